"""The files of a run: what is written comes back, in every reader, after any kill."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import duckdb
import fsspec
import polars
import pyarrow as pa
import pyarrow.dataset
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcage.rollout import arrow, schema
from rollcage.rollout.arrow import Journal, Location, NoRun, RunBusy, read_attempts, read_rollouts, recover
from rollcage.rollout.outcome import TABLE, Evidence, Outcome, Stage
from rollcage.rollout.rows import attempt_from_row, attempts_batch, rollouts_batch
from rollcage.rollout.trajectory import (
    Attempt,
    CommandRecord,
    Message,
    Phase,
    Reward,
    Segment,
    ToolCall,
    Trajectory,
    Turn,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "arrow.md"


def an_attempt(task: str = "count-lines", sample: int = 0, **changes: Any) -> Attempt:
    segment = Segment([5, 6, 7, 8], [0, 0, 1, 1], [math.nan, math.nan, -0.5, -1.25])
    turn = Turn(
        0, "ls", "stop", 0, 2, 2, "model", 3, 3, 0.1, 0.4, 2, 2,
        commands=[CommandRecord("ls", 0, "a\n", "", 0.01)],
    )  # fmt: skip
    trajectory = Trajectory([Message("user", "look"), Message("assistant", "ls", 0)], [turn], [segment])
    attempt = Attempt(
        f"{task}-{sample}-a", "demo", task, "ab" * 32, sample, 0, "bash", "model", "host-1", Outcome.PASSED,
        reward=Reward(1.0), started_at=1700000000.25, ended_at=1700000003.5, phases={Phase.AGENT.value: 2.0},
        trajectory=trajectory,
    )  # fmt: skip
    return dataclasses.replace(attempt, **changes)


def an_empty_attempt(task: str = "empty", sample: int = 0) -> Attempt:
    return Attempt(f"{task}-{sample}-e", "demo", task, "", sample, 0, "nop", "", "", Outcome.CANCELLED)


def a_run(path: Path, *groups: list[Attempt]) -> Location:
    location = Location(path)
    location.write_json("job.json", {})
    for group in groups:
        location.write_shard("rollouts", [rollouts_batch([(attempt, 1, len(group)) for attempt in group])])
        location.write_shard("attempts", [attempts_batch(group)])
    return location


def comparable(attempts: Iterable[Attempt]) -> list[dict[str, Any]]:
    """Attempts that can be compared: NaN, which is not equal to itself, has become a word."""

    def without_nan(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_nan(item) for key, item in value.items()}
        if isinstance(value, list):
            return [without_nan(item) for item in value]
        return "NaN" if isinstance(value, float) and math.isnan(value) else value

    return [without_nan(dataclasses.asdict(attempt)) for attempt in attempts]


def leaves(kind: pa.DataType) -> list[pa.DataType]:
    if pa.types.is_dictionary(kind):
        return []
    if pa.types.is_nested(kind):
        return [leaf for i in range(kind.num_fields) for leaf in leaves(kind.field(i).type)]
    return [kind]


# Conversion

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
number = st.floats(allow_nan=False, allow_infinity=False)
seconds = st.floats(0, 1e6)
int32 = st.integers(-(2**31), 2**31 - 1)
time = st.integers(1, 4 * 10**15).map(lambda microseconds: microseconds / 1e6)
segments = st.lists(
    st.tuples(st.integers(0, 2**31 - 1), st.booleans(), st.floats(-1e3, 0, width=32)), max_size=6
).map(
    lambda tokens: Segment(
        [token for token, _, _ in tokens],
        [int(sampled) for _, sampled, _ in tokens],
        [logprob if sampled else math.nan for _, sampled, logprob in tokens],
    )
)
commands = st.builds(
    CommandRecord, text, st.none() | int32, text, text, seconds, st.booleans(), st.integers(0, 2**40), text
)
calls = st.lists(st.builds(ToolCall, text, text, text), max_size=2).map(tuple)
turns = st.builds(
    Turn, int32, text, text, st.none() | int32, int32, int32, text, int32, int32, seconds, seconds, int32, int32,
    int32, st.none() | seconds, st.booleans(), text, st.booleans(), st.lists(commands, max_size=2),
)  # fmt: skip
trajectories = st.builds(
    Trajectory,
    st.lists(
        st.builds(Message, text, text, st.none() | int32, calls, st.none() | text, text, text), max_size=3
    ),
    st.lists(turns, max_size=3),
    st.lists(segments, max_size=3),
)
rewards = st.builds(
    Reward,
    number,
    st.dictionaries(text, number, max_size=3),
    text,
    text,
    st.lists(text, max_size=3).map(tuple),
    st.lists(st.tuples(text, number), max_size=3).map(tuple),
    st.lists(text, max_size=3).map(tuple),
)
evidence = st.builds(
    Evidence,
    text,
    text,
    st.none() | int32,
    st.none() | int32,
    st.none() | st.booleans(),
    st.none() | seconds,
    text,
    st.lists(text, max_size=3).map(tuple),
)
json_values = st.recursive(
    st.none() | st.booleans() | int32 | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)
attempts = st.builds(
    Attempt, text, text, text, text, int32, int32, text, text, text, st.sampled_from(Outcome),
    st.none() | st.sampled_from([row.name for row in TABLE]), st.none() | st.sampled_from(Stage),
    st.none() | evidence, st.none() | rewards, time | st.just(0.0), time | st.just(0.0),
    st.dictionaries(st.sampled_from([phase.value for phase in Phase]), seconds), seconds, st.none() | seconds,
    trajectories, st.dictionaries(text, json_values, max_size=3), int32,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.lists(attempts, min_size=1, max_size=3))
def test_any_attempt_comes_back_from_a_row_as_it_was(written: list[Attempt]) -> None:
    for attempt in written:  # of evidence what a terminal may be given is kept, and no more
        attempt.evidence = attempt.evidence and attempt.evidence.capped()
    batch = rollouts_batch([(attempt, 2, 4) for attempt in written])
    batch.validate(full=True)
    read = [attempt_from_row(row) for row in batch.to_pylist()]
    assert comparable(read) == comparable(written)

    without = [attempt_from_row(row) for row in attempts_batch(written).to_pylist()]
    assert comparable(without) == comparable([dataclasses.replace(a, trajectory=None) for a in written])


@pytest.mark.parametrize("ids", [["7"], [2**31], [None]])
def test_token_ids_that_are_none_are_refused_by_name(ids: list[Any]) -> None:
    attempt = an_attempt(trajectory=Trajectory(segments=[Segment(ids, [1], [-0.5])]))
    with pytest.raises(ValueError, match="ids must be numbers of type int32"):
        rollouts_batch([(attempt, 1, 1)])


def test_counts_stand_beside_an_attempt_without_its_trajectory() -> None:
    [row] = attempts_batch([an_attempt()]).to_pylist()
    counts = ("turn_count", "malformed_turns", "command_count", "prompt_tokens", "completion_tokens")
    assert [row[name] for name in counts] == [1, 0, 1, 2, 2]
    assert "segments" not in row


def test_the_domain_comes_from_the_outcome_table() -> None:
    lost = an_attempt(outcome=Outcome.INVALID, error_class="network_pool", stage=Stage.START, reward=None)
    [row] = attempts_batch([lost]).to_pylist()
    assert (row["error_class"], row["domain"], row["stage"]) == ("network_pool", "infra", "start")


def test_surrogates_and_nul_in_any_text_can_be_written() -> None:
    bad = "a\udcffb\0c"
    attempt = an_attempt(
        task=bad,
        evidence=Evidence(message=bad, also=(bad,)),
        reward=Reward(0.0, {bad: 1.0}, output_tail=bad, test_ids=(bad,)),
        trajectory=Trajectory(
            [Message("user", bad)], [Turn(0, bad, "stop", commands=[CommandRecord(bad, 0, bad, bad, 0)])]
        ),
        extra={"k": bad},
    )
    [row] = rollouts_batch([(attempt, 1, 1)]).to_pylist()
    assert row["task"] == row["test_ids"][0] == row["messages"][0]["content"] == "a\ufffdb\0c"
    assert row["turns"][0]["commands"][0]["stdout"] == "a\ufffdb\0c"
    assert attempt_from_row(row).extra == {"k": bad}


def test_extra_that_is_not_json_does_not_cost_the_record() -> None:
    [row] = attempts_batch([an_attempt(extra={"path": Path("x")})]).to_pylist()
    assert "path" in attempt_from_row(row).extra


def test_evidence_is_capped_where_nobody_has_done_so() -> None:
    [row] = attempts_batch([an_attempt(evidence=Evidence(message="m", log_tail="x" * 100_000))]).to_pylist()
    assert 1000 < len(row["evidence"]["log_tail"]) < 4096


def test_an_unknown_phase_is_refused() -> None:
    with pytest.raises(ValueError, match="no such phase: coffee"):
        attempts_batch([an_attempt(phases={"coffee": 1.0})])


# Schema


def test_no_column_is_of_null_type_and_all_text_is_large() -> None:
    kinds = {leaf for table in schema.SCHEMAS.values() for field in table for leaf in leaves(field.type)}
    assert pa.large_string() in kinds
    assert kinds.isdisjoint({pa.null(), pa.string(), pa.binary()})


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Message, schema.MESSAGE),
        (Turn, schema.TURN),
        (CommandRecord, schema.COMMAND),
        (Segment, schema.SEGMENT),
        (Evidence, schema.EVIDENCE),
    ],
)
def test_the_schema_has_every_field_of_the_records(kind: Any, fields: tuple[schema.Field, ...]) -> None:
    assert [field.name for field in fields] == [field.name for field in dataclasses.fields(kind)]


def test_tokens_have_the_types_that_trainers_expect() -> None:
    segment = schema.ROLLOUTS.field("segments").type.value_type
    assert [segment.field(name).type.value_type for name in ("ids", "loss_mask", "logprobs")] == [
        pa.int32(),
        pa.int8(),
        pa.float32(),
    ]


def test_dictionaries_have_the_order_of_the_outcome_table(tmp_path: Path) -> None:
    run = a_run(tmp_path, [an_empty_attempt()])
    table = read_rollouts(run)
    assert table["error_class"].chunk(0).dictionary.to_pylist() == [row.name for row in TABLE]
    assert table["outcome"].chunk(0).dictionary.to_pylist() == list(Outcome)


def test_the_page_of_the_schema_is_current() -> None:
    page = PAGE.read_text()
    assert set(re.findall(r"<!-- table: (\w+) -->", page)) == set(schema.tables())
    assert schema.update_page(page) == page, "run: python -m rollcage.rollout.schema docs/arrow.md"


# Shards


def test_shards_are_numbered_and_none_is_written_over(tmp_path: Path) -> None:
    run = a_run(tmp_path, [an_attempt()])
    first = Path(run.shards("rollouts")[0]).read_bytes()
    (tmp_path / "rollouts" / "part-00001.arrow").write_bytes(first)
    another = [rollouts_batch([(an_attempt("b"), 1, 1)])]
    assert Path(run.write_shard("rollouts", another)).name == "part-00002.arrow"
    (tmp_path / "rollouts" / "part-99999.arrow").write_bytes(first)
    later = Location(tmp_path)
    assert Path(later.write_shard("rollouts", another)).name == "part-100000.arrow"
    assert [path.rpartition("/")[2] for path in later.shards("rollouts")] == [
        "part-00000.arrow",
        "part-00001.arrow",
        "part-00002.arrow",
        "part-99999.arrow",
        "part-100000.arrow",
    ]
    for copy in ("part-00000", "part-00001", "part-99999"):
        assert (tmp_path / "rollouts" / f"{copy}.arrow").read_bytes() == first


def test_a_shard_that_a_kill_left_half_written_is_not_read(tmp_path: Path) -> None:
    run = a_run(tmp_path, [an_attempt()])
    (tmp_path / "rollouts" / "part-00001.arrow.tmp").write_bytes(b"ARROW1")
    assert read_rollouts(run).num_rows == 1
    run.remove_torn()
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["part-00000.arrow"]


def test_each_group_is_a_batch_of_its_own_whatever_its_agent(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    groups = [
        rollouts_batch([(an_attempt("a", sample, agent=agent), 1, 2) for sample in range(2)])
        for agent in ("bash", "oracle", "nop")
    ]
    reader = pa.ipc.open_file(run.write_shard("rollouts", groups))
    assert [reader.get_batch(i)["agent"].to_pylist() for i in range(reader.num_record_batches)] == [
        ["bash"] * 2,
        ["oracle"] * 2,
        ["nop"] * 2,
    ]


def test_a_newer_schema_is_refused_by_name(tmp_path: Path) -> None:
    run = a_run(tmp_path, [an_attempt()])
    newer = read_rollouts(run).replace_schema_metadata({schema.VERSION_KEY: b"99"})
    with pa.ipc.new_file(run.shards("rollouts")[0], newer.schema) as writer:
        writer.write_table(newer)
    with pytest.raises(schema.SchemaVersionError, match=r"part-00000\.arrow: schema version 99"):
        read_rollouts(run)


def test_no_run_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(NoRun, match="there is no run here"):
        read_rollouts(tmp_path)


def test_a_run_can_lie_on_any_filesystem_of_pyarrow(tmp_path: Path) -> None:
    memory = pa.fs.PyFileSystem(pa.fs.FSSpecHandler(fsspec.filesystem("memory")))
    run = Location("bucket/run", journal=tmp_path / "journal", filesystem=memory)
    run.write_json("job.json", {"a": 1})
    for task in ("a", "b"):
        run.write_shard("rollouts", [rollouts_batch([(an_attempt(task), 1, 1)])])
    assert [path.rpartition("/")[2] for path in run.shards("rollouts")] == [
        "part-00000.arrow",
        "part-00001.arrow",
    ]
    assert read_rollouts(run, ["task"])["task"].to_pylist() == ["a", "b"]
    assert run.read_json("job.json") == {"a": 1}
    assert run.read_json("summary.json") is None


def test_a_local_run_can_be_named_by_its_uri(tmp_path: Path) -> None:
    a_run(tmp_path, [an_attempt()])
    assert read_attempts(f"file://{tmp_path}").num_rows == 1


def test_two_processes_cannot_write_one_run(tmp_path: Path) -> None:
    run = Location(tmp_path)
    run.lock()
    with pytest.raises(
        RunBusy, match=rf"another process( \({os.getpid()}\))? is writing this run: .*--output"
    ):
        Location(tmp_path).lock()


# Journal


def journal_of(directory: Path, attempts: list[Attempt]) -> tuple[Journal, list[int]]:
    """A journal and its size after each append."""
    journal = Journal(directory, "rollouts")
    sizes = []
    for attempt in attempts:
        journal.append([rollouts_batch([(attempt, 1, 8)])])
        sizes.append(journal.size)
    journal.close()
    return journal, sizes


def test_a_journal_cut_at_any_byte_gives_every_whole_row(tmp_path: Path) -> None:
    # Agents differ, so that the stream holds dictionaries between its batches.
    written = [an_attempt("a", sample, agent=f"agent-{sample % 3}") for sample in range(8)]
    journal, sizes = journal_of(tmp_path, written)
    data = journal.path.read_bytes()
    assert sizes[-1] == len(data)
    chance = random.Random(7)
    cuts = [*(chance.randrange(len(data)) for _ in range(20)), 0, 1, *sizes, *(size - 1 for size in sizes)]
    for cut in cuts:
        torn = tmp_path / "torn.arrows"
        torn.write_bytes(data[:cut])
        read = [row for batch in recover(torn) for row in batch.to_pylist()]
        whole = sum(size <= cut for size in sizes)
        assert comparable(map(attempt_from_row, read)) == comparable(written[:whole]), f"cut at {cut}"


def test_rows_of_a_journal_are_read_once_also_when_a_shard_has_them(tmp_path: Path) -> None:
    run = a_run(tmp_path, [an_attempt("a", 0)])
    assert run.journal
    journal_of(run.journal, [an_attempt("a", 0), an_attempt("a", 1)])
    journal_of(run.journal, [an_attempt("a", 1), an_attempt("b", 0)])
    table = read_rollouts(run, ["task", "sample"])
    assert table.to_pylist() == [
        {"task": "a", "sample": 0},
        {"task": "a", "sample": 1},
        {"task": "b", "sample": 0},
    ]
    assert read_rollouts(run).schema.equals(schema.ROLLOUTS, check_metadata=True)


# Other people's readers


@pytest.fixture
def awkward_run(tmp_path: Path) -> Location:
    """Two shards; the first has nothing but empty values in it, the second everything."""
    full = [an_attempt("full", sample, evidence=Evidence("said", "engine", 500, 137, True, 1.5, "log", ("more",)),
                       error_class="agent_oom", stage=Stage.AGENT) for sample in range(2)]  # fmt: skip
    return a_run(tmp_path / "runs" / "demo", [an_empty_attempt()], full)


def test_pyarrow_reads_the_shards(awkward_run: Location) -> None:
    dataset = pyarrow.dataset.dataset(f"{awkward_run.path}/rollouts", format="ipc")
    assert dataset.schema.equals(schema.ROLLOUTS)
    assert dataset.to_table().num_rows == 3
    rows = dataset.to_table(filter=pyarrow.dataset.field("reward") >= 1).to_pylist()
    assert rows[0]["segments"][0]["ids"] == [5, 6, 7, 8]


def test_datasets_reads_the_shards(awkward_run: Location, tmp_path: Path) -> None:
    for table in ("attempts", "rollouts"):
        read = datasets.load_dataset(
            "arrow",
            data_files=f"{awkward_run.path}/{table}/*.arrow",
            split="train",
            cache_dir=str(tmp_path / "cache"),
        )
        assert [row["outcome"] for row in read] == ["cancelled", "passed", "passed"]
        assert read[0]["evidence"] is None or read[0]["evidence"]["message"] is None
        assert read[1]["evidence"]["also"] == ["more"]
    assert read[0]["segments"] == []
    assert read[1]["segments"][0]["loss_mask"] == [0, 0, 1, 1]


def test_polars_reads_the_shards(awkward_run: Location) -> None:
    for table in ("attempts", "rollouts"):
        read = polars.read_ipc(f"{awkward_run.path}/{table}/*.arrow")
        assert read["error_class"].cast(polars.String).to_list() == [None, "agent_oom", "agent_oom"]
        assert read["evidence"].struct.field("exit_code").to_list() == [None, 137, 137]
    assert read["segments"].to_list()[1][0]["ids"] == [5, 6, 7, 8]


def test_duckdb_reads_the_shards(awkward_run: Location) -> None:
    shards = pyarrow.dataset.dataset(f"{awkward_run.path}/rollouts", format="ipc")  # noqa: F841
    rows = duckdb.sql(
        "select agent, outcome, evidence.message, segments[1].ids, started_at from shards order by task, sample"
    ).fetchall()
    assert [row[:4] for row in rows] == [
        ("nop", "cancelled", None, None),
        ("bash", "passed", "said", [5, 6, 7, 8]),
        ("bash", "passed", "said", [5, 6, 7, 8]),
    ]


def test_the_examples_of_the_page_run(
    awkward_run: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) >= 6
    for example in examples:
        exec(compile(example, str(PAGE), "exec"), {})


def test_a_schema_of_another_table_is_not_accepted(tmp_path: Path) -> None:
    with pytest.raises(pa.ArrowInvalid):
        arrow.Location(tmp_path).write_shard("attempts", [rollouts_batch([(an_attempt(), 1, 1)])])
