"""Ray on this machine, for tests that need no job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import ray

from rollcage.cluster.actors import WORKER_NICENESS


@contextmanager
def local_ray(*, num_cpus: int = 2, num_gpus: int = 0) -> Iterator[None]:
    """Ray is there inside the block. Its workers have the niceness that they have in a job: at Ray's own, engines get
    hardly any time beside other tests."""
    ray.init(
        address="local",
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        include_dashboard=False,
        object_store_memory=128 << 20,
        log_to_driver=False,
        _system_config={"worker_niceness": WORKER_NICENESS},
    )
    try:
        yield
    finally:
        ray.shutdown()
