"""A tiny store in memory that keeps the API contract the scheduler relies on: one tier, LRU."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from kvstore.errors import OutOfPages
from kvstore.keys import KeyChain, scope_key


@dataclass
class FakePage:
    slot: int
    key: bytes | None = None
    users: int = 0


class FakePool:
    def __init__(self, slot_count, page_bytes):
        self.data = np.zeros((slot_count, page_bytes), dtype=np.uint8)

    def as_tensor(self, dtype=None, shape=None):
        del dtype, shape
        return self.data


@dataclass
class FakeRestore:
    valid_tokens: int


class FakeStore:
    """Device slots only; suspended sessions keep their slots unless a page is needed.

    ``corrupt`` is called with each page that a resume serves; a test breaks bytes with it.
    """

    def __init__(self, slot_count, page_bytes, block_tokens, corrupt=None):
        self.block_tokens = block_tokens
        self.pool = FakePool(slot_count, page_bytes)
        self.free = list(range(slot_count))
        self.index: OrderedDict[bytes, FakePage] = OrderedDict()  # oldest first
        self.corrupt = corrupt
        self.steps = 0
        self.open_sessions = 0
        self.suspends = 0

    def device_pool(self, group):
        assert group == "full"
        return self.pool

    def stream(self):
        return object()

    def step(self, fence):
        assert fence is None
        self.steps += 1

    def session(self, tokens, *, salt=b""):
        return FakeSession(self, tokens, salt)

    def take(self, count):
        droppable = [key for key, page in self.index.items() if not page.users]
        if len(self.free) + len(droppable) < count:
            return None
        while len(self.free) < count:
            self.free.append(self.index.pop(droppable.pop(0)).slot)
        return [FakePage(self.free.pop(), users=1) for _ in range(count)]

    def let_go(self, page):
        page.users -= 1
        if page.users:
            return
        if page.key is None:
            self.free.append(page.slot)
        else:
            self.index.move_to_end(page.key)


class FakeSession:
    def __init__(self, store, tokens, salt):
        self.store = store
        self.chain = KeyChain(store.block_tokens, scope_key(salt))
        prompt = KeyChain(store.block_tokens, scope_key(salt))
        prompt.extend(tokens)
        self.tokens = tokens
        self.pages = []
        for key in prompt.keys:
            page = store.index.get(key)
            if page is None:
                break
            page.users += 1
            self.pages.append(page)
        self.cached_tokens = len(self.pages) * store.block_tokens
        self.cached_tokens_by_level = {"device": self.cached_tokens} if self.pages else {}
        self.history = self.cached_tokens
        self.chain.extend(tokens[: self.cached_tokens])
        self.is_active = False

    async def __aenter__(self):
        self.store.open_sessions += 1
        return self

    async def __aexit__(self, *args):
        self.store.open_sessions -= 1
        for page in reversed(self.pages):
            self.store.let_go(page)
        self.pages = []

    async def resume(self, stream):
        assert not self.is_active
        assert stream is not None
        self.is_active = True
        if len(self.pages) > len(self.store.pool.data):
            raise OutOfPages("too large")
        if self.store.corrupt:
            for page in self.pages:
                self.store.corrupt(self.store.pool.data[page.slot])
        return FakeRestore(self.history)

    is_growing = False

    def try_grow(self, tokens_total):
        assert self.is_active
        missing = -(-tokens_total // self.store.block_tokens) - len(self.pages)
        fresh = self.store.take(max(0, missing))
        if fresh is None:
            return False
        self.pages += fresh
        return True

    def page_table(self, group):
        assert group == "full"
        return np.array([page.slot for page in self.pages], dtype=np.int32)

    def commit(self, tokens):
        assert self.is_active
        first = len(self.chain.keys)
        self.chain.extend(tokens)
        self.history += len(tokens)
        assert self.history <= len(self.pages) * self.store.block_tokens
        for block in range(first, len(self.chain.keys)):
            page, key = self.pages[block], self.chain.keys[block]
            known = self.store.index.get(key)
            if known is None:
                page.key = key
                self.store.index[key] = page
            elif known is not page:
                known.users += 1
                self.pages[block] = known
                self.store.let_go(page)

    def suspend(self, fence):
        assert self.is_active
        assert fence is None
        self.store.suspends += 1
        self.is_active = False
        # The fake gives up the last page, as a store that lost it would.
        if self.pages:
            keep = (len(self.pages) - 1) * self.store.block_tokens
            self.store.let_go(self.pages.pop())
            if self.history > keep:
                self.history = keep
                self._rewind(keep)

    def _rewind(self, tokens):
        blocks = tokens // self.store.block_tokens
        self.chain.keys = self.chain.keys[:blocks]
        self.chain._pending = b""
