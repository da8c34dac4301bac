"""What watching costs: paired steps in one process, bare and watched in turn, with an A/A control.

Run by ``make bench``, which rewrites docs/benchmarks.md. CPU time of one thread; the ratio of the 10th percentiles and
of the medians over the pairs. Tiles have the block shape of a large model and few blocks, so that many pairs fit.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

import keelscope as ks
from keelscope import models

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
DASHBOARD = "<!-- dashboard -->"  # where the part that dashboard.py writes begins


@dataclass(frozen=True, slots=True)
class Workload:
    """One model shape."""

    name: str
    doc: str
    depth: int
    width: int
    batch: int
    length: int


@dataclass(frozen=True, slots=True)
class Ratio:
    """Watched over bare, from paired CPU times."""

    low: float
    median: float
    mean: float
    """Total over total: with ``every=10`` the only one of the three that sees the recorded steps."""
    extra_ms: float


WORKLOADS = (
    Workload("W1 tile", "4 blocks (8 sub-layers), d=128, 4 heads, T=64, B=4", 8, 128, 4, 64),
    Workload("W3 tile", "10 blocks (20 sub-layers), d=64, 4 heads, T=32, B=1", 20, 64, 1, 32),
)


class Training:
    """One model and one fixed batch; `step` is a whole training step."""

    def __init__(self, workload: Workload) -> None:
        self.model = models.build("pre_ln", depth=workload.depth, width=workload.width, heads=4, vocabulary=256)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.tokens = torch.randint(0, 256, (workload.batch, workload.length + 1))

    def step(self) -> None:
        logits = self.model(self.tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@contextmanager
def bare(_: Training) -> Iterator[None]:
    yield


def watched(**options: object) -> Callable[[Training], object]:
    """A watch writing to a file, as users run it."""

    @contextmanager
    def attach(training: Training) -> Iterator[None]:
        with (
            tempfile.TemporaryDirectory() as folder,
            ks.watch(training.model, f"{folder}/run.h5", optimizer=training.optimizer, **options),
        ):
            yield

    return attach


@contextmanager
def naive(training: Training) -> Iterator[None]:
    """The hooks people write first: six statistics with ``.item()`` per leaf, forward and full backward."""
    handles = []
    for module in training.model.modules():
        if not any(module.children()):
            handles.append(module.register_forward_hook(lambda m, i, o: _six(o)))
            handles.append(module.register_full_backward_hook(lambda m, i, o: _six(o[0])))
    yield
    for handle in handles:
        handle.remove()


def _six(tensor: object) -> None:
    if isinstance(tensor, torch.Tensor):
        t = tensor.detach().float()
        for value in (t.mean(), t.var(), t.norm(), t.abs().max(), (t == 0).float().mean(), t.isfinite().all()):
            value.item()


VARIANTS: dict[str, Callable[[Training], object]] = {
    "A/A control": bare,
    "default probes, every step": watched(),
    "default probes, every=10": watched(every=10),
    'default probes, sites="leaves"': watched(sites="leaves"),
    "naive .item() hooks, every leaf": naive,
}


def measure(workload: Workload, attach: Callable[[Training], object], pairs: int) -> Ratio:
    """Interleave bare and instrumented steps of two equal trainings."""
    torch.manual_seed(0)
    plain, probed = Training(workload), Training(workload)
    times: tuple[list[float], list[float]] = ([], [])
    with attach(probed):  # type: ignore[attr-defined]
        for pair in range(-5, pairs):
            for which in (0, 1) if pair % 2 else (1, 0):
                start = time.thread_time()
                (plain, probed)[which].step()
                if pair >= 0:
                    times[which].append(time.thread_time() - start)
    return _ratio(*times)


def _ratio(bare_times: list[float], probed_times: list[float]) -> Ratio:
    low = statistics.quantiles(probed_times, n=10)[0] / statistics.quantiles(bare_times, n=10)[0]
    pairs = sorted(b / a for a, b in zip(bare_times, probed_times, strict=True))
    extra = statistics.mean(probed_times) - statistics.mean(bare_times)
    mean = sum(probed_times) / sum(bare_times)
    return Ratio(low, statistics.median(pairs), mean, 1e3 * extra)


def table(pairs: int) -> str:
    """The markdown table of all workloads and variants."""
    lines = [
        "| workload | variant | p10 ratio | median ratio | mean ratio | extra ms per step |",
        "|---|---|---|---|---|---|",
    ]
    for workload in WORKLOADS:
        for name, attach in VARIANTS.items():
            r = measure(workload, attach, pairs)
            print(f"{workload.name}: {name}: {r.low:.3f} {r.median:.3f} {r.mean:.3f}", flush=True)
            lines.append(
                f"| {workload.name} | {name} | {r.low:.2f} | {r.median:.2f} | {r.mean:.2f} | {r.extra_ms:.2f} |"
            )
    return "\n".join(lines)


def machine() -> str:
    """Processor, cores and versions."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    cpu = names[0] if names else platform.processor()
    return f"{cpu}, {len(names)} cores, 1 thread used; Python {platform.python_version()}, torch {torch.__version__}"


def page(pairs: int) -> str:
    shapes = "\n".join(f"- **{w.name}**: {w.doc}, forward + cross-entropy + backward + AdamW" for w in WORKLOADS)
    return f"""# Benchmarks

What watching costs, regenerated by `make bench`: bare and watched training steps in turn, in one process,
{pairs} pairs, CPU time of the training thread. The run file is written. The A/A control pairs two bare trainings: what
it differs from 1 by cannot be resolved. No CUDA device was at hand; costs on a GPU are not measured.

Machine: {machine()}.

{shapes}

{table(pairs)}

Watching every step costs most where tensors are small, because each observation is a handful of torch operations
whatever its size. With `every=10` nine of ten steps carry no hooks, so low quantiles and the median show the bare step
and the mean shows what is paid in all.
"""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=150)
    torch.set_num_threads(1)
    told = PAGE.read_text() if PAGE.exists() else ""
    dashboard = told[told.find(DASHBOARD) :] if DASHBOARD in told else ""
    PAGE.write_text("\n".join(part for part in (page(parser.parse_args().pairs), dashboard) if part))
