"""Files that are open when the interpreter ends."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import ctypes, sys, torch, keelscope as ks
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with ks.watch(model, sys.argv[1], optimizer=optimizer) as watch:
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
run = ks.open_run(watch.path)
assert run["outputs/rms"].values.shape[0] == 1
ctypes.pythonapi.Py_IncRef(ctypes.py_object(run))  # as where something that is never freed holds it
"""


def test_a_run_that_is_never_closed_ends_with_the_process(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "run.h5"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
