"""Watches of keelscope, as users write them, for both benchmarks that time steps."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from pairs import Attach
from workloads import Training

import keelscope as ks
from keelscope import kernel
from keelscope.probe import resolve_probes

__all__ = ["watched"]


def watched(name: str = "", *, each: str = "", compiled: bool = True, **options: object) -> Attach:
    """A watch writing to a file, as users run it; `each` names probes that record on every recorded step here."""

    @contextmanager
    def attach(training: Training) -> Iterator[object]:
        chosen = dict(options)
        if name:
            chosen["sites"] = lambda _, module: type(module).__name__ == name or "Norm" in type(module).__name__
        if each:
            chosen["probes"] = [replace(probe, every=1) for probe in resolve_probes(each)]
        native = kernel._native
        if not compiled:
            kernel._native = None
        with tempfile.TemporaryDirectory() as folder:
            session = ks.watch(training.model, f"{folder}/run.h5", optimizer=training.optimizer, **chosen)
            with session:
                yield session
            kernel._native = native
            training.size = session.path.stat().st_size

    return attach
