"""Runs a command as in another boot, which began so long before the last change below a directory
by its own clock: rebooted.py SECONDS DIRECTORY COMMAND..."""
import ctypes
import os
import pathlib
import subprocess
import sys
import time

CLONE_NEWNS, CLONE_NEWTIME = 0x20000, 0x80
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
BOOT_ID = b"/proc/sys/kernel/random/boot_id"
SECOND = 1_000_000_000
libc = ctypes.CDLL(None, use_errno=True)
seconds, directory, command = float(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3:]


def must(status):
    assert status == 0, os.strerror(ctypes.get_errno())


must(libc.unshare(CLONE_NEWNS | CLONE_NEWTIME))
must(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
identity = directory.parent / "boot_id"
identity.write_text("00000000-0000-4000-8000-000000000002\n")
must(libc.mount(bytes(identity), BOOT_ID, None, MS_BIND, None))
changed = max(path.stat().st_ctime_ns for path in directory.rglob("*"))
up = time.time_ns() - changed + int(seconds * SECOND)
ahead = up - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
# Of the children only.
with open("/proc/self/timens_offsets", "w") as offsets:
    offsets.write(f"boottime {ahead // SECOND} {ahead % SECOND}\n")
sys.exit(subprocess.call(command))
