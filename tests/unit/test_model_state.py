"""Expected model states against the figures of the ZeRO paper (arXiv 1910.02054) and of Llama 3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import tb_chopper
from tb_chopper.backend.metrics import memory, model_state
from tb_chopper.backend.metrics.model_state import Optimizer
from tests.builders import TraceBuilder
from tests.unit import tables
from tests.unit.test_memory import ONE, allocated, steps
from torch_ext import sidecar

LLAMA3_8B = 8_030_261_248
FUSED = ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
         "TensorListMetadata<1>, at::native::(anonymous namespace)::FusedAdamMathFunctor<{}, 4, (ADAM_MODE)1, false>>")
FOREACH = ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
           "TensorListMetadata<3>, at::native::(anonymous namespace)::PointwiseOpListFunctor<{}, 3>>")


def model(n: int, **parts: int) -> list[dict[str, Any]]:
    return [{"fqn": "", "cls": "M", "params": n}, *({"fqn": f.replace("__", "."), "cls": "X", "params": p}
                                                    for f, p in parts.items())]


def state(modules: dict[int, Any], plan: dict[str, int], kernels: pd.DataFrame | None = None, **more: Any) -> pd.Series:
    rows = tables.kernels([{"start": 0, "end": 1}]) if kernels is None else kernels
    measured = memory.memory(allocated(), rows)
    found = model_state.model_state(modules, dict.fromkeys(modules, plan), rows, measured,
                                    memory.activations(allocated(), rows), **more)
    row: pd.Series = found.iloc[0]
    return row


@pytest.mark.parametrize("shards, gigabytes", [(1, 120.0), (64, 1.9)])
def test_zero_paper(shards: int, gigabytes: float):
    """Figure 1: 7.5 B parameters, Adam in mixed precision: 120 GB, and 1.9 GB with all of it divided by 64."""
    row = state({0: model(7_500_000_000)}, {"dp_shard": shards})
    assert row["state_bytes"] / 1e9 == pytest.approx(gigabytes, rel=0.02)
    assert row["bytes_per_parameter"] == 16
    assert row["optimizer_bytes"] == 12 * 7_500_000_000 / shards
    assert "mixed precision" in row["assumed"] and "the optimizer is AdamW" in row["assumed"]


def test_llama3_8b_on_eight():
    row = state({0: model(LLAMA3_8B)}, {"dp_shard": 8})
    assert row["parameters"] == LLAMA3_8B / 8
    assert row["state_bytes"] == 16 * LLAMA3_8B / 8
    assert row["lasting_bytes"] == 14 * LLAMA3_8B / 8


@pytest.mark.parametrize("plan, share", [
    ({"dp_replicate": 4}, 1), ({"dp_shard": 4, "dp_replicate": 2}, 4), ({"dp_shard": 4, "tp": 2}, 8),
    ({"tp": 8, "pp": 2}, 16), ({"dp_shard": 2, "cp": 4}, 8), ({"cp": 4}, 1), ({}, 1)])
def test_what_a_plan_divides(plan: dict[str, int], share: int):
    assert model_state.parameters(model(6400), plan, True) == 6400 / share


def test_experts_are_divided_among_expert_ranks():
    """2400 of 3000 parameters are experts, 600 are not; the router is none."""
    modules = model(3000, layers__0__moe=2405, layers__0__moe__experts=2400, layers__0__moe__experts__1=300,
                    layers__0__moe__router=5)
    assert model_state.parameters(modules, {"ep": 4}, True) == 600 + 2400 / 4
    assert model_state.parameters(modules, {"ep": 4, "dp_shard": 8}, True) == 3000 / 8
    assert model_state.parameters(modules, {}, True) == 3000


def test_stages_of_a_pipeline_have_their_own_modules():
    own = {0: model(100, layers__0=90), 1: model(300, layers__1=290)}
    rows = tables.kernels([{"start": 0, "end": 1}])
    found = model_state.model_state(own, {gpu: {"pp": 2} for gpu in own}, rows, memory.memory(allocated(), rows),
                                    memory.activations(allocated(), rows))
    assert found["parameters"].tolist() == [100, 300]
    assert model_state.parameters([*model(100), *model(40)], {"pp": 2}, False) == 140, "two stages, interleaved"
    same = state({0: model(400), 1: model(400)}, {"pp": 2})
    assert same["parameters"] == 200 and "stages" in same["assumed"]


def optimizer_kernels(name: str, operation: str = "op") -> pd.DataFrame:
    return tables.kernels([{"start": 0, "end": 1, "phase": "optimizer", "name": name, "operation": operation}])


@pytest.mark.parametrize("name, operation, found", [
    (FUSED.format("float"), "AdamW.step", Optimizer("AdamW", 4, False)),
    (FUSED.format("c10::BFloat16"), "op", Optimizer("Adam", 2, False)),
    (FOREACH.format("float"), "SGD.step", Optimizer("SGD", 4, False)),
    ("void multi_tensor_apply_kernel<TensorListMetadata<5>, AdamFunctorMaster<c10::BFloat16, float, int>>", "op",
     Optimizer(None, 2, True)),
    ("elementwise_kernel", "op", Optimizer(None, None, False))])
def test_the_optimizer_of_a_trace(name: str, operation: str, found: Optimizer):
    assert model_state.optimizer(optimizer_kernels(name, operation)) == found


@pytest.mark.parametrize("found, matrices, each", [
    (Optimizer("AdamW", 4, False), 2, (4, 4, 8)), (Optimizer("Adam", 2, False), 2, (2, 2, 4)),
    (Optimizer(None, 2, True), 2, (2, 2, 12)), (Optimizer(None, None, False), 2, (2, 2, 12)),
    (Optimizer(None, None, False), 4, (4, 4, 8)), (Optimizer("SGD", 4, False), 4, (4, 4, 4)),
    (Optimizer("Adafactor", None, False), 2, (2, 2, 4))])
def test_bytes_per_parameter(found: Optimizer, matrices: int, each: tuple[int, int, int]):
    assert model_state.layout(found, matrices)[:3] == each


def test_matrices_by_their_recorded_types():
    args = '{"Input Dims": [[8, 8], [8, 8]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}'
    rows = tables.kernels([{"start": 0, "end": 1, "op_type": "gemm", "op_args": args}])
    assert model_state.matrix_width(rows) == 2
    odd = '{"Input Dims": [[], [8, 8]], "Input type": ["", "float"]}'  # a DTensor has no type
    assert model_state.matrix_width(tables.kernels([{"start": 0, "end": 1, "op_type": "gemm", "op_args": odd}])) == 4
    assert model_state.matrix_width(tables.kernels([{"start": 0, "end": 1}])) is None


def test_unknown_parameters_have_no_row():
    modules = {0: [{"fqn": "", "cls": "M", "params": None}], 1: [{"fqn": "layers.0", "cls": "B", "params": 7}]}
    rows = tables.kernels([{"start": 0, "end": 1}])
    found = model_state.model_state(modules, {}, rows, memory.memory(allocated(), rows),
                                    memory.activations(allocated(), rows))
    assert len(found) == 0 and found.columns.tolist() == list(model_state.COLUMNS)


def test_plans_of_process_groups():
    groups = pd.DataFrame({"role": ["shard", "shard", "tensor", "data", "unknown"], "size": [4, 8, 2, 2, 99]})
    assert model_state.plan_of_groups(groups) == {"dp_shard": 8, "tp": 2}


def test_activations_are_what_the_forward_adds():
    """ONE: 100, 300, 250, 850, 250 at 0, 10, 20, 30, 40."""
    rows = tables.kernels([{"start": 6, "end": 7, "launch": 5, "step": 5},
                           {"start": 36, "end": 37, "launch": 35, "step": 5, "phase": "backward"}])
    events = allocated(memory.Source(ONE, {"0": 0}, memory.PROFILER), windows=steps((5, 0, 50)))
    found = memory.activations(events, rows)
    assert found.to_numpy().tolist() == [[0, 5, 100, 850, 750]]


def test_model_state_of_a_run(tmp_path: Path):
    """A model of 100 float32 parameters that AdamW trains on two shards: 50 · (4 + 4 + 8) bytes; floor 1000."""
    for rank in (0, 1):
        trace = TraceBuilder(rank=rank, world_size=2)
        trace.head["deviceProperties"][0]["totalGlobalMem"] = 80_000
        trace.training_step(0, 0)
        trace.memory(5, 1000, 1000, 4000)
        trace.memory(30, 300, 1300, 4000)
        trace.memory(450, -300, 1000, 4000)
        path = trace.write(tmp_path / f"rank{rank}.pt.trace.json")
        content = sidecar.empty()
        content["modules"] = [{"fqn": "", "cls": "M", "params": 100, "order": 0}]
        content["training"]["parallel"] = {"dp_shard": 2}
        sidecar.write(sidecar.path_for(path), content)
    row = tb_chopper.open_run(tmp_path).model_state().iloc[1]
    assert row[["gpu", "parameters", "state_bytes", "floor_bytes", "peak_bytes", "total_bytes"]].tolist() == [
        1, 50, 800, 1000, 1300, 80_000]
    assert row["activation_bytes"] == 300
    assert row["floor_ratio"] == pytest.approx(1000 / 600)
    assert row["plan"] == "dp_shard 2"
