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
    protected_copy_fraction: float | None = None
    write_policy: str | None = None
    eviction_policy: str | None = None


def choose_rows(rows: str, engine: str = "io_uring") -> list[Variant]:
    """Return the rows of ``--rows``: what is compared with what."""
    return {
        "stacked": ablation_variants,
        "each": each_variants,
        "fractions": fraction_variants,
        "policies": policy_variants,
    }[rows](engine)


def each_variants(engine: str) -> list[Variant]:
    """Return each option alone and all of them together."""
    plain = Variant("all off", engine)
    return [
        plain,
        replace(plain, options="keep copy", keep_copy=True),
        replace(plain, options="write-through", write_through=True),
        replace(plain, options="inclusive host", inclusive_host=True),
        _all_on("all on", engine),
    ]


def fraction_variants(engine: str) -> list[Variant]:
    """Return all options on, with three shares of protected disk copies (INV-506)."""
    return [
        replace(_all_on(f"fraction {fraction:g}", engine), protected_copy_fraction=fraction)
        for fraction in (0.0, 0.25, 1.0)
    ]


def policy_variants(engine: str) -> list[Variant]:
    """Return eviction policies and write admission, with all options on (INV-409)."""
    return [
        replace(
            _all_on(f"{policy}, write {admission}", engine),
            eviction_policy=policy,
            write_policy=admission,
        )
        for policy in ("lru", "s3fifo")
        for admission in ("all", "selective")
    ]


def _all_on(options: str, engine: str) -> Variant:
    return Variant(options, engine, keep_copy=True, write_through=True, inclusive_host=True)


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
