/* Kills children of vfork at any moment, mostly while they call exec. After each one the parent
 * gets a signal, which it handles at once. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static volatile pid_t child;
static volatile sig_atomic_t handled;
static int killed;

static void on_signal(int signal)
{
    (void)signal;
    handled++;
}

static void *kills(void *unused)
{
    (void)unused;
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, NULL);
    for (unsigned seed = 1;;) {
        pid_t to = child;
        if (to == 0)
            continue;
        child = 0;
        for (volatile int pause = rand_r(&seed) % 160000; pause > 0; pause--)
            ;
        kill(to, SIGKILL);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    int rounds = argc == 2 ? atoi(argv[1]) : 0;
    pthread_t thread;
    signal(SIGUSR1, on_signal);
    if (rounds == 0 || pthread_create(&thread, NULL, kills, NULL) != 0)
        return 2;
    for (int round = 0; round < rounds; round++) {
        pid_t made = vfork();
        if (made == 0) {
            child = getpid();
            execl("/bin/true", "true", (char *)NULL);
            _exit(1);
        }
        int status, before = handled;
        waitpid(made, &status, 0);
        killed += WIFSIGNALED(status);
        pthread_kill(pthread_self(), SIGUSR1);
        if (handled == before) {
            printf("round %d: the signal is not handled\n", round);
            fflush(stdout);
            _exit(1);
        }
    }
    printf("%s\n", killed > 0 ? "handled" : "no child was killed");
    fflush(stdout);
    _exit(0);
}
