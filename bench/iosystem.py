"""What a run stands on: an engine, its completion queue, files and memory. Real or simulated."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import anyio

from kvstore._uring.base import Engine
from kvstore.config import IoConfig
from kvstore.errors import KVStoreError

from .iofiles import is_written, round_up
from .jobs import JobError, JobSpec
from .memory import Memory, SmallMemory, open_memory

#: Job fields that make an engine; jobs that run together must agree on them.
ENGINE_FIELDS = (
    "ioengine",
    "policy",
    "disk_io_threads",
    "kernel_rings",
    "inflight_bytes",
    "required_inflight_bytes",
    "background_inflight_bytes",
    "background_bytes_max",
    "read_piece_bytes",
    "write_piece_bytes",
    "memory",
)


def io_config(job: JobSpec) -> IoConfig:
    """Return the engine's settings for a job."""
    values: dict[str, Any] = {
        "disk_io_threads": job.disk_io_threads,
        "kernel_rings": job.kernel_rings,
        "direct": "on" if job.direct else "off",
    }
    for name in ENGINE_FIELDS[4:10]:
        if getattr(job, name):
            values[name] = getattr(job, name)
    return IoConfig(**values)


class Files(Protocol):
    """The open files of a run, by path; each is registered with the engine once."""

    def open(self, path: Path, size_bytes: int, *, direct: bool) -> tuple[int, str]:
        """Open a file of at least ``size_bytes`` and return (file id, mode).

        Raises: JobError: no space, no permission, no O_DIRECT.
        """
        ...

    def is_written(self, path: Path, size_bytes: int) -> bool:
        """Return whether reads of the file will reach the disk."""
        ...

    async def aclose(self) -> None:
        """Drain and close all of them."""
        ...


class SlotFiles:
    """Files on disk, opened as the store opens its slot files."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._files: dict[Path, tuple[int, Any]] = {}

    def open(self, path: Path, size_bytes: int, *, direct: bool) -> tuple[int, str]:
        """Open, preallocate and register a file; an existing one is never made smaller."""
        from kvstore._uring.probe import open_slot_file

        if path not in self._files:
            have = path.stat().st_size if path.exists() else 0
            try:
                opened = open_slot_file(
                    path, max(round_up(size_bytes), have), direct="on" if direct else "off"
                )
            except (KVStoreError, OSError) as error:
                raise JobError("--directory", f"cannot prepare {path.name}: {error}") from None
            file_id = self._engine.register_file(opened.direct_fd, opened.buffered_fd)
            self._files[path] = (file_id, opened)
        file_id, opened = self._files[path]
        return file_id, str(opened.mode)

    def is_written(self, path: Path, size_bytes: int) -> bool:
        """Ask the file system for holes and unwritten extents."""
        return is_written(self._files[path][1].buffered_fd, size_bytes)

    async def aclose(self) -> None:
        """Drain and close all of them."""
        for file_id, opened in self._files.values():
            await self._engine.drain(file_id, 30.0)
            self._engine.unregister_file(file_id)
            opened.close()
        self._files.clear()


class SimFiles:
    """Files in memory; nothing is written to disk."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._files: dict[Path, int] = {}

    def open(self, path: Path, size_bytes: int, *, direct: bool) -> tuple[int, str]:
        """Register an empty file."""
        del size_bytes, direct
        if path not in self._files:
            self._files[path] = self._engine.register_file(-1, -1)
        return self._files[path], "simulated"

    def is_written(self, path: Path, size_bytes: int) -> bool:
        """Nothing has to be laid out for a simulation."""
        del path, size_bytes
        return True

    async def aclose(self) -> None:
        """Drain and forget all of them."""
        for file_id in self._files.values():
            await self._engine.drain(file_id, 30.0)
            self._engine.unregister_file(file_id)
        self._files.clear()


@dataclass(slots=True)
class System:
    """Everything a group of jobs borrows. `aclose` waits for what is in flight first."""

    engine: Engine
    queue: Any
    files: Files
    memory: Memory

    async def aclose(self) -> None:
        """Give everything back in order: files, engine, queue, memory (INV-139)."""
        with anyio.CancelScope(shield=True):
            await self.files.aclose()
            self.engine.unregister_memory(self.memory.address)
            await self.engine.aclose()
            self.queue.close()
            self.memory.close()


def open_system(job: JobSpec, memory_bytes: int, *, config: IoConfig | None = None) -> System:
    """Open the engine a job names, never another one (INV-127), with memory registered.

    ``config`` replaces the settings that the job asks for.

    Raises: JobError: the system refuses it, with the reason.
    """
    if job.ioengine == "simulated":
        return _open_simulated(job, memory_bytes)
    from kvstore._uring import open_engine
    from kvstore._uring.native import CompletionQueue

    try:
        engine = open_engine(config or io_config(job), kind=job.ioengine, policy=job.policy)
    except (KVStoreError, OSError) as error:
        raise JobError("--ioengine", f"{job.ioengine} cannot be used: {error}") from None
    queue = CompletionQueue(asyncio.get_running_loop())
    memory = open_memory(memory_bytes, job.memory)
    engine.register_memory(memory.address, memory.length)
    return System(engine, queue, SlotFiles(engine), memory)


def _open_simulated(job: JobSpec, memory_bytes: int) -> System:
    from kvstore.testing.completions import SimCompletions
    from kvstore.testing.engine import SimEngine

    loop = asyncio.get_running_loop()
    engine = SimEngine(loop, config=io_config(job), seed=job.randseed)
    memory = SmallMemory(memory_bytes)
    engine.register_memory(memory.address, memory.length)
    return System(engine, SimCompletions(loop), SimFiles(engine), memory)
