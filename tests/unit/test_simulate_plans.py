"""Simulated tensor and pipeline parallel plans: what was planted comes out, in the simulation and in its files."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pandas as pd
import pytest

import tb_chopper
from tb_chopper.backend.errors import InvalidSelection
from tb_chopper.backend.run import Run
from tb_chopper.backend.simulate import (
    Options,
    configs,
    physics,
    pipeline_schedule,
    pipeline_truth,
    plan,
    recorded,
    schedule,
    simulate,
    workload,
)
from tb_chopper.backend.simulate import truth as right
from tb_chopper.backend.simulate.config import Config
from tb_chopper.backend.simulate.run import programs
from tb_chopper.backend.simulate.sidecar import model_flop

HYBRID = Options(tensor=2, pipeline=2, ranks=8, layers=4, steps=2, dialect="cuda", seed=3)
ALONE: dict[str, Any] = {"pipeline": 4, "ranks": 4, "layers": 8, "steps": 1, "dialect": "cuda"}


def config_of(**options: Any) -> Config:
    (chosen,) = configs(Options(**options))
    return chosen


def simulated(config: Config) -> pd.DataFrame:
    """The kernels of all ranks, as in truth/kernels.parquet, without files."""
    timeline = schedule.simulate(config, [programs(config, place) for place in range(config.plan.pipeline)])
    parts = [right.of_rank(recorded.record(timeline, r), timeline.ranks[r]) for r in range(config.ranks)]
    return right.with_waits(parts, config)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight GPUs: tensor 2, pipeline 2, data 2."""
    return simulate(tmp_path_factory.mktemp("hybrid"), HYBRID)[0]


@pytest.fixture(scope="module")
def kernels(hybrid: Path) -> pd.DataFrame:
    return pd.read_parquet(hybrid / "truth/kernels.parquet")


@pytest.fixture(scope="module")
def analysed(hybrid: Path) -> Run:
    return tb_chopper.open_run(hybrid)


@pytest.fixture(scope="module", params=["gpipe", "1f1b", "interleaved"])
def pipelined(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four stages' GPUs and nothing else."""
    return simulate(tmp_path_factory.mktemp(request.param), Options(**ALONE, schedule=request.param))[0]


# -- orders -----------------------------------------------------------------------------------------------------------


def _texts(orders: Any) -> list[list[str]]:
    return [[str(action) for action in actions] for actions in orders]


@pytest.mark.parametrize(("ranks", "virtual", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 3, 12), (2, 3, 2)])
def test_interleaved_is_torchs(ranks: int, virtual: int, microbatches: int):
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    theirs = torch.ScheduleInterleaved1F1B.__new__(torch.ScheduleInterleaved1F1B)
    theirs.n_local_stages, theirs.pp_group_size, theirs._n_microbatches, theirs.rank = virtual, ranks, microbatches, 0
    theirs.number_of_rounds = max(1, microbatches // ranks)
    theirs.microbatches_per_round = microbatches // theirs.number_of_rounds
    orders = {r: [a for a in theirs._calculate_single_rank_operations(r) if a] for r in range(ranks)}
    mine = [pipeline_schedule.order("interleaved", ranks, virtual, microbatches, r) for r in range(ranks)]
    assert _texts(mine) == _texts(orders.values())
    stages = ranks * virtual
    with_messages = torch._add_send_recv(orders, stage_to_rank=lambda s: s % ranks, num_stages=stages)
    assert _texts(pipeline_schedule.with_messages(mine, stages)) == _texts(with_messages.values())


@pytest.mark.parametrize(("name", "cls"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (4, 4), (2, 5)])
def test_schedules_of_one_stage_per_gpu_are_torchs(name: str, cls: str, ranks: int, microbatches: int):
    """What torch's schedule calls of a stage that does nothing."""
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    for rank in range(ranks):
        called: list[str] = []
        stage = MagicMock(stage_index=rank, num_stages=ranks)
        stage.forward_one_chunk.side_effect = lambda m, *_, **__: called.append(f"{rank}F{m}")  # noqa: B023
        stage.backward_one_chunk.side_effect = lambda m, *_, **__: called.append(f"{rank}B{m}")  # noqa: B023
        for ops in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
            getattr(stage, ops).return_value = []
        theirs = MagicMock(_stage=stage, _num_stages=ranks, _n_microbatches=microbatches, _has_backward=True)
        theirs._check_inputs.return_value = ([()] * microbatches, [{}] * microbatches)
        getattr(torch, cls)._step_microbatches(theirs)
        assert [str(a) for a in pipeline_schedule.order(name, ranks, 1, microbatches, rank)] == called


def test_orders_that_wait_for_each_other_are_refused():
    backward_first = [pipeline_schedule.Action("B", 0, 0), pipeline_schedule.Action("F", 0, 0)]
    with pytest.raises(ValueError, match="wait for each other"):
        pipeline_schedule.with_messages([backward_first, [pipeline_schedule.Action("F", 1, 0)]], 2)


# -- places and groups ------------------------------------------------------------------------------------------------


def test_groups_are_those_of_a_device_mesh():
    """Names and ranks as torch 2.13 reports them for init_device_mesh((2, 2, 2), ("pp", "dp_shard", "tp"))."""
    config = config_of(tensor=2, pipeline=2, ranks=8, layers=4)
    found = {r: {g.description: (g.name, list(g.ranks)) for g in plan.groups(config, r).values()} for r in (0, 5)}
    everybody = list(range(8))
    assert found == {
        0: {"default_pg": ("0", everybody), "mesh_pp": ("1", [0, 4]), "mesh_dp_shard": ("5", [0, 2]),
            "mesh_tp": ("9", [0, 1])},
        5: {"default_pg": ("0", everybody), "mesh_pp": ("2", [1, 5]), "mesh_dp_shard": ("8", [5, 7]),
            "mesh_tp": ("11", [4, 5])},
    }


def test_places_and_ranks_are_each_others_inverse():
    config = config_of(tensor=2, pipeline=4, ranks=8, hosts=2, layers=4)
    assert [plan.rank_at(config, plan.place(config, r)) for r in range(16)] == list(range(16))
    assert plan.place(config, 5) == plan.Place(pipeline=1, data=0, tensor=1)
    assert [plan.neighbour(config, 13, True), plan.neighbour(config, 13, False)] == [1, 9]


def test_the_first_stages_have_the_layers_that_are_left():
    config = config_of(pipeline=4, ranks=4, layers=6)
    assert [list(plan.layers(config, s)) for s in range(4)] == [[0, 1], [2, 3], [4], [5]]


# -- work -------------------------------------------------------------------------------------------------------------


def _matrix_flop(config: Config) -> float:
    """FLOPs of the matrix products of a step, over all ranks."""
    each = [sum(i.kernel.flop for i in programs(config, place)[1].items if i.kernel.kind in ("gemm", "attention"))
            for place in range(config.plan.pipeline)]
    return sum(each) * config.ranks / config.plan.pipeline


def test_a_plan_divides_the_work_and_adds_none():
    one = _matrix_flop(config_of(ranks=1, layers=4))
    hybrid = config_of(tensor=2, pipeline=2, ranks=4, layers=4, microbatches=3)
    assert _matrix_flop(hybrid) == pytest.approx(3 * one, rel=1e-12)
    data = replace(hybrid, gpus_per_host=8)
    assert _matrix_flop(data) == pytest.approx(6 * one, rel=1e-12)


def test_parameters_of_all_places_are_those_of_the_model():
    config = config_of(pipeline=4, ranks=4, layers=6)
    assert sum(plan.params(config, place) for place in range(4)) == config.model.params


def test_tensor_parallel_layers_sum_twice_forward_and_twice_backward():
    work = workload.build(config_of(tensor=2, layers=2))
    assert sum(op.reduce_forward is not None for op in work.layer) == 2  # behind attention and MLP
    assert sum(op.reduce_backward is not None for op in work.layer) == 2  # before them
    assert {op.reduce_forward.elements for op in work.layer if op.reduce_forward} == {2048 * 2048}


def test_tensor_parallel_projections_are_narrower():
    whole, half = (
        {op.operation: op.call.dims for op in workload.build(config_of(tensor=t)).layer if op.call.name == "aten::mm"}
        for t in (1, 2))
    assert whole["qkv_ip"] == ((2048, 2048), (2048, 3072)) and half["qkv_ip"] == ((2048, 2048), (2048, 1536))
    assert whole["mlp_dp"] == ((2048, 7168), (7168, 2048)) and half["mlp_dp"] == ((2048, 3584), (3584, 2048))


# -- bubbles ----------------------------------------------------------------------------------------------------------


def _bubbles(config: Config) -> pd.Series:
    """Idle share by rank."""
    actions = pipeline_truth.actions(simulated(config), config)
    bubbles = pd.DataFrame(pipeline_truth.summary(actions, config)["bubbles"])
    return bubbles.groupby("rank")["bubble"].mean()


EQUAL: dict[str, Any] = {**ALONE, "shape": "b2s4", "balanced": True, "equal_gpus": True}


@pytest.mark.parametrize(("name", "virtual", "microbatches", "theory"), [
    ("gpipe", 1, 4, 3 / 7), ("1f1b", 1, 4, 3 / 7), ("1f1b", 1, 8, 3 / 11), ("interleaved", 2, 8, 3 / 19)])
def test_equal_stages_idle_as_theory_says(
        name: str, virtual: int, microbatches: int, theory: float, monkeypatch: pytest.MonkeyPatch):
    """Nothing sets the bubble: it is what waiting for the neighbours leaves. Messages that cost nothing, GPUs that
    keep their clock."""
    config = config_of(**EQUAL, schedule=name, microbatches=microbatches, virtual=virtual if virtual > 1 else None)
    monkeypatch.setattr(physics, "MESSAGE_LATENCY_NS", 0)
    free = replace(config, gpu=replace(config.gpu, peer_bytes_per_s=1e18, power_cap_w=3000.0))
    bubbles = _bubbles(free)
    assert bubbles.mean() == pytest.approx(theory, abs=0.004)
    assert bubbles.to_numpy() == pytest.approx(theory, abs=0.012)
    assert _bubbles(config).mean() > theory + 0.005  # messages take their time


def test_bubble_of_theory():
    """Published: with 8 stages and 32 microbatches 7/32 of the ideal time; a quarter of it with 4 stages per GPU."""
    for virtual in (1, 4):
        share = pipeline_schedule.bubble(8, virtual, 32)
        assert share / (1 - share) == pytest.approx(7 / 32 / virtual)


def test_a_slower_stage_makes_the_others_wait():
    even = _bubbles(config_of(**EQUAL, schedule="1f1b"))
    uneven = _bubbles(config_of(**EQUAL, schedule="1f1b", slow={2: 0.8}))
    assert uneven[2] < even[2]
    assert (uneven[[0, 1, 3]] > even[[0, 1, 3]] + 0.05).all()


def test_stages_with_embedding_and_head_are_longer():
    config = config_of(**{**ALONE, "layers": 4})
    actions = pipeline_truth.actions(simulated(config), config)
    forward = actions[actions["kind"] == "F"]
    length = (forward["end_ns"] - forward["start_ns"]).groupby(forward["stage"]).median()
    assert length[3] > 1.5 * length[1]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 6), (4, 4)])
def test_every_schedule_ends(name: str, ranks: int, microbatches: int):
    """With a launch queue so short that hosts wait for sends whose receivers have not come yet."""
    config = config_of(pipeline=ranks, ranks=ranks, layers=8, steps=1, schedule=name, microbatches=microbatches)
    config = replace(config, host=replace(config.host, queue_depth=32))
    actions = pipeline_truth.actions(simulated(config), config)
    assert len(actions) == 2 * config.plan.stages * microbatches


# -- communication ----------------------------------------------------------------------------------------------------


def test_ranks_of_a_group_leave_together_a_transfer_after_the_last(kernels: pd.DataFrame):
    config = config_of(**_told(HYBRID))
    rows = kernels[(kernels["kind"] == "communication") & kernels["launched"]]
    sizes = {"tp": 2, "dp_shard": 2, "world": 8, "pp": 2}
    assert set(rows["role"]) == set(sizes)
    for _, together in rows.groupby("instance"):
        first = together.iloc[0]
        if len(together) < sizes[first["role"]]:
            continue  # an end of it was launched before the capture
        arrived = together["start_ns"].max()
        assert together["end_ns"].nunique() == 1
        assert together["wait_ns"].tolist() == (arrived - together["start_ns"]).tolist()
        name = {"pp": "send", "dp_shard": "_allgather_base"}.get(first["role"], "allreduce")
        transfer = physics.transfer_ns(name, first["bytes"], config, together["rank"].tolist())
        assert first["end_ns"] - arrived == pytest.approx(transfer, abs=2)


def _told(options: Options) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("tensor", "pipeline", "ranks", "layers", "steps", "dialect")}


def test_ranks_of_groups_are_their_members(kernels: pd.DataFrame):
    config = config_of(**_told(HYBRID))
    rows = kernels[kernels["role"].isin(["tp", "dp_shard"])]
    for name, mine in rows.groupby("group", observed=True):
        group = next(g for g in plan.groups(config, mine["rank"].iloc[0]).values() if g.name == name)
        assert sorted(set(mine["rank"])) == list(group.ranks)


def test_a_receiver_computes_after_its_sender(pipelined: Path):
    """The forward of a microbatch by a stage begins after the stage before has ended its own; backward the other way
    round; and neither before the message is there."""
    actions = pd.read_parquet(pipelined / "truth/pipeline.parquet")
    at = actions.set_index(["kind", "stage", "microbatch"])
    last = actions["stage"].max()
    for (kind, stage, microbatch), row in at.iterrows():
        before = stage - 1 if kind == "F" else stage + 1
        if 0 <= before <= last:
            assert row["start_ns"] > at.loc[(kind, before, microbatch), "end_ns"]
    kernels = pd.read_parquet(pipelined / "truth/kernels.parquet")
    received = kernels[(kernels["stream"].isin([3, 5])) & kernels["launched"]]
    assert len(received) == (2 * last * actions["microbatch"].nunique())
    for row in received.itertuples():
        kind = "F" if row.stream == 3 else "B"
        assert at.loc[(kind, row.stage, row.microbatch), "start_ns"] > row.end_ns


def test_bubbles_of_the_table_are_the_time_between_actions(pipelined: Path):
    actions = pd.read_parquet(pipelined / "truth/pipeline.parquet")
    summary = json.loads((pipelined / "truth/truth.json").read_text())["pipeline"]
    total = actions["end_ns"].max() - actions["start_ns"].min()
    for entry in summary["bubbles"]:
        mine = actions[actions["rank"] == entry["rank"]]
        drain = actions["end_ns"].max() - mine["end_ns"].max()
        assert entry["bubble"] == pytest.approx((mine["bubble_ns"].sum() + drain) / total, abs=1e-9)


def test_messages_between_hosts_take_longer():
    inside, between = (physics.transfer_ns("send", 1e6, config_of(pipeline=4, hosts=2, ranks=2, layers=4), ends)
                       for ends in ((0, 1), (1, 2)))
    assert between - physics.MESSAGE_LATENCY_NS == pytest.approx(6 * (inside - physics.MESSAGE_LATENCY_NS))


# -- files ------------------------------------------------------------------------------------------------------------


def _trace(run: Path, rank: int) -> dict[str, Any]:
    ranks = json.loads((run / "truth/truth.json").read_text())["ranks"]
    document: dict[str, Any] = json.loads(gzip.decompress((run / ranks[rank]["trace"]).read_bytes()))
    return document


@pytest.mark.torch
def test_torch_validates_the_traces(hybrid: Path, pipelined: Path):
    validator = pytest.importorskip("torch.profiler._trace_validator")
    for trace in [*hybrid.glob("*.pt.trace.json.gz"), *pipelined.glob("*.pt.trace.json.gz")]:
        passed, violations = validator.validate_trace(str(trace))
        assert passed, violations


def test_a_trace_tells_its_process_groups(hybrid: Path):
    told = _trace(hybrid, 5)["distributedInfo"]
    assert told["pg_count"] == 4
    assert [(g["pg_name"], g["pg_desc"], g["pg_size"], g["ranks"]) for g in told["pg_config"]] == [
        ("0", "default_pg", 8, list(range(8))), ("2", "mesh_pp", 2, [1, 5]), ("8", "mesh_dp_shard", 2, [5, 7]),
        ("11", "mesh_tp", 2, [4, 5])]


def test_communication_events_tell_group_and_peer(hybrid: Path):
    events = _trace(hybrid, 5)["traceEvents"]
    calls = [e["args"] for e in events if e["name"] == "record_param_comms"]
    on_device = [e["args"] for e in events if e.get("cat") == "kernel" and "Collective name" in e["args"]]
    keys = ("Process Group Name", "Process Group Description", "Process Group Ranks", "Group size")
    for rows in (calls, on_device):
        told = {a["Collective name"]: tuple(a[k] for k in keys) for a in rows}
        assert told["send"] == told["recv"] == ("2", "mesh_pp", "[1, 5]", 2)
        assert told["_allgather_base"] == ("8", "mesh_dp_shard", "[5, 7]", 2)
        assert {a["Src Rank"] for a in rows if a["Collective name"] == "recv"} == {1}
        assert {a["Dst Rank"] for a in rows if a["Collective name"] == "send"} == {1}
        reduced = {tuple(a[k] for k in keys) for a in rows if a["Collective name"] == "allreduce"}
        assert reduced == {("11", "mesh_tp", "[4, 5]", 2), ("0", "default_pg", str(list(range(8))), 8)}
    sent = next(a for a in calls if a["Collective name"] == "send")
    assert (sent["Rank"], sent["Global rank start"], sent["Global rank stride"]) == (0, 1, 4)  # peer, in the group
    assert {e["name"] for e in events if str(e["name"]).startswith("nccl:send")} == {"nccl:send 1->0"}


def test_kernels_of_batched_messages_tell_nothing(tmp_path: Path):
    run = simulate(tmp_path, Options(pipeline=2, steps=1, dialect="cuda", batched=True))[0]
    events = _trace(run, 0)["traceEvents"]
    on_device = [e["args"] for e in events if e.get("cat") == "kernel" and "SendRecv" in e["name"]]
    on_device = [a for a in on_device if "External id" in a]  # launched in the capture
    calls = [e for e in events if e["name"] == "record_param_comms" and e["args"]["Collective name"] == "send"]
    assert len(on_device) == 8 and not [a for a in on_device if "Collective name" in a or "Process Group Name" in a]
    assert [e["args"]["Dst Rank"] for e in calls] == [1] * 4
    ends = {e["ts"] + e["dur"] for e in calls}
    coalesced = [e["ts"] for e in events if e["name"] == "nccl:coalesced" and e.get("cat") == "user_annotation"]
    assert len(coalesced) == 8 and all(any(c > end for c in coalesced) for end in ends)


def test_the_sidecar_tells_the_plan_and_the_share_of_the_rank(hybrid: Path):
    sidecars = [json.loads(p.read_text()) for p in sorted(hybrid.glob("*.chopper.json"))]
    assert all(s["training"]["parallel"] == {"pp": 2, "dp_shard": 2, "tp": 2} for s in sidecars)
    (alone,) = configs(Options(ranks=1, layers=4))
    tokens = 2 * 4 * 2048  # of two replicas, four microbatches each
    assert sum(s["training"]["tokens_per_step"] for s in sidecars) == tokens
    total = sum(s["training"]["model_flops_per_step"] for s in sidecars)
    assert total == pytest.approx(2 * 4 * model_flop(alone), rel=1e-12)
    held = [{m["fqn"] for m in s["modules"] if m["fqn"].count(".") == 1} for s in sidecars]
    assert held[0] == {"layers.0", "layers.1"} and held[7] == {"layers.2", "layers.3"}


def test_scopes_of_a_pipeline(pipelined: Path):
    events = _trace(pipelined, 1)["traceEvents"]
    names = [e["name"] for e in events if e.get("cat") == "user_annotation"]
    name = next(n for n in pipeline_schedule.CLASSES if f"_{n}_" in pipelined.name)
    stages, virtual = (8, 2) if name == "interleaved" else (4, 1)
    assert f"chopper::pp::schedule::{pipeline_schedule.CLASSES[name]}::stages{stages}::mb8::v{virtual}" in names
    assert {n for n in names if n.startswith("chopper::pp::") and "schedule" not in n} == {
        f"chopper::pp::{kind}::stage{s}::mb{m}" for kind in "FB" for s in range(1, stages, 4) for m in range(8)}
    torchs = {"gpipe": {"Forward 0", "Backward 7"}, "interleaved": {"PP:1F0", "PP:5RECV_B7", "PP:1SEND_F3"}}
    assert torchs.get(name, set()) <= set(names)
    assert name != "1f1b" or not [n for n in names if n.startswith(("PP:", "Forward", "Backward"))]


def test_no_counter_passes_where_they_would_hang(tmp_path: Path):
    run = simulate(tmp_path, Options(tensor=2, steps=1))[0]
    assert not list(run.rglob("*counter_collection.csv"))


# -- the analysis -----------------------------------------------------------------------------------------------------


def test_roles_of_the_groups(analysed: Run):
    groups = analysed.process_groups()
    named = groups[groups["description"].notna()].groupby("description")["role"].agg(set).to_dict()
    assert named["mesh_tp"] == {"tensor"} and named["mesh_pp"] == {"pipeline"} and named["mesh_dp_shard"] == {"shard"}
    assert len(groups[groups["description"] == "mesh_tp"]) == 4


def test_collectives_of_groups_are_matched_and_their_waits_found(analysed: Run, kernels: pd.DataFrame):
    true = kernels[kernels["role"].isin(["tp", "dp_shard"]) & kernels["launched"] & (kernels["wait_ns"] >= 0)]
    true = true.rename(columns={"rank": "gpu"})
    rows = analysed.arrivals().merge(true, on=["gpu", "start_ns"], suffixes=("", "_true"))
    assert len(rows) == len(true) > 500
    assert (rows["n_ranks"] == 2).all()
    assert (rows.groupby("instance")["instance_true"].nunique() == 1).all()
    assert (rows["wait_ns"] - rows["wait_ns_true"]).abs().max() <= 1


def test_layers_and_phases_inside_microbatches(analysed: Run, kernels: pd.DataFrame):
    computed = kernels[(kernels["kind"] == "compute") & kernels["launched"]].rename(columns={"rank": "gpu"})
    rows = analysed.kernels.merge(computed, on=["gpu", "correlation"], suffixes=("", "_true"))
    assert len(rows) == len(computed) > 5000
    layer = rows["layer"].astype(object).astype(str).str.extract(r"(\d+)")[0].fillna("-1").astype(int)
    assert (layer == rows["layer_true"]).all()
    assert (rows["phase"].astype(str) == rows["phase_true"].astype(str)).all()
    assert (rows["step"].astype("int64") == rows["step_true"]).all()


def test_the_pipeline_is_recognised_and_its_actions_found(pipelined: Path):
    run = tb_chopper.open_run(pipelined)
    true = pd.read_parquet(pipelined / "truth/pipeline.parquet").rename(columns={"rank": "gpu"})
    keys = ["gpu", "step", "stage", "microbatch", "kind"]
    found = run.pipeline_actions().merge(true, on=keys, suffixes=("", "_true"))
    assert len(found) == len(true) == len(run.pipeline_actions())
    assert (found["start_ns"] == found["start_ns_true"]).all()
    assert (found["end_ns"] == found["end_ns_true"]).all()
    summary = json.loads((pipelined / "truth/truth.json").read_text())["pipeline"]
    measured = run.pipeline().set_index("gpu")
    assert set(measured["told"]) == {summary["schedule"]}
    assert set(measured["microbatches"]) == {8}
    for entry in summary["bubbles"]:
        assert measured.loc[entry["rank"], "bubble_share"] == pytest.approx(entry["bubble"], abs=1e-6)
    assert measured["theory_share"].iloc[0] == pytest.approx(summary["bubble_of_equal_stages"])


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "message"), [
    ({"tensor": 3}, "2 GPUs cannot be divided"),
    ({"tensor": 2, "pipeline": 0}, "pipeline is 0"),
    ({"pipeline": 2, "layers": 1}, "2 stages need as many layers"),
    ({"pipeline": 2, "schedule": "zigzag"}, "no pipeline schedule 'zigzag'"),
    ({"pipeline": 2, "schedule": "1f1b", "virtual": 2, "layers": 8}, "one stage per GPU"),
    ({"pipeline": 2, "microbatches": 1}, "as many microbatches as GPUs of the pipeline"),
    ({"pipeline": 2, "schedule": "interleaved", "microbatches": 3, "layers": 8}, "multiple of the pipeline's 2 GPUs"),
    ({"microbatches": 4}, "microbatches is of a pipeline"),
    ({"tensor": 2, "fsdp": 1}, "FSDP version 2 only"),
    ({"tensor": 32, "ranks": 8, "hosts": 4}, "cannot be divided by tensor 32"),
])
def test_impossible_plans_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(InvalidSelection, match=message):
        configs(Options(**options))


def test_the_default_plan_is_fsdp_over_all():
    config = config_of()
    assert config.plan.is_default and config.data == 2 and config.run_name == "simulated_tiny_b1s2_fsdp2"
    assert config_of(tensor=2, pipeline=2, ranks=8, layers=4).run_name == "simulated_tiny_b1s2_tp2_pp2_dp2_1f1b_m4"
