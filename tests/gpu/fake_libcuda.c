/* A stand-in for libcuda.so.1 on machines without a GPU, so that the CUDA device's own code runs in
 * CI: marshalling, ABI versions, fallbacks, error mapping, the watch. Device memory is host memory.
 *
 * A stream is a FIFO list of operations with a thread of its own; a wait polls its word as hardware
 * does. What it should do wrong is set through `fake_set(name, value)`, and what was called is read
 * through `fake_get(name)`. Names: see `knobs`. A call fails when `fail_call` names its number in
 * the list of calls and `fail_after` counts down to zero; then `fail_code` is returned.
 */
#define _GNU_SOURCE
#include <assert.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long ptr_t;

enum { OP_COPY, OP_SET, OP_WAIT32, OP_WAIT64, OP_WRITE64, OP_EVENT, OP_JOIN, OP_HOST, OP_SPIN, OP_FILL, OP_CHECK,
       OP_POISON, OP_FAULT };

struct event {
    volatile uint64_t recorded, passed;
};

struct op {
    struct op *next;
    int kind;
    ptr_t target, source;
    uint64_t value;
    struct event *event;
    void (*function)(void *);
    void *argument;
};

struct stream {
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    struct op *head, **tail;
    uint64_t enqueued, done;
    int stopping, capturing;
};

static struct knob {
    const char *name;
    long value;
} knobs[] = {
    {"driver_version", 13000}, {"device_count", 2}, {"memops64", 1}, {"wait64_code", 0},
    {"wait32_code", 0}, {"write64_code", 0}, {"deaf_words", 0}, {"sticky", 0}, {"batch_abi", 13},
    {"batch_code", 0}, {"fail_code", 0}, {"fail_after", 0}, {"alloc_code", 0},
    {"register_code", 0}, {"register_max", 0}, {"register_fail_at", 0}, {"capturing", 0},
    {"calls_batch12", 0}, {"calls_batch13", 0}, {"calls_memcpy", 0}, {"calls_wait32", 0},
    {"calls_wait64", 0}, {"calls_register", 0}, {"calls_unregister", 0}, {"calls_kernel", 0},
    {"calls_query", 0}, {"last_order", 0}, {"last_flags", 0}, {"last_priority", 0},
    {"registered", 0}, {"streams", 0}, {"events", 0}, {"allocations", 0}, {"retained", 0},
    {"modes_relaxed", 0}, {"current", 0}, {"batch_runs_max", 0}, {"memcpy_code", 0},
    {"record_code", 0}, {"event_code", 0}, {"quiet_loss", 0}, {"parked", 0},
};

static long *knob(const char *name)
{
    for (size_t i = 0; i < sizeof knobs / sizeof knobs[0]; i++) {
        if (!strcmp(knobs[i].name, name)) {
            return &knobs[i].value;
        }
    }
    abort();
}

void fake_set(const char *name, long value) { *knob(name) = value; }
long fake_get(const char *name) { return *knob(name); }
#define COUNT(name) __atomic_add_fetch(knob(name), 1, __ATOMIC_SEQ_CST)
#define DROP(name) __atomic_sub_fetch(knob(name), 1, __ATOMIC_SEQ_CST)

static __thread long current_context;
static __thread int capture_mode;
static struct stream legacy;

/* Every call: a lost context answers with its code; the counted-down failure of `fail_after`. */
static int gatekeeper(void)
{
    if (*knob("sticky")) {
        return (int)*knob("sticky");
    }
    if (*knob("fail_after") > 0 && __atomic_sub_fetch(knob("fail_after"), 1, __ATOMIC_SEQ_CST) == 0) {
        return (int)*knob("fail_code");
    }
    return current_context ? 0 : 201;
}
#define ENTER()                                                                                    \
    do {                                                                                           \
        int code_ = gatekeeper();                                                                  \
        if (code_) return code_;                                                                   \
    } while (0)

static void nap(void)
{
    struct timespec little = {0, 20000};
    nanosleep(&little, NULL);
}

static void run(struct op *op)
{
    switch (op->kind) {
    case OP_COPY: memcpy((void *)op->target, (void *)op->source, op->value); break;
    case OP_SET: memset((void *)op->target, (int)op->source, op->value); break;
    case OP_WAIT32:
        while ((int32_t)(*(volatile uint32_t *)op->target - (uint32_t)op->value) < 0) {
            if (*knob("sticky")) return;
            nap();
        }
        break;
    case OP_WAIT64:
        while (*knob("deaf_words") == 1 ||
               (int64_t)(*(volatile uint64_t *)op->target - op->value) < 0) {
            if (*knob("sticky")) return;
            nap();
        }
        break;
    case OP_WRITE64:
        __atomic_store_n((uint64_t *)op->target, op->value, __ATOMIC_RELEASE);
        if (*knob("deaf_words") == 1) *knob("deaf_words") = 0; /* a device write does wake it */
        break;
    case OP_EVENT: __atomic_store_n(&op->event->passed, op->value, __ATOMIC_RELEASE); break;
    case OP_JOIN:
        while (__atomic_load_n(&op->event->passed, __ATOMIC_ACQUIRE) < op->value) {
            if (*knob("sticky")) return;
            nap();
        }
        break;
    case OP_HOST: op->function(op->argument); break;
    case OP_FILL:
        for (uint64_t i = 0; i < op->value; i++)
            ((uint32_t *)op->target)[i] = (uint32_t)op->source + (uint32_t)i * 2654435761u;
        break;
    case OP_CHECK:
    case OP_POISON:
        for (uint64_t i = 0; i < op->value; i++) {
            uint32_t want = op->kind == OP_POISON ? 0xffffffffu : (uint32_t)op->source + (uint32_t)i * 2654435761u;
            *(uint64_t *)op->argument += ((uint32_t *)op->target)[i] != want;
        }
        break;
    case OP_FAULT: *knob("quiet_loss") = 700; break;
    case OP_SPIN: {
        struct timespec wait = {(time_t)(op->value / 1000000000), (long)(op->value % 1000000000)};
        nanosleep(&wait, NULL);
        break;
    }
    }
}

static void *stream_main(void *argument)
{
    struct stream *stream = argument;
    pthread_mutex_lock(&stream->mutex);
    for (;;) {
        while (!stream->head && !stream->stopping) pthread_cond_wait(&stream->changed, &stream->mutex);
        struct op *op = stream->head;
        if (!op) break;
        if (!(stream->head = op->next)) stream->tail = &stream->head;
        pthread_mutex_unlock(&stream->mutex);
        int parks = op->kind == OP_WAIT32 || op->kind == OP_WAIT64;
        if (parks) COUNT("parked");
        /* lost: other work never ends, and nobody is told before the last gate has opened */
        while (*knob("quiet_loss") && !*knob("sticky") && *knob("parked") && !parks) nap();
        if (!*knob("sticky")) run(op);
        if (parks) DROP("parked");
        if (*knob("quiet_loss") && !*knob("parked")) *knob("sticky") = *knob("quiet_loss");
        free(op);
        pthread_mutex_lock(&stream->mutex);
        stream->done++;
        pthread_cond_broadcast(&stream->changed);
    }
    pthread_mutex_unlock(&stream->mutex);
    return NULL;
}

static void begin(struct stream *stream)
{
    memset(stream, 0, sizeof *stream);
    stream->tail = &stream->head;
    pthread_mutex_init(&stream->mutex, NULL);
    pthread_cond_init(&stream->changed, NULL);
    pthread_create(&stream->thread, NULL, stream_main, stream);
}

static int push(struct stream *stream, struct op op)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (!stream) {
        extern void fake_begin_legacy(void);
        pthread_once(&once, fake_begin_legacy);
        stream = &legacy;
    }
    struct op *made = malloc(sizeof *made);
    *made = op;
    made->next = NULL;
    pthread_mutex_lock(&stream->mutex);
    *stream->tail = made;
    stream->tail = &made->next;
    stream->enqueued++;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->mutex);
    return 0;
}
void fake_begin_legacy(void) { begin(&legacy); }

static int f_cuInit(unsigned flags) { (void)flags; return 0; }
static int f_cuDriverGetVersion(int *out) { *out = (int)*knob("driver_version"); return 0; }
static int f_cuDeviceGetCount(int *out) { *out = (int)*knob("device_count"); return *out ? 0 : 100; }
static int f_cuDeviceGet(int *out, int ordinal)
{
    *out = ordinal;
    return ordinal < *knob("device_count") ? 0 : 101;
}
static int f_cuDeviceGetName(char *out, int length, int device)
{
    (void)device;
    strncpy(out, "Fake GPU", (size_t)length);
    return 0;
}
static int f_cuDeviceGetAttribute(int *out, int attribute, int device)
{
    (void)device;
    *out = attribute == 122 ? (int)*knob("memops64") : attribute == 134 ? -1 : 1;
    return 0;
}
static int f_cuDevicePrimaryCtxRetain(long *out, int device) { COUNT("retained"); *out = 1000 + device; return 0; }
static int f_cuDevicePrimaryCtxRelease(int device) { (void)device; DROP("retained"); return 0; }
static int f_cuCtxGetCurrent(long *out) { *out = current_context; return 0; }
static int f_cuCtxSetCurrent(long context) { current_context = context; *knob("current") = context; return 0; }
static int f_cuCtxGetStreamPriorityRange(int *low, int *high) { *low = 0; *high = -5; return 0; }
static int f_cuThreadExchangeStreamCaptureMode(int *mode)
{
    int old = capture_mode;
    capture_mode = *mode;
    if (*mode == 2) COUNT("modes_relaxed");
    *mode = old;
    return 0;
}
static int f_cuStreamCreateWithPriority(struct stream **out, unsigned flags, int priority)
{
    ENTER();
    assert(flags == 1);
    *out = malloc(sizeof **out);
    begin(*out);
    *knob("last_priority") = priority;
    COUNT("streams");
    return 0;
}
static int f_cuStreamDestroy(struct stream *stream)
{
    ENTER();
    pthread_mutex_lock(&stream->mutex);
    stream->stopping = 1;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->mutex);
    pthread_detach(stream->thread); /* leaked: the driver too finishes its work later */
    DROP("streams");
    return 0;
}
static int f_cuStreamQuery(struct stream *stream)
{
    ENTER();
    COUNT("calls_query");
    if (*knob("capturing") && capture_mode != 2) return 900;
    if (!stream) return 0;
    pthread_mutex_lock(&stream->mutex);
    int busy = stream->enqueued != stream->done;
    pthread_mutex_unlock(&stream->mutex);
    return busy ? 600 : 0;
}
static int f_cuStreamSynchronize(struct stream *stream)
{
    ENTER();
    pthread_mutex_lock(&stream->mutex);
    while (stream->enqueued != stream->done) pthread_cond_wait(&stream->changed, &stream->mutex);
    pthread_mutex_unlock(&stream->mutex);
    return 0;
}
static int f_cuStreamIsCapturing(struct stream *stream, int *out)
{
    ENTER();
    *out = *knob("capturing") && (long)(uintptr_t)stream == *knob("capturing");
    if (*knob("capturing") && !stream) return 906;
    return 0;
}
static int f_cuStreamWaitEvent(struct stream *stream, struct event *event, unsigned flags)
{
    ENTER();
    (void)flags;
    return push(stream, (struct op){.kind = OP_JOIN, .event = event, .value = event->recorded});
}
static int f_cuStreamWaitValue32(struct stream *stream, ptr_t address, uint32_t value, unsigned flags)
{
    ENTER();
    assert(flags == 0);
    COUNT("calls_wait32");
    if (*knob("wait32_code")) return (int)*knob("wait32_code");
    return push(stream, (struct op){.kind = OP_WAIT32, .target = address, .value = value});
}
static int f_cuStreamWaitValue64(struct stream *stream, ptr_t address, uint64_t value, unsigned flags)
{
    ENTER();
    assert(flags == 0 && address % 8 == 0);
    COUNT("calls_wait64");
    if (*knob("wait64_code")) return (int)*knob("wait64_code");
    return push(stream, (struct op){.kind = OP_WAIT64, .target = address, .value = value});
}
static int f_cuStreamWriteValue64(struct stream *stream, ptr_t address, uint64_t value, unsigned flags)
{
    ENTER();
    assert(flags == 0);
    if (*knob("write64_code")) return (int)*knob("write64_code");
    return push(stream, (struct op){.kind = OP_WRITE64, .target = address, .value = value});
}
static int f_cuEventCreate(struct event **out, unsigned flags)
{
    ENTER();
    assert(flags == 2);
    *out = calloc(1, sizeof **out);
    COUNT("events");
    return 0;
}
static int f_cuEventDestroy(struct event *event) { ENTER(); free(event); DROP("events"); return 0; }
static int f_cuEventRecord(struct event *event, struct stream *stream)
{
    ENTER();
    if (*knob("record_code")) return (int)*knob("record_code");
    event->recorded++;
    return push(stream, (struct op){.kind = OP_EVENT, .event = event, .value = event->recorded});
}
static int f_cuEventQuery(struct event *event)
{
    ENTER();
    COUNT("calls_query");
    if (*knob("event_code")) return (int)*knob("event_code");
    if (*knob("capturing") && capture_mode != 2) return 900;
    return __atomic_load_n(&event->passed, __ATOMIC_ACQUIRE) >= event->recorded ? 0 : 600;
}
static int f_cuMemAlloc(ptr_t *out, size_t length)
{
    ENTER();
    if (*knob("alloc_code")) return (int)*knob("alloc_code");
    *out = (ptr_t)aligned_alloc(4096, (length + 4095) & ~(size_t)4095);
    COUNT("allocations");
    return *out ? 0 : 2;
}
static int f_cuMemFree(ptr_t address) { ENTER(); free((void *)address); DROP("allocations"); return 0; }
static int f_cuMemsetD8Async(ptr_t target, unsigned char value, size_t length, struct stream *stream)
{
    ENTER();
    return push(stream, (struct op){.kind = OP_SET, .target = target, .source = value, .value = length});
}
static int f_cuMemcpyAsync(ptr_t target, ptr_t source, size_t length, struct stream *stream)
{
    ENTER();
    COUNT("calls_memcpy");
    if (*knob("memcpy_code")) return (int)*knob("memcpy_code");
    return push(stream, (struct op){.kind = OP_COPY, .target = target, .source = source, .value = length});
}
static int f_cuMemHostRegister(void *address, size_t length, unsigned flags)
{
    ENTER();
    (void)address;
    assert(flags == 3);
    long call = COUNT("calls_register");
    if (*knob("register_max") && (long)length > *knob("register_max")) return 1;
    if (*knob("register_fail_at") && call == *knob("register_fail_at")) return 2;
    if (*knob("register_code")) return (int)*knob("register_code");
    COUNT("registered");
    return 0;
}
static int f_cuMemHostUnregister(void *address)
{
    ENTER();
    (void)address;
    COUNT("calls_unregister");
    DROP("registered");
    return 0;
}
static int f_cuMemHostGetDevicePointer(ptr_t *out, void *address, unsigned flags)
{
    ENTER();
    (void)flags;
    *out = (ptr_t)address;
    return 0;
}
static int f_cuLaunchHostFunc(struct stream *stream, void (*function)(void *), void *argument)
{
    ENTER();
    return push(stream, (struct op){.kind = OP_HOST, .function = function, .argument = argument});
}
static int f_cuModuleLoadData(void **out, const void *image) { ENTER(); *out = (void *)image; return 0; }
static int f_cuModuleUnload(void *module) { (void)module; return 0; }
static int f_cuModuleGetFunction(const char **out, void *module, const char *name)
{
    ENTER();
    (void)module;
    *out = strdup(name);
    return 0;
}

struct piece { uint64_t base, stride, bytes, offset; };
struct scatter { uint64_t staging, pieces, page_bytes; uint32_t to_pool, unused; int32_t slots[256]; };

static int f_cuLaunchKernel(const char *name, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by,
                            unsigned bz, unsigned shared, struct stream *stream, void **args, void **extra)
{
    ENTER();
    (void)z, (void)bx, (void)by, (void)bz, (void)shared, (void)extra;
    COUNT("calls_kernel");
    if (!strcmp(name, "kvs_spin"))
        return push(stream, (struct op){.kind = OP_SPIN, .value = *(uint64_t *)args[0]});
    if (!strcmp(name, "kvs_fill"))
        return push(stream, (struct op){.kind = OP_FILL, .target = *(ptr_t *)args[0], .value = *(uint64_t *)args[1],
                                        .source = *(uint32_t *)args[2]});
    if (!strcmp(name, "kvs_check"))
        return push(stream, (struct op){.kind = OP_CHECK, .target = *(ptr_t *)args[0], .value = *(uint64_t *)args[1],
                                        .source = *(uint32_t *)args[2], .argument = *(void **)args[3]});
    if (!strcmp(name, "kvs_check_poison"))
        return push(stream, (struct op){.kind = OP_POISON, .target = *(ptr_t *)args[0], .value = *(uint64_t *)args[1],
                                        .argument = *(void **)args[2]});
    if (!strcmp(name, "kvs_fault")) return push(stream, (struct op){.kind = OP_FAULT});
    assert(!strcmp(name, "kvs_scatter"));
    const struct scatter *scatter = args[0];
    const struct piece *pieces = (const struct piece *)scatter->pieces;
    for (unsigned page = 0; page < y; page++) {
        for (unsigned i = 0; i < x; i++) {
            ptr_t pool = pieces[i].base + (uint64_t)scatter->slots[page] * pieces[i].stride;
            ptr_t stage = scatter->staging + page * scatter->page_bytes + pieces[i].offset;
            push(stream, (struct op){.kind = OP_COPY, .value = pieces[i].bytes,
                                     .target = scatter->to_pool ? pool : stage,
                                     .source = scatter->to_pool ? stage : pool});
        }
    }
    return 0;
}

struct attributes { int order, source_type, source_id, target_type, target_id; unsigned flags; };

static int batch(ptr_t *targets, ptr_t *sources, size_t *sizes, size_t count, struct attributes *attributes,
                 size_t *indices, size_t attribute_count, struct stream *stream)
{
    ENTER();
    if (*knob("batch_code")) return (int)*knob("batch_code");
    if (!stream || *knob("capturing") == (long)(uintptr_t)stream || attributes->order == 0) return 1;
    assert(attribute_count == 1 && indices[0] == 0 && count > 0);
    *knob("last_order") = attributes->order;
    *knob("last_flags") = attributes->flags;
    if ((long)count > *knob("batch_runs_max")) *knob("batch_runs_max") = (long)count;
    for (size_t i = count; i > 0; i--) /* unordered: backwards here */
        push(stream, (struct op){.kind = OP_COPY, .target = targets[i - 1], .source = sources[i - 1],
                                 .value = sizes[i - 1]});
    return 0;
}
static int f_batch12(ptr_t *t, ptr_t *s, size_t *n, size_t count, struct attributes *a, size_t *i, size_t ac,
                     size_t *failed, struct stream *stream)
{
    COUNT("calls_batch12");
    *failed = SIZE_MAX;
    return batch(t, s, n, count, a, i, ac, stream);
}
static int f_batch13(ptr_t *t, ptr_t *s, size_t *n, size_t count, struct attributes *a, size_t *i, size_t ac,
                     struct stream *stream)
{
    COUNT("calls_batch13");
    return batch(t, s, n, count, a, i, ac, stream);
}

int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status)
{
    (void)flags;
    *status = 0;
    *out = NULL;
#define GIVE(symbol) if (!strcmp(name, #symbol)) { *out = (void *)f_##symbol; return 0; }
    GIVE(cuInit) GIVE(cuDriverGetVersion) GIVE(cuDeviceGetCount) GIVE(cuDeviceGet) GIVE(cuDeviceGetName)
    GIVE(cuDeviceGetAttribute) GIVE(cuDevicePrimaryCtxRetain) GIVE(cuDevicePrimaryCtxRelease)
    GIVE(cuCtxGetCurrent) GIVE(cuCtxSetCurrent) GIVE(cuCtxGetStreamPriorityRange)
    GIVE(cuThreadExchangeStreamCaptureMode) GIVE(cuStreamCreateWithPriority) GIVE(cuStreamDestroy)
    GIVE(cuStreamQuery) GIVE(cuStreamSynchronize) GIVE(cuStreamIsCapturing) GIVE(cuStreamWaitEvent)
    GIVE(cuStreamWaitValue32) GIVE(cuStreamWaitValue64) GIVE(cuStreamWriteValue64) GIVE(cuEventCreate)
    GIVE(cuEventDestroy) GIVE(cuEventRecord) GIVE(cuEventQuery) GIVE(cuMemAlloc) GIVE(cuMemFree)
    GIVE(cuMemsetD8Async) GIVE(cuMemcpyAsync) GIVE(cuMemHostRegister) GIVE(cuMemHostUnregister)
    GIVE(cuMemHostGetDevicePointer) GIVE(cuLaunchHostFunc) GIVE(cuModuleLoadData) GIVE(cuModuleUnload)
    GIVE(cuModuleGetFunction) GIVE(cuLaunchKernel)
    if (!strcmp(name, "cuMemcpyBatchAsync")) {
        if (version >= 13000 && *knob("batch_abi") >= 13) *out = (void *)f_batch13;
        else if (version < 13000 && *knob("batch_abi") >= 12) *out = (void *)f_batch12;
        return *out ? 0 : 500;
    }
    return 500;
}
