"""What run files cost, in CPU and bytes; ``python tests/bench/storage.py`` rewrites its part of the page.

Three runs are written through the store: one with many statistics, for the cost of a commit; a real training, for the
size of a sealed file; and a synthetic one of 100,000 steps, for reading. CPU times, because the machine may be busy.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import h5py
import numpy as np
from page import PAGE, replaced

from keelscope.store.commit import Committer
from keelscope.store.encoding import create_objects
from keelscope.store.pace import Pace
from keelscope.store.reader import open_run
from keelscope.store.rows import RowPacker
from keelscope.store.runfiles import RunFiles
from keelscope.store.schema import GroupSpec, Row, RunInfo, RunLayout, Site, StatisticSpec
from keelscope.store.sealedfile import logical_bytes
from keelscope.store.sealing import seal
from keelscope.store.writer import RunWriter

COMMIT_ROWS, COMMIT_STATISTICS, REPEATS = 512, 20, 15
Lines = list[tuple[str, str, str]]


def layout_of(layers: int, n_statistics: int) -> RunLayout:
    sites = tuple(Site(f"layers.{i}", "Block", "layer", "layers", i) for i in range(layers))
    specs = tuple(StatisticSpec(f"s{i:02}", "1", "A statistic.") for i in range(n_statistics))
    return RunLayout(RunInfo("bench", "0", "2026-01-01T00:00:00Z"), (GroupSpec("gradients", specs, sites),), ("loss",))


def rows_of(layout: RunLayout, count: int) -> Iterator[Row]:
    """Levels that drift over depth and time, with noise in every bit of every value."""
    rng = np.random.default_rng(0)
    group = layout.groups[0]
    depth = np.linspace(-2, 0, len(group.sites))
    for step in range(count):
        noise = rng.normal(0, 0.1, (len(group.statistics), len(group.sites)))
        values = {spec.name: 10 ** (-3 + depth * step / count + noise[i]) for i, spec in enumerate(group.statistics)}
        yield Row(step, step * 0.1, {"gradients": values}, {"loss": 4 - 2 * step / count})


def commit_cpu(folder: Path, layers: int) -> Lines:
    layout = layout_of(layers, COMMIT_STATISTICS)
    packer = RowPacker(layout)
    with h5py.File(folder / "commit.h5", "x", libver=("v110", "v110"), rdcc_nbytes=0, locking=False) as file:
        create_objects(file, packer.layout)
        file.swmr_mode = True
        committer = Committer(file, packer.layout)
        packed = [packer.pack(row) for row in rows_of(layout, COMMIT_ROWS)]
        start = time.process_time()
        for at in range(0, COMMIT_ROWS, 16):
            committer.commit(packed[at : at + 16])
        spent = 1000 * (time.process_time() - start) / COMMIT_ROWS
    what = f"commit of a row, {layers:,} layers x {COMMIT_STATISTICS} statistics, CPU"
    return [(what, f"{spent:.2f} ms", "<= 0.5 ms")]


def real_sizes(folder: Path) -> Lines:
    """A training of 64 sub-layers, recorded by default, sealed in every precision."""
    command = [sys.executable, "-m", "keelscope", "train", "keel", "--depth", "64", "--width", "32", "--length", "32"]
    command += ["--batch-size", "2", "--steps", "200", "--json", "--out", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    trained, lines = folder / "keel.h5", []
    with open_run(trained) as run:
        layout, rows = run._source.layout, len(run.steps)
        raw = logical_bytes(run._source)  # type: ignore[arg-type]
        copies = [read_rows(run, row) for row in range(rows)]
    for precision, target in (("exact", "<= 85 %"), ("float32", ""), ("10bit", "")):
        path = folder / f"{precision}.h5"
        writer = RunWriter(path, layout, pace=Pace(seal="never"))
        for row in copies:
            writer.append(row)
        writer.close()
        live = path.stat().st_size
        start = time.process_time()
        seal(path, precision)
        spent, size = time.process_time() - start, path.stat().st_size
        about = f"{size / 2**20:.1f} MB, {size / raw:.0%} of its numbers as recorded ({live / 2**20:.1f} MB live)"
        lines.append((f"sealed, {precision}: training of 64 sub-layers, {rows} steps", about, target))
        lines.append((f"sealing it, {precision}, CPU", f"{spent:.2f} s", ""))
    return lines


def read_rows(run, row: int) -> Row:
    values: dict[str, dict[str, np.ndarray]] = {}
    step = int(run["scalars/loss"].steps[row])
    for key in list(run.keys()):
        group, _, name = key.partition("/")
        at = np.flatnonzero(run.steps_of(group) == step)
        if group != "scalars" and at.size:
            values.setdefault(group, {})[name] = run.read(key, int(at[0]), int(at[0]) + 1).values[0]
    scalars = {name: float(run[f"scalars/{name}"].values[row]) for name in run.scalars}
    return Row(step, scalars.pop("wall_time"), values, scalars)


def milliseconds(action: Callable[[], object]) -> str:
    """Median CPU time, and wall time for comparison."""
    cpu, wall = [], []
    for _ in range(REPEATS):
        start, begun = time.process_time(), time.perf_counter()
        action()
        cpu.append(1000 * (time.process_time() - start))
        wall.append(1000 * (time.perf_counter() - begun))
    return f"{statistics.median(cpu):.1f} ms ({statistics.median(wall):.1f} ms wall)"


def long_run(folder: Path, layers: int, steps: int) -> Lines:
    path, layout = folder / "long.h5", layout_of(layers, 1)
    writer = RunWriter(path, layout, pace=Pace(seal="never"))
    for row in rows_of(layout, steps):
        writer.append(row)
    writer.close()
    opened = RunFiles(path)
    raw, parts = logical_bytes(opened), len(opened.sources)
    opened.close()
    start = time.process_time()
    done = seal(path)
    spent = time.process_time() - start
    size = f"{steps:,} steps x {layers:,} layers"
    lines = [
        (f"sealed, exact: noise of {size}", f"{done.bytes_after / 2**20:.0f} MB, {done.bytes_after / raw:.0%}", ""),
        (f"sealing it ({parts} parts; merge, overviews, verify), CPU", f"{spent:.0f} s", ""),
    ]
    with open_run(path) as run:
        key = "gradients/s00"
        lines += [
            ("last row, all layers", milliseconds(lambda: run.read(key, -1)), "<= 5 ms"),
            (f"one layer, {steps:,} steps", milliseconds(lambda: run.read(key, sites=slice(5, 6))), "<= 200 ms"),
            (f"heatmap of {size} from /overview_256", milliseconds(lambda: run.overview(key, 256)), "<= 50 ms"),
            (f"the same from /overview_16 ({-(-steps // 16):,} rows)", milliseconds(lambda: run.overview(key, 16)), ""),
        ]
    lines.append(("opening it", milliseconds(lambda: open_run(path).close()), ""))
    return lines


def section(lines: Lines) -> str:
    info = Path("/proc/cpuinfo").read_text()
    cpu = next((line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")), "")
    versions = ", ".join(f"{name} {version(name)}" for name in ("h5py", "numpy"))
    body = "\n".join(f"| {name} | {value} | {target} |" for name, value, target in lines)
    return f"""
## Run files

`make bench-storage` writes, seals and reads run files (see [file format](file-format.md)). Sizes are relative to the
numbers as they are recorded, in float64. Load average when measured: {os.getloadavg()[0]:.1f}.

Machine: {cpu or platform.processor()}, {os.cpu_count()} cores; Python {platform.python_version()}, {versions}.

| measure | value | target |
|---|---|---|
{body}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=100_000)
    options = parser.parse_args()
    lines: Lines = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for part in (
            lambda: commit_cpu(folder, options.layers),
            lambda: real_sizes(folder),
            lambda: long_run(folder, options.layers, options.steps),
        ):
            found = part()
            lines += found
            for line in found:
                print(*line, sep=" | ", flush=True)
    PAGE.write_text(replaced(PAGE.read_text(), "storage", section(lines)))


if __name__ == "__main__":
    main()
