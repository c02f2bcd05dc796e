"""Parquet: the rollouts with all their columns, as in `schema.ROLLOUTS`; polars, duckdb and datasets read it.

Columns of words (`outcome`, `error_class`, ...) keep their dictionaries. A group is a row group, so that one group at a
time is in memory here and can be in the reader.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from rollcage.rollout.formats.base import Format
from rollcage.rollout.schema import ROLLOUTS


def write(tables: Iterable[pa.Table], path: str | Path) -> int:
    """Write tables of `schema.ROLLOUTS` and return how many rows they had. Raises `OSError`."""
    import pyarrow.parquet as pq

    rows = 0
    with pq.ParquetWriter(str(path), ROLLOUTS, compression="zstd") as writer:
        for table in tables:
            writer.write_table(table.select(ROLLOUTS.names).cast(ROLLOUTS))
            rows += table.num_rows
    return rows


PARQUET = Format(
    "parquet", "all columns of the rollouts, as they are: one file", "parquet", (), "polars, duckdb, datasets"
)
