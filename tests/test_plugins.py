"""Plugins are found by entry point, a broken one warns and is left out."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from keelscope import plugins
from keelscope.errors import PluginWarning, UnknownNameError

if TYPE_CHECKING:
    from pathlib import Path


def install(folder: Path, package: str, code: str, value: str, group: str = "keelscope.rules") -> None:
    """Lay out an importable package with metadata, as an installer would."""
    module = package.replace("-", "_")
    (folder / f"{module}.py").write_text(code)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\nthing = {module}:{value}\n")


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_single_objects_and_tuples(site):
    install(site, "one-rule", "rule = 'first'", "rule")
    install(site, "many-rules", "RULES = ('second', 'third')", "RULES")
    install(site, "listed-rules", "RULES = ['fourth']", "RULES")
    found = [pair for pair in plugins.load("keelscope.rules") if pair[0] != "keelscope"]
    assert found == [
        ("listed-rules", "fourth"),
        ("many-rules", "second"),
        ("many-rules", "third"),
        ("one-rule", "first"),
    ]


@pytest.mark.parametrize(
    ("code", "value", "reason"),
    [
        ("raise RuntimeError('no licence')", "rule", "RuntimeError: no licence"),
        ("import not_installed_anywhere", "rule", "No module named 'not_installed_anywhere'"),
        ("other = 1", "rule", "AttributeError"),
    ],
)
def test_broken_plugin_warns_and_is_left_out(site, code, value, reason):
    install(site, "broken-pack", code, value)
    install(site, "good-pack", "rule = 'works'", "rule")
    with pytest.warns(PluginWarning, match="broken-pack is left out") as record:
        found = plugins.load("keelscope.rules")
    assert ("good-pack", "works") in found
    assert "broken-pack" not in dict(found)
    assert reason in str(record[0].message)
    assert "keelscope.rules" in str(record[0].message)


def test_a_broken_plugin_warns_once_per_process(site):
    install(site, "broken-pack", "raise RuntimeError('no licence')", "rule")
    script = "from keelscope import plugins; plugins.load('keelscope.rules'); plugins.load('keelscope.rules')"
    code = f"import sys; sys.path.insert(0, {str(site)!r}); {script}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("broken-pack is left out") == 1


def test_unknown_group():
    with pytest.raises(UnknownNameError, match=r"no plugin group 'keelscope.colours'; groups are"):
        plugins.load("keelscope.colours")


def test_builtins_enter_by_the_same_door():
    assert "keelscope" in dict(plugins.load("keelscope.probes"))
