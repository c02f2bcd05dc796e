"""One rollout, without Ray: tasks, sandboxes, agents, policies, outcomes, trajectories, Arrow."""
