/* Random operations on files of its own in each thread, each result checked against a model in memory. Prints what the files
   hold in the end. Arguments: seed, operations, threads. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#define LIMIT (192 * 1024)
#define COPIES 3

extern char **environ;
static int operations, threads;

struct file {
    uint64_t random;
    int number, at;
    char path[64], other[64];
    int fd[COPIES]; /* of one description, the first always open */
    int append;
    unsigned char *data, *buf;
    off_t size, place;
};

#define CHECK(f, ok)                                                                                   \
    do {                                                                                               \
        if (!(ok)) {                                                                                   \
            fprintf(stdout, "thread %d operation %d line %d: %s, errno %d\n", (f)->number, (f)->at,    \
                    __LINE__, #ok, errno);                                                             \
            fflush(stdout);                                                                            \
            _exit(9);                                                                                  \
        }                                                                                              \
    } while (0)

static unsigned below(struct file *f, unsigned limit)
{
    f->random = f->random * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(f->random >> 33) % limit;
}

static int some_fd(struct file *f)
{
    int fd = f->fd[below(f, COPIES)];
    return fd >= 0 ? fd : f->fd[0];
}

static off_t some_place(struct file *f)
{
    off_t at = below(f, 3) ? (off_t)below(f, LIMIT / 4096 - 4) * 4096 : (off_t)below(f, LIMIT - 20000);
    return below(f, 4) ? at : f->size < LIMIT - 20000 ? f->size : 0;
}

static size_t some_len(struct file *f)
{
    switch (below(f, 4)) {
    case 0: return 4096;
    case 1: return 1 + below(f, 300);
    case 2: return 4096 * (1 + below(f, 3));
    default: return 1 + below(f, 9000);
    }
}

static void fill(struct file *f, size_t len)
{
    unsigned char c = (unsigned char)below(f, 256);
    for (size_t i = 0; i < len; i++)
        f->buf[i] = (unsigned char)(c + i * 7);
}

static void put(struct file *f, off_t at, size_t len)
{
    if (at > f->size)
        memset(f->data + f->size, 0, at - f->size);
    memcpy(f->data + at, f->buf, len);
    if (at + (off_t)len > f->size)
        f->size = at + len;
}

static void resize(struct file *f, off_t size)
{
    if (size > f->size)
        memset(f->data + f->size, 0, size - f->size);
    f->size = size;
}

/* All of the file as somebody finds it who has `fd`, another description of it. */
static void compare(struct file *f, int fd)
{
    ssize_t got = pread(fd, f->buf, LIMIT, 0);
    CHECK(f, got == f->size);
    CHECK(f, !memcmp(f->buf, f->data, f->size));
}

static void reopen(struct file *f, int flags)
{
    for (int i = 0; i < COPIES; i++)
        if (f->fd[i] >= 0) {
            CHECK(f, close(f->fd[i]) == 0);
            f->fd[i] = -1;
        }
    f->append = !!(flags & O_APPEND);
    f->fd[0] = open(f->path, O_RDWR | O_CREAT | flags, 0644);
    CHECK(f, f->fd[0] >= 0);
    f->place = 0;
    if (flags & O_TRUNC)
        f->size = 0;
}

static void write_some(struct file *f)
{
    size_t len = some_len(f);
    off_t at = f->append ? f->size : f->place;
    if (at + len > LIMIT) {
        f->place = 0;
        CHECK(f, lseek(some_fd(f), 0, SEEK_SET) == 0);
        if (f->append)
            return;
        at = 0;
    }
    fill(f, len);
    struct iovec parts[2] = {{f->buf, len / 3}, {f->buf + len / 3, len - len / 3}};
    ssize_t done = below(f, 2) ? write(some_fd(f), f->buf, len) : writev(some_fd(f), parts, 2);
    CHECK(f, done == (ssize_t)len);
    put(f, at, len);
    f->place = at + len;
}

static void pwrite_some(struct file *f)
{
    size_t len = some_len(f);
    off_t at = f->append ? f->size : some_place(f);
    if (at + len > LIMIT)
        return;
    fill(f, len);
    CHECK(f, pwrite(some_fd(f), f->buf, len, at) == (ssize_t)len);
    put(f, at, len);
}

static ssize_t there(struct file *f, off_t at, size_t len)
{
    off_t left = f->size > at ? f->size - at : 0;
    return left < (off_t)len ? left : (ssize_t)len;
}

static void read_some(struct file *f)
{
    size_t len = some_len(f);
    memset(f->buf, 0xEE, len);
    if (below(f, 2)) {
        off_t at = some_place(f);
        CHECK(f, pread(some_fd(f), f->buf, len, at) == there(f, at, len));
        CHECK(f, !memcmp(f->buf, f->data + at, there(f, at, len)));
        return;
    }
    struct iovec parts[2] = {{f->buf, len / 2}, {f->buf + len / 2, len - len / 2}};
    ssize_t got = below(f, 2) ? read(some_fd(f), f->buf, len) : readv(some_fd(f), parts, 2);
    CHECK(f, got == there(f, f->place, len));
    CHECK(f, !memcmp(f->buf, f->data + f->place, got));
    f->place += got;
}

static void seek_some(struct file *f)
{
    off_t to = some_place(f);
    switch (below(f, 3)) {
    case 0: CHECK(f, lseek(some_fd(f), to, SEEK_SET) == to); f->place = to; break;
    case 1: CHECK(f, lseek(some_fd(f), 0, SEEK_CUR) == f->place); break;
    default: CHECK(f, lseek(some_fd(f), 0, SEEK_END) == f->size); f->place = f->size;
    }
}

static void stat_some(struct file *f)
{
    struct stat by_fd, by_path;
    CHECK(f, fstat(some_fd(f), &by_fd) == 0 && stat(f->path, &by_path) == 0);
    CHECK(f, by_fd.st_size == f->size && by_path.st_size == f->size);
}

static void change_size(struct file *f)
{
    off_t size = below(f, LIMIT), at = some_place(f), len = some_len(f);
    switch (below(f, 4)) {
    case 0: CHECK(f, ftruncate(some_fd(f), size) == 0); resize(f, size); break;
    case 1: CHECK(f, truncate(f->path, size) == 0); resize(f, size); break;
    case 2:
        CHECK(f, fallocate(some_fd(f), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, len) == 0);
        if (at < f->size)
            memset(f->data + at, 0, there(f, at, len));
        break;
    default:
        CHECK(f, posix_fallocate(some_fd(f), at, len) == 0);
        if (at + len > f->size)
            resize(f, at + len);
    }
}

static void copy_descriptor(struct file *f)
{
    int which = 1 + below(f, COPIES - 1), *copy = &f->fd[which];
    if (*copy < 0)
        *copy = below(f, 2) ? dup(f->fd[0]) : fcntl(f->fd[0], F_DUPFD_CLOEXEC, 3);
    else if (below(f, 2))
        CHECK(f, dup2(f->fd[0], *copy) == *copy);
    else {
        CHECK(f, close(*copy) == 0);
        *copy = -1;
        return;
    }
    CHECK(f, *copy >= 0);
}

static void names(struct file *f)
{
    switch (below(f, 4)) {
    case 0:
        CHECK(f, rename(f->path, f->other) == 0 && rename(f->other, f->path) == 0);
        break;
    case 1:
        CHECK(f, unlink(f->path) == 0);
        fill(f, 500);
        if (f->size + 500 <= LIMIT) {
            CHECK(f, pwrite(f->fd[0], f->buf, 500, f->append ? f->size : 100) == 500);
            put(f, f->append ? f->size : 100, 500);
        }
        compare(f, f->fd[0]);
        f->size = 0;
        reopen(f, O_EXCL);
        break;
    case 2:
        CHECK(f, chmod(f->path, 0444) == 0 && fsync(f->fd[0]) == 0 && chmod(f->path, 0644) == 0);
        break;
    default: reopen(f, below(f, 4) ? (below(f, 2) ? O_APPEND : O_DSYNC) : O_TRUNC);
    }
}

static void second_description(struct file *f)
{
    int fd = open(f->path, O_RDONLY | (below(f, 2) ? O_NONBLOCK : 0));
    CHECK(f, fd >= 0);
    compare(f, fd);
    CHECK(f, close(fd) == 0);
}

static void map_some(struct file *f)
{
    if (!f->size)
        return;
    void *at = mmap(NULL, f->size, PROT_READ, below(f, 2) ? MAP_PRIVATE : MAP_SHARED, f->fd[0], 0);
    CHECK(f, at != MAP_FAILED);
    CHECK(f, !memcmp(at, f->data, f->size));
    CHECK(f, munmap(at, f->size) == 0);
}

static void in_child(struct file *f)
{
    int status;
    pid_t child = fork();
    if (!child) {
        off_t place = lseek(f->fd[0], 0, SEEK_CUR);
        compare(f, f->fd[0]);
        CHECK(f, place == f->place);
        _exit(0);
    }
    CHECK(f, child > 0 && waitpid(child, &status, 0) == child && status == 0);
}

static void in_program(struct file *f)
{
    char command[200], number[20];
    int status;
    sprintf(number, "%lld", (long long)f->size);
    sprintf(command, "test $(wc -c < %s) = %s", f->path, number);
    if (below(f, 2)) {
        CHECK(f, system(command) == 0);
        return;
    }
    pid_t child;
    char *arguments[] = {"sh", "-c", command, NULL};
    CHECK(f, posix_spawn(&child, "/bin/sh", NULL, NULL, arguments, environ) == 0);
    CHECK(f, waitpid(child, &status, 0) == child && status == 0);
}

static void send_some(struct file *f)
{
    int pair[2];
    char byte = 1, space[CMSG_SPACE(sizeof(int))];
    memset(space, 0, sizeof space);
    CHECK(f, socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    struct iovec part = {&byte, 1};
    struct mmsghdr message = {.msg_hdr = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space}};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message.msg_hdr);
    header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS, header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &f->fd[0], sizeof(int));
    CHECK(f, below(f, 2) ? sendmmsg(pair[0], &message, 1, 0) == 1 : sendmsg(pair[0], &message.msg_hdr, 0) == 1);
    CHECK(f, recvmsg(pair[1], &message.msg_hdr, 0) == 1);
    int fd;
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message.msg_hdr)), sizeof fd);
    compare(f, fd);
    CHECK(f, close(fd) == 0 && close(pair[0]) == 0 && close(pair[1]) == 0);
}

static void copy_out(struct file *f)
{
    off_t at = 0;
    int to = open(f->other, O_RDWR | O_CREAT | O_TRUNC, 0644);
    CHECK(f, to >= 0);
    for (ssize_t done; at < f->size;) {
        done = below(f, 2) ? sendfile(to, f->fd[0], &at, f->size - at) : copy_file_range(f->fd[0], &at, to, NULL, f->size - at, 0);
        CHECK(f, done > 0);
    }
    compare(f, to);
    CHECK(f, close(to) == 0 && unlink(f->other) == 0);
}

static void *work(void *of)
{
    struct file *f = of;
    reopen(f, O_EXCL);
    for (f->at = 0; f->at < operations; f->at++) {
        unsigned kind = below(f, 200);
        if (kind < 60) pwrite_some(f);
        else if (kind < 100) write_some(f);
        else if (kind < 145) read_some(f);
        else if (kind < 160) seek_some(f);
        else if (kind < 170) CHECK(f, below(f, 2) ? fsync(some_fd(f)) == 0 : fdatasync(some_fd(f)) == 0);
        else if (kind < 178) stat_some(f);
        else if (kind < 184) copy_descriptor(f);
        else if (kind < 188) change_size(f);
        else if (kind < 191) names(f);
        else if (kind < 194) second_description(f);
        else if (kind == 194) map_some(f);
        else if (kind == 195) in_child(f);
        else if (kind == 196 && below(f, 8) == 0) in_program(f);
        else if (kind == 197) send_some(f);
        else if (kind == 198) copy_out(f);
        else if (kind == 199) reopen(f, 0);
    }
    compare(f, f->fd[0]);
    return NULL;
}

/* Writes pages and syncs them, between two calls that a trace shows. */
static int write_hot(void)
{
    static char page[4096];
    int fd = open("hot", O_RDWR | O_CREAT, 0644), failed = 0;
    for (int i = 0; i < 100; i++)
        failed |= pwrite(fd, page, sizeof page, i * 4096) < 0;
    failed |= !access("/begin", F_OK);
    for (int i = 0; i < 1000; i++)
        failed |= pwrite(fd, page, sizeof page, i % 100 * 4096) < 0 || fdatasync(fd) < 0;
    return failed | !access("/end", F_OK);
}

int main(int count, char **arguments)
{
    if (count == 1)
        return write_hot();
    if (count != 4)
        return 2;
    operations = atoi(arguments[2]), threads = atoi(arguments[3]);
    struct file *files = calloc(threads, sizeof *files);
    pthread_t *ids = calloc(threads, sizeof *ids);
    for (int i = 0; i < threads; i++) {
        struct file *f = &files[i];
        *f = (struct file){.random = strtoull(arguments[1], NULL, 10) * 1000 + i, .number = i, .fd = {-1, -1, -1}};
        sprintf(f->path, "file.%d", i), sprintf(f->other, "other.%d", i);
        f->data = calloc(1, 2 * LIMIT), f->buf = calloc(1, 2 * LIMIT);
        if (threads == 1)
            work(f);
        else
            pthread_create(&ids[i], NULL, work, f);
    }
    for (int i = 0; i < threads && threads > 1; i++)
        pthread_join(ids[i], NULL);
    for (int i = 0; i < threads; i++)
        printf("%d: %lld bytes\n", i, (long long)files[i].size);
    return 0;
}
