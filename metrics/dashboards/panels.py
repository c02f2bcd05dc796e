"""What a dashboard is made of: a short description of its panels, and Grafana's JSON of it.

    DASHBOARD = Board("rollcage-x", "X", "What X says", (Row("First", (Graph("Title", "What it says", query, ...),)),))
    json_of(DASHBOARD)

Every panel has a description and a unit, every query the data source that the variable `datasource` chooses, and of
Rollcage's metrics those of the exporters (one for each Ray cluster) that the variable `cluster` chooses. uids are
fixed, so that a dashboard that is imported again takes the place of the former one and links stay good.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TypeVar

from grafana_foundation_sdk.builders import common, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models

from rollcage.metrics.queries import NAME

TAG = "rollcage"
RATE = "[$__rate_interval]"
"""The range over which a graph takes rates: Grafana knows the scrape interval and the width of a pixel."""

COLUMNS = 24
"""Width of Grafana's grid."""

_DATA = models.DataSourceRef(type_val="prometheus", uid="${datasource}")

P = TypeVar("P", stat.Panel, timeseries.Panel)


@dataclass(frozen=True)
class Panel:
    """`queries`: each with the text of its legend. `unit`: as Grafana calls it. `warn`, `bad`: where the colour
    changes; a `bad` below `warn` means that less is worse."""

    title: str
    description: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    warn: float | None = None
    bad: float | None = None
    width: int = 8
    height: int = 8


@dataclass(frozen=True)
class Stat(Panel):
    """One number: how it is now."""

    width: int = 4
    height: int = 4


@dataclass(frozen=True)
class Graph(Panel):
    """Lines over time; `stacked` where their sum means something. `exemplars`: those of its queries' counters are
    shown, as points."""

    stacked: bool = False
    exemplars: bool = False


REPORT = "http://127.0.0.1:8000/report.html"
"""Where a run's page is looked for unless told: `python -m http.server` serves a directory there."""


@dataclass(frozen=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    """A dashboard. `choices`: variables that filter, each with the metric whose label it is."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    choices: dict[str, str] = field(default_factory=dict)

    @property
    def panels(self) -> list[Panel]:
        """All of them, in order."""
        return [panel for row in self.rows for panel in row.panels]


def json_of(board: Board) -> str:
    """What Grafana imports."""
    made = (
        builders.Dashboard(f"Rollcage: {board.title}")
        .uid(board.uid)
        .description(board.description)
        .tags([TAG])
        .time("now-1h", "now")
        .refresh("10s")
        .timezone("browser")
        .readonly()
        .link(
            builders.DashboardLink("Rollcage")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .keep_time(True)
            .include_vars(True)
        )
        .link(
            builders.DashboardLink("Run report")
            .type(models.DashboardLinkType.LINK)
            .url("${report}")
            .tooltip("What `rollcage report RUN --html` wrote, served at the address of the variable")
            .target_blank(True)
        )
        .with_variable(builders.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(builders.TextBoxVariable("report").label("Run report's URL").default_value(REPORT))
    )
    made = made.with_variable(_choice("cluster", "rollcage_build_info", "instance"))
    for name, metric in board.choices.items():
        made = made.with_variable(_choice(name, metric, name))
    number = 0
    for row in board.rows:
        made = made.with_row(builders.Row(row.title))
        for panel in row.panels:
            number += 1
            made = made.with_panel(_stat(panel, number) if isinstance(panel, Stat) else _graph(panel, number))
    return json.dumps(made.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _choice(name: str, metric: str, label: str) -> builders.QueryVariable:
    return (
        builders.QueryVariable(name)
        .label(name.capitalize())
        .datasource(_DATA)
        .query(f"label_values({metric}, {label})")
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(selected=True, text="All", value="$__all"))
    )


def _of_the_cluster(query: str) -> str:
    """`query` with Rollcage's metrics of the chosen exporters alone."""

    def chosen(found: re.Match[str]) -> str:
        others = (found["selector"] or "{}")[1:-1]
        return f'{found["name"]}{{instance=~"$cluster"{"," if others else ""}{others}}}'

    return re.sub(rf"(?P<name>{NAME.pattern})(?P<selector>{{[^}}]*}})?", chosen, query)


def _legend(query: str, legend: str) -> str:
    """What is not added up has the name of its exporter, where nothing else of its legend is one cluster's alone."""
    added_up = " by (" in query or query.startswith(("sum(", "min(", "max(", "count("))
    alone = "{{host}}" in legend or "{{job_id}}" in legend
    return legend if added_up or alone else f"{legend} {{{{instance}}}}"


def _stat(panel: Stat, number: int) -> stat.Panel:
    return _common(stat.Panel(), panel, number).color_mode(common_models.BigValueColorMode.VALUE)


def _graph(panel: Panel, number: int) -> timeseries.Panel:
    made = _common(timeseries.Panel(), panel, number).min(0).line_width(1).fill_opacity(10)
    if isinstance(panel, Graph) and panel.stacked:
        made = made.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    if panel.bad is not None:
        line = common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.DASHED)
        made = made.thresholds_style(line)
    return made


def _common(made: P, panel: Panel, number: int) -> P:
    made = made.id(number).title(panel.title).description(panel.description).unit(panel.unit)
    made = made.datasource(_DATA).span(panel.width).height(panel.height).thresholds(_thresholds(panel))
    for index, (query, legend) in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(_of_the_cluster(query)).legend_format(_legend(query, legend))
        target = target.ref_id(chr(ord("A") + index))
        if isinstance(panel, Graph) and panel.exemplars:
            target = target.exemplar(True)
        made = made.with_target(target.datasource(_DATA))
    return made


def _thresholds(panel: Panel) -> builders.ThresholdsConfig:
    steps = [(None, "green"), (panel.warn, "yellow"), (panel.bad, "red")]
    if panel.warn is not None and panel.bad is not None and panel.bad < panel.warn:
        steps = [(None, "red"), (panel.bad, "yellow"), (panel.warn, "green")]
    return (
        builders.ThresholdsConfig()
        .mode(models.ThresholdsMode.ABSOLUTE)
        .steps(
            [
                models.Threshold(value, color)
                for n, (value, color) in enumerate(steps)
                if n == 0 or value is not None
            ]
        )
    )
