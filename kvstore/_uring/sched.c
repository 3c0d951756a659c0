/* The scheduler: which piece goes next (INV-101 to INV-112, INV-116, INV-128, INV-136).

   Pure: time comes in as `now_ns`, nothing is called but the allocator, nothing is global. The
   same calls give the same order (INV-135), so a failure can be replayed.

   A transfer enters its class queue as one node, a *range* that is cut into pieces when they are
   dispatched: the pieces of a transfer arrive together and lie side by side in the queue, so one
   node stands for all of them. A piece that comes back short is a node of its own, put at the
   head. Each queue is sorted by arrival, so only its head is looked at for age (INV-110).

   Once a piece is in the device its order is fixed. Everything here follows from that: few bytes
   are let in, in total and per class, and the rest waits where it can still be reordered; a read
   that arrives behind a large write goes after at most one more write piece (INV-131). */
#include "table.h"
#include "uring.h"

typedef struct kvs_node {
    struct kvs_node *previous, *next; /* NULL when not queued */
    uint64_t arrival_ns;
    uint32_t transfer;
    uint32_t piece; /* KVS_RANGE: the node is the range of a transfer */
} kvs_node;

#define KVS_RANGE UINT32_MAX

typedef struct {
    kvs_node range;
    uint64_t next_offset, end_offset; /* not yet cut */
    uint32_t header_bytes;
    uint32_t inflight; /* pieces in the device */
    uint32_t put_back; /* pieces queued again */
    uint8_t io_class, opcode;
    bool used, charged;
} kvs_entry;

typedef struct {
    kvs_node node;
    uint64_t offset, dispatched_ns;
    uint32_t length;
    uint8_t io_class; /* at dispatch: bounds and counts stay with it */
    bool inflight, used, again;
} kvs_flying;

struct kvs_sched {
    kvs_sched_config config;
    kvs_table entries, pieces;
    uint32_t *free_pieces;
    uint32_t free_count;
    kvs_node queues[KVS_CLASSES]; /* sentinels */
    kvs_class_counts counts[KVS_CLASSES];
    kvs_histogram histograms[KVS_CLASSES][2];
    uint64_t background_charged;
    uint64_t dispatches;         /* never reset (INV-105) */
    uint64_t background_turn_at; /* the dispatch from which the next turn is due */
    uint64_t read_active_until;
    uint32_t inflight_pieces;
    uint64_t inflight_bytes;
    bool last_was_read, last_write_was_background;
};

/* ---- small helpers ---- */

static bool is_empty(const kvs_node *queue) { return queue->next == queue; }

static void unlink_node(kvs_node *node) {
    assert(node->next && node->previous);
    node->previous->next = node->next;
    node->next->previous = node->previous;
    node->next = node->previous = NULL;
}

static void link_after(kvs_node *where, kvs_node *node) {
    assert(!node->next && !node->previous);
    node->previous = where;
    node->next = where->next;
    where->next->previous = node;
    where->next = node;
}

static kvs_entry *entry_at(const kvs_sched *sched, uint32_t transfer) {
    kvs_entry *entry = kvs_table_at(&sched->entries, transfer);
    assert(entry->used);
    return entry;
}

static kvs_flying *piece_at(const kvs_sched *sched, uint32_t piece) {
    kvs_flying *flying = kvs_table_at(&sched->pieces, piece);
    assert(flying->used);
    return flying;
}

/* The FIFO policy has one queue for all; counts stay per class. */
static kvs_node *queue_of(kvs_sched *sched, const kvs_entry *entry) {
    return &sched->queues[sched->config.policy == KVS_POLICY_FIFO ? 0 : entry->io_class];
}

static void record(kvs_histogram *histogram, uint64_t value) {
    uint32_t bucket = (uint32_t)value;
    if (value >= 16) {
        uint32_t shift = 59 - (uint32_t)__builtin_clzll(value);
        bucket = (shift + 1) * 16 + (uint32_t)(value >> shift) - 16;
    }
    assert(bucket < KVS_HISTOGRAM_BUCKETS);
    histogram->counts[bucket]++;
    histogram->total++;
    histogram->sum_ns += value;
    if (value > histogram->max_ns) histogram->max_ns = value;
}

static uint64_t since(uint64_t now_ns, uint64_t then_ns) {
    return now_ns > then_ns ? now_ns - then_ns : 0;
}

/* INV-112: repaid per piece when it is written, failed or withdrawn; promotion repays nothing. */
static void repay(kvs_sched *sched, const kvs_entry *entry, uint64_t bytes) {
    if (!entry->charged) return;
    assert(sched->background_charged >= bytes);
    sched->background_charged -= bytes;
}

/* ---- creation ---- */

kvs_sched *kvs_sched_new(const kvs_sched_config *config) {
    assert(config->depth > 0 && config->background_turn >= 2);
    assert(config->read_piece_bytes > 0 && config->write_piece_bytes > 0);
    kvs_sched *sched = calloc(1, sizeof *sched);
    if (!sched) return NULL;
    sched->config = *config;
    sched->entries.item_bytes = sizeof(kvs_entry);
    sched->pieces.item_bytes = sizeof(kvs_flying);
    for (int i = 0; i < KVS_CLASSES; i++)
        sched->queues[i].next = sched->queues[i].previous = &sched->queues[i];
    return sched;
}

void kvs_sched_free(kvs_sched *sched) {
    if (!sched) return;
    kvs_table_free(&sched->entries);
    kvs_table_free(&sched->pieces);
    free(sched->free_pieces);
    free(sched);
}

int kvs_sched_reserve(kvs_sched *sched, uint32_t count) {
    return kvs_table_reserve(&sched->entries, count);
}

/* ---- a transfer comes and goes ---- */

uint64_t kvs_sched_background_bytes(const kvs_sched *sched) { return sched->background_charged; }

uint64_t kvs_sched_background_room(const kvs_sched *sched) {
    uint64_t most = sched->config.background_bytes_max;
    return most > sched->background_charged ? most - sched->background_charged : 0;
}

int kvs_sched_add(kvs_sched *sched, uint32_t transfer, uint32_t io_class, uint32_t opcode,
                  uint32_t header_bytes, uint64_t bytes) {
    assert(io_class < KVS_CLASSES && bytes > 0 && header_bytes <= bytes);
    bool charged = io_class == KVS_BACKGROUND;
    if (charged && bytes > kvs_sched_background_room(sched)) { /* INV-111: skipped, not delayed */
        sched->counts[io_class].skipped++;
        return -ENOBUFS;
    }
    if (kvs_sched_reserve(sched, transfer + 1) != 0) return -ENOMEM;
    kvs_entry *entry = kvs_table_at(&sched->entries, transfer);
    assert(!entry->used);
    *entry = (kvs_entry){
        .range = {.transfer = transfer, .piece = KVS_RANGE},
        .end_offset = bytes,
        .header_bytes = header_bytes,
        .io_class = (uint8_t)io_class,
        .opcode = (uint8_t)opcode,
        .used = true,
        .charged = charged,
    };
    if (charged) sched->background_charged += bytes;
    sched->counts[io_class].transfers++;
    sched->counts[io_class].issued_bytes += bytes;
    sched->counts[io_class].queued_bytes += bytes;
    return 0;
}

void kvs_sched_ready(kvs_sched *sched, uint32_t transfer, uint64_t now_ns) {
    kvs_entry *entry = entry_at(sched, transfer);
    assert(!entry->range.next && entry->next_offset == 0 && entry->end_offset > 0);
    kvs_node *queue = queue_of(sched, entry);
    kvs_node *tail = queue->previous;
    entry->range.arrival_ns = now_ns;
    if (tail != queue && tail->arrival_ns > now_ns) entry->range.arrival_ns = tail->arrival_ns;
    link_after(tail, &entry->range);
}

uint64_t kvs_sched_queued(const kvs_sched *sched, uint32_t transfer) {
    const kvs_entry *entry = entry_at(sched, transfer);
    uint64_t bytes = entry->end_offset - entry->next_offset;
    const kvs_node *queue = queue_of((kvs_sched *)sched, entry);
    uint32_t left = entry->put_back;
    for (const kvs_node *node = queue->next; left; node = node->next) {
        assert(node != queue);
        if (node->transfer != transfer || node->piece == KVS_RANGE) continue;
        bytes += piece_at(sched, node->piece)->length;
        left--;
    }
    return bytes;
}

uint32_t kvs_sched_inflight(const kvs_sched *sched, uint32_t transfer) {
    return entry_at(sched, transfer)->inflight;
}

static void free_piece(kvs_sched *sched, kvs_flying *flying, uint32_t piece) {
    flying->used = false;
    sched->free_pieces[sched->free_count++] = piece;
}

uint64_t kvs_sched_withdraw(kvs_sched *sched, uint32_t transfer) {
    kvs_entry *entry = entry_at(sched, transfer);
    uint64_t bytes = entry->end_offset - entry->next_offset;
    entry->end_offset = entry->next_offset;
    if (entry->range.next) unlink_node(&entry->range);
    kvs_node *queue = queue_of(sched, entry);
    for (kvs_node *node = queue->next, *next; entry->put_back; node = next) {
        assert(node != queue);
        next = node->next;
        if (node->transfer != transfer) continue;
        kvs_flying *flying = piece_at(sched, node->piece);
        bytes += flying->length;
        unlink_node(node);
        free_piece(sched, flying, node->piece);
        entry->put_back--;
    }
    kvs_class_counts *counts = &sched->counts[entry->io_class];
    assert(counts->queued_bytes >= bytes);
    counts->queued_bytes -= bytes;
    counts->withdrawn_bytes += bytes;
    repay(sched, entry, bytes);
    return bytes;
}

void kvs_sched_remove(kvs_sched *sched, uint32_t transfer) {
    kvs_entry *entry = entry_at(sched, transfer);
    assert(entry->inflight == 0 && entry->put_back == 0);
    assert(entry->next_offset == entry->end_offset && !entry->range.next);
    entry->used = false;
}

int kvs_sched_promote(kvs_sched *sched, uint32_t transfer, uint64_t now_ns) {
    kvs_entry *entry = entry_at(sched, transfer);
    uint64_t bytes = kvs_sched_queued(sched, transfer);
    if (entry->io_class != KVS_BACKGROUND || (bytes == 0 && entry->inflight == 0)) return 0;
    kvs_node *from = queue_of(sched, entry);
    entry->io_class = KVS_REQUIRED;
    kvs_node *to = queue_of(sched, entry);
    if (to->previous != to && to->previous->arrival_ns > now_ns) now_ns = to->previous->arrival_ns;
    if (from != to) {
        /* INV-108: in order, to the tail. INV-110: ageing restarts. */
        uint32_t left = entry->put_back + (entry->range.next ? 1 : 0);
        for (kvs_node *node = from->next, *next; left; node = next) {
            assert(node != from);
            next = node->next;
            if (node->transfer != transfer) continue;
            unlink_node(node);
            node->arrival_ns = now_ns;
            link_after(to->previous, node);
            left--;
        }
    }
    kvs_class_counts *out = &sched->counts[KVS_BACKGROUND], *in = &sched->counts[KVS_REQUIRED];
    out->queued_bytes -= bytes;
    out->promoted_out_bytes += bytes;
    in->promoted_in_bytes += bytes;
    in->queued_bytes += bytes;
    out->promotions++;
    return 1;
}

/* ---- what goes next ---- */

static uint32_t head_length(const kvs_sched *sched, const kvs_node *node) {
    if (node->piece != KVS_RANGE) return piece_at(sched, node->piece)->length;
    const kvs_entry *entry = entry_at(sched, node->transfer);
    /* INV-102, INV-339: the limit counts payload, so the first piece may carry the header too. */
    uint64_t limit = entry->opcode == KVS_OP_READ ? sched->config.read_piece_bytes
                                                  : sched->config.write_piece_bytes;
    if (entry->next_offset == 0) limit += entry->header_bytes;
    uint64_t left = entry->end_offset - entry->next_offset;
    return (uint32_t)(left < limit ? left : limit);
}

/* INV-103: equal to the limit counts as aged. */
static bool is_aged(const kvs_sched *sched, uint32_t io_class, uint64_t now_ns) {
    const kvs_node *queue = &sched->queues[io_class];
    if (io_class == KVS_READ || is_empty(queue)) return false;
    uint64_t limit =
        io_class == KVS_REQUIRED ? sched->config.required_age_ns : sched->config.background_age_ns;
    return since(now_ns, queue->next->arrival_ns) >= limit;
}

/* INV-136: room under the bound of the class itself. A piece larger than its bound may go alone. */
static bool has_room(const kvs_sched *sched, uint32_t io_class, uint64_t now_ns) {
    if (sched->config.policy != KVS_POLICY_KVSTORE || io_class == KVS_READ) return true;
    uint64_t bytes = sched->counts[io_class].inflight_bytes;
    if (bytes == 0) return true;
    uint64_t bound = sched->config.required_bytes;
    if (io_class == KVS_BACKGROUND) {
        bool reads = !is_empty(&sched->queues[KVS_READ]) ||
                     sched->counts[KVS_READ].inflight_pieces || now_ns < sched->read_active_until;
        if (reads) return false; /* one piece while reads are in flight, or on a turn */
        bound = sched->config.background_bytes;
    }
    return bytes + head_length(sched, sched->queues[io_class].next) <= bound;
}

typedef struct {
    uint8_t classes[KVS_CLASSES + 1];
    uint32_t count;
} kvs_order;

static void push(kvs_order *order, uint32_t io_class) {
    order->classes[order->count++] = (uint8_t)io_class;
}

/* The classes that may take this dispatch, best first. */
static kvs_order preference(const kvs_sched *sched, uint64_t now_ns) {
    kvs_order order = {.count = 0};
    const kvs_node *queues = sched->queues;
    bool required = is_aged(sched, KVS_REQUIRED, now_ns);
    bool background = is_aged(sched, KVS_BACKGROUND, now_ns);
    /* INV-105: turns are counted over all dispatches and never reset, so the turn of background
       comes round while required is aged too. Turns so short that background would always be due
       alternate with required, or INV-107 could not hold. */
    bool due = background && sched->dispatches + 1 >= sched->background_turn_at &&
               !(sched->config.background_turn < 4 && required && sched->last_write_was_background);
    if (sched->config.policy == KVS_POLICY_UPSTREAM) due = background && !required;
    if (!is_empty(&queues[KVS_READ])) {
        /* INV-104: an aged write only after a read, so two never follow each other. */
        if (sched->last_was_read && due) push(&order, KVS_BACKGROUND);
        if (sched->last_was_read && required) push(&order, KVS_REQUIRED);
        push(&order, KVS_READ);
        return order;
    }
    /* INV-106 */
    if (background && (due || !required)) push(&order, KVS_BACKGROUND);
    if (!is_empty(&queues[KVS_REQUIRED])) push(&order, KVS_REQUIRED);
    if (!is_empty(&queues[KVS_BACKGROUND])) push(&order, KVS_BACKGROUND);
    return order;
}

/* The queue that the next piece comes from, or -1. Changes nothing. */
static int choose(const kvs_sched *sched, uint64_t now_ns) {
    if (sched->inflight_pieces >= sched->config.depth) return -1; /* INV-128 */
    if (sched->config.policy == KVS_POLICY_FIFO) return is_empty(&sched->queues[0]) ? -1 : 0;
    kvs_order order = preference(sched, now_ns);
    for (uint32_t i = 0; i < order.count; i++) {
        uint32_t io_class = order.classes[i];
        if (!has_room(sched, io_class, now_ns)) continue;
        if (sched->config.policy != KVS_POLICY_KVSTORE || sched->inflight_bytes == 0)
            return (int)io_class;
        uint64_t bytes = head_length(sched, sched->queues[io_class].next);
        /* INV-136: without room in total for the chosen piece nothing goes. */
        return sched->inflight_bytes + bytes <= sched->config.total_bytes ? (int)io_class : -1;
    }
    return -1;
}

int kvs_sched_peek(kvs_sched *sched, uint64_t now_ns) { return choose(sched, now_ns) >= 0; }

/* A free piece number, or -ENOMEM. Pieces that wait to go again keep theirs, so there may be more
   of them than the depth. */
static int64_t new_piece(kvs_sched *sched) {
    if (sched->free_count == 0) {
        uint32_t before = kvs_table_capacity(&sched->pieces), after = before + KVS_CHUNK_ITEMS;
        uint32_t *numbers = realloc(sched->free_pieces, after * sizeof *numbers);
        if (!numbers) return -ENOMEM;
        sched->free_pieces = numbers;
        if (kvs_table_reserve(&sched->pieces, after) != 0) return -ENOMEM;
        for (uint32_t i = after; i > before; i--) numbers[sched->free_count++] = i - 1;
    }
    return sched->free_pieces[--sched->free_count];
}

/* Takes the head of a queue: a piece that was put back, or a fresh one cut off a range. */
static kvs_flying *take_head(kvs_sched *sched, kvs_node *head) {
    kvs_entry *entry = entry_at(sched, head->transfer);
    if (head->piece != KVS_RANGE) {
        kvs_flying *flying = piece_at(sched, head->piece);
        unlink_node(head);
        entry->put_back--;
        return flying;
    }
    int64_t number = new_piece(sched);
    if (number < 0) return NULL;
    kvs_flying *flying = kvs_table_at(&sched->pieces, (uint32_t)number);
    *flying = (kvs_flying){
        .node = {.arrival_ns = head->arrival_ns,
                 .transfer = head->transfer,
                 .piece = (uint32_t)number},
        .offset = entry->next_offset,
        .length = head_length(sched, head),
        .used = true,
    };
    entry->next_offset += flying->length;
    if (entry->next_offset == entry->end_offset) unlink_node(head);
    return flying;
}

int kvs_sched_next(kvs_sched *sched, uint64_t now_ns, kvs_piece *piece) {
    int chosen = choose(sched, now_ns);
    if (chosen < 0) return 0;
    bool aged = is_aged(sched, (uint32_t)chosen, now_ns);
    kvs_flying *flying = take_head(sched, sched->queues[chosen].next);
    if (!flying) return 0;
    kvs_entry *entry = entry_at(sched, flying->node.transfer);
    uint32_t io_class = entry->io_class;
    kvs_class_counts *counts = &sched->counts[io_class];
    flying->io_class = (uint8_t)io_class;
    flying->dispatched_ns = now_ns;
    flying->inflight = true;
    entry->inflight++;
    sched->inflight_pieces++;
    sched->inflight_bytes += flying->length;
    counts->queued_bytes -= flying->length;
    counts->inflight_bytes += flying->length;
    counts->inflight_pieces++;
    counts->pieces++;
    counts->aged += aged;
    record(&sched->histograms[io_class][KVS_WAIT], since(now_ns, flying->node.arrival_ns));
    sched->dispatches++;
    sched->last_was_read = io_class == KVS_READ;
    if (io_class == KVS_BACKGROUND)
        sched->background_turn_at = sched->dispatches + sched->config.background_turn;
    if (io_class != KVS_READ) sched->last_write_was_background = io_class == KVS_BACKGROUND;
    *piece = (kvs_piece){
        .offset = flying->offset,
        .queued_ns = flying->node.arrival_ns,
        .length = flying->length,
        .piece = flying->node.piece,
        .transfer = flying->node.transfer,
        .io_class = (uint8_t)io_class,
        .opcode = entry->opcode,
        .aged = aged,
        .again = flying->again,
    };
    return 1;
}

/* ---- what comes back ---- */

static void leave_device(kvs_sched *sched, kvs_flying *flying, kvs_entry *entry, uint64_t now_ns) {
    assert(flying->inflight && entry->inflight > 0 && sched->inflight_pieces > 0);
    kvs_class_counts *counts = &sched->counts[flying->io_class];
    flying->inflight = false;
    entry->inflight--;
    sched->inflight_pieces--;
    sched->inflight_bytes -= flying->length;
    counts->inflight_bytes -= flying->length;
    counts->inflight_pieces--;
    record(&sched->histograms[flying->io_class][KVS_SERVICE], since(now_ns, flying->dispatched_ns));
    if (flying->io_class == KVS_READ)
        sched->read_active_until = now_ns + sched->config.read_linger_ns;
}

static void count_done(kvs_sched *sched, const kvs_flying *flying, const kvs_entry *entry,
                       uint64_t bytes) {
    kvs_class_counts *counts = &sched->counts[flying->io_class];
    counts->done_bytes += bytes;
    if (entry->opcode == KVS_OP_READ) counts->read_bytes += bytes;
    else counts->written_bytes += bytes;
    repay(sched, entry, bytes);
}

void kvs_sched_done(kvs_sched *sched, uint32_t piece, int ok, uint64_t now_ns) {
    kvs_flying *flying = piece_at(sched, piece);
    kvs_entry *entry = entry_at(sched, flying->node.transfer);
    leave_device(sched, flying, entry, now_ns);
    if (ok) {
        count_done(sched, flying, entry, flying->length);
    } else {
        sched->counts[flying->io_class].failed_bytes += flying->length;
        repay(sched, entry, flying->length);
    }
    free_piece(sched, flying, piece);
}

void kvs_sched_again(kvs_sched *sched, uint32_t piece, uint64_t bytes, uint64_t now_ns) {
    kvs_flying *flying = piece_at(sched, piece);
    kvs_entry *entry = entry_at(sched, flying->node.transfer);
    assert(bytes < flying->length);
    leave_device(sched, flying, entry, now_ns);
    count_done(sched, flying, entry, bytes);
    flying->offset += bytes;
    flying->length -= (uint32_t)bytes;
    flying->again = true;
    if (flying->io_class != entry->io_class) { /* promoted meanwhile */
        sched->counts[flying->io_class].promoted_out_bytes += flying->length;
        sched->counts[entry->io_class].promoted_in_bytes += flying->length;
    }
    sched->counts[entry->io_class].queued_bytes += flying->length;
    kvs_node *queue = queue_of(sched, entry);
    /* The old arrival time, but never later than the head's: the queue stays sorted. */
    if (!is_empty(queue) && queue->next->arrival_ns < flying->node.arrival_ns)
        flying->node.arrival_ns = queue->next->arrival_ns;
    link_after(queue, &flying->node);
    entry->put_back++;
}

void kvs_sched_count(const kvs_sched *sched, uint32_t io_class, kvs_class_counts *counts) {
    assert(io_class < KVS_CLASSES);
    *counts = sched->counts[io_class];
}

void kvs_sched_histogram(const kvs_sched *sched, uint32_t io_class, uint32_t kind,
                         kvs_histogram *histogram) {
    assert(io_class < KVS_CLASSES && kind <= KVS_SERVICE);
    *histogram = sched->histograms[io_class][kind];
}
