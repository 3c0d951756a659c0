"""Job lists from fio's two notations: INI job files and the command line.

Both follow fio: ``[global]`` (or options before the first ``--name``) gives defaults for the
jobs after it, a bare key is a switch, ``;`` and ``#`` start comments, sections may repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .jobs import BARE, OPTIONS, JobError, JobSpec, job_from, option_value


def parse_job_text(text: str, source: str, defaults: dict[str, Any] | None = None) -> list[JobSpec]:
    """Return the jobs of one INI text; ``defaults`` stand under its ``[global]``.

    Raises: JobError with file, line and key.
    """
    shared = dict(defaults or {})
    jobs: list[tuple[int, dict[str, Any]]] = []
    section: dict[str, Any] | None = None
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line or line[0] in ";#":
            continue
        where = f"{source}:{number}: "
        if line.startswith("["):
            if not line.endswith("]") or len(line) < 3:
                raise JobError(f"{where}{line}", "not a section")
            name = line[1:-1].strip()
            if name == "global":
                section = shared
            else:
                section = {**shared, "name": name}
                jobs.append((number, section))
            continue
        if section is None:
            raise JobError(f"{where}{line}", "stands before the first [section]")
        key, _, value = line.partition("=")
        try:
            found = option_value(key.strip(), value.strip())
        except JobError as error:
            raise error.at(where) from None
        if found is not None:
            section[found[0]] = found[1]
    if not jobs:
        raise JobError(source, "holds no job")
    return [_job(values, f"{source}:{number}: ") for number, values in jobs]


def _job(values: dict[str, Any], where: str) -> JobSpec:
    try:
        return job_from(values)
    except JobError as error:
        raise error.at(where) from None


def read_job_file(path: str, defaults: dict[str, Any] | None = None) -> list[JobSpec]:
    """Read and parse one job file.

    Raises: JobError: unreadable, or wrong inside.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise JobError(path, f"cannot read job file: {reason}") from None
    return parse_job_text(text, path, defaults)


#: Options of the run as a whole, not of a job: their names and whether they take a value.
RUN_OPTIONS = ("output", "output-format", "eta", "loop")


def parse_command_line(arguments: Sequence[str]) -> tuple[list[JobSpec], dict[str, str]]:
    """Return (jobs, options of the run) from a fio command line.

    ``--key=value`` and ``--key value`` are the same; each ``--name`` starts a job; options before
    the first are defaults for all jobs, job files among them. Without any ``--name`` and without
    job files, the options make up one job.

    Raises: JobError.
    """
    shared: dict[str, Any] = {}
    run: dict[str, str] = {}
    named: list[dict[str, Any]] = []
    files: list[str] = []
    position = 0
    while position < len(arguments):
        word = arguments[position]
        position += 1
        if not word.startswith("--"):
            files.append(word)
            continue
        key, has_value, text = word[2:].partition("=")
        takes_none = key in BARE or (key in OPTIONS and OPTIONS[key].is_flag)
        if not has_value and not takes_none and _is_value(arguments, position):
            text = arguments[position]
            position += 1
        try:
            if key.replace("_", "-") in RUN_OPTIONS:
                run[key.replace("_", "-")] = _needed(key, text)
                continue
            found = option_value(key, text)
        except JobError as error:
            raise error.at("--") from None
        if found is None:
            continue
        if found[0] == "name":
            named.append(dict(shared))
        (named[-1] if named else shared)[found[0]] = found[1]
    jobs = [job for path in files for job in read_job_file(path, shared)]
    jobs += [_job(values, "--") for values in named]
    if not jobs:
        jobs = [_job(shared, "--")]
    return jobs, run


def _is_value(arguments: Sequence[str], position: int) -> bool:
    return position < len(arguments) and not arguments[position].startswith("--")


def _needed(key: str, text: str) -> str:
    if not text:
        raise JobError(key, "needs a value")
    return text
