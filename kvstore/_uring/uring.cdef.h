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
/* What a batch of records has in common, so that the usual one needs no look at each. */
typedef struct {
    uint64_t least_token, greatest_token;
    uint32_t all_good; /* each is a verdict and an end, with status 0 */
} kvs_batch;
/* Takes up to `count` records; the descriptor stays readable while records are left. */
uint32_t kvs_cq_reap(kvs_cq *cq, kvs_record *records, uint32_t count, kvs_batch *batch);
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
/* 1 if this call published, 0 if the ticket was published before (INV-204). Wakes waiters. The
   first failure of a transfer of the ticket, if there is one, goes before `status`. */
int kvs_gate_publish(kvs_gates *gates, uint32_t word, uint64_t generation, int32_t status);
/* One transfer of the ticket has its verdict; the last one publishes the first failure, or 0.
   `at_once` publishes a failure now (deadline, cancel, close: INV-205). 1 if it published. */
int kvs_gate_transfer(kvs_gates *gates, uint32_t word, uint64_t generation, int32_t status,
                      int at_once);
/* A transfer of the ticket has failed and has its verdict later, behind its poison (INV-219):
   whoever opens the gate before that says why. Publishes nothing. */
void kvs_gate_note(kvs_gates *gates, uint32_t word, uint64_t generation, int32_t status);
/* 1 and the status if published, 0 while open, -EINVAL for a released record. */
int kvs_gate_status(kvs_gates *gates, uint32_t slot, uint64_t generation, int32_t *status);
int kvs_gate_release(kvs_gates *gates, uint32_t slot, uint64_t generation);
/* Publishes every open ticket as failed (INV-222), with its first failure if there is one, else
   `status`; returns how many there were. */
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

/* ---- devices: cpudev.c, watch.c, cudacopy.c ---- */

/* Status of a completion that carries a device error: KVS_DEVICE_STATUS - code. */
enum { KVS_DEVICE_STATUS = -20000 };

/* Where the pages of one pool and one host area lie. A page is piece_count pieces on the device
   (one per base address) and one contiguous payload on the host, pieces in order. */
typedef struct kvs_pages {
    const uint64_t *piece_bases;
    const uint64_t *piece_strides;
    const uint64_t *piece_bytes;
    uint64_t piece_count;
    uint64_t host_base;
    uint64_t slot_bytes;
    uint64_t slots_per_slab;
    uint64_t slab_bytes;
    uint64_t payload_offset;
} kvs_pages;

typedef struct kvs_run {
    uint64_t target;
    uint64_t source;
    uint64_t bytes;
} kvs_run;

/* Write the runs of `count` pages, contiguous neighbours merged; returns how many. `runs` has room
   for count * piece_count. */
uint64_t kvs_pages_expand(const kvs_pages *pages, const int32_t *device_slots,
                          const int32_t *host_slots, uint64_t count, int to_device, kvs_run *runs);

/* The CPU device. Calls return 0, a positive device code, or -errno. */
typedef struct kvs_cpu kvs_cpu;
typedef struct kvs_cpu_event kvs_cpu_event;
typedef struct kvs_cpu_config {
    uint32_t queue_count;
    uint32_t queue_depth;
    uint64_t bytes_per_s;
    uint64_t latency_ns;
    uint64_t shuffle_seed;
    uint64_t full_timeout_ns;
    int early_reads;
} kvs_cpu_config;
typedef struct kvs_cpu_counters {
    uint64_t batches;
    uint64_t pages_to_device;
    uint64_t pages_to_host;
    uint64_t bytes_to_device;
    uint64_t bytes_to_host;
    uint64_t notified;
    uint64_t gates_waited;
} kvs_cpu_counters;

kvs_cpu *kvs_cpu_new(const kvs_cpu_config *config);
int kvs_cpu_close(kvs_cpu *device, uint64_t timeout_ns);
void kvs_cpu_fail(kvs_cpu *device, int code);
int kvs_cpu_error(kvs_cpu *device);
void kvs_cpu_inject(kvs_cpu *device, uint64_t nth_copy, int code);
int kvs_cpu_copy(kvs_cpu *device, uint32_t stream, const kvs_pages *pages,
                 const int32_t *device_slots, const int32_t *host_slots, uint64_t count,
                 int to_device);
int kvs_cpu_wait_event(kvs_cpu *device, uint32_t stream, kvs_cpu_event *event);
/* `sleepers`: address of the word's count of native sleepers, which its publisher looks at, or 0
   for a word that is always woken (written by `kvs_cpu_write_word`). */
int kvs_cpu_wait_word(kvs_cpu *device, uint32_t stream, uint64_t word, uint64_t value, int bits,
                      uint64_t sleepers);
int kvs_cpu_write_word(kvs_cpu *device, uint32_t stream, uint64_t word, uint64_t value);
int kvs_cpu_work(kvs_cpu *device, uint32_t stream, uint64_t address, uint64_t bytes, int value,
                 uint64_t duration_ns);
int kvs_cpu_record(kvs_cpu *device, uint32_t stream, kvs_cpu_event *event);
int kvs_cpu_notify(kvs_cpu *device, uint32_t stream, kvs_cq *queue, uint64_t token);
int kvs_cpu_notify_event(kvs_cpu *device, kvs_cpu_event *event, kvs_cq *queue, uint64_t token);
int kvs_cpu_synchronize(kvs_cpu *device, uint64_t timeout_ns);
uint64_t kvs_cpu_pending(kvs_cpu *device, uint32_t stream);
void kvs_cpu_count(kvs_cpu *device, kvs_cpu_counters *out);
kvs_cpu_event *kvs_cpu_event_new(void);
int kvs_cpu_event_query(const kvs_cpu_event *event);
void kvs_cpu_event_free(kvs_cpu_event *event);

/* The CUDA device: the driver, loaded by name, and one device's primary context. Calls return 0, a
   positive CUresult, or -errno. Every call makes the context current for its own duration. */
typedef struct kvs_cuda kvs_cuda;
typedef struct kvs_cuda_event kvs_cuda_event;
typedef struct kvs_cuda_caps {
    char name[64];
    int driver_version;
    int device_count;
    int batch_copy;
    int attribute_memops64;
    int copy_engines;
    int host_numa;
    int uses_host_page_tables;
    int multiprocessors;
    int priority_low;
    int priority_high;
} kvs_cuda_caps;
typedef struct kvs_cuda_counters {
    uint64_t batches;
    uint64_t driver_calls;
    uint64_t pages_to_device;
    uint64_t pages_to_host;
    uint64_t bytes_to_device;
    uint64_t bytes_to_host;
    uint64_t batch_calls;
    uint64_t loop_calls;
    uint64_t staged_calls;
} kvs_cuda_counters;

/* `failed` (64 bytes) receives the name of what failed. */
int kvs_cuda_open(const char *library, int ordinal, kvs_cuda **out, char *failed);
/* Without `is_lost` everything of the device is given back; with it only memory of ours is. */
void kvs_cuda_close(kvs_cuda *device, int is_lost);
void kvs_cuda_get_caps(kvs_cuda *device, kvs_cuda_caps *caps);
int kvs_cuda_attribute(kvs_cuda *device, int attribute, int *value);
int kvs_cuda_error(kvs_cuda *device);
void kvs_cuda_count(kvs_cuda *device, kvs_cuda_counters *out);
/* Which copy call is used: -1 best, 0 loop, 1 ABI 12.8, 2 ABI 13.0. Returns the one in use. */
int kvs_cuda_set_batch(kvs_cuda *device, int batch_copy);
void kvs_cuda_set_min_dma(kvs_cuda *device, uint64_t min_dma);
void kvs_cuda_set_source_order(kvs_cuda *device, int order);
int kvs_cuda_stream_new(kvs_cuda *device, int priority, uint64_t *stream);
int kvs_cuda_stream_free(kvs_cuda *device, uint64_t stream);
int kvs_cuda_stream_query(kvs_cuda *device, uint64_t stream);
int kvs_cuda_stream_synchronize(kvs_cuda *device, uint64_t stream);
int kvs_cuda_stream_capturing(kvs_cuda *device, uint64_t stream, int *capturing);
int kvs_cuda_alloc(kvs_cuda *device, uint64_t bytes, uint64_t *address);
int kvs_cuda_free(kvs_cuda *device, uint64_t address);
int kvs_cuda_memset(kvs_cuda *device, uint64_t stream, uint64_t address, int value, uint64_t bytes);
int kvs_cuda_memcpy(kvs_cuda *device, uint64_t stream, uint64_t target, uint64_t source,
                    uint64_t bytes);
int kvs_cuda_register(kvs_cuda *device, uint64_t address, uint64_t bytes);
int kvs_cuda_unregister(kvs_cuda *device, uint64_t address);
/* `enqueued`: runs that were enqueued although the call failed; their memory stays borrowed. */
int kvs_cuda_copy(kvs_cuda *device, uint64_t stream, const kvs_pages *pages,
                  const int32_t *device_slots, const int32_t *host_slots, uint64_t count,
                  int to_device, uint64_t *enqueued);
/* Whole pages through `staging` on the device and one kernel; `pieces` is what
   kvs_cuda_upload_pieces returned. */
int kvs_cuda_upload_pieces(kvs_cuda *device, const kvs_pages *pages, uint64_t *pieces);
int kvs_cuda_copy_staged(kvs_cuda *device, uint64_t stream, const kvs_pages *pages, uint64_t pieces,
                         uint64_t staging, uint64_t staging_bytes, const int32_t *device_slots,
                         const int32_t *host_slots, uint64_t count, int to_device,
                         uint64_t *enqueued);
int kvs_cuda_wait_word(kvs_cuda *device, uint64_t stream, uint64_t word, uint64_t value, int bits);
int kvs_cuda_write_word(kvs_cuda *device, uint64_t stream, uint64_t word, uint64_t value);
/* A real wait, released by a CPU store, on a private stream: 0 if it works, 801 if not. */
int kvs_cuda_probe_memops(kvs_cuda *device, int bits, uint64_t timeout_ns);
kvs_cuda_event *kvs_cuda_event_new(kvs_cuda *device, int *error);
kvs_cuda_event *kvs_cuda_event_wrap(kvs_cuda *device, uint64_t handle);
void kvs_cuda_event_free(kvs_cuda_event *event);
int kvs_cuda_event_record(kvs_cuda_event *event, uint64_t stream);
/* 1 passed, 0 pending, negative CUresult. */
int kvs_cuda_event_query(kvs_cuda_event *event);
int kvs_cuda_wait_event(kvs_cuda_event *event, uint64_t stream);
/* Address of word `lane` of the completion words, or 0 if there are not that many. */
uint64_t kvs_cuda_lane_word(kvs_cuda *device, uint32_t lane);
/* Kernels by name; `args` is one buffer of 8-byte values. */
int kvs_cuda_launch(kvs_cuda *device, uint64_t stream, const char *kernel, uint32_t blocks,
                    uint32_t threads, const uint64_t *args, uint32_t arg_count);
/* Host function through the driver's own symbol: posts to the queue from the driver's thread. */
int kvs_cuda_host_post(kvs_cuda *device, uint64_t stream, kvs_cq *queue, uint64_t token);
/* Measurements in native code, without the GIL. */
int kvs_cuda_gate_latency(kvs_cuda *device, uint64_t stream, uint64_t gate_word, uint64_t done_word,
                          uint64_t first_value, uint32_t count, uint64_t hold_ns, uint64_t *out_ns);
int kvs_spin_until(uint64_t word, uint64_t value, uint64_t timeout_ns, uint64_t *seen_ns);
/* Spins on two words, one after the other; when each was seen. For measurements without the GIL. */
int kvs_spin_pair(uint64_t first, uint64_t first_value, uint64_t second, uint64_t second_value,
                  uint64_t timeout_ns, uint64_t *seen_ns);
int kvs_cuda_enqueue_cost(kvs_cuda *device, uint64_t stream, int call, uint64_t a, uint64_t b,
                          uint32_t count, uint64_t *total_ns);

/* The device watch: one native thread that looks for finished device work. */
typedef struct kvs_watch kvs_watch;
typedef struct kvs_watch_config {
    uint64_t spin_ns;
    uint64_t sleep_max_ns;
    uint64_t error_probe_ns;
} kvs_watch_config;
typedef struct kvs_watch_counters {
    uint64_t passes;
    uint64_t sleeps;
    uint64_t idle_waits;
    uint64_t completed;
    uint64_t failed;
    uint64_t pending;
} kvs_watch_counters;
kvs_watch *kvs_watch_new(kvs_cuda *device, const kvs_watch_config *config);
/* Entries of one lane (stream) pass in order; lane -1 stands alone. 0 or the sticky code. */
int kvs_watch_word(kvs_watch *watch, int32_t lane, uint64_t word, uint64_t value, kvs_cq *queue,
                   uint64_t token);
int kvs_watch_event(kvs_watch *watch, int32_t lane, kvs_cuda_event *event, kvs_cq *queue,
                    uint64_t token);
void kvs_watch_fail(kvs_watch *watch, int code);
void kvs_watch_count(kvs_watch *watch, kvs_watch_counters *out);
/* Ends every pending entry with CUDA_ERROR_DEINITIALIZED, stops the thread, frees. */
void kvs_watch_close(kvs_watch *watch);

/* ---- arena.c: memory for I/O (INV-138) ---- */

/* Maps `length` bytes, 2 MiB aligned, excluded from fork; 0 or -errno. `numa_node` -1: any. */
int kvs_arena_map(uint64_t length, int numa_node, uint64_t *address);
/* Faults every page in, with `threads` native threads. 0 or -errno. */
int kvs_arena_prefault(uint64_t address, uint64_t length, uint32_t threads);
int kvs_arena_unmap(uint64_t address, uint64_t length);
/* Allocates blocks with fallocate mode 0: 0. 1 if zeros were written because the file system has
   none; -errno. */
int kvs_allocate(int fd, uint64_t offset, uint64_t length);

/* ---- checksum.c ---- */

uint64_t kvs_xxh3_64(const void *data, uint64_t length);

/* ---- sched.c: which piece goes next; explicit time, no system calls, no globals ---- */

enum { KVS_READ = 0, KVS_REQUIRED = 1, KVS_BACKGROUND = 2, KVS_CLASSES = 3 };
enum { KVS_OP_READ = 0, KVS_OP_WRITE = 1 };
enum {
    KVS_POLICY_KVSTORE = 0,  /* INV-101 to INV-107, INV-136 */
    KVS_POLICY_UPSTREAM = 1, /* classes and ageing, no byte bounds, turns 1 in 2: the peer row */
    KVS_POLICY_FIFO = 2      /* one queue, no classes, no bounds: the baseline row */
};
enum { KVS_HISTOGRAM_BUCKETS = 1024 };
enum { KVS_WAIT = 0, KVS_SERVICE = 1 };

typedef struct {
    uint64_t total_bytes;          /* in the device */
    uint64_t required_bytes;       /* in the device */
    uint64_t background_bytes;     /* in the device */
    uint64_t background_bytes_max; /* issued but not yet written (INV-111) */
    uint64_t required_age_ns;
    uint64_t background_age_ns;
    uint64_t read_linger_ns; /* how long a finished read counts as in flight (INV-136) */
    uint32_t read_piece_bytes;
    uint32_t write_piece_bytes;
    uint32_t background_turn;
    uint32_t depth; /* pieces in the device (INV-128) */
    uint32_t policy;
    uint32_t reserved;
} kvs_sched_config;

typedef struct {
    uint64_t offset; /* in the transfer, header included */
    uint64_t queued_ns;
    uint32_t length;
    uint32_t piece; /* a piece that was put back keeps its number */
    uint32_t transfer;
    uint8_t io_class;
    uint8_t opcode;
    uint8_t aged;
    uint8_t again; /* 1: it was put back before */
} kvs_piece;

/* INV-808: issued + promoted_in = done + failed + withdrawn + promoted_out + queued + inflight. */
typedef struct {
    uint64_t issued_bytes, promoted_in_bytes, promoted_out_bytes;
    uint64_t done_bytes, failed_bytes, withdrawn_bytes;
    uint64_t queued_bytes, inflight_bytes; /* gauges */
    uint64_t read_bytes, written_bytes;
    uint64_t transfers, pieces, promotions, aged, skipped;
    uint64_t inflight_pieces; /* gauge */
} kvs_class_counts;

typedef struct {
    uint64_t counts[1024];
    uint64_t total, sum_ns, max_ns;
} kvs_histogram;

typedef struct kvs_sched kvs_sched;

kvs_sched *kvs_sched_new(const kvs_sched_config *config);
void kvs_sched_free(kvs_sched *sched);
/* Makes room for transfer numbers below `count`; 0 or -ENOMEM. */
int kvs_sched_reserve(kvs_sched *sched, uint32_t count);
/* Announces a transfer, its pieces not yet queued, and charges the background cap. 0, -ENOBUFS
   above the cap (counted as skipped), -ENOMEM. `transfer` is the caller's number, free till now. */
int kvs_sched_add(kvs_sched *sched, uint32_t transfer, uint32_t io_class, uint32_t opcode,
                  uint32_t header_bytes, uint64_t bytes);
/* Queues the pieces of an announced transfer. */
void kvs_sched_ready(kvs_sched *sched, uint32_t transfer, uint64_t now_ns);
/* 1: raised from background to required (INV-108); 0: nothing changed (INV-110). */
int kvs_sched_promote(kvs_sched *sched, uint32_t transfer, uint64_t now_ns);
/* Takes all queued pieces out; returns their bytes. */
uint64_t kvs_sched_withdraw(kvs_sched *sched, uint32_t transfer);
/* 1 and the next piece, which is now in the device; 0 when nothing may go. */
int kvs_sched_next(kvs_sched *sched, uint64_t now_ns, kvs_piece *piece);
/* 1 if kvs_sched_next would return a piece. */
int kvs_sched_peek(kvs_sched *sched, uint64_t now_ns);
/* A piece left the device for good. */
void kvs_sched_done(kvs_sched *sched, uint32_t piece, int ok, uint64_t now_ns);
/* A piece left the device with `bytes` of it done; the rest goes to the head of its queue with
   its old arrival time (INV-116). */
void kvs_sched_again(kvs_sched *sched, uint32_t piece, uint64_t bytes, uint64_t now_ns);
/* Bytes of a transfer still queued, and pieces of it in the device. */
uint64_t kvs_sched_queued(const kvs_sched *sched, uint32_t transfer);
uint32_t kvs_sched_inflight(const kvs_sched *sched, uint32_t transfer);
/* Forgets a transfer with nothing queued and nothing in the device; its number is free. */
void kvs_sched_remove(kvs_sched *sched, uint32_t transfer);
uint64_t kvs_sched_background_bytes(const kvs_sched *sched); /* charged against the cap */
uint64_t kvs_sched_background_room(const kvs_sched *sched);
void kvs_sched_count(const kvs_sched *sched, uint32_t io_class, kvs_class_counts *counts);
void kvs_sched_histogram(const kvs_sched *sched, uint32_t io_class, uint32_t kind,
                         kvs_histogram *histogram);

/* ---- engine.c: the transfer table; reactor.c and workers.c execute what it hands out ---- */

enum { KVS_SUBMIT_VERIFY = 1, KVS_SUBMIT_SEAL = 2, KVS_SUBMIT_NO_CHECKSUM = 4, KVS_SUBMIT_POISON = 8 };
enum { KVS_MISMATCH = -10000, KVS_END_OF_FILE = -10001 };
enum { KVS_HEADER_BYTES = 4096, KVS_IDENTITY_BYTES = 192 };
enum { KVS_KIND_RING = 0, KVS_KIND_WORKERS = 1, KVS_KIND_INLINE = 2 };
/* Error counts are kept per errno below KVS_ERRORS - 2; the last two are ours. */
enum { KVS_ERRORS = 160, KVS_ERROR_END_OF_FILE = 158, KVS_ERROR_MISMATCH = 159 };
enum { KVS_FILES_MAX = 256, KVS_SLABS_MAX = 1024 };
/* Parts of the ring set-up that can be switched off, to test the fallbacks. */
enum {
    KVS_WITHOUT_DEFER = 1,
    KVS_WITHOUT_COOP = 2,
    KVS_WITHOUT_SUBMIT_ALL = 4,
    KVS_WITHOUT_CQSIZE = 8,
    KVS_WITHOUT_FIXED_FILES = 16,
    KVS_WITHOUT_FIXED_BUFFERS = 32
};

/* One transfer; mirrored by SUBMISSION_DTYPE in base.py. */
typedef struct {
    uint64_t handle; /* out */
    uint64_t token;
    uint64_t address;
    uint64_t offset;
    uint64_t payload_bytes;
    uint64_t deadline_ns; /* 0: the engine's default, all ones: none */
    uint64_t gate_generation;
    int32_t gate_word; /* -1: no gate */
    uint32_t file_id;
    uint32_t header_bytes;
    uint8_t io_class;
    uint8_t opcode;
    uint16_t flags;
    uint8_t identity[192];
} kvs_submission;

typedef struct {
    kvs_sched_config sched;
    uint64_t deadline_ns;
    uint64_t inline_bytes; /* checksums up to this size are computed by the reactor itself */
    uint32_t kind;
    uint32_t threads;
    uint32_t ring_entries;
    uint32_t kernel_rings;
    uint32_t iowq_workers;
    uint32_t without;
} kvs_engine_config;

typedef struct {
    uint64_t open_transfers, background_bytes, inflight_pieces; /* gauges */
    uint64_t short_transfers, retries, direct_fallbacks, mismatches, deadlines, cancelled;
    uint64_t wakeups, submit_calls, submit_ns_max, overflows;
    uint64_t registered_bytes;
    uint32_t direct_files, buffered_files;
    uint32_t setup_flags, features, ring_entries, fixed_files, fixed_buffers, threads, cloned;
} kvs_engine_counts;

/* What the fault shim does to the pieces that match; the test kit's rules, for every engine. The
   last four report success, as a device does that has lost or misplaced a write. */
enum {
    KVS_FAULT_ERRNO = 1, /* argument: errno; the piece never reaches the device */
    KVS_FAULT_SHORT = 2, /* argument: bytes; the rest is not transferred */
    KVS_FAULT_ZERO = 3,  /* as at the end of a file */
    KVS_FAULT_DELAY = 4, /* argument: nanoseconds between device and engine */
    KVS_FAULT_HOLD = 5,  /* never, until the rule is released */
    KVS_FAULT_FLIP = 6,  /* argument: bit number in the piece; wrong in memory after a read, wrong
                            on the disk and right in memory after a write */
    KVS_FAULT_TORN = 7,      /* writes; argument: bytes that arrive, rounded down to 4 KiB */
    KVS_FAULT_SECTORS = 8,   /* writes; argument: sector i of 4 KiB arrives if bit i % 32 is set */
    KVS_FAULT_LOST = 9,      /* writes; nothing arrives */
    KVS_FAULT_MISDIRECT = 10 /* argument: bytes, the distance from the right place in the file; a
                                piece that would begin before the file never reaches the device */
};

typedef struct {
    uint64_t offset_low, offset_high; /* pieces that overlap [low, high) of the file */
    uint64_t skip;                    /* the first matches that go through */
    uint64_t count;                   /* how many are affected then; all ones: all */
    int64_t argument;
    int32_t file_id;       /* -1: any */
    uint32_t class_mask;   /* bit per class, 0: any */
    uint32_t opcode_mask;  /* bit per opcode, 0: any */
    uint32_t action;
    uint32_t direct_mask;  /* 1: buffered pieces, 2: direct pieces, 0: any */
    uint32_t reserved;
} kvs_fault;

typedef struct kvs_engine kvs_engine;

/* Starts every thread and ring, or none (INV-126); NULL and -errno. `gates` may be NULL. */
kvs_engine *kvs_engine_new(const kvs_engine_config *config, kvs_gates *gates, int *error);
int kvs_engine_register_file(kvs_engine *engine, int direct_fd, int buffered_fd);
int kvs_engine_unregister_file(kvs_engine *engine, uint32_t file_id); /* -EBUSY: not drained */
int kvs_engine_register_memory(kvs_engine *engine, uint64_t address, uint64_t length);
int kvs_engine_unregister_memory(kvs_engine *engine, uint64_t address);
/* Takes all records or none: 0, -ESHUTDOWN, -ENOMEM, -EINVAL. */
int kvs_engine_submit(kvs_engine *engine, kvs_cq *cq, kvs_submission *submissions, uint32_t count);
int kvs_engine_promote(kvs_engine *engine, uint64_t handle);
int kvs_engine_cancel(kvs_engine *engine, uint64_t handle);
/* Moves the deadline to a later time (all ones: never); 0 if it is not later, passed, or over. */
int kvs_engine_extend(kvs_engine *engine, uint64_t handle, uint64_t deadline_ns);
uint64_t kvs_engine_background_room(kvs_engine *engine);
/* Posts `token` once no transfer of the file is open (file_id -1: of any file). 0 or -ENOMEM. */
int kvs_engine_drain(kvs_engine *engine, int64_t file_id, kvs_cq *cq, uint64_t token);
/* Refuses new transfers and cancels the open ones. */
void kvs_engine_stop(kvs_engine *engine);
/* After stop: waits for the last piece, then ends the threads. -ETIMEDOUT: pieces never came back;
   the threads live on and the engine must not be freed (INV-139). */
int kvs_engine_join(kvs_engine *engine, uint64_t timeout_ns);
void kvs_engine_free(kvs_engine *engine);
/* The number of the rule, or -ENOSPC. */
int kvs_engine_inject(kvs_engine *engine, const kvs_fault *fault);
/* Ends a rule and lets go of what it holds; returns how many pieces it affected. */
uint64_t kvs_engine_release(kvs_engine *engine, uint32_t rule);
void kvs_engine_count(kvs_engine *engine, kvs_engine_counts *counts);
void kvs_engine_class(kvs_engine *engine, uint32_t io_class, kvs_class_counts *counts,
                      kvs_histogram *wait, kvs_histogram *service, uint64_t *errors);
/* Open transfers of a file, and whether direct I/O is in force for it. */
int kvs_engine_file(kvs_engine *engine, uint32_t file_id, uint32_t *transfers, uint32_t *direct);
