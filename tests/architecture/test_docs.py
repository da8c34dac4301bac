"""What the program says of itself is what the documentation says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from keelscope.cli import list_command

ROOT = Path(__file__).parents[2]
WRITER = runpy.run_path(str(ROOT / "scripts/write_docs.py"))


@pytest.mark.parametrize("page", sorted(WRITER["PAGES"]))
def test_page_is_up_to_date(page):
    expected = WRITER["PAGES"][page]()
    assert (ROOT / page).read_text(encoding="utf-8") == expected, "run: python scripts/write_docs.py"


@pytest.mark.parametrize("kind", ["probes", "statistics", "rules", "schemes"])
def test_every_name_is_documented(kind):
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    names = [row["name"] for row in getattr(list_command, kind)()]
    assert names
    assert [name for name in names if f"`{name}`" not in pages and f"# {name}\n" not in pages] == []


def test_every_page_is_reachable():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if page not in nav} == set()


def test_no_page_asks_another_host():
    """The site works without a network: nothing is loaded from elsewhere (links may lead there)."""
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert "font: false" in settings
    assert "extra_javascript" not in settings
    for page in (ROOT / "docs").rglob("*.md"):
        assert not re.search(
            r"!\[[^]]*\]\(https?://|<(img|script|link)[^>]+https?://", page.read_text(encoding="utf-8")
        )
