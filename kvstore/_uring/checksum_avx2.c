/* xxh3-64 with 256-bit registers; `kvs_xxh3_64` calls it where the processor has them. */
#if defined(__x86_64__)
#pragma GCC target("avx2")
#define XXH_VECTOR 2 /* XXH_AVX2 */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "uring.h"

uint64_t kvs_xxh3_64_avx2(const void *data, uint64_t length) { return XXH3_64bits(data, length); }
#else
typedef int kvs_no_avx2;
#endif
