"""How long the report's page takes to write, and to open in a headless Chromium. Reach: 10,000 rollouts in 2 s.

    python benchmarks/report_html.py [--rollouts 10000] [--keep DIRECTORY] [--shots DIRECTORY]

The run is simulated: tasks of every difficulty, eight samples each, ten turns of some hundred tokens with commands and
their outputs, infra errors and retries. "Ready" is when the page's list of rollouts can be used, by the page's own
clock from the start of its loading, and "read" when the last of its rollouts is there; "opened" is how long one takes
to be shown. Where others keep the machine busy, look at the processor time of the page's process. `--shots` has
pictures of it taken.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from rollcage.metrics.page import write_page
from rollcage.rollout.arrow import Location
from rollcage.rollout.outcome import BY_NAME, Evidence, Outcome
from rollcage.rollout.rows import attempts_batch, rollouts_batch
from rollcage.rollout.trajectory import (
    Attempt,
    CommandRecord,
    Message,
    Phase,
    Reward,
    Segment,
    Trajectory,
    Turn,
)

sys.path.append(str(Path(__file__).parent.parent / "tests" / "metrics"))

from browser import Browser, browser

SAMPLES, TURNS, PROMPT, ANSWER = 8, 10, 300, 100
ROUNDS = 5
START = 1.7e9
WORDS = re.split(
    " ",
    "error: expected file path src main test total modified drwxr-xr-x root 4096 Nov import return def class self "
    "assert passed failed warning in 0.03s 1 2 17 42 /usr/lib/python3 build target link cargo make gcc -O2 -Wall "
    "int char * const struct undefined reference to main.o tests/test_outputs.py line AssertionError None True",
)
SAYINGS = (
    "Let me look at the files first.", "The test expects another format; I will read it.", "That failed, so try again:",
    "Now build it and run the tests.", "The output looks right. One more check before I finish.",
)  # fmt: skip
COMMANDS = ("ls -la", "cat tests/test_outputs.py", "grep -rn 'expected' src | head -40", "make -j2 2>&1 | tail -30",
            "python3 -m pytest -q", "sed -n 1,80p src/main.c", "echo done > /app/result.txt")  # fmt: skip
INFRA = {
    "network_pool": ("all predefined address pools have been fully subnetted", "engine"),
    "image_pull": ("toomanyrequests: You have reached your pull rate limit", "registry"),
    "container_lost": (
        "the container ended with exit code 137 and it was not its own doing",
        "container state",
    ),
    "policy_timeout": ("no answer within 600 s", "policy server"),
}


def lines(chance: random.Random, count: int) -> str:
    """So many lines of what a terminal prints."""
    return "\n".join(" ".join(chance.choices(WORDS, k=chance.randint(3, 11))) for _ in range(count))


def a_trajectory(chance: random.Random) -> Trajectory:
    found, segment = Trajectory(), Segment()
    numbers = np.random.default_rng(chance.getrandbits(32))
    prompt = "You are an agent at a terminal. Solve the task below; say `done` when you are.\n" + lines(
        chance, 12
    )
    found.messages.append(Message("user", prompt))
    for index in range(chance.randint(3, TURNS * 2 - 3)):
        segment.ids += (50_000 * numbers.random(PROMPT) ** 3).astype(int).tolist()
        segment.loss_mask += [0] * PROMPT
        segment.logprobs += [float("nan")] * PROMPT
        before = len(segment.ids)
        segment.ids += (50_000 * numbers.random(ANSWER) ** 3).astype(int).tolist()
        segment.loss_mask += [1] * ANSWER
        segment.logprobs += (-numbers.exponential(0.5, ANSWER)).tolist()
        failed = chance.random() < 0.2
        command = CommandRecord(
            chance.choice(COMMANDS), int(failed), lines(chance, chance.randint(2, 30)),
            "\x1b[31m" + lines(chance, 2) + "\x1b[0m" if failed else "", chance.expovariate(2),
        )  # fmt: skip
        text = f"{chance.choice(SAYINGS)}\n\n```bash\n{command.command}\n```"
        found.messages += [Message("assistant", text, index), Message("user", command.stdout, index)]
        found.turns.append(
            Turn(index, text, "stop", 0, before, ANSWER, "small", index // 6, index // 6, 0.02, 0.9, before, ANSWER,
                 cached_tokens=before - PROMPT, commands=[command])
        )  # fmt: skip
    found.segments.append(segment)
    return found


def an_end(chance: random.Random, easy: float) -> tuple[Outcome, str | None]:
    if chance.random() < 0.03:
        return Outcome.INVALID, chance.choice(list(INFRA))
    if chance.random() < easy:
        return Outcome.PASSED, None
    return Outcome.FAILED, chance.choice(
        (None, None, None, "turn_limit", "agent_timeout", "context_overflow")
    )


def an_attempt(task: str, sample: int, number: int, end: tuple[Outcome, str | None], at: float,
               chance: random.Random) -> Attempt:  # fmt: skip
    outcome, error = end
    message, said_by = INFRA.get(error or "", ("the agent's limit was met", "rollcage"))
    valid = outcome is not Outcome.INVALID
    trajectory = a_trajectory(chance)
    took = 2 * len(trajectory.turns) + chance.expovariate(0.2)
    passed = outcome is Outcome.PASSED
    tests = tuple(f"tests/test_outputs.py::test_{name}" for name in ("exists", "format", "values"))
    value = 1.0 if passed else round(chance.random() ** 3 * 0.9, 2)
    printed = f"collected 3 items\n\n{lines(chance, 6)}\n\x1b[32m2 passed\x1b[0m, 1 failed"
    reward = Reward(value, {"reward": value}, output_tail=printed, test_ids=tests)
    return Attempt(
        f"{task}-{sample}-{number}", "simulated", task, "ab" * 32, sample, number, "bash", "small",
        f"host-{sample % 4}", outcome, error_class=error, stage=BY_NAME[error].stages[0] if error else None,
        evidence=Evidence(message, said_by, seconds=took, log_tail=lines(chance, 3)) if error else None,
        reward=reward if valid else None, started_at=at, ended_at=at + took,
        phases={Phase.QUEUE: chance.random(), Phase.IMAGE: 0.4, Phase.START: 0.2 + 0.2 * chance.random(),
                Phase.AGENT: took - 3, Phase.VERIFY: 1 + chance.random(), Phase.TEARDOWN: 0.1},
        trajectory=trajectory,
    )  # fmt: skip


def simulate(target: Path, rollouts: int, seed: int = 0) -> None:
    """A finished run of so many rollouts."""
    chance, run = random.Random(seed), Location(target)
    run.write_json("job.json", {"job": "simulated"})
    families = (
        "compile-sqlite",
        "fix-git",
        "parse-logs",
        "train-model",
        "crack-hash",
        "make-plot",
        "tune-nginx",
    )
    groups, attempts = [], []
    for number in range(rollouts // SAMPLES):
        task, easy = f"{chance.choice(families)}-{number:04d}", min(1.0, max(0.0, chance.gauss(0.45, 0.45)))
        group = []
        for sample in range(SAMPLES):
            at, tries = START + number * 2.5 + chance.random() * 60, 1
            if chance.random() < 0.02:
                attempts.append(an_attempt(task, sample, 0, (Outcome.INVALID, "network_pool"), at, chance))
                tries = 2
            last = an_attempt(task, sample, tries - 1, an_end(chance, easy), at, chance)
            attempts.append(last)
            group.append((last, tries, SAMPLES))
        groups.append(rollouts_batch(group))
        if len(groups) == 32:
            run.write_shard("rollouts", groups)
            run.write_shard("attempts", [attempts_batch(attempts)])
            groups, attempts = [], []
    if groups:
        run.write_shard("rollouts", groups)
        run.write_shard("attempts", [attempts_batch(attempts)])
    run.write_json("summary.json", {"wall_seconds": 2.5 * rollouts / SAMPLES + 60})


def measure(page: Path, scratch: Path, shots: Path | None) -> dict[str, list[float]]:
    """Seconds until the page is ready, until all of it is read, of the processor until then, and that a rollout takes
    to open, in several rounds."""
    took: dict[str, list[float]] = {"ready": [], "read": [], "busy": [], "opened": []}
    for round_ in range(ROUNDS):
        with browser(scratch / f"profile{round_}") as tab:
            tab.window(1280, 900)
            tab.call("Performance.enable")
            tab.open(page.as_uri())
            took["ready"].append(float(tab.run("document.documentElement.dataset.ready")) / 1000)
            whole = tab.run("performance.getEntriesByType('navigation')[0].domContentLoadedEventStart")
            took["read"].append(float(whole) / 1000)
            metrics = {one["name"]: one["value"] for one in tab.call("Performance.getMetrics")["metrics"]}
            took["busy"].append(metrics["ProcessTime"])
            start = time.perf_counter()
            tab.run("document.getElementById('row3').click()")
            tab.until("document.querySelector('#detail .title')")
            took["opened"].append(time.perf_counter() - start)
            if shots and round_ == 0:
                take(tab, shots)
    return took


def take(tab: Browser, shots: Path) -> None:
    """Pictures of the page's parts, light and dark, wide and narrow."""
    for name, width, height, dark, mobile in (
        ("light", 1280, 900, False, False), ("dark", 1280, 900, True, False), ("phone", 390, 844, False, True),
        ("phone-dark", 390, 844, True, True),
    ):  # fmt: skip
        tab.window(width, height, dark=dark, mobile=mobile)
        for part in ("results", "tasks", "errors", "rollouts"):
            tab.run(
                f"document.documentElement.style.scrollBehavior='auto';document.getElementById('{part}').scrollIntoView()"
            )
            tab.run("new Promise(requestAnimationFrame)")
            (shots / f"{name}-{part}.png").write_bytes(tab.screenshot())
    tab.window(1280, 900)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument(
        "--keep", type=Path, help="keep the run and the page here, and use the run that is here"
    )
    parser.add_argument("--shots", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = options.keep or Path(scratch)
        run, page = place / "run", place / "report.html"
        if options.shots:
            options.shots.mkdir(parents=True, exist_ok=True)
        if not run.exists():
            simulate(run, options.rollouts)
        start = time.perf_counter()
        report = write_page(run, page)
        print(f"written: {report['rollouts']:,} rollouts, {report['completion_tokens']:,} sampled tokens, "
              f"{page.stat().st_size / 2**20:.1f} MiB in {time.perf_counter() - start:.1f} s")  # fmt: skip
        took = measure(page, Path(scratch), options.shots)
        for name, said in (("ready", "ready to use (reach: 2 s)"), ("read", "read to its end"),
                           ("busy", "processor time until then"), ("opened", "a rollout opened")):  # fmt: skip
            print(f"{said}: median {statistics.median(took[name]):.2f} s, worst {max(took[name]):.2f} s")


if __name__ == "__main__":
    main()
