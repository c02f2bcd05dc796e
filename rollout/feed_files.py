"""How far each reader of a run has come: RUN/feed/NAME-RANK.json, an `Acknowledgement`.

Written whole or not at all, by the reader; read by the driver of a stream job, which opens no new group while too many
committed ones have not been acknowledged. Not synced to disk: what a crash of the machine brings back is an older
position, which the reader had reached, too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.fs

from rollcage.rollout.location import Location

FOLDER = "feed"

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""What a feed may be called: it becomes a file's name."""

_FILE = re.compile(rf"({NAME.pattern})-(\d+)\.json")


@dataclass(frozen=True)
class Acknowledgement:
    """One reader's position: every batch before `batch` is done with. `version` is the trainer's policy version, where
    it told the feed; `at` is Unix time."""

    name: str
    rank: int
    world_size: int
    batch: int
    version: int | None
    at: float


def acknowledge(location: Location, reached: Acknowledgement) -> None:
    """Write a reader's file anew. Raises `OSError`."""
    about = asdict(reached)
    path = f"{location.path}/{FOLDER}/{about.pop('name')}-{reached.rank}.json"
    data = json.dumps(about).encode() + b"\n"
    location.filesystem.create_dir(f"{location.path}/{FOLDER}")
    if location.local is None:
        with location.filesystem.open_output_stream(path) as sink:
            sink.write(data)
        return
    temporary = Path(f"{path}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    temporary.rename(path)


def acknowledgements(run: str | Path | Location) -> list[Acknowledgement]:
    """What the readers have said last. Of each name the ranks of its newest world only: files of ranks that a smaller
    world no longer has would hold the job back for ever."""
    location = Location.of(run)
    found: dict[str, list[Acknowledgement]] = {}
    for path in _files(location):
        if match := _FILE.fullmatch(path.rpartition("/")[2]):
            with location.filesystem.open_input_stream(path) as source:
                about = json.loads(source.read())
            found.setdefault(match[1], []).append(Acknowledgement(name=match[1], **about))
    newest = {name: max(ranks, key=lambda one: one.at).world_size for name, ranks in found.items()}
    return [one for name, ranks in found.items() for one in ranks if one.rank < newest[name]]


def acknowledged(reached: Iterable[Acknowledgement]) -> int:
    """The batch before which every reader is done; 0 where nobody reads yet, or a rank has said nothing."""
    by_name: dict[str, list[Acknowledgement]] = {}
    for one in reached:
        by_name.setdefault(one.name, []).append(one)
    whole = (
        min(one.batch for one in ranks) if len(ranks) >= ranks[0].world_size else 0
        for ranks in by_name.values()
    )
    return min(whole, default=0)


def _files(location: Location) -> list[str]:
    folder = f"{location.path}/{FOLDER}"
    if location.local is not None:
        # Asked some times a second: without the status of each file.
        return sorted(f"{folder}/{name}" for name in os.listdir(folder)) if os.path.isdir(folder) else []
    selector = pa.fs.FileSelector(folder, allow_not_found=True)
    return sorted(info.path for info in location.filesystem.get_file_info(selector))
