"""Attention statistics of real models, against weights that are formed explicitly."""

from __future__ import annotations

import copy
import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import keelscope as ks
from keelscope.errors import RecordingWarning
from keelscope.models import build
from keelscope.testing import check_probe
from keelscope_probes.attention import ATTENTION, MOST_HEADS

NAMES = ("entropy", "entropy_share", "max_weight", "sink_mass")


def expected(*weights: Tensor) -> dict[str, np.ndarray]:
    """Every statistic by head from weights ``[batch, head, query, key]`` of one or more calls, row by row."""
    heads = weights[0].shape[1]
    found = {name: np.full(heads, np.nan) for name in NAMES}
    for head in range(heads):
        rows = [row for w in weights for row in w[:, head].flatten(0, 1).double().numpy() if row.sum() > 0]
        entropies = [-sum(w * math.log(w) for w in row if w > 0) for row in rows]
        shares = [e / math.log((row > 0).sum()) for e, row in zip(entropies, rows, strict=True) if (row > 0).sum() > 1]
        found["entropy"][head] = np.mean(entropies)
        found["entropy_share"][head] = np.mean(shares) if shares else np.nan
        found["max_weight"][head] = np.mean([row.max() for row in rows])
        found["sink_mass"][head] = np.mean([row[0] for row in rows])
    return found


def recorded(model: nn.Module, loss, **options) -> dict[str, dict[str, np.ndarray]]:
    """Path -> statistic -> ``[head]`` of one watched step; a warning of the watch is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecordingWarning)
        with ks.watch(model, probes="attention", **options) as watch:
            loss(model).backward()
    series = {name: watch.run.get(f"attention/{name}") for name in NAMES}
    if series["entropy"] is None:
        return {}
    paths = [site.path for site in series["entropy"].sites]
    return {path: {name: series[name].values[0, i] for name in NAMES} for i, path in enumerate(paths)}


def assert_matches(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], error: float = 1e-5) -> None:
    heads = len(wanted["entropy"])
    for name in NAMES:
        np.testing.assert_allclose(found[name][:heads], wanted[name], rtol=error, atol=error, err_msg=name)
        assert np.isnan(found[name][heads:]).all(), name


def tokens(*shape: int) -> Tensor:
    return torch.randint(1, 99, shape, generator=torch.Generator().manual_seed(1))


def test_conformance():
    check_probe(ATTENTION)
    check_probe(ATTENTION, module=nn.MultiheadAttention(8, 2), inputs=(torch.randn(5, 3, 8),) * 3)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(split=st.integers(0, 4), queries=st.integers(0, 5), keys=st.integers(1, 6), seed=st.integers(0, 99))
def test_merge_law(split, queries, keys, seed):
    """of(a ++ b) == merge(of(a), of(b)), joined along the batch; some keys are masked."""
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(4, 3, queries, keys, dtype=torch.float64, generator=generator)
    scores.masked_fill_(torch.rand(scores.shape, generator=generator) < 0.3, -torch.inf)
    terms = ATTENTION.statistics[0].terms
    a, b, whole = (terms.of(part).numpy() for part in (scores[:split], scores[split:], scores))
    np.testing.assert_allclose(terms.merge(a, b), whole, rtol=1e-12, atol=1e-12)


def gpt2(implementation: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=16, bos_token_id=0, eos_token_id=0,
        attn_implementation=implementation, initializer_range=0.5,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def bert(implementation: str) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=16, attn_implementation=implementation, initializer_range=0.5,
    )  # fmt: skip
    return BertForMaskedLM(config)


def llama(implementation: str) -> nn.Module:
    """Four heads that share two keys."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=99, max_position_embeddings=16, bos_token_id=0, eos_token_id=0, attn_implementation=implementation,
        initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("build_model", [gpt2, bert, llama])
def test_hugging_face(build_model, padded):
    """Fused and eager attention give the weights that the eager model returns."""
    torch.manual_seed(0)
    eager = build_model("eager").eval()
    fused = build_model("sdpa").eval()
    fused.load_state_dict(eager.state_dict())
    batch = {"input_ids": tokens(3, 12)}
    blind = 5 if padded and build_model is not bert else 0  # queries before the first token of a causal model
    if padded:
        mask = torch.ones(3, 12, dtype=torch.int64)
        mask[1, :5], mask[2, 7:] = 0, 0
        batch["attention_mask"] = mask
    with torch.no_grad():
        weights = eager(**batch, output_attentions=True).attentions
    for one in weights:
        one[1, :, :blind] = 0
    for model in (eager, fused):
        found = recorded(model, lambda model: model(**batch).logits.square().mean())
        assert len(found) == 2
        for i, values in enumerate(found.values()):
            assert_matches(values, expected(weights[i]))


def test_reference_model():
    torch.manual_seed(0)
    model = build("pre_ln", depth=4, width=32, heads=4, vocabulary=99)
    kept: dict[str, Tensor] = {}
    branch = model.sublayers[2].branch
    for name in ("query", "key"):
        getattr(branch, name).register_forward_hook(lambda _m, _i, out, name=name: kept.__setitem__(name, out.detach()))
    found = recorded(model, lambda model: model(tokens(2, 20)).square().mean())
    assert list(found) == ["sublayers.0.branch", "sublayers.2.branch"]
    query, key = (branch.rotary(branch._split(kept[name], None)) for name in ("query", "key"))
    scores = query @ key.mT * branch.scale + torch.full((20, 20), -torch.inf).triu(1)
    assert_matches(found["sublayers.2.branch"], expected(scores.softmax(-1)))


class Attends(nn.Module):
    """Attention between given queries and keys, in any of the ways it is written."""

    def __init__(self, how, heads: int = 2) -> None:
        super().__init__()
        self.how = how
        self.scale = nn.Parameter(torch.ones(heads, 1, 1))

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return self.how(self.scale * query, key)


def seen(how, query: Tensor, key: Tensor) -> dict[str, np.ndarray]:
    model = nn.Sequential()
    model.add_module("attends", Attends(how, query.shape[1]))
    return recorded(model, lambda model: model.attends(query, key).square().sum(), sites="all")["attends"]


def operands(queries: int = 6, keys: int = 9, heads: int = 2, batch: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(2 * torch.randn(batch, heads, n, 8, generator=generator) for n in (queries, keys))


def masked(query: Tensor, key: Tensor, mask: Tensor | None = None, scale: float = 8**-0.5) -> Tensor:
    scores = query @ key.mT * scale
    weights = (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1)
    return weights.nan_to_num(0.0)


SOME = torch.rand(6, 9, generator=torch.Generator().manual_seed(3)) > 0.4
SOME[2] = False
PER_HEAD = torch.rand(3, 2, 6, 9, generator=torch.Generator().manual_seed(4)) > 0.4
CAUSAL = torch.ones(6, 9).tril().bool()


@pytest.mark.parametrize(
    ("options", "mask"),
    [
        ({}, None),
        ({"is_causal": True}, CAUSAL),
        ({"attn_mask": SOME}, SOME),
        ({"attn_mask": PER_HEAD}, PER_HEAD),
        ({"attn_mask": PER_HEAD[:, :1, :1]}, PER_HEAD[:, :1, :1]),
        ({"attn_mask": torch.zeros(6, 9).masked_fill(~SOME, -torch.inf)}, SOME),
        ({"attn_mask": torch.zeros(6, 9).masked_fill(~SOME, torch.finfo(torch.float32).min)}, SOME),
        ({"attn_mask": torch.zeros(6, 9).masked_fill(~PER_HEAD, torch.finfo(torch.float32).min)}, PER_HEAD),
        ({"attn_mask": torch.zeros(6, 9).masked_fill(~PER_HEAD, -1e4)}, PER_HEAD),
    ],
    ids=[
        "none",
        "causal",
        "a query without keys",
        "per head",
        "key padding",
        "inf",
        "smallest",
        "per head, smallest",
        "-1e4",
    ],
)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_masks(options, mask, dropout):
    """Weights before dropout; a query that may attend to nothing is left out."""
    query, key = operands()

    def how(q: Tensor, k: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, dropout_p=dropout, **options)

    assert_matches(seen(how, query, key), expected(masked(query, key, mask)))


def test_every_query_without_keys():
    query, key = operands()
    nothing = torch.zeros(6, 9, dtype=torch.bool)
    found = seen(lambda q, k: F.scaled_dot_product_attention(q, k, k, attn_mask=nothing), query, key)
    assert all(np.isnan(values).all() for values in found.values())


@pytest.mark.parametrize(
    "how",
    [
        lambda q, k: torch.softmax(q @ k.mT, -1) @ k,
        lambda q, k: F.softmax(q @ k.mT, dim=-1, dtype=torch.float32) @ k,
        lambda q, k: (q @ k.mT).softmax(3) @ k,
        lambda q, k: nn.Softmax(-1)(q @ k.mT) @ k,
        lambda q, k: F.dropout((q @ k.mT).softmax(-1), 0.5) @ k,
        lambda q, k: F.scaled_dot_product_attention(q, k, k, scale=1.0),
        lambda q, k: F.scaled_dot_product_attention(q.double(), k.double(), k.double(), scale=1.0),
    ],
)
def test_ways_to_write_it(how):
    query, key = operands()
    assert_matches(seen(how, query, key), expected(masked(query, key, scale=1.0)))


def test_grouped_queries():
    query, key = operands(heads=6)
    found = seen(lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True), query, key[:, :2])
    assert_matches(found, expected(masked(query, key[:, :2].repeat_interleave(3, dim=1))))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    query, key = operands()
    found = seen(lambda q, k: F.scaled_dot_product_attention(q.to(dtype), k.to(dtype), k.to(dtype)), query, key)
    assert_matches(found, expected(masked(query.to(dtype).double(), key.to(dtype).double())))


def test_autocast():
    """Scores from what the operator was given, half precision, without further rounding."""
    query, key = operands()

    def how(q: Tensor, k: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.scaled_dot_product_attention(q, k, k).float()

    assert_matches(seen(how, query, key), expected(masked(query.bfloat16().double(), key.bfloat16().double())))


@pytest.mark.parametrize("queries", [64, 65, 200])
def test_long_sequences_are_looked_at_through_some_queries(queries):
    query, key = operands(queries, 10)
    step = -(-queries // 64)
    found = seen(lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True), query, key)
    weights = masked(query, key, torch.ones(queries, 10).tril().bool())[:, :, step // 2 :: step]
    assert 32 <= weights.shape[2] <= 64
    assert_matches(found, expected(weights))


def test_saturated_and_uniform_heads():
    query = torch.ones(1, 2, 3, 8) * torch.tensor([1e4, 0.0]).reshape(1, 2, 1, 1)
    key = torch.eye(5, 8).expand(1, 2, 5, 8) * torch.arange(5, 0, -1).reshape(5, 1)
    found = seen(lambda q, k: F.scaled_dot_product_attention(q, k, k), query, key)
    np.testing.assert_allclose(found["entropy"], [0, math.log(5)], atol=1e-6)
    np.testing.assert_allclose(found["sink_mass"], [1, 0.2], atol=1e-6)
    np.testing.assert_allclose(found["max_weight"], [1, 0.2], atol=1e-6)
    assert found["entropy_share"][1] == pytest.approx(1)


def test_what_is_not_finite_is_not_hidden():
    query, key = operands()
    query[0, 1, 2] = math.nan
    found = seen(lambda q, k: F.scaled_dot_product_attention(q, k, k), query, key)
    for name in NAMES:
        assert np.isfinite(found[name][0])
        assert math.isnan(found[name][1])


@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention(need_weights):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 4, batch_first=True, dropout=0.3)
    x = torch.randn(3, 7, 16)
    found = recorded(attention, lambda attention: attention(x, x, x, need_weights=need_weights)[0].sum())[""]
    _, weights = attention.eval()(x, x, x, average_attn_weights=False)
    assert_matches(found, expected(weights.detach()))


def test_encoder_layer():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)
    x = torch.randn(3, 7, 16)
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 4:] = True
    found = recorded(model, lambda model: model(x, src_key_padding_mask=padding).square().sum())
    assert list(found) == ["layers.0.self_attn", "layers.1.self_attn"]
    bias = torch.zeros(3, 7).masked_fill(padding, -torch.inf)
    _, weights = model.layers[0].self_attn.eval()(x, x, x, key_padding_mask=bias, average_attn_weights=False)
    assert_matches(found["layers.0.self_attn"], expected(weights.detach()))


def test_inference_path_of_multihead_attention_is_left_as_it_is():
    """Without gradients it runs in one kernel: unseen, and still taken."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2).eval()
    x = torch.randn(3, 7, 16)
    with torch.no_grad():
        alone = model(x)
        with ks.watch(model, probes=["attention", "outputs"]) as watch:
            watched = model(x)
            watch.step()
    assert torch.equal(alone, watched)
    assert watch.run.get("attention/entropy") is None


@pytest.mark.usefixtures("vision")
def test_timm():
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    model = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=5)
    pictures = torch.randn(2, 3, 32, 32)
    fused = recorded(model, lambda model: model(pictures).square().sum())
    for block in model.blocks:
        block.attn.fused_attn = False
    eager = recorded(model, lambda model: model(pictures).square().sum())
    assert list(fused) == list(eager) == ["blocks.0.attn", "blocks.1.attn"]
    for path in fused:
        assert_matches(fused[path], eager[path])


def test_several_calls_in_a_step_are_merged():
    query, key = operands()

    def twice(q: Tensor, k: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k) + F.scaled_dot_product_attention(q, k[:, :, :6], k[:, :, :6])

    assert_matches(seen(twice, query, key), expected(masked(query, key), masked(query, key[:, :, :6])))


def test_heads_differ_from_site_to_site():
    model = nn.ModuleList([Attends(lambda q, k: F.scaled_dot_product_attention(q, k, k), heads) for heads in (2, 5)])
    few, many = operands(heads=2), operands(heads=5)
    found = recorded(model, lambda model: model[0](*few).sum() + model[1](*many).sum(), sites="all")
    assert len(found["0"]["entropy"]) == 5
    assert_matches(found["0"], expected(masked(*few)))
    assert_matches(found["1"], expected(masked(*many)))


def test_more_heads_than_are_kept():
    query, key = operands(heads=MOST_HEADS + 4, batch=1)
    found = seen(lambda q, k: F.scaled_dot_product_attention(q, k, k), query, key)
    assert_matches(found, expected(masked(query, key)[:, :MOST_HEADS]))


def test_what_is_no_attention():
    """Softmax over channels, over classes and over experts."""

    def how(q: Tensor, k: Tensor) -> Tensor:
        routed = q.flatten(0, 1).softmax(-1)  # [token, position, expert]
        return q.softmax(1).sum() + routed.sum() + q.softmax(2).sum() + k.log_softmax(-1).sum()

    model = nn.ModuleList([Attends(how)])
    assert recorded(model, lambda model: model[0](*operands()), sites="all") == {}


def test_the_file_has_one_axis_of_heads(tmp_path):
    model = build("post_ln", depth=4, width=32, heads=4, vocabulary=99)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ks.watch(model, tmp_path / "run.h5", optimizer=optimizer, probes=["default", "attention"]) as watch:
        for _ in range(12):
            optimizer.zero_grad()
            model(tokens(2, 9)).square().mean().backward()
            optimizer.step()
    with ks.open_run(watch.path) as run:
        series = run["attention/entropy"]
        assert series.values.shape == (2, 2, 4)
        assert series.steps.tolist() == [0, 10]
        assert np.isfinite(series.values).all()
        assert copy.copy(series).dims == ("head",)
