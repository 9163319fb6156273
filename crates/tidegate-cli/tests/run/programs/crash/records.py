"""Numbered records with digests, written in the ways in which programs keep what matters."""

import errno
import hashlib
import math
import os
import random
import signal

DIGEST_BYTES = 32
# A disk writes each sector whole.
SECTOR_BYTES = 512


def record(seed, number, size):
    """`size` bytes that name the seed and the number, with a digest of all."""
    head = b"seed %d number %d\n" % (seed, number)
    body = (head + hashlib.sha256(head).digest() * (size // 32 + 1))[: max(size - DIGEST_BYTES, len(head))]
    return body + hashlib.sha256(body).digest()


def size_of(seed, number, most=6000):
    return 100 + (number * 2654435761 + seed * 40503) % most


class Appended:
    """Records of many sizes at the end of one file, each synced before it is acknowledged. The last one may be torn."""

    @staticmethod
    def work(path, seed, acknowledge, most_bytes=math.inf):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.fsync(fd)
        number = size = 0
        while size < most_bytes:
            number += 1
            data = record(seed, number, size_of(seed, number))
            assert os.write(fd, data) == len(data)
            size += len(data)
            os.fdatasync(fd)
            acknowledge(number)
        signal.pause()

    @staticmethod
    def verify(path, seed, last):
        with open(path, "rb") as file:
            found = file.read()
        offset = number = 0
        while offset < len(found):
            number += 1
            data = record(seed, number, size_of(seed, number))
            if found[offset : offset + len(data)] != data:
                return None if number > last else f"record {number} at {offset} of {len(found)} is torn"
            offset += len(data)
        return None if number >= last else f"LOST: only {number} are there"


class Fitting(Appended):
    """The same for a small disk: one that is full would cut a record short."""

    @staticmethod
    def work(path, seed, acknowledge):
        Appended.work(path, seed, acknowledge, 128 << 20)


class Filling(Appended):
    """The same until there is an error, whose name it says."""

    @staticmethod
    def work(path, seed, acknowledge):
        try:
            Appended.work(path, seed, acknowledge)
        except AssertionError:
            Filling.write_until_error(path)
        except OSError as error:
            Filling.say(error)
            if error.errno == errno.EIO:
                # Of a sync in flight: a write tells what the file system has become.
                Filling.write_until_error(path, 1)

    @staticmethod
    def write_until_error(path, most=math.inf):
        """After a write that was cut short the next one tells why."""
        try:
            with open(path, "ab", buffering=0) as file:
                while most > 0:
                    most -= file.write(b"x")
        except OSError as error:
            Filling.say(error)

    @staticmethod
    def say(error):
        os.write(1, f"{errno.errorcode[error.errno]}\n".encode())


class Slots:
    """A few places written again and again, so that one write in the log covers another."""

    COUNT, SLOT_BYTES = 37, 9000

    @staticmethod
    def place(seed, number):
        return random.Random(seed << 32 | number).randrange(Slots.COUNT)

    @staticmethod
    def work(path, seed, acknowledge):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DSYNC, 0o644)
        number = 0
        while True:
            number += 1
            data = record(seed, number, size_of(seed, number, Slots.SLOT_BYTES - 200))
            assert os.pwrite(fd, data, Slots.place(seed, number) * Slots.SLOT_BYTES) == len(data)
            acknowledge(number)

    @staticmethod
    def verify(path, seed, last):
        """The write that was not acknowledged may be torn between sectors, as without Tidegate."""
        with open(path, "rb") as file:
            found = file.read()
        acknowledged = Slots.image(seed, last)
        begun = Slots.image(seed, last + 1)
        if len(found) < len(acknowledged):
            return f"LOST: {len(found)} bytes of {len(acknowledged)}"
        for at in range(0, len(found), SECTOR_BYTES):
            sector = found[at : at + SECTOR_BYTES]
            if not any(image[at : at + len(sector)] == sector for image in (acknowledged, begun)):
                return f"LOST: at {at} of slot {at // Slots.SLOT_BYTES}: {sector[:40]}"
        return None

    @staticmethod
    def image(seed, last):
        """The file after `last` writes."""
        image = bytearray()
        for number in range(1, last + 1):
            start = Slots.place(seed, number) * Slots.SLOT_BYTES
            data = record(seed, number, size_of(seed, number, Slots.SLOT_BYTES - 200))
            image.extend(bytes(max(0, start + len(data) - len(image))))
            image[start : start + len(data)] = data
        return image


class Versions:
    """A file replaced as a whole, as editors do: written beside it, fsync, renamed over it, fsync of the directory."""

    @staticmethod
    def work(path, seed, acknowledge):
        os.mkdir(path)
        parent = os.open(os.path.dirname(path), os.O_RDONLY)
        os.fsync(parent)
        directory = os.open(path, os.O_RDONLY)
        number = 0
        while True:
            number += 1
            fd = os.open(f"{path}/new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            data = record(seed, number, size_of(seed, number))
            assert os.write(fd, data) == len(data)
            os.fsync(fd)
            os.close(fd)
            os.rename(f"{path}/new", f"{path}/current")
            os.fsync(directory)
            acknowledge(number)

    @staticmethod
    def verify(path, seed, last):
        with open(f"{path}/current", "rb") as file:
            found = file.read()
        for number in last, last + 1:
            if found == record(seed, number, size_of(seed, number)):
                return None
        return f"LOST: {len(found)} bytes that start with {found[:40]}"


class Rotated:
    """A log of records that is renamed when it is full; the oldest is removed."""

    EACH, KEPT = 50, 4

    @staticmethod
    def work(path, seed, acknowledge):
        os.mkdir(path)
        directory = os.open(path, os.O_RDONLY)
        parent = os.open(os.path.dirname(path), os.O_RDONLY)
        os.fsync(parent)
        number = 0
        while True:
            fd = os.open(f"{path}/log", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o640)
            os.fsync(fd)
            os.fsync(directory)
            for number in range(number + 1, number + 1 + Rotated.EACH):
                os.write(fd, record(seed, number, size_of(seed, number, 700)))
                os.fdatasync(fd)
                acknowledge(number)
            generation = number // Rotated.EACH
            os.rename(f"{path}/log", f"{path}/log.{generation}")
            if generation > Rotated.KEPT:
                os.unlink(f"{path}/log.{generation - Rotated.KEPT}")
            os.close(fd)
            os.fsync(directory)

    @staticmethod
    def verify(path, seed, last):
        found, generation = b"", (last - 1) // Rotated.EACH + 1
        names = [f"log.{n}" for n in range(max(1, generation - Rotated.KEPT + 1), generation + 1)] + ["log"]
        for name in names:
            if os.path.exists(f"{path}/{name}"):
                with open(f"{path}/{name}", "rb") as file:
                    found += file.read()
        oldest = max(0, generation - Rotated.KEPT) * Rotated.EACH + 1
        for number in range(oldest, last + 1):
            if record(seed, number, size_of(seed, number, 700)) not in found:
                return f"LOST: record {number} of {oldest}..{last}; there are {sorted(os.listdir(path))}"
        # A removal and a renaming that were done before are done.
        extra = set(os.listdir(path)) - set(names) - {f"log.{generation - Rotated.KEPT}"}
        return f"came back: {extra}" if extra else None


class Large:
    """One write() of some MiB over the last one. The kernel ends one that is killed wherever it is:
    what it left behind the last one is the beginning of the next one, all of it or nothing too."""

    SIZE = 3 << 20

    @staticmethod
    def content(seed, number):
        return record(seed, number, Large.SIZE)

    @staticmethod
    def work(path, seed, acknowledge):
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        number = 0
        while True:
            number += 1
            assert os.pwrite(fd, Large.content(seed, number), 0) == Large.SIZE
            os.fdatasync(fd)
            acknowledge(number)

    @staticmethod
    def verify(path, seed, last):
        with open(path, "rb") as file:
            found = file.read()
        old = Large.content(seed, last) if last else b""
        new = Large.content(seed, last + 1)
        begun = os.path.commonprefix((found, new))
        if found == begun + old[len(begun) :]:
            return None
        heads = {found[at : at + 24] for at in range(0, len(found), 4096)}
        return f"torn or lost: {len(found)} bytes, starts of pages: {sorted(heads)[:5]}"
