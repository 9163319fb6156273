/* Several processes, signals, descriptors that travel. */
#include "posix.h"
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/time.h>

static int shared_fd;

static void child_writes(void)
{
    TELL(write(shared_fd, "child ", 6));
    TELL(fsync(shared_fd));
    int own = open_file("of the child", 0);
    TELL(write(own, "own", 3));
    TELL(fsync(own));
}

static void fork_both_write(void)
{
    shared_fd = open_file("file", 0);
    TELL(write(shared_fd, "parent ", 7));
    for (int round = 0; round < 3; round++) {
        in_child(child_writes);
        TELL(lseek(shared_fd, 0, SEEK_CUR));
        TELL(write(shared_fd, "parent ", 7));
        TELL(fdatasync(shared_fd));
    }
    show("file");
    show("of the child");
}

static void appends_forever_children(void)
{
    char record[16];
    for (int round = 0; round < 300; round++) {
        snprintf(record, sizeof record, "%07d\n", round);
        MUST(write(shared_fd, record, 8));
        if (round % 50 == 0)
            MUST(fsync(shared_fd));
    }
}

/* Four processes append to one file at once: no record may be lost or torn. */
static void fork_concurrent_appends(void)
{
    shared_fd = open_file("file", O_APPEND);
    pid_t pids[4];
    for (int which = 0; which < 4; which++)
        if ((pids[which] = MUST(fork())) == 0) {
            appends_forever_children();
            _exit(0);
        }
    for (int which = 0; which < 4; which++)
        MUST(waitpid(pids[which], NULL, 0));
    static int seen[300];
    FILE *file = fopen("file", "r");
    int number, count = 0;
    while (fscanf(file, "%7d\n", &number) == 1 && number >= 0 && number < 300 && ++seen[number] <= 4)
        count++;
    say("%d records, at end %d", count, feof(file) != 0);
    fclose(file);
    MUST(unlink("file")); /* its order differs each time */
}

static int child_overwrites(void *unused)
{
    (void)unused;
    char bytes[5] = "";
    TELL(pread(shared_fd, bytes, 4, 0));
    TELL(pwrite(shared_fd, "KKKK", 4, 0));
    TELL(fsync(shared_fd));
    say("%s", bytes);
    _exit(0);
}

static pid_t fork_otherwise(int way)
{
    static char stack[1 << 20];
    struct clone_args arguments = {.exit_signal = SIGCHLD};
    switch (way) {
    case 0: return _Fork();
    case 1: return clone(child_overwrites, stack + sizeof stack, SIGCHLD, NULL);
    case 2: return syscall(SYS_clone3, &arguments, sizeof arguments);
    default: return syscall(SYS_clone, SIGCHLD, 0L, 0L, 0L, 0L);
    }
}

/* Forks of which the handlers of pthread_atfork do not hear: parent and child are two processes
 * all the same. */
static void other_forks(void)
{
    shared_fd = open_file("file", 0);
    TELL(fsync(shared_fd));
    for (int way = 0; way < 4; way++) {
        char bytes[9] = "";
        for (int round = 0; round < 10; round++)
            MUST(pwrite(shared_fd, "BBBBBBBB", 8, 0));
        pid_t pid = MUST(fork_otherwise(way));
        if (pid == 0)
            child_overwrites(NULL);
        MUST(waitpid(pid, NULL, 0));
        TELL(pread(shared_fd, bytes, 8, 0));
        say("%s", bytes);
    }
    TELL(write(shared_fd, "end", 3));
    show("file");
}

static void run_again(char *const arguments[])
{
    pid_t pid = MUST(fork());
    if (pid == 0) {
        execv(self, arguments);
        _exit(97);
    }
    int status;
    MUST(waitpid(pid, &status, 0));
    say("executed: status %d", WEXITSTATUS(status));
}

static void exec_keeps_descriptors(void)
{
    shared_fd = open_file("file", 0);
    int closed = open_file("closed", O_CLOEXEC);
    MUST(dup2(shared_fd, 40));
    MUST(dup3(closed, 41, O_CLOEXEC));
    TELL(write(40, "before ", 7));
    run_again((char *[]){(char *)self, "--child", "write", "40", "executed ", NULL});
    run_again((char *[]){(char *)self, "--child", "write", "41", "lost", NULL});
    TELL(lseek(40, 0, SEEK_CUR));
    TELL(write(40, "after", 5));
    show("file");
    show("closed");
}

static void try_lock(void)
{
    struct flock region = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    TELL(fcntl(open_file("file", 0), F_SETLK, &region));
}

static volatile sig_atomic_t breaks;

static void note_break(int signal)
{
    (void)signal;
    breaks++;
}

/* What the process has locked and leased before it executed this program again. */
static void keep_locks(int leased)
{
    signal(SIGIO, note_break);
    in_child(try_lock);
    int synchronous = open_file("file", O_DSYNC);
    for (int round = 0; round < 20; round++) {
        MUST(pwrite(synchronous, "synced", 6, round));
        MUST(pwrite(leased, "synced", 6, round));
        MUST(fdatasync(leased));
    }
    in_child(try_lock);
    TELL(fcntl(leased, F_GETLEASE));
    TELL(breaks);
}

static void locks_over_exec(void)
{
    pid_t pid = MUST(fork());
    if (pid == 0) {
        struct flock region = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
        char leased[12];
        int number = open_file("leased", 0);
        TELL(fcntl(number, F_SETLEASE, F_WRLCK));
        TELL(fcntl(open_file("file", 0), F_SETLK, &region));
        sprintf(leased, "%d", number);
        execl(self, self, "--child", "locked", leased, NULL);
        _exit(97);
    }
    int status;
    MUST(waitpid(pid, &status, 0));
    say("executed: status %d", WEXITSTATUS(status));
    show("file");
    show("leased");
}

static void vfork_exec(void)
{
    MUST(dup2(open_file("file", 0), 40));
    TELL(write(40, "before ", 7));
    for (int round = 0; round < 3; round++) {
        pid_t pid = vfork();
        if (pid == 0) {
            execl(self, self, "--child", "write", "40", "child ", NULL);
            _exit(97);
        }
        int status;
        MUST(waitpid(pid, &status, 0));
        TELL(WEXITSTATUS(status));
        TELL(write(40, "parent ", 7));
    }
    TELL(fsync(40));
    show("file");
}

extern char **environ;

static void spawned_programs(void)
{
    pid_t pid;
    int status;
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 40, "spawned", O_WRONLY | O_CREAT, 0600);
    posix_spawn_file_actions_adddup2(&actions, 40, 41);
    char *arguments[] = {(char *)self, "--child", "write", "41", "by a spawned program", NULL};
    TELL(posix_spawn(&pid, self, &actions, NULL, arguments, environ));
    MUST(waitpid(pid, &status, 0));
    TELL(WEXITSTATUS(status));
    show("spawned");
    TELL(system("echo from the shell >shell; echo again >>shell; cat shell; exit 3") >> 8);
    show("shell");
    FILE *pipe = popen("cat >popen", "w");
    TELL(fprintf(pipe, "through a pipe\n"));
    TELL(pclose(pipe));
    show("popen");
    TELL(system("env -i sh -c 'echo outside >>shell'"));
    show("shell");
}

static int ticks, handler_fd;

static void on_tick(int signal)
{
    (void)signal;
    int saved = errno;
    ticks++;
    if (write(handler_fd, "tick\n", 5) != 5 || fdatasync(handler_fd))
        _exit(96);
    errno = saved;
}

static void tick_every(int microseconds)
{
    struct itimerval timer = {{0, microseconds}, {0, microseconds}};
    MUST(setitimer(ITIMER_REAL, &timer, NULL));
}

/* A handler that writes to the file whose write it interrupts. */
static void signals_in_writes(void)
{
    static char page[4096];
    memset(page, '.', sizeof page - 1);
    page[sizeof page - 1] = '\n';
    handler_fd = open_file("file", O_APPEND);
    struct sigaction action = {.sa_handler = on_tick};
    MUST(sigaction(SIGALRM, &action, NULL));
    tick_every(200);
    long pages = 0;
    while (ticks < 500) {
        MUST(write(handler_fd, page, sizeof page) == sizeof page ? 0 : -1);
        if (pages++ % 16 == 0)
            MUST(fsync(handler_fd));
        if (pages % 256 == 0)
            MUST(ftruncate(handler_fd, 0));
    }
    tick_every(0);
    MUST(ftruncate(handler_fd, 0));
    int seen = ticks;
    on_tick(0);
    TELL(seen >= 500);
    show("file");
}

static sigjmp_buf back;

static void jump_out(int signal)
{
    siglongjmp(back, signal);
}

/* A handler that never returns: what it interrupted must leave nothing locked. */
static void jumps_out_of_writes(void)
{
    static char page[65536];
    static volatile int jumps;
    handler_fd = open_file("file", 0);
    signal(SIGALRM, jump_out);
    while (jumps < 300) {
        if (sigsetjmp(back, 1)) {
            jumps++;
            MUST(pwrite(handler_fd, "after a jump", 12, 0));
            continue;
        }
        struct itimerval once = {{0, 0}, {0, 50 + jumps % 100}};
        setitimer(ITIMER_REAL, &once, NULL);
        for (;;) {
            MUST(pwrite(handler_fd, page, sizeof page, 65536));
            MUST(fdatasync(handler_fd));
        }
    }
    show("file");
    shared_fd = handler_fd;
    in_child(child_writes);
}

static void new_files_synced(int count)
{
    for (int number = 0; number < count; number++) {
        char name[32];
        snprintf(name, sizeof name, "new %d", number);
        int fd = open_file(name, 0);
        MUST(write(fd, "new", 3));
        MUST(fsync(fd));
        close(fd);
    }
}

/* A process that leaves its first syncs by a jump, then works on, and has a child that does. */
static void jumps_early(long after_us)
{
    static char page[4096];
    handler_fd = open_file("early", 0);
    signal(SIGALRM, jump_out);
    if (!sigsetjmp(back, 1)) {
        struct itimerval once = {{0, 0}, {0, after_us}};
        setitimer(ITIMER_REAL, &once, NULL);
        for (;;) {
            MUST(pwrite(handler_fd, page, sizeof page, 0));
            MUST(fdatasync(handler_fd));
        }
    }
    /* What waits for a lock that is not given back is killed. */
    signal(SIGALRM, SIG_DFL);
    alarm(30);
    MUST(pwrite(handler_fd, page, sizeof page, 0));
    MUST(fsync(handler_fd));
    MUST(fsync(handler_fd));
    int status;
    pid_t pid = MUST(fork());
    if (pid == 0) {
        alarm(30);
        MUST(pwrite(handler_fd, page, sizeof page, 0));
        MUST(fsync(handler_fd));
        new_files_synced(40);
        _exit(0);
    }
    MUST(waitpid(pid, &status, 0));
    _exit(status != 0);
}

/* What is made once, at a process's first sync, may be left half made by a jump. */
static void jumps_out_of_first_syncs(void)
{
    for (int round = 0; round < 120; round++) {
        int status;
        pid_t pid = MUST(fork());
        if (pid == 0)
            jumps_early(20 + round * 5);
        MUST(waitpid(pid, &status, 0));
        if (status != 0) {
            say("round %d: status %d", round, status);
            return;
        }
    }
    TELL(unlink("early"));
}

static void *write_until_cancelled(void *unused)
{
    (void)unused;
    int fd = open_file("file", 0);
    for (;;) {
        MUST(pwrite(fd, "0123456789", 10, 0));
        fsync(fd);
    }
    return NULL;
}

static void cancellation(void)
{
    for (int round = 0; round < 50; round++) {
        pthread_t thread;
        void *result;
        MUST(-pthread_create(&thread, NULL, write_until_cancelled, NULL));
        usleep(round * 20);
        MUST(-pthread_cancel(thread));
        MUST(-pthread_join(thread, &result));
        MUST(result == PTHREAD_CANCELED ? 0 : -1);
        int fd = open_file("file", 0);
        MUST(pwrite(fd, "main", 4, 10));
        MUST(fsync(fd));
        close(fd);
    }
    show("file");
}

/* Writes until it is killed; closes `done` once the first write is complete. */
static void killed_writer(int done)
{
    static char bytes[1 << 20];
    fill(bytes, sizeof bytes, 5);
    for (;;) {
        MUST(pwrite(shared_fd, bytes, sizeof bytes, 0));
        MUST(fdatasync(shared_fd));
        close(done);
        done = -1;
    }
}

/* A process killed inside a write must not keep the others from the file. */
static void killed_in_a_write(void)
{
    shared_fd = open_file("file", 0);
    for (int round = 0; round < 20; round++) {
        int done[2];
        MUST(pipe(done));
        pid_t pid = MUST(fork());
        if (pid == 0) {
            close(done[0]);
            killed_writer(done[1]);
        }
        close(done[1]);
        /* The content is the same in every run only where one write was complete. */
        char none;
        if (round == 0)
            MUST(read(done[0], &none, 1));
        close(done[0]);
        usleep(2000 + round * 200);
        MUST(kill(pid, SIGKILL));
        MUST(waitpid(pid, NULL, 0));
        MUST(pwrite(shared_fd, "alive", 5, 1 << 20));
        MUST(fsync(shared_fd));
    }
    char end[6] = "";
    TELL(pread(shared_fd, end, 5, 1 << 20));
    say("%s", end);
}

static void send_descriptor(int socket, int fd)
{
    char byte = '!', control[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec part = {&byte, 1};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    *header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof fd)};
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    MUST(sendmsg(socket, &message, 0));
}

static int receive_descriptor(int socket)
{
    char byte, control[CMSG_SPACE(sizeof(int))];
    struct iovec part = {&byte, 1};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    int fd;
    MUST(recvmsg(socket, &message, 0));
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
    return fd;
}

static void passed_descriptors(void)
{
    int sockets[2];
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets));
    pid_t pid = MUST(fork());
    if (pid == 0) {
        for (int round = 0; round < 3; round++) {
            int fd = receive_descriptor(sockets[1]);
            MUST(write(fd, "receiver ", 9));
            MUST(fsync(fd));
            close(fd);
            MUST(write(sockets[1], "k", 1));
        }
        _exit(0);
    }
    int fd = open_file("file", 0);
    for (int round = 0; round < 3; round++) {
        TELL(write(fd, "sender ", 7));
        send_descriptor(sockets[0], fd);
        char answer;
        MUST(read(sockets[0], &answer, 1));
        TELL(lseek(fd, 0, SEEK_CUR));
        TELL(fdatasync(fd));
    }
    MUST(waitpid(pid, NULL, 0));
    show("file");
}

static void proc_self_fd(void)
{
    char path[64];
    int fd = open_file("file", 0);
    TELL(write(fd, "0123456789", 10));
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int again = MUST(open(path, O_WRONLY));
    TELL(write(again, "abc", 3));
    TELL(fsync(again));
    snprintf(path, sizeof path, "/dev/fd/%d", fd);
    int append = MUST(open(path, O_WRONLY | O_APPEND));
    TELL(write(append, "end", 3));
    MUST(unlink("file"));
    again = MUST(open(path, O_RDWR));
    TELL(write(again, "ABCDE", 5));
    char bytes[32] = "";
    TELL(pread(fd, bytes, 31, 0));
    say("%s", bytes);
    TELL(close(MUST(open(path, O_RDWR | O_TRUNC))));
    TELL(lseek(fd, 0, SEEK_END));
}

static void ten_thousand_files(void)
{
    struct rlimit limit = {10100, 10100};
    if (TELL(setrlimit(RLIMIT_NOFILE, &limit)))
        return;
    MUST(mkdir("many", 0755));
    MUST(chdir("many"));
    static int fds[10000];
    for (int number = 0; number < 10000; number++) {
        char name[16];
        snprintf(name, sizeof name, "%d", number);
        fds[number] = open_file(name, 0);
        MUST(write(fds[number], name, strlen(name)));
    }
    for (int number = 0; number < 10000; number++) {
        MUST(write(fds[number], " again", 6));
        if (number % 50 == 0)
            MUST(fsync(fds[number]));
    }
    show("0");
    show("5000");
    show("9999");
    /* To compare the rest by a few files only. */
    for (int number = 0; number < 10000; number++) {
        char name[16];
        struct stat status;
        snprintf(name, sizeof name, "%d", number);
        MUST(stat(name, &status));
        MUST(status.st_size == (off_t)strlen(name) + 6 ? 0 : -1);
        if (number % 1000)
            MUST(unlink(name));
    }
}

static void file_size_limit(void)
{
    char bytes[100] = "";
    struct rlimit limit = {1000, 1000};
    int fd = open_file("file", 0);
    signal(SIGXFSZ, SIG_IGN);
    MUST(setrlimit(RLIMIT_FSIZE, &limit));
    TELL(pwrite(fd, bytes, 100, 850));
    TELL(pwrite(fd, bytes, 100, 950));
    TELL(pwrite(fd, bytes, 100, 1000));
    TELL(lseek(fd, 0, SEEK_END));
    TELL(ftruncate(fd, 1001));
    TELL(fallocate(fd, 0, 0, 2000));
    TELL(ftruncate(fd, 500));
    TELL(lseek(fd, 980, SEEK_SET));
    TELL(write(fd, bytes, 100));
    TELL(write(fd, bytes, 100));
    TELL(lseek(fd, 0, SEEK_CUR));
    TELL(fsync(fd));
    show("file");
}

static void dies_of_its_limit(void)
{
    struct rlimit limit = {100, 100};
    int fd = open_file("limited", 0);
    MUST(setrlimit(RLIMIT_FSIZE, &limit));
    TELL(write(fd, "start", 5));
    TELL(pwrite(fd, "x", 1, 100));
}

static void grows_past_its_limit(void)
{
    struct rlimit limit = {100, 100};
    int fd = open_file("limited", 0);
    MUST(setrlimit(RLIMIT_FSIZE, &limit));
    TELL(ftruncate(fd, 200));
}

static void enters_strict_mode(void)
{
    int fd = open_file("strict", 0), appended = open_file("appended", O_APPEND);
    MUST(write(fd, "before ", 7));
    MUST(prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT));
    bool wrote = write(fd, "inside ", 7) == 7 && write(appended, "inside", 6) == 6 && write(fd, "again", 5) == 5;
    write(1, wrote ? "wrote\n" : "failed\n", wrote ? 6 : 7);
    syscall(SYS_exit, 5);
}

/* How processes end: by signals, limits, in a sandbox that allows read and write only. */
static void ends_of_processes(void)
{
    in_child(dies_of_its_limit);
    show("limited");
    in_child(grows_past_its_limit);
    show("limited");
    in_child(enters_strict_mode);
    show("strict");
    show("appended");
    shared_fd = open_file("aborted", 0);
    pid_t pid = MUST(fork());
    if (pid == 0) {
        signal(SIGABRT, SIG_DFL);
        MUST(write(shared_fd, "last words", 10));
        struct rlimit no_core = {0, 0};
        setrlimit(RLIMIT_CORE, &no_core);
        abort();
    }
    int status;
    MUST(waitpid(pid, &status, 0));
    TELL(WTERMSIG(status));
    show("aborted");
}

int child_role(int count, char **arguments)
{
    if (count == 3 && !strcmp(arguments[0], "write")) {
        int fd = atoi(arguments[1]);
        ssize_t length = strlen(arguments[2]);
        return write(fd, arguments[2], length) == length && fsync(fd) == 0 ? 0 : 1;
    }
    if (count == 2 && !strcmp(arguments[0], "locked")) {
        keep_locks(atoi(arguments[1]));
        return 0;
    }
    return 2;
}

const struct section process_sections[] = {
    {"fork_both_write", fork_both_write},
    {"fork_concurrent_appends", fork_concurrent_appends},
    {"other_forks", other_forks},
    {"exec_keeps_descriptors", exec_keeps_descriptors},
    {"locks_over_exec", locks_over_exec},
    {"vfork_exec", vfork_exec},
    {"spawned_programs", spawned_programs},
    {"signals_in_writes", signals_in_writes},
    {"jumps_out_of_writes", jumps_out_of_writes},
    {"jumps_out_of_first_syncs", jumps_out_of_first_syncs},
    {"cancellation", cancellation},
    {"killed_in_a_write", killed_in_a_write},
    {"passed_descriptors", passed_descriptors},
    {"proc_self_fd", proc_self_fd},
    {"ten_thousand_files", ten_thousand_files},
    {"file_size_limit", file_size_limit},
    {"ends_of_processes", ends_of_processes},
    {NULL, NULL},
};
