"""Writes and syncs `file` as the lines of a pipe say, and says how each went: commanded.py PIPE."""
import errno
import os
import sys

from covered import cover

file = os.open("file", os.O_RDWR)
cover(file)
os.write(1, b"ready\n")
with open(sys.argv[1], encoding="ascii") as lines:
    for number, line in enumerate(lines):
        try:
            if line == "write\n":
                os.pwrite(file, b"new" * 20000, 0)
            else:
                os.fdatasync(file)
            said = "OK"
        except OSError as error:
            said = errno.errorcode[error.errno]
        os.write(1, f"{number} {said}\n".encode())
