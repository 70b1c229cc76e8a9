"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

# The time limit of one example says more about the machine than about the code.
settings.register_profile("chopper", deadline=None, max_examples=60, derandomize=bool(os.environ.get("CI")))
settings.load_profile("chopper")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real files, where the checkout has it beside itself; the test is skipped where not."""
    if not DATA.is_dir():
        pytest.skip("the folder of real files is not beside this checkout")
    return DATA


@pytest.fixture(scope="session", autouse=True)
def _own_cache():
    """Caches of read-only folders go to a folder of this test session, never to the user's."""
    with tempfile.TemporaryDirectory() as folder:
        old = os.environ.get("XDG_CACHE_HOME")
        os.environ["XDG_CACHE_HOME"] = folder
        yield
        os.environ.pop("XDG_CACHE_HOME") if old is None else os.environ.update(XDG_CACHE_HOME=old)
