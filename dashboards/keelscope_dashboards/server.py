"""Serving the app on this machine: pick a free port, say where it is, open the browser, stop on Ctrl-C."""

from __future__ import annotations

import ipaddress
import socket
import threading
import webbrowser
from typing import TYPE_CHECKING

from keelscope.errors import UsageError
from keelscope_dashboards.guard import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flask import Flask

__all__ = ["allowed_hosts", "listen", "serve", "serve_on"]

PORTS_TRIED = 20
THREADS = 8


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
    listening = listen(host.strip("[]"), port)
    taken = int(listening.getsockname()[1])
    shown = "127.0.0.1" if _is_wildcard(host) else host.strip("[]")
    url = f"http://{f'[{shown}]' if ':' in shown else shown}:{taken}/"
    say(f"keelscope dashboard: {url}  (Ctrl-C stops it)")
    if shown not in LOOPBACK or _is_wildcard(host):
        say("It is reachable from the network, and anyone who can reach it can read these runs.")
    if browser:
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
    serve_on(server, listening)
    say("Stopped.")


def serve_on(server: Flask, listening: socket.socket) -> None:
    """Answer requests until Ctrl-C, which waitress takes as the end.

    Args:
        server: the Flask server of the app.
        listening: where.
    """
    from waitress import create_server

    waiting = create_server(server, sockets=[listening], threads=THREADS, ident=None)
    try:
        waiting.run()
    finally:
        waiting.close()
        listening.close()


def listen(host: str, port: int) -> socket.socket:
    """A socket on the first free port.

    Args:
        host: address to bind.
        port: the first to try.

    Returns:
        The socket, listening.

    Raises:
        UsageError: if none of the next ports is free.
    """
    reason = ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in range(port, min(port + PORTS_TRIED, 65536)):
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, candidate))
            listening.listen()
        except OSError as error:
            reason = error.strerror or str(error)
            listening.close()
        else:
            return listening
    raise UsageError(f"No port from {port} on can be bound on {host}: {reason}; choose others with --port and --host.")
