"""Running an agent, which is anybody's code, for as long as its clock allows."""

from __future__ import annotations

import asyncio

from rollcage.rollout.agents.base import Agent, AgentContext
from rollcage.rollout.outcome import AgentStopped, Evidence

AGENT_END_SEC = 150.0
"""How long an agent may take to end once it is cancelled: a call of the engine, which is waited for, and a little."""


async def run_agent(agent: Agent, context: AgentContext) -> None:
    """Run `agent` on one step. When this returns or raises, the agent has ended.

    Raises `AgentStopped` (`agent_timeout`) once `context.clock` has expired, also where the agent then ends in
    another way; `RuntimeError` where it ends in one that no agent should: as if it had been cancelled, by
    `sys.exit`, or not within `AGENT_END_SEC` of its timeout. Lets through whatever else the agent raises.
    """
    clock = context.clock
    worker = asyncio.ensure_future(_run(agent, context))
    watch = asyncio.ensure_future(clock.expired())
    try:
        await asyncio.wait({worker, watch}, return_when=asyncio.FIRST_COMPLETED)
        in_time = worker.done()
    finally:
        watch.cancel()
        if not worker.done():
            worker.cancel()
            await asyncio.wait({worker}, timeout=AGENT_END_SEC)
    if not worker.done():
        raise RuntimeError(f"the agent goes on, {AGENT_END_SEC:g} s after its time ran out")
    error = None if worker.cancelled() else worker.exception()
    if not in_time:
        said = f"the agent's {clock.limit_sec:g} s ran out ({clock.infra_seconds:.1f} s more went to waiting)"
        also = () if error is None else (f"as it was stopped: {error!r}",)
        raise AgentStopped("agent_timeout", said, Evidence(said, also=also))
    if worker.cancelled():
        raise RuntimeError("the agent ended as if it had been cancelled, which it was not")
    if error is not None:
        raise error


async def _run(agent: Agent, context: AgentContext) -> None:
    try:
        await agent.run(context)
    except SystemExit as error:  # it would end this process, and every attempt in it
        raise RuntimeError(f"the agent called sys.exit({error.code!r})") from error
