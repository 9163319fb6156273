/* Random blocks written with no sync, for a C library that makes each write durable: `io FILE
 * FILE_BYTES BLOCK_BYTES REQUESTS`; prints the times. What `bench io` does, in C since a peer
 * replaces the whole C library. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "times.h"

static uint64_t state = 1;

/* SplitMix64. */
static uint64_t next_random(void)
{
    uint64_t mixed = state += 0x9e3779b97f4a7c15;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
    return mixed ^ (mixed >> 31);
}

int main(int argc, char **argv)
{
    if (argc != 5) {
        fprintf(stderr, "usage: io FILE FILE_BYTES BLOCK_BYTES REQUESTS\n");
        return 2;
    }
    uint64_t block = strtoull(argv[3], NULL, 10), requests = strtoull(argv[4], NULL, 10);
    uint64_t blocks = strtoull(argv[2], NULL, 10) / block, warm_up = requests / 50, before = 0;
    char *buffer = aligned_alloc(4096, block);
    uint64_t *times = calloc(requests, sizeof *times);
    int fd = open(argv[1], O_RDWR);
    if (fd < 0 || buffer == NULL || times == NULL) {
        perror(argv[1]);
        return 1;
    }
    memset(buffer, 0x5a, block);
    for (uint64_t request = 0; request < warm_up + requests; request++) {
        if (request == warm_up)
            before = now_ns();
        memcpy(buffer, &request, sizeof request);
        off_t offset = (off_t)((unsigned __int128)next_random() * blocks >> 64) * block;
        if (pwrite(fd, buffer, block, offset) != (ssize_t)block) {
            perror("pwrite");
            return 1;
        }
        if (request >= warm_up) {
            uint64_t now = now_ns();
            times[request - warm_up] = now - before;
            before = now;
        }
    }
    print_times(times, requests, 1);
    return 0;
}
