"""Graphs that were looked at are freed without recursion, whoever still holds a part of them."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch
from torch import nn

import keelscope
from keelscope import unwinding
from keelscope.topology.graph import Graph
from keelscope.unwinding import Breaks, unwind

LOOK = """
import gc, sys, threading
import torch
from keelscope import unwinding
from keelscope.topology.graph import Graph

def look():
    x = torch.ones(2, requires_grad=True)
    y, middle = x, None
    for i in range(6000):
        y = y * 1.0
        if i == 3000:
            middle = y
    {look}
    del y
    gc.collect()
    del middle
    gc.collect()

threading.stack_size(256 * 1024)
thread = threading.Thread(target=look)
thread.start()
thread.join()
print("alive")
"""
TOUCH = "node = y.grad_fn\n    while node is not None and node.next_functions: node = node.next_functions[0][0]"


def run(look):
    code = LOOK.replace("{look}", look)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)


def test_a_deep_graph_that_was_read_is_freed_on_a_small_stack():
    done = run("Graph([y.grad_fn])")
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_a_graph_that_is_read_twice_is_freed_too():
    done = run("Graph([y.grad_fn]), Graph([y.grad_fn, middle.grad_fn])")
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_without_help_the_same_graph_overflows_the_stack():
    """The reason for the module; once torch frees such graphs itself, this fails and the module can go."""
    assert run(TOUCH).returncode < 0


WATCH = """
import sys, threading
import torch
from torch import nn
import keelscope as ks
from keelscope import unwinding

unwinding.Breaks.distance = {distance}
net = nn.Sequential(*[nn.Linear(2, 2) for _ in range(2000)])
optimizer = torch.optim.SGD(net.parameters(), lr=0.0)

def train():
    with ks.watch(net, optimizer=optimizer, sites="all", probes="gradients") as watch:
        for step in range(3):
            loss = net(torch.ones(2, 2)).sum()
            if step != 1:  # a graph that no backward pass has been through is freed as well
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss

threading.stack_size(256 * 1024)
thread = threading.Thread(target=train)
thread.start()
thread.join()
print("alive")
"""


@pytest.mark.parametrize("helped", [True, False])
def test_a_watched_model_of_many_layers_trains_on_a_small_stack(helped):
    """With its hooks alone, a loss that is freed there ends the process."""
    code = WATCH.replace("{distance}", str(unwinding.Breaks.distance if helped else 10**9))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    if helped:
        assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr
    else:
        assert done.returncode < 0


class Trace(torch.autograd.Function):
    """Counts the nodes of its kind that are alive."""

    alive = 0

    @staticmethod
    def forward(ctx, x):
        ctx.token = Token()
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Token:
    def __init__(self):
        Trace.alive += 1

    def __del__(self):
        Trace.alive -= 1


@pytest.mark.parametrize("kept", [0, 7, 19])
def test_nodes_end_with_the_tensors_that_lead_to_them_and_not_later(kept):
    tensors = [torch.ones(2, requires_grad=True)]
    for _ in range(20):
        tensors.append(Trace.apply(tensors[-1]))
    Graph([tensors[-1].grad_fn])
    remaining = tensors[kept]
    assert Trace.alive == 20
    tensors.clear()
    gc.collect()
    assert Trace.alive == kept
    remaining.sum().backward()
    del remaining
    gc.collect()
    assert Trace.alive == 0


@pytest.mark.parametrize("kept", [0, 70, 130, 199])
def test_breaks_keep_nothing_alive(kept):
    breaks, tensors = Breaks(), [torch.ones(2, requires_grad=True)]
    for _ in range(200):
        tensors.append(Trace.apply(tensors[-1]))
        breaks.passed(tensors[-1].grad_fn)
    remaining = tensors[kept]
    tensors.clear()
    gc.collect()
    assert Trace.alive == kept
    remaining.sum().backward()
    del remaining
    gc.collect()
    assert Trace.alive == 0


def test_nothing_is_held_where_there_is_nothing_behind_the_top():
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    unwind([y.grad_fn], [y.grad_fn])
    assert not y.grad_fn.metadata


def test_a_graph_that_nobody_holds_is_gone_when_the_optimizer_makes_its_state():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4 * Breaks.distance)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    left = []
    gc.collect()
    gc.disable()
    try:
        with keelscope.watch(model, optimizer=optimizer, sites="leaves"):
            optimizer.register_step_pre_hook(lambda *_: left.append(len(unwinding._dead)))
            for _ in range(3):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        gc.enable()
    assert left[0] == 0
    assert max(left) <= 4  # later they wait for the row to end: as many as there are breaks
