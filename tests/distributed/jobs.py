"""What each of several ranks does in the tests of distributed training, and the server that forks the ranks.

As a script it reads ``(world, job, arguments)`` from stdin and writes the list of what each rank returned, or
the text of its traceback; a rank that was killed gives None.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import runpy
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import keelscope as ks
from keelscope.probe import available_probes
from keelscope.store.pace import Pace

TIMEOUT = 120

BATCH = 8
STEPS = 3


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Sizes that neither two nor four ranks divide: shards are uneven, and on four ranks some are empty."""

    def __init__(self, width: int = 5, hidden: int = 7, depth: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def fresh(seed: int = 0, **sizes: int) -> Net:
    torch.manual_seed(seed)
    return Net(**sizes)


def batch(step: int) -> Tensor:
    return torch.randn(BATCH, 6, 3, generator=torch.Generator().manual_seed(100 + step))


def own(x: Tensor) -> Tensor:
    """This rank's part of the batch."""
    return x.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else x


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sum(-1, keepdim=True)).square().mean()


def plain(model: nn.Module, x: Tensor, step: int) -> Tensor:
    loss = loss_of(model, own(x))
    loss.backward()
    return loss


def train(
    model: nn.Module, backward: Callable[..., Tensor] = plain, *, steps: int = STEPS, clip: float = 0.0, **options
):
    """A training, watched where options are given: what the rank recorded, what is true, and what it left behind."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watched = ks.watch(model, optimizer=optimizer, **options) if options else contextlib.nullcontext()
    losses, truth = [], []
    with watched as watch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            losses.append(backward(model, batch(step), step).detach())
            truth.append(gradient_norms(model))
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    weights = [local(p.detach()).clone() for p in model.parameters()]
    found = recorded(watch.run) if options and "path" not in options else {}
    coverage = {(e.path, e.what): e.status for e in watch.coverage} if options else {}
    notes = watch.run.notes if found else ()
    said = [str(w.message) for w in caught if "keelscope" in type(w.message).__module__]
    return {
        "run": found, "truth": truth, "losses": losses, "weights": weights, "coverage": coverage, "warnings": said,
        "notes": notes,
    }  # fmt: skip


def gradient_norms(model: nn.Module) -> dict[str, float]:
    """Of every parameter, put together from all ranks."""
    whole = {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in model.named_parameters()}
    return {n.removeprefix("module."): float(torch.linalg.vector_norm(g.double())) for n, g in whole.items()}


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def recorded(run: ks.Run) -> dict[str, Any]:
    """Everything a rank wrote, with how it combines."""
    found: dict[str, Any] = {}
    for group in run.groups.values():
        for statistic in group.statistics:
            series = run[f"{group.name}/{statistic.name}"]
            found[f"{group.name}/{statistic.name}"] = {
                "values": series.values,
                "sites": [site.path for site in group.sites],
                "across": statistic.across_ranks,
                "provenance": dict(group.provenance),
            }
    return found


PROBES = ("default", "inputs", "updates", "sublayers", "tokens")


def single(**options):
    return train(fresh(), probes=PROBES, **options)


def ddp():
    return train(nn.parallel.DistributedDataParallel(fresh()), probes=PROBES)


LITTLE = ("gradients", "parameters", "parameter_gradients", "updates")


def sharded(model: nn.Module, mesh: object = None, **options: object) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp():
    return train(sharded(fresh()), probes=PROBES)


def hsdp():
    from torch.distributed import init_device_mesh

    return train(
        sharded(fresh(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))), probes=LITTLE
    )


def split(model: nn.Module, mesh: object) -> nn.Module:
    """Tensor parallel blocks; norms, first and last layer stay ordinary tensors on every rank."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def whole_batch(model: nn.Module, x: Tensor, step: int) -> Tensor:
    loss = loss_of(model, x)
    loss.backward()
    return loss


def tensor_parallel():
    from torch.distributed import init_device_mesh

    model = split(fresh(width=4, hidden=8), init_device_mesh("cpu", (dist.get_world_size(),)))
    return train(model, whole_batch, probes=LITTLE)


def sequence_parallel():
    """Norms on parts of the sequence: their gradients stay parts of a sum, which no rank adds up before the step."""
    from torch.distributed import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    model, mesh = fresh(width=4, hidden=8).blocks[0], init_device_mesh("cpu", (2,))
    plan = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1))}
    parallelize_module(model, mesh, plan | {"down": RowwiseParallel(output_layouts=Shard(1))})
    x = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(1)).chunk(2, dim=1)[dist.get_rank()]
    with ks.watch(model, probes=PROBES, sites="all") as watch:
        model(x).square().sum().backward()
    return {"run": recorded(watch.run), "coverage": {(e.path, e.what): e.status for e in watch.coverage}}


def sharded_after_watching():
    model = fresh()
    with ks.watch(model, probes=LITTLE) as watch:
        sharded(model)
        loss_of(model, own(batch(0))).backward()
        watch.step()
    return {e.path: (e.status, e.reason) for e in watch.coverage if e.what == "parameter"}


def fsdp_with_tensor_parallel():
    """Two groups of data, the layers of each on two ranks."""
    from torch.distributed import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = sharded(split(fresh(width=4, hidden=8), mesh["tensor"]), mesh["data"])

    def half(model: nn.Module, x: Tensor, step: int) -> Tensor:
        return whole_batch(model, x.chunk(2)[mesh["data"].get_local_rank()], step)

    return train(model, half, probes=LITTLE)


def accumulated(model: nn.Module, x: Tensor, step: int, parts: int = 6) -> Tensor:
    """Micro-batches of one sample; ranks exchange gradients with the last only."""
    total = torch.zeros(())
    pieces = own(x).repeat_interleave(2, 0)[:parts].split(1)
    for i, piece in enumerate(pieces):
        last = i == len(pieces) - 1
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(last)
        waiting = model.no_sync() if hasattr(model, "no_sync") and not last else contextlib.nullcontext()
        with waiting:
            loss = loss_of(model, piece) / len(pieces)
            loss.backward()
        total += loss.detach()
    return total


def variants(of: str):
    """Ways to train data-parallel, one after the other."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    parallel = nn.parallel.DistributedDataParallel
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    build = {
        "ddp_views": lambda: parallel(fresh(), gradient_as_bucket_view=True),
        "ddp_static": lambda: parallel(fresh(), static_graph=True),
        "ddp_accumulated": lambda: parallel(fresh()),
        "fsdp_accumulated": lambda: sharded(fresh()),
        "fsdp_half": lambda: sharded(fresh(), mp_policy=half),
        "fsdp_offloaded": lambda: sharded(fresh(), offload_policy=CPUOffloadPolicy(pin_memory=False)),
        "fsdp_kept": lambda: sharded(fresh(), reshard_after_forward=False),
        "fsdp_checkpointed": lambda: sharded(checkpointed(fresh())),
    }
    chosen = {name: make for name, make in build.items() if name.startswith(of)}
    ways = {name: accumulated if "accumulated" in name else plain for name in chosen}
    probes = (*LITTLE, "parameter_gradients+clipped_norm")
    return {name: train(make(), ways[name], probes=probes, clip=0.01, steps=2) for name, make in chosen.items()}


def accumulated_without_optimizer():
    """Nobody says when a step is complete before the first is."""
    model = sharded(fresh())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    truth = []
    with ks.watch(model, probes=LITTLE) as watch:
        for step in range(2):
            accumulated(model, batch(step), step)
            truth.append(gradient_norms(model))
            optimizer.step()
            optimizer.zero_grad()
            watch.step()
    return {"run": recorded(watch.run), "truth": truth, "warnings": []}


def checkpointed(model: nn.Module) -> nn.Module:
    from torch.distributed._composable import checkpoint

    for block in model.blocks:
        checkpoint(block)
    return model


def unwatched_and_watched(how: str, every: int, steps: int = 20):
    def build() -> nn.Module:
        return sharded(fresh()) if how == "fsdp" else nn.parallel.DistributedDataParallel(fresh())

    return train(build(), steps=steps, clip=0.5), train(build(), steps=steps, clip=0.5, probes=PROBES, every=every)


def only_the_first_watches(how: str):
    model = sharded(fresh()) if how == "fsdp" else nn.parallel.DistributedDataParallel(fresh())
    return train(model, clip=0.5, **({"probes": LITTLE} if dist.get_rank() == 0 else {}))


def to_file(path: str, how: str):
    model = sharded(fresh()) if how == "fsdp" else nn.parallel.DistributedDataParallel(fresh())
    return train(model, probes=LITTLE, path=path)


def from_page(script: str, port: int):
    """A script as `torchrun` would run it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.chdir(Path(script).parent)
    runpy.run_path(script)


def first_to_file(path: str, how: str):
    """Only one rank watches, and writes."""
    model = sharded(fresh()) if how == "fsdp" else nn.parallel.DistributedDataParallel(fresh())
    return train(model, **({"probes": PROBES, "path": path} if dist.get_rank() == 0 else {}))


def killed(path: str, at: int, steps: int):
    """The last rank is killed in its backward pass; the others notice, and go on without it."""
    model = nn.parallel.DistributedDataParallel(fresh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ks.watch(model, path, optimizer=optimizer, probes=LITTLE, pace=Pace(batch=1)) as watch:
        for step in range(at):
            plain(model, batch(step), step)
            optimizer.step()
            optimizer.zero_grad()
        assert len(watch.run.steps)  # everything is committed
        if dist.get_rank() == dist.get_world_size() - 1:
            model.module.head.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        with contextlib.suppress(RuntimeError):
            plain(model, batch(at), at)
        for step in range(at, steps):
            optimizer.zero_grad()
            plain(model.module, batch(step), step)
            optimizer.step()
    return "done"


class Stage(nn.Module):
    """Part of `Net`, under the names of the whole."""

    def __init__(self, whole: Net, entries: range) -> None:
        super().__init__()
        self.inp = whole.inp if entries.start == 0 else nn.Identity()
        self.blocks = nn.ModuleDict({str(i): whole.blocks[i] for i in entries})
        self.head = whole.head if entries.stop == len(whole.blocks) else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(x)


def staged(path: str, depth: int = 6):
    """Two stages of one model, which hand each other activations and their gradients."""
    rank, half = dist.get_rank(), depth // 2
    model = Stage(fresh(depth=depth), range(half * rank, half * (rank + 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ks.watch(model, path, optimizer=optimizer, probes=PROBES) as watch:
        for step in range(STEPS):
            x = batch(step)
            between = torch.empty(*x.shape[:-1], 5, requires_grad=True)
            if rank == 0:
                out = model(x)
                dist.send(out.detach(), 1)
                gradient = torch.empty_like(out)
                dist.recv(gradient, 1)
                out.backward(gradient)
            else:
                dist.recv(between.data, 0)
                loss = (model(between) - x.sum(-1, keepdim=True)).square().mean()
                loss.backward()
                dist.send(between.grad, 0)
                watch.log(loss=loss)
            optimizer.step()
            optimizer.zero_grad()


def run_rank(rank: int, world: int, folder: Path, job: str, arguments: tuple) -> None:
    signal.alarm(TIMEOUT)  # a hang ends here, and with it the test
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)
        module, _, name = job.rpartition(":")
        result = (getattr(importlib.import_module(module), name) if module else globals()[name])(*arguments)
    except BaseException:
        result = f"rank {rank}: {traceback.format_exc()}"
    (folder / f"{rank}.tmp").write_bytes(pickle.dumps(result))
    (folder / f"{rank}.tmp").rename(folder / f"{rank}.pickle")
    leave_together([folder / f"{other}.pickle" for other in range(world)])


def leave_together(results: list[Path], seconds: float = 5.0) -> None:
    """Who exits first resets connections that others still read from; a rank that was killed is not waited for long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not all(result.exists() for result in results):
        time.sleep(0.01)


def serve() -> None:
    for name in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.profiler"):
        importlib.import_module(name)  # once, before the forks
    available_probes()
    assert callable(ks.watch)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            world, job, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        with tempfile.TemporaryDirectory() as name:
            folder, children = Path(name), []
            for rank in range(world):
                child = os.fork()
                if not child:
                    run_rank(rank, world, folder, job, arguments)
                    os._exit(0)
                children.append(child)
            for child in children:
                os.waitpid(child, 0)
            files = [folder / f"{rank}.pickle" for rank in range(world)]
            pickle.dump([pickle.loads(file.read_bytes()) if file.exists() else None for file in files], out)
            out.flush()


if __name__ == "__main__":
    serve()
