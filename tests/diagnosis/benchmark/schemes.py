"""Reference schemes: what theory says of each at its own initialisation, at several depths and seeds."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import torch

from keelscope import models

kit = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("labels.py"))))
label = kit.label

SMALL = {"width": 32, "heads": 4}


def run(scheme, seed, **options):
    """One pass of a scheme on bytes of text."""
    return kit.once(models.build(scheme, seed=seed, **{**SMALL, **options}), kit.text(seed), kit.cross_entropy)


def branch_weights(depth, *, first=0):
    """Paths of the matrices of all branches."""
    names = (("query", "key", "value", "output"), ("hidden", "output"))
    return [f"sublayers.{i}.branch.{name}.weight" for i in range(first, depth) for name in names[i % 2]]


def lowest(upto, *, suffix=""):
    """Sites are a run of sub-layers from the input side, and none of the uppermost: where the decades are lost."""

    def holds(sites):
        numbers = [int(site.removesuffix(suffix).rpartition(".")[2]) for site in sites]
        return numbers[0] <= 2 and numbers[-1] < 60 and len(numbers) >= 0.8 * (numbers[-1] - numbers[0]) > upto / 4

    return holds


@label(
    "flat",
    family="{scheme}",
    seeds=(0, 1),
    variants=[
        {"scheme": name, "depth": depth}
        for name, depth in (
            ("keel", 16), ("keel_gate", 16), ("deepnorm", 16), ("ngpt", 16), ("completep", 16), ("depth_mup", 16),
            ("layerscale", 16), ("gpt2_scaled_init", 16),
        )
    ],
)  # fmt: skip
def flat_by_design(seed, scheme, depth):
    """A scheme built to keep the gradient level: branches scaled with depth, or a norm under a weighted shortcut."""
    return run(scheme, seed, depth=depth)


@label(
    "healthy",
    family="{scheme}",
    variants=[
        {"scheme": name, "depth": 16}
        for name in (
            "pre_ln", "peri_ln", "sandwich_ln", "normformer", "sub_ln", "ln_scaling", "attn_res", "hyper_connections",
            "mhc", "siamese_norm", "residual_dual", "mix_ln", "dyt",
        )
    ],
)  # fmt: skip
def sound(seed, scheme, depth):
    """A scheme whose gradient changes with depth as a power law, or over few layers only: at most drifting."""
    return run(scheme, seed, depth=depth)


@label("flat", family="{scheme}", variants=[{"scheme": "keel", "depth": 64}, {"scheme": "deepnorm", "depth": 48}])
def flat_and_deep(seed, scheme, depth):
    """Flat at any depth, says the theory of the scheme."""
    return run(scheme, seed, depth=depth)


@label("healthy", family="pre_ln", seeds=(1,), variants=[{"depth": 64}])
def sound_and_deep(seed, depth):
    """Pre-LN grows the gradient as a power law: half a decade over 64 sub-layers."""
    return run("pre_ln", seed, depth=depth)


@label(
    "flat",
    family="{scheme}",
    seeds=(0, 1),
    variants=[{"scheme": "rezero", "depth": 16}, {"scheme": "skipinit", "depth": 16}],
    findings={"zero_grad_by_init": branch_weights(16)},
)
def identity_at_first(seed, scheme, depth):
    """The identity at init: the gradient is exactly level, and every branch waits for its weight for one step."""
    return run(scheme, seed, depth=depth)


@label("flat", family="fixup")
def identity_by_last_matrix(seed):
    """Fixup: the last matrix of each branch is 0, so that the stream is the identity."""
    return run("fixup", seed, depth=16)


@label(
    "healthy",
    family="post_ln",
    seeds=(0, 1),
    variants=[{"init": "normal", "depth": 32}, {"init": "torch", "depth": 16}],
)
def post_ln_with_small_branches(seed, init, depth):
    """Post-LN whose branches are far smaller than the stream: 1/2 log10(1 + v) is below 0.01 decades per sub-layer."""
    return run("post_ln", seed, init=init, depth=depth)


@label(
    "healthy",
    family="{scheme} with {norm} norm",
    variants=[
        {"scheme": "pre_ln", "norm": "layer", "depth": 12},
        {"scheme": "keel", "norm": "scale", "depth": 12},
        {"scheme": "keel", "norm": "layer", "depth": 12},
        {"scheme": "deepnorm", "norm": "layer", "depth": 12},
    ],
)
def sound_with_other_norms(seed, scheme, norm, depth):
    """The laws of a scheme do not depend on which norm it uses."""
    return run(scheme, seed, norm=norm, depth=depth)


@label(
    "healthy",
    family="{scheme} {init}",
    variants=[
        {"scheme": "keel", "init": "torch", "depth": 12},
        {"scheme": "pre_ln", "init": "xavier", "depth": 12},
        {"scheme": "pre_ln", "init": "normal", "depth": 12},
        {"scheme": "peri_ln", "init": "normal", "depth": 12},
    ],
)
def sound_at_other_inits(seed, scheme, init, depth):
    """Usual initialisations change the size of the branches, not the shortcut."""
    return run(scheme, seed, init=init, depth=depth)


@label("healthy", family="pre_ln bf16", variants=[{"depth": 12}])
def pre_ln_in_bfloat16(seed, depth):
    """Branches and stream of like size: bfloat16 rounds, but absorbs nothing."""
    model = models.build("pre_ln", seed=seed, depth=depth, **SMALL).to(torch.bfloat16)
    return kit.once(model, kit.text(seed), kit.cross_entropy)


@label("healthy", family="pre_ln one token", variants=[{"scheme": "pre_ln"}, {"scheme": "keel"}], rounds=True)
def sequence_of_one_token(seed, scheme):
    """With one position softmax is constant, so that queries and keys have gradient 0 by construction: no illness."""
    model = models.build(scheme, seed=seed, depth=12, **SMALL)
    return kit.once(model, kit.text(seed, sequences=8, length=1), kit.cross_entropy)


@label(
    "vanishing",
    family="post_ln",
    seeds=(0, 1),
    variants=[{"depth": 64}],
    findings={"vanishing": lowest(40), "shortcut_attenuated": lowest(40, suffix=".branch")},
)
def post_ln_at_unit_gain(seed, depth):
    """0.07 decades per sub-layer at late tokens and 0.11 on the shortcut (Xiong et al.): 4.5 and 7 decades over 64."""
    return run("post_ln", seed, depth=depth)


@label("vanishing", family="hybrid_norm", seeds=(0, 1), findings={"shortcut_attenuated": lowest(40, suffix=".branch")})
def hybrid_norm_at_unit_gain(seed):
    """Post-LN's law in the feed-forward half: 0.05 decades per sub-layer at late tokens, 3.2 over 64."""
    return run("hybrid_norm", seed, depth=64)


@label("vanishing", family="highway closed shortcut", variants=[{"bias": 1.0}, {"bias": 2.0}])
def highway_with_open_gates(seed, bias):
    """Highway gates at sigmoid(b) > 1/2 leave a factor 1 - sigmoid(b) to the shortcut, the branches 32 times weaker.

    Output matrices are scaled by 1/32, so that the branch cannot make up for it: 0.57 (b = 1) or 0.92 decades (b = 2)
    per sub-layer.
    """
    model = models.build("highway", seed=seed, depth=16, gate_bias=bias, **SMALL)
    with torch.no_grad():
        for layer in model.sublayers:
            layer.branch.output.weight /= 32
    return kit.once(model, kit.text(seed), kit.cross_entropy)


@label(
    "flat",
    healthy=False,
    family="keel bf16",
    seeds=(0, 1),
    findings={"residual_absorbed": [f"sublayers.{i}.branch" for i in range(16)]},
)
def bfloat16_absorbs_the_branch(seed):
    """Keel with a shortcut weight of 1024 in bfloat16, whose 8 bits end at 1/256: the sum is the shortcut.

    The first block is built like the others (`first_block="none"`), so that all of them are concerned. The gradient
    itself is level, which is why the headline is flat.
    """
    model = models.build("keel", seed=seed, depth=16, alpha=1024.0, first_block="none", **SMALL).to(torch.bfloat16)
    return kit.once(model, kit.text(seed), kit.cross_entropy)


@label(
    "flat",
    family="keel_gate at one",
    seeds=(0, 1),
    findings={"zero_grad_by_init": branch_weights(12)},
)
def gates_at_one(seed):
    """Raw gates at T = 1: nothing of the branch passes, but the gate has a gradient and moves: alive."""
    return run("keel_gate", seed, depth=12, gate_init=1.0)


@label(
    "flat",
    healthy=False,
    family="keel_gate saturated",
    seeds=(0, 1),
    findings={"gate_dead": branch_weights(12), "saturated": [f"sublayers.{i}.gate.bias" for i in range(12)]},
)
def gates_that_cannot_open(seed):
    """Sigmoid gates with logit 40: T is 1 in float32 and its slope 0; neither gate nor branch will ever move."""
    model = models.build("keel_gate", seed=seed, depth=12, gate_init=0.9, activation="sigmoid", **SMALL)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".gate." in name:
                parameter.fill_(40.0)
    return kit.once(model, kit.text(seed), kit.cross_entropy)


@label(
    "healthy",
    healthy=False,
    family="highway almost closed",
    seeds=(0, 1),
    findings={"gate_closed": [f"sublayers.{i}.gate" for i in range(12)]},
)
def highway_with_closed_gates(seed):
    """Input-dependent gates with bias -7 let 0.001 of their branch through: the stream is level, the branches idle."""
    return run("highway", seed, depth=12, gate="token", gate_bias=-7.0)


@label("exploding", family="sum without norm", seeds=(0, 1))
def sum_without_norm(seed):
    """x + F(x) without any norm: each sub-layer multiplies the power by 1 + v, forward and backward.

    v is at least 0.43 for a feed-forward branch at unit gain (second moment of GELU): 0.08 decades, 2.5 over 32 of
    them. Queries are 0, so that attention only averages: with scores that grow like the stream the gradient of
    softmax would overflow, which is another illness.
    """
    model = models.build("rezero", seed=seed, depth=64, **SMALL)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("alpha"):
                parameter.fill_(1.0)
            elif ".query." in name:
                parameter.zero_()
    return kit.once(model, kit.text(seed), kit.cross_entropy)
