/* Writes that the kernel or a mapping makes: not by write(). */
#include "posix.h"
#include <aio.h>
#include <linux/aio_abi.h>
#include <sys/sendfile.h>

static void shared_mapping(void)
{
    int fd = open_file("file", 0);
    MUST(ftruncate(fd, 16384));
    char *map = mmap(NULL, 16384, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), bytes[32] = "";
    TELL(map != MAP_FAILED);
    memcpy(map + 100, "stored", 6);
    TELL(pread(fd, bytes, 6, 100));
    say("%s", bytes);
    TELL(pwrite(fd, "written", 7, 200));
    say("%.7s", map + 200);
    TELL(fsync(fd));
    memcpy(map + 8192, "after fsync", 11);
    TELL(msync(map, 16384, MS_SYNC));
    TELL(write(fd, "through the descriptor", 22));
    say("%.22s", map);
    MUST(close(fd)); /* the mapping stays */
    memcpy(map + 300, "without a descriptor", 20);
    fd = open_file("file", 0);
    TELL(pread(fd, bytes, 20, 300));
    say("%s", bytes);
    map = mremap(map, 16384, 8192, MREMAP_MAYMOVE);
    memcpy(map + 400, "remapped", 8);
    TELL(pwrite(fd, "REM", 3, 400));
    TELL(munmap(map, 8192));
    TELL(write(fd, "afterwards", 10));
    TELL(fdatasync(fd));
    show("file");
}

static void mapping_made_writable(void)
{
    int fd = open_file("file", 0);
    TELL(write(fd, "0123456789", 10));
    char *map = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0), bytes[16] = "";
    TELL(pwrite(fd, "ab", 2, 0));
    say("%.10s", map);
    TELL(mprotect(map, 4096, PROT_READ | PROT_WRITE));
    memcpy(map + 4, "cd", 2);
    TELL(pread(fd, bytes, 10, 0));
    say("%s", bytes);
    char *private = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    memcpy(private, "private", 7);
    TELL(pwrite(fd, "ZZ", 2, 8));
    TELL(fsync(fd));
    show("file");
}

static void copies_by_the_kernel(void)
{
    char bytes[20000];
    fill(bytes, sizeof bytes, 2);
    int from = open_file("from", 0), to = open_file("to", 0), pipes[2];
    TELL(write(from, bytes, sizeof bytes));
    off_t offset = 100;
    TELL(sendfile(to, from, &offset, 5000));
    TELL(lseek(to, 0, SEEK_CUR));
    TELL(write(to, "between", 7));
    loff_t in = 0, out = 9000;
    TELL(copy_file_range(from, &in, to, &out, 10000, 0));
    TELL(pwrite(to, "over", 4, 9100));
    TELL(fsync(to));
    show("to");
    MUST(pipe(pipes));
    TELL(write(pipes[1], "through a pipe", 14));
    out = 50;
    TELL(splice(pipes[0], NULL, to, &out, 14, 0));
    in = 0;
    TELL(splice(from, &in, pipes[1], NULL, 4096, 0));
    TELL(splice(pipes[0], NULL, to, NULL, 4096, 0));
    struct iovec part = {"from memory", 11};
    TELL(vmsplice(pipes[1], &part, 1, 0));
    TELL(splice(pipes[0], NULL, to, NULL, 11, 0));
    TELL(write(to, "end", 3));
    TELL(fdatasync(to));
    show("to");
    int appended = open_file("to", O_APPEND);
    TELL(copy_file_range(from, &in, appended, NULL, 10, 0));
    TELL(sendfile(appended, from, &offset, 10));
    show("to");
}

static void posix_aio_reads(void)
{
    int fd = open_file("file", 0);
    char bytes[9] = "";
    for (int round = 0; round < 10; round++)
        MUST(pwrite(fd, "old word", 8, 0));
    MUST(pwrite(fd, "new", 3, 0));
    struct aiocb one = {.aio_fildes = fd, .aio_buf = bytes, .aio_nbytes = 8};
    TELL(aio_read(&one));
    while (aio_error(&one) == EINPROGRESS)
        usleep(100);
    TELL(aio_return(&one));
    say("%s", bytes);
    TELL(pwrite(fd, "NEW", 3, 0));
    show("file");
}

static void posix_aio(void)
{
    char bytes[8192];
    fill(bytes, sizeof bytes, 7);
    int fd = open_file("file", 0);
    TELL(write(fd, "start", 5));
    struct aiocb one = {.aio_fildes = fd, .aio_buf = bytes, .aio_nbytes = 8192, .aio_offset = 100}, two = one,
                 *list[] = {&two};
    TELL(aio_write(&one));
    while (aio_error(&one) == EINPROGRESS)
        usleep(100);
    TELL(aio_return(&one));
    two.aio_lio_opcode = LIO_WRITE;
    two.aio_offset = 5000;
    TELL(lio_listio(LIO_WAIT, list, 1, NULL));
    TELL(aio_return(&two));
    TELL(pwrite(fd, "over", 4, 5100));
    TELL(aio_fsync(O_DSYNC, &one));
    while (aio_error(&one) == EINPROGRESS)
        usleep(100);
    TELL(aio_return(&one));
    show("file");
}

static void kernel_aio(void)
{
    char bytes[4096];
    fill(bytes, sizeof bytes, 8);
    int fd = open_file("file", 0);
    aio_context_t context = 0;
    TELL(syscall(SYS_io_setup, 4, &context));
    TELL(write(fd, "start", 5));
    struct iocb request = {.aio_fildes = fd, .aio_lio_opcode = IOCB_CMD_PWRITE, .aio_buf = (uintptr_t)bytes,
                           .aio_nbytes = 4096, .aio_offset = 1000}, *requests[] = {&request};
    struct io_event event;
    TELL(syscall(SYS_io_submit, context, 1, requests));
    TELL(syscall(SYS_io_getevents, context, 1, 1, &event, NULL));
    TELL(event.res);
    TELL(pwrite(fd, "over", 4, 1100));
    TELL(fsync(fd));
    TELL(syscall(SYS_io_destroy, context));
    show("file");
}

static void raw_system_calls(void)
{
    int fd = syscall(SYS_openat, AT_FDCWD, "file", O_CREAT | O_RDWR, 0600);
    TELL(syscall(SYS_write, fd, "by syscall ", 11));
    TELL(write(fd, "by write ", 9));
    TELL(syscall(SYS_pwrite64, fd, "BY", 2, 0L));
    TELL(pwrite(fd, "Call", 4, 6));
    TELL(syscall(SYS_fsync, fd));
    TELL(syscall(SYS_ftruncate, fd, 15));
    TELL(write(fd, "end", 3));
    TELL(syscall(SYS_renameat2, AT_FDCWD, "file", AT_FDCWD, "renamed", 0));
    TELL(fsync(fd));
    TELL(syscall(SYS_close, fd));
    show("renamed");
}

/* Calls that change attributes and names, and one that starts a program. */
static void more_raw_system_calls(void)
{
    struct timespec times[2] = {{1000000000, 0}, {1000000000, 0}};
    struct stat status;
    int fd = open_file("file", 0);
    for (int round = 0; round < 10; round++)
        MUST(write(fd, "0123456789", 10));
    TELL(syscall(SYS_utimensat, AT_FDCWD, "file", times, 0));
    MUST(fstat(fd, &status));
    say("%lld", (long long)status.st_mtime);
    MUST(pwrite(fd, "more", 4, 0));
    TELL(syscall(SYS_utimensat, fd, NULL, times, 0));
    TELL(syscall(SYS_fchmod, fd, 0640));
    TELL(syscall(SYS_fchmodat, AT_FDCWD, "file", 0600));
    TELL(syscall(SYS_fchown, fd, -1, -1));
    TELL(syscall(SYS_fchownat, AT_FDCWD, "file", -1, -1, 0));
    TELL(syscall(SYS_fremovexattr, fd, "user.absent"));
    MUST(fsync(fd));
    MUST(stat("file", &status));
    say("%lld %o", (long long)status.st_mtime, status.st_mode & 07777);
    TELL(syscall(SYS_mknodat, AT_FDCWD, "fifo", S_IFIFO | 0600, 0L));
    void *map = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
    TELL(syscall(SYS_pkey_mprotect, map, 4096L, PROT_READ | PROT_WRITE, -1L));
    memcpy(map, "mapped", 6);
    TELL(fsync(fd));
    show("file");
    MUST(dup2(fd, 40));
    pid_t pid = MUST(fork());
    if (pid == 0) {
        char *arguments[] = {(char *)self, "--child", "write", "40", "executed", NULL}, *nothing[] = {NULL};
        syscall(SYS_execve, self, arguments, nothing);
        _exit(97);
    }
    int status_of_child;
    MUST(waitpid(pid, &status_of_child, 0));
    TELL(WEXITSTATUS(status_of_child));
    show("file");
}

static void direct(void)
{
    char *pages = NULL, bytes[16] = "";
    MUST(-posix_memalign((void **)&pages, 4096, 16384));
    memset(pages, 0, 16384);
    fill(pages, 16384, 4);
    int fd = open("file", O_CREAT | O_RDWR | O_DIRECT, 0600), buffered = open_file("file", 0);
    if (fd < 0) {
        say("no O_DIRECT here");
        return;
    }
    TELL(write(buffered, "buffered", 8));
    TELL(pwrite(fd, pages, 8192, 4096));
    TELL(pread(buffered, bytes, 15, 4096));
    say("%s", bytes);
    TELL(pwrite(buffered, "over", 4, 5000));
    TELL(pread(fd, pages, 4096, 4096));
    say("%.8s", pages + 904);
    TELL(pwrite(fd, pages + 1, 100, 1));
    TELL(fsync(buffered));
    TELL(fcntl(buffered, F_SETFL, O_DIRECT));
    TELL(pwrite(buffered, pages, 4096, 12288));
    TELL(fcntl(buffered, F_SETFL, 0));
    TELL(pwrite(buffered, "end", 3, 16000));
    TELL(fdatasync(fd));
    show("file");
}

static void other_descriptors(void)
{
    int pipes[2], sockets[2], memory = memfd_create("memory", 0), null = MUST(open("/dev/null", O_WRONLY));
    char bytes[16] = "";
    MUST(pipe2(pipes, O_NONBLOCK));
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets));
    TELL(write(pipes[1], "pipe", 4));
    TELL(read(pipes[0], bytes, 15));
    TELL(read(pipes[0], bytes, 15));
    TELL(pwrite(pipes[1], "x", 1, 0));
    TELL(write(sockets[0], "socket", 6));
    TELL(read(sockets[1], bytes, 15));
    say("%s", bytes);
    TELL(write(memory, "memory", 6));
    TELL(fsync(memory));
    TELL(pread(memory, bytes, 15, 0));
    TELL(ftruncate(memory, 3));
    TELL(write(null, "anything", 8));
    TELL(fsync(null));
    TELL(fsync(pipes[0]));
    TELL(fdatasync(sockets[0]));
    int full = MUST(open("/dev/full", O_WRONLY));
    TELL(write(full, "x", 1));
    signal(SIGPIPE, SIG_IGN);
    MUST(close(pipes[0]));
    TELL(write(pipes[1], "x", 1));
    TELL(write(0, "standard input is for reading", 29));
    MUST(mkfifo("fifo", 0600));
    int fifo = MUST(open("fifo", O_RDWR));
    TELL(write(fifo, "fifo", 4));
    TELL(read(fifo, bytes, 15));
    TELL(fsync(fifo));
}

const struct section kernel_sections[] = {
    {"shared_mapping", shared_mapping},
    {"mapping_made_writable", mapping_made_writable},
    {"copies_by_the_kernel", copies_by_the_kernel},
    {"posix_aio", posix_aio},
    {"posix_aio_reads", posix_aio_reads},
    {"kernel_aio", kernel_aio},
    {"raw_system_calls", raw_system_calls},
    {"more_raw_system_calls", more_raw_system_calls},
    {"direct", direct},
    {"other_descriptors", other_descriptors},
    {NULL, NULL},
};
