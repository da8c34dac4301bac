"""The hub is asked briefly, as the environment says."""

from __future__ import annotations

import socket
import time

import pytest

from keelscope.errors import TargetError
from keelscope.targets import hub


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    for name in (
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "HF_ENDPOINT",
        "HTTPS_PROXY",
        "https_proxy",
        "ALL_PROXY",
        "all_proxy",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_an_open_port_answers_and_a_closed_one_does_not(monkeypatch, listener):
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listener}")
    assert hub.hub_answers()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert not hub.hub_answers()


def test_offline_by_word_asks_nobody(monkeypatch, listener):
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listener}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not hub.hub_answers()


def test_a_proxy_is_asked_instead(monkeypatch, listener):
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{listener}")
    assert hub._gate("https://huggingface.co") == ("127.0.0.1", listener)
    assert hub.hub_answers()


def test_a_name_that_never_resolves_is_given_up(monkeypatch):
    monkeypatch.setattr(hub, "PATIENCE", 0.05)

    def stuck(*_, **__):
        time.sleep(0.3)
        raise OSError("too late")

    monkeypatch.setattr(socket, "create_connection", stuck)
    assert not hub.hub_answers()


def test_an_unreachable_hub_is_not_asked_again(monkeypatch):
    transformers = pytest.importorskip("transformers")
    from keelscope.targets.families import build

    asked = []
    monkeypatch.setattr("keelscope.targets.families.hub_answers", lambda: False)

    def refuse(name, **options):
        asked.append(options)
        raise OSError("not in the cache")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)
    with pytest.raises(TargetError, match="hf:gpt3 is no folder here, and the hub did not give it"):
        build("hf:gpt3")
    assert asked == [{"local_files_only": True}]
