"""The exporter: sums, restarts of whoever counts and of itself, and its port."""

from __future__ import annotations

import base64
import contextlib
import errno
import http.client
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from certificates import self_signed
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from rollcage.metrics.counts import Counts, Example, UnknownLabel
from rollcage.metrics.definitions import FAMILIES, MOST, OTHER, Kind, Sender, most_series
from rollcage.metrics.exporter import ADDED_UP, FORGET_SEC, SILENT_SEC, Exporter
from rollcage.metrics.serving import AT_ONCE, Server, serve
from rollcage.metrics.simulated import simulate

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def samples(exporter: Exporter) -> Samples:
    registry = CollectorRegistry()
    registry.register(exporter)
    return parsed(generate_latest(registry).decode())


def parsed(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of(found: Samples, name: str) -> float:
    return sum(value for (other, _), value in found.items() if other == "rollcage_" + name)


def a_host(name: str = "host-1") -> Counts:
    counts = Counts(Sender.HOST, {"host": [name]})
    counts.set("host_up", 1, name)
    counts.set("sandboxes", 2, "warm", name)
    return counts


def a_job(name: str = "j", *, dispatched: int = 0, ended: int = 0, commits: int = 0) -> Counts:
    counts = Counts(Sender.JOB, {"agent": ["a"], "policy": ["p"], "job_id": [name]})
    counts.add("attempts_dispatched", amount=dispatched)
    counts.add("attempts_ended", amount=ended)
    counts.add("ledger_commits", amount=commits)
    counts.set("attempts_in_flight", dispatched - ended)
    return counts


def test_all_families_and_constant_series_are_there_before_anybody_counts() -> None:
    found = samples(Exporter())
    for family in FAMILIES:
        for labels in family.series({}):
            name = family.full_name + ("_count" if family.kind is Kind.HISTOGRAM else "")
            key = (name, tuple(sorted(zip(family.label_names, labels, strict=True))))
            assert found[key] == (1.0 if family.name == "build_info" else 0.0)


def test_hosts_are_added_up_and_keep_gauges_of_their_own() -> None:
    exporter = Exporter()
    for number, built in enumerate((3, 4)):
        counts = a_host(f"host-{number}")
        counts.add("image_builds", "built", amount=built)
        counts.observe("image_build_seconds", 0.1 * 10**number)
        exporter.accept(f"host-{number}", counts.snapshot(), incarnation="1")
    found = samples(exporter)
    assert found["rollcage_image_builds_total", (("result", "built"),)] == 7
    assert found["rollcage_sandboxes", (("host", "host-1"), ("state", "warm"))] == 2
    buckets = [
        found["rollcage_image_build_seconds_bucket", (("le", le),)] for le in ("0.1", "0.5", "1.0", "+Inf")
    ]
    assert buckets == [1, 1, 2, 2]
    assert found["rollcage_image_build_seconds_sum", ()] == pytest.approx(1.1)


def test_a_scrape_with_all_names_that_may_be_declared_stays_within_the_bound_of_the_docs() -> None:
    exporter = Exporter()
    simulate(exporter, hosts=MOST["host"], jobs=MOST["job_id"], policies=MOST["policy"], agents=MOST["agent"])
    assert len(samples(exporter)) == most_series()


def values_of(found: Samples, label: str) -> set[str]:
    return {value for _, labels in found for name, value in labels if name == label}


@pytest.mark.parametrize("label", MOST)
def test_no_label_has_more_values_than_it_may_and_what_is_beyond_is_counted(
    label: str, tmp_path: Path
) -> None:
    most, sender = MOST[label], Sender.HOST if label == "host" else Sender.JOB
    exporter = Exporter(tmp_path, clock=Clock())
    sent = {}
    for number in range(most + 3):
        counts = Counts(sender, {label: [f"n{number}"]})
        if label == "agent":
            counts.add("commands", f"n{number}")
        if label == "policy":
            counts.observe("policy_queue_seconds", 1, f"n{number}")
            counts.set("policy_version", number, f"n{number}")
        if label == "host":
            counts.add("image_builds", "built")
            counts.set("sandboxes", 1, "warm", f"n{number}")
        if label == "job_id":
            counts.add("ledger_commits")
        sent[f"s{number}"] = counts.snapshot()
    said = {name: exporter.accept(name, one, incarnation="1") for name, one in sent.items()}
    beyond = {name for name, text in said.items() if text}
    for after in (exporter, Exporter(tmp_path, clock=Clock())):
        found = samples(after)
        assert len(values_of(found, label)) == most
        match label:
            case "agent":
                assert len(beyond) == 4
                assert "n18 is counted as 'other'" in said["s18"]
                assert of(found, "commands_total") == most + 3
                assert found["rollcage_commands_total", (("agent", "other"),)] == 4
            case "policy":
                assert of(found, "policy_queue_seconds_count") == most + 3
                assert found["rollcage_policy_queue_seconds_count", (("policy", "other"),)] == 4
                assert found["rollcage_policy_version", (("policy", "other"),)] == most + 2
            case "host":
                assert beyond == {"s256", "s257", "s258"}
                assert "n256 has no gauges of its own" in said["s256"]
                assert of(found, "image_builds_total") == most + 3
                assert of(found, "sandboxes") == most
            case "job_id":
                assert of(found, "ledger_commits_total") == most + 3
    # Whoever has a place keeps it, and who has none takes that of one that is gone.
    again = {name: exporter.accept(name, sent[name], incarnation="2") for name in sent}
    assert {name for name, text in again.items() if text} == beyond
    if label in ("host", "job_id"):
        exporter.accept("s0", sent["s0"], incarnation="2", final=True)
        assert exporter.accept(f"s{most}", sent[f"s{most}"], incarnation="3") == ""


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_a_counter_that_is_no_number_is_refused_and_changes_nothing(wrong: float) -> None:
    exporter = Exporter(clock=Clock())
    counts = a_job()
    with pytest.raises(ValueError, match="a counter never falls and is a number"):
        counts.add("ledger_commits", amount=wrong)
    with pytest.raises(ValueError, match="a counter never falls"):
        counts.set("ledger_commits", wrong)
    with pytest.raises(ValueError, match="a counter never falls"):
        counts.observe("command_seconds", wrong)
    snapshot = counts.snapshot()
    snapshot.values["ledger_commits"][()] = wrong
    before = samples(exporter)
    with pytest.raises(ValueError, match="rollcage_ledger_commits_total: a counter never falls"):
        exporter.accept("j", snapshot, incarnation="1")
    assert samples(exporter) == before


def test_jobs_that_ended_make_room_for_others() -> None:
    exporter = Exporter()
    for number in range(3 * MOST["job_id"]):
        exporter.accept(f"j{number}", a_job(f"j{number}").snapshot(), incarnation="1", final=True)
    assert of(samples(exporter), "job_rollouts") == 0


def test_a_host_that_starts_again_adds_to_what_it_had_counted() -> None:
    exporter = Exporter()
    for incarnation in "123":
        counts = a_host()
        counts.add("image_builds", "built", amount=5)
        counts.observe("sandbox_remove_seconds", 1)
        exporter.accept("h", counts.snapshot(), incarnation=incarnation)
    found = samples(exporter)
    assert of(found, "image_builds_total") == 15
    assert of(found, "sandbox_remove_seconds_count") == 3
    assert of(found, "host_up") == 1


def test_a_driver_that_goes_on_begins_where_its_ledger_is() -> None:
    exporter = Exporter()
    exporter.accept("j", a_job(dispatched=10, ended=7, commits=2).snapshot(), incarnation="1")
    exporter.accept("j", a_job(dispatched=8, ended=8, commits=1).snapshot(), incarnation="2")
    found = samples(exporter)
    assert [
        of(found, f"attempts_{name}") for name in ("dispatched_total", "ended_total", "abandoned_total")
    ] == [
        10,
        8,
        2,
    ]
    assert of(found, "ledger_commits_total") == 3


def test_a_job_that_ends_with_attempts_in_flight_has_abandoned_them() -> None:
    exporter, snapshot = Exporter(), a_job(dispatched=10, ended=7).snapshot()
    for _ in range(2):
        exporter.accept("j", snapshot, incarnation="1", final=True)
    found = samples(exporter)
    names = ("dispatched_total", "ended_total", "abandoned_total", "in_flight")
    assert [of(found, f"attempts_{name}") for name in names] == [10, 7, 3, 0]
    assert not [key for key in found if ("job_id", "j") in key[1]]


def test_a_late_snapshot_changes_nothing() -> None:
    exporter, counts = Exporter(), a_host()
    early = counts.snapshot()
    counts.add("image_builds", "built")
    exporter.accept("h", counts.snapshot(), incarnation="1")
    exporter.accept("h", early, incarnation="1")
    assert of(samples(exporter), "image_builds_total") == 1
    exporter.accept("h", a_host().snapshot(), incarnation="2")
    exporter.accept("h", counts.snapshot(), incarnation="1")
    assert of(samples(exporter), "image_builds_total") == 1


def test_a_silent_host_is_down_then_gone_and_its_counts_stay() -> None:
    clock = Clock()
    exporter, counts = Exporter(clock=clock), a_host()
    counts.add("image_builds", "built")
    exporter.accept("h", counts.snapshot(), incarnation="1")
    clock.now += SILENT_SEC + 1
    found = samples(exporter)
    assert found["rollcage_host_up", (("host", "host-1"),)] == 0
    assert ("rollcage_sandboxes", (("host", "host-1"), ("state", "warm"))) not in found
    clock.now += FORGET_SEC[Sender.HOST]
    found = samples(exporter)
    assert ("rollcage_host_up", (("host", "host-1"),)) not in found
    assert of(found, "image_builds_total") == 1
    exporter.accept("h", counts.snapshot(), incarnation="1")
    assert samples(exporter)["rollcage_host_up", (("host", "host-1"),)] == 1


def test_a_job_whose_driver_is_dead_keeps_its_gauges_for_the_alert_and_is_forgotten_at_last() -> None:
    clock = Clock()
    exporter = Exporter(clock=clock)
    exporter.accept("j", a_job(dispatched=3, ended=1).snapshot(), incarnation="1")
    clock.now += SILENT_SEC * 2
    assert of(samples(exporter), "attempts_in_flight") == 2
    assert of(samples(exporter), "exporter_silent_seconds") == SILENT_SEC * 2
    clock.now += FORGET_SEC[Sender.JOB]
    found = samples(exporter)
    assert (of(found, "attempts_in_flight"), of(found, "attempts_abandoned_total")) == (0, 2)
    assert of(found, "exporter_sources") == 0


def test_an_exporter_that_starts_again_knows_all_that_it_had_accepted(tmp_path: Path) -> None:
    before = Exporter(tmp_path)
    simulate(before, hosts=3, jobs=2, policies=2, ticks=3)
    for name in ("a/b", "a_b", "../x", "ü"):
        before.accept(name, a_job(name, dispatched=2, ended=1).snapshot(), incarnation="1")
    before.accept("ü" * 300, a_job(dispatched=2, ended=1).snapshot(), incarnation="1")
    (tmp_path / "torn.tmp").write_text("{")
    after = Exporter(tmp_path)
    now, then = (
        {key: value for key, value in samples(one).items() if not re.search("exporter_s|_silent_", key[0])}
        for one in (after, before)
    )
    assert now == then


def test_a_state_of_another_version_is_read_as_far_as_this_one_knows_it(tmp_path: Path) -> None:
    before, counts = Exporter(tmp_path), a_job(dispatched=2, ended=2)
    counts.observe("phase_seconds", 3, "agent")
    counts.observe("command_seconds", 3)
    before.accept("j", counts.snapshot(), incarnation="1")
    [file] = tmp_path.glob("*.json")
    data = json.loads(file.read_text())
    data["last"]["values"] |= {"gone": [[[], 3.0]], "commands": [[["a", "another label"], 1.0]]}
    data["last"]["histograms"] |= {"command_seconds": [[[], [0, 1], 3.0]], "gone": [[[], [1], 1.0]]}
    data["last"]["declared"] |= {"galaxy": ["milky way"], "policy": ["p", *map(str, range(99))]}
    del data["last"]["values"]["ledger_commits"]
    file.write_text(json.dumps(data))
    found = samples(Exporter(tmp_path))
    assert of(found, "attempts_ended_total") == 2
    assert of(found, "phase_seconds_count") == 1
    assert of(found, "command_seconds_count") == of(found, "commands_total") == 0


def test_a_jump_of_the_machines_clock_forgets_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = Exporter(tmp_path)
    exporter.accept("j", a_job(dispatched=3, ended=1).snapshot(), incarnation="1")
    exporter.accept("h", a_host().snapshot(), incarnation="1")
    now = time.time()
    for jump in (10 * 24 * 3600.0, -10 * 24 * 3600.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: now + jump)
        found = samples(exporter)
        assert of(found, "host_up") == 1
        assert of(found, "attempts_in_flight") == 2
        assert of(found, "attempts_abandoned_total") == 0
    assert of(samples(Exporter(tmp_path)), "host_up") == 1  # backwards, while it was not there


def test_how_long_a_source_was_silent_outlives_the_exporter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Exporter(tmp_path).accept("h", a_host().snapshot(), incarnation="1")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + SILENT_SEC * 2)
    found = samples(Exporter(tmp_path))
    assert of(found, "host_up") == 0
    assert of(found, "exporter_silent_seconds") == pytest.approx(SILENT_SEC * 2, abs=5)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"name": 1}'])
def test_a_spoiled_state_file_is_named_with_a_remedy(tmp_path: Path, text: str) -> None:
    (tmp_path / "j.json").write_text(text)
    with pytest.raises(ValueError, match=r"j\.json: this is no snapshot .*; delete it"):
        Exporter(tmp_path)


def get(
    url: str, *, context: ssl.SSLContext | None = None, user: str | None = None, accept: str = "*/*"
) -> str:
    request = urllib.request.Request(url, headers={"Accept": accept})
    if user:
        request.add_header("Authorization", "Basic " + base64.b64encode(user.encode()).decode())
    with urllib.request.urlopen(request, timeout=30, context=context) as answer:
        return str(answer.read().decode())


@pytest.fixture
def serving(simulated: Exporter, request: pytest.FixtureRequest) -> Callable[..., Server]:
    def start(**options: object) -> Server:
        server = serve(simulated, port=0, **options)  # type: ignore[arg-type]
        request.addfinalizer(server.close)
        return server

    return start


def test_a_scrape_is_what_prometheus_itself_calls_good(serving: Callable[..., Server]) -> None:
    url = f"http://127.0.0.1:{serving().port}/metrics"
    text = get(url)
    assert of(parsed(text), "attempts_ended_total") > 0
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    families = {
        family.name for family in openmetrics(get(url, accept="application/openmetrics-text; version=1.0.0"))
    }
    assert families == {"rollcage_" + family.name for family in FAMILIES}


def exemplars(exporter: Exporter) -> dict[tuple[str, ...], dict[str, str]]:
    """Of rollcage_attempts_total in OpenMetrics: by error class and agent."""
    registry = CollectorRegistry()
    registry.register(exporter)
    return {
        (sample.labels["error_class"], sample.labels["agent"]): sample.exemplar.labels
        for family in openmetrics(generate_openmetrics(registry).decode())
        for sample in family.samples
        if sample.exemplar is not None
    }


def example(counts: Counts, agent: str, attempt_id: str, job_id: str = "j") -> None:
    labels = ("invalid", "infra", "network_setup", agent)
    counts.add("attempts", *labels)
    counts.example("attempts", *labels, job_id=job_id, attempt_id=attempt_id)


def test_exemplars_name_the_last_attempt_of_each_ending_where_they_are_wanted() -> None:
    plain, wanted = Exporter(), Exporter(exemplars=True)
    one, two = (Counts(Sender.JOB, {"agent": ["a", "b"], "job_id": [job]}) for job in "xy")
    example(one, "a", "1-1")
    example(one, "a", "2-1")
    example(two, "b", "3-1")
    for exporter in (plain, wanted):
        for job, counts in (("x", one), ("y", two)):
            exporter.accept(job, counts.snapshot(), incarnation="1", final=job == "y")
    example(one, "b", "4-1")
    wanted.accept("x", one.snapshot(), incarnation="1")
    assert exemplars(plain) == {}
    assert exemplars(wanted) == {
        ("network_setup", "a"): {"job_id": "j", "attempt_id": "2-1"},
        ("network_setup", "b"): {"job_id": "j", "attempt_id": "4-1"},
    }
    assert of(samples(wanted), "attempts_total") == 4


def test_an_exemplar_too_long_for_openmetrics_is_left_out_and_one_of_no_series_is_refused() -> None:
    exporter, counts = Exporter(exemplars=True), Counts(Sender.JOB, {"agent": ["a"], "job_id": ["j"]})
    example(counts, "a", "1-1", job_id="j" * 109)  # with the two names 128 characters
    example(counts, "a", "2-1", job_id="j" * 110)
    exporter.accept("j", counts.snapshot(), incarnation="1")
    assert [one["attempt_id"] for one in exemplars(exporter).values()] == ["1-1"]
    with pytest.raises(UnknownLabel):
        example(counts, "nobody", "3-1")
    unknown = counts.snapshot()
    unknown.examples["attempts"]["invalid", "infra", "network_setup", "nobody"] = Example({}, 0.0)
    with pytest.raises(UnknownLabel):
        exporter.accept("j", unknown, incarnation="1")


def test_an_exemplar_of_an_agent_too_many_is_of_other() -> None:
    exporter = Exporter(exemplars=True)
    agents = [f"a{number}" for number in range(MOST["agent"] + 1)]
    counts = Counts(Sender.JOB, {"agent": agents, "job_id": ["j"]})
    for number, agent in enumerate((*agents[-2:], agents[-2])):
        example(counts, agent, f"{number}-1")
    exporter.accept("j", counts.snapshot(), incarnation="1")
    assert exemplars(exporter) == {("network_setup", OTHER): {"job_id": "j", "attempt_id": "2-1"}}


def test_only_who_knows_the_password_is_answered(serving: Callable[..., Server]) -> None:
    url = f"http://127.0.0.1:{serving(user='prometheus', password='gehåim').port}/metrics"
    for wrong in (None, "prometheus:x", "x:gehåim"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            get(url, user=wrong)
    assert "rollcage_attempts_total" in get(url, user="prometheus:gehåim")
    lower = urllib.request.Request(url)
    lower.add_header("Authorization", "basic " + base64.b64encode("prometheus:gehåim".encode()).decode())
    with urllib.request.urlopen(lower, timeout=30) as answer:
        assert answer.status == 200


def test_clients_that_say_nothing_have_a_bounded_number_of_threads_and_leave_room_again(
    serving: Callable[..., Server],
) -> None:
    server = serving()
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(AT_ONCE + 20)]
    idle[-1].settimeout(30)
    assert idle[-1].recv(1) == b""  # closed at once
    assert threading.active_count() < AT_ONCE + 20
    for one in idle:
        one.close()
    until = time.monotonic() + 30
    while time.monotonic() < until:
        with contextlib.suppress(OSError, urllib.error.URLError):
            assert "rollcage_attempts_total" in get(f"http://127.0.0.1:{server.port}/metrics")
            return
        time.sleep(0.1)
    pytest.fail("no scrape is answered any more")


@pytest.mark.parametrize("path", ["", "/", "/metric", "/metrics/", "/targets"])
def test_a_path_that_there_is_not_names_those_that_there_are(
    serving: Callable[..., Server], path: str
) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404") as raised:
        get(f"http://127.0.0.1:{serving().port}{path}")
    assert raised.value.read() == b"there is /metrics\n"


@pytest.mark.parametrize("path", ["/metrics", "/targets"])
def test_head_has_no_body_and_other_methods_are_refused(serving: Callable[..., Server], path: str) -> None:
    port = serving(targets=lambda: "[]").port
    answers = {}
    for method in ("GET", "HEAD", "POST", "DELETE"):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request(method, path)
        with contextlib.closing(connection), connection.getresponse() as answer:
            answers[method] = (answer.status, bool(answer.read()))
    assert answers == {"GET": (200, True), "HEAD": (200, False), "POST": (405, True), "DELETE": (405, True)}


def test_a_client_that_is_slow_for_ever_is_cut_off(
    serving: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollcage.metrics.serving.ANSWERED_SEC", 1.0)
    with socket.create_connection(("127.0.0.1", serving().port), timeout=30) as slow:
        until = time.monotonic() + 30
        with pytest.raises(OSError):  # noqa: PT011 -- a reset, or a broken pipe
            while time.monotonic() < until:
                slow.sendall(b"G")
                time.sleep(0.1)
    assert time.monotonic() < until


def test_a_certificate_that_is_not_there_is_named(serving: Callable[..., Server], tmp_path: Path) -> None:
    with pytest.raises(
        OSError, match=re.escape(f"certificate {tmp_path / 'c.pem'} with the key {tmp_path / 'k'}")
    ):
        serving(certificate=tmp_path / "c.pem", key=tmp_path / "k")


def test_half_of_a_pair_is_refused(simulated: Exporter, tmp_path: Path) -> None:
    for options in ({"user": "u"}, {"certificate": tmp_path}):
        with pytest.raises(ValueError, match="go together"):
            serve(simulated, port=0, **options)  # type: ignore[arg-type]


def test_tls_answers_though_a_client_that_says_nothing_is_connected(
    serving: Callable[..., Server], tmp_path: Path
) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    self_signed(certificate, key)
    port = serving(certificate=certificate, key=key).port
    with socket.create_connection(("127.0.0.1", port)):
        context = ssl.create_default_context(cafile=str(certificate))
        assert "rollcage_attempts_total" in get(f"https://127.0.0.1:{port}/metrics", context=context)
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        get(f"https://127.0.0.1:{port}/metrics")


def test_hosts_of_a_killed_driver_are_gone_once_another_one_goes_on(tmp_path: Path) -> None:
    clock = Clock()
    exporter = Exporter(tmp_path, clock=clock)
    exporter.accept("j", a_job().snapshot(), incarnation="1")
    exporter.accept("host-1", a_host().snapshot(), incarnation="1", of="j")
    clock.now += 60
    other = a_host("host-2")
    exporter.accept("host-2", other.snapshot(), incarnation="1", of="j")
    exporter.accept("j", a_job().snapshot(), incarnation="2")
    exporter.accept("host-2", other.snapshot(), incarnation="1", of="j")
    up = {labels: value for (name, labels), value in samples(exporter).items() if name == "rollcage_host_up"}
    assert up == {(("host", "host-2"),): 1.0}


def test_sources_that_have_ended_are_added_up_once_and_still_counted() -> None:
    exporter = Exporter()
    for number in range(5):
        exporter.accept(f"h{number}", a_host(f"h{number}").snapshot(), incarnation="1", final=True)
    before = of(samples(exporter), "image_builds_total")
    late = a_host("h0")
    late.add("image_builds", "built", amount=7)
    late.snapshot()
    exporter.accept("h0", late.snapshot(), incarnation="2", final=True)
    assert of(samples(exporter), "image_builds_total") == before + late.value("image_builds", "built")


def test_a_job_that_is_not_heard_says_for_how_long(tmp_path: Path) -> None:
    clock = Clock()
    exporter = Exporter(clock=clock)
    for job in ("dead", "alive", "ended"):
        exporter.accept(job, a_job(job).snapshot(), incarnation="1", final=job == "ended")
    clock.now += 200
    alive = a_job("alive")
    alive.snapshot()
    exporter.accept("alive", alive.snapshot(), incarnation="1")
    clock.now += 1
    found = samples(exporter)
    silent = {
        labels: value for (name, labels), value in found.items() if name == "rollcage_job_silent_seconds"
    }
    assert silent == {(("job_id", "dead"),): 201.0, (("job_id", "alive"),): 1.0}


def test_hosts_that_are_gone_are_added_up_and_a_kill_while_that_is_done_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    exporter = Exporter(tmp_path, clock=clock)

    def gone(first: int, final: bool) -> None:
        for number in range(first, first + ADDED_UP):
            counts = a_host(f"h{number}")
            counts.add("image_builds", "built")
            counts.observe("image_build_seconds", 1)
            exporter.accept(f"h{number}", counts.snapshot(), incarnation="1", final=final)
        clock.now += FORGET_SEC[Sender.HOST] + 1

    def counted(one: Exporter) -> tuple[float, float]:
        found = samples(one)
        return of(found, "image_builds_total"), of(found, "image_build_seconds_count")

    gone(0, final=True)
    assert counted(exporter) == (ADDED_UP, ADDED_UP)
    assert len(list(tmp_path.glob("*.json"))) == 1
    gone(ADDED_UP, final=False)
    unlink, left = Path.unlink, 5

    def killed(path: Path, missing_ok: bool = False) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", killed)
    with pytest.raises(KeyboardInterrupt):
        samples(exporter)
    monkeypatch.undo()
    assert len(list(tmp_path.glob("*.json"))) == ADDED_UP - 5 + 1
    for _ in range(2):
        assert counted(Exporter(tmp_path, clock=clock)) == (2 * ADDED_UP, 2 * ADDED_UP)
        assert len(list(tmp_path.glob("*.json"))) == 1


def test_a_scrape_of_a_cluster_that_had_thousands_of_jobs_and_hosts_is_as_fast_as_that_of_a_new_one() -> None:
    clock = Clock()
    old, new = Exporter(clock=clock), Exporter(clock=clock)
    host, job = a_host().snapshot(), a_job(dispatched=5, ended=5).snapshot()
    for number in range(1000):
        old.accept(f"h{number}", host, incarnation="1", final=True)
        old.accept(f"j{number}", job, incarnation="1", final=True)
        clock.now += 60
    for exporter in (old, new):
        simulate(exporter, hosts=8, jobs=2)
        samples(exporter)

    def cost(exporter: Exporter) -> float:
        begun = time.process_time()
        for _ in range(10):
            samples(exporter)
        return time.process_time() - begun

    assert of(samples(old), "attempts_ended_total") > 5000
    assert min(cost(old) for _ in range(3)) < 1.5 * min(cost(new) for _ in range(3)) + 0.05


def test_a_ledger_that_lost_its_last_attempts_breaks_no_identity() -> None:
    exporter = Exporter()
    exporter.accept("j", a_job(dispatched=10, ended=10).snapshot(), incarnation="1")
    exporter.accept("j", a_job(dispatched=8, ended=8).snapshot(), incarnation="2")
    found = samples(exporter)
    names = ("dispatched_total", "ended_total", "abandoned_total", "in_flight")
    assert [of(found, f"attempts_{name}") for name in names] == [10, 10, 0, 0]


def test_attempts_that_were_begun_before_the_first_word_of_the_next_driver_are_abandoned_none_the_less() -> (
    None
):
    exporter = Exporter()
    exporter.accept("j", a_job(dispatched=10, ended=8).snapshot(), incarnation="1")
    following = a_job(dispatched=8, ended=8)
    following.begin()
    following.add("attempts_dispatched", amount=4)
    following.set("attempts_in_flight", 4)
    exporter.accept("j", following.snapshot(), incarnation="2")
    found = samples(exporter)
    names = ("dispatched_total", "ended_total", "abandoned_total", "in_flight")
    assert [of(found, f"attempts_{name}") for name in names] == [14, 8, 2, 4]


def test_what_a_full_disk_did_not_take_is_kept_as_soon_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    exporter = Exporter(state)
    exporter.accept("j", a_job(dispatched=3, ended=1).snapshot(), incarnation="1")
    shutil.rmtree(state)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    later = a_job(dispatched=7, ended=5)
    later.snapshot()
    with pytest.raises(OSError, match="No space left"):
        exporter.accept("j", later.snapshot(), incarnation="1", final=True)
    assert of(samples(exporter), "attempts_ended_total") == 5
    monkeypatch.undo()
    exporter.accept("h", a_host().snapshot(), incarnation="1")
    found = samples(Exporter(state))
    assert (of(found, "attempts_ended_total"), of(found, "attempts_in_flight")) == (5, 0)
    assert of(found, "host_up") == 1
