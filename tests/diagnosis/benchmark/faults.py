"""Sound networks with one fault built in: where the gradient stops, turns non-finite, or was never meant to go."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from keelscope import models

HERE = Path(__file__).parent
kit = SimpleNamespace(**runpy.run_path(str(HERE / "labels.py")))
nets = SimpleNamespace(**runpy.run_path(str(HERE / "plain.py")))
label = kit.label


class Faulty(nets.Residual):
    """A residual network with something done to the stream before block `at`, or inside that block's sum."""

    def __init__(self, depth=12, *, at=6, before=lambda x: x, branch=None, **options):
        super().__init__(depth, **options)
        self.at, self.before, self.branch = at, before, branch

    def forward(self, x):
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            if i == self.at:
                x = self.before(x)
            x = self.branch(block, x) if i == self.at and self.branch else block(x)
        return self.head(x)


def blocks(stop, start=0):
    """Paths of blocks."""
    return [f"blocks.{i}" for i in range(start, stop)]


def parameters(paths, names=("norm", "first", "second")):
    """Weights and biases of the linear layers and norms of blocks."""
    return [f"{path}.{name}.{kind}" for path in paths for name in names for kind in ("weight", "bias")]


@label(
    "dead",
    family="detached stream",
    seeds=(0, 1, 2),
    findings={"disconnected": ["stem", *blocks(6)]},
)
def detached_in_the_middle(seed):
    """x.detach() before block 6: the stem and six blocks are trainable, run, and get no gradient."""
    return nets.judged(Faulty(before=torch.Tensor.detach), seed)


@label("healthy", healthy=False, family="detached branch", seeds=(0, 1), findings={"disconnected": ["blocks.6"]})
def detached_branch(seed):
    """One branch computed under no_grad: the shortcut carries the gradient past it, one block does not train."""

    def branch(block, x):
        return x + (block(x) - x).detach()

    return nets.judged(Faulty(branch=branch), seed)


@label("healthy", healthy=False, family="detached embedding", seeds=(0, 1), findings={"disconnected": ["stem"]})
def detached_stem(seed):
    """The stream is detached right after the stem: every block trains, the stem does not."""
    return nets.judged(Faulty(at=0, before=torch.Tensor.detach), seed)


@label(
    "dead",
    family="multiplied by zero",
    seeds=(0, 1),
    findings={"zero_gradient": kit.all_of("stem", *blocks(6), extra={"blocks.6.first.weight"})},
)
def stream_multiplied_by_zero(seed):
    """The stream times 0 plus a constant before block 6: connected, and the gradient below is exactly 0.

    A norm makes 0 of a constant, so that the weight behind it in block 6 has gradient 0, too.
    """
    return nets.judged(Faulty(before=lambda x: 0.0 * x + 0.1), seed)


@label(
    "healthy",
    healthy=False,
    family="branch times zero",
    seeds=(0, 1),
    findings={"gate_dead": parameters(["blocks.6"])},
)
def branch_multiplied_by_zero(seed):
    """One branch is multiplied by a mask of 0, recorded over 4 steps of training: its block never gets a gradient."""

    def branch(block, x):
        return x + 0.0 * (block(x) - x)

    return kit.train(Faulty(branch=branch), kit.vectors(seed), kit.cross_entropy, steps=4)


@label("healthy", family="frozen lower half", seeds=(0, 1), findings={"frozen": ["stem", *blocks(6)]})
def frozen_lower_half(seed):
    """Fine-tuning: requires_grad is False in the stem and six of twelve blocks, by intent."""
    model = nets.Residual(12)
    for part in (model.stem, *model.blocks[:6]):
        part.requires_grad_(requires_grad=False)
    return nets.judged(model, seed)


@label("healthy", family="frozen middle", seeds=(0, 1), findings={"frozen": blocks(8, 4)})
def frozen_middle(seed):
    """Blocks 4 to 7 are frozen; the gradient passes through them to the trainable ones below."""
    model = nets.Residual(12)
    for part in model.blocks[4:8]:
        part.requires_grad_(requires_grad=False)
    return nets.judged(model, seed)


@label("not enough data", family="frozen backbone", seeds=(0, 1), healthy=True, findings={"frozen": ["stem", "blocks"]})
def frozen_backbone(seed):
    """Only the head trains: no gradient enters the stack, so that there is nothing to say of its depth."""
    model = nets.Residual(12)
    for part in (model.stem, model.blocks):
        part.requires_grad_(requires_grad=False)
    return nets.judged(model, seed)


@label("healthy", healthy=False, family="unused layer", seeds=(0, 1), findings={"never_called": ["spare"]})
def module_that_is_never_called(seed):
    """A layer is registered and never used."""
    model = nets.Residual(8)
    model.spare = nn.Linear(4, 4)
    return nets.judged(model, seed)


@label("healthy", healthy=False, family="unused head", seeds=(0, 1), findings={"disconnected": ["other"]})
def head_that_the_loss_ignores(seed):
    """A second head runs, but only the first enters the loss."""

    class TwoHeads(nets.Residual):
        def __init__(self):
            super().__init__(8)
            self.other = nn.Linear(5, 5)

        def forward(self, x):
            scores = super().forward(x)
            self.other(scores)
            return scores

    return nets.judged(TwoHeads(), seed)


@label(
    "dead",
    family="dead relu",
    seeds=(0, 1, 2),
    variants=[{"at": 2}, {"at": 6}],
    findings=lambda at: {"dead_units": [str(2 * at + 1)]},
)
def dead_relu_layer(seed, at):
    """A bias of -100 closes every ReLU of one layer: the gradient is exactly 0 at its input and below.

    The weight above sees an input of 0 and has gradient 0 as well. The other biases are 0.2, so that the layers above
    are awake.
    """
    model = nets.normal(nets.mlp(10, "relu", width=48), 2**0.5)
    for module in model[:-1:2]:
        nn.init.constant_(module.bias, 0.2)
    nn.init.constant_(model[2 * at].bias, -100.0)
    return nets.judged(model, seed, width=48)


@label(
    "vanishing",
    family="saturated {activation}",
    seeds=(0, 1),
    variants=[{"activation": "tanh"}, {"activation": "sigmoid"}],
)
def saturated_everywhere(seed, activation):
    """Biases of +-4 (tanh) or +-7 (sigmoid) put every unit on the flat part: a slope of 0.001 per layer."""
    model = nets.normal(nets.mlp(8, activation, width=24), 1.0)
    size = {"tanh": 4.0, "sigmoid": 7.0}[activation]
    for module in model[:-1]:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.bias, size)
            with torch.no_grad():
                module.bias[::2] *= -1
                module.weight *= 0.3
    return nets.judged(model, seed)


@label(
    "healthy",
    healthy=False,
    family="saturated layer",
    seeds=(0, 1),
    findings={"knee": ["10", "12"]},
)
def one_saturated_layer(seed):
    """One tanh of twelve with biases of +-4, a slope of 0.0013: the gradient drops by almost 3 decades at that layer.

    The other layers are orthogonal with small signals, hence level: the slope over the stack is 0 on either side.
    """
    model = nets.orthogonal(nets.mlp(12, "tanh", width=24))
    with torch.no_grad():
        model[0].weight *= 0.1
        model[10].bias.fill_(4.0)
        model[10].bias[::2] *= -1
    return nets.judged(model, seed)


@label(
    "healthy",
    healthy=False,
    family="norm over two features",
    seeds=(0, 1),
    findings={"norm_kills_gradient": ["narrow"]},
)
def norm_over_two_features(seed):
    """LayerNorm over 2 features leaves +-1: its gradient is 0 up to epsilon.

    It stands at the end of the stack, so that all layers below lose the same and the profile is level.
    """

    class Narrow(nets.Residual):
        def __init__(self):
            super().__init__(8)
            self.down, self.narrow = nn.Linear(24, 2), nn.LayerNorm(2)
            self.head = nn.Linear(2, 5)

        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return self.head(self.narrow(self.down(x)))

    return nets.judged(Narrow(), seed)


@label(
    "dead",
    family="norm over one feature",
    seeds=(0, 1),
    findings={"zero_gradient": kit.all_of("stem", *blocks(8), "down", extra={"head.weight"})},
)
def norm_over_one_feature(seed):
    """LayerNorm over 1 feature gives its bias whatever comes in: the gradient below is exactly 0."""

    class One(nets.Residual):
        def __init__(self):
            super().__init__(8)
            self.down, self.narrow = nn.Linear(24, 1), nn.LayerNorm(1)
            self.head = nn.Linear(1, 5)

        def forward(self, x):
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return self.head(self.narrow(self.down(x)))

    return nets.judged(One(), seed)


# --- not finite ------------------------------------------------------------------------------------------------------


@label("non-finite", family="learning rate", seeds=(0, 1, 2), findings={})
def learning_rate_far_too_large(seed):
    """A learning rate of 1e6 on squares without norms: weights grow without bound, NaN after a few steps."""
    model = nets.normal(nets.Residual(8, norm=None, classes=24), 1.0)
    x, _ = kit.vectors(seed)
    return kit.train(model, (x, x.flip(1)), kit.squares, steps=12, rate=1e6)


@label("non-finite", family="nan weight", seeds=(0, 1), findings={"nonfinite_forward": ["blocks.4.first"]})
def nan_in_a_weight(seed):
    """One NaN in a weight of block 4: it and everything after it is NaN."""
    model = nets.Residual(8)
    with torch.no_grad():
        model.blocks[4].first.weight[0, 0] = float("nan")
    return nets.judged(model, seed)


@label("non-finite", family="half overflow", seeds=(0, 1), findings={"nonfinite_forward": ["8"]})
def overflow_of_half_precision(seed):
    """A linear layer whose products pass 65504 in float16: Inf at its output, the layers before it are finite."""
    model = nets.orthogonal(nets.mlp(8, "relu")).half()
    with torch.no_grad():
        model[8].weight.fill_(30000.0)
        model[6].bias.fill_(3.0)
    x, y = kit.vectors(seed)
    return kit.once(model, (x.half(), y), kit.cross_entropy)


class RootAtZero(nets.Residual):
    """Ends in the distance of each score to itself: 0, where the slope of the root is infinite."""

    def forward(self, x):
        scores = super().forward(x)
        return (scores - scores.detach()).square().sqrt()


@label("non-finite", family="root at zero", seeds=(0, 1), findings={"nonfinite_backward": ["head"]})
def root_of_zero_at_the_output(seed):
    """The slope of sqrt at 0 is Inf, times the 0 of the square NaN: the forward pass is finite, the backward is not."""
    x, _ = kit.vectors(seed)
    return kit.once(RootAtZero(8), (x, torch.ones(32, 5)), kit.squares)


@label("non-finite", family="log of zero in the loss", seeds=(0, 1), findings={"nonfinite_forward": []})
def loss_takes_the_log_of_zero(seed):
    """The loss takes log(relu(score)): -Inf over finite outputs. No module is to blame, so that no site is named."""
    return kit.once(nets.Residual(8), kit.vectors(seed), lambda output, _: output.relu().log().mean().neg())


# --- zero by initialisation, and structural zeros: no illness ---------------------------------------------------------


class LowRank(nn.Module):
    """A frozen linear layer plus a low-rank update that starts at 0."""

    def __init__(self, width, rank=2):
        super().__init__()
        self.plain = nn.Linear(width, width).requires_grad_(requires_grad=False)
        self.down = nn.Parameter(torch.randn(rank, width) / width**0.5)
        self.up = nn.Parameter(torch.zeros(width, rank))

    def forward(self, x):
        return self.plain(x) + x @ self.down.T @ self.up.T


@label(
    "healthy", family="lora", seeds=(0, 1), findings={"zero_grad_by_init": [f"blocks.{i}.first.down" for i in range(8)]}
)
def low_rank_adapters_at_zero(seed):
    """LoRA starts with B = 0, so that A has gradient 0 for one step."""
    model = nets.Residual(8).requires_grad_(requires_grad=False)
    for block in model.blocks:
        block.first = LowRank(24)
    return nets.judged(model, seed)


@label(
    "healthy",
    family="zero last matrix",
    seeds=(0, 1),
    findings={"zero_grad_by_init": parameters(blocks(10), ("norm", "first"))},
)
def zero_last_matrix_of_each_branch(seed):
    """The second matrix of each branch starts at 0 (Fixup, GPT-like residual inits): identity, and alive."""
    model = nets.Residual(10)
    for block in model.blocks:
        nn.init.zeros_(block.second.weight)
    return nets.judged(model, seed)


@label("healthy", family="zero head", seeds=(0, 1))
def zero_head_over_three_steps(seed):
    """The head starts at 0: no gradient below it on the first step, and a usual one from the second on."""
    model = nets.Residual(10)
    nn.init.zeros_(model.head.weight)
    return kit.train(model, kit.vectors(seed), kit.cross_entropy, steps=3)


@label("dead", family="zero head at once", seeds=(0, 1))
def zero_head_on_its_first_step(seed):
    """The same on one step: debatable, since training cures it, but on that step no layer gets any gradient."""
    model = nets.Residual(10)
    nn.init.zeros_(model.head.weight)
    return nets.judged(model, seed)


@label(
    "healthy",
    healthy=False,
    family="stuck",
    seeds=(0,),
    findings={"zero_grad_stuck": parameters(blocks(6), ("norm", "first"))},
)
def zero_weights_left_out_of_the_optimizer(seed):
    """Zero matrices that the optimizer does not know, recorded over 12 steps: the branches stay without gradient."""
    model = nets.Residual(6)
    for block in model.blocks:
        nn.init.zeros_(block.second.weight)
    learned = [name for name, _ in model.named_parameters() if "second" not in name]
    return kit.train(model, kit.vectors(seed), kit.cross_entropy, steps=12, learned=learned)


# --- little to judge by, and sizes that mean nothing -----------------------------------------------------------------


@label("not enough data", family="two layers", seeds=(0, 1), healthy=True)
def two_layers(seed):
    """A network of two layers has no depth to speak of."""
    return nets.judged(nets.mlp(1, "relu"), seed)


@label("not enough data", family="forward only", seeds=(0, 1), findings={"no_backward": []})
def forward_only(seed):
    """An evaluation loop: outputs, and no gradient."""
    import keelscope as ks

    model, (x, _) = nets.Residual(8), kit.vectors(seed)
    with ks.watch(model) as session:
        for _ in range(3):
            model(x)
            session.step()
    return session.run


@label("healthy", healthy=False, family="tiny loss", seeds=(0, 1), findings={"uniformly_small": []})
def loss_scaled_by_1e_minus_12(seed):
    """The loss is divided by 1e12: gradients are small everywhere alike, depth is not to blame."""
    return kit.once(nets.Residual(12), kit.vectors(seed), lambda o, b: 1e-12 * kit.cross_entropy(o, b))


@label("healthy", family="large loss", seeds=(0, 1))
def loss_scaled_by_1e9(seed):
    """Sums instead of means make gradients large everywhere alike; with Adam it changes nothing."""
    return kit.once(nets.Residual(12), kit.vectors(seed), lambda o, b: 1e9 * kit.cross_entropy(o, b))


@label("healthy", family="trained", seeds=(0, 1))
def trained_for_twenty_steps(seed):
    """A residual network that learns, over 20 steps of gradient descent."""
    return kit.train(nets.Residual(10), kit.vectors(seed), kit.cross_entropy, steps=20)


@label("healthy", family="trained scheme", variants=[{"scheme": "keel"}, {"scheme": "pre_ln"}])
def scheme_trained_for_five_steps(seed, scheme):
    """A reference scheme over 5 steps of gradient descent on text."""
    model = models.build(scheme, seed=seed, depth=12, width=32)
    return kit.train(model, kit.text(seed), kit.cross_entropy, steps=5, rate=0.5)
