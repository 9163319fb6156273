/* A project's quota: what makes one, and a program that meets it.
 *
 * quota limit DEVICE DIRECTORY PROJECT   makes the directory the project's, which may have so many
 *                                        blocks of 4096 bytes, and a file in it
 * quota bounded COMMAND...               runs a command that may not pass over limits
 * quota write DIRECTORY                  writes that file block by block, each synced, until that
 *                                        fails; then over its first block; then, cut to nothing,
 *                                        one block more. Prints what each did. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/fs.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/quota.h>
#include <unistd.h>

#ifndef PRJQUOTA
#define PRJQUOTA 2
#endif

enum { BLOCK_BYTES = 4096, BLOCKS_MAX = 20, KIB = 1024 };

static int failed(const char *what)
{
    printf("%s: %s\n", what, strerror(errno));
    return 1;
}

static int limit(const char *device, const char *directory, unsigned project)
{
    int opened = open(directory, O_RDONLY);
    struct fsxattr attributes;
    if (opened < 0 || ioctl(opened, FS_IOC_FSGETXATTR, &attributes) != 0)
        return failed(directory);
    attributes.fsx_projid = project;
    attributes.fsx_xflags |= FS_XFLAG_PROJINHERIT;
    if (ioctl(opened, FS_IOC_FSSETXATTR, &attributes) != 0)
        return failed("FSSETXATTR");
    struct dqblk quota = { .dqb_bhardlimit = BLOCKS_MAX * BLOCK_BYTES / KIB, .dqb_valid = QIF_BLIMITS };
    if (quotactl(QCMD(Q_SETQUOTA, PRJQUOTA), device, project, (caddr_t)&quota) != 0)
        return failed("Q_SETQUOTA");
    return openat(opened, "file", O_WRONLY | O_CREAT | O_EXCL, 0644) < 0 ? failed("file") : 0;
}

/* A superuser with this capability has no limits. On one CPU, since ext4 has space for small
 * files by CPU: the file of a program that moves is in pieces, whose map takes a block of the
 * limit. */
static int run_bounded(char **command)
{
    cpu_set_t first;
    CPU_ZERO(&first);
    CPU_SET(0, &first);
    if (sched_setaffinity(0, sizeof first, &first) != 0)
        return failed("sched_setaffinity");
    if (prctl(PR_CAPBSET_DROP, CAP_SYS_RESOURCE, 0, 0, 0) == 0)
        execvp(command[0], command);
    return failed(command[0]);
}

static int write_block(int file, int number)
{
    static char block[BLOCK_BYTES];
    memset(block, 'a' + number % 26, sizeof block);
    ssize_t done = pwrite(file, block, sizeof block, (off_t)number * BLOCK_BYTES);
    return done == BLOCK_BYTES && fsync(file) == 0;
}

static int write_until_full(const char *directory)
{
    int file = chdir(directory) == 0 ? open("file", O_RDWR) : -1, blocks = 0;
    if (file < 0)
        return failed(directory);
    while (blocks < 2 * BLOCKS_MAX && write_block(file, blocks))
        blocks++;
    printf("%d blocks, then %s\n", blocks, strerror(errno));
    printf("over the first: %s\n", write_block(file, 0) ? "ok" : strerror(errno));
    int is_cut = ftruncate(file, 0) == 0 && write_block(file, 0);
    printf("cut: %s, %lld bytes\n", is_cut ? "ok" : strerror(errno), (long long)lseek(file, 0, SEEK_END));
    return 0;
}

int main(int count, char **words)
{
    if (count == 5 && strcmp(words[1], "limit") == 0)
        return limit(words[2], words[3], atoi(words[4]));
    if (count > 2 && strcmp(words[1], "bounded") == 0)
        return run_bounded(words + 2);
    return count == 3 ? write_until_full(words[2]) : 2;
}
