/* The CUDA device: the driver API through symbols of its own, with no Python package in between.
 *
 * libcuda is loaded by name and every function comes from cuGetProcAddress, so that the ABI is the
 * one asked for and no binding can wrap a callback (the reason: bindings that take the GIL on the
 * driver's thread). Each call makes the primary context current for its own duration and puts the
 * caller's back, because torch may have another device current on the loop's thread; it also
 * relaxes the thread's capture mode meanwhile, so that a graph capture elsewhere is not
 * invalidated.
 *
 * The reactor never comes here: publishing a gate is a plain store to registered memory (INV-216).
 *
 * Order: srcAccessOrder is STREAM unless a test says otherwise. ANY would let the copy engine read
 * the host page before the gate opens.
 */
#include "devices.h"

#include <dlfcn.h>
#include <stdio.h>
#include <sys/mman.h>

#include "kernels.ptx.h"

typedef int result_t;
typedef void *handle_t;
typedef unsigned long long deviceptr_t;

enum {
    CODE_INVALID_VALUE = 1,
    CODE_NOT_READY = 600,
    CODE_NOT_SUPPORTED = 801,
    CODE_CAPTURE_IMPLICIT = 906,
    STREAM_NON_BLOCKING = 1,
    EVENT_DISABLE_TIMING = 2,
    WAIT_GEQ = 0,
    REGISTER_PORTABLE = 1,
    ALREADY_REGISTERED = 712,
    REGISTER_DEVICEMAP = 2,
    CAPTURE_RELAXED = 2,
    ORDER_STREAM = 1,
    PREFER_OVERLAP = 1,
    BATCH_RUNS_MAX = 2048,
    BATCH_BYTES_MAX = 64 << 20,
    SCATTER_PAGES_MAX = 256,
    SERVICE_BYTES = 1 << 16,
    SERVICE_LANES = SERVICE_BYTES / 64 - 2, /* the last two words are the probe's */
    DRIVER_ABI = 12000,
};

struct location {
    int type;
    int id;
};

struct copy_attributes {
    int source_order;
    struct location source_hint;
    struct location target_hint;
    unsigned flags;
};
_Static_assert(sizeof(struct copy_attributes) == 24, "CUmemcpyAttributes");

/* name, arguments; all with the signatures of CUDA 12.0 */
#define DRIVER_FUNCTIONS(X)                                                                        \
    X(cuInit, (unsigned))                                                                          \
    X(cuDriverGetVersion, (int *))                                                                 \
    X(cuDeviceGetCount, (int *))                                                                   \
    X(cuDeviceGet, (int *, int))                                                                   \
    X(cuDeviceGetName, (char *, int, int))                                                         \
    X(cuDeviceGetAttribute, (int *, int, int))                                                     \
    X(cuDevicePrimaryCtxRetain, (handle_t *, int))                                                 \
    X(cuDevicePrimaryCtxRelease, (int))                                                            \
    X(cuCtxGetCurrent, (handle_t *))                                                               \
    X(cuCtxSetCurrent, (handle_t))                                                                 \
    X(cuCtxGetStreamPriorityRange, (int *, int *))                                                 \
    X(cuThreadExchangeStreamCaptureMode, (int *))                                                  \
    X(cuStreamCreateWithPriority, (handle_t *, unsigned, int))                                     \
    X(cuStreamDestroy, (handle_t))                                                                 \
    X(cuStreamQuery, (handle_t))                                                                   \
    X(cuStreamSynchronize, (handle_t))                                                             \
    X(cuStreamIsCapturing, (handle_t, int *))                                                      \
    X(cuStreamWaitEvent, (handle_t, handle_t, unsigned))                                           \
    X(cuStreamWaitValue32, (handle_t, deviceptr_t, uint32_t, unsigned))                            \
    X(cuStreamWaitValue64, (handle_t, deviceptr_t, uint64_t, unsigned))                            \
    X(cuStreamWriteValue64, (handle_t, deviceptr_t, uint64_t, unsigned))                           \
    X(cuEventCreate, (handle_t *, unsigned))                                                       \
    X(cuEventDestroy, (handle_t))                                                                  \
    X(cuEventRecord, (handle_t, handle_t))                                                         \
    X(cuEventQuery, (handle_t))                                                                    \
    X(cuMemAlloc, (deviceptr_t *, size_t))                                                         \
    X(cuMemFree, (deviceptr_t))                                                                    \
    X(cuMemsetD8Async, (deviceptr_t, unsigned char, size_t, handle_t))                             \
    X(cuMemcpyAsync, (deviceptr_t, deviceptr_t, size_t, handle_t))                                 \
    X(cuMemHostRegister, (void *, size_t, unsigned))                                               \
    X(cuMemHostUnregister, (void *))                                                               \
    X(cuMemHostGetDevicePointer, (deviceptr_t *, void *, unsigned))                                \
    X(cuLaunchHostFunc, (handle_t, void (*)(void *), void *))                                      \
    X(cuModuleLoadData, (handle_t *, const void *))                                                \
    X(cuModuleUnload, (handle_t))                                                                  \
    X(cuModuleGetFunction, (handle_t *, handle_t, const char *))                                   \
    X(cuLaunchKernel, (handle_t, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,       \
                       unsigned, handle_t, void **, void **))

struct driver {
#define X(name, arguments) result_t(*name) arguments;
    DRIVER_FUNCTIONS(X)
#undef X
    result_t (*batch_12)(deviceptr_t *, deviceptr_t *, size_t *, size_t, struct copy_attributes *,
                         size_t *, size_t, size_t *, handle_t);
    result_t (*batch_13)(deviceptr_t *, deviceptr_t *, size_t *, size_t, struct copy_attributes *,
                         size_t *, size_t, handle_t);
};

struct region {
    uint64_t host;
    uint64_t bytes;
    deviceptr_t device;
    bool is_shared; /* registered through another device, which also undoes it */
};

struct kvs_cuda_event {
    kvs_cuda *device;
    handle_t handle;
    struct kvs_cuda_event *next; /* in the pool */
    uint32_t references;
    bool is_ours;
};

struct kvs_cuda {
    struct driver call;
    int device;
    handle_t context;
    kvs_cuda_caps caps;
    kvs_cuda_counters counters;
    int error;
    bool is_closed;
    uint32_t references;
    int batch_copy;
    int source_order;
    uint64_t min_dma;
    pthread_mutex_t mutex; /* guards regions and the pool of events; held across no driver call */
    struct region *regions;
    uint32_t region_count, region_room;
    kvs_cuda_event *free_events;
    char *service; /* completion words, one cache line each, then two words for the probe */
    handle_t service_stream;
    uint64_t probe_value;
    bool service_is_stuck;
    handle_t module;
    pthread_mutex_t streams_mutex; /* held while a stream is queried, so that none goes meanwhile */
    uint64_t *streams;             /* what the watch asks for errors: every stream of ours */
    uint32_t stream_count, stream_room;
};

struct guard {
    handle_t before;
    int capture_mode;
};

bool kvs_device_code_is_sticky(int code) {
    switch (code) {
    case 4:   /* deinitialized */
    case 46:  /* device unavailable */
    case 201: /* invalid context */
    case 214: /* ECC */
    case 219: /* NVLink */
    case 220:
    case 226: /* contained */
    case 700: /* illegal address */
    case 702: /* launch timeout */
    case 709: /* context destroyed */
    case 710: /* device assert */
    case 714:
    case 715:
    case 716:
    case 717:
    case 718:
    case 719: /* launch failed */
    case 720:
    case 721:
    case 999: /* unknown */
        return true;
    default:
        return false;
    }
}

static int noted(kvs_cuda *device, int result) {
    if (kvs_device_code_is_sticky(result)) {
        int none = 0;
        __atomic_compare_exchange_n(&device->error, &none, result, 0, __ATOMIC_SEQ_CST,
                                    __ATOMIC_SEQ_CST);
    }
    return result;
}

int kvs_cuda_error(kvs_cuda *device) { return __atomic_load_n(&device->error, __ATOMIC_ACQUIRE); }

static int enter(kvs_cuda *device, struct guard *guard) {
    if (device->is_closed) {
        return -ESHUTDOWN;
    }
    int error = kvs_cuda_error(device);
    if (error) {
        return error;
    }
    int result = device->call.cuCtxGetCurrent(&guard->before);
    if (result == 0 && guard->before != device->context) {
        result = device->call.cuCtxSetCurrent(device->context);
    }
    guard->capture_mode = CAPTURE_RELAXED;
    if (result == 0) {
        device->call.cuThreadExchangeStreamCaptureMode(&guard->capture_mode);
    }
    return noted(device, result);
}

static int leave(kvs_cuda *device, struct guard *guard, int result) {
    device->call.cuThreadExchangeStreamCaptureMode(&guard->capture_mode);
    if (guard->before != device->context) {
        device->call.cuCtxSetCurrent(guard->before);
    }
    return noted(device, result);
}

/* -- opening and closing ------------------------------------------------------------------------
 */

static int load(struct driver *call, const char *library, char *failed) {
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    snprintf(failed, 64, "%s", library);
    if (!handle) {
        return -ELIBACC;
    }
    result_t (*find)(const char *, void **, int, uint64_t, int *);
    *(void **)&find = dlsym(handle, "cuGetProcAddress_v2");
    snprintf(failed, 64, "cuGetProcAddress_v2");
    if (!find) {
        return -ELIBACC; /* older than 12.0 */
    }
    int status = 0;
    void *symbol = NULL;
#define X(name, arguments)                                                                         \
    symbol = NULL;                                                                                 \
    snprintf(failed, 64, "%s", #name);                                                             \
    if (find(#name, &symbol, DRIVER_ABI, 0, &status) || !symbol) {                                 \
        return -ELIBACC;                                                                           \
    }                                                                                              \
    *(void **)&call->name = symbol;
    DRIVER_FUNCTIONS(X)
#undef X
    symbol = NULL;
    if (find("cuMemcpyBatchAsync", &symbol, 13000, 0, &status) == 0) {
        *(void **)&call->batch_13 = symbol;
    }
    symbol = NULL;
    if (find("cuMemcpyBatchAsync", &symbol, 12080, 0, &status) == 0) {
        *(void **)&call->batch_12 = symbol;
    }
    return 0;
}

static void release(kvs_cuda *device) {
    if (__atomic_sub_fetch(&device->references, 1, __ATOMIC_ACQ_REL) == 0) {
        pthread_mutex_destroy(&device->mutex);
        pthread_mutex_destroy(&device->streams_mutex);
        free(device->streams);
        free(device->regions);
        free(device);
    }
}

static int best_batch(const kvs_cuda *device) {
    return device->call.batch_13 ? 2 : device->call.batch_12 ? 1 : 0;
}

/* Everything that needs the context current: service words, module, what the device offers. */
static int prepare(kvs_cuda *device, char *failed) {
    struct driver *call = &device->call;
    kvs_cuda_caps *caps = &device->caps;
    const struct {
        int attribute;
        int *value;
    } asked[] = {{122, &caps->attribute_memops64},
                 {40, &caps->copy_engines},
                 {134, &caps->host_numa},
                 {100, &caps->uses_host_page_tables},
                 {16, &caps->multiprocessors}};
    for (size_t i = 0; i < sizeof asked / sizeof asked[0]; i++) {
        if (call->cuDeviceGetAttribute(asked[i].value, asked[i].attribute, device->device)) {
            *asked[i].value = asked[i].attribute == 134 ? -1 : 0;
        }
    }
    call->cuDeviceGetName(caps->name, sizeof caps->name, device->device);
    call->cuCtxGetStreamPriorityRange(&caps->priority_low, &caps->priority_high);
    caps->batch_copy = device->batch_copy = best_batch(device);
    device->service = mmap(NULL, SERVICE_BYTES, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (device->service == MAP_FAILED) {
        device->service = NULL;
        return -ENOMEM;
    }
    madvise(device->service, SERVICE_BYTES, MADV_DONTFORK);
    snprintf(failed, 64, "cuMemHostRegister");
    int result = kvs_cuda_register(device, (uint64_t)(uintptr_t)device->service, SERVICE_BYTES);
    if (result == 0) {
        snprintf(failed, 64, "cuStreamCreateWithPriority");
        result = call->cuStreamCreateWithPriority(&device->service_stream, STREAM_NON_BLOCKING, 0);
    }
    if (result == 0 && call->cuModuleLoadData(&device->module, kvs_kernels_ptx)) {
        device->module = NULL; /* no staged path then; copies do without */
    }
    return result;
}

int kvs_cuda_open(const char *library, int ordinal, kvs_cuda **out, char *failed) {
    kvs_cuda *device = calloc(1, sizeof *device);
    if (!device) {
        return -ENOMEM;
    }
    device->references = 1;
    device->source_order = ORDER_STREAM;
    device->min_dma = 32 << 10;
    pthread_mutex_init(&device->mutex, NULL);
    pthread_mutex_init(&device->streams_mutex, NULL);
    struct driver *call = &device->call;
    int result = load(call, library, failed);
    bool retained = false;
    struct guard guard;
#define STEP(expression)                                                                           \
    if (result == 0) {                                                                             \
        snprintf(failed, 64, "%.63s", #expression);                                                \
        failed[strcspn(failed, "(")] = 0;                                                          \
        result = expression;                                                                       \
    }
    STEP(call->cuInit(0))
    STEP(call->cuDriverGetVersion(&device->caps.driver_version))
    STEP(call->cuDeviceGetCount(&device->caps.device_count))
    STEP(call->cuDeviceGet(&device->device, ordinal))
    STEP(call->cuDevicePrimaryCtxRetain(&device->context, device->device))
    retained = result == 0;
    STEP(enter(device, &guard))
#undef STEP
    if (result == 0) {
        result = prepare(device, failed);
        leave(device, &guard, 0);
    }
    if (result == 0) {
        *out = device;
        return 0;
    }
    int error = result;
    if (retained) {
        kvs_cuda_close(device, 0);
    } else {
        release(device);
    }
    return error;
}

void kvs_cuda_close(kvs_cuda *device, int is_lost) {
    struct guard guard;
    if (device->is_closed) {
        return;
    }
    bool usable = !is_lost && enter(device, &guard) == 0;
    pthread_mutex_lock(&device->mutex);
    kvs_cuda_event *event = device->free_events;
    device->free_events = NULL;
    pthread_mutex_unlock(&device->mutex);
    while (event) {
        kvs_cuda_event *next = event->next;
        if (usable) {
            device->call.cuEventDestroy(event->handle);
        }
        free(event);
        event = next;
    }
    if (usable) { /* INV-924: on a lost context the driver is left alone */
        if (device->service_stream) {
            device->call.cuStreamDestroy(device->service_stream);
        }
        if (device->module) {
            device->call.cuModuleUnload(device->module);
        }
        for (uint32_t i = device->region_count; i > 0; i--) {
            device->call.cuMemHostUnregister((void *)(uintptr_t)device->regions[i - 1].host);
        }
        leave(device, &guard, 0);
        device->call.cuDevicePrimaryCtxRelease(device->device);
    }
    if (device->service && usable && !device->service_is_stuck) {
        munmap(device->service,
               SERVICE_BYTES); /* leaked on a lost device: it may still be mapped */
    }
    device->is_closed = true;
    release(device);
}

void kvs_cuda_get_caps(kvs_cuda *device, kvs_cuda_caps *caps) { *caps = device->caps; }

int kvs_cuda_attribute(kvs_cuda *device, int attribute, int *value) {
    return device->call.cuDeviceGetAttribute(value, attribute, device->device);
}

void kvs_cuda_count(kvs_cuda *device, kvs_cuda_counters *out) {
    *out = device->counters; /* only the loop's thread enqueues */
}

int kvs_cuda_set_batch(kvs_cuda *device, int batch_copy) {
    int best = best_batch(device);
    bool offered = (batch_copy == 2 && device->call.batch_13) ||
                   (batch_copy == 1 && device->call.batch_12) || batch_copy == 0;
    device->batch_copy = offered ? batch_copy : best;
    return device->batch_copy;
}

void kvs_cuda_set_min_dma(kvs_cuda *device, uint64_t min_dma) { device->min_dma = min_dma; }

void kvs_cuda_set_source_order(kvs_cuda *device, int order) { device->source_order = order; }

/* -- one driver call each -----------------------------------------------------------------------
 */

#define WITH_CONTEXT(device, expression)                                                           \
    struct guard guard;                                                                            \
    int result = enter(device, &guard);                                                            \
    if (result == 0) {                                                                             \
        result = leave(device, &guard, expression);                                                \
    }                                                                                              \
    return result

static void watch_stream(kvs_cuda *device, uint64_t stream) {
    pthread_mutex_lock(&device->streams_mutex);
    if (device->stream_count == device->stream_room) {
        device->stream_room = device->stream_room ? 2 * device->stream_room : 16;
        device->streams = realloc(device->streams, device->stream_room * sizeof device->streams[0]);
        assert(device->streams);
    }
    device->streams[device->stream_count++] = stream;
    pthread_mutex_unlock(&device->streams_mutex);
}

static void unwatch_stream(kvs_cuda *device, uint64_t stream) {
    pthread_mutex_lock(&device->streams_mutex);
    for (uint32_t i = 0; i < device->stream_count; i++) {
        if (device->streams[i] == stream) {
            device->streams[i] = device->streams[--device->stream_count];
            break;
        }
    }
    pthread_mutex_unlock(&device->streams_mutex);
}

int kvs_cuda_stream_new(kvs_cuda *device, int priority, uint64_t *stream) {
    struct guard guard;
    int result = enter(device, &guard);
    if (result) {
        return result;
    }
    result =
        device->call.cuStreamCreateWithPriority((handle_t *)stream, STREAM_NON_BLOCKING, priority);
    if (result == 0) {
        watch_stream(device, *stream);
    }
    return leave(device, &guard, result);
}

int kvs_cuda_stream_free(kvs_cuda *device, uint64_t stream) {
    unwatch_stream(device, stream);
    WITH_CONTEXT(device, device->call.cuStreamDestroy((handle_t)(uintptr_t)stream));
}

int kvs_cuda_stream_query(kvs_cuda *device, uint64_t stream) {
    WITH_CONTEXT(device, device->call.cuStreamQuery((handle_t)(uintptr_t)stream));
}

int kvs_cuda_stream_synchronize(kvs_cuda *device, uint64_t stream) {
    WITH_CONTEXT(device, device->call.cuStreamSynchronize((handle_t)(uintptr_t)stream));
}

int kvs_cuda_stream_capturing(kvs_cuda *device, uint64_t stream, int *capturing) {
    struct guard guard;
    int result = enter(device, &guard);
    if (result) {
        return result;
    }
    result = device->call.cuStreamIsCapturing((handle_t)(uintptr_t)stream, capturing);
    if (result == CODE_CAPTURE_IMPLICIT) { /* the legacy stream while another stream captures */
        *capturing = 1;
        result = 0;
    }
    return leave(device, &guard, result);
}

int kvs_cuda_alloc(kvs_cuda *device, uint64_t bytes, uint64_t *address) {
    WITH_CONTEXT(device, device->call.cuMemAlloc((deviceptr_t *)address, bytes));
}

int kvs_cuda_free(kvs_cuda *device, uint64_t address) {
    WITH_CONTEXT(device, device->call.cuMemFree(address));
}

int kvs_cuda_memset(kvs_cuda *device, uint64_t stream, uint64_t address, int value,
                    uint64_t bytes) {
    WITH_CONTEXT(device, device->call.cuMemsetD8Async(address, (unsigned char)value, bytes,
                                                      (handle_t)(uintptr_t)stream));
}

int kvs_cuda_memcpy(kvs_cuda *device, uint64_t stream, uint64_t target, uint64_t source,
                    uint64_t bytes) {
    WITH_CONTEXT(device,
                 device->call.cuMemcpyAsync(target, source, bytes, (handle_t)(uintptr_t)stream));
}

/* -- host memory --------------------------------------------------------------------------------
 */

int kvs_cuda_register(kvs_cuda *device, uint64_t address, uint64_t bytes) {
    struct guard guard;
    int result = enter(device, &guard);
    if (result) {
        return result;
    }
    struct driver *call = &device->call;
    void *host = (void *)(uintptr_t)address;
    struct region region = {.host = address, .bytes = bytes};
    result = call->cuMemHostRegister(host, bytes, REGISTER_PORTABLE | REGISTER_DEVICEMAP);
    if (result == 0) {
        result = call->cuMemHostGetDevicePointer(&region.device, host, 0);
        if (result) {
            call->cuMemHostUnregister(host);
        }
    } else if (result == ALREADY_REGISTERED) {
        /* Registered through another device, portably: good if it covers the whole range. */
        deviceptr_t last = 0;
        char *end = (char *)host + bytes - 1;
        region.is_shared = true;
        if (call->cuMemHostGetDevicePointer(&region.device, host, 0) == 0 &&
            call->cuMemHostGetDevicePointer(&last, end, 0) == 0 &&
            last - region.device == bytes - 1) {
            result = 0;
        }
    }
    if (result == 0) {
        pthread_mutex_lock(&device->mutex);
        if (device->region_count == device->region_room) {
            device->region_room = device->region_room ? 2 * device->region_room : 16;
            device->regions =
                realloc(device->regions, device->region_room * sizeof *device->regions);
            assert(device->regions);
        }
        device->regions[device->region_count++] = region;
        pthread_mutex_unlock(&device->mutex);
    }
    return leave(device, &guard, result);
}

int kvs_cuda_unregister(kvs_cuda *device, uint64_t address) {
    pthread_mutex_lock(&device->mutex);
    int found = -ENOENT;
    bool is_shared = false;
    for (uint32_t i = 0; i < device->region_count && found; i++) {
        if (device->regions[i].host == address) {
            is_shared = device->regions[i].is_shared;
            device->regions[i] = device->regions[--device->region_count];
            found = 0;
        }
    }
    pthread_mutex_unlock(&device->mutex);
    if (found || is_shared) {
        return found;
    }
    WITH_CONTEXT(device, device->call.cuMemHostUnregister((void *)(uintptr_t)address));
}

/* The device's address of a word in registered memory, 0 if it is in none. */
static deviceptr_t device_address(kvs_cuda *device, uint64_t address) {
    deviceptr_t found = 0;
    pthread_mutex_lock(&device->mutex);
    for (uint32_t i = 0; i < device->region_count && !found; i++) {
        const struct region *region = &device->regions[i];
        if (address >= region->host && address + 8 <= region->host + region->bytes) {
            found = region->device + (address - region->host);
        }
    }
    pthread_mutex_unlock(&device->mutex);
    return found;
}

/* -- copies -------------------------------------------------------------------------------------
 */

static int copy_loop(kvs_cuda *device, handle_t stream, const kvs_run *runs, uint64_t count,
                     uint64_t *enqueued) {
    int result = 0;
    for (uint64_t i = 0; i < count && result == 0; i++) {
        result = device->call.cuMemcpyAsync(runs[i].target, runs[i].source, runs[i].bytes, stream);
        *enqueued += result == 0;
    }
    device->counters.driver_calls += count;
    device->counters.loop_calls++;
    return result;
}

static int copy_batch(kvs_cuda *device, handle_t stream, const kvs_run *runs, uint64_t count,
                      uint64_t *enqueued) {
    deviceptr_t *targets = malloc(3 * BATCH_RUNS_MAX * sizeof *targets);
    if (!targets) {
        return -ENOMEM;
    }
    deviceptr_t *sources = targets + BATCH_RUNS_MAX;
    size_t *sizes = (size_t *)(sources + BATCH_RUNS_MAX);
    struct copy_attributes attributes = {.source_order = device->source_order,
                                         .flags = PREFER_OVERLAP};
    int result = 0;
    uint64_t done = 0;
    while (done < count && result == 0) {
        uint64_t bytes = 0, used = 0;
        while (done + used < count && used < BATCH_RUNS_MAX &&
               (used == 0 || bytes + runs[done + used].bytes <= BATCH_BYTES_MAX)) {
            targets[used] = runs[done + used].target;
            sources[used] = runs[done + used].source;
            sizes[used] = runs[done + used].bytes;
            bytes += sizes[used++];
        }
        size_t first = 0, failed_index = 0;
        result = device->batch_copy == 2
                     ? device->call.batch_13(targets, sources, sizes, used, &attributes, &first, 1,
                                             stream)
                     : device->call.batch_12(targets, sources, sizes, used, &attributes, &first, 1,
                                             &failed_index, stream);
        device->counters.driver_calls++;
        device->counters.batch_calls++;
        if (result == 0) {
            done += used;
            *enqueued += used;
        }
    }
    free(targets);
    if (result == CODE_NOT_SUPPORTED) { /* this driver lists the call and lacks it: never again */
        device->batch_copy = 0;
        result = copy_loop(device, stream, runs + done, count - done, enqueued);
    }
    return result;
}

/* One run, small runs, the legacy stream, no batch call: a loop of single copies is as good or the
   only way. Otherwise batches. */
static int copy_runs(kvs_cuda *device, handle_t stream, const kvs_run *runs, uint64_t count,
                     uint64_t *enqueued) {
    bool small = count > 0 && runs[0].bytes < device->min_dma;
    if (count <= 1 || small || stream == NULL || device->batch_copy == 0) {
        return copy_loop(device, stream, runs, count, enqueued);
    }
    return copy_batch(device, stream, runs, count, enqueued);
}

static void count_pages(kvs_cuda *device, const kvs_pages *pages, uint64_t count, int to_device) {
    uint64_t page_bytes = 0;
    for (uint64_t i = 0; i < pages->piece_count; i++) {
        page_bytes += pages->piece_bytes[i];
    }
    device->counters.batches++;
    *(to_device ? &device->counters.pages_to_device : &device->counters.pages_to_host) += count;
    *(to_device ? &device->counters.bytes_to_device : &device->counters.bytes_to_host) +=
        count * page_bytes;
}

int kvs_cuda_copy(kvs_cuda *device, uint64_t stream, const kvs_pages *pages,
                  const int32_t *device_slots, const int32_t *host_slots, uint64_t count,
                  int to_device, uint64_t *enqueued) {
    *enqueued = 0;
    kvs_run *runs = malloc((count * pages->piece_count + 1) * sizeof *runs);
    if (!runs) {
        return -ENOMEM;
    }
    uint64_t run_count = kvs_pages_expand(pages, device_slots, host_slots, count, to_device, runs);
    struct guard guard;
    int result = enter(device, &guard);
    if (result == 0) {
        result = copy_runs(device, (handle_t)(uintptr_t)stream, runs, run_count, enqueued);
        if (result == 0) {
            count_pages(device, pages, count, to_device);
        }
        leave(device, &guard, result);
    }
    free(runs);
    return result;
}

struct piece {
    uint64_t base, stride, bytes, offset;
};

struct scatter_args {
    uint64_t staging;
    uint64_t pieces;
    uint64_t page_bytes;
    uint32_t to_pool;
    uint32_t unused;
    int32_t slots[SCATTER_PAGES_MAX];
};

int kvs_cuda_upload_pieces(kvs_cuda *device, const kvs_pages *pages, uint64_t *address) {
    struct piece *table = malloc(pages->piece_count * sizeof *table);
    if (!table) {
        return -ENOMEM;
    }
    uint64_t offset = 0;
    bool aligned = true;
    for (uint64_t i = 0; i < pages->piece_count; i++) {
        table[i] = (struct piece){pages->piece_bases[i], pages->piece_strides[i],
                                  pages->piece_bytes[i], offset};
        aligned &= (table[i].base | table[i].stride | table[i].bytes | offset) % 16 == 0;
        offset += pages->piece_bytes[i];
    }
    int result = aligned && device->module ? 0 : CODE_NOT_SUPPORTED;
    uint64_t bytes = pages->piece_count * sizeof *table;
    if (result == 0) {
        result = kvs_cuda_alloc(device, bytes, address);
    }
    if (result == 0) {
        uint64_t stream = (uint64_t)(uintptr_t)device->service_stream;
        result = kvs_cuda_memcpy(device, stream, *address, (uint64_t)(uintptr_t)table, bytes);
        if (result == 0) {
            result = kvs_cuda_stream_synchronize(device, stream);
        }
    }
    free(table);
    return result;
}

int kvs_cuda_copy_staged(kvs_cuda *device, uint64_t stream, const kvs_pages *pages, uint64_t pieces,
                         uint64_t staging, uint64_t staging_bytes, const int32_t *device_slots,
                         const int32_t *host_slots, uint64_t count, int to_device,
                         uint64_t *enqueued) {
    *enqueued = 0;
    uint64_t page_bytes = 0;
    for (uint64_t i = 0; i < pages->piece_count; i++) {
        page_bytes += pages->piece_bytes[i];
    }
    uint64_t group = staging_bytes / page_bytes;
    group = group > SCATTER_PAGES_MAX ? SCATTER_PAGES_MAX : group;
    if (group == 0 || !device->module) {
        return CODE_NOT_SUPPORTED;
    }
    struct scatter_args *args = calloc(1, sizeof *args);
    kvs_run *runs = malloc(SCATTER_PAGES_MAX * sizeof *runs);
    int32_t *order = malloc(SCATTER_PAGES_MAX * sizeof *order);
    struct guard guard;
    handle_t kernel = NULL;
    int result = args && runs && order ? enter(device, &guard) : -ENOMEM;
    if (result) {
        free(args), free(runs), free(order);
        return result;
    }
    /* the staging area as a pool of one piece, so that the same expansion lays out the copies */
    kvs_pages staged = *pages;
    staged.piece_count = 1;
    staged.piece_bases = &staging;
    staged.piece_strides = &page_bytes;
    staged.piece_bytes = &page_bytes;
    result = device->call.cuModuleGetFunction(&kernel, device->module, "kvs_scatter");
    for (uint64_t done = 0; done < count && result == 0; done += group) {
        uint64_t used = count - done < group ? count - done : group;
        for (uint64_t i = 0; i < used; i++) {
            args->slots[i] = device_slots[done + i];
            order[i] = (int32_t)i;
        }
        args->staging = staging;
        args->pieces = pieces;
        args->page_bytes = page_bytes;
        args->to_pool = to_device != 0;
        void *parameters[] = {args};
        uint64_t run_count =
            kvs_pages_expand(&staged, order, host_slots + done, used, to_device, runs);
        if (to_device) {
            result = copy_runs(device, (handle_t)(uintptr_t)stream, runs, run_count, enqueued);
        }
        if (result == 0) {
            result = device->call.cuLaunchKernel(kernel, (unsigned)pages->piece_count,
                                                 (unsigned)used, 1, 128, 1, 1, 0,
                                                 (handle_t)(uintptr_t)stream, parameters, NULL);
        }
        if (result == 0 && !to_device) {
            result = copy_runs(device, (handle_t)(uintptr_t)stream, runs, run_count, enqueued);
        }
    }
    if (result == 0) {
        count_pages(device, pages, count, to_device);
        device->counters.staged_calls++;
    }
    leave(device, &guard, result);
    free(args), free(runs), free(order);
    return result;
}

/* -- words --------------------------------------------------------------------------------------
 */

int kvs_cuda_wait_word(kvs_cuda *device, uint64_t stream, uint64_t word, uint64_t value, int bits) {
    assert(bits == 32 || bits == 64);
    deviceptr_t address = device_address(device, word);
    handle_t handle = (handle_t)(uintptr_t)stream;
    if (!address) {
        return CODE_INVALID_VALUE;
    }
    WITH_CONTEXT(
        device, bits == 64
                    ? device->call.cuStreamWaitValue64(handle, address, value, WAIT_GEQ)
                    : device->call.cuStreamWaitValue32(handle, address, (uint32_t)value, WAIT_GEQ));
}

int kvs_cuda_write_word(kvs_cuda *device, uint64_t stream, uint64_t word, uint64_t value) {
    deviceptr_t address = device_address(device, word);
    if (!address) {
        return CODE_INVALID_VALUE;
    }
    WITH_CONTEXT(device,
                 device->call.cuStreamWriteValue64((handle_t)(uintptr_t)stream, address, value, 0));
}

uint64_t kvs_cuda_lane_word(kvs_cuda *device, uint32_t lane) {
    return lane < SERVICE_LANES ? (uint64_t)(uintptr_t)device->service + 64 * lane : 0;
}

static bool idle_within(kvs_cuda *device, uint64_t stream, uint64_t timeout_ns) {
    uint64_t begin = kvs_now_ns();
    int result;
    do {
        result = kvs_cuda_stream_query(device, stream);
    } while (result == CODE_NOT_READY && kvs_now_ns() - begin < timeout_ns);
    return result == 0;
}

int kvs_cuda_probe_memops(kvs_cuda *device, int bits, uint64_t timeout_ns) {
    uint64_t stream = 0, rescue = 0;
    uint64_t word = (uint64_t)(uintptr_t)device->service + 64 * (SERVICE_LANES + (bits == 32));
    uint64_t value = ++device->probe_value;
    int result = kvs_cuda_stream_new(device, 0, &stream);
    if (result) {
        return result;
    }
    result = kvs_cuda_wait_word(device, stream, word, value, bits);
    if (result == 0) {
        uint64_t begin = kvs_now_ns();
        while (kvs_now_ns() - begin < 200000) { /* let the wait reach the device first */
        }
        __atomic_store_n((uint64_t *)(uintptr_t)word, value, __ATOMIC_RELEASE);
        do {
            result = kvs_cuda_stream_query(device, stream);
        } while (result == CODE_NOT_READY && kvs_now_ns() - begin < timeout_ns);
        if (result == CODE_NOT_READY) { /* a CPU store does not wake it: free it by the device */
            result = CODE_NOT_SUPPORTED;
            bool freed = kvs_cuda_stream_new(device, 0, &rescue) == 0;
            if (freed) {
                kvs_cuda_write_word(device, rescue, word, value);
                freed = idle_within(device, rescue, timeout_ns);
                kvs_cuda_stream_free(device, rescue);
            }
            if (!freed || !idle_within(device, stream, timeout_ns)) {
                device->service_is_stuck = true; /* a stream that never ends still reads the word */
                return result;
            }
        }
    }
    kvs_cuda_stream_free(device, stream);
    return result;
}

/* -- events -------------------------------------------------------------------------------------
 */

static kvs_cuda_event *event_make(kvs_cuda *device, handle_t handle, bool is_ours) {
    kvs_cuda_event *event = calloc(1, sizeof *event);
    if (event) {
        event->device = device;
        event->handle = handle;
        event->references = 1;
        event->is_ours = is_ours;
        __atomic_add_fetch(&device->references, 1, __ATOMIC_RELAXED);
    }
    return event;
}

static int event_create(kvs_cuda *device, handle_t *handle) {
    WITH_CONTEXT(device, device->call.cuEventCreate(handle, EVENT_DISABLE_TIMING));
}

kvs_cuda_event *kvs_cuda_event_new(kvs_cuda *device, int *error) {
    pthread_mutex_lock(&device->mutex);
    kvs_cuda_event *event = device->free_events;
    if (event) {
        device->free_events = event->next;
        event->next = NULL;
        event->references = 1;
        __atomic_add_fetch(&device->references, 1, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&device->mutex);
    *error = 0;
    if (!event) {
        handle_t handle = NULL;
        *error = event_create(device, &handle);
        event = *error ? NULL : event_make(device, handle, true);
    }
    return event;
}

kvs_cuda_event *kvs_cuda_event_wrap(kvs_cuda *device, uint64_t handle) {
    return event_make(device, (handle_t)(uintptr_t)handle, false);
}

void kvs_cuda_event_retain(kvs_cuda_event *event) {
    __atomic_add_fetch(&event->references, 1, __ATOMIC_RELAXED);
}

void kvs_cuda_event_free(kvs_cuda_event *event) {
    kvs_cuda *device = event->device;
    if (__atomic_sub_fetch(&event->references, 1, __ATOMIC_ACQ_REL) != 0) {
        return;
    }
    pthread_mutex_lock(&device->mutex);
    bool pooled = event->is_ours && !device->is_closed;
    if (pooled) {
        event->next = device->free_events;
        device->free_events = event;
    }
    pthread_mutex_unlock(&device->mutex);
    if (!pooled) {
        free(event);
    }
    release(device);
}

int kvs_cuda_event_record(kvs_cuda_event *event, uint64_t stream) {
    WITH_CONTEXT(event->device,
                 event->device->call.cuEventRecord(event->handle, (handle_t)(uintptr_t)stream));
}

static int event_state(kvs_cuda *device, int result) {
    noted(device, result);
    return result == 0 ? 1 : result == CODE_NOT_READY ? 0 : -result;
}

int kvs_cuda_event_query(kvs_cuda_event *event) {
    kvs_cuda *device = event->device;
    struct guard guard;
    int result = enter(device, &guard);
    if (result) {
        return result == -ESHUTDOWN ? 1 : -result;
    }
    return event_state(device, leave(device, &guard, device->call.cuEventQuery(event->handle)));
}

int kvs_cuda_event_poll(kvs_cuda_event *event) {
    return event_state(event->device, event->device->call.cuEventQuery(event->handle));
}

int kvs_cuda_wait_event(kvs_cuda_event *event, uint64_t stream) {
    WITH_CONTEXT(event->device, event->device->call.cuStreamWaitEvent((handle_t)(uintptr_t)stream,
                                                                      event->handle, 0));
}

/* -- for the watch ------------------------------------------------------------------------------
 */

int kvs_cuda_thread_begin(kvs_cuda *device) {
    int mode = CAPTURE_RELAXED;
    int result = device->call.cuCtxSetCurrent(device->context);
    if (result == 0) {
        result = device->call.cuThreadExchangeStreamCaptureMode(&mode);
    }
    return noted(device, result);
}

/* A word never says that the context is lost, so every stream of ours is asked: the one whose work
 * was lost answers with the code. While a gate is parked no call reports a fault at all (measured);
 * the code appears once the gates are open. A capturing stream is left out: asking it would end the
 * capture.
 */
int kvs_cuda_probe_error(kvs_cuda *device) {
    int result = kvs_cuda_error(device);
    if (result == 0) {
        result = device->call.cuStreamQuery(device->service_stream);
    }
    pthread_mutex_lock(&device->streams_mutex);
    for (uint32_t i = 0; i < device->stream_count && !kvs_device_code_is_sticky(result); i++) {
        handle_t stream = (handle_t)(uintptr_t)device->streams[i];
        int capturing = 0;
        result = device->call.cuStreamIsCapturing(stream, &capturing);
        if (result == 0 && !capturing) {
            result = device->call.cuStreamQuery(stream);
        }
    }
    pthread_mutex_unlock(&device->streams_mutex);
    return kvs_device_code_is_sticky(noted(device, result)) ? result : 0;
}

/* -- kernels, host functions, measurements ------------------------------------------------------
 */

int kvs_cuda_launch(kvs_cuda *device, uint64_t stream, const char *kernel, uint32_t blocks,
                    uint32_t threads, const uint64_t *args, uint32_t arg_count) {
    void *parameters[16];
    assert(arg_count <= 16);
    if (!device->module) {
        return CODE_NOT_SUPPORTED;
    }
    for (uint32_t i = 0; i < arg_count; i++) {
        parameters[i] = (void *)&args[i];
    }
    struct guard guard;
    handle_t function = NULL;
    int result = enter(device, &guard);
    if (result) {
        return result;
    }
    result = device->call.cuModuleGetFunction(&function, device->module, kernel);
    if (result == 0) {
        result = device->call.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0,
                                             (handle_t)(uintptr_t)stream, parameters, NULL);
    }
    return leave(device, &guard, result);
}

struct host_post {
    kvs_cq *queue;
    uint64_t token;
};

static void post_from_driver(void *argument) {
    struct host_post *post = argument;
    kvs_cq_post(post->queue, post->token, 0, KVS_FLAG_VERDICT | KVS_FLAG_END, 0);
    kvs_cq_release(post->queue);
    free(post);
}

int kvs_cuda_host_post(kvs_cuda *device, uint64_t stream, kvs_cq *queue, uint64_t token) {
    struct guard guard;
    struct host_post *post = malloc(sizeof *post);
    int result = post ? enter(device, &guard) : -ENOMEM;
    if (result) {
        free(post);
        return result;
    }
    *post = (struct host_post){queue, token};
    kvs_cq_retain(queue);
    result = device->call.cuLaunchHostFunc((handle_t)(uintptr_t)stream, post_from_driver, post);
    if (result) {
        kvs_cq_release(queue);
        free(post);
    }
    return leave(device, &guard, result);
}

int kvs_spin_until(uint64_t word, uint64_t value, uint64_t timeout_ns, uint64_t *seen_ns) {
    uint64_t begin = kvs_now_ns(), now = begin;
    const uint64_t *flag = (const uint64_t *)(uintptr_t)word;
    while ((int64_t)(__atomic_load_n(flag, __ATOMIC_ACQUIRE) - value) < 0) {
        now = kvs_now_ns();
        if (now - begin > timeout_ns) {
            return -ETIME;
        }
    }
    *seen_ns = kvs_now_ns();
    return 0;
}

int kvs_spin_pair(uint64_t first, uint64_t first_value, uint64_t second, uint64_t second_value,
                  uint64_t timeout_ns, uint64_t *seen_ns) {
    int result = kvs_spin_until(first, first_value, timeout_ns, &seen_ns[0]);
    return result ? result : kvs_spin_until(second, second_value, timeout_ns, &seen_ns[1]);
}

int kvs_cuda_gate_latency(kvs_cuda *device, uint64_t stream, uint64_t gate_word, uint64_t done_word,
                          uint64_t first_value, uint32_t count, uint64_t hold_ns,
                          uint64_t *out_ns) {
    int result = 0;
    for (uint32_t i = 0; i < count && result == 0; i++) {
        uint64_t value = first_value + i, seen = 0;
        result = kvs_cuda_wait_word(device, stream, gate_word, value, 64);
        if (result == 0) {
            result = kvs_cuda_write_word(device, stream, done_word, value);
        }
        uint64_t begin = kvs_now_ns();
        while (kvs_now_ns() - begin < hold_ns) {
        }
        begin = kvs_now_ns();
        __atomic_store_n((uint64_t *)(uintptr_t)gate_word, value, __ATOMIC_RELEASE);
        if (result == 0) {
            result = kvs_spin_until(done_word, value, 5000000000u, &seen);
            out_ns[i] = seen - begin;
        }
    }
    return result;
}

int kvs_cuda_enqueue_cost(kvs_cuda *device, uint64_t stream, int call, uint64_t a, uint64_t b,
                          uint32_t count, uint64_t *total_ns) {
    int result = 0;
    kvs_cuda_event *event = kvs_cuda_event_new(device, &result);
    if (!event) {
        return result;
    }
    uint64_t begin = kvs_now_ns();
    for (uint32_t i = 0; i < count && result == 0; i++) {
        switch (call) {
        case 0:
            result = kvs_cuda_memcpy(device, stream, a, b, 4096);
            break;
        case 1:
            result = kvs_cuda_wait_word(device, stream, a, 0, 64);
            break;
        case 2:
            result = kvs_cuda_write_word(device, stream, a, b);
            break;
        case 3:
            result = kvs_cuda_event_record(event, stream);
            break;
        case 4:
            result = kvs_cuda_event_query(event) < 0 ? CODE_INVALID_VALUE : 0;
            break;
        default:
            result = CODE_INVALID_VALUE;
        }
    }
    *total_ns = kvs_now_ns() - begin;
    kvs_cuda_event_free(event);
    return result;
}
