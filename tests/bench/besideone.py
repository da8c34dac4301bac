"""Tools measured one by one: ``python besideone.py NAME,NAME,... TILE,TILE,...`` prints JSON, a line per tool and tile.

Every tool is imported in a forked process of its own, and every figure is of a process forked from that one: the first
times pairs of steps, two take a few steps without and with the tool for their largest resident memory.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version

import othertools as tools
import peers
import torch
from pairs import Attach, Make, bare, measure, ordinary, peak_kilobytes
from workloads import WORKLOADS, Workload, hide_torchvision

MEMORY_STEPS, LIMIT = 3, 900
SECONDS = float(os.environ.get("BENCH_SECONDS", "20"))  # for the pairs of a tool on a tile, at most


@dataclass(frozen=True, slots=True)
class Tool:
    """How a tool is put on a training, and what must be there for it."""

    attach: Callable[[Workload], Attach]
    imports: tuple[str, ...] = ()
    make: Make = ordinary
    once_in: int = 1
    """Steps of which one is recorded: so many pairs are measured, whatever they take."""
    package: str = field(default="torch")


def keelscope(*, blocks_only: bool = False, **options: int | str) -> Tool:
    def attach(workload: Workload) -> Attach:
        from watchers import watched

        return watched(workload.blocks if blocks_only else "", **options)

    return Tool(attach, ("watchers",), once_in=int(options.get("every", 1)), package="keelscope")


def tool(attach: Attach, package: str = "torch", *imports: str, make: Make = ordinary, once_in: int = 1) -> Tool:
    return Tool(lambda _: attach, imports, make, once_in, package)


TOOLS: dict[str, Tool] = {
    "control": tool(bare),
    "keelscope-norms": keelscope(blocks_only=True),
    "keelscope": keelscope(),
    "keelscope-leaves": keelscope(sites="leaves"),
    "keelscope-100": keelscope(every=100),
    "naive-leaves": tool(peers.naive(peers.is_leaf)),
    "naive-blocks": tool(peers.naive(lambda module: "Block" in type(module).__name__)),
    "grad-flow": tool(tools.before_step(tools.grad_flow)),
    "clip": tool(tools.before_step(tools.clipped)),
    "anomaly": tool(tools.anomaly),
    "lightning": tool(tools.before_step(tools.lightning_norms), "lightning", "lightning.pytorch.utilities"),
    "tensorboard": tool(tools.histograms, "tensorboard", "torch.utils.tensorboard"),
    "wandb": tool(peers.wandb_watch(1), "wandb", "wandb"),
    "wandb-100": tool(peers.wandb_watch(100), "wandb", "wandb", once_in=100),
    "underflow": tool(peers.underflow, "transformers", "transformers.debug_utils"),
    "tensor-tracker": tool(tools.tracked, "tensor-tracker", "tensor_tracker"),
    "torchlens": tool(tools.torchlens_trace, "torchlens", "torchlens"),
    "nnsight": tool(tools.nnsight_blocks, "nnsight", "nnsight"),
    "transformer-lens": tool(tools.run_with_cache, "transformer-lens", "transformer_lens", make=tools.hooked),
    "composer": tool(tools.optimizer_monitor, "mosaicml", "composer.callbacks", "composer.optim", make=tools.composed),
}


def timed(chosen: Tool, workload: Workload) -> dict[str, object]:
    pairs = 100 if chosen.once_in > 1 else max(10, int(100 * min(1, 2 * workload.pairs)))
    seconds, warm = (float("inf"), 5) if chosen.once_in > 1 else (SECONDS, 3)
    return asdict(measure(workload, chosen.attach(workload), pairs, make=chosen.make, seconds=seconds, warm=warm))


def peak(chosen: Tool, workload: Workload, attach: Attach) -> float:
    """Megabytes."""
    training = chosen.make(workload)
    with attach(training):
        for _ in range(MEMORY_STEPS):
            training.step()
    return peak_kilobytes() / 1024


def forked(action: Callable[[], object]) -> object:
    """What an action returns in a process of its own."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        signal.alarm(LIMIT)
        try:
            told = {"value": action()}
        except BaseException as error:
            traceback.print_exc()
            told = {"error": first_line(error)}
        with os.fdopen(writing, "w") as pipe:
            json.dump(told, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    told = json.loads(text or '{"error": "its process ended"}')
    if "error" in told:
        raise RuntimeError(told["error"])
    return told["value"]


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def figures(chosen: Tool, workload: Workload) -> dict[str, object]:
    found = forked(lambda: timed(chosen, workload))
    memory = [forked(lambda put=put: peak(chosen, workload, put)) for put in (bare, chosen.attach(workload))]
    return {"ratio": found, "memory": memory}


def told_of(name: str, tiles: list[str]) -> None:
    """Print what is found of a tool, tile by tile."""
    chosen = TOOLS[name]
    for module in chosen.imports:
        importlib.import_module(module)
    told = {"name": name, "torch": torch.__version__}
    with suppress(PackageNotFoundError):
        told["version"] = version(chosen.package)
    for workload in (w for w in WORKLOADS if w.name in tiles):
        try:
            found = figures(chosen, workload)
        except RuntimeError as error:
            found = {"error": str(error)}
        print(json.dumps({**told, "tile": workload.name, **found}), flush=True)


def main(names: list[str], tiles: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if "W2" in tiles:
        try:
            importlib.import_module("torchvision")  # Composer takes it from where it is
        except Exception:  # whatever it is that is wrong with it
            hide_torchvision()
        importlib.import_module("transformers").GPT2LMHeadModel  # noqa: B018  (imported when asked for)
    for name in names:
        try:
            forked(lambda name=name: told_of(name, tiles))
        except RuntimeError as error:
            print(json.dumps({"name": name, "error": str(error)}), flush=True)


if __name__ == "__main__":
    main(*(argument.split(",") for argument in sys.argv[1:3]))
