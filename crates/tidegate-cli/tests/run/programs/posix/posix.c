/* `posix SECTION`: runs one section and prints its transcript. `posix --child ROLE ...` is what
 * sections execute. */
#include "posix.h"

const char *self;

void say(const char *format, ...)
{
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line - 1, format, arguments);
    va_end(arguments);
    if (length > (int)sizeof line - 2)
        length = sizeof line - 2;
    line[length] = '\n';
    if (write(1, line, length + 1) != length + 1)
        _exit(99);
}

long told(const char *expression, long result)
{
    if (result < 0)
        say("%s = %ld %s", expression, result, strerrorname_np(errno));
    else
        say("%s = %ld", expression, result);
    return result;
}

long expect(const char *expression, long result)
{
    if (result < 0) {
        say("FAILED: %s: %s", expression, strerror(errno));
        _exit(98);
    }
    return result;
}

int open_file(const char *path, int more_flags)
{
    return MUST(open(path, O_RDWR | O_CREAT | more_flags, 0644));
}

static uint64_t checksum(int fd)
{
    static __thread char bytes[65536];
    uint64_t sum = 0xcbf29ce484222325;
    off_t offset = 0;
    ssize_t count;
    while ((count = MUST(pread(fd, bytes, sizeof bytes, offset))) > 0) {
        for (ssize_t at = 0; at < count; at++)
            sum = (sum ^ (unsigned char)bytes[at]) * 0x100000001b3;
        offset += count;
    }
    return sum;
}

void show(const char *path)
{
    int fd = open(path, O_RDONLY);
    if (fd < 0) {
        say("%s: %s", path, strerrorname_np(errno));
        return;
    }
    struct stat status;
    char start[33] = "";
    MUST(fstat(fd, &status));
    MUST(pread(fd, start, 32, 0));
    for (char *at = start; *at; at++)
        if (*at < ' ' || *at > '~')
            *at = '?';
    say("%s: %lld bytes, checksum %016llx, \"%s\"", path, (long long)status.st_size,
        (unsigned long long)checksum(fd), start);
    close(fd);
}

void in_child(void (*child)(void))
{
    pid_t pid = MUST(fork());
    if (pid == 0) {
        child();
        _exit(0);
    }
    int status;
    MUST(waitpid(pid, &status, 0));
    say("child: %s %d", WIFSIGNALED(status) ? "signal" : "status",
        WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
}

void fill(char *bytes, size_t count, unsigned seed)
{
    for (size_t at = 0; at < count; at++)
        bytes[at] = "0123456789abcdefghijklmnopqrstuvwxyz"[(at / 7 + at + seed) % 36];
}

static const struct section *find(const char *name)
{
    const struct section *const tables[] = {write_sections,  process_sections, name_sections,
                                            kernel_sections, stdio_sections,   error_sections};
    for (size_t table = 0; table < sizeof tables / sizeof *tables; table++)
        for (const struct section *section = tables[table]; section->name; section++)
            if (!strcmp(section->name, name))
                return section;
    return NULL;
}

int main(int count, char **arguments)
{
    self = arguments[0];
    if (count > 2 && !strcmp(arguments[1], "--child"))
        return child_role(count - 2, arguments + 2);
    const struct section *section = count == 2 ? find(arguments[1]) : NULL;
    if (!section) {
        fprintf(stderr, "usage: posix SECTION\n");
        return 2;
    }
    section->run();
    say("end of %s", section->name);
    return 0;
}
