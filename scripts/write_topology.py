"""Write docs/topology.md, with a table of what is found in real models: ``python scripts/write_topology.py``.

A test compares the page with `page`, so that it cannot go stale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keelscope.models import SCHEMES, build
from keelscope.topology import Coefficient, Topology, find

PAGE = Path(__file__).parents[1] / "docs" / "topology.md"
DEPTH = 16

INTRODUCTION = f"""\
# Topology

<!-- Written by scripts/write_topology.py. Edit that. -->

keelscope reads the residual structure of a model from the autograd graph of the first recorded forward: every
residual addition, its shortcut and its branch, the weights on them, and the norms before and after. Nothing has to be
declared, and no forward of its own is run.

```python
from keelscope import topology

found = topology.find(model, batch, loss_fn)  # or during a recording: run.info.sublayers
found.sublayers[0].form  # 'n(a x + F(n x))'
found.sublayers[0].alpha  # kind, value, parameter
found.schemes  # per stream: names of the schemes that all its sub-layers follow
found.unknown  # what could not be read, and why
```

## What counts

A sum is a **residual addition** if, back to one common tensor, one operand passes no product of matrices,
convolution, embedding or attention, and another passes at least one. That leaves out rotary positions, epsilons,
activations, masks, biases and position embeddings: a Llama of four blocks has 25 sums, of which 8 are residual.
Casts, views, copies and dropout are seen through. A sum in place on a view (`z += x` after a Linear with bias) is
completed by the backward pass, which alone shows that it was a sum; so are regions under reentrant checkpointing.
Under checkpointing no saved tensor is read, since that would run the model's forward again: a weight that cannot be
read otherwise is unknown.

Additions inside a branch, a second stream that takes up the same branch (ResiDual) and a second call of the same
modules are in `found.further`, not in the count of sub-layers. A sum whose both operands pass a convolution (the
projection shortcut of a ResNet) is no residual addition; `found.unknown` names it.

## Forms

a and b are the weights of shortcut and branch, c a weight on what the branch reads; n is a norm, d a tanh in its
place, W the branch's last matrix, y a second stream. A weight is *one*, a *constant* (a number in the code), a
*buffer* (any tensor that needs no gradient), a *learnable scalar* or *learnable vector* (computed from parameters
alone, a softplus of one for instance), a *gate (token)* (computed from data), or *unknown*. Its value is that of the
recorded step, for several entries the mean.

Schemes that differ in their initialisation only have the same form, so several names may be given; where the values
of a and b single some out (a equal to the number of sub-layers is Keel, to its fourth root DeepNorm), only those are.

## A model that says it itself

Where the shortcut is no sum (streams mixed by a matrix, attention over depth), a module may have an attribute or
method `residual_topology`: one mapping per sub-layer, with plain values and paths relative to the module.

```python
class Block(nn.Module):
    residual_topology = [{{"form": "A x + b F(n c x)", "schemes": ["mhc"], "branch": "branch", "norm_before": "norm"}}]
```

Keys are `form`, `schemes`, `site` (default: the module itself), `branch`, `norm_before`, `norm_after`, `branch_norm`,
`inner_norm`, `alpha` and `beta` (a number, or the path of a parameter). Gates alone are declared by
`residual_gates`, see [gates](gates.md).

## What is found

Small models of each architecture, in training mode, and every reference scheme at {DEPTH} sub-layers.
"""


INTERFACE = """
## Interface

::: keelscope.topology.find

::: keelscope.topology.Topology

::: keelscope.topology.Sublayer

::: keelscope.topology.Coefficient

::: keelscope.topology.GraphReader
"""


def mean_square(output: Any, _batch: object) -> Tensor:
    """A loss for any output."""
    for name in ("logits", "last_hidden_state"):
        output = getattr(output, name, output)
    loss: Tensor = output.float().square().mean()
    return loss


def _ids(size: int = 50) -> Tensor:
    return torch.randint(3, size, (2, 6), generator=torch.Generator().manual_seed(0))


def _huggingface(kind: str, **options: object) -> Callable[[], tuple[nn.Module, object]]:
    """A small model of an architecture of transformers, with random weights."""

    def make() -> tuple[nn.Module, object]:
        import transformers

        heads = {"bert": "MaskedLM", "roberta": "MaskedLM", "vit": "ImageClassification", "t5": "Seq2SeqLM"}
        config = transformers.AutoConfig.for_model(kind, **{**_sizes(kind), **options})
        model = getattr(transformers, f"AutoModelFor{heads.get(kind, 'CausalLM')}").from_config(config)
        if kind == "vit":
            return model, torch.randn(2, 3, 8, 8)
        return model, {"input_ids": _ids(), "decoder_input_ids": _ids()} if kind == "t5" else {"input_ids": _ids()}

    return make


def _sizes(kind: str) -> dict[str, object]:
    tokens = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "gpt2":
        return {**tokens, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 16}
    if kind == "t5":
        return {**tokens, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 4, "num_heads": 2}
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
    if kind == "vit":
        return {**sizes, "image_size": 8, "patch_size": 4}
    return {**tokens, **sizes, "max_position_embeddings": 16}


def _encoder(*, norm_first: bool) -> tuple[nn.Module, object]:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=norm_first)
    stack = nn.TransformerEncoder(layer, 4, nn.LayerNorm(16) if norm_first else None, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(50, 16), stack, nn.Linear(16, 5)), _ids()


def _vit_with_layerscale() -> tuple[nn.Module, object]:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=4, init_values=1e-5, drop_path_rate=0.2)
    return model, torch.randn(4, 3, 32, 32)


def _swin() -> tuple[nn.Module, object]:
    import timm

    sizes = {"img_size": 56, "depths": (2, 2), "embed_dim": 24, "num_heads": (2, 2)}
    return timm.create_model("swin_tiny_patch4_window7_224", **sizes), torch.randn(2, 3, 56, 56)


def _resnet() -> tuple[nn.Module, object]:
    import torchvision

    return torchvision.models.resnet18(num_classes=5), torch.randn(2, 3, 32, 32)


def _mlp() -> tuple[nn.Module, object]:
    layers = [layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(4, 16)


MODELS: dict[str, Callable[[], tuple[nn.Module, object]]] = {
    "BERT (transformers)": _huggingface("bert"),
    "RoBERTa (transformers)": _huggingface("roberta", max_position_embeddings=32),
    "GPT-2 (transformers)": _huggingface("gpt2"),
    "Llama (transformers)": _huggingface("llama", num_key_value_heads=2),
    "Gemma 2 (transformers)": _huggingface("gemma2", num_key_value_heads=1, head_dim=8),
    "OLMo 2 (transformers)": _huggingface("olmo2", num_key_value_heads=2),
    "Qwen 3 (transformers)": _huggingface("qwen3", num_key_value_heads=1, head_dim=8),
    "Mixtral (transformers)": _huggingface("mixtral", num_local_experts=4, num_key_value_heads=2),
    "GPT-NeoX, parallel branches (transformers)": _huggingface("gpt_neox"),
    "T5 (transformers)": _huggingface("t5"),
    "ViT (transformers)": _huggingface("vit"),
    "nn.TransformerEncoderLayer": lambda: _encoder(norm_first=False),
    "nn.TransformerEncoderLayer, norm_first": lambda: _encoder(norm_first=True),
    "ViT with LayerScale (timm)": _vit_with_layerscale,
    "Swin (timm)": _swin,
    "ResNet-18 (torchvision)": _resnet,
    "multi-layer perceptron": _mlp,
}


def look(name: str) -> Topology:
    """The topology of one model of the table, in training mode."""
    torch.manual_seed(0)
    if name in MODELS:
        model, batch = MODELS[name]()
        return find(model.train(), batch, mean_square)
    return find(build(name, depth=DEPTH, width=8, heads=2), _ids(256), mean_square)


def names() -> list[str]:
    """All rows of the table."""
    return [*MODELS, *SCHEMES]


def page(found: Mapping[str, Topology]) -> str:
    """The whole page, from the topology of each model."""
    head = "| model | sub-layers | form | a | b | schemes |\n|---|---|---|---|---|---|"
    return "\n".join([INTRODUCTION, head, *(_row(name, found[name]) for name in names()), INTERFACE])


def _row(name: str, found: Topology) -> str:
    cells = [f"`{name}`" if name in SCHEMES else name, str(len(found))]
    cells += [_joined([f"`{s.form}`" for s in found.sublayers])]
    cells += [_weights([s.alpha for s in found.sublayers]), _weights([s.beta for s in found.sublayers])]
    cells += [_joined([f"`{scheme}`" for schemes in found.schemes for scheme in schemes])]
    return f"| {' | '.join(cells)} |"


def _joined(texts: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(texts)) or "none"


def _weights(weights: Sequence[Coefficient]) -> str:
    """Each kind once, with its value, or with the first and the last of many."""
    kinds: dict[str, list[str]] = {}
    for weight in weights:
        values = kinds.setdefault(weight.kind, [])
        if weight.value is not None and not weight.is_one:
            values.append(f"{weight.value:.4g}")
    spans = {kind: list(dict.fromkeys(values)) for kind, values in kinds.items()}
    return _joined([_span(kind, values) for kind, values in spans.items()])


def _span(kind: str, values: Sequence[str]) -> str:
    if len(values) > 1:
        return f"{kind} {values[0]} to {values[-1]}"
    return f"{kind} {values[0]}" if values else kind


if __name__ == "__main__":
    PAGE.write_text(page({name: look(name) for name in names()}), encoding="utf-8")
