from __future__ import annotations

import torch
from torch import nn

import keelscope as ks


def report_of(title: str) -> ks.Report:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(12)])
    return ks.report(model, torch.ones(4, 8), lambda output, _: output.square().mean(), config={"title": title})


def test_page_stands_alone_and_holds_the_verdict(tmp_path):
    report = report_of("a")
    path = tmp_path / "r.html"
    report.to_html(path)
    page = path.read_text()
    assert page.startswith("<!doctype html>")
    assert f"{report.headline}</title>" in page
    assert page.count("<tr") >= 12
    for outside in ("http:", "https:", "<script", "src=", "@import", "url("):
        assert outside not in page


def test_strings_of_a_run_are_escaped():
    from dataclasses import replace

    from keelscope.store.memory import MemoryWriter
    from keelscope_dashboards.document import render

    report = report_of("a")
    source = report.run._source
    hostile = replace(source.layout.info, title="<script>alert(1)</script>")
    writer = MemoryWriter(replace(source.layout, info=hostile))
    page = render(ks.diagnose(writer.run()))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
