"""The two ways a gradient takes through a residual sub-layer, measured on the live graph of one forward.

    LiveGraph (keelscope.topology)  ->  Regions (regions)  ->  PathFlow (flow, chain)

`regions` says which nodes belong to branches and which lead from one stream tensor to the one before; `flow` puts hooks
on the nodes around each stream tensor and hands over both parts of its gradient; `chain` carries a gradient along
shortcuts alone. No backward pass of its own is run, and no branch is entered a second time.
"""

from __future__ import annotations

from keelscope.paths.flow import PathFlow, PathGradients
from keelscope.paths.regions import Regions

__all__ = ["PathFlow", "PathGradients", "Regions"]
