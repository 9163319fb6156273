"""Covers the file `db`, changes how its overwrites are made, renames `X`, and syncs an overwrite.

usage: commits.py KIND"""
import ctypes, fcntl, os, struct, sys, time

PAGE = 4096
FICLONE, FICLONERANGE, FIDEDUPERANGE = 0x40049409, 0x4020940D, 0xC0189436


def sync_file_system():
    if ctypes.CDLL(None).syncfs(os.open(".", os.O_RDONLY)):
        sys.exit("syncfs failed")


def overwrite(content, rounds=1, at=0):
    for _ in range(rounds):
        os.pwrite(db, content, at)
        os.fdatasync(db)


def other(content=b""):
    fd = os.open("other", os.O_RDWR | os.O_CREAT)
    os.write(fd, content)
    os.fsync(fd)
    return fd


def deduplicate():
    same = other(os.pread(db, size, 0))
    request = struct.pack("=QQHHIqQQiI", 0, size, 1, 0, 0, same, 0, 0, 0, 0)
    result = bytearray(request)
    fcntl.ioctl(db, FIDEDUPERANGE, result)
    if struct.unpack_from("=Qi", result, 40) != (size, 0):
        sys.exit("nothing was shared")


KINDS = {
    "clone": lambda: fcntl.ioctl(other(), FICLONE, db),
    "clone of a range": lambda: fcntl.ioctl(
        other(), FICLONERANGE, struct.pack("=qQQQ", db, 0, size, 0)
    ),
    "deduplication": deduplicate,
    "copy_file_range": lambda: os.copy_file_range(db, other(), size, 0, 0),
    "data in the journal": lambda: None,
    "read": lambda: None,
}

kind = sys.argv[1]
db = os.open("db", os.O_RDWR)
size = os.fstat(db).st_size
overwrite(b"c" * size, 10)
KINDS[kind]()
sync_file_system()
overwrite(b"d" * PAGE, 12, size // 2)
sync_file_system()
os.rename("X", "Y")
if kind == "read":
    before = os.fstat(db).st_atime_ns
    while os.fstat(db).st_atime_ns == before:
        os.pread(db, 1, 0)
    os.fsync(db)
else:
    overwrite(b"N" * PAGE)
print("done", flush=True)
time.sleep(1000)
