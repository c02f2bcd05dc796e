#!/bin/sh
# The file holds the word and nothing else.
if [ "$(cat /app/hello.txt)" = hello ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
