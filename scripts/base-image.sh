#!/usr/bin/env bash
# Gets the base image of the examples and tests: present, else pulled, else made with debootstrap.
set -euo pipefail
cd "$(dirname "$0")/.."
image=debian:bookworm-slim

say() { if [ -t 1 ]; then printf '\033[1m==>\033[0m %s\n' "$*"; else printf '==> %s\n' "$*"; fi; }

if docker image inspect "$image" >/dev/null 2>&1; then
  exit 0
fi
say "pulling $image"
if timeout 300 docker pull --quiet "$image"; then
  exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "$image could not be pulled. Load it from a machine that can: docker save $image | docker load" >&2
  exit 1
fi
say "no registry in reach: making $image with debootstrap"
command -v debootstrap >/dev/null || {
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends debootstrap >/dev/null
}
mirror=$(sed -n 's/^URIs: *//p' /etc/apt/sources.list.d/debian.sources 2>/dev/null | head -n 1)
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase bookworm "$root" "${mirror:-http://deb.debian.org/debian}" >"$root.log" || {
  tail -n 20 "$root.log" >&2
  exit 1
}
rm -rf "$root.log" "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
tar -C "$root" -c . | docker import --change 'CMD ["bash"]' - "$image" >/dev/null
say "made $image"
