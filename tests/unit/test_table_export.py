"""Tables on disk against the tables of the run."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow.parquet
import pytest

import tb_chopper
from tb_chopper.backend import schema
from tb_chopper.backend.export import tables
from tb_chopper.backend.export.redact import Redactor
from tb_chopper.backend.run import Run
from tb_chopper.backend.simulate import Options, simulate
from tests.builders import TraceBuilder
from tests.contract.test_augmented_trace import NAMES


def built(folder: Path) -> Run:
    t = TraceBuilder(rank=3, world_size=4)
    for i in range(2):
        t.training_step(i, 1000 * i)
    for i, name in enumerate(NAMES):
        t.launch(name, 2000 + 20 * i, 2005 + 20 * i, 7)
    t.memory(10, 512, 1024, 2048)
    t.head["host_name"] = "gpu-box-7.example.org"
    t.launch("/home/alice/secret/kernel.py(3)", 3000, 3010, 5)
    t.write(folder / "gpu-box-7.example.org_4711.pt.trace.json")
    return tb_chopper.open_run(folder)


def test_parquet_holds_the_tables_with_units(tmp_path: Path) -> None:
    run = built(tmp_path / "run")
    written = tables.export(run, tmp_path / "out", "parquet")
    assert {p.name for p in written} >= {"kernels.parquet", "steps.parquet", "workers.parquet", "memory.parquet",
                                         "findings.parquet"}
    for name, expected, columns in (("kernels", run.kernels, schema.KERNELS), ("steps", run.steps, schema.STEPS),
                                    ("workers", run.workers, schema.WORKERS)):
        # Missing integers are nulls in the file; pandas makes floats of such a column unless told otherwise.
        found = schema.conform(pd.read_parquet(tmp_path / "out" / f"{name}.parquet"), columns)
        pd.testing.assert_frame_equal(found.astype(str), expected.reset_index(drop=True).astype(str))
    fields = {f.name: f.metadata for f in pyarrow.parquet.read_schema(tmp_path / "out/kernels.parquet")}
    assert set(fields) == {c.name for c in schema.KERNELS}
    assert fields["start_ns"][b"unit"] == b"ns" and fields["bytes"][b"unit"] == b"B" and fields["step"][b"meaning"]


def test_csv_says_units_in_its_header_and_keeps_every_digit(tmp_path: Path) -> None:
    run = built(tmp_path / "run")
    tables.export(run, tmp_path / "out", "csv")
    found = pd.read_csv(tmp_path / "out/kernels.csv", keep_default_na=False, dtype=str)
    assert {"start_ns [ns]", "bytes [B]", "occupancy [%]", "name", "step"} <= set(found.columns)
    assert found["start_ns [ns]"].tolist() == run.kernels["start_ns"].astype(str).tolist()
    assert found["name"].tolist() == run.kernels["name"].tolist() and set(NAMES) <= set(found["name"])
    steps = run.kernels["step"].astype(object).where(run.kernels["step"].notna(), "").astype(str).tolist()
    assert found["step"].tolist() == steps


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_redacted_tables_name_no_host_and_no_folder(tmp_path: Path, form: tables.Format) -> None:
    run = built(tmp_path / "run")
    plain = tables.export(run, tmp_path / "plain", form)
    redacted = tables.export(run, tmp_path / "redacted", form, redactor=Redactor(["gpu-box-7.example.org"]))
    text = {k: b"".join((p.read_bytes() if form == "csv" else repr(pd.read_parquet(p).to_dict()).encode())
                        for p in files) for k, files in (("plain", plain), ("redacted", redacted))}
    for secret in (b"gpu-box-7", b"alice", b"/home"):
        assert secret in text["plain"] and secret not in text["redacted"]
    assert b"kernel.py(3)" in text["redacted"]


def test_a_simulated_run_has_its_telemetry(tmp_path: Path) -> None:
    (folder,) = simulate(tmp_path, Options(preset="tiny"))
    run = tb_chopper.open_run(folder)
    tables.export(run, tmp_path / "out", "csv")
    found = pd.read_csv(tmp_path / "out/telemetry.csv")
    assert found["clock_mhz [MHz]"].tolist() == pytest.approx(run.telemetry.samples["clock_mhz"].tolist(), nan_ok=True)
    assert "temperature_c [°C]" in found
