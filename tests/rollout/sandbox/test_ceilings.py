"""A machine's own limits are named before they are met."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollcage.rollout.sandbox import ceilings as ceilings_module
from rollcage.rollout.sandbox.ceilings import ceilings


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ceilings_module, "PROC_SYS", tmp_path)
    monkeypatch.setattr(ceilings_module.psutil, "process_iter", lambda _attrs: iter(()))
    for name, value in {"kernel/pid_max": 4_194_304, "net/ipv4/neigh/default/gc_thresh3": 512}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{value}\n")
    return tmp_path


def test_the_lowest_comes_first_and_says_how_it_is_raised(machine: Path) -> None:
    lowest, *others = ceilings()
    assert (lowest.name, lowest.sandboxes) == ("net.ipv4.neigh.default.gc_thresh3", 512)
    assert lowest.remedy(1000) == (
        "net.ipv4.neigh.default.gc_thresh3 is 512: sysctl -w net.ipv4.neigh.default.gc_thresh3=2000"
    )
    assert [other.name for other in others] == ["kernel.pid_max"]


def test_what_raises_a_limit_really_makes_room(machine: Path) -> None:
    for ceiling in ceilings():
        value = int(ceiling.remedy(10_000_000).rpartition("=")[2])
        (machine / ceiling.name.replace(".", "/")).write_text(str(value))
    assert all(ceiling.sandboxes >= 10_000_000 for ceiling in ceilings())


def test_a_real_machine_has_room_for_some() -> None:
    assert ceilings()[0].sandboxes > 0
