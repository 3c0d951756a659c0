/* The CPU device: ordered streams on native worker threads that stand for hardware queues.
 *
 * A stream is a number; it runs on queue (stream % queue_count), and a queue runs its work in the
 * order it came in, whichever stream it belongs to. So a queue that waits at a gate also holds back
 * the other streams mapped to it, as on a GPU whose streams share hardware queues. A queue has a
 * finite depth; enqueueing into a full one blocks the caller, at most `full_timeout_ns`.
 *
 * Workers take neither the GIL nor any lock that a publisher of gate words holds: a gate is a plain
 * load and a futex wait on the word itself (INV-216). One mutex guards the queues and the waiters
 * of events; it is never held while bytes are moved or a gate is waited for.
 *
 * An error is sticky: from then on every call returns it, waits are broken off, copies are skipped,
 * and every queued notification is delivered with it (INV-917).
 */
#include "uring.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { VERDICT_AND_END = KVS_FLAG_VERDICT | KVS_FLAG_END };
enum op_kind { OP_COPY, OP_WAIT_EVENT, OP_WAIT_WORD, OP_WRITE_WORD, OP_RECORD, OP_NOTIFY, OP_WORK };

struct waiter {
    struct waiter *next;
    kvs_cq *queue;
    uint64_t token;
};

struct kvs_cpu_event {
    uint32_t references;
    int32_t state; /* 0 pending, 1 passed, negative: the device's code */
    struct waiter *waiters;
};

struct op {
    enum op_kind kind;
    union {
        struct {
            kvs_run *runs;
            uint64_t run_count;
            uint64_t page_count;
            char *early; /* the source as it was when enqueued, or NULL */
            int to_device;
        } copy;
        struct {
            uint64_t word;
            uint64_t value;
            uint64_t sleepers; /* address of the word's count of sleepers, or 0 */
            int bits;
        } word;
        kvs_cpu_event *event;
        struct {
            kvs_cq *queue;
            uint64_t token;
        } notify;
        struct {
            uint64_t address;
            uint64_t bytes;
            uint64_t duration_ns;
            int value;
        } work;
    };
};

struct queue {
    kvs_cpu *device;
    pthread_t thread;
    pthread_cond_t not_empty;
    pthread_cond_t not_full;
    struct op *ops;
    uint64_t head; /* the operation that runs or is next; it stays counted until it has ended */
    uint64_t tail;
    uint64_t parked_word; /* address the worker sleeps on, 0 if it does not */
};

struct kvs_cpu {
    kvs_cpu_config config;
    pthread_mutex_t mutex;
    pthread_cond_t changed; /* an event passed, a queue went idle, an error came */
    int error;
    int stopping;
    uint64_t inject_in;
    int inject_code;
    uint64_t random;
    kvs_cpu_counters counters;
    uint32_t started;
    struct queue queues[];
};

static int broken(kvs_cpu *device) {
    return __atomic_load_n(&device->error, __ATOMIC_ACQUIRE) != 0 ||
           __atomic_load_n(&device->stopping, __ATOMIC_ACQUIRE) == 2;
}

uint64_t kvs_pages_expand(const kvs_pages *pages, const int32_t *device_slots,
                          const int32_t *host_slots, uint64_t count, int to_device, kvs_run *runs) {
    assert(pages->slots_per_slab > 0);
    uint64_t used = 0;
    for (uint64_t page = 0; page < count; page++) {
        assert(device_slots[page] >= 0 && host_slots[page] >= 0);
        uint64_t host_slot = (uint64_t)host_slots[page];
        uint64_t host = pages->host_base + host_slot / pages->slots_per_slab * pages->slab_bytes +
                        host_slot % pages->slots_per_slab * pages->slot_bytes +
                        pages->payload_offset;
        for (uint64_t piece = 0; piece < pages->piece_count; piece++) {
            uint64_t bytes = pages->piece_bytes[piece];
            uint64_t device = pages->piece_bases[piece] +
                              (uint64_t)device_slots[page] * pages->piece_strides[piece];
            uint64_t target = to_device ? device : host, source = to_device ? host : device;
            kvs_run *last = used ? &runs[used - 1] : NULL;
            if (last && last->target + last->bytes == target &&
                last->source + last->bytes == source) {
                last->bytes += bytes;
            } else {
                runs[used++] = (kvs_run){target, source, bytes};
            }
            host += bytes;
        }
    }
    return used;
}

/* -- events ------------------------------------------------------------------------------------ */

kvs_cpu_event *kvs_cpu_event_new(void) {
    kvs_cpu_event *event = calloc(1, sizeof *event);
    if (event) {
        event->references = 1;
        event->state = 1; /* never recorded counts as complete */
    }
    return event;
}

int kvs_cpu_event_query(const kvs_cpu_event *event) {
    return __atomic_load_n(&event->state, __ATOMIC_ACQUIRE);
}

static void event_hold(kvs_cpu_event *event) {
    __atomic_add_fetch(&event->references, 1, __ATOMIC_RELAXED);
}

void kvs_cpu_event_free(kvs_cpu_event *event) {
    if (__atomic_sub_fetch(&event->references, 1, __ATOMIC_ACQ_REL) == 0) {
        assert(!event->waiters);
        free(event);
    }
}

static void event_pass(kvs_cpu *device, kvs_cpu_event *event, int error) {
    pthread_mutex_lock(&device->mutex);
    __atomic_store_n(&event->state, error ? -error : 1, __ATOMIC_RELEASE);
    struct waiter *waiters = event->waiters;
    event->waiters = NULL;
    pthread_cond_broadcast(&device->changed);
    pthread_mutex_unlock(&device->mutex);
    while (waiters) {
        struct waiter *next = waiters->next;
        kvs_cq_post(waiters->queue, waiters->token, error ? KVS_DEVICE_STATUS - error : 0,
                    VERDICT_AND_END, 0);
        __atomic_add_fetch(&device->counters.notified, 1, __ATOMIC_RELAXED);
        kvs_cq_release(waiters->queue);
        free(waiters);
        waiters = next;
    }
}

/* -- executing --------------------------------------------------------------------------------- */

static void pause_until(kvs_cpu *device, uint64_t when_ns) {
    struct timespec at = kvs_timespec(when_ns);
    pthread_mutex_lock(&device->mutex);
    while (!broken(device) && kvs_now_ns() < when_ns) {
        pthread_cond_timedwait(&device->changed, &device->mutex, &at);
    }
    pthread_mutex_unlock(&device->mutex);
}

static uint64_t draw(kvs_cpu *device) {
    uint64_t x = __atomic_load_n(&device->random, __ATOMIC_RELAXED);
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    __atomic_store_n(&device->random, x, __ATOMIC_RELAXED);
    return x;
}

static void run_copy(kvs_cpu *device, struct op *op) {
    uint64_t begin = kvs_now_ns(), bytes = 0, count = op->copy.run_count;
    kvs_run *runs = op->copy.runs;
    if (device->config.shuffle_seed) {
        for (uint64_t i = count; i > 1 && !op->copy.early; i--) {
            uint64_t j = draw(device) % i;
            kvs_run swap = runs[i - 1];
            runs[i - 1] = runs[j];
            runs[j] = swap;
        }
    }
    for (uint64_t i = 0; i < count && !broken(device); i++) {
        const char *source =
            op->copy.early ? op->copy.early + bytes : (const char *)(uintptr_t)runs[i].source;
        memcpy((char *)(uintptr_t)runs[i].target, source, runs[i].bytes);
        bytes += runs[i].bytes;
    }
    uint64_t wire_ns = device->config.latency_ns;
    if (device->config.bytes_per_s) {
        wire_ns += (uint64_t)((double)bytes * 1e9 / (double)device->config.bytes_per_s);
    }
    if (wire_ns) {
        pause_until(device, begin + wire_ns);
    }
    kvs_cpu_counters *counters = &device->counters;
    __atomic_add_fetch(&counters->batches, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(op->copy.to_device ? &counters->pages_to_device : &counters->pages_to_host,
                       op->copy.page_count, __ATOMIC_RELAXED);
    __atomic_add_fetch(op->copy.to_device ? &counters->bytes_to_device : &counters->bytes_to_host,
                       bytes, __ATOMIC_RELAXED);
}

static int word_reached(uint64_t address, uint64_t value, int bits) {
    if (bits == 32) {
        uint32_t word = __atomic_load_n((uint32_t *)(uintptr_t)address, __ATOMIC_ACQUIRE);
        return (int32_t)(word - (uint32_t)value) >= 0;
    }
    uint64_t word = __atomic_load_n((uint64_t *)(uintptr_t)address, __ATOMIC_ACQUIRE);
    return (int64_t)(word - value) >= 0; /* cyclic signed, as on the GPU (INV-209) */
}

/* Sleep on the low half of the word until it reaches the value. The publisher wakes the futex after
   its store; `interrupt` wakes it, again and again while parked_word is set, after an error. */
static void wait_word(struct queue *queue, const struct op *op) {
    uint64_t address = op->word.word;
    uint32_t *sleepers = (uint32_t *)(uintptr_t)op->word.sleepers;
    if (sleepers) { /* seq_cst: pairs with the publisher's load after its store of the flag */
        __atomic_add_fetch(sleepers, 1, __ATOMIC_SEQ_CST);
    }
    for (;;) {
        __atomic_store_n(&queue->parked_word, address, __ATOMIC_SEQ_CST);
        uint32_t low = __atomic_load_n((uint32_t *)(uintptr_t)address, __ATOMIC_SEQ_CST);
        if (word_reached(address, op->word.value, op->word.bits) || broken(queue->device)) {
            break;
        }
        syscall(SYS_futex, (void *)(uintptr_t)address, FUTEX_WAIT_PRIVATE, low, NULL, NULL, 0);
    }
    if (sleepers) {
        __atomic_sub_fetch(sleepers, 1, __ATOMIC_SEQ_CST);
    }
    __atomic_store_n(&queue->parked_word, 0, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&queue->device->counters.gates_waited, 1, __ATOMIC_RELAXED);
}

static void interrupt(kvs_cpu *device) {
    pthread_mutex_lock(&device->mutex);
    pthread_cond_broadcast(&device->changed);
    for (uint32_t i = 0; i < device->started; i++) {
        pthread_cond_broadcast(&device->queues[i].not_full);
        pthread_cond_broadcast(&device->queues[i].not_empty);
    }
    pthread_mutex_unlock(&device->mutex);
    for (uint32_t i = 0; i < device->started; i++) {
        uint64_t word;
        while ((word = __atomic_load_n(&device->queues[i].parked_word, __ATOMIC_SEQ_CST)) != 0) {
            syscall(SYS_futex, (void *)(uintptr_t)word, FUTEX_WAKE_PRIVATE, 0x7fffffff, NULL, NULL,
                    0);
            usleep(50);
        }
    }
}

static void wait_event(kvs_cpu *device, kvs_cpu_event *event) {
    pthread_mutex_lock(&device->mutex);
    while (kvs_cpu_event_query(event) == 0 && !broken(device)) {
        pthread_cond_wait(&device->changed, &device->mutex);
    }
    pthread_mutex_unlock(&device->mutex);
}

static int take_injection(kvs_cpu *device) {
    int code = 0;
    pthread_mutex_lock(&device->mutex);
    if (device->inject_in && --device->inject_in == 0) {
        code = device->inject_code;
    }
    pthread_mutex_unlock(&device->mutex);
    return code;
}

static int current_error(kvs_cpu *device) {
    int error = __atomic_load_n(&device->error, __ATOMIC_ACQUIRE);
    if (!error && __atomic_load_n(&device->stopping, __ATOMIC_ACQUIRE) == 2) {
        error = 4; /* as CUDA_ERROR_DEINITIALIZED: closed with work outstanding */
    }
    return error;
}

static void execute(struct queue *queue, struct op *op) {
    kvs_cpu *device = queue->device;
    int code;
    switch (op->kind) {
    case OP_COPY:
        code = take_injection(device);
        if (code) {
            kvs_cpu_fail(device, code);
        }
        if (!broken(device)) {
            run_copy(device, op);
        }
        break;
    case OP_WAIT_EVENT:
        wait_event(device, op->event);
        break;
    case OP_WAIT_WORD:
        wait_word(queue, op);
        break;
    case OP_WRITE_WORD:
        if (!broken(device)) {
            __atomic_store_n((uint64_t *)(uintptr_t)op->word.word, op->word.value,
                             __ATOMIC_RELEASE);
            syscall(SYS_futex, (void *)(uintptr_t)op->word.word, FUTEX_WAKE_PRIVATE, 0x7fffffff,
                    NULL, NULL, 0);
        }
        break;
    case OP_RECORD:
        event_pass(device, op->event, current_error(device));
        break;
    case OP_NOTIFY:
        code = current_error(device);
        kvs_cq_post(op->notify.queue, op->notify.token, code ? KVS_DEVICE_STATUS - code : 0,
                    VERDICT_AND_END, 0);
        __atomic_add_fetch(&device->counters.notified, 1, __ATOMIC_RELAXED);
        break;
    case OP_WORK:
        pause_until(device, kvs_now_ns() + op->work.duration_ns);
        if (!broken(device) && op->work.bytes) {
            memset((char *)(uintptr_t)op->work.address, op->work.value, op->work.bytes);
        }
        break;
    }
}

static void discard(struct op *op) {
    if (op->kind == OP_COPY) {
        free(op->copy.runs);
        free(op->copy.early);
    } else if (op->kind == OP_WAIT_EVENT || op->kind == OP_RECORD) {
        kvs_cpu_event_free(op->event);
    } else if (op->kind == OP_NOTIFY) {
        kvs_cq_release(op->notify.queue);
    }
}

static void *work(void *argument) {
    struct queue *queue = argument;
    kvs_cpu *device = queue->device;
    uint32_t depth = device->config.queue_depth;
    pthread_mutex_lock(&device->mutex);
    for (;;) {
        while (queue->head == queue->tail && !device->stopping) {
            pthread_cond_wait(&queue->not_empty, &device->mutex);
        }
        if (queue->head == queue->tail) {
            break;
        }
        struct op op = queue->ops[queue->head % depth];
        pthread_mutex_unlock(&device->mutex);
        execute(queue, &op);
        discard(&op);
        pthread_mutex_lock(&device->mutex);
        queue->head++;
        pthread_cond_broadcast(&queue->not_full);
        if (queue->head == queue->tail) {
            pthread_cond_broadcast(&device->changed);
        }
    }
    pthread_mutex_unlock(&device->mutex);
    return NULL;
}

/* -- life -------------------------------------------------------------------------------------- */

static void destroy(kvs_cpu *device) {
    for (uint32_t i = 0; i < device->config.queue_count; i++) {
        pthread_cond_destroy(&device->queues[i].not_empty);
        pthread_cond_destroy(&device->queues[i].not_full);
        free(device->queues[i].ops);
    }
    pthread_cond_destroy(&device->changed);
    pthread_mutex_destroy(&device->mutex);
    free(device);
}

static void join_all(kvs_cpu *device) {
    for (uint32_t i = 0; i < device->started; i++) {
        pthread_join(device->queues[i].thread, NULL);
    }
}

kvs_cpu *kvs_cpu_new(const kvs_cpu_config *config) {
    assert(config->queue_count > 0 && config->queue_depth > 0);
    kvs_cpu *device = calloc(1, sizeof *device + config->queue_count * sizeof(struct queue));
    if (!device) {
        return NULL;
    }
    device->config = *config;
    device->random = config->shuffle_seed ? config->shuffle_seed : 1;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&device->mutex, NULL);
    pthread_cond_init(&device->changed, &monotonic);
    int failed = 0;
    for (uint32_t i = 0; i < config->queue_count; i++) {
        struct queue *queue = &device->queues[i];
        queue->device = device;
        queue->ops = calloc(config->queue_depth, sizeof *queue->ops);
        pthread_cond_init(&queue->not_empty, &monotonic);
        pthread_cond_init(&queue->not_full, &monotonic);
        failed |= !queue->ops;
    }
    pthread_condattr_destroy(&monotonic);
    for (uint32_t i = 0; i < config->queue_count && !failed; i++) {
        failed = pthread_create(&device->queues[i].thread, NULL, work, &device->queues[i]) != 0;
        device->started += !failed;
    }
    if (failed) { /* INV-126: what was started is stopped and joined */
        pthread_mutex_lock(&device->mutex);
        __atomic_store_n(&device->stopping, 2, __ATOMIC_RELEASE);
        pthread_mutex_unlock(&device->mutex);
        interrupt(device);
        join_all(device);
        destroy(device);
        return NULL;
    }
    return device;
}

int kvs_cpu_close(kvs_cpu *device, uint64_t timeout_ns) {
    pthread_mutex_lock(&device->mutex);
    if (!device->stopping) {
        __atomic_store_n(&device->stopping, 1, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&device->mutex);
    int result = kvs_cpu_synchronize(device, timeout_ns);
    if (result == -ETIME) { /* a gate nobody published, or endless work: break it off */
        pthread_mutex_lock(&device->mutex);
        __atomic_store_n(&device->stopping, 2, __ATOMIC_RELEASE);
        pthread_mutex_unlock(&device->mutex);
    }
    interrupt(device);
    join_all(device);
    destroy(device);
    return result == -ETIME ? -ETIME : 0;
}

void kvs_cpu_fail(kvs_cpu *device, int code) {
    assert(code > 0);
    int none = 0;
    __atomic_compare_exchange_n(&device->error, &none, code, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    interrupt(device);
}

int kvs_cpu_error(kvs_cpu *device) { return __atomic_load_n(&device->error, __ATOMIC_ACQUIRE); }

void kvs_cpu_inject(kvs_cpu *device, uint64_t nth_copy, int code) {
    pthread_mutex_lock(&device->mutex);
    device->inject_in = nth_copy;
    device->inject_code = code;
    pthread_mutex_unlock(&device->mutex);
}

int kvs_cpu_synchronize(kvs_cpu *device, uint64_t timeout_ns) {
    struct timespec at = kvs_timespec(kvs_now_ns() + timeout_ns);
    int waited = 0;
    pthread_mutex_lock(&device->mutex);
    for (uint32_t i = 0; i < device->started && waited != ETIMEDOUT; i++) {
        struct queue *queue = &device->queues[i];
        while (queue->head != queue->tail && waited != ETIMEDOUT) {
            waited = pthread_cond_timedwait(&device->changed, &device->mutex, &at);
        }
    }
    pthread_mutex_unlock(&device->mutex);
    return waited == ETIMEDOUT ? -ETIME : kvs_cpu_error(device);
}

uint64_t kvs_cpu_pending(kvs_cpu *device, uint32_t stream) {
    struct queue *queue = &device->queues[stream % device->config.queue_count];
    pthread_mutex_lock(&device->mutex);
    uint64_t pending = queue->tail - queue->head;
    pthread_mutex_unlock(&device->mutex);
    return pending;
}

void kvs_cpu_count(kvs_cpu *device, kvs_cpu_counters *out) {
    const kvs_cpu_counters *in = &device->counters;
    out->batches = __atomic_load_n(&in->batches, __ATOMIC_RELAXED);
    out->pages_to_device = __atomic_load_n(&in->pages_to_device, __ATOMIC_RELAXED);
    out->pages_to_host = __atomic_load_n(&in->pages_to_host, __ATOMIC_RELAXED);
    out->bytes_to_device = __atomic_load_n(&in->bytes_to_device, __ATOMIC_RELAXED);
    out->bytes_to_host = __atomic_load_n(&in->bytes_to_host, __ATOMIC_RELAXED);
    out->notified = __atomic_load_n(&in->notified, __ATOMIC_RELAXED);
    out->gates_waited = __atomic_load_n(&in->gates_waited, __ATOMIC_RELAXED);
}

/* -- enqueueing -------------------------------------------------------------------------------- */

/* Returns with the operation owned by the queue, or an error and nothing enqueued. */
static int enqueue(kvs_cpu *device, uint32_t stream, const struct op *op) {
    struct queue *queue = &device->queues[stream % device->config.queue_count];
    uint32_t depth = device->config.queue_depth;
    struct timespec at = kvs_timespec(kvs_now_ns() + device->config.full_timeout_ns);
    int waited = 0;
    pthread_mutex_lock(&device->mutex);
    while (!device->error && !device->stopping && queue->tail - queue->head == depth &&
           waited != ETIMEDOUT) {
        waited = pthread_cond_timedwait(&queue->not_full, &device->mutex, &at);
    }
    int result = device->error                        ? device->error
                 : device->stopping                   ? -ESHUTDOWN
                 : queue->tail - queue->head == depth ? -EAGAIN
                                                      : 0;
    if (result == 0) {
        queue->ops[queue->tail++ % depth] = *op;
        pthread_cond_signal(&queue->not_empty);
    }
    pthread_mutex_unlock(&device->mutex);
    return result;
}

int kvs_cpu_copy(kvs_cpu *device, uint32_t stream, const kvs_pages *pages,
                 const int32_t *device_slots, const int32_t *host_slots, uint64_t count,
                 int to_device) {
    struct op op = {.kind = OP_COPY};
    op.copy.runs = malloc((count * pages->piece_count + 1) * sizeof(kvs_run));
    if (!op.copy.runs) {
        return -ENOMEM;
    }
    op.copy.to_device = to_device;
    op.copy.page_count = count;
    op.copy.run_count =
        kvs_pages_expand(pages, device_slots, host_slots, count, to_device, op.copy.runs);
    if (device->config.early_reads) { /* what srcAccessOrder ANY allows: a race behind a gate */
        uint64_t bytes = 0;
        for (uint64_t i = 0; i < op.copy.run_count; i++) {
            bytes += op.copy.runs[i].bytes;
        }
        op.copy.early = malloc(bytes + 1);
        if (!op.copy.early) {
            free(op.copy.runs);
            return -ENOMEM;
        }
        bytes = 0;
        for (uint64_t i = 0; i < op.copy.run_count; i++) {
            memcpy(op.copy.early + bytes, (const char *)(uintptr_t)op.copy.runs[i].source,
                   op.copy.runs[i].bytes);
            bytes += op.copy.runs[i].bytes;
        }
    }
    int result = enqueue(device, stream, &op);
    if (result) {
        discard(&op);
    }
    return result;
}

int kvs_cpu_wait_event(kvs_cpu *device, uint32_t stream, kvs_cpu_event *event) {
    struct op op = {.kind = OP_WAIT_EVENT};
    op.event = event;
    event_hold(event);
    int result = enqueue(device, stream, &op);
    if (result) {
        kvs_cpu_event_free(event);
    }
    return result;
}

int kvs_cpu_wait_word(kvs_cpu *device, uint32_t stream, uint64_t word, uint64_t value, int bits,
                      uint64_t sleepers) {
    assert(word % 8 == 0 && (bits == 32 || bits == 64));
    struct op op = {.kind = OP_WAIT_WORD};
    op.word.word = word;
    op.word.value = value;
    op.word.bits = bits;
    op.word.sleepers = sleepers;
    return enqueue(device, stream, &op);
}

int kvs_cpu_write_word(kvs_cpu *device, uint32_t stream, uint64_t word, uint64_t value) {
    assert(word % 8 == 0);
    struct op op = {.kind = OP_WRITE_WORD};
    op.word.word = word;
    op.word.value = value;
    return enqueue(device, stream, &op);
}

int kvs_cpu_work(kvs_cpu *device, uint32_t stream, uint64_t address, uint64_t bytes, int value,
                 uint64_t duration_ns) {
    struct op op = {.kind = OP_WORK};
    op.work.address = address;
    op.work.bytes = bytes;
    op.work.value = value;
    op.work.duration_ns = duration_ns;
    return enqueue(device, stream, &op);
}

int kvs_cpu_record(kvs_cpu *device, uint32_t stream, kvs_cpu_event *event) {
    assert(kvs_cpu_event_query(event) == 1 && !event->waiters);
    struct op op = {.kind = OP_RECORD};
    op.event = event;
    event_hold(event);
    __atomic_store_n(&event->state, 0, __ATOMIC_RELEASE);
    int result = enqueue(device, stream, &op);
    if (result) {
        __atomic_store_n(&event->state, 1, __ATOMIC_RELEASE);
        kvs_cpu_event_free(event);
    }
    return result;
}

int kvs_cpu_notify(kvs_cpu *device, uint32_t stream, kvs_cq *queue, uint64_t token) {
    struct op op = {.kind = OP_NOTIFY};
    op.notify.queue = queue;
    op.notify.token = token;
    kvs_cq_retain(queue);
    int result = enqueue(device, stream, &op);
    if (result) {
        discard(&op);
    }
    return result;
}

int kvs_cpu_notify_event(kvs_cpu *device, kvs_cpu_event *event, kvs_cq *queue, uint64_t token) {
    struct waiter *waiter = malloc(sizeof *waiter);
    if (!waiter) {
        return -ENOMEM;
    }
    pthread_mutex_lock(&device->mutex);
    int result = device->error ? device->error : device->stopping ? -ESHUTDOWN : 0;
    int state = kvs_cpu_event_query(event);
    if (result == 0 && state == 0) {
        *waiter = (struct waiter){event->waiters, queue, token};
        event->waiters = waiter;
        kvs_cq_retain(queue);
        waiter = NULL;
    }
    pthread_mutex_unlock(&device->mutex);
    if (result == 0 && state != 0) {
        kvs_cq_post(queue, token, state < 0 ? KVS_DEVICE_STATUS + state : 0, VERDICT_AND_END, 0);
    }
    free(waiter);
    return result;
}
