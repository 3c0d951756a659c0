/* The completion queue: any native thread posts, one event loop reaps.

   A mutex guards a ring that doubles when it is full, so a record is never lost. Posters make one
   system call per sleep of the loop: `armed` is set by the first record and cleared by the reap
   that empties the ring, both under the mutex, so no wake-up can be lost between them. The
   descriptor is closed with the last reference, never earlier: a poster may be about to write. */
#include "uring.h"

#include <stdio.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct kvs_cq {
    pthread_mutex_t lock;
    kvs_record *records;
    uint32_t capacity, head, count;
    int fd;
    bool armed, closed;
    uint64_t wakeups;
    atomic_uint references;
};

kvs_cq *kvs_cq_new(uint32_t capacity) {
    assert(capacity > 0);
    kvs_cq *cq = calloc(1, sizeof *cq);
    if (!cq) return NULL;
    cq->capacity = capacity;
    cq->records = malloc(capacity * sizeof *cq->records);
    cq->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (!cq->records || cq->fd < 0) {
        int error = cq->records ? errno : ENOMEM;
        free(cq->records);
        if (cq->fd >= 0) close(cq->fd);
        free(cq);
        errno = error;
        return NULL;
    }
    pthread_mutex_init(&cq->lock, NULL);
    atomic_init(&cq->references, 1);
    return cq;
}

void kvs_cq_retain(kvs_cq *cq) {
    unsigned before = atomic_fetch_add_explicit(&cq->references, 1, memory_order_relaxed);
    assert(before > 0);
    (void)before;
}

void kvs_cq_release(kvs_cq *cq) {
    unsigned before = atomic_fetch_sub_explicit(&cq->references, 1, memory_order_acq_rel);
    assert(before > 0);
    if (before > 1) return;
    close(cq->fd);
    pthread_mutex_destroy(&cq->lock);
    free(cq->records);
    free(cq);
}

static void grow(kvs_cq *cq) {
    uint32_t capacity = cq->capacity * 2;
    kvs_record *records = malloc((size_t)capacity * sizeof *records);
    if (!records) {
        /* A lost completion would hang its waiter for ever; there is nothing better to do. */
        fputs("kvstore: no memory for a completion record\n", stderr);
        abort();
    }
    uint32_t first = cq->capacity - cq->head;
    if (first > cq->count) first = cq->count;
    memcpy(records, cq->records + cq->head, first * sizeof *records);
    memcpy(records + first, cq->records, (cq->count - first) * sizeof *records);
    free(cq->records);
    cq->records = records;
    cq->capacity = capacity;
    cq->head = 0;
}

bool kvs_cq_append(kvs_cq *cq, uint64_t token, int32_t status, uint32_t flags, uint64_t value) {
    bool wake = false;
    pthread_mutex_lock(&cq->lock);
    if (!cq->closed) {
        if (cq->count == cq->capacity) grow(cq);
        cq->records[(cq->head + cq->count) % cq->capacity] =
            (kvs_record){.token = token, .value = value, .status = status, .flags = flags};
        cq->count++;
        wake = !cq->armed;
        cq->armed = true;
        cq->wakeups += wake;
    }
    pthread_mutex_unlock(&cq->lock);
    return wake;
}

void kvs_cq_wake(kvs_cq *cq) {
    uint64_t one = 1;
    ssize_t written;
    do written = write(cq->fd, &one, sizeof one);
    while (written < 0 && errno == EINTR);
    assert(written == sizeof one || errno == EAGAIN);
}

void kvs_cq_post(kvs_cq *cq, uint64_t token, int32_t status, uint32_t flags, uint64_t value) {
    if (kvs_cq_append(cq, token, status, flags, value)) kvs_cq_wake(cq);
}

uint32_t kvs_cq_reap(kvs_cq *cq, kvs_record *records, uint32_t count, kvs_batch *batch) {
    *batch = (kvs_batch){.least_token = UINT64_MAX, .all_good = 1};
    pthread_mutex_lock(&cq->lock);
    uint32_t taken = cq->count < count ? cq->count : count;
    for (uint32_t i = 0; i < taken; i++) {
        const kvs_record *record = &cq->records[cq->head];
        records[i] = *record;
        cq->head = (cq->head + 1) % cq->capacity;
        if (record->token < batch->least_token) batch->least_token = record->token;
        if (record->token > batch->greatest_token) batch->greatest_token = record->token;
        if (record->status != 0 || record->flags != (KVS_FLAG_VERDICT | KVS_FLAG_END))
            batch->all_good = 0;
    }
    cq->count -= taken;
    if (cq->count == 0) {
        uint64_t value;
        ssize_t got;
        do got = read(cq->fd, &value, sizeof value);
        while (got < 0 && errno == EINTR);
        cq->armed = false;
    }
    pthread_mutex_unlock(&cq->lock);
    return taken;
}

void kvs_cq_close(kvs_cq *cq) {
    pthread_mutex_lock(&cq->lock);
    cq->closed = true;
    cq->count = 0;
    pthread_mutex_unlock(&cq->lock);
}

int kvs_cq_fd(const kvs_cq *cq) { return cq->fd; }

uint64_t kvs_cq_wakeups(kvs_cq *cq) {
    pthread_mutex_lock(&cq->lock);
    uint64_t wakeups = cq->wakeups;
    pthread_mutex_unlock(&cq->lock);
    return wakeups;
}
