"""Which call a checkpointed region repeats."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import keelscope as ks
from keelscope.calls import CallRecord
from keelscope.recomputation import repeated_call


def record(*, tracked, recomputed=False):
    return CallRecord(0, tracked, tracked, recomputed=recomputed)


def test_the_last_call_without_gradients_that_was_not_repeated_yet():
    first, second = record(tracked=False), record(tracked=False)
    assert repeated_call([first, second]) is second
    second.recomputed = True
    assert repeated_call([first, second]) is first
    assert repeated_call([]) is None
    assert repeated_call([record(tracked=True)]) is None


def test_outside_a_reentrant_checkpoint_a_later_call_in_the_graph_is_meant():
    assert repeated_call([record(tracked=False), record(tracked=True)]) is None


class Net(nn.Module):
    """One layer inside a checkpoint, outside of it, and without gradients."""

    def __init__(self, order, reentrant):
        super().__init__()
        self.shared, self.order, self.reentrant = nn.Linear(3, 3), order, reentrant

    def forward(self, x):
        for how in self.order:
            if how == "checkpointed":
                x = torch.tanh(checkpoint(self.shared, x, use_reentrant=self.reentrant))
            elif how == "plain":
                x = torch.tanh(self.shared(x))
            else:
                with torch.no_grad():
                    self.shared(x)
        return x


@pytest.mark.parametrize(
    ("order", "reentrant"),
    [
        (("checkpointed", "plain"), True),
        (("plain", "checkpointed"), True),
        (("checkpointed", "plain", "checkpointed"), True),
        (("unseen", "checkpointed", "plain"), False),
        (("unseen", "plain", "checkpointed"), False),
    ],
)
def test_each_call_has_its_own_gradient(order, reentrant):
    torch.manual_seed(0)
    net = Net(order, reentrant)
    x = torch.randn(4, 3, requires_grad=True)
    with ks.watch(net, sites="all", calls=True) as watch:
        net(x).square().mean().backward()
        watch.step()
        calls = watch.calls["shared"]
    h, outputs = x.detach().requires_grad_(), []
    for how in order:
        if how != "unseen":
            outputs.append(nn.functional.linear(h, net.shared.weight, net.shared.bias))
            h = torch.tanh(outputs[-1])
    wanted = iter([g.norm().item() for g in torch.autograd.grad(h.square().mean(), outputs)])
    expected = [() if how == "unseen" else (pytest.approx(next(wanted)),) for how in order]
    assert [call.leaves[""] for call in calls] == expected
