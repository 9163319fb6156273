#!/bin/sh
# Stands for a program that drives OCF: the operations are the size of the cache that was asked for.
[ "$1" = miss ] && [ -d "$4" ] && [ -d "$5" ] || exit 1
echo "starting $1"
echo "{\"ops\": $2, \"ops_per_s\": 1000.0, \"mean_ns\": 1.5, \"p50_ns\": 1, \"p99_ns\": 2," \
    "\"p999_ns\": 3, \"p9999_ns\": 4, \"max_ns\": 5}"
