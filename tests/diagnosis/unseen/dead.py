"""Models no layer of whose body gets a gradient: it is exactly 0 there, or never arrives."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

S = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("steps.py"))))
label, once, fit = S.label, S.once, S.fit


class Block(nn.Module):
    """A sound Pre-LN block."""

    def __init__(self, width=48):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Encoder(nn.Module):
    """An entry and blocks."""

    def __init__(self, depth=8, width=48):
        super().__init__()
        self.entry = nn.Linear(24, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x):
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return x


class Cut(nn.Module):
    """An encoder, something between, and a head of one layer."""

    def __init__(self, between, outputs=5):
        super().__init__()
        self.encoder, self.head, self.between = Encoder(), nn.Linear(48, outputs), between

    def forward(self, x):
        return self.head(self.between(self.encoder(x)))


@label("dead", family="hard threshold {how}", variants=({"how": "sign"}, {"how": "round"}, {"how": "step"}))
def quantised_without_straight_through(seed, how):
    """Codes made by sign, rounding or a comparison with a differentiable factor of 0: the slope is 0, the encoder of
    8 blocks gets exactly 0, the head learns. Measured: sign: 50 of 52 parameters get exactly 0; loss 1.79 -> 1.43 in
    30 steps of Adam. round: 50 of 52 parameters get exactly 0; loss 1.6 -> 1.3 in 30 steps of Adam. step: 50 of 52
    parameters get exactly 0; loss 1.75 -> 1.47 in 30 steps of Adam."""
    made = {"sign": torch.sign, "round": torch.round, "step": lambda z: torch.heaviside(z.detach(), z.detach()) + 0 * z}
    return once(Cut(made[how]), S.vectors(seed), S.cross_entropy)


@label("dead", family="softmax of one")
def softmax_over_a_single_score(seed):
    """A softmax over the one output of a yes-or-no head is 1 whatever the score; nothing gets a gradient. Measured:
    52 of 52 parameters get exactly 0; loss 78.1 -> 78.1 in 30 steps of Adam."""

    def loss(output, batch):
        return F.binary_cross_entropy(output.softmax(-1)[:, 0], (batch[-1] > 2).float())

    return once(Cut(nn.Identity(), outputs=1), S.vectors(seed), loss)


@label("dead", family="clamped output")
def output_beyond_its_clamp(seed):
    """A hard sigmoid at the exit whose input starts at 30, beyond 3: flat, so that all gradients are exactly 0.
    Measured: 52 of 52 parameters get exactly 0; loss 0.25 -> 0.25 in 30 steps of Adam."""
    model = Cut(nn.Identity())
    nn.init.constant_(model.head.bias, 30.0)
    return once(model, S.vectors(seed), lambda output, _: (F.hardsigmoid(output) - 0.5).square().mean())


@label("dead", family="dead relu")
def units_below_zero_for_good(seed):
    """10 ReLU layers with a bias of -100: no unit of any of them is ever on, outputs do not depend on inputs.
    Measured: 23 of 24 parameters get exactly 0; loss 1.6 -> 1.59 in 30 steps of Adam."""
    layers = [nn.Sequential(nn.Linear(48, 48), nn.ReLU()) for _ in range(10)]
    for layer in layers:
        nn.init.constant_(layer[0].bias, -100.0)
    return once(nn.Sequential(nn.Linear(24, 48), *layers, nn.Linear(48, 5)), S.vectors(seed), S.cross_entropy)


@label("dead", family="dropout of one")
def dropout_that_keeps_nothing(seed):
    """nn.Dropout(1.0), the chance to keep given as the chance to drop: the head sees 0, the encoder gets exactly 0.
    Measured: 51 of 52 parameters get exactly 0; loss 1.66 -> 1.64 in 30 steps of Adam."""
    return once(Cut(nn.Dropout(1.0)), S.vectors(seed), S.cross_entropy)


@label("dead", family="zeros everywhere")
def weights_all_zero(seed):
    """8 tanh layers and a head started at 0, weights and biases: only the bias of the head gets a gradient, for
    ever. Measured: 19 of 20 parameters get exactly 0; loss 1.61 -> 1.6."""
    layers = [nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(8)]
    model = nn.Sequential(nn.Linear(24, 48), *layers, nn.Linear(48, 5))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = S.vectors(seed)
    return fit(model, lambda _: S.cross_entropy(model(batch[0]), batch), steps=4, optimizer=optimizer)


@label("dead", family="loss weight")
def loss_weight_left_at_zero(seed):
    """A loss multiplied by a weight that was to grow and stayed 0: every gradient is exactly 0 on each of 3 steps.
    Measured: 52 of 52 parameters get exactly 0; loss 0."""
    model, batch = Cut(nn.Identity()), S.vectors(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    return fit(model, lambda _: 0.0 * S.cross_entropy(model(batch[0]), batch), steps=3, optimizer=optimizer)


@label("dead", family="inverted mask")
def mask_the_wrong_way_round(seed):
    """Outputs are multiplied by the padding mask where its inverse was meant; nothing is padded: all is 0. Measured:
    51 of 52 parameters get exactly 0; loss 1.66 -> 1.64 in 30 steps of Adam."""
    padded = torch.zeros(32, 1)
    return once(Cut(lambda z: z * padded), S.vectors(seed), S.cross_entropy)


@label("dead", family="half precision")
def half_precision_without_loss_scale(seed):
    """A whole model in float16 with a loss divided by 1e6 for accumulation: gradients are below 6e-8 and flushed to
    0. Measured: 50 of 52 parameters get exactly 0; loss 1.67e-06 -> nan in 30 steps of Adam."""
    model, (x, y) = Cut(nn.Identity()).half(), S.vectors(seed)
    return once(model, (x.half(), y), lambda output, batch: F.cross_entropy(output, batch[-1]) / 1e6)


@label("dead", family="hinge")
def hinge_that_nobody_touches(seed):
    """A margin of -50, a sign slipped: every hinge is satisfied from the start, gradients are exactly 0. Measured:
    52 of 52 parameters get exactly 0; loss 0 -> 0 in 30 steps of Adam."""
    return once(
        Cut(nn.Identity()), S.vectors(seed), lambda output, batch: F.multi_margin_loss(output, batch[-1], margin=-50.0)
    )


class Severed(nn.Module):
    """An encoder whose features are handed on without their graph."""

    def __init__(self, how):
        super().__init__()
        self.encoder, self.how = Encoder(), how
        self.head = nn.Sequential(nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 5))

    def forward(self, x):
        z = self.encoder(x)
        return self.head(
            {"detach": z.detach(), "data": z.data, "numpy": torch.from_numpy(z.detach().numpy())}[self.how]
        )


class SeveredAtTheEnd(Severed):
    """The same, with the head outside no_grad."""

    def forward(self, x):
        with torch.no_grad():
            z = self.encoder(x)
        return self.head(z)


@label(
    "dead",
    family="severed {how}",
    variants=({"how": "detach"}, {"how": "data"}, {"how": "numpy"}, {"how": "no_grad"}),
    findings={"disconnected": S.under("encoder")},
)
def encoder_cut_from_the_loss(seed, how):
    """8 blocks whose features reach the head through detach, .data, numpy or a no_grad block; all parameters are
    trainable and none of the encoder gets a gradient. Measured: detach: output gradients 0.0013 at head.0 and 0.012
    at head.2 (of 3), parameters' 0.26 and 0.3; 50 of 54 parameters get no gradient; loss 1.57 -> 1.2 in 30 steps of
    Adam. data: output gradients 0.0013 at head.0 and 0.012 at head.2 (of 3), parameters' 0.26 and 0.3; 50 of 54
    parameters get no gradient; loss 1.57 -> 1.2 in 30 steps of Adam. numpy: output gradients 0.0013 at head.0 and
    0.012 at head.2 (of 3), parameters' 0.26 and 0.3; 50 of 54 parameters get no gradient; loss 1.57 -> 1.2 in 30
    steps of Adam. no_grad: output gradients 0.0013 at head.0 and 0.012 at head.2 (of 3), parameters' 0.26 and 0.3;
    50 of 54 parameters get no gradient; loss 1.57 -> 1.2 in 30 steps of Adam."""
    return once(SeveredAtTheEnd(how) if how == "no_grad" else Severed(how), S.vectors(seed), S.cross_entropy)


@label("dead", family="transformers vit", findings={"disconnected": S.under("body")})
def vision_transformer_read_as_numbers(seed):
    """A ViT of transformers whose class token goes through .tolist() into a new tensor before its head; everything
    is trainable, the head alone learns. Measured: 102 of 104 parameters get no gradient; loss 2.73 -> 1.85 in 30
    steps of Adam."""
    from transformers import ViTConfig, ViTModel

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            config = ViTConfig(
                image_size=32,
                patch_size=8,
                hidden_size=48,
                num_hidden_layers=6,
                num_attention_heads=4,
                intermediate_size=96,
            )
            self.body, self.head = ViTModel(config, add_pooling_layer=False), nn.Linear(48, 10)

        def forward(self, pictures):
            return self.head(torch.tensor(self.body(pictures).last_hidden_state[:, 0].tolist()))

    return once(Reads(), S.images(seed, size=32), S.cross_entropy)
