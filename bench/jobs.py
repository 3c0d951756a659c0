"""Jobs in fio's words: every option once, for the command line and for job files.

``OPTIONS`` is the one table: a key, how its text becomes a value, and a line of help. Values keep
fio's meaning and fio's units (``k``, ``m``, ``g`` are powers of 1024, times are seconds unless a
unit is given). Options that fio has and that are always so here are taken and have no effect.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from kvstore.config import ALIGNMENT_BYTES, IO_THREADS_MAX, IoClass

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

RW_MODES = ("read", "write", "randread", "randwrite", "rw", "randrw")
RW_ALIASES = {"readwrite": "rw"}
ENGINES = ("io_uring", "threads", "serial", "simulated")
PRIOS = ("auto", "read", "required", "background")
POLICIES = ("kvstore", "upstream", "fifo")
VERIFY_MODES = ("none", "xxh3")
VERIFY_ALIASES = {"0": "none", "xxhash": "xxh3", "xxh3-64": "xxh3"}
MEMORY_KINDS = ("auto", "huge", "small")
RATE_PROCESSES = ("linear", "poisson")

Pair = tuple[int, int]
Split = tuple[tuple[int, float], ...]


class JobError(Exception):
    """A bad option or job-file key: ``field`` says which, ``str()`` is the whole line."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message

    def at(self, where: str) -> JobError:
        """Return the same error with a place in front of the field."""
        return JobError(f"{where}{self.field}", self.message)


def _bad(message: str, text: str) -> ValueError:
    return ValueError(f"{message}, got {text!r}")


_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?$", re.IGNORECASE)
_SIZE_UNITS = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": 1 << 40}
_TIME = re.compile(r"^(\d+(?:\.\d+)?)\s*(us|ms|s|m|h|d)?$", re.IGNORECASE)
_TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_size(text: str) -> int:
    """Return bytes: ``4096``, ``4k``, ``1m``, ``2g``, ``1MiB``; always powers of 1024."""
    found = _SIZE.match(text.strip())
    if not found:
        raise _bad("must be a size such as 4096, 64k, 1m or 2g", text)
    return int(float(found[1]) * _SIZE_UNITS[found[2].lower()])


def parse_file_size(text: str) -> int:
    """Return bytes above 0, as `parse_size`."""
    size = parse_size(text)
    if size == 0:
        raise _bad("must be above 0", text)
    return size


def parse_time(text: str) -> float:
    """Return seconds: ``10``, ``500ms``, ``2m``."""
    found = _TIME.match(text.strip())
    if not found:
        raise _bad("must be a time such as 10, 500ms or 2m", text)
    return float(found[1]) * _TIME_UNITS[(found[2] or "s").lower()]


def parse_flag(text: str) -> bool:
    """Return a switch: a bare key, 1/0, true/false, yes/no."""
    word = text.strip().lower()
    if word in ("", "1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise _bad("must be 0 or 1", text)


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """Return a parser of whole numbers in ``low..high``."""

    def parse(text: str) -> int:
        bound = (
            f"must be a whole number in {low}..{high}"
            if high is not None
            else (f"must be a whole number of at least {low}")
        )
        try:
            value = int(text)
        except ValueError:
            raise _bad(bound, text) from None
        if value < low or (high is not None and value > high):
            raise _bad(bound, text)
        return value

    return parse


def number(low: float) -> Callable[[str], float]:
    """Return a parser of finite numbers of at least ``low``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise _bad("must be a number", text) from None
        if not math.isfinite(value) or value < low:
            raise _bad(f"must be a number of at least {low:g}", text)
        return value

    return parse


def choice(
    choices: tuple[str, ...], aliases: Mapping[str, str] | None = None
) -> Callable[[str], str]:
    """Return a parser that takes one of ``choices``, or an alias of one."""

    def parse(text: str) -> str:
        word = (aliases or {}).get(text.strip(), text.strip())
        if word not in choices:
            raise _bad(f"must be one of {', '.join(choices)}", text)
        return word

    return parse


def parse_block_size(text: str) -> Pair:
    """Return (read, write) block sizes: ``64k`` for both, or ``64k,1m``."""
    parts = text.split(",")
    if len(parts) > 2:
        raise _bad("must be one size, or read,write", text)
    sizes = [parse_size(part) if part else 0 for part in parts]
    read = sizes[0] or sizes[-1]
    write = sizes[1] if len(sizes) == 2 and sizes[1] else read
    for size in (read, write):
        _check_block(size, text)
    return read, write


def _check_block(size: int, text: str) -> None:
    if size <= 0 or size % ALIGNMENT_BYTES:
        raise _bad(f"must be a multiple of {ALIGNMENT_BYTES}", text)
    if size > GIB:
        raise _bad("must be at most 1g", text)


def _parse_split(text: str) -> Split:
    entries: list[tuple[int, float | None]] = []
    for part in text.split(":"):
        size_text, _, share_text = part.partition("/")
        size = parse_size(size_text)
        _check_block(size, size_text)
        share = number(0.0)(share_text) if share_text else None
        entries.append((size, share))
    given = sum(share for _, share in entries if share is not None)
    blanks = sum(1 for _, share in entries if share is None)
    if given > 100.0 + 1e-9 or (not blanks and abs(given - 100.0) > 1e-9):
        raise _bad("the percentages must add up to 100", text)
    rest = (100.0 - given) / blanks if blanks else 0.0
    return tuple((size, rest if share is None else share) for size, share in entries)


def parse_bssplit(text: str) -> tuple[Split, Split]:
    """Return the splits of reads and writes: ``4k/50:64k/50``, or two with a comma between."""
    parts = text.split(",")
    if len(parts) > 2 or not parts[0]:
        raise _bad("must be size/percent:..., or read,write", text)
    read = _parse_split(parts[0])
    return read, (_parse_split(parts[1]) if len(parts) == 2 else read)


def _pair(parse: Callable[[str], int]) -> Callable[[str], Pair]:
    def parse_pair(text: str) -> Pair:
        parts = text.split(",")
        if len(parts) > 2:
            raise _bad("must be one value, or read,write", text)
        read = parse(parts[0]) if parts[0] else 0
        if len(parts) == 1:
            return read, read
        return read, parse(parts[1]) if parts[1] else 0

    return parse_pair


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """One job as written, before it is cloned ``numjobs`` times. Sizes are bytes, times seconds."""

    name: str = "job"
    rw: str = "read"
    bs: Pair = (4 * KIB, 4 * KIB)
    bssplit: tuple[Split, Split] | None = None
    directory: str = ""
    filename: str | None = None
    size: int = 0
    iodepth: int = 1
    queue_ahead: int = 0
    numjobs: int = 1
    rwmixread: int = 50
    rate: Pair = (0, 0)
    rate_iops: Pair = (0, 0)
    rate_process: str = "linear"
    runtime: float = 0.0
    time_based: bool = False
    ramp_time: float = 0.0
    direct: bool = True
    ioengine: str = "io_uring"
    prio: str = "auto"
    deadline_ms: float = 0.0
    verify: str = "none"
    group_reporting: bool = False
    stonewall: bool = False
    randseed: int = 1
    policy: str = "kvstore"
    disk_io_threads: int = 16
    kernel_rings: int = 1
    inflight_bytes: int = 0
    required_inflight_bytes: int = 0
    background_inflight_bytes: int = 0
    background_bytes_max: int = 0
    read_piece_bytes: int = 0
    write_piece_bytes: int = 0
    memory: str = "auto"

    @property
    def is_random(self) -> bool:
        """Whether offsets are drawn at random."""
        return self.rw.startswith("rand")

    @property
    def reads(self) -> bool:
        """Whether the job reads at all."""
        return self.rw not in ("write", "randwrite")

    @property
    def writes(self) -> bool:
        """Whether the job writes at all."""
        return self.rw not in ("read", "randread")

    @property
    def slots(self) -> int:
        """How many transfers one clone keeps open, and so how many buffers it has."""
        return self.iodepth + self.queue_ahead

    @property
    def block_bytes_max(self) -> int:
        """The largest block, which is what one buffer must hold."""
        if self.bssplit is None:
            return max(self.bs)
        return max(size for split in self.bssplit for size, _ in split)

    def io_class(self, *, is_read: bool) -> IoClass:
        """Return the class of a transfer: by direction, unless ``prio`` names one."""
        if self.prio == "auto":
            return IoClass.READ if is_read else IoClass.REQUIRED
        return IoClass[self.prio.upper()]


@dataclass(frozen=True, slots=True)
class Option:
    """One key: how its text becomes a value, whether a bare key is enough, and its help."""

    parse: Callable[[str], Any]
    help: str
    is_flag: bool = False


OPTIONS: dict[str, Option] = {
    "name": Option(str, "name of the job; each further --name starts another job"),
    "rw": Option(choice(RW_MODES, RW_ALIASES), f"{' | '.join(RW_MODES)} (default read)"),
    "bs": Option(parse_block_size, "block size, or read,write (default 4k); a multiple of 4096"),
    "bssplit": Option(parse_bssplit, "mixed block sizes: size/percent:..., or read,write"),
    "directory": Option(str, "the only place where files are made; needed"),
    "filename": Option(str, "file inside the directory, shared by all clones (default: one each)"),
    "size": Option(parse_file_size, "bytes of the file, and to transfer unless time_based"),
    "iodepth": Option(integer(1, 65536), "transfers kept open per job (default 1)"),
    "queue_ahead": Option(
        integer(0, 65536), "transfers waiting in the engine beyond iodepth (default 0, as fio)"
    ),
    "numjobs": Option(integer(1, 1024), "clones of the job (default 1)"),
    "rwmixread": Option(integer(0, 100), "percent of reads in rw and randrw (default 50)"),
    "rate": Option(_pair(parse_size), "bytes per second at most, or read,write"),
    "rate_iops": Option(_pair(integer(0)), "transfers per second at most, or read,write"),
    "rate_process": Option(choice(RATE_PROCESSES), "linear | poisson arrivals under a rate"),
    "runtime": Option(parse_time, "stop after this time"),
    "time_based": Option(
        parse_flag, "run for the whole runtime, over and over the file", is_flag=True
    ),
    "ramp_time": Option(parse_time, "run this long before anything is counted"),
    "direct": Option(parse_flag, "1: O_DIRECT (default), 0: through the page cache", is_flag=True),
    "ioengine": Option(choice(ENGINES), f"{' | '.join(ENGINES)} (default io_uring)"),
    "prio": Option(choice(PRIOS), "class: read | required | background (default by direction)"),
    "deadline_ms": Option(number(0.0), "deadline of each transfer (default: the engine's 30 s)"),
    "verify": Option(
        choice(VERIFY_MODES, VERIFY_ALIASES), "xxh3: seal every write, check every read"
    ),
    "group_reporting": Option(parse_flag, "one report per group, not per clone", is_flag=True),
    "stonewall": Option(parse_flag, "wait for the jobs before this one", is_flag=True),
    "randseed": Option(integer(0), "seed of offsets, mix and arrivals (default 1)"),
    "policy": Option(
        choice(POLICIES), "kvstore | upstream | fifo (one ring, no classes, no bounds)"
    ),
    "disk_io_threads": Option(
        integer(1, IO_THREADS_MAX), "workers of the threads engine (default 16)"
    ),
    "kernel_rings": Option(integer(1, 3), "io_urings that carry the classes: 1 | 3"),
    "inflight_bytes": Option(parse_size, "bytes in the device at most (default 16m)"),
    "required_inflight_bytes": Option(parse_size, "of required writes (default 8m)"),
    "background_inflight_bytes": Option(parse_size, "of background writes (default 4m)"),
    "background_bytes_max": Option(
        parse_size, "background bytes not yet written; more is skipped (default 1g)"
    ),
    "read_piece_bytes": Option(parse_size, "largest read piece (default 4m)"),
    "write_piece_bytes": Option(parse_size, "largest write piece (default 1m)"),
    "memory": Option(choice(MEMORY_KINDS), "huge | small pages under the buffers (auto: as given)"),
}

#: fio's other spellings of our keys.
SYNONYMS = {"readwrite": "rw", "blocksize": "bs", "wait_for_previous": "stonewall"}

#: Keys of fio job files that are always so here, or that mean nothing here.
IMPLIED = frozenset(
    [
        "thread",
        "fixedbufs",
        "registerfiles",
        "nonvectored",
        "norandommap",
        "invalidate",
        "fallocate",
        "iomem",
        "refill_buffers",
        "scramble_buffers",
        "randrepeat",
        "overwrite",
        "create_on_open",
        "description",
    ]
)

#: Of these, the ones that fio takes without a value.
BARE = frozenset(["thread", "fixedbufs", "registerfiles", "norandommap", "refill_buffers"])


def option_value(key: str, text: str) -> tuple[str, Any] | None:
    """Return (field, value) of one key, None for a key that is always so here.

    Raises: JobError: unknown key, or a value that does not fit.
    """
    field = SYNONYMS.get(key, key).replace("-", "_")
    if field in IMPLIED:
        return None
    option = OPTIONS.get(field)
    if option is None:
        near = difflib.get_close_matches(field, OPTIONS, n=1)
        raise JobError(key, f"no such option{f', did you mean {near[0]}?' if near else ''}")
    if not text and not option.is_flag:
        raise JobError(key, "needs a value")
    try:
        return field, option.parse(text)
    except ValueError as error:
        raise JobError(key, str(error)) from None


def check_job(job: JobSpec) -> JobSpec:
    """Check the fields against each other and return the job.

    Raises: JobError naming the field at fault.
    """
    if not job.directory:
        raise JobError("directory", "needed: files are made there and nowhere else")
    if job.time_based and not job.runtime:
        raise JobError("time_based", "needs a runtime")
    if job.kernel_rings not in (1, 3):
        raise JobError("kernel_rings", f"must be 1 or 3, got {job.kernel_rings}")
    if job.verify != "none":
        if job.bssplit is not None or job.bs[0] != job.bs[1]:
            raise JobError("verify", "needs one block size")
        if job.bs[0] < 2 * ALIGNMENT_BYTES:
            raise JobError("verify", "needs blocks of at least 8k: 4k of each hold the header")
    if job.size and job.size < job.block_bytes_max:
        raise JobError("size", f"must hold one block of {job.block_bytes_max} bytes")
    for name in ("read_piece_bytes", "write_piece_bytes"):
        value = getattr(job, name)
        if value and (value % ALIGNMENT_BYTES or value > 4 * MIB):
            raise JobError(name, f"must be a multiple of 4096 and at most 4m, got {value}")
    if job.prio == "background" and job.ioengine == "serial":
        raise JobError("prio", "the serial engine has no classes")
    return job


def job_from(values: Mapping[str, Any]) -> JobSpec:
    """Build and check a job from parsed values.

    Raises: JobError.
    """
    known = {field.name for field in fields(JobSpec)}
    assert set(values) <= known, set(values) - known
    return check_job(replace(JobSpec(), **values))


def groups_of(jobs: list[JobSpec]) -> list[list[JobSpec]]:
    """Cut the jobs at each ``stonewall`` into groups that run one after the other."""
    groups: list[list[JobSpec]] = []
    for job in jobs:
        if not groups or job.stonewall:
            groups.append([])
        groups[-1].append(job)
    return groups


def size_text(count: int) -> str:
    """Return a size as fio writes it in job options: ``64k``, ``1m``."""
    for unit, factor in (("g", GIB), ("m", MIB), ("k", KIB)):
        if count >= factor and count % factor == 0:
            return f"{count // factor}{unit}"
    return str(count)


def job_options(job: JobSpec) -> dict[str, str]:
    """Return the options that differ from the defaults as fio's ``job options`` strings."""
    plain = JobSpec()
    options: dict[str, str] = {}
    for field in fields(JobSpec):
        value = getattr(job, field.name)
        if value == getattr(plain, field.name) and field.name not in (
            "name",
            "rw",
            "bs",
            "ioengine",
        ):
            continue
        options[field.name] = _option_text(field.name, value)
    return options


def _option_text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if name == "bssplit":
        read, write = (
            ":".join(f"{size_text(size)}/{share:g}" for size, share in half) for half in value
        )
        return read if read == write else f"{read},{write}"
    if name in ("bs", "rate", "rate_iops"):
        show = str if name == "rate_iops" else size_text
        return show(value[0]) if value[0] == value[1] else f"{show(value[0])},{show(value[1])}"
    if name == "size" or name.endswith("_bytes"):
        return size_text(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
