"""Attribution on small tables written down by hand; times in µs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tb_chopper.backend import schema
from tb_chopper.backend.attribution import Attributed, attribute, layers, names, tree
from tb_chopper.backend.attribution.names import Role

EVALUATE = "autograd::engine::evaluate_function: "


class Program:
    """A host program and the device rows that it launches, in the order of the calls."""

    def __init__(self) -> None:
        self.host: list[dict[str, Any]] = []
        self.device: list[dict[str, Any]] = []
        self.pids = ["1", "1", "1"]

    def add(self, kind: str, name: str, start: float, end: float, thread: int = 0, **more: Any) -> Program:
        self.host.append({"kind": kind, "name": name, "start_ns": round(start * 1000), "end_ns": round(end * 1000),
                          "thread": thread, "finished": True, **more})
        return self

    def op(self, name: str, start: float, end: float, thread: int = 0, **more: Any) -> Program:
        return self.add("cpu_op", name, start, end, thread, **more)

    def scope(self, name: str, start: float, end: float, thread: int = 0, **more: Any) -> Program:
        return self.add("annotation", name, start, end, thread, **more)

    def frame(self, name: str, start: float, end: float, thread: int = 0) -> Program:
        return self.add("module", f"nn.Module: {name}", start, end, thread)

    def launch(self, at: float, thread: int = 0, *, kernels: int = 1, call: str = "cudaLaunchKernel", start: float = 0,
               name: str = "k", **more: Any) -> Program:
        """A launch call of 1 µs at `at` and its kernels of 5 µs, from `start` on (10 µs later by default)."""
        correlation = 1000 + len(self.host)
        self.add("runtime", call, at, at + 1, thread, correlation=correlation)
        for i in range(kernels):
            self.kernel((start or at + 10) + 5 * i, name=name, correlation=correlation, **more)
        return self

    def kernel(self, start: float, duration: float = 5, name: str = "k", **more: Any) -> Program:
        begin = round(start * 1000)
        self.device.append({"start_ns": begin, "end_ns": begin + round(duration * 1000), "name": name,
                            "activity": "kernel", "device": "0", "stream": 7, **more})
        return self

    def run(self, **more: Any) -> Attributed:
        host, device = pd.DataFrame(self.host), pd.DataFrame(self.device)
        for frame, table in ((host, schema.HOST), (device, schema.DEVICE)):
            whole = [c.name for c in table if c.dtype == "int64" and c.name in frame]
            frame[whole] = frame[whole].fillna(schema.MISSING)
        threads = pd.DataFrame({"pid": self.pids, "tid": ["1", "2", "3"]})
        return attribute(schema.Trace(
            Path("trace.json"), schema.conform(host, schema.HOST), schema.conform(threads, schema.THREADS),
            schema.conform(device, schema.DEVICE), schema.empty(schema.MEMORY)), **more)


def only(result: Attributed) -> Any:
    """The one row of a result."""
    (row,) = result.kernels.itertuples()
    return row


def values(result: Attributed, column: str) -> list[Any]:
    return [None if pd.isna(v) else v for v in result.kernels[column]]


def codes(result: Attributed) -> set[str]:
    return {f.code for f in result.findings}


# -- the tree


def closest_container(thread: np.ndarray, start: np.ndarray, end: np.ndarray, node: int) -> int:
    """By definition: the last earlier node of the thread that holds this one, 2 ns of slack."""
    for other in range(node - 1, -1, -1):
        if thread[other] == thread[node] and end[other] + 2 >= end[node] and end[other] > start[node]:
            return other
    return -1


@pytest.mark.parametrize("seed", range(6))
def test_parents_are_the_closest_containers_even_where_intervals_cross(seed: int) -> None:
    random = np.random.default_rng(seed)
    start = random.integers(0, 300, 200)
    end = start + random.integers(0, [20, 60, 300][seed % 3], 200)
    thread = random.integers(0, 3, 200)
    built = tree.build(thread, start, end)
    assert sorted(built.row) == list(range(200))
    for node in range(200):
        assert built.parent[node] == closest_container(built.thread, built.start_ns, built.end_ns, node)


def test_the_innermost_of_nested_scopes_is_located() -> None:
    built = tree.build(np.zeros(4, int), np.array([0, 10, 20, 60]), np.array([100, 50, 30, 90]))
    times = np.array([5, 25, 30, 55, 60, 99, 100, -1])
    assert list(built.locate(np.zeros(8, int), times)) == [0, 2, 1, 0, 3, 0, -1, -1]


# -- launch, operator, operation


def test_a_kernel_goes_to_the_innermost_operator_around_its_launch() -> None:
    row = only(Program().op("aten::linear", 0, 50).op("aten::addmm", 10, 40, args="{}").launch(20).run())
    assert (row.cpu_op, row.operation, row.op_id, row.op_args) == ("aten::addmm", "aten::linear", 1, "{}")
    assert (row.launch_ns, row.launch_end_ns, row.launch_name) == (20_000, 21_000, "cudaLaunchKernel")
    assert (row.attributed_by, row.phase) == ("launch containment", "forward")


def test_a_launch_on_another_thread_belongs_to_no_operator_of_this_one() -> None:
    row = only(Program().op("aten::mm", 0, 50, thread=0).launch(20, thread=1).run())
    assert row.cpu_op is np.nan and row.operation == schema.UNATTRIBUTED
    assert (row.attributed_by, row.phase) == ("launch call only", "other")


def test_asynchronous_annotations_hold_nothing() -> None:
    program = Program().scope("attn_op", 0, 50).add("async", "nccl:all_reduce", 5, 500).launch(20)
    assert only(program.run()).operation == "attn_op"


def test_the_first_of_several_calls_with_one_correlation_is_the_launch() -> None:
    program = Program().op("aten::mm", 0, 20).launch(5).op("aten::add", 30, 50)
    program.add("runtime", "cudaLaunchKernel", 35, 36, correlation=program.host[1]["correlation"])
    assert only(program.run()).cpu_op == "aten::mm"


def test_kernels_of_a_graph_share_one_launch_and_its_scope() -> None:
    program = Program().scope("ProfilerStep#4", 0, 100).scope("decode", 5, 60)
    result = program.launch(20, kernels=8, call="cudaGraphLaunch").launch(70, kernels=2, call="hipGraphLaunch").run()
    assert values(result, "attributed_by") == ["graph replay"] * 10
    assert values(result, "operation") == ["decode"] * 8 + ["hipGraphLaunch"] * 2
    assert values(result, "step") == [4] * 10


def test_kernels_from_before_the_capture_are_named_so_and_lost_launches_are_not() -> None:
    """A stream is in order: what runs after a kernel of the capture was launched in it."""
    program = Program().scope("ProfilerStep#0", 0, 50).scope("ProfilerStep#1", 50, 100).op("aten::mm", 10, 30)
    program.kernel(3, correlation=1).launch(15).kernel(40, correlation=2).op("aten::mm", 60, 80).launch(65)
    result = program.kernel(90).run()
    assert values(result, "operation") == [schema.BEFORE_CAPTURE, "aten::mm", schema.UNATTRIBUTED, "aten::mm",
                                           schema.UNATTRIBUTED]
    assert values(result, "step") == [None, 0, 0, 1, 1]
    assert values(result, "attributed_by") == ["no launch in capture", "launch containment", "time",
                                               "launch containment", "time"]


def with_external_ids(wrong: int) -> Program:
    """20 kernels inside their operators, `wrong` of which name another; one launched outside every operator."""
    program = Program()
    for i in range(20):
        program.op(f"aten::op{i}", 100 * i, 100 * i + 50, external_id=i)
        program.launch(100 * i + 10, external_id=(i + 1) % 20 if i < wrong else i)
    return program.launch(5000, thread=1, external_id=3)


def test_external_ids_serve_where_containment_fails_and_both_agree_elsewhere() -> None:
    last = with_external_ids(wrong=1).run().kernels.iloc[-1]
    assert (last.cpu_op, last.attributed_by) == ("aten::op3", "external id")
    last = with_external_ids(wrong=2).run().kernels.iloc[-1]
    assert (last.operation, last.attributed_by) == (schema.UNATTRIBUTED, "launch call only")


# -- names of operations


def test_scopes_of_the_author_name_operations_and_the_innermost_wins() -> None:
    program = Program().scope("Iteration7", 0, 200).scope("Layer3", 5, 190).scope("attn_ra", 10, 100)
    program.scope("attn_op", 20, 60).op("aten::linear", 30, 50).launch(35).op("aten::add", 70, 90).launch(75)
    result = program.run()
    assert values(result, "operation") == ["attn_op", "attn_ra"]
    assert values(result, "layer") == ["Layer3", "Layer3"]
    assert values(result, "step") == [7, 7] and list(result.steps["source"]) == ["annotation"]


def test_a_scope_around_everything_is_named_with_each_operator() -> None:
    program = Program().scope("my network", 0, 1000)
    for i, op in enumerate(["aten::conv2d", "aten::batch_norm", "aten::relu", "aten::max_pool2d"]):
        program.op(op, 100 * i, 100 * i + 50).launch(100 * i + 10)
    assert values(program.run(), "operation") == [
        "my network: aten::conv2d", "my network: aten::batch_norm", "my network: aten::relu",
        "my network: aten::max_pool2d"]


def test_module_scopes_name_operations_by_their_path_below_the_layer() -> None:
    program = Program().scope("chopper::(Llama)", 0, 900)
    for k in range(2):
        t = 400 * k
        program.scope(f"chopper::layers.{k}", t, t + 300).scope(f"chopper::layers.{k}.attention", t + 5, t + 150)
        program.scope(f"chopper::layers.{k}.attention.wq", t + 10, t + 50).op("aten::linear", t + 12, t + 40)
        program.launch(t + 20).op("aten::mul", t + 60, t + 80).launch(t + 65).op("aten::add", t + 200, t + 220)
        program.launch(t + 210)
    program.scope("chopper::output", 800, 850).op("aten::linear", 810, 840).launch(820)
    result = program.run()
    layer = ["attention.wq", "attention: aten::mul", "aten::add"]
    assert values(result, "operation") == [*layer, *layer, "output"]
    assert values(result, "layer") == ["layers.0"] * 3 + ["layers.1"] * 3 + [None]
    assert values(result, "attributed_by")[0] == "module scope"


def test_module_frames_are_named_by_their_place_in_the_frame_around() -> None:
    program = Program().frame("Model_0", 0, 1000)
    for k in range(2):
        t = 400 * k
        program.frame(f"Block_{k}", t + 5, t + 300)
        for i in range(2):
            program.frame(f"Linear_{2 * k + i}", t + 10 + 100 * i, t + 90 + 100 * i)
            program.op("aten::linear", t + 20 + 100 * i, t + 80 + 100 * i).launch(t + 30 + 100 * i)
    program.frame("Linear_9", 900, 990).op("aten::linear", 910, 980).launch(920)
    result = program.run()
    assert values(result, "operation") == ["Linear_0", "Linear_1", "Linear_0", "Linear_1", "Linear"]
    assert values(result, "layer") == ["Block_0", "Block_0", "Block_1", "Block_1", None]


@pytest.mark.parametrize(("collective", "group", "kernel", "expected"), [
    ("allreduce", "mesh_tp", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*)", "all_reduce (mesh_tp)"),
    ("_allgather_base", None, "ncclDevKernel_Generic_1", "all_gather"),
    (None, None, "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reduce_scatter"),
    (None, None, "multimem_all_reduce_kernel", "all_reduce"),
    (None, None, "mscclKernel_123", "communication"),
])
def test_communication_is_named_by_collective_and_group(
        collective: str | None, group: str | None, kernel: str, expected: str) -> None:
    program = Program().scope("attn_op", 0, 50).launch(10, name=kernel, collective=collective, group_desc=group)
    row = only(program.run())
    assert (row.kind, row.operation) == ("communication", expected)


def test_a_pattern_of_the_user_makes_communication() -> None:
    assert only(Program().launch(10, name="my_ring").run(communication=["my_ring"])).kind == "communication"


# -- autograd: layer and operation of backward work


def training(seq_on_node: bool = True) -> Program:
    """Two layers on thread 0, their backward on thread 1, and gradients accumulated after each node."""
    program = Program()
    for k in range(2):
        program.scope(f"chopper::layers.{k}.wq", 100 * k, 100 * k + 90)
        program.op("aten::linear", 100 * k + 10, 100 * k + 80, seq=k, fwd_thread=0)
        program.op("aten::mm", 100 * k + 20, 100 * k + 70, seq=k, fwd_thread=0).launch(100 * k + 30)
    program.scope("chopper::norm", 200, 250).op("aten::mul", 210, 240, seq=5, fwd_thread=0).launch(220)
    for i, (node, seq) in enumerate([("MulBackward0", 5), ("MmBackward0", 1), ("MmBackward0", 0)]):
        t = 300 + 100 * i
        own = {"seq": seq, "fwd_thread": 1}
        program.op(EVALUATE + node, t, t + 50, thread=1, **(own if seq_on_node else {}))
        program.op(node, t + 5, t + 45, thread=1, **own).op("aten::mm", t + 10, t + 40, thread=1)
        program.launch(t + 20, thread=1)
        program.op(EVALUATE + "torch::autograd::AccumulateGrad", t + 60, t + 90, thread=1)
        program.op("torch::autograd::AccumulateGrad", t + 62, t + 88, thread=1).op("aten::add_", t + 65, t + 80, 1)
        program.launch(t + 70, thread=1)
    return program


@pytest.mark.parametrize("seq_on_node", [True, False])
def test_backward_takes_layer_and_operation_of_its_forward_operator(seq_on_node: bool) -> None:
    result = training(seq_on_node).run()
    backward = result.kernels[result.kernels["phase"] == "backward"]
    assert [None if pd.isna(v) else v for v in backward["layer"]] == [None, None, *["layers.1"] * 2, *["layers.0"] * 2]
    assert list(backward["operation"]) == ["norm", "aten::add_", "wq", "aten::add_", "wq", "aten::add_"]
    assert list(backward["attributed_by"]) == [
        "sequence number", "launch containment", "sequence number", "neighbour", "sequence number", "neighbour"]
    assert list(result.kernels["phase"][:3]) == ["forward"] * 3


def test_the_forward_operator_that_started_last_made_the_node() -> None:
    """Operators that make no node carry the number of the next one."""
    program = Program().scope("chopper::layers.0.a", 0, 50).op("aten::view", 10, 40, seq=7, fwd_thread=0)
    program.scope("chopper::layers.1.b", 100, 150).op("aten::mm", 110, 140, seq=7, fwd_thread=0)
    program.op(EVALUATE + "MmBackward0", 200, 250, thread=1, seq=7, fwd_thread=1).launch(210, thread=1)
    row = only(program.run())
    assert (row.layer, row.operation) == ("layers.1", "b")


def test_equal_numbers_of_two_threads_are_told_apart_by_votes() -> None:
    """Both threads use 0..8; id 4 stands for the thread of which it explains more nodes, by name too."""
    program = Program()
    for i in range(9):
        program.scope(f"chopper::layers.{i}.m", 100 * i, 100 * i + 50, thread=0)
        program.op("aten::mm", 100 * i + 5, 100 * i + 45, thread=0, seq=i, fwd_thread=0)
        program.scope(f"chopper::layers.{i}.s", 100 * i, 100 * i + 50, thread=1)
        program.op("aten::silu", 100 * i + 5, 100 * i + 45, thread=1, seq=i, fwd_thread=0)
        program.op(EVALUATE + "SiluBackward0", 2000 + 100 * i, 2050 + 100 * i, thread=2, seq=i, fwd_thread=4)
        program.launch(2010 + 100 * i, thread=2)
    result = program.run()
    assert values(result, "operation") == ["s"] * 9
    assert values(result, "layer") == [f"layers.{i}" for i in range(9)]


def test_a_forward_operator_before_the_capture_leaves_phase_without_layer() -> None:
    row = only(Program().op(EVALUATE + "MmBackward0", 0, 50, seq=3, fwd_thread=1).launch(10).run())
    assert (row.phase, row.operation) == ("backward", "MmBackward0") and pd.isna(row.layer)


def checkpointed(inner: str) -> Program:
    """A node that runs `inner` with a number of its own before its own work."""
    program = Program().scope("chopper::layers.0.a", 0, 50).op("aten::silu", 10, 40, seq=1, fwd_thread=0).launch(20)
    program.op(EVALUATE + "SiluBackward0", 100, 300, seq=1, fwd_thread=1)
    program.op(inner, 110, 150, seq=8, fwd_thread=0).launch(120).op("aten::cat", 155, 160).launch(157)
    program.op("aten::add", 165, 190, seq=9, fwd_thread=0).launch(170)
    return program.op("aten::silu_backward", 200, 290).launch(250)


def test_recompute_needs_heavy_forward_work_and_spans_it() -> None:
    result = checkpointed("aten::linear").run()
    assert values(result, "recompute") == [False, True, True, True, False]
    assert values(result, "phase") == ["forward"] + ["backward"] * 4
    assert values(result, "layer") == ["layers.0"] * 5
    assert values(result, "operation") == ["a", "aten::linear", "aten::cat", "aten::add", "a"]
    assert not any(values(checkpointed("aten::view").run(), "recompute"))


def test_phases_by_scope_name() -> None:
    program = Program().scope("Optimizer.step#AdamW.step", 600, 700).op("aten::_fused_adamw_", 610, 690).launch(620)
    program.scope("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 0, 50).launch(10)
    program.op("aten::mm", 100, 150).launch(110)
    program.op(EVALUATE + "MmBackward0", 200, 300, thread=1).launch(210, thread=1)
    program.op("aten::copy_", 320, 340, thread=1).launch(330, thread=1)
    program.op("aten::_foreach_norm", 400, 450).launch(410)
    program.op("aten::item", 800, 850).launch(810)
    result = program.run()
    assert values(result, "phase") == ["other", "forward", "backward", "backward", "optimizer", "optimizer", "forward"]
    assert values(result, "operation")[5] == "AdamW.step"


# -- sharded training without module scopes


def test_fsdp2_brackets_and_communication_scopes_give_layers() -> None:
    program = Program()
    for k in range(2):
        t = 200 * k
        program.scope(f"FSDP::pre_forward (layers.{k})", t, t + 30)
        program.scope(f"FSDP::all_gather (layers.{k})", t + 5, t + 25)
        program.launch(t + 10, name="ncclDevKernel_AllGather")
        program.op("aten::linear", t + 50, t + 90, seq=k, fwd_thread=0).launch(t + 60)
        program.scope(f"FSDP::post_forward (layers.{k})", t + 100, t + 120)
    program.op(EVALUATE + "AddmmBackward0", 500, 600, seq=1, fwd_thread=1).launch(505)
    program.scope("FSDP::backward_prefetch for layers.0", 520, 580).scope("FSDP::all_gather (layers.0)", 525, 575)
    program.launch(530, name="ncclDevKernel_AllGather")
    program.scope("FSDP::post_backward_reduce (layers.1)", 700, 750).launch(710, name="ncclDevKernel_ReduceScatter")
    program.scope("FSDP::post_backward_reduce", 800, 850).launch(810, name="ncclDevKernel_ReduceScatter")
    result = program.run()
    assert values(result, "layer") == [
        "layers.0", "layers.0", "layers.1", "layers.1", "layers.1", "layers.0", "layers.1", None]
    assert values(result, "operation") == [
        "FSDP::all_gather", "aten::linear", "FSDP::all_gather", "aten::linear", "aten::linear", "FSDP::all_gather",
        "FSDP::post_backward_reduce", "FSDP::post_backward_reduce"]
    assert values(result, "phase") == ["forward"] * 4 + ["backward"] * 4
    assert values(result, "attributed_by")[:2] == ["fsdp2 scope", "fsdp2 bracket"]


def test_a_pre_forward_without_its_post_forward_opens_nothing() -> None:
    program = Program().scope("FSDP::pre_forward (layers.0)", 0, 10).scope("FSDP::pre_forward (layers.0)", 100, 110)
    program.op("aten::mm", 20, 40).launch(30).op("aten::mm", 120, 140).launch(130)
    program.scope("FSDP::post_forward (layers.0)", 150, 160)
    assert values(program.run(), "layer") == [None, "layers.0"]


def test_fsdp2_communication_names_its_layer_without_any_bracket() -> None:
    program = Program().scope("FSDP::post_backward_reduce (layers.1)", 0, 50)
    program.launch(10, name="ncclDevKernel_ReduceScatter")
    assert only(program.run()).layer == "layers.1"


def test_fsdp1_forwards_are_numbered_under_each_root() -> None:
    program = Program()
    for step in range(2):
        t = 1000 * step
        program.scope(f"ProfilerStep#{step}", t, t + 990).scope("FullyShardedDataParallel.forward", t + 10, t + 900)
        for k in range(3):
            program.scope("FullyShardedDataParallel.forward", t + 100 + 200 * k, t + 250 + 200 * k)
            program.op("aten::mm", t + 120 + 200 * k, t + 140 + 200 * k).launch(t + 130 + 200 * k)
    assert values(program.run(), "layer") == [f"fsdp_unit.{k}" for k in (0, 1, 2, 0, 1, 2)]


# -- steps


def test_the_later_of_overlapping_steps_wins_and_repeated_numbers_are_one_step() -> None:
    program = Program().scope("ProfilerStep#0", 0, 1000).scope("ProfilerStep#1", 900, 1900)
    program.scope("ProfilerStep#2", 1900, 2900, thread=1).scope("ProfilerStep#1", 950, 1050, thread=2)
    result = program.launch(930).launch(1490).launch(1950).run()
    assert values(result, "step") == [1, 1, 2]
    assert list(result.steps["step"]) == [0, 1, 2] and list(result.steps["n_kernels"]) == [0, 2, 1]
    assert {"duplicate_steps", "overlapping_steps"} <= codes(result)


def test_steps_by_launch_on_any_thread_and_windows_by_first_kernel() -> None:
    program = Program().scope("ProfilerStep#5", 0, 100).scope("ProfilerStep#6", 100, 200)
    program.launch(10, start=40, activity="memcpy", name="Memcpy HtoD").launch(20, start=50)
    program.launch(90, thread=1, start=150).launch(120, start=170).launch(205, start=210)
    result = program.run()
    assert values(result, "step") == [5, 5, 5, 6, None]
    first, second = result.steps.itertuples()
    assert (first.gpu_start_ns, first.gpu_end_ns, first.n_kernels) == (50_000, 170_000, 2)
    assert (second.gpu_start_ns, second.gpu_end_ns) == (170_000, 175_000)


def test_empty_and_cut_steps() -> None:
    program = Program()
    for step, kernels in enumerate([10, 0, 10, 3]):
        program.scope(f"ProfilerStep#{step}", 1000 * step, 1000 * step + 1000)
        for i in range(kernels):
            program.launch(1000 * step + 50 * i + 50)
    steps = program.run().steps
    assert list(steps["n_kernels"]) == [10, 0, 10, 3]
    assert list(steps["complete"]) == [True, True, True, False]
    assert pd.isna(steps["gpu_start_ns"][1]) and pd.isna(steps["gpu_end_ns"][1])
    assert steps["gpu_end_ns"][0] == 515_000, "a step before an empty one ends with its own kernels"


def test_steps_that_lost_kernels_are_incomplete() -> None:
    program = Program().scope("ProfilerStep#0", 0, 100).scope("ProfilerStep#1", 100, 200)
    program.launch(10).launch(20).launch(110).launch(120, kernels=0)
    result = program.run()
    assert list(result.steps["complete"]) == [True, False]


def test_every_device_has_its_own_steps() -> None:
    program = Program().scope("ProfilerStep#0", 0, 100)
    steps = program.launch(10, start=20, device="0").launch(30, start=50, device="1").run().steps
    assert list(zip(steps["device"], steps["gpu_start_ns"], strict=True)) == [("0", 20_000), ("1", 50_000)]


def test_steps_end_with_the_optimizer_where_nothing_marks_them() -> None:
    program = Program()
    for i in range(2):
        t = 1000 * i
        program.op("aten::mm", t, t + 50).launch(t + 10).op(EVALUATE + "MmBackward0", t + 100, t + 150).launch(t + 110)
        for part in range(2):  # two optimizers in a row end one step
            program.scope(f"Optimizer.step#O{part}.step", t + 200 + 100 * part, t + 290 + 100 * part)
            program.launch(t + 210 + 100 * part)
    program.op("aten::mm", 2000, 2050).launch(2010).op(EVALUATE + "MmBackward0", 2100, 2150).launch(2110)
    result = program.run()
    assert values(result, "step") == [0] * 4 + [1] * 4 + [2] * 2
    assert list(result.steps["source"]) == ["optimizer"] * 3 and list(result.steps["complete"]) == [True, True, False]
    assert "steps_without_profiler" in codes(result)


def test_steps_begin_with_a_batch_where_there_is_no_optimizer() -> None:
    program = Program()
    for i in range(3):
        program.scope("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 100 * i, 100 * i + 20)
        program.op("aten::mm", 100 * i + 50, 100 * i + 80).launch(100 * i + 60)
    result = program.run()
    assert values(result, "step") == [0, 1, 2] and list(result.steps["source"]) == ["dataloader"] * 3


def kernels_only(sequence: str) -> Attributed:
    program = Program()
    for i, name in enumerate(sequence):
        program.kernel(10 * i, name=name)
    return program.run()


def test_steps_by_repetition_where_the_host_is_silent() -> None:
    result = kernels_only("efghij" + "abcabcdefghij" * 3 + "abcab")
    assert list(result.steps["source"].unique()) == ["sequence"]
    assert list(result.steps["n_kernels"])[1:-1] == [13] * (len(result.steps) - 2)
    assert values(result, "operation") == [schema.UNATTRIBUTED] * 50


def test_equal_layers_of_one_pass_are_no_steps() -> None:
    result = kernels_only("pq" + "abcdefghij" * 6 + "r")
    assert len(result.steps) == 0 and "no_steps" in codes(result)


# -- no GPU


def test_leaf_operators_stand_in_where_there_is_no_gpu() -> None:
    program = Program().scope("ProfilerStep#0", 0, 1000).op("aten::linear", 10, 90).op("aten::mm", 20, 80, args="{}")
    program.op("aten::add", 100, 150, thread=1).scope("FSDP::all_gather (layers.0)", 200, 260)
    program.op("c10d::_allgather_base_", 210, 250).add("async", "gloo:all_gather", 300, 600, thread=2)
    result = program.run()
    rows = result.kernels
    assert list(rows["name"]) == ["aten::mm", "aten::add", "c10d::_allgather_base_", "gloo:all_gather"]
    assert list(rows["kind"]) == ["compute", "compute", "communication", "communication"]
    assert set(rows["device"]) == {"cpu"} and set(rows["activity"]) == {"cpu_op"}
    assert list(rows["stream"]) == [0, 1, 0, 2]
    assert list(rows["cpu_op"][:2]) == ["aten::mm", "aten::add"] and rows["op_args"][0] == "{}"
    assert rows["launch_ns"].isna().all() and list(rows["operation"][:2]) == ["aten::linear", "aten::add"]
    assert list(rows["operation"][2:]) == ["FSDP::all_gather"] * 2 and list(rows["layer"][2:]) == ["layers.0"] * 2
    assert list(rows["attributed_by"])[-1] == "issue order" and list(rows["step"]) == [0] * 4
    assert "cpu_operations" in codes(result)


def test_an_operator_that_does_its_work_itself_stands_in_with_all_it_calls() -> None:
    program = Program().op("aten::linear", 0, 100).op("aten::addmm", 5, 95).op("aten::expand", 10, 20)
    # The kind decides: a second call that is mostly expand is one row as well.
    program.op("aten::addmm", 200, 230).op("aten::expand", 205, 225).op("aten::add", 300, 310)
    rows = program.run().kernels
    assert list(rows["name"]) == ["aten::addmm", "aten::addmm", "aten::add"]
    assert list(rows["op_type"]) == ["gemm", "gemm", "vector"]


def test_collectives_issued_before_the_capture_stay_without_scope() -> None:
    program = Program().add("async", "gloo:all_reduce", 10, 50, thread=1).op("c10d::allreduce_", 100, 120)
    program.add("async", "gloo:all_reduce", 130, 150, thread=1)
    assert values(program.run(), "attributed_by") == ["nothing", "launch containment", "issue order"]


def test_nothing_stands_in_where_the_profiler_lost_the_gpu() -> None:
    program = Program().op("aten::mm", 0, 50).launch(10, kernels=0).launch(20, kernels=0)
    result = program.run()
    assert len(result.kernels) == 0 and "cpu_operations" not in codes(result)


def test_an_empty_trace_gives_empty_tables() -> None:
    result = Program().run()
    assert len(result.kernels) == 0 and len(result.steps) == 0
    assert list(result.steps.columns) == [c.name for c in schema.STEPS]


# -- several processes


@pytest.mark.parametrize("later", [0, 3], ids=["at the same time", "one a little later"])
def test_two_ranks_in_one_file_keep_their_own_launches_and_steps(later: float) -> None:
    """The same program twice: equal correlation ids, step numbers and times but for `later` µs."""
    both = Program()
    both.pids = ["1", "2", "2"]
    for rank, delay in enumerate([0, later]):
        one = Program().scope("ProfilerStep#3", 0 + delay, 100 + delay, thread=rank)
        one.op(f"aten::rank{rank}", 5, 95, rank)
        for i in range(5):
            one.launch(10 + 10 * i + delay, thread=rank, start=30 + 10 * i + delay, device=str(rank))
        both.host += one.host
        both.device += one.device
    result = both.run()
    assert "several_processes" in codes(result) and "duplicate_steps" not in codes(result)
    assert list(result.kernels["cpu_op"]) == [f"aten::rank{d}" for d in result.kernels["device"]]
    assert [both.host[i]["name"] for i in result.kernels["op_id"]] == list(result.kernels["cpu_op"])
    assert list(zip(result.steps["device"], result.steps["n_kernels"], strict=True)) == [("0", 5), ("1", 5)]
    assert ((result.kernels["start_ns"] - result.kernels["launch_ns"]) == 20_000).all()


# -- names


@pytest.mark.parametrize(("name", "role", "label", "phase"), [
    ("ProfilerStep#12", Role.STEP, "ProfilerStep#12", names.NO_PHASE),
    ("Iteration3", Role.STEP, "Iteration3", names.NO_PHASE),
    ("Layer11", Role.LAYER, "Layer11", names.NO_PHASE),
    ("chopper::layers.3.mlp", Role.MODULE, "layers.3.mlp", names.NO_PHASE),
    ("fwd::layers.3.mlp", Role.MODULE, "layers.3.mlp", names.NO_PHASE),
    ("Optimizer.step#AdamW.step", Role.OPTIMIZER, "AdamW.step", names.OPTIMIZER),
    ("Optimizer.zero_grad#SGD.zero_grad", Role.OPTIMIZER, "SGD.zero_grad", names.OPTIMIZER),
    ("b_ga", Role.SCOPE, "b_ga", names.OPTIMIZER),
    ("FSDP::all_gather (layers.0)", Role.FSDP2, "FSDP::all_gather", names.NO_PHASE),
    ("FSDP::post_backward_rs_wait ()", Role.FSDP2, "FSDP::post_backward_rs_wait", names.BACKWARD),
    ("FSDP::backward_prefetch for layers.0", Role.FSDP2, "FSDP::backward_prefetch", names.BACKWARD),
    ("FullyShardedDataParallel._post_backward_hook", Role.SCOPE, "FSDP1::post_backward_hook", names.BACKWARD),
    ("PP:0F1", Role.WRAPPER, "PP:0F1", names.FORWARD),
    ("PP:3W2", Role.WRAPPER, "PP:3W2", names.BACKWARD),
    ("PP:1RECV_F0", Role.WRAPPER, "PP:1RECV_F0", names.FORWARD),
    ("PP:1SEND_B0", Role.WRAPPER, "PP:1SEND_B0", names.BACKWARD),
    ("PP:(0F1;1B0)OVERLAP_F_B", Role.WRAPPER, "PP:(0F1;1B0)OVERLAP_F_B", names.NO_PHASE),
    ("Backward 2", Role.WRAPPER, "Backward 2", names.BACKWARD),
    ("## Call CompiledFxGraph abc ##", Role.WRAPPER, "## Call CompiledFxGraph abc ##", names.NO_PHASE),
    ("mlp_gp", Role.SCOPE, "mlp_gp", names.NO_PHASE),
    ("c10d::x", Role.SCOPE, "c10d::x", names.NO_PHASE),
    ("<script>alert(1)</script>", Role.SCOPE, "<script>alert(1)</script>", names.NO_PHASE),
])
def test_annotations(name: str, role: Role, label: str, phase: int) -> None:
    meaning = names.of_annotation(name)
    assert (meaning.role, meaning.label, meaning.phase) == (role, label, phase)


@pytest.mark.parametrize(("name", "role", "label"), [
    ("aten::mul.Tensor", Role.OP, "aten::mul"), ("triton_poi_fused_add_0", Role.OP, "triton_poi_fused_add_0"),
    (EVALUATE + "MmBackward0", Role.AUTOGRAD, "MmBackward0"), ("CompiledFunctionBackward", Role.GRAD_FN,
                                                               "CompiledFunctionBackward"),
    ("RegisterPostBackwardFunction", Role.OP, "RegisterPostBackwardFunction"),
    ("torch::autograd::AccumulateGrad", Role.GRAD_FN, "AccumulateGrad"),
    ("Torch-Compiled Region: 0/0", Role.WRAPPER, "Torch-Compiled Region: 0/0"),
    ("Optimizer.step#SGD.step", Role.OPTIMIZER, "SGD.step"),
])
def test_operators(name: str, role: Role, label: str) -> None:
    meaning = names.of_operator(name)
    assert (meaning.role, meaning.label) == (role, label)


@pytest.mark.parametrize(("fqns", "expected"), [
    (["model.layers.0.mlp", "model.layers.1"], {"model.layers.0.mlp": "layers.0", "model.layers.1": "layers.1"}),
    (["layers.0"], {"layers.0": "layers.0"}),
    (["_orig_mod.module.h.2.attn"], {"_orig_mod.module.h.2.attn": "h.2"}),
    (["encoder.layers.0", "decoder.layers.0"], {"encoder.layers.0": "encoder.layers.0",
                                                "decoder.layers.0": "decoder.layers.0"}),
    (["layer1.0.conv1", "layer1.1.conv1"], {"layer1.0.conv1": "layer1.0", "layer1.1.conv1": "layer1.1"}),
    (["layers.3.experts.5", "layers.3.experts.6"],
     {"layers.3.experts.5": "layers.3", "layers.3.experts.6": "layers.3"}),
    (["head.0", "norm"], {}),
    (["0", "1"], {"0": "0", "1": "1"}),
])
def test_layers_of_modules(fqns: list[str], expected: dict[str, str]) -> None:
    assert layers.of_modules(fqns) == expected
