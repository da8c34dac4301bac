"""Write docs/schemes.md from the docstrings of the schemes: ``python scripts/write_schemes.py``.

A test compares the page with `page()`, so that it cannot go stale.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from keelscope.models import SCHEMES, describe, init

if TYPE_CHECKING:
    from keelscope.models import SchemeInfo

PAGE = Path(__file__).parents[1] / "docs" / "schemes.md"

INTRODUCTION = """\
# Residual schemes

<!-- Written by scripts/write_schemes.py from the docstrings of keelscope.models.schemes. Edit those. -->

Each reference model is a decoder-only transformer with one flat stack of residual sub-layers (attention, feed-forward,
attention, ...). A scheme says how a sub-layer's branch meets the stream. `keelscope train NAME` trains one, and
`keelscope.models.build("NAME", depth=64)` builds one in Python.

In the equations x is the stream, F the branch (attention or feed-forward), n a norm, L the number of sub-layers and
N = L / 2 the number of blocks. "Expect" is the gradient flow at random initialisation with unit-gain matrices, in
decades per sub-layer; `tests/models/` asserts the numbers. It is no claim about trained networks.
"""

OWN_SCHEME = """\
## A scheme of your own

Subclass `keelscope.models.SubLayer` and give the class to `build`:

```python
from keelscope import models


class HalfResidual(models.SubLayer):
    name = "half_residual"

    def __init__(self, place: models.Place, *, strength: float = 1.0) -> None:
        super().__init__(place)
        self.norm = place.norm()
        self.strength = strength

    def forward(self, x):
        return x / 2 + self.strength * self.branch(self.norm(x))


model = models.build(HalfResidual, depth=64, strength=0.5)
```

A file with such a class in `keelscope/models/schemes/` is found by itself; `SCHEMES`, the command line and this page
then know it by its `name`.
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


def _table(schemes: list[SchemeInfo]) -> str:
    rows = [f"| [`{info.name}`](#{info.name}) | {_cell(info.equation)} | {_cell(info.expect)} |" for info in schemes]
    return "\n".join(["| scheme | equation | expect |", "|---|---|---|", *rows, ""])


def _initialisations() -> str:
    listing = (init.__doc__ or "").split("\n\n", 2)[2]
    return f"## Initialisations\n\nThe option `init` of every scheme:\n\n```text\n{textwrap.dedent(listing)}```\n"


def _section(info: SchemeInfo) -> str:
    lines = [f"### {info.name}", "", _cell(info.summary), "", f"`{info.equation}`", ""]
    lines += [f"- Init: {_cell(info.init)}", f"- Expect: {_cell(info.expect)}", f"- Source: {_cell(info.source)}"]
    lines += [f"- Option `{option.name}` (default `{option.default}`): {_cell(option.doc)}" for option in info.options]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page.

    Returns:
        Markdown.
    """
    schemes = [describe(scheme) for scheme in SCHEMES.values()]
    sections = "\n".join(_section(info) for info in schemes)
    return "\n".join([INTRODUCTION, _table(schemes), "## One by one\n", sections, _initialisations(), OWN_SCHEME])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
