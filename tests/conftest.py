"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real files, where the checkout has it beside itself; the test is skipped where not."""
    if not DATA.is_dir():
        pytest.skip("the folder of real files is not beside this checkout")
    return DATA
