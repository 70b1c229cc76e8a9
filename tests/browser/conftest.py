"""The browser, and a tab on the module's `server`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.page import ARGUMENTS, CHROMIUM, Tab, TensorBoard


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def tab(browser: Any, server: TensorBoard) -> Iterator[Tab]:
    """Closed after the test, which fails if the console or the network had anything to complain of."""
    tab = Tab(browser, server)
    yield tab
    complaints = list(tab.complaints)
    tab.context.close()
    assert complaints == []
