/* Writes in all the ways that there are, and says how many writes that were.
 *
 * usage: every_write PATH */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <sys/sendfile.h>
#include <sys/uio.h>
#include <unistd.h>

enum { TIMES = 10 };

static int writes;

static void check(int has_written) {
    if (!has_written) _exit(3);
    writes++;
}

int main(int count, char **words) {
    if (count != 2) return 2;
    int fd = open(words[1], O_RDWR | O_CREAT, 0644), source = open("/etc/passwd", O_RDONLY);
    struct iovec parts[100];
    for (int i = 0; i < 100; i++) parts[i] = (struct iovec){"part", 4};
    for (int i = 0; i < TIMES; i++) {
        off_t start = 0;
        check(write(fd, "abcd", 4) == 4);
        check(pwrite(fd, "abcd", 4, 100) == 4);
        check(writev(fd, parts, 3) == 12);
        check(writev(fd, parts, 100) == 400);
        check(pwritev(fd, parts, 3, 4096) == 12);
        check(pwritev2(fd, parts, 3, 4096, RWF_NOWAIT & 0) == 12);
        check(sendfile(fd, source, &start, 5) == 5);
        check(dprintf(fd, "%d\n", i) > 0 && !fdatasync(fd));
        FILE *stream = fopen(words[1], "r+");
        check(stream && fputs("stream", stream) > 0 && !fflush(stream));
        check(fputs("closed", stream) > 0 && !fclose(stream));
        stream = fdopen(dup(fd), "r+");
        check(stream && fputs("stream", stream) > 0 && !fflush(stream));
        check(fputs("closed", stream) > 0 && !fclose(stream));
    }
    printf("%d\n", writes);
    return 0;
}
