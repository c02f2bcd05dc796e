"""Names for the Engine's failures, by exception type, HTTP status and who wrote the message."""

from __future__ import annotations

from rollcage.rollout.outcome import Evidence, SandboxError


def engine_fault(error: Exception, doing: str) -> SandboxError:
    """The class of a failed call to the engine, with its evidence. `doing` completes "could not ..."."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    said = getattr(error, "explanation", None) or str(error)
    evidence = Evidence(message=f"could not {doing}: {said}", said_by="engine", status=status)
    return SandboxError("docker_unavailable" if status is None else "container_start", str(said), evidence)
