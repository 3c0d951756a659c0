/* The only declarations: cffi and the compiler read this one file, so a drifting signature is a
   compile error. No preprocessor beyond this comment; constants are enums. */

enum { KVS_ABI_VERSION = 1 };

int kvs_abi_version(void);
uint64_t kvs_now_ns(void); /* CLOCK_MONOTONIC */

/* ---- completion.c: many producers, one loop; an eventfd wakes the loop (INV-129) ---- */

enum { KVS_FLAG_VERDICT = 1, KVS_FLAG_END = 2 };

typedef struct {
    uint64_t token;
    uint64_t value;
    int32_t status;
    uint32_t flags;
} kvs_record;

typedef struct kvs_cq kvs_cq;

kvs_cq *kvs_cq_new(uint32_t capacity);
void kvs_cq_retain(kvs_cq *cq);
void kvs_cq_release(kvs_cq *cq);
/* Posts after close are dropped. A poster holds a reference. Never fails, never blocks on I/O. */
void kvs_cq_post(kvs_cq *cq, uint64_t token, int32_t status, uint32_t flags, uint64_t value);
/* Takes up to `count` records; the descriptor stays readable while records are left. */
uint32_t kvs_cq_reap(kvs_cq *cq, kvs_record *records, uint32_t count);
void kvs_cq_close(kvs_cq *cq);
int kvs_cq_fd(const kvs_cq *cq);
uint64_t kvs_cq_wakeups(kvs_cq *cq);

/* ---- gate.c: flag words that device streams wait on (INV-203 to INV-211) ---- */

typedef struct kvs_gates kvs_gates;

typedef struct {
    uint64_t generation;
    uint32_t word;
    uint32_t slot; /* of the status record, which outlives the use of the word (INV-207) */
} kvs_ticket;

typedef struct {
    uint64_t taken;
    uint64_t good;
    uint64_t failed;
    uint64_t open;
} kvs_gate_counts;

kvs_gates *kvs_gates_new(uint32_t words);
void kvs_gates_retain(kvs_gates *gates);
void kvs_gates_release(kvs_gates *gates);
uint64_t kvs_gates_address(const kvs_gates *gates);
uint64_t kvs_gates_length(const kvs_gates *gates);
/* 0, or -EBUSY when no word or no status record is free; never blocks (INV-211). */
int kvs_gate_take(kvs_gates *gates, uint32_t transfers, uint64_t now_ns, kvs_ticket *ticket);
/* 1 if this call published, 0 if the ticket was published before (INV-204). Wakes waiters. */
int kvs_gate_publish(kvs_gates *gates, uint32_t word, uint64_t generation, int32_t status);
/* One transfer of the ticket has its verdict; the last one publishes the first failure, or 0.
   `at_once` publishes a failure now (deadline, cancel, close: INV-205). 1 if it published. */
int kvs_gate_transfer(kvs_gates *gates, uint32_t word, uint64_t generation, int32_t status,
                      int at_once);
/* 1 and the status if published, 0 while open, -EINVAL for a released record. */
int kvs_gate_status(kvs_gates *gates, uint32_t slot, uint64_t generation, int32_t *status);
int kvs_gate_release(kvs_gates *gates, uint32_t slot, uint64_t generation);
/* Publishes every open ticket as failed (INV-222); returns how many there were. */
uint32_t kvs_gates_publish_all(kvs_gates *gates, int32_t status);
/* Blocks the calling native thread until word >= generation in signed arithmetic (INV-209), or
   until CLOCK_MONOTONIC reaches `until_ns` (all ones: no limit). 0 or -ETIMEDOUT. */
int kvs_gate_wait(kvs_gates *gates, uint32_t word, uint64_t generation, uint64_t until_ns);
/* 1 if word >= generation; does not block. */
int kvs_gate_passed(kvs_gates *gates, uint32_t word, uint64_t generation);
void kvs_gates_count(kvs_gates *gates, kvs_gate_counts *counts);
/* The oldest open ticket, for the watchdog (INV-223): 1, its ticket and when it was taken. */
int kvs_gates_oldest(kvs_gates *gates, kvs_ticket *ticket, uint64_t *taken_ns);
/* 1 if this build has the store barrier that the device needs between data and flag (INV-217). */
int kvs_gate_has_barrier(void);

/* ---- arena.c: memory for I/O (INV-138) ---- */

/* Maps `length` bytes, 2 MiB aligned, excluded from fork; 0 or -errno. `numa_node` -1: any. */
int kvs_arena_map(uint64_t length, int numa_node, uint64_t *address);
/* Faults every page in, with `threads` native threads. 0 or -errno. */
int kvs_arena_prefault(uint64_t address, uint64_t length, uint32_t threads);
int kvs_arena_unmap(uint64_t address, uint64_t length);

/* ---- checksum.c ---- */

uint64_t kvs_xxh3_64(const void *data, uint64_t length);
