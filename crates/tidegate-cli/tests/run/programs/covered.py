"""Has files covered. On a busy machine the supervisor, which has to hold them, is late for the
first syncs."""
import json
import os
import socket

SOCKET = "TIDEGATE_SOCKET"


def answered():
    """The syncs that the log has answered. Asked of the supervisor itself: nothing is logged while
    `tidegate stat` runs in the tree, which makes its own system calls."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as supervisor:
        supervisor.connect(os.environ[SOCKET])
        supervisor.send(b'{"request":"stat"}')
        return json.loads(supervisor.recv(65536))["fsyncs_skipped"]


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
