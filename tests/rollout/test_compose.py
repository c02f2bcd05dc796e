"""docker-compose.yaml: what is read, what it means here, and what is refused with its line."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rollcage.rollout.compose import (
    Check,
    Compose,
    Dependency,
    Mount,
    Service,
    has_internet,
    image_environment,
    read_compose,
)
from rollcage.rollout.compose_limits import KEPT_CAPABILITIES as ALLOWED
from rollcage.rollout.outcome import TaskError
from rollcage.rollout.sandbox.hostconfig import KEPT_CAPABILITIES
from rollcage.rollout.task import load_task, missing_env, referenced_env
from rollcage.rollout.task_model import Environment, Problem


def read(folder: Path, text: str, **settings: Any) -> tuple[Compose | None, list[Problem]]:
    """The file with this text in `folder`, and what is wrong with it."""
    problems: list[Problem] = []
    file = folder / "docker-compose.yaml"
    file.write_text(text, encoding="utf-8")
    environment = Environment(context=folder, **settings)
    return read_compose(file, environment, problems), problems


def services(
    folder: Path, text: str, environ: dict[str, str] | None = None, **settings: Any
) -> dict[str, Service]:
    compose, problems = read(folder, text, **settings)
    assert compose is not None, problems
    return compose.services(environ or {})


def service(folder: Path, body: str, environ: dict[str, str] | None = None, top: str = "") -> Service:
    """The service `db` with these keys, each on a line of its own."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return services(folder, f"services:\n  db:\n    image: x\n{lines}{top}", environ)["db"]


def refusals(folder: Path, body: str, name: str = "db", top: str = "") -> list[Problem]:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    compose, problems = read(folder, f"services:\n  {name}:\n    image: x\n{lines}{top}")
    assert compose is None
    return problems


class TestVariables:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("$A", "a"),
            ("${A}-${A}", "a-a"),
            ("$$A $${A}", "$A ${A}"),
            ("${B:-b}", "b"),
            ("${B-b}", "b"),
            ("${E:-b}", "b"),
            ("${E-b}", ""),
            ("${B:-${C:-$A}}", "a"),
            ("${B:-{}}", "{}"),
            ("${A:+yes}${B:+no}", "yes"),
            ("${E:+x}${E+y}", "y"),
            ("${A:?must be}", "a"),
            ("$B.", "."),
            ("cost: 5$$", "cost: 5$"),
        ],
    )
    def test_are_replaced_as_compose_does(self, tmp_path: Path, text: str, value: str) -> None:
        found = service(tmp_path, f"hostname: h\nenvironment:\n  X: '{text}'", {"A": "a", "E": ""})
        assert found.env == {"X": value}

    @pytest.mark.parametrize("text", ["$1", "${", "${A", "${A!x}", "${1}", "a $ b", "${A:x}"])
    def test_that_compose_refuses_are_refused(self, tmp_path: Path, text: str) -> None:
        [problem] = refusals(tmp_path, f"working_dir: '/{text}'")
        assert (problem.line, problem.error_class) == (4, "task_malformed")
        assert "$$" in problem.remedy

    def test_keys_are_not_replaced(self, tmp_path: Path) -> None:
        assert service(tmp_path, "environment:\n  ${A}: 1").env == {"${A}": "1"}

    def test_without_value_they_are_missing_before_anything_is_spent(self, write_task: Any) -> None:
        task = load_task(
            write_task(
                "services:\n  db:\n    image: ${IMAGE}\n    environment:\n      - KEY\n      - X=${Y:-${Z}}\n"
            )
        )
        assert {name for name, _ in missing_env(task, {})} == {"IMAGE", "Z"}
        [(name, where)] = missing_env(task, {"Z": ""})
        assert name == "IMAGE"
        assert where.endswith("docker-compose.yaml:3")
        assert referenced_env(task) == {"IMAGE", "Y", "Z", "KEY"}
        assert missing_env(task, {"IMAGE": "x", "Y": "y"}) == []

    def test_of_the_task_and_of_a_dot_env_file_count(self, tmp_path: Path) -> None:
        (tmp_path / ".env").write_text(
            "# comment\nexport A='$x'\nB=\"b c\" # more\nC=${B}d # no\nD=env\nE=e\n"
        )
        text = "services: {db: {image: x, environment: ['V=$A,$B,$C,$D,$E']}}"
        found = services(tmp_path, text, {"E": "job"}, env={"D": "task"})["db"].env
        assert found == {"V": "$x,b c,b cd,task,job"}

    def test_of_harbor_are_there(self, tmp_path: Path) -> None:
        text = (
            "services: {main: {build: '${CONTEXT_DIR}', image: '${MAIN_IMAGE_NAME}', cpus: '${CPUS}', mem_limit: "
            "'${MEMORY}', volumes: ['${HOST_VERIFIER_LOGS_PATH}:${ENV_VERIFIER_LOGS_PATH}', "
            "'${HOST_AGENT_LOGS_PATH}:${ENV_AGENT_LOGS_PATH}'], environment: ['TEST_DIR=${TEST_DIR}']}}"
        )
        main = services(tmp_path, text, cpus=2, memory_mb=512)["main"]
        assert (main.context, main.cpus, main.memory_mb, main.mounts) == (tmp_path, 2.0, 512, ())
        assert main.env == {"TEST_DIR": "/tests"}

    def test_that_are_not_known_yet_are_no_problem_and_are_one_once_they_are(self, tmp_path: Path) -> None:
        compose, problems = read(
            tmp_path, "services:\n  db:\n    image: x\n    cpus: ${N}\n    mem_limit: ${M}g\n"
        )
        assert compose is not None, problems
        assert compose.services({"N": "2", "M": "1"})["db"].memory_mb == 1024
        with pytest.raises(TaskError, match=r"yaml:4: services.db.cpus must be a number, not many") as caught:
            compose.services({"N": "many", "M": "1"})
        assert caught.value.error_class == "task_malformed"


class TestYaml:
    def test_anchors_merges_and_x_keys(self, tmp_path: Path) -> None:
        found = services(
            tmp_path,
            "x-env: &env {A: 1, B: 2}\nx-base: &base\n  image: x\n  user: one\n"
            "services:\n  db:\n    <<: *base\n    user: two\n    x-note: 1\n    environment: {<<: [*env], B: 3}\n",
        )["db"]
        assert (found.image, found.user, found.env) == ("x", "two", {"A": "1", "B": "3"})

    def test_values_are_those_of_yaml_1_2(self, tmp_path: Path) -> None:
        found = service(
            tmp_path, "environment:\n  A: yes\n  B: 22:22\n  C: 010\n  D: 1.10\n  E: true\n  F:\n  G: ''"
        )
        assert found.env == {"A": "yes", "B": "22:22", "C": "010", "D": "1.10", "E": "true", "G": ""}

    @pytest.mark.parametrize(
        ("text", "line", "said"),
        [
            ("services: [", 1, "does not parse"),
            ("services:\n  a: {image: x}\n  a: {image: y}\n", 3, "a is there twice"),
            ("services:\n  a: !reset {}\n", 2, "tag"),
            ("services:\n  a: &a\n    <<: *a\n", None, ""),
            ("", None, "is empty"),
            ("services: {a: {image: x, build: 5: 6}}", 1, "does not parse"),
            ("include: [x.yaml]\n", 1, "include is not done"),
            ("services:\n  a:\n    image: x\n    comand: x\n", 4, "services.a.comand is not done"),
            ("services:\n  a: {}\n", 2, "neither image nor build"),
            ("services:\n  a b: {image: x}\n", 2, "is no name"),
            ("services:\n  a:\n    image: x\n    comand: ${X}\n", 4, "services.a.comand is not done"),
        ],
    )
    def test_what_is_wrong_is_named_with_its_line(
        self, tmp_path: Path, text: str, line: int | None, said: str
    ) -> None:
        compose, problems = read(tmp_path, text)
        assert compose is None
        assert said in problems[0].message
        assert problems[0].file.endswith("docker-compose.yaml")
        assert line is None or problems[0].line == line

    def test_aliases_that_stand_for_more_than_there_is_memory(self, tmp_path: Path) -> None:
        levels = "".join(f"x-{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9))
        compose, [problem] = read(tmp_path, "x-0: &a0 [1]\n" + levels)
        assert compose is None
        assert "stands for too much" in problem.message

    def test_it_can_be_sent_to_another_machine(self, tmp_path: Path) -> None:
        compose, _ = read(tmp_path, "services: {db: {image: x}}")
        assert pickle.loads(pickle.dumps(compose)) == compose


class TestServices:
    def test_images(self, tmp_path: Path) -> None:
        (tmp_path / "app").mkdir()
        (tmp_path / "Dockerfile").write_text("FROM x")
        found = services(
            tmp_path,
            "services:\n  a: {image: redis:7}\n  b: {build: ./app}\n  d: {image: shared}\n"
            "  c:\n    image: shared\n    build: {context: app, dockerfile: D, target: t, args: [A=1, B]}\n",
            {"B": "2"},
        )
        task = Environment(context=tmp_path, build_timeout_sec=7)
        made = {name: image_environment(one, task) for name, one in found.items()}
        assert made["main"] == task
        assert (made["a"].docker_image, made["a"].context) == ("redis:7", None)
        assert (made["b"].context, made["b"].dockerfile) == (tmp_path / "app", "Dockerfile")
        assert made["c"] == made["d"]
        assert (made["c"].dockerfile, made["c"].target, made["c"].build_args) == (
            "D",
            "t",
            {"A": "1", "B": "2"},
        )
        assert made["c"].build_timeout_sec == 7

    def test_the_image_of_main(self, tmp_path: Path) -> None:
        task = Environment(context=None, docker_image="task:1")
        text = "services: {main: {image: other}}"
        assert image_environment(services(tmp_path, "services: {}")["main"], task).docker_image == "task:1"
        assert image_environment(services(tmp_path, text)["main"], task).docker_image == "other"
        (tmp_path / "Dockerfile").write_text("FROM x")
        built = image_environment(services(tmp_path, text)["main"], Environment(context=tmp_path))
        assert (built.context, built.docker_image) == (tmp_path, None)

    def test_commands(self, tmp_path: Path) -> None:
        found = service(tmp_path, "command: sh -c 'echo \"a b\" $$X'\nentrypoint: ['/a b', '-c']")
        assert found.command == ("sh", "-c", 'echo "a b" $X')
        assert found.entrypoint == ("/a b", "-c")
        assert service(tmp_path, "entrypoint: []").entrypoint == ()

    @pytest.mark.parametrize(
        "command",
        [
            "sleep infinity",
            "[sh, -c, sleep infinity]",
            "tail -f /dev/null",
            '["bash", "-c", "while true; do sleep 30; done"]',
            "/bin/bash",
            '["/bin/sh", "-c", "exec sleep inf"]',
        ],
    )
    def test_main_may_be_told_to_wait(self, tmp_path: Path, command: str) -> None:
        assert services(tmp_path, f"services: {{main: {{command: {command}}}}}")["main"].command is None

    def test_env_files_and_environment(self, tmp_path: Path) -> None:
        (tmp_path / "a.env").write_text("A=file\nB=file\nFROM_JOB\nUNSET\n")
        (tmp_path / "b.env").write_text("B=second\n")
        found = service(
            tmp_path,
            "environment: [A=own, JOB, NOT_THERE]\n"
            "env_file: [a.env, {path: b.env}, {path: none.env, required: false}]",
            {"JOB": "1", "FROM_JOB": "2"},
        )
        assert found.env == {"A": "own", "B": "second", "FROM_JOB": "2", "JOB": "1"}

    def test_healthchecks(self, tmp_path: Path) -> None:
        body = (
            "healthcheck:\n  test: {}\n  interval: 1m30s\n  timeout: 500ms\n  start_period: 2s\n  retries: 5"
        )
        expected = {
            "curl -f x": ("/bin/sh", "-c", "curl -f x"),
            "[CMD, a, b c]": ("a", "b c"),
            "[CMD-SHELL, 'a || b']": ("/bin/sh", "-c", "a || b"),
            "[NONE]": (),
        }
        for test, argv in expected.items():
            assert service(tmp_path, body.format(test)).check == Check(argv, 90.0, 0.5, 2.0, 5)
        assert service(tmp_path, "healthcheck: {interval: 1s}").check == Check(None, 1.0)
        disabled = service(tmp_path, "healthcheck: {disable: true}").check
        assert disabled is not None
        assert disabled.argv == ()

    def test_dependencies(self, tmp_path: Path) -> None:
        found = services(
            tmp_path,
            "services:\n  a: {image: x}\n  b: {image: x, depends_on: [a], links: [c]}\n"
            "  c:\n    image: x\n    depends_on:\n      a: {condition: service_healthy}\n"
            "      z: {condition: service_started, required: false}\n"
            "  main: {depends_on: {b: {condition: service_completed_successfully}}}\n",
        )
        assert found["b"].depends == (Dependency("a"), Dependency("c"))
        assert found["c"].depends == (Dependency("a", "service_healthy"), Dependency("z", required=False))
        assert found["main"].depends == (Dependency("b", "service_completed_successfully"),)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("services: {a: {image: x, depends_on: [b]}, b: {image: x, depends_on: [a]}}", "a -> b -> a"),
            ("services: {a: {image: x, depends_on: [b]}}", "depends on b, which is not there"),
            (
                "services: {a: {image: x, depends_on: [b]}, b: {image: x, profiles: [p]}}",
                "a profile leaves out",
            ),
            ("services: {a: {image: x, depends_on: {main: {condition: ready}}}}", "service_healthy"),
        ],
    )
    def test_dependencies_that_cannot_be(self, tmp_path: Path, text: str, said: str) -> None:
        compose, [problem] = read(tmp_path, text)
        assert compose is None
        assert said in f"{problem.message} ({problem.remedy})"

    def test_services_of_a_profile_are_not_started(self, tmp_path: Path) -> None:
        found = services(
            tmp_path, "services: {a: {image: x, profiles: [debug]}, b: {image: x, profiles: []}}"
        )
        assert set(found) == {"b", "main"}

    def test_limits(self, tmp_path: Path) -> None:
        assert service(tmp_path, "mem_limit: 1.5g\ncpus: 0.5\nshm_size: 64m").memory_mb == 1536
        deploy = "deploy: {replicas: 1, resources: {limits: {cpus: '2', memory: 512M, pids: 50}}}"
        found = service(tmp_path, deploy + "\nulimits: {nofile: 1024, nproc: {soft: 1, hard: 2}}")
        assert (found.cpus, found.memory_mb, found.pids) == (2.0, 512, 50)
        assert found.ulimits == {"nofile": (1024, 1024), "nproc": (1, 2)}

    def test_names(self, tmp_path: Path) -> None:
        found = service(
            tmp_path,
            "container_name: one\nhostname: h\nnetworks: {n: {aliases: [two, three]}}\nextra_hosts: ['x:10.0.0.1']",
            top="  main: {networks: [n]}\nnetworks: {n: {driver: bridge}}\n",
        )
        assert (found.aliases, found.hostname) == (("two", "three", "one"), "h")
        assert found.extra_hosts == ("x:10.0.0.1",)

    def test_capabilities(self, tmp_path: Path) -> None:
        assert set(service(tmp_path, "").capabilities) == set(KEPT_CAPABILITIES) == ALLOWED
        found = service(tmp_path, "cap_drop: [ALL]\ncap_add: [CAP_CHOWN, setuid]")
        assert found.capabilities == ("CHOWN", "SETUID")


class TestMounts:
    def test_volumes_files_and_memory(self, tmp_path: Path) -> None:
        (tmp_path / "init").mkdir()
        (tmp_path / "init/a.sql").write_text("x")
        found = service(
            tmp_path,
            "volumes:\n  - data:/data\n  - data:/ro:ro\n  - /anonymous/\n  - ./init/a.sql:/a.sql:ro\n  - ./none:/none\n"
            "  - {type: volume, source: data, target: /long, read_only: true}\n"
            "  - {type: bind, source: ./init, target: /init}\n  - {type: tmpfs, target: /fast, tmpfs: {size: 1m}}\n"
            "tmpfs: ['/run:mode=755', /tmp]",
            top="volumes: {data: {}}\n",
        )
        assert found.mounts == (
            Mount("/data", volume="data"),
            Mount("/ro", volume="data", read_only=True),
            Mount("/anonymous"),
            Mount("/a.sql", source=tmp_path / "init/a.sql", read_only=True),
            Mount("/none"),
            Mount("/long", volume="data", read_only=True),
            Mount("/init", source=tmp_path / "init"),
        )
        assert found.tmpfs == {"/run": "mode=755", "/tmp": "", "/fast": "size=1m"}

    def test_secrets_and_configs_that_are_files(self, tmp_path: Path) -> None:
        (tmp_path / "key").write_text("x")
        found = service(
            tmp_path,
            "secrets: [s]\nconfigs: [{source: c, target: /etc/c.conf}]",
            top="secrets: {s: {file: ./key}}\nconfigs: {c: {content: 'a $$b'}}\n",
        )
        assert found.mounts == (
            Mount("/run/secrets/s", source=tmp_path / "key", read_only=True),
            Mount("/etc/c.conf", content="a $b", read_only=True),
        )

    def test_a_folder_that_two_share_for_writing_becomes_a_volume(self, tmp_path: Path) -> None:
        (tmp_path / "data").mkdir()
        text = "services: {a: {image: x, volumes: ['./data:/a']}, main: {volumes: ['./data:/m:ro']}}"
        found = services(tmp_path, text)
        [one], [other] = found["a"].mounts, found["main"].mounts
        assert one.volume == other.volume is not None
        assert one.source == tmp_path / "data"
        assert other.read_only
        unshared = services(tmp_path, text.replace("/a'", "/a:ro'"))
        assert unshared["a"].mounts[0].volume is None

    def test_harbors_artifacts_are_shared_with_main(self, tmp_path: Path) -> None:
        text = "services: {a: {image: x, volumes: ['${HOST_ARTIFACTS_PATH:-./x}:/out']}}"
        found = services(tmp_path, text)
        assert found["main"].mounts[0].target == "/logs/artifacts"
        assert found["main"].mounts[0].volume == found["a"].mounts[0].volume

    @pytest.mark.parametrize(
        "source",
        [
            "/etc",
            "~/x",
            "../x",
            "./a/../../x",
            "/var/run/docker.sock",
            "./link",
            "${HOST_VERIFIER_LOGS_PATH}",
            "/",
        ],
    )
    def test_paths_of_the_host_are_refused(self, tmp_path: Path, source: str) -> None:
        (tmp_path / "link").symlink_to("/etc")
        [problem] = refusals(tmp_path, f"volumes:\n  - '{source}:/x'")
        assert (problem.line, problem.error_class) == (5, "unsupported")
        assert "services.db.volumes[0]" in problem.message

    @pytest.mark.parametrize("body", ["build: ..", "build: {dockerfile: ../D}", "env_file: ../x", "build: /"])
    def test_so_are_builds_and_env_files(self, tmp_path: Path, body: str) -> None:
        assert refusals(tmp_path, body)[0].error_class == "unsupported"


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ("privileged: true", "privileged"),
        ("network_mode: host", "network_mode"),
        ("network_mode: bridge", "network_mode"),
        ("pid: host", "pid"),
        ("ipc: host", "ipc"),
        ("devices: ['/dev/kvm:/dev/kvm']", "devices"),
        ("cap_add: [CHOWN, NET_ADMIN]", "cap_add[1]"),
        ("security_opt: ['seccomp:unconfined']", "security_opt[0]"),
        ("userns_mode: host", "userns_mode"),
        ("extra_hosts: ['host.docker.internal:host-gateway']", "extra_hosts"),
        ("deploy: {resources: {reservations: {devices: [{capabilities: [gpu]}]}}}", "deploy.resources"),
        ("deploy: {replicas: 3}", "deploy.replicas"),
        ("extends: {service: x}", "extends"),
        ("sysctls: {kernel.shmmax: 1}", "sysctls"),
        ("dns: 8.8.8.8", "dns"),
        ("networks: {default: {ipv4_address: 10.0.0.2}}", "networks.default.ipv4_address"),
        ("volumes: [{type: cluster, source: x, target: /x}]", "volumes[0]"),
    ],
)
def test_what_is_not_done_is_named_with_its_key(tmp_path: Path, body: str, key: str) -> None:
    [problem] = refusals(tmp_path, body)
    assert problem.message.startswith(f"services.db.{key}")
    assert (problem.line, problem.error_class) == (4, "unsupported")
    assert problem.remedy


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ("command: python server.py", "command"),
        ("entrypoint: ['/start.sh']", "entrypoint"),
        ("cap_drop: [ALL]", "cap"),
        ("network_mode: none", "network_mode"),
        ("network_mode: 'service:db'", "network_mode"),
    ],
)
def test_what_main_cannot_have(tmp_path: Path, body: str, key: str) -> None:
    assert refusals(tmp_path, body, "main")[0].message.startswith(f"services.main.{key}")


@pytest.mark.parametrize(
    "body",
    [
        "ports: ['80:80']\nexpose: [1]\nlabels: {a: b}\nlogging: {driver: syslog}\nrestart: unless-stopped\ntty: true",
        "privileged: false\ninit: true\nplatform: linux/amd64\npull_policy: always\nstop_grace_period: 1s",
        "security_opt: ['no-new-privileges:true', 'label=disable']\npid: ''\nread_only: true\nstdin_open: true",
    ],
)
def test_what_changes_nothing_is_taken(tmp_path: Path, body: str) -> None:
    service(tmp_path, body)


def chain(length: int) -> str:
    """Services of which each depends on the next, none but the last on a network."""
    lines = ["services:", "  main: {}", f"  s{length}: {{image: x}}"]
    for number in range(length):
        lines.append(f"  s{number}: {{image: x, network_mode: none, depends_on: [s{number + 1}]}}")
    return "\n".join(lines)


class TestTooMuch:
    """Whatever a file holds, reading it ends, with a problem that has its line."""

    @pytest.mark.parametrize(
        ("body", "said"),
        [
            (f"mem_limit: {'9' * 400}g", "services.db.mem_limit must be at most 1,073,741,824 MiB"),
            ("mem_limit: 99999999t", "services.db.mem_limit must be at most"),
            ("deploy: {resources: {limits: {memory: 9999999999999g}}}", "limits.memory must be at most"),
            ("shm_size: 99999999t", "services.db.shm_size must be at most"),
            (f"cpus: {'9' * 400}", "services.db.cpus must be a number"),
            (f"healthcheck: {{interval: {'9' * 400}h}}", "interval must be at most 1,000,000,000 s"),
            ("environment: {A: '" + "${A:-" * 3000 + "}" * 3000 + "'}", "nests variables more than 20 deep"),
        ],
    )
    def test_of_one_value(self, tmp_path: Path, body: str, said: str) -> None:
        [problem] = refusals(tmp_path, body)
        assert said in problem.message
        assert len(problem.message) < 200
        assert (problem.line, problem.error_class) == (4, "task_malformed")

    def test_variables_that_stand_for_more_than_there_is_memory(self, tmp_path: Path) -> None:
        lines = [f"V{n}=${{V{n - 1}}}${{V{n - 1}}}" for n in range(1, 60)]
        (tmp_path / "many.env").write_text("\n".join(["V0=0123456789", *lines]))
        [problem] = refusals(tmp_path, "env_file: many.env")
        assert "(many.env): becomes more than a MiB of text" in problem.message

    def test_services_that_depend_on_each_other(self, tmp_path: Path) -> None:
        assert len(services(tmp_path, chain(1500))) == 1502
        [problem] = read(
            tmp_path, chain(1500).replace("s1500: {image: x}", "s1500: {image: x, depends_on: [s0]}")
        )[1]
        assert problem.message.endswith("-> ... -> s1500")
        assert "depends on itself" in problem.message

    def test_services_for_one_network(self, tmp_path: Path) -> None:
        text = "services:\n" + "".join(f"  s{n}: {{image: x}}\n" for n in range(13))
        compose, [problem] = read(tmp_path, text)
        assert compose is None
        assert "has 14 services, and a task has at most 13 containers" in problem.message
        assert (problem.line, problem.error_class) == (1, "unsupported")
        for fewer in ("s12: {image: x, profiles: [p]}", "s12: {image: x, network_mode: none}"):
            assert read(tmp_path, text.replace("s12: {image: x}", fewer))[1] == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("container_name: x y", "container_name (x y) is no name for a container"),
        ("networks: {default: {aliases: [web, 'x y']}}", "aliases[1] (x y) is no name for a container"),
        ("environment: {'': x}", "has the variable ''"),
        ("environment: ['=x']", "has the variable ''"),
        ('environment: {A: "a\\0b"}', "environment.A holds a NUL"),
        ('command: [sh, "\\0"]', "command[1] holds a NUL"),
        ('labels: {}\nworking_dir: "/\\ud800"', "working_dir holds half of a surrogate pair"),
        ("tmpfs: /x:frobnicate", "tmpfs has the tmpfs option 'frobnicate'"),
        ("tmpfs: ['/x:size=1m,mode=999']", "tmpfs[0] has the tmpfs option 'mode=999'"),
        ("tmpfs: ['x']", "tmpfs[0] mounts at 'x'"),
        ("tmpfs: /", "tmpfs mounts at /, over everything"),
        ("ulimits: {nosuch: 5}", "ulimits.nosuch is no ulimit"),
        ("ulimits: {stack: {soft: 2, hard: 1}}", "ulimits.stack has a soft limit above the hard one"),
        ("ulimits: {stack: {soft: -1, hard: 1}}", "ulimits.stack has a soft limit above the hard one"),
        ("ulimits: {stack: 1.5}", "ulimits.stack must be a number"),
        (f"hostname: {'a' * 65}", "hostname (" + "a" * 60 + ") is no hostname"),
    ],
)
def test_what_no_engine_takes_is_said_with_its_key(tmp_path: Path, body: str, said: str) -> None:
    [problem] = refusals(tmp_path, body)
    assert said in problem.message
    assert (problem.line, problem.error_class) == (4 + body.count("\n"), "task_malformed")


@pytest.mark.parametrize(
    ("image", "valid"),
    [
        ("debian", True),
        ("debian:bookworm-slim", True),
        ("docker.elastic.co/elasticsearch/elasticsearch:8.11.0", True),
        ("localhost:5000/a/b__c:1.0_x", True),
        ("ghcr.io/owner/name@sha256:" + "0af1" * 16, True),
        ("x:1@sha256:" + "0af1" * 16, True),
        ("[::1]:5000/x", True),
        ("", False),
        ("../x", False),
        ("UPPER/Case:tag", False),
        ("-rf", False),
        ("a b", False),
        ("x:", False),
        ("x:" + "t" * 129, False),
        ("a/" * 300 + "a", False),
    ],
)
def test_the_name_of_an_image_is_looked_at(tmp_path: Path, image: str, valid: bool) -> None:
    text = f"services:\n  db:\n    image: '{image}'\n"
    problems = read(tmp_path, text)[1]
    if valid:
        assert problems == []
    else:
        assert [(one.line, one.error_class) for one in problems] == [(3, "task_malformed")]
        assert problems[0].message.startswith("services.db.image")
    with pytest.raises(TaskError, match=r"yaml:1: services\.db\.image") if not valid else nullcontext():
        services(tmp_path, "services: {db: {image: '${IMAGE}'}}", {"IMAGE": image})


def test_ulimits_may_be_unlimited_as_elasticsearch_has_it(tmp_path: Path) -> None:
    found = service(
        tmp_path, "ulimits: {memlock: {soft: -1, hard: -1}, nproc: -1, nofile: {soft: 1, hard: 65536}}"
    )
    assert found.ulimits == {"memlock": (-1, -1), "nproc": (-1, -1), "nofile": (1, 65536)}


@pytest.mark.parametrize("files", [1048577, -1, 99999999999])
def test_more_open_files_than_a_kernel_has_are_refused(tmp_path: Path, files: int) -> None:
    [problem] = refusals(tmp_path, f"ulimits: {{nofile: {files}}}")
    assert (problem.line, problem.error_class) == (4, "unsupported")
    assert "1048576" in problem.remedy


class TestMountsAt:
    """What is mounted where the kernel, the engine or Rollcage has its own is refused."""

    VOLUMES = "volumes: {v: {}}\n"

    @pytest.mark.parametrize(
        "target", ["/proc", "/proc/1/x", "/sys", "/sys/fs/cgroup", "/dev", "/dev/../dev/x"]
    )
    @pytest.mark.parametrize(
        "body", ["tmpfs: {}", "volumes: ['v:{}']", "volumes: ['./f:{}']", "volumes: ['{}']"]
    )
    def test_the_kernels(self, tmp_path: Path, target: str, body: str) -> None:
        (tmp_path / "f").write_text("")
        [problem] = refusals(tmp_path, body.format(target), top=self.VOLUMES)
        assert "which is the kernel's" in problem.message
        assert (problem.line, problem.error_class) == (4, "unsupported")

    @pytest.mark.parametrize("target", ["/etc/hosts", "/etc/resolv.conf", "/etc/hostname"])
    def test_the_engines(self, tmp_path: Path, target: str) -> None:
        (tmp_path / "f").write_text("")
        for body in (f"volumes: ['./f:{target}:ro']", f"configs: [{{source: c, target: {target}}}]"):
            [problem] = refusals(tmp_path, body, top="configs: {c: {content: x}}\n")
            assert f"mounts at {target}, which is the engine's own" in problem.message

    @pytest.mark.parametrize(
        "target",
        [
            "/tests",
            "/tests/x",
            "/solution",
            "/logs",
            "/logs/",
            "/logs/verifier",
            "/logs/agent",
            "/logs/artifacts/x",
        ],
    )
    @pytest.mark.parametrize(
        "body",
        [
            "tmpfs: ['{}:size=1m']",
            "volumes: ['v:{}']",
            "volumes: ['{}']",
            "volumes: [{{type: tmpfs, target: '{}'}}]",
        ],
    )
    def test_ours_in_main(self, tmp_path: Path, target: str, body: str) -> None:
        [problem] = refusals(tmp_path, body.format(target), "main", top=self.VOLUMES)
        assert f"mounts at {target.rstrip('/')} of main" in problem.message
        assert (problem.line, problem.error_class) == (4, "unsupported")
        service(tmp_path, body.format(target), top=self.VOLUMES)  # another service has its own

    def test_ours_in_main_by_files_that_two_share(self, tmp_path: Path) -> None:
        (tmp_path / "f").mkdir()
        text = "services:\n  main: {volumes: ['./f:/tests']}\n  db: {image: x, volumes: ['./f:/f']}\n"
        [problem] = read(tmp_path, text)[1]
        assert "mounts at /tests of main" in problem.message
        assert services(tmp_path, text.splitlines()[0] + "\n" + text.splitlines()[1])  # a copy is made anew

    def test_what_is_nobodys(self, tmp_path: Path) -> None:
        tmpfs = "['/dev/shm:size=64m', '/run:rw,noexec,nosuid,size=10%,mode=1777,uid=5']"
        text = f"services: {{main: {{tmpfs: {tmpfs}, volumes: ['v:/logs/app']}}}}\n"
        assert services(tmp_path, text + self.VOLUMES)["main"].tmpfs["/dev/shm"] == "size=64m"


class TestNetworks:
    def test_several_that_keep_nobody_apart_become_one(self, tmp_path: Path) -> None:
        text = "services: {a: {image: x, networks: [p, q]}, main: {networks: [q]}}\nnetworks: {p: , q: }"
        assert has_internet(Environment(tmp_path, compose=read(tmp_path, text)[0]), services(tmp_path, text))

    def test_that_keep_services_apart_are_refused(self, tmp_path: Path) -> None:
        text = (
            "services: {a: {image: x, networks: [p]}, b: {image: x, networks: [q]}, main: {networks: [p, q]}}\n"
            "networks:\n  p:\n  q:\n"
        )
        compose, [problem] = read(tmp_path, text)
        assert compose is None
        assert (problem.error_class, problem.line) == ("unsupported", 3)
        assert "a and b apart" in problem.message

    def test_internal_ones_have_no_internet(self, tmp_path: Path) -> None:
        text = (
            "services: {a: {image: x, networks: [p]}, main: {networks: [p]}}\nnetworks: {p: {internal: true}}"
        )
        assert not has_internet(
            Environment(tmp_path, compose=read(tmp_path, text)[0]), services(tmp_path, text)
        )
        compose, [problem] = read(
            tmp_path, text.replace("main: {networks: [p]}", "main: {networks: [p, default]}")
        )
        assert compose is None
        assert "is internal for some services" in problem.message

    @pytest.mark.parametrize(
        "how", ["external: true", "driver: overlay", "ipam: {config: [{subnet: 10.0.0.0/24}]}"]
    )
    def test_of_others_are_refused(self, tmp_path: Path, how: str) -> None:
        [problem] = refusals(tmp_path, "user: x", top=f"networks: {{n: {{{how}}}}}\n")
        assert problem.error_class == "unsupported"
        assert problem.message.startswith("networks.n")

    def test_an_allowlist_for_several_containers_is_refused(self, tmp_path: Path) -> None:
        compose, [problem] = read(tmp_path, "services: {a: {image: x}}", network_mode="allowlist")
        assert compose is None
        assert problem.error_class == "unsupported"


@pytest.fixture
def write_task(tmp_path: Path) -> Any:
    """Write a task with this docker-compose.yaml; its directory."""

    def write(compose: str) -> Path:
        for name, text in {
            "task.toml": "",
            "instruction.md": "Do it.",
            "tests/test.sh": "exit",
            "environment/Dockerfile": "FROM x",
            "environment/docker-compose.yaml": compose,
        }.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return write


def test_a_dockerfile_that_is_not_there_is_said(write_task: Any) -> None:
    with pytest.raises(TaskError, match="environment/server: is missing"):
        load_task(write_task("services: {server: {build: server}}"))


def test_a_task_with_a_compose_file_alone_needs_its_main_image(write_task: Any) -> None:
    path = write_task("services: {main: {image: 'debian:12'}}")
    (path / "environment/Dockerfile").unlink()
    task = load_task(path)
    assert task.environment.compose is not None
    main = task.environment.compose.services({})["main"]
    assert image_environment(main, task.environment).docker_image == "debian:12"
    (path / "environment/docker-compose.yaml").write_text("services: {main: {}}")
    with pytest.raises(TaskError, match="Dockerfile: is missing"):
        load_task(path)
