# Waits for the disk below its directory in the middle of a change of its mappings: what the kernel would show of its memory waits with it.
# argv: a pipe by which it hears that the disk answers no more.
import mmap
import os
import sys
import time

fds = [os.open(str(number), os.O_RDWR | os.O_CREAT) for number in range(16)]
for fd in fds:
    os.write(fd, b"." * 4096)
    # Not sync(2): that would wait for the disks of others too.
    os.fsync(fd)
print("synced", flush=True)
with open(sys.argv[1], "rb") as told:
    told.read()
if os.fork() == 0:
    # The inodes alone: a journal that has data to wait for does not come to its own blocks.
    os.fchmod(fds[0], 0o600)
    os.fsync(fds[0])
for fd in fds[1:]:
    # Until the journal is at these blocks, to which each mapping would add a time of access.
    time.sleep(0.2)
    mmap.mmap(fd, 4096, prot=mmap.PROT_READ)
