"""What generates an agent's tokens."""

from rollcage.rollout.policies.base import Completion, Policy, PolicySession, Sampling

__all__ = ["Completion", "Policy", "PolicySession", "Sampling"]
