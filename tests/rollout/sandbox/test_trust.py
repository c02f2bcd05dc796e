"""Builds and sandboxes trust the host's CA bundle, and know its proxies, where the job says so."""

from __future__ import annotations

import http.server
import json
import ssl
import subprocess
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from ipaddress import ip_network
from pathlib import Path

import pytest

from rollcage.rollout.outcome import BuildError, SandboxError
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.images import Images
from rollcage.rollout.sandbox.pool import SandboxPool, SandboxSettings
from rollcage.rollout.sandbox.reaper import BUILD_LABEL
from rollcage.rollout.sandbox.trust import BUNDLE, VARIABLES, Proxies, Trust, load_trust, sandbox_env
from rollcage.rollout.task import Environment

BASE = "debian:bookworm-slim"
PROXIES = Proxies("http://proxy.example:3128", "http://proxy.example:3129", ("10.0.0.0/8",))


@pytest.fixture(scope="session")
def gateway() -> str:
    """This machine's address, as containers on the engine's own bridge see it."""
    engine = Engine()
    try:
        [config] = engine.api.inspect_network("bridge")["IPAM"]["Config"]
        # Before it is first started again an engine does not say which: the first address.
        return str(config.get("Gateway") or ip_network(config["Subnet"])[1])
    finally:
        engine.close()


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory, gateway: str) -> Path:
    """A folder with ca.pem, the only authority that knows server.pem (with its key in server.key)."""
    folder = tmp_path_factory.mktemp("authority")
    (folder / "names").write_text(f"subjectAltName=IP:{gateway}\n")
    for command in (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=own-ca "
        "-keyout ca.key -out ca.pem",
        "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=own.example -keyout server.key "
        "-out server.csr",
        "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names -out server.pem",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLCAGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# What is given


def test_a_file_without_a_certificate_is_refused_by_name(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "empty.pem").write_text("nothing\n")
    for path, problem in (
        (tmp_path / "empty.pem", "no certificate"),
        (tmp_path / "none.pem", "No such file"),
    ):
        with pytest.raises(SandboxError) as caught:
            load_trust(str(path), local=True)
        assert "sandbox.ca_bundle" in caught.value.message
        assert problem in caught.value.message
    assert load_trust(None, local=False) is None


def test_an_engine_on_another_machine_cannot_be_given_a_bundle(authority: Path, cache: Path) -> None:
    with pytest.raises(SandboxError, match="another machine"):
        load_trust(str(authority / "ca.pem"), local=False)


def test_a_job_keeps_the_bundle_that_it_began_with(authority: Path, tmp_path: Path, cache: Path) -> None:
    own = tmp_path / "own.pem"
    own.write_bytes((authority / "ca.pem").read_bytes())
    first = load_trust(str(own), local=True)
    own.write_bytes((authority / "ca.pem").read_bytes() + b"\n")
    second = load_trust(str(own), local=True)
    assert first is not None
    assert second is not None
    assert first.digest != second.digest
    folder = Path(first.bind.split(":")[0])
    assert (folder / "ca-bundle.pem").read_bytes() == (authority / "ca.pem").read_bytes()
    assert sorted(path.name for path in (cache / "trust").iterdir()) == sorted([first.digest, second.digest])


def test_proxies_come_in_both_spellings_and_leave_the_sandbox_itself_out() -> None:
    found = PROXIES.variables()
    assert found["HTTP_PROXY"] == found["http_proxy"] == "http://proxy.example:3128"
    assert found["https_proxy"] == "http://proxy.example:3129"
    assert found["no_proxy"] == "10.0.0.0/8,localhost,127.0.0.1,::1"
    assert Proxies(no=("x",)).variables() == {}


def test_what_the_image_sets_stays_and_no_proxy_is_told_to_who_has_no_internet(authority: Path) -> None:
    trust = Trust.read(authority / "ca.pem")
    assert sandbox_env(trust, PROXIES, {"PIP_CERT": "/own"}, internet=False) == {
        name: value for name, value in VARIABLES.items() if name != "PIP_CERT"
    }
    assert sandbox_env(None, PROXIES, {}, internet=True) == PROXIES.variables()
    assert sandbox_env(None, None, {}, internet=True) == {}


# On an engine


@pytest.fixture
def server(authority: Path) -> Iterator[int]:
    """An HTTPS server on this machine whose certificate only `authority` vouches for; its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "8")
            self.end_headers()
            self.wfile.write(b"trusted\n")

        def log_message(self, *_: object) -> None:
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority / "server.pem", authority / "server.key")
    server = http.server.ThreadingHTTPServer(("0.0.0.0", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.fixture
async def name(engine: Engine) -> AsyncIterator[str]:
    """A host's name; images that it built are removed."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    yield name
    for image in engine.api.images(filters={"label": f"{BUILD_LABEL}={name}"}):
        if image.get("RepoTags"):
            engine.api.remove_image(image["Id"], force=True, noprune=True)


def task(tmp_path: Path, text: str) -> Environment:
    root = tmp_path / uuid.uuid4().hex
    root.mkdir()
    (root / "Dockerfile").write_text(f"{text}\nLABEL salt={root.name}\n")
    return Environment(context=root)


# Debian's slim image has no other program that speaks TLS than apt.
FETCH = (
    "rm -f /tmp/got; /usr/lib/apt/apt-helper -o Acquire::Retries=0 download-file https://{}:{}/x /tmp/got "
    "&& cat /tmp/got"
)


@pytest.mark.docker
@pytest.mark.parametrize("flag", ["", "--mount=type=cache,target=/c "])
async def test_a_build_step_trusts_it_and_the_image_does_not_keep_that(
    engine: Engine, name: str, authority: Path, server: int, gateway: str, tmp_path: Path, flag: str
) -> None:
    text = (
        f"FROM {BASE} AS a\nFROM a\nUSER nobody\nRUN {flag}{FETCH.format(gateway, server)} # {uuid.uuid4()}"
    )
    environment = task(tmp_path, text)
    plain = Images(engine, host=name)
    with pytest.raises(BuildError) as caught:
        await plain.ensure(environment, task="t")
    assert caught.value.error_class == "image_build"
    assert "certificate" in caught.value.evidence.log_tail
    trusting = Images(engine, host=name, trust=Trust.read(authority / "ca.pem"), proxies=Proxies(no=("x",)))
    image = await trusting.ensure(environment, task="t")
    assert "trusted\n" in image.log_tail
    assert not set(VARIABLES) & set(image.env)
    config = json.dumps(engine.api.inspect_image(image.id)["Config"])
    assert "proxy" not in config.lower()
    assert environment.context is not None
    for bundle, is_same in ((trusting.trust, True), (Trust(authority / "ca.pem", b"another"), False)):
        other = Images(engine, host=name, trust=bundle)
        await other._look()
        assert (await other._reference(environment, environment.context) == image.reference) is is_same


@pytest.mark.docker
async def test_a_build_step_knows_the_proxies_and_the_image_does_not(
    engine: Engine, name: str, tmp_path: Path
) -> None:
    environment = task(tmp_path, f"FROM {BASE}\nRUN env | sort | grep -i proxy # {uuid.uuid4()}")
    images = Images(engine, host=name, proxies=PROXIES)
    image = await images.ensure(environment, task="t")
    assert "HTTP_PROXY=http://proxy.example:3128\n" in image.log_tail
    assert "https_proxy=http://proxy.example:3129\n" in image.log_tail
    inspected = json.dumps([engine.api.inspect_image(image.id), engine.api.history(image.id)])
    assert "proxy.example" not in inspected
    assert not (await Images(engine, host=name).ensure(environment, task="t")).built


@pytest.mark.docker
async def test_a_sandbox_trusts_it_and_an_agent_cannot_change_it(
    engine: Engine, name: str, authority: Path, server: int, gateway: str, cache: Path
) -> None:
    settings = SandboxSettings(
        pids=64, ca_bundle=str(authority / "ca.pem"), proxies=PROXIES, insecure_network=True
    )
    pool = SandboxPool(engine, settings, host=name, job="test")
    try:
        online = Environment(
            context=None, docker_image=BASE, env={"PIP_CERT": "/the/tasks/own", "http_proxy": ""}
        )
        image = await pool.image(online, "t")
        sandbox = await pool.acquire(image, online, attempt_id=uuid.uuid4().hex)
        shell = await sandbox.shell()
        fetched = await shell.run(f"(unset HTTPS_PROXY https_proxy; {FETCH.format(gateway, server)})")
        assert "trusted\n" in fetched.text
        env = (await shell.run("env")).text.splitlines()
        assert {f"SSL_CERT_FILE={BUNDLE}", "PIP_CERT=/the/tasks/own", "http_proxy="} <= set(env)
        assert "HTTPS_PROXY=http://proxy.example:3129" in env
        changed = await shell.run(
            f"echo x >> {BUNDLE}; rm -rf {BUNDLE}; umount /etc/rollcage; wc -c < {BUNDLE}"
        )
        assert changed.text.splitlines()[0] == str((authority / "ca.pem").stat().st_size)
        offline = Environment(context=None, docker_image=BASE, network_mode="no-network")
        alone = await pool.acquire(image, offline, attempt_id=uuid.uuid4().hex)
        env = (await (await alone.shell()).run("env")).text.splitlines()
        assert f"SSL_CERT_FILE={BUNDLE}" in env
        assert not [line for line in env if "proxy" in line.lower()]
    finally:
        await pool.close()
