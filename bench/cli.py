"""The command ``kvstore-bench``: a click group that loads its subcommands when they are called.

Bad input of any kind ends as one line ``kvstore-bench: error: <option or field>: ...`` on
standard error with exit status 2, click's own usage errors included.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

try:
    import click
except ImportError:
    sys.stderr.write("kvstore-bench: error: click: not installed; install 'kvstore[bench]'\n")
    raise SystemExit(2) from None

from kvstore.errors import ConfigError

PROGRAM = "kvstore-bench"
INTERRUPTED = 130

#: Subcommand -> ``module:attribute`` of its click command; imported when it is called.
COMMANDS = {
    "replay": "kvstore_bench.replay:command",
    "io": "kvstore_bench.io:command",
    "compare": "kvstore_bench.compare:command",
    "mixed": "kvstore_bench.mixed:command",
    "meta": "kvstore_bench.meta:command",
    "device": "kvstore_bench.device:command",
    "report": "kvstore_bench.report:command",
}


def package_version() -> str:
    """Return the version of the installed distribution, ``unknown`` for a plain checkout."""
    try:
        return metadata.version("kvstore")
    except metadata.PackageNotFoundError:
        return "unknown"


def option_name(name: str) -> str:
    """Return a field's name as its option: ``page_bytes`` -> ``--page-bytes``."""
    return "--" + name.replace("_", "-")


def bad_option(name: str, message: str) -> click.BadParameter:
    """Return the error for an option whose value is well formed but cannot be used."""
    hint = name if name.startswith("-") else option_name(name)
    return click.BadParameter(message, param_hint=hint)


def error_line(error: click.ClickException | ConfigError) -> str:
    """Return the one line that reports ``error`` and names the option or field."""
    message = " ".join((str(error) if isinstance(error, ConfigError) else error.message).split())
    name = ""
    match error:
        case click.exceptions.NoArgsIsHelpError():
            name, message = "command", f"missing; one of {', '.join(COMMANDS)}, or --help"
        case ConfigError():
            field = getattr(error, "field", "")
            name, message = field, message.removeprefix(f"{field}: ")
        case click.NoSuchOption() | click.BadOptionUsage():
            name = error.option_name
        case click.BadParameter(param_hint=str(hint)) if hint:
            name = hint
        case click.BadParameter(param=click.Parameter() as param):
            name = " / ".join(param.opts) or (param.name or "")
        case click.FileError():
            name = error.ui_filename
        case click.UsageError() if error.ctx is not None:
            name = error.ctx.info_name or ""
    name = name.strip("'\"")
    if isinstance(error, click.MissingParameter) and not message:
        message = "missing"
    return f"{PROGRAM}: error: {name}: {message}" if name else f"{PROGRAM}: error: {message}"


class LazyGroup(click.Group):
    """A group whose subcommands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of `COMMANDS`."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a subcommand; None for an unknown name."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module_name, _, attribute = COMMANDS[cmd_name].partition(":")
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] in ("kvstore", "kvstore_bench"):
                raise click.UsageError(f"{cmd_name}: not available in this build") from error
            hint = f"{cmd_name}: needs {error.name}; install 'kvstore[bench]'"
            raise click.UsageError(hint) from error
        loaded = getattr(module, attribute)
        assert isinstance(loaded, click.Command)
        return loaded

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the subcommands that can be loaded, with their first line of help."""
        rows = []
        for name in self.list_commands(ctx):
            try:
                loaded = self.get_command(ctx, name)
            except click.UsageError:
                continue
            rows.append((name, loaded.get_short_help_str(90) if loaded else ""))
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Name the unknown subcommand itself in the error, not the program."""
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            hint = f"no such command; one of {', '.join(COMMANDS)}"
            raise click.BadParameter(hint, ctx=ctx, param_hint=args[0])
        return super().resolve_command(ctx, args)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,  # noqa: FBT002  (the signature is click's)
        **extra: Any,
    ) -> Any:
        """Run as click does, but report every error as one line with exit status 2."""
        del prog_name
        if not standalone_mode:
            return super().main(args, PROGRAM, complete_var, standalone_mode=False, **extra)
        try:
            status = super().main(args, PROGRAM, complete_var, standalone_mode=False, **extra)
        except (click.Abort, KeyboardInterrupt):
            click.echo(f"{PROGRAM}: interrupted", err=True)
            sys.exit(INTERRUPTED)
        except click.exceptions.Exit as error:
            sys.exit(error.exit_code)
        except (click.ClickException, ConfigError) as error:
            click.echo(error_line(error), err=True)
            sys.exit(2)
        sys.exit(status if isinstance(status, int) else 0)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_version(), prog_name=PROGRAM)
def cli() -> None:
    """Measure the store and its parts; the words are those of fio where they exist."""


def main() -> None:
    """Run the command line; never returns."""
    cli.main()


if __name__ == "__main__":
    main()
