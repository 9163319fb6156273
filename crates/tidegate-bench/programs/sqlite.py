"""SQLite, one insert a transaction: `sqlite.py DATABASE JOURNAL_MODE SYNCHRONOUS SECONDS`; prints the times as JSON."""

import json
import sqlite3
import sys
import time

INSERT = "insert into rows(text) values(?)"


def connect(path, journal_mode, synchronous):
    database = sqlite3.connect(path, isolation_level=None)
    (found,) = database.execute(f"pragma journal_mode={journal_mode}").fetchone()
    if found != journal_mode:
        sys.exit(f"journal_mode is {found}, expected {journal_mode}")
    database.execute(f"pragma synchronous={synchronous}")
    database.execute("create table rows(number integer primary key, text)")
    return database


def insert(database, seconds):
    """Times of the inserts in nanoseconds, from answer to answer."""
    text, clock, times = "x" * 100, time.perf_counter_ns, []
    execute = database.cursor().execute
    for _ in range(50):
        execute(INSERT, (text,))
    now = clock()
    end = now + int(seconds * 1e9)
    while now < end:
        execute(INSERT, (text,))
        now, before = clock(), now
        times.append(now - before)
    return times


def main(path, journal_mode, synchronous, seconds):
    times = insert(connect(path, journal_mode, synchronous), float(seconds))
    total, times = sum(times), sorted(times)

    def at(share):
        return times[min(len(times) - 1, int(len(times) * share))]

    print(json.dumps({
        "ops": len(times), "ops_per_s": len(times) * 1e9 / total, "mean_ns": total / len(times),
        "p50_ns": at(0.5), "p99_ns": at(0.99), "p999_ns": at(0.999), "p9999_ns": at(0.9999), "max_ns": times[-1],
    }))


main(*sys.argv[1:])
