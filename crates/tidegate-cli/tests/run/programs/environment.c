/* Prints LD_PRELOAD, or executes a program in this way, which prints it. */
#define _GNU_SOURCE
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

int main(int count, char **arguments)
{
    if (count < 3 || !strcmp(arguments[1], "script")) {
        const char *value = getenv("LD_PRELOAD");
        puts(value ? value : "");
        return 0;
    }
    const char *way = arguments[1];
    char *path = arguments[2], *argv[] = {path, NULL};
    int (*spawn)(pid_t *, const char *, const posix_spawn_file_actions_t *, const posix_spawnattr_t *,
                 char *const[], char *const[]) = strcmp(way, "spawn") ? posix_spawnp : posix_spawn;
    if (!strcmp(way, "execve"))
        execve(path, argv, environ);
    else if (!strcmp(way, "execv"))
        execv(path, argv);
    else if (!strcmp(way, "execvp"))
        execvp(path, argv);
    else if (!strcmp(way, "execl"))
        execl(path, path, NULL);
    else if (!strcmp(way, "execlp"))
        execlp(path, path, NULL);
    else if (!strcmp(way, "execle"))
        execle(path, path, NULL, environ);
    else if (!strcmp(way, "syscall"))
        syscall(SYS_execve, path, argv, environ);
    else {
        pid_t pid;
        int status;
        if (spawn(&pid, path, NULL, NULL, argv, environ) || waitpid(pid, &status, 0) != pid)
            return 1;
        return WEXITSTATUS(status);
    }
    return 1;
}
