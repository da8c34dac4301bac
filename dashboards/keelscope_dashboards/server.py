"""Serving the app on this machine: pick a free port, say where it is, open the browser, stop on Ctrl-C."""

from __future__ import annotations

import ipaddress
import threading
import webbrowser
from typing import TYPE_CHECKING, Protocol

from keelscope.errors import UsageError
from keelscope_dashboards.guard import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flask import Flask

__all__ = ["allowed_hosts", "serve"]

PORTS_TRIED = 20
THREADS = 8


class _Server(Protocol):
    """What waitress gives."""

    def run(self) -> None: ...

    def close(self) -> None: ...


def allowed_hosts(host: str, extra: Sequence[str]) -> frozenset[str]:
    """The names a browser may use for this server.

    Args:
        host: the address that is bound.
        extra: names given by the user.

    Returns:
        Loopback names, `host` unless it stands for all addresses, and `extra`.

    Raises:
        UsageError: if all addresses are bound without saying under which names the server is reached.
    """
    everywhere = _is_wildcard(host)
    if everywhere and not extra:
        raise UsageError(
            f"--host {host} listens on every network; say under which name browsers reach it: --allowed-host NAME."
        )
    return LOOPBACK | frozenset(extra) | (frozenset() if everywhere else {host.strip("[]")})


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return not host


def serve(server: Flask, *, host: str, port: int, browser: bool, say: Callable[[str], None]) -> None:
    """Serve until interrupted.

    Args:
        server: the Flask server of the app.
        host: address to bind.
        port: first port to try; the next free one is taken.
        browser: whether to open a browser window.
        say: prints one line to the user.
    """
    bound, taken = _bind(server, host, port)
    shown = "127.0.0.1" if _is_wildcard(host) else host
    url = f"http://{f'[{shown}]' if ':' in shown else shown}:{taken}/"
    say(f"keelscope dashboard: {url}  (Ctrl-C stops it)")
    if shown not in LOOPBACK:
        say("It is reachable from the network, and anyone who can reach it can read these runs.")
    if browser:
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
    try:
        bound.run()
    except KeyboardInterrupt:
        say("Stopped.")
    finally:
        bound.close()


def _bind(server: Flask, host: str, port: int) -> tuple[_Server, int]:
    from waitress import create_server

    last: OSError | None = None
    for candidate in range(port, min(port + PORTS_TRIED, 65536)):
        try:
            return create_server(server, host=host.strip("[]"), port=candidate, threads=THREADS, ident=None), candidate
        except OSError as error:
            last = error
    reason = f": {last.strerror}" if last is not None else ""
    raise UsageError(f"No free port from {port} on could be bound on {host}{reason}; choose one with --port.")
