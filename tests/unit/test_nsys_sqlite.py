"""Exports of Nsight Systems, built and real, as runtime traces."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from tb_chopper.backend import kernel_names, schema
from tb_chopper.backend.errors import UnreadableFile
from tb_chopper.backend.readers import nsys_sqlite

EPOCH = 1_779_782_330_176_752_435
MANGLED = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_"


def global_id(pid: int, tid: int = 0) -> int:
    return (1 << 56) | (pid << 24) | tid


def export(path: Path, gpus: bool = True) -> Path:
    """Two processes of one GPU each that use the same correlation ids."""
    with sqlite3.connect(path) as db:
        db.executescript("""
            CREATE TABLE StringIds (id, value);
            CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs);
            CREATE TABLE TARGET_INFO_SYSTEM_ENV (name, value);
            CREATE TABLE TARGET_INFO_GPU (id, name, smCount);
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, "end", deviceId, streamId, correlationId, globalPid,
                mangledName, demangledName, shortName, gridX, gridY, gridZ, blockX, blockY, blockZ);
            CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start, "end", deviceId, streamId, correlationId, globalPid, bytes,
                copyKind);
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, "end", globalTid, correlationId, nameId);
            CREATE TABLE NVTX_EVENTS (start, "end", eventType, text, textId, globalTid);""")
        db.executemany("INSERT INTO StringIds VALUES (?,?)", [
            (1, MANGLED), (2, "f<(int)4>"), (3, "f"), (4, "cudaLaunchKernel_v7000"), (5, "step 3")])
        db.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (?)", [EPOCH])
        db.execute("INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES ('TOKEN', 'secret')")
        if gpus:
            db.executemany("INSERT INTO TARGET_INFO_GPU VALUES (?, 'NVIDIA H100 80GB HBM3', 132)", [[0], [1]])
        for gpu, pid in enumerate((500, 501)):
            db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?,?,?,7,9,?,?,2,3,66,2,1,128,1,1)",
                       [100 + gpu, 200 + gpu, gpu, global_id(pid), 1 if gpu else None])
            db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?,?,?,8,-1,?,4096,1)",
                       [50, 60, gpu, global_id(pid)])
            db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?,?,?,9,4)", [20, 30, global_id(pid, 77)])
            db.executemany("INSERT INTO NVTX_EVENTS VALUES (?,?,?,?,?,?)", [
                (10, 40, 59, "aten::mm, seq = 12, op_id = 3", None, global_id(pid, 77)),
                (5, None, 59, None, 5, global_id(pid, 77)), (5, 9, 34, "mark", None, global_id(pid, 77))])
    return path


def test_kernels_calls_and_ranges(tmp_path):
    trace = nsys_sqlite.read(export(tmp_path / "a.sqlite"))
    kernels = trace.device[trace.device["activity"] == "kernel"]
    assert kernels["start_ns"].tolist() == [EPOCH + 100, EPOCH + 101] and kernels["device"].tolist() == ["0", "1"]
    assert kernels["grid"].tolist() == ["[66, 2, 1]"] * 2 and kernels["blocks_per_sm"].tolist() == [1.0, 1.0]
    expected = kernel_names.demangle(MANGLED)
    assert kernels["name"].tolist() == ["f<(int)4>", expected if expected != MANGLED else "f<(int)4>"]
    copy = trace.device[trace.device["activity"] == "memcpy"].iloc[0]
    assert (copy["name"], copy["bytes"], copy["correlation"]) == ("Memcpy HtoD (Host -> Device)", 4096, -1)
    calls = trace.host[trace.host["kind"] == "runtime"]
    assert set(calls["name"]) == {"cudaLaunchKernel"}
    assert sorted(calls["correlation"]) == sorted(kernels["correlation"]) and kernels["correlation"].nunique() == 2
    operator = trace.host[trace.host["kind"] == "cpu_op"].iloc[0]
    assert (operator["name"], operator["seq"]) == ("aten::mm", 12)
    step = trace.host[trace.host["kind"] == "annotation"].iloc[0]
    assert (step["name"], step["finished"]) == ("step 3", False)
    assert trace.threads["pid"].tolist() == ["500", "501"] and trace.threads["tid"].tolist() == ["77", "77"]
    assert trace.meta["deviceProperties"][1] == {"id": 1, "name": "NVIDIA H100 80GB HBM3", "numSms": 132}
    assert "secret" not in str(trace)
    for frame, table in ((trace.device, schema.DEVICE), (trace.host, schema.HOST)):
        assert frame.columns.tolist() == [c.name for c in table]


def test_tables_that_are_empty_or_absent(tmp_path):
    path = export(tmp_path / "a.sqlite", gpus=False)
    with sqlite3.connect(path) as db:
        db.executescript("DROP TABLE NVTX_EVENTS; DROP TABLE CUPTI_ACTIVITY_KIND_RUNTIME; DELETE FROM "
                         "TARGET_INFO_SESSION_START_TIME")
    trace = nsys_sqlite.read(path)
    assert len(trace.device) == 4 and not len(trace.host)
    assert trace.device["blocks_per_sm"].isna().all() and [f.code for f in trace.findings] == ["no_epoch"]
    assert trace.device["start_ns"].min() == 50


@pytest.mark.parametrize("script", ["CREATE TABLE cookies (a)", "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start)"])
def test_no_gpu_work_is_said_in_one_line(tmp_path, script):
    with sqlite3.connect(tmp_path / "a.sqlite") as db:
        db.execute(script)
    with pytest.raises(UnreadableFile, match="--trace=cuda"):
        nsys_sqlite.read(tmp_path / "a.sqlite")
    (tmp_path / "b.sqlite").write_bytes(b"SQLite format 3\0" + b"\xff" * 600)
    with pytest.raises(UnreadableFile, match="nsys export"):
        nsys_sqlite.read(tmp_path / "b.sqlite")


def test_a_real_export_of_two_gpus(shared):
    path = shared / "counters" / "nsys_sqlite" / "mfu_2gpu_before.sqlite"
    trace = nsys_sqlite.read(path)
    with sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True) as db:
        counts = {t: db.execute(f"SELECT COUNT(*) FROM CUPTI_ACTIVITY_KIND_{t}").fetchone()[0]
                  for t in ("KERNEL", "MEMCPY", "MEMSET", "RUNTIME")}
        busy = dict(db.execute('SELECT deviceId, SUM("end" - start) FROM CUPTI_ACTIVITY_KIND_KERNEL GROUP BY 1'))
        joined = db.execute("""SELECT COUNT(*) FROM CUPTI_ACTIVITY_KIND_KERNEL k WHERE EXISTS (SELECT 1 FROM
            CUPTI_ACTIVITY_KIND_RUNTIME r WHERE r.correlationId = k.correlationId
            AND (r.globalTid >> 24) = (k.globalPid >> 24))""").fetchone()[0]
    of = trace.device["activity"].value_counts()
    assert [of["kernel"], of["memcpy"], of["memset"]] == [counts[t] for t in ("KERNEL", "MEMCPY", "MEMSET")]
    assert (trace.host["kind"] == "runtime").sum() == counts["RUNTIME"]
    kernels = trace.device[trace.device["activity"] == "kernel"]
    duration = (kernels["end_ns"] - kernels["start_ns"]).groupby(kernels["device"], observed=True).sum()
    assert {int(k): v for k, v in duration.items()} == busy
    launches = trace.host.loc[trace.host["kind"] == "runtime", "correlation"]
    assert np.isin(kernels["correlation"], launches).sum() == joined
    assert (trace.host["kind"] == "cpu_op").sum() > 10_000
