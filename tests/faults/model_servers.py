"""Model servers that fail: one on loopback that speaks the wires and does as its URL says, and vLLM's own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import aiohttp
import psutil
from aiohttp import web
from vllm_processes import all_engines

from rollcage.rollout.policies.leash import Leash
from rollcage.rollout.policies.vllm import CPU_ENVIRONMENT, QUIET_ENVIRONMENT

CONTEXT = 2048
"""Tokens of the tiny model's."""

ANSWER = "```bash\necho 42 >/app/answer\nsubmit\n```"

REFUSALS = {
    "storm": (429, "slow down", {"Retry-After": "0"}),
    "wait": (429, "slow down", {"Retry-After": "120"}),
    "overloaded": (529, "overloaded", {}),
    "500": (500, "oh", {}),
    "dead": (500, "EngineCore encountered an issue.", {}),
    "503": (503, "no", {}),
    "504": (504, "too slow", {}),
    "refused": (400, "temperature must be non-negative", {}),
    "long": (400, "max_tokens must be at least 1, got -186", {}),
    "too_long": (400, "prompt is too long: 20000 tokens > 16384 maximum", {}),
}
"""What a server says that refuses: status, words, headers."""


class Wire:
    """Speaks OpenAI's chat API at `/FAULT/v1/chat/completions` and the Messages API at `/FAULT/v1/messages`: FAULT is
    of `REFUSALS`, or `reset`, `endless`, `passes` (its fourth request is answered) or `one_fails` (every session but
    the first is answered). Requests of a fault are counted in `asked`; `open` are those that it is at."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: dict[str, int] = {}
        self.open = 0
        self._failed = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        fault = request.match_info["fault"]
        await request.read()
        self.asked[fault] = self.asked.get(fault, 0) + 1
        self.open += 1
        try:
            return await self._answer(fault, request)
        finally:
            self.open -= 1

    async def health(self, _: web.Request) -> web.Response:
        """Of a server whose engine is dead."""
        return web.Response(status=503)

    async def _answer(self, fault: str, request: web.Request) -> web.StreamResponse:
        if fault == "passes":
            fault = "storm" if self.asked[fault] < 4 else ""
        if fault == "one_fails":
            session = request.headers["x-session-id"]
            self._failed = self._failed or session
            fault = "500" if session == self._failed else ""
        if fault in REFUSALS:
            status, message, headers = REFUSALS[fault]
            error = {"type": "error", "message": message, "code": None}
            return web.json_response({"type": "error", "error": error}, status=status, headers=headers)
        if fault in ("reset", "endless"):
            return await self._begin(fault, request)
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": ANSWER},
        }
        return web.json_response({"object": "chat.completion", "choices": [choice]})

    async def _begin(self, fault: str, request: web.Request) -> web.StreamResponse:
        kind = "text/event-stream" if request.path.endswith("/messages") else "application/json"
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        while True:
            await response.write(b'event: ping\ndata: {"type": "ping"}\n\n' if "event" in kind else b" " * 64)
            if fault == "reset":
                assert request.transport is not None
                request.transport.abort()
                return response
            await asyncio.sleep(0.02)


@asynccontextmanager
async def wire() -> AsyncIterator[Wire]:
    served = Wire()
    app = web.Application()
    app.router.add_post("/{fault}/v1/{path:.*}", served.handle)
    app.router.add_get("/dead/health", served.health)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    served.url = f"http://{host}:{port}"
    try:
        yield served
    finally:
        await runner.cleanup()


class VllmServer:
    """vLLM's own server with a tiny model called `tiny`. Its port goes on answering when its engine is dead."""

    def __init__(self, model: Path, port: int, process: subprocess.Popen[bytes]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.model = model
        self.process = process

    def signal(self, signum: signal.Signals) -> None:
        """To the server and its engine."""
        os.killpg(self.process.pid, signum)

    def engine(self) -> psutil.Process:
        [engine] = all_engines(1, below=self.process.pid)
        return engine

    async def started(self) -> None:
        async with aiohttp.ClientSession() as client:
            while True:
                if self.process.poll() is not None:
                    raise RuntimeError("vLLM's server did not start")
                try:
                    async with client.get(f"{self.url}/health") as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.1)

    async def running_some(self) -> bool:
        """Whether its engine is at work on any request."""
        return await self._running() > 0

    async def running_none(self) -> bool:
        """Whether its engine has no request left."""
        return await self._running() == 0

    async def _running(self) -> float:
        async with aiohttp.ClientSession() as client, client.get(f"{self.url}/metrics") as response:
            text = await response.text()
        [line] = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
        return float(line.rsplit(" ", 1)[1])


@contextmanager
def vllm_server(model: Path) -> Iterator[VllmServer]:
    """Begun, not started yet; ended in whatever state it is."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    command += [
        "--max-model-len",
        str(CONTEXT),
        "--max-num-seqs",
        "8",
        "--enforce-eager",
        "--dtype",
        "float32",
    ]
    environment = {
        "OMP_NUM_THREADS": "1",
        "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1",
        **CPU_ENVIRONMENT,
        **QUIET_ENVIRONMENT,
        **os.environ,
    }
    scratch = Path(tempfile.mkdtemp(prefix="rollcage-test-vllm-"))
    environment |= {"TMPDIR": str(scratch), "VLLM_RPC_BASE_PATH": str(scratch)}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    leash = Leash([process.pid], scratch=scratch)
    try:
        yield VllmServer(model, port, process)
    finally:
        leash.pull()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
