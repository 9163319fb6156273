/* Random blocks written with no sync, for a C library that makes each write durable: `io FILE FILE_BYTES BLOCK_BYTES
 * REQUESTS`; prints the times as JSON. What `bench io` does, in C since a peer replaces the whole C library. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static uint64_t state = 1;

/* SplitMix64. */
static uint64_t next_random(void)
{
    uint64_t mixed = state += 0x9e3779b97f4a7c15;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
    return mixed ^ (mixed >> 31);
}

static uint64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static int by_size(const void *one, const void *other)
{
    uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;
    return (a > b) - (a < b);
}

int main(int argc, char **argv)
{
    if (argc != 5) {
        fprintf(stderr, "usage: io FILE FILE_BYTES BLOCK_BYTES REQUESTS\n");
        return 2;
    }
    uint64_t block = strtoull(argv[3], NULL, 10), requests = strtoull(argv[4], NULL, 10);
    uint64_t blocks = strtoull(argv[2], NULL, 10) / block;
    char *buffer = aligned_alloc(4096, block);
    uint64_t *times = calloc(requests, sizeof *times);
    int fd = open(argv[1], O_RDWR);
    if (fd < 0 || buffer == NULL || times == NULL) {
        perror(argv[1]);
        return 1;
    }
    memset(buffer, 0x5a, block);
    uint64_t warm_up = requests / 50, begun = 0, before = 0;
    for (uint64_t request = 0; request < warm_up + requests; request++) {
        if (request == warm_up)
            begun = before = now_ns();
        memcpy(buffer, &request, sizeof request);
        off_t offset = (unsigned __int128)next_random() * blocks >> 64;
        if (pwrite(fd, buffer, block, offset * block) != (ssize_t)block) {
            perror("pwrite");
            return 1;
        }
        if (request >= warm_up) {
            uint64_t now = now_ns();
            times[request - warm_up] = now - before;
            before = now;
        }
    }
    double total_ns = before - begun;
    qsort(times, requests, sizeof *times, by_size);
    printf("{\"ops\": %llu, \"ops_per_s\": %f, \"mean_ns\": %f, \"p50_ns\": %llu, \"p99_ns\": %llu, \"p999_ns\": %llu, "
           "\"p9999_ns\": %llu, \"max_ns\": %llu}\n",
           (unsigned long long)requests, requests * 1e9 / total_ns, total_ns / requests,
           (unsigned long long)times[requests / 2], (unsigned long long)times[requests - 1 - requests / 100],
           (unsigned long long)times[requests - 1 - requests / 1000],
           (unsigned long long)times[requests - 1 - requests / 10000], (unsigned long long)times[requests - 1]);
    return 0;
}
