"""A driver for the pure tables: short words for sessions, and an executor that obeys by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvstore.config import Tier
from kvstore.core.invariants import check_state
from kvstore.core.page import Move, MoveKind, Page
from kvstore.core.planner import Plan, Refusal
from kvstore.core.spec import GroupSpec, LevelSpec, TablesSpec
from kvstore.core.tables import PASSED, Tables
from kvstore.keys import BlockKey
from kvstore.stats import PoolStats


def key(name: str, block: int) -> BlockKey:
    """Return a made-up key: blocks of one name form a chain."""
    return BlockKey(f"{name}:{block}".encode().ljust(32, b"\0"))


class Session:
    """A prefix of blocks of one name, held from `Driver.open` until `close`."""

    def __init__(self, driver: Driver, name: str, rows: list[list[Page | None]]) -> None:
        self.driver = driver
        self.name = name
        self.rows = rows
        self.committed = len(rows[0])
        self.applied: Any = None

    @property
    def pages(self) -> list[Page]:
        """All pages, of all groups."""
        return [page for row in self.rows for page in row if page is not None]

    def plan(self, grow: int = 0) -> Plan | Refusal:
        """Plan to resume, with room for more blocks."""
        return self.driver.tables.plan_restore(self.rows, [grow] * len(self.rows))

    def start(self, grow: int = 0) -> Session:
        """Plan and apply a resume; nothing has moved yet."""
        plan = self.plan(grow)
        assert isinstance(plan, Plan), plan
        tables = self.driver.tables
        self.applied = tables.apply(plan)
        for row, new in zip(self.rows, self.applied.new_pages, strict=True):
            row.extend(new)
        self.driver.pump()
        return self

    def lock(self) -> Session:
        """Lock what has arrived."""
        absent = [page for page in self.pages if not page.lock_count]
        self.driver.tables.lock([page for page in absent if page.level == 0 and page.is_ready])
        return self

    def resume(self, grow: int = 0) -> Session:
        """Resume and run every move to its end."""
        self.start(grow)
        self.driver.finish_all()
        return self.lock()

    def commit(self, priority: int = 35) -> Session:
        """Commit every block of the session."""
        for group, row in enumerate(self.rows):
            for block in range(self.committed, len(row)):
                page = row[block]
                assert page is not None
                parent = row[block - 1] if block else None
                row[block] = self.driver.tables.commit(
                    page,
                    key(self.name, block),
                    parent,
                    block,
                    priority,
                    parent_key=key(self.name, block - 1) if block else None,
                )
            assert group >= 0
        self.committed = len(self.rows[0])
        return self

    def suspend(self, fence: Any = PASSED) -> Session:
        """Turn locks into holds."""
        for row in self.rows:
            self.driver.tables.unlock(row, fence)
        self.driver.pump()
        return self

    def close(self) -> None:
        """Release locks and holds."""
        for row in self.rows:
            self.driver.tables.unlock([page for page in row if page and page.lock_count], PASSED)
            self.driver.tables.unhold(row)
        self.driver.pump()


class Driver:
    """Tables with an executor that ends moves when it is told to."""

    def __init__(
        self,
        device: int = 4,
        host: int | None = 4,
        disk: int | None = 8,
        *,
        keep_host: bool = False,
        keep_disk: bool = False,
        share_host: str = "0.0",
        share_disk: str = "1.0",
        groups: Sequence[GroupSpec] = (GroupSpec(name="full"),),
        **options: Any,
    ) -> None:
        count = len(groups)
        levels = [LevelSpec(tier=Tier.DEVICE, slot_counts=(device,) * count)]
        if host is not None:
            levels.append(
                LevelSpec(
                    tier=Tier.HOST,
                    slot_counts=(host,) * count,
                    keep_copy=keep_host,
                    share_fraction=share_host,
                )
            )
        if disk is not None:
            levels.append(
                LevelSpec(
                    tier=Tier.DISK,
                    slot_counts=(disk,) * count,
                    keep_copy=keep_disk,
                    share_fraction=share_disk,
                )
            )
        self.spec = TablesSpec(
            groups=tuple(groups), levels=tuple(levels), block_tokens=4, **options
        )
        self.tables = Tables(self.spec)
        self.running: list[Move] = []
        self.started: list[Move] = []
        self.promoted: list[Move] = []
        self.cancelled: list[Move] = []
        self.resolved: list[Move] = []
        self.lost: list[Page] = []
        self.shrunk: list[tuple[int, int]] = []
        self.events: list[Any] = []

    # -- executor

    def pump(self) -> None:
        """Take the outbox."""
        while outbox := self.tables.take_outbox():
            self.running.extend(outbox.start)
            self.started.extend(outbox.start)
            self.promoted.extend(outbox.promote)
            self.cancelled.extend(outbox.cancel)
            self.resolved.extend(outbox.resolved)
            self.lost.extend(outbox.lost)
            self.shrunk.extend(outbox.shrunk)
            self.events.extend(outbox.events)
        check_state(self.tables)

    def end(self, move: Move, how: str = "done", **options: Any) -> None:
        """End one running move."""
        self.running.remove(move)
        if move.state.name == "BOUNCING" and how == "done":
            self.tables.move_source_released(move)
        elif how == "done":
            self.tables.move_done(move)
        elif how == "failed":
            self.tables.move_failed(move, -5, **options)
        else:
            self.tables.move_cancelled(move)
        self.pump()

    def finish_all(self, *kinds: MoveKind) -> None:
        """Let running moves (of some kinds) end well, and those that follow from them."""
        while True:
            ready = [move for move in self.running if not kinds or move.kind in kinds]
            if not ready:
                return
            self.end(ready[0])

    def writes(self, level: int, since: int = 0) -> int:
        """Count the moves that were started towards a level."""
        return sum(move.target.level == level for move in self.started[since:])

    # -- sessions

    def open(self, name: str, blocks: int) -> Session:
        """Match up to ``blocks`` blocks of a name and hold what is there."""
        match = self.tables.match([key(name, block) for block in range(blocks)])
        for row in match.pages:
            self.tables.hold(row)
        return Session(self, name, [list(row) for row in match.pages])

    def fill(self, name: str, blocks: int, priority: int = 35) -> Session:
        """Open, grow to ``blocks`` blocks and commit them; the session is active."""
        session = self.open(name, blocks)
        session.resume(blocks - session.committed)
        return session.commit(priority)

    def put(self, name: str, blocks: int, priority: int = 35) -> None:
        """Leave ``blocks`` committed, droppable blocks behind."""
        self.fill(name, blocks, priority).close()
        check_state(self.tables)

    def evict_written_through(self, name: str, blocks: int) -> list[Move]:
        """Put a request and empty the device; returns the background writes, still running."""
        self.put(name, blocks)
        shrunk = tuple(pool.total for pool in self.tables.pools[0])
        self.tables.apply(self.tables.plan_trim(0, shrunk))
        self.pump()
        self.finish_all(MoveKind.EVICT)
        return [move for move in self.running if move.kind is MoveKind.WRITE_THROUGH]

    def get(self, name: str, blocks: int) -> int:
        """Resume what is there of a name, close, and return how many blocks that was."""
        session = self.open(name, blocks)
        session.resume()
        session.close()
        return session.committed

    def page(self, name: str, block: int, group: int = 0) -> Page:
        """Return the page of a block; it must exist."""
        page = self.tables.index.get(group, key(name, block))
        assert page is not None
        return page

    def has(self, name: str, block: int, group: int = 0) -> bool:
        """Tell whether a block is in the index."""
        return self.tables.index.get(group, key(name, block)) is not None

    def levels(self, name: str, blocks: int) -> list[int | None]:
        """Return the level of each block, None for those gone."""
        return [self.page(name, b).level if self.has(name, b) else None for b in range(blocks)]

    def stats(self, level: int, group: int = 0) -> PoolStats:
        """Return the statistics of a pool."""
        return self.tables.snapshot()[level, group]

    def slots_of(self, name: str, block: int) -> list[int]:
        """Return the levels on which a block owns a slot."""
        return [slot.level for slot in self.page(name, block).slots]


@pytest.fixture
def make() -> type[Driver]:
    """Hand out the driver."""
    return Driver


@pytest.fixture
def block_key() -> Any:
    """Hand out the key function of the driver."""
    return key
