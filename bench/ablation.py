"""The rows of the ablation, each adding one option to the row above, and their interleaving."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

REPEATS_MIN = 3


@dataclass(frozen=True, slots=True)
class Variant:
    """What a row changes: the engine and the three options."""

    options: str
    engine: str
    keep_copy: bool = False
    write_through: bool = False
    inclusive_host: bool = False


def ablation_variants(engine: str = "io_uring") -> list[Variant]:
    """Return the rows in order; the rows below the engines use ``engine``.

    Where io_uring is refused, its row is left out and ``engine`` is ``threads``.
    """
    serial = Variant("serial baseline", "serial")
    threads = Variant("parallel I/O (threads)", "threads")
    ring = Variant("parallel I/O (io_uring)", "io_uring")
    keep = Variant("+ keep copy", engine, keep_copy=True)
    through = replace(keep, options="+ write-through", write_through=True)
    inclusive = replace(through, options="+ inclusive host", inclusive_host=True)
    first = [serial, threads, ring] if engine == "io_uring" else [serial, threads]
    return [*first, keep, through, inclusive]


def interleave(variants: Sequence[Variant], repeats: int) -> Iterator[tuple[int, int, Variant]]:
    """Yield (repeat, row, variant) as A B C A B C, so that slow drift hits all rows alike."""
    for repeat in range(repeats):
        for row, variant in enumerate(variants):
            yield repeat, row, variant
