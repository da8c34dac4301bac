"""Edges in flat arrays, beside what the nodes say themselves."""

from __future__ import annotations

import torch

from keelscope.topology.graph import Graph

X = torch.ones(2, 6, requires_grad=True)


def test_inputs_are_those_of_the_nodes():
    first, second = (X * X).chunk(2, 1)
    graph = Graph([(torch.cat([second, first * 2, second]) + torch.ones(1)).grad_fn])
    expected = [
        tuple(None if source is None else (graph.index[source], output) for source, output in node.next_functions)
        for node in graph.nodes
    ]
    assert list(graph.inputs) == expected
    assert [graph.inputs[i] for i in range(len(graph.nodes))] == expected
    assert len(graph.inputs) == len(expected)
    assert any(key is not None and key[1] for keys in expected for key in keys)
    assert any(None in keys for keys in expected)


def test_readers_are_those_that_take_a_tensor_once_per_use():
    first, second = (X * X).chunk(2, 1)
    graph = Graph([(torch.cat([second, first * 2, second]) + torch.ones(1)).grad_fn])
    for index in range(len(graph.nodes)):
        for output in range(3):
            key = index, output
            expected = [taker for taker, keys in enumerate(graph.inputs) for taken in keys if taken == key]
            assert graph.readers[key] == tuple(expected)
