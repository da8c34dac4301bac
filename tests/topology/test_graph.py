"""The graph as arrays: order, leaves, shapes, and which operations mix features or positions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from keelscope.topology.graph import Graph

X = torch.randn(2, 4, 8, requires_grad=True) * 1.0
W = torch.randn(8, 8, requires_grad=True)

HEAVY = {
    "linear": lambda x: F.linear(x, W),
    "linear with bias": lambda x: F.linear(x, W, W[0]),
    "matmul": lambda x: x @ W,
    "matrix times vector": lambda x: x[0] @ W[0],
    "bmm": lambda x: torch.bmm(x, x.mT),
    "baddbmm": lambda x: torch.baddbmm(x @ x.mT, x, x.mT),
    "einsum": lambda x: torch.einsum("btd,de->bte", x, W),
    "tensordot": lambda x: torch.tensordot(x, W, 1),
    "bilinear": lambda x: F.bilinear(x, x, torch.randn(3, 8, 8, requires_grad=True)),
    "convolution": lambda x: F.conv1d(x, torch.randn(5, 4, 3, requires_grad=True)),
    "depthwise": lambda x: F.conv1d(x, torch.randn(4, 1, 3, requires_grad=True), groups=4),
    "transposed": lambda x: F.conv_transpose1d(x, torch.randn(4, 5, 3, requires_grad=True)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "attention with dropout": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "multi-head attention": lambda x: nn.MultiheadAttention(8, 2, batch_first=True)(x, x, x)[0],
    "lstm": lambda x: nn.LSTM(8, 8, batch_first=True)(x)[0],
    "gru": lambda x: nn.GRU(8, 8, batch_first=True)(x)[0],
    "lstm cell": lambda x: nn.LSTMCell(8, 8)(x[:, 0])[0],
    "fourier": lambda x: torch.fft.fft(x).real,
    "distances": lambda x: torch.cdist(x, x),
}
LIGHT = {
    "product": lambda x: x * W[0],
    "softmax": lambda x: x.softmax(-1),
    "gelu": F.gelu,
    "layer norm": lambda x: F.layer_norm(x, (8,)),
    "rms norm": lambda x: F.rms_norm(x, (8,)),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group norm": lambda x: F.group_norm(x, 2),
    "cumulative sum": lambda x: x.cumsum(1),
    "mean": lambda x: x.mean(1, keepdim=True),
    "concatenation": lambda x: torch.cat([x, x]),
    "pooling": lambda x: F.avg_pool1d(x, 2),
    "interpolation": lambda x: F.interpolate(x, scale_factor=2),
    "dropout": lambda x: F.dropout(x, 0.5),
    "chunk": lambda x: x.chunk(2, -1)[0],
    "index": lambda x: x[:, torch.tensor([2, 1])],
    "roll": lambda x: x.roll(1, 1),
    "views": lambda x: x.view(8, 8).mT.reshape(2, 4, 8).unsqueeze(0).squeeze(0).permute(2, 0, 1),
    "where": lambda x: torch.where(x > 0, x, -x),
    "cast": lambda x: x.double(),
}


def between(output):
    """Whether anything on the way to the input is heavy."""
    graph = Graph([output.grad_fn])
    return any(graph.is_heavy(i) for i in range(len(graph.nodes)))


@pytest.mark.parametrize("name", HEAVY)
def test_mixes_features_or_positions(name):
    assert between(HEAVY[name](X))


@pytest.mark.parametrize("name", LIGHT)
def test_mixes_nothing(name):
    assert not between(LIGHT[name](X))


def test_embedding():
    assert between(F.embedding(torch.tensor([1, 2]), W))
    assert between(F.embedding_bag(torch.tensor([[1, 2]]), W))


def test_inputs_come_first():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    graph = Graph([model(X).grad_fn])
    for index, keys in enumerate(graph.inputs):
        assert all(key is None or key[0] < index for key in keys)
    assert len(set(graph.nodes)) == len(graph.nodes)


def test_execution_order_is_that_of_the_program():
    a = X * 2
    b = a.exp()
    c = a.cos()
    graph = Graph([(b * c).grad_fn])
    names = [name for name in graph.names if name != "AccumulateGrad"]
    assert names[-4:] == ["Mul", "Exp", "Cos", "Mul"]


def test_leaf_shape_and_readers():
    w = torch.ones(8, requires_grad=True)
    y = X * w + w
    graph = Graph([y.grad_fn])
    leaf = next(i for i, name in enumerate(graph.names) if name == "AccumulateGrad" and graph.leaf((i, 0)) is w)
    assert graph.shape((leaf, 0)) == (8,)
    assert len(graph.readers[leaf, 0]) == 2
    assert graph.numel((len(graph.nodes) - 1, 0)) == 64


def test_origin_is_behind_views_and_casts():
    graph = Graph([X.double().transpose(0, 1).contiguous().grad_fn])
    last = len(graph.nodes) - 1
    assert graph.names[graph.origin((last, 0))[0]] == "Mul"
