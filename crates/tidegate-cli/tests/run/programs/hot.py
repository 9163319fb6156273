"""Writes some pages of a file again and again, and the others now and then, with a sync after each
write, and says how far it is.

The version of a write says what it writes: see `write_of` of power.rs.
"""
import os
import struct

file = os.open("hot", os.O_RDWR | os.O_CREAT)
os.pwrite(file, bytes(640 * 4096), 0)
for sync in range(3):
    os.fsync(file)
version = 0
while True:
    version += 1
    mixed = version * 2654435761 % 2**32
    words = 64 if mixed % 5 == 0 else 512
    page = mixed // 256 % (16 if mixed % 8 else 640)
    os.pwrite(file, struct.pack("<Q", version) * words, page * 4096)
    os.fdatasync(file)
    if version % 32 == 0:
        print("hot", version, flush=True)
