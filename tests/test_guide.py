"""The guide to writing a probe does what it says, block by block."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from pathlib import Path

import pytest
import torch

import keelscope as ks

PAGE = Path(__file__).parents[1] / "docs" / "write-a-probe.md"
BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str, str]]:
    return BLOCK.findall(PAGE.read_text(encoding="utf-8"))


def test_every_block_runs_and_prints_what_the_page_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shown = next(text for language, _, text in blocks() if language == "text")
    names: dict[str, object] = {}
    output = io.StringIO()
    with contextlib.redirect_stdout(output), torch.random.fork_rng():
        for language, title, code in blocks():
            if language == "python" and title:
                Path(title).write_text(code)
                names |= runpy.run_path(title, run_name="ends")
            elif language == "python":
                exec(compile(code, str(PAGE), "exec"), names)
    assert numbers(output.getvalue()) == pytest.approx(numbers(shown), abs=0.021)
    assert words(output.getvalue()) == words(shown)
    with ks.open_run("ends.h5") as run:
        assert run["ends/saturated_fraction"].values.shape == (3, 2)


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d*)?", text)]


def words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z]+", text)


def test_every_part_of_the_page_is_a_block():
    assert [language for language, _, _ in blocks()] == ["python", "python", "python", "python", "text", "toml"]


def test_entry_point_on_the_page(tmp_path, monkeypatch):
    """The lines for pyproject.toml, as an installer writes them down."""
    from keelscope.probe import available_probes

    toml = next(text for language, _, text in blocks() if language == "toml")
    name, value = re.search(r'(\w+) = "([^"]+)"', toml).groups()
    code = next(text for _, title, text in blocks() if title == "ends.py")
    (tmp_path / "ends.py").write_text(code)
    info = tmp_path / "ends-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ends\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[keelscope.probes]\n{name} = {value}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert available_probes()["ends"].statistics[0].name == "saturated_fraction"
