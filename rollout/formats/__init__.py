"""Rollouts in the formats that trainers and viewers take. Each module's functions take a table of `schema.ROLLOUTS` (a
feed's group, `read_rollouts`); `export.export` writes a whole run to a file. None needs the package it is made for.

    skyrl   skyrl-merged   verl   trl   trl-ids   prime-rl   atif   sharegpt   parquet
"""

from __future__ import annotations

from rollcage.rollout.formats import atif, parquet, prime_rl, sharegpt, skyrl, trl, verl
from rollcage.rollout.formats.base import Format, Need, Unfit

__all__ = ["FORMATS", "Format", "Need", "Unfit"]

FORMATS: dict[str, Format] = {
    one.name: one
    for one in (
        skyrl.STEP_WISE,
        skyrl.MERGED,
        verl.AGENT_LOOP,
        trl.CONVERSATIONAL,
        trl.TOKENS,
        prime_rl.TRACES,
        atif.ATIF,
        sharegpt.SHAREGPT,
        parquet.PARQUET,
    )
}
"""By name; what `rollcage export --format` takes."""
