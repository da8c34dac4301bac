"""Whole models, growth with depth, and processes: what tiles do not show."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from longrun import write_run
from pairs import peak_kilobytes
from workloads import WORKLOADS, Stack, Training, tokens

import keelscope as ks
from keelscope import kernel
from keelscope.store.sealing import seal

__all__ = ["described", "growth", "processes", "wholes"]

DEPTHS = {32: 200, 128: 120, 512: 60, 2048: 32}  # blocks of two sub-layers, and pairs of steps
WHOLE_RUNS = 5
MODES = ("bare", "libraries", "watched", "every=10")  # the second one has watched another, tiny model before


def wholes() -> str:
    """Full-size models, each in processes of its own: CPU per step and peak memory."""
    lines = [
        "| model | CPU per step, bare | watched | every=10, mean | peak memory, bare | with the libraries | watched "
        "| first recorded step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for workload in (w for w in WORKLOADS if w.whole is not None):
        found = {mode: _middle([_in_process(workload.name, mode) for _ in range(WHOLE_RUNS)]) for mode in MODES}
        times = [found["bare"]["step"], found["watched"]["step"], found["every=10"]["mean"]]
        peaks = [f"{found[mode]['peak_mb']:,.0f} MB" for mode in ("bare", "libraries", "watched")]
        cells = [workload.name, *(f"{t:.2f} s" for t in times), *peaks, f"{found['watched']['first']:.1f} s"]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def _middle(runs: list[dict[str, float]]) -> dict[str, float]:
    """The median of every figure: what malloc makes of the same allocations differs by tens of MB between processes."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def _in_process(name: str, mode: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, __file__, name, mode], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def whole(name: str, mode: str) -> dict[str, float]:
    """Train a full-size model for some steps in this process."""
    torch.manual_seed(0)
    workload = next(w for w in WORKLOADS if w.name == name)
    training = Training(workload.whole(), workload.batch())
    steps, every = (12, 10) if mode == "every=10" else (6, 1)
    with tempfile.TemporaryDirectory() as folder:
        options = {"optimizer": training.optimizer, "every": every}
        if mode == "libraries":
            watch_something(f"{folder}/tiny.h5")
        is_bare = mode in {"bare", "libraries"}
        with nullcontext() if is_bare else ks.watch(training.model, f"{folder}/run.h5", **options):
            times = [_cpu(training.step) for _ in range(steps)]
    middle = statistics.median(times[2:])
    recorded = times[10] if mode == "every=10" else middle  # steps 0 and 10 are recorded; 0 also looks at the graph
    peak = peak_kilobytes() / 1024
    return {"step": middle, "mean": (9 * middle + recorded) / 10, "peak_mb": peak, "first": times[0]}


def watch_something(path: str) -> None:
    """What stays of a watch that is over: libraries, and the memory they took."""
    tiny = Training(Stack(1, 16, 2), tokens(1, 8, 256)())
    with ks.watch(tiny.model, path, optimizer=tiny.optimizer):
        tiny.step()
        tiny.step()


def _cpu(step: Callable[[], None]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def growth() -> str:
    """Extra CPU of a recorded step against depth, and against the number of steps recorded before."""
    extras = [_extra(blocks, pairs) for blocks, pairs in DEPTHS.items()]
    exponent, unsure = _exponent(extras)
    lines = ["| sub-layers | pairs | extra CPU per recorded step | standard error |", "|---|---|---|---|"]
    lines += [
        f"| {2 * blocks:,} | {pairs} | {1e3 * extra:.2f} ms | {1e3 * error:.2f} ms |"
        for (blocks, pairs), (extra, error) in zip(DEPTHS.items(), extras, strict=True)
    ]
    early, late = _early_and_late()
    lines += [
        "",
        f"The exponent of the line through them is {exponent:.2f} +- {unsure:.2f} (1 is linear). Watching a step takes "
        f"{early:.2f} ms of CPU among the first recorded steps and {late:.2f} ms after 1,500.",
    ]
    print("\n".join(lines), flush=True)
    return "\n".join(lines)


def _exponent(extras: list[tuple[float, float]]) -> tuple[float, float]:
    """Slope of the line through logarithms, weighted by what is known of each point, and its standard error."""
    known = np.array([extra / error for extra, error in extras])
    (slope, _), spread = np.polyfit(
        np.log(list(DEPTHS)), np.log([extra for extra, _ in extras]), 1, w=known, cov="unscaled"
    )
    return float(slope), float(np.sqrt(spread[0, 0]))


def _extra(blocks: int, pairs: int) -> tuple[float, float]:
    """Seconds of CPU that watching adds to a step of a narrow model, and the standard error.

    Two trainings change roles half-way: in a deep model it decides about some percent where its tensors lie.
    """
    one, other = (Training(Stack(blocks, 16, 2), tokens(1, 8, 256)()) for _ in range(2))
    halves = [_differences(*roles, pairs // 2) for roles in ((one, other), (other, one))]
    quartiles = [np.quantile(half, [0.25, 0.75]) for half in halves]
    errors = [0.93 * (high - low) / np.sqrt(pairs // 2) for low, high in quartiles]  # of normal distributions
    return float(np.mean(np.median(halves, axis=1))), float(np.hypot(*errors) / 2)


def _differences(plain: Training, probed: Training, pairs: int) -> list[float]:
    extras = []
    with (
        tempfile.TemporaryDirectory() as folder,
        ks.watch(probed.model, f"{folder}/run.h5", optimizer=probed.optimizer),
    ):
        for pair in range(-3, pairs):
            order = (plain, probed) if pair % 2 else (probed, plain)
            spent = {training: _cpu(training.step) for training in order}
            if pair >= 0:
                extras.append(spent[probed] - spent[plain])
    return extras


def _early_and_late() -> tuple[float, float]:
    """Median ``watch_ms`` of steps 20 to 320, and of the last 300 of 1,800."""
    training = Training(Stack(2, 16, 2), tokens(1, 8, 256)())
    with (
        tempfile.TemporaryDirectory() as folder,
        ks.watch(training.model, f"{folder}/run.h5", optimizer=training.optimizer) as session,
    ):
        for _ in range(1800):
            training.step()
        spent = session.run["scalars/watch_ms"].values
    return float(np.median(spent[20:320])), float(np.median(spent[1500:]))


def processes(steps: int) -> str:
    """CPU and wall time of whole processes, the best of five."""
    found = {
        "`import keelscope`": (_best("-c", "import keelscope"), "< 0.3 s"),
        "`keelscope --help`": (_best("-m", "keelscope", "--help"), "< 0.5 s"),
    }
    with tempfile.TemporaryDirectory() as folder:
        run = write_run(Path(folder) / "long.h5", 1024, steps, sealed=False)
        size = f"`keelscope report` of 1,024 layers, {steps:,} steps"
        found[f"{size}, just closed"] = (_best("-m", "keelscope", "report", run), "< 1.5 s")
        seal(run)
        found[f"{size}, sealed"] = (_best("-m", "keelscope", "report", run), "< 1.5 s")
    lines = ["| process | CPU | wall | target |", "|---|---|---|---|"]
    lines += [f"| {name} | {cpu:.2f} s | {wall:.2f} s | {target} |" for name, ((cpu, wall), target) in found.items()]
    print("\n".join(lines), flush=True)
    return "\n".join(lines)


def _best(*arguments: object) -> tuple[float, float]:
    """Seconds of CPU and of wall time; modules are compiled once, as where keelscope is installed."""
    cpu, wall = [], []
    with tempfile.TemporaryDirectory() as compiled:
        settings = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        settings["PYTHONPYCACHEPREFIX"] = compiled
        for _ in range(6):
            before, start = os.times(), time.perf_counter()
            command = [sys.executable, *map(str, arguments)]
            subprocess.run(command, capture_output=True, check=False, env=settings)
            after = os.times()
            wall.append(time.perf_counter() - start)
            cpu.append(sum(after[2:4]) - sum(before[2:4]))
    return min(cpu), min(wall)


def described() -> str:
    """Processor, cores, load and versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "h5py", "transformers"))
    kind = "compiled kernel" if kernel.is_compiled() else "torch operations only"
    load = f"load average when it was made {os.getloadavg()[1]:.1f}"
    cpu = names[0] if names else platform.processor()
    return f"{cpu}, {len(names)} cores, 1 thread used; Python {platform.python_version()}, {packages}; {kind}; {load}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(whole(*sys.argv[1:])))
