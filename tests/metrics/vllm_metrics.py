"""vLLM's own metrics, as the source of the installed vLLM declares them: imported, it would take torch along and want a
model's configuration."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rollcage.metrics.serving import serve

KINDS = {"_counter_cls": Counter, "_gauge_cls": Gauge, "_histogram_cls": Histogram}
COMMON = ("model_name", "engine")
"""What `labelnames` is in vLLM's constructor."""


@dataclass(frozen=True)
class Declared:
    name: str
    kind: type[Counter] | type[Gauge] | type[Histogram]
    labels: tuple[str, ...]


@cache
def declared() -> dict[str, Declared]:
    """Those of its logger for Prometheus, by name."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0]) / "v1" / "metrics" / "loggers.py"
    found = {}
    for node in ast.walk(ast.parse(source.read_text("utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in KINDS:
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            name, labels = given.get("name"), given.get("labelnames")
            if isinstance(name, ast.Constant) and labels is not None:
                found[name.value] = Declared(name.value, KINDS[node.func.attr], _labels(labels))
    assert len(found) > 20, f"{source} declares its metrics in another way"
    return found


def _labels(node: ast.expr) -> tuple[str, ...]:
    if isinstance(node, ast.BinOp):
        return _labels(node.left) + _labels(node.right)
    if isinstance(node, ast.Name) and node.id == "labelnames":
        return COMMON
    return tuple(one.value for one in getattr(node, "elts", ()) if isinstance(one, ast.Constant))


@cache
def samples() -> frozenset[str]:
    """Names of the samples of a scrape."""
    found = set()
    for one in declared().values():
        ends = {Counter: ("_total",), Gauge: ("",), Histogram: ("_bucket", "_sum", "_count")}[one.kind]
        found |= {
            one.name.removesuffix("_total") + end if one.kind is Counter else one.name + end for end in ends
        }
    return frozenset(found)


@contextmanager
def simulated_vllm() -> Iterator[str]:
    """The address (host:port) of one that counts something in each of its metrics, twice a second."""
    registry, stop = CollectorRegistry(), Event()
    made = [
        one.kind(one.name, one.name, one.labels, registry=registry)
        for one in declared().values()
        if one.labels
    ]

    def work() -> None:
        while not stop.wait(0.5):
            for metric in made:
                child = metric.labels(*("x" for _ in metric._labelnames))
                child.observe(1) if isinstance(child, Histogram) else child.inc()

    server = serve(registry, port=0, plain=True)
    worker = Thread(target=work)
    worker.start()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        stop.set()
        worker.join()
        server.close()
