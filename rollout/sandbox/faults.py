"""Names for the Engine's failures, by exception type, HTTP status, error code and who wrote the message.

Only what the engine, its builder or a registry says is read here: the `message` of the API's error JSON and
the `errorDetail` of its streams. What a container prints never comes here. Still, an engine's message quotes
names that a task chose (a user, a path, a command), so each rule holds on to the engine's own words: at the
start of the message, or at its end where the system's own error stands.

Rules are tried from the top; the first that matches names the class. The messages are those of Engine 20.10 to 28
and of podman's Docker-compatible API; tests/rollout/sandbox/test_faults.py lists them.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import requests
import urllib3
from docker.errors import APIError

from rollcage.rollout.outcome import BuildError, Evidence, SandboxError

RATE_LIMIT_WAIT_SEC = 120.0
"""A registry that says 429 counts pulls over hours; asking again within seconds only keeps it shut."""


@dataclass(frozen=True)
class Rule:
    """`status` None: any. `pattern` is searched for, whatever the case, in the engine's message."""

    error_class: str
    pattern: str
    status: int | None = None

    def holds(self, message: str, status: int | None) -> bool:
        if self.status is not None and status != self.status:
            return False
        return re.search(self.pattern, message, re.IGNORECASE | re.DOTALL) is not None


_NETWORKS = (
    Rule("network_pool", r"could not find an available, non-overlapping IPv[46] address pool"),
    Rule("network_pool", r"all predefined address pools have been fully subnetted"),
    Rule("network_pool", r"could not find an available predefined network"),
    Rule("network_pool", r"could not find free subnet from subnet pools"),
    Rule("network_setup", r"pool overlaps with other one on this address space"),
    Rule("network_setup", r"(conflicts|overlaps) with (existing )?(network|route|subnet)"),
    Rule("network_setup", r"adding interface \S+ to bridge \S+ failed"),
    Rule("network_setup", r"failed to create endpoint \S+ on network"),
    Rule("network_setup", r"failed to set up container networking"),
    Rule("network_setup", r"failed to (allocate gateway|get network during|update store for object type)"),
    Rule("network_setup", r"no available IPv[46] addresses on this network"),
    Rule("network_setup", r"^network \S+ (is ambiguous|has active endpoints|with name|not found)"),
    Rule("network_setup", r"(network \S+ not found|no such network)"),
    Rule("network_setup", r"(iptables|nftables|netavark|firewalld?)\b.*(failed|error|:)"),
    Rule("network_setup", r"port is already allocated$|cannot join network of"),
)

_HOST = (
    Rule("disk_full", r"(^|: )no space left on device(\W|$)[^:]*$|disk quota exceeded$"),
    Rule("host_oom", r"fork/exec \S+: (cannot allocate memory|resource temporarily unavailable)"),
    Rule("host_oom", r"(runtime: out of memory|cannot allocate memory)(: unknown)?$"),
    Rule("docker_timeout", r"(context deadline exceeded|timeout waiting for container \S+)(: unknown)?$"),
    Rule("docker_unavailable", r"containerd\.sock|error while dialing|daemon is shutting down"),
)

_RUNC = (
    r"^(failed to create (shim task|task for container): )*(OCI runtime create failed|runc create failed): "
    r"(runc create failed: |unable to start container process: |error during container init: |"
    r"container_linux\.go:\d+: [a-z ]+: |process_linux\.go:\d+: [a-z ]+: )*"
)
"""What runc's own words stand behind: nothing of it is a name that a task chose."""

_RLIMIT = Rule(
    "container_config",
    _RUNC + r"error setting rlimits? (for ready process: error setting rlimit )?type \d+: ",
)

_TASK = (
    Rule(
        "container_config",
        _RUNC + r"(wrong rlimit value: |rlimit type .* not supported|sethostname: invalid)",
    ),
    _RLIMIT,
    Rule("container_config", _RUNC + r"environment variable (name|value) can't contain null"),
    # The engine's own mounts there come from no path of the host.
    Rule("container_config", _RUNC + r'error mounting "(/[^"]*|tmpfs)" to rootfs at "/(proc|sys|dev)[/"]'),
    Rule(
        "container_config", _RUNC + r'error mounting "tmpfs" to rootfs at .*: invalid argument(: unknown)?$'
    ),
    Rule("container_config", r"^invalid tmpfs option \["),
    Rule("container_config", r"^json: cannot unmarshal number \S+ into Go "),
    Rule("container_config", r"unable to find (user|group) "),
    Rule("container_config", r"the working directory '.*' is invalid, it needs to be an absolute path"),
    Rule("container_config", r"invalid (mount config|mode|volume specification|working directory|argument)"),
    Rule("container_config", r"^(minimum memory limit|invalid memory|range of cpus|nanocpus)"),
    Rule(
        "container_config", r"minimum memory(swap)? limit|memory limit .* (too|less)|must be at least 6 ?MB"
    ),
    Rule("container_config", r"range of cpus is from|cpu count cannot be|invalid cpuset"),
    Rule("container_config", r"could not select device driver"),
    Rule("container_config", r"invalid (container name|environment variable|hostname|ip address)"),
    Rule(
        "container_config", r'exec: ".*": (executable file not found|permission denied|stat .*: no such file)'
    ),
    Rule(
        "container_config",
        r"chdir to cwd .* set in config\.json failed|^cannot mkdir: .* is not a directory$",
    ),
    Rule(
        "container_config",
        r"^error processing tar file.*: (not a directory|is a directory|file exists|too many levels of [a-z ]+)$",
    ),
    Rule("container_config", r"no command specified|exec format error"),
    Rule("container_config", r"storage-opt|--storage-opt is supported only"),
)

_CONTAINER = (
    Rule("container_lost", r"^no such (container|exec instance)|no (container|exec session) with (name|id)"),
    Rule("container_lost", r"container \S+ is (not running|paused|restarting)|is not running$"),
    Rule("container_lost", r"removal of container \S+ is already in progress|marked for removal"),
    Rule("container_lost", r"cannot exec in a (stopped|paused) (container|state)|container state improper"),
    Rule("container_lost", r"(ttrpc: closed|shim exited|process already finished)(: unknown)?$"),
    Rule("base_image_missing", r"invalid reference format"),
    Rule(
        "container_start",
        r"^no such image|unknown or invalid runtime name|^unknown runtime specified|name .* is already in use",
    ),
)

_REGISTRY = (
    Rule("image_pull", r"toomanyrequests|too many requests|pull rate limit|429 too many"),
    Rule("image_pull", r"no such host|temporary failure in name resolution|server misbehaving"),
    Rule("image_pull", r"TLS handshake|x509:|tls:|certificate|HTTP response to HTTPS client"),
    Rule(
        "image_pull",
        r"i/o timeout|Client\.Timeout|context deadline exceeded|context canceled|request canceled",
    ),
    Rule(
        "image_pull", r"connection (refused|reset)|no route to host|network is unreachable|\bEOF$|broken pipe"
    ),
    Rule("image_pull", r"unexpected HTTP status: 5\d\d|HTTP status: 5\d\d|status code 5\d\d|bad gateway"),
    Rule("image_pull", r"^unauthorized|: unauthorized|filesystem layer verification failed|blob unknown"),
    # What the engine makes of a registry's DENIED without details, ghcr.io's for one: the bare code, which also
    # stands for what does not exist.
    Rule("base_image_missing", r"pull access denied for|(^|: )denied$"),
    Rule("base_image_missing", r"manifest (for \S+ |for |)(not found|unknown)|manifest unknown|name unknown"),
    Rule("base_image_missing", r"requested access to the resource is denied|repository \S+ not found"),
    Rule("base_image_missing", r"repository name not known to registry|repository does not exist"),
    Rule("base_image_missing", r"no matching manifest for|does not match the specified platform"),
    Rule("base_image_missing", r"invalid reference format|repository name must be (lowercase|canonical)"),
    Rule("base_image_missing", r"\S: not found$", 404),
)

_BUILDER = (
    Rule(
        "dockerfile_parse",
        r"^(dockerfile parse error|failed to parse dockerfile|the dockerfile .* cannot be empty)",
    ),
    Rule("dockerfile_parse", r"^(unknown instruction|syntax error|file with no instructions|no build stage)"),
    Rule("unsupported", r"^the --(chmod|mount|link|network|security) option requires BuildKit"),
    Rule(
        "image_build", r"^(COPY|ADD) failed: (file not found in build context|forbidden path|no source files)"
    ),
    Rule(
        "image_build",
        r"^(COPY|ADD) failed: .*(no such file or directory|file does not exist|not a directory)$",
    ),
    Rule("image_build", r"^(COPY|ADD) failed: .*status 4\d\d|invalid chown"),
    Rule("build_infra", r"^ADD failed: (Get |failed to GET )"),
    Rule("image_build", r"can't find (uid|gid) for|max depth exceeded|unable to convert uid/gid"),
    Rule("image_build", r'exec: ".*": (executable file not found|permission denied|stat .*: no such file)'),
    Rule("image_build", r"exec .*(argument list too long|exec format error)|unable to find (user|group) "),
    Rule("image_build", r"^(when using|cannot normalize|failed to process|failed to parse) "),
)

_DOINGS = (
    (r"exec|attach|copy|read|stop", "container_lost"),
    (r"network", "network_setup"),
    (r"create|start|run", "container_start"),
)
"""What a failure is that no rule names, by the words of what was being done; otherwise `container_lost`."""


def engine_fault(error: Exception, doing: str) -> SandboxError:
    """The class of a failed call to the engine, with its evidence. `doing` completes "could not ..."."""
    status, said = _said(error)
    message = f"could not {doing}: {said}"
    evidence = Evidence(message, said_by="rollcage" if status is None else "engine", status=status)
    if status is None:
        return SandboxError(_unanswered(error), message, evidence)
    rules = (*_TASK, *_CONTAINER, *_NETWORKS, *_HOST)
    return SandboxError(_first(rules, said, status) or _by_status(status, doing), message, evidence)


def is_rlimit_refusal(error: SandboxError) -> bool:
    """Whether the engine may not give a container a limit as high as it was asked for."""
    said = error.evidence.message.partition(": ")[2]  # behind what was being done
    return error.evidence.said_by == "engine" and _RLIMIT.holds(said, None)


def pull_fault(error: Exception | Mapping[str, Any], reference: str) -> BuildError:
    """The class of a pull that failed: an exception, or the message of the pull's stream that says so."""
    status, said = _said(error)
    message = f"could not pull {reference}: {said}"
    answered = status is not None or not isinstance(error, Exception)
    evidence = Evidence(message, said_by="registry" if answered else "rollcage", status=status)
    if isinstance(error, Exception) and not answered:
        return BuildError(_unanswered(error), message, evidence)
    found = _first((*_HOST[:1], *_REGISTRY, *_HOST[1:]), said, status) or "image_pull"
    limited = status == 429 or (found == "image_pull" and _REGISTRY[0].holds(said, status))
    return BuildError(found, message, evidence, RATE_LIMIT_WAIT_SEC if limited else None)


def build_fault(error: Exception | Mapping[str, Any], doing: str, *, log_tail: str = "") -> BuildError:
    """The class of a build that failed: an exception, or the message of the builder's stream that says so.

    A message with an exit code is about a step that ended by itself: the task's fault, whatever it says.
    `log_tail` is kept as evidence and never looked at.
    """
    status, said = _said(error)
    code = None if isinstance(error, Exception) else (error.get("errorDetail") or {}).get("code")
    message = f"could not {doing}: {said}"
    evidence = Evidence(message, said_by="builder", status=status, exit_code=code, log_tail=log_tail)
    if code:
        return BuildError("image_build", message, evidence)
    if isinstance(error, Exception) and status is None:
        return BuildError(_unanswered(error), message, evidence)
    rules = (*_BUILDER, *_NETWORKS, *_HOST, *_REGISTRY)
    return BuildError(_first(rules, said, status) or "build_infra", message, evidence)


def _said(error: Exception | Mapping[str, Any]) -> tuple[int | None, str]:
    """(HTTP status, message) as the other side gave them; no status where no answer came."""
    if not isinstance(error, Exception):
        detail = error.get("errorDetail") or {}
        return None, str(detail.get("message") or error.get("error") or error)
    if isinstance(error, APIError) and error.response is not None:
        explanation = error.explanation
        return int(error.response.status_code), str(explanation or error)
    return None, f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _first(rules: tuple[Rule, ...], message: str, status: int | None) -> str | None:
    return next((rule.error_class for rule in rules if rule.holds(message, status)), None)


def _by_status(status: int, doing: str) -> str:
    if status in (502, 503):
        return "docker_unavailable"
    if status in (408, 504):
        return "docker_timeout"
    if status == 400:
        return "container_config"
    return next((name for word, name in _DOINGS if re.search(word, doing)), "container_lost")


def _unanswered(error: Exception) -> str:
    """The class of a call that got no answer: it took too long, or nobody was there."""
    chain = list(_chain(error))
    if any(isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT) for one in chain):
        return "disk_full"
    timeouts = (requests.exceptions.ReadTimeout, urllib3.exceptions.ReadTimeoutError, TimeoutError)
    return "docker_timeout" if any(isinstance(one, timeouts) for one in chain) else "docker_unavailable"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and those that it was made of: causes, contexts and arguments."""
    waiting, seen = [error], set()
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            more = (one.__cause__, one.__context__, getattr(one, "reason", None), *one.args)
            waiting += [other for other in more if isinstance(other, BaseException)]
