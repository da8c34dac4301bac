"""The application: its commands, those of plugins, and what becomes of an error.

Plugin commands are looked up when a name is not a built-in one, or when all are listed: the look-up costs more than
most commands need.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.main

from keelscope import plugins
from keelscope.cli import (
    compare_command,
    demo_command,
    doctor_command,
    export_command,
    list_command,
    report_command,
    train_command,
)
from keelscope.cli.output import closed_pipe_is_fine
from keelscope.cli.parameters import PlainCommand, PlainGroup
from keelscope.errors import CoverageWarning, KeelscopeError, PluginWarning, RecordingWarning

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["create_app", "main"]

OK, FINDING, BAD_INPUT, BUG, INTERRUPTED = 0, 1, 2, 3, 130
COMMANDS = (
    report_command,
    compare_command,
    train_command,
    demo_command,
    export_command,
    doctor_command,
    list_command,
)
OURS = (CoverageWarning, PluginWarning, RecordingWarning)
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[2]  # typer names the parser's root exception nowhere else


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: words after ``keelscope``; None takes those of the process.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    try:
        with _own_warnings():
            code = create_app()(args=words or ["--help"], prog_name="keelscope", standalone_mode=False)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        if debug:
            raise
        return _explain(error)
    if code == INTERRUPTED:
        _say("interrupted.")
    return code if isinstance(code, int) else OK


def create_app() -> typer.Typer:
    """The typer application with the built-in commands.

    Returns:
        A new application; calling it runs a command.
    """
    app = typer.Typer(
        cls=_Group,
        name="keelscope",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="See where gradients vanish, explode or stay flat through deep PyTorch models, and why.",
        epilog="Start with: keelscope demo",
    )
    app.callback()(_options)
    for command in COMMANDS:
        command.add_command(app)
    for registered in app.registered_commands:
        registered.cls = PlainCommand
    return app


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"keelscope {version('keelscope')}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_version)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; may stand anywhere on the line.")] = False,
) -> None:
    pass


class _Group(PlainGroup):
    """A group that asks plugins for commands it does not know itself."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest = [word for word in args if word != "--debug"]
        return super().parse_args(ctx, rest)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands:
            self._add_plugins()
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: Any) -> Any:
        with closed_pipe_is_fine():
            return super().invoke(ctx)
        return OK

    def list_commands(self, ctx: Any) -> list[str]:
        self._add_plugins()
        return super().list_commands(ctx)

    def _add_plugins(self) -> None:
        for package, add_command in plugins.load("keelscope.commands"):
            for name, command in _plugin_commands(package, add_command).items():
                self.commands.setdefault(name, command)


def _plugin_commands(package: str, add_command: Any) -> dict[str, Any]:
    """The commands that one ``add_command(app)`` of a plugin adds; none if it fails."""
    app = typer.Typer()
    try:
        add_command(app)
        return dict(typer.main.get_group(app).commands)
    except Exception as error:  # a foreign package may raise anything, the other commands must go on
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"plugin {package} is left out: its commands do not load ({reason}).", PluginWarning, stacklevel=2
        )
        return {}


def _explain(error: Exception) -> int:
    if isinstance(error, OSError) and error.filename is not None:
        _say(f"{error.strerror}: {error.filename}.")
        return BAD_INPUT
    if isinstance(error, KeelscopeError):
        _say(str(error))
        return BAD_INPUT
    if isinstance(error, OSError) and error.errno in _FULL:
        _say(f"the output cannot be written: {os.strerror(error.errno)}; free some space and run it again.")
        return BAD_INPUT
    if isinstance(error, USAGE_ERROR):
        _say(_usage(error))
        return BAD_INPUT
    _say(
        f"this is a bug in keelscope: {type(error).__name__}: {' '.join(str(error).split())}. "
        "Run again with --debug and open an issue with the traceback."
    )
    return BUG


def _usage(error: Any) -> str:
    path = getattr(getattr(error, "ctx", None), "command_path", "keelscope")
    message = " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "")
    return f"{message}; see {path} --help."


def _say(sentence: str) -> None:
    print(f"keelscope: {sentence}", file=sys.stderr)


@contextmanager
def _own_warnings() -> Iterator[None]:
    """Print keelscope's own warnings as one sentence each, once; leave other packages' as they are."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def showwarning(message: Any, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, OURS):
                _say(f"note: {message}")
            else:
                show(message, category, *place, **more)

        warnings.showwarning = showwarning
        for category in OURS:
            warnings.simplefilter("once", category)
        yield
