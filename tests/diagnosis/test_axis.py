from __future__ import annotations

import pytest

from keelscope.diagnosis.axis import _one_way, depth_axis, row_owner, row_sites
from keelscope.store.memory import MemoryWriter
from keelscope.store.schema import GroupSpec, RunInfo, RunLayout, Site, Stack, StatisticSpec


def run_of(modules=(), parameters=(), stacks=()):
    spec = (StatisticSpec("norm", "1", ""),)
    groups = [GroupSpec("gradients", spec, tuple(modules))] if modules else []
    groups += [GroupSpec("parameter_gradients", spec, tuple(parameters))] if parameters else []
    return MemoryWriter(RunLayout(RunInfo("t", "id", "2026", stacks=tuple(stacks)), tuple(groups))).run()


def entries(stack, n, prefix=None, kind="Block"):
    return [Site(f"{prefix or stack}.{i}", kind, "layer", stack, i) for i in range(n)]


def paths(sites):
    return [site.path for site in sites]


def test_the_main_stack_in_order_of_position_not_of_the_site_axis():
    blocks = entries("h", 5)
    run = run_of(
        [Site("wte", "Embedding", numel=9), *blocks[3:], *blocks[:3]], stacks=[Stack("h", "Block", 5, 2, main=True)]
    )
    axis = depth_axis(run)
    assert paths(axis.sites) == [f"h.{i}" for i in range(5)]
    assert axis.depth.tolist() == [2, 4, 6, 8, 10]
    assert (axis.length, axis.unit, axis.first_block) == (10, "sub-layer", 1)


def test_the_flagged_stack_before_a_longer_one():
    stacks = [Stack("a", "A", 4, 0, main=True), Stack("b", "B", 6)]
    axis = depth_axis(run_of([*entries("b", 6), *entries("a", 4)], stacks=stacks))
    assert axis.stack.path == "a"
    assert axis.unit == "block"


def test_the_longest_stack_when_none_is_flagged():
    stacks = [Stack("a", "A", 4), Stack("b", "B", 6)]
    assert depth_axis(run_of([*entries("b", 6), *entries("a", 4)], stacks=stacks)).stack.path == "b"


def test_stages_make_one_chain():
    stack = Stack("layer1,layer2", "Bottleneck", 4, 0, main=True)
    sites = [Site(f"layer{1 + i // 2}.{i % 2}", "Bottleneck", "layer", stack.path, i) for i in range(4)]
    assert paths(depth_axis(run_of(sites, stacks=[stack])).sites) == ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]


def test_two_stacks_in_one_container_are_told_apart_by_class():
    stacks = [Stack("features", "Stem", 2), Stack("features", "Block", 4, main=True)]
    sites = [*entries("features", 2, "features.stem", "Stem"), *entries("features", 4)]
    assert paths(depth_axis(run_of(sites, stacks=stacks)).sites) == [f"features.{i}" for i in range(4)]


def test_a_short_stack_between_embedding_and_head_stays_the_axis():
    sites = [Site("wte", "Embedding", numel=9), *entries("h", 3), Site("head", "Linear", numel=9)]
    axis = depth_axis(run_of(sites, stacks=[Stack("h", "Block", 3, 0, main=True)]))
    assert paths(axis.sites) == ["h.0", "h.1", "h.2"]


def test_a_short_stack_beside_a_long_chain_is_passed_over():
    chain = [Site(f"net.{i}", "Linear", numel=9) for i in range(8)]
    axis = depth_axis(run_of([*chain, *entries("h", 2)], stacks=[Stack("h", "Block", 2, 0, main=True)]))
    assert len(axis) == 10
    assert (axis.unit, axis.depth.tolist()) == ("module", list(range(1, 11)))


def test_rows_are_entries_and_owners_outside():
    sites = [
        Site("wte", "Embedding", numel=9),
        Site("net", "Net"),
        *entries("h", 4),
        Site("h.0.attn", "Attention", "branch", "h", 0, 9),
        Site("h.0.norm", "LayerNorm", "norm", "h", 0, 9),
        Site("norm", "LayerNorm", "norm", numel=4),
    ]
    assert paths(row_sites(run_of(sites))) == ["wte", "h.0", "h.1", "h.2", "h.3", "norm"]


def test_leaves_of_a_stack_are_rows_when_its_entries_are_not_watched():
    sites = [Site(f"h.{i}.lin", "Linear", "branch", "h", i, 9) for i in range(4)]
    run = run_of(sites, stacks=[Stack("h", "Block", 4, 0, main=True)])
    assert paths(row_sites(run)) == [f"h.{i}.lin" for i in range(4)]
    assert depth_axis(run).unit == "module"


def test_rows_from_parameters_alone():
    parameters = [
        Site("wte.weight", "Parameter", "parameter"),
        *(
            Site(f"enc.h.{i}.{name}", "Parameter", "parameter", "enc.h", i)
            for i in range(4)
            for name in ("attn.q.weight", "attn.k.weight")
        ),
        Site("scale", "Parameter", "parameter"),
    ]
    run = run_of(parameters=parameters, stacks=[Stack("enc.h", "Block", 4, 2, main=True)])
    assert paths(row_sites(run)) == ["wte", "enc.h.0", "enc.h.1", "enc.h.2", "enc.h.3", ""]
    axis = depth_axis(run)
    assert (len(axis), axis.length, axis.sites[0].kind) == (4, 8, "Block")


def test_an_empty_run_has_an_empty_axis():
    axis = depth_axis(run_of())
    assert (len(axis), axis.length, axis.depth.tolist()) == (0, 0, [])


@pytest.mark.parametrize(
    ("path", "row"),
    [
        ("h.1.attn.q.weight", 1),
        ("h.1.scale", 1),
        ("h.10.weight", -1),
        ("h.weight", -1),
        ("cls", 0),
        ("other.weight", -1),
    ],
)
def test_a_parameter_belongs_to_the_innermost_row(path, row):
    assert row_owner(path, {"": 0, "h.1": 1}) == row


def test_a_decoder_with_a_short_stack_is_a_chain_of_its_own():
    encoder = [Site("e.embed", "WordEmbedding", numel=9), *entries("e.layers", 3, kind="EncoderLayer")]
    decoder = [Site("d.embed", "WordEmbedding", numel=9), Site("d.pos", "Embedding", numel=9)]
    decoder += entries("d.layers", 3, kind="DecoderLayer")
    stacks = [Stack("e.layers", "EncoderLayer", 3, main=True), Stack("d.layers", "DecoderLayer", 3)]
    head = Site("head", "Linear", numel=9)
    axis = depth_axis(run_of([*encoder, *decoder, head], stacks=stacks))
    assert paths(axis.sites) == ["d.embed", "d.pos", "d.layers.0", "d.layers.1", "d.layers.2", "head"]
    late = Site("codes", "Embedding", numel=9)
    assert len(depth_axis(run_of([*encoder, *decoder[2:], late, head], stacks=stacks))) == 9


@pytest.mark.parametrize(
    ("names", "left"),
    [
        (("q", "k", "v", "o", "f", "g"), "vofg"),
        (("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.out", "f", "g"), None),
        (("to_q", "to_k", "to_v", "o", "f", "g"), None),
        (("query", "key", "value", "o", "f", "g"), None),
        (("q", "k", "o", "f", "g"), "qkofg"),
        (("a.q", "a.k", "b.v", "o", "f", "g"), "a.qa.kb.vofg"),
        (("q", "k", "v", "o"), "qkvo"),
    ],
)
def test_queries_and_keys_outside_stacks_lie_beside_their_values(names, left):
    rows = tuple(Site(name, "Linear", numel=4) for name in names)
    kept = [site.path for site in _one_way(rows)]
    assert "".join(kept) == left if left else kept == list(names[2:])
