/* The transfer table: what is open, what is known about it, and who is told.

   A transfer is one page, so one bad sector costs one page (INV-115).

   Life of a transfer: FREE -> (SEALING ->) MOVING -> (CHECKING ->) FREE. `users` counts whoever
   may still touch its memory: pieces in the device and native work. A transfer ends, exactly once,
   when it has no user and nothing queued; only then is END posted (INV-113, INV-120). A deadline,
   a cancel or a close may deliver the verdict earlier, also exactly once (INV-118, INV-119).

   Verdicts are decided, gates published and records appended under the lock, so no interleaving
   can deliver twice or out of order. Waking the loop happens after the lock is open. */
#include "engine.h"

#include <signal.h>
#include <stdio.h>
#include <unistd.h>

/* ---- locking, and what follows it ---- */

void kvs_engine_lock(kvs_engine *engine) { pthread_mutex_lock(&engine->lock); }

void kvs_engine_open(kvs_engine *engine) {
    if (kvs_engine_has_work(engine, true)) pthread_cond_signal(&engine->work);
    pthread_mutex_unlock(&engine->lock);
}

void kvs_engine_tell(kvs_out *out) {
    for (uint32_t i = 0; i < out->count; i++) {
        kvs_cq_wake(out->queues[i]);
        kvs_cq_release(out->queues[i]);
    }
    out->count = 0;
}

void kvs_engine_unlock(kvs_engine *engine, kvs_out *out) {
    bool doorbell = false;
    bool timer = kvs_engine_next_timer(engine) < engine->awake_at;
    if (engine->config.kind == KVS_KIND_RING) {
        if (engine->sleeping && (out->kick || timer)) {
            engine->sleeping = false;
            doorbell = true;
        }
        if (kvs_engine_has_work(engine, true)) pthread_cond_signal(&engine->work);
    } else if (engine->config.kind == KVS_KIND_WORKERS) {
        if (out->kick && engine->idle_workers) pthread_cond_signal(&engine->work);
        if (timer) pthread_cond_signal(&engine->clock);
    }
    pthread_mutex_unlock(&engine->lock);
    if (doorbell) kvs_reactor_ring_doorbell(engine);
    kvs_engine_tell(out);
    out->kick = false;
}

static void post(kvs_out *out, kvs_cq *cq, uint64_t token, int32_t status, uint32_t flags,
                 uint64_t value) {
    if (!kvs_cq_append(cq, token, status, flags, value)) return;
    if (out->count == sizeof out->queues / sizeof *out->queues) {
        kvs_cq_wake(cq);
        return;
    }
    kvs_cq_retain(cq);
    out->queues[out->count++] = cq;
}

int kvs_thread_start(pthread_t *thread, const char *name, void *(*run)(void *), void *argument) {
    sigset_t all, before;
    sigfillset(&all); /* Python's handlers run in its main thread */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int result = pthread_create(thread, NULL, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (result == 0) pthread_setname_np(*thread, name);
    return -result;
}

/* ---- deadlines: a binary heap of transfer numbers ---- */

static kvs_transfer *transfer_at(const kvs_engine *engine, uint32_t index) {
    return kvs_table_at(&engine->transfers, index);
}

static uint64_t heap_key(const kvs_engine *engine, uint32_t at) {
    return transfer_at(engine, engine->heap[at])->deadline_ns;
}

static void heap_place(kvs_engine *engine, uint32_t at, uint32_t index) {
    engine->heap[at] = index;
    transfer_at(engine, index)->heap_index = at;
}

static void heap_fix(kvs_engine *engine, uint32_t at) {
    uint32_t index = engine->heap[at];
    uint64_t key = transfer_at(engine, index)->deadline_ns;
    while (at > 0 && key < heap_key(engine, (at - 1) / 2)) {
        heap_place(engine, at, engine->heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= engine->heap_count) break;
        if (child + 1 < engine->heap_count && heap_key(engine, child + 1) < heap_key(engine, child))
            child++;
        if (heap_key(engine, child) >= key) break;
        heap_place(engine, at, engine->heap[child]);
        at = child;
    }
    heap_place(engine, at, index);
}

static void heap_add(kvs_engine *engine, kvs_transfer *transfer) {
    assert(engine->heap_count < engine->heap_capacity);
    heap_place(engine, engine->heap_count, transfer->index);
    heap_fix(engine, engine->heap_count++);
}

static void heap_remove(kvs_engine *engine, kvs_transfer *transfer) {
    uint32_t at = transfer->heap_index;
    if (at == KVS_NONE) return;
    transfer->heap_index = KVS_NONE;
    uint32_t last = engine->heap[--engine->heap_count];
    if (last == transfer->index) return;
    heap_place(engine, at, last);
    heap_fix(engine, at);
}

uint64_t kvs_engine_next_timer(const kvs_engine *engine) {
    uint64_t next = engine->heap_count ? heap_key(engine, 0) : KVS_NEVER;
    for (uint32_t i = 0; i < engine->hold_count; i++)
        if (engine->holds[i].due_ns < next) next = engine->holds[i].due_ns;
    return next;
}

/* ---- native work on the memory of a transfer ---- */

static void push_work(kvs_work_list *list, kvs_transfer *transfer) {
    transfer->next_work = NULL;
    if (list->tail) list->tail->next_work = transfer;
    else list->head = transfer;
    list->tail = transfer;
}

static kvs_transfer *pop_list(kvs_work_list *list) {
    kvs_transfer *transfer = list->head;
    if (!transfer) return NULL;
    list->head = transfer->next_work;
    if (!list->head) list->tail = NULL;
    return transfer;
}

static bool remove_work(kvs_work_list *list, kvs_transfer *transfer) {
    kvs_transfer *previous = NULL;
    for (kvs_transfer *at = list->head; at; previous = at, at = at->next_work) {
        if (at != transfer) continue;
        if (previous) previous->next_work = at->next_work;
        else list->head = at->next_work;
        if (list->tail == at) list->tail = previous;
        return true;
    }
    return false;
}

bool kvs_engine_has_work(const kvs_engine *engine, bool helper) {
    if (!helper) return engine->inline_work.head != NULL;
    return engine->helper_work[0].head || engine->helper_work[1].head ||
           engine->helper_work[2].head;
}

kvs_transfer *kvs_engine_pop_work(kvs_engine *engine, bool helper) {
    if (!helper) return pop_list(&engine->inline_work);
    for (int i = 0; i < 3; i++) {
        kvs_transfer *transfer = pop_list(&engine->helper_work[i]);
        if (transfer) return transfer;
    }
    return NULL;
}

static void start_work(kvs_engine *engine, kvs_transfer *transfer, kvs_work work, kvs_out *out) {
    transfer->work = (uint8_t)work;
    transfer->users++;
    out->kick = true;
    bool small = transfer->request.payload_bytes <= engine->config.inline_bytes;
    if (engine->config.kind == KVS_KIND_RING && small) {
        push_work(&engine->inline_work, transfer);
        return;
    }
    /* checks first, somebody waits for them; then headers, in the order of their classes */
    bool lazy = transfer->request.io_class == KVS_BACKGROUND &&
                engine->config.sched.policy != KVS_POLICY_FIFO;
    int list = work != KVS_WORK_SEAL ? 0 : lazy ? 2 : 1;
    push_work(&engine->helper_work[list], transfer);
}

int32_t kvs_work_perform(const kvs_transfer *transfer) {
    const kvs_submission *request = &transfer->request;
    int32_t status = 0;
    if (transfer->work == KVS_WORK_SEAL) {
        kvs_seal(request);
        return 0;
    }
    if (transfer->work == KVS_WORK_VERIFY) {
        status = kvs_verify(request);
        if (status == 0) return 0;
    }
    if (request->flags & KVS_SUBMIT_POISON) /* INV-219: all ones is NaN in every format */
        memset((void *)(uintptr_t)request->address, 0xff, transfer->length);
    return status;
}

/* ---- the end of a transfer ---- */

static void count_error(kvs_engine *engine, uint32_t io_class, int32_t status) {
    uint32_t code = (uint32_t)-status;
    if (status == KVS_END_OF_FILE) code = KVS_ERROR_END_OF_FILE;
    if (status == KVS_MISMATCH) code = KVS_ERROR_MISMATCH;
    engine->errors[io_class][code < KVS_ERRORS ? code : EIO]++;
}

/* Publishes the gate of a transfer with its verdict (INV-204, INV-205). Deadline, cancel and
   close do not wait for the rest of the batch. */
static void publish_gate(kvs_engine *engine, const kvs_transfer *transfer) {
    const kvs_submission *request = &transfer->request;
    if (request->gate_word < 0) return;
    int at_once = transfer->status == -ECANCELED || transfer->status == -ETIME;
    kvs_gate_transfer(engine->gates, (uint32_t)request->gate_word, request->gate_generation,
                      transfer->status, at_once);
}

static void check_drains(kvs_engine *engine, kvs_out *out) {
    for (uint32_t i = 0; i < engine->drain_count;) {
        kvs_drain *drain = &engine->drains[i];
        bool done = drain->file_id < 0 ? engine->open_transfers == 0
                                       : engine->files[drain->file_id].transfers == 0;
        if (!done) {
            i++;
            continue;
        }
        post(out, drain->cq, drain->token, 0, KVS_FLAG_VERDICT | KVS_FLAG_END, 0);
        kvs_cq_release(drain->cq);
        *drain = engine->drains[--engine->drain_count];
    }
}

/* No user, nothing queued: END, together with the verdict unless that was told before. */
static void conclude(kvs_engine *engine, kvs_transfer *transfer, kvs_out *out) {
    assert(transfer->users == 0 && transfer->phase != KVS_FREE);
    uint32_t flags = KVS_FLAG_END;
    if (!transfer->verdict) {
        publish_gate(engine, transfer);
        flags |= KVS_FLAG_VERDICT;
    }
    kvs_sched_remove(engine->sched, transfer->index);
    heap_remove(engine, transfer);
    post(out, transfer->cq, transfer->request.token, transfer->status, flags, transfer->moved);
    kvs_cq_release(transfer->cq);
    transfer->cq = NULL;
    transfer->phase = KVS_FREE;
    transfer->generation++;
    transfer->next_free = engine->free_head;
    engine->free_head = transfer->index;
    engine->free_count++;
    kvs_file *file = &engine->files[transfer->request.file_id];
    assert(file->transfers > 0 && engine->open_transfers > 0);
    file->transfers--;
    engine->open_transfers--;
    if (engine->drain_count) check_drains(engine, out);
    if (engine->open_transfers == 0) pthread_cond_broadcast(&engine->idle);
}

/* Called whenever a piece is back or pieces were withdrawn: is the I/O over? */
static void advance(kvs_engine *engine, kvs_transfer *transfer, kvs_out *out) {
    if (transfer->users || kvs_sched_queued(engine->sched, transfer->index)) return;
    const kvs_submission *request = &transfer->request;
    bool is_read = request->opcode == KVS_OP_READ;
    transfer->phase = KVS_CHECKING;
    if (transfer->status == 0 && (request->flags & KVS_SUBMIT_VERIFY))
        start_work(engine, transfer, KVS_WORK_VERIFY, out);
    else if (transfer->status != 0 && is_read && (request->flags & KVS_SUBMIT_POISON)) {
        if (request->gate_word >= 0) /* a stop may open the gate before the poison is written */
            kvs_gate_note(engine->gates, (uint32_t)request->gate_word, request->gate_generation,
                          transfer->status);
        start_work(engine, transfer, KVS_WORK_POISON, out);
    } else conclude(engine, transfer, out);
}

/* The waiter is told now; memory and slot stay taken until the last user is gone. */
static void tell_early(kvs_engine *engine, kvs_transfer *transfer, kvs_out *out) {
    assert(!transfer->verdict && transfer->status != 0);
    publish_gate(engine, transfer);
    transfer->verdict = true;
    heap_remove(engine, transfer);
    post(out, transfer->cq, transfer->request.token, transfer->status, KVS_FLAG_VERDICT,
         transfer->moved);
}

/* Ends a transfer before its time: queued pieces are withdrawn at once, those in the device are
   awaited (INV-118). False if its verdict is told already, or waits only for its poison. */
static bool end_early(kvs_engine *engine, kvs_transfer *transfer, int32_t status, kvs_out *out) {
    if (transfer->verdict) return false;
    if (transfer->work == KVS_WORK_POISON && transfer->phase == KVS_CHECKING) return false;
    if (transfer->status == 0) transfer->status = status; /* the first failure stays */
    kvs_sched_withdraw(engine->sched, transfer->index);
    if (transfer->users) tell_early(engine, transfer, out);
    else advance(engine, transfer, out);
    return true;
}

void kvs_engine_work_done(kvs_engine *engine, kvs_transfer *transfer, int32_t status,
                          uint64_t now_ns, kvs_out *out) {
    assert(transfer->users > 0);
    kvs_work work = transfer->work;
    transfer->work = KVS_WORK_NONE;
    transfer->users--;
    if (work == KVS_WORK_SEAL && transfer->status == 0) {
        transfer->phase = KVS_MOVING;
        kvs_sched_ready(engine->sched, transfer->index, now_ns);
        out->kick = true;
        return;
    }
    if (work == KVS_WORK_SEAL) { /* cancelled meanwhile */
        advance(engine, transfer, out);
        return;
    }
    if (status != 0 && transfer->status == 0) {
        assert(status == KVS_MISMATCH);
        transfer->status = status;
        engine->counts.mismatches++;
        count_error(engine, transfer->request.io_class, status);
    }
    conclude(engine, transfer, out);
}

/* ---- pieces ---- */

static bool is_write_fault(uint32_t action) {
    return action == KVS_FAULT_TORN || action == KVS_FAULT_SECTORS || action == KVS_FAULT_LOST;
}

/* The first rule of the fault shim that takes this piece, or -1. */
static int32_t match_rule(kvs_engine *engine, const kvs_piece *piece, const kvs_flight *flight,
                          uint32_t file_id) {
    for (uint32_t i = 0; i < engine->rule_count; i++) {
        kvs_rule *rule = &engine->rules[i];
        const kvs_fault *fault = &rule->fault;
        if (!rule->used) continue;
        if (fault->class_mask && !(fault->class_mask >> piece->io_class & 1)) continue;
        if (fault->opcode_mask && !(fault->opcode_mask >> piece->opcode & 1)) continue;
        if (piece->opcode == KVS_OP_READ && is_write_fault(fault->action)) continue;
        if (fault->direct_mask && !(fault->direct_mask >> flight->direct & 1)) continue;
        if (fault->file_id >= 0 && (uint32_t)fault->file_id != file_id) continue;
        if (flight->offset >= fault->offset_high) continue;
        if (flight->offset + flight->length <= fault->offset_low) continue;
        if (rule->matches++ < fault->skip) continue;
        if (rule->affected >= fault->count) continue;
        rule->affected++;
        rule->flying++;
        return (int32_t)i;
    }
    return -1;
}

/* Bytes of a piece that a rule lets through. */
static uint32_t let_through(const kvs_fault *fault, uint32_t length) {
    bool cut = fault->action == KVS_FAULT_SHORT || fault->action == KVS_FAULT_TORN;
    return cut && fault->argument < (int64_t)length ? (uint32_t)fault->argument & ~4095u : length;
}

/* Bends a piece to the rule that took it. */
static void bend(const kvs_fault *fault, kvs_flight *flight, kvs_dispatch *run) {
    run->length = let_through(fault, flight->length);
    switch (fault->action) {
    case KVS_FAULT_ERRNO:
    case KVS_FAULT_ZERO:
    case KVS_FAULT_LOST:
        run->skip = true;
        break;
    case KVS_FAULT_MISDIRECT:
        run->skip = fault->argument < 0 && (uint64_t)-fault->argument > run->offset;
        run->offset += (uint64_t)fault->argument;
        break;
    case KVS_FAULT_FLIP:
    case KVS_FAULT_SECTORS:
        if (run->opcode == KVS_OP_READ) break;
        flight->scratch = aligned_alloc(4096, ((size_t)run->length + 4095) & ~(size_t)4095);
        run->skip = !flight->scratch; /* fails with ENOMEM */
        run->source = run->address;
        run->address = (uint64_t)(uintptr_t)flight->scratch;
        run->fault = (uint8_t)fault->action;
        run->argument = fault->argument;
        break;
    default:
        run->skip = run->length == 0;
    }
}

void kvs_fault_fill(const kvs_dispatch *run) {
    uint8_t *scratch = (uint8_t *)(uintptr_t)run->address;
    memcpy(scratch, (const void *)(uintptr_t)run->source, run->length);
    if (run->fault == KVS_FAULT_FLIP) {
        scratch[run->argument / 8 % run->length] ^= (uint8_t)(1u << run->argument % 8);
        return;
    }
    for (uint32_t at = 0; at < run->length; at += 4096) {
        uint32_t left = run->length - at, bytes = left < 4096 ? left : 4096;
        if (run->argument >> at / 4096 % 32 & 1) continue;
        ssize_t got = pread(run->fd, scratch + at, bytes, (off_t)(run->offset + at));
        if (got < (ssize_t)bytes) memset(scratch + at, 0, bytes); /* was never written */
    }
}

bool kvs_engine_take(kvs_engine *engine, uint64_t now_ns, kvs_dispatch *run) {
    kvs_piece piece;
    if (!kvs_sched_next(engine->sched, now_ns, &piece)) return false;
    if (kvs_table_reserve(&engine->flights, piece.piece + 1) != 0) {
        kvs_sched_again(engine->sched, piece.piece, 0, now_ns);
        return false;
    }
    kvs_transfer *transfer = transfer_at(engine, piece.transfer);
    assert(transfer->phase == KVS_MOVING && transfer->status == 0);
    kvs_file *file = &engine->files[transfer->request.file_id];
    kvs_flight *flight = kvs_table_at(&engine->flights, piece.piece);
    assert(!flight->flying);
    *flight = (kvs_flight){
        .address = transfer->request.address + piece.offset,
        .offset = transfer->request.offset + piece.offset,
        .transfer = piece.transfer,
        .length = piece.length,
        .tries = piece.again ? flight->tries : 0,
        .direct = file->direct_fd >= 0 && !file->direct_ended,
        .flying = true,
    };
    transfer->users++;
    *run = (kvs_dispatch){
        .address = flight->address,
        .offset = flight->offset,
        .length = flight->length,
        .piece = piece.piece,
        .fd = flight->direct ? file->direct_fd : file->buffered_fd,
        .file_slot = transfer->request.file_id * 2 + (flight->direct ? 0 : 1),
        .opcode = piece.opcode,
        .io_class = piece.io_class,
        .direct = flight->direct,
    };
    flight->rule =
        engine->rule_count ? match_rule(engine, &piece, flight, transfer->request.file_id) : -1;
    if (flight->rule >= 0) bend(&engine->rules[flight->rule].fault, flight, run);
    return true;
}

static void fail_piece(kvs_engine *engine, kvs_transfer *transfer, uint32_t piece, int32_t status,
                       uint64_t now_ns) {
    /* INV-113: the first failure decides; queued pieces are skipped, those in flight awaited. */
    kvs_sched_done(engine->sched, piece, 0, now_ns);
    count_error(engine, transfer->request.io_class, status);
    if (transfer->status == 0) transfer->status = status;
    kvs_sched_withdraw(engine->sched, transfer->index);
}

/* Applies the outcome of a piece, which comes from its own result alone (INV-117). */
static void settle(kvs_engine *engine, uint32_t piece, int32_t result, uint64_t now_ns,
                   kvs_out *out) {
    kvs_flight *flight = kvs_table_at(&engine->flights, piece);
    kvs_transfer *transfer = transfer_at(engine, flight->transfer);
    kvs_file *file = &engine->files[transfer->request.file_id];
    assert(flight->flying && transfer->users > 0);
    flight->flying = false;
    transfer->users--;
    bool retry = result == -EINTR || result == -EAGAIN;
    if (result >= 0 && (uint32_t)result >= flight->length) {
        transfer->moved += flight->length;
        kvs_sched_done(engine->sched, piece, 1, now_ns);
    } else if (transfer->status != 0) { /* over already: nothing is tried again */
        kvs_sched_done(engine->sched, piece, 0, now_ns);
        if (result < 0 && !retry) count_error(engine, transfer->request.io_class, result);
    } else if (result == -EINVAL && flight->direct && file->buffered_fd >= 0) {
        /* INV-130: this piece again, buffered, and no more direct I/O for this file */
        file->direct_ended = true;
        engine->counts.direct_fallbacks++;
        kvs_sched_again(engine->sched, piece, 0, now_ns);
    } else if (result > 0 || retry) {
        uint32_t unit = flight->direct ? 4096 : 1;
        uint32_t bytes = result > 0 ? (uint32_t)result & ~(unit - 1) : 0;
        if (result > 0) engine->counts.short_transfers++;
        else engine->counts.retries++;
        transfer->moved += bytes;
        flight->tries = bytes ? 0 : flight->tries + 1;
        if (flight->tries > KVS_TRIES_MAX)
            fail_piece(engine, transfer, piece, result < 0 ? result : -EIO, now_ns);
        else kvs_sched_again(engine->sched, piece, bytes, now_ns);
    } else {
        fail_piece(engine, transfer, piece, result == 0 ? KVS_END_OF_FILE : result, now_ns);
    }
    advance(engine, transfer, out);
}

static void hold_piece(kvs_engine *engine, uint32_t piece, int32_t result, uint64_t due_ns,
                       int32_t rule) {
    kvs_flight *flight = kvs_table_at(&engine->flights, piece);
    assert(engine->hold_count < engine->config.sched.depth);
    flight->result = result;
    engine->holds[engine->hold_count++] =
        (kvs_hold){.due_ns = due_ns, .piece = piece, .rule = rule};
}

void kvs_engine_back(kvs_engine *engine, uint32_t piece, int32_t result, uint64_t now_ns,
                     kvs_out *out) {
    kvs_flight *flight = kvs_table_at(&engine->flights, piece);
    assert(flight->flying);
    if (flight->rule >= 0) {
        kvs_rule *rule = &engine->rules[flight->rule];
        int64_t argument = rule->fault.argument;
        bool is_write = transfer_at(engine, flight->transfer)->request.opcode == KVS_OP_WRITE;
        assert(rule->flying > 0);
        rule->flying--;
        switch (rule->fault.action) {
        case KVS_FAULT_ERRNO:
            result = (int32_t)-argument;
            break;
        case KVS_FAULT_ZERO:
            result = 0;
            break;
        case KVS_FAULT_SHORT:
            if (argument < (int64_t)flight->length && result >= 0) result = (int32_t)argument;
            break;
        case KVS_FAULT_FLIP:
        case KVS_FAULT_SECTORS:
            if (is_write) result = flight->scratch ? result : -ENOMEM;
            else if (result > 0)
                ((uint8_t *)(uintptr_t)flight->address)[argument / 8 % result] ^=
                    (uint8_t)(1u << argument % 8);
            free(flight->scratch);
            flight->scratch = NULL;
            break;
        case KVS_FAULT_TORN:
            if (result == (int32_t)let_through(&rule->fault, flight->length))
                result = (int32_t)flight->length;
            break;
        case KVS_FAULT_LOST:
            result = (int32_t)flight->length;
            break;
        case KVS_FAULT_MISDIRECT:
            if (argument < 0 && (uint64_t)-argument > flight->offset)
                result = (int32_t)flight->length;
            break;
        case KVS_FAULT_DELAY:
            hold_piece(engine, piece, result, now_ns + (uint64_t)argument, flight->rule);
            return;
        case KVS_FAULT_HOLD:
            if (!rule->used) break; /* released while the piece was in the device */
            hold_piece(engine, piece, result, KVS_NEVER, flight->rule);
            return;
        default:
            assert(false);
        }
    }
    bool retry = result == -EINTR || result == -EAGAIN;
    if (retry && flight->tries >= KVS_TRIES_BEFORE_PAUSE && flight->tries < KVS_TRIES_MAX &&
        transfer_at(engine, flight->transfer)->status == 0) {
        hold_piece(engine, piece, result, now_ns + KVS_RETRY_PAUSE_NS, -1);
        return;
    }
    settle(engine, piece, result, now_ns, out);
}

void kvs_engine_tick(kvs_engine *engine, uint64_t now_ns, kvs_out *out) {
    for (uint32_t i = 0; i < engine->hold_count;) {
        if (engine->holds[i].due_ns > now_ns) {
            i++;
            continue;
        }
        uint32_t piece = engine->holds[i].piece;
        engine->holds[i] = engine->holds[--engine->hold_count];
        settle(engine, piece, ((kvs_flight *)kvs_table_at(&engine->flights, piece))->result, now_ns,
               out);
        out->kick = true;
    }
    while (engine->heap_count && heap_key(engine, 0) <= now_ns) { /* INV-119 */
        kvs_transfer *transfer = transfer_at(engine, engine->heap[0]);
        heap_remove(engine, transfer);
        if (end_early(engine, transfer, -ETIME, out)) engine->counts.deadlines++;
    }
}

/* ---- the loop's side ---- */

static bool is_valid(const kvs_engine *engine, const kvs_submission *request) {
    bool is_read = request->opcode == KVS_OP_READ;
    uint32_t flags = request->flags;
    if (request->file_id >= KVS_FILES_MAX || !engine->files[request->file_id].used) return false;
    if (request->io_class >= KVS_CLASSES || request->opcode > KVS_OP_WRITE) return false;
    if (request->io_class == KVS_READ && !is_read) return false;
    if (request->header_bytes != 0 && request->header_bytes != KVS_HEADER_BYTES) return false;
    if (request->payload_bytes == 0 || request->payload_bytes >= (uint64_t)1 << 40) return false;
    if (request->address == 0 || request->address % 4096 || request->offset % 4096) return false;
    if ((flags & KVS_SUBMIT_VERIFY) && (!is_read || !request->header_bytes)) return false;
    if ((flags & KVS_SUBMIT_SEAL) && (is_read || !request->header_bytes)) return false;
    if (request->gate_word < 0) return true;
    return engine->gates && is_read &&
           (uint32_t)request->gate_word < kvs_gates_words(engine->gates);
}

/* Makes room for `count` more transfers, so that taking them cannot fail. */
static int reserve(kvs_engine *engine, uint32_t count) {
    uint32_t capacity = kvs_table_capacity(&engine->transfers);
    if (engine->free_count < count) {
        uint32_t wanted = engine->open_transfers + count;
        wanted += wanted / 2;
        uint32_t *heap = realloc(engine->heap, (size_t)(wanted + KVS_CHUNK_ITEMS) * sizeof *heap);
        if (!heap) return -ENOMEM;
        engine->heap = heap;
        if (kvs_sched_reserve(engine->sched, wanted) != 0) return -ENOMEM;
        int result = kvs_table_reserve(&engine->transfers, wanted);
        for (uint32_t i = capacity; i < kvs_table_capacity(&engine->transfers); i++) {
            kvs_transfer *transfer = transfer_at(engine, i);
            transfer->index = i;
            transfer->generation = 1;
            transfer->next_free = engine->free_head;
            engine->free_head = i;
            engine->free_count++;
        }
        engine->heap_capacity = kvs_table_capacity(&engine->transfers);
        assert(engine->heap_capacity <= wanted + KVS_CHUNK_ITEMS);
        if (result != 0) return result;
    }
    return 0;
}

static void take_one(kvs_engine *engine, kvs_cq *cq, kvs_submission *request, uint64_t now_ns,
                     kvs_out *out) {
    uint32_t index = engine->free_head;
    kvs_transfer *transfer = transfer_at(engine, index);
    assert(transfer->phase == KVS_FREE && transfer->index == index);
    uint64_t length = request->header_bytes + ((request->payload_bytes + 4095) & ~(uint64_t)4095);
    int added = kvs_sched_add(engine->sched, index, request->io_class, request->opcode,
                              request->header_bytes, length);
    if (added == -ENOBUFS) { /* INV-111: skipped and counted, not delayed */
        request->handle = 0;
        post(out, cq, request->token, -ENOBUFS, KVS_FLAG_VERDICT | KVS_FLAG_END, 0);
        return;
    }
    assert(added == 0);
    engine->free_head = transfer->next_free;
    engine->free_count--;
    engine->open_transfers++;
    engine->files[request->file_id].transfers++;
    request->handle = (uint64_t)transfer->generation << 32 | index;
    transfer->request = *request;
    transfer->cq = cq;
    kvs_cq_retain(cq);
    transfer->length = length;
    transfer->moved = 0;
    transfer->users = 0;
    transfer->status = 0;
    transfer->work = KVS_WORK_NONE;
    transfer->verdict = false;
    transfer->heap_index = KVS_NONE;
    transfer->deadline_ns =
        request->deadline_ns ? request->deadline_ns : now_ns + engine->config.deadline_ns;
    if (transfer->deadline_ns != KVS_NEVER) heap_add(engine, transfer);
    if (request->flags & KVS_SUBMIT_SEAL) {
        transfer->phase = KVS_SEALING;
        start_work(engine, transfer, KVS_WORK_SEAL, out);
    } else {
        transfer->phase = KVS_MOVING;
        kvs_sched_ready(engine->sched, index, now_ns);
    }
}

int kvs_engine_submit(kvs_engine *engine, kvs_cq *cq, kvs_submission *submissions, uint32_t count) {
    kvs_out out = {.count = 0};
    uint64_t now_ns = kvs_now_ns();
    int result = 0;
    kvs_engine_lock(engine);
    if (engine->stopping) result = -ESHUTDOWN;
    for (uint32_t i = 0; i < count && result == 0; i++)
        if (!is_valid(engine, &submissions[i])) result = -EINVAL;
    if (result == 0) result = reserve(engine, count);
    for (uint32_t i = 0; i < count && result == 0; i++)
        take_one(engine, cq, &submissions[i], now_ns, &out);
    out.kick = result == 0 && count > 0;
    uint64_t spent = kvs_now_ns() - now_ns;
    if (spent > engine->counts.submit_ns_max) engine->counts.submit_ns_max = spent;
    kvs_engine_unlock(engine, &out);
    if (result == 0 && engine->config.kind == KVS_KIND_INLINE) kvs_workers_run_inline(engine);
    return result;
}

/* The transfer of a handle, or NULL if that one is over: the generation tells (late calls are
   normal, not errors). */
static kvs_transfer *find(kvs_engine *engine, uint64_t handle) {
    uint32_t index = (uint32_t)handle, generation = (uint32_t)(handle >> 32);
    if (index >= kvs_table_capacity(&engine->transfers)) return NULL;
    kvs_transfer *transfer = transfer_at(engine, index);
    bool is_open = transfer->phase != KVS_FREE && transfer->generation == generation;
    return is_open ? transfer : NULL;
}

int kvs_engine_promote(kvs_engine *engine, uint64_t handle) {
    kvs_out out = {.count = 0};
    int changed = 0;
    kvs_engine_lock(engine);
    kvs_transfer *transfer = find(engine, handle);
    if (transfer && transfer->status == 0) {
        changed = kvs_sched_promote(engine->sched, transfer->index, kvs_now_ns());
        if (changed) {
            transfer->request.io_class = KVS_REQUIRED;
            if (transfer->work == KVS_WORK_SEAL && remove_work(&engine->helper_work[2], transfer))
                push_work(&engine->helper_work[1], transfer);
            out.kick = true; /* INV-108: the dispatcher is woken */
        }
    }
    kvs_engine_unlock(engine, &out);
    return changed;
}

int kvs_engine_cancel(kvs_engine *engine, uint64_t handle) {
    kvs_out out = {.count = 0};
    kvs_engine_lock(engine);
    kvs_transfer *transfer = find(engine, handle);
    bool ended = transfer && end_early(engine, transfer, -ECANCELED, &out);
    if (ended) engine->counts.cancelled++;
    out.kick = out.kick || ended;
    kvs_engine_unlock(engine, &out);
    if (ended && engine->config.kind == KVS_KIND_INLINE) kvs_workers_run_inline(engine);
    return ended;
}

/* INV-336: a waiter that joins later may wait longer. A deadline only moves to a later time, and so
   nobody has to be woken: whoever sleeps until the old one looks again and sleeps on. */
int kvs_engine_extend(kvs_engine *engine, uint64_t handle, uint64_t deadline_ns) {
    kvs_out out = {.count = 0};
    int changed = 0;
    kvs_engine_lock(engine);
    kvs_transfer *transfer = find(engine, handle);
    if (transfer && !transfer->verdict && transfer->status == 0 &&
        transfer->heap_index != KVS_NONE && deadline_ns > transfer->deadline_ns) {
        transfer->deadline_ns = deadline_ns;
        if (deadline_ns == KVS_NEVER) heap_remove(engine, transfer);
        else heap_fix(engine, transfer->heap_index);
        changed = 1;
    }
    kvs_engine_unlock(engine, &out);
    return changed;
}

uint64_t kvs_engine_background_room(kvs_engine *engine) {
    pthread_mutex_lock(&engine->lock);
    uint64_t room = kvs_sched_background_room(engine->sched);
    pthread_mutex_unlock(&engine->lock);
    return room;
}

/* ---- files ---- */

int kvs_engine_register_file(kvs_engine *engine, int direct_fd, int buffered_fd) {
    if (direct_fd < 0 && buffered_fd < 0) return -EBADF;
    int result = -ENFILE;
    pthread_mutex_lock(&engine->lock);
    for (uint32_t i = 0; i < KVS_FILES_MAX && result == -ENFILE; i++) {
        if (engine->files[i].used || engine->files[i].stale) continue;
        engine->files[i] =
            (kvs_file){.direct_fd = direct_fd, .buffered_fd = buffered_fd, .used = true};
        result = (int)i;
    }
    pthread_mutex_unlock(&engine->lock);
    return result;
}

int kvs_engine_unregister_file(kvs_engine *engine, uint32_t file_id) {
    kvs_out out = {.count = 0};
    int result = -EINVAL;
    kvs_engine_lock(engine);
    if (file_id < KVS_FILES_MAX && engine->files[file_id].used) {
        result = engine->files[file_id].transfers ? -EBUSY : 0; /* INV-121 */
        if (result == 0) {
            engine->files[file_id].used = false;
            if (engine->config.kind == KVS_KIND_RING && !engine->quit) {
                engine->files[file_id].stale = true; /* until the ring lets go of it */
                engine->files_stale = true;
                out.kick = true;
            }
        }
    }
    kvs_engine_unlock(engine, &out);
    return result;
}

int kvs_engine_file(kvs_engine *engine, uint32_t file_id, uint32_t *transfers, uint32_t *direct) {
    int result = -EINVAL;
    pthread_mutex_lock(&engine->lock);
    if (file_id < KVS_FILES_MAX && engine->files[file_id].used) {
        *transfers = engine->files[file_id].transfers;
        *direct = engine->files[file_id].direct_fd >= 0 && !engine->files[file_id].direct_ended;
        result = 0;
    }
    pthread_mutex_unlock(&engine->lock);
    return result;
}

int kvs_engine_register_memory(kvs_engine *engine, uint64_t address, uint64_t length) {
    if (engine->config.kind != KVS_KIND_RING) return 0; /* nothing to register */
    return kvs_reactor_memory(engine, address, length, true);
}

int kvs_engine_unregister_memory(kvs_engine *engine, uint64_t address) {
    if (engine->config.kind != KVS_KIND_RING) return 0;
    return kvs_reactor_memory(engine, address, 0, false);
}

int kvs_engine_drain(kvs_engine *engine, int64_t file_id, kvs_cq *cq, uint64_t token) {
    kvs_out out = {.count = 0};
    int result = 0;
    assert(file_id < KVS_FILES_MAX);
    kvs_engine_lock(engine);
    if (engine->drain_count == engine->drain_capacity) {
        uint32_t capacity = engine->drain_capacity ? 2 * engine->drain_capacity : 8;
        kvs_drain *drains = realloc(engine->drains, capacity * sizeof *drains);
        if (drains) {
            engine->drains = drains;
            engine->drain_capacity = capacity;
        } else {
            result = -ENOMEM;
        }
    }
    if (result == 0) {
        kvs_cq_retain(cq);
        engine->drains[engine->drain_count++] =
            (kvs_drain){.cq = cq, .token = token, .file_id = file_id};
        check_drains(engine, &out);
    }
    kvs_engine_unlock(engine, &out);
    return result;
}

/* ---- birth and death ---- */

static void free_all(kvs_engine *engine) {
    for (uint32_t i = 0; i < engine->drain_count; i++) kvs_cq_release(engine->drains[i].cq);
    kvs_sched_free(engine->sched);
    kvs_table_free(&engine->transfers);
    kvs_table_free(&engine->flights);
    free(engine->heap);
    free(engine->holds);
    free(engine->drains);
    pthread_cond_destroy(&engine->idle);
    pthread_cond_destroy(&engine->work);
    pthread_cond_destroy(&engine->clock);
    pthread_mutex_destroy(&engine->lock);
    if (engine->gates) kvs_gates_release(engine->gates);
    free(engine);
}

kvs_engine *kvs_engine_new(const kvs_engine_config *config, kvs_gates *gates, int *error) {
    *error = -ENOMEM;
    kvs_engine *engine = calloc(1, sizeof *engine);
    if (!engine) return NULL;
    engine->config = *config;
    engine->free_head = KVS_NONE;
    engine->awake_at = KVS_NEVER;
    engine->transfers.item_bytes = sizeof(kvs_transfer);
    engine->flights.item_bytes = sizeof(kvs_flight);
    engine->gates = gates;
    if (gates) kvs_gates_retain(gates);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&engine->lock, NULL);
    pthread_cond_init(&engine->idle, &monotonic);
    pthread_cond_init(&engine->work, &monotonic);
    pthread_cond_init(&engine->clock, &monotonic);
    pthread_condattr_destroy(&monotonic);
    engine->sched = kvs_sched_new(&config->sched);
    engine->holds = malloc(config->sched.depth * sizeof *engine->holds);
    if (!engine->sched || !engine->holds ||
        kvs_table_reserve(&engine->flights, config->sched.depth) != 0) {
        free_all(engine);
        return NULL;
    }
    *error = 0;
    if (config->kind == KVS_KIND_RING) *error = kvs_reactor_start(engine);
    if (config->kind == KVS_KIND_WORKERS) *error = kvs_workers_start(engine);
    if (*error) {
        free_all(engine);
        return NULL;
    }
    return engine;
}

void kvs_engine_stop(kvs_engine *engine) {
    kvs_out out = {.kick = true};
    kvs_engine_lock(engine);
    engine->stopping = true;
    uint32_t capacity = kvs_table_capacity(&engine->transfers);
    for (uint32_t i = 0; i < capacity; i++) {
        kvs_transfer *transfer = transfer_at(engine, i);
        if (transfer->phase != KVS_FREE && end_early(engine, transfer, -ECANCELED, &out))
            engine->counts.cancelled++;
    }
    out.kick = true;
    kvs_engine_unlock(engine, &out);
    if (engine->config.kind == KVS_KIND_INLINE) kvs_workers_run_inline(engine);
    /* INV-204: tickets whose transfers were never submitted have nobody else to publish them */
    if (engine->gates) kvs_gates_publish_all(engine->gates, -ECANCELED);
}

int kvs_engine_join(kvs_engine *engine, uint64_t timeout_ns) {
    struct timespec until = kvs_timespec(kvs_now_ns() + timeout_ns);
    kvs_out out = {.kick = true};
    kvs_engine_lock(engine);
    assert(engine->stopping && !engine->joined);
    int waited = 0;
    while (engine->open_transfers && waited == 0)
        waited = pthread_cond_timedwait(&engine->idle, &engine->lock, &until);
    bool over = engine->open_transfers == 0;
    engine->quit = over;
    if (over) {
        engine->joined = true;
        pthread_cond_broadcast(&engine->work);
        pthread_cond_broadcast(&engine->clock);
    }
    kvs_engine_unlock(engine, &out);
    if (!over) return -ETIMEDOUT; /* INV-139 */
    if (engine->reactor) kvs_reactor_join(engine);
    if (engine->workers) kvs_workers_join(engine);
    return 0;
}

void kvs_engine_free(kvs_engine *engine) {
    assert(engine->joined && engine->open_transfers == 0);
    free_all(engine);
}

/* ---- faults and counts ---- */

int kvs_engine_inject(kvs_engine *engine, const kvs_fault *fault) {
    int result = -ENOSPC;
    assert(fault->action >= KVS_FAULT_ERRNO && fault->action <= KVS_FAULT_MISDIRECT);
    assert(fault->argument >= 0 || fault->action == KVS_FAULT_MISDIRECT);
    pthread_mutex_lock(&engine->lock);
    uint32_t at = 0;
    while (at < engine->rule_count && (engine->rules[at].used || engine->rules[at].flying)) at++;
    if (at < KVS_RULES_MAX) {
        if (at == engine->rule_count) engine->rule_count++;
        engine->rules[at] = (kvs_rule){.fault = *fault, .used = true};
        result = (int)at;
    }
    pthread_mutex_unlock(&engine->lock);
    return result;
}

uint64_t kvs_engine_release(kvs_engine *engine, uint32_t rule) {
    kvs_out out = {.kick = true};
    kvs_engine_lock(engine);
    assert(rule < engine->rule_count);
    engine->rules[rule].used = false;
    uint64_t affected = engine->rules[rule].affected;
    for (uint32_t i = 0; i < engine->hold_count; i++)
        if (engine->holds[i].rule == (int32_t)rule) engine->holds[i].due_ns = 0;
    kvs_engine_unlock(engine, &out);
    if (engine->config.kind == KVS_KIND_INLINE) kvs_workers_run_inline(engine);
    return affected;
}

void kvs_engine_count(kvs_engine *engine, kvs_engine_counts *counts) {
    pthread_mutex_lock(&engine->lock);
    *counts = engine->counts;
    counts->open_transfers = engine->open_transfers;
    counts->background_bytes = kvs_sched_background_bytes(engine->sched);
    counts->direct_files = counts->buffered_files = 0;
    for (uint32_t i = 0; i < KVS_FILES_MAX; i++) {
        if (!engine->files[i].used) continue;
        bool direct = engine->files[i].direct_fd >= 0 && !engine->files[i].direct_ended;
        counts->direct_files += direct;
        counts->buffered_files += !direct;
    }
    for (uint32_t i = 0; i < KVS_CLASSES; i++) {
        kvs_class_counts class_counts;
        kvs_sched_count(engine->sched, i, &class_counts);
        counts->inflight_pieces += class_counts.inflight_pieces;
    }
    pthread_mutex_unlock(&engine->lock);
}

void kvs_engine_class(kvs_engine *engine, uint32_t io_class, kvs_class_counts *counts,
                      kvs_histogram *wait, kvs_histogram *service, uint64_t *errors) {
    assert(io_class < KVS_CLASSES);
    pthread_mutex_lock(&engine->lock);
    kvs_sched_count(engine->sched, io_class, counts);
    kvs_sched_histogram(engine->sched, io_class, KVS_WAIT, wait);
    kvs_sched_histogram(engine->sched, io_class, KVS_SERVICE, service);
    memcpy(errors, engine->errors[io_class], sizeof engine->errors[io_class]);
    pthread_mutex_unlock(&engine->lock);
}
