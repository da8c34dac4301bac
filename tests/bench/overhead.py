"""What watching costs: paired steps in one process, bare and watched in turn, with an A/A control.

Run by ``make bench``, which rewrites its part of docs/benchmarks.md. CPU time of the process on one thread (the thread
that writes the run file included); ratios of the 10th percentiles and of the medians.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

import torch
from machine import described, growth, processes, wholes
from page import PAGE, page_of
from pairs import Attach, bare, measure, repeated
from peers import PEERS
from watchers import watched
from workloads import WORKLOADS, Workload

AVERAGED = "blocks and norms, every=10"
"""Judged by its mean, which needs many steps: what a watch costs once is spread over them, as in a training."""
AVERAGED_OVER = 5
EVERYTHING = "default,norms,sublayers,inputs,updates,tokens,attention"


def variants(workload: Workload) -> dict[str, Attach]:
    """What is measured on a workload."""
    found: dict[str, Attach] = {
        "A/A control": bare,
        "blocks and norms": watched(workload.blocks),
        "default sites": watched(),
        AVERAGED: watched(workload.blocks, every=10),
        "default sites, every=10": watched(every=10),
        "default sites, steps not recorded": watched(every=1000),
    }
    if workload.name == "W5":
        return found
    found |= {
        "every leaf": watched(sites="leaves"),
        "blocks and norms, torch": watched(workload.blocks, compiled=False),
    }
    if workload.name in {"W1", "W2", "W3"}:
        found |= {
            "norms alone, on its step": watched(each="norms"),
            "sublayers alone, on its step": watched(each="sublayers"),
        }
    if workload.name in {"W1", "W3"}:
        found["all but jacobians"] = watched(probes=EVERYTHING)
        found |= PEERS
    return found


def table(pairs: int, only: str) -> str:
    """The markdown table of all workloads and variants."""
    lines = [
        "| tile | watched | CPU p10 | CPU median | CPU mean | wall median | extra ms | bytes per step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for workload in WORKLOADS:
        for name, attach in variants(workload).items() if only in workload.name else ():
            several = max(10, int(pairs * workload.pairs))
            long = AVERAGED_OVER * several * workload.trainings
            try:
                is_averaged = name == AVERAGED
                r = measure(workload, attach, long, warm=25) if is_averaged else repeated(workload, attach, several)
            except Exception as error:  # a peer that cannot run is said to be so
                print(f"{workload.name}: {name}: {type(error).__name__}: {error}", file=sys.stderr)
                lines.append(f"| {workload.name} | {name} | does not run: {type(error).__name__} | | | | | |")
                continue
            size = f"{r.size:,.0f}" if r.size else ""
            figures = " | ".join(f"{x:.2f}" for x in (r.low, r.median, r.mean, r.wall, r.extra_ms))
            lines.append(f"| {workload.name} | {name} | {figures} | {size} |")
            print(lines[-1], flush=True)
    return "\n".join(lines)


def preload() -> None:
    """Import what workloads take from transformers before a peer is imported that gets in its way."""
    import transformers

    for name in ("GPT2LMHeadModel", "ResNetForImageClassification"):
        getattr(transformers, name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--only", default="", help="part of a workload's name; prints, and writes nothing")
    parser.add_argument("--report-steps", type=int, default=100_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runpy.run_path(str(Path(__file__).parents[1] / "conftest.py"))["declare_operators"]()
    preload()
    measured = table(arguments.pairs, arguments.only)
    if not arguments.only:
        parts = [measured, *["Not measured yet."] * 3]
        shapes = [(workload.name, workload.doc) for workload in WORKLOADS]
        later = (wholes, growth, lambda: processes(arguments.report_steps))
        for place, part in enumerate((None, *later)):
            parts[place] = part() if part else measured
            PAGE.write_text(page_of(PAGE.read_text(), described(), shapes, arguments.pairs, parts))
