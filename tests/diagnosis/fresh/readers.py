"""Sound encoders and encoder-decoders of transformers, small and from scratch."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

NEEDS = "transformers"
S = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "unseen" / "steps.py")))
label, once, fit = S.label, S.once, S.fit
SIDES = {
    "vocab_size": 256,
    "d_model": 48,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
READER = {
    "vocab_size": 256,
    "hidden_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
}


def of_library(kind, task, **options):
    """A model of transformers by the name of its configuration and what it is for."""
    transformers = importlib.import_module("transformers")
    return getattr(transformers, f"{kind}For{task}")(getattr(transformers, f"{kind}Config")(**options))


def pairs(seed, length=14):
    """A text to read and the text behind it to write."""
    ids, after = S.text(seed, sequences=3, length=length)
    return {"input_ids": ids, "labels": after}


@label(
    "healthy",
    family="translator {kind}",
    variants=({"kind": "Pegasus"}, {"kind": "MBart"}, {"kind": "Marian"}, {"kind": "BlenderbotSmall"}),
)
def four_layers_a_side_with_cross_attention(seed, kind):
    """Four layers a side as the library starts them: Pegasus and mBART norm before a branch, Marian and the small
    BlenderBot after the sum; cross attention in each decoder layer. Measured: Pegasus: output gradients 1.9e-05 at
    model.encoder.layers.0 and 1.9e-05 at model.encoder.layers.3 (of 4), parameters' 0.0085 and 0.0088; 2 of 175
    parameters are frozen; loss 5.6 -> 3.58 in 30 steps of Adam. MBart: output gradients 5.1e-06 at
    model.encoder.layers.0 and 5.1e-06 at model.encoder.layers.3 (of 4), parameters' 0.0018 and 0.0019; loss 5.58 ->
    3.45 in 30 steps of Adam. Marian: output gradients 6.6e-06 at model.encoder.layers.0 and 6.8e-06 at
    model.encoder.layers.3 (of 4), parameters' 0.0048 and 0.0041; 2 of 171 parameters are frozen; loss 5.6 -> 3.58
    in 30 steps of Adam. BlenderbotSmall: output gradients 7e-06 at model.encoder.layers.0 and 7.1e-06 at
    model.encoder.layers.3 (of 4), parameters' 0.0035 and 0.0035; loss 5.58 -> 3.48 in 30 steps of Adam."""
    task = {"Marian": "", "Pegasus": "ConditionalGeneration"}.get(kind, "ConditionalGeneration")
    if kind == "Marian":
        from transformers import MarianConfig, MarianMTModel

        model = MarianMTModel(MarianConfig(**SIDES, decoder_vocab_size=256))
    else:
        model = of_library(kind, task, **SIDES)
    return once(model, pairs(seed), None)


@label("healthy", family="translator ProphetNet")
def prophetnet_that_predicts_two_steps(seed):
    """ProphetNet: two streams in the decoder predict the next two tokens, Post-LN. Measured: output gradients
    7.2e-06 at prophetnet.encoder.layers.0 and 7.3e-06 at prophetnet.encoder.layers.2 (of 3), parameters' 0.0026 and
    0.0026; loss 5.57 -> 3.35 in 30 steps of Adam."""
    model = of_library(
        "ProphetNet",
        "ConditionalGeneration",
        vocab_size=256,
        hidden_size=48,
        num_encoder_layers=3,
        num_decoder_layers=3,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_position_embeddings=64,
        ngram=2,
    )
    return once(model, pairs(seed, length=10), None)


MASKED = {
    "RoFormer": {**READER, "embedding_size": 48},
    "Longformer": {**READER, "attention_window": 8},
    "ConvBert": {**READER, "embedding_size": 48, "conv_kernel_size": 5},
    "MPNet": READER,
    "Nystromformer": {**READER, "num_landmarks": 6, "segment_means_seq_len": 24, "conv_kernel_size": 5},
    "MobileBert": {
        **READER,
        "embedding_size": 32,
        "intra_bottleneck_size": 24,
        "num_feedforward_networks": 2,
        "true_hidden_size": 24,
    },
}


@label("healthy", family="reader {kind}", variants=tuple({"kind": kind} for kind in MASKED))
def reader_that_fills_in(seed, kind):
    """Six Post-LN layers with masked tokens as targets: rotary positions, a local window of 8 with one token that
    all see, half the heads as convolutions, relative buckets, landmarks with a convolution, MobileBERT's
    bottlenecks with affine norms. Measured: RoFormer: output gradients 0.00063 at roformer.encoder.layer.0 and
    0.00063 at roformer.encoder.layer.5 (of 6), parameters' 0.14 and 0.14; 1 of 106 parameters are frozen; loss 5.65
    -> 3.34 in 30 steps of Adam. Longformer: output gradients 0.00045 at longformer.encoder.layer.0 and 0.00046 at
    longformer.encoder.layer.5 (of 6), parameters' 0.1 and 0.11; loss 5.61 -> 3.11 in 30 steps of Adam. ConvBert:
    output gradients 0.00062 at convbert.encoder.layer.0 and 0.00063 at convbert.encoder.layer.5 (of 6), parameters'
    0.11 and 0.12; loss 5.52 -> 2.98 in 30 steps of Adam. MPNet: output gradients 0.00045 at mpnet.encoder.layer.0
    and 0.00045 at mpnet.encoder.layer.5 (of 6), parameters' 0.096 and 0.097; loss 5.62 -> 3.13 in 30 steps of Adam.
    Nystromformer: output gradients 0.0005 at nystromformer.encoder.layer.0 and 0.00051 at
    nystromformer.encoder.layer.5 (of 6), parameters' 0.11 and 0.11; loss 5.49 -> 3.04 in 30 steps of Adam.
    MobileBert: output gradients 0.028 at mobilebert.encoder.layer.0 and 0.028 at mobilebert.encoder.layer.5 (of 6),
    parameters' 3 and 3; loss 5.55 -> 3.02 in 30 steps of Adam."""
    model = of_library(kind, "MaskedLM", **MASKED[kind])
    ids = S.text(seed, sequences=3, length=24)[0]
    hidden = torch.rand(ids.shape, generator=S.generator_of(seed)) < 0.3
    batch = {"input_ids": ids.masked_fill(hidden, 3), "labels": ids.masked_fill(~hidden, -100)}
    if kind == "Longformer":
        batch["global_attention_mask"] = (torch.arange(24) == 0).long().expand(3, -1)
    return once(model, batch, None)


@label("healthy", family="reader XLNet")
def xlnet_in_two_micro_batches(seed):
    """XLNet's relative attention, Post-LN, 2 steps of AdamW of two micro-batches; its vector for masks, which
    classification never needs, is frozen. Measured: output gradients 7.3e-05 at transformer.layer.0 and 7.5e-05 at
    transformer.layer.5 (of 6), parameters' 0.01 and 0.011; 1 of 108 parameters are frozen; loss 0.547 -> 0.555."""
    model = of_library(
        "XLNet", "SequenceClassification", vocab_size=256, d_model=48, n_layer=6, n_head=4, d_inner=96, num_labels=3
    )
    model.transformer.mask_emb.requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-4)
    segments = (torch.arange(12) > 5).long().expand(4, -1)

    def loss(k):
        ids = S.text(seed + k, sequences=4, length=12)[0]
        return model(input_ids=ids, token_type_ids=segments, labels=torch.arange(4) % 3).loss

    return fit(model, loss, steps=2, optimizer=optimizer, accumulate=2)


@label("healthy", family="reader Funnel")
def funnel_that_halves_its_sequence(seed):
    """Funnel: three blocks of two layers, pooled by two between them, and two layers on the sequence restored.
    Measured: output gradients 0.027 at the first layer of six, 0.033 at the last, 0.029 at the last of the decoder;
    loss 24.3 -> 3.9 in 30 steps of Adam."""
    model = of_library(
        "Funnel",
        "MaskedLM",
        vocab_size=256,
        block_sizes=[2, 2, 2],
        num_decoder_layers=2,
        d_model=48,
        n_head=4,
        d_head=12,
        d_inner=96,
    )
    ids, after = S.text(seed, sequences=3, length=16)
    return once(model, {"input_ids": ids, "labels": after}, None)


@label("healthy", family="reader Conformer")
def speech_by_convolutions_and_attention(seed):
    """Conformer of Wav2Vec2: half a feed-forward, attention, a depthwise convolution, half a feed-forward, with
    rotary positions, read at the mean. Measured: output gradients 0.00092 at encoder.layers.0 and 0.00073 at
    encoder.layers.4 (of 5), parameters' 0.91 and 0.52; loss 1.8 -> 0.0436 in 30 steps of Adam."""
    from transformers import Wav2Vec2ConformerConfig
    from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import Wav2Vec2ConformerEncoder

    class Listener(nn.Module):
        def __init__(self):
            super().__init__()
            config = Wav2Vec2ConformerConfig(
                hidden_size=48,
                num_hidden_layers=5,
                num_attention_heads=4,
                intermediate_size=96,
                conv_depthwise_kernel_size=5,
                position_embeddings_type="rotary",
                layerdrop=0.0,
            )
            self.entry, self.head = nn.Linear(20, 48), nn.Linear(48, 6)
            self.encoder = Wav2Vec2ConformerEncoder(config)
            del self.encoder.pos_conv_embed

        def forward(self, sound):
            return self.head(self.encoder(self.entry(sound)).last_hidden_state.mean(1))

    sound = torch.randn(6, 18, 20, generator=S.generator_of(seed))
    return once(Listener(), (sound, torch.arange(6)), S.cross_entropy)


@label("healthy", family="forecaster {kind}", variants=({"kind": "PatchTST"}, {"kind": "Informer"}))
def forecaster_of_series(seed, kind):
    """Transformers for series: PatchTST's patches with batch norm for layer norm, and Informer's sparse attention
    that keeps the sharpest queries, with a distribution for each step. Measured: PatchTST: output gradients 0.0018
    at model.encoder.layers.0 and 0.0016 at model.encoder.layers.3 (of 4), parameters' 0.27 and 0.28; 1 of 69
    parameters are frozen; loss 19 -> 2.35 in 30 steps of Adam. Informer: output gradients 2.7e-06 at
    model.encoder.layers.0 and 2.8e-06 at model.encoder.layers.2 (of 3), parameters' 0.0043 and 0.0042; 2 of 140
    parameters are frozen; loss 3.43 -> 2.75 in 30 steps of Adam."""
    generator = S.generator_of(seed)
    if kind == "PatchTST":
        model = of_library(
            kind,
            "Prediction",
            num_input_channels=3,
            context_length=32,
            patch_length=4,
            patch_stride=4,
            prediction_length=4,
            d_model=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            ffn_dim=64,
        )
        series = torch.randn(8, 36, 3, generator=generator).cumsum(1)
        return once(model, {"past_values": series[:, :32], "future_values": series[:, 32:]}, None)
    model = of_library(
        kind,
        "Prediction",
        prediction_length=6,
        context_length=18,
        lags_sequence=[1, 2],
        num_time_features=1,
        d_model=32,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        distil=False,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
    )
    series, times = torch.randn(8, 26, generator=generator).cumsum(1), torch.linspace(-0.5, 0.5, 26)
    batch = {
        "past_values": series[:, :20],
        "past_time_features": times[:20].expand(8, 20)[..., None],
        "past_observed_mask": torch.ones(8, 20),
        "future_values": series[:, 20:],
        "future_time_features": times[20:].expand(8, 6)[..., None],
    }
    return once(model, batch, None)
