/* Covers a file, installs a filter of system calls in one of several ways, and works with files:
 *
 *     filtered WAY [NUMBER]...
 *
 * The filter allows the calls of these numbers, and kills for any other. Without numbers there is
 * none, so that a tracer can see which calls the program makes behind its PR_SET_NO_NEW_PRIVS. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

static struct sock_filter code[512];
static struct sock_fprog filter = {.filter = code};
static int covered;
static char *self;

static void must(int is_right, const char *what)
{
    if (!is_right) {
        if (write(2, what, strlen(what)) < 0)
            _exit(3);
        _exit(2);
    }
}
#define MUST(expression) must(expression, #expression "\n")

static void handler(int signal)
{
    (void)signal;
}

/* What servers do with files, by functions of the C library and by numbers. */
static void work(void)
{
    struct iovec parts[2] = {{"one", 3}, {"two", 3}};
    int fd = open("upload", O_CREAT | O_RDWR | O_TRUNC, 0644);
    MUST(fd >= 0);
    MUST(write(fd, "data", 4) == 4);
    MUST(writev(fd, parts, 2) == 6);
    MUST(pwrite(fd, "D", 1, 0) == 1);
    MUST(ftruncate(fd, 8) == 0);
    MUST(fsync(fd) == 0);
    MUST(fdatasync(covered) == 0);
    MUST(pwrite(covered, "behind", 6, 100) == 6);
    MUST(fsync(covered) == 0);
    MUST(fchmod(fd, 0600) == 0);
    MUST(dup3(fd, 200, 0) == 200);
    MUST(syscall(SYS_pwrite64, 200, "x", 1, 1) == 1);
    MUST(syscall(SYS_fsync, 200) == 0);
    MUST(close(200) == 0);
    MUST(close(fd) == 0);
    MUST(linkat(AT_FDCWD, "upload", AT_FDCWD, "linked", 0) == 0);
    MUST(renameat(AT_FDCWD, "upload", AT_FDCWD, "renamed") == 0);
    MUST(chmod("renamed", 0644) == 0);
    MUST(unlinkat(AT_FDCWD, "linked", 0) == 0);
    MUST(mkdirat(AT_FDCWD, "made", 0755) == 0);
    MUST(unlinkat(AT_FDCWD, "made", AT_REMOVEDIR) == 0);
    MUST(unlinkat(AT_FDCWD, "renamed", 0) == 0);
    MUST(!dlopen("libno-such-library.so", RTLD_NOW | RTLD_NOLOAD));
    MUST(dlsym(RTLD_DEFAULT, "rename") != NULL);
    MUST(sigaction(SIGUSR1, &(struct sigaction){.sa_handler = handler}, NULL) == 0);
}

static void install(const char *way)
{
    MUST(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    if (!filter.len)
        return;
    if (!strcmp(way, "number"))
        MUST(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter) == 0);
    else if (!strcmp(way, "all-threads"))
        MUST(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &filter) == 0);
    else if (!strcmp(way, "handle")) {
        int (*prctl_of)(int, ...) = dlsym(dlopen("libc.so.6", RTLD_NOW), "prctl");
        MUST(prctl_of(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0) == 0);
    } else
        MUST(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0) == 0);
}

static void *in_thread(void *way)
{
    install(way);
    work();
    return NULL;
}

int main(int count, char **arguments)
{
    char *way = arguments[1];
    self = arguments[0];
    if (!strcmp(way, "started")) {
        covered = open("covered", O_RDWR);
        work();
        _exit(0);
    }
    code[filter.len++] =
        (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (int n = 2; n < count; n++) {
        code[filter.len++] =
            (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)atoi(arguments[n]), 0, 1);
        code[filter.len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    }
    code[filter.len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    if (count == 2)
        filter.len = 0;
    MUST(sigaction(SIGTERM, &(struct sigaction){.sa_handler = handler}, NULL) == 0);
    covered = open("covered", O_CREAT | O_RDWR, 0644);
    for (int n = 0; n < 10; n++) {
        MUST(pwrite(covered, "before", 6, 0) == 6);
        MUST(fdatasync(covered) == 0);
    }
    if (!strcmp(way, "thread") || !strcmp(way, "all-threads")) {
        pthread_t thread;
        MUST(!pthread_create(&thread, NULL, in_thread, way));
        MUST(!pthread_join(thread, NULL));
        if (!strcmp(way, "all-threads"))
            work();
    } else {
        install(way);
        work();
    }
    if (!strcmp(way, "forked") || !strcmp(way, "executed")) {
        int status;
        pid_t child = fork();
        if (child == 0 && !strcmp(way, "executed")) {
            execl(self, self, "started", NULL);
            _exit(1);
        }
        if (child == 0) {
            work();
            _exit(0);
        }
        MUST(waitpid(child, &status, 0) == child);
        MUST(status == 0);
    }
    MUST(write(1, "ok\n", 3) == 3);
}
