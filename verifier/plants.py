"""What an agent may have left for the verifier to run, found in the list of what differs from the image.

The rule: **what the image had, the verifier gets from the image; what the agent added stays**, since tasks
install things honestly, except in places where no honest work needs to put anything:

- put back: shells, interpreters and common tools of the image that were changed or removed; Python's standard
  library; pytest and what it is made of; `sitecustomize`, start-up lines of `.pth` files, `/etc/ld.so.preload`;
- taken away: programs added in front of one of the image's own tools on the PATH; an added `sitecustomize`,
  `.pth` with code, `pyvenv.cfg` of a system interpreter; parts of pytest, and modules that its start imports, in
  the working directory or without a distribution; pytest's configuration in `/`; `$HOME/.local/bin/env`;
- switched off: pytest plugins of distributions that were added and that the tests never name.

Pure functions over paths; `verify.py` asks the sandbox and acts.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from posixpath import basename, dirname

from rollcage.rollout.sandbox.base import Change

PRELOAD = "/etc/ld.so.preload"

_TOOL_NAMES = """
    sh bash dash ash busybox env python python2 python3 pytest py.test uv uvx curl wget apt apt-get dpkg
    git perl jq openssl cat head tail tac tee ls cp mv rm rmdir ln mkdir mktemp touch chmod chown stat
    readlink realpath basename dirname pwd test [ expr echo printf true false yes seq date sleep timeout
    wc sort uniq cut tr paste comm join od xxd hexdump base64 md5sum sha1sum sha256sum sha512sum cksum sum
    dd df du id whoami nproc uname grep egrep fgrep sed awk gawk mawk find xargs diff cmp tar gzip gunzip
    zcat xz unzip bc kill pkill pgrep ps which file ldd nc ss netstat su sudo runuser setpriv
"""
TOOLS = frozenset(_TOOL_NAMES.split())
"""Programs that test scripts call. Not pip: tasks have the agent repair it, and it can only lose a reward."""

SYSTEM_BIN = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
_PACKAGED_BIN = frozenset(SYSTEM_BIN[2:])
"""Where distributions put programs: what was added there is not taken away."""

_PYTEST = frozenset(
    ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "exceptiongroup", "tomli", "pygments")
)
_START_OF_PYTEST = frozenset(
    ("argparse", "ast", "contextlib", "dataclasses", "functools", "importlib", "inspect", "io", "json", "linecache",
     "logging", "os", "pathlib", "pprint", "re", "shlex", "shutil", "site", "subprocess", "sys", "tempfile",
     "textwrap", "tokenize", "traceback", "types", "typing", "unittest", "warnings")
)  # fmt: skip
"""Modules of the standard library that any Python program started in the working directory would trip over."""

_PYTEST_CONFIG = frozenset(
    "/" + name
    for name in ("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "pyproject.toml",
                 "tox.ini", "setup.cfg", "setup.py")
)  # fmt: skip

_PYTHON_NAME = re.compile(r"python\d(\.\d+)?")
_STDLIB = re.compile(r"/lib(?:64)?/python3(?:\.\d+)?(?:$|/(?!(?:site|dist)-packages(?:$|/))(?P<top>[^/]+))")
_SITE = re.compile(r"^(?P<site>.*/(?:site|dist)-packages)/(?P<top>[^/]+)")
_CUSTOMIZE = re.compile(r"/(?:site|user)customize(?:\.[^/]+)?(?:/|$)")
_SITE_DIR = re.compile(r"/(?:(?:site|dist)-packages|python3(?:\.\d+)?)/")
_VENV_CONFIG = frozenset(f"{place}/pyvenv.cfg" for place in (*SYSTEM_BIN, "/usr", "/usr/local", ""))
_ENTRY_POINTS = re.compile(r"/[^/]+\.(?:dist|egg)-info/entry_points\.txt$")

_HONEST_PTH = (
    re.compile(r"import os; var = 'SETUPTOOLS_USE_DISTUTILS'; enabled = os\.environ\.get\(var, '(?:local|stdlib)'\)"
               r" == 'local'; enabled and __import__\('_distutils_hack'\);?"),
    re.compile(r"import (__editable___\w+_finder); \1\.install\(\)"),
    re.compile(r"import _virtualenv"),
)  # fmt: skip


@dataclass(frozen=True)
class Plants:
    """What is to be done before the verifier runs. All are absolute paths.

    `restore`: from the image. `remove`: files. `shadows` maps an added program to the places where, if the
    image has one of the same name there, it is the image's that counts. `startup`: `.pth` files that count only
    if they hold code, with whether the image has one at that path. `plugins`: `entry_points.txt` to be read.
    """

    restore: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    shadows: tuple[tuple[str, tuple[str, ...]], ...] = ()
    startup: tuple[tuple[str, bool], ...] = ()
    plugins: tuple[str, ...] = ()


def find_plants(changes: Iterable[Change], *, workdir: str, path: Sequence[str], home: str) -> Plants:
    """Sort what differs from the image. `path` are the directories of the verifier's PATH, in order."""
    kinds = {change.path: change.kind for change in changes}
    added = {name for name, kind in kinds.items() if kind == "added"}
    owned_sites = {
        match["site"] for name in added if (match := _SITE.match(name)) and match["top"].startswith("pytest-")
    }
    bins = dict.fromkeys((*path, *SYSTEM_BIN))
    restore, remove, shadows, startup, plugins = [], [], [], [], []
    for name, kind in kinds.items():
        if name.endswith(".pth") and kind != "deleted" and _SITE_DIR.search(name):
            startup.append((name, kind == "modified"))
        elif kind == "added":
            if _ENTRY_POINTS.search(name):
                plugins.append(name)
            elif _never_honest(name, workdir, home, owned_sites):
                remove.append(name)
            elif dirname(name) in bins and dirname(name) not in _PACKAGED_BIN and _is_tool(name):
                shadows.append((name, _elsewhere(name, bins, added)))
        elif _the_images_own(name, bins):
            restore.append(name)
    return Plants(
        _without_children(restore),
        tuple(remove),
        tuple(s for s in shadows if s[1]),
        tuple(startup),
        tuple(plugins),
    )


def runs_code(pth: str) -> bool:
    """Whether a `.pth` file's text runs code at the start of Python, beyond what installers are known to write."""
    lines = [line.strip() for line in pth.splitlines() if line.startswith(("import ", "import\t"))]
    return any(not any(known.fullmatch(line) for known in _HONEST_PTH) for line in lines)


def plugins_to_switch_off(entry_points: Mapping[str, str], tests: str) -> tuple[str, ...]:
    """Names of the pytest plugins in these `entry_points.txt` (path to text) that `tests`, the text of the
    tests, neither names nor asks for by their distribution."""
    names = []
    for path, text in entry_points.items():
        distribution = re.split(r"-\d", basename(dirname(path)), maxsplit=1)[0]
        for name in _pytest11(text):
            wanted = (_spelled(name), _spelled(distribution))
            if not any(word in _spelled(tests) for word in wanted):
                names.append(name)
    return tuple(dict.fromkeys(names))


def _the_images_own(path: str, bins: Container[str]) -> bool:
    if path == PRELOAD or _CUSTOMIZE.search(path) or path in _PYTEST_CONFIG or path in bins:
        return True
    if dirname(path) in bins and _is_tool(path):
        return True
    if (site := _SITE.match(path)) is not None:
        return re.split(r"[-.]", site["top"])[0] in _PYTEST or site["top"].startswith("pytest_")
    return _STDLIB.search(path) is not None


def _never_honest(path: str, workdir: str, home: str, owned_sites: set[str]) -> bool:
    if (
        path in (PRELOAD, f"{home.rstrip('/')}/.local/bin/env")
        or path in _VENV_CONFIG
        or _CUSTOMIZE.search(path)
    ):
        return True
    if path in _PYTEST_CONFIG:
        return workdir != "/"
    if path.startswith(f"{workdir.rstrip('/')}/"):
        module = _module(path[len(workdir.rstrip("/")) + 1 :])
        if module in _PYTEST or (module in _START_OF_PYTEST and path.count("/") == workdir.count("/") + 1):
            return True
    if (site := _SITE.match(path)) is not None:
        return _module(site["top"]) in _PYTEST and site["site"] not in owned_sites
    stdlib = _STDLIB.search(path)
    return stdlib is not None and _module(stdlib["top"] or "") in _PYTEST


def _module(below: str) -> str:
    """The Python module that a file at this relative path belongs to; empty where it is none."""
    top, _, rest = below.partition("/")
    if rest:
        return top
    return top.partition(".")[0] if top.endswith((".py", ".so", ".pyc")) else ""


def _is_tool(path: str) -> bool:
    return basename(path) in TOOLS or _PYTHON_NAME.fullmatch(basename(path)) is not None


def _elsewhere(program: str, bins: Iterable[str], added: set[str]) -> tuple[str, ...]:
    """Other places on the PATH where a program of this name would be the image's. /bin is often /usr/bin."""
    name = basename(program)
    same = {"/bin": "/usr/bin", "/sbin": "/usr/sbin"}
    aliases = {**same, **{new: old for old, new in same.items()}}
    return tuple(
        f"{place}/{name}"
        for place in bins
        if f"{place}/{name}" not in added | {program} and f"{aliases.get(place)}/{name}" not in added
    )


def _without_children(paths: Sequence[str]) -> tuple[str, ...]:
    """Without the directories that are listed only because something in them is."""
    parents = {dirname(path) for path in paths}
    return tuple(path for path in paths if path not in parents)


def _pytest11(text: str) -> list[str]:
    names, inside = [], False
    for line in text.splitlines():
        if line.strip().startswith("["):
            inside = line.strip() == "[pytest11]"
        elif inside and "=" in line:
            names.append(line.partition("=")[0].strip())
    return [name for name in names if re.fullmatch(r"[\w.-]+", name)]


def _spelled(text: str) -> str:
    return re.sub(r"[-_.]+", "-", text).lower()
