"""A client of a simulated store: it runs the fake model's kernels and checks, in stream order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from kvstore.config import StoreConfig
from kvstore.errors import DeviceError
from kvstore.testing.model import History, ReferenceModel
from kvstore.testing.store import SimRig


@final
class SimClient:
    """What a scheduler does for its requests, with bytes that can be checked.

    `put` computes and commits a token sequence, `get` brings it back and compares every page.
    """

    def __init__(self, store: Any, rig: SimRig, config: StoreConfig) -> None:
        self.store = store
        self.rig = rig
        self.config = config
        self.model = ReferenceModel(config)
        self.stream = rig.device.stream("compute")
        self._errors: list[BaseException] = []
        self._flood_next = 0

    # -- kernels in stream order ------------------------------------------------------------------

    def compute(
        self, session: Any, history: History, start: int = 0, *, duration_ns: int = 20_000
    ) -> None:
        """Enqueue the kernel that writes the tokens from ``start`` on."""
        pools, now = self._tables(session), history.copy()

        def kernel() -> None:
            for group, pool, table in pools:
                self.model.write(pool, group, table, now, start)

        self._launch(kernel, duration_ns)

    def verify(
        self,
        session: Any,
        history: History,
        token_count: int,
        *,
        into: list[BaseException] | None = None,
    ) -> None:
        """Enqueue the check of the first ``token_count`` tokens.

        `settle` raises what it finds, unless it goes ``into`` a list of the caller.
        """
        pools, now = self._tables(session), history.copy()

        def kernel() -> None:
            for group, pool, table in pools:
                self.model.check(pool, group, table, now, token_count)

        self._launch(kernel, 5_000, into)

    def _launch(
        self,
        kernel: Callable[[], None],
        duration_ns: int,
        into: list[BaseException] | None = None,
    ) -> None:
        found = self._errors if into is None else into

        def guarded() -> None:
            try:
                kernel()
            except AssertionError as error:
                found.append(error)

        self.stream.launch(guarded, duration_ns)

    def _tables(self, session: Any) -> list[tuple[str, Any, Any]]:
        names = [group.name for group in self.config.pool_groups]
        return [
            (name, self.store.device_pool(name), np.array(session.page_table(name)))
            for name in names
        ]

    def raise_errors(self) -> None:
        """Raise the first mismatch that a check found."""
        if self._errors:
            raise self._errors[0]

    async def settle(self) -> None:
        """Wait until the kernels enqueued so far have run, and raise what they found."""
        await self.rig.event(self.stream)
        self.raise_errors()

    def step(self) -> Any:
        """Be one scheduler step: everything released before it is free behind its fence."""
        try:
            fence = self.stream.record()
        except DeviceError:
            fence = None  # the device may be lost: the store finds out by its own calls
        return self.store.step(fence)

    async def grow(self, session: Any, tokens_total: int) -> bool:
        """Grow a session, and make sure that the slots it was given are drained before they are
        used: by the order of its stream, or by waiting here.
        """
        while not session.try_grow(tokens_total):
            if not session.is_growing:
                return False
            await self.step()
        return True

    # -- whole requests ---------------------------------------------------------------------------

    def session(self, tokens: Sequence[int], **options: Any) -> Any:
        """Open a session over ``tokens``."""
        return self.store.session(np.asarray(tokens, np.int64), **options)

    def history(self, tokens: Sequence[int], salt: bytes = b"", adapter: bytes = b"") -> History:
        """Return the history of a request."""
        history = self.model.history(salt, adapter)
        history.extend(tokens)
        return history

    async def resume(self, session: Any, history: History, **options: Any) -> int:
        """Resume, compare what came back, and return how many tokens are valid."""
        restore = await session.resume(self.stream, **options)
        valid = int(restore.valid_tokens)
        self.verify(session, history, valid)
        await self.settle()
        return valid

    async def put(self, tokens: Sequence[int], salt: bytes = b"", **options: Any) -> int:
        """Compute and commit a sequence; returns how many tokens were cached already."""
        history = self.history(tokens, salt)
        async with self.session(tokens, salt=salt, **options) as session:
            valid = await self.resume(session, history)
            grown = await self.grow(session, len(tokens))
            assert grown, "the device has no room for the test's tokens"
            if valid < len(tokens):
                self.compute(session, history, valid)
                session.commit(np.asarray(tokens[valid:], np.int64))
            self.verify(session, history, len(tokens))
            await self.settle()
            session.suspend(self.stream.record())
        return valid

    async def get(self, tokens: Sequence[int], salt: bytes = b"", **options: Any) -> int:
        """Bring a sequence back, compare every page, and return how many tokens are valid."""
        history = self.history(tokens, salt)
        async with self.session(tokens, salt=salt) as session:
            valid = await self.resume(session, history, **options)
        self.step()
        return valid

    async def flood(self, blocks: int) -> None:
        """Put that many blocks nobody asked for before, so that older pages move down."""
        block = self.config.block_tokens
        device = min(
            pool.total for (level, _), pool in self.store.stats().pools.items() if level == "device"
        )
        part = max(1, min(blocks, device // 2))
        for start in range(0, blocks, part):
            count = min(part, blocks - start)
            base = (1 << 20) + self._flood_next * block
            self._flood_next += count
            await self.put(list(range(base, base + count * block)))
            self.step()
