/* Stops a process in the middle of its next pwrite: the kernel has entered the call, not begun it.
 *
 *     stopped PID        says "traced", then "stopped"; lets it go on when standard input ends
 *     stopped PID kill   says "traced", then kills it there, and says "killed" */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static void must(long result, const char *what)
{
    if (result < 0) {
        perror(what);
        exit(1);
    }
}

static void say(const char *line)
{
    must(write(1, line, strlen(line)), "write");
}

/* Lets it run to its next system call, and passes signals on. Whether that is a pwrite to begin. */
static int is_at_pwrite(pid_t pid, int *signal)
{
    int status;
    must(ptrace(PTRACE_SYSCALL, pid, 0, *signal), "PTRACE_SYSCALL");
    must(waitpid(pid, &status, __WALL), "waitpid");
    if (!WIFSTOPPED(status)) {
        fprintf(stderr, "it has ended: %x\n", status);
        exit(1);
    }
    *signal = WSTOPSIG(status);
    if (status >> 16 == PTRACE_EVENT_STOP)
        *signal = 0;
    if (*signal != (SIGTRAP | 0x80))
        return 0;
    *signal = 0;
    struct __ptrace_syscall_info call;
    must(ptrace(PTRACE_GET_SYSCALL_INFO, pid, sizeof call, &call), "PTRACE_GET_SYSCALL_INFO");
    return call.op == PTRACE_SYSCALL_INFO_ENTRY && call.entry.nr == SYS_pwrite64;
}

int main(int count, char **arguments)
{
    if (count < 2)
        return 2;
    pid_t pid = atoi(arguments[1]);
    must(ptrace(PTRACE_SEIZE, pid, 0, PTRACE_O_TRACESYSGOOD), "PTRACE_SEIZE");
    must(ptrace(PTRACE_INTERRUPT, pid, 0, 0), "PTRACE_INTERRUPT");
    int status, signal = 0;
    must(waitpid(pid, &status, __WALL), "waitpid");
    say("traced\n");
    while (!is_at_pwrite(pid, &signal))
        ;
    if (count > 2) {
        must(kill(pid, SIGKILL), "kill");
        must(waitpid(pid, &status, __WALL), "waitpid");
        say("killed\n");
        return 0;
    }
    say("stopped\n");
    char end;
    while (read(0, &end, 1) > 0)
        ;
    /* It may have been killed meanwhile. */
    ptrace(PTRACE_DETACH, pid, 0, 0);
    return 0;
}
