/* What every C file of the extension sees: the shared declarations and a few plain helpers. */
#ifndef KVS_URING_H
#define KVS_URING_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "uring.cdef.h"

#ifdef NDEBUG
#error "asserts are policy: build with -UNDEBUG"
#endif

#define KVS_NEVER UINT64_MAX

static inline struct timespec kvs_timespec(uint64_t ns) {
    return (struct timespec){.tv_sec = (time_t)(ns / 1000000000u),
                             .tv_nsec = (long)(ns % 1000000000u)};
}

/* Completion: append under a caller's lock, wake after it. `kvs_cq_append` returns true if the
   caller must call `kvs_cq_wake`; order of appends is order of delivery. */
bool kvs_cq_append(kvs_cq *cq, uint64_t token, int32_t status, uint32_t flags, uint64_t value);
void kvs_cq_wake(kvs_cq *cq);

uint32_t kvs_gates_words(const kvs_gates *gates);

#if defined(__x86_64__)
uint64_t kvs_xxh3_64_avx2(const void *data, uint64_t length);
uint64_t kvs_xxh3_64_avx512(const void *data, uint64_t length);
#endif

#endif
