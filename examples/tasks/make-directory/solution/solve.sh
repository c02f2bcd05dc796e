#!/bin/sh
mkdir /app/data
