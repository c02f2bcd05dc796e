#!/bin/sh
grep -l ERROR /app/logs/*.log > /app/answer.txt
