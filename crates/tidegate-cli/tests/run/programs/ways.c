/* Makes each call that changes files, each of a file of its own, in one of the ways in which a
 * program can reach it; syncs the files and the directory; says `done` and waits.
 *
 * Usage: ways WAY OBJECT STATIC. The same source is the program, an object that it loads (-shared),
 * and a static program that it starts. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#define FILES 10

typedef long (*function)(long, long, long, long, long, long);

struct call {
    const char *name;
    function by_name;
    /* Other names of the function: an alias, and a version of its symbol. */
    const char *alias, *version;
    long number, arguments[6];
};

/* The files f0 to f9; `covered` has their descriptors, which children inherit. */
static int covered[FILES];
static char letter[100];
static struct iovec parts[2] = {{letter, 50}, {letter + 50, 50}};

static long at(const char *text) { return (long)text; }

static int made(struct call *calls) {
    int n = 0;
#define CALL(name, alias, number, ...) \
    calls[n++] = (struct call){#name, (function)(void *)name, alias, "GLIBC_2.2.5", number, {__VA_ARGS__}}
    CALL(pwrite, "__pwrite64", SYS_pwrite64, covered[0], (long)letter, 100, 0);
    CALL(write, "__write", SYS_write, covered[1], (long)letter, 100);
    CALL(writev, NULL, SYS_writev, covered[2], (long)parts, 2);
    CALL(ftruncate, "ftruncate64", SYS_ftruncate, covered[3], 10);
    CALL(truncate, "truncate64", SYS_truncate, at("f4"), 10);
    CALL(fallocate, "fallocate64", SYS_fallocate, covered[5], 3, 0, 4096);
    calls[n - 1].version = "GLIBC_2.10";
    CALL(fchmod, NULL, SYS_fchmod, covered[6], 0600);
    CALL(chmod, NULL, SYS_chmod, at("f7"), 0600);
    CALL(fsetxattr, NULL, SYS_fsetxattr, covered[8], at("user.way"), at("v"), 1, 0);
    calls[n - 1].version = "GLIBC_2.3";
    CALL(rename, NULL, SYS_rename, at("new"), at("old"));
    CALL(link, NULL, SYS_link, at("f9"), at("linked"));
    CALL(unlink, NULL, SYS_unlink, at("gone"));
    CALL(symlink, NULL, SYS_symlink, at("f9"), at("symbolic"));
    CALL(mkdir, NULL, SYS_mkdir, at("made"), 0755);
#undef CALL
    return n;
}

static void must(const char *name, long result) {
    if (result < 0) {
        fprintf(stderr, "%s: %ld, %s\n", name, result, strerror(errno));
        _exit(1);
    }
}

static long own(long number, const long *a) {
#if defined __x86_64__ && !defined OWN
    long result;
    register long d __asm__("r10") = a[3], e __asm__("r8") = a[4], f __asm__("r9") = a[5];
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a[0]), "S"(a[1]), "d"(a[2]), "r"(d), "r"(e), "r"(f) : "rcx", "r11", "memory");
    return result;
#else
    return syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
#endif
}

static void by(const char *name, function function, const long *a) {
    /* Only its lower half is the result of an `int` function; the others here return small ones. */
    must(name, (int)function(a[0], a[1], a[2], a[3], a[4], a[5]));
}

/* The descriptors from where the program has put them. */
static void find(void) {
    for (int i = 0; i < FILES; i++) covered[i] = 100 + i;
    memset(letter, 'L', sizeof letter);
}

/* What an object is called for: a handle of the C library is looked for in its own namespace. */
void act(const char *way) {
    struct call calls[32];
    find();
    int count = made(calls);
    void *handle = dlopen("libc.so.6", RTLD_NOW);
    for (int i = 0; i < count; i++) {
        struct call *c = &calls[i];
        void *found = c->by_name;
        if (!strcmp(way, "alias") && c->alias) found = dlsym(handle, c->alias);
        if (!strcmp(way, "default")) found = dlsym(RTLD_DEFAULT, c->name);
        if (!strcmp(way, "next")) found = dlsym(RTLD_NEXT, c->name);
        if (!strcmp(way, "handle")) found = dlsym(handle, c->name);
        if (!strcmp(way, "version")) found = dlvsym(handle, c->name, c->version);
        if (!found) must(c->name, -1);
        const long *a = c->arguments;
        if (!strcmp(way, "syscall")) must(c->name, syscall(c->number, a[0], a[1], a[2], a[3], a[4], a[5]));
        else if (!strcmp(way, "own")) must(c->name, own(c->number, a));
        else by(c->name, (function)found, a);
    }
}

__attribute__((constructor)) static void loaded(void) {
    if (getenv("TIDEGATE_TEST_ACT")) act("own");
}

static void cover(void) {
    find();
    char name[8], old[8192];
    memset(old, '-', sizeof old);
    for (int i = 0; i < FILES; i++) {
        snprintf(name, sizeof name, "f%d", i);
        int fd = open(name, O_RDWR);
        must(name, fd);
        must("dup2", dup2(fd, covered[i]));
        close(fd);
        for (int n = 0; n < 10; n++) {
            must("pwrite", pwrite(covered[i], old, 4096, 0));
            must("fdatasync", fdatasync(covered[i]));
        }
    }
    /* A directory whose names are all known to be durable. */
    int directory = open(".", O_RDONLY);
    for (int n = 0; n < 5; n++) {
        int fd = open("p", O_CREAT | O_EXCL | O_RDWR, 0644);
        must("p", write(fd, "p", 1));
        must("fsync", fsync(fd));
        close(fd);
        must("rename", rename("p", "q"));
        must("fsync", fsync(directory));
    }
    close(directory);
}

static void load(const char *object, int flags, const char *way) {
    void *handle = dlopen(object, flags);
    if (!handle) {
        fprintf(stderr, "%s\n", dlerror());
        _exit(1);
    }
    void (*function)(const char *) = dlsym(handle, "act");
    if (way) function(way);
}

static void start(const char *program) {
    extern char **environ;
    char *arguments[] = {(char *)program, "act", NULL};
    pid_t child;
    int status;
    must("posix_spawn", -posix_spawn(&child, program, NULL, NULL, arguments, environ));
    must("waitpid", waitpid(child, &status, 0));
    must("child", -status);
}

int main(int count, char **arguments) {
    const char *way = arguments[1];
    if (count == 2) {
        act("own");
        return 0;
    }
    cover();
    if (!strcmp(way, "object")) load(arguments[2], RTLD_NOW, "name");
    else if (!strcmp(way, "deepbind")) load(arguments[2], RTLD_NOW | RTLD_DEEPBIND, "name");
    else if (!strcmp(way, "own")) load(arguments[2], RTLD_NOW, "own");
    else if (!strcmp(way, "next")) load(arguments[2], RTLD_NOW, "next");
    else if (!strcmp(way, "constructor")) {
        setenv("TIDEGATE_TEST_ACT", "1", 1);
        load(arguments[2], RTLD_NOW, NULL);
    } else if (!strcmp(way, "namespace")) {
        void *handle = dlmopen(LM_ID_NEWLM, arguments[2], RTLD_NOW);
        must("dlmopen", handle ? 0 : -1);
        ((void (*)(const char *))dlsym(handle, "act"))("name");
    } else if (!strcmp(way, "child")) start(arguments[3]);
    else act(way);
    for (int i = 0; i < FILES; i++) must("fsync", fsync(covered[i]));
    int directory = open(".", O_RDONLY);
    must("fsync", fsync(directory));
    puts("done");
    fflush(stdout);
    pause();
}
