"""The topology of a model: its residual sub-layers, read from the autograd graph of one forward.

    find / GraphReader (reader)  ->  Graph (graph)  ->  Reading (reading)  ->  Topology (records)

A reading finds the residual additions (additions), what lies on shortcut, branch and stream (trails, sides, streams),
the weights (coefficients), the norms (normalisations) and the names (forms), and says what it could not read (gaps).
"""

from __future__ import annotations

from keelscope.topology.coefficients import Coefficient
from keelscope.topology.live import LiveGate, LiveGraph, LiveOutput, LiveSublayer, Operands, Places
from keelscope.topology.reader import GraphReader, find
from keelscope.topology.records import Sublayer, Topology

__all__ = [
    "Coefficient",
    "GraphReader",
    "LiveGate",
    "LiveGraph",
    "LiveOutput",
    "LiveSublayer",
    "Operands",
    "Places",
    "Sublayer",
    "Topology",
    "find",
]
