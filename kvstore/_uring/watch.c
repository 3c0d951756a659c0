/* The device watch: one native thread per store that looks for finished device work and posts it to
 * the completion queue, so that awaiting a copy needs no thread hop in Python.
 *
 * An entry is a completion word (plain memory that the stream writes behind its work) or an event.
 * Entries of one lane, that is of one stream, pass in order, so only the oldest of each lane is
 * looked at: a pass costs O(lanes + completions). Between passes without a completion the thread
 * spins for `spin_ns`, then sleeps for an eighth of the time it has waited, at most `sleep_max_ns`;
 * timer slack is 1 ns, because the default of 50 us would cost more than a host function. With
 * nothing pending it sleeps on a condition without a time limit.
 *
 * Words say nothing about errors, so every `error_probe_ns` the context is asked. A sticky error
 * ends every pending entry, and every later one at once, with its code (INV-917).
 */
#include "devices.h"

#include <sys/prctl.h>

enum { CODE_DEINITIALIZED = 4, VERDICT_AND_END = KVS_FLAG_VERDICT | KVS_FLAG_END };

struct entry {
    struct entry *next;
    int32_t lane;
    uint64_t word; /* 0: the event counts */
    uint64_t value;
    kvs_cuda_event *event;
    kvs_cq *queue;
    uint64_t token;
};

struct lane {
    int32_t id;
    struct entry *head, **tail;
};

struct kvs_watch {
    kvs_watch_config config;
    kvs_cuda *device;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t arrived;
    struct entry *incoming, **incoming_tail;
    int stopping;
    int error;
    int sleeping;
    struct lane **lanes; /* the watching thread's own */
    uint32_t lane_count, lane_room;
    kvs_watch_counters counters;
};

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void finish(kvs_watch *watch, struct entry *entry, int code) {
    __atomic_add_fetch(code ? &watch->counters.failed : &watch->counters.completed, 1,
                       __ATOMIC_RELAXED);
    __atomic_sub_fetch(&watch->counters.pending, 1, __ATOMIC_RELEASE);
    kvs_cq_post(entry->queue, entry->token, code ? KVS_DEVICE_STATUS - code : 0, VERDICT_AND_END,
                0);
    kvs_cq_release(entry->queue);
    if (entry->event) {
        kvs_cuda_event_free(entry->event);
    }
    free(entry);
}

/* 1 passed, 0 pending, negative code. */
static int look(const struct entry *entry) {
    if (entry->word) {
        uint64_t now = __atomic_load_n((uint64_t *)(uintptr_t)entry->word, __ATOMIC_ACQUIRE);
        return (int64_t)(now - entry->value) >= 0;
    }
    return kvs_cuda_event_poll(entry->event);
}

static void take_in(kvs_watch *watch, struct entry *entry) {
    struct lane *lane = NULL;
    for (uint32_t i = 0; i < watch->lane_count && entry->lane >= 0 && !lane; i++) {
        lane = watch->lanes[i]->id == entry->lane ? watch->lanes[i] : NULL;
    }
    if (!lane) {
        if (watch->lane_count == watch->lane_room) {
            watch->lane_room = watch->lane_room ? 2 * watch->lane_room : 64;
            watch->lanes = realloc(watch->lanes, watch->lane_room * sizeof *watch->lanes);
            assert(watch->lanes);
        }
        lane = calloc(1, sizeof *lane);
        assert(lane);
        lane->id = entry->lane;
        lane->tail = &lane->head;
        watch->lanes[watch->lane_count++] = lane;
    }
    entry->next = NULL;
    *lane->tail = entry;
    lane->tail = &entry->next;
}

static void drop_lane(kvs_watch *watch, uint32_t index) {
    free(watch->lanes[index]);
    watch->lanes[index] = watch->lanes[--watch->lane_count];
}

static void fail_all(kvs_watch *watch, int code) {
    while (watch->lane_count) {
        struct entry *entry = watch->lanes[0]->head;
        while (entry) {
            struct entry *next = entry->next;
            finish(watch, entry, code);
            entry = next;
        }
        drop_lane(watch, 0);
    }
}

/* Looks once at each lane; returns how many entries passed, or a negative sticky code. */
static int pass(kvs_watch *watch) {
    int done = 0;
    __atomic_add_fetch(&watch->counters.passes, 1, __ATOMIC_RELAXED);
    for (uint32_t i = 0; i < watch->lane_count;) {
        struct lane *lane = watch->lanes[i];
        int state = 0;
        while (lane->head && (state = look(lane->head)) != 0) {
            if (state < 0 && kvs_device_code_is_sticky(-state)) {
                return state;
            }
            struct entry *entry = lane->head;
            lane->head = entry->next;
            finish(watch, entry, state < 0 ? -state : 0);
            done++;
        }
        if (lane->head) {
            i++;
        } else {
            drop_lane(watch, i);
        }
    }
    return done;
}

/* Waits for an arrival, at most `sleep_ns`; 0: without limit. The mutex is held. */
static void doze(kvs_watch *watch, uint64_t sleep_ns) {
    watch->sleeping = 1;
    if (sleep_ns == 0) {
        __atomic_add_fetch(&watch->counters.idle_waits, 1, __ATOMIC_RELAXED);
        pthread_cond_wait(&watch->arrived, &watch->mutex);
    } else {
        struct timespec until = kvs_timespec(kvs_now_ns() + sleep_ns);
        __atomic_add_fetch(&watch->counters.sleeps, 1, __ATOMIC_RELAXED);
        pthread_cond_timedwait(&watch->arrived, &watch->mutex, &until);
    }
    watch->sleeping = 0;
}

static void *watch_main(void *argument) {
    kvs_watch *watch = argument;
    prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    if (watch->device) {
        int result = kvs_cuda_thread_begin(watch->device);
        if (result > 0) {
            kvs_watch_fail(watch, result);
        }
    }
    uint64_t moved_ns = kvs_now_ns(), probed_ns = moved_ns, sleep_ns = 0;
    bool first = true;
    pthread_mutex_lock(&watch->mutex);
    for (;;) {
        while (!watch->incoming && !watch->stopping && watch->lane_count == 0) {
            doze(watch, 0);
            moved_ns = probed_ns = kvs_now_ns();
        }
        if (!first && sleep_ns && !watch->incoming && !watch->stopping && !watch->error) {
            doze(watch, sleep_ns);
        }
        first = false;
        struct entry *entry = watch->incoming;
        watch->incoming = NULL;
        watch->incoming_tail = &watch->incoming;
        int stopping = watch->stopping, error = watch->error;
        pthread_mutex_unlock(&watch->mutex);

        if (entry) {
            moved_ns = kvs_now_ns();
        }
        while (entry) {
            struct entry *next = entry->next;
            take_in(watch, entry);
            entry = next;
        }
        int done = error ? -error : pass(watch);
        uint64_t now = kvs_now_ns();
        if (done >= 0 && watch->device && now - probed_ns >= watch->config.error_probe_ns) {
            int code = kvs_cuda_probe_error(watch->device);
            probed_ns = now;
            done = code ? -code : done;
        }
        if (done < 0) {
            if (!error) {
                kvs_watch_fail(watch, -done);
            }
            fail_all(watch, -done);
        } else if (stopping) {
            fail_all(watch, CODE_DEINITIALIZED);
        }
        moved_ns = done > 0 ? now : moved_ns;
        uint64_t waited = now - moved_ns;
        sleep_ns = waited < watch->config.spin_ns ? 0 : waited / 8;
        sleep_ns = sleep_ns > watch->config.sleep_max_ns ? watch->config.sleep_max_ns : sleep_ns;
        if (sleep_ns == 0) {
            for (int i = 0; i < 16; i++) {
                relax();
            }
        }
        pthread_mutex_lock(&watch->mutex);
        if (stopping && !watch->incoming) {
            break;
        }
    }
    pthread_mutex_unlock(&watch->mutex);
    return NULL;
}

kvs_watch *kvs_watch_new(kvs_cuda *device, const kvs_watch_config *config) {
    kvs_watch *watch = calloc(1, sizeof *watch);
    if (!watch) {
        return NULL;
    }
    watch->config = *config;
    watch->device = device;
    watch->incoming_tail = &watch->incoming;
    pthread_mutex_init(&watch->mutex, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&watch->arrived, &monotonic);
    pthread_condattr_destroy(&monotonic);
    if (pthread_create(&watch->thread, NULL, watch_main, watch)) {
        pthread_cond_destroy(&watch->arrived);
        pthread_mutex_destroy(&watch->mutex);
        free(watch);
        return NULL;
    }
    return watch;
}

static int push(kvs_watch *watch, const struct entry *made) {
    struct entry *entry = malloc(sizeof *entry);
    if (!entry) {
        return -ENOMEM;
    }
    *entry = *made;
    entry->next = NULL;
    pthread_mutex_lock(&watch->mutex);
    int result = watch->error ? watch->error : watch->stopping ? -ESHUTDOWN : 0;
    if (result == 0) {
        kvs_cq_retain(entry->queue);
        if (entry->event) {
            kvs_cuda_event_retain(entry->event);
        }
        __atomic_add_fetch(&watch->counters.pending, 1, __ATOMIC_RELAXED);
        *watch->incoming_tail = entry;
        watch->incoming_tail = &entry->next;
        if (watch->sleeping) {
            pthread_cond_signal(&watch->arrived);
        }
    }
    pthread_mutex_unlock(&watch->mutex);
    if (result) {
        free(entry);
    }
    return result;
}

int kvs_watch_word(kvs_watch *watch, int32_t lane, uint64_t word, uint64_t value, kvs_cq *queue,
                   uint64_t token) {
    assert(word && word % 8 == 0);
    struct entry entry = {
        .lane = lane, .word = word, .value = value, .queue = queue, .token = token};
    return push(watch, &entry);
}

int kvs_watch_event(kvs_watch *watch, int32_t lane, kvs_cuda_event *event, kvs_cq *queue,
                    uint64_t token) {
    struct entry entry = {.lane = lane, .event = event, .queue = queue, .token = token};
    return push(watch, &entry);
}

void kvs_watch_fail(kvs_watch *watch, int code) {
    assert(code > 0);
    pthread_mutex_lock(&watch->mutex);
    if (!watch->error) {
        watch->error = code;
    }
    pthread_cond_signal(&watch->arrived);
    pthread_mutex_unlock(&watch->mutex);
}

void kvs_watch_count(kvs_watch *watch, kvs_watch_counters *out) {
    const kvs_watch_counters *in = &watch->counters;
    out->passes = __atomic_load_n(&in->passes, __ATOMIC_RELAXED);
    out->sleeps = __atomic_load_n(&in->sleeps, __ATOMIC_RELAXED);
    out->idle_waits = __atomic_load_n(&in->idle_waits, __ATOMIC_RELAXED);
    out->completed = __atomic_load_n(&in->completed, __ATOMIC_RELAXED);
    out->failed = __atomic_load_n(&in->failed, __ATOMIC_RELAXED);
    out->pending = __atomic_load_n(&in->pending, __ATOMIC_RELAXED);
}

void kvs_watch_close(kvs_watch *watch) {
    pthread_mutex_lock(&watch->mutex);
    watch->stopping = 1;
    pthread_cond_signal(&watch->arrived);
    pthread_mutex_unlock(&watch->mutex);
    pthread_join(watch->thread, NULL);
    assert(!watch->incoming && watch->lane_count == 0);
    free(watch->lanes);
    pthread_cond_destroy(&watch->arrived);
    pthread_mutex_destroy(&watch->mutex);
    free(watch);
}
