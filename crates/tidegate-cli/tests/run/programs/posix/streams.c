/* stdio: its buffering and order, mixed with the descriptors below it. */
#include "posix.h"
#include <stdio_ext.h>

static void streams(void)
{
    FILE *file = fopen("file", "w+");
    TELL(fprintf(file, "number %d\n", 42));
    show("file"); /* nothing yet: it is in the buffer */
    TELL(fflush(file));
    show("file");
    TELL(fputs("more\n", file));
    TELL(fsync(fileno(file)));
    show("file");
    TELL(fputc('!', file));
    TELL(fseek(file, 0, SEEK_SET));
    show("file");
    char line[32];
    TELL(fgets(line, sizeof line, file) != NULL);
    say("%s", line);
    TELL(fseeko(file, 7, SEEK_SET));
    TELL(fwrite("17", 1, 2, file));
    TELL(ftell(file));
    rewind(file);
    TELL(ftruncate(fileno(file), 9));
    TELL(fdatasync(fileno(file)));
    TELL(fclose(file));
    show("file");
}

static void modes_of_streams(void)
{
    static const char *const modes[] = {"w", "a", "r+", "a+", "ab", "w+", "wx", "ae", "r"};
    for (size_t at = 0; at < sizeof modes / sizeof *modes; at++) {
        FILE *file = fopen("file", modes[at]);
        if (!file) {
            say("%s: %s", modes[at], strerrorname_np(errno));
            continue;
        }
        say("%s: at %ld, descriptor at %ld", modes[at], ftell(file), (long)lseek(fileno(file), 0, SEEK_CUR));
        TELL(fprintf(file, "mode %s;", modes[at]));
        MUST(fflush(file));
        TELL(ftell(file));
        MUST(fsync(fileno(file)));
        fprintf(file, "again;");
        TELL(ftell(file));
        MUST(fclose(file));
        show("file");
    }
    TELL(fopen("absent", "r") == NULL);
    TELL(freopen("other", "w", fopen("file", "a")) != NULL);
    FILE *again = freopen("file", "a", fopen("other", "r"));
    TELL(ftell(again));
    TELL(ftell(fdopen(open_file("file", 0), "a")));
    MUST(mkfifo("pipe", 0600));
    MUST(open("pipe", O_RDWR));
    TELL(fopen("pipe", "a") != NULL);
}

static void buffers_of_streams(void)
{
    FILE *unbuffered = fopen("unbuffered", "w"), *lines = fopen("lines", "w"), *large = fopen("large", "w");
    static char buffer[100000], bytes[50000];
    fill(bytes, sizeof bytes, 6);
    TELL(setvbuf(unbuffered, NULL, _IONBF, 0));
    TELL(setvbuf(lines, NULL, _IOLBF, 1024));
    TELL(setvbuf(large, buffer, _IOFBF, sizeof buffer));
    TELL(fputs("at once", unbuffered));
    show("unbuffered");
    TELL(fputs("a line\nhalf", lines));
    show("lines");
    TELL(fwrite(bytes, 1, sizeof bytes, large));
    show("large");
    TELL(fwrite(bytes, 1, sizeof bytes, large));
    TELL(fwrite(bytes, 1, sizeof bytes, large));
    TELL(fflush(NULL));
    show("lines");
    show("large");
    TELL(pwrite(fileno(large), "below the stream", 16, 10));
    TELL(fputs_unlocked("end", large));
    TELL(fcloseall());
    show("large");
}

static void descriptors_of_streams(void)
{
    int fd = open_file("file", 0);
    TELL(write(fd, "descriptor ", 11));
    FILE *stream = fdopen(fd, "r+");
    TELL(fputs("stream ", stream));
    TELL(fflush(stream));
    TELL(write(fd, "descriptor ", 11));
    TELL(fsync(fd));
    TELL(fputs("stream ", stream));
    TELL(dup2(open_file("second", 0), fd)); /* the stream now writes to another file */
    TELL(fflush(stream));
    TELL(fclose(stream));
    show("file");
    show("second");
    stream = fopen("third", "w");
    TELL(fputs("third", stream));
    stream = freopen("fourth", "w", stream);
    TELL(fputs("fourth", stream));
    TELL(dprintf(fileno(stream), "dprintf %s ", "before"));
    TELL(fclose(stream));
    show("third");
    show("fourth");
}

static void formatted_output(void)
{
    int fd = open_file("file", O_APPEND);
    for (int round = 0; round < 10; round++) {
        MUST(dprintf(fd, "line %d of %s\n", round, "dprintf"));
        MUST(write(fd, "line by write\n", 14));
        if (round % 3 == 0)
            MUST(fsync(fd));
    }
    MUST(dprintf(fd, "%0*d\n", 20000, 1));
    show("file");
    TELL(dprintf(1, "to standard output\n"));
    TELL(dprintf(99, "nowhere"));
}

/* A program whose standard output is a file, with a child that inherits an unflushed stream's
 * descriptor. */
static void redirected_output(void)
{
    int saved = MUST(dup(1));
    MUST(dup2(open_file("output", O_TRUNC), 1));
    printf("by printf\n");
    fflush(stdout);
    say("by write");
    if (system("echo by a shell; echo error >&1"))
        say("the shell failed");
    puts("by puts");
    fflush(stdout);
    MUST(fsync(1));
    MUST(dup2(saved, 1));
    show("output");
}

static void leaves_by_exit(void)
{
    FILE *file = fopen("exited", "w");
    fputs("flushed by exit", file);
    exit(4);
}

static void leaves_at_once(void)
{
    FILE *file = fopen("left", "w");
    fputs("flushed;", file);
    fflush(file);
    fputs("never flushed", file);
    _exit(5);
}

static void streams_at_exit(void)
{
    in_child(leaves_by_exit);
    show("exited");
    in_child(leaves_at_once);
    show("left");
}

const struct section stdio_sections[] = {
    {"streams", streams},
    {"modes_of_streams", modes_of_streams},
    {"buffers_of_streams", buffers_of_streams},
    {"descriptors_of_streams", descriptors_of_streams},
    {"formatted_output", formatted_output},
    {"redirected_output", redirected_output},
    {"streams_at_exit", streams_at_exit},
    {NULL, NULL},
};
