#!/usr/bin/env bash
# mypy reads the folders under the name they are imported by.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p build/typing/rollcage
for folder in rollout verifier generator metrics cluster; do
  ln -sfn "../../../$folder" "build/typing/rollcage/$folder"
done
cd build/typing
exec "${PYTHON:-../../.venv/bin/python}" -m mypy --config-file ../../pyproject.toml -p rollcage
