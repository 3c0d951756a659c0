/* The engine's insides, shared by the transfer table and the two executors.

   One mutex guards everything below. It is held for bookkeeping only: never across a system call
   that can wait, a checksum, a copy or a device call. */
#ifndef KVS_ENGINE_H
#define KVS_ENGINE_H

#include "table.h"
#include "uring.h"

#define KVS_NONE UINT32_MAX

/* Where a transfer is. Everything after `KVS_FREE` belongs to its submitter until END. */
typedef enum {
    KVS_FREE = 0,
    KVS_SEALING, /* native code lays the header down; no piece is queued yet */
    KVS_MOVING,  /* pieces are queued or in the device */
    KVS_CHECKING /* all pieces are back; native code verifies or poisons */
} kvs_phase;

typedef enum { KVS_WORK_NONE = 0, KVS_WORK_SEAL, KVS_WORK_VERIFY, KVS_WORK_POISON } kvs_work;

typedef struct kvs_transfer {
    kvs_submission request;
    kvs_cq *cq; /* a reference */
    struct kvs_transfer *next_work;
    uint64_t length; /* header and padded payload */
    uint64_t moved;
    uint64_t deadline_ns;
    uint32_t index, generation;
    uint32_t heap_index;
    uint32_t next_free;
    uint32_t users; /* pieces in the device, and native work on its memory (INV-120) */
    int32_t status; /* 0, or the first failure */
    uint8_t phase, work;
    bool verdict; /* delivered before the last piece was back */
} kvs_transfer;

typedef struct {
    int direct_fd, buffered_fd;
    uint32_t transfers;
    bool used, direct_ended;
    bool stale; /* unregistered, but a ring still holds its descriptors */
} kvs_file;

/* What the engine remembers about a piece, by the scheduler's piece number. */
typedef struct {
    uint64_t address, offset; /* in memory, in the file */
    uint32_t transfer, length;
    uint32_t tries; /* without progress */
    int32_t rule;   /* of the fault shim, -1: none */
    int32_t result; /* while held */
    void *scratch;  /* what the fault shim writes in place of the memory, or NULL */
    bool direct, flying, paused;
} kvs_flight;

typedef struct {
    uint64_t due_ns;
    uint32_t piece;
    int32_t rule; /* -1: a pause before a retry */
} kvs_hold;

/* One piece for an executor. */
typedef struct {
    uint64_t address, offset;
    uint32_t length, piece;
    int fd;
    uint32_t file_slot; /* of the ring's file table: file_id * 2, + 1 when buffered */
    uint64_t source;    /* 0, or where the memory is: `address` is scratch yet to be filled */
    int64_t argument;   /* of the fault, for the filling */
    uint8_t opcode, io_class, fault;
    bool direct, skip; /* skip: the fault shim decides the result, the device sees nothing */
} kvs_dispatch;

/* What to do once the lock is open again. */
typedef struct {
    kvs_cq *queues[8];
    uint32_t count;
    bool kick; /* there may be something for the executor */
} kvs_out;

typedef struct {
    kvs_transfer *head, *tail;
} kvs_work_list;

typedef struct {
    kvs_cq *cq;
    uint64_t token;
    int64_t file_id;
} kvs_drain;

enum { KVS_RULES_MAX = 64, KVS_TRIES_MAX = 8, KVS_TRIES_BEFORE_PAUSE = 4 };
#define KVS_RETRY_PAUSE_NS 1000000u

typedef struct {
    kvs_fault fault;
    uint64_t matches, affected;
    uint32_t flying; /* pieces it took that are not back yet */
    bool used;
} kvs_rule;

typedef struct kvs_reactor kvs_reactor;
typedef struct kvs_workers kvs_workers;

struct kvs_engine {
    pthread_mutex_t lock;
    pthread_cond_t idle;  /* open_transfers became 0 */
    pthread_cond_t work;  /* for idle workers, or the helper of a ring */
    pthread_cond_t clock; /* the thread that keeps the deadlines of the threads engine */
    kvs_engine_config config;
    kvs_sched *sched;
    kvs_gates *gates;
    kvs_table transfers, flights;
    uint32_t free_head, free_count;
    uint32_t *heap; /* transfers by deadline */
    uint32_t heap_count, heap_capacity;
    kvs_hold *holds;
    uint32_t hold_count;
    kvs_file files[KVS_FILES_MAX];
    bool files_stale;
    kvs_work_list inline_work;    /* small, for the reactor */
    kvs_work_list helper_work[3]; /* checks, seals of required, seals of background */
    kvs_drain *drains;
    uint32_t drain_count, drain_capacity;
    kvs_rule rules[KVS_RULES_MAX];
    uint32_t rule_count;
    uint32_t open_transfers;
    bool stopping, quit, joined;
    /* sleep protocol: set by the sleeper, cleared by whoever wakes it, both under the lock */
    bool sleeping;
    uint32_t idle_workers;
    uint64_t awake_at; /* when the sleeper wakes by itself */
    kvs_engine_counts counts;
    uint64_t errors[KVS_CLASSES][KVS_ERRORS];
    kvs_reactor *reactor;
    kvs_workers *workers;
};

/* Opening the lock wakes whoever has to act: completion queues, executor, helper. */
void kvs_engine_lock(kvs_engine *engine);
void kvs_engine_unlock(kvs_engine *engine, kvs_out *out);
/* The two halves of it for the reactor, which hands pieces over before it wakes the loop. */
void kvs_engine_open(kvs_engine *engine);
void kvs_engine_tell(kvs_out *out);

/* All of these are called under the lock. */
bool kvs_engine_take(kvs_engine *engine, uint64_t now_ns, kvs_dispatch *run);
void kvs_engine_back(kvs_engine *engine, uint32_t piece, int32_t result, uint64_t now_ns,
                     kvs_out *out);
void kvs_engine_tick(kvs_engine *engine, uint64_t now_ns, kvs_out *out);
uint64_t kvs_engine_next_timer(const kvs_engine *engine);
kvs_transfer *kvs_engine_pop_work(kvs_engine *engine, bool helper);
bool kvs_engine_has_work(const kvs_engine *engine, bool helper);
void kvs_engine_work_done(kvs_engine *engine, kvs_transfer *transfer, int32_t status,
                          uint64_t now_ns, kvs_out *out);

/* Without the lock, by whoever popped the work. */
int32_t kvs_work_perform(const kvs_transfer *transfer);
/* Without the lock, before a piece with a `source` goes to the device. */
void kvs_fault_fill(const kvs_dispatch *run);

/* checksum.c */
void kvs_seal(const kvs_submission *request);
int32_t kvs_verify(const kvs_submission *request);

/* Starts a native thread with all signals blocked; 0 or -errno. */
int kvs_thread_start(pthread_t *thread, const char *name, void *(*run)(void *), void *argument);

/* reactor.c */
int kvs_reactor_start(kvs_engine *engine);
void kvs_reactor_ring_doorbell(kvs_engine *engine);
void kvs_reactor_join(kvs_engine *engine);
int kvs_reactor_memory(kvs_engine *engine, uint64_t address, uint64_t length, bool add);

/* workers.c */
int kvs_workers_start(kvs_engine *engine);
void kvs_workers_join(kvs_engine *engine);
void kvs_workers_run_inline(kvs_engine *engine);

#endif
