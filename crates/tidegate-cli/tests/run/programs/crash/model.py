"""Random operations on files and names, and the same in memory.

Operation N follows from the seed and from what the operations before it left. Each is one system call that changes
something, then the fsyncs that make it durable, then the acknowledgement. So after a crash the directory must be as after
N operations, N the last acknowledged one, or as after N + 1; the file that this one changes may be a mixture.
"""

import ctypes
import errno
import mmap
import os
import random
import shutil

FALLOC_PUNCH_HOLE_KEEP_SIZE = 3
MOST_BYTES = 300_000
NAMES = [f"{directory}{name}" for directory in ("", "a/", "b/") for name in ("p", "q", "r", "s")]
libc = ctypes.CDLL(None, use_errno=True)


class File:
    """What a file holds."""

    def __init__(self):
        self.data = bytearray()

    def write(self, offset, data):
        if len(self.data) < offset:
            self.data.extend(bytes(offset - len(self.data)))
        self.data[offset : offset + len(data)] = data


class Memory:
    """Names and files as they should be."""

    def __init__(self):
        self.names = {}
        self.directories = {"a", "b"}

    def listing(self):
        return {name: bytes(file.data) for name, file in self.names.items()}, self.directories


class Operations:
    """Chooses operation after operation; does each in memory and, where `root` is given, on the disk."""

    def __init__(self, seed, root=None):
        self.seed = seed
        self.number = 0
        self.memory = Memory()
        self.root = root
        self.fds = {}  # of files, by identity: kept open over renames and removals

    # --- the disk

    def path(self, name):
        return os.path.join(self.root, name)

    def fd(self, name):
        file = self.memory.names[name]
        if file not in self.fds:
            if len(self.fds) > 5:
                os.close(self.fds.pop(next(iter(self.fds))))
            self.fds[file] = os.open(self.path(name), os.O_RDWR)
        return self.fds[file]

    def sync_directory(self, *names):
        for name in names:
            fd = os.open(os.path.dirname(self.path(name)), os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

    # --- one operation

    def step(self):
        self.number += 1
        choose = random.Random(self.seed << 32 | self.number)
        existing = sorted(self.memory.names)
        kinds = ["create"] if not existing else [
            "create", "create", "write", "write", "write", "append", "vector", "large", "truncate", "reopen_truncate",
            "rename", "rename", "replace", "link", "unlink", "unlink_and_write", "punch", "allocate", "mapped", "copied",
            "by_child", "touch_directory",
        ]
        getattr(self, choose.choice(kinds))(choose, existing)

    def create(self, choose, existing):
        free = [name for name in NAMES if name not in self.memory.names]
        if not free:
            return self.unlink(choose, existing)
        name = choose.choice(free)
        if self.root:
            fd = os.open(self.path(name), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.fsync(fd)
            self.sync_directory(name)
        file = self.memory.names[name] = File()
        if self.root:
            self.fds[file] = fd

    def data(self, choose, most):
        count = choose.randint(1, most)
        return (b"%d." % self.number * (count // 2 + 1))[:count]

    def write_at(self, name, offset, data, call=os.pwrite):
        file = self.memory.names[name]
        if self.root:
            fd = self.fd(name)
            call(fd, data, offset)
            os.fdatasync(fd)
        file.write(offset, data)

    def write(self, choose, existing):
        name = choose.choice(existing)
        offset = choose.randint(0, min(len(self.memory.names[name].data) + 5000, MOST_BYTES))
        self.write_at(name, offset, self.data(choose, 9000))

    def append(self, choose, existing):
        name = choose.choice(existing)
        file = self.memory.names[name]
        if len(file.data) > MOST_BYTES:
            return self.truncate(choose, existing)

        def append(_, data, __):
            fd = os.open(self.path(name), os.O_WRONLY | os.O_APPEND)
            os.write(fd, data)
            os.close(fd)

        self.write_at(name, len(file.data), self.data(choose, 5000), append)

    def vector(self, choose, existing):
        name = choose.choice(existing)

        def write_parts(fd, data, offset):
            third = len(data) // 3
            os.pwritev(fd, [data[:third], data[third:third], data[third:]], offset)

        self.write_at(name, choose.randint(0, 20000), self.data(choose, 30000), write_parts)

    def large(self, choose, existing):
        self.write_at(choose.choice(existing), choose.randint(0, 100), self.data(choose, 250_000))

    def by_child(self, choose, existing):
        def in_child(fd, data, offset):
            pid = os.fork()
            if pid == 0:
                os.pwrite(fd, data, offset)
                os._exit(0)
            # One that was killed has perhaps written nothing.
            assert os.waitpid(pid, 0)[1] == 0

        self.write_at(choose.choice(existing), choose.randint(0, 9000), self.data(choose, 9000), in_child)

    def resize(self, name, size, call):
        file = self.memory.names[name]
        if self.root:
            fd = self.fd(name)
            call(fd)
            os.fsync(fd)
        if size < len(file.data):
            del file.data[size:]
        else:
            file.data.extend(bytes(size - len(file.data)))

    def truncate(self, choose, existing):
        name = choose.choice(existing)
        size = choose.randint(0, len(self.memory.names[name].data) + 3000)
        self.resize(name, size, lambda fd: os.ftruncate(fd, size))

    def reopen_truncate(self, choose, existing):
        name = choose.choice(existing)
        self.resize(name, 0, lambda fd: os.close(os.open(self.path(name), os.O_WRONLY | os.O_TRUNC)))

    def allocate(self, choose, existing):
        name = choose.choice(existing)
        end = choose.randint(1, 30000)
        size = max(end, len(self.memory.names[name].data))
        self.resize(name, size, lambda fd: os.posix_fallocate(fd, 0, end))

    def punch(self, choose, existing):
        name = choose.choice(existing)
        file = self.memory.names[name]
        offset, count = choose.randint(0, 20000), choose.randint(1, 20000)
        if self.root:
            fd = self.fd(name)
            call = libc.fallocate(fd, FALLOC_PUNCH_HOLE_KEEP_SIZE, ctypes.c_long(offset), ctypes.c_long(count))
            assert call == 0, errno.errorcode[ctypes.get_errno()]
            os.fsync(fd)
        end = min(offset + count, len(file.data))
        if offset < end:
            file.data[offset:end] = bytes(end - offset)

    def mapped(self, choose, existing):
        name = choose.choice(existing)
        file = self.memory.names[name]
        if not file.data:
            return self.write(choose, existing)
        offset = choose.randrange(len(file.data))
        data = self.data(choose, 3000)[: len(file.data) - offset]
        if self.root:
            with mmap.mmap(self.fd(name), 0) as mapping:
                mapping[offset : offset + len(data)] = data
                mapping.flush()
        file.write(offset, data)

    def copied(self, choose, existing):
        source, target = choose.choice(existing), choose.choice(existing)
        if source == target or self.memory.names[source] is self.memory.names[target]:
            return self.write(choose, existing)
        count, offset = choose.randint(1, 20000), choose.randint(0, 5000)
        data = bytes(self.memory.names[source].data[:count])
        if not data:
            return self.write(choose, existing)
        if self.root:
            fd, done = self.fd(target), 0
            while done < len(data):
                done += os.copy_file_range(self.fd(source), fd, len(data) - done, done, offset + done)
            os.fsync(fd)
        self.memory.names[target].write(offset, data)

    def rename_to(self, old, new):
        if self.root:
            os.rename(self.path(old), self.path(new))
            self.sync_directory(old, new)
        if self.memory.names[old] is not self.memory.names.get(new):  # two names of one file: nothing is done
            self.memory.names[new] = self.memory.names.pop(old)

    def rename(self, choose, existing):
        self.rename_to(choose.choice(existing), choose.choice(NAMES))

    def replace(self, choose, existing):
        self.rename_to(choose.choice(existing), choose.choice(existing))

    def link(self, choose, existing):
        free = [name for name in NAMES if name not in self.memory.names]
        if not free:
            return self.unlink(choose, existing)
        old, new = choose.choice(existing), choose.choice(free)
        if self.root:
            os.link(self.path(old), self.path(new))
            self.sync_directory(new)
        self.memory.names[new] = self.memory.names[old]

    def unlink(self, choose, existing):
        name = choose.choice(existing)
        if self.root:
            self.fd(name)
            os.unlink(self.path(name))
            self.sync_directory(name)
        del self.memory.names[name]

    def unlink_and_write(self, choose, existing):
        """What is written after the last name is gone must not bring the file back."""
        name = choose.choice(existing)
        file = self.memory.names[name]
        self.unlink(random.Random(choose.random()), [name])
        if self.root and file in self.fds and file not in self.memory.names.values():
            os.pwrite(self.fds[file], b"into nothing", 0)

    def touch_directory(self, choose, existing):
        """A directory comes and goes; with it what is logged below it."""
        if self.root:
            path = self.path("passing")
            os.mkdir(path)
            fd = os.open(f"{path}/file", os.O_RDWR | os.O_CREAT, 0o600)
            os.write(fd, b"passing")
            os.close(fd)
            shutil.rmtree(path)
            self.sync_directory("passing")


def work(root, seed, acknowledge):
    os.mkdir(root)
    for directory in "a", "b":
        os.mkdir(os.path.join(root, directory))
    for path in root, os.path.dirname(root):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    operations = Operations(seed, root)
    while True:
        operations.step()
        acknowledge(operations.number)


def found_below(root):
    names, directories = {}, set()
    for directory, below, files in os.walk(root):
        relative = os.path.relpath(directory, root)
        prefix = "" if relative == "." else relative + "/"
        directories.update(prefix + name for name in below)
        for name in files:
            with open(os.path.join(directory, name), "rb") as file:
                names[prefix + name] = file.read()
    return names, directories


def difference(wanted, found):
    for name in sorted(wanted.keys() | found.keys()):
        if name not in wanted:
            return f"{name} should not exist ({len(found[name])} bytes)"
        if name not in found:
            return f"{name} is missing ({len(wanted[name])} bytes)"
        one, two = wanted[name], found[name]
        if one != two:
            at = next((at for at in range(min(len(one), len(two))) if one[at] != two[at]), min(len(one), len(two)))
            return f"{name}: {len(one)} bytes wanted, {len(two)} found; at {at}: {one[at:at+30]} / {two[at:at+30]}"
    return None


def between(before, after, found):
    """Whether each file is as before or as after, or a mixture of both."""
    if found.keys() != before.keys() or found.keys() != after.keys():
        return False
    for name, data in found.items():
        old, new = before[name], after[name]
        if data in (old, new):
            continue
        if not min(len(old), len(new)) <= len(data) <= max(len(old), len(new)):
            return False
        if any(byte not in (old[at : at + 1] + new[at : at + 1] + b"\0") for at, byte in enumerate(data)):
            return False
    return True


def verify(root, seed, last):
    operations = Operations(seed)
    for _ in range(last):
        operations.step()
    names, directories = found_below(root)
    before, wanted_directories = operations.memory.listing()
    operations.step()
    after, _ = operations.memory.listing()
    if directories - {"passing"} != wanted_directories:
        return f"directories: {directories}"
    names.pop("passing/file", None)
    if names in (before, after) or between(before, after, names):
        return None
    return f"after {last} operations: {difference(before, names)}; after one more: {difference(after, names)}"
