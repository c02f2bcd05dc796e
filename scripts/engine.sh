#!/usr/bin/env bash
# start: finds a Docker Engine; as root on Debian or Ubuntu installs and starts one where there is none.
# stop:  stops an engine that this script started.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${ROLLCAGE_CACHE:-$PWD/.cache}
pidfile=$cache/dockerd.pid

say() { if [ -t 1 ]; then printf '\033[1m==>\033[0m %s\n' "$*"; else printf '==> %s\n' "$*"; fi; }

answers() {
  if command -v docker >/dev/null; then
    timeout 20 docker version --format '{{.Server.Version}}' 2>/dev/null
  else
    .venv/bin/python -c 'import docker; print(docker.from_env(timeout=20).version()["Version"])' 2>/dev/null
  fi
}

stop() {
  if [ -s "$pidfile" ] && kill "$(cat "$pidfile")" 2>/dev/null; then
    say "stopping the Docker Engine that make started"
    while kill -0 "$(cat "$pidfile")" 2>/dev/null; do sleep 0.2; done
  fi
  rm -f "$pidfile"
}

start() {
  if version=$(answers); then
    say "Docker Engine $version"
    return
  fi
  if [ -n "${DOCKER_HOST:-}" ]; then
    echo "No Docker Engine answers at DOCKER_HOST=$DOCKER_HOST. Start it, or unset DOCKER_HOST." >&2
    exit 1
  fi
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    cat >&2 <<'TXT'
No Docker Engine answers. Either
  - start it:              sudo systemctl start docker
  - let yourself use it:   sudo usermod -aG docker "$USER", then log in again
  - install one:           https://docs.docker.com/engine/install/
  - or name another one:   export DOCKER_HOST=tcp://host:2375
and run this again.
TXT
    exit 1
  fi
  if ! command -v dockerd >/dev/null; then
    say "installing a Docker Engine (docker.io, iptables)"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends docker.io iptables ca-certificates >/dev/null
  fi
  say "starting the Docker Engine"
  if [ -d /run/systemd/system ]; then
    systemctl start docker
  elif ! answers >/dev/null; then
    mkdir -p "$cache"
    setsid nohup dockerd --pidfile "$pidfile" >"$cache/dockerd.log" 2>&1 </dev/null &
  fi
  for _ in $(seq 60); do
    if version=$(answers); then
      say "Docker Engine $version (stop it with: make engine-stop)"
      return
    fi
    sleep 0.5
  done
  echo "The Docker Engine did not come up within 30 s. The end of its log:" >&2
  tail -n 20 "$cache/dockerd.log" >&2 || journalctl -u docker -n 20 >&2 || true
  exit 1
}

"${1:-start}"
