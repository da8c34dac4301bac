"""Whatever equation is written down, in whatever way, is read back."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from keelscope import topology


class Block(nn.Module):
    """after(a x + b outer(F(before(x)))), as a specification says."""

    def __init__(self, spec):
        super().__init__()
        self.spec = spec
        self.before, self.outer, self.after = (
            nn.LayerNorm(8) if spec[k] else None for k in ("before", "outer", "after")
        )
        self.rise, self.fall = nn.Linear(8, 16), nn.Linear(16, 8)
        for name in ("a", "b"):
            kind, value = spec[name]
            if kind == "learnable scalar":
                setattr(self, name, nn.Parameter(torch.tensor(value)))
            elif kind == "learnable vector":
                setattr(self, name, nn.Parameter(torch.full((8,), value)))
            elif kind == "buffer":
                self.register_buffer(name, torch.tensor(value))

    def weighted(self, name, x):
        kind, value = self.spec[name]
        if kind == "one":
            return x
        weight = value if kind == "constant" else getattr(self, name)
        return weight * x if self.spec["weight_first"] else x * weight

    def branch(self, x):
        x = x if self.before is None else self.before(x)
        x = self.fall(F.gelu(self.rise(x)))
        if self.spec["dropout"] == "before":
            x = F.dropout(x, 0.5)
        return x if self.outer is None else self.outer(x)

    def forward(self, x):
        shortcut, branch = self.weighted("a", x), self.weighted("b", self.branch(x))
        if self.spec["dropout"] == "after":
            branch = F.dropout(branch, 0.5)
        if self.spec["cast"]:
            shortcut, branch = shortcut.double(), branch.double()
        if self.spec["turned"]:
            shortcut, branch = shortcut.transpose(1, 2), branch.transpose(1, 2).contiguous()
        x = self.joined(shortcut, branch)
        if self.spec["turned"]:
            x = x.transpose(1, 2)
        return (x.float() if self.after is None else self.after(x.float())).to(torch.float32)

    def joined(self, shortcut, branch):
        how = self.spec["how"]
        if how == "in place":
            return torch.clone(branch).add_(shortcut)
        return branch + shortcut if how == "branch first" else shortcut + branch


class Net(nn.Module):
    """Embedding, three blocks, final norm."""

    def __init__(self, spec):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(20, 8), nn.LayerNorm(8)
        self.blocks = nn.ModuleList(Block(spec) for _ in range(3))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


weight = st.one_of(
    st.just(("one", 1.0)),
    st.tuples(
        st.sampled_from(["constant", "buffer", "learnable scalar", "learnable vector"]),
        st.sampled_from([-1.5, 0.25, 3.0, 64.0]),
    ),
)
specs = st.fixed_dictionaries(
    {
        "a": weight,
        "b": weight,
        **{name: st.booleans() for name in ("before", "outer", "after", "weight_first", "cast", "turned")},
        "dropout": st.sampled_from(["", "before", "after"]),
        "how": st.sampled_from(["shortcut first", "branch first", "in place"]),
    }
)


def written(spec):
    branch = "F(n x)" if spec["before"] else "F(x)"
    branch = f"n({branch})" if spec["outer"] else branch
    a, b = ("" if spec[name][0] == "one" else f"{name} " for name in ("a", "b"))
    whole = f"{a}x + {b}{branch}"
    return f"n({whole})" if spec["after"] else whole


@settings(max_examples=60, deadline=None)
@given(specs)
def test_read_back(spec):
    torch.manual_seed(0)
    found = topology.find(Net(spec), torch.arange(12).view(2, 6), lambda output, _: output.square().mean())
    assert [record.form for record in found.sublayers] == [written(spec)] * 3
    for i, record in enumerate(found.sublayers):
        for name, coefficient in (("a", record.alpha), ("b", record.beta)):
            kind, value = spec[name]
            assert (coefficient.kind, coefficient.value) == (kind, pytest.approx(value))
            assert coefficient.parameter == (f"blocks.{i}.{name}" if kind not in {"one", "constant"} else None)
        places = {"norm_before": "before", "branch_norm": "outer", "norm_after": "after"}
        for attribute, name in places.items():
            assert getattr(record, attribute) == (f"blocks.{i}.{name}" if spec[name] else None)
        assert record.site == f"blocks.{i}"
