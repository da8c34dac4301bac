"""Whether the model hub can be reached, asked once and briefly: its own client tries again for half a minute."""

from __future__ import annotations

import os
import socket
import threading
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

__all__ = ["hub_answers"]

HUB = "https://huggingface.co"
PATIENCE = 2.0
"""Seconds to wait for a connection; the look-up of the name counts too."""


def hub_answers() -> bool:
    """Whether a connection to the hub, or to the proxy in front of it, can be opened within two seconds.

    The environment decides as it does for the hub's own client: ``HF_HUB_OFFLINE``, ``HF_ENDPOINT`` and proxies.

    Returns:
        False when offline; files that are in the cache can still be loaded then.
    """
    if any(
        os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"}
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    ):
        return False
    return _connects(*_gate(os.environ.get("HF_ENDPOINT") or HUB))


def _gate(url: str) -> tuple[str, int]:
    """Host and port that a request to a URL goes to first."""
    parts = urlsplit(url)
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy and not proxy_bypass(parts.hostname or ""):
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _connects(host: str, port: int) -> bool:
    """In a thread of its own, since nothing else bounds the look-up of a name."""
    done: list[bool] = []

    def connect() -> None:
        try:
            with socket.create_connection((host, port), timeout=PATIENCE):
                done.append(True)
        except (OSError, ValueError):
            pass

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return bool(done)
