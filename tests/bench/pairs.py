"""Bare and instrumented training steps in turn, in one process."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from workloads import Training, Workload

__all__ = ["Attach", "Make", "Ratio", "bare", "measure", "ordinary", "peak_kilobytes", "repeated"]

Attach = Callable[[Training], AbstractContextManager[object]]
Make = Callable[[Workload], Training]
FEWEST = 5  # pairs, however long they take


@dataclass(frozen=True, slots=True)
class Ratio:
    """Watched over bare."""

    low: float
    median: float
    mean: float
    """Total over total: where only some steps are recorded, the only one that sees them."""
    wall: float
    extra_ms: float
    mean_ms: float
    size: float
    """Bytes of the run file per recorded step."""
    pairs: int


@contextmanager
def bare(_: Training) -> Iterator[None]:
    yield


def ordinary(workload: Workload) -> Training:
    return Training(workload.model(), workload.batch())


def measure(
    workload: Workload,
    attach: Attach,
    pairs: int,
    *,
    make: Make = ordinary,
    seconds: float = float("inf"),
    warm: int = 5,
) -> Ratio:
    """Interleave bare and instrumented steps of two equal trainings; fewer pairs if they take longer than asked."""
    trainings = []
    for _ in range(2):
        torch.manual_seed(0)
        trainings.append(make(workload))
    times: tuple[list[float], list[float]] = ([], [])
    walls: tuple[list[float], list[float]] = ([], [])
    with attach(trainings[1]):
        begun = time.perf_counter()
        for pair in range(-warm, pairs):
            if pair >= FEWEST and time.perf_counter() - begun > seconds:
                break
            for which in (0, 1) if pair % 2 else (1, 0):
                start, wall = time.process_time(), time.perf_counter()
                trainings[which].step()
                if pair >= 0:
                    times[which].append(time.process_time() - start)
                    walls[which].append(time.perf_counter() - wall)
    return ratio(times, walls, trainings[1].size / (len(times[0]) + warm))


def repeated(workload: Workload, attach: Attach, pairs: int) -> Ratio:
    """The median of every figure over as many measurements as a workload asks for, each of two new trainings."""
    found = [measure(workload, attach, pairs) for _ in range(workload.trainings)]
    return Ratio(*(statistics.median(figures) for figures in zip(*map(astuple, found), strict=True)))


def ratio(times: tuple[list[float], list[float]], walls: tuple[list[float], list[float]], size: float) -> Ratio:
    tenth = [sorted(several)[len(several) // 10] for several in times]
    middle = [statistics.median(several) for several in times]
    return Ratio(
        low=tenth[1] / tenth[0],
        median=middle[1] / middle[0],
        mean=sum(times[1]) / sum(times[0]),
        wall=statistics.median(walls[1]) / statistics.median(walls[0]),
        extra_ms=1e3 * (tenth[1] - tenth[0]),
        mean_ms=1e3 * (statistics.mean(times[1]) - statistics.mean(times[0])),
        size=size,
        pairs=len(times[0]),
    )


def peak_kilobytes() -> int:
    """Largest resident memory of this process; what getrusage says includes that of the parent."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(next(line for line in status.read_text().splitlines() if line.startswith("VmHWM")).split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
