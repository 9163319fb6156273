/* Wrong calls: the same errors, and nothing done. */
#include "posix.h"

static void wrong_arguments(void)
{
    int fd = open_file("file", 0), reader = MUST(open("file", O_RDONLY)), path = MUST(open("file", O_PATH));
    TELL(write(fd, "0123456789", 10));
    TELL(write(reader, "x", 1));
    TELL(pwrite(reader, "x", 1, 0));
    TELL(ftruncate(reader, 0));
    TELL(fallocate(reader, 0, 0, 10));
    TELL(write(path, "x", 1));
    TELL(fsync(path));
    TELL(write(-1, "x", 1));
    TELL(write(999, "x", 1));
    TELL(fsync(999));
    TELL(fdatasync(-1));
    TELL(close(999));
    TELL(dup(999));
    TELL(lseek(fd, -1, SEEK_SET));
    TELL(lseek(fd, 0, 99));
    TELL(pwrite(fd, "x", 1, -1));
    TELL(write(fd, "", 0));
    TELL(pwrite(fd, NULL, 0, 100));
    TELL(lseek(fd, 0, SEEK_END));
    TELL(write(fd, NULL, 10));
    TELL(pwrite(fd, (void *)8, 4096, 0));
    struct iovec parts[2] = {{"good", 4}, {(void *)8, 4}};
    TELL(pwritev(fd, parts, 2, 0) >= -1); /* the kernel may take the good part or none */
    TELL(pwritev(fd, (void *)8, 2, 0));
    TELL(fallocate(fd, 0, -1, 10));
    TELL(fallocate(fd, 0x1000, 0, 10));
    TELL(fsync(reader));
    TELL(pwrite(fd, "0123", 4, 0));
    show("file");
}

/* Places that no file system has, of a file that nobody else has open. */
static void places_far_away(void)
{
    int fd = open_file("file", 0);
    TELL(write(fd, "0123456789", 10));
    TELL(pwrite(fd, "a", 1, 3));
    TELL(lseek(fd, INT64_MAX, SEEK_SET));
    TELL(lseek(fd, 1, SEEK_SET));
    TELL(lseek(fd, INT64_MAX, SEEK_CUR));
    TELL(lseek(fd, INT64_MIN, SEEK_END));
    TELL(lseek(fd, 1000, SEEK_SET));
    TELL(write(fd, "behind", 6));
    TELL(pwrite(fd, "x", 1, 1LL << 60));
    TELL(pwrite(fd, "x", 1, INT64_MAX));
    TELL(pwrite(fd, "x", 1, 0));
    TELL(lseek(fd, 0, SEEK_CUR));
    TELL(lseek(fd, -6, SEEK_CUR));
    show("file");
}

static int mapped_fd;

static void empties_the_mapped_file(void)
{
    MUST(ftruncate(mapped_fd, 0));
}

/* Writes from a mapping of a file that was cut meanwhile, by this process or by another one. */
static void truncated_mapping(void)
{
    long page = sysconf(_SC_PAGESIZE);
    int fd = open_file("file", 0);
    mapped_fd = open_file("mapped", 0);
    MUST(ftruncate(mapped_fd, 2 * page));
    MUST(pwrite(mapped_fd, "mapped", 6, page));
    char *pages = mmap(NULL, 2 * page, PROT_READ, MAP_SHARED, mapped_fd, 0);
    MUST(fsync(fd));
    for (int by_other = 0; by_other < 2; by_other++) {
        TELL(pwrite(fd, pages + page, 6, 0));
        TELL(fdatasync(fd));
        show("file");
        by_other ? in_child(empties_the_mapped_file) : empties_the_mapped_file();
        TELL(write(fd, pages + page, 6));
        TELL(pwrite(fd, pages, 6, 0));
        struct iovec part = {pages + page, 6};
        TELL(pwritev(fd, &part, 1, 0));
        TELL(fdatasync(fd));
        show("file");
        MUST(ftruncate(mapped_fd, 2 * page));
        MUST(pwrite(mapped_fd, "again", 6, page));
    }
    TELL(pwrite(fd, pages + page, 6, 0));
    TELL(fdatasync(fd));
    show("file");
}

/* A buffer whose end cannot be read: the kernel writes what it can. */
static void half_readable_buffer(void)
{
    long page = sysconf(_SC_PAGESIZE);
    char *pages = mmap(NULL, 3 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(pages, 'a', 2 * page);
    MUST(munmap(pages + 2 * page, page));
    int fd = open_file("file", 0);
    TELL(write(fd, pages + 2 * page, 10));
    TELL(write(fd, pages + page, page));
    TELL(write(fd, pages + 2 * page - 1, 1));
    ssize_t wrote = pwrite(fd, pages + page, 2 * page, 0);
    TELL(wrote == page || wrote == -1);
    TELL(fsync(fd));
    TELL(lseek(fd, 0, SEEK_END));
    show("file");
    struct iovec parts[2] = {{pages, 10}, {pages + 2 * page, 10}};
    wrote = pwritev(fd, parts, 2, 0);
    TELL(wrote == 10 || wrote == -1);
    TELL(pwritev(fd, (struct iovec *)(pages + 2 * page), 2, 0));
    /* What could be written from before cannot be any more. */
    TELL(mprotect(pages + page, page, PROT_NONE));
    TELL(pwrite(fd, pages + page, page, 0));
    TELL(pwrite(fd, pages, page, 0));
    TELL(mprotect(pages + page, page, PROT_READ));
    TELL(pwrite(fd, pages + page, page, 0));
    MUST(munmap(pages, 2 * page));
    TELL(pwrite(fd, pages + page, page, 0));
    TELL(pwrite(fd, pages, 1, 0));
    TELL(pwrite(fd, "after", 5, 0));
    TELL(fdatasync(fd));
    show("file");
}

/* Names that cannot be read, and one that ends where nothing more can be read. */
static void unreadable_names(void)
{
    long page = sysconf(_SC_PAGESIZE);
    char *pages = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    MUST(munmap(pages + page, page));
    memset(pages, 'x', page);
    char *last = pages + page - 5;
    strcpy(last, "file");
    TELL(close(open_file(last, 0)));
    TELL(rename(last, "other"));
    TELL(rename("other", last));
    char *const bad[] = {(char *)-1, (char *)8, pages + page, pages + page - 3};
    pages[page - 1] = 'x'; /* no longer terminated */
    for (size_t at = 0; at < sizeof bad / sizeof *bad; at++) {
        TELL(open(bad[at], O_RDONLY));
        TELL(open(bad[at], O_RDWR | O_CREAT, 0600));
        TELL(openat(AT_FDCWD, bad[at], O_WRONLY | O_TRUNC));
        TELL(creat(bad[at], 0600));
        TELL(unlink(bad[at]));
        TELL(rmdir(bad[at]));
        TELL(rename("file", bad[at]));
        TELL(rename(bad[at], "file"));
        TELL(link("file", bad[at]));
        TELL(symlink("file", bad[at]));
        TELL(symlink(bad[at], "link"));
        TELL(mkdir(bad[at], 0700));
        TELL(mkfifo(bad[at], 0600));
        TELL(truncate(bad[at], 0));
        TELL(chmod(bad[at], 0600));
        TELL(chown(bad[at], -1, -1));
        TELL(utimensat(AT_FDCWD, bad[at], NULL, 0));
        TELL(execv(bad[at], (char *const[]){"x", NULL}));
        TELL(execve("/bin/true", (char *const[]){"x", NULL}, (char *const[]){bad[at], NULL}));
        TELL(fopen(bad[at], "w") == NULL);
        TELL(sendmsg(-1, (struct msghdr *)bad[at], 0));
    }
    show("file");
}

static void wrong_names(void)
{
    char deep[5000];
    memset(deep, 'x', sizeof deep - 1);
    deep[sizeof deep - 1] = 0;
    MUST(mkdir("directory", 0755));
    MUST(symlink("loop", "loop"));
    open_file("file", 0);
    TELL(open("directory", O_WRONLY));
    TELL(open("directory", O_CREAT | O_RDWR, 0600));
    TELL(open("file/below", O_CREAT | O_RDWR, 0600));
    TELL(open("absent/below", O_CREAT | O_RDWR, 0600));
    TELL(open("loop", O_RDWR));
    TELL(open(deep, O_CREAT | O_RDWR, 0600));
    TELL(open("", O_RDWR));
    TELL(open(NULL, O_RDWR));
    TELL(unlink("absent"));
    TELL(unlink("directory"));
    TELL(unlink(deep));
    TELL(rename("file", deep));
    TELL(rename(deep, "file"));
    TELL(rename("directory", "directory/inside"));
    TELL(link("directory", "hard"));
    TELL(link("absent", "hard"));
    TELL(rename(NULL, "file"));
    TELL(rmdir("file"));
    TELL(truncate("directory", 0));
    TELL(openat(999, "file", O_RDWR));
    TELL(openat(MUST(open("file", O_RDONLY)), "below", O_RDWR));
    TELL(mkdir("file", 0700));
    TELL(open("file/", O_RDWR));
    TELL(rename("file", "file/"));
}

const struct section error_sections[] = {
    {"wrong_arguments", wrong_arguments},
    {"places_far_away", places_far_away},
    {"truncated_mapping", truncated_mapping},
    {"half_readable_buffer", half_readable_buffer},
    {"unreadable_names", unreadable_names},
    {"wrong_names", wrong_names},
    {NULL, NULL},
};
