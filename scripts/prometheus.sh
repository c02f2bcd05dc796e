#!/usr/bin/env bash
# Finds prometheus and promtool; as root on Debian or Ubuntu installs them where they are missing, without starting
# the package's service.
set -euo pipefail

command -v prometheus >/dev/null && command -v promtool >/dev/null && exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "prometheus and promtool are missing: sudo apt-get install prometheus" >&2
  exit 1
fi

echo "==> installing Prometheus (its service stays off)"
# The package would start its service at once; a policy that somebody has set stays.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  trap 'rm -f "$policy"' EXIT
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends prometheus >/dev/null
if command -v systemctl >/dev/null; then
  systemctl disable --quiet prometheus 2>/dev/null || true
fi
