"""Every row of a table and every diagnosis that offers to be shown in the trace names a kernel of the run."""

from __future__ import annotations

import pytest

import tb_chopper
from tb_chopper.backend import views
from tb_chopper.backend.run import Run
from tb_chopper.backend.views import trace_link
from tb_chopper.cli import main

WITHOUT = {"overview", "diagnosis", "stragglers", "cpu", "findings"}
"""Tabs whose rows are GPUs, steps, samples or files rather than kernels."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two hosts whose clocks are 5 ms apart: a kernel is named by its own host's."""
    folder = tmp_path_factory.mktemp("hosts")
    assert main(["simulate", str(folder), "--preset", "tiny", "--hosts", "2", "--clock-skew", "5000"]) == 0
    return tb_chopper.open_run(next(folder.iterdir()))


@pytest.mark.parametrize(("name", "by"), [(n, b) for n, e in views.REGISTRY.items() for b in (e.by or (None,))])
def test_rows_name_kernels(run: Run, name: str, by: str | None) -> None:
    view = run.view(name, **({} if by is None else {"by": by}))
    for table in view.tables.values():
        for at in table.rows[table.at].dropna() if table.at else ():
            if at:
                assert trace_link.find(run.kernels, at) is not None
    offered = any(t.at and t.rows[t.at].notna().any() for t in view.tables.values())
    assert offered or not len(view.tables) or name in WITHOUT | {"memory", "parallelism", "fusion"}


def test_diagnoses_name_kernels(run: Run) -> None:
    for found in run.diagnosis:
        if getattr(found, "kernel", ""):
            trace_link.find(run.kernels, found.kernel)
