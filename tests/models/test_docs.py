"""docs/schemes.md says what the classes say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import torch

from keelscope import models

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "schemes.md"


def test_the_page_is_what_the_script_writes():
    page = runpy.run_path(str(ROOT / "scripts" / "write_schemes.py"))["page"]()
    assert PAGE.read_text(encoding="utf-8") == page, "run: python scripts/write_schemes.py"


def test_the_page_has_every_scheme_and_every_option():
    text = PAGE.read_text(encoding="utf-8")
    for name, scheme in models.SCHEMES.items():
        section = text.split(f"### {name}\n")[1].split("\n#")[0]
        for option in models.describe(scheme).options:
            assert f"Option `{option.name}`" in section


def test_the_example_on_the_page_runs():
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
    scope = {}
    exec(code, scope)
    assert scope["model"](torch.zeros(1, 4, dtype=torch.long)).shape == (1, 4, 256)
    assert scope["model"].sublayers[0].strength == 0.5
