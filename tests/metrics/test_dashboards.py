"""Dashboards: current, complete, and every query of theirs has data in a real Prometheus."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from threading import Event, Thread
from typing import Any

import pytest
import vllm_metrics
import yaml
from real_prometheus import RULES, Prometheus, prometheus

from rollcage.metrics.dashboards.build import BOARDS, path_of
from rollcage.metrics.dashboards.panels import Board, json_of
from rollcage.metrics.definitions import FAMILIES
from rollcage.metrics.exporter import Exporter
from rollcage.metrics.queries import metrics_of, unknown
from rollcage.metrics.serving import serve
from rollcage.metrics.simulated import ticking

RECORDED = {
    rule["record"]: rule["expr"]
    for group in yaml.safe_load((RULES / "recording.yaml").read_text("utf-8"))["groups"]
    for rule in group["rules"]
}
BOARDS_BY_UID = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)


def panels(board: Board) -> list[dict[str, Any]]:
    made = json.loads(path_of(board).read_text("utf-8"))
    rows = [panel for panel in made["panels"] if panel["type"] == "row"]
    return [panel for panel in made["panels"] if panel["type"] != "row"] + [
        panel for row in rows for panel in row.get("panels", ())
    ]


def vllm_metrics_of(query: str) -> set[str]:
    return set(re.findall(r"vllm:\w+", query))


def as_asked(query: str) -> str:
    """With Grafana's variables filled in."""
    asked = query.replace("$__rate_interval", "1m")
    for choice in ("$cluster", "$host", "$policy"):
        asked = asked.replace(choice, ".*")
    assert "$" not in asked
    return asked


QUERIES = [
    pytest.param(target["expr"], id=f"{board.uid}: {panel['title']} {target['refId']}")
    for board in BOARDS
    for panel in panels(board)
    for target in panel["targets"]
]


@BOARDS_BY_UID
def test_the_json_is_current(board: Board) -> None:
    assert path_of(board).read_text("utf-8") == json_of(board)


def test_there_is_no_other_json() -> None:
    assert set(path_of(BOARDS[0]).parent.glob("*.json")) == set(map(path_of, BOARDS))


@BOARDS_BY_UID
def test_a_dashboard_can_be_provisioned_anywhere_and_leads_to_the_others(board: Board) -> None:
    made = json.loads(path_of(board).read_text("utf-8"))
    assert made["uid"] == board.uid
    assert made.get("id") is None
    assert made["templating"]["list"][0]["type"] == "datasource"
    others, report = made["links"]
    assert (others["type"], others["tags"], others["keepTime"]) == ("dashboards", ["rollcage"], True)
    assert (report["type"], report["url"]) == ("link", "${report}")
    assert {"name": "report", "type": "textbox"}.items() <= made["templating"]["list"][1].items()
    assert made["tags"] == ["rollcage"]


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_is_of_the_clusters_that_were_chosen(query: str) -> None:
    chosen = re.findall(r"rollcage_[\w:]+\{instance=~\"\$cluster\"", query)
    assert len(chosen) == len(re.findall(r"[\w:]*rollcage_[\w:]+", query))


@BOARDS_BY_UID
def test_a_dashboard_can_be_had_for_one_cluster(board: Board) -> None:
    variables = {
        one["name"]: one for one in json.loads(path_of(board).read_text("utf-8"))["templating"]["list"]
    }
    assert variables["cluster"]["query"] == "label_values(rollcage_build_info, instance)"
    assert variables["cluster"]["allValue"] == ".*"


@BOARDS_BY_UID
def test_a_panel_has_all_that_a_reader_needs(board: Board) -> None:
    found = panels(board)
    assert len(found) == len(board.panels) == len({panel["id"] for panel in found})
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in found}
    assert len(places) == len(found)
    for panel in found:
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        for target in panel["targets"]:
            assert (
                target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            )


@pytest.mark.parametrize("query", QUERIES)
def test_every_metric_of_a_query_exists(query: str) -> None:
    assert metrics_of(query) or vllm_metrics_of(query)
    assert not unknown(query, RECORDED)
    assert vllm_metrics_of(query) <= vllm_metrics.samples()


def test_a_metric_that_vllm_has_not_would_be_found() -> None:
    assert not vllm_metrics_of("rate(vllm:num_preemptions[5m])") <= vllm_metrics.samples()
    assert not vllm_metrics_of("rate(vllm:gpu_cache_usage_perc[5m])") <= vllm_metrics.samples()
    assert vllm_metrics.declared()["vllm:num_preemptions"].labels == ("model_name", "engine")


def test_every_family_of_a_job_or_a_host_is_on_a_dashboard_or_in_a_rule() -> None:
    text = " ".join([*(str(query.values[0]) for query in QUERIES), *RECORDED.values()])
    shown = metrics_of(text)
    left_out = {
        family.full_name
        for family in FAMILIES
        if not any(re.fullmatch(family.full_name + "(_bucket|_sum|_count)?", name) for name in shown)
    }
    assert left_out == {
        "rollcage_build_info",
        "rollcage_command_output_bytes_total",
        "rollcage_exporter_snapshots_total",
        "rollcage_exporter_sources",
        "rollcage_job_progress_timestamp_seconds",
        "rollcage_job_started_timestamp_seconds",
    }


@pytest.fixture(scope="module")
def scraping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has scraped simulated hosts and jobs for some seconds, while they go on."""
    exporter, stop = Exporter(exemplars=True), Event()

    def work() -> None:
        for _ in ticking(exporter, hosts=2, jobs=2, policies=2):
            if stop.wait(0.5):
                return

    server, worker = serve(exporter, port=0), Thread(target=work)
    worker.start()
    try:
        with (
            vllm_metrics.simulated_vllm() as vllm,
            prometheus(tmp_path_factory.mktemp("data"), f"127.0.0.1:{server.port}", vllm=vllm) as found,
        ):
            found.wait_for("count_over_time(cluster:rollcage_attempts:rate5m[5m]) > 2")
            yield found
    finally:
        stop.set()
        worker.join()
        server.close()


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_of_a_panel_has_data(query: str, scraping: Prometheus) -> None:
    assert scraping.wait_for(as_asked(query))


def test_points_of_a_panel_with_exemplars_name_attempts(scraping: Prometheus) -> None:
    with_exemplars = [
        target["expr"]
        for board in BOARDS
        for panel in panels(board)
        for target in panel["targets"]
        if target.get("exemplar")
    ]
    assert len(with_exemplars) == 3
    for query in map(as_asked, with_exemplars):
        scraping.wait_for(query)
        found = scraping.exemplars(query)
        assert found
        for series in found:
            assert series["seriesLabels"]["__name__"] == "rollcage_attempts_total"
            assert all(set(one["labels"]) == {"job_id", "attempt_id"} for one in series["exemplars"])


def test_labels_of_ours_are_called_in_prometheus_as_the_docs_call_them(scraping: Prometheus) -> None:
    for family in FAMILIES:
        name = family.full_name + ("_count" if family.buckets else "")
        found = scraping.wait_for(name)[0]["metric"]
        assert set(found) - {"__name__", "instance", "job"} == set(family.label_names)


def test_a_choice_of_a_dashboard_is_a_label_of_its_metric(scraping: Prometheus) -> None:
    for board in BOARDS:
        for label, metric in board.choices.items():
            assert {one["metric"][label] for one in scraping.wait_for(metric)} == {f"{label}-0", f"{label}-1"}


def test_every_recorded_rule_has_data(scraping: Prometheus) -> None:
    for name in RECORDED:
        scraping.wait_for(name)
