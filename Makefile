# Each target installs what it needs (scripts/install-deps), or says what to install.

.PHONY: help install deb demo test bench bench-programs papers soak

help:
	@echo "make install PREFIX=/usr/local   release binaries, stripped, their debug information beside them"
	@echo "make deb     a Debian package of it, in target/deb"
	@echo "make demo    ext4 on a Tidegate BTT over NBD, killed with -9 in the middle of writes, recovered;"
	@echo "             SQLite plain and under tidegate run, killed and recovered; a slow disk behind a cache,"
	@echo "             killed and whole"
	@echo "make test    format, lints, docs and every test, with a short run of each fuzz target"
	@echo "make bench   the tables of docs/benchmarks/, measured here, with the peers beside them"
	@echo "make bench-programs   RocksDB, YCSB, Filebench and fio on ext4 over NBD, with and without DRAM tiers (needs root)"
	@echo "make papers [TRACES=DIR]   the four papers' figures in docs/papers.md; AFCM's from the traces in DIR,"
	@echo "                           or from traces that it makes; PARTS=traces, model or bench makes only these;"
	@echo "                           a page with plots in target/papers/report"
	@echo "make soak    the long versions: kill -9 and power cuts, SQLite's own tests, fsx, fio, fuzzing, for hours;"
	@echo "             then hostile clients, flipped bits and kills, for a day (TIDEGATE_ABUSE_SECONDS)"

install:
	@scripts/install-deps build
	@scripts/install $(PREFIX)

deb:
	@scripts/install-deps build deb
	@scripts/deb

demo:
	@scripts/install-deps build demo
	@scripts/demo

test:
	@scripts/install-deps build
	@scripts/test

bench:
	@scripts/install-deps build bench
	@scripts/bench

bench-programs:
	@scripts/install-deps build programs
	@scripts/bench-programs

papers:
	@scripts/install-deps build bench programs
	@TRACES="$(TRACES)" PARTS="$(PARTS)" scripts/papers

soak:
	@scripts/install-deps build test soak
	@scripts/soak
