/* The calls that change files, each reached in several ways. */
#ifndef CALLS_H
#define CALLS_H

enum call {
    OPEN, WRITE, PWRITE, FTRUNCATE, FALLOCATE, COPY_FILE_RANGE, SENDFILE, SPLICE, MMAP, LINK, LINKAT,
    SYMLINK, UNLINK, RENAME, EXCHANGE, MKDIR, RMDIR, SETXATTR, CHMOD, FCHOWN, UTIMENSAT, FSYNC,
    FDATASYNC, SYNC, MSYNC, CALL_COUNT
};

/* How a call is reached. */
enum way {
    BY_NAME,    /* the public name, as the linker binds it */
    BY_LIBC,    /* `dlsym` on the handle of the C library */
    BY_VERSION, /* `dlvsym` on the same */
    BY_DEEP,    /* an object that is loaded with RTLD_DEEPBIND */
    BY_SPACE,   /* an object that `dlmopen` loads, with a C library of its own */
    BY_NUMBER,  /* `syscall` */
    BY_NEW,     /* `syscall` with the newest number that the kernel has for it */
    BY_OWN,     /* a system call instruction of a loaded object */
    WAY_COUNT
};

/* The names of the ways, as they stand behind "@". */
extern const char *const way_names[WAY_COUNT];

/* The name of a call. */
const char *call_name(enum call which);

/* Makes a call by its public name: its result, or its negative errno. */
long call_by_name(int which, const long *arguments);

/* Makes a call by a function of its name. */
long call_function(int which, void *function, const long *arguments);

/* The number and the arguments of the system call behind a call, with the newest number there is
 * for it if `is_new`. What the arguments point to stays until the next time. */
long numbered(enum call which, int is_new, const long *arguments, long *raw);

#endif
