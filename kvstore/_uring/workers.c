/* The threads engine: workers that take one piece at a time, and a thread that keeps the clock.

   The scheduler is the same as the ring's; only the executor differs. One worker and the FIFO
   policy make the `serial` engine; no worker at all makes the inline engine of tests, where the
   caller of submit does everything itself (INV-125). Nobody polls: workers sleep until there is a
   piece, the clock until the next deadline, and without transfers for ever (INV-129). */
#include "engine.h"

#include <unistd.h>

struct kvs_workers {
    uint32_t count; /* started */
    bool clock_started;
    pthread_t clock;
    pthread_t threads[];
};

static int32_t perform(const kvs_dispatch *run) {
    if (run->skip) return 0;
    if (run->source) kvs_fault_fill(run);
    void *memory = (void *)(uintptr_t)run->address;
    ssize_t result = run->opcode == KVS_OP_READ
                         ? pread(run->fd, memory, run->length, (off_t)run->offset)
                         : pwrite(run->fd, memory, run->length, (off_t)run->offset);
    return result < 0 ? -errno : (int32_t)result;
}

/* Does one thing, if there is one; the lock is held on entry and on return. */
static bool do_one(kvs_engine *engine) {
    kvs_out out = {.count = 0};
    kvs_dispatch run;
    kvs_transfer *transfer = kvs_engine_pop_work(engine, true);
    if (transfer) {
        out.kick = kvs_engine_has_work(engine, true) || kvs_sched_peek(engine->sched, kvs_now_ns());
        kvs_engine_unlock(engine, &out); /* another one may go on with the rest */
        int32_t status = kvs_work_perform(transfer);
        kvs_engine_lock(engine);
        kvs_engine_work_done(engine, transfer, status, kvs_now_ns(), &out);
    } else if (kvs_engine_take(engine, kvs_now_ns(), &run)) {
        engine->counts.submit_calls++;
        out.kick = kvs_engine_has_work(engine, true) || kvs_sched_peek(engine->sched, kvs_now_ns());
        kvs_engine_unlock(engine, &out);
        int32_t result = perform(&run);
        kvs_engine_lock(engine);
        kvs_engine_back(engine, run.piece, result, kvs_now_ns(), &out);
    } else {
        return false;
    }
    out.kick = false; /* this worker goes on itself and wakes the next one when it takes a piece */
    bool timer = kvs_engine_next_timer(engine) < engine->awake_at; /* a pause before a retry */
    if (out.count || timer) {
        kvs_engine_unlock(engine, &out);
        kvs_engine_lock(engine);
    }
    return true;
}

static void *worker_main(void *argument) {
    kvs_engine *engine = argument;
    kvs_engine_lock(engine);
    while (!engine->quit) {
        if (do_one(engine)) continue;
        engine->idle_workers++;
        pthread_cond_wait(&engine->work, &engine->lock);
        engine->idle_workers--;
        engine->counts.wakeups++;
    }
    pthread_mutex_unlock(&engine->lock);
    return NULL;
}

static void *clock_main(void *argument) {
    kvs_engine *engine = argument;
    kvs_out out = {.count = 0};
    kvs_engine_lock(engine);
    while (!engine->quit) {
        kvs_engine_tick(engine, kvs_now_ns(), &out);
        engine->awake_at = kvs_engine_next_timer(engine);
        if (out.count || out.kick) {
            kvs_engine_unlock(engine, &out);
            kvs_engine_lock(engine);
            continue;
        }
        struct timespec until = kvs_timespec(engine->awake_at);
        if (engine->awake_at == KVS_NEVER) pthread_cond_wait(&engine->clock, &engine->lock);
        else pthread_cond_timedwait(&engine->clock, &engine->lock, &until);
    }
    pthread_mutex_unlock(&engine->lock);
    return NULL;
}

int kvs_workers_start(kvs_engine *engine) {
    uint32_t count = engine->config.threads;
    kvs_workers *workers = calloc(1, sizeof *workers + count * sizeof(pthread_t));
    if (!workers) return -ENOMEM;
    engine->workers = workers;
    int result = kvs_thread_start(&workers->clock, "kvs-clock", clock_main, engine);
    workers->clock_started = result == 0;
    while (result == 0 && workers->count < count) {
        result =
            kvs_thread_start(&workers->threads[workers->count], "kvs-worker", worker_main, engine);
        workers->count += result == 0;
    }
    if (result != 0) { /* INV-126: what has started is stopped and joined */
        kvs_engine_lock(engine);
        engine->quit = true;
        pthread_cond_broadcast(&engine->work);
        pthread_cond_broadcast(&engine->clock);
        pthread_mutex_unlock(&engine->lock);
        kvs_workers_join(engine);
    }
    if (result == 0) engine->counts.threads = count;
    return result;
}

void kvs_workers_join(kvs_engine *engine) {
    kvs_workers *workers = engine->workers;
    for (uint32_t i = 0; i < workers->count; i++) pthread_join(workers->threads[i], NULL);
    if (workers->clock_started) pthread_join(workers->clock, NULL);
    engine->workers = NULL;
    free(workers);
}

void kvs_workers_run_inline(kvs_engine *engine) {
    kvs_out out = {.count = 0};
    kvs_engine_lock(engine);
    do kvs_engine_tick(engine, kvs_now_ns(), &out);
    while (do_one(engine));
    kvs_engine_unlock(engine, &out);
}
