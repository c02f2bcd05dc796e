#!/bin/sh
mv /app/old.txt /app/new.txt
