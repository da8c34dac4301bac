"""The section "Beside other tools": rows, columns and what is said of them."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROWS", "TILES", "Row", "described", "section"]

TILES = ("W1", "W2", "W3")
MISSING = "not measured"
SPREAD = 0.25  # of the ratio of one pair on a busy machine; a median of n pairs is known to about this over sqrt(n)


@dataclass(frozen=True, slots=True)
class Row:
    """A tool in the table."""

    name: str
    title: str
    records: str
    environment: str = "main"
    mean: bool = False
    """One step in many is recorded, so that only the mean shows what it costs."""


ROWS = (
    Row("control", "A/A control", "nothing: two bare trainings"),
    Row(
        "keelscope-norms", "**keelscope**, blocks and norms", "default probes at those modules, all parameters; a file"
    ),
    Row("keelscope", "**keelscope**, default sites", "the same, also at modules directly inside a block"),
    Row("keelscope-leaves", "**keelscope**, every leaf", "the same at every leaf"),
    Row("keelscope-100", "**keelscope**, default sites, every=100", "the same on one step in 100", mean=True),
    Row("naive-leaves", "`.item()` hooks, every leaf", "six statistics of outputs and gradients, parameter norms"),
    Row("naive-blocks", "`.item()` hooks, blocks", "the same at blocks"),
    Row("grad-flow", "bar chart of gradients (pasted snippet)", "mean and largest gradient of every weight"),
    Row("clip", "`clip_grad_norm_`", "the total norm, which it scales: what training loops do anyhow"),
    Row("lightning", "`grad_norm` of Lightning", "gradient norm of every parameter, and the total"),
    Row("composer", "`OptimizerMonitor` of Composer", "norms of parameter, gradient, moment, update", "composer"),
    Row("tensor-tracker", "tensor-tracker, std", "standard deviation of every module's output and gradient"),
    Row("nnsight", "nnsight, blocks", "outputs of blocks and their gradients as tensors, no statistics"),
    Row("transformer-lens", "TransformerLens `run_with_cache`", "all hook points and gradients as tensors"),
    Row("torchlens", "TorchLens `trace`, gradients", "every operation, its output and gradient as tensors"),
    Row("underflow", "`DebugUnderflowOverflow`", "smallest and largest magnitude of weights, inputs, outputs"),
    Row("anomaly", "`autograd.detect_anomaly`", "whether a gradient is NaN, and which operation made it"),
    Row("tensorboard", "TensorBoard `add_histogram`", "histogram of every parameter and gradient"),
    Row("wandb", "`wandb.watch`, log_freq=1", "64-bin histogram of every parameter and gradient"),
    Row("wandb-100", "`wandb.watch`, log_freq=100", "the same on one step in 100", mean=True),
)

Results = dict[str, list[dict[str, object]]]


def described(python: str) -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = names[0].partition(":")[2].strip() if names else platform.processor()
    return f"{cpu}, {os.cpu_count()} cores, 1 thread used; Python {python}; load average {os.getloadavg()[2]:.1f}"


def section(results: Results) -> str:
    """The text between the markers."""
    template = (Path(__file__).parent / "beside.md.in").read_text()
    machine = results.get("machine", [{"text": "unknown"}])[0]["text"]
    parts = {"table": table(results), "compared": compared(results), "recorded": recorded(results)}
    return template.format(machine=machine, **parts)


def table(results: Results) -> str:
    lines = [f"| tool | {' | '.join(TILES)} | extra ms | extra memory, MB | pairs |", "|---|---|---|---|---|---|---|"]
    for row in ROWS:
        entries = results.get(row.name, [{"error": MISSING}])
        tiles = {entry.get("tile"): entry for entry in entries}
        if None in tiles:
            lines.append(f"| {row.title} | {short(tiles[None])} | | | | | |")
            continue
        found = [tiles.get(tile, {"error": MISSING}) for tile in TILES]
        ratios = " | ".join(cell(row, entry) for entry in found)
        extra, memory, pairs = (" / ".join(part(row, entry) for entry in found) for part in (extra_ms, extra_mb, count))
        lines.append(f"| {row.title} | {ratios} | {extra} | {memory} | {pairs} |")
    return "\n".join(lines)


def short(entry: dict[str, object]) -> str:
    error = str(entry["error"]).replace("|", "/")[:160]
    return error if error == MISSING else f"does not run: {error}"


def cell(row: Row, entry: dict) -> str:
    if "error" in entry:
        return short(entry)
    ratio = entry["ratio"]
    return f"{ratio['mean']:.2f} (mean)" if row.mean else f"{figure(ratio['low'])} / {figure(ratio['median'])}"


def figure(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def extra_ms(row: Row, entry: dict) -> str:
    return "-" if "error" in entry else f"{entry['ratio']['mean_ms' if row.mean else 'extra_ms']:.1f}"


def extra_mb(row: Row, entry: dict) -> str:
    del row
    return "-" if "error" in entry else f"{entry['memory'][1] - entry['memory'][0]:+.0f}"


def count(row: Row, entry: dict) -> str:
    del row
    return "-" if "error" in entry else str(entry["ratio"]["pairs"])


def compared(results: Results) -> str:
    """What a step costs beside keelscope at its default sites, tile by tile, in order of cost."""
    lines = []
    for tile in TILES:
        found = {row: extra for row in ROWS if (extra := extra_share(results, row, tile)) is not None}
        own = next((found[row] for row in found if row.name == "keelscope"), None)
        others = sorted((row for row in found if not row.name.startswith(("keelscope", "control"))), key=found.get)
        if own is None:
            continue
        parts: dict[str, list[str]] = {"Cheaper": [], "Not told apart": [], "Dearer": []}
        for row in others:
            apart = abs(max(0, found[row][0]) - own[0]) > known(found[row], own)  # nothing costs less than nothing
            kind = "Not told apart" if not apart else "Cheaper" if found[row][0] < own[0] else "Dearer"
            factor = f", {found[row][0] / own[0]:.1f} times" if kind == "Dearer" and own[0] > 2 * known(own) else ""
            parts[kind].append(f"{row.title} ({found[row][0]:+.0%}{factor})")
        told = " ".join(f"{kind}: {', '.join(names) or 'none'}." for kind, names in parts.items())
        lines.append(f"- **{tile}**, keelscope {own[0]:+.0%}. {told}")
    return "\n".join(lines)


def known(*found: tuple[float, int]) -> float:
    """How well a share, or the difference of two, is known."""
    return SPREAD * sum(1 / pairs for _, pairs in found) ** 0.5


def extra_share(results: Results, row: Row, tile: str) -> tuple[float, int] | None:
    """Extra CPU of the median step as a share of the bare one, and pairs; none where only the mean shows it."""
    entry = next((e for e in results.get(row.name, ()) if e.get("tile") == tile and "ratio" in e), None)
    return None if entry is None or row.mean else (entry["ratio"]["median"] - 1, entry["ratio"]["pairs"])


def recorded(results: Results) -> str:
    lines = ["| tool | version | what it records on every step |", "|---|---|---|"]
    for row in ROWS:
        entry = results.get(row.name, [{}])[0]
        torch = f" (torch {entry['torch']})" if row.environment != "main" and "torch" in entry else ""
        lines.append(f"| {row.title} | {entry.get('version', '')}{torch} | {row.records} |")
    return "\n".join(lines)
