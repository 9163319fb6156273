/* Writes a file and syncs it, as often as it is told, in one of these ways; other files of the
 * process are in the log.
 *
 * usage: plain_calls direct|stream|mapped|ordinary PATH TIMES */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static void on_signal(int signal) { (void)signal; }

int main(int count, char **words) {
    if (count != 4) return 2;
    int direct = !strcmp(words[1], "direct"), times = atoi(words[3]);
    int fd = open(words[2], O_RDWR | O_CREAT | (direct ? O_DIRECT : 0), 0644);
    char *page = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fd < 0 || page == MAP_FAILED || ftruncate(fd, 1 << 20)) return 3;
    /* Hooks that must not be interrupted have more to do then. */
    signal(SIGUSR1, on_signal);
    FILE *stream = !strcmp(words[1], "stream") ? fdopen(fd, "r+") : NULL;
    if (!strcmp(words[1], "mapped") &&
        mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED)
        return 3;
    for (int i = 0; i < times; i++) {
        if (stream ? fputc('x', stream) < 0 || fflush(stream) : pwrite(fd, page, 4096, 0) != 4096)
            return 3;
        if (i % 2 ? fsync(fd) : fdatasync(fd)) return 3;
    }
    return 0;
}
