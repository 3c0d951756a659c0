"""A simulated executor and sessions over the pure tables, with every byte tracked as a symbol.

Each place (level, group, slot) and each bounce page holds a symbol. A started move turns its
target into garbage at once and reads its source as late as it may, so a slot that is handed over
too early, a stale slot or a mixed-up one shows as a wrong symbol. Sessions verify all their pages
whenever they use them. The choices come from a function, so that a seeded generator and hypothesis
can both drive the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.config import Tier
from kvstore.core.invariants import check_state
from kvstore.core.page import Move, MoveKind, MoveState, Page, PageState
from kvstore.core.planner import Plan, Refusal
from kvstore.core.slots import Fence, Slot, SlotState
from kvstore.core.spec import GroupSpec, LevelSpec, TablesSpec
from kvstore.core.tables import PASSED, Tables
from kvstore.errors import StalePlan
from kvstore.keys import BlockKey

GARBAGE = "garbage"
Draw = Callable[[int], int]  # returns a number in 0..n-1
Place = tuple[int, int, int]


def place_of(slot: Slot) -> Place:
    return (slot.level, slot.group, slot.slot_id)


class Session:
    """One request: a path of block names below a salt, and its pages per group."""

    def __init__(self, salt: int, path: list[int]) -> None:
        self.salt = salt
        self.path = path
        self.rows: list[list[Page | None]] = []
        self.committed = 0
        self.is_active = False
        self.waiting: dict[Page, None] = {}  # in order: a seed has to replay
        self.fences: list[Fence] = []
        self.last_write: dict[Page, str] = {}

    def pages(self) -> list[Page]:
        return [page for row in self.rows for page in row if page is not None]


class TableModel:
    """See the module. Every method is one step; `check` runs every rule."""

    BLOCK_TOKENS = 4
    DEPTH = 6

    def __init__(
        self, draw: Draw, *, with_faults: bool = True, with_recovery: bool = False
    ) -> None:
        self.draw = draw
        self.with_faults = with_faults
        self.spec = self._draw_spec()
        self.tables = Tables(self.spec)
        self.memory: dict[Place, str] = {}
        self.bounce: dict[Move, str] = {}
        self.running: dict[Move, str | None] = {}  # started; what was read, None before
        self.cancelled: set[Move] = set()
        self.content: dict[Page, str] = {}
        self.sessions: list[Session] = []
        self.kernels: dict[Fence, list[tuple[Page, Place, str]]] = {}
        self.step_uses: list[Fence] = []
        self.serial = 0
        self.served_pages = 0
        self.refusals = 0
        self.prefetch_refusals = 0
        self.last_counters: dict[str, int] = {}
        self.log: list[str] = []
        self.recovered_pages = 0
        #: What a scan of the disk finds, not taken in yet: group, slot, salt, path, generation.
        self.found: list[tuple[int, int, int, list[int], int]] = []
        self.is_recovering = with_recovery and self.spec.levels[-1].tier is Tier.DISK
        self.wheel = self.WHEEL
        if self.is_recovering:
            self._draw_found()
            self.wheel = (*self.WHEEL, *["recover"] * 12)

    # -- set-up -------------------------------------------------------------------------------

    def _draw_spec(self) -> TablesSpec:
        draw = self.draw
        policy = ("lru", "lru", "s3fifo")[draw(3)]
        groups = [GroupSpec(name="full", eviction_policy=policy)]
        if draw(3) == 0:
            window, sinks = 4 + draw(9), draw(6)
            groups.append(GroupSpec(name="window", window=window, sinks=sinks))
        fractions = ("0.0", "0.25", "1.0")
        shape = draw(5)
        tiers = [
            (Tier.DEVICE, Tier.HOST, Tier.DISK),
            (Tier.DEVICE, Tier.HOST, Tier.DISK),
            (Tier.DEVICE, Tier.HOST),
            (Tier.DEVICE, Tier.DISK),
            (Tier.DEVICE,),
        ][shape]
        levels = [
            LevelSpec(
                tier=tier,
                slot_counts=tuple(3 + draw((6, 12)[draw(2)]) for _ in groups),
                keep_copy=tier is not Tier.DEVICE and draw(2) == 0,
                share_fraction=fractions[draw(3)],
            )
            for tier in tiers
        ]
        return TablesSpec(
            groups=tuple(groups),
            levels=tuple(levels),
            block_tokens=self.BLOCK_TOKENS,
            write_through=draw(2) == 0,
            selective_uses=2 if draw(4) == 0 else None,
            bounce_pages=1 + draw(2),
            background_bytes_max=1 + draw(6),
        )

    def _draw_found(self) -> None:
        """Put pages of an earlier life on the disk, in any order, some twice, some orphaned."""
        draw, disk = self.draw, len(self.spec.levels) - 1
        for group, pool in enumerate(self.tables.pools[disk]):
            for slot_id in range(pool.total):
                if draw(3) == 0:
                    continue
                salt, path = draw(2), [draw(2) for _ in range(1 + draw(self.DEPTH - 2))]
                self.memory[disk, group, slot_id] = f"key{salt}{path}g{group}"
                self.found.append((group, slot_id, salt, path, 1 + draw(5)))
        for index in range(len(self.found) - 1, 0, -1):
            other = draw(index + 1)
            found = self.found
            found[index], found[other] = found[other], found[index]

    def recover(self) -> None:
        """Take in the next page of an earlier life, as a scan beside the serving store would."""
        if not self.is_recovering:
            return
        if not self.found:
            before = self.tables.page_count
            dropped = self.tables.recovery_done()
            assert before - self.tables.page_count == dropped
            self.is_recovering = False
            self.pump()
            return
        group, slot_id, salt, path, generation = self.found.pop()
        pool = self.tables.pools[-1][group]
        if slot_id < len(pool.generations) and pool.generations[slot_id]:
            return  # written in this life: what the scan read is void
        key, parent = self.key(salt, path), self.key(salt, path[:-1])
        is_known = self.tables.index.get(group, key) is not None
        is_free = slot_id < pool.total and pool.handles[slot_id] is None
        page = self.tables.recover(group, slot_id, key, parent, len(path) - 1, generation)
        assert (page is not None) == (is_free and not is_known), "INV-921"
        if page is None:
            return
        assert page.primary is not None
        assert page.primary.generation >= generation, "INV-304: an old handle would pass"
        assert not page.hold_count, "INV-921: recovered pages start droppable"
        self.content[page] = f"key{salt}{path}g{group}"
        self.recovered_pages += 1

    def key(self, salt: int, path: list[int]) -> BlockKey:
        return BlockKey(bytes([salt, *(name + 1 for name in path)]).ljust(32, b"\0"))

    def keys(self, session: Session) -> list[BlockKey]:
        path = session.path
        return [self.key(session.salt, path[: end + 1]) for end in range(len(path))]

    # -- executor -----------------------------------------------------------------------------

    def pump(self) -> None:
        """Take the outbox and note what it says."""
        while outbox := self.tables.take_outbox():
            for move in outbox.start:
                if move.state is MoveState.STARTED and move in self.bounce:
                    self.running[move] = self.bounce[move]
                else:
                    self.running[move] = None
            for move in outbox.cancel:
                if move.state is MoveState.ENDED:  # between its stages: the bounce slot is free
                    del self.bounce[move]
                    continue
                assert move in self.running
                self.cancelled.add(move)
            for move in outbox.resolved:
                self._settle(move.page)
            for page in outbox.lost:
                assert page.state is PageState.DEAD
                assert page.hold_count > 0

    def _device_ready(self, move: Move) -> bool:
        """Tell whether the stream of a device copy has passed what it waits for."""
        return all(fence.passed for fence in move.waits)

    def run_move(self) -> None:
        """Bring one running move a step further: read, release, write, end, fail."""
        ready = [move for move in self.running if self._device_ready(move)]
        if not ready:
            return
        move = ready[self.draw(len(ready))]
        if move.is_device_copy and not move.target_fence.passed and self.draw(3) == 0:
            self._enqueue(move)
            return
        fails = self.with_faults and self.draw(12) == 0
        if move.state is MoveState.BOUNCING:
            if fails:
                self._end(move, "fail")
                return
            self.bounce[move] = self._read(move)
            del self.running[move]
            if move.is_detached:
                self.bounce.pop(move, None)
                self.cancelled.discard(move)
            self.tables.move_source_released(move)
            self.pump()
            return
        self.memory[place_of(move.target)] = GARBAGE
        if self.running[move] is None:
            if fails:
                self._end(move, "fail")
                return
            read = self._read(move)
            staged = Tier.DISK in (self._tier(move.source), self._tier(move.target))
            if staged and not move.is_source_released and self.draw(2):
                self.running[move] = read
                if self._tier(move.source) is Tier.DISK:
                    self.tables.move_source_released(move)
                    self.pump()
                    return
            self.running[move] = read
        if fails:
            self._end(move, "fail")
            return
        self._end(move, "done")

    def _read(self, move: Move) -> str:
        return self.memory.get(place_of(move.source), GARBAGE)

    def _tier(self, slot: Slot) -> Tier:
        return self.spec.levels[slot.level].tier

    def _enqueue(self, move: Move) -> None:
        """Report the device event of a copy before the copy has run."""
        tables = self.tables
        if self._tier(move.source) is Tier.DEVICE:
            tables.fence_enqueued(move.source_fence, "event")
        pair = {self._tier(move.source), self._tier(move.target)}
        is_staged = pair == {Tier.DEVICE, Tier.DISK}
        if not is_staged:
            tables.fence_enqueued(move.source_fence, "event")
            tables.fence_enqueued(move.target_fence, "event")
        self.pump()

    def _end(self, move: Move, how: str) -> None:
        read = self.running.pop(move)
        self.bounce.pop(move, None)
        if move in self.cancelled:
            self.cancelled.discard(move)
            how = ("done", "fail", "cancel")[self.draw(3)]
        elif how == "fail" and self.draw(4) == 0:
            how = "cancel"
        page = move.page
        if how == "fail" and not move.is_detached and self.draw(4) == 0:
            # The verdict is bad, yet a piece is still in flight; its end comes some time later.
            self.running[move] = read
            self.cancelled.add(move)
            self.tables.move_stalled(move)
            self.pump()
            self._settle(page)
            return
        if move.state is MoveState.STARTED:
            self.memory[place_of(move.target)] = GARBAGE
        if how == "done" and move.state is MoveState.STARTED:
            if read is None:
                read = self._read(move)
            if not move.is_detached:
                assert page not in self.content or read == self.content[page], (
                    f"INV-418: {move} read {read}"
                )
            self.memory[place_of(move.target)] = read
            self.tables.move_done(move)
        elif how == "cancel" or (how == "done" and move.state is MoveState.BOUNCING):
            self.tables.move_cancelled(move)
        else:
            self.tables.move_failed(move, -5)
        self.pump()
        self._settle(page)

    def _settle(self, page: Page) -> None:
        """Lock a page that has arrived for the sessions that wait for it, or end their wait."""
        for session in list(self.sessions):
            if page not in session.waiting:
                continue
            if page.is_ready and page.level == 0:
                del session.waiting[page]
                self.tables.lock([page])
                if not session.waiting:
                    self._activated(session)
            elif page.state is PageState.DEAD or not page.is_restoring:
                self._give_up(session)

    def _give_up(self, session: Session) -> None:
        """End a resume that failed: back to suspended, nothing leaked (INV-916)."""
        waiting, session.waiting = session.waiting, {}
        locked = [page for page in session.pages() if page not in waiting]
        self.tables.unlock([page for page in locked if page.lock_count], PASSED)
        others = {page for other in self.sessions for page in other.waiting}
        nobody = [
            page
            for page in waiting
            if page not in others and page.state is not PageState.DEAD and page.is_restoring
        ]
        self.tables.abandon(nobody)
        self.pump()

    def _activated(self, session: Session) -> None:
        session.is_active = True
        self._follow_stream(session)
        self.verify(session)

    def _follow_stream(self, session: Session) -> None:
        """The session's new work is queued behind its last write, which thus has landed."""
        mine = set(session.pages())
        for uses in self.kernels.values():
            for page, place, symbol in uses:
                is_here = page.primary is not None and place_of(page.primary) == place
                is_late = page in mine and is_here and self.memory.get(place) == GARBAGE
                if is_late and self.content.get(page) == symbol:
                    self.memory[place] = symbol

    # -- kernels ------------------------------------------------------------------------------

    def verify(self, session: Session) -> None:
        """Check every page of an active session, as a kernel would read it."""
        for page in session.pages():
            slot = page.primary
            assert slot is not None and slot.level == 0 and page.lock_count, page
            if page in self.content:
                found = self.memory.get(place_of(slot))
                assert found == self.content[page], f"wrong bytes in {page}: {found}"
                self.served_pages += 1

    def _may_write(self, session: Session) -> bool:
        session.fences = [fence for fence in session.fences if not fence.passed]
        return not session.fences

    def decode(self) -> None:
        """Let a session write into the pages it fills."""
        session = self._pick(lambda one: one.is_active)
        if session is None or not self._may_write(session):
            return
        for page in session.pages():
            if page.state is PageState.FILLING:
                self.serial += 1
                token = f"fill{self.serial}"
                assert page.primary is not None
                self.memory[place_of(page.primary)] = token
                self.content[page] = token
        self.verify(session)

    def _kernel_fence(self, session: Session) -> Fence:
        """End a session's device work: now, at the next step, or with a fence of its own."""
        kind = self.draw(3)
        if kind == 0:
            return PASSED
        fence = self.tables.step_fence if kind == 1 else self.tables.new_fence()
        uses = self.kernels.setdefault(fence, [])
        for page in session.pages():
            if page.primary is not None and page in self.content:
                place = place_of(page.primary)
                uses.append((page, place, self.content[page]))
                is_mine = page.state is PageState.FILLING and page.lock_count == 1
                if is_mine:
                    self.memory[place] = GARBAGE  # its last write is still in the queue
        if kind == 2:
            self.step_uses.append(fence)
        return fence

    def pass_kernel(self) -> None:
        """Let device work of a step or a session end; it must still find its bytes."""
        if self.draw(2) or not self.step_uses:
            fence = self.tables.rotate_step_fence()
        else:
            fence = self.step_uses[self.draw(len(self.step_uses))]
        if self.draw(2) and fence in self.kernels:
            self.tables.fence_enqueued(fence, "event")
            self.pump()
            if fence not in self.step_uses:
                self.step_uses.append(fence)
            return
        self._finish_kernel(fence)

    def _finish_kernel(self, fence: Fence) -> None:
        for page, place, symbol in self.kernels.pop(fence, ()):
            if self.memory.get(place) == GARBAGE and page.state is PageState.FILLING:
                if self.content.get(page) == symbol:
                    self.memory[place] = symbol
            elif page.state is not PageState.FILLING and not symbol.startswith("fill"):
                found = self.memory.get(place)
                assert found == symbol, f"INV-224: {place} reused before its step ended"
        if fence in self.step_uses:
            self.step_uses.remove(fence)
        self.tables.fence_passed(fence)
        self.pump()

    # -- sessions -----------------------------------------------------------------------------

    def _pick(self, wanted: Callable[[Session], bool]) -> Session | None:
        fitting = [session for session in self.sessions if wanted(session)]
        return fitting[self.draw(len(fitting))] if fitting else None

    def open(self) -> None:
        """Match a random path and hold what it finds."""
        if len(self.sessions) >= 5:
            return
        length = 1 + self.draw(self.DEPTH)
        path = [self.draw(2) for _ in range(length)]
        session = Session(self.draw(2), path)
        match = self.tables.match(self.keys(session))
        again = self.tables.match(self.keys(session))
        assert match == again, "INV-321: a match changes nothing"
        session.rows = [list(row) for row in match.pages]
        session.committed = match.block_count
        for group, row in enumerate(session.rows):
            for block, page in enumerate(row):
                needed = self.spec.groups[group].needs_block(
                    block, match.block_count, self.BLOCK_TOKENS
                )
                assert (page is not None) == needed, "INV-337"
                if page is not None:
                    expected = f"key{session.salt}{session.path[: block + 1]}g{group}"
                    assert self.content[page] == expected, "INV-317: matched a wrong page"
            self.tables.hold(row)
        self.sessions.append(session)

    def resume(self) -> None:
        """Bring a suspended session to the device, with room for one or two more blocks."""
        session = self._pick(lambda one: not one.is_active and not one.waiting)
        if session is None:
            return
        self._truncate(session)
        grow = min(self.draw(3), len(session.path) + 1 - len(session.rows[0]))
        counts = [max(0, grow)] * len(self.spec.groups)
        plan = self.plan(lambda: self.tables.plan_restore(session.rows, counts))
        if isinstance(plan, Refusal):
            self._check_refusal(session.rows, counts, plan)
            return
        applied = self.tables.apply(plan)
        session.fences = [*session.fences, *applied.fences]
        for row, new in zip(session.rows, applied.new_pages, strict=True):
            row.extend(new)
        fresh = {page for new in applied.new_pages for page in new}
        wanted = [page for page in session.pages() if page not in fresh]
        resident = [page for page in wanted if page.level == 0 and page.is_ready]
        self.tables.lock(resident)
        session.waiting = dict.fromkeys(page for page in wanted if page not in resident)
        for page in session.waiting:
            assert page.is_restoring, page
        if not session.waiting:
            self._activated(session)
        self.pump()

    def plan(self, make: Callable[[], Any]) -> Any:
        """Plan, and now and then check that planning is pure and stale plans are refused."""
        if self.draw(16):
            return make()
        before = fingerprint(self.tables)
        plan = make()
        assert fingerprint(self.tables) == before, "INV-401, INV-403: planning changed a table"
        again = make()
        assert describe(again) == describe(plan), "INV-401: the same tables, another plan"
        if isinstance(plan, Plan):
            stale = make()
            self.tables.version += 1
            try:
                self.tables.apply(stale)
            except StalePlan:
                pass
            else:
                raise AssertionError("INV-402: a stale plan was applied")
            self.tables.version -= 1
            assert fingerprint(self.tables) == before, "INV-402: a stale plan left a trace"
        return plan

    def _check_refusal(
        self, rows: list[list[Page | None]], counts: list[int], refusal: Refusal
    ) -> None:
        """Compare a refusal with plain counting (INV-408)."""
        if self._is_stalled():
            return
        self.refusals += 1
        group = refusal.group
        wanted = {page for page in rows[group] if page is not None}
        locked, held = set(wanted), set()
        for level in self.tables.pools:
            for slot in level[group].handles:
                page = slot.page if slot is not None else None
                if page is None or page.primary is not slot:
                    continue
                if page.lock_count or page.is_restoring:
                    locked.add(page)
                elif page.hold_count and page not in wanted:
                    held.add(page)
        grow = counts[group]
        device = self.tables.pools[0][group].total
        everything = sum(level[group].total for level in self.tables.pools)
        too_many = len(locked) + grow > device
        too_many |= len(locked) + grow + len(held) > everything
        assert too_many, f"INV-408: refused although counting says it fits: {refusal}"

    def _is_stalled(self) -> bool:
        """Tell whether a transfer may never end: its slots are out of every count (INV-119)."""
        stalled = any(pool.stalled for level in self.tables.pools for pool in level)
        return stalled or bool(self.tables.stalled_moves)

    def _truncate(self, session: Session) -> None:
        """Cut a session back to its last servable block after a loss (INV-335)."""
        servable = min(
            next(
                (
                    block
                    for block, page in enumerate(row)
                    if page is not None and page.state is PageState.DEAD
                ),
                len(row),
            )
            for row in session.rows
        )
        for row in session.rows:
            self.tables.unhold([page for page in row[servable:] if page is not None])
            del row[servable:]
        session.committed = min(session.committed, servable)
        self.pump()

    def grow(self) -> None:
        """Add a block to an active session, synchronously (INV-417)."""
        session = self._pick(lambda one: one.is_active)
        if session is None or len(session.rows[0]) > len(session.path):
            return
        counts = [1] * len(self.spec.groups)
        before = [len(row) for row in session.rows]
        plan = self.plan(lambda: self.tables.plan_grow(counts))
        if isinstance(plan, Refusal):
            assert before == [len(row) for row in session.rows]
            self._check_refusal([[] for _ in counts], counts, plan)
            return
        applied = self.tables.apply(plan)
        session.fences.extend(applied.fences)
        for row, new in zip(session.rows, applied.new_pages, strict=True):
            row.extend(new)
        self.pump()

    def commit(self) -> None:
        """Commit the first filled block of an active session."""
        session = self._pick(
            lambda one: (
                one.is_active
                and one.committed < min(len(one.rows[0]), len(one.path))
                and all(
                    row[one.committed] is not None and row[one.committed] in self.content
                    for row in one.rows
                )
            )
        )
        if session is None or not self._may_write(session):
            return
        block = session.committed
        key = self.key(session.salt, session.path[: block + 1])
        parent_key = self.key(session.salt, session.path[:block])
        for group, row in enumerate(session.rows):
            page = row[block]
            assert page is not None
            parent = row[block - 1] if block else None
            symbol = f"key{session.salt}{session.path[: block + 1]}g{group}"
            assert page.primary is not None
            self.memory[place_of(page.primary)] = symbol
            used = self.tables.commit(page, key, parent, block, self.draw(3), parent_key=parent_key)
            if used is not page:
                self.content.pop(page, None)
            known = self.content.get(used)
            assert used is page or known == symbol, f"INV-322: merged with {known}"
            self.content[used] = symbol
            row[block] = used
        session.committed = block + 1
        self._leave_window(session)
        self.pump()
        self.verify(session)

    def _leave_window(self, session: Session) -> None:
        """Release what left the window (INV-337)."""
        for spec, row in zip(self.spec.groups, session.rows, strict=True):
            if spec.window is None:
                continue
            for block in range(session.committed):
                page = row[block]
                if page is None:
                    continue
                if not spec.needs_block(block, session.committed, self.BLOCK_TOKENS):
                    row[block] = None
                    self.tables.unlock([page])
                    self.tables.unhold([page])

    def suspend(self) -> None:
        """Turn the locks of an active session into holds."""
        session = self._pick(lambda one: one.is_active)
        if session is None:
            return
        self.verify(session)
        fence = self._kernel_fence(session)
        for row in session.rows:
            self.tables.unlock(row, fence)
        session.is_active = False
        self.pump()

    def cancel(self) -> None:
        """Cancel a resume that waits (INV-327, INV-916)."""
        session = self._pick(lambda one: bool(one.waiting))
        if session is not None:
            self._give_up(session)

    def close(self) -> None:
        """End a session in whatever state it is."""
        session = self._pick(lambda one: True)
        if session is None:
            return
        if session.waiting:
            self._give_up(session)
        if session.is_active:
            fence = self._kernel_fence(session)
            for row in session.rows:
                self.tables.unlock(row, fence)
        for row in session.rows:
            self.tables.unhold(row)
        self.sessions.remove(session)
        self.pump()
        self._forget()

    def fork(self) -> None:
        """Share the committed blocks of a session with a new one."""
        session = self._pick(lambda one: not one.waiting and len(one.rows[0]) > 0)
        if session is None or len(self.sessions) >= 4:
            return
        if any(page.state is PageState.DEAD for page in session.pages()):
            return
        twin = Session(session.salt, list(session.path))
        twin.rows = [row[: session.committed] for row in session.rows]
        twin.committed = session.committed
        for row in twin.rows:
            self.tables.hold(row)
        self.sessions.append(twin)

    def prefetch(self) -> None:
        """Bring a suspended session's pages up to the host tier."""
        session = self._pick(lambda one: not one.is_active and not one.waiting)
        if session is None or len(self.spec.levels) < 3:
            return
        self._truncate(session)
        plan = self.plan(lambda: self.tables.plan_prefetch(session.rows))
        if isinstance(plan, Refusal):
            self._check_prefetch_refusal(session.rows, plan)
            return
        self.tables.apply(plan)
        self.pump()
        for page in session.pages():
            assert page.level <= 1, "INV-333: a prefetched page is on the host or above"

    def _check_prefetch_refusal(self, rows: list[list[Page | None]], refusal: Refusal) -> None:
        """Compare a refused prefetch with plain counting (INV-333, INV-408).

        What is on the device stays there; the wanted pages below need host slots, and with the
        other held ones not more than host and disk have.
        """
        if self._is_stalled():
            return
        self.refusals += 1
        self.prefetch_refusals += 1
        host, disk = (self.tables.pools[level][refusal.group] for level in (1, 2))
        wanted = {page for page in rows[refusal.group] if page is not None and page.level > 0}
        held = {
            slot.page
            for pool in (host, disk)
            for slot in pool.handles
            if slot is not None
            and slot.page is not None
            and slot.page.primary is slot
            and slot.page.hold_count
        }
        too_many = len(wanted) > host.total or len(wanted | held) > host.total + disk.total
        assert too_many, f"INV-408: prefetch refused although counting says it fits: {refusal}"

    def resize(self) -> None:
        """Shrink or grow a colder level while everything goes on (INV-901)."""
        if len(self.spec.levels) < 2:
            return
        level = 1 + self.draw(len(self.spec.levels) - 1)
        counts = [2 + self.draw(12) for _ in self.spec.groups]
        pools = self.tables.pools[level]
        copies = [pool.copies.count for pool in pools]
        totals = [pool.total for pool in pools]
        plan = self.plan(lambda: self.tables.plan_resize(level, counts))
        if isinstance(plan, Refusal):
            self._check_resize_refusal(level, counts, plan)
            return
        self.tables.apply(plan)
        for pool, count, total, before in zip(pools, counts, totals, copies, strict=True):
            assert pool.total == count
            if count >= total and level == len(self.spec.levels) - 1 and count > total:
                assert pool.copies.count <= before + pool.primaries
        self.pump()

    def trim(self) -> None:
        """Evict ahead of use, so that demotions can be recalled (INV-330)."""
        level = self.draw(len(self.spec.levels))
        plan = self.plan(lambda: self.tables.plan_trim(level, [2] * len(self.spec.groups)))
        if isinstance(plan, Plan):
            self.tables.apply(plan)
            self.pump()

    def _check_resize_refusal(self, level: int, counts: list[int], refusal: Refusal) -> None:
        """A shrink is refused only if the held pages do not fit here and below (INV-902)."""
        if self._is_stalled():
            return
        group = refusal.group
        held = [0] * len(self.spec.levels)
        for index, pools in enumerate(self.tables.pools):
            for slot in pools[group].handles:
                page = slot.page if slot is not None else None
                if page is not None and page.primary is slot and page.hold_count:
                    held[index] += 1
        room = [pools[group].total for pools in self.tables.pools]
        room[level] = counts[group]
        assert sum(held[level:]) > sum(room[level:]), "INV-902: the held pages would fit"

    # -- the whole ----------------------------------------------------------------------------

    STEPS = (
        ("open", 6),
        ("resume", 8),
        ("grow", 4),
        ("decode", 6),
        ("commit", 8),
        ("suspend", 5),
        ("close", 4),
        ("cancel", 2),
        ("fork", 2),
        ("prefetch", 5),
        ("resize", 3),
        ("trim", 5),
        ("pass_kernel", 6),
        ("run_move", 22),
    )
    WHEEL = tuple(name for name, weight in STEPS for _ in range(weight))

    def step(self) -> str:
        name = self.wheel[self.draw(len(self.wheel))]
        getattr(self, name)()
        return name

    def check(self) -> None:
        """Run every rule of the tables, and the contents of all valid slots."""
        check_state(self.tables)
        writing = {place for uses in self.kernels.values() for _page, place, _symbol in uses}
        for level in self.tables.pools:
            for pool in level:
                for slot in pool.handles:
                    if slot is None or slot.state is not SlotState.VALID:
                        continue
                    page = slot.page
                    assert page is not None
                    if page not in self.content or page.state is PageState.FILLING:
                        continue
                    place = place_of(slot)
                    if place in writing and self.memory.get(place) == GARBAGE:
                        continue
                    found = self.memory.get(place)
                    assert found == self.content[page], f"INV-302: {slot} of {page}: {found}"
        self._check_monotonic()

    def _check_monotonic(self) -> None:
        gauges = {"total", "ready", "draining", "primaries", "copies", "evictable", "available"}
        now: dict[str, int] = {}
        for (level, group), stats in self.tables.snapshot().items():
            assert stats.total == stats.ready + stats.draining + stats.primaries + stats.copies
            stalled = len(self.tables.pools[level][group].stalled)
            free = stats.ready + stats.draining - stalled
            assert stats.available == free + stats.evictable + stats.copies, "INV-803"
            for name in stats.__slots__:
                if name not in gauges and name != "retained_copies":
                    now[f"{level}/{group}/{name}"] = getattr(stats, name)
        for name, value in now.items():
            assert value >= self.last_counters.get(name, 0), f"INV-801: {name} fell"
        self.last_counters = now

    def _forget(self) -> None:
        if len(self.content) > 500:
            alive = {page for page in self.content if page.state is not PageState.DEAD}
            self.content = {page: self.content[page] for page in alive}

    def drain(self) -> None:
        """Let everything that runs end well; nothing may be left waiting (no deadlock)."""
        with_faults, self.with_faults = self.with_faults, False
        for fence in list(self.kernels):
            if fence is self.tables.step_fence:
                self.tables.rotate_step_fence()
            self._finish_kernel(fence)
        self._finish_kernel(self.tables.rotate_step_fence())
        for _ in range(100_000):
            if not self.running:
                break
            self.run_move()
        self.with_faults = with_faults
        assert not self.running, "moves cannot run"
        stuck = list(self.tables.moves)
        assert not stuck, f"INV-407: moves wait for each other: {stuck}"
        for pools in self.tables.pools:
            for pool in pools:
                assert not pool.draining, "INV-306: nothing runs, yet slots drain"
                assert not pool.retiring, "INV-904: nothing runs, yet slots retire"
        assert self.tables.background_bytes == 0, "INV-112: an idle engine shows zero"

    def finish(self) -> None:
        """Close all sessions; then every page is droppable and every slot accounted for."""
        while self.sessions:
            self.close()
        self.drain()
        while self.is_recovering:
            self.recover()
        self.check()
        for level in self.tables.pools:
            for pool in level:
                held = pool.policy.held_count
                assert held == 0, "INV-311: a hold outlived its session"
        if self.draw(2):
            self.tables.clear()
        else:
            while not self.tables.close_some(1 + self.draw(4)):
                self.check()
        self.check()
        assert self.tables.page_count == 0
        assert all(
            pool.ready_count == pool.total for level in self.tables.pools for pool in level
        ), "a slot leaked"


def describe(plan: Any) -> Any:
    """Return a comparable picture of a plan or refusal."""
    if isinstance(plan, Refusal):
        return plan
    return [
        (
            group.group,
            group.recalls,
            group.drops,
            group.reclaims,
            group.take_backs,
            group.evicts,
            group.evict_levels,
            group.relocates,
            group.restores,
            group.grow,
            group.writes,
            sorted(group.skipped.items()),
        )
        for group in plan.groups
    ]


def fingerprint(tables: Tables) -> Any:
    """Return a picture of all tables except the refusal counters."""
    pools = []
    for level in tables.pools:
        for pool in level:
            slots = [
                None
                if slot is None
                else (
                    slot.generation,
                    slot.state,
                    id(slot.page),
                    id(slot.colder),
                    id(slot.lane),
                    id(slot.prev),
                    id(slot.next),
                    slot.stamp,
                    slot.page is not None
                    and (slot.page.hold_count, slot.page.lock_count, slot.page.state),
                )
                for slot in pool.handles
            ]
            pools.append(
                (
                    tuple(slots),
                    tuple(pool.ready),
                    pool.ready_count,
                    tuple(map(id, pool.draining)),
                    pool.total,
                    pool.policy.held_count,
                    pool.policy.droppable_count,
                    pool.reclaimed,
                    pool.reused,
                    pool.kept,
                    pool.dropped,
                    pool.evicted,
                )
            )
    return (
        tuple(pools),
        tuple((id(move), move.state, move.blocked) for move in tables.moves),
        tables.version,
        tables.background_bytes,
        len(tables.index),
        bool(tables.outbox),
    )


__all__ = ["Fence", "MoveKind", "Session", "TableModel"]
