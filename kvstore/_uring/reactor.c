/* The ring engine: one thread that owns every io_uring, and a helper for large checksums.

   The reactor takes pieces from the scheduler, hands them to the kernel in one call per round,
   and reaps in batches. It creates the rings itself (SINGLE_ISSUER, DEFER_TASKRUN where the kernel
   has them) and takes neither the GIL nor any lock that a device call could hold.

   Sleep: under the lock it finds nothing to do, sets `sleeping` and waits in the kernel, with a
   read on an eventfd, the doorbell, among its own operations. Whoever adds work clears `sleeping`
   under the same lock and rings. Nothing is polled by time; the only timeout is the next deadline.

   With three kernel rings (INV-137) nothing can wait in all of them at once. The doorbell is then
   registered as the eventfd of each, so that completions ring it too, and the wait is a poll on
   it. (A poll on a ring's own descriptor is not woken by deferred task work.) */
#include "engine.h"

#include <liburing.h>
#include <poll.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <unistd.h>

#ifndef IORING_REGISTER_CLONE_BUFFERS_OP
#define IORING_REGISTER_CLONE_BUFFERS_OP 30 /* 6.12 */
#define KVS_CLONE_DST_REPLACE 2u            /* 6.13 */
#endif

/* Pieces of one io_uring_enter. The kernel holds a batch back until it is complete, so a large one
   leaves the device idle: 64 KiB reads reached 0.89 of fio with 64, 1.0 with 8. An idle device
   gets one piece to begin with while the others are being prepared. */
enum { BATCH = 8, FIRST_BATCH = 1, WORK_BATCH = 16, REAP = 256, RINGS_MAX = 3 };
#define DOORBELL UINT64_MAX

typedef struct {
    uint32_t src_fd, flags, src_off, dst_off, nr, pad[3];
} kvs_clone;

typedef struct {
    uint64_t address, length;
} kvs_slab;

/* A request of the loop that only the owner of the rings may carry out. */
typedef struct kvs_command {
    struct kvs_command *next;
    uint64_t address, length;
    int result;
    bool add, done;
} kvs_command;

struct kvs_reactor {
    struct io_uring rings[RINGS_MAX];
    uint32_t ring_count;
    bool fixed_files, fixed_buffers[RINGS_MAX];
    bool slots_used[KVS_FILES_MAX * 2];
    kvs_slab slabs[KVS_SLABS_MAX];
    uint32_t slab_end; /* behind the last slab in use */
    int doorbell;
    uint64_t doorbell_value;
    bool doorbell_armed;
    pthread_t thread, helper;
    pthread_cond_t answered; /* start-up and commands */
    int started;             /* 1: running, negative: why not */
    kvs_command *commands;   /* of callers that wait */
    struct {
        uint32_t piece;
        int32_t result;
    } reaped[REAP];
    uint32_t reaped_count;
};

/* ---- set-up ---- */

static int open_ring(kvs_engine *engine, struct io_uring *ring) {
    static const struct {
        uint32_t without, flags;
    } ladder[] = {
        {KVS_WITHOUT_DEFER, IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN},
        {KVS_WITHOUT_COOP, IORING_SETUP_COOP_TASKRUN},
        {KVS_WITHOUT_SUBMIT_ALL, IORING_SETUP_SUBMIT_ALL},
        {KVS_WITHOUT_CQSIZE, IORING_SETUP_CQSIZE | IORING_SETUP_CLAMP},
    };
    /* one more for the doorbell, so that the submission queue cannot be full (INV-128) */
    uint32_t entries = engine->config.sched.depth + 1, without = engine->config.without;
    int result = -EINVAL;
    /* Flags the kernel does not know are dropped stepwise, newest first. */
    for (uint32_t step = 0; step <= 4 && result == -EINVAL; step++) {
        struct io_uring_params params = {.cq_entries = 4 * entries};
        for (uint32_t i = step; i < 4; i++)
            if (!(without & ladder[i].without)) params.flags |= ladder[i].flags;
        result = io_uring_queue_init_params(entries, ring, &params);
        if (result != 0) continue;
        uint32_t needed = IORING_FEAT_EXT_ARG | IORING_FEAT_NODROP | IORING_FEAT_SUBMIT_STABLE;
        if ((params.features & needed) != needed) {
            io_uring_queue_exit(ring);
            return -EOPNOTSUPP;
        }
        engine->counts.setup_flags = params.flags;
        engine->counts.features = params.features;
        engine->counts.ring_entries = params.sq_entries;
        io_uring_ring_dontfork(ring);
    }
    return result;
}

/* Set-up alone proves nothing: a filter may refuse io_uring_enter only. */
static int prove_ring(struct io_uring *ring) {
    struct io_uring_sqe *sqe = io_uring_get_sqe(ring);
    struct io_uring_cqe *cqe;
    io_uring_prep_nop(sqe);
    int result = io_uring_submit_and_wait(ring, 1);
    if (result < 0) return result;
    do result = io_uring_wait_cqe(ring, &cqe);
    while (result == -EINTR);
    if (result < 0) return result;
    result = cqe->res;
    io_uring_cqe_seen(ring, cqe);
    return result;
}

static int probe_opcodes(struct io_uring *ring) {
    static const int needed[] = {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_READ_FIXED,
                                 IORING_OP_WRITE_FIXED};
    struct io_uring_probe *probe = io_uring_get_probe_ring(ring);
    if (!probe) return -EOPNOTSUPP;
    int result = 0;
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
        if (!io_uring_opcode_supported(probe, needed[i])) result = -EOPNOTSUPP;
    io_uring_free_probe(probe);
    return result;
}

static int open_rings(kvs_engine *engine) {
    kvs_reactor *reactor = engine->reactor;
    uint32_t without = engine->config.without, count = engine->config.kernel_rings;
    int result = 0;
    while (result == 0 && reactor->ring_count < count) {
        struct io_uring *ring = &reactor->rings[reactor->ring_count];
        result = open_ring(engine, ring);
        if (result != 0) break;
        reactor->ring_count++;
        result = prove_ring(ring);
        if (result == 0) result = probe_opcodes(ring);
        unsigned bounded[2] = {engine->config.iowq_workers, 0}; /* INV-130 */
        if (result == 0) io_uring_register_iowq_max_workers(ring, bounded);
    }
    reactor->fixed_files = result == 0 && !(without & KVS_WITHOUT_FIXED_FILES);
    for (uint32_t i = 0; i < reactor->ring_count && result == 0; i++) {
        struct io_uring *ring = &reactor->rings[i];
        if (reactor->fixed_files && io_uring_register_files_sparse(ring, KVS_FILES_MAX * 2) != 0)
            reactor->fixed_files = false;
        reactor->fixed_buffers[i] = !(without & KVS_WITHOUT_FIXED_BUFFERS);
        if (count > 1) result = io_uring_register_eventfd(ring, reactor->doorbell);
        if (i == 0 && reactor->fixed_buffers[0])
            reactor->fixed_buffers[0] = io_uring_register_buffers_sparse(ring, KVS_SLABS_MAX) == 0;
    }
    for (uint32_t i = 1; i < reactor->ring_count; i++) reactor->fixed_buffers[i] = false;
    engine->counts.fixed_files = reactor->fixed_files;
    if (result != 0)
        while (reactor->ring_count) io_uring_queue_exit(&reactor->rings[--reactor->ring_count]);
    return result;
}

/* ---- what only the owner may do: memory and files of the rings ---- */

static int update_slab(kvs_reactor *reactor, uint32_t slot, uint64_t address, uint64_t length) {
    struct iovec part = {.iov_base = (void *)(uintptr_t)address, .iov_len = length};
    int result = io_uring_register_buffers_update_tag(&reactor->rings[0], slot, &part, NULL, 1);
    return result < 0 ? result : 0;
}

/* INV-137: registered once, on the first ring; the others share it where the kernel can. */
static void clone_buffers(kvs_engine *engine) {
    kvs_reactor *reactor = engine->reactor;
    kvs_clone clone = {.src_fd = (uint32_t)reactor->rings[0].ring_fd};
    engine->counts.cloned = reactor->ring_count > 1;
    for (uint32_t i = 1; i < reactor->ring_count; i++) {
        clone.flags = reactor->fixed_buffers[i] ? KVS_CLONE_DST_REPLACE : 0;
        int fd = reactor->rings[i].ring_fd;
        reactor->fixed_buffers[i] =
            io_uring_register(fd, IORING_REGISTER_CLONE_BUFFERS_OP, &clone, 1) >= 0;
        if (!reactor->fixed_buffers[i]) engine->counts.cloned = 0;
    }
}

static int add_slab(kvs_engine *engine, uint64_t address, uint64_t length) {
    kvs_reactor *reactor = engine->reactor;
    if (!reactor->fixed_buffers[0]) return -EOPNOTSUPP;
    uint32_t slot = 0;
    while (slot < KVS_SLABS_MAX && reactor->slabs[slot].length) slot++;
    if (slot == KVS_SLABS_MAX) return -ENOSPC;
    int result = update_slab(reactor, slot, address, length);
    if (result != 0) return result;
    reactor->slabs[slot] = (kvs_slab){.address = address, .length = length};
    if (slot >= reactor->slab_end) reactor->slab_end = slot + 1;
    return 0;
}

static int remove_slab(kvs_reactor *reactor, uint64_t address) {
    for (uint32_t slot = 0; slot < reactor->slab_end; slot++) {
        if (!reactor->slabs[slot].length || reactor->slabs[slot].address != address) continue;
        reactor->slabs[slot] = (kvs_slab){0};
        while (reactor->slab_end && !reactor->slabs[reactor->slab_end - 1].length)
            reactor->slab_end--;
        return update_slab(reactor, slot, 0, 0);
    }
    return -ENOENT;
}

static void run_command(kvs_engine *engine) {
    kvs_reactor *reactor = engine->reactor;
    kvs_command *command = reactor->commands;
    reactor->commands = command->next;
    pthread_mutex_unlock(&engine->lock); /* pinning takes milliseconds */
    int result = command->add ? add_slab(engine, command->address, command->length)
                              : remove_slab(reactor, command->address);
    uint64_t bytes = 0;
    for (uint32_t slot = 0; slot < reactor->slab_end; slot++) bytes += reactor->slabs[slot].length;
    if (result == 0 && reactor->ring_count > 1) clone_buffers(engine);
    pthread_mutex_lock(&engine->lock);
    engine->counts.registered_bytes = bytes;
    engine->counts.fixed_buffers = bytes > 0;
    command->result = result;
    command->done = true;
    pthread_cond_broadcast(&reactor->answered);
}

int kvs_reactor_memory(kvs_engine *engine, uint64_t address, uint64_t length, bool add) {
    kvs_out out = {.kick = true};
    kvs_command command = {.address = address, .length = length, .add = add};
    kvs_engine_lock(engine);
    if (engine->quit) {
        pthread_mutex_unlock(&engine->lock);
        return -ESHUTDOWN;
    }
    kvs_reactor *reactor = engine->reactor;
    command.next = reactor->commands;
    reactor->commands = &command;
    kvs_engine_unlock(engine, &out);
    kvs_engine_lock(engine);
    while (!command.done) pthread_cond_wait(&reactor->answered, &engine->lock);
    pthread_mutex_unlock(&engine->lock);
    return command.result;
}

/* Puts a descriptor into the file tables before its first piece; false: use the plain one. */
static bool use_file_slot(kvs_reactor *reactor, uint32_t slot, int fd) {
    if (!reactor->fixed_files) return false;
    if (reactor->slots_used[slot]) return true;
    for (uint32_t i = 0; i < reactor->ring_count; i++)
        if (io_uring_register_files_update(&reactor->rings[i], slot, &fd, 1) < 0) return false;
    reactor->slots_used[slot] = true;
    return true;
}

/* Lets go of unregistered files, so that closing them frees them; under the lock. */
static void forget_files(kvs_engine *engine) {
    kvs_reactor *reactor = engine->reactor;
    int none = -1;
    for (uint32_t slot = 0; slot < KVS_FILES_MAX * 2; slot++) {
        kvs_file *file = &engine->files[slot / 2];
        if (!file->stale) continue;
        for (uint32_t i = 0; i < reactor->ring_count && reactor->slots_used[slot]; i++)
            io_uring_register_files_update(&reactor->rings[i], slot, &none, 1);
        reactor->slots_used[slot] = false;
        if (slot % 2) file->stale = false;
    }
    engine->files_stale = false;
}

/* ---- pieces into the kernel and back ---- */

static int find_slab(const kvs_reactor *reactor, uint64_t address, uint32_t length) {
    for (uint32_t slot = 0; slot < reactor->slab_end; slot++) {
        const kvs_slab *slab = &reactor->slabs[slot];
        if (address >= slab->address && address + length <= slab->address + slab->length)
            return (int)slot;
    }
    return -1;
}

static void prepare(kvs_engine *engine, const kvs_dispatch *run) {
    kvs_reactor *reactor = engine->reactor;
    uint32_t at = reactor->ring_count > 1 ? run->io_class : 0;
    struct io_uring_sqe *sqe = io_uring_get_sqe(&reactor->rings[at]);
    assert(sqe); /* INV-128 */
    if (run->skip) {
        io_uring_prep_nop(sqe);
        io_uring_sqe_set_data64(sqe, run->piece);
        return;
    }
    if (run->source) kvs_fault_fill(run);
    void *memory = (void *)(uintptr_t)run->address;
    int slab = reactor->fixed_buffers[at] ? find_slab(reactor, run->address, run->length) : -1;
    bool is_read = run->opcode == KVS_OP_READ;
    if (slab >= 0 && is_read)
        io_uring_prep_read_fixed(sqe, run->fd, memory, run->length, run->offset, slab);
    else if (slab >= 0)
        io_uring_prep_write_fixed(sqe, run->fd, memory, run->length, run->offset, slab);
    else if (is_read) io_uring_prep_read(sqe, run->fd, memory, run->length, run->offset);
    else io_uring_prep_write(sqe, run->fd, memory, run->length, run->offset);
    if (use_file_slot(reactor, run->file_slot, run->fd)) {
        sqe->fd = (int)run->file_slot;
        sqe->flags |= IOSQE_FIXED_FILE;
    }
    /* INV-130: buffered pieces would copy inside the submit call; kernel workers do it instead. */
    if (!run->direct) sqe->flags |= IOSQE_ASYNC;
    /* An extra only: best effort, urgent to lazy. Never IDLE, a write may be promoted later. */
    static const uint16_t level[KVS_CLASSES] = {0, 4, 7};
    sqe->ioprio = (uint16_t)(2u << 13 | level[run->io_class]);
    io_uring_sqe_set_data64(sqe, run->piece);
}

static void arm_doorbell(kvs_reactor *reactor) {
    if (reactor->doorbell_armed || reactor->ring_count > 1) return;
    struct io_uring_sqe *sqe = io_uring_get_sqe(&reactor->rings[0]);
    assert(sqe);
    io_uring_prep_read(sqe, reactor->doorbell, &reactor->doorbell_value, 8, 0);
    io_uring_sqe_set_data64(sqe, DOORBELL);
    reactor->doorbell_armed = true;
}

/* Copies completions out; they are acted on later, under the lock. */
static void reap(kvs_reactor *reactor) {
    for (uint32_t i = 0; i < reactor->ring_count; i++) {
        struct io_uring *ring = &reactor->rings[i];
        struct io_uring_cqe *cqe;
        unsigned head, seen = 0;
        io_uring_for_each_cqe(ring, head, cqe) {
            if (reactor->reaped_count == REAP) break;
            seen++;
            if (cqe->user_data == DOORBELL) {
                reactor->doorbell_armed = false;
                continue;
            }
            reactor->reaped[reactor->reaped_count].piece = (uint32_t)cqe->user_data;
            reactor->reaped[reactor->reaped_count++].result = cqe->res;
        }
        io_uring_cq_advance(ring, seen);
    }
}

/* Some answers of the kernel ask for patience: nothing is lost, the next round tries again. */
static void expect_transient(int result) {
    if (result >= 0 || result == -EINTR || result == -ETIME || result == -EBUSY) return;
    if (result == -EAGAIN || result == -ENOMEM) {
        struct timespec pause = {.tv_nsec = 1000000};
        nanosleep(&pause, NULL);
        return;
    }
    fprintf(stderr, "kvstore: io_uring_enter failed: %s\n", strerror(-result));
    abort(); /* pieces are in the kernel and cannot be told apart from lost ones */
}

/* Hands over what is prepared; waits for a completion, the doorbell or the time if `wait`. */
static void enter_one(kvs_engine *engine, bool wait, uint64_t until_ns) {
    struct io_uring *ring = &engine->reactor->rings[0];
    struct io_uring_cqe *cqe;
    if (!wait) {
        expect_transient(io_uring_submit_and_get_events(ring));
        return;
    }
    struct __kernel_timespec left = {0};
    uint64_t now_ns = until_ns == KVS_NEVER ? 0 : kvs_now_ns();
    if (until_ns != KVS_NEVER && until_ns > now_ns) {
        left.tv_sec = (int64_t)((until_ns - now_ns) / 1000000000u);
        left.tv_nsec = (int64_t)((until_ns - now_ns) % 1000000000u);
    }
    expect_transient(io_uring_submit_and_wait_timeout(ring, &cqe, 1,
                                                      until_ns == KVS_NEVER ? NULL : &left, NULL));
}

static void enter_many(kvs_engine *engine, bool wait, uint64_t until_ns) {
    kvs_reactor *reactor = engine->reactor;
    bool ready = false;
    for (uint32_t i = 0; i < reactor->ring_count; i++) {
        struct io_uring *ring = &reactor->rings[i];
        if (io_uring_sq_ready(ring)) expect_transient(io_uring_submit_and_get_events(ring));
        ready = ready || io_uring_cq_ready(ring);
    }
    if (wait && !ready) {
        struct pollfd polled = {.fd = reactor->doorbell, .events = POLLIN};
        struct timespec left = {0};
        uint64_t now_ns = kvs_now_ns(), value;
        if (until_ns != KVS_NEVER && until_ns > now_ns) left = kvs_timespec(until_ns - now_ns);
        ppoll(&polled, 1, until_ns == KVS_NEVER ? NULL : &left, NULL);
        ssize_t got = read(reactor->doorbell, &value, sizeof value); /* before the rings */
        (void)got;
    }
    for (uint32_t i = 0; i < reactor->ring_count; i++)
        expect_transient(io_uring_get_events(&reactor->rings[i]));
}

/* ---- the loop ---- */

/* Small checksums, between handing pieces over and looking for results; without the lock. */
static void do_inline_work(kvs_engine *engine, kvs_out *out) {
    for (uint32_t i = 0; i < WORK_BATCH; i++) {
        kvs_engine_lock(engine);
        kvs_transfer *transfer = kvs_engine_pop_work(engine, false);
        pthread_mutex_unlock(&engine->lock);
        if (!transfer) return;
        int32_t status = kvs_work_perform(transfer);
        kvs_engine_lock(engine);
        kvs_engine_work_done(engine, transfer, status, kvs_now_ns(), out);
        pthread_mutex_unlock(&engine->lock);
    }
}

static void *reactor_main(void *argument) {
    kvs_engine *engine = argument;
    kvs_reactor *reactor = engine->reactor;
    kvs_dispatch runs[BATCH];
    uint32_t in_device = 0;
    int result = open_rings(engine);
    kvs_engine_lock(engine);
    reactor->started = result == 0 ? 1 : result;
    pthread_cond_broadcast(&reactor->answered);
    kvs_out out = {.count = 0};
    while (result == 0) {
        uint64_t now_ns = kvs_now_ns();
        for (uint32_t i = 0; i < reactor->reaped_count; i++)
            kvs_engine_back(engine, reactor->reaped[i].piece, reactor->reaped[i].result, now_ns,
                            &out);
        in_device -= reactor->reaped_count;
        reactor->reaped_count = 0;
        kvs_engine_tick(engine, now_ns, &out);
        while (reactor->commands) run_command(engine);
        if (engine->files_stale) forget_files(engine);
        if (engine->quit && !reactor->doorbell_armed) break;
        uint32_t count = 0, batch = in_device ? BATCH : FIRST_BATCH;
        while (count < batch && kvs_engine_take(engine, now_ns, &runs[count])) count++;
        in_device += count;
        bool work = kvs_engine_has_work(engine, false), tell = out.count > 0;
        bool quit = engine->quit, wait = count < batch && !work && !quit && !(count && tell);
        uint64_t until_ns = kvs_engine_next_timer(engine);
        engine->sleeping = wait;
        engine->awake_at = until_ns;
        engine->counts.submit_calls += count > 0;
        out.kick = false; /* this thread is the executor and awake */
        kvs_engine_open(engine);
        if (!count) kvs_engine_tell(&out); /* otherwise the device comes first */
        for (uint32_t i = 0; i < count; i++) prepare(engine, &runs[i]);
        if (!quit) arm_doorbell(reactor);
        if (reactor->ring_count == 1) enter_one(engine, wait, until_ns);
        else enter_many(engine, wait, until_ns);
        kvs_engine_tell(&out);
        if (work) do_inline_work(engine, &out);
        reap(reactor);
        kvs_engine_lock(engine);
        engine->sleeping = false;
        engine->counts.wakeups += wait;
    }
    pthread_mutex_unlock(&engine->lock);
    for (uint32_t i = 0; i < reactor->ring_count; i++) {
        engine->counts.overflows += *reactor->rings[i].cq.koverflow;
        io_uring_queue_exit(&reactor->rings[i]);
    }
    return NULL;
}

static void *helper_main(void *argument) {
    kvs_engine *engine = argument;
    kvs_out out = {.count = 0};
    kvs_engine_lock(engine);
    while (!engine->quit) {
        kvs_transfer *transfer = kvs_engine_pop_work(engine, true);
        if (!transfer) {
            pthread_cond_wait(&engine->work, &engine->lock);
            continue;
        }
        pthread_mutex_unlock(&engine->lock);
        int32_t status = kvs_work_perform(transfer);
        kvs_engine_lock(engine);
        kvs_engine_work_done(engine, transfer, status, kvs_now_ns(), &out);
        kvs_engine_unlock(engine, &out);
        kvs_engine_lock(engine);
    }
    pthread_mutex_unlock(&engine->lock);
    return NULL;
}

void kvs_reactor_ring_doorbell(kvs_engine *engine) {
    uint64_t one = 1;
    ssize_t written;
    do written = write(engine->reactor->doorbell, &one, sizeof one);
    while (written < 0 && errno == EINTR);
}

static void free_reactor(kvs_engine *engine) {
    close(engine->reactor->doorbell);
    pthread_cond_destroy(&engine->reactor->answered);
    free(engine->reactor);
    engine->reactor = NULL;
}

int kvs_reactor_start(kvs_engine *engine) {
    kvs_reactor *reactor = calloc(1, sizeof *reactor);
    if (!reactor) return -ENOMEM;
    /* a read in the ring must wait, a read after a poll must not */
    int blocking = engine->config.kernel_rings > 1 ? EFD_NONBLOCK : 0;
    reactor->doorbell = eventfd(0, EFD_CLOEXEC | blocking);
    if (reactor->doorbell < 0) {
        int result = -errno;
        free(reactor);
        return result;
    }
    pthread_cond_init(&reactor->answered, NULL);
    engine->reactor = reactor;
    int result = kvs_thread_start(&reactor->helper, "kvs-helper", helper_main, engine);
    if (result != 0) {
        free_reactor(engine);
        return result;
    }
    result = kvs_thread_start(&reactor->thread, "kvs-reactor", reactor_main, engine);
    kvs_engine_lock(engine);
    while (result == 0 && reactor->started == 0)
        pthread_cond_wait(&reactor->answered, &engine->lock);
    if (result == 0 && reactor->started < 0) {
        pthread_mutex_unlock(&engine->lock);
        pthread_join(reactor->thread, NULL);
        kvs_engine_lock(engine);
        result = reactor->started;
    }
    if (result != 0) { /* INV-126 */
        engine->quit = true;
        pthread_cond_broadcast(&engine->work);
        pthread_mutex_unlock(&engine->lock);
        pthread_join(reactor->helper, NULL);
        free_reactor(engine);
        return result;
    }
    engine->counts.threads = 2;
    pthread_mutex_unlock(&engine->lock);
    return 0;
}

/* After `quit`: the doorbell that woke the reactor is also the last operation in its ring. */
void kvs_reactor_join(kvs_engine *engine) {
    kvs_reactor_ring_doorbell(engine);
    pthread_join(engine->reactor->thread, NULL);
    pthread_join(engine->reactor->helper, NULL);
    free_reactor(engine);
}
