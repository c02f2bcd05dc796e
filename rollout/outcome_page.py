"""Prints docs/outcomes.md from the outcome table, and from what injected faults were given:
`python -m rollcage.rollout.outcome_page > docs/outcomes.md`.

`faults.json` is written by `pytest tests/faults --write-fault-table`, which injects each of them.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from rollcage.rollout.outcome import TABLE, Domain, ErrorClass, Quarantine, Stage

_INTRODUCTION = """# Outcomes

*Made from `rollout/outcome.py` and `rollout/faults.json` by `python -m rollcage.rollout.outcome_page`; do not edit.*

Every attempt ends in exactly one record, every rollout in exactly one outcome: `passed`, `failed`, `invalid` (no
attempt gave a reward that counts) or `cancelled`. An attempt that did not simply pass or fail has one of these error
classes.

- Who said it decides, never what a sandbox printed: classes come from exception types, status codes and error
  messages of the Engine's API, and container state.
- An agent that met a limit is graded all the same: its rollout is `passed` or `failed`, with the class beside it. One
  that left nothing to grade (a sandbox in which no shell starts) has failed.
- Unknown is `internal_error` with no reward, never a 0.
- The first fault names the attempt; a later one, in teardown for instance, is added to its evidence.
- A quarantined task gets no further attempt in the job; its rollouts that wait end `invalid` with the class.
- A verifier's error quarantines its task once two of its rollouts have spent their retries on one, or the only rollout
  that it has: what a single one meets may be its own agent's doing.
- Only the failed sample is run again, never its whole group.
"""

_FAULTS = """## Faults injected

What `tests/faults` does to real engines, registries, containers, tasks and policies, the class that it must be given,
and the class that it was given when the tests last wrote this table (`pytest tests/faults --write-fault-table`). Where
an attempt must end without a class its outcome stands.

| fault | how | expected | given |
|---|---|---|---|
"""

_QUARANTINE = {
    Quarantine.NEVER: "no",
    Quarantine.AT_ONCE: "at once",
    Quarantine.AFTER_RETRIES: "after the retries of two",
}


def page() -> str:
    """The page as Markdown."""
    sections = [_INTRODUCTION]
    for domain in Domain:
        rows = [row for row in TABLE if row.domain is domain]
        sections.append(
            f"## {domain}\n\nFault of: {', '.join(dict.fromkeys(row.fault_of for row in rows))}.\n\n"
            "| error class | meaning | stage | reward | retries | first wait | quarantine |\n"
            "|---|---|---|---|---|---|---|\n" + "\n".join(map(_row, rows)) + "\n"
        )
    return "\n".join([*sections, _FAULTS + "".join(map(_fault, recorded_faults()))])


def recorded_faults() -> list[dict[str, Any]]:
    """The rows of the fault table, with what each was given."""
    rows: list[dict[str, Any]] = json.loads(files(__package__).joinpath("faults.json").read_text("utf-8"))
    return rows


def _fault(row: dict[str, Any]) -> str:
    given = f"not injected: {row['not_injected']}" if row["not_injected"] else f"`{row['given']}`"
    how = row["how"].replace("|", "\\|")
    return f"| {row['fault']} | {how} | `{row['expected']}` | {given} |\n"


def _row(row: ErrorClass) -> str:
    stages = "any" if len(row.stages) == len(Stage) else ", ".join(row.stages)
    reward = "graded" if row.reward_valid else "none"
    wait = f"{row.backoff_sec:g} s" if row.retries else ""
    host = ", another host" if row.other_host else ""
    return (
        f"| `{row.name}` | {row.meaning} | {stages} | {reward} | {row.retries}{host} | {wait} "
        f"| {_QUARANTINE[row.quarantine]} |"
    )


if __name__ == "__main__":
    print(page(), end="")
