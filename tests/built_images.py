"""What tests leave on the engine that they build on."""

from __future__ import annotations

from typing import Any

from rollcage.rollout.sandbox.reaper import BUILD_LABEL


def remove_built_by(api: Any, host: str) -> None:
    """Remove every image whose build had this host's label, those on top first."""
    while made := api.images(filters={"label": f"{BUILD_LABEL}={host}"}):
        parents = {api.inspect_image(image["Id"])["Parent"] for image in made}
        for image in made:
            if image["Id"] not in parents:
                api.remove_image(image["Id"], force=True)
