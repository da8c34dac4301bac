"""What builders of the unseen half share: the labels of the benchmark, ways to take steps, conditions on sites.

Nothing here knows a rule or a threshold of the tool. `fit` is the training loop that most people write.
"""

from __future__ import annotations

import runpy
from contextlib import nullcontext
from pathlib import Path

import torch

import keelscope as ks

LABELS = runpy.run_path(str(Path(__file__).parents[1] / "benchmark" / "labels.py"))
label, once, cross_entropy, squares = (LABELS[name] for name in ("label", "once", "cross_entropy", "squares"))
vectors, images, text, tokens = (LABELS[name] for name in ("vectors", "images", "text", "tokens"))
PROBES = LABELS["PROBES"]


def fit(model, loss_of, *, steps, optimizer, clip=None, accumulate=1, every=None):
    """Optimizer steps under a watch; ``loss_of(k)`` is the loss of micro-batch k."""
    with ks.watch(model, optimizer=optimizer, probes=PROBES, **({} if every is None else {"every": every})) as session:
        for step in range(steps):
            for part in range(accumulate):
                loss = loss_of(step * accumulate + part) / accumulate
                loss.backward()
            session.log(loss=loss)
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return session.run


def settle(model, batch, loss, *, steps, rate=1e-3, decay=0.0):
    """Steps of AdamW before anybody watches."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=decay)
    for _ in range(steps):
        loss(model(*batch[:-1]), batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def autocast(dtype):
    """Mixed precision on the processor; nothing for None."""
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def output_loss(output, batch):
    """The loss that a module computes itself."""
    return output


def generator_of(seed):
    """A source of random numbers of its own."""
    return torch.Generator().manual_seed(7000 + seed)


def under(*paths):
    """A condition: sites are named, and all of them are these modules or inside them."""

    def holds(sites):
        return bool(sites) and all(any(site == p or site.startswith(f"{p}.") for p in paths) for site in sites)

    return holds


def first_under(*paths):
    """A condition: the first site named, input side first, is one of these modules, in it, or directly around it."""
    around = {path.rpartition(".")[0] for path in paths}

    def holds(sites):
        return bool(sites) and (under(*paths)(sites[:1]) or sites[0] in around)

    return holds


def some(sites):
    """A condition: at least one site is named."""
    return bool(sites)
