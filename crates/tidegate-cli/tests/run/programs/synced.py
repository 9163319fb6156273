"""Writes synchronously by ways that the log does not have: by long vectors, inside the kernel, by a stream of the C library."""
import ctypes
import os

parts = [b"x"] * 65
source = os.open("source", os.O_RDWR | os.O_CREAT)
os.write(source, b"0123456789")


def synced(name):
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_DSYNC)


os.writev(synced("vector"), parts)
os.pwritev(os.open("plain", os.O_WRONLY | os.O_CREAT), parts, 0, os.RWF_DSYNC)
os.sendfile(synced("sent"), source, 0, 10)
os.copy_file_range(source, synced("copied"), 10, 0)
reader, writer = os.pipe()
os.write(writer, b"0123456789")
os.splice(reader, synced("spliced"), 10)

libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
streamed = synced("streamed")
os.write(streamed, b"01234")
stream = ctypes.c_void_p(libc.fdopen(streamed, b"r+"))
libc.fputs(b"56789", stream)
libc.fflush(stream)
flags = int(open(f"/proc/self/fdinfo/{streamed}").read().split()[3], 8)
print("flags", oct(flags & os.O_DSYNC), flush=True)
