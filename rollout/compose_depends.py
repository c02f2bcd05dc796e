"""What services ask of each other: an order to start in, and networks that keep nobody apart."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from rollcage.rollout.compose_model import Service
from rollcage.rollout.compose_yaml import Place
from rollcage.rollout.sandbox.subnets import SMALL_PLACES
from rollcage.rollout.task_model import Problem


def check_depends(services: Mapping[str, Service], places: Mapping[str, Place], root: Place) -> None:
    """No service may depend on itself, by whatever way, or on one that is not there."""
    if ring := _ring(services):
        said = f"depends on itself: {' -> '.join(_shown(ring))}"
        places.get(ring[0], root).problem(said, "take one of these out of depends_on")
        return
    for name, service in services.items():
        for dependency in service.depends:
            if dependency.service not in services and dependency.required:
                why = "a profile leaves out" if dependency.service in places else "is not there"
                said = f"depends on {dependency.service}, which {why}"
                places.get(name, root).problem(said, "correct the name, or write the service")


def _ring(services: Mapping[str, Service]) -> list[str]:
    """Services of which each depends on the next and the last is the first; empty where there are none such.
    Without recursion, as a chain may be longer than Python's stack is deep."""
    done: set[str] = set()
    for first in services:
        above: dict[str, None] = {}  # an ordered set: the way from `first` to where the walk is
        pending = [first]
        while pending:
            name = pending[-1]
            if name in done or name not in services:
                pending.pop()
            elif name in above:  # all that it depends on has been seen
                del above[name]
                done.add(name)
                pending.pop()
            else:
                above[name] = None
                for dependency in services[name].depends:
                    if dependency.service in above:
                        way = list(above)
                        return [*way[way.index(dependency.service) :], dependency.service]
                    pending.append(dependency.service)
    return []


def _shown(ring: list[str], most: int = 10) -> list[str]:
    return ring if len(ring) <= most else [*ring[: most - 1], "...", ring[-1]]


def check_count(services: Mapping[str, Service], root: Place) -> None:
    """One task's network has no place for more."""
    joined = sum(not service.network for service in services.values())
    if joined > SMALL_PLACES:
        said = f"has {joined} services, and a task has at most {SMALL_PLACES} containers on its network"
        problem = Problem(root.document.file, root.line, said, "run several in one container", "unsupported")
        root.document.problems.append(problem)


def check_apart(services: Mapping[str, Service], networks: Mapping[str, Place], root: Place) -> None:
    """All services must share a network with each other, and have internet all or none: `has_internet`."""
    joined: dict[frozenset[str], str] = {}
    for name, service in services.items():
        if not service.network:
            joined.setdefault(frozenset(service.networks or ("default",)), name)
    for (its, one), (theirs, other) in combinations(joined.items(), 2):
        if not its & theirs:
            place = next(iter(networks.values()), root)
            said = f"networks keep {one} and {other} apart, who share none"
            problem = Problem(place.document.file, place.line, said, "give them one network", "unsupported")
            place.document.problems.append(problem)
            return
    closed = {name for name, place in networks.items() if is_internal(place)}
    if closed and len({its <= closed for its in joined}) > 1:
        place = networks[min(closed)]
        place.unsupported("is internal for some services and not for others", "give all services one network")


def is_internal(place: Place) -> bool:
    """Whether a network has no way out."""
    internal = place.get("internal")
    return internal is not None and internal.flag()
