"""Who may talk to the dashboard: Host allow-list, same-origin check, strict headers on every answer.

Binding to 127.0.0.1 does not stop a web page from reaching the server through DNS rebinding or a cross-site request;
this does. Installed on the Flask server below Dash, so that it covers Dash's own routes too.
"""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from flask import Response, abort, request

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from flask import Flask

__all__ = ["LOOPBACK", "content_security_policy", "install", "script_hash"]

_PLACES = frozenset({"document"})
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}


def script_hash(script: str) -> str:
    """The CSP source expression that allows one inline script.

    Args:
        script: its text, without the tags.

    Returns:
        ``'sha256-...'`` with its quotes.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def content_security_policy(script_hashes: Iterable[str] = (), *, framed: bool = False) -> str:
    """The policy: everything from this server only, no inline script but those hashed, no evaluation of strings.

    Args:
        script_hashes: source expressions of the inline scripts.
        framed: whether pages of this machine may hold it in a frame.

    Returns:
        The header value.
    """
    scripts = " ".join(["'self'", *script_hashes])
    here = (f"{scheme}://{host}:*" for scheme in ("http", "https") for host in ("127.0.0.1", "localhost"))
    frames = " ".join(here) if framed else "'none'"
    return (
        f"default-src 'self'; script-src {scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "font-src 'self'; connect-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
        f"frame-ancestors {frames}"
    )


def install(server: Flask, *, hosts: Collection[str], policy: str, framed: bool = False) -> None:
    """Check every request and mark every answer.

    Args:
        server: the Flask server.
        hosts: host names a browser may use, without port.
        policy: the Content-Security-Policy value.
        framed: whether pages of this machine may hold it in a frame, which the policy says too.
    """
    allowed = frozenset(host.lower() for host in hosts)

    def check() -> None:
        if _hostname(f"//{request.host}") not in allowed:
            abort(403, "This dashboard does not answer to that host name; start it with --allowed-host to add one.")
        if _crosses_origins(allowed, _PLACES | {"iframe"} if framed else _PLACES):
            abort(403, "This dashboard does not answer requests from other sites.")

    def mark(response: Response) -> Response:
        for name, value in HEADERS.items():
            if not (framed and name == "X-Frame-Options"):
                response.headers.setdefault(name, value)
        response.headers["Content-Security-Policy"] = policy
        return response

    server.before_request(check)
    server.after_request(mark)


def _crosses_origins(allowed: frozenset[str], places: frozenset[str]) -> bool:
    origin = request.headers.get("Origin")
    if origin is not None and (_hostname(origin) not in allowed or urlsplit(origin).netloc != request.host):
        return True
    return request.headers.get("Sec-Fetch-Site", "none") in {"cross-site", "same-site"} and not _follows_a_link(places)


def _follows_a_link(places: frozenset[str]) -> bool:
    """Whether a person opens the page itself from a link elsewhere, which reads nothing across origins."""
    navigates = request.headers.get("Sec-Fetch-Mode") == "navigate"
    document = request.headers.get("Sec-Fetch-Dest") in places
    return request.method == "GET" and navigates and document and not request.path.startswith("/api/")


def _hostname(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""
