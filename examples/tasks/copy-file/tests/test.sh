#!/bin/sh
# Both files are there with the text that the image was built with.
want="bring milk and bread"
if [ "$(cat /app/backup.txt)" = "$want" ] && [ "$(cat /app/notes.txt)" = "$want" ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
