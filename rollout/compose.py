"""docker-compose.yaml as Harbor's tasks have it: several services, of which `main` is the agent's.

    file -> tree with lines -> variables replaced -> services, checked

`read_compose` reads and checks a file while a task is loaded, when nobody knows the job's variables yet;
`Compose.services` reads it once more with them. What Harbor lays under and over the file is done here: `main` is
there whether the file names it or not, its image is built of the file's own folder, its command only waits, the
task's `[environment].env` wins over `environment`, and what the file says of its limits wins over task.toml's.

Several networks become the rollout's one, under the same names. Where they keep services apart that is refused:
nothing here would keep them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rollcage.rollout.compose_depends import check_apart, check_count, check_depends, is_internal
from rollcage.rollout.compose_files import HOST_LOGS, parse_env
from rollcage.rollout.compose_model import MAIN, Check, Dependency, Mount, Service
from rollcage.rollout.compose_service import read_service
from rollcage.rollout.compose_targets import check_target
from rollcage.rollout.compose_variables import Lookup, VariableError, interpolate
from rollcage.rollout.compose_yaml import Document, Node, Place, parse_yaml, texts_of
from rollcage.rollout.task_model import Environment, Problem, problems_error
from rollcage.rollout.task_toml import read_text
from rollcage.rollout.terminal_bench_compose import HARNESS

__all__ = ["MAIN", "Check", "Compose", "Dependency", "Mount", "Service", "read_compose"]

MAIN_IMAGE = "rollcage/main"
"""What `${MAIN_IMAGE_NAME}` stands for: the task's own image, under whatever name it has."""

_TOP = ("services", "networks", "volumes", "secrets", "configs")
_NO_MEANING = frozenset({"version", "name"})


@dataclass(frozen=True)
class Compose:
    """A docker-compose.yaml that has been read. `root` is its folder; `own` are the variables that Harbor sets for
    it, `given` those of a `.env` file beside it, `env` the task's `[environment].env`."""

    file: str
    root: Path
    tree: Node
    own: dict[str, str]
    given: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)

    def services(
        self, environ: Mapping[str, str], env: Mapping[str, str] | None = None
    ) -> dict[str, Service]:
        """The services that are started, by name, `main` among them, where the job has the variables `environ`.
        `env`: the task's own, resolved.

        Raises `TaskError` where they are not what they should be with these variables.
        """
        problems: list[Problem] = []
        values = {**self.given, **environ, **(self.env if env is None else env), **self.own}
        services = _read(self, Document(self.file, problems, Lookup(values)))
        if problems:
            raise problems_error(problems)
        return services

    def names(self) -> set[str]:
        """The services that are started."""
        return set(_read(self, Document(self.file, [], Lookup(self.own))))

    def referenced(self) -> set[str]:
        """The variables that the file may take from a host."""
        return self._lookup({}).asked - self.own.keys() - self.env.keys()

    def missing(self, environ: Mapping[str, str]) -> list[tuple[str, str]]:
        """Each (variable, `file:line`) that has no default and that nobody sets."""
        values = {**self.given, **environ, **self.env, **self.own}
        found = []
        for text, line in texts_of(self.tree):
            lookup = Lookup(values)
            _asked(text, lookup)
            found += [(name, f"{self.file}:{line}") for name in sorted(lookup.missing)]
        return found

    def _lookup(self, values: Mapping[str, str]) -> Lookup:
        """Everything that is asked for; names of bare `environment` entries are."""
        lookup = Lookup(values)
        for text, _ in texts_of(self.tree):
            _asked(text, lookup)
        _read(self, Document(self.file, [], lookup))
        return lookup


def read_compose(file: Path, environment: Environment, problems: list[Problem]) -> Compose | None:
    """Read and check the file; None, and problems, where anything is wrong with it. `environment` is the task's
    (or its verifier's), as task.toml has it."""
    before = len(problems)
    text = read_text(file, problems)
    tree = parse_yaml(text, str(file), problems) if text is not None else None
    if tree is None:
        if len(problems) == before:
            problems.append(Problem(str(file), None, "is empty", "write services:, or remove it"))
        return None
    compose = Compose(str(file), file.parent, tree, _own(environment), {}, dict(environment.env))
    place = Place(tree, (), Document(str(file), problems))
    compose = replace(compose, given=_dot_env(file.parent / ".env", place))
    literal = {key: value for key, value in environment.env.items() if not value.startswith("${")}
    known = Lookup({**compose.given, **literal, **compose.own})
    services = _read(compose, Document(str(file), problems, known, lenient=True))
    if environment.network_mode == "allowlist" and len(services) > 1:
        said, remedy = "has several services, and task.toml an allowlist", "write another network_mode"
        problems.append(Problem(str(file), None, said, remedy, "unsupported"))
    return compose if len(problems) == before else None


def image_environment(service: Service, environment: Environment) -> Environment:
    """What the image of a service is made of. `environment` is the task's own."""
    own = replace(environment, compose=None, build_args=service.build_args, target=service.target)
    if service.context is not None:
        return replace(own, context=service.context, dockerfile=service.dockerfile, docker_image=None)
    if service.name != MAIN:
        return replace(own, context=None, docker_image=service.image)
    context = environment.context
    builds = context is not None and (context / environment.dockerfile).is_file()
    if service.image in (None, MAIN_IMAGE) or builds:  # a name for what is built
        return own
    return replace(own, context=None, docker_image=service.image)


def _asked(text: str, lookup: Lookup) -> None:
    try:
        interpolate(text, lookup)
    except VariableError:
        return  # a problem that reading the services names


def _own(environment: Environment) -> dict[str, str]:
    """The variables that Harbor 0.26 sets for the file (`environments/docker/compose_env.py`), and
    COMPOSE_PROJECT_NAME, which compose does. `TEST_DIR` and those of Terminal-Bench are left in files that began as
    old tasks."""
    own = {
        "MAIN_IMAGE_NAME": MAIN_IMAGE,
        "CONTEXT_DIR": ".",
        "TEST_DIR": "/tests",
        **HARNESS,
        "T_BENCH_TASK_LOGS_PATH": f"{HOST_LOGS}task",
        "T_BENCH_TASK_AGENT_LOGS_PATH": f"{HOST_LOGS}task-agent",
        "CPUS": f"{environment.cpus:g}" if environment.cpus else "",
        "MEMORY": f"{environment.memory_mb}M" if environment.memory_mb else "",
    }
    if environment.docker_image is not None:
        own["PREBUILT_IMAGE_NAME"] = environment.docker_image
    for name, folder in (("VERIFIER_LOGS", "verifier"), ("AGENT_LOGS", "agent"), ("ARTIFACTS", "artifacts")):
        own[f"HOST_{name}_PATH"] = f"{HOST_LOGS}{folder}"
        own[f"ENV_{name}_PATH"] = f"/logs/{folder}"
    return own


def _dot_env(file: Path, place: Place) -> dict[str, str]:
    if not file.is_file():
        return {}
    text = read_text(file, place.document.problems)
    if text is None:
        return {}
    try:
        pairs = parse_env(text, place)
    except VariableError as error:
        place.document.problems.append(Problem(str(file), None, str(error), error.remedy))
        return {}
    return {key: value for key, value in pairs.items() if value is not None}


def _read(compose: Compose, document: Document) -> dict[str, Service]:
    root = Place(compose.tree, (), document)
    tables: dict[str, dict[str, Place]] = {key: {} for key in _TOP}
    for key, place in root.table().items():
        if key in _TOP:
            tables[key] = place.table()
        elif key not in _NO_MEANING:
            place.unsupported("is not done", "write what it brings into this file")
    _check_declared(tables)
    services = {
        name: read_service(name, place, compose.root, tables)
        for name, place in tables["services"].items()
        if not ((profiles := place.get("profiles")) and profiles.texts())
    }
    services.setdefault(MAIN, Service(MAIN, root.line))
    services = _shared_images(services)
    services = _shared_files(services, tables["services"])
    check_count(services, root)
    check_depends(services, tables["services"], root)
    check_apart(services, tables["networks"], root)
    return services


def _check_declared(tables: Mapping[str, Mapping[str, Place]]) -> None:
    for kind in ("networks", "volumes", "secrets", "configs"):
        for place in tables[kind].values():
            if (external := place.get("external")) is not None and (external.is_table or external.flag()):
                place.unsupported("is made by somebody else (external)", "declare it here")
            driver = place.get("driver")
            usual = ("local",) if kind == "volumes" else ("bridge", "default")
            if driver is not None and (name := driver.text()) not in (*usual, None, ""):
                driver.unsupported(f"is {name}", f"leave it out: it is {usual[0]}")
            if (options := place.get("driver_opts")) is not None:
                options.unsupported("is not done", "take it out, if the task can do without")
            if (ipam := place.get("ipam")) is not None and ipam.get("config") is not None:
                ipam.unsupported("asks for addresses of its own", "reach services by their names")


def _shared_images(services: dict[str, Service]) -> dict[str, Service]:
    """A service that names the image which another one builds is made of the same build."""
    built = {one.image: one for one in services.values() if one.image is not None and one.context}
    found = {}
    for name, service in services.items():
        other = built.get(service.image or "") if service.context is None else None
        if other is not None:
            service = replace(
                service, context=other.context, dockerfile=other.dockerfile, build_args=other.build_args,
                target=other.target,
            )  # fmt: skip
        found[name] = service
    return found


def _shared_files(services: dict[str, Service], places: Mapping[str, Place]) -> dict[str, Service]:
    """Files of the task that several services mount and one may write become a volume, which has a copy of them;
    Harbor's log folders, where a service has them, are mounted in `main` as well."""
    users: dict[Path, list[tuple[str, Mount]]] = {}
    for name, service in services.items():
        for mount in service.mounts:
            if mount.source is not None:
                users.setdefault(mount.source, []).append((name, mount))
    shared = {
        source
        for source, mounts in users.items()
        if len({name for name, _ in mounts}) > 1 and not all(mount.read_only for _, mount in mounts)
    }
    for source in sorted(shared):
        if not source.is_dir():
            place = places[users[source][0][0]]
            place.unsupported(f"shares the file {source.name} for writing", "share its folder")
        for name, mount in users[source]:
            check_target(places[name], name, mount.target)  # no copy any more
    logs = {m.volume for s in services.values() for m in s.mounts if (m.volume or "").startswith(HOST_LOGS)}
    found = {}
    for name, service in services.items():
        mounts = [replace(m, volume=f"files:{m.source}") if m.source in shared else m for m in service.mounts]
        if name == MAIN:
            mounts += [Mount(f"/logs/{(volume or '').removeprefix(HOST_LOGS)}", volume=volume) for volume in sorted(
                volume for volume in logs if volume is not None)]  # fmt: skip
        found[name] = replace(service, mounts=tuple(mounts))
    return found


def has_internet(environment: Environment, services: Mapping[str, Service]) -> bool:
    """Whether the file lets its services out: not where all their networks are internal."""
    compose = environment.compose
    if compose is None:
        return True
    networks = Place(compose.tree, (), Document(compose.file, [], Lookup(compose.own))).get("networks")
    closed = {name for name, place in networks.table().items() if is_internal(place)} if networks else set()
    used = {name for s in services.values() if not s.network for name in s.networks or ("default",)}
    return not closed or not used <= closed
