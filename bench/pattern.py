"""What a job asks for: offsets, sizes and directions, drawn in batches from one seed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .jobs import JobSpec, Split

_CHUNK = 4096
#: Above this many blocks a random job draws with repetition instead of permuting all of them.
_PERMUTE_MAX = 1 << 24


class _Offsets:
    """Offsets of one direction with one block size: in order, or each block once per round."""

    def __init__(
        self, block_bytes: int, region_bytes: int, rng: np.random.Generator, *, is_random: bool
    ) -> None:
        self._block_bytes = block_bytes
        self._blocks = region_bytes // block_bytes
        self._rng = rng
        self._is_random = is_random
        self._position = 0
        self._order: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def take(self, count: int) -> npt.NDArray[np.uint64]:
        if not self._is_random:
            blocks = (self._position + np.arange(count)) % self._blocks
            self._position = int(self._position + count) % self._blocks
            return (blocks * self._block_bytes).astype(np.uint64)
        if self._blocks > _PERMUTE_MAX:
            drawn = self._rng.integers(0, self._blocks, count)
            return (drawn * self._block_bytes).astype(np.uint64)
        parts: list[npt.NDArray[np.int64]] = []
        while count:
            if self._position == len(self._order):
                self._order, self._position = self._rng.permutation(self._blocks), 0
            part = self._order[self._position : self._position + count]
            self._position += len(part)
            count -= len(part)
            parts.append(part)
        return (np.concatenate(parts) * self._block_bytes).astype(np.uint64)


class _SplitOffsets:
    """Offsets of one direction with mixed block sizes; random ones may repeat."""

    def __init__(
        self, split: Split, region_bytes: int, rng: np.random.Generator, *, is_random: bool
    ) -> None:
        self._sizes = np.array([size for size, _ in split], np.int64)
        shares = np.array([share for _, share in split], np.float64)
        self._shares = shares / shares.sum()
        self._region_bytes = region_bytes
        self._rng = rng
        self._is_random = is_random
        self._position = 0

    def take(self, count: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        sizes = self._rng.choice(self._sizes, count, p=self._shares)
        if self._is_random:
            blocks = self._rng.integers(0, self._region_bytes // sizes)
            return (blocks * sizes).astype(np.uint64), sizes
        offsets = np.empty(count, np.uint64)
        for i, size in enumerate(sizes.tolist()):
            if self._position + size > self._region_bytes:
                self._position = 0
            offsets[i] = self._position
            self._position += size
        return offsets, sizes


class Pattern:
    """The endless sequence of one clone; equal seeds give equal sequences."""

    def __init__(self, job: JobSpec, region_bytes: int, seed: int, base: int = 0) -> None:
        self._base = np.uint64(base)
        self._rng = np.random.default_rng([job.randseed, seed])
        self._mix = job.rwmixread / 100.0 if job.reads and job.writes else float(job.reads)
        self._sides: list[_Offsets | _SplitOffsets] = []
        for side in (0, 1):  # read, write
            if job.bssplit is not None:
                self._sides.append(
                    _SplitOffsets(
                        job.bssplit[side], region_bytes, self._rng, is_random=job.is_random
                    )
                )
            else:
                self._sides.append(
                    _Offsets(job.bs[side], region_bytes, self._rng, is_random=job.is_random)
                )
        self._bs = job.bs
        self._offsets: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
        self._sizes: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._is_read: npt.NDArray[np.bool_] = np.empty(0, np.bool_)
        self._position = 0

    def take(
        self, count: int
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return up to ``count`` (offset, size, is_read) as parallel arrays, at least one."""
        if self._position == len(self._offsets):
            self._refill()
        part = slice(self._position, self._position + count)
        self._position = min(part.stop, len(self._offsets))
        return self._offsets[part], self._sizes[part], self._is_read[part]

    def offsets(self, count: int) -> npt.NDArray[np.uint64] | None:
        """Return exactly ``count`` offsets of a job of one direction and size, None at an end."""
        start = self._position
        if start + count > len(self._offsets):
            return None
        self._position = start + count
        return self._offsets[start : start + count]

    def put_back(self, count: int) -> None:
        """Take back the last ``count`` of the latest `take`: they come again."""
        assert count <= self._position
        self._position -= count

    def _refill(self) -> None:
        if self._mix in (0.0, 1.0):
            is_read = np.full(_CHUNK, self._mix == 1.0)
        else:
            is_read = self._rng.random(_CHUNK) < self._mix
        self._offsets = np.empty(_CHUNK, np.uint64)
        self._sizes = np.empty(_CHUNK, np.int64)
        for side, mask in ((0, is_read), (1, ~is_read)):
            count = int(mask.sum())
            if not count:
                continue
            source = self._sides[side]
            if isinstance(source, _SplitOffsets):
                self._offsets[mask], self._sizes[mask] = source.take(count)
            else:
                self._offsets[mask] = source.take(count)
                self._sizes[mask] = self._bs[side]
        self._offsets += self._base
        self._is_read = is_read
        self._position = 0
