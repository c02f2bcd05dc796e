"""A Parquet file has all that the run has, in every reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import duckdb
import polars
import pyarrow as pa
import pyarrow.parquet as pq

from rollcage.rollout.arrow import read_rollouts
from rollcage.rollout.formats import FORMATS
from rollcage.rollout.formats.export import export


def test_polars_duckdb_and_datasets_read_what_was_written(
    write_run: Any, shapes: Any, tmp_path: Path
) -> None:
    run = write_run(
        [shapes.attempt(shapes.text_turns()), shapes.attempt(shapes.summed_up(), sample=1, reward=0.0)],
        [shapes.attempt(shapes.without_ids(shapes.tool_turns()), task="other", agent="tools")],
    )
    file = tmp_path / "rollouts.parquet"
    assert export(run, FORMATS["parquet"], file).rows == 3

    def comparable(table: pa.Table) -> str:
        return repr(table.to_pylist())

    read = pq.read_table(file)
    assert comparable(read) == comparable(read_rollouts(run))
    assert pq.ParquetFile(file).num_row_groups == 2
    assert polars.read_parquet(file)["agent"].cast(polars.String).to_list() == ["bash", "bash", "tools"]
    counted = f"select outcome, sum(len(segments)), max(draw) from '{file}' group by outcome order by outcome"
    assert duckdb.sql(counted).fetchall() == [("failed", 3, 0), ("passed", 1, 0)]
    rows = datasets.load_dataset(
        "parquet", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert rows[0]["segments"][0]["loss_mask"] == [*[0] * 6, 1, 1, 0, 0, 0, 1, 1, 1]
