"""Models that nobody here wrote: every sub-layer, its form, weights and place; and the page that says so."""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WRITER = runpy.run_path(str(ROOT / "scripts" / "write_topology.py"))
PRE = ("gpt2_scaled_init", "pre_ln")
POST = ("post_ln",)
SANDWICH = ("peri_ln", "sandwich_ln")

# Number of sub-layers, form of all, names per stream.
EXPECTED = {
    "BERT (transformers)": (8, "n(x + F(x))", [POST]),
    "RoBERTa (transformers)": (8, "n(x + F(x))", [POST]),
    "GPT-2 (transformers)": (8, "x + F(n x)", [PRE]),
    "Llama (transformers)": (8, "x + F(n x)", [PRE]),
    "Gemma 2 (transformers)": (8, "x + n(F(n x))", [SANDWICH]),
    "OLMo 2 (transformers)": (8, "x + n(F(x))", [()]),
    "Qwen 3 (transformers)": (8, "x + F(n x)", [PRE]),
    "Mixtral (transformers)": (8, "x + F(n x)", [PRE]),
    "GPT-NeoX, parallel branches (transformers)": (4, "x + F(n x)", [PRE]),
    "T5 (transformers)": (20, "x + F(n x)", [PRE, PRE]),
    "ViT (transformers)": (8, "x + F(n x)", [PRE]),
    "nn.TransformerEncoderLayer": (8, "n(x + F(x))", [POST]),
    "nn.TransformerEncoderLayer, norm_first": (8, "x + F(n x)", [PRE]),
    "ViT with LayerScale (timm)": (8, "x + b F(n x)", [("layerscale",)]),
    "Swin (timm)": (8, "x + F(n x)", [PRE, PRE]),
    "ResNet-18 (torchvision)": (5, "relu(x + n(F(x)))", [(), (), (), ()]),
    "multi-layer perceptron": (0, None, []),
}

# Sub-layer -> shortcut, branch, norm before, norm after, norm on the branch, site of the sum, reader of the sum.
SITES = {
    "BERT (transformers)": {
        0: ("bert.embeddings.dropout", "bert.encoder.layer.0.attention.output.dropout", None,
            "bert.encoder.layer.0.attention.output.LayerNorm", None, "bert.encoder.layer.0.attention.output.LayerNorm",
            "bert.encoder.layer.0.intermediate.dense"),
        7: ("bert.encoder.layer.3.attention.output.LayerNorm", "bert.encoder.layer.3.output.dropout", None,
            "bert.encoder.layer.3.output.LayerNorm", None, "bert.encoder.layer.3",
            "cls.predictions.transform.dense"),
    },
    "GPT-2 (transformers)": {
        0: ("transformer.drop", "transformer.h.0.attn", "transformer.h.0.ln_1", None, None, None,
            "transformer.h.0.ln_2"),
        7: (None, "transformer.h.3.mlp", "transformer.h.3.ln_2", None, None, "transformer.h.3", "transformer.ln_f"),
    },
    "Llama (transformers)": {
        0: ("model.embed_tokens", "model.layers.0.self_attn", "model.layers.0.input_layernorm", None, None, None,
            "model.layers.0.post_attention_layernorm"),
        7: (None, "model.layers.3.mlp", "model.layers.3.post_attention_layernorm", None, None, "model.layers.3",
            "model.norm"),
    },
    "Gemma 2 (transformers)": {
        3: (None, "model.layers.1.post_feedforward_layernorm", "model.layers.1.pre_feedforward_layernorm", None,
            "model.layers.1.post_feedforward_layernorm", "model.layers.1", "model.layers.2.input_layernorm"),
    },
    "T5 (transformers)": {
        9: ("decoder.block.0.layer.0", "decoder.block.0.layer.1.dropout", "decoder.block.0.layer.1.layer_norm", None,
            None, "decoder.block.0.layer.1", "decoder.block.0.layer.2.layer_norm"),
    },
    "nn.TransformerEncoderLayer": {
        7: ("1.layers.3.norm1", "1.layers.3.dropout2", None, "1.layers.3.norm2", None, "1.layers.3", "2"),
    },
    "nn.TransformerEncoderLayer, norm_first": {
        7: (None, "1.layers.3.dropout2", "1.layers.3.norm2", None, None, "1.layers.3", "1.norm"),
    },
    "ViT with LayerScale (timm)": {
        1: (None, "blocks.0.mlp", "blocks.0.norm2", None, None, "blocks.0", "blocks.1.norm1"),
    },
    "ResNet-18 (torchvision)": {
        4: ("layer4.0", "layer4.1.bn2", None, None, "layer4.1.bn2", "layer4.1", "layer4.1.relu"),
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def seen(operators):
    """Topologies that were read before, so that the page reads none again."""
    return {}


@pytest.fixture
def found(seen, request):
    def get(name):
        if any(package in name for package in ("timm", "torchvision")):
            request.getfixturevalue("vision")
        elif "transformers" in name:
            pytest.importorskip("transformers")
        if name not in seen:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what libraries deprecate while they build a model is not under test
                seen[name] = WRITER["look"](name)
        return seen[name]

    return get


@pytest.mark.parametrize("name", EXPECTED)
def test_every_sublayer_is_found_and_named(name, found):
    number, form, schemes = EXPECTED[name]
    topology = found(name)
    assert [record.form for record in topology.sublayers] == [form] * number
    assert list(topology.schemes) == schemes
    assert all(record.alpha.is_one for record in topology.sublayers)
    assert topology.further == ()
    assert len(topology.unknown) == (3 if name.startswith("ResNet") else 0)


@pytest.mark.parametrize("name", SITES)
def test_sites(name, found):
    for index, expected in SITES[name].items():
        s = found(name).sublayers[index]
        assert (s.shortcut, s.branch, s.norm_before, s.norm_after, s.branch_norm, s.site, s.read_by) == expected


def test_streams_of_encoder_and_decoder(found):
    """Three sub-layers per block in the decoder, two in the encoder."""
    assert [s.stream for s in found("T5 (transformers)").sublayers] == [0] * 8 + [1] * 12


def test_layerscale_parameters(found):
    found = found("ViT with LayerScale (timm)")
    assert [s.beta.parameter for s in found.sublayers[:2]] == ["blocks.0.ls1.gamma", "blocks.0.ls2.gamma"]
    assert {s.beta.kind for s in found.sublayers} == {"learnable vector"}


def test_every_row_has_an_expectation():
    assert set(EXPECTED) == set(WRITER["MODELS"])


def test_page_is_up_to_date(found, vision):
    page = WRITER["page"]({name: found(name) for name in WRITER["names"]()})
    assert WRITER["PAGE"].read_text(encoding="utf-8") == page, "run: python scripts/write_topology.py"
