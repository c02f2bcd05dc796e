"""Ray on this machine, for tests that need no job, and for jobs that join a cluster."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray._common.utils import get_default_ray_temp_dir
from ray.cluster_utils import Cluster

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


@contextmanager
def ray_cluster(*, nodes: int = 1, num_cpus: int = 2) -> Iterator[str]:
    """The address of a cluster on this machine that outlives the jobs that join it. `num_cpus` are those of a node."""
    # Where a cluster's files lie elsewhere, Ray writes its address here all the same, and does not make the directory.
    Path(get_default_ray_temp_dir()).mkdir(exist_ok=True)
    node = {"num_cpus": num_cpus, "object_store_memory": 100 << 20}
    with tempfile.TemporaryDirectory(prefix="rc-", dir="/tmp", ignore_cleanup_errors=True) as files:
        head = node | {"include_dashboard": False, "temp_dir": files}
        made = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(nodes - 1):
            made.add_node(**node)
        yield made.address
        made.shutdown()
