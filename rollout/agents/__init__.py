"""What decides: agents turn an instruction into commands in a sandbox."""

from rollcage.rollout.agents.base import Agent, AgentContext, load_agent

__all__ = ["Agent", "AgentContext", "load_agent"]
