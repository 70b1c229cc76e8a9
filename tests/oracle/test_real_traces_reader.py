"""The reader on every real trace: kernel counts, steps and busy time as a separate program found them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tb_chopper.backend import schema
from tb_chopper.backend.readers import kineto

FILES = sorted(
    str(p.relative_to(root)) for root in [Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"]
    for p in root.glob("*/*.pt.trace.json.gz"))
REPAIRS = {"kernel_overruns_successor", "negative_duration", "missing_duration", "kernel_without_time", "missing_timestamp"}


@pytest.fixture(scope="module")
def oracle(shared: Path) -> dict[str, dict[str, object]]:
    return json.loads((shared / "traces" / "oracle.json").read_text())


def busy_ns(device: pd.DataFrame) -> int:
    """Length of the union of all activities, by a plain sweep."""
    rows = device.sort_values("start_ns")
    reach = np.maximum.accumulate(rows["end_ns"].to_numpy())
    before = np.append(rows["start_ns"].iloc[0], reach[:-1])
    return int(np.maximum(0, rows["end_ns"].to_numpy() - np.maximum(rows["start_ns"].to_numpy(), before)).sum())


@pytest.mark.parametrize("name", FILES)
def test_a_real_trace_is_read_whole_and_unrepaired(shared: Path, oracle: dict[str, dict], name: str) -> None:
    trace = kineto.read(shared / "traces" / name)
    expected = oracle[name]
    assert trace.complete
    assert not REPAIRS & {f.code for f in trace.findings}
    assert (trace.device["activity"] == "kernel").sum() == expected["n_kernels"]
    scopes = trace.host.loc[trace.host["kind"].isin(["annotation", "cpu_op"]), "name"].astype(str)
    assert scopes[scopes.str.startswith("ProfilerStep#")].nunique() == expected["n_steps"]
    assert set(trace.device["device"].unique()) == set(expected["gpus"])
    for gpu, totals in expected["gpus"].items():
        device = trace.device[trace.device["device"] == gpu]
        assert busy_ns(device) / 1000 == pytest.approx(totals["busy"], abs=1)
        assert (device["end_ns"].max() - device["start_ns"].min()) / 1000 == pytest.approx(totals["total"], abs=1)


@pytest.mark.parametrize("name", FILES[::6])
def test_the_tables_are_those_of_the_schema(shared: Path, name: str) -> None:
    trace = kineto.read(shared / "traces" / name)
    for frame, table in ((trace.host, schema.HOST), (trace.device, schema.DEVICE), (trace.memory, schema.MEMORY),
                         (trace.threads, schema.THREADS)):
        assert [(c, str(d)) for c, d in frame.dtypes.items()] == [(c.name, c.dtype) for c in table]


def test_there_are_real_traces_beside_a_full_checkout(shared: Path) -> None:
    assert len(FILES) == 38
