"""The pytest plugin: the fixture `keelscope_report`, which reports a model inside a test.

Loaded by pytest through the entry point group ``pytest11``; torch is imported when the fixture is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from keelscope.diagnosis import Report

__all__ = ["keelscope_report"]

_WIDTH = 100


@pytest.fixture
def keelscope_report(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """`keelscope.report`, whose reports are shown with the test if it fails.

    ``keelscope_report(model, batch, loss_fn).check()`` fails on every finding of severity error;
    ``check(fail_on="vanishing,exploding")`` chooses.

    Args:
        request: the test.

    Returns:
        A function that takes what `keelscope.report` takes.
    """

    def report(target: Any, batch: object = None, loss_fn: Any = None, **options: Any) -> Report:
        from keelscope.oneshot import report as make_report

        made = make_report(target, batch, loss_fn, **options)
        request.node.add_report_section("call", f"keelscope report of {made.title}", made.to_text(width=_WIDTH))
        return made

    return report
