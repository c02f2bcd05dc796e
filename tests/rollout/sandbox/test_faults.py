"""Each thing that an engine, a builder or a registry says has its class; what a task makes them quote has none.

The messages are real ones: of Engine 20.10 to 28, of containerd and runc, of registries, and of podman.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
import requests
import urllib3
from docker.errors import APIError, BuildError, DockerException, NotFound
from docker.types import IPAMConfig, IPAMPool

from rollcage.rollout.outcome import RolloutError, SandboxError
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.faults import build_fault, engine_fault, pull_fault


def answer(status: int, message: str) -> APIError:
    """The exception that docker-py raises for this answer of the engine."""
    response = requests.Response()
    response.status_code = status
    response.url = "http+docker://localhost/v1.41/x"
    kind = NotFound if status == 404 else APIError
    return kind(f"{status} Error", response=response, explanation=message)


OCI = (
    "failed to create shim task: OCI runtime create failed: runc create failed: "
    "unable to start container process: "
)
ENGINE = [
    # the network pool: three wordings of Docker, one of podman
    ("create a network", 404, "could not find an available, non-overlapping IPv4 address pool among the defaults to"
     " assign to the network", "network_pool"),
    ("create a network", 400, "all predefined address pools have been fully subnetted", "network_pool"),
    ("create a network", 500, "could not find an available predefined network", "network_pool"),
    ("create a network", 500, "could not find free subnet from subnet pools", "network_pool"),
    ("start a container", 500, "failed to set up container networking: all predefined address pools have been fully"
     " subnetted", "network_pool"),
    # Engine 17.06 to 19.03; "invalid pool request: " since 24 (moby: libnetwork/ipams/defaultipam/allocator.go)
    ("create a network", 500, 'failed to parse pool request for address space "LocalDefault" pool "" subpool "": could'
     " not find an available predefined network", "network_pool"),
    ("create a network", 500, "could not find an available, non-overlapping IPv6 address pool among the defaults to"
     " assign to the network", "network_pool"),
    # networks otherwise
    ("create a network", 403, "invalid pool request: Pool overlaps with other one on this address space",
     "network_setup"),
    ("start a container", 500, "failed to set up container networking: driver failed programming external connectivity"
     " on endpoint x (1a): Unable to enable DIRECT ACCESS FILTERING - DROP rule: (iptables failed: iptables --wait -t"
     " raw -A PREROUTING: exit status 3)", "network_setup"),
    ("start a container", 500, "netavark: No such file or directory (os error 2)", "network_setup"),
    ("start a container", 500, 'setup network: netavark: nftables error: "nft" did not return successfully while'
     " applying ruleset", "network_setup"),
    ("create a network", 500, "plugin netavark failed: exit status 101", "network_setup"),
    ("create a network", 403, "Pool overlaps with other one on this address space", "network_setup"),
    ("create a network", 403, "cannot create network 5f (br-5f): conflicts with network a1 (br-a1): networks have"
     " overlapping IPv4", "network_setup"),
    ("start a container", 500, "failed to create endpoint x on network bridge: adding interface veth1a2b3c"
     " to bridge"
     " docker0 failed: could not find bridge docker0: route ip+net: no such network interface", "network_setup"),
    ("start a container", 500, "failed to create endpoint x on network rollcage-1: adding interface veth9 to bridge"
     " br-9 failed: exchange full", "network_setup"),
    ("start a container", 500, "failed to set up container networking: failed to create endpoint x on network y:"
     " Unable to enable ACCEPT OUTGOING rule: (iptables failed: iptables --wait ...)", "network_setup"),
    ("start a container", 500, "driver failed programming external connectivity on endpoint x (1a): Bind for"
     " 0.0.0.0:80 failed: port is already allocated", "network_setup"),
    ("start a container", 404, "network rollcage-1 not found", "network_setup"),
    ("start a container", 500, "network 0f1e not found", "network_setup"),
    ("remove a network", 403, "error while removing network: network x id 1 has active endpoints", "network_setup"),
    ("create a container", 500, "netavark: iptables: failed to execute", "network_setup"),
    ("start a container", 403, "no available IPv4 addresses on this network's address pools: rollcage-1 (1a)",
     "network_setup"),
    # the disk
    ("start a container", 500, "error creating overlay mount to /var/lib/docker/overlay2/1/merged: no space left on"
     " device", "disk_full"),
    ("create a container", 500, "mkdir /var/lib/docker/overlay2/1-init: no space left on device", "disk_full"),
    ("start a container", 500, OCI + "error during container init: write /proc/self/attr: no space left on device:"
     " unknown", "disk_full"),
    ("copy files into a container", 500, "write /a/b: no space left on device", "disk_full"),
    ("start a container", 500, 'failed to create task for container: failed to mount /tmp/containerd-mount1: mkdir'
     " /var/lib/containerd/1: no space left on device: unknown", "disk_full"),
    ("create a container", 500, 'open /var/lib/docker/containers/5e/.tmp-config.v2.json1: no space left on device',
     "disk_full"),
    ("create a container", 500, "creating container storage: creating read-write layer with ID 1a: write"
     " /var/lib/containers/storage/overlay-layers/.tmp-layers.json1: no space left on device", "disk_full"),
    # what the task asks; the next two are moby's daemon/errors.go
    ("start a container", 400, OCI + 'error mounting "/x" to rootfs at "/y": not a directory: unknown: Are you trying'
     " to mount a directory onto a file (or vice-versa)? Check if the specified host path exists and is the expected"
     " type", "container_config"),
    ("create a container", 400, "Duplicate mount point: /data", "container_config"),
    ("create a container", 400, "Minimum memory limit allowed is 6MB", "container_config"),
    ("create a container", 400, "Minimum memory limit allowed is 4MB", "container_config"),
    ("create a container", 400, "Range of CPUs is from 0.01 to 2.00, as there are only 2 CPUs available",
     "container_config"),
    ("start a container", 500, "unable to find user app: no matching entries in passwd file", "container_config"),
    ("start a container", 500, "unable to find group app: no matching entries in group file", "container_config"),
    ("create a container", 400, "the working directory 'rel' is invalid, it needs to be an absolute path",
     "container_config"),
    ("create a container", 400, 'invalid mount config for type "bind": bind source path does not exist: /x',
     "container_config"),
    ("start a container", 500, 'could not select device driver "" with capabilities: [[gpu]]', "container_config"),
    ("start a container", 400, OCI + 'exec: "/bin/sh": stat /bin/sh: no such file or directory: unknown',
     "container_config"),
    ("start a container", 400, OCI + 'exec: "bash": executable file not found in $PATH:'
     ' unknown', "container_config"),
    ("start a container", 500, "Cannot mkdir: /etc/passwd is not a directory", "container_config"),
    ("create a container", 400, "invalid environment variable: =x", "container_config"),
    ("create a container", 400, "something that only a later engine minds", "container_config"),
    ("start the service b", 500, "failed to create shim task: OCI runtime create failed: runc create failed: wrong"
     " rlimit value: RLIMIT_NOSUCH: unknown", "container_config"),
    ("start the service b", 500, OCI + "error during container init: error setting rlimits for ready process: error"
     " setting rlimit type 7: operation not permitted: unknown", "container_config"),
    ("start a container", 500, OCI + "error during container init: environment variable value can't contain"
     ' null(\\x00): "A=a\\x00b": unknown', "container_config"),
    ("start a container", 500, OCI + 'error during container init: error mounting "/var/lib/docker/volumes/v/_data" to'
     ' rootfs at "/proc": "/var/lib/docker/overlay2/1/merged/proc" cannot be mounted because it is inside /proc:'
     " unknown", "container_config"),
    ("start a container", 500, OCI + 'error during container init: error mounting "tmpfs" to rootfs at "/proc/x": mkdir'
     " /var/lib/docker/overlay2/1/merged/proc/x: no such file or directory: unknown", "container_config"),
    ("start a container", 500, OCI + 'error during container init: error mounting "tmpfs" to rootfs at "/x": mount'
     " tmpfs:/x (via /proc/self/fd/6), flags: 0xe, data: size=frob: invalid argument: unknown", "container_config"),
    ("start a container", 500, OCI + "error during container init: sethostname: invalid argument: unknown",
     "container_config"),
    ("start a container", 500, 'invalid tmpfs option ["frobnicate"]', "container_config"),
    ("create a container", 500, "json: cannot unmarshal number 109951161678088372224 into Go struct field"
     " HostConfig.HostConfig.Memory of type int64", "container_config"),
    # the same mounts where the host is at fault
    ("start a container", 500, OCI + 'error during container init: error mounting "proc" to rootfs at "/proc": mount'
     " proc:/proc (via /proc/self/fd/6), flags: 0xe: operation not permitted: unknown", "container_start"),
    # starting
    ("create a container", 400, "Unknown runtime specified runsc", "container_start"),
    ("create a container", 400, "unknown or invalid runtime name: runsc", "container_start"),
    ("create a container", 404, "No such image: rollcage/env:1", "container_start"),
    ("create a container", 409, 'Conflict. The container name "/a" is already in use by container "5e". You have to'
     " remove (or rename) that container to be able to reuse that name.", "container_start"),
    ("start a container", 500, OCI + "can't get final child's PID from pipe: EOF: unknown", "container_start"),
    ("start a container", 500, "fork/exec /usr/bin/containerd-shim-runc-v2: resource temporarily unavailable",
     "host_oom"),
    ("start a container", 500, "fork/exec /usr/bin/runc: cannot allocate memory", "host_oom"),
    # a container that is not there any more
    ("attach to a container", 404, "No such container: 1a2b", "container_lost"),
    ("attach to a container", 404, 'no container with name or ID "1a2b" found: no such'
     ' container', "container_lost"),
    ("start an exec", 409, "Container 5eab is not running", "container_lost"),
    ("start an exec", 409, "container 5eab is not running", "container_lost"),
    ("start an exec", 404, "No such exec instance: 1a", "container_lost"),
    ("start an exec", 500, "cannot exec in a stopped container: unknown", "container_lost"),
    ("start an exec", 500, "ttrpc: closed: unknown", "container_lost"),
    ("start an exec", 409, "can only create exec sessions on running containers: container state improper",
     "container_lost"),
    ("start an exec", 500, "nobody has seen this one", "container_lost"),
    # moby's daemon/errors.go: errExecPaused, errContainerIsRestarting
    ("start an exec", 409, "Container 5eab is paused, unpause the container before exec", "container_lost"),
    ("start an exec", 409, "Container 5eab is restarting, wait until the container is running", "container_lost"),
    ("signal a container", 409, "cannot kill container: 5eab: container 5eab is not running", "container_lost"),
    ("signal a container", 500, "cannot kill container: 5eab: No such container: 5eab", "container_lost"),
    ("inspect a container", 404, "no such object: 5eab", "container_lost"),
    ("start an exec", 500, "task 5eab not found: not found", "container_lost"),
    # the engine itself
    ("inspect a container", 503, "service unavailable", "docker_unavailable"),
    ("start a container", 500, 'connection error: desc = "transport: Error while dialing dial unix'
     ' /run/containerd/containerd.sock: connect: connection refused": unavailable', "docker_unavailable"),
    ("start a container", 500, "context deadline exceeded: unknown", "docker_timeout"),
    ("stop a container", 504, "gateway timeout", "docker_timeout"),
    # spoofs: names that the task chose, quoted by the engine
    ("start a container", 500, "unable to find user no space left on device: no matching entries in passwd file",
     "container_config"),
    ("create a container", 404, "No such image: no-space-left-on-device:latest", "container_start"),
    ("create a container", 400, "the working directory 'all predefined address pools have been fully subnetted' is"
     " invalid, it needs to be an absolute path", "container_config"),
    ("start a container", 400, OCI + 'exec: "could not find an available, non-overlapping IPv4 address pool": stat'
     " could not find: no such file or directory: unknown", "container_config"),
    ("start a container", 500, OCI + 'error mounting "/x/wrong rlimit value: x" to rootfs at "/y": mkdir'
     " /var/lib/docker/overlay2/1/merged/y: no space left on device: unknown", "disk_full"),
    ("start a container", 500, OCI + "error during container init: write /x/error setting rlimit type 7: environment"
     " variable value can't contain null: no space left on device: unknown", "disk_full"),
    ("start a container", 500, 'error creating overlay mount to /x/invalid tmpfs option ["x"]: json: cannot unmarshal'
     " number 1 into Go x: no space left on device", "disk_full"),
]  # fmt: skip


@pytest.mark.parametrize(("doing", "status", "message", "error_class"), ENGINE)
def test_what_the_engine_says_has_its_class(doing: str, status: int, message: str, error_class: str) -> None:
    fault = engine_fault(answer(status, message), doing)
    assert fault.error_class == error_class
    assert fault.evidence.status == status
    assert fault.evidence.said_by == "engine"
    assert message in fault.evidence.message


def raised(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


UNANSWERED = [
    (requests.exceptions.ConnectionError("Connection aborted.", ConnectionRefusedError(111, "refused")),
     "docker_unavailable"),
    (requests.exceptions.ConnectionError("Connection aborted.", FileNotFoundError(2, "No such file")),
     "docker_unavailable"),
    (requests.exceptions.ConnectionError(urllib3.exceptions.ProtocolError("RemoteDisconnected")),
     "docker_unavailable"),
    (requests.exceptions.ChunkedEncodingError("broken"), "docker_unavailable"),
    (urllib3.exceptions.ProtocolError("Connection broken: IncompleteRead(0 bytes read)"), "docker_unavailable"),
    (ConnectionResetError(104, "reset"), "docker_unavailable"),
    (BrokenPipeError(32, "broken pipe"), "docker_unavailable"),
    (PermissionError(13, "denied"), "docker_unavailable"),
    (raised(DockerException("Error while fetching server API version"), FileNotFoundError(2, "gone")),
     "docker_unavailable"),
    (requests.exceptions.ReadTimeout("Read timed out. (read timeout=120)"), "docker_timeout"),
    (requests.exceptions.ConnectionError(
        urllib3.exceptions.ReadTimeoutError(None, "/x", "Read timed"
     " out.")), "docker_timeout"),  # type: ignore[arg-type]
    (raised(DockerException("Error while fetching server API version"), requests.exceptions.ReadTimeout("slow")),
     "docker_timeout"),
    (TimeoutError("timed out"), "docker_timeout"),
    (OSError(errno.ENOSPC, "No space left on device"), "disk_full"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "error_class"), UNANSWERED, ids=lambda value: repr(value)[:50])
def test_an_engine_that_does_not_answer_is_gone_or_slow(error: Exception, error_class: str) -> None:
    for fault in (
        engine_fault(error, "start a container"),
        build_fault(error, "build"),
        pull_fault(error, "a"),
    ):
        assert fault.error_class == error_class
        assert fault.evidence.status is None


PULLS = [
    (404, "pull access denied for nosuch, repository does not exist or may require 'docker login': denied:"
     " requested"
     " access to the resource is denied", "base_image_missing", False),
    (404, "manifest for debian:nope not found: manifest unknown: manifest unknown", "base_image_missing", False),
    (404, "manifest unknown", "base_image_missing", False),
    (404, "manifest for python@sha256:00 not found: manifest unknown: OCI index found, but accept header does not"
     " support OCI indexes", "base_image_missing", False),
    (500, "no matching manifest for linux/arm64/v8 in the manifest list entries", "base_image_missing", False),
    (404, "failed to resolve reference \"docker.io/library/nosuch:1\": docker.io/library/nosuch:1: not found",
     "base_image_missing", False),
    # ghcr.io's answer for what is not there, or is not for everybody: the bare error code
    (403, "denied", "base_image_missing", False),
    (500, 'Head "https://ghcr.io/v2/x/y/manifests/1": denied', "base_image_missing", False),
    (404, "repository nosuch not found: name unknown: repository name not known to registry", "base_image_missing",
     False),
    (400, "invalid reference format: repository name must be lowercase", "base_image_missing", False),
    (500, "unknown: repository name not known to registry", "base_image_missing", False),
    (500, 'Get "https://nosuch.invalid/v2/": dial tcp: lookup nosuch.invalid on 10.0.0.1:53: no such host',
     "image_pull", False),
    (500, 'Get "https://r.example/v2/": net/http: TLS handshake timeout', "image_pull", False),
    (500, 'Get "https://r.example/v2/": x509: certificate signed by unknown authority', "image_pull", False),
    (500, 'Get "https://r.example/v2/": net/http: request canceled while waiting for connection (Client.Timeout'
     " exceeded while awaiting headers)", "image_pull", False),
    (500, 'Get "http://127.0.0.1:1/v2/": dial tcp 127.0.0.1:1: connect: connection refused', "image_pull", False),
    (500, "received unexpected HTTP status: 503 Service Unavailable", "image_pull", False),
    (500, "error pulling image configuration: download failed after attempts=6: unexpected"
     " EOF", "image_pull", False),
    (401, "unauthorized: authentication required", "image_pull", False),
    (500, "something that a registry never said before", "image_pull", False),
    (500, "toomanyrequests: You have reached your pull rate limit. You may increase the limit by authenticating and"
     " upgrading: https://www.docker.com/increase-rate-limit", "image_pull", True),
    (429, "slow down", "image_pull", True),
    # the containerd image store of Engine 25 to 28
    (500, 'failed to copy: httpReadSeeker: failed open: unexpected status from GET request to https://r.example/v2/x:'
     " 429 Too Many Requests", "image_pull", True),
    (500, 'failed to resolve reference "r.example/x:1": unexpected status from HEAD request to https://r.example/v2/x:'
     " 503 Service Unavailable", "image_pull", False),
    (500, 'failed to extract layer sha256:1a: write /var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/1/fs/x:'
     " no space left on device: unknown", "disk_full", False),
    (500, "tls: first record does not look like a TLS handshake", "image_pull", False),
    (500, "http: server gave HTTP response to HTTPS client", "image_pull", False),
    (500, "filesystem layer verification failed for digest sha256:1a", "image_pull", False),
    (500, "Error initializing source docker://nosuch:1: reading manifest 1 in docker.io/library/nosuch: manifest"
     " unknown", "base_image_missing", False),  # podman
    (500, "initializing source docker://nosuch:1: reading manifest 1 in docker.io/library/nosuch: requested access to"
     " the resource is denied", "base_image_missing", False),
    (500, "failed to register layer: Error processing tar file(exit status 1): write /usr/x: no space left"
     " on device",
     "disk_full", False),
    (500, "write /var/lib/docker/tmp/GetImageBlob1: no space left on device", "disk_full", False),
]  # fmt: skip


@pytest.mark.parametrize(("status", "message", "error_class", "limited"), PULLS)
def test_what_a_registry_says_has_its_class(
    status: int, message: str, error_class: str, limited: bool
) -> None:
    faults = [pull_fault(answer(status, message), "an/image:1")]
    if status in (404, 500):
        faults.append(pull_fault({"errorDetail": {"message": message}, "error": message}, "an/image:1"))
    if message.endswith(": not found"):
        faults.pop()  # the stream has no status; only newer engines say it so, and those answer 404
    for fault in faults:
        assert fault.error_class == error_class
        assert "an/image:1" in fault.message
        assert (fault.retry_after_sec is not None) == limited


BUILDS: list[tuple[dict[str, Any], str]] = [
    ({"code": 7, "message": "The command '/bin/sh -c exit 7' returned a non-zero code: 7"}, "image_build"),
    ({"code": 1, "message": "The command '/bin/sh -c echo no space left on device' returned a non-zero code: 1"},
     "image_build"),
    ({"code": 100, "message": "The command '/bin/sh -c apt-get install toomanyrequests: no such host' returned a"
      " non-zero code: 100"}, "image_build"),
    ({"message": "dockerfile parse error line 4: unknown instruction: ECHO"}, "dockerfile_parse"),
    ({"message": "dockerfile parse error on line 4: unknown instruction: ECHO"}, "dockerfile_parse"),
    ({"message": "the Dockerfile (Dockerfile) cannot be empty"}, "dockerfile_parse"),
    ({"message": "the --mount option requires BuildKit. Refer to https://docs.docker.com/go/buildkit/ to"
     " learn how to"
      " build images with BuildKit enabled"}, "unsupported"),
    ({"message": "COPY failed: file not found in build context or excluded by .dockerignore: stat nope:"
     " file does not"
      " exist"}, "image_build"),
    ({"message": "COPY failed: stat app/no space left on device: file does not exist"}, "image_build"),
    ({"message": "COPY failed: error processing tar file: write /x: no space left on device"}, "disk_full"),
    ({"message": "ADD failed: failed to GET https://x.example/a with status 404 Not Found: gone"}, "image_build"),
    ({"message": 'ADD failed: Get "https://x.invalid/a": dial tcp: lookup x.invalid: no such host'}, "build_infra"),
    ({"message": "unable to convert uid/gid chown string to host mapping: can't find uid for user xx: no such user:"
      " xx"}, "image_build"),
    ({"message": "unable to find user nobodyx: no matching entries in passwd file"}, "image_build"),
    ({"message": OCI + 'exec: "/bin/sh": stat /bin/sh: no such file or directory: unknown'}, "image_build"),
    ({"message": "max depth exceeded"}, "image_build"),
    ({"message": 'failed to process "${x#y}": missing \':\' in substitution'}, "image_build"),
    ({"message": 'invalid from flag value nope: Get "https://r.example/v2/": dial tcp: lookup r.example: no such'
      ' host'}, "image_pull"),
    ({"message": "pull access denied for nosuch, repository does not exist or may require 'docker login'"},
     "base_image_missing"),
    ({"message": "failed to create endpoint x on network bridge: adding interface veth1 to bridge docker0 failed:"
      " exchange full"}, "network_setup"),
    ({"message": "mkdir /var/lib/docker/overlay2/1-init: no space left on device"}, "disk_full"),
    ({"message": "No such image: sha256:1a"}, "build_infra"),
    ({"message": "something that no builder said before"}, "build_infra"),
]  # fmt: skip


@pytest.mark.parametrize(("detail", "error_class"), BUILDS)
def test_what_the_builder_says_has_its_class(detail: dict[str, Any], error_class: str) -> None:
    said = {"errorDetail": detail, "error": detail["message"]}
    fault = build_fault(said, "build the image of task t", log_tail="no space left on device\n")
    assert fault.error_class == error_class
    assert fault.evidence.exit_code == detail.get("code")
    assert fault.evidence.log_tail == "no space left on device\n"


def test_a_builders_answer_by_status_is_read_too() -> None:
    fault = build_fault(answer(400, "dockerfile parse error line 2: unknown instruction: ECHO"), "build")
    assert (fault.error_class, fault.evidence.status) == ("dockerfile_parse", 400)


def test_docker_pys_own_build_error_has_a_class_too() -> None:
    assert isinstance(build_fault(BuildError("odd", iter(())), "build"), RolloutError)


# the same from a real engine

IMAGE = "debian:bookworm-slim"


@pytest.fixture
async def engine() -> Any:
    engine = Engine(timeout_sec=60)
    yield engine
    engine.close()


def started(
    api: Any, argv: list[str] | None = None, host: dict[str, Any] | None = None, **settings: Any
) -> None:
    config = api.create_host_config(pids_limit=64, **(host or {}))
    labels = {"rollcage.host": "test-faults"}
    container = api.create_container(IMAGE, argv or ["true"], host_config=config, labels=labels, **settings)[
        "Id"
    ]
    try:
        api.start(container)
    finally:
        api.remove_container(container, force=True)


def overlapping(api: Any) -> IPAMConfig:
    taken = api.inspect_network("bridge")["IPAM"]["Config"][0]["Subnet"]
    return IPAMConfig(pool_configs=[IPAMPool(subnet=taken)])


REAL = [
    ("create a container", lambda api: started(api, host={"mem_limit": "1m"}), "container_config"),
    ("create a container", lambda api: started(api, host={"nano_cpus": 999 * 10**9}), "container_config"),
    ("start a container", lambda api: started(api, user="no space left on device"), "container_config"),
    ("create a container", lambda api: started(api, working_dir="relative"), "container_config"),
    ("start a container", lambda api: started(api, working_dir="/etc/passwd"), "container_config"),
    ("start a container", lambda api: started(api, ["/no space left on device"]), "container_config"),
    ("create a container", lambda api: started(api, host={"runtime": "no-such-runtime"}), "container_start"),
    ("start a container", lambda api: started(api, host={"network_mode": "no-such-network"}), "network_setup"),
    ("create a container", lambda api: api.create_container("nosuch:1", ["true"]), "container_start"),
    ("start an exec", lambda api: api.exec_create("nosuch", ["true"]), "container_lost"),
    ("create a network", lambda api: api.create_network("rollcage-test-overlap", ipam=overlapping(api)),
     "network_setup"),
]  # fmt: skip


@pytest.mark.docker
@pytest.mark.parametrize(("doing", "request_", "error_class"), REAL)
async def test_a_real_engine_says_it(engine: Engine, doing: str, request_: Any, error_class: str) -> None:
    with pytest.raises(SandboxError) as caught:
        await engine.call(doing, request_)
    assert caught.value.error_class == error_class
    assert caught.value.evidence.said_by == "engine"


def test_an_engine_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(SandboxError) as caught:
        Engine(f"unix://{tmp_path}/none.sock")
    assert caught.value.error_class == "docker_unavailable"


@pytest.fixture
def mute_engine(tmp_path: Path) -> Iterator[str]:
    """A socket that takes connections and never answers."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "mute.sock"))
        listener.listen()
        yield f"unix://{tmp_path}/mute.sock"


def test_an_engine_that_never_answers_is_a_timeout(mute_engine: str) -> None:
    with pytest.raises(SandboxError) as caught:
        Engine(mute_engine, timeout_sec=1)
    assert caught.value.error_class == "docker_timeout"


@pytest.mark.docker
def test_a_real_registry_that_cannot_be_reached_is_a_pull_fault() -> None:
    with pytest.raises(APIError) as caught:
        docker.APIClient().pull("127.0.0.1:1/nosuch:1")
    assert pull_fault(caught.value, "127.0.0.1:1/nosuch:1").error_class == "image_pull"
