"""`watch`: a recording session over a training loop.

It keeps hooks on the model during recorded steps only, notices when steps begin and end, and hands closed rows to the
journal. Hooks never raise into the training loop, and training is bit-identical with and without them.

```
forward ──▶ row k open ──optimizer step──▶ complete ──next forward──▶ closed ──▶ journal ──▶ file
                             log(loss=...) belongs to k ▲
```
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from torch import nn
from torch.optim import Optimizer

from keelscope import openwatches
from keelscope.arming import Arm, Arming
from keelscope.calls import Call, ParameterCalls
from keelscope.containment import contained
from keelscope.distributed import place
from keelscope.errors import CoverageWarning, NothingToObserveError, UsageError
from keelscope.journal import Journal, check_destination
from keelscope.logbook import Logbook
from keelscope.probe import Probe, resolve_probes
from keelscope.recorder import Recorder
from keelscope.resume import starting_step
from keelscope.schedule import Schedule, as_schedule
from keelscope.sites import Selector
from keelscope.steps import IdleOptimizer, StepClock, as_optimizers
from keelscope.store.pace import Pace
from keelscope.store.reader import Run
from keelscope.store.schema import CoverageEntry, RunLayout

__all__ = ["Watch", "watch"]


def watch(  # noqa: PLR0913 - the public interface: every option has a default and a name
    model: nn.Module,
    path: str | Path | None = None,
    *,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    probes: str | Probe | Iterable[str | Probe] = "default",
    sites: Selector | Iterable[Selector] = "auto",
    every: int | Schedule = 1,
    arm: Arm | None = None,
    config: Mapping[str, object] | None = None,
    exists: str = "new",
    calls: bool = False,
    first_step: int | None = None,
    pace: Pace | None = None,
) -> Watch:
    """Record gradient-flow statistics of a model while it trains.

    Args:
        model: any module, on any device, wrapped or not.
        path: the HDF5 run file to write; None keeps the run in memory.
        optimizer: the optimizer, or all of them: steps are then seen by themselves. Without it call ``watch.step()``.
        probes: names and probe objects, see ``keelscope list probes``.
        sites: which modules, see `keelscope.sites.plan_sites`.
        every: record every n-th step, or a `Schedule`.
        arm: record every step for a while after a spike or a number that is not finite, see `Arm`.
        config: JSON values to store with the run, for example hyperparameters.
        exists: if the file exists, ``"new"`` takes the next free name, ``"error"`` refuses, ``"resume"`` goes on.
        calls: keep every call and backward pass of the last recorded step in ``watch.calls`` and ``watch.gradients``.
        first_step: number of the first step, where training goes on from a checkpoint. By default 0; with
            ``exists="resume"`` what the optimizer's loaded state says, or the step after the last recorded one.
        pace: when rows are written and when the disk must have them.

    Returns:
        The session; use it as a context manager or call ``close()``.

    Raises:
        UsageError: if an argument cannot be used; unknown names list near matches.
        RunFileError: if the run file cannot be where `path` says.
        NothingToObserveError: if `model` has neither modules nor parameters to observe.

    Example:
        >>> import torch
        >>> net = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> with watch(net, optimizer=optimizer) as session:
        ...     loss = net(torch.ones(4, 2)).mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     session.log(loss=loss)
        >>> round(float(session.run["parameter_gradients/norm"].of("weight").values[0, 0]), 3)
        1.414
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"watch() takes a torch.nn.Module; got {type(model).__name__}.")
    check_destination(path, exists, place()[0])
    optimizers = as_optimizers(optimizer)
    first = starting_step(first_step, path, exists, optimizers)
    recorder = Recorder(model, resolve_probes(probes), sites, optimizers, keep_calls=calls)
    if not recorder.plan.modules and not recorder.plan.parameters:
        raise NothingToObserveError(f"{type(model).__name__} has no module and no parameter to observe.")
    journal = Journal(path, exists, pace)
    schedule = Arming(as_schedule(every), arm, journal)
    return Watch(model, recorder, optimizers, schedule, journal, path=path, config=config or {}, first_step=first)


class Watch:
    """An open recording session, made by `watch`."""

    def __init__(  # noqa: PLR0913 - only `watch` calls it
        self,
        model: nn.Module,
        recorder: Recorder,
        optimizers: tuple[Optimizer, ...],
        schedule: Arming,
        journal: Journal,
        *,
        path: str | Path | None,
        config: Mapping[str, object],
        first_step: int,
    ) -> None:
        self._leave = openwatches.enter(model, self)
        self._model: nn.Module | None = model
        self._recorder, self._schedule = recorder, schedule
        self._title, self._config = path, config
        self._journal = journal
        journal.layout = self._layout
        self._clock = StepClock(optimizers, self._before_step, self._after_step, first_step)
        self._logbook = Logbook(journal, schedule, first_step)
        self._explicit = bool(optimizers)
        self._optimizers = optimizers
        self._step = self._first_step = first_step
        self._idle = IdleOptimizer(optimizers, model)
        self._recording = self._complete = self._closed = False
        self._coverage: tuple[CoverageEntry, ...] = ()
        recorder.admits, recorder.on_growth = self._admits, journal.redraw
        recorder.backward_begins = self._backward_begins
        self._begin_row()

    @property
    def coverage(self) -> tuple[CoverageEntry, ...]:
        """What was observed on the recorded steps and what was not, with the reason."""
        return self._coverage if self._closed else self._journal.told(self._recorder.coverage())

    @property
    def path(self) -> Path | None:
        """The file being written, or the one that will be when the first row is complete; None for a run in memory."""
        return self._journal.path

    @property
    def run(self) -> Run:
        """The run as recorded so far, with the interface of `keelscope.open_run`. Looking closes a complete row."""
        self._settle()
        return self._journal.run()

    @property
    def calls(self) -> Mapping[str, list[Call]]:
        """Module path -> its calls on the last recorded step, in order (needs ``calls=True``)."""
        self._settle()
        return self._recorder.last_calls

    @property
    def gradients(self) -> Mapping[str, ParameterCalls]:
        """Parameter path -> its gradient per backward pass on the last recorded step (needs ``calls=True``)."""
        self._settle()
        return self._recorder.last_gradients

    def step(self) -> None:
        """Say that an optimizer step is complete. Not needed, and without effect, when ``optimizer=`` was given."""
        if self._optimizers or self._closed:
            return
        self._explicit = True
        if self._complete:
            self._next_row()
        self._clock.tick()
        self._end_step()

    def log(self, **scalars: object) -> None:
        """Store numbers beside the step that was last completed, or is running.

        What cannot be stored is left out with one warning per name: a wrong number does not end a training. A name that
        comes after the first recorded step begins a new part of the file, so that only a few can.

        Args:
            scalars: ``name=number``, for example ``loss=loss``; one-entry tensors are welcome.
        """
        if self._closed:
            self._logbook.refuse(scalars)
        elif self._logbook.take(scalars, self._clock.completed, self._begun()):
            self._record_what_comes()

    def _record_what_comes(self) -> None:
        """The step that comes is armed, which nobody knew when the one before ended."""
        if not self._recording:
            self._begin_row()
        elif self._complete:
            self._recorder.attach()

    def close(self) -> None:
        """Write the last row, take every hook off the model and close the file. Safe to call twice."""
        self._close(keep_open_row=True)

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(keep_open_row=kind is None)

    def _begun(self) -> bool | None:
        """Whether the running step has had a forward that trains; None where no hook would have seen it."""
        watching = self._recording and (not self._complete or self._schedule.records(self._clock.completed))
        seen = self._recorder.current.saw_backward or self._recorder.current.saw_forward
        return (seen and not self._complete) if watching and seen else None

    def _settle(self) -> None:
        """Close the row of a step that is complete, and be ready for the next."""
        if self._complete and not self._closed:
            self._next_row()

    def _close(self, *, keep_open_row: bool) -> None:
        if self._closed:
            return
        try:
            self._finish(keep_open_row=keep_open_row)
        finally:
            self._closed = True
            self._leave()
            self._coverage = self._journal.told(self._recorder.coverage())
            self._clock.close()
            self._recorder.pause()
            self._recorder.admits = _admits_nothing
            self._journal.close(self._coverage)
            self._recorder.release()
            self._model = None

    def _finish(self, *, keep_open_row: bool) -> None:
        open_row = self._recorder.current
        evaluated = self._clock.untouched and open_row.has_calls  # a model that only runs forward
        alone = (open_row.saw_forward or evaluated) and not self._recorder.has_trained  # else half a step of training
        worth = keep_open_row and (open_row.saw_backward or alone)
        if self._recording and (self._complete or worth):
            self._close_row()

    def _next_row(self, *, seen: bool = True) -> None:
        self._close_row()
        self._begin_row(seen=seen)

    def _begin_row(self, *, seen: bool = True) -> None:
        self._step, self._complete = self._clock.completed, False
        self._recording = seen and (self._schedule.records(self._step) or not self._explicit)
        if self._recording:
            self._recorder.is_fleeting = not self._schedule.records(self._step + 1)
            self._recorder.open()

    @contained
    def _close_row(self) -> None:
        """Hand the open row to the journal."""
        start = time.perf_counter()
        self._complete = self._recording = False
        row, step, schedule = self._recorder.take(), self._step, self._schedule
        own = self._recorder.scalars(row, at_once=schedule.judges or not schedule.records(step))
        if schedule.records(step):
            self._journal.add(step, row.values, row.observed, row.later, kept=schedule.keeps(step))
            own |= schedule.scalars(step)
        self._journal.log(step, own := self._journal.lacks(step, own))
        schedule.see_all(step, own)
        spent = self._recorder.milliseconds() + 1e3 * (time.perf_counter() - start)
        self._journal.log(step, {"watch_ms": spent})
        self._journal.flush(step + 1)

    def _admits(self, grad_enabled: bool) -> bool:
        """Whether a forward belongs to the open row; closes that row if the forward starts the next."""
        if not grad_enabled:
            return not self._complete
        if self._complete:
            self._next_row()
        elif self._recorder.current.saw_backward and not self._recorder.still_accumulating():
            self._step_not_seen()
        return True

    def _step_not_seen(self) -> None:
        """Gradients were used or cleared, but nobody said that a step is complete."""
        if not self._explicit:
            self._close_unseen_step()
        elif self._optimizers and not self._clock.partial:
            self._recorder.discard()
            if self._idle.once_more():
                self._logbook.leave_out("", self._idle.WARNING)

    def _backward_begins(self) -> None:
        """Without any forward to tell (functional calls), a backward after a complete step is the next one's."""
        self._idle.backward_begins()
        if self._complete and not self._recorder.current.has_calls:
            self._next_row()

    def _close_unseen_step(self) -> None:
        """Without optimizer and `step()`, a forward after a finished backward pass is the next step."""
        if self._clock.untouched:
            warnings.warn(
                "watch() was given no optimizer= and step() was not called: one row is recorded per backward pass.",
                CoverageWarning,
                stacklevel=8,
            )
        self._close_row()
        self._clock.tick()
        self._begin_row()

    @contained
    def _before_step(self, optimizer: Optimizer, closure: bool) -> None:
        if self._complete and not self._clock.partial:  # closing may arm this step, whose forward is over
            self._next_row(seen=self._schedule.records(self._clock.completed))
        self._idle.step_begins(closure=closure)
        if self._recording and not self._complete:
            self._recorder.before_step(optimizer, closure=closure)
        if not closure and self._schedule.weighs:
            self._schedule.weigh(optimizer)

    @contained
    def _after_step(self, optimizer: Optimizer, done: bool) -> None:
        if self._recording and not self._complete:
            self._recorder.parameters.after_step(optimizer)
        if done:
            self._end_step()

    def _end_step(self) -> None:
        """A step is complete: keep its row for `log`, and take the hooks off unless the next step is recorded."""
        self._idle.step_ends()
        self._schedule.step_ends(self._clock.completed - 1)
        following = self._schedule.records(self._clock.completed)
        if self._recording and not self._complete:
            self._complete = True
            self._recorder.rest(pause=not following)
        else:
            self._journal.flush(self._clock.completed - 1)
            if following:
                self._begin_row()

    def _layout(self, scalars: tuple[str, ...]) -> RunLayout:
        assert self._model is not None
        layout = self._recorder.layout(self._model, title=self._title, config=self._config)
        return replace(layout, scalars=scalars, part=replace(layout.part, resumed_at_step=self._first_step))


def _admits_nothing(_: bool) -> bool:
    return False
