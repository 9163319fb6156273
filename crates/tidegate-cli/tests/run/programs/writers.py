"""Two writers of one file, each with a sync behind its write. The first one begins when the pipe
`first` was opened and closed, the second one when `second` was."""
import os
import signal

from covered import cover


def say(line):
    os.write(1, f"{line}\n".encode())


def write(name, byte):
    with open(name, encoding="ascii") as go:
        go.read()
    os.pwrite(file, byte * 4096, 0)
    os.fdatasync(file)
    say(f"{name} has written")


for name in "first", "second":
    os.mkfifo(name)
file = os.open("file", os.O_RDWR | os.O_CREAT)
os.write(file, b"0" * 4096)
cover(file)
pid = os.fork()
if pid == 0:
    write("first", b"A")
else:
    say(f"child {pid}")
    write("second", b"B")
signal.pause()
