"""The simulated store that the cases run on."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from kvstore.config import StoreConfig
from kvstore.testing import SimClient, SimRig, sim_config

BLOCK = 8


@contextlib.asynccontextmanager
async def opened(
    config: StoreConfig | None = None, **options: Any
) -> AsyncIterator[tuple[Any, SimClient, SimRig]]:
    """Open a simulated store; yields it with a client and its rig, checks what close leaves."""
    config = config or sim_config()
    rig = SimRig.create(config, **options)
    async with rig.open(config) as store:
        yield store, SimClient(store, rig, config), rig
    rig.check_closed()


def tokens_of(blocks: int, base: int = 0) -> list[int]:
    """Return the tokens of so many blocks."""
    return list(range(base, base + blocks * BLOCK))
