"""Errors are one sentence and an exit code; plugin commands join."""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib.metadata import version

import pytest
import typer

from keelscope import plugins
from keelscope.cli import application
from keelscope.errors import CoverageWarning, PluginWarning, UsageError


def one_sentence(text: str) -> bool:
    return text.startswith("keelscope: ") and text.count("\n") == 1 and "Traceback" not in text


def test_version(keelscope):
    assert keelscope("--version") == (0, f"keelscope {version('keelscope')}\n", "")


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",)])
def test_help_names_every_command(keelscope, words):
    code, out, _ = keelscope(*words)
    assert code == 0
    for command in ("report", "compare", "train", "demo", "list"):
        assert f" {command} " in out


@pytest.mark.parametrize("command", ["report", "compare", "train", "demo", "list"])
def test_every_command_has_help_with_an_example(keelscope, command):
    code, out, _ = keelscope(command, "--help")
    assert code == 0
    assert f"Example: keelscope {command}" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("nonsense",), "No such command 'nonsense'; see keelscope --help."),
        (("report",), "Missing argument 'TARGET'; see keelscope report --help."),
        (("report", "x", "--frmat", "json"), "No such option: --frmat"),
        (
            ("list", "probs"),
            "'probs' is not one of 'probes', 'statistics', 'rules', 'schemes', 'thresholds'; see keelscope list",
        ),
        (("train", "keel", "--depth", "deep"), "Invalid value for '--depth'"),
        (("compare", "one.h5"), "compare takes 2 to 8 runs or models, not 1; use keelscope report for one."),
    ],
)
def test_usage_errors(keelscope, words, sentence):
    code, out, err = keelscope(*words)
    assert code == 2
    assert out == ""
    assert one_sentence(err), err
    assert sentence in err


@pytest.fixture
def command(monkeypatch):
    """Install a command named ``act`` that does what the test says."""

    def install(action) -> None:
        def add_command(app: typer.Typer) -> None:
            app.command("act")(action)

        monkeypatch.setattr(plugins, "load", lambda group: [("a-package", add_command)])

    return install


def test_plugin_commands_join(keelscope, command):
    command(lambda: typer.echo("acted"))
    assert keelscope("act") == (0, "acted\n", "")
    assert " act " in keelscope("--help").out


def test_a_plugin_cannot_replace_a_builtin_command(keelscope, monkeypatch):
    monkeypatch.setattr(
        plugins, "load", lambda group: [("p", lambda app: app.command("list")(lambda: typer.echo("stolen")))]
    )
    assert "stolen" not in keelscope("--help").out + keelscope("list", "schemes").out


def test_builtin_commands_do_not_look_up_plugins(keelscope, monkeypatch):
    monkeypatch.setattr(plugins, "load", lambda group: pytest.fail("looked up"))
    assert keelscope("list", "--help").code == 0


def test_broken_plugin_is_left_out(keelscope, monkeypatch):
    def broken(app: typer.Typer) -> None:
        raise ImportError("no such thing")

    monkeypatch.setattr(
        plugins, "load", lambda group: [("broken-pack", broken), ("p", lambda app: app.command("act")(lambda: None))]
    )
    code, out, err = keelscope("--help")
    assert code == 0
    assert " act " in out
    assert (
        err
        == "keelscope: note: plugin broken-pack is left out: its commands do not load (ImportError: no such thing).\n"
    )


def raising(error: BaseException):
    def action() -> None:
        raise error

    return action


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (UsageError("give a number."), 2, "give a number."),
        (FileNotFoundError(2, "No such file or directory", "a.txt"), 2, "No such file or directory: a.txt."),
        (PermissionError(13, "Permission denied", "b.txt"), 2, "Permission denied: b.txt."),
        (KeyError("surprise"), 3, "this is a bug in keelscope: KeyError: 'surprise'. Run again with --debug and open"),
        (RuntimeError("two\nlines"), 3, "RuntimeError: two lines."),
        (KeyboardInterrupt(), 130, "interrupted."),
    ],
)
def test_what_becomes_of_an_error(keelscope, command, error, code, sentence):
    command(raising(error))
    result = keelscope("act")
    assert result.code == code
    assert one_sentence(result.err), result.err
    assert sentence in result.err


@pytest.mark.parametrize("words", [("--debug", "act"), ("act", "--debug")])
def test_debug_lets_the_error_through(keelscope, command, words):
    command(raising(UsageError("give a number.")))
    with pytest.raises(UsageError):
        keelscope(*words)


def test_own_warnings_are_sentences_said_once(keelscope, command):
    def action() -> None:
        for _ in range(3):
            warnings.warn("one site is missing.", CoverageWarning, stacklevel=1)
        warnings.warn("a package is left out.", PluginWarning, stacklevel=1)

    command(action)
    _, _, err = keelscope("act")
    assert err == "keelscope: note: one site is missing.\nkeelscope: note: a package is left out.\n"


def test_warning_state_is_restored(keelscope):
    before = warnings.showwarning, list(warnings.filters)
    keelscope("--version")
    assert (warnings.showwarning, list(warnings.filters)) == before


def test_exit_codes_are_documented():
    codes = (application.OK, application.FINDING, application.BAD_INPUT, application.BUG, application.INTERRUPTED)
    assert codes == (0, 1, 2, 3, 130)


def test_as_a_process():
    done = subprocess.run([sys.executable, "-m", "keelscope", "nonsense"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "keelscope: No such command 'nonsense'; see keelscope --help.\n"
