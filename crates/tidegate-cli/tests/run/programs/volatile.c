/* Syncs, asked for in all ways. `answers DIR`: each call on each kind of descriptor, with what it
   returns and errno. `flags DIR`: what F_GETFL shows of descriptors that were opened with O_SYNC
   and O_DSYNC, and of copies. `write FILE TIMES`: appends and syncs so many times, each time by
   another call. `negative`: syncs of negative descriptors. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <unistd.h>

static void say(const char *kind, const char *call, long result) {
    int error = errno;
    printf("%s %s: %ld %s\n", kind, call, result, result < 0 ? strerrorname_np(error) : "");
    errno = 0;
}

#define SAY(kind, call) say(kind, #call, call)

static void answers(const char *kind, int fd) {
    long most = 0x7fffffffffffffff;
    char byte = 'x';
    struct iovec part = {&byte, 1};
    SAY(kind, fsync(fd));
    SAY(kind, fdatasync(fd));
    SAY(kind, syncfs(fd));
    SAY(kind, sync_file_range(fd, 0, 0, SYNC_FILE_RANGE_WRITE));
    SAY(kind, sync_file_range(fd, 0, 4096, 7));
    SAY(kind, sync_file_range(fd, 0, 4096, 0));
    SAY(kind, sync_file_range(fd, 0, 4096, 8));
    SAY(kind, sync_file_range(fd, 0, 4096, 15));
    SAY(kind, sync_file_range(fd, -1, 4096, 7));
    SAY(kind, sync_file_range(fd, 0, -1, 7));
    SAY(kind, sync_file_range(fd, most, 1, 7));
    SAY(kind, pwritev2(fd, &part, 1, 0, RWF_DSYNC));
    SAY(kind, pwritev2(fd, &part, 1, 0, RWF_SYNC | RWF_DSYNC));
    SAY(kind, pwritev2(fd, &part, 1, 0, 1 << 30));
    SAY(kind, syscall(SYS_fsync, fd));
    SAY(kind, syscall(SYS_fdatasync, fd));
    SAY(kind, syscall(SYS_syncfs, fd));
    SAY(kind, syscall(SYS_sync_file_range, fd, 0, 4096, 8));
    SAY(kind, syscall(SYS_pwritev2, fd, &part, 1, 0, 0, RWF_SYNC));
    SAY(kind, fcntl(fd, F_GETFL));
}

static void opened(const char *path, int flags) {
    char kind[256];
    snprintf(kind, sizeof kind, "%.200s %#x", path, flags);
    int fd = open(path, flags | O_NONBLOCK, 0600);
    SAY(kind, fd >= 0 ? 0 : -1);
    if (fd >= 0) {
        answers(kind, fd);
        close(fd);
    }
}

static void answer_all(void) {
    int pair[2];
    answers("closed", 900);
    answers("negative", -1);
    answers("lowest", -2147483647 - 1);
    opened("file", O_RDWR | O_CREAT);
    opened("file", O_RDONLY);
    opened("file", O_WRONLY | O_APPEND);
    opened("file", O_PATH);
    opened(".", O_RDONLY | O_DIRECTORY);
    opened(".", O_PATH);
    opened(".", O_RDWR | O_TMPFILE);
    (void)!symlink("file", "link");
    opened("link", O_PATH | O_NOFOLLOW);
    opened("link", O_RDWR);
    mkfifo("fifo", 0600);
    opened("fifo", O_RDWR);
    static const char *const elsewhere[] = {
        "/dev/null", "/dev/zero", "/dev/full", "/dev/ptmx", "/proc", "/proc/self/status",
        "/proc/self/ns/mnt", "/sys", "/sys/kernel/mm/transparent_hugepage/enabled", "/sys/fs/cgroup",
        "/dev", "/dev/shm", "/dev/pts", "/sys/kernel/debug", "/dev/loop0",
    };
    for (unsigned at = 0; at < sizeof elsewhere / sizeof *elsewhere; at++) {
        opened(elsewhere[at], O_RDONLY);
    }
    opened("/dev/null", O_RDWR);
    (void)!pipe(pair);
    answers("pipe to read", pair[0]);
    answers("pipe to write", pair[1]);
    socketpair(AF_UNIX, SOCK_STREAM, 0, pair);
    answers("socket", pair[0]);
    answers("eventfd", eventfd(0, EFD_NONBLOCK));
    answers("epoll", epoll_create1(0));
    answers("timerfd", timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK));
    answers("inotify", inotify_init1(IN_NONBLOCK));
    answers("memfd", memfd_create("memory", 0));
    int gone = open("gone", O_RDWR | O_CREAT, 0600);
    unlink("gone");
    answers("removed", gone);
    static char page[16384] __attribute__((aligned(4096)));
    int fd = open("file", O_RDWR);
    (void)!ftruncate(fd, 8192);
    char *file = mmap(0, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    file[0] = 'y';
    SAY("file", msync(file, 8192, MS_SYNC));
    SAY("file", msync(file, 8192, MS_ASYNC));
    SAY("file", msync(file, 8192, MS_SYNC | MS_INVALIDATE));
    SAY("file", msync(file, 8192, MS_SYNC | MS_ASYNC));
    SAY("file", msync(file, 8192, 0));
    SAY("file", msync(file, 8192, 8));
    SAY("file", msync(file, 8192, MS_SYNC | 8));
    SAY("file", msync(file + 1, 100, MS_SYNC));
    SAY("file", msync(file, (size_t)-1, MS_SYNC));
    SAY("file", syscall(SYS_msync, file, 8192, MS_SYNC));
    mlock(file, 4096);
    SAY("locked", msync(file, 4096, MS_SYNC | MS_INVALIDATE));
    SAY("memory", msync(page, 4096, MS_SYNC));
    munmap(file, 8192);
    SAY("unmapped", msync(file, 4096, MS_SYNC));
    sync();
    SAY("all", syscall(SYS_sync));
}

static void show(const char *how, int fd) {
    if (fd < 0) {
        say(how, "open", fd);
        return;
    }
    int flags = fcntl(fd, F_GETFL);
    int copies[] = {dup(fd), dup2(fd, 300), dup3(fd, 301, O_CLOEXEC), fcntl(fd, F_DUPFD, 400),
                    fcntl(fd, F_DUPFD_CLOEXEC, 401), (int)syscall(SYS_dup, fd)};
    printf("%s: %o by syscall %lo", how, flags, syscall(SYS_fcntl, fd, F_GETFL));
    for (unsigned at = 0; at < sizeof copies / sizeof *copies; at++) {
        printf(" %o", fcntl(copies[at], F_GETFL));
    }
    fcntl(fd, F_SETFL, O_APPEND);
    printf(" append %o", fcntl(fd, F_GETFL));
    /* Another file under the same number. */
    int plain = open("plain", O_RDWR | O_CREAT, 0600);
    dup2(plain, fd);
    printf(" other %o\n", fcntl(fd, F_GETFL));
    for (unsigned at = 0; at < sizeof copies / sizeof *copies; at++) {
        close(copies[at]);
    }
    close(plain);
    close(fd);
}

static void flags_of(int flags) {
    char how[64], name[] = "madeXXXXXX";
    snprintf(how, sizeof how, "%#o", flags);
    unlink("file");
    show(how, open("file", O_RDWR | O_CREAT | O_EXCL | flags, 0400));
    show(how, open("file", O_RDWR | O_CREAT | flags, 0600));
    show(how, open64("file", O_RDWR | O_TRUNC | flags));
    show(how, openat(AT_FDCWD, "file", O_WRONLY | flags));
    show(how, openat64(AT_FDCWD, "file", O_WRONLY | O_APPEND | flags));
    show(how, (int)syscall(SYS_openat, AT_FDCWD, "file", O_RDONLY | flags));
    show(how, open(".", O_RDWR | O_TMPFILE | flags, 0600));
    show(how, open("file", O_PATH | flags));
    show(how, open("link", O_RDWR | O_NOFOLLOW | flags));
    show(how, open("no/such", O_RDWR | O_CREAT | flags, 0600));
    show(how, open("no-such", O_RDWR | flags));
    show(how, open("", O_RDWR | flags));
    show(how, open((const char *)8, O_RDWR | flags));
    show(how, openat(901, "file", O_RDWR | flags));
    show(how, open("/dev/null", O_RDWR | flags));
    show(how, mkostemp(name, flags));
    unlink(name);
    int fd = open("file", O_RDWR | flags);
    close(fd);
    show("reopened", open("file", O_RDWR));
}

static void write_synced(const char *path, int times) {
    int fd = open(path, O_RDWR | O_CREAT | O_APPEND, 0600);
    int synced = open(path, O_RDWR | O_SYNC);
    char *map = MAP_FAILED;
    for (int time = 0; time < times; time++) {
        char block[4096];
        memset(block, time, sizeof block);
        if (write(fd, block, sizeof block) != sizeof block) {
            exit(2);
        }
        if (map == MAP_FAILED) {
            map = mmap(0, sizeof block, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        }
        map[0] = (char)(time + 1);
        struct iovec part = {block, sizeof block};
        int failed = 0;
        switch (time % 6) {
        case 0: failed = fsync(fd); break;
        case 1: failed = fdatasync(fd); break;
        case 2: failed = syncfs(fd); break;
        case 3: failed = msync(map, sizeof block, MS_SYNC); break;
        case 4: failed = (int)syscall(SYS_fsync, fd); break;
        /* By flags only where the library takes them off. */
        case 5:
            failed = getenv("BY_FLAGS") ? pwritev2(fd, &part, 1, 0, RWF_SYNC) + pwrite(synced, block, 4096, 0) < 0
                                        : sync_file_range(fd, 0, 0, 7);
            break;
        }
        if (failed) {
            exit(3);
        }
    }
    sync();
}

int main(int count, char **words) {
    setbuf(stdout, NULL);
    if (count > 2 && !strcmp(words[1], "write")) {
        write_synced(words[2], atoi(words[3]));
        return 0;
    }
    if (count > 1 && !strcmp(words[1], "negative")) {
        static const int negative[] = {-1, -2, AT_FDCWD, -2147483647 - 1};
        for (int at = 0; at < 4; at++) {
            SAY("negative", fsync(negative[at]));
            SAY("negative", fdatasync(negative[at]));
            SAY("negative", syncfs(negative[at]));
            SAY("negative", sync_file_range(negative[at], 0, 0, 2));
            SAY("negative", syscall(SYS_fsync, negative[at]));
        }
        SAY("unmapped", msync((void *)4096, 4096, MS_ASYNC));
        return 0;
    }
    if (chdir(words[2])) {
        return 1;
    }
    if (!strcmp(words[1], "answers")) {
        answer_all();
        return 0;
    }
    (void)!symlink("file", "link");
    flags_of(0);
    flags_of(O_SYNC);
    flags_of(O_DSYNC);
    return 0;
}
