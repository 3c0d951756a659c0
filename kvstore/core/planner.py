"""The planner: a wish in, a list of steps or a typed refusal out; and the applying of plans.

Planning is pure: it reads the tables and changes nothing, so the same tables give the same plan
(INV-401) and a refusal leaves no trace (INV-403). Each pool group is planned by itself, level by
level from the hottest: what has to leave a level falls to the next one. Applying checks the whole
plan first and then changes ownership without raising (INV-402).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, final

from kvstore.config import IoClass, Tier
from kvstore.core.copies import CopyEnd
from kvstore.core.eviction.base import EvictionPolicy, Selection
from kvstore.core.page import Move, MoveKind, Page, PageState
from kvstore.core.slots import Fence, Pool, Slot, SlotState
from kvstore.errors import LogicError, StalePlan

if TYPE_CHECKING:
    from kvstore.core.transitions import Transitions


#: Members by plain names: apply looks at them for every page that moves.
_DEAD: Final = PageState.DEAD
_COMMITTED: Final = PageState.COMMITTED
_WRITING: Final = SlotState.WRITING
_DRAINING: Final = SlotState.DRAINING
_RELEASED: Final = SlotState.RELEASED
_EVICT: Final = MoveKind.EVICT
_RESTORE: Final = MoveKind.RESTORE
_RELOCATE: Final = MoveKind.RELOCATE
_REQUIRED: Final = IoClass.REQUIRED
_READ: Final = IoClass.READ
_BACKGROUND: Final = IoClass.BACKGROUND
_RECLAIMED: Final = CopyEnd.RECLAIMED


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a plan is not possible: what `OutOfPages` will say (INV-404).

    ``needed`` and ``available`` are slots of the pool group on the level. ``never``: not even an
    empty store could serve the wish, so waiting is useless (INV-335).
    """

    level: int
    group: int
    needed: int
    available: int
    never: bool


@final
@dataclass(slots=True)
class GroupPlan:
    """The steps for one pool group, in the order in which they are applied."""

    group: int
    recalls: list[tuple[Page, Slot]] = field(default_factory=list)
    drops: list[Page] = field(default_factory=list)
    reclaims: list[tuple[Slot, CopyEnd]] = field(default_factory=list)
    take_backs: list[tuple[Page, Slot]] = field(default_factory=list)
    evicts: list[Page] = field(default_factory=list)
    evict_levels: list[int] = field(default_factory=list)  # where each of `evicts` goes
    relocates: list[Page] = field(default_factory=list)
    restores: list[Page] = field(default_factory=list)
    restore_level: int = 0
    unkept: set[Page] = field(default_factory=set)  # restores whose source is needed at once
    withdrawn: set[Page] = field(default_factory=set)  # recalls whose write is not kept either
    grow: int = 0
    priority: int = 0  # of the pages made for growth
    arrivals: list[Page] = field(default_factory=list)  # of all levels, in eviction order
    writes: list[Page] = field(default_factory=list)
    write_class: IoClass = IoClass.BACKGROUND
    write_candidates: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    selections: list[tuple[EvictionPolicy, Selection]] = field(default_factory=list)
    takes: list[int] = field(default_factory=list)  # slots to allocate, per level


@final
@dataclass(slots=True)
class Plan:
    """An accepted plan for tables of exactly this version. The caller applies it or forgets it.

    ``joined`` are moves in flight that already bring wanted pages (INV-326).
    """

    version: int
    groups: list[GroupPlan]
    joined: list[Move]
    resize: tuple[int, tuple[int, ...]] | None = None

    @property
    def is_empty(self) -> bool:
        """Tell whether applying changes nothing: every wanted page is there or on its way."""
        return not self.groups and self.resize is None


@final
@dataclass(slots=True)
class Applied:
    """What an applied plan did.

    ``new_pages[group]``: pages for grown blocks, each with one hold and one lock of the caller.
    ``moves``: the moves made, started or not. ``joined``: see `Plan`. ``recalled``: wanted pages
    that are back on the device without a move (INV-330); the caller locks them like resident
    ones. ``fences``: uses of granted device slots that have not ended; the stream of the session
    waits for them (INV-338, INV-417).
    """

    new_pages: list[list[Page]]
    moves: list[Move]
    joined: list[Move]
    recalled: list[Page]
    fences: list[Fence]


def plan_restore(
    tables: Transitions,
    pages: Sequence[Sequence[Page | None]],
    grow: Sequence[int] | None,
    target_level: int = 0,
    priority: int = 0,
) -> Plan | Refusal:
    """Plan to bring pages to a level and to grow on the device, whole or not at all (INV-416).

    Cost: one look at each page, and O(pages moved) for the rest (INV-420).
    """
    joined: list[Move] = []
    groups: list[GroupPlan] = []
    for group, row in enumerate(pages):
        absent: list[Page] = []
        for page in row:
            if page is None:
                continue
            slot = page.primary
            if slot is None:
                raise LogicError("a lost page cannot be restored", pool_group=group)
            if slot.level > target_level:
                absent.append(page)
            elif slot.write is not None:
                joined.append(slot.write)
        count = grow[group] if grow is not None else 0
        if not absent and not count:
            continue
        planned = _Cascade(tables, group, row, absent, count, target_level).run()
        if isinstance(planned, Refusal):
            return planned
        planned.priority = priority
        groups.append(planned)
    _plan_write_through(tables, groups)
    return Plan(tables.version, groups, joined)


@final
class _Cascade:
    """The walk down the levels for one pool group."""

    def __init__(
        self,
        tables: Transitions,
        group: int,
        wanted: Sequence[Page | None],
        absent: Sequence[Page],
        grow: int,
        target_level: int,
        *,
        shrink: tuple[int, int] | None = None,
        trim: tuple[int, int] | None = None,
    ) -> None:
        self.tables = tables
        self.group = group
        self.wanted = wanted
        self.target_level = target_level
        self.grow = grow
        self.shrink = shrink
        self.trim = trim
        self.pools: list[Pool] = [level[group] for level in tables.pools]
        count = tables.level_count
        self.plan = GroupPlan(group, grow=grow, takes=[0] * count, restore_level=target_level)
        self.total = [pool.total for pool in self.pools]
        if shrink is not None:
            self.total[shrink[0]] = shrink[1]
        self.free = [pool.free_count for pool in self.pools]
        self.goal = [0] * count
        self.goal[0] = grow
        self.held = [pool.policy.held_count for pool in self.pools]
        self.kept: list[list[Page]] = [[] for _ in range(count)]
        self.written: list[list[Page]] = [[] for _ in range(count)]
        self.reserved: list[dict[Slot, Page]] = [{} for _ in range(count)]
        self._excluded: set[Slot] | None = None
        self.stalled = tables.stalled_slots() if tables.stalled_moves else set()
        for page in absent:
            self._want(page)

    def _want(self, page: Page) -> None:
        """Account for one page that has to come up."""
        tables, plan = self.tables, self.plan
        slot = page.primary
        assert slot is not None
        recalled = tables.recall_source(page) if slot.write is not None else None
        if page.hold_count:
            self.held[slot.level] -= 1
        if recalled is not None:
            # INV-330: the hotter slot still holds the data; it is draining and was counted free.
            plan.recalls.append((page, recalled))
            self.free[recalled.level] -= recalled.lane is recalled.pool.draining
            if tables.keeps_recalled(page, recalled):
                self.written[slot.level].append(page)
            elif slot not in self.stalled:
                self.free[slot.level] += 1
            if recalled.level <= self.target_level:
                if page.hold_count:
                    self.held[recalled.level] += 1
                return
            slot = recalled
        plan.restores.append(page)
        self.goal[self.target_level] += 1
        if tables.spec.levels[slot.level].keep_copy and page.state is _COMMITTED:
            if slot not in self.stalled:
                self.kept[slot.level].append(page)
        elif slot not in self.stalled:
            self.free[slot.level] += 1  # given back by a promoted page (INV-405)

    @property
    def excluded(self) -> set[Slot]:
        """The slots of the wanted pages: never victims of their own plan."""
        if self._excluded is None:
            self._excluded = {page.primary for page in self.wanted if page is not None}  # type: ignore[misc]
            self._excluded.update(slot for _page, slot in self.plan.recalls)
            self._excluded.update(self.stalled)
        return self._excluded

    def _room_below(self, level: int) -> int:
        """Return how many held pages the colder levels can take, all else put out (INV-408)."""
        return sum(
            self.total[below] - len(self.pools[below].stalled) - self.held[below] - self.goal[below]
            for below in range(level + 1, self.tables.level_count)
        )

    def run(self) -> GroupPlan | Refusal:
        """Walk from the hottest level down; what does not fit falls to the next one."""
        incoming: list[Page] = []
        for level in range(self.tables.level_count):
            is_named = self._is_shrinking(level) or self._is_trimmed(level)
            if not incoming and not self.goal[level] and not is_named:
                continue
            outcome = self._level(level, incoming)
            if isinstance(outcome, Refusal):
                return outcome
            incoming = outcome
        assert not incoming
        return self.plan

    def _is_shrinking(self, level: int) -> bool:
        return self.shrink is not None and self.shrink[0] == level

    def _is_trimmed(self, level: int) -> bool:
        return self.trim is not None and self.trim[0] == level

    def _level(self, level: int, incoming: list[Page]) -> list[Page] | Refusal:
        """Place what falls onto a level; return what falls further (INV-405, INV-410)."""
        plan, pool, tables = self.plan, self.pools[level], self.tables
        newcomers: list[Page] = []
        for page in incoming:
            primary = page.primary
            if primary is None or primary.colder is None:  # no copy anywhere
                newcomers.append(page)
                continue
            copy = page.slot_at(level)
            if copy is None:
                newcomers.append(page)
            else:
                self.reserved[level][copy] = page  # INV-411: before room is counted
        if tables.spec.selective_uses is not None and tables.tiers[level] is Tier.DISK:
            newcomers = self._admit(newcomers, tables.spec.selective_uses)
        need = self.goal[level] + len(newcomers)
        falling: list[Page] = []
        if self._is_shrinking(level):
            shortage = self._shrink_shortage(level)
        elif self.trim is not None and self._is_trimmed(level):
            shortage = self.trim[1] - self.free[level]
        else:
            shortage = need - self.free[level]
        if shortage > 0:
            is_last = level == tables.last_level
            make_room = self._make_room_last if is_last else self._make_room
            missing = make_room(level, shortage, newcomers, falling)
            if missing:
                if self._is_shrinking(level) or self._is_trimmed(level):
                    need = self.total[level] + missing
                available = max(0, need - missing)
                return Refusal(level, self.group, need, available, self._never())
        gone = set(falling)
        gone.update(plan.drops)
        if gone:
            incoming = [page for page in incoming if page not in gone]
            newcomers = [page for page in newcomers if page not in gone]
        plan.arrivals += incoming
        plan.evicts += newcomers
        plan.evict_levels += [level] * len(newcomers)
        plan.takes[level] += len(newcomers)
        for copy, page in self.reserved[level].items():
            if page not in gone:
                plan.take_backs.append((page, copy))
        plan.takes[level] += self.goal[level]
        if self._is_shrinking(level):
            self._relocate(level, gone)
        assert pool.level == level
        return falling

    def _admit(self, newcomers: list[Page], uses: int) -> list[Page]:
        """Drop droppable pages used less than ``uses`` times instead of writing them (INV-409)."""
        admitted = [page for page in newcomers if page.hold_count or page.uses >= uses]
        refused = len(newcomers) - len(admitted)
        if refused:
            kept = set(admitted)
            self.plan.drops.extend(page for page in newcomers if page not in kept)
            self.plan.write_candidates += refused
            _skip(self.plan, "admission", refused)
        return admitted

    def _reclaim(self, level: int, count: int) -> int:
        """Reclaim unreserved copies, oldest first, pending ones last (INV-510, INV-511).

        Those this very plan would make come at the end: they are simply not kept.
        """
        if count <= 0:
            return 0
        plan = self.plan
        taken = {slot for slot, _end in plan.reclaims}
        taken.update(self.stalled)
        done = 0
        for slot in self.pools[level].copies.oldest(self.reserved[level]):
            if done == count:
                return done
            if slot not in taken:
                plan.reclaims.append((slot, _RECLAIMED))
                done += 1
        for fresh, given_up in (
            (self.kept[level], plan.unkept),
            (self.written[level], plan.withdrawn),
        ):
            while done < count and fresh:
                given_up.add(fresh.pop(0))
                done += 1
        return done

    def _unreserved(self, level: int) -> int:
        fresh = len(self.kept[level]) + len(self.written[level])
        return self.pools[level].copies.count - len(self.reserved[level]) + fresh

    def _share_excess(self, level: int) -> int:
        """Return how many unreserved copies are above the share (INV-507, INV-508)."""
        share = self.tables.spec.levels[level].share(self.total[level])
        return max(0, self._unreserved(level) - share)

    def _make_room(
        self, level: int, shortage: int, newcomers: list[Page], falling: list[Page]
    ) -> int:
        """Make room on a level that has a colder one; return what is still missing."""
        shortage -= self._reclaim(level, min(self._share_excess(level), shortage))  # INV-506
        room = self._room_below(level)
        pool = self.pools[level]
        if shortage > 0:
            if self._is_shrinking(level):  # INV-903: droppable pages by age, then held ones
                victims = self._select(pool, shortage, 0)
                if len(victims) < shortage:
                    self.excluded.update(page.primary for page in victims if page.primary)
                    victims += self._select(pool, shortage - len(victims), room)
            else:
                victims = self._select(pool, shortage, room)
            if pool.policy.held_count:
                room -= sum(page.hold_count > 0 for page in victims)
            shortage -= len(victims)
            falling.extend(victims)  # INV-410: in front of what falls from above
        shortage -= self._reclaim(level, shortage)
        if shortage > 0:
            for page in newcomers:
                if shortage == 0:
                    break
                if page.hold_count:
                    if room <= 0:
                        continue  # INV-414: the next droppable one goes in its place
                    room -= 1
                falling.append(page)
                shortage -= 1
        if shortage > 0:  # INV-517: a promise outranks a saved transfer
            for copy, page in list(self.reserved[level].items()):
                if shortage == 0:
                    break
                if not page.hold_count:
                    del self.reserved[level][copy]
                    self.plan.reclaims.append((copy, _RECLAIMED))
                    falling.append(page)
                    shortage -= 1
        return shortage

    def _make_room_last(
        self, level: int, shortage: int, newcomers: list[Page], falling: list[Page]
    ) -> int:
        """Make room on the last level, where only droppable pages and copies can go (INV-412)."""
        assert not falling
        shortage -= self._reclaim(level, min(self._share_excess(level), shortage))  # INV-506
        if shortage > 0:
            victims = self._select(self.pools[level], shortage, 0)  # INV-413: never a held one
            shortage -= len(victims)
            self.plan.drops.extend(victims)
        shortage -= self._reclaim(level, shortage)  # INV-504, INV-505: only now the share
        if shortage > 0:
            for page in newcomers:  # oldest first; held ones are placed first (INV-412)
                if shortage == 0:
                    break
                if not page.hold_count:
                    self.plan.drops.append(page)
                    shortage -= 1
        if shortage > 0:
            for copy, page in list(self.reserved[level].items()):
                if shortage == 0:
                    break
                if not page.hold_count:  # INV-517, INV-518: dropped with its copy
                    del self.reserved[level][copy]
                    self.plan.drops.append(page)
                    shortage -= 1
        return shortage

    def _select(self, pool: Pool, count: int, held_limit: int) -> list[Page]:
        selection = pool.policy.select(count, held_limit=max(0, held_limit), excluded=self.excluded)
        if selection.passed_over:
            self.plan.selections.append((pool.policy, selection))
        return [slot.page for slot in selection.victims if slot.page is not None]

    def _never(self) -> bool:
        """Tell whether an empty store could not serve the wish either (INV-335).

        Slots of transfers that may never end are no room: who waited for them in the queue of
        restores would hold up all behind it (INV-119).
        """
        if self.shrink is not None or self.trim is not None:
            return False
        wanted = sum(page is not None for page in self.wanted) + self.grow
        level = self.target_level
        return wanted > self.total[level] - len(self.pools[level].stalled)

    # -- shrinking ----------------------------------------------------------------------------

    def _shrink_shortage(self, level: int) -> int:
        """Release all copies of the pool; return how many pages still do not fit (INV-903)."""
        pool = self.pools[level]
        total = self.total[level]
        for slot in [*pool.copies.finished, *pool.copies.pending]:
            self.plan.reclaims.append((slot, CopyEnd.RESIZED))
        blocked = sum(slot.slot_id < total for slot in pool.stalled)
        blocked += sum(
            slot.pool is pool and slot.slot_id < total and pool.copies.has(slot)
            for slot in self.stalled
        )
        return pool.primaries + blocked - total

    def _relocate(self, level: int, gone: set[Page]) -> None:
        """Move the pages that stay, but sit above the new end, inside the level (INV-903)."""
        pool = self.pools[level]
        for slot in pool.handles[self.total[level] :]:
            if slot is None or slot.page is None or slot.page.primary is not slot:
                continue
            if slot.page not in gone and slot.state is not _DRAINING:
                self.plan.relocates.append(slot.page)


def plan_resize(tables: Transitions, level: int, slot_counts: Sequence[int]) -> Plan | Refusal:
    """Plan a new size of a level; growing needs no step, shrinking may refuse (INV-902).

    Raises: ValueError: a size below one slot, or the device tier (INV-901, INV-905).
    """
    if level == 0:
        raise ValueError("level: the device tier cannot be resized")
    if len(slot_counts) != len(tables.spec.groups) or min(slot_counts) < 1:
        raise ValueError("slot_counts: each pool group needs at least one slot")
    groups: list[GroupPlan] = []
    for group, count in enumerate(slot_counts):
        if count >= tables.pools[level][group].total:
            continue  # INV-520: copies of groups that do not shrink survive
        planned = _Cascade(tables, group, (), (), 0, 0, shrink=(level, count)).run()
        if isinstance(planned, Refusal):
            return planned
        groups.append(planned)
    return Plan(tables.version, groups, [], (level, tuple(slot_counts)))


def plan_trim(tables: Transitions, level: int, free_counts: Sequence[int]) -> Plan | Refusal:
    """Plan to have ``free_counts[group]`` free slots on a level before anybody asks for them.

    For a store that evicts between two watermarks; the pages evicted can be recalled for as long
    as their slots are promised to nobody (INV-330).
    """
    groups: list[GroupPlan] = []
    for group, count in enumerate(free_counts):
        if count <= tables.pools[level][group].free_count:
            continue
        planned = _Cascade(tables, group, (), (), 0, 0, trim=(level, count)).run()
        if isinstance(planned, Refusal):
            return planned
        groups.append(planned)
    _plan_write_through(tables, groups)
    return Plan(tables.version, groups, [])


def plan_flush(tables: Transitions) -> Plan:
    """Plan to write committed pages to ready disk slots, the most valuable first (INV-926).

    A parent goes before its children, so what reaches the disk can be found again. Cost: O(pages);
    for a planned restart only.
    """
    groups: list[GroupPlan] = []
    disk = tables.last_level
    if tables.tiers[disk] is not Tier.DISK:
        return Plan(tables.version, [], [])
    for group in range(len(tables.spec.groups)):
        room = tables.pools[disk][group].ready_count
        plan = GroupPlan(group, takes=[0] * tables.level_count, write_class=IoClass.REQUIRED)
        for level in range(disk):
            for slot in tables.pools[level][group].policy.newest_first():
                page = slot.page
                if room and page is not None and _is_writable(tables, page):
                    plan.writes.append(page)
                    room -= 1
        if plan.writes:
            groups.append(plan)
    return Plan(tables.version, groups, [])


def _is_writable(tables: Transitions, page: Page) -> bool:
    """Tell whether a disk copy of the page makes sense: full, committed, none there (INV-602)."""
    return page.state is _COMMITTED and page.slot_at(tables.last_level) is None


def _plan_write_through(tables: Transitions, groups: list[GroupPlan]) -> None:
    """Plan the background writes last, into what is left over (INV-601 to INV-607, INV-615)."""
    host = tables.spec.write_through_level if tables.spec.write_through else None
    if host is None:
        return
    disk = host + 1
    cap = tables.spec.background_bytes_max - tables.background_bytes
    if tables.engine_room_bytes is not None:
        cap = min(cap, tables.engine_room_bytes - tables.unissued_background_bytes())
    for plan in groups:
        # INV-606: in the order of eviction. INV-616: a shadow taken back counts like a copied page.
        goes = zip(plan.evicts, plan.evict_levels, strict=True)
        staying = {page for page, level in goes if level == host}
        staying.update(page for page, slot in plan.take_backs if slot.level == host)
        candidates = [
            page for page in plan.arrivals if page in staying and _is_writable(tables, page)
        ]
        if not candidates:
            continue
        plan.write_candidates += len(candidates)
        uses = tables.spec.selective_uses
        if uses is not None:
            admitted = [page for page in candidates if page.uses >= uses]
            _skip(plan, "admission", len(candidates) - len(admitted))
            candidates = admitted
        pool, sources = tables.pools[disk][plan.group], tables.pools[host][plan.group]
        ready = max(0, pool.ready_count - plan.takes[disk])
        ended = sum(slot.pool is pool for slot, _end in plan.reclaims)
        reused = sum(slot.pool is pool for _page, slot in plan.take_backs)
        kept = sum(
            page not in plan.unkept and _kept_level(tables, page) == disk for page in plan.restores
        )
        copies = pool.copies.count - ended - reused + kept
        share = tables.spec.levels[disk].share(pool.total) - copies
        page_bytes = tables.spec.groups[plan.group].page_bytes
        pending = sources.total // 4 - sources.pending_sources
        room = min(max(0, cap) // page_bytes, pending)
        for page in candidates:
            issued = len(plan.writes)
            if issued >= ready:
                _skip(plan, "no_free_slot", 1)
            elif issued >= share:
                _skip(plan, "share", 1)
            elif issued >= room:
                _skip(plan, "cap", 1)
            else:
                plan.writes.append(page)
        cap -= len(plan.writes) * page_bytes


def _kept_level(tables: Transitions, page: Page) -> int:
    """Return the level whose slot a restore of the page would leave as a copy, or -1."""
    slot = page.primary
    if slot is None or page.state is not _COMMITTED:
        return -1
    return slot.level if tables.spec.levels[slot.level].keep_copy else -1


def _skip(plan: GroupPlan, reason: str, count: int) -> None:
    if count:
        plan.skipped[reason] = plan.skipped.get(reason, 0) + count


# -- applying -------------------------------------------------------------------------------------


def apply(tables: Transitions, plan: Plan) -> Applied:
    """Check the whole plan, then carry it out; nothing raises after the check (INV-402).

    Raises: StalePlan: the tables have changed since the plan was made; nothing was changed.
    """
    if plan.version != tables.version:
        raise StalePlan(f"made for tables {plan.version}, they are at {tables.version}")
    tables.version += 1
    tables.counters.plans_applied += 1
    level = 0
    new_pages: list[list[Page]] = [[] for _ in tables.spec.groups]
    applied = Applied(new_pages, [], plan.joined, [], [])
    if plan.resize is not None:
        level, counts = plan.resize
        for pool, count in zip(tables.pools[level], counts, strict=True):
            if count > pool.total:
                pool.grow(count)
    for group_plan in plan.groups:
        _apply_group(tables, group_plan, applied, plan.resize)
        if plan.resize is not None and not tables.pools[level][group_plan.group].retiring:
            tables.outbox.shrunk.append((level, group_plan.group))
    return applied


def _apply_group(
    tables: Transitions,
    plan: GroupPlan,
    applied: Applied,
    resize: tuple[int, tuple[int, ...]] | None,
) -> None:
    for policy, selection in plan.selections:
        policy.commit(selection)
    for page, source in plan.recalls:
        if page.primary is not None:
            tables.recall(page, source, is_kept=page not in plan.withdrawn)
            if source.level == 0:
                applied.recalled.append(page)
    for page in plan.drops:
        if page.state is not _DEAD:
            tables.drop(page)
    for slot, end in plan.reclaims:
        if slot.page is not None and slot.pool.copies.has(slot):
            tables.end_copy(slot, end)
    for page, copy in plan.take_backs:
        if page.state is not _DEAD:
            _take_back(tables, page, copy)
    if resize is not None:
        # From here on slots above the new end are not handed out (INV-904).
        tables.pools[resize[0]][plan.group].begin_shrink(resize[1][plan.group])
    moves, levels = _leave_sources(tables, plan)
    _grow(tables, plan, applied)
    owners = _bind_targets(tables, plan, moves, levels)
    _enter_queues(tables, plan)
    if plan.restores and plan.evicts:  # moves in one direction cannot wait in a ring
        _break_cycles(moves, owners)
    tables.schedule(moves)
    written = _plan_writes(tables, plan)
    tables.schedule(written)
    applied.moves += moves
    applied.moves += written
    _count(tables, plan, len(written))


def _take_back(tables: Transitions, page: Page, copy: Slot) -> None:
    """Exchange the primary for the copy: no move, no write, no new slot (INV-411, INV-503)."""
    source = tables.unbind_primary(page)
    source.pool.evicted += 1
    tables.take_back(page, copy)
    tables.release(source)
    tables.note("moved", page)


def _leave_sources(tables: Transitions, plan: GroupPlan) -> tuple[list[Move], list[int]]:
    """Take every moving page off its source, before any target is handed out (INV-405).

    Returns: the moves, and the level each one goes to.
    """
    evicts, levels = plan.evicts, plan.evict_levels
    living = [index for index, page in enumerate(evicts) if page.state is not _DEAD]
    if len(living) < len(evicts):
        evicts = [evicts[index] for index in living]
        levels = [levels[index] for index in living]
    moves = tables.depart(evicts, _EVICT, _REQUIRED)
    for move in moves:
        move.source.pool.evicted += 1
    levels = levels.copy()
    for page in plan.relocates:
        source = page.primary
        if page.state is _DEAD or source is None:
            continue
        page.detach(source)
        source.pool.primaries -= 1
        move = tables.new_move(page, _RELOCATE, source, _REQUIRED)
        tables.release_source(source)
        moves.append(move)
        levels.append(source.level)
    restores = [page for page in plan.restores if page.state is not _DEAD]
    kind = MoveKind.PREFETCH if plan.restore_level else MoveKind.RESTORE
    unkept, kept = plan.unkept, set[Page]()
    for page in restores:
        if _kept_level(tables, page) >= 0 and page not in unkept:
            kept.add(page)
    moves += tables.depart(restores, kind, _READ, kept)
    levels += [plan.restore_level] * len(restores)
    return moves, levels


def _grow(tables: Transitions, plan: GroupPlan, applied: Applied) -> None:
    """Make the new pages; ready slots go to the growing session first."""
    group, priority, device = plan.group, plan.priority, tables.pools[0][plan.group]
    row, fences = Page.make(group, priority, plan.grow), applied.fences
    applied.new_pages[group] += row
    slots = device.allocate_many(plan.grow)[0]
    for index, page in enumerate(row):
        slot = slots[index]
        page.hold_count = page.lock_count = 1
        page.primary = slot
        slot.page = page
        readers = slot.readers
        if readers is None:
            continue
        if isinstance(readers, list):
            fences.extend(slot.outstanding())
        elif not readers.passed:
            fences.append(readers)
    device.primaries += plan.grow
    tables.page_count += plan.grow


def _bind_targets(
    tables: Transitions, plan: GroupPlan, moves: list[Move], levels: list[int]
) -> list[Slot | None]:
    """Hand out the slots of the moves: ready ones first, else those that drain the longest.

    Returns: per move the handle its target took over, if any.
    """
    owners: list[Slot | None] = []
    supply: list[list[Slot]] = []
    inherited: list[list[Slot | None]] = []
    taken = [0] * tables.level_count
    counts = [0] * tables.level_count
    for level in levels:
        counts[level] += 1
    for level, pools in enumerate(tables.pools):
        pool = pools[plan.group]
        slots, old = pool.allocate_many(counts[level])
        pool.primaries += len(slots)
        supply.append(slots)
        inherited.append(old)
    for index, move in enumerate(moves):
        level = levels[index]
        place = taken[level]
        taken[level] = place + 1
        slot = supply[level][place]
        owners.append(inherited[level][place])
        slot.state = _WRITING
        slot.write = move
        move.target = slot
        slot.page = page = move.page
        first = page.primary
        assert first is None or first.level > level, "INV-302: a primary is the hottest slot"
        slot.colder = first
        page.primary = slot
        if move.kind is _RELOCATE and move.source.lane is not None:
            move.source.lane.replace(move.source, slot)  # it keeps its place in the queue
    return owners


def _enter_queues(tables: Transitions, plan: GroupPlan) -> None:
    """Queue what has arrived on colder levels: as it fell, and prefetched pages tail first."""
    stamp = tables.next_stamp()
    for page in plan.arrivals:
        if page.state is not _DEAD:
            tables.arrive(page, stamp)
    if plan.restore_level:
        for page in reversed(plan.restores):
            if page.state is not _DEAD:
                tables.arrive(page, stamp)


def _break_cycles(moves: list[Move], owners: list[Slot | None]) -> None:
    """Send one move of each cycle through the bounce buffer (INV-407).

    A move waits for the one that leaves its target; each waits for at most one, so what is not a
    path is a ring.
    """
    count = len(moves)
    for index, move in enumerate(moves):
        source = move.source
        if source.state is _DRAINING or source.state is _RELEASED:
            source.stamp = index  # it is in no queue of a policy, so the field is free
    follows = [-1] * count
    for index, old in enumerate(owners):
        if old is not None and 0 <= old.stamp < count and moves[old.stamp].source is old:
            follows[index] = old.stamp
    walked = [-1] * count  # each move with the first one of its walk
    for first in range(count):
        node = first
        while node >= 0 and walked[node] < 0:
            walked[node] = first
            node = follows[node]
        if node < 0 or walked[node] != first:
            continue
        start, ring = node, [node]
        node = follows[start]
        while node != start:
            ring.append(node)
            node = follows[node]
        # Prefer a restore: its data is read through pinned memory anyway.
        chosen = moves[start]
        for index in ring:
            if moves[index].kind is _RESTORE:
                chosen = moves[index]
                break
        chosen.via_bounce = True


def _plan_writes(tables: Transitions, plan: GroupPlan) -> list[Move]:
    """Issue the write-through copies into ready slots (INV-603, INV-608, INV-609)."""
    written: list[Move] = []
    if not plan.writes:
        return written
    pool = tables.pools[tables.last_level][plan.group]
    page_bytes = tables.spec.groups[plan.group].page_bytes
    for page in plan.writes:
        if page.state is not _COMMITTED or page.primary is None or not pool.ready_count:
            continue
        move = tables.new_move(page, MoveKind.WRITE_THROUGH, page.primary, plan.write_class)
        slot = pool.allocate_ready()
        slot.state = _WRITING
        slot.write = move
        move.target = slot
        page.attach(slot)
        pool.copies.add(slot)
        pool.written_through += 1
        if plan.write_class is _BACKGROUND:
            tables.charge_background(move, page_bytes)
        written.append(move)
    return written


def _count(tables: Transitions, plan: GroupPlan, issued: int) -> None:
    """Book the write-through of a plan: candidates = issued + skipped (INV-615)."""
    counters = tables.counters
    skipped = sum(plan.skipped.values())
    counters.write_through_skipped += skipped
    for reason, count in plan.skipped.items():
        counters.write_through_skipped_by[reason] += count
    if plan.write_class is _BACKGROUND:
        counters.write_through_issued += issued
        # A page that ended with another one of this plan was no candidate after all.
        ended = len(plan.writes) - issued
        counters.write_through_candidates += plan.write_candidates - ended
