"""The examples of the README run as they are printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel

import kvstore

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
PAGE_BYTES = 16 << 10


def test_quick_start_runs_as_printed() -> None:
    """The first example runs in a fresh interpreter and finds the first request's prefix."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", BLOCKS[0]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["0 of 96 tokens cached", "96 of 128 tokens cached"]


class Steps:
    """The smallest scheduler the example can run in: every call is a step of its own."""

    def __init__(self, store: kvstore.KVStore, output_tokens: int) -> None:
        self.store = store
        self.output_tokens = output_tokens
        self.made: dict[int, int] = {}
        self.suspensions = 0

    async def next(self) -> None:
        self.suspensions += 1
        self.store.step()
        await anyio.sleep(0.002)

    async def run(self, table: Any, todo: list[int]) -> tuple[int | None, None]:
        assert (table >= 0).all()
        assert todo
        await anyio.lowlevel.checkpoint()
        self.store.step()
        request = anyio.get_current_task().id
        self.made[request] = self.made.get(request, 0) + 1
        return (None if self.made[request] > self.output_tokens else 7), None


def test_scheduler_example_serves_more_requests_than_fit(tmp_path: Path) -> None:
    """Requests that do not fit together all end, and their prefixes are shareable afterwards."""
    names: dict[str, Any] = {}
    exec(compile(BLOCKS[1], "README.md", "exec"), names)
    config = kvstore.StoreConfig(
        block_tokens=8,
        pool_groups=(kvstore.PoolGroupConfig("full", page_bytes=PAGE_BYTES),),
        device=kvstore.DeviceTierConfig(gpu_cache_size=12 * PAGE_BYTES),
        host=kvstore.HostTierConfig(host_cache_size=64 * PAGE_BYTES),
        disk=kvstore.DiskTierConfig(
            disk_cache_size=256 * PAGE_BYTES, disk_cache_path=str(tmp_path)
        ),
        check_invariants=True,
    )
    prompts = [[request * 1000 + i for i in range(40)] for request in range(4)]

    async def main() -> None:
        async with kvstore.open_store(config) as store:
            steps = Steps(store, output_tokens=20)
            with anyio.fail_after(60):
                async with anyio.create_task_group() as group:
                    for prompt in prompts:
                        group.start_soon(names["serve"], store, prompt, None, steps)
            assert steps.suspensions > 0
            for prompt in prompts:
                assert store.probe(prompt, salt=b"tenant-7") == 40
                assert store.probe(prompt, salt=b"tenant-8") == 0

    anyio.run(main)
