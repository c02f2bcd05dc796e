"""The agent that does nothing. A task that it passes has a verifier which nobody should trust."""

from __future__ import annotations

from rollcage.rollout.agents.base import AgentContext


class NopAgent:
    """Done at once."""

    name = "nop"
    needs_policy = False

    async def run(self, context: AgentContext) -> None:
        context.emit("nothing to do")
