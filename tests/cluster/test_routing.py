"""Routing sessions to replicas, without Ray."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rollcage.cluster.routing import CLIENT_SEC, DOUBT_SEC, Report, Routing


def well(life: str, kv_use: float = 0.0, requests: int = 0) -> Report:
    return Report(life, serves=True, open=True, kv_use=kv_use, requests=requests)


def routing(*reports: Report) -> Routing:
    made = Routing()
    made.report(dict(enumerate(reports, start=1)))
    return made


def test_a_session_stays_and_new_ones_go_where_there_are_fewest() -> None:
    router = routing(well("a"), well("b"), well("c"))
    first = [router.place("client", f"s{i}", 0.0) for i in range(9)]
    assert Counter(first) == {1: 3, 2: 3, 3: 3}
    assert [router.place("client", f"s{i}", 1.0) for i in range(9)] == first
    router.ended([f"s{i}" for i in range(9) if first[i] == 2])
    for i in range(3):
        router.report({1: well("a"), 2: well("b"), 3: well("c")})
        assert router.place("client", f"new{i}", 2.0) == 2


def test_new_sessions_go_by_kv_use_then_by_requests_then_by_sessions() -> None:
    router = routing(well("a", 0.55, 1), well("b", 0.21, 30), well("c", 0.29, 20))
    assert router.place("client", "s", 0.0) == 3
    router.report({1: well("a", 0.5), 2: well("b", 0.21, 1), 3: well("c", 0.29, 1)})
    assert router.place("client", "t", 0.0) == 2  # of as many requests the one with fewer sessions


def test_sessions_that_come_at_once_are_spread_before_any_is_measured() -> None:
    router = routing(well("a", requests=4), well("b", requests=0))
    assert Counter(router.place("client", f"s{i}", 0.0) for i in range(10)) == {1: 3, 2: 7}


def test_sessions_of_a_lost_replica_move_and_it_is_back_with_another_life() -> None:
    router = routing(well("a"), well("b"))
    at = router.place("client", "s", 0.0)
    life, other = ("a", 2) if at == 1 else ("b", 1)
    router.doubt(life, 0.0)
    assert router.place("client", "s", 0.1) == other
    router.report({1: well("a"), 2: well("b")})  # a report that was under way
    assert {router.place("client", f"t{i}", 0.2) for i in range(4)} == {other}
    router.report({1: well("a2"), 2: well("b2")})
    assert {router.place("client", f"u{i}", 0.3) for i in range(8)} == {1, 2}


def test_who_doubts_a_life_in_error_does_not_lose_it_for_ever() -> None:
    router = routing(well("a"))
    router.doubt("a", 0.0)
    assert router.place("client", "s", DOUBT_SEC - 0.1) is None
    assert router.place("client", "s", DOUBT_SEC) == 1


def test_one_that_is_updated_keeps_its_sessions_and_gets_new_ones_only_alone() -> None:
    router = routing(well("a"), well("b"))
    sessions = {i: router.place("client", f"s{i}", 0.0) for i in range(2)}
    updating = Report("a", serves=True)
    router.report({1: updating, 2: well("b")})
    assert {i: router.place("client", f"s{i}", 1.0) for i in range(2)} == sessions
    assert {router.place("client", f"n{i}", 1.0) for i in range(4)} == {2}
    router.report({1: updating})
    assert router.place("client", "last", 1.0) == 1


def test_one_that_drains_keeps_nothing() -> None:
    router = routing(well("a"), well("b"))
    for i in range(4):
        router.place("client", f"s{i}", 0.0)
    router.report({1: Report("a"), 2: well("b")})
    assert {router.place("client", f"s{i}", 1.0) for i in range(4)} == {2}
    router.report({2: well("b")})
    assert router.sessions(1) == 0
    assert router.sessions(2) == 4


def test_sessions_of_a_process_that_is_gone_are_not_counted() -> None:
    router = routing(well("a"), well("b"))
    for i in range(6):
        router.place("dead", f"s{i}", 0.0)
    router.place("alive", "t", CLIENT_SEC + 1)
    assert router.sessions(1) + router.sessions(2) == 1
    assert not router.knows("dead")
    assert router.knows("alive")


def test_a_router_that_began_anew_learns_where_sessions_are() -> None:
    router = routing(well("a"), well("b"))
    assert not router.knows("client")
    router.adopt("client", {"s": 2, "t": 2, "gone": 7}, 0.0)
    assert router.knows("client")
    assert (router.sessions(1), router.sessions(2)) == (0, 2)
    assert router.place("client", "s", 0.0) == 2


STEP = st.tuples(
    st.sampled_from(["place", "end", "report", "doubt", "adopt", "later"]),
    st.integers(0, 5),
    st.integers(0, 3),
    st.sampled_from(["well", "updating", "none", "absent"]),
)


@given(st.lists(STEP, max_size=80))
def test_whatever_happens_turns_go_to_replicas_that_take_them_and_counts_are_right(
    steps: list[tuple[str, int, int, str]],
) -> None:
    router, now = Routing(), 0.0
    reports: dict[int, Report] = {}
    doubted: dict[str, float] = {}
    alive: set[str] = set()
    for what, session, number, how in steps:
        name = f"s{session}"
        if what == "place":
            serving = {n for n, r in reports.items() if r.serves and now >= doubted.get(r.life, now)}
            placed = router.place("client", name, now)
            assert placed in serving if serving else placed is None
            if placed is not None:
                alive.add(name)
                assert router.place("client", name, now) == placed
            else:
                alive.discard(name)
        elif what == "end":
            router.ended([name])
            alive.discard(name)
        elif what == "report":
            if how == "absent":
                reports.pop(number, None)
            else:
                life = f"life{number}-{session}"
                reports[number] = Report(life, serves=how != "none", open=how == "well")
            router.report(reports)
        elif what == "doubt" and number in reports:
            router.doubt(reports[number].life, now)
            doubted[reports[number].life] = now + DOUBT_SEC
        elif what == "adopt":
            router.adopt("client", {name: number}, now)
            if number in reports:
                alive.add(name)
        elif what == "later":
            now += 4.0
        counted = sum(router.sessions(n) for n in range(4))
        assert counted <= len(alive)
