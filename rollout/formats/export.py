"""A run's rollouts into a file of one format: one group at a time in memory, and the whole file or none.

What is written goes to a temporary place beside the output and is renamed at the end. One that a killed export left is
deleted by the next export to the same output: whoever writes holds a lock on it. A rollout that the format can't
hold ends the export with the number of such rollouts and why, unless they are to be left out.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pyarrow as pa

from rollcage.rollout.arrow import Location
from rollcage.rollout.formats import parquet
from rollcage.rollout.formats.base import Format, Row, Unfit
from rollcage.rollout.formats.select import Counts, Selection, rollouts, tables


class NothingToExport(ValueError):
    """No rollout of the run is wanted, or is fit; the message says why not, by number."""


class OutputExists(ValueError):
    """There is something at the output already."""


@dataclass(frozen=True)
class Exported:
    """`rows`: lines, files or Parquet rows that were written."""

    rows: int
    counts: Counts


def export(
    run: str | Path | Location,
    format: Format,
    output: Path | IO[bytes],
    selection: Selection | None = None,
    *,
    skip_unfit: bool = False,
    overwrite: bool = False,
    tools: Mapping[str, Sequence[Row]] | None = None,
) -> Exported:
    """Write the selected rollouts of `run` to `output`: a file, a directory where the format is `json`, or (of lines
    alone) an open file, which gets all or nothing.

    `tools`: the tool definitions of each agent, by its name, for formats that hold them. Raises `Unfit`,
    `NothingToExport`, `OutputExists`, `RunError` and `OSError`; then the output is as it was.
    """
    selection, counts, offered = selection or Selection(), Counts(), tools or {}
    if isinstance(output, Path) and not overwrite and _is_there(output):
        raise OutputExists(f"{output} is there already: name another place, or overwrite it")
    if format.file == "parquet":
        if not isinstance(output, Path):
            raise ValueError("parquet can't be written to a stream: name a file")
        with _in_place(output) as place:
            rows = parquet.write(_counted(run, selection, format, counts), place)
            _check(run, format, counts, skip_unfit)
        return Exported(rows, counts)
    lines = _rows(run, format, selection, skip_unfit, offered, counts)
    if format.file == "json":
        if not isinstance(output, Path):
            raise ValueError(f"{format.name} can't be written to a stream: name a directory")
        rows = _write_files(lines, output, lambda: _check(run, format, counts, skip_unfit))
    elif isinstance(output, Path):
        with _in_place(output) as place:
            with place.open("wb") as sink:
                rows = _write_lines(lines, sink)
            _check(run, format, counts, skip_unfit)
    else:
        with tempfile.TemporaryFile() as kept:
            rows = _write_lines(lines, kept)
            _check(run, format, counts, skip_unfit)
            kept.seek(0)
            shutil.copyfileobj(kept, output)
        output.flush()
    return Exported(rows, counts)


def _rows(
    run: str | Path | Location,
    format: Format,
    selection: Selection,
    skip_unfit: bool,
    tools: Mapping[str, Sequence[Row]],
    counts: Counts,
) -> Iterator[Row]:
    for group in rollouts(run, selection, format, counts):
        # Once one is unfit nothing will be left of the file; go on to count them all.
        if skip_unfit or not counts.unfit:
            yield from format.rows(group, tools)


def _counted(
    run: str | Path | Location, selection: Selection, format: Format, counts: Counts
) -> Iterator[pa.Table]:
    """The tables as they are; where rollouts are chosen one by one, the rows of those."""
    if not (selection.untruncated or selection.shortest or selection.distinct):
        for table in tables(run, selection, counts):
            counts.kept += table.num_rows
            yield table
        return
    kept = {(one.key, one.attempt_id) for group in rollouts(run, selection, format, counts) for one in group}
    for table in tables(run, selection, Counts()):
        names = ("job", "agent", "task", "sample", "draw")
        keys = zip(*(table[name].to_pylist() for name in names), strict=True)
        ids = table["attempt_id"].to_pylist()
        rows = [row for row, (key, one) in enumerate(zip(keys, ids, strict=True)) if (key, one) in kept]
        if rows:
            yield table.take(rows)


def _check(run: str | Path | Location, format: Format, counts: Counts, skip_unfit: bool) -> None:
    unfit = counts.unfit.total()
    reasons = [
        f"{count}: {why} (the first: {counts.first_unfit[why]})" for why, count in counts.unfit.most_common()
    ]
    if unfit and not skip_unfit:
        listed = "".join(f"\n    {reason}" for reason in reasons)
        raise Unfit(
            f"{run}: {unfit} of {unfit + counts.kept} rollouts can't be said in the format {format.name}:{listed}"
        )
    if not counts.kept:
        left = [f"{count}: {why}" for why, count in counts.left_out.most_common() if count]
        listed = "".join(f"\n    {reason}" for reason in [*left, *reasons])
        raise NothingToExport(f"{run}: nothing to export; {counts.read} rollouts were read{listed}")


def _write_lines(rows: Iterator[Row], sink: IO[bytes]) -> int:
    count = 0
    for row in rows:
        sink.write(_line(row) + b"\n")
        count += 1
    return count


def _write_files(rows: Iterator[Row], output: Path, check: Callable[[], None]) -> int:
    """A file a row, moved into the directory `output` once all are written."""
    names = []
    with _temporary(output, tempfile.mkdtemp) as held:
        for row in rows:
            names.append(row["_file"])
            content = {name: value for name, value in row.items() if name != "_file"}
            (held / names[-1]).write_bytes(_line(content) + b"\n")
        check()
        output.mkdir(exist_ok=True)
        for name in names:
            os.replace(held / name, output / name)
    return len(names)


def _line(row: Row) -> bytes:
    return json.dumps(row, ensure_ascii=False, allow_nan=False).encode()


def _is_there(output: Path) -> bool:
    return any(output.iterdir()) if output.is_dir() else output.exists()


@contextmanager
def _in_place(output: Path) -> Iterator[Path]:
    """A place to write to, which becomes `output` when all went well, and is gone otherwise."""
    with _temporary(output, _make_file) as place:
        yield place
        place.chmod(0o666 & ~_umask())
        os.replace(place, output)


@contextmanager
def _temporary(output: Path, make: Callable[[None, str, Path], str]) -> Iterator[Path]:
    """A place beside `output`, locked by whoever writes it and gone in the end; those of killed exports go now."""
    output.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{output.name}.export-"
    for left in output.parent.glob(f"{glob.escape(prefix)}*"):
        _remove_left(left)
    while True:
        place = Path(make(None, prefix, output.parent))
        lock = os.open(place, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if place.exists():
            break
        os.close(lock)  # another export took it for left before it was locked
    try:
        yield place
    finally:
        _remove(place)
        os.close(lock)


def _remove_left(place: Path) -> None:
    with suppress(FileNotFoundError):  # its export ended meanwhile
        lock = os.open(place, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(place)
        except BlockingIOError:
            return  # its export is at work
        finally:
            os.close(lock)


def _remove(place: Path) -> None:
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def _make_file(suffix: str | None, prefix: str, directory: Path) -> str:
    descriptor, name = tempfile.mkstemp(suffix, prefix, directory)
    os.close(descriptor)
    return name


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
