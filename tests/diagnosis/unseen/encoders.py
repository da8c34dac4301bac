"""Sound encoders of transformers, small and from scratch: text, speech, two towers, adapters on a frozen body."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

NEEDS = "transformers"
S = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("steps.py"))))
label, once, fit = S.label, S.once, S.fit
SMALL = {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 96}


@label("healthy", family="albert")
def albert_with_layers_used_twice(seed):
    """ALBERT with four groups of shared weights, each used twice; masked language modelling of 15 % of the bytes.
    Measured: output gradients 0.00043 at albert.encoder.albert_layer_groups.0 and 0.00043 at
    albert.encoder.albert_layer_groups.3 (of 4), parameters' 0.54 and 0.2; loss 5.54 -> 4.13 in 30 steps of Adam."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    config = AlbertConfig(
        vocab_size=256, embedding_size=24, num_hidden_layers=8, num_hidden_groups=4, max_position_embeddings=64,
        pad_token_id=0, **SMALL,
    )  # fmt: skip
    ids = S.text(seed, sequences=4, length=32)[0]
    hidden = torch.rand(ids.shape, generator=S.generator_of(seed)) < 0.15
    return once(
        AlbertForMaskedLM(config),
        {"input_ids": ids.masked_fill(hidden, 3), "labels": ids.masked_fill(~hidden, -100)},
        None,
    )


@label("healthy", family="electra")
def electra_that_finds_replaced_tokens(seed):
    """ELECTRA's discriminator, a Post-LN encoder of 6 layers: one yes or no for each token. Measured: output
    gradients 6.3e-06 at electra.encoder.layer.0 and 6.4e-06 at electra.encoder.layer.5 (of 6), parameters' 0.032 and
    0.0079; loss 0.692 -> 0.36 in 30 steps of Adam."""
    from transformers import ElectraConfig, ElectraForPreTraining

    config = ElectraConfig(
        vocab_size=256, embedding_size=24, num_hidden_layers=6, max_position_embeddings=64, pad_token_id=0, **SMALL
    )
    ids = S.text(seed, sequences=4, length=24)[0]
    swapped = torch.rand(ids.shape, generator=S.generator_of(seed)) < 0.2
    return once(
        ElectraForPreTraining(config),
        {"input_ids": torch.where(swapped, ids.flip(0), ids), "labels": swapped.long()},
        None,
    )


@label("healthy", family="fnet")
def fnet_that_mixes_by_fourier(seed):
    """FNet: Fourier transforms instead of attention, Post-LN, 5 layers, three classes. Measured: output gradients
    5.5e-05 at fnet.encoder.layer.0 and 7.4e-05 at fnet.encoder.layer.4 (of 5), parameters' 0.0054 and 0.0076; loss
    1.1 -> 0.341 in 30 steps of Adam."""
    from transformers import FNetConfig, FNetForSequenceClassification

    config = FNetConfig(
        vocab_size=256,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=5,
        max_position_embeddings=64,
        num_labels=3,
    )
    return once(
        FNetForSequenceClassification(config),
        {"input_ids": S.text(seed, sequences=6)[0], "labels": torch.arange(6) % 3},
        None,
    )


@label("healthy", family="whisper")
def whisper(seed):
    """Whisper: two convolutions and 4 layers over a spectrogram, 4 layers of decoder. Measured: output gradients
    0.00013 at model.encoder.layers.0 and 0.00013 at model.encoder.layers.3 (of 4), parameters' 0.11 and 0.11; 1 of
    167 parameters are frozen; loss 5.53 -> 3.15 in 30 steps of Adam."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=256, num_mel_bins=16, d_model=48, encoder_layers=4, decoder_layers=4, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, max_source_positions=32,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    sound = torch.randn(2, 16, 64, generator=S.generator_of(seed))
    return once(
        WhisperForConditionalGeneration(config),
        {"input_features": sound, "labels": S.text(seed, sequences=2, length=16)[0]},
        None,
    )


@label("healthy", family="clip")
def clip_of_two_towers(seed):
    """CLIP: pictures and texts in two pre-norm towers of 4 layers, a contrastive loss over 6 pairs. Measured: output
    gradients 0.03 at text_model.encoder.layers.0 and 0.012 at text_model.encoder.layers.3 (of 4), parameters' 15 and
    6.4; loss 1.99 -> 0.00127 in 30 steps of Adam."""
    from transformers import CLIPConfig, CLIPModel

    tower = {"num_hidden_layers": 4, **SMALL}
    config = CLIPConfig(
        text_config={"vocab_size": 256, "max_position_embeddings": 32, "eos_token_id": 255, **tower},
        vision_config={"image_size": 16, "patch_size": 4, **tower},
        projection_dim=32,
    )
    batch = {
        "pixel_values": S.images(seed)[0],
        "input_ids": S.text(seed, sequences=6, length=16)[0],
        "return_loss": True,
    }
    return once(CLIPModel(config), batch, None)


@label("healthy", family="deberta")
def deberta_with_relative_positions(seed):
    """DeBERTa v2: Post-LN with disentangled attention over relative positions, 5 layers, three classes. Measured:
    output gradients 4e-05 at deberta.encoder.layer.0 and 4.2e-05 at deberta.encoder.layer.4 (of 5), parameters'
    0.006 and 0.0059; loss 1.1 -> 0.419 in 30 steps of Adam."""
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    config = DebertaV2Config(
        vocab_size=256, num_hidden_layers=5, max_position_embeddings=64, relative_attention=True, position_buckets=16,
        pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm", num_labels=3, **SMALL,
    )  # fmt: skip
    batch = {"input_ids": S.text(seed, sequences=6)[0], "labels": torch.arange(6) % 3}
    return once(DebertaV2ForSequenceClassification(config), batch, None)


@label("healthy", family="wav2vec2")
def wav2vec2_with_ctc(seed):
    """Wav2vec 2: five convolutions over raw sound, 4 Post-LN layers, CTC over a short transcript. Measured: output
    gradients 0.0062 at wav2vec2.feature_extractor.conv_layers.0 and 0.044 at
    wav2vec2.feature_extractor.conv_layers.4 (of 5), parameters' 3.1 and 15; 1 of 83 parameters are frozen; loss 280
    -> 95.2 in 30 steps of Adam."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=32, num_hidden_layers=4, conv_dim=(32,) * 5, conv_kernel=(10, 3, 3, 3, 2),
        conv_stride=(5, 2, 2, 2, 2), num_feat_extract_layers=5, num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4, apply_spec_augment=False, layerdrop=0.0, **SMALL,
    )  # fmt: skip
    generator = S.generator_of(seed)
    sound, said = torch.randn(2, 4000, generator=generator), torch.randint(1, 32, (2, 8), generator=generator)
    model = Wav2Vec2ForCTC(config)
    model.wav2vec2.masked_spec_embed.requires_grad_(requires_grad=False)  # nothing is masked here
    return once(model, {"input_values": sound, "labels": said}, None)


@label("healthy", family="bert lora")
def bert_with_lora_on_a_frozen_body(seed):
    """Low-rank adapters on every query and value, after 3 steps; the body is frozen on purpose, the head learns.
    Measured: output gradients 7e-05 at bert.encoder.layer.0 and 7.1e-05 at bert.encoder.layer.5 (of 6), parameters'
    0.00073 and 0.00047; 103 of 129 parameters are frozen; loss 1.1 -> 1.09."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=256, num_hidden_layers=6, max_position_embeddings=64, num_labels=3, **SMALL)
    model = BertForSequenceClassification(config)
    model.bert.requires_grad_(requires_grad=False)
    for layer in model.bert.encoder.layer:
        attention = layer.attention.self
        attention.query, attention.value = Lora(attention.query), Lora(attention.value)
    learned = [p for p in model.parameters() if p.requires_grad]
    batch = {"input_ids": S.text(seed, sequences=6)[0], "labels": torch.arange(6) % 3}
    return fit(model, lambda _: model(**batch).loss, steps=4, optimizer=torch.optim.AdamW(learned, lr=2e-3))


class Lora(nn.Module):
    """A frozen linear layer and a learned product of rank 4 that starts at 0."""

    def __init__(self, frozen):
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, 4, bias=False)
        self.up = nn.Linear(4, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.frozen(x) + 2 * self.up(self.down(x))
