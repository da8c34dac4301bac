"""How commands write: strict JSON, tables, and commands that can be copied."""

from __future__ import annotations

import json

import pytest

from keelscope.cli.output import invocation, print_table, to_json, write
from keelscope.errors import UsageError


def test_json_is_strict():
    value = {"a": float("nan"), "b": [float("inf"), -float("inf"), 1.5, None, True], "c": {"d": ("x", 1)}}
    text = to_json(value)
    assert json.loads(text, parse_constant=pytest.fail) == {
        "a": None,
        "b": ["inf", "-inf", 1.5, None, True],
        "c": {"d": ["x", 1]},
    }


def test_table_keeps_brackets_and_says_when_it_is_empty(capsys):
    print_table([{"name": "x", "shape": "[step, site]"}])
    assert "[step, site]" in capsys.readouterr().out
    print_table([])
    assert capsys.readouterr() == ("", "keelscope: nothing is installed.\n")


def test_write(tmp_path, capsys):
    write("text\n\n", None)
    assert capsys.readouterr().out == "text\n"
    write("text\n\n", tmp_path / "new" / "file.txt")
    assert (tmp_path / "new" / "file.txt").read_text() == "text\n"
    with pytest.raises(UsageError, match="cannot be written"):
        write("text", tmp_path / "new")


def test_invocation_can_be_copied(tmp_path, monkeypatch):
    script = tmp_path / "bin" / "keelscope"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    assert invocation(str(script)) == "bin/keelscope"
    monkeypatch.setenv("PATH", str(script.parent))
    assert invocation(str(script)) == "keelscope"
    assert invocation("/lib/keelscope/__main__.py") == "python -m keelscope"
