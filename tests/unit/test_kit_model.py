"""The reference model finds every kind of wrong page; patterns differ in every word."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.config import DeviceTierConfig, PoolGroupConfig, StoreConfig
from kvstore.testing import ReferenceModel, SimDevice, check_pattern, pattern, token_rows

BLOCK, PAGE = 16, 4096


def _model() -> ReferenceModel:
    return ReferenceModel(
        StoreConfig(
            block_tokens=BLOCK,
            pool_groups=(PoolGroupConfig("full", PAGE), PoolGroupConfig("local", 1000)),
            device=DeviceTierConfig(gpu_cache_size=1 << 20),
        )
    )


async def _filled(tokens, salt=b""):
    model, device = _model(), SimDevice()
    pool = device.create_pool("full", 8, PAGE)
    history = model.history(salt)
    history.extend(tokens)
    table = np.array([3, 1, 5, 0], np.int32)
    model.write(pool, "full", table, history, 0)
    return model, pool, history, table


async def test_written_pages_check_and_are_counted():
    """Whole blocks and the tail compare equal, padding is not looked at."""
    model, pool, history, table = await _filled(range(40))
    assert 3 == model.check(pool, "full", table, history)
    assert (3, 40) == (model.checked_pages, model.checked_tokens)
    assert 2 == model.check(pool, "full", np.array([3, -1, 5], np.int32), history)
    assert 1 == model.check(pool, "full", table, history, 10)


async def test_tail_written_in_steps_equals_tail_written_at_once():
    """Decoding token by token gives the same page."""
    model, pool, history, table = await _filled(range(20))
    for token in range(20, 40):
        history.extend([token])
        model.write(pool, "full", table, history, token)
    assert 3 == model.check(pool, "full", table, history)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda pages: pages.__setitem__((3, 17), pages[3, 17] ^ 1), id="bit"),
        pytest.param(lambda pages: pages.__setitem__(3, pages[1].copy()), id="mixed up"),
        pytest.param(lambda pages: pages.__setitem__(3, 0), id="lost"),
        pytest.param(lambda pages: pages.__setitem__(3, 0xFF), id="poison"),
        pytest.param(
            lambda pages: pages.__setitem__(3, np.roll(pages[3], PAGE // BLOCK)), id="shifted"
        ),
    ],
)
async def test_damage_is_found(damage):
    """A flipped bit, another block's page, zeros, poison and a shift all raise."""
    model, pool, history, table = await _filled(range(40))
    damage(model.pages(pool, "full"))
    with pytest.raises(AssertionError, match="full: block 0"):
        model.check(pool, "full", table, history)


async def test_other_tenant_and_other_history_differ():
    """Equal tokens under another salt, or after another prefix, have other bytes."""
    model, pool, _, table = await _filled(range(32))
    stranger = model.history(b"tenant")
    stranger.extend(range(32))
    with pytest.raises(AssertionError):
        model.check(pool, "full", table, stranger)
    other = model.history()
    other.extend([7, *range(1, 32)])
    with pytest.raises(AssertionError, match="block 0"):
        model.check(pool, "full", table, other)
    with pytest.raises(AssertionError, match="block 1"):
        model.check(pool, "full", np.array([-1, 1], np.int32), other)


def test_history_truncates_and_continues():
    """A truncated history has the keys of its shorter self."""
    model = _model()
    history, twin = model.history(b"x"), model.history(b"x")
    history.extend(range(100))
    history.truncate(35)
    twin.extend(range(35))
    assert (3, twin.key(1)) == (history.block_count, history.key(1))
    assert list(range(32, 35)) == history.block(2)
    assert twin.parent(2) == history.parent(2)


def test_rows_depend_on_each_of_their_inputs():
    """Group, parent, position and token each change the bytes."""
    base = token_rows("full", b"p", 0, [5], 250)
    assert (1, 250) == base.shape
    for other in (
        token_rows("local", b"p", 0, [5], 250),
        token_rows("full", b"q", 0, [5], 250),
        token_rows("full", b"p", 1, [5], 250),
        token_rows("full", b"p", 0, [6], 250),
    ):
        assert not np.array_equal(base, other)


def test_patterns_of_any_size_and_key():
    """A pattern is a prefix of the longer one, keys of any type work, a difference is named."""
    assert np.array_equal(pattern("a", 100), pattern("a", 4096)[:100])
    for key in (b"\x00" * 32, 17, "text"):
        check_pattern(key, pattern(key, 1001))
    wrong = pattern("a", 64)
    wrong[40] ^= 8
    with pytest.raises(AssertionError, match="page a: byte 40"):
        check_pattern("a", wrong)
