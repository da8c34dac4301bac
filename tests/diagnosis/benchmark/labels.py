"""What a labelled model is, and how the builders of the benchmark are labelled and recorded.

A label says what is true of a model by the way it was built, never what the tool said of it. Builders live beside this
file, one file per kind of model, and take a seed and the options of a variant; `collect.py` gathers them.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F

import keelscope as ks
from keelscope.oneshot import record_once
from keelscope.text import Text

ROOT = Path(__file__).parents[3]
PROBES = ("default", "sublayers")
ACCEPTED = {"healthy": ("flat", "drifting")}
"""Headlines that a label accepts beside its own word. ``healthy`` leaves open how level a sound model is."""


@dataclass(frozen=True)
class Labelled:
    """One model of the benchmark."""

    build: Callable[..., object]
    """``build(seed, **variant)`` gives the recorded run."""
    seed: int
    variant: Mapping[str, object]
    family: str
    """Architecture; the split goes by family and seed."""
    headline: str
    """``healthy`` or a headline."""
    healthy: bool
    """Whether an error or a warning would be a false alarm."""
    findings: Mapping[str, frozenset[str] | Callable[[list[str]], bool]] = field(default_factory=dict)
    """Rule -> the sites it must name, all of them and no other; or a condition on them, input side first."""
    rounds: bool = False
    """Whether gradients are 0 but for rounding, which differs between processors, and absolute thresholds with it."""

    @property
    def name(self) -> str:
        """Builder, variant and seed."""
        options = ", ".join(str(v) if isinstance(v, str) else f"{key} {v}" for key, v in self.variant.items())
        return f"{self.build.__name__.replace('_', ' ')}{f' ({options})' if options else ''}, seed {self.seed}"

    @property
    def why(self) -> str:
        """The reason of the label, from the builder's docstring."""
        return " ".join((self.build.__doc__ or "").split())

    @property
    def needs(self) -> str:
        """Text that names the library it comes from, if any."""
        return f"{self.build.__globals__.get('NEEDS', '')} {self.family}"

    @property
    def is_slow(self) -> bool:
        """Left to slow tests: sound models at a further seed."""
        return self.healthy and self.seed > 0

    @property
    def half(self) -> str:
        """``calibration`` or ``test``: decided by architecture and seed alone."""
        digest = hashlib.sha256(f"{self.family} {self.seed}".encode()).digest()
        return ("calibration", "test")[digest[0] % 2]

    def at_other_seed(self, shift):
        """The same label at another seed."""
        return replace(self, seed=self.seed + shift)

    def record(self):
        """Build it and return its run."""
        torch.manual_seed(self.seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what libraries deprecate, and overflow that is meant
            return self.build(self.seed, **self.variant)

    def accepts(self, word: str) -> bool:
        """Whether a headline is right."""
        return word in ACCEPTED.get(self.headline, (self.headline,))

    def names_rightly(self, rule: str, sites: Sequence[str]) -> bool:
        """Whether a rule named the sites that the label asks for."""
        expected = self.findings[rule]
        return expected(list(sites)) if callable(expected) else expected == set(sites)


def label(headline, *, family, healthy=None, findings=None, seeds=(0,), variants=None, rounds=False):
    """Label a builder ``build(seed, **variant) -> run``; `findings` is a mapping or a function of the variant."""

    if variants is None:
        variants = ({},)

    def decorate(build):
        build.labelled = [
            Labelled(
                build=build,
                seed=seed,
                variant=variant,
                family=family.format(**variant),
                headline=headline,
                healthy=headline in ("healthy", "flat", "drifting") if healthy is None else healthy,
                findings=_sites(findings(**variant) if callable(findings) else findings or {}),
                rounds=rounds,
            )
            for variant in variants
            for seed in seeds
        ]
        return build

    return decorate


def _sites(findings):
    return {rule: sites if callable(sites) else frozenset(sites) for rule, sites in findings.items()}


def once(model, batch, loss):
    """One forward and backward, as ``keelscope report`` does it."""
    return record_once(model, batch, loss, probes=PROBES)


def train(model, batch, loss, *, steps, rate=0.05, learned=None):
    """Steps of plain gradient descent under a watch, over all parameters or the named ones."""
    with ks.watch(model, probes=PROBES) as session:
        for _ in range(steps):
            value = loss(model(*batch[:-1]), batch)
            session.log(loss=value)
            value.backward()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if parameter.grad is not None and (learned is None or name in learned):
                        parameter.sub_(rate * parameter.grad)
                    parameter.grad = None
            session.step()
    return session.run


def cross_entropy(output, batch):
    """Cross entropy of class scores, or of next-token scores, against the last entry of the batch."""
    return F.cross_entropy(output.flatten(0, -2).float(), batch[-1].flatten())


def squares(output, batch):
    """Mean square against the last entry of the batch."""
    return (output.float() - batch[-1]).square().mean()


def vectors(seed, *, width=24, batch=32, classes=5):
    """Standard normal vectors and classes."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(batch, width, generator=generator), torch.randint(classes, (batch,), generator=generator)


def images(seed, *, size=16, batch=6, classes=10):
    """Smooth pictures: a few waves each, as photographs have more energy at low frequencies."""
    generator = torch.Generator().manual_seed(2000 + seed)
    grid = torch.linspace(0, 3.14, size)
    waves = torch.randn(batch, 3, 4, 4, generator=generator)
    basis = torch.stack([torch.cos(k * grid) for k in range(4)])
    pictures = torch.einsum("bckl,kx,ly->bcxy", waves, basis, basis)
    return pictures / pictures.std(), torch.randint(classes, (batch,), generator=generator)


def text(seed, *, sequences=4, length=24):
    """Bytes of the licence and the bytes that follow them."""
    return Text.read(ROOT / "LICENSE").batch(0, sequences, length, seed=seed)


def tokens(seed, *, vocabulary=97, sequences=3, length=16) -> dict[str, torch.Tensor]:
    """Random tokens as a Hugging Face language model takes them."""
    ids = torch.randint(vocabulary, (sequences, length), generator=torch.Generator().manual_seed(3000 + seed))
    return {"input_ids": ids, "labels": ids}


def all_of(*paths, extra=()):
    """A condition: these modules are named, and nothing but them, what they contain, and `extra`."""

    def holds(sites):
        inside = [site for site in sites if any(site == path or site.startswith(f"{path}.") for path in paths)]
        return set(paths) <= set(sites) and set(sites) - set(inside) <= set(extra)

    return holds


def one_around(path):
    """A condition: one site, the module itself or the innermost watched one that contains it, and no whole block."""

    def holds(sites):
        return len(sites) == 1 and sites[0] in {path, path.rpartition(".")[0]}

    return holds
