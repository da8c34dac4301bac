"""fully_shard with a mixed-precision policy: bfloat16 inside the modules, float32 shards and gradients outside.

Source: pytorch/torchtitan#734
Gist: gradients differ from another wrapper's, and nobody is sure in which precision which number was taken; inside,
    the parameters are other objects with another dtype than those the optimizer sees.
Expectation: plain floats under the ordinary names, within the resolution of bfloat16; outputs are recorded as
    bfloat16.
"""

import tempfile

import torch
import torch.distributed as dist
from reference import double, linear, params
from torch import nn

KIND = "distributed"
SOURCE = "pytorch/torchtitan#734"
RTOL = 3e-2


def data():
    return torch.randn(32, 8, generator=torch.Generator().manual_seed(211))


def build():
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if not dist.is_initialized():
        place = "file://" + tempfile.mkdtemp() + "/store"
        dist.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    torch.manual_seed(311)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), data()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)), mp_policy=policy)

    def step(m):
        m.zero_grad()
        loss = m(x).float().pow(2).mean()
        loss.backward()
        return loss.item()

    return model, step


def oracle():
    torch.manual_seed(311)
    w = double(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    loss = linear(torch.tanh(linear(data().double(), w, "0")), w, "2").pow(2).mean()
    return {"params": params(loss, w), "loss": loss}


EXPECT = {
    "dtypes": {"0": "bfloat16", "2": "bfloat16"},
    "behaviour": {"must_not_raise": True, "values_are_python_floats": True},
    "params": {
        "0.weight": {"grad_norm": 0.23240939},
        "0.bias": {"grad_norm": 0.124368059},
        "2.weight": {"grad_norm": 0.218246935},
        "2.bias": {"grad_norm": 0.257290818},
    },
    "loss": 0.0541559302,
}
