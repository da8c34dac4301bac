"""Models of transformers, timm and torchvision, small, as their authors start them, and with a fault."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

kit = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("labels.py"))))
label = kit.label

NEEDS = "transformers"
ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def gpt2(layers=4):
    """GPT-2 with a width of 32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(n_layer=layers, n_embd=32, n_head=4, vocab_size=97, n_positions=32, **off, **ENDS)
    )


def llama(layers=4):
    """Llama with a width of 32 and grouped queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(num_hidden_layers=layers, vocab_size=97, max_position_embeddings=32, **sizes, **ENDS)
    )


def bert(layers=4):
    """BERT with a width of 32 and its masked-token head."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "max_position_embeddings": 32}
    return BertForMaskedLM(BertConfig(num_hidden_layers=layers, vocab_size=97, pad_token_id=0, **sizes))


def vit(layers=4):
    """A vision transformer on pictures of 16 by 16."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "image_size": 16, "patch_size": 4}
    return ViTForImageClassification(ViTConfig(num_hidden_layers=layers, num_labels=10, **sizes))


BUILDERS = {"gpt2": gpt2, "llama": llama, "bert": bert, "vit": vit}
STACKS = {"gpt2": "transformer.h", "llama": "model.layers", "bert": "bert.encoder.layer", "vit": "vit.layers"}


def judged(model, kind, seed):
    """One pass with the loss that the model itself computes."""
    if kind != "vit":
        return kit.once(model, kit.tokens(seed), None)
    pictures, classes = kit.images(seed)
    return kit.once(model, {"pixel_values": pictures, "labels": classes}, None)


@label(
    "healthy",
    family="{kind}",
    seeds=(0, 1),
    variants=[{"kind": kind, "layers": layers} for kind in BUILDERS for layers in (4, 8)],
)
def as_released(seed, kind, layers):
    """The library's own initialisation (std 0.02): branches are small against the stream, Pre-LN or Post-LN alike."""
    return judged(BUILDERS[kind](layers), kind, seed)


@label(
    "healthy",
    family="{kind} fine-tuning",
    variants=[{"kind": kind} for kind in ("gpt2", "llama")],
    findings=lambda kind: {"frozen": [f"{STACKS[kind]}.0", f"{STACKS[kind]}.1"]},
)
def lower_blocks_frozen(seed, kind):
    """Two of six blocks are frozen, as in fine-tuning."""
    model = BUILDERS[kind](6)
    model.get_submodule(STACKS[kind])[:2].requires_grad_(requires_grad=False)
    return judged(model, kind, seed)


@label(
    "non-finite",
    family="{kind} nan",
    variants=[
        {"kind": "gpt2", "path": "transformer.h.2.mlp.c_fc"},
        {"kind": "llama", "path": "model.layers.1.mlp.up_proj"},
    ],
    findings=lambda kind, path: {"nonfinite_forward": kit.one_around(path)},
)
def nan_in_one_projection(seed, kind, path):
    """A NaN in one weight: the module that owns it is the first with a NaN at its output."""
    model = BUILDERS[kind](4)
    with torch.no_grad():
        model.get_submodule(path).weight[0, 0] = float("nan")
    return judged(model, kind, seed)


class Detached(nn.Module):
    """A module whose output is detached."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs).detach()


@label(
    "healthy",
    healthy=False,
    family="bert detached embedding",
    seeds=(0, 1),
    findings={"disconnected": lambda sites: all(".embeddings" in site for site in sites)},
)
def embedding_detached(seed):
    """BERT whose embeddings are detached before the encoder (head untied): the encoder trains, they do not."""
    model = bert(6)
    model.cls.predictions.decoder.weight = nn.Parameter(model.cls.predictions.decoder.weight.detach().clone())
    model.bert.embeddings = Detached(model.bert.embeddings)
    return judged(model, "bert", seed)


@label("vanishing", family="bert large branches", seeds=(0, 1))
def post_ln_with_large_branches(seed):
    """BERT whose output matrices are random and large: 1/2 log10(1 + v) with v = 16 takes 0.6 decades per sub-layer.

    Queries are 0, so that attention averages: nothing in the branch carries the gradient of single tokens back, and
    the matrix before the last is small, so that the branch's own Jacobian is small while its bias keeps its size.
    """
    model = bert(6)
    with torch.no_grad():
        for layer in model.bert.encoder.layer:
            for output in (layer.attention.output.dense, layer.output.dense):
                nn.init.normal_(output.bias, std=4.0)
                output.weight *= 0.1
    return judged(model, "bert", seed)


@label(
    "healthy",
    family="torchvision {name}",
    variants=[{"name": "resnet18"}, {"name": "mobilenet_v3_small"}, {"name": "shufflenet_v2_x0_5"}],
)
def torchvision_model(seed, name):
    """Image networks as published; normalised, with residual sums or few layers."""
    import torchvision

    model = getattr(torchvision.models, name)(num_classes=10)
    return kit.once(model.train(), kit.images(seed, size=32), kit.cross_entropy)


@label("healthy", family="torchvision zero residual", findings={})
def resnet_with_zero_residual_gain(seed):
    """zero_init_residual=True starts the last BatchNorm of each branch at gain 0: identity blocks, alive."""
    import torchvision

    model = torchvision.models.resnet18(num_classes=10, zero_init_residual=True)
    return kit.once(model.train(), kit.images(seed, size=32), kit.cross_entropy)


TIMM = {
    "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 6},
    "convnext_atto": {},
    "resnet10t": {},
}


@label("healthy", family="timm {name}", variants=[{"name": name} for name in TIMM])
def timm_model(seed, name):
    """Image networks as published."""
    import timm

    model = timm.create_model(name, num_classes=10, **TIMM[name])
    return kit.once(model.train(), kit.images(seed, size=32), kit.cross_entropy)


MORE = {
    "DistilBert": {"dim": 32, "hidden_dim": 64, "n_layers": 4, "n_heads": 4},
    "Albert": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "embedding_size": 16,
    },
    "Roberta": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4},
    "OPT": {
        "hidden_size": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
    },
    "GPTNeoX": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4},
    "Gemma2": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    "Olmo2": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "Qwen3": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    "Mamba": {"hidden_size": 32, "num_hidden_layers": 4, "state_size": 4},
    "T5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 4, "num_heads": 4},
}


@label("healthy", family="transformers {name}", variants=[{"name": name} for name in MORE if name != "Albert"])
def other_language_model(seed, name):
    """The library's own initialisation of other architectures: Post-LN, Pre-LN, parallel, sandwich, state space."""
    import transformers

    config = getattr(transformers, f"{name}Config")(vocab_size=97, **ENDS, **MORE[name])
    if name == "T5":
        config.decoder_start_token_id = 0
    heads = {"DistilBert": "ForMaskedLM", "Roberta": "ForMaskedLM", "T5": "ForConditionalGeneration"}
    model = getattr(transformers, f"{name}{heads.get(name, 'ForCausalLM')}")(config)
    batch = kit.tokens(seed)
    batch["input_ids"] = batch["input_ids"].clamp(min=2)
    return kit.once(model, batch, None)


@label("healthy", family="transformers Albert", seeds=(0, 1))
def albert(seed):
    """One shared block called six times at std 0.02: depth lies in the calls, and branches are small."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    return kit.once(AlbertForMaskedLM(AlbertConfig(vocab_size=97, **ENDS, **MORE["Albert"])), kit.tokens(seed), None)


@label("healthy", family="bert classifier", seeds=(0, 1))
def bert_read_at_its_class_token(seed):
    """Classification from the first token of BERT: later tokens get no gradient at the top, by design."""
    from transformers import BertForSequenceClassification

    model = BertForSequenceClassification(bert(6).config)
    batch = kit.tokens(seed)
    return kit.once(model, {"input_ids": batch["input_ids"], "labels": torch.tensor([0, 1, 1])}, None)


@label("healthy", family="padded", seeds=(0, 1), variants=[{"kind": "bert"}, {"kind": "llama"}])
def padded_batch(seed, kind):
    """Half of one sequence is padding that neither attention nor loss looks at."""
    batch = kit.tokens(seed)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 8:] = 0
    labels = batch["labels"].masked_fill(mask == 0, -100)
    return kit.once(
        BUILDERS[kind](6), {"input_ids": batch["input_ids"], "attention_mask": mask, "labels": labels}, None
    )
