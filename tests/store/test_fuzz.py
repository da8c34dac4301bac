"""Mutants of real run files, read as the command line and the dashboard read them: nothing gets out but our errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from mutations import fuzz

from keelscope.store import isolated


def test_sixty_mutants(tmp_path, monkeypatch):
    monkeypatch.setattr(isolated, "PATIENCE", 2.0)
    outcome = fuzz(tmp_path, range(60), 30.0, share=6)
    assert outcome["findings"] == {}
    assert min(outcome["read"], outcome["refused"]) > 5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_minutes_of_mutants(tmp_path, monkeypatch):
    monkeypatch.setattr(isolated, "PATIENCE", 2.0)
    outcome = fuzz(tmp_path, range(1_000_000, 2_000_000), 600.0)
    assert outcome["findings"] == {}
    assert outcome["refused"] > 1000
