#!/bin/sh
# The text is under the new name, and nothing is left under the old one.
if [ "$(cat /app/new.txt)" = "seven blue boats" ] && [ ! -e /app/old.txt ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
