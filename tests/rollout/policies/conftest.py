"""vLLM on the CPU, for all tests: one engine in this process, one server for policies that speak HTTP, both with the
small model; and tiny models, where what they say does not matter."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
import tiny_models

from rollcage.rollout.policies import smollm2
from rollcage.rollout.policies.leash import Leash
from rollcage.rollout.policies.vllm import CPU_ENVIRONMENT, QUIET_ENVIRONMENT, VllmEngine

START_SEC = 300.0

CONTEXT = 512
"""Of the engine in this process."""


@dataclass
class VllmServer:
    """A server of OpenAI's and Anthropic's APIs. `url` has no path. It knows the small model by `name`."""

    url: str
    name: str
    model: Path
    max_model_len: int
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def running(self) -> bool:
        return self.process.poll() is None


class VllmServers:
    """Starts a server when one is asked for and none runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server: VllmServer | None = None
        self._leash: Leash | None = None

    def running(self) -> VllmServer:
        if self._server is None or not self._server.running:
            self.stop()
            self._server = self._start()
        return self._server

    def stop(self) -> None:
        """End the server with its engine, in whatever state they are."""
        if self._leash is not None:
            self._leash.pull()
        if self._server is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._server.process.pid, signal.SIGKILL)
            self._server.process.wait()
        self._server = self._leash = None

    def _start(self) -> VllmServer:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        model, length, log = smollm2.prepare(), 2048, self._folder / f"vllm-{port}.log"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--served-model-name", "smollm2", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--max-model-len", str(length), "--max-num-seqs", "8"]
        command += ["--enforce-eager", "--dtype", "float32", "--enable-prompt-tokens-details"]
        # Of the prefix cache: a CPU's own, 128, is longer than a test's prompts, and it takes multiples of 32.
        command += ["--block-size", "32"]
        command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-scale-out"]
        scratch = Path(tempfile.mkdtemp(prefix="rollcage-test-vllm-"))  # short: it holds sockets
        environment = {"OMP_NUM_THREADS": "1", **CPU_ENVIRONMENT, **QUIET_ENVIRONMENT, **os.environ}
        environment |= {"TMPDIR": str(scratch), "VLLM_RPC_BASE_PATH": str(scratch)}
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._leash = Leash([process.pid], scratch=scratch)
        url = f"http://127.0.0.1:{port}"
        server = self._server = VllmServer(url, "smollm2", model, length, log, process)
        until = time.monotonic() + START_SEC
        while not _answers(f"{url}/health"):
            if not server.running or time.monotonic() > until:
                self.stop()
                pytest.fail(f"vLLM's server did not start: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.25)
        return server


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="session")
def vllm_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServers]:
    servers = VllmServers(tmp_path_factory.mktemp("vllm"))
    yield servers
    servers.stop()


@pytest.fixture
def vllm_server(vllm_servers: VllmServers) -> VllmServer:
    """The server, started where none runs: a test that kills it costs the next one a start, so it comes last."""
    return vllm_servers.running()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine() -> AsyncIterator[VllmEngine]:
    """As users have it: kernels are compiled (tests/conftest.py). The last test of test_vllm.py kills it."""
    engine = VllmEngine(
        str(smollm2.prepare()), {"max_model_len": CONTEXT, "max_num_seqs": 8}, tool_parser="hermes"
    )
    with pytest.MonkeyPatch.context() as environ:
        environ.delenv("TORCHDYNAMO_DISABLE", raising=False)
        await engine.start()
    yield engine
    await engine.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a tiny model (`tests/tiny_models.py`) with tags of thinking in its tokenizer."""

    def make(name: str, *, seed: int, hidden: int = 64) -> Path:
        folder = tmp_path_factory.mktemp("tiny") / name
        return tiny_models.tiny_model(folder, seed, hidden=hidden, tokens=("<think>", "</think>"))

    return make


@pytest.fixture(scope="session")
def tiny_adapter(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a LoRA adapter of a tiny model's queries, with random weights."""

    def make(name: str, *, seed: int, rank: int = 8, hidden: int = 64, module: str = "q_proj") -> Path:
        import torch
        from safetensors.torch import save_file

        target = tmp_path_factory.mktemp("adapter") / name
        target.mkdir()
        config = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": rank,
            "target_modules": [module],
            "bias": "none",
        }
        (target / "adapter_config.json").write_text(json.dumps(config))
        generator = torch.Generator().manual_seed(seed)
        weights = {}
        for layer in range(2):
            at = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{at}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator)
            weights[f"{at}.lora_B.weight"] = torch.randn(hidden, rank, generator=generator)
        save_file(weights, target / "adapter_model.safetensors")
        return target

    return make
