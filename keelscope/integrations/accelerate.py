"""Accelerate: ``with watch_accelerated(accelerator, model, optimizer, "runs/net.h5") as watch:`` after ``prepare``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from keelscope.integrations.recording import takes_part
from keelscope.session import Watch, watch

__all__ = ["watch_accelerated"]


def watch_accelerated(
    accelerator: Any, model: Any, optimizer: Any, path: str | Path | None = None, **options: Any
) -> Watch:
    """Watch a model and its optimizers as ``accelerator.prepare`` returned them.

    That is ``watch(accelerator.unwrap_model(model), path, optimizer=optimizer)``, with the settings of the accelerator
    stored beside. Each process of a process group records its share. Of processes without one the main one writes the
    file; on the others the watch is there to be called, and keeps one step in memory.

    Args:
        accelerator: the `accelerate.Accelerator`.
        model: the prepared model.
        optimizer: the prepared optimizer, or several.
        path: the HDF5 run file to write; None keeps the run in memory.
        options: those of `keelscope.watch`.

    Returns:
        The session; use it as a context manager or call ``close()``.

    Raises:
        UsageError: if an option cannot be used.
    """
    settings = {
        "mixed_precision": accelerator.mixed_precision,
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
    }
    options["config"] = {**settings, **(options.get("config") or {})}
    if not takes_part(is_main=accelerator.is_main_process):
        path, options["every"] = None, sys.maxsize
    return watch(accelerator.unwrap_model(model), path, optimizer=optimizer, **options)
