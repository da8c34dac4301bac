"""The part of an HTML report that says why: the causes as a waterfall, and the residual paths as tables.

Called by `document.render`; no scripts, every string from the run escaped.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import numpy as np

from keelscope.formatting import NOT_OBSERVED, decades, number
from keelscope_dashboards.causes import waterfall_svg

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from keelscope.diagnosis import Report
    from keelscope.diagnosis.paths import StreamPaths

__all__ = ["why_section"]

_RIGHT = ' class="n"'
_WHOLE = 40  # sub-layers that are listed without folding
_ENDS = 3
_LARGEST = 6
_TELLING = 0.1  # decades
_ROUNDING = 1e-6
_CAUSES = ("by norms", "by weights", "by branches", "other")
_HEAD = (
    "",
    "sub-layer",
    "equation",
    "a",
    "v",
    "shortcut",
    "from the top",
    "by norm",
    "by weight",
    "by branch",
    "other",
)
_STREAM_HEAD = ("stream", "sub-layers", "shortcut", "slope", "law", "mean v", *_CAUSES)


def why_section(report: Report) -> str:
    """The section, or nothing where the run does not hold its residual paths.

    Args:
        report: any report.

    Returns:
        HTML text.
    """
    if report.paths is None:
        return ""
    main = report.paths.main
    figure = waterfall_svg(main.attribution)
    drawn = f"<figure>{figure}<figcaption>{_CAPTION}</figcaption></figure>" if figure else ""
    streams = "".join(_stream_row(stream) for stream in report.paths.streams)
    rows = "".join(_sublayer_row(main, i) for i in _shown(main))
    return (
        f"<section><h2>Why</h2>{drawn}"
        f'<div class="table" tabindex="0"><table>{_head(_STREAM_HEAD)}<tbody>{streams}</tbody></table></div>'
        f"<h3>Sub-layers, {escape(_counted(main))}</h3>"
        f'<div class="table" tabindex="0"><table>{_head(_HEAD)}<tbody>{rows}</tbody></table></div>'
        f"<p><small>{_LEGEND}</small></p></section>"
    )


_CAPTION = (
    "What changes the gradient on its way from the output end of the stack to the input, in decades (log10). "
    "Negative means that it shrinks."
)
_LEGEND = (
    "Decades unless said. shortcut: what shortcuts alone do to the gradient; slope: the same per sub-layer, fitted; "
    "law: as 1/2 log10(1 + v/a^2) predicts; a: weight of the shortcut; v: mean square of the branch over that of the "
    "stream; from the top: what shortcuts alone leave of the gradient at the top. The last four columns add up to the "
    "measured change of the whole gradient."
)


def _counted(stream: StreamPaths) -> str:
    shown = sum(i >= 0 for i in _shown(stream))
    return f"{shown} of {len(stream)}" if shown < len(stream) else f"all {len(stream)}"


def _head(titles: Sequence[str]) -> str:
    words = {"", "sub-layer", "equation"}
    cells = (f'<th scope="col"{"" if title in words else _RIGHT}>{title or "&nbsp;"}</th>' for title in titles)
    return f"<thead><tr>{''.join(cells)}</tr></thead>"


def _stream_row(stream: StreamPaths) -> str:
    shortcut, totals = stream.shortcut, stream.attribution.totals
    law = shortcut.predicted[~np.isnan(shortcut.predicted)]
    known = not np.isnan(stream.attribution.stream)
    cells = [
        str(stream.stream),
        str(len(stream)),
        _change(shortcut.change),
        _plain(-shortcut.slope, decades),
        _change(float(law[0]) if law.size else float("nan")),
        _plain(shortcut.mean_branch_gain, number),
        *(_change(totals[name]) if known else NOT_OBSERVED for name in ("norm", "scale", "branch", "other")),
    ]
    return f"<tr>{_cells(cells)}</tr>"


def _cells(numbers: Sequence[str]) -> str:
    return "".join(f'<td class="n">{text}</td>' for text in numbers)


def _shown(stream: StreamPaths) -> list[int]:
    """Indices of the sub-layers listed, -1 for a gap: the ends, the quartiles, and those that change most."""
    n = len(stream)
    if n <= _WHOLE:
        return list(range(n))
    split = stream.attribution
    change = np.nan_to_num(np.abs(split.norm + split.scale + split.branch))
    kept = {*range(_ENDS), *range(n - _ENDS, n), *(n * q // 4 for q in (1, 2, 3))}
    kept |= {int(index) for index in np.argsort(change)[-_LARGEST:] if change[index] > _TELLING}
    out: list[int] = []
    for index in sorted(kept):
        out += [-1, index] if index > (out[-1] if out else -1) + 1 else [index]
    return out


def _sublayer_row(stream: StreamPaths, i: int) -> str:
    if i < 0:
        return f'<tr><td colspan="{len(_HEAD)}" class="gap">...</td></tr>'
    split, missing = stream.attribution, np.full(len(stream), np.nan)
    texts = [str(i + 1), stream.sites[i].path, stream.infos[i].form]
    numbers = [_plain(float(stream.values.get(key, missing)[i]), number) for key in ("alpha", "branch_gain")]
    columns = (stream.shortcut.gains, stream.shortcut.carried, split.norm, split.scale, split.branch, split.other)
    numbers += [_change(float(column[i])) for column in columns]
    words = "".join(f"<td>{escape(text)}</td>" for text in texts)
    return f"<tr>{words}{_cells(numbers)}</tr>"


def _plain(value: float, text: Callable[[float | None], str]) -> str:
    return text(None if np.isnan(value) else value)


def _change(value: float) -> str:
    """Decades with three digits after the point; 0 for rounding errors."""
    if np.isnan(value):
        return NOT_OBSERVED
    exact = np.isinf(value) or abs(value) < _ROUNDING
    return decades(value if np.isinf(value) else 0.0) if exact else f"{value:+.3f}"
