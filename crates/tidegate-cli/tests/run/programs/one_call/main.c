/* Covers a file, installs a filter of system calls, and calls one function:
 *
 *     one_call                     prints the names of the functions
 *     one_call NAME [NUMBER]...    calls it in the current directory, which is empty
 *
 * The filter allows the calls of these numbers, and kills for any other. Without numbers there is
 * none, so that a tracer can see which calls the function makes behind PR_SET_NO_NEW_PRIVS. */
#define _GNU_SOURCE
#include <aio.h>
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <mntent.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>
#include <utime.h>

/* Opened or made before the filter: a covered file, a file with data, a directory, a pipe, sockets,
 * a stream, memory. */
static int covered, fd, dir, ends[2], sockets[2], number;
static pid_t child;
static char *no_words[] = {NULL};
static FILE *stream;
static char *page;
static struct iovec parts[2] = {{"one", 3}, {"two", 3}};
static struct stat stat_buffer;
static struct statx statx_buffer;
static struct statfs statfs_buffer;
static struct statvfs statvfs_buffer;
static struct rlimit limit;
static struct flock lock = {.l_type = F_WRLCK};
static struct sockaddr_un address = {AF_UNIX, "socket"};
static char text[64], template[16];
static struct timeval moments[2];
static struct timespec times[2];
static sigset_t set;

static void on_signal(int signal) { (void)signal; }

static char *templated(const char *name) { return strcpy(template, name); }

/* A child of `fork` or the like ends at once. */
static int child_ends(pid_t pid)
{
    if (pid == 0)
        _exit(0);
    return waitpid(pid, NULL, 0) == pid ? 0 : -1;
}

struct call {
    const char *name;
    long (*make)(void);
};
#define CALL(name, expression) static long call_##name(void) { return (long)(expression); }
#define FOUND(pointer) ((pointer) ? 0 : -1)
#include "calls.h"
#undef CALL
#define CALL(name, expression) {#name, call_##name},
static const struct call calls[] = {
#include "calls.h"
};

static void must(int is_right, const char *what)
{
    if (!is_right) {
        perror(what);
        exit(2);
    }
}
#define MUST(expression) must(expression, #expression)

static void prepare(void)
{
    MUST((covered = open("covered", O_CREAT | O_RDWR, 0644)) >= 0);
    for (int n = 0; n < 10; n++) {
        MUST(pwrite(covered, "before", 6, 0) == 6);
        MUST(fdatasync(covered) == 0);
    }
    MUST(mkdir("directory", 0755) == 0);
    MUST((dir = open("directory", O_RDONLY | O_DIRECTORY)) >= 0);
    MUST((fd = open("file", O_CREAT | O_RDWR, 0644)) >= 0);
    MUST(pwrite(fd, "data", 4, 0) == 4);
    MUST(pipe(ends) == 0);
    MUST(socketpair(AF_UNIX, SOCK_DGRAM, 0, sockets) == 0);
    MUST((stream = fopen("stream", "w+")) != NULL);
    page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    MUST(page != MAP_FAILED);
    MUST(getrlimit(RLIMIT_CORE, &limit) == 0);
    MUST(write(ends[1], "pipe", 4) == 4);
    MUST(sigaction(SIGTERM, &(struct sigaction){.sa_handler = on_signal}, NULL) == 0);
}

static struct sock_filter code[512];
static struct sock_fprog filter = {.filter = code};

static void put(struct sock_filter instruction) { code[filter.len++] = instruction; }

static void allow(unsigned number)
{
    put((struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1));
    put((struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
}

static void confine(int count, char **numbers)
{
    put((struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)));
    for (int n = 0; n < count; n++)
        allow((unsigned)atoi(numbers[n]));
    /* The C library asks for random bits for one name of a file in twenty. */
    allow(SYS_getrandom);
    put((struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS));
    MUST(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    if (count)
        MUST(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0) == 0);
}

int main(int count, char **arguments)
{
    for (size_t n = 0; n < sizeof calls / sizeof *calls; n++) {
        if (count == 1)
            puts(calls[n].name);
        if (count == 1 || strcmp(calls[n].name, arguments[1]))
            continue;
        prepare();
        confine(count - 2, arguments + 2);
        _exit(calls[n].make() < 0);
    }
    return count != 1;
}
