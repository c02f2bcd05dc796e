#!/bin/sh
# The number is the first word of the file: what `wc -l words.txt` prints behind it does no harm.
read -r count _ < /app/count.txt
if [ "$count" = 37 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
