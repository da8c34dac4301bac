"""Scalars of a run that is being recorded, sent to TensorBoard or W&B while it trains.

with ks.watch(model, "runs/keel.h5", optimizer=optimizer) as watch, Mirror(watch.run, TensorBoardSink("tb")) as mirror:
for batch in batches:
...
mirror.update()
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol, Self

from keelscope.errors import UsageError
from keelscope.export.scalars import Sink, TensorBoardSink, WandbSink, points
from keelscope.export.selection import Selection
from keelscope.store.reader import Run

__all__ = ["Mirror", "Recording", "TensorBoardSink", "WandbSink"]


class Recording(Protocol):
    """What is needed of a watch."""

    @property
    def run(self) -> Run:
        """The run as recorded so far."""


class Mirror:
    """Sends the rows of a run to a sink as they come; the run file stays the record.

    Args:
        watched: a watch, or a run that another process records.
        sink: `TensorBoardSink`, `WandbSink`, or anything with `add` and `close`.
        selection: which series and sites; None means all. Deep models are summarised over their sites.
        seconds: look for new rows at most this often.
    """

    def __init__(
        self, watched: Recording | Run, sink: Sink, selection: Selection | None = None, *, seconds: float = 1.0
    ) -> None:
        self._watched, self._sink, self._seconds = watched, sink, seconds
        self._selection = selection or Selection()
        self._sent = -1
        self._looked = float("-inf")

    def update(self) -> int:
        """Send what is new. Costs nothing between looks.

        Returns:
            How many numbers were sent.
        """
        if time.monotonic() - self._looked < self._seconds:
            return 0
        return self._send()

    def close(self) -> None:
        """Send the rest and close the sink; the run stays open."""
        self._send()
        self._sink.close()

    def _send(self) -> int:
        run, sent = self._current(), 0
        for step, seconds, values in points(run, self._selection, after=self._sent) if run is not None else ():
            self._sink.add(step, seconds, values)
            self._sent, sent = step, sent + len(values)
        self._looked = time.monotonic()
        return sent

    def _current(self) -> Run | None:
        if isinstance(self._watched, Run):
            self._watched.refresh()
            return self._watched
        try:
            return self._watched.run
        except UsageError:  # no row is complete yet
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
