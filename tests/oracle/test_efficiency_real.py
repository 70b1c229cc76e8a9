"""Efficiency, precision and fusion of real traces against values read from their files without the project's code."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import tb_chopper
from tb_chopper.backend.metrics import fusion
from tb_chopper.backend.run import Run


def opened(shared: Path, name: str) -> Run:
    return tb_chopper.open_run(shared / "traces" / name)


def events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as stream:
        data = json.load(stream)
    return data["traceEvents"] if isinstance(data, dict) else data


def device_rows(path: Path) -> pd.DataFrame:
    """Kernels of a file as written: name, start and dur in µs, blocks per SM, occupancy."""
    return pd.DataFrame([
        {"name": e["name"], "start": float(e["ts"]), "us": float(e["dur"]), "stream": e["args"].get("stream"),
         "blocks": e["args"].get("blocks per SM"), "occupancy": e["args"].get("est. achieved occupancy %")}
        for e in events(path) if e.get("cat") == "kernel"])


def test_a_busy_gpu_that_is_not_efficient(shared):
    """Published for this trace: utilization 0.235, SM efficiency 0.171, occupancy 35 %, over a window of its own."""
    row = opened(shared, "nccl_a100").efficiency().iloc[0]
    assert row["gpu_utilization"] == pytest.approx(0.235, abs=0.004)
    assert row["sm_efficiency"] == pytest.approx(0.171, abs=0.002)
    assert row["occupancy"] == pytest.approx(0.35, abs=0.01)


@pytest.mark.parametrize("name", ["vit_h100", "bert_small_h100", "timesformer_h100"])
def test_lost_time_and_occupancy_are_those_of_the_file(shared, name):
    run = opened(shared, name)
    rows = device_rows(shared / "traces" / name / "worker0.pt.trace.json.gz")
    lost = ((1 - rows["blocks"].clip(upper=1)) * rows["us"]).sum()
    row = run.efficiency(by=[]).iloc[0]
    assert row["lost_us"] == pytest.approx(lost, rel=1e-4)
    assert row["occupancy"] == pytest.approx((rows["occupancy"] * rows["us"]).sum() / rows["us"].sum() / 100, rel=1e-6)
    parts = row[["lost_us", "ideal_us", "below_us", "unknown_us"]].sum()
    assert parts == pytest.approx(rows["us"].sum(), rel=1e-6)
    # What a group lost adds up to the whole, whatever the grouping.
    for by in ("operation", "kernel", "layer", "phase", ["gpu", "operation"]):
        assert run.efficiency(by=by)["lost_us"].sum() == pytest.approx(lost, rel=1e-4)


def test_types_of_products_by_recorded_types_and_names(shared):
    """The recommender multiplies fp32, most of it on tensor cores (`s1688gemm`): tf32."""
    rows = device_rows(shared / "traces/ads_a100/rank3.pt.trace.json.gz")
    tf32 = rows.loc[rows["name"].str.contains("s1688gemm"), "us"].sum()
    plain = rows.loc[rows["name"].str.contains("sgemm_|gemv|gemmk1|epilogue::impl"), "us"].sum()
    types = opened(shared, "ads_a100").precision().set_index("dtype")["time_us"]
    assert types["tf32"] == tf32 == 66811
    assert types["fp32"] == plain == 11115


@pytest.mark.parametrize(("name", "dtype"), [
    ("vit_h100", "bf16"), ("bert_small_mi300x", "bf16"), ("megatron_tp8_a100", "fp16"), ("dlrm8_v100", "fp32"),
    ("torchrec4_v100", "fp32"), ("sglang_decode_graph_mi300x", "bf16"), ("minitoy_mi250", "fp32")])
def test_the_type_of_most_products(shared, name, dtype):
    types = opened(shared, name).precision(by=["dtype"]).set_index("dtype")["time_us"]
    assert types.idxmax() == dtype and types[dtype] / types.sum() > 0.7


def test_unfused_attention_of_timesformer(shared):
    """Between the two products of each attention stand a scale, a softmax and a copy: 24 times, in 12 layers."""
    for name, total in (("timesformer_h100", 85721.366), ("timesformer_mi300x", 53590.572)):
        run = opened(shared, name)
        rows = device_rows(shared / "traces" / name / "worker0.pt.trace.json.gz").sort_values("start")
        softmax = rows["name"].str.contains("softmax|SoftMax").to_numpy().nonzero()[0]
        assert len(softmax) == 24
        around = rows["us"].to_numpy()[[i + d for i in softmax for d in (-1, 0, 1)]].sum()
        found = run.fusion(by=["pattern", "operations"]).set_index("pattern").loc[fusion.ATTENTION]
        assert found["operations"] == "mul → _softmax → copy_" and found["n"] == 24
        assert found["saved_us"] == pytest.approx(around, rel=1e-6) == pytest.approx(total, rel=1e-6)
        layers = run.chains[run.chains["pattern"] == fusion.ATTENTION]["layer"].value_counts()
        assert len(layers) == 12 and (layers == 2).all()


def test_megatron_fuses_some_and_not_attention(shared):
    """40 layers on eight ranks: softmax between baddbmm and bmm; bias and activation in Triton; Apex' layer norm."""
    run = opened(shared, "megatron_tp8_a100")
    attention = run.fusion().set_index("pattern").loc[fusion.ATTENTION]
    assert attention["n"] == attention["n_kernels"] == 8 * 40
    rows = pd.concat([device_rows(p) for p in sorted((shared / "traces/megatron_tp8_a100").glob("*.gz"))])
    assert attention["time_us"] == rows.loc[rows["name"].str.contains("softmax"), "us"].sum()
    fused = run.fused().set_index("how")
    triton = rows[rows["name"].str.startswith("triton_")]
    assert fused.loc["torch.compile (Triton)", ["n", "time_us"]].tolist() == [len(triton), triton["us"].sum()]
    assert fused.loc["fused kernel", "time_us"] == rows.loc[rows["name"].str.contains("cuApplyLayerNorm"), "us"].sum()
    breaks = run.graph_breaks()
    assert (breaks["n_regions"] == 120).all() and (breaks["n_breaks"] == 0).all()


@pytest.mark.parametrize(("name", "n"), [("vit_h100", 12), ("vit_mi300x", 12), ("bert_small_h100", 4),
                                         ("bert_small_mi300x", 4)])
def test_fused_attention_is_recognised_and_not_proposed(shared, name, n):
    run = opened(shared, name)
    assert run.fused().set_index("how").loc["attention", "n"] == n
    assert not (run.fusion()["pattern"] == fusion.ATTENTION).any()


def test_eager_chains_of_resnet(shared):
    """ResNet-50: 16 residual sums behind a normalisation in every forward pass."""
    run = opened(shared, "resnet50_v100")
    forward = run.chains[(run.chains["phase"] == "forward") & (run.chains["pattern"] == fusion.BATCH_NORM)]
    summed = forward[forward["operations"].astype(str).str.contains("cudnn_batch_norm → add_")]
    assert (summed.groupby("step").size() <= 16).all() and (summed.groupby("step").size() >= 12).all()
    # Nothing can save more than the sums, ReLUs and their gradients take: 13.3 ms of a step, counted from the file.
    assert run.fusion(where={"phase": ["forward", "backward"]})["per_step_us"].sum() < 13_300


def test_no_saving_without_shapes(shared):
    row = opened(shared, "nccl_a100").fusion().iloc[0]
    assert row["n"] > 0 and row["time_us"] > 0 and row["saved_us"] == 0 and row["known_share"] == 0
