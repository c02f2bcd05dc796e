"""The exporter: sums, restarts of whoever counts and of itself, and its port."""

from __future__ import annotations

import base64
import shlex
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from rollcage.metrics.counts import Counts, UnknownLabel
from rollcage.metrics.definitions import FAMILIES, MOST, Kind, Sender, most_series
from rollcage.metrics.exporter import FORGET_SEC, SILENT_SEC, Exporter
from rollcage.metrics.serving import Server, serve
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


@pytest.mark.parametrize("label", MOST)
def test_a_source_with_one_name_too_many_is_refused_and_changes_nothing(label: str) -> None:
    exporter, sender = Exporter(clock=Clock()), Sender.HOST if label == "host" else Sender.JOB
    for number in range(MOST[label]):
        exporter.accept(f"s{number}", Counts(sender, {label: [f"n{number}"]}).snapshot(), incarnation="1")
    before = samples(exporter)
    with pytest.raises(UnknownLabel, match="state directory"):
        exporter.accept("more", Counts(sender, {label: ["one more"]}).snapshot(), incarnation="1")
    assert samples(exporter) == before
    exporter.accept("again", Counts(sender, {label: ["n0"]}).snapshot(), incarnation="1")


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
    (tmp_path / "torn.tmp").write_text("{")
    after = Exporter(tmp_path)
    assert {k: v for k, v in samples(after).items() if "exporter_s" not in k[0]} == {
        k: v for k, v in samples(before).items() if "exporter_s" not in k[0]
    }


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


def test_only_who_knows_the_password_is_answered(serving: Callable[..., Server]) -> None:
    url = f"http://127.0.0.1:{serving(user='prometheus', password='gehåim').port}/metrics"
    for wrong in (None, "prometheus:x", "x:gehåim"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            get(url, user=wrong)
    assert "rollcage_attempts_total" in get(url, user="prometheus:gehåim")


def test_half_of_a_pair_is_refused(simulated: Exporter, tmp_path: Path) -> None:
    for options in ({"user": "u"}, {"certificate": tmp_path}):
        with pytest.raises(ValueError, match="go together"):
            serve(simulated, port=0, **options)  # type: ignore[arg-type]


def test_tls_answers_though_a_client_that_says_nothing_is_connected(
    serving: Callable[..., Server], tmp_path: Path
) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        shlex.split(
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost "
            f"-addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout {key} -out {certificate}"
        ),
        check=True,
        capture_output=True,
    )
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
