"""Workers that write until they are killed, and the check of what they left.

    crash.py work DIR KIND.SEED...     a process for each; a line `KIND.SEED NUMBER` for each thing done and durable
    crash.py verify DIR ACKS           ACKS: such lines. All that was acknowledged must be there, and nothing torn

A worker's file or directory has its name. What a worker does follows from its seed alone, so that the check can do it
again in memory.
"""

import os
import sys

import database
import model
import records

KINDS = {
    "model": model,
    "records": records.Appended,
    "filling": records.Filling,
    "slots": records.Slots,
    "versions": records.Versions,
    "fitting": records.Fitting,
    "rotated": records.Rotated,
    "large": records.Large,
    "delete": database.Mode("delete"),
    "truncate": database.Mode("truncate"),
    "persist": database.Mode("persist"),
    "wal": database.Mode("wal"),
}


def parts(name):
    kind, seed = name.split(".")
    return KINDS[kind], int(seed)


def work(directory, names):
    pids = []
    for name in names:
        pid = os.fork()
        if pid == 0:
            kind, seed = parts(name)
            prefix = name.encode()
            kind.work(os.path.join(directory, name), seed, lambda number: os.write(1, b"%s %d\n" % (prefix, number)))
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


def acknowledged(acks):
    last = {}
    with open(acks, encoding="ascii") as lines:
        for line in lines:
            words = line.split()
            if line.endswith("\n") and len(words) == 2:
                last[words[0]] = int(words[1])
    return last


def verify(directory, acks):
    good = True
    for name, last in sorted(acknowledged(acks).items()):
        kind, seed = parts(name)
        wrong = kind.verify(os.path.join(directory, name), seed, last)
        print(f"{name}: {last} acknowledged: {wrong or 'all there'}")
        good = good and not wrong
    return good


if __name__ == "__main__":
    if len(sys.argv) > 3 and sys.argv[1] == "work":
        work(sys.argv[2], sys.argv[3:])
    elif len(sys.argv) == 4 and sys.argv[1] == "verify":
        sys.exit(0 if verify(sys.argv[2], sys.argv[3]) else 1)
    else:
        sys.exit(__doc__)
