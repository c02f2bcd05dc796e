#!/bin/sh
# The absolute path, or the one from the workdir, and nothing else.
case "$(cat /app/answer.txt)" in
  /app/logs/service-4.log | logs/service-4.log | ./logs/service-4.log) echo 1 > /logs/verifier/reward.txt ;;
  *) echo 0 > /logs/verifier/reward.txt ;;
esac
