"""A synthetic run of any size, written through the store as a training would: what the dashboard is measured on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from keelscope.store.pace import Pace
from keelscope.store.schema import GroupSpec, Row, RunInfo, RunLayout, Site, Stack, StatisticSpec
from keelscope.store.writer import RunWriter

__all__ = ["layout_of", "rows_of", "write_run"]

CYCLE = 64  # distinct rows of noise, used in turn


def layout_of(layers: int, steps: int, title: str) -> RunLayout:
    """One stack with the gradient and the variance of every layer."""
    sites = tuple(Site(f"layers.{i}", "Block", "layer", "layers", i, 8) for i in range(layers))
    rms = StatisticSpec("rms", "1", "Root mean square.")
    variance = StatisticSpec("variance", "1", "Variance.")
    groups = (GroupSpec("outputs", (variance,), sites), GroupSpec("gradients", (rms,), sites))
    info = RunInfo(
        title=title,
        run_id="0" * 32,
        created_at="2026-01-01T00:00:00Z",
        model_class="Synthetic",
        n_parameters=1000,
        device="cpu",
        seed=0,
        stacks=(Stack("layers", "Block", layers, 1, main=True),),
        config={"steps": steps},
    )
    return RunLayout(info, groups, ("loss",))


def rows_of(layers: int, steps: int, start: int = 0) -> Iterator[Row]:
    """A gradient that vanishes ever more towards the input, with noise and, now and then, a spike in one layer."""
    rng = np.random.default_rng(0)
    depth, noise = np.linspace(-1, 0, layers), 10 ** rng.normal(0, 0.1, (CYCLE, layers))
    for step in range(start, steps):
        gradient = 10 ** (-3 + 6 * step / steps * depth) * noise[step % CYCLE]
        if step % 997 == 0:
            gradient[step % layers] *= 1e3
        values = {"outputs": {"variance": noise[-1 - step % CYCLE]}, "gradients": {"rms": gradient}}
        yield Row(step, step * 0.1, values, {"loss": 4 - 2 * step / steps})


def write_run(path: Path, layers: int, steps: int, *, sealed: bool = True) -> Path:
    """The whole run as a finished file, or as it is before a closed run has been sealed."""
    pace = Pace() if sealed else Pace(seal="never")
    writer = RunWriter(path, layout_of(layers, steps, path.stem), pace=pace)
    for row in rows_of(layers, steps):
        writer.append(row)
    writer.close()
    return Path(writer.path)
