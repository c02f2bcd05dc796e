"""The report's page: what it holds, what it escapes, how large it is."""

from __future__ import annotations

import base64
import json
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from simulated import HOSTILE, a_run, hostile_run

from rollcage.metrics.page import write_page
from rollcage.metrics.page_text import text
from rollcage.metrics.plots import nice_ticks
from rollcage.metrics.recordings import cut
from rollcage.metrics.report import summarize
from rollcage.rollout.arrow import read_rollouts
from rollcage.rollout.location import Location, NoRun


class Parsed(HTMLParser):
    """Every tag of a page, every text outside of scripts, and the content of scripts by their id."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: dict[str | None, str] = {}
        self._within: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._within = tag

    def handle_data(self, data: str) -> None:
        if self._within == "script":
            self.scripts[self.tags[-1][1].get("id")] = data
        elif data.strip():
            self.texts.append(data.strip())

    def handle_endtag(self, tag: str) -> None:
        self._within = None

    def unpacked(self, name: str) -> Any:
        return json.loads(zlib.decompress(base64.b64decode(self.scripts[name]), -zlib.MAX_WBITS))

    def rollouts(self) -> list[dict[str, Any]]:
        return [
            one
            for name in self.scripts
            if re.fullmatch(r"c\d+", str(name))
            for one in self.unpacked(str(name))
        ]


def page_of(run: Path | Location, target: Path, **options: Any) -> Parsed:
    write_page(run, target, **options)
    return Parsed(target.read_text(encoding="utf-8"))


def test_the_numbers_are_those_of_the_report(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    page, report = page_of(run, tmp_path / "page.html"), summarize(run)
    said = " ".join(page.texts)
    for number in (
        f"{100 * report['pass_rate']:.1f}%",
        f"95%: {100 * report['pass_rate_low']:.1f}-{100 * report['pass_rate_high']:.1f}%",
        f"{100 * report['pass_at_k'][-1]['value']:.1f}%",
        f"{report['passed']} passed",
        f"{report['failed']} failed",
        f"{report['invalid']} invalid",
        f"{report['attempt_errors']['network_pool']} attempts",
    ):
        assert number in said, number
    columns = page.unpacked("columns")
    assert len(columns["task"]) == report["rollouts"]
    assert columns["outcome"].count("passed") == report["passed"]
    assert "has not ended" not in said


def test_every_rollout_is_there_with_all_that_happened(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    page = page_of(run, tmp_path / "page.html")
    rows, kept = read_rollouts(run).to_pylist(), page.rollouts()
    assert [one["attempt_id"] for one in kept] == [row["attempt_id"] for row in rows]
    row, one = rows[0], kept[0]
    assert [turn["text"] for turn in one["turns"]] == [turn["text"] for turn in row["turns"]]
    assert one["turns"][0]["commands"][0]["stdout"] == row["turns"][0]["commands"][0]["stdout"]
    assert one["turns"][0]["commands"][0]["exit_code"] == 0
    segment, whole = one["segments"][0], row["segments"][0]
    assert (segment["all_ids"], segment["ids"]) == (True, whole["ids"])
    assert segment["spans"] == [[5, 3], [12, 3]]
    assert segment["logprobs"] == [250, 500, 750, 250, 500, 750]
    retried = next(one for one in kept if one.get("tries"))
    assert retried["tries"][0] | {"seconds": 0} == {
        "number": 0, "outcome": "invalid", "error_class": "network_pool", "host": "host", "message": "no pool left",
        "seconds": 0,
    }  # fmt: skip


def test_nothing_that_a_run_says_becomes_markup(tmp_path: Path) -> None:
    run = hostile_run(tmp_path / "run")
    page = page_of(run, tmp_path / "page.html")
    clean = page_of(a_run(tmp_path / "clean"), tmp_path / "clean.html")
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in clean.tags}, "no tag that a clean run has not"
    handlers = [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert handlers == []
    raw = (tmp_path / "page.html").read_bytes()
    assert not re.search(rb"[\x00-\x08\x0b-\x1f]", raw)
    assert "\u202e" not in raw.decode("utf-8")
    # It is all there for the viewer, as it was.
    [one] = [one for one in page.rollouts() if "big" in one["attempt_id"]]
    assert one["turns"][0]["commands"][0]["stdout"].startswith(HOSTILE.replace("\ud800", "\ufffd"))


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("</script><img onerror=x>", "&lt;/script&gt;&lt;img onerror=x&gt;"),
        ("a\x00b\x1b[31m", "a\u2400b\u241b[31m"),
        ("\ud800", "\ufffd"),
        ("a\u202eb", "a\ufffdb"),
        ('"quoted"\n', "&quot;quoted&quot;\n"),
    ],
)
def test_text_is_escaped_and_what_hides_is_shown(given: str, shown: str) -> None:
    assert text(given) == shown


def test_a_page_keeps_to_its_size_and_says_what_is_missing(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", output=100_000)
    whole = page_of(run, tmp_path / "page.html")
    small = page_of(run, tmp_path / "small.html", limit_bytes=300_000)
    assert not any("are not on this page" in json.dumps(one) for one in whole.rollouts())
    size = sum(len(script) for name, script in small.scripts.items() if re.fullmatch(r"c\d+", str(name)))
    assert size < 400_000 < 2_000_000 < sum(map(len, whole.scripts.values()))
    assert len(small.rollouts()) == len(whole.rollouts())
    stdout = small.rollouts()[-1]["turns"][0]["commands"][0]["stdout"]
    missing = int(re.search(r"\[([\d,]+) characters are not on this page\]", stdout)[1].replace(",", ""))  # type: ignore[index]
    assert len(re.sub(r"\n\[.*\]\n", "", stdout)) + missing == 100_000 + len("hello")


def test_a_text_loses_its_middle() -> None:
    assert (
        cut("a" * 600 + "b" * 600, 300) == "a" * 200 + "\n[900 characters are not on this page]\n" + "b" * 100
    )
    assert cut("short", 3) == "short", "what is cut must be worth the words"


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    (run / "summary.json").unlink()
    assert "This run has not ended." in page_of(run, tmp_path / "page.html").texts


def test_a_run_in_which_nothing_has_ended_has_a_page(tmp_path: Path) -> None:
    Location(tmp_path / "run").write_json("job.json", {})
    page = page_of(tmp_path / "run", tmp_path / "page.html")
    assert "Nothing has ended yet." in page.texts
    assert page.unpacked("columns") == {}


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(NoRun):
        write_page(tmp_path / "nothing", tmp_path / "page.html")
    with pytest.raises(OSError, match="nowhere"):
        write_page(a_run(tmp_path / "run"), tmp_path / "nowhere" / "page.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_run_in_an_object_store_has_a_page(tmp_path: Path) -> None:
    import pyarrow.fs

    a_run(tmp_path / "bucket" / "run")
    store = pyarrow.fs.SubTreeFileSystem(str(tmp_path / "bucket"), pyarrow.fs.LocalFileSystem())
    page = page_of(Location("run", filesystem=store), tmp_path / "page.html")
    assert len(page.rollouts()) == len(read_rollouts(tmp_path / "bucket" / "run"))


@pytest.mark.parametrize("most", [0, 0.5, 1, 2, 3, 4, 7, 21, 49, 99, 101, 1234, 9999, 10**7])
def test_axes_have_a_few_whole_numbers_that_reach_the_top(most: float) -> None:
    ticks = nice_ticks(most)
    assert ticks[0] == 0
    assert most <= ticks[-1] <= max(2 * most, 1)
    assert 2 <= len(ticks) <= 7
    assert all(float(tick).is_integer() for tick in ticks)
