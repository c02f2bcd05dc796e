"""Rollouts that wait for a policy cost little: 2,000 of them in one process, in memory, threads and files.

In a process of its own, whose memory is measured; the server that lets them wait is another one.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SERVER = """
import asyncio, json, resource, sys

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "done"}}
body = json.dumps({"choices": [choice]}).encode()
head = f"HTTP/1.1 200 OK\\r\\nContent-Type: application/json\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
waiting, everybody = 0, asyncio.Event()


async def answer(reader, writer):
    global waiting
    try:
        await reader.readuntil(b"\\r\\n\\r\\n")
    except asyncio.IncompleteReadError:
        return  # a connection that was given up
    waiting += 1
    if waiting == int(sys.argv[1]):
        everybody.set()
    await everybody.wait()
    await asyncio.sleep(1)
    writer.write(head.encode() + body)
    await writer.drain()
    writer.close()


async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


asyncio.run(main())
"""

CLIENT = """
import asyncio, json, resource, sys, time
import psutil
from rollcage.rollout.policies.base import Sampling
from rollcage.rollout.policies.openai_chat import ChatPolicy
from rollcage.rollout.policies.openai_probe import Offer
from rollcage.rollout.policies.openai_wire import Server, ServerSettings
from rollcage.rollout.trajectory import Message

resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
sessions, port = int(sys.argv[1]), sys.argv[2]
policy = ChatPolicy(
    Server(ServerSettings(f"http://127.0.0.1:{port}/v1", "m", max_connections=sessions)), Offer()
)


async def one(number):
    session = policy.session(f"attempt-{number}", task="t", sample=number)
    made, _ = await session.complete([Message("user", "word " * 500)], Sampling())
    return made.text


async def main():
    me, seen = psutil.Process(), {"rss": 0, "threads": 0}

    async def watch():
        while True:
            seen["rss"] = max(seen["rss"], me.memory_info().rss)
            seen["threads"] = max(seen["threads"], me.num_threads())
            await asyncio.sleep(0.1)

    watching = asyncio.create_task(watch())
    texts = await asyncio.gather(*map(one, range(sessions)))
    watching.cancel()
    print(json.dumps(seen | {"answers": texts.count("done"), "cpu": time.process_time()}))


asyncio.run(main())
"""

SESSIONS = 2000


@pytest.mark.timeout(120)
def test_two_thousand_sessions_wait_in_a_gibibyte_and_without_threads() -> None:
    """The server answers nobody before all of them wait."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(SESSIONS)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        client = [sys.executable, "-c", CLIENT, str(SESSIONS), port]
        done = subprocess.run(client, capture_output=True, text=True, timeout=100, check=False)
    finally:
        server.kill()
        server.wait()
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout)
    print(seen)
    assert seen["answers"] == SESSIONS
    assert seen["rss"] < 1 << 30
    assert seen["threads"] < 20
