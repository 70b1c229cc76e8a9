"""The simulated node: what its files say must follow from the causes that were set."""

from __future__ import annotations

import gzip
import hashlib
import json
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tb_chopper.backend.errors import InvalidSelection
from tb_chopper.backend.simulate import Options, config, configs, physics, simulate, workload
from tb_chopper.backend.simulate.workload import Kernel

Event = dict[str, Any]


def events(run: Path) -> list[list[Event]]:
    """Events of each rank's trace, in order of ranks."""
    truth = json.loads((run / "truth/truth.json").read_text())
    return [json.loads(gzip.decompress((run / r["trace"]).read_bytes()))["traceEvents"] for r in truth["ranks"]]


def of_category(trace: list[Event], *categories: str) -> list[Event]:
    return [e for e in trace if e.get("cat") in categories and e["ph"] == "X"]


def ns(event: Event) -> tuple[int, int]:
    start = round(event["ts"] * 1000)
    return start, start + round(event["dur"] * 1000)


@pytest.fixture(scope="module", params=[("rocm", 2), ("cuda", 2), ("rocm", 1)], ids=lambda p: f"{p[0]}-fsdp{p[1]}")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dialect, fsdp = request.param
    return simulate(tmp_path_factory.mktemp("run"), Options(dialect=dialect, fsdp=fsdp))[0]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulate(tmp_path_factory.mktemp("plain"), Options())[0]


@pytest.fixture(scope="module")
def truth(run: Path) -> pd.DataFrame:
    return pd.read_parquet(run / "truth/kernels.parquet")


# -- physics ------------------------------------------------------------------------------------------------------


def test_a_matrix_kernel_needs_its_flops_at_the_peak_of_its_units():
    # 1307.4 TFLOP/s: 304 CUs of 2048 FLOP a clock at 2.1 GHz; half utilization takes twice as long
    kernel = Kernel("k", "gemm", flop=1e12, flop_performed=1e12, utilization=0.5)
    seconds = physics.cycles(kernel, config.MI300X) / 2.1e9
    assert seconds == pytest.approx(2 * 1e12 / 1307.4432e12, rel=1e-6)


def test_a_memory_bound_kernel_needs_its_bytes_at_the_peak_of_the_memory():
    kernel = Kernel("k", "vector", bytes=5.3248e9, utilization=0.5)
    assert physics.cycles(kernel, config.MI300X) / 2.1e9 == pytest.approx(2e-3)


def test_tiles_are_padded_to_whole_tiles():
    work = workload.build(config.preset("mi300x-llama3-8b", shape="b1s4"))
    linear = {op.operation: op.call.kernels[0] for op in work.layer if op.node == "MmBackward0"}
    assert linear["mlp_gp"].flop_performed == linear["mlp_gp"].flop == 2 * 4096 * 4096 * 14336
    # MT224x256x64: 4096 outputs make 19 tiles of 224
    assert linear["mlp_dp"].flop_performed / linear["mlp_dp"].flop == pytest.approx(19 * 224 / 4096)
    assert "_MT224x256x64_" in linear["mlp_dp"].name


def test_published_flops_of_a_layer():
    work = workload.build(config.preset("mi300x-llama3-8b", shape="b1s4"))
    flop = {op.operation: sum(k.flop for k in op.call.kernels) for op in work.layer}
    assert flop["attn_op"] == 2 * 4096 * 4096 * 4096
    assert flop["qkv_ip"] == 2 * 4096 * 4096 * (32 + 2 * 8) * 128
    fa = next(op for op in work.layer if op.operation == "attn_fa")
    assert fa.call.children[0].kernels[0].flop == 2 * 4096**2 * 128 * 32
    assert sum(k.flop for k in fa.backward[0].children[0].kernels) == 5 * 4096**2 * 128 * 32


def test_parameters_are_those_of_llama3_8b():
    assert config.LLAMA3_8B.layer_params == 218_112_000
    assert config.LLAMA3_8B.params == 8_030_261_248


def test_collectives_obey_the_ring_formula():
    eight = config.preset("mi300x-llama3-8b")
    n_bytes = 218_112_000 * 2
    expected = n_bytes * 7 / 8 / 285e9 * 1e9
    gather, reduce = (physics.transfer_ns(name, n_bytes, eight) - physics.COLLECTIVE_LATENCY_NS
                      for name in ("_allgather_base", "allreduce"))
    assert gather == pytest.approx(expected)
    assert reduce == pytest.approx(2 * expected)


@pytest.mark.parametrize("fsdp", [1, 2])
def test_the_power_cap_makes_the_clock(fsdp: int):
    """At the balance, idle + memory + allocator + activity x dynamic x (f / f_max)^3 is the cap."""
    c = replace(config.preset("mi300x-llama3-8b", fsdp=fsdp), silicon=config.Silicon((0.0,)))
    c = replace(c, fsdp=replace(c.fsdp, allocator_swing_w=0.0))
    controller = physics.PowerController(c, 0, np.random.default_rng(0))
    for _ in range(3000):
        controller.update(0.7)
    expected = 2100 * ((750 - 140 - 105 - c.fsdp.allocator_w) / (0.7 * 1500)) ** (1 / 3)
    assert controller.clock_mhz == pytest.approx(expected, rel=1e-3)
    assert controller.power_w == pytest.approx(750, rel=1e-3)


# -- the schedule ---------------------------------------------------------------------------------------------------


def test_factors_multiply_to_the_duration(truth: pd.DataFrame):
    compute = truth[truth["kind"] == "compute"]
    factors = compute[["d_thr_ns", "ovr_inst", "ovr_util", "ovr_overlap", "ovr_freq"]].prod(axis=1)
    assert (factors / (compute["end_ns"] - compute["start_ns"]) - 1).abs().max() < 1e-9
    assert (compute["ovr_inst"] >= 1).all()


def test_work_is_done_at_the_clock_and_slower_under_communication(run: Path, truth: pd.DataFrame):
    """Each kernel's cycles, added up again from its duration, its overlap and the clock."""
    contention = {k.name: k.contention for k in _all_kernels(run)}
    rows = truth[truth["kind"] == "compute"]
    c = rows["name"].map(contention).astype(float)
    length = rows["end_ns"] - rows["start_ns"]
    done = (length - rows["overlap_ns"] + rows["overlap_ns"] / (1 + c)) * rows["clock_mhz"] * 1e-3
    # the clock is known as a mean over the kernel, times are rounded to ns
    assert (done - rows["work_cycles"]).abs().max() < 5 + 0.004 * rows["work_cycles"].max()
    assert ((done - rows["work_cycles"]).abs() / rows["work_cycles"]).max() < 0.005
    assert (rows["overlap_ns"] > 0).sum() > 50  # the rule was put to use


def _all_kernels(run: Path) -> list[Kernel]:
    from tb_chopper.backend.simulate.run import programs

    options = json.loads((run / "truth/truth.json").read_text())["config"]
    chosen, = configs(Options(dialect=options["gpu"]["dialect"], fsdp=options["fsdp"]["version"]))
    return [item.kernel for program in programs(chosen) for item in program.items]


def test_streams_run_in_order_and_kernels_after_their_launch(truth: pd.DataFrame):
    for _, rows in truth.groupby(["rank", "stream"]):
        assert (rows["start_ns"].to_numpy()[1:] >= rows["end_ns"].to_numpy()[:-1]).all()
    launched = truth[truth["launched"]]
    assert (launched["start_ns"] > launched["launch_ns"]).all()


def test_a_collective_ends_together_after_its_last_rank(run: Path, truth: pd.DataFrame):
    collectives = truth[truth["kind"] == "communication"]
    assert (collectives.groupby("seq")["end_ns"].nunique() == 1).all()
    (chosen,) = configs(Options(**_kind(run)))
    for _, rows in collectives[collectives["launched"]].groupby("seq"):
        arrived = rows["start_ns"].max()
        assert rows["wait_ns"].tolist() == (arrived - rows["start_ns"]).tolist()
        name = "_reduce_scatter_base" if "post_backward" in rows["operation"].iloc[0] else "_allgather_base"
        name = "allreduce" if rows["operation"].iloc[0] == "b_ga" else name
        transfer = physics.transfer_ns(name, rows["bytes"].iloc[0], chosen)
        assert rows["end_ns"].iloc[0] - arrived == pytest.approx(transfer, abs=2)


def _kind(run: Path) -> dict[str, Any]:
    options = json.loads((run / "truth/truth.json").read_text())["config"]
    return {"dialect": options["gpu"]["dialect"], "fsdp": options["fsdp"]["version"]}


def test_a_layer_begins_after_its_parameters_are_there(truth: pd.DataFrame):
    """Forward: the first kernel of a layer's attn_n starts after the end of the layer's gathering."""
    forward = truth[(truth["phase"] == "forward") & truth["launched"]]
    gathered = forward[forward["kind"] == "communication"].set_index(["rank", "step", "layer"])["end_ns"]
    first = forward[forward["operation"] == "attn_n"].groupby(["rank", "step", "layer"])["start_ns"].min()
    assert len(first) == 12
    assert (first > gathered.reindex(first.index)).all()


def test_the_slower_gpu_is_waited_for(tmp_path: Path):
    """By the factor where the power cap limits its clock, about, and exactly where its limit does."""
    for preset, rel in (("tiny", 0.05), ("healthy", 1e-9)):
        plain = Options(preset, optimizer_every=0, layers=2, ranks=2, steps=3)
        tables = [pd.read_parquet(simulate(tmp_path / name, options)[0] / "truth/kernels.parquet")
                  for name, options in (("plain", plain), ("slow", replace(plain, slow={1: 0.5})))]
        clean, slow = (t[t["kind"] == "compute"].groupby("rank")["clock_mhz"].mean() for t in tables)
        assert slow[1] == pytest.approx(0.5 * clean[1], rel=rel)
        communication = tables[1][(tables[1]["kind"] == "communication") & tables[1]["launched"]]
        wait = communication.groupby("rank")["wait_ns"].sum()
        assert wait[0] > 20 * wait[1]


# -- the trace --------------------------------------------------------------------------------------------------------


def test_the_trace_has_the_kernels_of_the_truth(run: Path, truth: pd.DataFrame):
    for rank, trace in enumerate(events(run)):
        written = {e["args"]["correlation"]: (e["name"], *ns(e)) for e in of_category(trace, "kernel", "gpu_memcpy")}
        mine = truth[truth["rank"] == rank]
        expected = {c: (n, s, e) for c, n, s, e in zip(mine["correlation"], mine["name"], *(
            mine[t] - _base(run, rank) for t in ("start_ns", "end_ns")), strict=True)}
        assert written == expected


def _base(run: Path, rank: int) -> int:
    truth = json.loads((run / "truth/truth.json").read_text())
    return json.loads(gzip.decompress((run / truth["ranks"][rank]["trace"]).read_bytes()))["baseTimeNanoseconds"]


def test_host_events_nest(run: Path):
    for trace in events(run):
        open_until: dict[Any, list[int]] = defaultdict(list)
        host = of_category(trace, "cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
        for e in sorted(host, key=lambda e: (e["tid"], e["ts"], -e["dur"])):
            start, end = ns(e)
            stack = open_until[e["tid"]]
            while stack and stack[-1] <= start:
                stack.pop()
            assert not stack or end <= stack[-1], e
            stack.append(end)


def test_launches_point_to_kernels_and_operators(run: Path):
    for trace in events(run):
        kernels = {e["args"]["correlation"]: e for e in of_category(trace, "kernel", "gpu_memcpy")}
        calls = {e["args"]["correlation"]: e for e in of_category(trace, "cuda_runtime", "cuda_driver")}
        operators = {e["args"]["External id"]: e for e in of_category(trace, "cpu_op", "user_annotation")}
        starts = {e["id"] for e in trace if e.get("cat") == "ac2g" and e["ph"] == "s"}
        launched = [e for e in kernels.values() if "External id" in e["args"]]
        assert {e["args"]["correlation"] for e in launched} == starts
        for kernel in launched:
            call = calls[kernel["args"]["correlation"]]
            assert call["args"]["External id"] == kernel["args"]["External id"]
            operator = operators[call["args"]["External id"]]
            assert operator["tid"] == call["tid"]
            assert ns(operator)[0] <= ns(call)[0] <= ns(call)[1] <= ns(operator)[1]
        early = [e for e in kernels.values() if "External id" not in e["args"]]
        assert len(early) > 20
        assert not {e["args"]["correlation"] for e in early} & set(calls)


def test_backward_nodes_have_their_forward(run: Path):
    for trace in events(run):
        forward = {(e["tid"], e["args"]["Sequence number"]) for e in of_category(trace, "cpu_op")
                   if e["args"].get("Fwd thread id") == 0}
        nodes = [e for e in of_category(trace, "cpu_op") if e["args"].get("Fwd thread id") == 1]
        numbers = [e["args"]["Sequence number"] for e in nodes if e["name"].startswith("autograd::engine")]
        assert len(numbers) == len(set(numbers)) > 100
        assert {n for _, n in forward} >= set(numbers)
        ends = defaultdict(dict)
        for e in trace:
            if e.get("cat") == "fwdbwd":
                ends[e["id"]][e["ph"]] = e
        assert len(ends) == len(numbers)
        starts = {(e["tid"], e["ts"]) for e in of_category(trace, "cpu_op")}
        for pair in ends.values():
            assert all((e["tid"], e["ts"]) in starts for e in pair.values())
            assert pair["s"]["tid"] != pair["f"]["tid"]


def test_units_of_grids(plain: Path):
    """Threads where hipExtModuleLaunchKernel recorded them, blocks elsewhere: 2048 x 7168 outputs are 8 x 28 tiles."""
    for trace in events(plain):
        calls = {e["args"]["correlation"]: e["name"] for e in of_category(trace, "cuda_runtime")}
        operators = {e["args"]["External id"]: e for e in of_category(trace, "cpu_op")}
        seen = 0
        for e in of_category(trace, "kernel"):
            call = calls.get(e["args"]["correlation"])
            operator = operators.get(e["args"].get("External id"))
            if operator is not None and operator["args"].get("Input Dims") == [[2048, 2048], [2048, 7168]]:
                assert call == "hipExtModuleLaunchKernel"
                assert e["args"]["grid"] == [8 * 28 * 256, 1, 1]
                assert e["args"]["block"] == [256, 1, 1]
                seen += 1
        assert seen == (2 + 2) * 2 * 3  # gate and up, both gradients of down; two layers, three steps


# -- telemetry and counters -----------------------------------------------------------------------------------------


def test_energy_is_the_integral_of_power(run: Path):
    log = pd.read_csv(run / "node0.telemetry.csv")
    for _, rows in log[log["record"] == "gpu"].groupby("gpu"):
        seconds = np.diff(rows["before_ns"]) * 1e-9
        assert (np.diff(rows["energy_j"]) > 0).all()
        # power is read at an instant and swings within a sample, the counter misses nothing
        mean = (rows["energy_j"].iloc[-1] - rows["energy_j"].iloc[0]) / seconds.sum()
        assert rows["power_w"].mean() == pytest.approx(mean, rel=0.1)


def test_samples_show_the_clock_of_the_kernels(run: Path, truth: pd.DataFrame):
    log = pd.read_csv(run / "node0.telemetry.csv")
    pair = log[log["record"] == "clock"].iloc[0]
    log = log[log["record"] == "gpu"]
    offset = int(pair["realtime_ns"]) - (int(pair["before_ns"]) + int(pair["after_ns"])) // 2
    for gpu, rows in log.groupby("gpu"):
        t = (rows["before_ns"] + rows["after_ns"]).astype("int64") // 2 + offset
        kernels = truth[(truth["rank"] == gpu) & (truth["kind"] == "compute") & (truth["end_ns"] <= t.iloc[-1])]
        middle = (kernels["start_ns"] + kernels["end_ns"]) // 2
        sampled = np.interp(middle, t, rows["clock_mhz"])
        assert np.median(np.abs(sampled / kernels["clock_mhz"] - 1)) < 0.01


@pytest.mark.parametrize(("version", "columns"), [("6.2", 15), ("6.4", 19), ("7.0", 19)])
def test_counters_count_the_work(tmp_path: Path, version: str, columns: int):
    run = simulate(tmp_path, Options(counter_columns=version, counter_steps=2))[0]
    kernels = pd.read_parquet(run / "truth/kernels.parquet").set_index(["rank", "correlation"])
    dispatches = pd.read_parquet(run / "truth/dispatches.parquet")
    for number, counter, per_flop in ((2, "SQ_INSTS_VALU_MFMA_MOPS_BF16", 512), (2, "SQ_VALU_MFMA_BUSY_CYCLES", 512)):
        for rank in (0, 1):
            (path,) = run.glob(f"counters/pass_{number}/node0/r{rank}_*_counter_collection.csv")
            rows = pd.read_csv(path)
            assert len(rows.columns) == columns
            mine = dispatches[(dispatches["rank"] == rank) & (dispatches["pass"] == number)].set_index("dispatch_id")
            assert (mine["step"] == 9).sum() == 37 * number  # surplus warm-up
            rows = rows[rows["Counter_Name"] == counter].set_index("Dispatch_Id").join(mine)
            rows = rows[rows["correlation"] >= 0]
            assert sorted(rows["step"].unique()) == [11, 12]
            flop = kernels.loc[[(rank, c) for c in rows["correlation"]], "flop_performed"].to_numpy()
            assert (rows["Counter_Value"].to_numpy() * per_flop == flop).all()
            assert flop.sum() > 0


def test_cycles_are_summed_over_the_dies(plain: Path):
    run = plain
    kernels = pd.read_parquet(run / "truth/kernels.parquet").set_index(["rank", "correlation"])
    dispatches = pd.read_parquet(run / "truth/dispatches.parquet").set_index(["rank", "pass", "dispatch_id"])
    (path,) = run.glob("counters/pass_1/node0/r0_*_counter_collection.csv")
    rows = pd.read_csv(path)
    rows = rows[rows["Counter_Name"] == "GRBM_GUI_ACTIVE"]
    correlation = dispatches.loc[[(0, 1, d) for d in rows["Dispatch_Id"]], "correlation"].to_numpy()
    rows, correlation = rows[correlation >= 0], correlation[correlation >= 0]
    matched = kernels.loc[[(0, c) for c in correlation]]
    compute = (matched["kind"] == "compute").to_numpy()
    counted, expected = rows["Counter_Value"].to_numpy()[compute], 8 * matched["work_cycles"].to_numpy()[compute]
    assert np.abs(counted - expected).max() <= 0.5 + 1e-6
    # and the clock of the counter run is its own
    length = (rows["End_Timestamp"] - rows["Start_Timestamp"]).to_numpy()
    clock = rows["Counter_Value"].to_numpy() / 8 / length * 1000
    assert np.median(clock[compute]) == pytest.approx(0.96 * 2100, rel=0.01)


def test_cpu_threads(tmp_path: Path):
    run = simulate(tmp_path, Options(ranks=8, layers=1, steps=2))[0]
    log = pd.read_csv(run / "node0.telemetry.csv")
    samples = log[log["record"] == "cpu"]["cpu_pct"].str.split()
    active = samples.map(len)
    used = samples.map(lambda pairs: sum(float(p.partition(":")[2]) for p in pairs) / 100)
    assert active.median() == 8 * 3 + 1
    assert used.median() == pytest.approx(8 * 1.09 + 0.06, rel=0.05)


# -- noise and damage -------------------------------------------------------------------------------------------------


def digest(run: Path) -> dict[str, str]:
    return {p.relative_to(run).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in run.rglob("*") if p.is_file() and p.suffix != ".parquet"}


def test_same_seed_same_files(tmp_path: Path):
    first, second = (digest(simulate(tmp_path / name, Options(jitter=0.01))[0]) for name in "ab")
    other = digest(simulate(tmp_path / "c", Options(jitter=0.01, seed=1))[0])
    assert first == second
    same = {name for name, value in first.items() if value in other.values()}
    assert all(name.endswith(("agent_info.csv", ".topology.txt")) for name in same)  # the machine stays the same


def test_simulating_again_replaces_the_files(tmp_path: Path):
    (run,) = simulate(tmp_path, Options())
    before = set(digest(run))
    simulate(tmp_path, Options(seed=3))
    assert len(digest(run)) == len(before)


def test_foreign_files_are_never_removed(tmp_path: Path):
    directory = tmp_path / "simulated_tiny_b1s2_fsdp2"
    directory.mkdir()
    (directory / "precious.pt.trace.json").write_text("{}")
    with pytest.raises(InvalidSelection, match="choose another output directory"):
        simulate(tmp_path, Options())
    assert (directory / "precious.pt.trace.json").read_text() == "{}"


def test_truncate_cuts_one_trace(tmp_path: Path):
    run = simulate(tmp_path, Options(truncate=1))[0]
    good, cut = (run / r["trace"] for r in json.loads((run / "truth/truth.json").read_text())["ranks"])
    json.loads(gzip.decompress(good.read_bytes()))
    with pytest.raises(EOFError):
        gzip.decompress(cut.read_bytes())


def test_drop_and_reorder(plain: Path, tmp_path: Path):
    whole = pd.read_parquet(plain / "truth/dispatches.parquet")
    damaged = pd.read_parquet(simulate(tmp_path, Options(drop=0.1, reorder=0.5))[0] / "truth/dispatches.parquet")
    assert len(damaged) / len(whole) == pytest.approx(0.9, abs=0.03)
    order = [t.query("rank == 0 and `pass` == 1 and correlation >= 0")["correlation"] for t in (whole, damaged)]
    assert (np.diff(order[0]) > 0).all()
    assert 0 < (np.diff(order[1]) < 0).mean() < 0.3


def test_clock_skew_moves_a_host(tmp_path: Path):
    run = simulate(tmp_path, Options(hosts=2, ranks=1, clock_skew_us=250.0))[0]
    table = pd.read_parquet(run / "truth/kernels.parquet")
    ends = table[table["kind"] == "communication"].set_index(["rank", "seq"])["end_ns"]
    common = ends[0].index.intersection(ends[1].index)
    assert len(common) > 20
    assert (ends[1][common] - ends[0][common] == 250_000).all()
    assert sorted(p.name for p in run.glob("*.telemetry.csv")) == ["node0.telemetry.csv", "node1.telemetry.csv"]
    pairs = [json.loads(next(run.glob(f"node{h}_*.chopper.json")).read_text())["clocks"][0] for h in (0, 1)]
    offsets = [pair["realtime_ns"] - pair["boottime_ns"] for pair in pairs]
    assert offsets[1] - offsets[0] == 250_000


@pytest.mark.parametrize(("options", "message"), [
    (Options(preset="huge"), "no preset 'huge'"),
    (Options(shape="4x2"), "not like b2s4"),
    (Options(fsdp=3), "FSDP version 3"),
    (Options(dialect="metal"), "dialect 'metal'"),
    (Options(ranks=9), "at most 8"),
    (Options(steps=0), "steps is 0"),
    (Options(drop=1.0), "drop is 1.0"),
    (Options(truncate=2), "rank 2 does not exist"),
    (Options(counter_columns="5.0"), "no counter columns of ROCm 5.0"),
])
def test_impossible_options_say_so_in_one_line(tmp_path: Path, options: Options, message: str):
    with pytest.raises(InvalidSelection, match=message) as error:
        simulate(tmp_path, options)
    assert "\n" not in str(error.value)
    assert not any(tmp_path.iterdir())


def test_all_is_the_published_sweep():
    names = [c.run_name for c in configs(Options(preset="mi300x-llama3-8b", all=True))]
    assert len(set(names)) == 10
    assert "simulated_mi300x-llama3-8b_b2s4_fsdp1" in names


def test_runs_say_that_they_are_simulated(run: Path):
    assert run.name.startswith("simulated_")
    sidecars = [json.loads(p.read_text()) for p in run.glob("*.chopper.json")]
    assert len(sidecars) == 2
    assert all(s["simulated"] is True for s in sidecars)


def test_the_tiny_run_is_made_in_a_second(tmp_path: Path):
    simulate(tmp_path / "warm", Options())
    begin = time.process_time()
    simulate(tmp_path / "measured", Options())
    assert time.process_time() - begin < 1.0


def test_progress_reaches_the_end(tmp_path: Path):
    seen: list[float] = []
    simulate(tmp_path, Options(), lambda done, doing: seen.append(done))
    assert seen == sorted(seen)
    assert seen[0] == 0.0
    assert seen[-1] == 1.0
