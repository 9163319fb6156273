"""A child that writes a covered file is killed in the middle, its parent goes on: killed.py WAY.

WAY is what the child is: a plain `fork`, another `user`, in another `pid-namespace`, or a program
that is `started` there. The child begins when the pipe `go` was opened and closed. The parent says
`done` once the log has answered a sync of its own.
"""
import ctypes
import os
import signal
import sys

from covered import answered, cover

WRITE = "import os, sys; open('go').read(); os.pwrite(int(sys.argv[1]), b'child', 0)"
CLONE_NEWPID = 0x20000000

way = sys.argv[1]


def say(line):
    os.write(1, f"{line}\n".encode())


def write_in_namespace():
    assert ctypes.CDLL(None).unshare(CLONE_NEWPID) == 0
    pid = os.fork()
    if pid:
        say(f"child {pid}")
        os.waitpid(pid, 0)
    elif way == "started":
        os.set_inheritable(file, True)
        os.execv(sys.executable, [sys.executable, "-c", WRITE, str(file)])
    else:
        write()


def write():
    with open("go", encoding="ascii") as go:
        go.read()
    os.pwrite(file, b"child", 0)


os.mkfifo("go")
os.chmod("go", 0o666)
file = os.open("file", os.O_RDWR | os.O_CREAT)
os.write(file, bytes(4096))
cover(file)
pid = os.fork()
if pid == 0:
    if way in ("pid-namespace", "started"):
        write_in_namespace()
    else:
        if way == "user":
            os.setresuid(65534, 65534, 65534)
        say(f"child {os.getpid()}")
        write()
    os._exit(0)
os.waitpid(pid, 0)
before = answered()
while answered() == before:
    os.pwrite(file, b"parent", 0)
    os.fdatasync(file)
say("done")
signal.pause()
