"""The overhead breakdown of simulated nodes, from their files alone, against what was planted.

The aggregate of an operation is the ratio of medians over its instances, on either side; its contention is what the
median of the time holds beyond work and clock (docs/metrics.md).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tb_chopper.backend.run import Run, open_run
from tb_chopper.backend.simulate import Options, simulate

FACTORS = ["ovr_inst", "ovr_util", "ovr_overlap", "ovr_freq"]
OPERATION = ["operation", "phase"]
INSTANCE = ["gpu", "step", "layer", *OPERATION]
PEAK_FLOP_PER_NS, PEAK_GHZ = 1307.4432e3, 2.1
GEMMS = ("qkv_ip", "attn_op", "mlp_gp", "mlp_up", "mlp_dp", "lp")
MATRIX = [(operation, phase) for operation in (*GEMMS, "attn_fa") for phase in ("forward", "backward")]


def truth_of(directory: Path) -> pd.DataFrame:
    return pd.read_parquet(directory / "truth/kernels.parquet").rename(columns={"rank": "gpu"})


def planted_instances(directory: Path) -> pd.DataFrame:
    """Sums over the kernels of each instance of an operation with matrix work: what it should take and what it took."""
    truth = truth_of(directory)
    rows = truth[truth["launched"] & (truth["kind"] == "compute")]
    rows = rows.assign(act=rows["end_ns"] - rows["start_ns"])
    rows = rows.assign(clocked=rows["clock_mhz"] * rows["act"])
    sums = rows.groupby(INSTANCE, observed=True).agg(
        start=("start_ns", "min"), end=("end_ns", "max"), act=("act", "sum"), work=("work_cycles", "sum"),
        clocked=("clocked", "sum"), flop=("flop", "sum"), performed=("flop_performed", "sum")).reset_index()
    sums = sums[sums["flop"] > 0]
    return sums.assign(freq=1000 * PEAK_GHZ * sums["act"] / sums["clocked"], peak=sums["work"] / PEAK_GHZ)


def planted(instances: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    median = instances.groupby(by, observed=True)[["flop", "performed", "peak", "freq", "act"]].median()
    thr, inst = median["flop"] / PEAK_FLOP_PER_NS, median["performed"] / median["flop"]
    return pd.DataFrame({
        "thr": thr, "inst": inst, "util": median["peak"] / thr / inst, "peak": median["peak"], "freq": median["freq"],
        "overlap": median["act"] / median["peak"] / median["freq"], "act": median["act"]})


def recovered(run: Run, by: list[str], method: str = "clock") -> pd.DataFrame:
    return run.overhead_breakdown(by, overlap_method=method).set_index(by)


def compare(table: pd.DataFrame, right: pd.DataFrame) -> None:
    """D_thr and inst exactly, util and D_peak within 1 %, clock and contention within 2 %, the product within 0.1 %."""
    table = table.loc[right.index]
    assert (table["source"] == "measured").all()
    for mine, true, tolerance in (("ovr_inst", "inst", 1e-9), ("ovr_util", "util", 0.01), ("ovr_freq", "freq", 0.02),
                                  ("ovr_overlap", "overlap", 0.02)):
        np.testing.assert_allclose(table[mine], right[true], rtol=tolerance, err_msg=mine)
    for mine, true, tolerance in (("d_thr_us", "thr", 1e-9), ("d_peak_us", "peak", 0.01), ("d_act_us", "act", 1e-9)):
        np.testing.assert_allclose(1000 * table[mine], right[true], rtol=tolerance, err_msg=mine)
    product = table["d_thr_us"] * table[FACTORS].prod(axis=1)
    np.testing.assert_allclose(product, table["d_act_us"], rtol=1e-3)


# ---- a node at real sizes: clocks sampled every 10 ms, kernels of 0.1 to 20 ms


@pytest.fixture(scope="module")
def node(simulated_node: dict[int, Path]) -> dict[int, tuple[Run, Path]]:
    return {version: (open_run(path), path) for version, path in simulated_node.items()}


@pytest.mark.parametrize("version", [1, 2])
def test_every_planted_factor_of_every_operation(node, version):
    run, path = node[version]
    right = planted(planted_instances(path), OPERATION)
    assert sorted(right.index) == sorted(MATRIX)
    compare(recovered(run, OPERATION), right)
    assert run.counter_alignment.matched_share > 0.99 and run.counter_alignment.pass_spread < 0.02
    assert (recovered(run, OPERATION, "auto").loc[MATRIX, "overlap_method"] == "clock").all()


def by_percentile(instances: pd.DataFrame, truth: pd.DataFrame) -> float:
    """D_50% / D_0% of one GPU: instances in order of the share of their time that communication covers."""
    comm = truth.loc[truth["kind"] == "communication", ["start_ns", "end_ns"]].sort_values("start_ns").to_numpy()
    rows = []
    for start, end in instances[["start", "end"]].to_numpy():
        covered, reach = 0, start
        for s, e in comm[(comm[:, 0] < end) & (comm[:, 1] > start)]:
            s, e = max(s, reach), min(e, end)
            covered, reach = covered + max(0, e - s), max(reach, e)
        rows.append((covered / (end - start), start, end - start))
    rows.sort()
    n = len(rows)
    middle = min(range(n), key=lambda i: (abs(100 * (i + 1) / n - 50), i))
    return 1.0 if rows[middle][0] == 0 else max(1.0, rows[middle][2] / rows[0][2])


@pytest.mark.parametrize("version", [1, 2])
def test_the_percentile_value_as_defined(node, version):
    run, path = node[version]
    instances, truth = planted_instances(path), truth_of(path)
    right = {(gpu, *key): by_percentile(rows, truth[truth["gpu"] == gpu])
             for (gpu, *key), rows in instances.groupby(["gpu", *OPERATION], observed=True)}
    table = recovered(run, ["gpu", *OPERATION], "percentile")
    for key, expected in right.items():
        assert table.loc[key, "ovr_overlap"] == pytest.approx(expected, rel=1e-12), key
    assert sum(v > 1 for v in right.values()) > 20
    whole = recovered(run, OPERATION, "percentile")["ovr_overlap"]
    for key in MATRIX:
        assert whole[key] == pytest.approx(np.median([right[(gpu, *key)] for gpu in range(8)]), rel=1e-12)


# ---- the published finding


def increments(node, version: int, phase: str) -> pd.DataFrame:
    """Time in us that each factor adds to the products, one after the other."""
    table = recovered(node[version][0], OPERATION).xs(phase, level="phase").loc[list(GEMMS)]
    after = table[["d_thr_us"]].join(table[FACTORS]).cumprod(axis=1)
    return after.diff(axis=1).assign(d_thr_us=table["d_thr_us"])


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_clock_is_the_largest_overhead_of_products_and_the_largest_gain_of_fsdp2(node, phase):
    one, two = (increments(node, v, phase) for v in (1, 2))
    for parts in (one, two):
        assert (parts[FACTORS].idxmax(axis=1) == "ovr_freq").all(), parts
    assert ((one - two).idxmax(axis=1) == "ovr_freq").all()


# ---- the finest granularity, and damage: clocks sampled every 0.5 ms


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulate(tmp_path_factory.mktemp("tiny"), Options("tiny"))[0]


def test_every_instance_for_itself(tiny):
    instances = planted_instances(tiny)
    instances = instances.assign(layer="Layer" + instances["layer"].astype(str))
    own = instances[instances["layer"] != "Layer-1"]
    table = open_run(tiny).overhead_breakdown(INSTANCE, {"step": [10, 11, 12]}, "clock")
    table = table.assign(layer=table["layer"].astype(object), step=table["step"].astype("int64")).set_index(INSTANCE)
    compare(table, planted(own, INSTANCE))
    contended = own["act"] / own["peak"] / own["freq"]
    assert contended.min() < 1.01 and contended.max() > 1.29  # both alone and under communication


@pytest.mark.parametrize("options", [
    Options("tiny", drop=0.05, reorder=0.3, seed=4), Options("tiny", fsdp=1, drop=0.05, counter_steps=2, seed=2),
    Options("tiny", drop=0.05, reorder=0.3, code_object_names=True, counter_columns="6.2", jitter=0.005, seed=9),
], ids=["fsdp2", "fsdp1-two-steps", "kd-names"])
def test_missing_dispatches_are_named_and_their_kernels_get_no_others_counters(tmp_path, options):
    directory = simulate(tmp_path, options)[0]
    run, truth = open_run(directory), truth_of(directory)
    aligned, counters = run.counter_alignment, run.counters.counters
    of_kernel = truth.set_index(["gpu", "correlation"])[["operation", "phase", "layer", "flop"]].astype(object)
    dispatches = pd.read_parquet(directory / "truth/dispatches.parquet")
    real = dispatches.set_index(["rank", "pass", "dispatch_id"])["correlation"]

    pairs = aligned.pairs
    kernel = run.kernels.loc[pairs["kernel"], ["gpu", "correlation"]].to_numpy()
    row = counters.loc[pairs["row"], ["rank", "pass", "dispatch"]].astype("int64").to_numpy()
    source = real.loc[list(map(tuple, row))].to_numpy()
    in_step = (source >= 0) & run.kernels.loc[pairs["kernel"], "step"].notna().to_numpy()
    mine = of_kernel.loc[list(map(tuple, kernel[in_step]))].to_numpy()
    theirs = of_kernel.loc[list(zip(row[in_step, 0], source[in_step], strict=True))].to_numpy()
    exact = (pairs["match"] == "exact").to_numpy()[in_step]
    assert (mine == theirs).all(axis=1)[exact].all()
    compute = (run.kernels.loc[pairs["kernel"], "kind"] == "compute").to_numpy()[in_step]
    assert exact[compute].mean() > 0.9
    # What stands in for a missing one does the same work, and is never called exact.
    same_work = (mine[:, [0, 1, 3]] == theirs[:, [0, 1, 3]]).all(axis=1)
    assert same_work[compute].mean() > 0.99

    names = aligned.names.set_index("name")
    steps = truth[truth["launched"] & truth["kind"].isin(["compute", "communication"])]
    kept = dispatches[dispatches["correlation"] >= 0].groupby(["rank", "correlation"]).size()
    last = steps[steps["step"] == steps["step"].max()].set_index(["gpu", "correlation"])
    missing = last[kept.reindex(last.index).fillna(0).to_numpy() < 3]
    lost = set(missing["name"].astype(str)) if options.counter_steps is None else set()
    suffix = " [clone .kd]" if options.code_object_names else ""
    assert len(missing) > 20
    for name in lost:
        row_of = names[names.index.astype(str).str.startswith(name)].iloc[0] if suffix else names.loc[name]
        assert row_of["n_exact"] < row_of["n_kernels"], name

    instances = planted_instances(directory)
    right, table = planted(instances, OPERATION), recovered(run, OPERATION)
    measured = [key for key in right.index if table.loc[key, "source"] == "measured"]
    assert len(measured) >= 10
    tolerance = 1e-9 if options.jitter is None else 0.01
    np.testing.assert_allclose(table.loc[measured, "ovr_inst"], right.loc[measured, "inst"], rtol=tolerance)
    np.testing.assert_allclose(table.loc[measured, "ovr_util"], right.loc[measured, "util"], rtol=0.01)
