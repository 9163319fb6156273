/* Renames by io_uring, then syncs the directory: uring FROM TO. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/io_uring.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static int submit(struct io_uring_sqe sqe)
{
    struct io_uring_params setup = {0};
    int ring = syscall(SYS_io_uring_setup, 1, &setup);
    if (ring < 0)
        return -1;
    size_t sq_bytes = setup.sq_off.array + setup.sq_entries * sizeof(unsigned);
    size_t cq_bytes = setup.cq_off.cqes + setup.cq_entries * sizeof(struct io_uring_cqe);
    int access = PROT_READ | PROT_WRITE;
    char *sq = mmap(NULL, sq_bytes, access, MAP_SHARED, ring, IORING_OFF_SQ_RING);
    char *cq = mmap(NULL, cq_bytes, access, MAP_SHARED, ring, IORING_OFF_CQ_RING);
    struct io_uring_sqe *sqes = mmap(NULL, setup.sq_entries * sizeof sqe, access, MAP_SHARED, ring, IORING_OFF_SQES);
    if (sq == MAP_FAILED || cq == MAP_FAILED || sqes == MAP_FAILED)
        return -1;
    sqes[0] = sqe;
    ((unsigned *)(sq + setup.sq_off.array))[0] = 0;
    __atomic_store_n((unsigned *)(sq + setup.sq_off.tail), 1, __ATOMIC_RELEASE);
    if (syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) != 1)
        return -1;
    return ((struct io_uring_cqe *)(cq + setup.cq_off.cqes))[0].res;
}

int main(int count, char **arguments)
{
    if (count != 3)
        return 2;
    struct io_uring_sqe sqe = {.opcode = IORING_OP_RENAMEAT, .fd = AT_FDCWD, .addr = (uintptr_t)arguments[1],
                               .len = (uint32_t)AT_FDCWD, .addr2 = (uintptr_t)arguments[2]};
    int result = submit(sqe), directory = open(".", O_RDONLY);
    if (result != 0)
        fprintf(stderr, "io_uring: %d\n", result);
    return result != 0 || fsync(directory) != 0;
}
