"""What watching costs: paired steps in one process, bare and watched in turn, with an A/A control.

Run by ``make bench``, which rewrites its part of docs/benchmarks.md. CPU time of the process on one thread (the thread
that writes the run file included); ratios of the 10th percentiles and of the medians.
"""

from __future__ import annotations

import argparse
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from machine import described, growth, page_of, processes, wholes
from peers import PEERS
from workloads import WORKLOADS, Training, Workload

import keelscope as ks
from keelscope import kernel
from keelscope.probe import resolve_probes

Attach = Callable[[Training], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Watched over bare."""

    low: float
    median: float
    mean: float
    """Total over total: where only some steps are recorded, the only one that sees them."""
    wall: float
    extra_ms: float
    size: float
    """Bytes of the run file per recorded step."""


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


@contextmanager
def bare(_: Training) -> Iterator[None]:
    yield


EVERYTHING = "default,norms,sublayers,inputs,updates,tokens,attention"


def variants(workload: Workload) -> dict[str, Attach]:
    """What is measured on a workload."""
    found: dict[str, Attach] = {
        "A/A control": bare,
        "blocks and norms": watched(workload.blocks),
        "default sites": watched(),
        "default sites, every=10": watched(every=10),
        "default sites, steps not recorded": watched(every=1000),
    }
    if workload.name == "W5":
        return found
    found |= {
        "every leaf": watched(sites="leaves"),
        "blocks and norms, torch": watched(workload.blocks, compiled=False),
    }
    if workload.name in {"W1", "W2", "W3"}:
        found |= {
            "norms alone, on its step": watched(each="norms"),
            "sublayers alone, on its step": watched(each="sublayers"),
        }
    if workload.name in {"W1", "W3"}:
        found["all but jacobians"] = watched(probes=EVERYTHING)
        found |= PEERS
    return found


def measure(workload: Workload, attach: Attach, pairs: int) -> Ratio:
    """Interleave bare and instrumented steps of two equal trainings."""
    trainings = []
    for _ in range(2):
        torch.manual_seed(0)
        trainings.append(Training(workload.model(), workload.batch()))
    times: tuple[list[float], list[float]] = ([], [])
    walls: tuple[list[float], list[float]] = ([], [])
    with attach(trainings[1]):
        for pair in range(-5, pairs):
            for which in (0, 1) if pair % 2 else (1, 0):
                start, wall = time.process_time(), time.perf_counter()
                trainings[which].step()
                if pair >= 0:
                    times[which].append(time.process_time() - start)
                    walls[which].append(time.perf_counter() - wall)
    return ratio(times, walls, trainings[1].size / (pairs + 5))


def ratio(times: tuple[list[float], list[float]], walls: tuple[list[float], list[float]], size: float) -> Ratio:
    tenth = [sorted(several)[len(several) // 10] for several in times]
    middle = [statistics.median(several) for several in times]
    return Ratio(
        low=tenth[1] / tenth[0],
        median=middle[1] / middle[0],
        mean=sum(times[1]) / sum(times[0]),
        wall=statistics.median(walls[1]) / statistics.median(walls[0]),
        extra_ms=1e3 * (tenth[1] - tenth[0]),
        size=size,
    )


def table(pairs: int, only: str) -> str:
    """The markdown table of all workloads and variants."""
    lines = [
        "| tile | watched | CPU p10 | CPU median | CPU mean | wall median | extra ms | bytes per step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for workload in WORKLOADS:
        for name, attach in variants(workload).items() if only in workload.name else ():
            try:
                r = measure(workload, attach, max(10, int(pairs * workload.pairs)))
            except Exception as error:  # a peer that cannot run is said to be so
                print(f"{workload.name}: {name}: {type(error).__name__}: {error}", file=sys.stderr)
                lines.append(f"| {workload.name} | {name} | does not run: {type(error).__name__} | | | | | |")
                continue
            size = f"{r.size:,.0f}" if r.size else ""
            figures = " | ".join(f"{x:.2f}" for x in (r.low, r.median, r.mean, r.wall, r.extra_ms))
            lines.append(f"| {workload.name} | {name} | {figures} | {size} |")
            print(lines[-1], flush=True)
    return "\n".join(lines)


def preload() -> None:
    """Import what workloads take from transformers before a peer is imported that gets in its way."""
    import transformers

    for name in ("GPT2LMHeadModel", "ResNetForImageClassification"):
        getattr(transformers, name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--only", default="", help="part of a workload's name; prints, and writes nothing")
    parser.add_argument("--report-steps", type=int, default=100_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runpy.run_path(str(Path(__file__).parents[1] / "conftest.py"))["declare_operators"]()
    preload()
    measured = table(arguments.pairs, arguments.only)
    if not arguments.only:
        parts = [measured, *["Not measured yet."] * 3]
        page = Path(__file__).parents[2] / "docs" / "benchmarks.md"
        later = (wholes, growth, lambda: processes(arguments.report_steps))
        for place, part in enumerate((None, *later)):
            parts[place] = part() if part else measured
            page.write_text(page_of(page.read_text(), described(), WORKLOADS, arguments.pairs, parts))
