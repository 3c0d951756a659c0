"""The command group: lazy subcommands, and every error as one line with exit status 2."""

from __future__ import annotations

import sys

import click
import pytest
from click.testing import CliRunner
from kvstore_bench.cli import COMMANDS, LazyGroup, cli, error_line
from kvstore_bench.options import format_size, parse_size

from kvstore.errors import ConfigError


def fails(*args: str) -> str:
    result = CliRunner().invoke(cli, list(args))
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    return lines[0]


def test_unknown_command_is_one_line():
    """An unknown subcommand is named together with those that exist."""
    assert fails("nonsense").startswith("kvstore-bench: error: nonsense: no such command")


def test_no_command_is_one_line():
    """No subcommand at all is an error that names the possible ones."""
    assert "replay" in fails()


def test_unknown_option_of_the_group_is_one_line():
    """An unknown option of the group is named."""
    assert fails("--bogus").startswith("kvstore-bench: error: --bogus: ")


def test_unknown_option_of_a_subcommand_is_one_line():
    """An unknown option of a subcommand is named."""
    assert fails("replay", "--bogus").startswith("kvstore-bench: error: --bogus: ")


def test_option_without_its_value_is_one_line():
    """A missing value names the option."""
    assert fails("replay", "--seed").startswith("kvstore-bench: error: --seed: ")


def test_word_where_a_number_belongs_is_one_line():
    """A value of the wrong kind names the option."""
    assert fails("replay", "--seed", "x").startswith("kvstore-bench: error: --seed: ")


def test_config_error_names_its_field_once():
    """A ConfigError of the store keeps its field and does not repeat it."""
    line = error_line(ConfigError("page_bytes: must be at least 1, got 0", field="page_bytes"))
    assert line == "kvstore-bench: error: page_bytes: must be at least 1, got 0"


def test_missing_package_names_the_extra(monkeypatch):
    """A subcommand whose package is missing says what to install."""
    monkeypatch.setitem(COMMANDS, "io", "a_missing_package.io:command")
    assert "install 'kvstore[bench]'" in fails("io")


def test_subcommands_are_loaded_lazily(monkeypatch):
    """Building the group imports no subcommand."""
    monkeypatch.setitem(COMMANDS, "io", "kvstore_bench.never_there:command")
    assert "kvstore_bench.never_there" not in sys.modules
    group = LazyGroup(name="x")
    assert "io" in group.list_commands(click.Context(group))


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("4096", 4096), ("64k", 65536), ("64M", 64 << 20), ("1GiB", 1 << 30), ("2tb", 2 << 40)],
)
def test_sizes(text, size_bytes):
    """Sizes take binary units with and without their ending."""
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "-1", "1.5g", "64q", "m"])
def test_no_sizes(text):
    """What is no size raises."""
    with pytest.raises(ValueError, match="must be a size"):
        parse_size(text)


def test_format_size():
    """Sizes are printed with binary units."""
    assert format_size(64 << 20) == "64 MiB"
    assert format_size(1536) == "1.50 KiB"
    assert format_size(10) == "10 B"
