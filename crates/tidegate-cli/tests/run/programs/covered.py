"""Has files covered. On a busy machine the supervisor, which has to hold them, is late for the
first syncs."""
import os

from supervisor import SOCKET, ask


def answered():
    """The syncs that the log has answered."""
    return ask()["fsyncs_skipped"]


def cover(file):
    """Overwrites the file's first byte with itself, and syncs, until the log answers; without a log
    once."""
    os.fsync(file)
    before = answered() if SOCKET in os.environ else -1
    while True:
        os.pwrite(file, os.pread(file, 1, 0), 0)
        os.fdatasync(file)
        if SOCKET not in os.environ or answered() > before:
            return
