/* The calls that change files, by name and by number: a part of the interpreter, and, compiled as a
 * shared object, the object that binds these names otherwise. */
#define _GNU_SOURCE
#include "calls.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/xattr.h>
#include <unistd.h>

/* Headers may be older than the kernel. */
enum { NR_OPENAT2 = 437, NR_FCHMODAT2 = 452, NR_SETXATTRAT = 463 };

const char *const way_names[WAY_COUNT] = {
    "", "libc", "version", "deep", "space", "number", "new", "own",
};

/* Where a system call has AT_FDCWD that the call does not have. */
enum shape { AS_IT_IS, AT_FIRST, AT_SECOND, AT_BOTH };

static const struct { const char *name; void *function; long number; enum shape shape; } calls[CALL_COUNT] = {
    [OPEN] = { "open", (void *)open, SYS_openat, AT_FIRST },
    [WRITE] = { "write", (void *)write, SYS_write, AS_IT_IS },
    [PWRITE] = { "pwrite", (void *)pwrite, SYS_pwrite64, AS_IT_IS },
    [FTRUNCATE] = { "ftruncate", (void *)ftruncate, SYS_ftruncate, AS_IT_IS },
    [FALLOCATE] = { "fallocate", (void *)fallocate, SYS_fallocate, AS_IT_IS },
    [COPY_FILE_RANGE] = { "copy_file_range", (void *)copy_file_range, SYS_copy_file_range, AS_IT_IS },
    [SENDFILE] = { "sendfile", (void *)sendfile, SYS_sendfile, AS_IT_IS },
    [SPLICE] = { "splice", (void *)splice, SYS_splice, AS_IT_IS },
    [MMAP] = { "mmap", (void *)mmap, SYS_mmap, AS_IT_IS },
    [LINK] = { "link", (void *)link, SYS_linkat, AT_BOTH },
    [LINKAT] = { "linkat", (void *)linkat, SYS_linkat, AS_IT_IS },
    [SYMLINK] = { "symlink", (void *)symlink, SYS_symlinkat, AT_SECOND },
    [UNLINK] = { "unlink", (void *)unlink, SYS_unlinkat, AT_FIRST },
    [RENAME] = { "rename", (void *)rename, SYS_renameat, AT_BOTH },
    [EXCHANGE] = { "renameat2", (void *)renameat2, SYS_renameat2, AS_IT_IS },
    [MKDIR] = { "mkdir", (void *)mkdir, SYS_mkdirat, AT_FIRST },
    [RMDIR] = { "rmdir", (void *)rmdir, SYS_unlinkat, AT_FIRST },
    [SETXATTR] = { "setxattr", (void *)setxattr, SYS_setxattr, AS_IT_IS },
    [CHMOD] = { "chmod", (void *)chmod, SYS_fchmodat, AT_FIRST },
    [FCHOWN] = { "fchown", (void *)fchown, SYS_fchown, AS_IT_IS },
    [UTIMENSAT] = { "utimensat", (void *)utimensat, SYS_utimensat, AS_IT_IS },
    [FSYNC] = { "fsync", (void *)fsync, SYS_fsync, AS_IT_IS },
    [FDATASYNC] = { "fdatasync", (void *)fdatasync, SYS_fdatasync, AS_IT_IS },
    [SYNC] = { "sync", (void *)sync, SYS_sync, AS_IT_IS },
    [MSYNC] = { "msync", (void *)msync, SYS_msync, AS_IT_IS },
};

const char *call_name(enum call which) { return calls[which].name; }

long call_function(int which, void *function, const long *a)
{
    long (*call)(long, long, long, long, long, long);
    memcpy(&call, &function, sizeof call);
    long found = call(a[0], a[1], a[2], a[3], a[4], a[5]);
    if (which == SYNC)
        return 0; /* it has no result */
    if (which != MMAP)
        found = (int)found;
    return found == -1 ? -errno : found;
}

long call_by_name(int which, const long *arguments)
{
    return call_function(which, calls[which].function, arguments);
}

static void set(long *raw, long a, long b, long c, long d, long e, long f)
{
    memcpy(raw, (long[6]){ a, b, c, d, e, f }, 6 * sizeof *raw);
}

static long numbered_as_new(enum call which, const long *a, long *raw)
{
    static struct { uint64_t flags, mode, resolve; } how;
    static struct { uint64_t value; uint32_t size, flags; } attribute;
    static struct iovec part;
    switch (which) {
    case OPEN:
        how.flags = (uint64_t)a[1];
        how.mode = a[1] & (O_CREAT | (O_TMPFILE & ~O_DIRECTORY)) ? (uint64_t)a[2] : 0;
        set(raw, AT_FDCWD, a[0], (long)&how, sizeof how, 0, 0);
        return NR_OPENAT2;
    case PWRITE:
        part = (struct iovec){ (void *)a[1], (size_t)a[2] };
        set(raw, a[0], (long)&part, 1, a[3], 0, 0);
        return SYS_pwritev2;
    case RENAME:
        set(raw, AT_FDCWD, a[0], AT_FDCWD, a[1], 0, 0);
        return SYS_renameat2;
    case CHMOD:
        set(raw, AT_FDCWD, a[0], a[1], 0, 0, 0);
        return NR_FCHMODAT2;
    case SETXATTR:
        attribute.value = (uint64_t)a[2];
        attribute.size = (uint32_t)a[3];
        attribute.flags = (uint32_t)a[4];
        set(raw, AT_FDCWD, a[0], 0, a[1], (long)&attribute, sizeof attribute);
        return NR_SETXATTRAT;
    default:
        return numbered(which, 0, a, raw);
    }
}

long numbered(enum call which, int is_new, const long *a, long *raw)
{
    if (is_new)
        return numbered_as_new(which, a, raw);
    switch (calls[which].shape) {
    case AT_FIRST: set(raw, AT_FDCWD, a[0], which == RMDIR ? AT_REMOVEDIR : a[1], a[2], 0, 0); break;
    case AT_SECOND: set(raw, a[0], AT_FDCWD, a[1], 0, 0, 0); break;
    case AT_BOTH: set(raw, AT_FDCWD, a[0], AT_FDCWD, a[1], 0, 0); break;
    case AS_IT_IS: memcpy(raw, a, 6 * sizeof *raw); break;
    }
    return calls[which].number;
}
