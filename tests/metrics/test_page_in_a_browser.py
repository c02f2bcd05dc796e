"""The report's page as a reader has it: in a Chromium, where this machine has one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, browser, chromium
from simulated import HOSTILE, a_run, hostile_run

from rollcage.metrics.page import write_page
from rollcage.metrics.page_tables import AT_ONCE

pytestmark = pytest.mark.skipif(
    chromium() is None, reason="no chromium here (Debian: apt-get install chromium)"
)

SHOWN = "document.querySelector('#detail .title')?.textContent"
DETAIL = "document.getElementById('detail').textContent"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def a_page(run: Path) -> str:
    target = run.with_suffix(".html")
    write_page(run, target)
    return target.as_uri()


def test_a_reader_picks_filters_and_reads_with_the_keyboard_alone(tab: Browser, tmp_path: Path) -> None:
    tab.window(1280, 900)
    tab.open(a_page(a_run(tmp_path / "run")))
    found = "document.getElementById('found').textContent"
    assert tab.run(found) == "20 of 20"

    # Down to the second one, and into it.
    tab.run("document.getElementById('list').focus()")
    for key in ("ArrowDown", "ArrowDown", "Enter"):
        tab.press(key)
    tab.until(f"{SHOWN}?.startsWith('task-0 #1')")
    assert tab.run("location.hash") == "#rollout/task-0/bash/0/1"
    text = tab.run(DETAIL)
    for part in (
        "turn 0: hello",
        "echo 1",
        "exit 1",
        "verifier says hello",
        "test_a",
        "thought 1",
        "the task: hello",
    ):
        assert part in text, part
    tab.press("j")
    tab.until(f"{SHOWN}?.startsWith('task-0 #2')")
    tab.press("k")
    tab.until(f"{SHOWN}?.startsWith('task-0 #1')")

    # Tokens, with what each was worth.
    tab.run(
        "[...document.querySelectorAll('#detail summary')].find((s) => s.textContent.includes('token ids')).click()"
    )
    tab.until("document.querySelectorAll('.tokens span').length === 3")
    assert tab.run("[...document.querySelectorAll('.tokens span')].map((t) => t.textContent + t.title)") == [
        "1-0.250 nat, 77.9%", "2-0.500 nat, 60.7%", "3-0.750 nat, 47.2%",
    ]  # fmt: skip

    # Search in what the list shows, then in what the rollouts hold; then by class.
    tab.press("/")
    for key in "engine":
        tab.press(key)
    tab.until(f"{found}.startsWith('0 of')")
    tab.run("document.getElementById('deep').click()")
    tab.until(f"{found} === '10 of 20'")  # what failed or was lost has evidence that the engine gave
    tab.run("location.hash = '#class/network_pool'")
    tab.until(f"{SHOWN}?.startsWith('task-2 #0')")
    assert tab.run(found) == "1 of 20"
    assert "no pool left" in tab.run(DETAIL)
    tab.run("location.hash = '#task/task-1'")
    tab.until(f"{SHOWN}?.startsWith('task-1 #0')")
    assert tab.run(found) == "4 of 20"
    assert "1 attempt(s) before this one" in tab.run(DETAIL)

    # Tasks are sorted by the column that is asked for.
    names = "[...document.querySelectorAll('table.tasks tbody tr')].map((r) => r.cells[0].textContent).join()"
    tab.run("document.querySelectorAll('table.tasks th button')[0].click()")
    assert tab.run(names) == "task-0,task-1,task-2,task-3,task-4"
    tab.run("document.querySelectorAll('table.tasks th button')[0].click()")
    assert tab.run(names) == "task-4,task-3,task-2,task-1,task-0"
    assert tab.errors == []
    assert len(tab.requests) == 1, "the page asked for something else than itself"


def test_hostile_words_stay_words(tab: Browser, tmp_path: Path) -> None:
    tab.window(1280, 900)
    tab.open(a_page(hostile_run(tmp_path / "run")))
    said = HOSTILE.split("\x1b", maxsplit=1)[0]
    for number in range(3):
        tab.run(f"document.getElementById('row{number}').click()")
        tab.until(
            f"document.getElementById('row{number}').getAttribute('aria-selected') === 'true' && {SHOWN}"
        )
        tab.until(f"location.hash.endsWith('/0') && {DETAIL}.length > 400")
        assert said in tab.run(DETAIL)
        assert tab.run("document.images.length + document.querySelectorAll('main script').length") == 0
        # Colours become classes, and the raw view has the signs instead.
        assert tab.run("document.querySelector('#detail .a1')?.textContent") == "red"
    tab.run("document.getElementById('row1').click()")
    tab.until(f"{SHOWN}?.startsWith('big')")
    tab.run("document.querySelector('.more').click()")
    assert (
        tab.run("Math.max(...[...document.querySelectorAll('#detail pre')].map((p) => p.textContent.length))")
        > 1e6
    )
    tab.run("document.querySelector('.actions input').click()")
    tab.until(f"{DETAIL}.includes('\\u241b[31mred')")
    assert not set("\x00\x1b\u202e") & set(tab.run("document.body.textContent"))
    assert tab.run("document.title") == "run · Rollcage report"
    assert tab.errors == []


def test_many_tasks_are_shown_when_they_are_asked_for(tab: Browser, tmp_path: Path) -> None:
    tab.window(1280, 900)
    tab.open(a_page(a_run(tmp_path / "run", tasks=AT_ONCE + 3, samples=1)))
    rows = "document.querySelectorAll('table.tasks tbody tr').length"
    assert tab.run(rows) == AT_ONCE
    tab.run("document.getElementById('all-tasks').click()")
    assert tab.run(rows) == AT_ONCE + 3
    tab.open(a_page(a_run(tmp_path / "again", tasks=AT_ONCE + 3, samples=1)))
    tab.run("document.querySelectorAll('table.tasks th button')[0].click()")  # what is sorted is all of them
    assert tab.run(rows) == AT_ONCE + 3
    assert tab.errors == []


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_a_phone_in_light_and_dark(tab: Browser, tmp_path: Path, dark: bool) -> None:
    tab.window(390, 844, dark=dark, mobile=True)
    tab.open(a_page(a_run(tmp_path / "run")))
    assert tab.run("document.documentElement.scrollWidth") <= 390
    [red, *_] = tab.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (red < 60) is dark
    tab.run("document.getElementById('row0').click()")
    tab.until(SHOWN)
    assert tab.run("getComputedStyle(document.getElementById('list')).display") == "none"
    assert tab.run("document.documentElement.scrollWidth") <= 390
    tab.run("document.querySelector('.back').click()")
    assert tab.run("getComputedStyle(document.getElementById('list')).display") == "block"
