from __future__ import annotations

import torch
from torch import nn

import keelscope as ks
from keelscope_dashboards.document import render


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

    report = report_of("a")
    source = report.run._source
    hostile = replace(source.layout.info, title="<script>alert(1)</script>")
    writer = MemoryWriter(replace(source.layout, info=hostile))
    page = render(ks.diagnose(writer.run()))
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_every_layer_of_a_long_stack_is_there_and_the_page_is_small(kit):
    page = render(ks.diagnose(kit.memory_run("post_ln", layers=1000, steps=300)))
    assert len(page) < 3_000_000
    assert "All 1001 rows" in page
    assert all(f"<td>sublayers.{i}</td>" in page.replace(' style="text-align:left"', "") for i in (0, 500, 999))


def test_the_browser_shows_it_in_light_dark_and_print(kit, browser, tmp_path):
    path = tmp_path / "r.html"
    ks.diagnose(kit.memory_run("broken", layers=24, steps=40)).to_html(path)
    trouble, seen = [], {}
    for scheme, media in (("light", "screen"), ("dark", "screen"), ("dark", "print")):
        page = browser.new_page(viewport={"width": 1000, "height": 800}, color_scheme=scheme)
        page.on("console", lambda message: trouble.append(message.text))
        page.on("request", lambda request: trouble.append(request.url) if request.url != path.as_uri() else None)
        page.emulate_media(media=media, color_scheme=scheme)
        page.goto(path.as_uri())
        ink, paper, cell = page.evaluate(
            "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor,"
            " getComputedStyle(document.querySelector('.tiles .k8')).fill]"
        )
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        seen[scheme, media] = (ink, paper, cell)
        page.close()
    assert trouble == []
    assert seen["dark", "print"] == seen["light", "screen"]
    assert all(a != b for a, b in zip(seen["light", "screen"], seen["dark", "screen"], strict=True))
