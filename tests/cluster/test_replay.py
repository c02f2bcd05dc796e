"""`rollcage replay` on real Docker: the same answers and tokens again, and what is said where the sandbox differs."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from rich.console import Console

from rollcage.cluster.config_policies import ScriptedPolicyConfig, VllmPolicyConfig
from rollcage.cluster.errors import InputError
from rollcage.cluster.recorded_run import RecordedRun, Selection, open_run, select
from rollcage.cluster.replay import Replayed, ReplayOptions, _tokenizer, compare, render_comparison, replay
from rollcage.rollout.arrow import read_rollouts
from rollcage.rollout.sandbox.base import HOSTNAME

pytestmark = [pytest.mark.docker, pytest.mark.timeout(240)]

ROLLCAGE = Path(sys.executable).parent / "rollcage"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "tasks"

GREET = ["```bash\npwd; id -u\n```", "```bash\necho hello >hello.txt\nsubmit\n```"]
FULL: list[Any] = [
    "```bash\npwd\n```",
    {"error": "context_overflow", "message": "the prompt is too long"},
    "I looked where I am. Next: greet.",
    "```bash\necho hello >hello.txt\nsubmit\n```",
]
TYPE = ['{"analysis": "", "plan": "", "commands": [], "task_complete": true}']
"""Nothing is typed, for how much of an output has come by a certain time is not the same each time."""
LOOK = ["```bash\ndate +%N; id -u\n```", "I am lost.", "```bash\nsubmit\n```"]


def rollcage(*arguments: str | Path) -> Any:
    done = subprocess.run([ROLLCAGE, *arguments], capture_output=True, text=True, timeout=200, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def again(run: Path, *, changed_tasks: bool = False, **selection: Any) -> Replayed:
    """`rollcage replay` of one rollout, in this process."""
    options = ReplayOptions(run, Selection(**selection), changed_tasks=changed_tasks)
    return replay(options, Console(file=StringIO()), show=lambda _attempt: None)


def files(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, run_here: Callable[..., Path]) -> Path:
    """A run of one task by four agents. Of the bash agent's samples the first solves it, and the second prints the
    time; the brief one has to sum up; the one with a terminal looks at its prompt, and is done."""
    root = tmp_path_factory.mktemp("replay")
    shutil.copytree(EXAMPLES / "say-hello", root / "tasks" / "say-hello")
    script = root / "answers.yaml"
    answers = {"rollcage/say-hello": {"samples": {0: GREET, 1: LOOK}}}
    script.write_text(yaml.safe_dump({"tokens": True, "tasks": answers}))
    brief = root / "brief.yaml"
    brief.write_text(yaml.safe_dump({"tokens": True, "default": FULL}))
    typed = root / "typed.yaml"
    typed.write_text(yaml.safe_dump({"tokens": True, "default": 2 * TYPE}))
    agents = [
        "oracle",
        {"name": "bash", "policy": "plain"},
        {"name": "bash", "label": "brief", "policy": "full", "options": {"summarize": True}, "samples": 1},
        {"name": "keys", "policy": "typed", "samples": 1},
    ]
    run = run_here(
        {
            "tasks": [str(root / "tasks")],
            "agents": agents,
            "policies": {
                "plain": {"kind": "scripted", "file": str(script)},
                "full": {"kind": "scripted", "file": str(brief)},
                "typed": {"kind": "scripted", "file": str(typed)},
            },
            "samples": 2,
            "output": str(root / "run"),
        }
    )
    script.unlink()  # no policy is asked again
    brief.unlink()
    typed.unlink()
    return run


@pytest.fixture
def unchanged(recorded: Path) -> Any:
    """The run is not written to."""
    before = files(recorded)
    yield recorded
    assert files(recorded) == before


def ids(run: Path) -> dict[str, str]:
    rows = read_rollouts(run, ["agent", "sample", "attempt_id"]).to_pylist()
    return {f"{row['agent']} {row['sample']}": row["attempt_id"] for row in rows}


def test_one_rollout_is_shown_as_it_runs_and_is_what_it_was(unchanged: Path) -> None:
    done = rollcage("replay", unchanged, "--rollout", "rollcage/say-hello#0", "--agent", "bash")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("passed\nreward 1 from reward.txt")
    assert done.stdout.endswith("replayed 1: 1 identical; outcomes agree in 1 of 1\n")
    assert "$ pwd; id -u" in done.stderr


def test_an_attempts_id_names_it_and_where_the_sandbox_differs_is_told(unchanged: Path) -> None:
    done = again(unchanged, rollout=ids(unchanged)["bash 1"])
    assert (done.comparison["diverged"], done.comparison["outcomes_agree"]) == (1, 1)
    [other] = done.comparison["others"]
    assert other["diverged"]["turn"] == 1
    assert other["diverged"]["recorded"] != other["diverged"]["given"]
    assert done.attempt is not None
    assert done.attempt.extra["replay"]["attempt_id"] == ids(unchanged)["bash 1"]
    rows = read_rollouts(unchanged, ["agent", "sample", "segments"]).to_pylist()
    [row] = [row for row in rows if (row["agent"], row["sample"]) == ("bash", 1)]
    trajectory = done.attempt.trajectory
    assert trajectory is not None
    # As text, because NaN is not equal to itself.
    assert str([vars(segment) for segment in trajectory.segments]) == str(row["segments"])
    assert [turn.malformed for turn in trajectory.turns] == [False, True, False]


@pytest.mark.ray
def test_a_whole_run_is_replayed_into_a_new_one(unchanged: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    done = rollcage("replay", unchanged, "--output", new, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert [said[word] for word in ("rollouts", "identical", "diverged", "without_policy")] == [6, 3, 1, 2]
    assert said["outcomes_agree"] == 6
    columns = ["agent", "task", "sample", "turn_count", "segments", "policy", "outcome"]
    then, now = (
        sorted(read_rollouts(run, columns).to_pylist(), key=lambda row: (row["agent"], row["sample"]))
        for run in (unchanged, new)
    )
    for old, new_row in zip(then, now, strict=True):
        assert str(old["segments"]) == str(new_row["segments"])
        assert {**old, "segments": 0, "policy": 0} == {**new_row, "segments": 0, "policy": 0}
    assert json.loads((new / "job.json").read_text())["replay_of"]["run"] == str(unchanged)
    # A replay is a run like any other.
    once_more = again(new, agent="bash", sample=0)
    assert (once_more.comparison["identical"], once_more.comparison["outcomes_agree"]) == (1, 1)


def test_an_agent_that_summed_up_does_so_again(unchanged: Path) -> None:
    done = again(unchanged, agent="brief", sample=0)
    assert (done.comparison["identical"], done.comparison["outcomes_agree"]) == (1, 1), done.comparison
    assert done.attempt is not None
    assert done.attempt.trajectory is not None
    assert [turn.purpose for turn in done.attempt.trajectory.turns] == ["act", "summary", "act"]
    assert len(done.attempt.trajectory.segments) == 2


def test_a_terminal_shows_the_same_prompt_again(unchanged: Path) -> None:
    done = again(unchanged, agent="keys", sample=0)
    assert done.comparison["identical"] == 1, done.comparison
    assert done.attempt is not None
    assert done.attempt.trajectory is not None
    assert f"root@{HOSTNAME}:" in done.attempt.trajectory.messages[0].content, "or it would show nothing"


def test_an_agent_without_a_policy_just_runs_again(unchanged: Path) -> None:
    found = again(unchanged, rollout="rollcage/say-hello#1", agent="oracle").comparison
    assert (found["without_policy"], found["outcomes_agree"]) == (1, 1)


def test_a_task_that_was_changed_is_refused_unless_told(recorded: Path) -> None:
    test = recorded.parent / "tasks" / "say-hello" / "tests" / "test.sh"
    text = test.read_text()
    test.write_text("#!/bin/sh\necho 0 >/logs/verifier/reward.txt\n")
    try:
        with pytest.raises(InputError, match=r"--changed-tasks(.|\n)*rollcage/say-hello"):
            again(recorded, agent="bash", sample=0)
        found = again(recorded, agent="bash", sample=0, changed_tasks=True).comparison
        assert (found["identical"], found["outcomes_agree"]) == (1, 0)
        said = StringIO()
        render_comparison(found, Console(file=said, width=1000))
        assert (
            "rollcage/say-hello#0 by bash: identical, passed with 1 then and failed with 0 now"
            in said.getvalue()
        )
    finally:
        test.write_text(text)


def test_a_task_that_is_gone_is_named(recorded: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(recorded, tmp_path / "run")
    job = json.loads((moved / "job.json").read_text())
    job["tasks"][0]["path"] = "/nowhere/say-hello"
    (moved / "job.json").write_text(json.dumps(job))
    with pytest.raises(InputError, match="rollcage/say-hello: /nowhere/say-hello"):
        again(moved)


def test_an_agent_whose_prompt_is_gone_is_told(recorded: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(recorded, tmp_path / "run")
    job = json.loads((moved / "job.json").read_text())
    job["config"]["agents"][1]["options"] = {"system_prompt": "/nowhere/prompt.md"}
    (moved / "job.json").write_text(json.dumps(job))
    with pytest.raises(InputError, match=r"agent 'bash' cannot be made any more: .*/nowhere/prompt\.md"):
        again(moved, agent="bash")


def test_where_there_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no run here"):
        again(tmp_path)


class TestTokenizers:
    """What counts an agent's tokens in a replay."""

    def named(self, policy: Any) -> tuple[str | None, str]:
        said = StringIO()
        return _tokenizer(policy, Console(file=said)), said.getvalue()

    def test_a_directory_a_cached_id_and_one_that_is_not_here(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        cached = tmp_path / "models--some--model"
        (cached / "snapshots" / "abc").mkdir(parents=True)
        (cached / "snapshots" / "abc" / "tokenizer_config.json").touch()
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text("abc")
        for here in ("some/model", str(tmp_path)):
            assert self.named(VllmPolicyConfig(kind="vllm", model=here)) == (here, "")
        for gone in ("other/model", "/not/a/directory/here"):
            name, said = self.named(VllmPolicyConfig(kind="vllm", model=gone))
            assert (name, "no tokenizer of the recorded policy is here" in said) == (None, True)

    def test_the_engine_may_have_had_another_than_the_models(self, tmp_path: Path) -> None:
        policy = VllmPolicyConfig(kind="vllm", model="x/y", engine_args={"tokenizer": str(tmp_path)})
        assert self.named(policy) == (str(tmp_path), "")

    def test_a_script_counts_bytes(self) -> None:
        assert self.named(ScriptedPolicyConfig(kind="scripted", file="gone.yaml")) == ("bytes", "")


class TestSelecting:
    """Which rollouts are meant."""

    def rows(self, run: RecordedRun) -> list[dict[str, Any]]:
        return list(run.rows(("attempt_id",)))

    def test_several_where_one_is_asked_for(self, recorded: Path) -> None:
        run = open_run(recorded)
        with pytest.raises(InputError, match=r"4 rollouts are meant(.|\n)*#0 by (bash|brief|oracle|keys): "):
            select(run, Selection(sample=0), self.rows(run))

    def test_none(self, recorded: Path) -> None:
        run = open_run(recorded)
        with pytest.raises(
            InputError, match=r"holds no such rollout; it has:\n  rollcage/say-hello#\d by \w+: "
        ):
            select(run, Selection(rollout="say-goodbye#0"), self.rows(run))

    def test_patterns_and_agents_take_several(self, recorded: Path) -> None:
        run = open_run(recorded)
        assert len(select(run, Selection(task="rollcage/say-*", agent="bash"), self.rows(run))) == 2
        assert len(select(run, Selection(), self.rows(run))) == 6


def row(sample: int, note: dict[str, Any] | None, outcome: str = "passed") -> dict[str, Any]:
    return {
        "agent": "a", "task": "t", "draw": 0, "sample": sample, "outcome": outcome, "error_class": None, "reward": 1.0,
        "turn_count": 2, "extra": json.dumps({} if note is None else {"replay": note}),
    }  # fmt: skip


def test_replays_are_told_apart() -> None:
    whole = {"turns": 2, "recorded_turns": 2, "diverged": None}
    notes = [whole, {**whole, "turns": 1}, {**whole, "recorded_turns": None, "turns": 0}, None]
    replayed = [row(sample, note) for sample, note in enumerate(notes)]
    found = compare([row(sample, None) for sample in range(4)], replayed)
    assert [found[word] for word in ("identical", "diverged", "unserved", "without_policy")] == [1, 1, 1, 1]
    [shorter] = found["others"]
    assert shorter["diverged"] == {"turn": 1, "recorded": "an answer", "given": "the agent did not ask"}


def test_what_was_called_off_is_counted_where_the_replay_is_told_of() -> None:
    said = StringIO()
    render_comparison(compare([row(0, None)], [row(0, None)], cancelled=2), Console(file=said, width=1000))
    assert said.getvalue().endswith("outcomes agree in 1 of 1\nleft out: 2 that ended cancelled\n")
