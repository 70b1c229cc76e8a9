"""The reader on every real trace: kernel counts, steps and busy time as a separate program found them."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tb_chopper.backend import schema
from tb_chopper.backend.readers import kineto

FILES = sorted(
    str(p.relative_to(root)) for root in [Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"]
    for p in root.glob("*/*.pt.trace.json.gz"))
REPAIRS = {
    "kernel_overruns_successor", "negative_duration", "missing_duration", "kernel_without_time", "missing_timestamp",
}


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
    # The oracle multiplies doubles: nanoseconds since the epoch are then 256 ns apart, and thousands of borders of
    # kernels add up to some µs. The next test compares this file with exact arithmetic.
    tolerance_us = 10 if name.startswith("resnet50_v100") else 1
    for gpu, totals in expected["gpus"].items():
        device = trace.device[trace.device["device"] == gpu]
        assert busy_ns(device) / 1000 == pytest.approx(totals["busy"], abs=tolerance_us)
        assert (device["end_ns"].max() - device["start_ns"].min()) / 1000 == pytest.approx(totals["total"], abs=1)


@pytest.mark.parametrize("name", [f for f in FILES if f.startswith(("resnet50", "minitoy", "vit_h100", "dlrm8"))])
def test_times_are_those_of_the_file_to_the_nanosecond(shared: Path, name: str) -> None:
    data = gzip.decompress((shared / "traces" / name).read_bytes())
    content = json.loads(data, parse_float=Decimal, parse_int=Decimal)
    events = [e for e in content["traceEvents"] if e["ph"] == "X" and e.get("cat", "").lower().removeprefix("gpu_") in
              ("kernel", "memcpy", "memset")]
    base = int(content.get("baseTimeNanoseconds", 0))
    device = kineto.read(shared / "traces" / name).device
    assert list(device["start_ns"]) == [base + int(e["ts"] * 1000) for e in events]
    assert list(device["end_ns"] - device["start_ns"]) == [int(e["dur"] * 1000) for e in events]


@pytest.mark.parametrize("name", FILES[::6])
def test_the_tables_are_those_of_the_schema(shared: Path, name: str) -> None:
    trace = kineto.read(shared / "traces" / name)
    for frame, table in ((trace.host, schema.HOST), (trace.device, schema.DEVICE), (trace.memory, schema.MEMORY),
                         (trace.threads, schema.THREADS)):
        assert [(c, str(d)) for c, d in frame.dtypes.items()] == [(c.name, c.dtype) for c in table]


def test_there_are_real_traces_beside_a_full_checkout(shared: Path) -> None:
    assert len(FILES) == 38
