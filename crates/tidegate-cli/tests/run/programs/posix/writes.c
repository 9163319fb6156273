/* How bytes get into files, sizes and offsets. */
#include "posix.h"
#include <limits.h>
#include <pthread.h>

static void append_mode(void)
{
    int one = open_file("log", O_APPEND), two = open_file("log", O_APPEND), plain = open_file("log", 0);
    TELL(write(one, "first ", 6));
    TELL(write(two, "second ", 7));
    TELL(lseek(one, 0, SEEK_CUR));
    TELL(lseek(one, 2, SEEK_SET));
    TELL(write(one, "third ", 6));
    TELL(lseek(one, 0, SEEK_CUR));
    TELL(pwrite(two, "fourth ", 7, 0)); /* Linux appends, whatever the offset */
    TELL(pwrite(plain, "FIRST", 5, 0));
    TELL(fcntl(plain, F_SETFL, O_APPEND));
    TELL(write(plain, "fifth", 5));
    TELL(fcntl(plain, F_SETFL, 0));
    TELL(write(plain, "!", 1));
    TELL(fdatasync(one));
    show("log");
}

static void duplicates(void)
{
    int fd = open_file("file", 0);
    int other = TELL(dup(fd));
    TELL(write(fd, "abc", 3));
    TELL(write(other, "def", 3));
    TELL(dup2(fd, 50));
    TELL(close(fd));
    TELL(write(50, "ghi", 3));
    TELL(dup3(50, 60, O_CLOEXEC));
    TELL(fcntl(60, F_GETFD));
    TELL(write(60, "jkl", 3));
    TELL(fcntl(60, F_DUPFD, 70));
    TELL(fcntl(60, F_DUPFD_CLOEXEC, 80));
    TELL(write(70, "mno", 3));
    TELL(ftruncate(80, 14));
    TELL(lseek(other, 0, SEEK_CUR));
    int unrelated = open_file("unrelated", 0);
    TELL(dup2(unrelated, 50)); /* closes one name of the file and gives it to another file */
    TELL(write(50, "other file", 10));
    TELL(fsync(50));
    TELL(fsync(70));
    TELL(dup2(70, 70));
    TELL(dup3(70, 70, 0));
    show("file");
    show("unrelated");
}

static void vectors(void)
{
    struct iovec parts[3] = {{"one ", 4}, {"", 0}, {"two ", 4}}, many[IOV_MAX];
    int fd = open_file("file", 0), synced = open_file("synced", O_DSYNC);
    TELL(writev(fd, parts, 3));
    TELL(pwritev(fd, parts, 3, 20));
    TELL(pwritev2(fd, parts, 3, 40, RWF_DSYNC));
    TELL(pwritev2(fd, parts, 3, -1, 0));
    TELL(pwritev2(fd, parts, 3, 0, RWF_APPEND));
    TELL(lseek(fd, 0, SEEK_CUR));
    TELL(pwritev2(fd, parts, 3, -1, RWF_APPEND));
    TELL(lseek(fd, 0, SEEK_CUR));
    TELL(pwritev2(fd, parts, 3, 0, 0x40000000));
    for (int at = 0; at < IOV_MAX; at++)
        many[at] = (struct iovec){"x", 1};
    TELL(writev(synced, many, IOV_MAX));
    TELL(writev(synced, many, IOV_MAX + 1));
    TELL(writev(synced, parts, 0));
    TELL(writev(synced, NULL, 0));
    parts[1].iov_len = SSIZE_MAX;
    TELL(writev(synced, parts, 3));
    TELL(pwritev(synced, parts, 1, -1));
    char into[2][4];
    struct iovec back[2] = {{into[0], 4}, {into[1], 4}};
    TELL(preadv(fd, back, 2, 20));
    say("%.4s|%.4s", into[0], into[1]);
    show("file");
    show("synced");
}

static void truncation(void)
{
    int fd = open_file("file", 0);
    TELL(write(fd, "0123456789", 10));
    TELL(ftruncate(fd, 4));
    TELL(write(fd, "X", 1)); /* leaves a hole */
    show("file");
    TELL(truncate("file", 100));
    TELL(lseek(fd, 0, SEEK_END));
    TELL(ftruncate(fd, 2));
    TELL(ftruncate(fd, 6)); /* what was cut off must not come back */
    TELL(fsync(fd));
    show("file");
    int again = TELL(open("file", O_WRONLY | O_TRUNC) > 0);
    TELL(lseek(fd, 0, SEEK_END));
    TELL(pwrite(fd, "after", 5, 3));
    TELL(ftruncate(fd, -1));
    TELL(truncate("absent", 0));
    say("%d", again);
    show("file");
}

static void allocation(void)
{
    char bytes[40960];
    fill(bytes, sizeof bytes, 1);
    int fd = open_file("file", 0);
    TELL(write(fd, bytes, sizeof bytes));
    TELL(fallocate(fd, 0, 32768, 65536));
    show("file");
    TELL(fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, 1 << 20));
    TELL(lseek(fd, 0, SEEK_END));
    TELL(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 5000, 10000));
    show("file");
    TELL(fallocate(fd, FALLOC_FL_ZERO_RANGE, 100, 200));
    TELL(fallocate(fd, FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE, 90000, 20000));
    show("file");
    TELL(fallocate(fd, FALLOC_FL_COLLAPSE_RANGE, 4096, 8192));
    show("file");
    TELL(fallocate(fd, FALLOC_FL_INSERT_RANGE, 8192, 4096));
    show("file");
    TELL(fallocate(fd, FALLOC_FL_PUNCH_HOLE, 0, 10));
    TELL(posix_fallocate(fd, 100000, 50000));
    TELL(posix_fallocate(fd, 0, 0));
    TELL(pwrite(fd, "end", 3, 149997));
    TELL(fsync(fd));
    show("file");
}

static void sparse(void)
{
    int fd = open_file("file", 0);
    TELL(pwrite(fd, "far", 3, 1 << 20));
    TELL(pwrite(fd, "near", 4, 65536));
    TELL(lseek(fd, 0, SEEK_DATA));
    TELL(lseek(fd, 65536, SEEK_HOLE));
    TELL(lseek(fd, 200000, SEEK_DATA));
    TELL(fdatasync(fd));
    TELL(lseek(fd, 0, SEEK_HOLE));
    TELL(lseek(fd, 1 << 21, SEEK_DATA));
    show("file");
    int huge = open_file("huge", 0);
    TELL(pwrite(huge, "x", 1, 5LL << 30));
    TELL(lseek(huge, 0, SEEK_END));
    TELL(fsync(huge));
    char byte = 0;
    TELL(pread(huge, &byte, 1, 5LL << 30));
    say("%c", byte);
    TELL(pwrite(huge, "x", 1, LLONG_MAX));
    TELL(ftruncate(huge, 10));
    show("huge");
}

static void sizes(void)
{
    struct stat status;
    struct statx more;
    int writer = open_file("file", 0), reader = MUST(open("file", O_RDONLY));
    for (int round = 1; round <= 3; round++) {
        TELL(write(writer, "0123456789", 10));
        MUST(fstat(reader, &status));
        say("fstat %lld", (long long)status.st_size);
        MUST(stat("file", &status));
        say("stat %lld", (long long)status.st_size);
        MUST(statx(AT_FDCWD, "file", 0, STATX_SIZE, &more));
        say("statx %lld", (long long)more.stx_size);
        TELL(lseek(reader, 0, SEEK_END));
        TELL(lseek(writer, 0, SEEK_CUR));
    }
    TELL(lseek(writer, -5, SEEK_END));
    TELL(write(writer, "abcdefghij", 10));
    char bytes[64] = "";
    TELL(pread(reader, bytes, 64, 20));
    say("%s", bytes);
}

/* Sizes around those of cache lines, pages and what a log may cut: each byte beside them must
 * stay. */
static void every_size(void)
{
    static char bytes[70000];
    static const int counts[] = {1, 7, 8, 63, 64, 65, 127, 128, 129, 191, 192, 4031, 4032, 4033, 4095, 4096, 4097, 65535,
                                 65536, 65537};
    int fd = open_file("file", 0), synced = open_file("synced", O_SYNC | O_APPEND);
    off_t offset = 0;
    fill(bytes, sizeof bytes, 3);
    for (size_t at = 0; at < sizeof counts / sizeof *counts; at++) {
        MUST(pwrite(fd, bytes + at, counts[at], offset));
        MUST(fdatasync(fd));
        MUST(write(synced, bytes + at, counts[at]));
        offset += counts[at] + at;
    }
    for (int count = 1; count < 600; count++)
        MUST(write(fd, bytes, count));
    static char large[9 << 20];
    fill(large, sizeof large, 9);
    TELL(pwrite(fd, large, sizeof large, 12345));
    TELL(fsync(fd));
    show("file");
    show("synced");
}

static void synchronous_flags(void)
{
    static const int flags[] = {O_SYNC, O_DSYNC, O_APPEND, O_SYNC | O_APPEND, O_NONBLOCK, O_NOATIME};
    for (size_t at = 0; at < sizeof flags / sizeof *flags; at++) {
        int fd = open_file("file", flags[at]);
        say("opened with %o, has %o", flags[at], (unsigned)fcntl(fd, F_GETFL));
        TELL(write(fd, "data", 4));
        TELL(fcntl(fd, F_SETFL, O_APPEND | O_SYNC));
        say("has %o", (unsigned)fcntl(fd, F_GETFL));
        TELL(fcntl(fd, F_GETFD));
        TELL(sync_file_range(fd, 0, 0, SYNC_FILE_RANGE_WRITE));
        if (at == 0)
            TELL(syncfs(fd));
        close(fd);
    }
    sync();
    show("file");
}

static void reused_descriptors(void)
{
    for (int round = 0; round < 200; round++) {
        char name[16];
        snprintf(name, sizeof name, "file.%d", round % 7);
        int fd = open_file(name, round % 3 ? 0 : O_TRUNC);
        MUST(pwrite(fd, name, strlen(name), round));
        if (round % 5 == 0)
            MUST(fsync(fd));
        if (round % 11 == 0)
            MUST(close_range(fd, fd, 0));
        else
            MUST(close(fd));
    }
    for (int number = 0; number < 7; number++) {
        char name[16];
        snprintf(name, sizeof name, "file.%d", number);
        show(name);
    }
    int first = open_file("a", 0), last = open_file("b", 0);
    TELL(close_range(first, last, CLOSE_RANGE_CLOEXEC));
    TELL(write(first, "still open", 10));
    TELL(fcntl(first, F_GETFD));
    TELL(close_range(first, last, 0));
    TELL(write(first, "closed", 6));
    closefrom(3);
    TELL(fcntl(3, F_GETFD));
    show("a");
}

static void *disjoint_writer(void *number)
{
    char page[4096];
    long which = (long)number;
    int fd = open_file("shared", 0);
    for (int round = 0; round < 64; round++) {
        fill(page, sizeof page, which * 64 + round);
        MUST(pwrite(fd, page, sizeof page, (round * 4L + which) * 4096));
        MUST(fdatasync(fd));
    }
    close(fd);
    return NULL;
}

static void *record_writer(void *number)
{
    char record[24];
    int fd = open_file("records", O_APPEND);
    for (int round = 0; round < 200; round++) {
        int length = snprintf(record, sizeof record, "thread %ld round %03d\n", (long)number, round);
        MUST(write(fd, record, length) == length ? 0 : -1);
        if (round % 10 == 0)
            MUST(fsync(fd));
    }
    close(fd);
    return NULL;
}

static void run_threads(void *(*body)(void *))
{
    pthread_t threads[4];
    for (long number = 0; number < 4; number++)
        MUST(-pthread_create(&threads[number], NULL, body, (void *)number));
    for (int number = 0; number < 4; number++)
        pthread_join(threads[number], NULL);
}

static void threads(void)
{
    run_threads(disjoint_writer);
    show("shared");
    run_threads(record_writer);
    FILE *records = fopen("records", "r");
    int next[4] = {0}, which, round, count = 0;
    while (fscanf(records, "thread %d round %d\n", &which, &round) == 2 && next[which]++ == round)
        count++;
    say("%d records, each thread's in order", count);
    TELL(feof(records) != 0);
    fclose(records);
    MUST(unlink("records")); /* its order differs each time */
}

static void *shared_offset_writer(void *fd)
{
    for (int round = 0; round < 500; round++)
        MUST(write((long)fd, "0123456\n", 8));
    return NULL;
}

/* Threads that share one offset: no write may lie over another. */
static void shared_offset(void)
{
    long fd = open_file("file", 0);
    pthread_t other;
    MUST(-pthread_create(&other, NULL, shared_offset_writer, (void *)fd));
    shared_offset_writer((void *)fd);
    pthread_join(other, NULL);
    TELL(lseek(fd, 0, SEEK_CUR));
    show("file");
}

const struct section write_sections[] = {
    {"append_mode", append_mode},
    {"duplicates", duplicates},
    {"vectors", vectors},
    {"truncation", truncation},
    {"allocation", allocation},
    {"sparse", sparse},
    {"sizes", sizes},
    {"every_size", every_size},
    {"synchronous_flags", synchronous_flags},
    {"reused_descriptors", reused_descriptors},
    {"threads", threads},
    {"shared_offset", shared_offset},
    {NULL, NULL},
};
