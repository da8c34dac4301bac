"""What the dashboard costs on a long, deep run; ``python tests/bench/dashboard.py`` rewrites its part of the page.

A run of 1,024 layers is written through the store, served by ``keelscope dash`` in a process of its own, and opened in
Chromium. Every page load has an empty browser cache; the first one also has a server that has read nothing yet.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from urllib.request import urlopen

from longrun import layout_of, rows_of, write_run
from page import PAGE, replaced
from playwright.sync_api import Browser, Page, sync_playwright

from keelscope.store.writer import RunWriter

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
ARGUMENTS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
LOADS, MOVES, TILES, RUNS = 5, 120, 20, 300
SCRUB = """async (n) => {
  const input = document.getElementById("step"), [low, high] = [Number(input.min), Number(input.max)], times = [];
  for (let i = 0; i < n; i++) {
    const start = performance.now();
    input.value = low + ((high - low) * ((i * 37) % n)) / n;
    input.dispatchEvent(new Event("input", { bubbles: true }));
    await new Promise((done) => requestAnimationFrame(() => {
      const channel = new MessageChannel();
      channel.port1.onmessage = done;
      channel.port2.postMessage(0);
    }));
    times.push(performance.now() - start);
  }
  return times;
}"""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """``keelscope dash`` over a folder, stopped at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "keelscope", "dash", str(folder), "--no-browser", "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}/"
    try:
        for _ in range(200):
            try:
                urlopen(f"{url}assets/wire.js").close()
                break
            except OSError:
                time.sleep(0.05)
        yield url
    finally:
        server.terminate()
        server.wait()


READY = """new MutationObserver(() => {
  if (window.usable || !document.querySelector("#value:not(:empty)")) return;
  if (document.querySelectorAll(".frame .ytick").length > 5) window.usable = performance.now();
}).observe(document, { childList: true, subtree: true, characterData: true })"""


def load(browser: Browser, url: str) -> tuple[Page, dict[str, float]]:
    """One page load with an empty cache: first paint; value at the cursor and axes of all charts; main-thread time."""
    page = browser.new_context(viewport={"width": 1440, "height": 900}, bypass_csp=True).new_page()
    page.add_init_script(READY)
    devtools = page.context.new_cdp_session(page)
    devtools.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(url, wait_until="commit")
    page.wait_for_function("window.usable", timeout=120_000)
    interactive = page.evaluate("window.usable")
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    metrics = {entry["name"]: entry["value"] for entry in devtools.send("Performance.getMetrics")["metrics"]}
    return page, {"paint": paint, "interactive": interactive, "cpu": 1000 * metrics["TaskDuration"]}


def whole(page: Page) -> float:
    """Milliseconds since navigation until all recorded steps are drawn."""
    while page.evaluate("keelscope.view.tile().behind"):
        page.wait_for_timeout(50)
    return float(page.evaluate("performance.now()"))


def heap(page: Page) -> float:
    """MB of JavaScript heap after a collection."""
    devtools = page.context.new_cdp_session(page)
    devtools.send("HeapProfiler.collectGarbage")
    return float(devtools.send("Runtime.getHeapUsage")["usedSize"]) / 2**20


def server_times(url: str, page: Page) -> list[float]:
    """Milliseconds for the tile of the focused run over HTTP, once it is pooled."""
    run = page.evaluate("keelscope.view.focus")
    times = []
    for _ in range(TILES):
        start = time.perf_counter()
        with urlopen(f"{url}api/v1/runs/{run}/tile?panel=gradient") as answer:
            answer.read()
        times.append(1000 * (time.perf_counter() - start))
    return times


def quantile(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, round(share * (len(times) - 1)))]


def long_run(browser: Browser, url: str) -> list[tuple[str, str, str]]:
    """Rows of the table about a finished run."""
    page, cold = load(browser, url)
    filled = whole(page)
    page.context.close()
    warm = []
    for _ in range(LOADS):
        page, found = load(browser, url)
        warm.append(found)
        if len(warm) < LOADS:
            page.context.close()
    scrub = page.evaluate(SCRUB, MOVES)
    tiles = server_times(url, page)
    nodes = page.evaluate("document.querySelectorAll('*').length")
    page.context.close()

    def middle(name: str) -> float:
        return statistics.median(one[name] for one in warm)

    return [
        ("first paint, server just started", f"{cold['paint']:.0f} ms", ""),
        ("interactive, server just started", f"{cold['interactive'] / 1000:.2f} s", "< 2.5 s"),
        ("all steps drawn, server just started", f"{filled / 1000:.1f} s", ""),
        (f"first paint, median of {LOADS}", f"{middle('paint'):.0f} ms", "< 1 s"),
        (f"interactive, median of {LOADS}", f"{middle('interactive') / 1000:.2f} s", "< 2.5 s"),
        ("main thread until then, CPU", f"{middle('cpu'):.0f} ms", ""),
        ("scrub to painted, p50", f"{quantile(scrub, 0.5):.0f} ms", "< 50 ms"),
        ("scrub to painted, p95", f"{quantile(scrub, 0.95):.0f} ms", ""),
        ("heatmap tile over HTTP, p50", f"{quantile(tiles, 0.5):.0f} ms", "< 50 ms"),
        ("heatmap tile over HTTP, p95", f"{quantile(tiles, 0.95):.0f} ms", ""),
        ("DOM nodes", f"{nodes:,}", "< 4,000"),
    ]


def soak(browser: Browser, folder: Path, layers: int, seconds: float) -> list[tuple[str, str, str]]:
    """Heap growth while a run is written, about 20 steps a second, and followed."""
    steps = int(20 * seconds) + 2000
    writer = RunWriter(folder / "live.h5", layout_of(layers, steps, "live"))
    done = threading.Event()

    def write() -> None:
        for row in rows_of(layers, steps):
            writer.append(row)
            if row.step > 1500 and done.wait(0.05):
                break

    thread = threading.Thread(target=write)
    thread.start()
    try:
        with served(folder) as url:
            page, _ = load(browser, url)
            page.wait_for_timeout(15_000)
            before, from_step = heap(page), page.evaluate("keelscope.view.step()")
            page.wait_for_timeout(1000 * seconds)
            after, to_step = heap(page), page.evaluate("keelscope.view.step()")
            nodes = page.evaluate("document.querySelectorAll('*').length")
            page.context.close()
    finally:
        done.set()
        thread.join()
        writer.close()
    minutes = f"{seconds / 60:.0f} minutes, {to_step - from_step:,.0f} new steps"
    return [
        (f"heap growth, followed live for {minutes}", f"{after - before:+.1f} MB", "< 20 MB"),
        ("heap", f"{after:.0f} MB", ""),
        ("DOM nodes after it", f"{nodes:,}", "< 4,000"),
    ]


def many_runs(browser: Browser, folder: Path) -> list[tuple[str, str, str]]:
    """A folder of hundreds of runs, the server just started and all of them open."""
    folder.mkdir()
    first = write_run(folder / "run-000.h5", 64, 200)
    for i in range(1, RUNS):
        shutil.copy(first, folder / f"run-{i:03}.h5")
    with served(folder) as url:
        page, cold = load(browser, url)
        page.wait_for_function("keelscope.view.runs.every((run) => run.rows)", timeout=400_000)
        nodes = page.evaluate("document.querySelectorAll('*').length")
        page.context.close()
        page, warm = load(browser, url)
        page.context.close()
    return [
        (f"interactive, folder of {RUNS} runs, server just started", f"{cold['interactive'] / 1000:.2f} s", ""),
        (f"interactive, folder of {RUNS} runs", f"{warm['interactive'] / 1000:.2f} s", "< 2.5 s"),
        (f"DOM nodes, folder of {RUNS} runs", f"{nodes:,}", "< 4,000"),
    ]


def section(options: argparse.Namespace, rows: list[tuple[str, str, str]], chromium: str) -> str:
    info = Path("/proc/cpuinfo").read_text()
    cpu = next((line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")), "")
    versions = ", ".join(f"{name} {version(name)}" for name in ("dash", "plotly", "h5py", "numpy"))
    body = "\n".join(f"| {name} | {value} | {target} |" for name, value, target in rows)
    return f"""
## Dashboard

`make bench-dashboard` writes a run of {options.layers:,} layers and {options.steps:,} steps, serves it with
`keelscope dash` and opens it in headless Chromium (software drawing, 1440 x 900, empty browser cache for every load).
Load average when measured: {os.getloadavg()[0]:.1f}.

Machine: {cpu or platform.processor()}, {os.cpu_count()} cores; Python {platform.python_version()}, {versions},
Chromium {chromium}.

| measure | value | target |
|---|---|---|
{body}

A tile that has not been read yet is pooled in parts of 0.4 s: the page is usable at once and fills from the first step
on.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--soak", type=float, default=600, help="seconds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        rows, used = measured(browser, Path(temporary), options), browser.version
        browser.close()
    PAGE.write_text(replaced(PAGE.read_text(), "dashboard", section(options, rows, used)))


def measured(browser: Browser, folder: Path, options: argparse.Namespace) -> list[tuple[str, str, str]]:
    """All rows of the table, printed as they come."""
    write_run(folder / "long" / "deep.h5", options.layers, options.steps)
    with served(folder / "long") as url:
        rows = long_run(browser, url)
    rows += many_runs(browser, folder / "many")
    (folder / "live").mkdir()
    rows += soak(browser, folder / "live", options.layers, options.soak)
    for row in rows:
        print(*row, flush=True)
    return rows


if __name__ == "__main__":
    main()
