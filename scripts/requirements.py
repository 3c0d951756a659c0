"""Print the packages that pyproject.toml asks for, one a line: run-time ones and named extras.

The Makefile installs them before kvstore itself, so that a changed C file costs a compilation
and nothing else. Usage: python scripts/requirements.py EXTRA[,EXTRA...]
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def requirements(extras: list[str]) -> list[str]:
    """Return the run-time dependencies and those of ``extras``, extras of extras resolved."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    pending, found = list(project["dependencies"]), []
    for extra in extras:
        pending += project["optional-dependencies"][extra]
    while pending:
        line = pending.pop(0)
        inner = re.fullmatch(rf"{project['name']}\[([\w,-]+)\]", line)
        if inner is None:
            found.append(line)
            continue
        for extra in inner[1].split(","):
            pending += project["optional-dependencies"][extra]
    return sorted(set(found))


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1].split(","))))
