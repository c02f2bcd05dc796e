"""The bash agent's loop with one command that costs nothing, whatever the answer says: a rollout that is its policy."""

from __future__ import annotations

import random
from dataclasses import replace

from rollcage.rollout.agents.base import AgentContext
from rollcage.rollout.agents.bash import BashAgent
from rollcage.rollout.agents.commands import run_command
from rollcage.rollout.agents.conversation import Conversation
from rollcage.rollout.agents.observation import OutputCap, observation
from rollcage.rollout.trajectory import Message

COMMAND = "echo 42 >answer.txt; head -n 6 /etc/passwd"


class TrivialAgent(BashAgent):
    """Talks, runs `COMMAND` and shows its output until its turns are used up: the attempt ends by `turn_limit`, graded.
    An answer's length is drawn evenly from a third of the job's `max_tokens` to all of it, by the attempt's seed: the
    model's own would end at once or never, and rollouts of one length would all end together. So they end anywhere, and
    a small model's hold no command that is worth its time."""

    async def run(self, context: AgentContext) -> None:
        lengths, most = random.Random(context.sampling.seed), context.sampling.max_tokens
        talk = Conversation(context, self.limits)
        cap = OutputCap(self.max_output_tokens, talk.count_tokens)
        new = self._opening(context.step.instruction)
        while True:
            context.sampling = replace(context.sampling, max_tokens=lengths.randint(most // 3, most))
            turn, _ = await talk.ask(new)
            result = await run_command(
                context, turn, COMMAND, timeout=self.command_timeout_sec, output_bytes=self.output_bytes
            )
            new = [Message("user", observation(result, cap), turn.index)]
