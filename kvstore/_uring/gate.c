/* Gate words and tickets.

   A word is an aligned 8-byte flag on a cache line of its own (INV-208); its value is the last
   published generation and only grows. A ticket is (word, generation) plus a status record that
   lives on when the word is used again (INV-207). All changes happen under one mutex that is
   held for a few stores and never across a call, so publishing exactly once (INV-204) needs no
   argument about interleavings. Waiters on the flag take no lock: the status is stored before the
   flag, with release order (INV-206). */
#include "uring.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { KVS_TICKETS_PER_WORD = 4 };

typedef struct {
    _Alignas(64) _Atomic uint64_t flag;
    _Atomic uint32_t waiters; /* native threads asleep on the flag, not device streams */
} kvs_word;

_Static_assert(sizeof(kvs_word) == 64, "one cache line per word");

typedef struct {
    uint64_t generation; /* last one handed out */
    uint64_t taken_ns;
    uint32_t slot;
    uint32_t transfers_left;
    int32_t status; /* first failure so far */
    bool open;
} kvs_word_state;

typedef struct {
    uint64_t generation;
    int32_t status;
    bool published, used;
} kvs_status_slot;

struct kvs_gates {
    pthread_mutex_t lock;
    kvs_word *words;
    size_t length;
    kvs_word_state *states;
    kvs_status_slot *slots;
    uint32_t *free_words, *free_slots;
    uint32_t word_count, slot_count, free_word_count, free_slot_count;
    kvs_gate_counts counts;
    atomic_uint references;
};

kvs_gates *kvs_gates_new(uint32_t words) {
    assert(words > 0);
    kvs_gates *gates = calloc(1, sizeof *gates);
    if (!gates) return NULL;
    gates->word_count = words;
    gates->slot_count = words * KVS_TICKETS_PER_WORD;
    gates->length = ((size_t)words * sizeof(kvs_word) + 4095) & ~(size_t)4095;
    gates->words = mmap(NULL, gates->length, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    gates->states = calloc(words, sizeof *gates->states);
    gates->slots = calloc(gates->slot_count, sizeof *gates->slots);
    gates->free_words = malloc(words * sizeof *gates->free_words);
    gates->free_slots = malloc(gates->slot_count * sizeof *gates->free_slots);
    if (gates->words == MAP_FAILED || !gates->states || !gates->slots || !gates->free_words ||
        !gates->free_slots) {
        if (gates->words != MAP_FAILED) munmap(gates->words, gates->length);
        free(gates->states), free(gates->slots), free(gates->free_words), free(gates->free_slots);
        free(gates);
        return NULL;
    }
    madvise(gates->words, gates->length, MADV_DONTFORK);
    for (uint32_t i = 0; i < words; i++) gates->free_words[i] = words - 1 - i;
    for (uint32_t i = 0; i < gates->slot_count; i++)
        gates->free_slots[i] = gates->slot_count - 1 - i;
    gates->free_word_count = words;
    gates->free_slot_count = gates->slot_count;
    pthread_mutex_init(&gates->lock, NULL);
    atomic_init(&gates->references, 1);
    return gates;
}

void kvs_gates_retain(kvs_gates *gates) {
    unsigned before = atomic_fetch_add_explicit(&gates->references, 1, memory_order_relaxed);
    assert(before > 0);
    (void)before;
}

void kvs_gates_release(kvs_gates *gates) {
    unsigned before = atomic_fetch_sub_explicit(&gates->references, 1, memory_order_acq_rel);
    assert(before > 0);
    if (before > 1) return;
    munmap(gates->words, gates->length);
    free(gates->states), free(gates->slots), free(gates->free_words), free(gates->free_slots);
    pthread_mutex_destroy(&gates->lock);
    free(gates);
}

uint64_t kvs_gates_address(const kvs_gates *gates) { return (uint64_t)(uintptr_t)gates->words; }
uint32_t kvs_gates_words(const kvs_gates *gates) { return gates->word_count; }
uint64_t kvs_gates_length(const kvs_gates *gates) { return gates->length; }

int kvs_gate_take(kvs_gates *gates, uint32_t transfers, uint64_t now_ns, kvs_ticket *ticket) {
    int result = -EBUSY;
    pthread_mutex_lock(&gates->lock);
    if (gates->free_word_count && gates->free_slot_count) {
        uint32_t word = gates->free_words[--gates->free_word_count];
        uint32_t slot = gates->free_slots[--gates->free_slot_count];
        kvs_word_state *state = &gates->states[word];
        assert(!state->open && !gates->slots[slot].used);
        state->generation++;
        state->taken_ns = now_ns;
        state->slot = slot;
        state->transfers_left = transfers;
        state->status = 0;
        state->open = true;
        gates->slots[slot].used = true;
        gates->slots[slot].generation = state->generation;
        gates->slots[slot].status = 0;
        gates->slots[slot].published = false;
        *ticket = (kvs_ticket){.generation = state->generation, .word = word, .slot = slot};
        gates->counts.taken++;
        gates->counts.open++;
        result = 0;
    }
    pthread_mutex_unlock(&gates->lock);
    return result;
}

/* The barrier that lets a device see data before flag (INV-217). */
static inline void store_barrier(void) {
#if defined(__aarch64__)
    __asm__ volatile("dmb oshst" ::: "memory");
#else
    atomic_thread_fence(memory_order_release);
#endif
}

int kvs_gate_has_barrier(void) {
#if defined(__aarch64__) || defined(__x86_64__)
    return 1;
#else
    return 0;
#endif
}

/* Under the lock, for an open word: status first, then the flag; then the word is free again
   (INV-210) and its record waits for release. A failure noted before stays the status, whoever
   publishes (INV-206, INV-207). */
static void publish_locked(kvs_gates *gates, uint32_t word, int32_t status) {
    kvs_word_state *state = &gates->states[word];
    kvs_status_slot *slot = &gates->slots[state->slot];
    if (state->status != 0) status = state->status;
    assert(state->open && slot->used && slot->generation == state->generation);
    assert(!slot->published);
    slot->status = status;
    slot->published = true;
    store_barrier();
    /* seq_cst: pairs with the waiter's increment, so that one of the two sees the other. */
    atomic_store_explicit(&gates->words[word].flag, state->generation, memory_order_seq_cst);
    state->open = false;
    gates->free_words[gates->free_word_count++] = word;
    gates->counts.open--;
    if (status == 0) gates->counts.good++;
    else gates->counts.failed++;
}

static void wake_waiters(kvs_gates *gates, uint32_t word) {
    if (atomic_load_explicit(&gates->words[word].waiters, memory_order_seq_cst))
        syscall(SYS_futex, &gates->words[word].flag, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

static bool is_open(const kvs_gates *gates, uint32_t word, uint64_t generation) {
    assert(word < gates->word_count);
    return gates->states[word].open && gates->states[word].generation == generation;
}

int kvs_gate_publish(kvs_gates *gates, uint32_t word, uint64_t generation, int32_t status) {
    pthread_mutex_lock(&gates->lock);
    bool published = is_open(gates, word, generation);
    if (published) publish_locked(gates, word, status);
    pthread_mutex_unlock(&gates->lock);
    if (published) wake_waiters(gates, word);
    return published;
}

int kvs_gate_transfer(kvs_gates *gates, uint32_t word, uint64_t generation, int32_t status,
                      int at_once) {
    bool published = false;
    pthread_mutex_lock(&gates->lock);
    if (is_open(gates, word, generation)) {
        kvs_word_state *state = &gates->states[word];
        assert(state->transfers_left > 0);
        state->transfers_left--;
        if (status != 0 && state->status == 0) state->status = status;
        if (state->transfers_left == 0 || (at_once && status != 0)) {
            publish_locked(gates, word, state->status);
            published = true;
        }
    }
    pthread_mutex_unlock(&gates->lock);
    if (published) wake_waiters(gates, word);
    return published;
}

void kvs_gate_note(kvs_gates *gates, uint32_t word, uint64_t generation, int32_t status) {
    pthread_mutex_lock(&gates->lock);
    if (is_open(gates, word, generation) && gates->states[word].status == 0)
        gates->states[word].status = status;
    pthread_mutex_unlock(&gates->lock);
}

int kvs_gate_status(kvs_gates *gates, uint32_t slot, uint64_t generation, int32_t *status) {
    int result = -EINVAL;
    assert(slot < gates->slot_count);
    pthread_mutex_lock(&gates->lock);
    const kvs_status_slot *record = &gates->slots[slot];
    if (record->used && record->generation == generation) {
        result = record->published;
        if (record->published) *status = record->status;
    }
    pthread_mutex_unlock(&gates->lock);
    return result;
}

int kvs_gate_release(kvs_gates *gates, uint32_t slot, uint64_t generation) {
    int result = -EINVAL;
    assert(slot < gates->slot_count);
    pthread_mutex_lock(&gates->lock);
    kvs_status_slot *record = &gates->slots[slot];
    if (record->used && record->generation == generation) {
        result = record->published ? 0 : -EBUSY;
        if (record->published) {
            record->used = false;
            gates->free_slots[gates->free_slot_count++] = slot;
        }
    }
    pthread_mutex_unlock(&gates->lock);
    return result;
}

uint32_t kvs_gates_publish_all(kvs_gates *gates, int32_t status) {
    uint32_t published = 0;
    for (uint32_t word = 0; word < gates->word_count; word++) {
        pthread_mutex_lock(&gates->lock);
        bool open = gates->states[word].open;
        if (open) publish_locked(gates, word, status);
        pthread_mutex_unlock(&gates->lock);
        if (open) wake_waiters(gates, word);
        published += open;
    }
    return published;
}

int kvs_gate_passed(kvs_gates *gates, uint32_t word, uint64_t generation) {
    assert(word < gates->word_count);
    uint64_t flag = atomic_load_explicit(&gates->words[word].flag, memory_order_acquire);
    return (int64_t)flag >= (int64_t)generation;
}

int kvs_gate_wait(kvs_gates *gates, uint32_t word, uint64_t generation, uint64_t until_ns) {
    assert(word < gates->word_count);
    kvs_word *line = &gates->words[word];
    int result = 0;
    atomic_fetch_add_explicit(&line->waiters, 1, memory_order_seq_cst);
    for (;;) {
        uint64_t flag = atomic_load_explicit(&line->flag, memory_order_seq_cst);
        if ((int64_t)flag >= (int64_t)generation) break;
        struct timespec until = kvs_timespec(until_ns);
        /* The low half of a little-endian word is enough: it changes with every publication. */
        long rc = syscall(SYS_futex, &line->flag, FUTEX_WAIT_BITSET_PRIVATE, (uint32_t)flag,
                          until_ns == KVS_NEVER ? NULL : &until, NULL, FUTEX_BITSET_MATCH_ANY);
        if (rc < 0 && errno == ETIMEDOUT) {
            result = kvs_gate_passed(gates, word, generation) ? 0 : -ETIMEDOUT;
            break;
        }
    }
    atomic_fetch_sub_explicit(&line->waiters, 1, memory_order_seq_cst);
    return result;
}

void kvs_gates_count(kvs_gates *gates, kvs_gate_counts *counts) {
    pthread_mutex_lock(&gates->lock);
    *counts = gates->counts;
    pthread_mutex_unlock(&gates->lock);
}

int kvs_gates_oldest(kvs_gates *gates, kvs_ticket *ticket, uint64_t *taken_ns) {
    int found = 0;
    pthread_mutex_lock(&gates->lock);
    for (uint32_t word = 0; gates->counts.open && word < gates->word_count; word++) {
        const kvs_word_state *state = &gates->states[word];
        if (!state->open || (found && state->taken_ns >= *taken_ns)) continue;
        *ticket = (kvs_ticket){.generation = state->generation, .word = word, .slot = state->slot};
        *taken_ns = state->taken_ns;
        found = 1;
    }
    pthread_mutex_unlock(&gates->lock);
    return found;
}
