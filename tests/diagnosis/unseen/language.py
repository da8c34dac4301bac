"""Sound language models of transformers, small and from scratch: decoders, encoder-decoders, state spaces, experts."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import torch

NEEDS = "transformers"
S = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("steps.py"))))
label, once, fit = S.label, S.once, S.fit
SMALL = {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 96}


def causal(config, dtype=None):
    """A language model and the text it reads, with the label that the model shifts itself."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config)
    return model if dtype is None else model.to(dtype)


def reading(seed, length=24):
    """Bytes of a text as a language model takes them."""
    ids = S.text(seed, sequences=3, length=length)[0]
    return {"input_ids": ids, "labels": ids}


@label("healthy", family="gpt-neox")
def neox_with_parallel_branches(seed):
    """Pythia's layout, attention and feed-forward side by side on one pre-norm stream, as released. Measured: output
    gradients 0.011 at gpt_neox.layers.0 and 0.0051 at gpt_neox.layers.7 (of 8), parameters' 3.7 and 1.1; loss 5.59
    -> 3.35 in 30 steps of Adam."""
    from transformers import GPTNeoXConfig

    model = causal(GPTNeoXConfig(vocab_size=256, num_hidden_layers=8, max_position_embeddings=64, **SMALL))
    return once(model, reading(seed), None)


@label("healthy", family="gpt2")
def gpt2_after_warmup(seed):
    """GPT-2 of 6 layers with AdamW, a linear warm-up, clipping at 1 and two micro-batches a step, as trained.
    Measured: output gradients 0.0014 at transformer.h.0 and 0.0013 at transformer.h.5 (of 6), parameters' 0.15 and
    0.17; loss 2.75 -> 2.59."""
    from transformers import GPT2Config

    model = causal(GPT2Config(vocab_size=256, n_layer=6, n_embd=48, n_head=4, n_positions=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: (k + 1) / 4)

    def loss_of(part):
        if part and part % 2 == 0:
            warm.step()
        return model(**reading(seed + part)).loss

    return fit(model, loss_of, steps=4, optimizer=optimizer, clip=1.0, accumulate=2)


@label("healthy", family="opt")
def opt_in_float64(seed):
    """OPT, a pre-norm decoder with learned positions and ReLU, in double precision. Measured: output gradients
    0.0079 at model.decoder.layers.0 and 0.0045 at model.decoder.layers.5 (of 6), parameters' 1.7 and 1.2; loss 5.54
    -> 3.28 in 30 steps of Adam."""
    from transformers import OPTConfig

    config = OPTConfig(
        vocab_size=256, num_hidden_layers=6, hidden_size=48, ffn_dim=96, num_attention_heads=4, word_embed_proj_dim=48
    )
    return once(causal(config, torch.float64), reading(seed), None)


@label("healthy", family="mistral")
def mistral_in_bfloat16_autocast(seed):
    """Mistral with grouped queries and a sliding window, trained in bfloat16 autocast for 3 steps of AdamW.
    Measured: output gradients 0.0097 at model.layers.0 and 0.0053 at model.layers.5 (of 6), parameters' 0.43 and
    0.21; loss 5.58 -> 5.37."""
    from transformers import MistralConfig

    config = MistralConfig(
        vocab_size=256,
        num_hidden_layers=6,
        num_key_value_heads=2,
        sliding_window=8,
        max_position_embeddings=64,
        **SMALL,
    )
    model = causal(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_of(part):
        with S.autocast(torch.bfloat16):
            return model(**reading(seed + part)).loss

    return fit(model, loss_of, steps=3, optimizer=optimizer, clip=1.0)


@label("healthy", family="gemma2")
def gemma2_with_norms_on_both_sides(seed):
    """Gemma 2: RMSNorm before and after every branch, soft caps on scores and logits. Measured: output gradients
    0.00028 at model.layers.0 and 9.5e-05 at model.layers.5 (of 6), parameters' 3.9 and 0.94; loss 5.55 -> 3.57 in 30
    steps of Adam."""
    from transformers import Gemma2Config

    config = Gemma2Config(
        vocab_size=256, num_hidden_layers=6, num_key_value_heads=2, head_dim=12, max_position_embeddings=64, **SMALL
    )
    return once(causal(config), reading(seed), None)


@label("healthy", family="mixtral")
def mixtral_where_most_experts_rest(seed):
    """8 experts, 2 a token, 12 tokens: experts that no token chose have no gradient, as meant in a mixture.
    Measured: output gradients 0.11 at model.layers.0 and 0.063 at model.layers.3 (of 4), parameters' 3.4 and 1.9;
    loss 5.54 -> 2.95 in 30 steps of Adam."""
    from transformers import MixtralConfig

    config = MixtralConfig(
        vocab_size=256,
        num_hidden_layers=4,
        num_key_value_heads=2,
        num_local_experts=8,
        max_position_embeddings=64,
        **SMALL,
    )
    ids = S.text(seed, sequences=1, length=12)[0]
    return once(causal(config), {"input_ids": ids, "labels": ids}, None)


@label("healthy", family="mamba")
def mamba(seed):
    """A selective state space model of 6 layers, initialised by the library. Measured: output gradients 0.026 at
    backbone.layers.0 and 0.018 at backbone.layers.5 (of 6), parameters' 0.58 and 0.43; loss 5.56 -> 2.3 in 30 steps
    of Adam."""
    from transformers import MambaConfig

    config = MambaConfig(vocab_size=256, num_hidden_layers=6, hidden_size=32, state_size=8)
    return once(causal(config), reading(seed, length=16), None)


@label("healthy", family="t5")
def t5(seed):
    """T5 v1.1: encoder and decoder of 4 layers, gated GELU, no scale in attention but in its initialisation.
    Measured: output gradients 0.014 at encoder.block.0 and 0.0067 at encoder.block.3 (of 4), parameters' 17 and 8.8;
    loss 26.6 -> 6.39 in 30 steps of Adam."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=256, d_model=48, d_kv=12, d_ff=96, num_layers=4, num_heads=4, feed_forward_proj="gated-gelu",
        decoder_start_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config)
    return once(model, reading(seed), None)


@label("healthy", family="bart")
def bart_of_three_layers_a_side(seed):
    """BART: Post-LN on both sides, of 3 layers each, shallow enough for it; initialised with 0.02. Measured: output
    gradients 2.6e-06 at model.encoder.layers.0 and 2.7e-06 at model.encoder.layers.2 (of 3), parameters' 0.0023 and
    0.0024; loss 5.55 -> 3.43 in 30 steps of Adam."""
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=256, d_model=48, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=64,
    )  # fmt: skip
    return once(BartForConditionalGeneration(config), reading(seed), None)


@label("healthy", family="qwen2 recomputed")
def qwen2_with_recomputation(seed):
    """Qwen 2 of 6 layers under gradient checkpointing, 2 steps of AdamW on two micro-batches each. Measured: output
    gradients 0.0044 at model.layers.0 and 0.003 at model.layers.5 (of 6), parameters' 0.31 and 0.26; loss 2.78 ->
    2.7."""
    from transformers import Qwen2Config

    config = Qwen2Config(
        vocab_size=256, num_hidden_layers=6, num_key_value_heads=2, max_position_embeddings=64, use_cache=False, **SMALL
    )
    model = causal(config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return fit(model, lambda k: model(**reading(seed + k)).loss, steps=2, optimizer=optimizer, clip=1.0, accumulate=2)
