/* A storm of signals over writes and syncs: `signals DIR COUNT`. A child sends COUNT queued signals
 * with numbers, and others between them. Handlers write and sync too, one on an alternate stack.
 * Prints "whole" if each queued signal was handled once and in order, and the program's view of
 * its handlers and mask has not changed. `signals DIR 0` makes 200 writes and syncs, no signal. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* Main and handlers write to the same file, so an operation that a handler interrupts has the lock
 * that the handler needs. */
static int file;
static volatile sig_atomic_t queued, others, wrong;
static volatile int expected;

static void check(int holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "%s: %s\n", what, strerror(errno));
        _exit(1);
    }
}

static void on_queued(int signal, siginfo_t *info, void *context)
{
    (void)context;
    if (signal != SIGRTMIN || info->si_code != SI_QUEUE || info->si_value.sival_int != expected)
        wrong = 1;
    expected++;
    queued++;
}

static void on_other(int signal)
{
    char block[512];
    memset(block, signal, sizeof block);
    int error = errno;
    if (pwrite(file, block, sizeof block, 65536 + 512 * signal) != sizeof block
        || fdatasync(file) != 0)
        wrong = 2;
    errno = error;
    others++;
}

/* The kernel calls it also while it runs. */
static void on_open(int signal)
{
    (void)signal;
    others++;
}

static int opened(const char *dir, const char *name)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    int fd = open(path, O_RDWR | O_CREAT, 0644);
    check(fd >= 0, path);
    char block[131072] = "";
    check(pwrite(fd, block, sizeof block, 0) == sizeof block, "fill");
    for (int sync = 0; sync < 12; sync++) {
        check(pwrite(fd, "x", 1, sync) == 1 && fsync(fd) == 0, "first syncs");
    }
    return fd;
}

static void write_and_sync(int number)
{
    char block[4096];
    memset(block, number, sizeof block);
    check(pwrite(file, block, sizeof block, 4096 * (number % 16)) == sizeof block, "write");
    check(fdatasync(file) == 0, "sync");
}

static void send_all(pid_t to, int count)
{
    for (int number = 0; number < count; number++) {
        union sigval value = { .sival_int = number };
        while (sigqueue(to, SIGRTMIN, value) != 0) {
            check(errno == EAGAIN, "sigqueue");
            usleep(100);
        }
        if (number % 5 == 0)
            kill(to, SIGUSR1);
        if (number % 11 == 0)
            kill(to, SIGUSR2);
        if (number % 7 == 0)
            kill(to, SIGALRM);
    }
}

static void is_seen(int signal, void *handler, int flags)
{
    struct sigaction seen;
    check(sigaction(signal, NULL, &seen) == 0, "sigaction");
    check((void *)seen.sa_handler == handler, "handler");
    check((seen.sa_flags & (SA_SIGINFO | SA_ONSTACK | SA_RESTART)) == flags, "flags");
}

int main(int argc, char **argv)
{
    check(argc == 3, "usage: signals DIR COUNT");
    int count = atoi(argv[2]);
    /* Handlers may be in one another: a frame of the kernel has some KiB. */
    size_t size = 4 << 20;
    stack_t stack = { .ss_sp = malloc(size), .ss_size = size };
    check(sigaltstack(&stack, NULL) == 0, "sigaltstack");
    struct sigaction action = { .sa_sigaction = on_queued, .sa_flags = SA_SIGINFO | SA_RESTART };
    check(sigaction(SIGRTMIN, &action, NULL) == 0, "sigaction");
    struct sigaction other = { .sa_handler = on_other, .sa_flags = SA_ONSTACK };
    check(sigaction(SIGUSR1, &other, NULL) == 0, "sigaction");
    struct sigaction open = { .sa_handler = on_open, .sa_flags = SA_NODEFER };
    check(sigaction(SIGUSR2, &open, NULL) == 0, "sigaction");
    check(signal(SIGALRM, on_other) == SIG_DFL, "signal");
    file = opened(argv[1], "file");
    if (count == 0) {
        for (int number = 0; number < 200; number++)
            write_and_sync(number);
        return 0;
    }
    pid_t parent = getpid(), child = fork();
    check(child >= 0, "fork");
    if (child == 0) {
        send_all(parent, count);
        _exit(0);
    }
    for (int number = 0; queued < count && !wrong; number++)
        write_and_sync(number);
    int status;
    while (waitpid(child, &status, 0) < 0)
        check(errno == EINTR, "waitpid");
    is_seen(SIGRTMIN, on_queued, SA_SIGINFO | SA_RESTART);
    is_seen(SIGUSR1, on_other, SA_ONSTACK);
    is_seen(SIGALRM, on_other, SA_RESTART);
    check(signal(SIGALRM, SIG_DFL) == on_other, "signal");
    sigset_t mask;
    check(sigprocmask(SIG_SETMASK, NULL, &mask) == 0, "mask");
    for (int signal = 1; signal < NSIG; signal++)
        check(sigismember(&mask, signal) != 1, "a signal is blocked");
    check(!wrong && others > 0, "the handlers");
    printf("whole\n");
    return 0;
}
