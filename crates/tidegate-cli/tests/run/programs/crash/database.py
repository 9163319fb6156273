"""SQLite, one row a transaction with synchronous=EXTRA: what was committed is there, and the database is sound."""

import sqlite3


class Mode:
    def __init__(self, mode):
        self.mode = mode

    def open(self, path):
        database = sqlite3.connect(path, isolation_level=None)
        database.execute(f"pragma journal_mode={self.mode}")
        # FULL does not sync the directory of a removed journal: a power cut may undo a commit.
        database.execute("pragma synchronous=extra")
        database.execute("pragma wal_autocheckpoint=50")
        return database

    @staticmethod
    def text(seed, number):
        return f"row {number} of {seed} " * (number % 90)

    def work(self, path, seed, acknowledge):
        database = self.open(path)
        database.execute("create table if not exists rows(number integer primary key, text)")
        first = database.execute("select coalesce(max(number), 0) + 1 from rows").fetchone()[0]
        number = first
        while True:
            database.execute("begin immediate")
            database.execute("insert into rows values(?, ?)", (number, self.text(seed, number)))
            if number % 10 == 0:
                database.execute("update rows set text = text where number > ?", (number - 30,))
            database.execute("commit")
            acknowledge(number)
            number += 1

    def verify(self, path, seed, last):
        database = self.open(path)
        (sound,) = database.execute("pragma integrity_check").fetchone()
        if sound != "ok":
            return f"integrity_check: {sound}"
        rows = database.execute("select number, text from rows order by number").fetchall()
        for at, (number, text) in enumerate(rows, 1):
            if number != at or text != self.text(seed, number):
                return f"row {at} is {number}: {text[:40]}"
        return None if len(rows) >= last else f"LOST: only {len(rows)} rows are there"
