/* xxh3-64, from the header of the system package libxxhash-dev. */
#include "uring.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

uint64_t kvs_xxh3_64(const void *data, uint64_t length) { return XXH3_64bits(data, length); }

int kvs_abi_version(void) { return KVS_ABI_VERSION; }

uint64_t kvs_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
