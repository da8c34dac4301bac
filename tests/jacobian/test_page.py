"""The page on block Jacobians shows what its example prints."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "jacobians.md"


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"[+-]?\d+\.\d+", text)]


def test_the_example_prints_what_the_page_shows():
    code, shown = re.findall(r"```(?:python|text)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[:2]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, str(PAGE), "exec"), {})
    assert numbers(output.getvalue()) == pytest.approx(numbers(shown), abs=0.021)
    assert [line.split()[0] for line in output.getvalue().splitlines()] == ["post_ln", "pre_ln", "keel"]
