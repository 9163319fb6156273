/* Executes file operations that it reads as text, one a line, and reports after each: the program
 * whose crashes are tested.
 *
 * interpreter STATIC [hold]    reads lines "NUMBER OPERATION ARGUMENT..." from standard input and
 *                              answers each with "NUMBER ok" or "NUMBER errno E: TEXT". STATIC is
 *                              this program, statically linked.
 * interpreter once LINE        executes one line and exits with its errno.
 * interpreter boot COMMAND...  runs a command for which the machine was started just now.
 * interpreter unsynced COMMAND...  runs a command whose syncs all succeed, and none is made.
 *
 * NUMBER identifies the bytes that an operation writes: see `fill`. With `hold` each file stays
 * open once it was opened, and later operations use that descriptor. Otherwise an operation opens
 * its file itself, and the next operation closes it. A sync of "." uses the descriptor of the last
 * operation. */
#define _GNU_SOURCE
#include "calls.h"

#ifndef STATIC
#include <dlfcn.h>
#endif
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <linux/falloc.h>
#include <linux/filter.h>
#include <linux/fs.h>
#include <linux/io_uring.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

enum { ARGUMENTS_MAX = 8, HELD_MAX = 320, BYTES_MAX = 1 << 20 };

static int number;           /* of the operation */
static int argument_count;
static char *arguments[ARGUMENTS_MAX];
static const char *static_program = "";
static enum way way;         /* how the step makes its calls */

static int hold;
static struct { char path[PATH_MAX]; int fd; } held[HELD_MAX];
static int last = -1;        /* the descriptor of the last operation */
static FILE *stream;         /* the stream of the last operation */
static char stream_path[PATH_MAX];
static int stream_appends;   /* whatever its position */
static void *mapping;        /* the mapping of the last operation */
static size_t mapping_bytes;

static unsigned char bytes[BYTES_MAX] __attribute__((aligned(4096)));

/* Offset and operation number determine a byte. Bytes of two operations differ at every offset, and
 * none is zero. */
static void fill(off_t offset, size_t length)
{
    static struct { int number; off_t offset; size_t length; } filled;
    if (filled.number == number && filled.offset == offset && filled.length == length)
        return;
    filled.number = number;
    filled.offset = offset;
    filled.length = length;
    for (size_t at = 0; at < length; at++) {
        uint64_t place = (uint64_t)offset + at;
        bytes[at] = 1 + (number * 41 + place * 11 + (place >> 8) * 29) % 251;
    }
}

static const char *path(int index) { return arguments[index]; }
static long long value(int index) { return atoll(arguments[index]); }
static int is(const char *text, const char *name) { return strcmp(text, name) == 0; }

static int result(long long found, long long wanted)
{
    if (found == wanted)
        return 0;
    if (found >= 0)
        errno = EIO; /* a short transfer */
    return -1;
}

#ifndef STATIC
/* What a file beside the program has under a name; it is loaded when it is first needed. */
static void *symbol_of(const char *file, int is_apart, int flags, const char *name)
{
    char copy[PATH_MAX], whole[PATH_MAX * 2];
    snprintf(copy, sizeof copy, "%s", static_program);
    snprintf(whole, sizeof whole, "%s/%s", dirname(copy), file);
    static void *apart;
    if (is_apart && !apart)
        apart = dlmopen(LM_ID_NEWLM, whole, RTLD_NOW);
    void *object = is_apart ? apart : dlopen(whole, RTLD_NOW | RTLD_LOCAL | flags);
    return object ? dlsym(object, name) : NULL;
}

/* The C library's function of a name, by its handle; by its oldest version if `with_version`. */
static void *of_libc(const char *name, int with_version)
{
    static const char *const versions[] = {
        "GLIBC_2.2.5", "GLIBC_2.3", "GLIBC_2.4", "GLIBC_2.5", "GLIBC_2.6", "GLIBC_2.10", "GLIBC_2.17", "GLIBC_2.27", "GLIBC_2.28" };
    void *library = dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD);
    void *found = library && !with_version ? dlsym(library, name) : NULL;
    for (size_t index = 0; library && with_version && !found && index < sizeof versions / sizeof *versions; index++)
        found = dlvsym(library, name, versions[index]);
    return found;
}

static long make_by_object(enum call which, enum way by, const long *arguments)
{
    int is_apart = by == BY_SPACE, flags = by == BY_DEEP ? RTLD_DEEPBIND : 0;
    if (by == BY_LIBC || by == BY_VERSION) {
        void *function = of_libc(call_name(which), by == BY_VERSION);
        return function ? call_function(which, function, arguments) : -ENOSYS;
    }
    if (by == BY_OWN) {
        long raw[6], number = numbered(which, 0, arguments, raw);
        long (*own)(long, const long *) = symbol_of("own.so", 0, 0, "call_own");
        return own ? own(number, raw) : -ENOSYS;
    }
    long (*call)(int, const long *) = symbol_of("calls.so", is_apart, flags, "call_by_name");
    return call ? call(which, arguments) : -ENOSYS;
}

/* Whether a preloaded library is not to see a call: CRASHTEST_MISSED names it. */
static int is_missed(enum call which)
{
    const char *wanted = getenv("CRASHTEST_MISSED");
    return wanted && is(wanted, call_name(which));
}

/* A system call by the instruction in the middle of a function of the C library, behind which that
 * function returns: no library that is loaded can see it. */
static long make_unseen(enum call which, const long *arguments)
{
    long a[6], number = numbered(which, 0, arguments, a);
    const unsigned char *code = (const unsigned char *)getppid;
#ifdef __x86_64__
    while (code[0] != 0x0f || code[1] != 0x05)
        code++;
    long result;
    register long fourth __asm__("r10") = a[3];
    register long fifth __asm__("r8") = a[4];
    register long sixth __asm__("r9") = a[5];
    __asm__ volatile("lea -128(%%rsp), %%rsp\n\tcall *%[code]\n\tlea 128(%%rsp), %%rsp"
                     : "=a"(result)
                     : [code] "b"(code), "0"(number), "D"(a[0]), "S"(a[1]), "d"(a[2]), "r"(fourth), "r"(fifth),
                       "r"(sixth)
                     : "rcx", "r11", "memory");
    return result;
#else
    while (memcmp(code, (const unsigned char[]){ 0x01, 0x00, 0x00, 0xd4 }, 4) != 0)
        code += 4;
    register long eighth __asm__("x8") = number;
    register long first __asm__("x0") = a[0];
    register long second __asm__("x1") = a[1];
    register long third __asm__("x2") = a[2];
    register long fourth __asm__("x3") = a[3];
    register long fifth __asm__("x4") = a[4];
    register long sixth __asm__("x5") = a[5];
    __asm__ volatile("blr %[code]"
                     : "+r"(first)
                     : [code] "r"(code), "r"(eighth), "r"(second), "r"(third), "r"(fourth), "r"(fifth), "r"(sixth)
                     : "x30", "memory");
    return first;
#endif
}
#else
static long make_by_object(enum call which, enum way by, const long *arguments)
{
    (void)which, (void)by, (void)arguments;
    return -ENOSYS;
}
static int is_missed(enum call which) { (void)which; return 0; }
static long make_unseen(enum call which, const long *arguments) { return make_by_object(which, BY_OWN, arguments); }
#endif

static long make_by_number(enum call which, int is_new, const long *arguments)
{
    long raw[6], nr = numbered(which, is_new, arguments, raw);
    long found = syscall(nr, raw[0], raw[1], raw[2], raw[3], raw[4], raw[5]);
    if (found == -1 && errno == ENOSYS && is_new)
        return make_by_number(which, 0, arguments);
    return found == -1 ? -errno : found;
}

/* Makes a call in the way that the step says. */
static long make(enum call which, const long *arguments)
{
    enum way by = way;
    long found = by == BY_NAME && is_missed(which) ? make_unseen(which, arguments)
        : by == BY_NAME ? call_by_name(which, arguments)
        : by == BY_NUMBER || by == BY_NEW ? make_by_number(which, by == BY_NEW, arguments)
        : make_by_object(which, by, arguments);
    if (found >= 0 || found < -4095)
        return found;
    errno = (int)-found;
    return -1;
}

/* A call and its arguments. */
#define MAKE(which, ...) make(which, (long[6]){ __VA_ARGS__ })

/* An open file, whose mode is 0644 if it is created. */
static int open_by(const char *name, int flags) { return MAKE(OPEN, (long)name, flags | O_CLOEXEC, 0644); }
static int fsync_by(int fd) { return MAKE(FSYNC, fd); }
static int fdatasync_by(int fd) { return MAKE(FDATASYNC, fd); }

static int ticks_are_awaited; /* by the caller */

/* A file's timestamps advance in ticks of this clock: two writes in one tick change them once. */
static void await_tick(void)
{
    struct timespec start, now;
    if (ticks_are_awaited)
        return;
    clock_gettime(CLOCK_REALTIME_COARSE, &start);
    do {
        nanosleep(&(struct timespec){ 0, 300000 }, NULL);
        clock_gettime(CLOCK_REALTIME_COARSE, &now);
    } while (now.tv_sec == start.tv_sec && now.tv_nsec == start.tv_nsec);
}

static int held_index(const char *name)
{
    for (int index = 0; index < HELD_MAX; index++)
        if (held[index].fd >= 0 && is(held[index].path, name))
            return index;
    return -1;
}

static void let_go(const char *name)
{
    int index = held_index(name);
    if (index >= 0) {
        close(held[index].fd);
        if (last == held[index].fd)
            last = -1;
        held[index].fd = -1;
    }
}

static int is_held(int fd)
{
    for (int index = 0; index < HELD_MAX; index++)
        if (held[index].fd == fd)
            return 1;
    return 0;
}

/* Closes what the last operation left open. */
static void release(void)
{
    if (stream)
        fclose(stream);
    else if (last >= 0 && !is_held(last))
        close(last);
    if (mapping)
        munmap(mapping, mapping_bytes);
    stream = NULL;
    mapping = NULL;
    last = -1;
}

static int remember(const char *name, int fd, int flags)
{
    /* Not what writes otherwise than at a given offset through the page cache. */
    if (fd >= 0 && hold && !(flags & (O_APPEND | O_DIRECT | O_SYNC))) {
        let_go(name);
        for (int index = 0; index < HELD_MAX; index++)
            if (held[index].fd < 0) {
                snprintf(held[index].path, PATH_MAX, "%s", name);
                held[index].fd = fd;
                break;
            }
    }
    return last = fd;
}

static int open_as(const char *name, int flags)
{
    return remember(name, open_by(name, flags), flags);
}

/* An existing file: the held descriptor, or a new one. */
static int existing(const char *name)
{
    int index = hold ? held_index(name) : -1;
    return index >= 0 ? (last = held[index].fd) : open_as(name, O_RDWR);
}

static int write_at(int fd, off_t offset, size_t length)
{
    fill(offset, length);
    return fd < 0 ? -1 : result(MAKE(PWRITE, fd, (long)bytes, length, offset), length);
}

static off_t size_of(int fd)
{
    struct stat status;
    return fstat(fd, &status) == 0 ? status.st_size : -1;
}

static int do_create(void) { return open_as(path(0), O_RDWR | O_CREAT | O_EXCL) < 0 ? -1 : 0; }
static int do_new(void)
{
    return write_at(open_as(path(0), O_RDWR | O_CREAT | O_EXCL), 0, value(1));
}
static int do_write(void) { await_tick(); return write_at(existing(path(0)), value(1), value(2)); }

static int do_append(void)
{
    await_tick();
    int is_open = hold && held_index(path(0)) >= 0;
    int fd = is_open ? existing(path(0)) : open_as(path(0), O_RDWR | O_APPEND);
    off_t end = fd < 0 ? -1 : lseek(fd, 0, SEEK_END);
    if (end < 0)
        return -1;
    fill(end, value(1));
    return result(MAKE(WRITE, fd, (long)bytes, value(1)), value(1));
}

static int do_truncate(void)
{
    await_tick();
    int fd = existing(path(0));
    return fd < 0 ? -1 : MAKE(FTRUNCATE, fd, value(1));
}

static int do_truncate_open(void)
{
    await_tick();
    int fd = open_as(path(0), O_RDWR | O_TRUNC);
    fill(0, value(1));
    return fd < 0 ? -1 : result(MAKE(WRITE, fd, (long)bytes, value(1)), value(1));
}

static int do_fallocate(void)
{
    static const struct { const char *name; int mode; } modes[] = {
        { "default", 0 }, { "keep", FALLOC_FL_KEEP_SIZE },
        { "punch", FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE }, { "zero", FALLOC_FL_ZERO_RANGE },
        { "collapse", FALLOC_FL_COLLAPSE_RANGE }, { "insert", FALLOC_FL_INSERT_RANGE },
    };
    int fd = existing(path(0));
    for (size_t index = 0; fd >= 0 && index < sizeof modes / sizeof *modes; index++)
        if (is(arguments[1], modes[index].name))
            return MAKE(FALLOCATE, fd, modes[index].mode, value(2), value(3));
    return -1;
}

static int do_link(void) { return MAKE(LINK, (long)path(0), (long)path(1)); }
static int do_symlink(void) { return MAKE(SYMLINK, (long)path(0), (long)path(1)); }
static int do_mkdir(void) { return MAKE(MKDIR, (long)path(0), 0755); }
static int do_rmdir(void) { return MAKE(RMDIR, (long)path(0)); }
static int do_utime(void)
{
    struct timespec times[2] = { { number, 0 }, { number, 0 } };
    return MAKE(UTIMENSAT, AT_FDCWD, (long)path(0), (long)times, 0);
}
static int do_chown(void)
{
    int fd = existing(path(0));
    return fd < 0 ? -1 : MAKE(FCHOWN, fd, geteuid(), getegid());
}
static int do_chmod(void) { return MAKE(CHMOD, (long)path(0), strtol(arguments[1], NULL, 8)); }

static int do_unlink(void)
{
    let_go(path(0));
    return MAKE(UNLINK, (long)path(0));
}

static int do_setxattr(void)
{
    char text[32];
    int length = snprintf(text, sizeof text, "%d", number);
    return MAKE(SETXATTR, (long)path(0), (long)"user.crashtest", (long)text, length, 0);
}

/* A capability of revision 2: CAP_NET_RAW, permitted and effective. */
static int do_setcap(void)
{
    uint32_t value[5] = { 0x02000001, 1 << 13 };
    return MAKE(SETXATTR, (long)path(0), (long)"security.capability", (long)value, sizeof value, 0);
}

/* An access control list of version 2: the user 1 may read, as all but the owner. */
static int do_setfacl(void)
{
    static const struct { uint32_t version; struct { uint16_t tag, may; uint32_t id; } entries[5]; } list = {
        2, { { 1, 6, -1 }, { 2, 4, 1 }, { 4, 4, -1 }, { 16, 4, -1 }, { 32, 4, -1 } } };
    return MAKE(SETXATTR, (long)path(0), (long)"system.posix_acl_access", (long)&list, sizeof list, 0);
}

static int do_append_only(void)
{
    int fd = existing(path(0)), flags;
    if (fd < 0 || ioctl(fd, FS_IOC_GETFLAGS, &flags) != 0)
        return -1;
    flags |= FS_APPEND_FL;
    return ioctl(fd, FS_IOC_SETFLAGS, &flags);
}

/* Held descriptors follow their files to new names. */
static void follow(const char *from, const char *to)
{
    size_t length = strlen(from);
    for (int index = 0; index < HELD_MAX; index++) {
        char *name = held[index].path, moved[PATH_MAX * 2];
        int is_below = strncmp(name, from, length) == 0 && (!name[length] || name[length] == '/');
        if (held[index].fd < 0 || !is_below)
            continue;
        snprintf(moved, sizeof moved, "%s%s", to, name + length);
        snprintf(name, PATH_MAX, "%.*s", PATH_MAX - 1, moved);
    }
}

static int renamed(int status)
{
    if (status == 0) {
        let_go(path(1));
        follow(path(0), path(1));
    }
    return status;
}

/* A sync of the file that only a preloaded library sees, if CRASHTEST_CLAIMED is set: for a
 * command that runs unsynced. */
static void claim_synced(const char *name)
{
    int fd = getenv("CRASHTEST_CLAIMED") ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (fd >= 0) {
        fsync(fd);
        close(fd);
    }
}

static int do_rename(void)
{
    claim_synced(path(0));
    return renamed(MAKE(RENAME, (long)path(0), (long)path(1)));
}

static int do_exchange(void)
{
    if (MAKE(EXCHANGE, AT_FDCWD, (long)path(0), AT_FDCWD, (long)path(1), RENAME_EXCHANGE) != 0)
        return -1;
    follow(path(0), "\1");
    follow(path(1), path(0));
    follow("\1", path(1));
    return 0;
}

static int do_mmap(void)
{
    await_tick();
    int fd = existing(path(0));
    mapping_bytes = fd < 0 ? 0 : size_of(fd);
    mapping = (void *)MAKE(MMAP, 0, mapping_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapping == MAP_FAILED) {
        mapping = NULL;
        return -1;
    }
    fill(value(1), value(2));
    memcpy((char *)mapping + value(1), bytes, value(2));
    return 0;
}

/* Whether an operation goes on with the stream of the last one: with files that stay open. */
static int goes_on(const char *name)
{
    int appends = is(name, "stdio"), overwrites = is(name, "fwrite") && !stream_appends;
    return hold && stream && (appends || overwrites) && is(path(0), stream_path);
}

static int open_stream(const char *mode)
{
    stream = fopen(path(0), mode);
    if (!stream)
        return -1;
    snprintf(stream_path, sizeof stream_path, "%s", path(0));
    stream_appends = mode[0] == 'a';
    return 0;
}

static int write_by_stream(off_t offset, size_t length)
{
    last = fileno(stream);
    fill(offset, length);
    int is_at = stream_appends || fseeko(stream, offset, SEEK_SET) == 0;
    return is_at && fwrite(bytes, 1, length, stream) == length && fflush(stream) == 0 ? 0 : -1;
}

static int do_stdio(void)
{
    await_tick();
    if (!stream && open_stream(access(path(0), F_OK) == 0 ? "a" : "w") != 0)
        return -1;
    return write_by_stream(size_of(fileno(stream)), value(1));
}

static int do_fwrite(void)
{
    await_tick();
    if (!stream && open_stream("r+") != 0)
        return -1;
    return write_by_stream(value(1), value(2));
}

static int do_reflink(void)
{
    int from = open(path(0), O_RDONLY | O_CLOEXEC);
    int to = open_as(path(1), O_RDWR | O_CREAT | O_EXCL);
    int status = from < 0 || to < 0 ? -1 : ioctl(to, FICLONE, from);
    close(from);
    return status;
}

/* Opens source and target of a copy. */
static off_t copied(int *from, int *to)
{
    await_tick();
    *from = open(path(0), O_RDONLY | O_CLOEXEC);
    *to = open_as(path(1), O_RDWR | O_CREAT);
    return *from < 0 || *to < 0 ? -1 : size_of(*from);
}

static int do_copy(void)
{
    int from, to;
    off_t length = copied(&from, &to), start = 0, target = 0, done = 0;
    while (length >= 0 && done < length) {
        ssize_t step = MAKE(COPY_FILE_RANGE, from, (long)&start, to, (long)&target, length - done, 0);
        if (step <= 0)
            break;
        done += step;
    }
    close(from);
    return result(done, length);
}

static int do_sendfile(void)
{
    int from, to;
    off_t length = copied(&from, &to), start = 0;
    if (length >= 0 && lseek(to, 0, SEEK_SET) == 0)
        length = result(MAKE(SENDFILE, to, from, (long)&start, length), length);
    close(from);
    return length;
}

static int do_splice(void)
{
    int from, to, ends[2];
    off_t length = copied(&from, &to), target = 0, done = 0;
    if (length < 0 || pipe(ends) != 0)
        return -1;
    while (done < length) {
        ssize_t step = splice(from, NULL, ends[1], NULL, length - done, 0);
        for (ssize_t left = step; left > 0;) {
            ssize_t part = MAKE(SPLICE, ends[0], 0, to, (long)&target, left, 0);
            if (part <= 0)
                return -1;
            left -= part;
        }
        if (step <= 0)
            return -1;
        done += step;
    }
    close(ends[0]);
    close(ends[1]);
    close(from);
    return 0;
}

/* One operation through an io_uring of its own; returns its result. */
static int uring(struct io_uring_sqe sqe)
{
    struct io_uring_params setup = { 0 };
    int ring = syscall(SYS_io_uring_setup, 1, &setup);
    if (ring < 0)
        return -1;
    size_t sq_bytes = setup.sq_off.array + setup.sq_entries * sizeof(unsigned);
    size_t cq_bytes = setup.cq_off.cqes + setup.cq_entries * sizeof(struct io_uring_cqe);
    size_t sqe_bytes = setup.sq_entries * sizeof sqe;
    int access = PROT_READ | PROT_WRITE, shared = MAP_SHARED | MAP_POPULATE, status = -1;
    char *sq = mmap(NULL, sq_bytes, access, shared, ring, IORING_OFF_SQ_RING);
    char *cq = mmap(NULL, cq_bytes, access, shared, ring, IORING_OFF_CQ_RING);
    struct io_uring_sqe *sqes = mmap(NULL, sqe_bytes, access, shared, ring, IORING_OFF_SQES);
    if (sq != MAP_FAILED && cq != MAP_FAILED && sqes != MAP_FAILED) {
        sqes[0] = sqe;
        ((unsigned *)(sq + setup.sq_off.array))[0] = 0;
        __atomic_store_n((unsigned *)(sq + setup.sq_off.tail), 1, __ATOMIC_RELEASE);
        if (syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) == 1)
            status = ((struct io_uring_cqe *)(cq + setup.cq_off.cqes))[0].res;
    }
    munmap(sq, sq_bytes);
    munmap(cq, cq_bytes);
    munmap(sqes, sqe_bytes);
    close(ring);
    if (status < -1)
        errno = -status;
    return status;
}

static int do_uring_write(void)
{
    await_tick();
    int fd = existing(path(0));
    fill(value(1), value(2));
    struct io_uring_sqe sqe = { .opcode = IORING_OP_WRITE, .fd = fd, .addr = (uintptr_t)bytes,
                                .len = value(2), .off = value(1) };
    return fd < 0 ? -1 : result(uring(sqe), value(2));
}

static int do_uring_rename(void)
{
    struct io_uring_sqe sqe = { .opcode = IORING_OP_RENAMEAT, .fd = AT_FDCWD,
                                .addr = (uintptr_t)path(0), .addr2 = (uintptr_t)path(1),
                                .len = (unsigned)AT_FDCWD };
    return renamed(uring(sqe) == 0 ? 0 : -1);
}

/* A write through a description that is opened for it with `flags`. */
static int write_opened(int flags)
{
    await_tick();
    return write_at(open_as(path(0), O_RDWR | flags), value(1), value(2));
}

static int do_direct(void) { return write_opened(O_DIRECT); }
static int do_osync(void) { return write_opened(O_SYNC); }
static int do_odsync(void) { return write_opened(O_DSYNC); }

static int do_dup(void)
{
    await_tick();
    int fd = existing(path(0)), copy = fd < 0 ? -1 : dup(fd);
    int status = write_at(copy, value(1), value(2));
    close(copy);
    return status;
}

static int do_tmpfile(void)
{
    char dir[PATH_MAX], link[64];
    snprintf(dir, sizeof dir, "%s", path(0));
    int fd = open_by(dirname(dir), O_TMPFILE | O_RDWR);
    if (write_at(fd, 0, value(1)) != 0 || (argument_count > 2 && fsync_by(fd) != 0))
        return -1;
    remember(path(0), fd, 0);
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    return MAKE(LINKAT, AT_FDCWD, (long)link, AT_FDCWD, (long)path(0), AT_SYMLINK_FOLLOW);
}

/* Syncs the last operation's descriptor for ".", else what is opened by its name. */
static int synced(int (*sync_it)(int))
{
    if (is(path(0), "."))
        return sync_it(last);
    int index = hold ? held_index(path(0)) : -1;
    int fd = index >= 0 ? held[index].fd : open(path(0), O_RDONLY | O_CLOEXEC);
    int status = fd < 0 ? -1 : sync_it(fd);
    if (index < 0)
        close(fd);
    return status;
}

static int do_fsync(void) { return synced(fsync_by); }
static int do_fdatasync(void) { return synced(fdatasync_by); }
static int do_sync(void) { return MAKE(SYNC, 0); }
/* Makes a file that is no part of the test, and syncs it. */
static int do_prepare(void)
{
    int fd = open("prepared", O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    int status = write_at(fd, 0, 100) == 0 ? fsync(fd) : -1;
    close(fd);
    return status;
}
/* Writes and syncs files that are no part of the test, each by itself. */
static int do_crowd(void)
{
    char name[32];
    await_tick();
    for (int index = 0; index < value(0); index++) {
        snprintf(name, sizeof name, "crowd.%d", index);
        int is_new = access(name, F_OK) != 0;
        int fd = is_new ? open_as(name, O_RDWR | O_CREAT | O_EXCL) : existing(name);
        if (write_at(fd, 0, 3000) != 0 || (is_new ? fsync : fdatasync)(fd) != 0)
            return -1;
        if (!is_held(fd))
            close(fd);
    }
    last = -1;
    return 0;
}

/* Overwrites a part of a program behind what is executed, and syncs it. */
static int do_patch(void)
{
    int fd = open("program", O_RDWR | O_CLOEXEC);
    await_tick();
    int status = write_at(fd, 16000, 100) == 0 ? fdatasync(fd) : -1;
    close(fd);
    return status;
}

/* Another program has renamed a file. */
static int do_moved(void) { return renamed(0); }
/* Another program has removed a name. */
static int do_gone(void)
{
    let_go(path(0));
    return 0;
}

/* Closes all that is held open. */
static int do_release(void)
{
    for (int index = 0; index < HELD_MAX; index++)
        if (held[index].fd >= 0)
            let_go(held[index].path);
    return 0;
}
static int do_msync(void) { return mapping ? MAKE(MSYNC, (long)mapping, mapping_bytes, MS_SYNC) : -1; }

/* For the outside: forces a commit of the journal by a file that is no part of the test. Its mode
 * makes its inode dirty whatever the clock says. */
static int do_commit(void)
{
    static mode_t mode = 0600;
    int fd = open(path(0), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    int status = fd < 0 || fchmod(fd, mode ^= 0040) != 0 ? -1 : fsync(fd);
    close(fd);
    return status;
}

/* For the outside: writes a file's dirty pages to the disk, without a commit of the journal. */
static int do_writeback(void)
{
    int fd = open(path(0), O_RDONLY | O_CLOEXEC);
    int whole = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    int status = fd < 0 ? -1 : sync_file_range(fd, 0, 0, whole);
    close(fd);
    return status;
}

static const struct { const char *name; int arguments, is_sync; int (*run)(void); } operations[] = {
    { "create", 1, 0, do_create }, { "new", 2, 0, do_new },
    { "write", 3, 0, do_write }, { "append", 2, 0, do_append },
    { "truncate", 2, 0, do_truncate }, { "truncate-open", 2, 0, do_truncate_open },
    { "fallocate", 4, 0, do_fallocate }, { "link", 2, 0, do_link }, { "symlink", 2, 0, do_symlink },
    { "unlink", 1, 0, do_unlink }, { "rename", 2, 0, do_rename }, { "exchange", 2, 0, do_exchange },
    { "mkdir", 1, 0, do_mkdir }, { "rmdir", 1, 0, do_rmdir }, { "mmap", 3, 0, do_mmap },
    { "stdio", 2, 0, do_stdio }, { "fwrite", 3, 0, do_fwrite }, { "copy", 2, 0, do_copy }, { "reflink", 2, 0, do_reflink }, { "sendfile", 2, 0, do_sendfile },
    { "splice", 2, 0, do_splice }, { "uring-write", 3, 0, do_uring_write },
    { "uring-rename", 2, 0, do_uring_rename }, { "direct", 3, 0, do_direct },
    { "osync", 3, 0, do_osync },
    { "odsync", 3, 0, do_odsync }, { "dup", 3, 0, do_dup }, { "tmpfile", 2, 0, do_tmpfile },
    { "setxattr", 1, 0, do_setxattr }, { "setcap", 1, 0, do_setcap },
    { "setfacl", 1, 0, do_setfacl }, { "append-only", 1, 0, do_append_only }, { "chmod", 2, 0, do_chmod },
    { "chown", 1, 0, do_chown }, { "utime", 1, 0, do_utime }, { "prepare", 0, 0, do_prepare },
    { "crowd", 1, 0, do_crowd }, { "patch", 0, 0, do_patch }, { "moved", 2, 0, do_moved }, { "gone", 1, 0, do_gone },
    { "release", 0, 0, do_release }, { "fsync", 1, 1, do_fsync },
    { "fdatasync", 1, 1, do_fdatasync }, { "sync", 0, 1, do_sync }, { "msync", 0, 1, do_msync },
    { "commit", 1, 0, do_commit }, { "writeback", 1, 0, do_writeback },
};

static int execute(const char *name)
{
    for (size_t index = 0; index < sizeof operations / sizeof *operations; index++)
        if (is(name, operations[index].name) && argument_count >= operations[index].arguments) {
            if (!operations[index].is_sync && !goes_on(name))
                release();
            errno = 0;
            return operations[index].run();
        }
    errno = ENOSYS;
    return -1;
}

/* The errno of a child that exits with it. */
static int result_of(pid_t child)
{
    int status;
    if (child < 0 || waitpid(child, &status, 0) != child)
        return -1;
    errno = WIFEXITED(status) ? WEXITSTATUS(status) : ECHILD;
    return errno ? -1 : 0;
}

static int execute_in_child(const char *name)
{
    fflush(NULL);
    pid_t child = fork();
    if (child == 0)
        _exit(execute(name) == 0 ? 0 : errno);
    return result_of(child);
}

/* The calls of which one makes the change of an operation. */
static int is_change(const struct __ptrace_syscall_info *call)
{
    static const uint64_t calls[] = {
        SYS_pwrite64, SYS_write, SYS_ftruncate, SYS_rename, SYS_renameat, SYS_renameat2, SYS_link,
        SYS_linkat, SYS_unlink, SYS_unlinkat, SYS_symlink, SYS_symlinkat, SYS_mkdir, SYS_mkdirat,
        SYS_rmdir, SYS_chmod, SYS_fchmodat, SYS_fchown, SYS_utimensat, SYS_setxattr };
    if (call->entry.nr == SYS_openat)
        return (call->entry.args[2] & O_EXCL) != 0;
    for (size_t index = 0; index < sizeof calls / sizeof *calls; index++)
        if (calls[index] == call->entry.nr)
            return 1;
    return 0;
}

/* Where a child is killed: see `Kill` in src/sequence.rs. */
enum kill { BEFORE, AT, IN, BEHIND, PAST };

/* A child that stops at the entry and at the exit of each of its system calls, or, `by_steps`,
 * behind each of its instructions as well. */
struct traced {
    pid_t child;
    int by_steps;
    int in_call;             /* it is at the entry of a system call */
    int in_change;           /* of the one that makes the change */
    int is_changed;
    int at_end;              /* the operation has returned */
    int count, count_behind; /* of stops: all, and those behind the exit of that call */
};

/* Whether the child's next instruction is a system call. */
static int is_at_call(pid_t child)
{
    struct __ptrace_syscall_info here;
    if (ptrace(PTRACE_GET_SYSCALL_INFO, child, sizeof here, &here) < 0)
        return 0;
    errno = 0;
    long code = ptrace(PTRACE_PEEKTEXT, child, (void *)here.instruction_pointer, NULL);
#ifdef __x86_64__
    return errno == 0 && (code & 0xffff) == 0x050f;
#else
    return errno == 0 && (code & 0xffffffff) == 0xd4000001;
#endif
}

/* Lets the child run to its next stop. */
static int go_on(const struct traced *it)
{
    int steps = it->by_steps && !it->in_call && !is_at_call(it->child);
    return ptrace(steps ? PTRACE_SINGLESTEP : PTRACE_SYSCALL, it->child, NULL, NULL);
}

/* Takes note of a stop of the child. Whether it was one. */
static int note_stop(struct traced *it, int status)
{
    struct __ptrace_syscall_info call;
    if (!WIFSTOPPED(status))
        return 0;
    it->count++;
    it->count_behind += it->is_changed;
    if (WSTOPSIG(status) != (SIGTRAP | 0x80))
        return 1;
    if (ptrace(PTRACE_GET_SYSCALL_INFO, it->child, sizeof call, &call) < 0)
        return 0;
    it->in_call = call.op == PTRACE_SYSCALL_INFO_ENTRY;
    if (it->in_call) {
        it->in_change = is_change(&call) && !it->is_changed;
        it->at_end = call.entry.nr == SYS_exit_group;
    } else {
        it->is_changed |= it->in_change && !call.exit.is_error;
        it->in_change = 0;
    }
    return 1;
}

/* Whether the child has come to where it is to be killed. */
static int is_there(const struct traced *it, enum kill where, int count)
{
    if (where < BEHIND)
        return it->in_change || (where != BEFORE && it->count == count);
    return it->is_changed && (it->at_end || it->count_behind == count);
}

/* Computes what an operation writes, so that its child does not step through that. */
static void fill_before(const char *name)
{
    struct stat status;
    if (is(name, "write"))
        fill(value(1), value(2));
    if (is(name, "append") && stat(path(0), &status) == 0)
        fill(status.st_size, value(1));
}

static void begin_traced(const char *name)
{
    ptrace(PTRACE_TRACEME, 0, NULL, NULL);
    raise(SIGSTOP);
    execute(name);
    _exit(0);
}

/* Lets the child come to where it is to be killed, and kills it there. */
static int kill_in(struct traced *it, enum kill where, int count)
{
    int status;
    if (it->child < 0 || waitpid(it->child, &status, 0) != it->child || !WIFSTOPPED(status))
        return -1;
    void *options = (void *)(PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL);
    ptrace(PTRACE_SETOPTIONS, it->child, NULL, options);
    while (!is_there(it, where, count)) {
        it->by_steps = where == IN || (where == PAST && it->is_changed);
        int goes_on = !it->at_end && go_on(it) == 0;
        if (!goes_on || waitpid(it->child, &status, 0) != it->child || !note_stop(it, status)) {
            errno = ECHILD; /* it has ended without the change */
            return -1;
        }
    }
    return kill(it->child, SIGKILL) == 0 && waitpid(it->child, &status, 0) == it->child ? 0 : -1;
}

/* Keeps this process, and the children that it makes, on the CPU where it is; `before` gets those
 * that it may run on. Two CPUs would wake each other at each step of a traced child. */
static void stay_here(cpu_set_t *before)
{
    cpu_set_t here;
    CPU_ZERO(before);
    if (sched_getaffinity(0, sizeof *before, before) != 0)
        return; /* there are more CPUs than it has bits */
    CPU_ZERO(&here);
    CPU_SET(sched_getcpu(), &here);
    sched_setaffinity(0, sizeof here, &here);
}

/* A child executes an operation, and is killed in it. */
static int execute_killed(const char *name, enum kill where, int count)
{
    cpu_set_t before;
    /* A name that the child changes may be another file's then. */
    if (!is(name, "write") && !is(name, "append") && !is(name, "truncate"))
        do_release();
    release();
    fflush(NULL);
    fill_before(name);
    await_tick();
    ticks_are_awaited = 1;
    stay_here(&before);
    struct traced it = { .child = fork() };
    if (it.child == 0)
        begin_traced(name);
    ticks_are_awaited = 0;
    int status = kill_in(&it, where, count), error = errno;
    sched_setaffinity(0, sizeof before, &before);
    errno = error;
    return status;
}

/* Takes "before", or "at", "in", "behind" or "past" and a count, off the words of a killed
 * operation, which follows; returns its name. */
static char *parse_kill(char **rest, enum kill *where, int *count)
{
    static const char *const names[] = { "before", "at", "in", "behind", "past" };
    char *word = *rest ? strsep(rest, " ") : "";
    *where = BEHIND;
    *count = 0;
    for (int index = 0; *rest && index <= PAST; index++)
        if (is(word, names[index])) {
            *where = index;
            if (index != BEFORE)
                *count = atoi(strsep(rest, " "));
            return *rest ? strsep(rest, " ") : "";
        }
    return word;
}

static int execute_static(char *line)
{
    release();
    pid_t child = fork();
    if (child == 0) {
        execl(static_program, static_program, "once", line, (char *)NULL);
        _exit(errno);
    }
    return result_of(child);
}

/* Takes "@" and the way that is named behind it off the first word of a step. */
static int parse_way(char *word)
{
    char *mark = strchr(word, '@');
    way = BY_NAME;
    if (!mark)
        return 1;
    *mark = 0;
    for (way = BY_LIBC; way < WAY_COUNT; way++)
        if (is(mark + 1, way_names[way]))
            return 1;
    return 0;
}

/* Executes "NUMBER OPERATION[@WAY] ARGUMENT...", with "fork", "killed" or "static" before it
 * if a child is to do it. */
static int execute_line(const char *line)
{
    char words[PATH_MAX], again[PATH_MAX], *rest = words;
    snprintf(words, sizeof words, "%s", line);
    number = atoi(strsep(&rest, " "));
    char *name = rest ? strsep(&rest, " ") : "";
    if (!parse_way(name)) {
        errno = EINVAL;
        return -1;
    }
    int forks = is(name, "fork"), is_killed = is(name, "killed"), is_static = is(name, "static");
    enum kill where = BEHIND;
    int count = 0;
    if (is_static) {
        snprintf(again, sizeof again, "%d %s", number, rest ? rest : "");
        return execute_static(again);
    }
    if (is_killed)
        name = parse_kill(&rest, &where, &count);
    else if (forks)
        name = rest ? strsep(&rest, " ") : "";
    for (argument_count = 0; rest && argument_count < ARGUMENTS_MAX; argument_count++)
        arguments[argument_count] = strsep(&rest, " ");
    if (is_killed)
        return execute_killed(name, where, count);
    return forks ? execute_in_child(name) : execute(name);
}

/* Runs a command in a time namespace that begins now: all files were changed before this boot. */
static int run_after_boot(char **command)
{
    struct timespec now;
    char text[64];
    clock_gettime(CLOCK_BOOTTIME, &now);
    int length = snprintf(text, sizeof text, "boottime %lld %ld\n", -(long long)now.tv_sec - 1,
                          1000000000L - now.tv_nsec);
    int fd = unshare(CLONE_NEWTIME) == 0 ? open("/proc/self/timens_offsets", O_WRONLY) : -1;
    if (fd < 0 || write(fd, text, length) != length) {
        perror("a new time namespace (Linux 5.6 or newer, as root)");
        return 1;
    }
    close(fd);
    pid_t child = fork();
    if (child == 0) {
        execvp(command[0], command);
        perror(command[0]);
        _exit(127);
    }
    int status = 1;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

#define ANSWERED(number, behind) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, behind, 0)

/* Runs a command, and all that it starts, whose syncs succeed without being made. The supervisor
 * asks by a range of one byte whether there is such a filter; the kernel gets that call. */
static int run_unsynced(char **command)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        ANSWERED(SYS_fsync, 7),
        ANSWERED(SYS_fdatasync, 6),
        ANSWERED(SYS_syncfs, 5),
        ANSWERED(SYS_sync, 4),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_sync_file_range, 0, 2),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 1, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO),
    };
    struct sock_fprog program = { sizeof code / sizeof *code, code };
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0)
        execvp(command[0], command);
    perror(command[0]);
    return 127;
}

/* One byte a call: a line that is read ahead would be another process's in a child. */
static int read_line(char *line, size_t size)
{
    size_t length = 0;
    while (length + 1 < size && read(0, line + length, 1) == 1) {
        if (line[length] == '\n') {
            line[length] = 0;
            return 1;
        }
        length++;
    }
    return 0;
}

int main(int count, char **words)
{
    char line[PATH_MAX], answer[PATH_MAX];
    for (int index = 0; index < HELD_MAX; index++)
        held[index].fd = -1;
    if (count > 2 && is(words[1], "once"))
        return execute_line(words[2]) == 0 ? 0 : errno;
    if (count > 2 && is(words[1], "boot"))
        return run_after_boot(words + 2);
    if (count > 2 && is(words[1], "unsynced"))
        return run_unsynced(words + 2);
    static_program = count > 1 ? words[1] : "";
    hold = count > 2 && is(words[2], "hold");
    while (read_line(line, sizeof line)) {
        int status = execute_line(line), found = errno;
        if (status == 0)
            snprintf(answer, sizeof answer, "%d ok\n", number);
        else
            snprintf(answer, sizeof answer, "%d errno %d: %s\n", number, found, strerror(found));
        if (write(1, answer, strlen(answer)) < 0)
            return 1;
    }
    return 0;
}
