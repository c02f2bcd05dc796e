"""One service of a docker-compose.yaml: what each of its keys means here.

A key is read (`_READERS`), says nothing about what happens inside (`_NO_MEANING`), or is not done: it would break
a sandbox's isolation (`compose_limits.py`), or nobody has needed it. Nothing is published on the host: `ports` are as
`expose`, and every service reaches every port of the others.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from rollcage.rollout.compose_files import build_context, env_file, inside, read_mounts
from rollcage.rollout.compose_limits import BREAKS_OUT, LIMITS, Reading, capabilities
from rollcage.rollout.compose_model import MAIN, Check, Condition, Dependency, Service
from rollcage.rollout.compose_yaml import Place

_NO_MEANING = frozenset(
    {
        "annotations", "attach", "container_name", "cpu_count", "cpu_percent", "cpu_period", "cpu_quota", "cpu_shares",
        "cpuset", "develop", "expose", "labels", "label_file", "logging", "mem_reservation", "mem_swappiness",
        "memswap_limit", "oom_score_adj", "platform", "ports", "profiles", "pull_policy", "pull_refresh_after",
        "stop_grace_period", "secrets", "configs", "cap_add", "cap_drop", "env_file", "environment", "tmpfs",
        "volumes",
    }
)  # fmt: skip
"""Keys that change nothing of what a service sees, or that are read together with others."""

_IDLE = re.compile(
    r"(/bin/)?(ba)?sh|cat|((/bin/)?(ba)?sh -l?c )?(exec )?((/bin/)?sleep (infinity|inf|\d+\w?)|tail -f /dev/null)|"
    r"((/bin/)?(ba)?sh -l?c )?while (true|:) *; *do sleep \d+\w? *; *done"
)
"""Commands that only keep a container alive, quotes left out."""

_RESTARTS = re.compile(r"no|always|unless-stopped|on-failure(:\d+)?")
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*")
_HOSTNAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_PART = "[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_DOMAIN = r"(?:[a-zA-Z0-9][a-zA-Z0-9-]*(?:\.[a-zA-Z0-9][a-zA-Z0-9-]*)*|\[[0-9a-fA-F:]+\])(?::[0-9]+)?"
_IMAGE = re.compile(
    rf"(?:{_DOMAIN}/)?{_PART}(?:/{_PART})*(?::[a-zA-Z0-9_][a-zA-Z0-9_.-]{{0,127}})?"
    r"(?:@[A-Za-z][A-Za-z0-9]*(?:[-_+.][A-Za-z][A-Za-z0-9]*)*:[0-9a-fA-F]{32,})?"
)
"""https://github.com/distribution/reference/blob/v0.6.0/regexp.go"""
_HOST = re.compile(r"([^\s:=]+)[:=](\[?[0-9a-fA-F:.]+\]?)")


def read_service(name: str, place: Place, root: Path, declared: dict[str, dict[str, Place]]) -> Service:
    """The service; what is wrong with it is noted."""
    if not _NAME.fullmatch(name):
        place.problem("is no name for a service", "use letters, digits, _ . and -")
    reading = Reading(name, root, declared)
    table = place.table()
    for key, value in table.items():
        if value.is_null:
            continue
        if (reader := _READERS.get(key)) is not None:
            reader(reading, value)
        elif key in BREAKS_OUT:
            if not (value.is_text and (value.text() or "false").lower() == "false"):
                value.unsupported(BREAKS_OUT[key], "take it out, if the task can do without")
        elif key not in _NO_MEANING:
            remedy = "take it out, if the task can do without"
            value.problem("is not done", remedy, "unsupported", whatever_it_is=True)
    for key in ("env_file", "environment"):  # what `environment` says wins, wherever it stands
        if (found := place.get(key)) is not None:
            _environment(reading, found, key)
    if (alias := place.get("container_name")) is not None and (text := alias.text()):
        _alias(reading, alias, text)
    for key in ("cap_drop", "cap_add"):
        if (found := place.get(key)) is not None:
            capabilities(reading, found, key)
    mounts, tmpfs = read_mounts(place, name, root, declared)
    if reading.values.get("read_only") and any(mount.volume is None for mount in mounts):
        place.unsupported("is read_only, and files must be copied in", "take read_only out")
    if not reading.is_main and place.get("build") is None:
        if (image := place.get("image")) is None:
            place.problem("has neither image nor build", "write one of them")
        elif image.is_text and not image.text():
            image.problem("is empty", "write the name of an image")
    return Service(
        name=name,
        line=place.line,
        aliases=tuple(dict.fromkeys(reading.aliases)),
        mounts=tuple(mounts),
        tmpfs=tmpfs,
        capabilities=tuple(sorted(reading.capabilities)),
        depends=tuple(reading.depends.values()),
        **reading.values,
    )


def _environment(reading: Reading, place: Place, key: str) -> None:
    env = reading.values.setdefault("env", {})
    pairs = env_file(reading.root, place) if key == "env_file" else place.pairs()
    for name, value in pairs.items():
        if value is None:  # the job's own, where it has one
            value = place.document.lookup.get(name)
        if not name or "=" in name or "\0" in name + (value or ""):
            said = f"has the variable {name[:60]!r}" if "\0" not in (value or "") else f"gives {name} a NUL"
            place.problem(f"{said}, which no program can be given", "correct its name or value")
        elif value is not None:
            env[name] = value


def _build(reading: Reading, place: Place) -> None:
    if place.is_text:
        context, table = place, {}
    else:
        table = place.table()
        context = table.get("context", place)
    values = reading.values
    folder = build_context(reading.root, context if context.is_text else None, place)
    values["context"] = folder or reading.root
    for key, value in table.items():
        if value.is_null or key == "context":
            continue
        if key == "dockerfile":
            values["dockerfile"] = value.text() or "Dockerfile"
            inside(
                reading.root, os.path.relpath(values["context"] / values["dockerfile"], reading.root), value
            )
        elif key == "target":
            values["target"] = value.text() or None
        elif key == "args":
            given = {name: text if text is not None else value.document.lookup.get(name)
                     for name, text in value.pairs().items()}  # fmt: skip
            values["build_args"] = {name: text for name, text in given.items() if text is not None}
        elif key not in {"tags", "labels", "cache_from", "cache_to", "pull", "no_cache", "platforms",
                         "provenance", "sbom", "shm_size"}:  # fmt: skip
            value.unsupported("is not done", "write it into the Dockerfile, if the task can do without")


def _argv(key: str) -> Callable[[Reading, Place], None]:
    def read(reading: Reading, place: Place) -> None:
        if place.is_text:
            try:
                argv = shlex.split(place.text() or "")
            except ValueError as error:
                place.problem(f"cannot be split into words: {error}", "correct its quotes")
                return
        else:
            argv = place.texts()
        if not reading.is_main:
            reading.values[key] = tuple(argv)
        elif argv and not _IDLE.fullmatch(" ".join(argv).strip()):
            place.unsupported(
                f"({shlex.join(argv)[:60]}) is not run: the first process of main only waits",
                "start it in a service of its own, or leave it to the agent",
            )

    return read


def _depends(reading: Reading, place: Place) -> None:
    if place.is_list:
        for item in place.items():
            if name := item.text():
                reading.depends[name] = Dependency(name)
        return
    for name, how in place.table().items():
        condition: Condition = "service_started"
        if (wanted := how.get("condition")) is not None:
            text = wanted.text()
            if text in get_args(Condition):
                condition = text  # type: ignore[assignment]
            else:
                wanted.problem(f"is {text}", "write one of " + ", ".join(get_args(Condition)))
        required = how.get("required")
        reading.depends[name] = Dependency(name, condition, required is None or required.flag())


def _links(reading: Reading, place: Place) -> None:
    for item in place.items():
        name, _, alias = (item.text() or "").partition(":")
        reading.depends.setdefault(name, Dependency(name))
        if alias and alias != name:
            item.unsupported(f"calls {name} by another name", f"give {name} the alias {alias}")


def _healthcheck(reading: Reading, place: Place) -> None:
    disabled = place.get("disable")
    test = place.get("test")
    argv: tuple[str, ...] | None = None
    if test is not None and test.is_text:
        argv = ("/bin/sh", "-c", test.text() or "")
    elif test is not None:
        words = test.texts()
        kind = words[0] if words else ""
        if kind == "NONE":
            argv = ()
        elif kind == "CMD":
            argv = tuple(words[1:])
        elif kind == "CMD-SHELL":
            argv = ("/bin/sh", "-c", " ".join(words[1:]))
        else:
            test.problem(f"begins with {kind!r}", 'begin it with "CMD", "CMD-SHELL" or "NONE"')
    if disabled is not None and disabled.flag():
        argv = ()
    times = {
        key: found.seconds() if (found := place.get(key)) is not None else None
        for key in ("interval", "timeout", "start_period")
    }
    retries = place.get("retries")
    number = retries.number() if retries is not None else None
    reading.values["check"] = Check(
        argv,
        times["interval"],
        times["timeout"],
        times["start_period"],
        None if number is None else int(number),
    )


def _networks(reading: Reading, place: Place) -> None:
    names: list[str] = []
    if place.is_list:
        names = place.texts()
    else:
        for name, how in place.table().items():
            names.append(name)
            for key, value in how.table().items():
                if key == "aliases":
                    for item in [value] if value.is_text else value.items():
                        _alias(reading, item, item.text() or "")
                elif key not in {"priority", "gw_priority", "interface_name"}:
                    value.unsupported("asks for an address of its own", "reach services by their names")
    for name in names:
        if name != "default" and name not in reading.declared["networks"]:
            place.problem(f"names {name}, which is not declared", f"write {name} under networks")
    reading.values["networks"] = tuple(names)


def _network_mode(reading: Reading, place: Place) -> None:
    mode = place.text() or ""
    if reading.name == MAIN and mode != "host":
        # Its network is the rollout's: this would promise less than it has.
        place.unsupported(f"is {mode}", 'take it out: task.toml\'s network_mode = "no-network" is for that')
    elif mode == "none" or (mode.startswith("service:") and mode != f"service:{reading.name}"):
        reading.values["network"] = mode
        if mode != "none":
            other = mode.removeprefix("service:")
            reading.depends.setdefault(other, Dependency(other))
    elif mode == "host":
        place.unsupported("shares the host's network", "take it out: services reach each other by name")
    else:
        place.unsupported(f"is {mode}", "take it out: services reach each other by name")


def _extra_hosts(reading: Reading, place: Place) -> None:
    pairs = place.pairs() if place.is_table else None
    entries = [f"{name}={address}" for name, address in pairs.items()] if pairs is not None else place.texts()
    hosts = []
    for entry in entries:
        match = _HOST.fullmatch(entry)
        if match is None:
            place.unsupported(f"({entry}) names no fixed address", "sandboxes cannot reach the host")
        else:
            hosts.append(f"{match[1]}:{match[2].strip('[]')}")
    reading.values["extra_hosts"] = tuple(hosts)


def _restart(reading: Reading, place: Place) -> None:
    text = place.text() or "no"
    if not _RESTARTS.fullmatch(text):
        place.problem(f"is {text}", "write no, always, unless-stopped or on-failure")
    reading.values["restart"] = "no" if reading.is_main else text


def _image(reading: Reading, place: Place) -> None:
    text = place.text() or None
    if text is not None and not (len(text) <= 512 and _IMAGE.fullmatch(text)):
        place.problem(f"({text[:60]}) is no name of an image", "write it as in docker pull, in small letters")
    reading.values["image"] = text


def _hostname(reading: Reading, place: Place) -> None:
    text = place.text() or None
    if text is not None and not _HOSTNAME.fullmatch(text):
        place.problem(f"({text[:60]}) is no hostname", "use at most 64 letters, digits, . and -")
    reading.values["hostname"] = text


def _alias(reading: Reading, place: Place, text: str) -> None:
    if not _NAME.fullmatch(text):
        place.problem(f"({text[:60]}) is no name for a container", "use letters, digits, _ . and -")
    reading.aliases.append(text)


def _text(key: str) -> Callable[[Reading, Place], None]:
    def read(reading: Reading, place: Place) -> None:
        reading.values[key] = place.text() or None

    return read


def _flag(key: str) -> Callable[[Reading, Place], None]:
    def read(reading: Reading, place: Place) -> None:
        reading.values[key] = place.flag()

    return read


_READERS: dict[str, Callable[[Reading, Place], None]] = {
    **LIMITS,
    "build": _build,
    "command": _argv("command"),
    "depends_on": _depends,
    "entrypoint": _argv("entrypoint"),
    "extra_hosts": _extra_hosts,
    "healthcheck": _healthcheck,
    "hostname": _hostname,
    "image": _image,
    "init": _flag("init"),
    "links": _links,
    "network_mode": _network_mode,
    "networks": _networks,
    "restart": _restart,
    "stdin_open": _flag("stdin_open"),
    "stop_signal": _text("stop_signal"),
    "tty": _flag("tty"),
    "user": _text("user"),
    "working_dir": _text("workdir"),
}
