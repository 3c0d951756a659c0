/* xxh3-64 with 512-bit registers; `kvs_xxh3_64` calls it where the processor has them. */
#if defined(__x86_64__)
#pragma GCC target("avx512f")
#define XXH_VECTOR 3 /* XXH_AVX512 */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "uring.h"

uint64_t kvs_xxh3_64_avx512(const void *data, uint64_t length) { return XXH3_64bits(data, length); }
#else
typedef int kvs_no_avx512;
#endif
