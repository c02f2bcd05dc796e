"""`rollcage replay`: a run's policy traffic once more, without a policy.

The same job: the recorded tasks, agents, samples and settings, with each policy replaced by the answers that it gave
(`policies/recorded.py`). Agents run again, and so do their commands. One rollout is run in the foreground, as
`rollcage try` does; several become a run of their own. The run itself is never written to.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from rich.console import Console

from rollcage.cluster.client_policies import model_path
from rollcage.cluster.config import JobConfig, PolicyConfig
from rollcage.cluster.config_model import KeepStates
from rollcage.cluster.config_policies import (
    OpenAIPolicyConfig,
    RecordedPolicyConfig,
    ScriptedPolicyConfig,
    VllmPolicyConfig,
)
from rollcage.cluster.errors import CouldNotRun, InputError
from rollcage.cluster.foreground import run_one
from rollcage.cluster.job import RunResult, run_plan
from rollcage.cluster.plan import JobPlan
from rollcage.cluster.recorded_run import (
    KEY,
    RecordedRun,
    Selection,
    called,
    changed_tasks,
    check_output,
    open_run,
    plan_again,
    select_uncancelled,
    shortened,
)
from rollcage.cluster.verdicts import shown, verdict, verdict_of
from rollcage.rollout.arrow import read_rollouts
from rollcage.rollout.outcome import Outcome
from rollcage.rollout.policies.recorded import BYTES
from rollcage.rollout.trajectory import Attempt

_COLUMNS = ("attempt_id", "outcome", "error_class", "reward", "turn_count")


@dataclass(frozen=True)
class ReplayOptions:
    """What the command line says. `docker_host`, `concurrency` None: the run's. `address`: of a Ray cluster, None:
    Ray is started here."""

    run: Path | str
    selection: Selection
    output: Path | None = None
    changed_tasks: bool = False
    docker_host: str | None = None
    concurrency: int | None = None
    address: str | None = None
    keep_states: str = "none"


@dataclass(frozen=True)
class Replayed:
    """What came of it: `result` of a job, or the `attempt` of the foreground. `comparison`: see `compare`."""

    comparison: dict[str, Any]
    result: RunResult | None = None
    attempt: Attempt | None = None

    @property
    def interrupted(self) -> bool:
        """A signal ended it."""
        if self.attempt is not None:
            return self.attempt.outcome is Outcome.CANCELLED
        return self.result is not None and self.result.interrupted

    @property
    def incomplete(self) -> bool:
        """Something has no valid reward."""
        if self.attempt is not None:
            return not self.attempt.reward_valid
        return self.result is not None and bool(self.result.summary["invalid"])


def replay(options: ReplayOptions, console: Console, show: Callable[[Attempt], None]) -> Replayed:
    """Replay what is selected; `show` is given the record where that is one rollout without an output of its own.

    Raises `InputError` where the run, the selection or its tasks are not as they must be, and as `run_job`.
    """
    if options.keep_states not in get_args(KeepStates):
        raise InputError(f"--keep-states {options.keep_states!r}: say {', '.join(get_args(KeepStates))}")
    run = open_run(options.run)
    check_output(run, options.output)
    if not run.finished:
        said = (
            f"{run.path} has not ended: it is still going on, or was killed; what has ended of it is replayed"
        )
        console.print(said, highlight=False, markup=False, soft_wrap=True)
    chosen, cancelled = select_uncancelled(run, options.selection, list(run.rows(_COLUMNS)))
    draw = _draw(chosen)
    config = _config(run, options, {row["agent"] for row in chosen}, draw, console)
    plan = plan_again(run, config, [row["task"] for row in chosen])
    if (changed := changed_tasks(run, plan)) and not options.changed_tasks:
        raise InputError(
            "tasks are not those that the run was made with; --changed-tasks replays on them as they are now:\n  "
            + shortened(changed)
        )
    plan = replace(plan, chosen=frozenset(tuple(row[name] for name in KEY) for row in chosen))
    if len(chosen) == 1 and options.selection.is_one and options.output is None:
        [row] = chosen
        attempt = run_one(config, _narrowed(plan, row), row["sample"], keep=False, console=console, show=show)
        return Replayed(compare(chosen, [_as_row(attempt)], cancelled), attempt=attempt)
    if options.output is None:
        config = config.model_copy(update={"name": f"{config.name}-replay"})
    about = {"replay_of": {"run": str(run.path), "job": run.job.get("job")}}
    result = run_plan(config, plan, console, about=about)
    new = read_rollouts(result.run, (*KEY, *_COLUMNS, "extra")).to_pylist()
    return Replayed(compare(chosen, new, cancelled), result=result)


def compare(
    recorded: Iterable[Mapping[str, Any]], replayed: Iterable[Mapping[str, Any]], cancelled: int = 0
) -> dict[str, Any]:
    """How a replay went, as JSON values. `identical`: every recorded turn was asked for with the same messages.
    `diverged`: another message, or other turns. `without_policy`: nothing to compare but the outcome. `unserved`: the
    replay ended before its first turn. `outcomes_agree` counts those of the same outcome and error class; `others` has
    the rest, and the diverged. `cancelled`: rollouts that had ended so, and were left out."""
    now = {tuple(row[name] for name in KEY): row for row in replayed}
    counts: Counter[str] = Counter(identical=0, diverged=0, without_policy=0, unserved=0)
    agree, others = 0, []
    for row in recorded:
        new = now.get(tuple(row[name] for name in KEY))
        note = json.loads(new["extra"]).get("replay") if new is not None else None
        word = _word(note)
        counts[word] += 1
        same = new is not None and verdict(new) == verdict(row)
        agree += same
        if not same or word == "diverged":
            others.append(
                {
                    "rollout": called(row),
                    "agent": row["agent"],
                    "turns": word,
                    "recorded": verdict(row),
                    "replayed": None if new is None else verdict(new),
                    "diverged": None if note is None else _where(note),
                }
            )
    return {
        "rollouts": sum(counts.values()),
        **counts,
        "cancelled": cancelled,
        "outcomes_agree": agree,
        "others": others,
    }


def render_comparison(comparison: Mapping[str, Any], console: Console) -> None:
    """Print what `compare` found."""
    words = ", ".join(
        f"{comparison[word]} {word.replace('_', ' ')}"
        for word in ("identical", "diverged", "without_policy", "unserved")
        if comparison[word]
    )
    total, agree = comparison["rollouts"], comparison["outcomes_agree"]
    console.print(
        f"replayed {total}: {words}; outcomes agree in {agree} of {total}", highlight=False, soft_wrap=True
    )
    if comparison["cancelled"]:
        left_out = f"left out: {comparison['cancelled']} that ended cancelled"
        console.print(left_out, highlight=False, soft_wrap=True)
    for other in comparison["others"]:
        said = f"{other['rollout']} by {other['agent']}: {other['turns'].replace('_', ' ')}"
        if other["recorded"] != other["replayed"]:
            said += f", {shown(other['recorded'])} then and {shown(other['replayed'])} now"
        console.print(said, highlight=False, markup=False, soft_wrap=True)
        if other["diverged"]:
            where = other["diverged"]
            console.print(
                f"  turn {where['turn']}, recorded: {where['recorded']!r}\n"
                f"  turn {where['turn']}, now:      {where['given']!r}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )


def _draw(rows: Sequence[Mapping[str, Any]]) -> int:
    """The draw that the rows are of: a session's answers are found by task and sample. Raises `InputError` for rows of
    several."""
    draws = sorted({row["draw"] for row in rows})
    if len(draws) > 1:
        raise InputError(
            f"these rollouts are of {len(draws)} draws of their tasks, and one at a time can be replayed: choose it "
            f"with --draw ({shortened(list(map(str, draws)), ', ')})"
        )
    return int(draws[0])


def _config(
    run: RecordedRun, options: ReplayOptions, agents: set[str], draw: int, console: Console
) -> JobConfig:
    """The run's job, with the recorded answers for policies, and the agents that are selected. Raises `InputError`
    where one of these cannot be made any more."""
    old = run.config
    policies: dict[str, PolicyConfig] = {}
    again = []
    for number, agent in enumerate(old.agents):
        if agent.called not in agents:
            continue
        try:
            named = old.policy_of(agent)
        except (ValueError, OSError, ImportError, AttributeError) as error:
            raise InputError(f"the run's agent {agent.called!r} cannot be made any more: {error}") from error
        if named is not None:
            name = f"recorded{number or ''}"
            policies[name] = RecordedPolicyConfig(
                kind="recorded",
                run=str(run.path),
                agent=agent.called,
                draw=draw,
                tokenizer=_tokenizer(old.policies[named], console),
                sampling=old.policies[named].sampling,
            )
            agent = agent.model_copy(update={"policy": name})
        again.append(agent)
    sandbox = old.sandbox.model_copy(update={"keep_states": options.keep_states})
    if options.docker_host is not None:
        sandbox = sandbox.model_copy(update={"docker_host": options.docker_host})
    changes: dict[str, Any] = {
        "agents": again,
        "policies": policies,
        "sandbox": sandbox,
        "retries": {
            **old.retries,
            "policy_error": 0,
        },  # a recording that has ended has no more at the next try
        "output": str(os.path.abspath(options.output)) if options.output else None,
        "ray": old.ray.model_copy(update={"address": options.address}),
    }
    if options.concurrency is not None:
        changes["concurrency"] = options.concurrency
    return old.model_copy(update=changes)


def _tokenizer(policy: PolicyConfig, console: Console) -> str | None:
    """What counted the recorded tokens, where this machine has it; None where nothing did, or it is not here."""
    if isinstance(policy, VllmPolicyConfig):
        name = policy.engine_args.get("tokenizer") or policy.model
    elif isinstance(policy, OpenAIPolicyConfig | RecordedPolicyConfig):
        name = policy.tokenizer
    else:
        name = BYTES if isinstance(policy, ScriptedPolicyConfig) else None
    if name is None or name == BYTES:
        return name
    if name == "smollm2":
        try:
            name = model_path(name)
        except CouldNotRun:
            name = None
    if name is None or not (Path(name).is_dir() or _is_cached(name)):
        console.print(
            "no tokenizer of the recorded policy is here: agents that count tokens count bytes", style="dim"
        )
        return None
    return name


def _is_cached(model: str) -> bool:
    """Whether the tokenizer of this Hugging Face id was fetched before."""
    try:
        return isinstance(try_to_load_from_cache(model, "tokenizer_config.json"), str)
    except HFValidationError:
        return False


def _narrowed(plan: JobPlan, row: Mapping[str, Any]) -> JobPlan:
    tasks = {key: task for key, task in plan.tasks.items() if key.name == row["task"]}
    return replace(plan, tasks=tasks, agents=(plan.agent(row["agent"]),))


def _as_row(attempt: Attempt) -> dict[str, Any]:
    turns = attempt.trajectory.turns if attempt.trajectory else []
    return {
        "agent": attempt.agent,
        "task": attempt.task,
        "draw": attempt.draw,
        "sample": attempt.sample,
        **verdict_of(attempt),
        "turn_count": len(turns),
        "extra": json.dumps(attempt.extra, default=repr),
    }


def _word(note: Mapping[str, Any] | None) -> str:
    if note is None:
        return "without_policy"
    if note["recorded_turns"] is None:
        return "unserved"
    return "diverged" if _where(note) else "identical"


def _where(note: Mapping[str, Any]) -> dict[str, Any] | None:
    if note["diverged"] is not None:
        return dict(note["diverged"])
    if note["recorded_turns"] is not None and note["turns"] < note["recorded_turns"]:
        return {"turn": note["turns"], "recorded": "an answer", "given": "the agent did not ask"}
    return None
