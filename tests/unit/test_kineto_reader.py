"""The Kineto reader on files built here: every dialect, layout and way to write a time."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tb_chopper.backend import schema
from tb_chopper.backend.readers import kineto
from tb_chopper.backend.schema import Trace
from tests.builders import PID, TID, ZERO_NS, Dialect, Layout, Times, TraceBuilder


def steps(dialect: Dialect = "cuda", n: int = 3, **options: Any) -> TraceBuilder:
    t = TraceBuilder(dialect, world_size=2, **options)
    for i in range(n):
        t.training_step(i, 1000 * i)
    t.thread_name("python")
    return t


def assert_same(a: Trace, b: Trace) -> None:
    for one, other in ((a.host, b.host), (a.device, b.device), (a.memory, b.memory), (a.threads, b.threads)):
        pd.testing.assert_frame_equal(one, other)
    assert (a.meta, a.complete) == (b.meta, b.complete)


def codes(trace: Trace) -> set[str]:
    return {f.code for f in trace.findings}


def test_every_table_is_as_the_schema_says(tmp_path: Path) -> None:
    trace = kineto.read(steps().write(tmp_path / "a.json"))
    for frame, table in ((trace.host, schema.HOST), (trace.device, schema.DEVICE), (trace.memory, schema.MEMORY),
                         (trace.threads, schema.THREADS)):
        assert [(c, str(d)) for c, d in frame.dtypes.items()] == [(c.name, c.dtype) for c in table]


@pytest.mark.parametrize("dialect", ["cuda", "rocm", "legacy"])
def test_the_planted_events_come_out(tmp_path: Path, dialect: Dialect) -> None:
    built = steps(dialect, n=2)
    trace = kineto.read(built.write(tmp_path / "a.json"))
    assert trace.complete
    assert not codes(trace) - {"python_frames_dropped"}
    device = trace.device
    assert len(device) == 2 * 6
    adamw = device[device["name"] == "fused_adamw"].iloc[1]
    assert (adamw["start_ns"], adamw["end_ns"]) == (ZERO_NS + 1_760_000, ZERO_NS + 1_820_250)
    assert adamw["device"] == str(built.device)
    assert adamw["stream"] == 7
    nccl = device[device["name"].astype(str).str.startswith("nccl")].iloc[0]
    assert (nccl["collective"], nccl["group"], nccl["group_size"], nccl["in_nelems"]) == ("allreduce", "0", 2, 1024)
    host = trace.host
    launch = host[(host["kind"] == "runtime") & (host["correlation"] == adamw["correlation"])].iloc[0]
    assert launch["start_ns"] == ZERO_NS + 1_720_000
    assert launch["external_id"] == adamw["external_id"] == built.external_id
    ops = host[host["name"] == "aten::mm"]
    assert list(ops["seq"]) == [0, 1, 0, 1]
    shapes = {"Input Dims": [[8, 8], [8, 8]], "Input type": ["float"] * 2, "Concrete Inputs": [""] * 2}
    assert json.loads(ops["args"].iloc[0]) == shapes
    threads = trace.threads.astype(object)
    assert [(row.pid, row.tid) for row in threads.itertuples()] == [(str(PID), str(TID)), (str(PID), str(TID + 1))]
    assert threads["name"].iloc[0] == "python"
    assert pd.isna(threads["name"].iloc[1])
    assert trace.meta["distributedInfo"]["world_size"] == 2


@pytest.mark.parametrize("layout", ["compact", "pretty"])
@pytest.mark.parametrize("as_list", [False, True])
def test_layouts_do_not_matter(tmp_path: Path, layout: Layout, as_list: bool) -> None:
    built = steps(times="absolute") if as_list else steps()
    expected = kineto.read(built.write(tmp_path / "a.json", as_list=as_list))
    assert_same(kineto.read(built.write(tmp_path / "b.json", layout, as_list)), expected)
    assert len(expected.device) == 18


def test_keys_may_come_in_any_order(tmp_path: Path) -> None:
    built = steps()
    expected = kineto.read(built.write(tmp_path / "a.json"))
    whole = {"traceEvents": built.events, **built.tail, **built.head}
    shuffled = [dict(reversed(e.items())) for e in built.events]
    for i, content in enumerate((whole, {**built.tail, "traceEvents": shuffled, **built.head})):
        path = tmp_path / f"{i}.json"
        path.write_text(built._plain(json.dumps(content, indent=1)))
        assert_same(kineto.read(path), expected)


@pytest.mark.parametrize("times", ["base", "absolute", "text"])
def test_times_are_exact_to_the_nanosecond(tmp_path: Path, times: Times) -> None:
    zero = ZERO_NS + 429_079
    t = TraceBuilder(times=times, zero_ns=zero)
    for i in range(200):
        t.kernel(f"k{i}", 0.9 * i, 0.88)
    device = kineto.read(t.write(tmp_path / "a.json")).device
    assert list(device["start_ns"]) == [zero + 900 * i for i in range(200)]
    assert set(device["end_ns"] - device["start_ns"]) == {880}


def test_times_relative_to_an_old_base_stay_exact(tmp_path: Path) -> None:
    t = TraceBuilder(zero_ns=0)
    starts = [7_889_237_999_999_991 + 7 * i for i in range(50)]  # the end of the quarter that a base stands for
    for start in starts:
        t.kernel("k", 0, 0.001)["ts"] = f"@{Decimal(start) / 1000}@"
    assert list(kineto.read(t.write(tmp_path / "a.json")).device["start_ns"]) == starts


def test_whole_microseconds_since_the_epoch_are_exact(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    events = [{"ph": "X", "cat": "Kernel", "name": "k", "pid": 0, "tid": "stream 7", "ts": 1623143093496523 + i,
               "dur": 1, "args": {"device": 0, "stream": 7}} for i in range(5)]
    path.write_text(json.dumps(events))
    assert list(kineto.read(path).device["start_ns"]) == [(1623143093496523 + i) * 1000 for i in range(5)]


def test_a_base_is_not_added_to_absolute_times(tmp_path: Path) -> None:
    t = TraceBuilder(times="absolute")
    t.kernel("k", 5, 1)
    t.tail["baseTimeNanoseconds"] = ZERO_NS - 10**15
    trace = kineto.read(t.write(tmp_path / "a.json"))
    assert trace.device["start_ns"].item() == ZERO_NS + 5000
    assert "base_time_ignored" in codes(trace)


def test_nonsense_times_do_not_move_the_others(tmp_path: Path) -> None:
    t = TraceBuilder()
    t.kernel("k", 5, 1)
    t.kernel("far", 2**62, 1)
    t.kernel("long", 7, 2**62)
    t.op("aten::mm", 2_000_000_000_000_000, 1)
    t.op("aten::mm", 6, 1)
    trace = kineto.read(t.write(tmp_path / "a.json"))
    assert list(trace.device["start_ns"]) == [ZERO_NS + 5000, ZERO_NS + 7000]
    assert (trace.device["end_ns"] >= trace.device["start_ns"]).all()
    t.tail["baseTimeNanoseconds"] = 10**30
    assert kineto.read(t.write(tmp_path / "b.json")).device["start_ns"].iloc[0] == 5000


def test_content_decides_what_is_compressed(tmp_path: Path) -> None:
    built = steps()
    expected = kineto.read(built.write(tmp_path / "a.json"))
    data = built.text().encode()
    for name, content in (
        ("gz_named_json.json", gzip.compress(data)), ("json_named_gz.json.gz", data),
        ("members.json.gz", gzip.compress(data[:1000]) + gzip.compress(data[1000:1001]) + gzip.compress(data[1001:])),
        ("padded.json.gz", gzip.compress(data) + b"\0" * 512), ("bom.json", b"\xef\xbb\xbf" + data),
    ):
        (tmp_path / name).write_bytes(content)
        assert_same(kineto.read(tmp_path / name), expected)


@pytest.mark.parametrize("chunk_bytes", [1, 64, 500, 4096])
@pytest.mark.parametrize("layout", ["indented", "compact"])
def test_small_chunks_give_the_same_tables(tmp_path: Path, chunk_bytes: int, layout: Layout) -> None:
    path = steps(n=4).write(tmp_path / "a.json", layout)
    assert_same(kineto.read(path, chunk_bytes=chunk_bytes), kineto.read(path))


def test_helpers_give_the_same_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = steps(n=60).write(tmp_path / "a.json.gz")
    monkeypatch.setattr(kineto, "INLINE_BYTES", 10_000)
    assert_same(kineto.read(path, chunk_bytes=4096, processes=2), kineto.read(path, processes=0))


def test_a_dead_helper_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = steps(n=60).write(tmp_path / "a.json")
    expected = kineto.read(path, processes=0)
    monkeypatch.setattr(kineto, "INLINE_BYTES", 10_000)
    monkeypatch.setattr("tb_chopper.backend.readers.decoders._PROGRAM", "import sys; sys.exit(1)  # {path}")
    assert_same(kineto.read(path, chunk_bytes=4096, processes=2), expected)


def test_names_that_look_like_events_are_names(tmp_path: Path) -> None:
    name = 'x}, {"ph": "X", "cat": "kernel", "name": "y"}, {"ph":1}], "traceEvents": ['
    t = TraceBuilder()
    for i in range(20):
        t.op(name, 10 * i, 5)
    path = t.write(tmp_path / "a.json")
    for chunk_bytes in (1, 50, 300, 1 << 20):
        trace = kineto.read(path, chunk_bytes=chunk_bytes)
        assert trace.complete, trace.findings
        assert list(trace.host["name"]) == [name] * 20


def test_a_long_tail_behind_the_events_is_found(tmp_path: Path) -> None:
    built = steps()
    expected = kineto.read(built.write(tmp_path / "a.json"))
    built.tail = {"INFO": [{"name": "x" * 50, "id": i} for i in range(300)], **built.tail}
    path = built.write(tmp_path / "b.json")
    for chunk_bytes in (100, 2000, 1 << 20):
        assert_same(kineto.read(path, chunk_bytes=chunk_bytes), expected)


def test_names_pass_as_text(tmp_path: Path) -> None:
    names = ["<img src=x onerror=alert(1)>", "k" * 5000, "层0 fwd", 'say "hi"\\n', "tab\there", "\u2028", "None", "nan"]
    t = TraceBuilder()
    for i, name in enumerate(names):
        t.kernel(name, i, 0.5)
    trace = kineto.read(t.write(tmp_path / "a.json"))
    assert list(trace.device["name"]) == names
    assert trace.complete


def test_odd_values_do_not_cost_the_event(tmp_path: Path) -> None:
    t = TraceBuilder()
    t.kernel("k", 0, 1, correlation=2**64 - 5, bytes="N/A")
    t.kernel("k", 2, 1, correlation="17", bytes=2**70)["args"]["blocks per SM"] = "inf"
    t.kernel("k", 4, 1, correlation=[1], dtype={"a": 1})["args"]["stream"] = "stream 9"
    t.events += [None, {}, 7, "text", [], {"ph": "X"}, {"ph": "X", "cat": ["kernel"], "name": "k", "ts": 6, "dur": 1}]
    t.op("aten::mm", 0, 1, **{"Comms Id": 10159970886766084423})["args"]["Sequence number"] = 10159970886766084423
    t.kernel("k", 8, 1)["args"] = None
    t.kernel("k", 10, 1)["name"] = None
    t.head |= {"distributedInfo": [1], "deviceProperties": "?"}
    trace = kineto.read(t.write(tmp_path / "a.json"))
    assert list(trace.device["correlation"]) == [-5, 17, -1, -1, -1]
    assert list(trace.device["stream"]) == [7, 7, 9, 7, 7]
    assert list(trace.device["name"]) == ["k", "k", "k", "k", ""]
    assert list(trace.device["bytes"]) == [-1] * 5
    assert trace.host.loc[trace.host["name"] == "aten::mm", "seq"].item() == 10159970886766084423 - 2**64
    assert {"ignored_entries", "missing_timestamp"} <= codes(trace)
    assert trace.complete


def test_only_modules_of_the_python_tracer_are_kept(tmp_path: Path) -> None:
    t = TraceBuilder()
    t.module("nn.Module: Linear_0", 0, 10)
    for i in range(5):
        t.module(f"train.py({i}): step", 0, 10)
    t.op("aten::mm", 1, 2)
    trace = kineto.read(t.write(tmp_path / "a.json"))
    assert list(trace.host["kind"]) == ["module", "cpu_op"]
    assert next(f.count for f in trace.findings if f.code == "python_frames_dropped") == 5


def test_communication_scopes_have_their_own_kind(tmp_path: Path) -> None:
    t = TraceBuilder()
    for name in ("nccl:all_reduce", "gloo:send", "ncclish", "ProfilerStep#1"):
        t.annotation(name, 0, 10)
    trace = kineto.read(t.write(tmp_path / "a.json"))
    assert list(trace.host["kind"]) == ["async", "async", "annotation", "annotation"]


def test_an_open_scope_is_marked(tmp_path: Path) -> None:
    t = TraceBuilder()
    t.annotation("a", 0, 10, finished=False)
    t.annotation("b", 0, 10)
    assert list(kineto.read(t.write(tmp_path / "a.json")).host["finished"]) == [False, True]


def test_memory_events(tmp_path: Path) -> None:
    t = TraceBuilder()
    t.memory(1, 512, 1024, 2048)
    t.memory(2, -512, 512, 2048)
    memory = kineto.read(t.write(tmp_path / "a.json")).memory
    assert list(memory["bytes"]) == [512, -512]
    assert list(memory["allocated_bytes"]) == [1024, 512]
    assert list(memory["t_ns"]) == [ZERO_NS + 1000, ZERO_NS + 2000]
    assert set(memory["reserved_bytes"]) == {2048}


def test_the_last_of_equal_keys_holds(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":1,"dur":1,"dur":2,'
                    '"args":{"correlation":5,"correlation":101,"stream":7}}]')
    device = kineto.read(path).device
    assert device["correlation"].item() == 101
    assert (device["end_ns"] - device["start_ns"]).item() == 2000


def test_nothing_of_the_environment_is_kept(tmp_path: Path) -> None:
    t = steps()
    t.head["PT_PROFILER_JOB_NAME"] = "secret"
    t.tail |= {"env": {"KEY": "secret"}, "metadata": {"env": {"TOKEN": "secret"}}, "hip_runtime_version": 7}
    meta = kineto.read(t.write(tmp_path / "a.json")).meta
    assert "secret" not in json.dumps(meta)
    assert meta["hip_runtime_version"] == 7


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    seen: list[float] = []
    kineto.read(steps(n=50).write(tmp_path / "a.json"), lambda share, text: seen.append(share), chunk_bytes=1000)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


# what the records say about the capture


def check(t: TraceBuilder, path: Path) -> tuple[Trace, dict[str, int]]:
    trace = kineto.read(t.write(path / "a.json"))
    return trace, {f.code: f.count for f in trace.findings}


def test_a_corrupt_duration_is_clipped_and_stays_visible(tmp_path: Path) -> None:
    t = TraceBuilder()
    for i in range(10):
        t.launch("fmha_bwd", 100 * i, 100 * i + 50, 90)
    t.events[2 + 4 * 4]["dur"] = "@1600000.000@"
    trace, found = check(t, tmp_path)
    row = trace.device.iloc[4]
    assert (row["end_ns"] - row["start_ns"], row["raw_end_ns"] - row["start_ns"]) == (100_000, 1_600_000_000)
    assert found["kernel_overruns_successor"] == 1
    assert "fmha_bwd" in next(f.message for f in trace.findings if f.code == "kernel_overruns_successor")


@pytest.mark.parametrize("overlap", [3.7, 50.0])
def test_small_overlaps_of_one_stream_are_legal(tmp_path: Path, overlap: float) -> None:
    t = TraceBuilder()
    for i in range(10):
        t.launch("pdl", 100 * i, 100 * i + 50, 100 + overlap)
    trace, found = check(t, tmp_path)
    assert set(trace.device["end_ns"] - trace.device["start_ns"]) == {round((100 + overlap) * 1000)}
    assert "kernel_overruns_successor" not in found


def test_communication_that_shares_a_queue_is_left_alone(tmp_path: Path) -> None:
    t = TraceBuilder("rocm")
    t.collective("ncclDevKernel_Generic_1", 0, 10, 5000, stream=0)
    for i in range(10):
        t.launch("gemm", 100 * i + 50, 600 * i + 100, 500, stream=0)
    trace, found = check(t, tmp_path)
    assert (trace.device["end_ns"] == trace.device["raw_end_ns"]).all()
    assert "kernel_overruns_successor" not in found


def test_kernels_of_one_graph_launch_are_left_alone(tmp_path: Path) -> None:
    t = TraceBuilder()
    t.runtime("cudaGraphLaunch", 0, 10, 5)
    t.kernel("branch_a", 50, 3000, correlation=5)
    t.kernel("branch_b", 60, 3000, correlation=5)
    trace, found = check(t, tmp_path)
    assert (trace.device["end_ns"] == trace.device["raw_end_ns"]).all()
    assert not {"kernel_overruns_successor", "duplicate_correlation"} & set(found)


def test_impossible_durations_add_no_time(tmp_path: Path) -> None:
    t = TraceBuilder()
    t.kernel("negative", 10, -5)
    t.kernel("missing", 30, None)
    t.kernel("fine", 50, 5)
    trace, found = check(t, tmp_path)
    assert list(trace.device["end_ns"] - trace.device["start_ns"]) == [0, 0, 5000]
    assert (found["negative_duration"], found["missing_duration"]) == (1, 1)


def test_kernels_without_time_are_left_out(tmp_path: Path) -> None:
    t = TraceBuilder()
    t.kernel("fine", 50, 5)
    for _ in range(3):
        t.kernel("range", 0, 0)
    trace, found = check(t, tmp_path)
    assert list(trace.device["name"]) == ["fine"]
    assert found["kernel_without_time"] == 3


def test_launches_without_kernels(tmp_path: Path) -> None:
    t = steps(n=1)
    for i in range(2):
        t.runtime("cudaLaunchKernel", 900 + i, 1, 900 + i)
    t.runtime("cudaDeviceSynchronize", 950, 1, 990)
    assert check(t, tmp_path)[1]["launch_without_kernel"] == 2


def test_lost_communication_is_named(tmp_path: Path) -> None:
    t = TraceBuilder(world_size=4)
    t.launch("gemm", 0, 10, 5)
    t.runtime("cudaLaunchKernel", 20, 1, 900)
    trace, found = check(t, tmp_path)
    assert found["no_communication"] == 1
    assert "although 1 launches" in next(f.message for f in trace.findings if f.code == "no_communication")


def test_no_gpu_and_no_cpu(tmp_path: Path) -> None:
    t = TraceBuilder()
    t.op("aten::mm", 0, 1)
    t.runtime("hipLaunchKernel", 2, 1, 5)
    assert check(t, tmp_path)[1] == {"no_gpu_events": 1}
    t = TraceBuilder()
    t.kernel("k", 0, 1)
    assert "no_cpu_events" in check(t, tmp_path)[1]


def test_clock_skew_is_counted(tmp_path: Path) -> None:
    t = TraceBuilder()
    for i in range(10):
        t.launch("k", 100 * i, 100 * i + (-3 if i < 4 else 20), 5)
    assert check(t, tmp_path)[1] == {"kernel_before_launch": 4}


def test_a_shared_correlation_that_is_no_graph(tmp_path: Path) -> None:
    t = TraceBuilder()
    correlation = t.launch("a", 0, 10, 5)
    t.kernel("b", 20, 5, correlation=correlation)
    t.kernel("tail of the step before", 1, 5)
    assert check(t, tmp_path)[1] == {"duplicate_correlation": 1, "launched_before_capture": 1}
