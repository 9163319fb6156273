/*
 * Tidegate for programs in C: pools of atomic, durable blocks. Link with -ltidegate.
 *
 * A function that fails returns -1 or a null pointer, and sets errno and the message that
 * tidegate_errormsg returns. Any number of threads may use an open pool at once. tidegate(3) is the
 * manual.
 *
 * cbindgen makes this file from src/tidegate.rs; a test compares them.
 */

#ifndef TIDEGATE_H
#define TIDEGATE_H

#include <stddef.h>
#include <stdint.h>

/**
 * Of `tidegate_open`: nothing is written to the pool.
 */
#define TIDEGATE_READ_ONLY 1

/**
 * Of `tidegate_check`: restores all that the pool itself proves.
 */
#define TIDEGATE_REPAIR 2

/**
 * An open pool.
 */
typedef struct tidegate_pool tidegate_pool;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Makes a pool of `pool_bytes` bytes in a new file at `path`, which the owner alone may read. The
 * `engine` is "btt", "raw", "log" or "cache". The `options` are those of `tidegate create`, such
 * as "block-size=512", separated by commas, or null. Returns 0 or -1.
 *
 * # Safety
 * `path`, `engine` and `options` are null or C strings.
 */
int tidegate_create(const char *path,
                    const char *engine,
                    uint64_t pool_bytes,
                    const char *options);

/**
 * Opens the pool in the file or devdax device at `path`, and completes writes that a crash cut
 * off. `backing` is the file, disk or URL behind a log or cache pool, `dram` a tier before the
 * pool, such as "transit:64M"; both may be null. `flags` is 0 or `TIDEGATE_READ_ONLY`. Returns the
 * pool, or null.
 *
 * # Safety
 * `path`, `backing` and `dram` are null or C strings.
 */
tidegate_pool *tidegate_open(const char *path,
                             const char *backing,
                             const char *dram,
                             unsigned int flags);

/**
 * Writes all that a DRAM tier holds to the pool, and closes the pool, which may be null. A pool
 * that fails to close is closed all the same: flush it first. Returns 0 or -1.
 *
 * # Safety
 * `pool` is null or a handle that nothing uses any more.
 */
int tidegate_close(tidegate_pool *pool);

/**
 * Returns the size of a block in bytes, or 0 for a null pointer. Offsets and lengths of all
 * functions are multiples.
 *
 * # Safety
 * `pool` is null or an open pool.
 */
uint32_t tidegate_block_bytes(const tidegate_pool *pool);

/**
 * Returns the number of blocks, or 0 for a null pointer.
 *
 * # Safety
 * `pool` is null or an open pool.
 */
uint64_t tidegate_blocks(const tidegate_pool *pool);

/**
 * Reads `len` bytes at `offset` to `buffer`. Each block is as one write left it. Returns 0 or -1.
 *
 * # Safety
 * `pool` is null or an open pool; `buffer` is null or has `len` bytes.
 */
int tidegate_read(tidegate_pool *pool,
                  void *buffer,
                  uint64_t offset,
                  uintptr_t len);

/**
 * Writes `len` bytes at `offset` from `buffer`. After a crash, each block of a btt, log or cache
 * pool is all old or all new. The write is durable on return, with a DRAM tier after the next
 * `tidegate_flush`. Returns 0 or -1.
 *
 * # Safety
 * `pool` is null or an open pool; `buffer` is null or has `len` bytes.
 */
int tidegate_write(tidegate_pool *pool,
                   const void *buffer,
                   uint64_t offset,
                   uintptr_t len);

/**
 * Makes `len` bytes at `offset` read as zeroes. Returns 0 or -1.
 *
 * # Safety
 * `pool` is null or an open pool.
 */
int tidegate_zero(tidegate_pool *pool, uint64_t offset, uint64_t len);

/**
 * Lets reads of the block at `offset` fail with `EIO` until it is written. Only a btt pool without
 * a DRAM tier can do so. Returns 0 or -1.
 *
 * # Safety
 * `pool` is null or an open pool.
 */
int tidegate_set_error(tidegate_pool *pool,
                       uint64_t offset);

/**
 * Makes all writes that have returned durable. Returns 0 or -1.
 *
 * # Safety
 * `pool` is null or an open pool.
 */
int tidegate_flush(tidegate_pool *pool);

/**
 * Looks for damage in the pool in the file at `path`, which no process may have open. `flags` is 0
 * or `TIDEGATE_REPAIR`. Returns the number of faults that remain, or -1.
 *
 * # Safety
 * `path` is null or a C string.
 */
int64_t tidegate_check(const char *path,
                       unsigned int flags);

/**
 * Returns the message of the calling thread's last error, or an empty text. It is valid until the
 * thread's next error.
 */
const char *tidegate_errormsg(void);

/**
 * Returns the version of this library, such as "0.1.0".
 */
const char *tidegate_version(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* TIDEGATE_H */
