"""Each kind of run is recorded once per test session, when a test first asks for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`recorded(kind)`: the log directory of a run of the example, one of tests/runs/record.py's KINDS."""
    pytest.importorskip("torch")
    from tests.runs.record import record

    @functools.cache
    def once(kind: str) -> Path:
        return record(kind, tmp_path_factory.mktemp(kind.replace("+", "_")))

    return once
