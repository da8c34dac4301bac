"""Sound networks on graphs, written out: attention along edges, attention with distances, messages on a mesh."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

S = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "unseen" / "steps.py")))
label, once, fit = S.label, S.once, S.fit


class Attends(nn.Module):
    """A graph attention layer of four heads with a shortcut and a layer norm before it."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.norm, self.heads, self.linear = nn.LayerNorm(width), heads, nn.Linear(width, width, bias=False)
        self.source = nn.Parameter(torch.randn(heads, width // heads) * 0.3)
        self.target = nn.Parameter(torch.randn(heads, width // heads) * 0.3)

    def forward(self, x, links):
        z = self.linear(self.norm(x)).unflatten(-1, (self.heads, -1))
        scores = (z * self.source).sum(-1)[:, None] + (z * self.target).sum(-1)[None]
        weights = F.leaky_relu(scores, 0.2).masked_fill(links[..., None] == 0, -1e9).softmax(1)
        return x + F.elu(torch.einsum("ijh,jhd->ihd", weights, z).flatten(1))


def graph(seed, nodes=48):
    """Node features, links with loops, and classes of half of the nodes."""
    generator = S.generator_of(seed)
    links = torch.rand(nodes, nodes, generator=generator) < 0.1
    return torch.randn(nodes, 12, generator=generator), (links | links.mT | torch.eye(nodes, dtype=torch.bool)).float()


@label("healthy", family="graph attention")
def attention_along_edges(seed):
    """Five residual graph attention layers, the loss on half of the nodes, as in transductive learning. Measured:
    output gradients 0.0029 at layers.0 and 0.0026 at layers.4 (of 5), parameters' 0.38 and 0.29; loss 1.46 -> 0.753
    in 30 steps of Adam."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.entry, self.exit = nn.Linear(12, 32), nn.Linear(32, 4)
            self.layers = nn.ModuleList(Attends() for _ in range(5))

        def forward(self, x, links):
            x = self.entry(x)
            for layer in self.layers:
                x = layer(x, links)
            return self.exit(x)

    batch = (*graph(seed), torch.arange(48) % 4)
    return once(Net(), batch, lambda output, batch: F.cross_entropy(output[:24], batch[-1][:24]))


class Distances(nn.Module):
    """Graphormer's layer: Pre-LN attention with a learned bias for each distance between two nodes."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.first, self.second, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.bias = nn.Embedding(5, heads)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ffn = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, distances):
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(1, 2, 0, 3)
        scores = q @ k.mT / q.shape[-1] ** 0.5 + self.bias(distances).permute(2, 0, 1)
        x = x + self.out((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
        return x + self.ffn(self.second(x))


@label("healthy", family="graph transformer")
def biases_of_distance(seed):
    """A graph transformer of four layers that reads a regression target from the mean; distances up to four bias
    its attention. In float64. Measured: output gradients 0.0065 at layers.0 and 0.0053 at layers.3 (of 4),
    parameters' 1.5 and 1.4; loss 1.31 -> 0.11 in 30 steps of Adam."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.entry, self.norm, self.exit = nn.Linear(12, 32), nn.LayerNorm(32), nn.Linear(32, 4)
            self.layers = nn.ModuleList(Distances() for _ in range(4))

        def forward(self, x, distances):
            x = self.entry(x)
            for layer in self.layers:
                x = layer(x, distances)
            return self.exit(self.norm(x))

    x, links = graph(seed, nodes=24)
    steps = torch.full((24, 24), 4)
    for k in (3, 2, 1):
        steps[torch.linalg.matrix_power(links, k) > 0] = k
    steps.fill_diagonal_(0)
    goal = torch.randn(24, 4, generator=S.generator_of(seed + 1))
    return once(Net().double(), (x.double(), steps, goal), S.squares)


@label("healthy", family="mesh")
def mesh_of_messages(seed):
    """MeshGraphNet: encode, six rounds of edge and node networks with sums and layer norms, decode; in bfloat16
    autocast. Measured: output gradients 0.01 at rounds.0 and 0.0047 at rounds.5 (of 6), parameters' 14 and 5.6;
    loss 1.87 -> 1.22."""

    class Round(nn.Module):
        def __init__(self, width=24):
            super().__init__()
            self.edge = nn.Sequential(
                nn.Linear(3 * width, width), nn.SiLU(), nn.Linear(width, width), nn.LayerNorm(width)
            )
            self.node = nn.Sequential(
                nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width), nn.LayerNorm(width)
            )

        def forward(self, nodes, edges, source, target):
            edges = edges + self.edge(torch.cat([edges, nodes[source], nodes[target]], dim=1)).float()
            arrived = torch.zeros_like(nodes).index_add(0, target, edges) / 4
            return nodes + self.node(torch.cat([nodes, arrived], dim=1)).float(), edges

    class Mesh(nn.Module):
        def __init__(self, width=24):
            super().__init__()
            self.node, self.edge, self.exit = nn.Linear(6, width), nn.Linear(2, width), nn.Linear(width, 3)
            self.rounds = nn.ModuleList(Round() for _ in range(6))

        def forward(self, nodes, edges, source, target):
            nodes, edges = self.node(nodes).float(), self.edge(edges).float()
            for one in self.rounds:
                nodes, edges = one(nodes, edges, source, target)
            return self.exit(nodes)

    generator = S.generator_of(seed)
    source, target = torch.randint(30, (2, 120), generator=generator)
    nodes, edges = torch.randn(30, 6, generator=generator), torch.randn(120, 2, generator=generator)
    model = Mesh()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(_):
        with S.autocast(torch.bfloat16):
            output = model(nodes, edges, source, target)
        return (output.float() - nodes[:, :3].sin()).square().mean()

    return fit(model, loss, steps=2, optimizer=optimizer)
