"""Error rates on tasks with the defects of arXiv 2610.02405, on Harbor 0.26 and here.

The set, drawn by `--seed`: 9.7% of the tasks have a set-up step that fails; 19% do not parse on an engine without
heredocs, and of those 74% are heredocs in the Dockerfile (the 74% is the paper's, the 19% this benchmark's); the rest
is sound. 64 are run at once against a private engine with Docker's default address pools, which have some thirty
networks: in the paper 9.1% of trials died of that. Every task has a verifier that also looks at what its heredoc has
written, so that an image which only seems to be built does not pass.

On Harbor as on Rollcage each task is one rollout by the oracle. An error rate is errors of a kind of all rollouts.
What no harness can run (a set-up step that fails, a Dockerfile that nobody can parse) is an error on both sides; what
differs is its name, and that Rollcage spends no attempt on it.

Needs root, dockerd, iptables, and Python 3.12 for Harbor (see harbor.py).

    python benchmarks/paper_table4.py [--tasks 100] [--concurrency 64] [--seed 7] [--python python3.12]
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from oracle_task import IMAGE, TEST, write_task
from private_engine import enter_network_namespace, private_engine
from trials import Harbor, Ran, Trial, run_rollcage

BUILD_FAILS = 0.097
"""The paper's share of trials that died of their image's build."""
PARSE_FAILS = 0.19
HEREDOC_OF_PARSE = 0.74
"""The paper's share of heredocs in what did not parse."""

FROM = f"FROM {IMAGE}\nENV TASK={{number}}\nWORKDIR /app\n"
SOUND = ("", "RUN mkdir -p /srv/data && echo ready > /srv/data/state\n", "COPY Dockerfile /app/made-from\n")
HEREDOCS = (
    "RUN <<EOF\nset -e\nmkdir -p /srv\necho port=8080 > /srv/conf\necho user=app >> /srv/conf\nEOF\n",
    "COPY <<'EOF' /srv/conf\nport=8080\nuser=app\nEOF\n",
    "RUN mkdir -p /srv && cat <<'EOF' > /srv/conf\nport=8080\nuser=app\nEOF\n",
    "RUN mkdir -p /srv\nRUN cat > /srv/conf <<-EOF\n\tport=8080\n\tuser=app\nEOF\n",
)
HEREDOC_TEST = TEST.replace("= 42 ]", '= 42 ] && [ "$(cat /srv/conf)" = "port=8080\nuser=app" ]')
UNPARSABLE = ("apt-get install -y curl\n", "echo ready > /srv/state\n", "COPY\n")
FAILING = (
    "RUN mkdir /srv/x && exit 7\n",
    "RUN cp /no/such/file /srv\n",
    "RUN useradd --no-such-option app\n",
)

EXAMPLE_CHARS = 300

KINDS = {"sound": SOUND, "heredoc": HEREDOCS, "does not parse": UNPARSABLE, "set-up step fails": FAILING}

ERRORS = {
    "network pool": (
        r"address pool|fully subnetted|available predefined network",
        ("network_pool", "network_setup"),
    ),
    "Dockerfile parse": (
        r"dockerfile parse error|unknown instruction|requires at least",
        ("dockerfile_parse",),
    ),
    "image build": (
        r"did not complete successfully|failed to solve|returned a non-zero code",
        ("image_build",),
    ),
}
"""An error's kind: how Harbor's message tells it, which of `RuntimeError` alone it cannot be told, and our classes."""


def write_tasks(root: Path, count: int, seed: int) -> dict[str, str]:
    """Write `count` tasks, the same for the same seed; the kind of each by its name."""
    draw = random.Random(seed)
    unparsed = round(count * PARSE_FAILS)
    shares = {
        "heredoc": round(unparsed * HEREDOC_OF_PARSE),
        "set-up step fails": round(count * BUILD_FAILS),
    }
    shares["does not parse"] = unparsed - shares["heredoc"]
    kinds = [kind for kind, number in shares.items() for _ in range(number)]
    kinds += ["sound"] * (count - len(kinds))
    draw.shuffle(kinds)
    for number, kind in enumerate(kinds):
        dockerfile = FROM.format(number=number) + draw.choice(KINDS[kind])
        files = {"environment/Dockerfile": dockerfile}
        if kind == "heredoc":
            files["tests/test.sh"] = HEREDOC_TEST
        write_task(root / f"task-{number:03}", network_mode="public", files=files)
    return {f"task-{number:03}": kind for number, kind in enumerate(kinds)}


def error_of(trial: Trial, task: str) -> str | None:
    """The kind of error of a trial of a `task` of this kind; None where its reward counts. A heredoc that was not
    understood is one, whether the engine said so or built something else."""
    kind = None
    if trial.error is not None:
        matches = (
            kind
            for kind, (pattern, classes) in ERRORS.items()
            if trial.error in classes or re.search(pattern, trial.message, re.I)
        )
        kind = next(matches, "other")
    misread = kind == "Dockerfile parse" or (kind is None and trial.reward != 1.0)
    return "heredoc" if task == "heredoc" and misread else kind


def show(sides: dict[str, Ran], kinds: dict[str, str]) -> None:
    """Print both sides' rates by the kind of error and by the kind of task."""
    errors = {
        name: [(error_of(trial, kinds[_short(trial.task)]), trial) for trial in ran.trials]
        for name, ran in sides.items()
    }
    counted = {name: Counter(error for error, _ in pairs) for name, pairs in errors.items()}
    print(f"\n{'error, of all rollouts':24}" + "".join(f"{name:>16}" for name in sides))
    for error in ("heredoc", *ERRORS, "other"):
        rates = (100 * counted[name][error] / len(kinds) for name in sides)
        print(f"{error:24}" + "".join(f"{rate:15.1f}%" for rate in rates))
    print(f"\n{'passed, of tasks':24}" + "".join(f"{name:>16}" for name in sides))
    for kind, number in sorted(Counter(kinds.values()).items()):
        passed = (
            sum(t.reward == 1.0 and not t.error and kinds[_short(t.task)] == kind for t in ran.trials)
            for ran in sides.values()
        )
        print(f"{kind + f' ({number})':24}" + "".join(f"{one:16}" for one in passed))
    print()
    for name, ran in sides.items():
        named = Counter(trial.error for trial in ran.trials if trial.error)
        for error, message in {error: trial.message for error, trial in errors[name] if error}.items():
            print(f"{name}: {error}, for instance: ...{' '.join(message.split())[-EXAMPLE_CHARS:]}")
        broken = [t for t in ran.trials if kinds[_short(t.task)] in ("does not parse", "set-up step fails")]
        spent = sum(trial.attempts for trial in broken)
        print(
            f"{name}: {len(ran.trials)} rollouts ended in {ran.whole_sec:.0f} s; errors by its own names: {dict(named)}"
        )
        print(
            f"{name}: {len(broken)} rollouts of tasks that cannot be built took {spent} attempts", flush=True
        )


def _short(task: str) -> str:
    return task.rsplit("/", 1)[-1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=20.0, help="each side is interrupted after so many")
    parser.add_argument("--python", help="a Python 3.12 or newer for Harbor; found where not given")
    options = parser.parse_args()
    harbor = Harbor.installed(options.python)  # out here, where an index can be reached
    enter_network_namespace()
    root = Path(tempfile.mkdtemp(prefix="rollcage-bench-"))
    try:
        kinds = write_tasks(root / "tasks", options.tasks, options.seed)
        print(f"{options.tasks} tasks (seed {options.seed}): {dict(sorted(Counter(kinds.values()).items()))}")
        with private_engine(root, IMAGE) as address:
            how: dict[str, Any] = {
                "samples": 1,
                "concurrency": options.concurrency,
                "docker_host": address,
                "timeout_sec": options.minutes * 60,
            }
            ours = run_rollcage(root / "tasks", root / "rollcage", **how)
            theirs = harbor.run(root / "tasks", root / "harbor", **how)
            show({"rollcage": ours, "harbor 0.26": theirs}, kinds)
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
