"""The augmented trace against its source, against the tables and against the tools that read it."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import tb_chopper
from tb_chopper.backend import logdir, schema
from tb_chopper.backend.alignment.telemetry import RunTelemetry
from tb_chopper.backend.errors import UnreadableFile, Unwritable
from tb_chopper.backend.export import chrome
from tb_chopper.backend.run import Run
from tb_chopper.backend.simulate import Options, simulate
from tests.builders import ZERO_NS, TraceBuilder
from tests.contract.chrome_json import is_ours, load, multiset

REAL = [
    "ddp4_mi300x/rank0.pt.trace.json.gz", "resnet50_v100/worker0.1623143566756.pt.trace.json.gz",
    "sglang_decode_graph_mi300x/rank0.pt.trace.json.gz", "nccl_a100/rank0.pt.trace.json.gz",
    "minitoy_mi250/worker0.pt.trace.json.gz", "dlrm8_v100/rank3.pt.trace.json.gz",
]
NAMES = [
    'a "quoted" name', "back\\slash \\n", "tab\tline\nfeed\x01", "核 naïve 🚀", "<script>alert('x')</script> & co",
    "%s %d {}",
    "k" * 5000,
]


def augment(source: Path, out: Path,
            samples: pd.DataFrame | None = None) -> tuple[Run, chrome.Exported, dict[str, Any]]:
    run = tb_chopper.open_run(source)
    if samples is not None:
        vars(run)["telemetry"] = RunTelemetry(samples, *([pd.DataFrame()] * 3))
    done = chrome.export(run, run.captures[0], out)
    return run, done, load(out)


def training(**options: Any) -> TraceBuilder:
    t = TraceBuilder("cuda", world_size=2, **options)
    for i in range(3):
        t.training_step(i, 1000 * i)
    t.kernel("launched_before", 5, 10)
    return t


def sampled(n: int = 5) -> pd.DataFrame:
    """1 kHz: clock 1000, 1100, ... MHz."""
    return schema.conform(pd.DataFrame({
        "t_ns": ZERO_NS + np.arange(n) * 1_000_000, "gpu": 0, "clock_mhz": 1000.0 + 100 * np.arange(n),
        "memory_clock_mhz": 900.0, "power_w": 500.5, "temperature_c": 60.0}), schema.TELEMETRY)


@pytest.mark.parametrize("name", REAL)
def test_every_event_of_a_real_trace_is_there_unchanged(shared: Path, tmp_path: Path, name: str) -> None:
    source = shared / "traces" / name
    run, done, out = augment(source, tmp_path / "out.json.gz")
    before, after = multiset(load(source)["traceEvents"]), multiset(out["traceEvents"])
    assert not before - after
    added = [e for e in out["traceEvents"] if is_ours(e)]
    assert after - before == multiset(added)
    assert (done.n_events, done.n_added) == (sum(before.values()), len(added))
    assert done.n_kernels == len(run.kernels)
    head = {k: v for k, v in out.items() if k not in ("traceEvents", chrome.KEY)}
    assert head == {k: v for k, v in load(source).items() if k != "traceEvents"}


@pytest.mark.parametrize("name", REAL)
def test_kernels_carry_their_own_rows(shared: Path, tmp_path: Path, name: str) -> None:
    run, _, out = augment(shared / "traces" / name, tmp_path / "out.json.gz")
    base_us = float(out.get("baseTimeNanoseconds", 0)) / 1000
    # Rows by what names a kernel in both, not by their order.
    rows: dict[Any, list[Any]] = {}
    for k in run.kernels.itertuples():
        rows.setdefault((k.name, k.correlation, k.stream, k.device), []).append(k)
    n = 0
    for e in out["traceEvents"]:
        if not isinstance(e, dict) or "chopper" not in (e.get("args") or {}):
            continue
        args, ours = e["args"], e["args"]["chopper"]
        stream = args.get("stream", str(e["tid"]).rsplit(" ", 1)[-1])
        near = rows[e["name"], int(args.get("correlation", -1)), int(stream), str(args.get("device", e["pid"]))]
        row = min(near, key=lambda k: abs(k.start_ns / 1000 - base_us - float(e["ts"])))
        assert abs(row.start_ns / 1000 - base_us - float(e["ts"])) < 1
        assert ours["operation"] == row.operation and ours["kind"] == row.kind
        assert ours.get("step") == (None if pd.isna(row.step) else row.step)
        assert ours.get("layer") == (None if pd.isna(row.layer) else row.layer)
        assert ours["prep_us"] == row.prep_ns / 1000 and ours["call_us"] == row.call_ns / 1000
        length = row.end_ns - row.start_ns
        assert ours["overlap_share"] == pytest.approx(row.overlap_ns / length if length else 0, abs=1e-4)
        n += 1
    assert n == len(run.kernels) > 0


def counter(out: dict[str, Any], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Times (µs) and values of a counter track."""
    events = [e for e in out["traceEvents"] if e.get("ph") == "C" and e["name"] == name]
    return np.array([e["ts"] for e in events]), np.array([next(iter(e["args"].values())) for e in events], float)


def test_exposed_communication_adds_up_to_the_timeline(shared: Path, tmp_path: Path) -> None:
    run, _, out = augment(shared / "traces/ddp4_mi300x/rank0.pt.trace.json.gz", tmp_path / "out.json.gz")
    t, exposed = counter(out, "Exposed communication")
    assert set(exposed) == {0.0, 1.0}
    expected_us = run.timeline()["exposed_communication_us"].iloc[0]
    assert (exposed[:-1] * np.diff(t)).sum() == pytest.approx(expected_us, rel=1e-6) and expected_us > 0


def test_activity_adds_up_to_the_blocks_of_the_kernels(shared: Path, tmp_path: Path) -> None:
    source = shared / "traces/nccl_a100/rank0.pt.trace.json.gz"
    _, _, out = augment(source, tmp_path / "out.json.gz")
    t, active = counter(out, "SM/CU activity (estimated)")
    # Independently: sampled at many moments, from the source's own blocks per SM.
    kernels = [e for e in load(source)["traceEvents"] if e.get("cat") == "kernel"]
    start, dur, load_ = (np.array(c, float) for c in zip(
        *((e["ts"], e["dur"], e["args"]["blocks per SM"]) for e in kernels), strict=True))
    moments = start + 0.4 * dur
    expected = [100 * min(1, load_[(start <= at) & (start + dur > at)].sum()) for at in moments[::7]]
    found = active[np.searchsorted(t, moments[::7], side="right") - 1]
    assert found == pytest.approx(np.array(expected), abs=0.01) and max(expected) > 50


def test_queue_length_is_launched_minus_started(shared: Path, tmp_path: Path) -> None:
    source = shared / "traces/ddp4_mi300x/rank0.pt.trace.json.gz"
    _, _, out = augment(source, tmp_path / "out.json.gz")
    events = load(source)["traceEvents"]
    launch = {e["args"]["correlation"]: e["ts"] for e in events
              if e.get("cat") == "cuda_runtime" and "correlation" in e["args"]}
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    streams = {e["args"]["stream"] for e in kernels if e["args"]["correlation"] in launch}
    for stream in streams:
        pairs = np.array([(launch[e["args"]["correlation"]], e["ts"]) for e in kernels
                          if e["args"]["stream"] == stream and e["args"]["correlation"] in launch])
        t, queued = counter(out, f"Queue length, stream {stream}")
        for at in np.linspace(pairs.min(), pairs.max(), 50):
            waiting = ((pairs[:, 0] <= at) & (pairs[:, 1] > at)).sum()
            i = np.searchsorted(t, at, side="right") - 1
            assert waiting == (queued[i] if i >= 0 else 0)
        assert queued[-1] == 0


def test_samples_become_counters_and_the_clock_of_kernels(tmp_path: Path) -> None:
    source = training().write(tmp_path / "rank0.pt.trace.json")
    _, _, out = augment(source, tmp_path / "out.json", sampled())
    t, clock = counter(out, "Engine clock")
    assert list(t) == [0, 1000, 2000, 3000, 4000] and list(clock) == [1000, 1100, 1200, 1300, 1400]
    assert counter(out, "Power")[1][0] == 500.5 and counter(out, "Temperature")[1][0] == 60
    places = [e["args"]["chopper"] for e in out["traceEvents"] if "chopper" in e.get("args", {})]
    assert {p["clock_source"] for p in places} == {"sampled"}
    # A kernel shorter than the samples are apart has the mean of the stretch around it: 1050, 1150, 1250.
    first = [e["args"]["chopper"]["clock_mhz"] for e in out["traceEvents"] if e["name"] == "fused_adamw"]
    assert first == [1050, 1150, 1250]


def test_kernels_carry_the_counters_of_their_dispatch(tmp_path: Path) -> None:
    (folder,) = simulate(tmp_path / "sim", Options(preset="tiny"))
    run = tb_chopper.open_run(folder)
    chrome.export(run, run.captures[0], tmp_path / "out.json")
    truth = pd.read_parquet(folder / "truth" / "kernels.parquet")
    planted = truth[(truth["rank"] == run.captures[0].rank) & (truth["flop_performed"] > 0)]
    flop = dict(zip(planted["correlation"], planted["flop_performed"], strict=True))
    found = {e["args"]["correlation"]: e["args"]["chopper"]["counters"]["SQ_INSTS_VALU_MFMA_MOPS_BF16"] * 512
             for e in load(tmp_path / "out.json")["traceEvents"]
             if e.get("args", {}).get("chopper", {}).get("counters")}
    both = found.keys() & flop.keys()
    assert len(both) > 0.9 * len(flop) > 0
    assert [found[c] for c in both] == pytest.approx([flop[c] for c in both], rel=0.01)
    assert all(value == 0 for c, value in found.items() if c not in flop)


def test_spans_of_steps_phases_and_layers_nest_on_threads_of_their_own(tmp_path: Path) -> None:
    source = training().write(tmp_path / "rank0.pt.trace.json")
    _, _, out = augment(source, tmp_path / "out.json")
    names = {e["tid"]: e["args"]["name"] for e in out["traceEvents"]
             if e["name"] == "thread_name" and is_ours(e)}
    spans = [e for e in out["traceEvents"] if e["ph"] == "X" and is_ours(e)]
    assert {e["pid"] for e in spans} == {0} and not {e["tid"] for e in spans} & {7, 20}
    steps = [e for e in spans if names[e["tid"]] == "chopper: Step"]
    assert [e["name"] for e in steps] == ["step 0", "step 1", "step 2"]
    phases = [(e["name"], e["args"].get("step"), e["ts"], e["dur"])
              for e in spans if names[e["tid"]] == "chopper: Phase"]
    # By hand, from training_step: forward runs from the first gemm_fwd to the end of the second, and so on.
    assert ("forward", 1, 1070.0, 95.0) in phases and ("optimizer", 1, 1760.0, 60.25) in phases
    assert [p[:2] for p in phases if p[1] == 1] == [("forward", 1), ("backward", 1), ("optimizer", 1)]
    for tid in names:
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == tid)
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(own))


@pytest.mark.parametrize("layout", ["indented", "compact", "pretty"])
@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("name", ["out.json", "out.json.gz"])
def test_every_layout_and_any_name(tmp_path: Path, layout: Any, as_list: bool, name: str) -> None:
    t = training()
    for i, text in enumerate(NAMES):
        t.launch(text, 3000 + 20 * i, 3005 + 20 * i, 7)
        t.op(text, 3000 + 20 * i, 10)
        t.annotation(f"mark {text}", 3200 + 20 * i, 10)
    source = t.write(tmp_path / "rank0.pt.trace.json", layout, as_list)
    _, done, out = augment(source, tmp_path / name)
    before, after = multiset(load(source)["traceEvents"]), multiset(out["traceEvents"])
    assert not before - after and sum((after - before).values()) == done.n_added
    kernels = {e["name"] for e in out["traceEvents"] if "chopper" in e.get("args", {})}
    assert set(NAMES) <= kernels


def test_kernels_that_start_together_keep_their_order(tmp_path: Path) -> None:
    t = TraceBuilder()
    for i in range(20):
        t.op(f"op{i}", 10 * i, 9)
        t.launch(f"kernel{i}", 10 * i + 1, 500, 5, stream=i % 3)
    _, _, out = augment(t.write(tmp_path / "a.json"), tmp_path / "out.json")
    found = {e["name"]: e["args"]["chopper"]["operation"] for e in out["traceEvents"] if "chopper" in e.get("args", {})}
    assert found == {f"kernel{i}": f"op{i}" for i in range(20)}


def test_events_without_place_or_args_pass(tmp_path: Path) -> None:
    t = training()
    t.events += [None, {}, {"ph": "X", "cat": "cpu_op", "name": '"kernel"', "pid": 1, "tid": 1, "ts": 1, "dur": 1},
                 {"ph": "X", "cat": "kernel", "name": "no args", "pid": 0, "tid": 7, "ts": 4000.5, "dur": 2},
                 {"ph": "X", "cat": "kernel", "name": "null args", "pid": 0, "tid": 7, "ts": 4010, "dur": 2,
                  "args": None},
                 {"ph": "X", "cat": "kernel", "name": "no time", "pid": 0, "tid": 7, "args": {"stream": 7}}]
    source = t.write(tmp_path / "a.json")
    _, _, out = augment(source, tmp_path / "out.json")
    assert not multiset(load(source)["traceEvents"]) - multiset(out["traceEvents"])
    assert next(e for e in out["traceEvents"] if e and e["name"] == "no args")["args"]["chopper"]["kind"] == "compute"


def test_damage_costs_only_what_is_damaged(tmp_path: Path) -> None:
    whole = training().text("indented")
    at = whole.rindex('"fused_adamw"')
    source = tmp_path / "cut.json"
    source.write_text(whole[:at])
    _, done, out = augment(source, tmp_path / "out.json")
    n_whole = len(json.loads(whole[:at][: whole[:at].rindex("},") + 1] + "]}")["traceEvents"])
    assert done.n_events == n_whole > 10
    assert any("truncated" in f for f in out[chrome.KEY]["findings"]) and not out[chrome.KEY]["complete"]


@pytest.mark.parametrize("family", ["malformed", "cases"])
def test_every_malformed_file_gives_valid_json_or_one_line(shared: Path, tmp_path: Path, family: str) -> None:
    sources = sorted(p for p in (shared / family).rglob("*.json*") if p.is_file() and ".chopper" not in p.name)
    written = 0
    for source in sources:
        try:
            run = tb_chopper.open_run(source)
            captures = run.captures
        except tb_chopper.backend.errors.ChopperError:
            continue
        for capture in captures:
            done = chrome.export(run, capture, tmp_path / "out.json")
            events = load(tmp_path / "out.json")["traceEvents"]
            assert len(events) == done.n_events + done.n_added
            on_gpu = run.kernels["activity"] != "cpu_op"
            assert done.n_kernels == on_gpu.sum()
            written += 1
    assert written > 10


def test_nothing_half_written(tmp_path: Path) -> None:
    source = training().write(tmp_path / "rank0.pt.trace.json")
    run = tb_chopper.open_run(source)
    before = source.read_bytes()
    with pytest.raises(Unwritable, match="source"):
        chrome.export(run, run.captures[0], source)
    assert source.read_bytes() == before

    def fail(share: float, text: str) -> None:
        raise KeyboardInterrupt

    (tmp_path / "out").mkdir()
    with pytest.raises(KeyboardInterrupt):
        chrome.export(run, run.captures[0], tmp_path / "out/x.json", progress=fail)
    assert os.listdir(tmp_path / "out") == []
    (tmp_path / "file").write_text("")
    with pytest.raises(Unwritable, match="cannot be written"):
        chrome.export(run, run.captures[0], tmp_path / "file" / "x.json")


def test_an_augmented_trace_reads_the_same_and_is_not_augmented_again(tmp_path: Path) -> None:
    source = training().write(tmp_path / "rank0.pt.trace.json")
    run, _, _ = augment(source, tmp_path / "out.json.gz")
    again = tb_chopper.open_run(tmp_path / "out.json.gz")
    columns = ["name", "start_ns", "end_ns", "operation", "phase", "step", "overlap_ns", "prep_ns"]
    pd.testing.assert_frame_equal(run.kernels[columns].astype(str), again.kernels[columns].astype(str))
    with pytest.raises(UnreadableFile, match="augmented trace already"):
        chrome.export(again, again.captures[0], tmp_path / "twice.json.gz")


@pytest.mark.parametrize("name", ["w_1.170.pt.trace.json.gz", "rank3_trace.json.gz", "x_trace.json.gz",
                                  "libkineto_activities_1.json", "pytorch_trace_gpu0.json.gz", "any.json"])
def test_no_scan_takes_the_augmented_trace_for_another_one(tmp_path: Path, name: str) -> None:
    training().write(tmp_path / chrome.file_name(name))
    assert logdir.find_runs(tmp_path) == []


# -- other tools ------------------------------------------------------------------------------------------------------


def test_the_contract_with_other_viewers(shared: Path, tmp_path: Path) -> None:
    source = shared / "traces/ddp4_mi300x/rank0.pt.trace.json.gz"
    _, _, out = augment(source, tmp_path / "out.json")
    assert all("name" in e for e in out["traceEvents"])
    assert all(isinstance(e["cat"], str) for e in out["traceEvents"] if e["ph"] == "X")
    text = (tmp_path / "out.json").read_text()
    assert text.index(f'"{chrome.KEY}"') < text.index('"traceEvents"')
    behind = list(out)[list(out).index("traceEvents") + 1 :]
    assert set(behind) <= set(load(source))


def overview(path: Path, cache: Path) -> dict[str, Any]:
    """What torch-tb-profiler makes of a trace."""
    from torch_tb_profiler.io import Cache
    from torch_tb_profiler.profiler.data import RunProfileData
    from torch_tb_profiler.profiler.run_generator import RunGenerator

    data = RunProfileData.parse("w", None, str(path), str(cache))
    data.process()
    profile = RunGenerator("w", None, data).generate_run_profile()
    assert Cache
    return {"overview": profile.overview, "kernels": profile.kernel_table, "operators": profile.operation_table_by_name}


@pytest.mark.parametrize("name", REAL[4:])
def test_torch_tb_profiler_sees_the_same(shared: Path, tmp_path: Path, name: str) -> None:
    pytest.importorskip("torch_tb_profiler")
    source = shared / "traces" / name
    augment(source, tmp_path / "out.pt.trace.json.gz")
    assert overview(tmp_path / "out.pt.trace.json.gz", tmp_path) == overview(source, tmp_path)


@pytest.mark.parametrize("name", REAL[2:])
def test_torchs_validator_finds_nothing_new(shared: Path, tmp_path: Path, name: str) -> None:
    validator = pytest.importorskip("torch.profiler._trace_validator")
    source = shared / "traces" / name
    augment(source, tmp_path / "out.json.gz")
    _, before = validator.validate_trace(str(source))
    _, after = validator.validate_trace(str(tmp_path / "out.json.gz"))
    assert list(map(str, after)) == list(map(str, before))


def test_hta_sees_the_same(shared: Path, tmp_path: Path) -> None:
    analysis = pytest.importorskip("hta.trace_analysis")
    source = shared / "traces/resnet18_ddp2_v100"
    breakdowns = []
    for rank in (0, 1):
        augment(source / f"worker{rank}.pt.trace.json.gz", tmp_path / f"{rank}.json.gz")
    for files in ({r: str(source / f"worker{r}.pt.trace.json.gz") for r in (0, 1)},
                  {r: str(tmp_path / f"{r}.json.gz") for r in (0, 1)}):
        found = analysis.TraceAnalysis(trace_files=files, trace_dir=str(tmp_path))
        breakdowns.append((found.get_temporal_breakdown(visualize=False), found.get_comm_comp_overlap(visualize=False)))
    for one, other in zip(*breakdowns, strict=True):
        pd.testing.assert_frame_equal(one, other)
