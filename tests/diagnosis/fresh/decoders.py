"""Sound decoders of transformers, small and from scratch: other norms, multipliers, positions, mixtures and hybrids."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path
from types import SimpleNamespace

import torch

NEEDS = "transformers"
S = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "unseen" / "steps.py")))
label, once, fit = S.label, S.once, S.fit
SMALL = {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 96, "num_hidden_layers": 6}
PAD = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def causal(kind, **options):
    """A language model over bytes, by the name of its configuration."""
    transformers = importlib.import_module("transformers")
    config = getattr(transformers, f"{kind}Config")(vocab_size=256, **PAD, **options)
    return transformers.AutoModelForCausalLM.from_config(config)


def reading(seed, length=20):
    """Bytes of a text as a language model takes them."""
    ids = S.text(seed, sequences=3, length=length)[0]
    return {"input_ids": ids, "labels": ids}


KINDS = {
    "Persimmon": SMALL,
    "Phi": SMALL,
    "StableLm": {**SMALL, "hidden_size": 64, "num_key_value_heads": 2},
    "Cohere": {**SMALL, "num_key_value_heads": 2},
    "Nemotron": {**SMALL, "num_key_value_heads": 2},
    "Bloom": {"hidden_size": 48, "n_head": 4, "n_layer": 6},
}


@label("healthy", family="decoder {kind}", variants=tuple({"kind": kind} for kind in KINDS))
def decoder_as_its_authors_start_it(seed, kind):
    """Six layers as the library starts them, all with a norm on each branch and the stream untouched: Persimmon's
    squared ReLU, Phi's and Cohere's parallel branches, a norm of StableLM with bias, Nemotron's norm around 1,
    Bloom's slopes for positions. Measured: Persimmon: output gradients 0.016 at model.layers.0 and 0.0089 at
    model.layers.5 (of 6), parameters' 2.7 and 1.4; loss 5.58 -> 3.14 in 30 steps of Adam. Phi: output gradients
    0.011 at model.layers.0 and 0.0068 at model.layers.5 (of 6), parameters' 2.2 and 1.3; loss 5.58 -> 3.24 in 30
    steps of Adam. StableLm: output gradients 0.013 at model.layers.0 and 0.0067 at model.layers.5 (of 6),
    parameters' 1.7 and 0.92; loss 5.57 -> 2.71 in 30 steps of Adam. Cohere: output gradients 0.00088 at
    model.layers.0 and 0.00068 at model.layers.5 (of 6), parameters' 0.066 and 0.041; loss 5.55 -> 5.38 in 30 steps
    of Adam. Nemotron: output gradients 0.023 at model.layers.0 and 0.013 at model.layers.5 (of 6), parameters' 3.3
    and 1.7; loss 5.53 -> 2.4 in 30 steps of Adam. Bloom: output gradients 0.00035 at transformer.h.0 and 0.00035 at
    transformer.h.5 (of 6), parameters' 0.063 and 0.064; loss 5.56 -> 3.4 in 30 steps of Adam."""
    return once(causal(kind, **KINDS[kind]), reading(seed), None)


@label("healthy", family="decoder Olmo2")
def olmo2_with_norms_behind_its_branches(seed):
    """OLMo 2: the branch is normed after it, the sum is not; after 3 steps of AdamW. Measured: output gradients
    0.00099 at model.layers.0 and 9.3e-05 at model.layers.5 (of 6), parameters' 0.53 and 0.49; loss 5.55 -> 5.34."""
    model, batch = causal("Olmo2", **SMALL), reading(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return fit(model, lambda _: model(**batch).loss, steps=3, optimizer=optimizer)


@label("healthy", family="decoder Granite")
def granite_with_multipliers(seed):
    """Granite 3's four multipliers: embeddings times 12, branches times 0.22, logits over 6, attention by 1 over a
    head's width; two micro-batches a step, bfloat16 autocast. Measured: output gradients 0.00012 at model.layers.0
    and 0.00012 at model.layers.5 (of 6), parameters' 0.0028 and 0.0028; loss 2.77 -> 2.77."""
    model = causal(
        "Granite",
        **SMALL,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        logits_scaling=6.0,
        attention_multiplier=1 / 12,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(k):
        with S.autocast(torch.bfloat16):
            return model(**reading(seed + k)).loss

    return fit(model, loss, steps=2, optimizer=optimizer, accumulate=2)


@label("healthy", family="decoder Falcon")
def falcon_with_one_key_for_all_heads(seed):
    """Falcon: one norm, attention with a single key and value head and the feed-forward in parallel; in float64.
    Measured: output gradients 0.012 at transformer.h.0 and 0.0058 at transformer.h.5 (of 6), parameters' 1.3 and
    0.66; loss 5.52 -> 3.37 in 30 steps of Adam."""
    model = causal("Falcon", hidden_size=48, num_attention_heads=4, num_hidden_layers=6, multi_query=True)
    return once(model.double(), reading(seed), None)


@label("healthy", family="decoder GPTJ")
def gptj_with_clipping(seed):
    """GPT-J: one norm for two parallel branches, rotary on a part of each head; 3 steps of SGD with momentum and
    clipping at 0.5. Measured: output gradients 0.0065 at transformer.h.0 and 0.0041 at transformer.h.5 (of 6),
    parameters' 0.16 and 0.13; loss 5.57 -> 5.4."""
    model = causal("GPTJ", n_embd=48, n_head=4, n_layer=6, rotary_dim=8, n_positions=64)
    batch = reading(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return fit(model, lambda _: model(**batch).loss, steps=3, optimizer=optimizer, clip=0.5)


@label("healthy", family="decoder RecurrentGemma")
def recurrence_and_local_attention_in_turn(seed):
    """Griffin's layout: two linear recurrences and one local attention in turn, each on a pre-norm stream.
    Measured: output gradients 0.0036 at model.layers.0 and 0.0017 at model.layers.5 (of 6), parameters' 0.56 and
    0.67; loss 5.66 -> 2.9 in 30 steps of Adam."""
    model = causal("RecurrentGemma", **SMALL, num_key_value_heads=1, lru_width=48, attention_window_size=16)
    return once(model, reading(seed, length=16), None)


@label("healthy", family="decoder Jamba")
def state_spaces_attention_and_experts(seed):
    """Jamba's hybrid: one attention in four layers, state spaces elsewhere, two of four experts in every other
    feed-forward; weights of 0.1 for this width, every expert is chosen by some token. Measured: output gradients
    0.013 at model.layers.0 and 0.0032 at model.layers.5 (of 6), parameters' 4.7 and 0.95; loss 5.8 -> 0.806 in 30
    steps of Adam."""
    model = causal(
        "Jamba",
        **SMALL,
        num_key_value_heads=2,
        attn_layer_period=4,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        num_experts_per_tok=2,
        mamba_d_state=4,
        mamba_dt_rank=4,
        initializer_range=0.1,
    )
    return once(model, reading(seed, length=16), None)


@label("healthy", family="decoder Qwen2Moe")
def shared_expert_beside_chosen_ones(seed):
    """Qwen's mixture: a shared expert behind a sigmoid sees each token, two of four others are chosen; the loss
    that balances them included. Measured: output gradients 0.013 at model.layers.0 and 0.0095 at model.layers.5 (of
    6), parameters' 1.1 and 0.76; loss 5.56 -> 3.29 in 30 steps of Adam."""
    model = causal(
        "Qwen2Moe",
        **SMALL,
        num_key_value_heads=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=96,
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
    )
    return once(model, reading(seed), None)


@label("healthy", family="decoder Rwkv")
def rwkv_with_decays_per_channel(seed):
    """RWKV: time mixing by decays of each channel and channel mixing by a squared ReLU, pre-norm; its embedding
    starts at 0.1 and not at 1e-4, as after its warm-up. Measured: output gradients 0.0021 at rwkv.blocks.0 and
    0.0012 at rwkv.blocks.5 (of 6), parameters' 0.81 and 0.57; loss 5.71 -> 1.44 in 30 steps of Adam."""
    model = causal("Rwkv", hidden_size=48, attention_hidden_size=48, num_hidden_layers=6, context_length=32)
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.1)
    return once(model, reading(seed, length=12), None)


@label("healthy", family="decoder prefix")
def learned_prefix_before_a_frozen_decoder(seed):
    """Prompt tuning: eight learned vectors before the embeddings of a frozen Llama of 6 layers; freezing is meant
    and the gradient still crosses every layer. Measured: output gradients 0.0083 at body.model.layers.0 and 0.0075
    at body.model.layers.5 (of 6); 57 of 58 parameters are frozen; loss 5.58 -> 5.47."""
    from torch import nn

    class Prompted(nn.Module):
        def __init__(self):
            super().__init__()
            self.prompt = nn.Parameter(torch.randn(8, 48) * 0.02)
            self.body = causal("Llama", **SMALL).requires_grad_(requires_grad=False)

        def forward(self, ids):
            embedded = self.body.get_input_embeddings()(ids)
            both = torch.cat([self.prompt.expand(len(ids), -1, -1), embedded], dim=1)
            return self.body(inputs_embeds=both).logits[:, 8:]

    model, (ids, after) = Prompted(), S.text(seed, sequences=3, length=16)
    optimizer = torch.optim.Adam([model.prompt], lr=0.01)
    return fit(model, lambda _: S.cross_entropy(model(ids), (ids, after)), steps=3, optimizer=optimizer)
