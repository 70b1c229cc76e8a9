"""Waits, bandwidths, roles and barriers of collectives on tables written by hand (µs)."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from tb_chopper.backend.metrics import collectives
from tb_chopper.backend.metrics.process_groups import of_description, process_groups
from tests.unit import tables

HOSTS = {0: "a", 1: "a", 2: "a", 3: "a"}


def collective(gpu: int, start: float, end: float, **columns: object) -> dict:
    return {"gpu": gpu, "start": start, "end": end, "kind": "communication", "name": "ncclDevKernel_Generic",
            "collective": "allreduce", "group": "0", "group_desc": "default_pg", "group_size": 2, "group_seq": 1,
            "dtype": "BFloat16", "in_nelems": 5_000_000, "out_nelems": 5_000_000, "step": 0, **columns}


def kernel(gpu: int, start: float, end: float, **columns: object) -> dict:
    told = dict.fromkeys(("group_size", "group_seq", "in_nelems", "out_nelems"), -1)
    return {"gpu": gpu, "start": start, "end": end, "step": 0, **told, **columns}


def arrived(rows: list[dict], groups: dict | None = None) -> pd.DataFrame:
    return collectives.arrivals(tables.kernels(rows), HOSTS, groups)[0]


TWO = [collective(0, 0, 400), collective(1, 300, 401)]


def test_wait_skew_transfer_and_bandwidth():
    row = collectives.collectives(arrived(TWO), link_bytes_per_s=200e9).iloc[0]
    assert row[["n_ranks", "size", "last_rank"]].tolist() == [2, 2, 1]
    assert row[["skew_us", "wait_us", "transfer_us"]].tolist() == [300, 300, 100]
    assert row["bytes"] == 10_000_000
    assert row["algbw_gbs"] == pytest.approx(100)
    assert row["busbw_gbs"] == pytest.approx(100)  # 2 (n − 1) / n = 1 for two ranks
    assert row["link_share"] == pytest.approx(0.5)
    assert row["source"] == "measured"
    assert not row["latency_bound"]


def test_per_gpu():
    by_gpu = collectives.collectives(arrived(TWO), by="gpu")
    assert by_gpu["wait_us"].tolist() == [300, 0]
    assert by_gpu["n_last"].tolist() == [0, 1]
    assert by_gpu["duration_us"].tolist() == [400, 101]


@pytest.mark.parametrize("name, n, factor", [
    ("allreduce", 8, 2 * 7 / 8), ("_allgather_base", 8, 7 / 8), ("_reduce_scatter_base", 8, 7 / 8),
    ("all_to_all", 8, 7 / 8), ("broadcast", 8, 1), ("reduce", 8, 1)])
def test_bus_bandwidth_by_kind(name: str, n: int, factor: float):
    rows = [{**r, "collective": name, "group_size": n} for r in TWO]
    row = collectives.instances(arrived(rows)).iloc[0]
    assert row["busbw_gbs"] / row["algbw_gbs"] == pytest.approx(factor)


def test_message_of_an_all_gather_is_what_a_rank_receives():
    rows = [{**r, "collective": "allgather", "in_nelems": 10, "out_nelems": 80} for r in TWO]
    assert collectives.instances(arrived(rows))["bytes"].tolist() == [160]
    rows = [{**r, "collective": "reduce_scatter", "in_nelems": 80, "out_nelems": 10} for r in TWO]
    assert collectives.instances(arrived(rows))["bytes"].tolist() == [160]


@pytest.mark.parametrize("dtype, size", [
    ("Float", 4), ("BFloat16", 2), ("Half", 2), ("Byte", 1), ("Long", 8), ("Float8_e4m3fn", 1), ("Mystery", np.nan)])
def test_element_sizes(dtype: str, size: float):
    assert collectives.element_bytes(dtype) == pytest.approx(size, nan_ok=True)


def test_nobody_is_last_where_all_arrive_at_once():
    row = collectives.instances(arrived([collective(0, 5, 10), collective(1, 5, 11)])).iloc[0]
    assert row["skew_us"] == 0
    assert pd.isna(row["last_rank"])


def test_a_missing_rank_makes_the_bandwidth_a_lower_bound():
    rows = [{**r, "group_size": 4} for r in TWO]
    assert collectives.instances(arrived(rows))["source"].tolist() == ["lower bound"]


def test_one_rank_alone_tells_no_wait():
    row = collectives.instances(arrived(TWO[:1])).iloc[0]
    assert row["source"] == "lower bound"
    assert row["transfer_us"] == 400
    assert np.isnan(row["wait_us"])
    assert pd.isna(row["last_rank"])
    assert arrived(TWO[:1])["is_last"].tolist() == [False]


def test_a_rank_that_comes_after_another_left_has_no_transfer_time():
    row = collectives.instances(arrived([collective(0, 0, 10), collective(1, 30, 40)])).iloc[0]
    assert row["skew_us"] == 30
    assert np.isnan(row["transfer_us"])
    assert np.isnan(row["busbw_gbs"])


def test_what_computation_hides():
    rows = [*TWO, kernel(0, 100, 350)]
    row = arrived(rows).iloc[0]
    assert row["exposed_wait_ns"] == 100_000  # 300 of waiting, 200 of them under computation
    assert row["exposed_ns"] == 150_000
    by_name = collectives.collectives(arrived(rows), by="name")
    assert by_name["exposed_share"].tolist() == [pytest.approx((150 + 101) / (400 + 101))]


def test_small_messages_are_bound_by_latency():
    rows = [{**r, "in_nelems": 1000} for r in TWO]
    each = collectives.collectives(arrived(rows), link_bytes_per_s=100e9)
    assert each["latency_bound"].tolist() == [True]
    assert collectives.collectives(arrived(rows))["latency_bound"].isna().all()
    assert collectives.collectives(arrived(rows), by="group", link_bytes_per_s=100e9)["n_latency_bound"].tolist() == [1]


def test_kernels_without_metadata_count_too():
    bare = {"collective": None, "group": None, "group_desc": None, "group_size": -1, "group_seq": -1, "dtype": None,
            "in_nelems": -1, "out_nelems": -1}
    rows = [{**r, **bare, "name": "ncclDevKernel_AllGather_RING_LL"} for r in TWO]
    rows += [{**r, **bare, "name": "cross_device_reduce_2stage", "start": r["start"] + 1000, "end": r["end"] + 1000}
             for r in TWO]
    each = collectives.instances(arrived(rows))
    assert each["name"].tolist() == ["all_gather", "all_reduce"]  # vLLM's custom all-reduce
    assert each["group"].unique().tolist() == [collectives.UNNAMED]
    assert each["wait_us"].tolist() == [300, 300]
    assert each["bytes"].isna().all()


def test_one_group_name_of_several_rank_sets():
    """Group "3" is ranks 0 and 1 on two hosts' first ranks, 2 and 3 on the others."""
    rows = [collective(g, 10 * g, 100 + 50 * (g // 2), group="3") for g in range(4)]
    groups = {0: {"3": [0, 1]}, 1: {"3": [0, 1]}, 2: {"3": [2, 3]}, 3: {"3": [2, 3]}}
    each = collectives.instances(arrived(rows, groups))
    assert each["group"].tolist() == ["3 [0, 1]", "3 [2, 3]"]
    assert each["wait_us"].tolist() == [10, 10]
    crowded, matched = collectives.arrivals(tables.kernels(rows), HOSTS)
    assert [f.code for f in collectives.findings(crowded, matched)] == ["group_name_shared"]


def test_members_of_groups_leave_out_what_is_malformed():
    told = {"pg_config": [{"pg_name": "0", "ranks": [0, 1]}, {"pg_name": "1", "ranks": "x"}, 7, {"ranks": [0]}]}
    assert collectives.members(told) == {"0": [0, 1]}
    assert collectives.members({"pg_config": "x"}) == collectives.members({}) == {}


def test_without_communication_everything_is_empty():
    none = arrived([kernel(0, 0, 10)])
    assert len(collectives.collectives(none)) == len(collectives.collectives(none, by="gpu")) == 0
    assert len(process_groups(none)) == 0
    assert len(collectives.gradient_barrier(none, tables.kernels([kernel(0, 0, 10)]))) == 0


# ---- roles -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("description, role", [
    ("mesh_tp", "tensor"), ("mesh_dp_shard", "shard"), ("mesh_dp_replicate", "data"), ("mesh_pp", "pipeline"),
    ("mesh_cp", "context"), ("mesh_ep", "expert"), ("mesh_dp_shard_mod_ep", "shard"), ("mesh_fsdp", "shard"),
    ("TENSOR_MODEL_PARALLEL_GROUP", "tensor"), ("DATA_PARALLEL_GROUP_WITH_CP", "data"),
    ("PIPELINE_MODEL_PARALLEL_GROUP", "pipeline"), ("CONTEXT_PARALLEL_GROUP", "context"),
    ("EXPERT_MODEL_PARALLEL_GROUP", "expert"), ("EXPERT_TENSOR_PARALLEL_GROUP", "tensor"),
    ("EXPERT_DATA_PARALLEL_GROUP", "data"), ("default_pg", None), ("undefined", None), ("", None)])
def test_role_of_a_description(description: str, role: str | None):
    assert of_description(description) == role


def roles(rows: list[dict], given: dict | None = None) -> list[tuple[str, str]]:
    found = process_groups(arrived(rows), given)
    return list(zip(found["role"], found["role_source"], strict=True))


def many(names_and_phases: list[tuple[str, str]], **columns: object) -> list[dict]:
    return [collective(g, 100 * i + g, 100 * i + 50, collective=name, phase=phase, group_seq=i, **columns)
            for i, (name, phase) in enumerate(names_and_phases) for g in (0, 1)]


def test_role_by_pattern():
    assert roles(many([("broadcast", "forward"), ("allreduce", "backward")] * 2)) == [("data", "pattern")]
    assert roles(many([("broadcast", "forward")] * 3)) == [("unknown", "unknown")]
    assert roles(many([("allreduce", "forward"), ("allreduce", "backward")] * 3)) == [("tensor", "pattern")]
    assert roles(many([("allreduce", "forward")])) == [("unknown", "unknown")]  # a metric that is averaged
    assert roles(many([("allgather", "forward"), ("reduce_scatter", "backward")])) == [("shard", "pattern")]
    both = [("allgather", "forward"), ("reduce_scatter", "forward"), ("allgather", "backward"),
            ("reduce_scatter", "backward")]
    assert roles(many(both * 3)) == [("tensor", "pattern")]  # sequence parallel
    assert roles(many(both)) == [("unknown", "unknown")]  # too few of a step for layers
    assert roles(many([("send", "forward"), ("recv", "backward")])) == [("pipeline", "pattern")]


def test_the_norm_of_gradients_alone_is_no_data_parallelism():
    assert roles(many([("allreduce", "optimizer")] * 4)) == [("unknown", "unknown")]


def test_role_by_callers_and_by_the_user():
    fsdp = many([("allgather", "forward")] * 3, operation="FSDP::all_gather")
    assert roles(fsdp) == [("shard", "callers")]
    assert roles(fsdp, {"0": "tensor"}) == [("tensor", "given")]
    assert roles(fsdp, {"default_pg": "context"}) == [("context", "given")]


# ---- the gradient barrier --------------------------------------------------------------------------------------------

def test_gradient_barrier():
    rows = []
    for step, base in ((0, 0), (1, 1000)):
        for gpu, late in ((0, 0), (1, 30 if step else 2)):
            rows += [
                kernel(gpu, base, base + 100, phase="backward", step=step),
                collective(gpu, base + 10, base + 20, step=step, group_seq=2 * step, phase="backward"),
                collective(gpu, base + 90 + late, base + 130, step=step, group_seq=2 * step + 1, phase="backward"),
                kernel(gpu, base + 140, base + 150, phase="optimizer", step=step)]
    kernels = tables.kernels(rows)
    barrier = collectives.gradient_barrier(collectives.arrivals(kernels, HOSTS)[0], kernels, {"0": "data"})
    assert barrier["step"].tolist() == [0, 1]
    assert barrier["late_gpu"].tolist() == [1, 1]
    assert barrier["skew_us"].tolist() == [2, 30]
    assert barrier["transfer_us"].tolist() == [38, 10]
    assert barrier["width_us"].tolist() == [40, 40]
    assert barrier["limited_by"].tolist() == ["bandwidth", "imbalance"]
    # From 100 to 130 on GPU 0 in both steps; on GPU 1 of step 1 the collective begins at 120.
    assert barrier["exposed_tail_us"].tolist() == [30, pytest.approx((30 + 10) / 2)]
    assert len(collectives.gradient_barrier(collectives.arrivals(kernels, HOSTS)[0], kernels, {"0": "tensor"})) == 0
