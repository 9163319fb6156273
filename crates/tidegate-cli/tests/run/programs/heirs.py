"""Gives up rights, but not those to the pool, and says how often programs that it starts then map
the pool: heirs.py WAY POOL."""
import ctypes
import os
import struct
import subprocess
import sys

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
RETURN, ALLOW = 6, 0x7FFF0000
CAPABILITIES_VERSION = 0x20080522
FLAGS = {"mount-namespace": 0x20000, "user-namespace": 0x10000000}
libc = ctypes.CDLL(None)
way, pool = sys.argv[1:]
count = f"grep -c {pool} /proc/self/maps"


class Program(ctypes.Structure):
    """A filter of system calls."""

    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]


def confine():
    if way == "filter":
        code = ctypes.create_string_buffer(struct.pack("HBBI", RETURN, 0, 0, ALLOW))
        program = Program(1, ctypes.addressof(code))
        assert libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
        assert libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program)) == 0
    elif way == "capabilities":
        assert libc.capset(struct.pack("II", CAPABILITIES_VERSION, 0), bytes(24)) == 0
    elif way in FLAGS:
        assert libc.unshare(FLAGS[way]) == 0


def started(program):
    printed = subprocess.run(program, stdout=subprocess.PIPE, check=False).stdout
    os.write(1, printed)


confine()
started(["/bin/sh", "-c", count])
libc.system(count.encode())
if os.fork() == 0:
    os.execv("/bin/sh", ["sh", "-c", count])
os.wait()
