/* Times of requests, and how programs of ours print them. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

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

/* Prints `count` times in nanoseconds, at least one, of threads that are always busy, as JSON. */
static void print_times(uint64_t *times, uint64_t count, unsigned threads)
{
    double total_ns = 0;
    for (uint64_t at = 0; at < count; at++)
        total_ns += times[at];
    qsort(times, count, sizeof *times, by_size);
    printf("{\"ops\": %llu, \"ops_per_s\": %f, \"mean_ns\": %f", (unsigned long long)count, threads * count * 1e9 / total_ns,
           total_ns / count);
    const char *names[] = {"p50_ns", "p99_ns", "p999_ns", "p9999_ns", "max_ns"};
    const uint64_t shares[] = {5000, 9900, 9990, 9999, 10000};
    for (int at = 0; at < 5; at++)
        printf(", \"%s\": %llu", names[at], (unsigned long long)times[(count - 1) * shares[at] / 10000]);
    printf("}\n");
}
