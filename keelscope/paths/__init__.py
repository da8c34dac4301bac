"""The two ways a gradient takes through a residual sub-layer, measured on the live graph of one forward.

    LiveGraph (keelscope.topology)  ->  Regions (regions)  ->  Routes (routes)  ->  PathFlow (flow, chain)

`regions` says which nodes belong to branches and which lead from one stream tensor to the one before; `routes` says at
which nodes gradients are looked at, for all graphs of one shape; `flow` puts hooks on these nodes and hands over both
parts of each stream tensor's gradient; `chain` carries a gradient along shortcuts alone. No backward pass of its own is
run, and no branch is entered a second time.
"""

from __future__ import annotations

from keelscope.paths.flow import PathFlow, PathGradients
from keelscope.paths.regions import Regions
from keelscope.paths.routes import Routes

__all__ = ["PathFlow", "PathGradients", "Regions", "Routes"]
