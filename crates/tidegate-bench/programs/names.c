/* What programs do with files and their syncs: `names DIRECTORY PATTERN SYNCS SECONDS`, with SYNCS
 * full or off; prints the times.
 *
 * mail     a delivery: created, written, synced, linked, unlinked, the directory synced
 * replace  created, written, synced, renamed over the former file, the directory synced
 * package  created, written, mode, owner and times set, synced, renamed over the former file, a
 *          line appended to a log, which is synced
 * redo     a block of a redo log, which is as long as it gets, and a mapping of which the kernel
 *          refuses, written and synced: MariaDB asks for MAP_SYNC, which takes persistent memory
 * locked   a transaction of LMDB: pages of a file written and synced, then a page of it through a
 *          descriptor with O_DSYNC, opened under a record lock on another file
 * lines    a line appended to a log, which is synced */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/mman.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "times.h"

enum { WARM_UP = 20, TIMES_MAX = 1000000, MAIL_BYTES = 3000, CONFIG_BYTES = 1000, TOOL_BYTES = 20000,
       PAGE_BYTES = 4096, PAGES = 256, REDO_BYTES = 4 << 20, BLOCK_BYTES = 512 };

static int syncs;
static char content[TOOL_BYTES];

static void check(int is_fine, const char *what)
{
    if (!is_fine) {
        perror(what);
        exit(1);
    }
}

/* A new file with so many bytes; its descriptor. */
static int made(const char *name, size_t bytes)
{
    int file = open(name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    check(file >= 0, name);
    check(write(file, content, bytes) == (ssize_t)bytes, "write");
    return file;
}

static void synced(int file)
{
    check(!syncs || fsync(file) == 0, "fsync");
    check(close(file) == 0, "close");
}

static void sync_directory(const char *name)
{
    int directory = open(name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    check(directory >= 0, name);
    synced(directory);
}

static void mail(uint64_t number)
{
    char from[32], to[32];
    snprintf(from, sizeof from, "tmp/%llu", (unsigned long long)number);
    snprintf(to, sizeof to, "new/%llu", (unsigned long long)number);
    synced(made(from, MAIL_BYTES));
    check(link(from, to) == 0, "link");
    check(unlink(from) == 0, "unlink");
    sync_directory("new");
}

static void replace(uint64_t number)
{
    (void)number;
    synced(made("config.new", CONFIG_BYTES));
    check(rename("config.new", "config") == 0, "rename");
    sync_directory(".");
}

static void package(uint64_t number)
{
    static int lines = -1;
    if (lines < 0)
        lines = open("log", O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    int file = made("tool.dpkg-new", TOOL_BYTES);
    check(fchmod(file, 0755) == 0, "fchmod");
    check(fchown(file, getuid(), getgid()) == 0, "fchown");
    struct timespec times[2] = {{(time_t)number, 0}, {(time_t)number, 0}};
    check(utimensat(AT_FDCWD, "tool.dpkg-new", times, 0) == 0, "utimensat");
    synced(file);
    check(rename("tool.dpkg-new", "tool") == 0, "rename");
    char line[64];
    int bytes = snprintf(line, sizeof line, "%llu installed tool\n", (unsigned long long)number);
    check(write(lines, line, bytes) == bytes, "write");
    check(!syncs || fsync(lines) == 0, "fsync");
}

/* A file that stays open, made where it is not there. */
static int opened(const char *name, int flags)
{
    int file = open(name, O_RDWR | O_CREAT | O_CLOEXEC | flags, 0644);
    check(file >= 0, name);
    return file;
}

static void redo(uint64_t number)
{
    static int log = -1;
    if (log < 0) {
        log = opened("ib_logfile0", 0);
        for (off_t place = 0; place < REDO_BYTES; place += PAGE_BYTES)
            check(pwrite(log, content, PAGE_BYTES, place) == PAGE_BYTES, "pwrite");
        check(!syncs || fsync(log) == 0, "fsync");
        void *mapped = mmap(NULL, REDO_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED_VALIDATE | MAP_SYNC, log, 0);
        check(mapped == MAP_FAILED, "a mapping with MAP_SYNC was not refused");
    }
    off_t place = (off_t)(number % (REDO_BYTES / BLOCK_BYTES)) * BLOCK_BYTES;
    check(pwrite(log, content, BLOCK_BYTES, place) == BLOCK_BYTES, "pwrite");
    check(!syncs || fdatasync(log) == 0, "fdatasync");
}

static void locked(uint64_t number)
{
    static int pages = -1, meta = -1;
    if (pages < 0) {
        int lock = opened("lock.mdb", 0);
        struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1};
        check(fcntl(lock, F_SETLK, &whole) == 0, "lock");
        pages = opened("data.mdb", 0);
        for (int page = 0; page < PAGES; page++)
            check(pwrite(pages, content, PAGE_BYTES, (off_t)page * PAGE_BYTES) == PAGE_BYTES, "pwrite");
        check(!syncs || fsync(pages) == 0, "fsync");
        meta = opened("data.mdb", syncs ? O_DSYNC : 0);
    }
    for (uint64_t page = 0; page < 3; page++) {
        off_t place = (off_t)(2 + (number * 3 + page) % (PAGES - 2)) * PAGE_BYTES;
        check(pwrite(pages, content, PAGE_BYTES, place) == PAGE_BYTES, "pwrite");
    }
    check(!syncs || fdatasync(pages) == 0, "fdatasync");
    check(pwrite(meta, content, 120, (off_t)(number % 2) * PAGE_BYTES) == 120, "pwrite");
}

static void lines(uint64_t number)
{
    static int log = -1;
    if (log < 0)
        log = opened("app.log", O_APPEND);
    char line[128];
    int bytes = snprintf(line, sizeof line, "%020llu a line of a log, as servers write one for each request\n",
                         (unsigned long long)number);
    check(write(log, line, bytes) == bytes, "write");
    check(!syncs || fdatasync(log) == 0, "fdatasync");
}

static const struct { const char *name; void (*run)(uint64_t); } patterns[] = {
    {"mail", mail}, {"replace", replace}, {"package", package}, {"redo", redo},
    {"locked", locked}, {"lines", lines},
};

static uint64_t run(void (*pattern)(uint64_t), uint64_t duration_ns, uint64_t *times)
{
    uint64_t count = 0, begun = now_ns(), before = begun;
    for (uint64_t number = 0; before - begun < duration_ns && count < TIMES_MAX; number++) {
        pattern(number);
        uint64_t now = now_ns();
        if (number >= WARM_UP)
            times[count++] = now - before;
        else
            begun = now;
        before = now;
    }
    return count;
}

int main(int argc, char **argv)
{
    void (*pattern)(uint64_t) = NULL;
    for (size_t at = 0; argc == 5 && at < sizeof patterns / sizeof *patterns; at++)
        if (strcmp(argv[2], patterns[at].name) == 0)
            pattern = patterns[at].run;
    if (pattern == NULL) {
        fprintf(stderr, "usage: names DIRECTORY mail|replace|package|redo|locked|lines full|off SECONDS\n");
        return 2;
    }
    syncs = strcmp(argv[3], "full") == 0;
    memset(content, 'x', sizeof content);
    check(chdir(argv[1]) == 0, argv[1]);
    check(mkdir("tmp", 0755) == 0 && mkdir("new", 0755) == 0, "mkdir");
    uint64_t *times = calloc(TIMES_MAX, sizeof *times);
    uint64_t count = times == NULL ? 0 : run(pattern, strtod(argv[4], NULL) * 1e9, times);
    check(count > 0, "nothing was done");
    print_times(times, count, 1);
    return 0;
}
