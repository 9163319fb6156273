/* Covers a file, gives up rights in one of several ways, and goes on writing the file:
 *
 *     confined WAY TEXT...
 *
 * says "mapped N", the number of its mappings then whose lines have one of the texts. What was
 * mapped before goes to standard error. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <grp.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/landlock.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#if defined(__x86_64__)
#define MACHINE AUDIT_ARCH_X86_64
#else
#define MACHINE AUDIT_ARCH_AARCH64
#endif

static char **texts;

static void must(long result, const char *what)
{
    if (result < 0) {
        perror(what);
        exit(1);
    }
}
#define MUST(expression) must((long)(expression), #expression)

/* Only reads: a filter may allow nothing else. */
static int count_mapped(int maps)
{
    static char all[1 << 18];
    size_t bytes = 0;
    ssize_t more;
    while ((more = read(maps, all + bytes, sizeof all - 1 - bytes)) > 0)
        bytes += more;
    all[bytes] = 0;
    int found = 0;
    for (char *line = all; *line;) {
        char *end = strchrnul(line, '\n');
        char next = *end;
        *end = 0;
        for (char **text = texts; *text; text++)
            if (strstr(line, *text)) {
                found++;
                break;
            }
        line = next ? end + 1 : end;
    }
    return found;
}

struct calls {
    const int *numbers;
    size_t count;
};

/* A filter that allows these calls alone; what else is called has `otherwise`. */
static struct sock_fprog filter_of(struct calls calls, uint32_t otherwise)
{
    static struct sock_filter code[256];
    size_t at = 0;
    code[at++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch));
    code[at++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, MACHINE, 1, 0);
    code[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    code[at++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (size_t call = 0; call < calls.count; call++) {
        code[at++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)calls.numbers[call], 0, 1);
        code[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    }
    code[at++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, otherwise);
    return (struct sock_fprog){.len = at, .filter = code};
}

/* As the network half of OpenSSH before authentication (sandbox-seccomp-filter.c): an empty root,
 * another user, no new descriptors, and a filter that kills. */
static void as_sshd(void)
{
    static const int allowed[] = {
        SYS_brk, SYS_clock_gettime, SYS_clock_nanosleep, SYS_close, SYS_exit, SYS_exit_group, SYS_futex, SYS_getpgid,
        SYS_getpid, SYS_getrandom, SYS_gettid, SYS_gettimeofday, SYS_getuid, SYS_geteuid, SYS_madvise, SYS_mmap,
        SYS_mprotect, SYS_mremap, SYS_munmap, SYS_nanosleep, SYS_ppoll, SYS_pselect6, SYS_read, SYS_rt_sigprocmask,
        SYS_shutdown, SYS_write, SYS_writev};
    mkdir("empty", 0755);
    MUST(chroot("empty"));
    MUST(chdir("/"));
    gid_t group = 65534;
    MUST(setgroups(1, &group));
    MUST(setresgid(group, group, group));
    MUST(setresuid(65534, 65534, 65534));
    struct rlimit none = {1, 1};
    MUST(setrlimit(RLIMIT_NOFILE, &none));
    struct rlimit no_processes = {0, 0};
    MUST(setrlimit(RLIMIT_NPROC, &no_processes));
    MUST(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    struct sock_fprog filter =
        filter_of((struct calls){allowed, sizeof allowed / sizeof *allowed}, SECCOMP_RET_KILL_PROCESS);
    MUST(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter));
}

/* As a browser's renderer: the fewest calls that it can do with, for all of its threads; and those
 * by which a process starts another one. */
static void as_renderer(void)
{
    static const int allowed[] = {SYS_read, SYS_write, SYS_pwrite64, SYS_fdatasync, SYS_fsync, SYS_futex, SYS_exit,
                                  SYS_exit_group, SYS_rt_sigprocmask, SYS_rt_sigreturn, SYS_madvise, SYS_mmap,
                                  SYS_munmap, SYS_mprotect, SYS_brk, SYS_gettid, SYS_getpid, SYS_clone,
                                  SYS_set_robust_list, SYS_wait4};
    MUST(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    struct sock_fprog filter =
        filter_of((struct calls){allowed, sizeof allowed / sizeof *allowed}, SECCOMP_RET_KILL_PROCESS);
    MUST(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &filter));
}

static void with_landlock(void)
{
    struct landlock_ruleset_attr rules = {.handled_access_fs = LANDLOCK_ACCESS_FS_EXECUTE |
                                              LANDLOCK_ACCESS_FS_WRITE_FILE | LANDLOCK_ACCESS_FS_READ_FILE |
                                              LANDLOCK_ACCESS_FS_READ_DIR | LANDLOCK_ACCESS_FS_MAKE_REG};
    int ruleset = syscall(SYS_landlock_create_ruleset, &rules, sizeof rules, 0);
    MUST(ruleset);
    MUST(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    MUST(syscall(SYS_landlock_restrict_self, ruleset, 0));
    if (open("another", O_RDWR | O_CREAT, 0600) >= 0)
        MUST(-1);
}

static void without_capabilities(void)
{
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct none[2] = {0};
    MUST(syscall(SYS_capset, &header, none));
}

static void confine(const char *way)
{
    if (!strcmp(way, "user")) {
        MUST(setgroups(0, NULL));
        MUST(setresgid(65534, 65534, 65534));
        MUST(setresuid(65534, 65534, 65534));
    } else if (!strcmp(way, "chroot")) {
        mkdir("empty", 0755);
        MUST(chroot("empty"));
    } else if (!strcmp(way, "user-namespace"))
        MUST(unshare(CLONE_NEWUSER));
    else if (!strcmp(way, "mount-namespace"))
        MUST(unshare(CLONE_NEWNS));
    else if (!strcmp(way, "capabilities"))
        without_capabilities();
    else if (!strcmp(way, "sshd"))
        as_sshd();
    else if (!strcmp(way, "renderer"))
        as_renderer();
    else if (!strcmp(way, "landlock"))
        with_landlock();
    else
        exit(2);
}

static int fd, second;
static volatile int is_writing, is_confined;

/* Another thread that writes all the time, before and after. */
static void *write_on(void *unused)
{
    (void)unused;
    for (int after = 0; after < 20;) {
        if (pwrite(second, "thread", 6, 0) != 6 || fdatasync(second) != 0)
            return "failed";
        is_writing = 1;
        after += is_confined;
    }
    return NULL;
}

int main(int count, char **arguments)
{
    if (count < 3)
        return 2;
    const char *way = arguments[1];
    texts = arguments + 2;
    int before = open("/proc/self/maps", O_RDONLY), after = open("/proc/self/maps", O_RDONLY);
    fd = open("file", O_RDWR | O_CREAT, 0600);
    second = open("second", O_RDWR | O_CREAT, 0600);
    MUST(write(fd, "0123456789", 10));
    MUST(write(second, "0123456789", 10));
    MUST(fsync(fd));
    MUST(fsync(second));
    MUST(pwrite(fd, "AB", 2, 0));
    MUST(fdatasync(fd));
    fprintf(stderr, "mapped before %d\n", count_mapped(before));
    /* The kernel gives a process with threads no other user namespace; sshd has none. */
    int is_sshd = !strcmp(way, "sshd"), has_thread = !is_sshd && strcmp(way, "user-namespace");
    pthread_t thread;
    if (has_thread)
        MUST(-pthread_create(&thread, NULL, write_on, NULL));
    while (has_thread && !is_writing)
        sched_yield();
    confine(way);
    is_confined = 1;
    /* What the filter of sshd does not allow, a program in it does not call. */
    int wrote = write(fd, "inside", 6) == 6 && write(fd, "", 0) == 0;
    if (!is_sshd)
        wrote = wrote && pwrite(fd, "YZ", 2, 8) == 2 && fdatasync(fd) == 0 && fsync(fd) == 0;
    void *failed = NULL;
    if (has_thread)
        pthread_join(thread, &failed);
    /* A child of it, where it may have one. */
    pid_t child = is_sshd ? -1 : fork();
    if (child == 0)
        _exit(pwrite(fd, "YZ", 2, 8) != 2 || fdatasync(fd) != 0);
    int status = 0;
    if (child > 0)
        wrote = wrote && waitpid(child, &status, 0) == child && status == 0;
    char line[64];
    int len = snprintf(line, sizeof line, "wrote %d, mapped %d\n", wrote && !failed, count_mapped(after));
    return write(1, line, len) != len;
}
