/* What the sections of the POSIX transcript share. A section works in an empty directory and
 * says what each call returned; the transcript must not depend on time, place, process numbers
 * or scheduling. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

/* Writes a line of the transcript, in one piece. */
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Says an expression and what it returned, with the name of the error if it is negative; hands
 * it back. */
long told(const char *expression, long result);
#define TELL(expression) told(#expression, (long)(expression))

/* Evaluates an expression that must not be negative; ends the program otherwise. */
long expect(const char *expression, long result);
#define MUST(expression) expect(#expression, (long)(expression))

/* Opens a new or existing file for reading and writing. */
int open_file(const char *path, int more_flags);

/* Says size and content of a file (its first bytes and a checksum of all), read by a descriptor
 * of its own. */
void show(const char *path);

/* Forks, runs `child` in the child, waits for it and says how it ended. */
void in_child(void (*child)(void));

/* A byte pattern that names each of its places. */
void fill(char *bytes, size_t count, unsigned seed);

struct section {
    const char *name;
    void (*run)(void);
};
extern const struct section write_sections[], process_sections[], name_sections[], kernel_sections[], stdio_sections[],
    error_sections[];

/* The program's own path, for sections that execute it again, with what another role does there. */
extern const char *self;
int child_role(int count, char **arguments);
