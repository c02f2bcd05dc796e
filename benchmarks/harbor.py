"""Oracle rollouts a second, against Harbor 0.26 with the same tasks, concurrency and engine.

Harbor runs as shipped, and tuned: with `init: true` and `stop_grace_period: 1s` in a compose file of its own, so
that no container takes ten seconds to stop. Both sides are started by their command line. Rates are over the
rollouts: from the start of the first until the last one's container is gone, so that neither side's own start (Ray's
is a few seconds, Harbor's imports are) is in them; the whole of each command is printed beside it. Every rollout of
both sides must have reward 1. Every repeat runs all three, one after the other; medians are compared.

With the defaults it takes about a quarter of an hour. Harbor needs Python 3.12 and is installed once, into a virtual
environment of its own under $ROLLCAGE_CACHE.

    python benchmarks/harbor.py [--tasks 6] [--samples 8] [--concurrency 8] [--repeats 3] [--python python3.12]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import docker
from docker.errors import NotFound
from oracle_task import IMAGE, write_task
from trials import Harbor, Ran, run_rollcage

TUNED = "services:\n  main:\n    init: true\n    stop_grace_period: 1s\n"
TARGETS = {"as shipped": 15.0, "tuned": 5.0}


def remove_images(label: str) -> None:
    """Remove the images that either side has built: Rollcage keeps them as a cache, Harbor leaves untagged ones."""
    api = docker.from_env().api
    for image in api.images(filters={"label": label}):
        try:
            api.remove_image(image["Id"], force=True)
        except NotFound:
            continue  # it went with another, whose parent it was
    api.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=6)
    parser.add_argument("--samples", type=int, default=8, help="rollouts of each task")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--python", help="a Python 3.12 or newer for Harbor; found where not given")
    options = parser.parse_args()
    harbor = Harbor.installed(options.python)
    rollouts = options.tasks * options.samples
    how = {"samples": options.samples, "concurrency": options.concurrency}
    with tempfile.TemporaryDirectory(prefix="rollcage-bench-") as scratch, ExitStack() as cleaning:
        root = Path(scratch)
        tasks = root / "tasks"
        label = f"rollcage.bench={root.name}"
        cleaning.callback(remove_images, label)
        for number in range(options.tasks):
            # The number is in the image, so that each task has one of its own, as tasks do.
            dockerfile = f"FROM {IMAGE}\nLABEL {label}\nENV TASK={number}\nWORKDIR /app\n"
            task = tasks / f"answer-{number}"
            write_task(task, network_mode="public", files={"environment/Dockerfile": dockerfile})
        tuned = root / "tuned.yaml"
        tuned.write_text(TUNED)
        sides: dict[str, Callable[[Path], Ran]] = {
            "rollcage": lambda run: run_rollcage(tasks, run, **how),
            "tuned": lambda run: harbor.run(tasks, run, compose=tuned, **how),
            "as shipped": lambda run: harbor.run(tasks, run, **how),
        }
        ran: dict[str, list[Ran]] = {name: [] for name in sides}
        print(f"{rollouts} rollouts of {options.tasks} tasks with internet, {options.concurrency} at once")
        for repeat in range(options.repeats):
            for name, side in sides.items():
                one = side(root / f"{name.replace(' ', '-')}-{repeat}").all_passed(rollouts)
                ran[name].append(one)
                print(
                    f"  run {repeat + 1}: {name:10}  {one.rate:5.2f} rollouts/s  whole {one.whole_sec:.0f} s",
                    flush=True,
                )
    rates = {name: statistics.median(one.rate for one in runs) for name, runs in ran.items()}
    wholes = {name: statistics.median(one.whole_sec for one in runs) for name, runs in ran.items()}
    print("harbor 0.26   rollcage/s  harbor/s  ratio  target   whole: rollcage s  harbor s  ratio")
    for name, target in TARGETS.items():
        print(
            f"{name:12}  {rates['rollcage']:10.2f}  {rates[name]:8.2f}  {rates['rollcage'] / rates[name]:5.1f}"
            f"  {target:6.0f}   {wholes['rollcage']:17.1f}  {wholes[name]:8.1f}"
            f"  {wholes[name] / wholes['rollcage']:5.1f}"
        )


if __name__ == "__main__":
    main()
