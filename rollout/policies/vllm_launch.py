"""Brings vLLM's `AsyncLLM` up, with its environment, its arguments and its temporary files, and takes it down.

vLLM leaves sockets, rendezvous files and compiled code in the folder for temporary files. Its processes are given
one of their own (`rollout/scratch.py`), which goes with the engine. Where ours is killed, also while the engine loads,
it goes with the processes that have it (`leash.py`).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError

from rollcage.rollout.outcome import Evidence, PolicyError
from rollcage.rollout.policies.leash import Leash, shared_memory
from rollcage.rollout.policies.vllm_load import LoadRecorder
from rollcage.rollout.policies.vllm_weights import (
    adapter_rank,
    local_directory,
    rank_for,
    require_adapter_fits,
)
from rollcage.rollout.scratch import VLLM, make_scratch, remove_abandoned, remove_scratch

CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Where the user sets none. 1 GiB of KV cache, not half of the machine's memory; threads unbound, because the
engine shares the cores with the sandboxes."""

CPU_ARGUMENTS = {
    "enforce_eager": True,
    "dtype": "float32",
    "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
}
"""Likewise. vLLM's own choice, bfloat16, is half as fast on a CPU without instructions for it. One worker computes in
the process of the engine's core: vLLM gives it one of its own, to set OpenMP's variables there, which are set here
before any of them starts. That one costs 0.7 GiB and a third of the start, and is waited for in a loop."""

COMPACT = {"backend": "xgrammar", "disable_any_whitespace": True}
"""Of structured answers: between the fields of a JSON object there may be white space without end otherwise, and small
models use up their tokens on it. vLLM lets only a backend that is named be told so; this is its first choice."""

QUIET_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}

QUIET_LOGGERS = ("vllm.tool_parsers", "vllm.reasoning", "vllm.parser", "vllm.v1.engine.async_llm")
"""They print a traceback for an answer that no parser can read, and for an engine whose end is reported already."""

GRACE_SEC, SHUTDOWN_SEC = 8.0, 14.0
"""vLLM asks its processes to end, and kills those that are there after the first. Past the second they are killed
here. The 5 s that vLLM has of itself are too short on a machine that is busy."""

LOOK_SEC = 0.5
"""How often the processes of an engine that loads are looked at."""

FAILURES = (
    RuntimeError, ValueError, OSError, TypeError, LookupError, AttributeError, AssertionError, ImportError,
)  # fmt: skip
"""What vLLM raises over a model or a setting that it cannot load: it checks few of them."""

_ERROR, _WHY = re.compile(r"\b\w*(?:Error|Exception): .+"), "initialization failed"
"""An error's line of a traceback, and what vLLM says where another of its processes has the reason."""

_LAUNCHING = threading.Lock()
"""The environment is the process's: one engine starts at a time."""


@dataclass
class Launched:
    """An engine that runs. `processes`: its core and its workers. `shared`: their shared memory."""

    llm: Any
    recorder: LoadRecorder
    processes: list[psutil.Process]
    shared: set[Path]
    _scratch: tuple[Path, int]
    _leash: Leash

    async def close(self) -> None:
        """End it in whatever state it is, hung or stopped too, and every request that waits for it with
        `EngineDeadError`. No process is left, and no file."""
        from vllm.v1.engine.exceptions import EngineDeadError

        llm = self.llm
        self.llm = None
        try:
            if llm.output_handler is not None:  # else it reports the engine's end as a failure
                llm.output_handler.cancel()
                await asyncio.wait([llm.output_handler])
            llm.output_processor.propagate_error(EngineDeadError())
            stopping = asyncio.ensure_future(asyncio.to_thread(llm.shutdown, GRACE_SEC))
            await asyncio.wait([stopping], timeout=SHUTDOWN_SEC)
            await asyncio.to_thread(self._kill)
            await stopping
        finally:
            await asyncio.to_thread(self._kill)
            for file in self.shared:
                file.unlink(missing_ok=True)
            self._leash.drop()
            remove_scratch(*self._scratch)
            del llm
            gc.collect()  # it is part of cycles, and holds sockets

    def _kill(self) -> None:
        for process in self.processes:
            try:
                process.kill()  # checks that it is the same process still
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(self.processes, timeout=GRACE_SEC)


def launch(
    model: str, engine_args: Mapping[str, Any], *, lora: Path | None, reasoning_parser: str | None
) -> Launched:
    """Load the model; takes from seconds to many minutes. `lora` is an adapter that will be served.

    Raises `ValueError` for a path of no model, an engine argument that vLLM does not have, or an adapter that is none,
    and `PolicyError` (`policy_unavailable`) where the engine does not come up.
    """
    if Path(model).is_absolute() and not Path(model).exists():
        raise ValueError(
            f"there is no {model}: name a model's directory on this machine, or its Hugging Face id"
        )
    with _LAUNCHING:
        remove_abandoned((VLLM,))
        try:
            scratch = make_scratch(VLLM)
        except OSError as error:
            raise _not_started(model, error) from error
        leash = Leash(scratch=scratch[0])
        recorder = LoadRecorder()
        seen: set[Path] = set()
        try:
            with _files_below(scratch[0]), _watched(scratch[0], leash, seen):
                llm = _load(model, engine_args, recorder, lora, reasoning_parser)
        except BaseException:
            leash.drop()
            for file in seen:
                file.unlink(missing_ok=True)
            remove_scratch(*scratch)
            raise
    processes = _processes(llm)
    shared = seen.union(*(shared_memory(process.pid) for process in processes))
    leash.also(shared)
    return Launched(llm, recorder, processes, shared, scratch, leash)


def plain_tokenizer(llm: Any) -> Any:
    """The engine's tokenizer without the wrappers that vLLM puts around it, each of which pickles as its maker and what
    it wraps: with them every process that is sent it, and so every host of sandboxes, would load vLLM and torch."""
    tokenizer = llm.get_tokenizer()
    while type(tokenizer).__module__ == "vllm.tokenizers.hf":
        tokenizer = tokenizer.__reduce__()[1][0]
    return tokenizer


def cpu_threads() -> int:
    """OpenMP threads of an engine without a GPU: half of the CPUs. A second thread on the same core gains
    little alone, and much is lost when one of them waits for a core that a sandbox has: with 12 runnable
    processes on 2 CPUs, 2 threads have been seen to give a third of what 1 gives."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def lora_arguments(path: Path, model: str) -> dict[str, Any]:
    """Engine arguments for an adapter, and room for the next version's beside it. Raises `ValueError`."""
    require_adapter_fits(path, local_directory(model))
    return {"enable_lora": True, "max_lora_rank": rank_for(adapter_rank(path)), "max_cpu_loras": 2}


def structured_outputs(given: Any) -> Any:
    """vLLM's configuration of structured answers: `given`, by name, above `COMPACT`; who names a backend says all of it
    himself. Raises `ValueError`."""
    from vllm.config import StructuredOutputsConfig

    if not isinstance(given, Mapping):
        return given
    try:
        return StructuredOutputsConfig(**{**({} if "backend" in given else COMPACT), **given})
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ValueError(f"vLLM does not take this structured_outputs_config: {wrong}") from error


def _load(
    model: str,
    engine_args: Mapping[str, Any],
    recorder: LoadRecorder,
    lora: Path | None,
    reasoning_parser: str | None,
) -> Any:
    for name, value in QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    class Engine(AsyncLLM):  # type: ignore[misc]
        """Closed by its owner; what is left of it at the interpreter's end closes nothing, and says nothing."""

        def __del__(self) -> None: ...

    settings: dict[str, Any] = {"model": model, "enable_log_requests": False}
    if current_platform.is_cpu():
        settings |= CPU_ARGUMENTS
        os.environ.setdefault("OMP_NUM_THREADS", str(cpu_threads()))
        for name, value in CPU_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    if lora is not None:
        settings |= lora_arguments(lora, model)
    if reasoning_parser is not None:
        settings["reasoning_parser"] = reasoning_parser
    settings |= engine_args
    settings["disable_log_stats"] = False  # without its statistics a request has no times
    settings["structured_outputs_config"] = structured_outputs(settings.get("structured_outputs_config", {}))
    try:
        arguments = AsyncEngineArgs(**settings)
    except TypeError as error:
        raise ValueError(f"vLLM does not take these engine arguments: {error}") from error
    log = Path("/proc/self/fd/2")
    before = log.stat().st_size if log.is_file() else 0
    try:
        llm = Engine.from_engine_args(arguments, stat_loggers=[lambda config, index: recorder])
    except FAILURES as error:
        raise _not_started(model, error, root_cause(log, before)) from error
    for name in QUIET_LOGGERS:  # vLLM sets its loggers anew while it starts
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return llm


def root_cause(log: Path, before: int) -> str:
    """The last error in what vLLM's processes wrote to `log`, if that is a file, behind its first `before` bytes: of a
    process that fails vLLM says only to look there. Empty where there is none."""
    if not log.is_file():
        return ""
    with log.open("rb") as stream:
        stream.seek(before)
        found = [line for line in _ERROR.findall(stream.read().decode(errors="replace")) if _WHY not in line]
    return found[-1].strip() if found else ""


def _not_started(model: str, error: Exception, cause: str = "") -> PolicyError:
    said = f"vLLM did not start with {model}: {cause if cause and _WHY in str(error) else error}"
    return PolicyError("policy_unavailable", said, Evidence(said, "policy server"))


@contextmanager
def _files_below(folder: Path) -> Iterator[None]:
    """Processes that are started inside, all of them engines' (`spawn`), put their temporary files there."""
    names = ("TMPDIR", "VLLM_RPC_BASE_PATH")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, str(folder)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _watched(scratch: Path, leash: Leash, seen: set[Path]) -> Iterator[None]:
    """Inside, the shared memory of the processes whose temporary files are in `scratch` is put into `seen` and told to
    the leash as it comes: where Ray ends an actor that loads, it ends these first, and then nobody could tell."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_SEC):
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error, OSError):
                    if process.environ().get("TMPDIR") == str(scratch):
                        new = shared_memory(process.pid) - seen
                        seen.update(new)
                        leash.also(new)

    looking = threading.Thread(target=look, name="vllm-shared-memory", daemon=True)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()


def _processes(llm: Any) -> list[psutil.Process]:
    manager = getattr(llm.engine_core.resources, "engine_manager", None)
    found: list[psutil.Process] = []
    for started in getattr(manager, "processes", ()):
        with suppress(psutil.NoSuchProcess):  # the first token asked of it says so
            core = psutil.Process(started.pid)
            found += [core, *core.children(recursive=True)]
    return found
