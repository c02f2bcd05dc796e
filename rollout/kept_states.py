"""What becomes of an attempt's saved states: made as its verifier begins, kept or removed as the attempt ends.

`Attempt.extra["state"]` says it: `images`, the state's name by step, and `missing`, why a step has none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from rollcage.rollout.outcome import Outcome, SandboxError
from rollcage.rollout.sandbox.base import Sandbox
from rollcage.rollout.sandbox.container import DockerSandbox
from rollcage.rollout.sandbox.pool import SandboxPool
from rollcage.rollout.sandbox.states import NotSaved
from rollcage.rollout.task import Step, Task
from rollcage.rollout.trajectory import Attempt

PASSED = "it passed, and only the states of others are kept (sandbox.keep_states: failed)"


@dataclass
class KeptStates:
    """The states of one attempt, for a pool whose settings want some kept."""

    pool: SandboxPool
    attempt: Attempt
    emit: Callable[[str], None]
    images: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def keeper(self, sandbox: Sandbox, task: Task, step: Step) -> Callable[[str], Awaitable[None]]:
        """What saves the sandbox as it was left behind this step. A state that cannot be saved is said, and is no
        failure of the attempt."""

        async def save(besides: str) -> None:
            try:
                if besides:
                    raise NotSaved(besides)
                if not isinstance(sandbox, DockerSandbox):
                    raise NotSaved("this kind of sandbox has no states")
                number = [one.name for one in task.steps].index(step.name) + 1
                self.missing[step.name] = "saving it was called off"  # until it is there
                self.images[step.name] = await self.pool.states.save(
                    sandbox,
                    task.environment,
                    attempt_id=self.attempt.attempt_id,
                    number=number,
                    step=step.name,
                )
                del self.missing[step.name]
                self.emit(f"state {self.images[step.name]}")
            except (NotSaved, SandboxError, OSError) as reason:
                self.missing[step.name] = str(reason)
                self.emit(f"no state is kept: {reason}")

        return save

    async def settle(self) -> None:
        """Keep what the job wants kept, now that the attempt has ended. Raises `SandboxError`."""
        passed = self.attempt.outcome is Outcome.PASSED and self.pool.settings.keep_states == "failed"
        if passed or self.attempt.outcome is Outcome.CANCELLED:
            await self.pool.states.drop(self.attempt.attempt_id)
            why = PASSED if passed else "the attempt was cancelled"
            self.missing |= dict.fromkeys(self.images, why)
            self.images = {}
        self.attempt.extra["state"] = {"images": self.images, "missing": self.missing}
