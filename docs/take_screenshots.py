"""Retake the pictures of the dashboard: ``python docs/take_screenshots.py RUNS [FOLDER]``.

RUNS is a folder of run files, for example what ``keelscope demo`` has recorded; FOLDER is docs/images by default. Needs
the package playwright and a Chromium (``CHROMIUM`` names another one than /usr/bin/chromium).
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from playwright.sync_api import Browser, sync_playwright
from werkzeug.serving import make_server

from keelscope_dashboards.app import create_app
from keelscope_dashboards.index import RunIndex
from keelscope_dashboards.pages import PAGES
from keelscope_dashboards.state import run_states
from keelscope_dashboards.verdicts import Judge

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
ARGUMENTS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
DESK, SMALL, PHONE = {"width": 1440, "height": 900}, {"width": 1240, "height": 760}, {"width": 390, "height": 844}
COLOURS = 256  # of a picture, where Pillow is installed: a third of the bytes
FRAMES = (  # part of the file name, colour scheme, scale
    ("light", "light", False),
    ("dark", "dark", False),
    ("phone-light", "light", True),
    ("phone-dark", "dark", True),
)


def main() -> None:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    runs = Path(sys.argv[1])
    folder = Path(sys.argv[2] if len(sys.argv) > 2 else Path(__file__).parent / "images")
    folder.mkdir(parents=True, exist_ok=True)
    with served(runs) as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        for page in PAGES:
            for word, scheme, phone in FRAMES:
                path = folder / f"{page.name}-{word}.png"
                size = PHONE if phone else DESK if page.build is None else SMALL
                profile = {"color_scheme": scheme, "viewport": size, "device_scale_factor": 2.0 if phone else 1.0}
                take(browser, url.replace("/?", f"/{'' if page.build is None else page.name}?"), path, profile)
                reduce(path)
                print(path, f"{path.stat().st_size / 1000:.0f} kB", flush=True)
        browser.close()


@contextmanager
def served(runs: Path) -> Iterator[str]:
    """The dashboard over a folder, every verdict ready, a vanishing run in focus where there is one."""
    index, judge = RunIndex([runs]), Judge()
    server = make_server("127.0.0.1", 0, create_app(index, judge).server, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    while any(state.verdict.headline == "pending" for state in run_states(index, judge)):
        time.sleep(0.1)
    vanishing = [state.name for state in run_states(index, judge) if state.verdict.headline == "vanishing"]
    query = f"?{urlencode({'run': vanishing[0]})}" if vanishing else ""
    try:
        yield f"http://127.0.0.1:{server.server_port}/{query}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        judge.close()
        index.close()


def reduce(path: Path) -> None:
    """Fewer colours, half of them frequent and half of them rare ones, if Pillow is there to choose them."""
    try:
        from PIL import Image
    except ImportError:
        return
    with Image.open(path) as opened:
        picture = opened.convert("RGB")
    half = COLOURS // 2
    common, rare = (
        picture.quantize(half, method=method).getpalette() or []
        for method in (Image.Quantize.MEDIANCUT, Image.Quantize.MAXCOVERAGE)
    )
    both = Image.new("P", (1, 1))
    both.putpalette([*common[: 3 * half], *rare[: 3 * half]])
    picture.quantize(palette=both, dither=Image.Dither.NONE).save(path, optimize=True)


def take(browser: Browser, url: str, path: Path, profile: dict[str, Any]) -> None:
    """One picture: of the overview the whole page where it is longer than the window, of other pages the window."""
    context = browser.new_context(**profile)
    page = context.new_page()
    page.goto(url)
    overview = page.evaluate("document.documentElement.dataset.page") == "overview"
    page.wait_for_selector("#value:not(:empty)" if overview else "body[data-drawn]")
    page.wait_for_timeout(1500)
    page.screenshot(path=path, full_page=overview)
    context.close()


if __name__ == "__main__":
    main()
