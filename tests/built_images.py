"""Images that tests build by themselves, and what they leave on the engine."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollcage.rollout.sandbox.build import Build
from rollcage.rollout.sandbox.context import Context, write_tar
from rollcage.rollout.sandbox.reaper import BUILD_LABEL

BUILD_SEC = 600.0


def build_image(
    api: Any,
    tag: str,
    dockerfile: str,
    *,
    context: Path | None = None,
    labels: Mapping[str, str] | None = None,
) -> str:
    """Build an image, as the engine's own builder reads the Dockerfile's text; its id. Unlike docker-py's `build` this
    survives that other tests remove images meanwhile."""
    text = dockerfile + "".join(f'\nLABEL {key}="{value}"\n' for key, value in (labels or {}).items())
    files = Context.read(context) if context else Context(Path(), ())
    write_tar(tar := io.BytesIO(), files, text.encode(), ())
    return Build(tag, f"build {tag}", {}).run(api, tar, BUILD_SEC)


def remove_built_by(api: Any, host: str) -> None:
    """Remove every image whose build had this host's label, those on top first."""
    while made := api.images(filters={"label": f"{BUILD_LABEL}={host}"}):
        parents = {api.inspect_image(image["Id"])["Parent"] for image in made}
        for image in made:
            if image["Id"] not in parents:
                api.remove_image(image["Id"], force=True)
