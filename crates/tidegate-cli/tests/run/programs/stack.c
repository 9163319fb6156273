/* How much stack calls take in a signal handler with a stack of its own (stack handler), or in a
 * thread of a program without handlers (stack thread): a line for each call, with the bytes that it
 * has used. The file "covered" is covered when the call comes. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/xattr.h>
#include <unistd.h>

enum { STACK = 128 << 10, PAINT = 0xa5 };

static unsigned char *stack;
static int covered, made, directory;
static struct iovec two[2] = {{"a", 1}, {"b", 1}};

static void done(long result) { (void)result; }

#define CALLS \
    CALL(nothing, 0) \
    CALL(pwrite, pwrite(covered, "x", 1, 0)) \
    CALL(pwrite_more, pwrite(covered, "x", 1, 4096)) \
    CALL(write, write(covered, "x", 1)) \
    CALL(pwritev, pwritev(covered, two, 2, 0)) \
    CALL(fdatasync, fdatasync(covered)) \
    CALL(fsync, fsync(covered)) \
    CALL(open, made = open("made", O_RDWR | O_CREAT | O_EXCL, 0644)) \
    CALL(write_made, write(made, "abc", 3)) \
    CALL(fsync_made, fsync(made)) \
    CALL(pwrite_made, pwrite(made, "b", 1, 1)) \
    CALL(fsync_made_again, fsync(made)) \
    CALL(rename, rename("made", "renamed")) \
    CALL(link, link("renamed", "made")) \
    CALL(unlink, unlink("renamed")) \
    CALL(chmod, chmod("made", 0600)) \
    CALL(fchmod, fchmod(made, 0640)) \
    CALL(setxattr, setxattr("made", "user.x", "y", 1, 0)) \
    CALL(truncate, truncate("covered", 100)) \
    CALL(ftruncate, ftruncate(made, 9)) \
    CALL(fsync_changed, fsync(made)) \
    CALL(open_empty, close(open("made", O_WRONLY | O_TRUNC))) \
    CALL(mkdir, mkdir("directory", 0700)) \
    CALL(rmdir, rmdir("directory")) \
    CALL(symlink, symlink("made", "symbolic")) \
    CALL(close, close(made)) \
    CALL(fsync_directory, fsync(directory)) \
    CALL(fallocate, fallocate(covered, 0, 0, 8192)) \
    CALL(fdatasync_left, fdatasync(covered)) \
    CALL(syncfs, syncfs(covered)) \
    CALL(remove, unlink("made"))

static uintptr_t lowest(void) {
    size_t at = 0;
    while (at < STACK && stack[at] == PAINT) at++;
    return (uintptr_t)(stack + at);
}

#define CALL(name, call) \
    static void on_##name(int signal) { \
        (void)signal; \
        done(call); \
    }
CALLS
#undef CALL

static int in_threads;
static void (*called)(int);

static void *in_thread(void *unused) {
    called(0);
    return unused;
}

static void call_in_handler(void) {
    stack_t own = {.ss_sp = stack, .ss_size = STACK};
    struct sigaction action = {.sa_handler = called, .sa_flags = SA_ONSTACK};
    if (sigaltstack(&own, 0) || sigaction(SIGUSR1, &action, 0)) exit(3);
    raise(SIGUSR1);
}

static void call_in_thread(void) {
    pthread_t thread;
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes) || pthread_attr_setstack(&attributes, stack, STACK)) exit(3);
    if (pthread_create(&thread, &attributes, in_thread, NULL)) exit(3);
    pthread_join(thread, NULL);
}

static void run(const char *name, void (*function)(int)) {
    called = function;
    memset(stack, PAINT, STACK);
    if (in_threads)
        call_in_thread();
    else
        call_in_handler();
    printf("%s %zu\n", name, (size_t)((uintptr_t)stack + STACK - lowest()));
}

int main(int count, char **arguments) {
    if (count != 2) return 2;
    in_threads = !strcmp(arguments[1], "thread");
    stack = mmap(0, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    covered = open("covered", O_RDWR | O_CREAT, 0644);
    directory = open(".", O_RDONLY | O_DIRECTORY);
    if (stack == MAP_FAILED || covered < 0 || directory < 0) return 3;
    for (int i = 0; i < 12; i++)
        if (pwrite(covered, "x", 1, i) != 1 || fdatasync(covered)) return 3;
#define CALL(name, call) run(#name, on_##name);
    CALLS
    return 0;
}
