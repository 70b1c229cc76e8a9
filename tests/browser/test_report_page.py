"""The report in a real browser, opened from disk: both themes, all figures, no network, whole on paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tb_chopper
from tb_chopper.backend.export import report
from tb_chopper.backend.views import REGISTRY
from tests.browser.page import CHROMIUM
from tests.builders import TraceBuilder

pytestmark = [pytest.mark.browser, pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")]
HOSTILE = "<img src=x onerror=document.title='broken'>" + "k" * 5000


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    for name, ranks in (("run", 2), ("other", 1)):
        for rank in range(ranks):
            t = TraceBuilder("rocm", rank=rank, world_size=ranks)
            for i in range(3):
                t.training_step(i, 1000 * i)
            t.launch(HOSTILE, 3000, 3010, 50)
            t.write(folder / name / f"rank{rank}.pt.trace.json.gz")
    run, other = (tb_chopper.open_run(folder / n) for n in ("run", "other"))
    report.export(run, folder / "report.html", compare=other)
    return folder / "report.html"


def opened(browser: Any, path: Path, scheme: str) -> tuple[Any, list[str]]:
    """The page, drawn, and everything that went wrong or left the machine."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
    page.on("request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else wrong.append(r.url))
    page.goto(path.as_uri())
    page.wait_for_function("document.documentElement.dataset.ready === 'yes'")
    page.wait_for_function("[...document.querySelectorAll('.plot')].every(p => p.dataset.drawn)")
    return page, wrong


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_is_drawn_in_the_readers_theme(browser: Any, written: Path, scheme: str) -> None:
    page, wrong = opened(browser, written, scheme)
    sections = page.evaluate("[...document.querySelectorAll('.report-view')].map(s => s.id)")
    assert sections == ["differences", *REGISTRY]
    assert page.evaluate("document.querySelectorAll('.plot .main-svg').length") > 0
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    red = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]")
    assert (red < 80) == (scheme == "dark")
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") != scheme
    assert page.title() == "Chopper: run" and wrong == []
    page.close()


def test_nothing_is_wider_than_the_page(browser: Any, written: Path) -> None:
    for width in (800, 1280, 1920):
        page, _ = opened(browser, written, "light")
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        page.close()


def test_it_prints_whole_and_light(browser: Any, written: Path) -> None:
    page, wrong = opened(browser, written, "dark")
    data = page.pdf(prefer_css_page_size=True, print_background=True)
    assert data.startswith(b"%PDF") and data.count(b"/Type /Page\n") >= len(REGISTRY) + 1
    page.emulate_media(media="print")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    assert page.evaluate("""[...document.querySelectorAll('.plot')].every(p =>
        p.querySelector('.main-svg').getBoundingClientRect().width <= p.clientWidth + 1)""")
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark" and wrong == []
    page.close()
