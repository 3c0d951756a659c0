"""The command ``kvstore``: doctor, fsck, inspect, top.

It looks and reports; it changes nothing outside the directory it is given. Exit codes: 0 all is
well, 1 something was found, 2 the question could not be answered, with one line that says why.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import fcntl
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

import xxhash

from kvstore.config import HEADER_BYTES
from kvstore.doctor import calibrate, examine
from kvstore.errors import FormatError, KVStoreError
from kvstore.tiers import disk_format

FSCK_STATES = ("good", "free", "stale", "damaged_header", "damaged_payload")
DAMAGED = ("damaged_header", "damaged_payload")
CLEAR_SCREEN = "\x1b[H\x1b[2J"


class CommandError(Exception):
    """The question cannot be answered; the message is the one line to show."""


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _table(rows: Sequence[Sequence[str]], out: TextIO) -> None:
    """Print rows in columns; the last column is not padded."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print("  ".join([*cells, row[-1]]).rstrip(), file=out)


# ---------------------------------------------------------------------------------------- doctor


def _doctor(options: argparse.Namespace, out: TextIO) -> int:
    directory = Path(options.directory)
    if not directory.is_dir():
        raise CommandError(f"--directory: {directory} is not a directory")
    report = examine(directory)
    if options.calibrate:
        report["calibration"] = asyncio.run(calibrate(directory, options.size_bytes))
    if options.json:
        print(json.dumps(report, indent=2), file=out)
        return 0
    rows = [(check["name"], check["status"], check["text"]) for check in report["checks"]]
    _table(rows, out)
    use = report["store"]
    print(f"\nA store on {directory} would use: {use['text']}", file=out)
    if options.calibrate:
        found = report["calibration"]
        print(f"\n{found['text']}", file=out)
        _table([(f"  {name}", str(value)) for name, value in found["proposal"].items()], out)
        print("\nReads of 1 MiB against bytes in flight:", file=out)
        _table(
            [
                ("  in flight MiB", "MB/s", "p50 ms", "p99 ms"),
                *(
                    (
                        f"  {point['inflight_bytes'] >> 20}",
                        f"{point['read_bytes_per_s'] / 1e6:.0f}",
                        f"{point['read_ns_p50'] / 1e6:.2f}",
                        f"{point['read_ns_p99'] / 1e6:.2f}",
                    )
                    for point in found["reads"]
                ),
            ],
            out,
        )
    return 0


# ------------------------------------------------------------------------------ fsck and inspect


class _SlotFile:
    """One slot file, opened for reading only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        self.size_bytes = os.fstat(self._fd).st_size
        try:
            self.superblock = disk_format.Superblock.decode(self.read(0, 4096))
        except BaseException:
            self.close()
            raise

    def read(self, offset: int, length: int) -> bytes:
        """Read ``length`` bytes, fewer only at the end of the file."""
        parts = []
        while length and (part := os.pread(self._fd, min(length, 1 << 26), offset)):
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return b"".join(parts)

    def slots(self) -> Iterator[tuple[int, str, disk_format.SlotHeader | None]]:
        """Yield (index, state, header) for every slot; payloads are read where a header is good.

        ``stale`` is a sound slot of another epoch or model, or a partial tail: a restart takes none
        of them in.
        """
        block = self.superblock
        for index in range(block.slot_count):
            offset = disk_format.slot_offset(index, block.slot_bytes)
            state, header = self._check(offset)
            os.posix_fadvise(self._fd, offset, block.slot_bytes, os.POSIX_FADV_DONTNEED)
            yield index, state, header

    def _check(self, offset: int) -> tuple[str, disk_format.SlotHeader | None]:
        block = self.superblock
        raw = self.read(offset, HEADER_BYTES)
        if not any(raw[:8]):
            return "free", None
        try:
            header = disk_format.decode_header(raw)
        except FormatError:
            return "damaged_header", None
        identity = header.identity
        if identity.payload_bytes > block.slot_bytes - HEADER_BYTES:
            return "damaged_header", header
        if identity.checksum_algorithm == disk_format.CHECKSUM_XXH3_64:
            payload = self.read(offset + HEADER_BYTES, identity.payload_bytes)
            if xxhash.xxh3_64_intdigest(payload) != header.payload_checksum:
                return "damaged_payload", header
        if not disk_format.fits_slot(header, block, block.page_bytes):
            return "stale", header
        return "good", header

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def _slot_paths(given: str) -> list[Path]:
    path = Path(given)
    if path.is_dir():
        paths = sorted(path.glob("*.slots"))
        if not paths:
            raise CommandError(f"{path}: no slot files (*.slots) here")
        return paths
    if path.is_file():
        return [path]
    raise CommandError(f"{path}: no such file or directory")


@contextlib.contextmanager
def _unused(given: str) -> Iterator[None]:
    """Hold the lock of the directory, shared, so that no store writes meanwhile (INV-923)."""
    path = Path(given)
    fd = os.open(path if path.is_dir() else path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise CommandError(f"{given}: in use by a running store") from None
    finally:
        os.close(fd)


def _check_file(path: Path, each: Callable[..., None] | None = None) -> dict[str, Any]:
    """Check one slot file and return what was found; ``damage`` lists it in words."""
    found: dict[str, Any] = {"path": str(path), "damage": []}
    try:
        file = _SlotFile(path)
    except FormatError as error:
        return found | {"damage": [str(error)]}
    with contextlib.closing(file):
        block = file.superblock
        found["superblock"] = {
            "version": disk_format.VERSION,
            "fingerprint": block.fingerprint.hex(),
            "slot_bytes": block.slot_bytes,
            "slot_count": block.slot_count,
            "page_bytes": block.page_bytes,
            "epoch": block.epoch,
            "pool_group": block.pool_group,
            "path_index": block.path_index,
            "path_count": block.path_count,
        }
        expected = disk_format.file_bytes(block.slot_count, block.slot_bytes)
        if file.size_bytes < expected:
            found["damage"].append(f"file has {file.size_bytes} bytes, needs {expected}")
        states: Counter[str] = Counter(dict.fromkeys(FSCK_STATES, 0))
        for index, state, header in file.slots():
            states[state] += 1
            if state in DAMAGED:
                found["damage"].append(f"slot {index}: {state.replace('_', ' ')}")
            if each is not None:
                each(index, state, header)
        found["slots"] = dict(states)
    return found


def _fsck(options: argparse.Namespace, out: TextIO) -> int:
    with _unused(options.path):
        files = [_check_file(path) for path in _slot_paths(options.path)]
    damaged = any(file["damage"] for file in files)
    if options.json:
        print(json.dumps({"files": files, "damaged": damaged}, indent=2), file=out)
        return int(damaged)
    for file in files:
        counts = ", ".join(
            f"{count} {state.replace('_', ' ')}" for state, count in file.get("slots", {}).items()
        )
        print(f"{file['path']}: {counts or 'not readable'}", file=out)
        for line in file["damage"][: options.limit]:
            print(f"  {line}", file=out)
        if len(file["damage"]) > options.limit:
            print(f"  and {len(file['damage']) - options.limit} more", file=out)
    if damaged:
        print("damage found; a store treats these slots as free or as misses", file=out)
    return int(damaged)


def _inspect(options: argparse.Namespace, out: TextIO) -> int:
    listed: list[dict[str, Any]] = []

    def each(index: int, state: str, header: disk_format.SlotHeader | None) -> None:
        entry: dict[str, Any] = {"slot": index, "state": state}
        if header is not None:
            identity = header.identity
            entry |= {
                "key": identity.key.hex(),
                "parent_key": identity.parent_key.hex(),
                "block_index": identity.block_index,
                "epoch": identity.epoch,
                "generation": identity.generation,
                "sequence": identity.sequence,
                "payload_bytes": identity.payload_bytes,
            }
        listed.append(entry)

    files = []
    with _unused(options.path):
        for path in _slot_paths(options.path):
            listed = []
            file = _check_file(path, each)
            if options.slots:
                file["entries"] = [entry for entry in listed if entry["state"] != "free"]
            files.append(file)
    if options.json:
        print(json.dumps({"files": files}, indent=2), file=out)
        return 0
    for file in files:
        print(file["path"], file=out)
        rows = [*file.get("superblock", {}).items(), *file.get("slots", {}).items()]
        _table([(f"  {name}", str(value)) for name, value in rows] or [("  ", "")], out)
        for line in file["damage"] if "superblock" not in file else ():
            print(f"  {line}", file=out)
        if file.get("entries"):
            heads = ("  slot", "state", "block", "epoch", "generation", "sequence", "key")
            names = ("slot", "state", "block_index", "epoch", "generation", "sequence", "key")
            _table(
                [heads, *(_entry_row(entry, names) for entry in file["entries"])],
                out,
            )
    return 0


def _entry_row(entry: dict[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    cells = [str(entry.get(name, "-")) for name in names]
    return (f"  {cells[0]}", *cells[1:-1], cells[-1][:16])


# ------------------------------------------------------------------------------------------- top


def _read_stats(path: Path) -> tuple[float, dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
        stats = json.loads(text)
        return path.stat().st_mtime, dict(stats)
    except FileNotFoundError:
        raise CommandError(f"{path}: no such file; a store writes it with write_stats()") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise CommandError(f"{path}: not a statistics file: {error}") from None


def _mib(count: float) -> str:
    return f"{count / (1 << 20):.1f}"


def render_top(before: dict[str, Any], now: dict[str, Any], seconds: float, out: TextIO) -> None:
    """Print one view: occupancy per pool, rates per path and per I/O class."""
    engine = now["engine"]
    print(
        f"health {now['health']}   engine {engine['engine'] or '-'}   "
        f"sessions {now['sessions_open']}   pages {now['pages']}   "
        f"lost {now['lost_pages']}   mismatches {engine['mismatches']}",
        file=out,
    )
    rows = [("pool", "total", "ready", "primary", "copies", "evicted/s", "dropped/s")]
    for name, pool in now["pools"].items():
        old = before["pools"].get(name, pool)
        rate = [(pool[key] - old[key]) / seconds for key in ("evicted", "dropped")]
        counts = [str(pool[key]) for key in ("total", "ready", "primaries", "copies")]
        rows.append((name, *counts, f"{rate[0]:.1f}", f"{rate[1]:.1f}"))
    print(file=out)
    _table(rows, out)
    if now["moved_bytes"]:
        print(file=out)
        _table(
            [("path", "MiB/s")]
            + [
                (path, _mib((count - before["moved_bytes"].get(path, 0)) / seconds))
                for path, count in now["moved_bytes"].items()
            ],
            out,
        )
    print(file=out)
    classes = [("class", "read MiB/s", "write MiB/s", "queued MiB", "wait p99 ms", "I/O p99 ms")]
    for name, counts in engine["classes"].items():
        old = before["engine"]["classes"].get(name, counts)
        classes.append(
            (
                name,
                _mib((counts["read_bytes"] - old["read_bytes"]) / seconds),
                _mib((counts["written_bytes"] - old["written_bytes"]) / seconds),
                _mib(counts["queued_bytes"]),
                f"{counts['queue_wait']['p99_ns'] / 1e6:.2f}",
                f"{counts['service']['p99_ns'] / 1e6:.2f}",
            )
        )
    _table(classes, out)


def _top(options: argparse.Namespace, out: TextIO) -> int:
    path = Path(options.path)
    written_at, before = _read_stats(path)
    if options.once:
        render_top(before, before, 1.0, out)
        return 0
    while True:
        time.sleep(options.interval)
        at, now = _read_stats(path)
        if out.isatty():
            out.write(CLEAR_SCREEN)
        render_top(before, now, max(at - written_at, options.interval), out)
        out.flush()
        written_at, before = at, now


# ------------------------------------------------------------------------------------------ main


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return value


def _size(text: str) -> int:
    units = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
    number, unit = (
        (text[:-1], units[text[-1:].lower()]) if text[-1:].lower() in units else (text, 1)
    )
    if not number.isdigit() or not int(number):
        raise argparse.ArgumentTypeError(f"must be a size such as 512m, got {text!r}")
    return int(number) * unit


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="kvstore", description=__doc__.split("\n", maxsplit=1)[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[..., int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        return command

    command = add("doctor", _doctor, "Say what this machine offers and what a store would use.")
    command.add_argument("--directory", default=".", help="where the slot files would lie")
    command.add_argument("--json", action="store_true", help="for scripts")
    command.add_argument(
        "--calibrate", action="store_true", help="measure the disk and propose values"
    )
    command.add_argument(
        "--size",
        dest="size_bytes",
        type=_size,
        default=256 << 20,
        help="bytes of the file that --calibrate writes and removes (256m)",
    )
    command = add("fsck", _fsck, "Check slot files: superblocks, headers, payload checksums.")
    command.add_argument("path", help="a cache directory, or one slot file")
    command.add_argument("--json", action="store_true", help="for scripts")
    command.add_argument("--limit", type=int, default=20, help="damaged slots to list per file")
    command = add("inspect", _inspect, "Show superblocks and what the slots hold.")
    command.add_argument("path", help="a cache directory, or one slot file")
    command.add_argument("--slots", action="store_true", help="list every slot in use")
    command.add_argument("--json", action="store_true", help="for scripts")
    command = add("top", _top, "Show the statistics file of a running store, again and again.")
    command.add_argument("path", help="the file that write_stats() keeps up to date")
    command.add_argument("--interval", type=_positive, default=2.0, help="seconds (2)")
    command.add_argument("--once", action="store_true", help="print one view and end")
    return parser


def main(arguments: Sequence[str] | None = None, out: TextIO | None = None) -> int:
    """Run a command and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options, out or sys.stdout))
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        message = name + (error.strerror or errno.errorcode.get(error.errno or 0, str(error)))
    except (CommandError, KVStoreError) as error:
        message = str(error)
    print(f"kvstore {options.command}: error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
