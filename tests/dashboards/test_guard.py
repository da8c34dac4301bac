"""The guard: who may talk to the dashboard, and the headers of every answer."""

from __future__ import annotations

import re
from typing import Any

import pytest

ANY_ROUTE = ("/", "/api/v1/state", "/_dash-layout", "/assets/keelscope.css")


@pytest.mark.parametrize("path", ANY_ROUTE)
@pytest.mark.parametrize("host", ["127.0.0.1:8050", "localhost", "LOCALHOST:9", "[::1]:8050"])
def test_loopback_names_are_answered(three_runs: Any, path: str, host: str) -> None:
    assert three_runs.client.get(path, headers={"Host": host}, buffered=True).status_code == 200


@pytest.mark.parametrize("path", ANY_ROUTE)
@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.nip.io", "evil.example:8050", "127.0.0.1@evil.example", "[", ""]
)
def test_other_hosts_are_refused(three_runs: Any, path: str, host: str) -> None:
    assert three_runs.client.get(path, headers={"Host": host}, buffered=True).status_code in {400, 403}


CALLBACK = "/_dash-update-component"


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://127.0.0.1:8050", True),
        ("http://127.0.0.1:9999", False),
        ("http://localhost:8050", False),
        ("http://evil.example", False),
        ("null", False),
    ],
)
def test_a_callback_is_for_the_page_itself(three_runs: Any, origin: str, allowed: bool) -> None:
    headers = {"Host": "127.0.0.1:8050", "Origin": origin}
    answer = three_runs.client.post(CALLBACK, json={}, headers=headers)
    assert (answer.status_code != 403) == allowed


@pytest.mark.parametrize(
    ("headers", "path", "expected"),
    [
        ({"Sec-Fetch-Site": "cross-site"}, "/api/v1/state", 403),
        ({"Sec-Fetch-Site": "same-site"}, "/api/v1/state", 403),
        ({"Sec-Fetch-Site": "same-origin"}, "/api/v1/state", 200),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}, "/", 200),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}, "/", 403),
        (
            {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"},
            "/api/v1/state",
            403,
        ),
    ],
)
def test_other_sites_may_link_but_not_read(three_runs: Any, headers: dict[str, str], path: str, expected: int) -> None:
    assert three_runs.client.get(path, headers=headers).status_code == expected


@pytest.mark.parametrize("path", [*ANY_ROUTE, "/api/v1/runs/x/tile", "/nowhere"])
def test_every_answer_carries_the_strict_headers(three_runs: Any, path: str) -> None:
    headers = three_runs.client.get(path, buffered=True).headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "connect-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe-eval" not in policy
    assert "'unsafe-inline'" not in policy.partition("script-src")[2].partition(";")[0]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"


def test_every_inline_script_of_the_page_is_allowed_by_its_hash(three_runs: Any) -> None:
    from keelscope_dashboards.guard import script_hash

    answer = three_runs.client.get("/")
    scripts = re.findall(r"<script(?![^>]*src=)([^>]*)>(.*?)</script>", answer.text, flags=re.DOTALL)
    inline = [text for attributes, text in scripts if "application/json" not in attributes]
    assert len(inline) == 2
    assert all(script_hash(text) in answer.headers["Content-Security-Policy"] for text in inline)


def test_the_page_names_nothing_outside_this_server(three_runs: Any) -> None:
    assert re.findall(r"(?:src|href)=\"(?:https?:)?//[^\"]*\"", three_runs.client.get("/").text) == []


def test_what_has_its_time_in_the_address_is_kept(three_runs: Any) -> None:
    for time, kept in (("?m=1", "public, max-age=31536000, immutable"), ("", "public, max-age=3600")):
        with three_runs.client.get(f"/assets/wire.js{time}") as answer:
            assert answer.headers["Cache-Control"] == kept
    scripts = re.findall(r'<script src="([^"?]*)', three_runs.client.get("/").text)
    assert "/assets/wire.js" in scripts
    assert not [name for name in scripts if re.search("polyfill|dash_table|plotly", name)]


def test_debug_is_off(three_runs: Any) -> None:
    assert not three_runs.app.server.debug
    assert b'"ui":false' in three_runs.client.get("/").data.replace(b" ", b"")
