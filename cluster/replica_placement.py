"""Where a replica runs: a Ray placement group of a bundle for each of its workers.

The actor is in the first bundle. An engine of one worker runs there too, with the bundle's GPU. An engine of several
(tensor x pipeline parallel) on GPUs starts its workers by vLLM's own Ray executor, which finds the group that its
actor is in, gives each of the first bundles that have a GPU one worker, and wants the first on the actor's node; the
actor itself then has no GPU. On the CPU vLLM has no Ray executor: there the workers are processes of one machine.

What the cluster does not have is told at once, not waited for.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollcage.cluster.config_policies import VllmPolicyConfig
from rollcage.cluster.errors import CouldNotRun, InputError
from rollcage.cluster.replica_protocol import CHECK_SEC, ReplicaSettings

PLACE_SEC = 300.0
"""How long a replica waits for what others have now. A cluster that is shared lets go of it within minutes or not."""

WAIT_SEC = 1.0
"""Of one call that waits for a group in a thread, which cannot be called off."""

Bundles = list[dict[str, float]]


@dataclass(frozen=True)
class Placement:
    """What one replica needs of Ray. `bundles` is empty where that is nothing. `actor`: options of its actor beside the
    bundle, `engine_args` and `environment` what its engine must be told of it."""

    bundles: Bundles
    strategy: str
    actor: Mapping[str, float]
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def placement_of(config: VllmPolicyConfig) -> Placement:
    """Raises `InputError` where the settings contradict each other."""
    workers = config.tensor_parallel_size * config.pipeline_parallel_size
    cpus, gpus = config.num_cpus, config.num_gpus
    if gpus > 1:
        raise InputError(
            f"num_gpus is {gpus:g}, but a worker has one GPU or a part of one: set tensor_parallel_size to the number "
            "of GPUs of a replica, and num_gpus to 1"
        )
    sizes = {
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
    }
    for key, size in sizes.items():
        if (other := config.engine_args.get(key, size)) != size:
            raise InputError(
                f"engine_args.{key} is {other}, and {key} {size}: say it once, beside engine_args"
            )
    args: dict[str, Any] = {key: size for key, size in sizes.items() if size > 1}
    environment: dict[str, str] = {}
    if workers > 1:
        args["distributed_executor_backend"] = "ray" if gpus else "mp"
        if gpus:
            environment["VLLM_RAY_PER_WORKER_GPUS"] = f"{gpus:g}"
    first, other = _needs(CPU=cpus, GPU=gpus), _needs(GPU=gpus)
    bundles = [bundle for bundle in [first, *[other] * (workers - 1)] if bundle]
    actor = {"num_cpus": cpus, "num_gpus": gpus if workers == 1 else 0.0}
    return Placement(bundles, config.placement, actor, args, environment)


def replica_settings(
    config: VllmPolicyConfig, model: str, placement: Placement, check_sec: float = CHECK_SEC
) -> ReplicaSettings:
    """What each replica of this policy is made with."""
    return ReplicaSettings(
        model=model,
        engine_args={**config.engine_args, **placement.engine_args},
        request_timeout_sec=config.request_timeout_sec,
        lora=None if config.lora is None else (config.lora.name, config.lora.path),
        tool_parser=config.tool_parser,
        reasoning_parser=config.reasoning_parser,
        template_kwargs=config.template_kwargs,
        threads=None if config.num_gpus else (config.threads or 0),
        environment=placement.environment,
        health_sec=config.health_sec,
        check_sec=check_sec,
    )


def require_resources(placement: Placement, replicas: int) -> None:
    """Raise `CouldNotRun` where the cluster, were it all free, could not hold so many replicas."""
    nodes = [Counter(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    each: Counter[str] = Counter()
    for bundle in placement.bundles:
        each.update(bundle)
    for key, amount in each.items():
        asked, there = amount * replicas, sum(node[key] for node in nodes)
        if asked > there + 1e-6:
            raise CouldNotRun(
                f"{replicas} replica(s) ask for {asked:g} {key} ({amount:g} each), and the Ray cluster has {there:g} "
                f"on {len(nodes)} node(s): ask for fewer replicas or workers, or add nodes"
            )
    if placement.strategy == "STRICT_PACK" and not any(_holds(node, each) for node in nodes):
        raise CouldNotRun(f"no single node of the Ray cluster has {_shown(each)}, which STRICT_PACK asks for")
    if placement.strategy == "STRICT_SPREAD" and len(placement.bundles) > len(nodes):
        raise CouldNotRun(
            f"STRICT_SPREAD asks for {len(placement.bundles)} nodes, and the Ray cluster has {len(nodes)}"
        )
    for bundle in placement.bundles:
        if not any(_holds(node, bundle) for node in nodes):
            raise CouldNotRun(f"no node of the Ray cluster has {_shown(bundle)}, which one worker asks for")


async def reserve(placement: Placement) -> PlacementGroup | None:
    """The group of one replica, once it has its place; None where it needs none. Raises `CouldNotRun` where others
    have what it needs for longer than `PLACE_SEC`. When this does not return the group is removed."""
    if not placement.bundles:
        return None
    group = placement_group(placement.bundles, strategy=placement.strategy)
    try:
        async with asyncio.timeout(PLACE_SEC):
            while not await asyncio.to_thread(group.wait, WAIT_SEC):
                continue
    except TimeoutError as error:
        remove_placement_group(group)
        needs = ", ".join(map(_shown, placement.bundles))
        free = _shown({key: ray.available_resources().get(key, 0.0) for key in ("CPU", "GPU")})
        raise CouldNotRun(
            f"a replica found no place within {PLACE_SEC:g} s: it asks for {needs} ({placement.strategy}), and {free} "
            "are free in all"
        ) from error
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def give_back(group: PlacementGroup | None) -> None:
    """Remove a group; actors that are still in it end."""
    if group is not None:
        remove_placement_group(group)


def actor_options(placement: Placement, group: PlacementGroup | None) -> dict[str, Any]:
    """Options of Ray for the replica's actor: in the first bundle, and what it starts in the same group."""
    options: dict[str, Any] = dict(placement.actor)
    if group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
        )
    return options


def _needs(**amounts: float) -> dict[str, float]:
    return {key: amount for key, amount in amounts.items() if amount > 0}


def _holds(node: Mapping[str, float], needs: Mapping[str, float]) -> bool:
    return all(node.get(key, 0.0) >= amount for key, amount in needs.items())


def _shown(needs: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {key}" for key, amount in needs.items())
