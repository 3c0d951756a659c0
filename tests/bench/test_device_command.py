"""``kvstore-bench device``: options, one-line errors, and measurements over a stand-in driver."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FAKE = Path(__file__).parents[1] / "gpu" / "fake_libcuda.c"


def _run(*options: str, library: str = "none.so") -> subprocess.CompletedProcess[str]:
    import os

    environment = {**os.environ, "KVSTORE_LIBCUDA": library}
    return subprocess.run(
        [sys.executable, "-m", "kvstore_bench", "device", *options],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("options", "name"),
    [(("--only", "B99"), "--only"), (("--device", "cpu"), "--device"), ((), "--device")],
)
def test_bad_input_is_one_line(options: tuple[str, ...], name: str) -> None:
    """A wrong option, or a machine without a GPU, is one line and exit status 2."""
    done = _run(*options)
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"kvstore-bench: error: {name}")


def test_measurements_run_and_are_saved(tmp_path: Path) -> None:
    """Copies, gate and event bridge run through their whole code and land in the JSON."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in driver")
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", library, FAKE, "-lpthread"], check=True
    )
    output = tmp_path / "out.json"
    done = _run("--quick", "--only", "B1,B6,B7", "--output", str(output), library=str(library))
    assert done.returncode == 0, done.stderr
    report = json.loads(output.read_text(encoding="utf-8"))
    assert {"B1", "B6", "B7"} == set(report["results"])
    assert report["results"]["B1"]["gb_s"]["median"] > 0
    assert report["results"]["B7"]["gil_hog_us"]["p50"] > 0
    assert report["device"]["caps"]["memops64"]
