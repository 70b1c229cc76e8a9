"""The memory that parameters, gradients and optimizer states should take on each GPU (docs/memory.md).

    bytes(GPU) = parameters(GPU) · (b_parameter + b_gradient + b_optimizer)
    parameters(GPU) = N / (dp_shard · cp · tp · pp)    experts: N_experts / (max(dp_shard · cp, ep) · pp)

Bytes per parameter with Adam, as ZeRO (Rajbhandari et al. 2020, section 3.1) counts them: 2 + 2 + 12 in mixed precision
(the optimizer holds a float32 copy, m and v); in torch, whose optimizers work on float32 parameters, 4 + 4 + 8; where
all is bfloat16, 2 + 2 + 4. Full sharding (ZeRO-3, FSDP) divides all three.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

Modules = Sequence[Mapping[str, Any]]
"""The modules of a sidecar: fqn, params."""
Plan = Mapping[str, int]

STATES = {"adafactor": 0, "sgd": 1, "adagrad": 1, "rmsprop": 1, "lion": 1, "muon": 1, "adadelta": 2, "lamb": 2,
          "adam": 2}
"""Tensors of the size of the parameters that an optimizer keeps, by a part of its name; SGD with momentum."""
ASSUMED = "AdamW"
EXPERTS = re.compile(r"(^|\.)experts?(\.\d+)?$")
_STEP = re.compile(r"(?:^|#)(\w+)\.step\b")
_FUNCTOR = re.compile(r"multi_tensor_apply_kernel\b.*Functor\w*<\s*(float|c10::BFloat16|c10::Half|double)\b")
_MASTER = re.compile(r"Functor\w*Master", re.IGNORECASE)
"""Apex and Megatron keep float32 copies beside 16-bit parameters."""
_FUSED = re.compile(r"Fused(Adam|Sgd|SGD|Adagrad|LAMB)\w*")
_INPUT = re.compile(r'"Input type":\s*\[[^\]]*?"(float|double|c10::BFloat16|c10::Half)"')
_WIDTH = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2}


class Optimizer(NamedTuple):
    """What a trace tells of an optimizer. name: None where it does not; width: bytes of what it works on, None; master:
    it keeps a float32 copy of 16-bit parameters."""

    name: str | None
    width: int | None
    master: bool


class Layout(NamedTuple):
    """Bytes per parameter, and in words what they are."""

    parameter: float
    gradient: float
    optimizer: float
    text: str


def optimizer(kernels: pd.DataFrame) -> Optimizer:
    """The optimizer by its scope (`AdamW.step`) and the names of its kernels."""
    own = kernels[kernels["phase"] == "optimizer"]
    kernel_names = own["name"].astype(str)
    steps = own["operation"].astype(str).str.extract(_STEP)[0].dropna()
    fused = kernel_names.str.extract(_FUSED)[0].dropna()
    functors = kernel_names.str.extract(_FUNCTOR)[0].dropna()
    functors = functors[functors.index.isin(fused.index)] if len(fused) else functors
    width = _WIDTH[str(functors.mode().iloc[0])] if len(functors) else None
    named = next((str(found.mode().iloc[0]) for found in (steps, fused) if len(found)), None)
    return Optimizer(named, width, bool(kernel_names.str.contains(_MASTER).any()))


def matrix_width(kernels: pd.DataFrame) -> int | None:
    """Bytes of the numbers that matrix products take: 4, 2, or None where no shapes were recorded."""
    types = kernels.loc[kernels["op_type"] == "gemm", "op_args"].dropna().astype(str).str.extract(_INPUT)[0].dropna()
    return _WIDTH.get(str(types.mode().iloc[0])) if len(types) else None


def layout(found: Optimizer, matrices: int | None) -> Layout:
    """Bytes per parameter of what a trace tells; what it does not tell is assumed: AdamW, mixed precision."""
    name = (found.name or ASSUMED).lower()
    states = next((n for part, n in STATES.items() if part in name), 2)
    if found.width == 2 and not found.master:
        return Layout(2, 2, 2 * states, "16-bit parameters, gradients and states")
    if found.width in (4, 8) and not found.master:
        width = found.width
        return Layout(width, width, width * states, f"{8 * width}-bit parameters, gradients and states")
    if found.width is None and not found.master and matrices == 4:
        return Layout(4, 4, 4 * states, "32-bit parameters, gradients and states")
    return Layout(2, 2, 4 * (states + 1), "16-bit parameters and gradients, 32-bit copies and states")


def parameters(modules: Modules, plan: Plan, whole: bool) -> float | None:
    """Parameters that one GPU holds; None where the modules do not tell. whole: the modules are those of the whole
    model, not of some stages of a pipeline (each stage is a model of its own in the table)."""
    roots = [m.get("params") for m in modules if m["fqn"] == ""]
    if not roots or None in roots:
        return None
    total = sum(n for n in roots if n)
    experts = sum(m.get("params") or 0 for m in modules if EXPERTS.search(m["fqn"])
                  and not EXPERTS.search(m["fqn"].rpartition(".")[0]))
    stages = plan.get("pp", 1) if whole else 1
    shards = plan.get("dp_shard", 1) * (plan.get("cp", 1) if plan.get("dp_shard", 1) > 1 else 1)
    of_experts = max(shards, plan.get("ep", 1)) if plan.get("ep", 1) > 1 else shards * plan.get("tp", 1)
    return (total - experts) / (shards * plan.get("tp", 1) * stages) + experts / (of_experts * stages)


DIMENSIONS = {"shard": "dp_shard", "tensor": "tp", "pipeline": "pp", "expert": "ep", "context": "cp"}
"""What a process group's role divides."""


def plan_of_groups(groups: pd.DataFrame) -> Plan:
    """The plan that process groups (metrics.process_groups) tell, where no one told the handler: the size of the
    largest group of each role. Plain data parallelism divides nothing."""
    largest = groups.groupby("role")["size"].max()
    return {name: int(largest[role]) for role, name in DIMENSIONS.items() if role in largest.index}


COLUMNS = ("gpu", "parameters", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "state_bytes", "lasting_bytes",
           "floor_ratio", "activation_bytes", "floor_bytes", "peak_bytes", "total_bytes", "bytes_per_parameter",
           "optimizer", "layout", "plan", "assumed")


def model_state(modules: Mapping[int, Modules], plans: Mapping[int, Plan], kernels: pd.DataFrame,
                measured: pd.DataFrame, activations: pd.DataFrame, total_bytes: Mapping[int, int] | None = None,
                inferred: bool = False) -> pd.DataFrame:
    """One row per gpu whose parameters are known; COLUMNS, all estimated but what is named measured here.

    parameters: held by the GPU; state_bytes = parameter + gradient + optimizer bytes; lasting_bytes: without gradients,
    which zero_grad frees between steps; floor_ratio: measured floor / lasting_bytes. floor_bytes, peak_bytes: of
    `metrics.memory.memory` (measured); activation_bytes: of `metrics.memory.activations` (measured), largest of its
    steps; total_bytes: memory of the device. optimizer, layout, plan: on what the bytes rest; assumed: what of it the
    data do not tell, or "".

    modules and plans (sizes of the parallel dimensions) by gpu; inferred: the plans come from process groups.
    """
    whole = len(modules) < 2 or len({tuple((m["fqn"], m.get("params")) for m in own) for own in modules.values()}) == 1
    levels = measured.set_index("gpu")
    forward = activations.groupby("gpu")["activation_bytes"].max()
    rows = []
    for gpu, own in sorted(modules.items()):
        plan = {k: int(v) for k, v in plans.get(gpu, {}).items() if int(v) > 0}
        n = parameters(own, plan, whole)
        if n is None:
            continue
        mine = kernels[kernels["gpu"] == gpu]
        found, matrices = optimizer(mine), matrix_width(mine)
        each = layout(found, matrices)
        lasting = n * (each.parameter + each.optimizer)
        known = gpu in levels.index and bool(levels["total_known"][gpu])
        floor, peak = (levels[c][gpu] if known else np.nan for c in ("floor_bytes", "peak_bytes"))
        rows.append((
            gpu, n, n * each.parameter, n * each.gradient, n * each.optimizer, n * sum(each[:3]), lasting,
            floor / lasting if lasting else np.nan, forward.get(gpu, np.nan), floor, peak,
            (total_bytes or {}).get(gpu, np.nan), sum(each[:3]), found.name or ASSUMED, each.text,
            " × ".join(f"{k} {v}" for k, v in plan.items() if v > 1) or "not divided",
            "; ".join(_assumed(found, matrices, plans.get(gpu, {}), inferred, whole and plan.get("pp", 1) > 1))))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _assumed(found: Optimizer, matrices: int | None, plan: Plan, inferred: bool, stages: bool) -> list[str]:
    out = []
    if found.name is None:
        out.append(f"the optimizer is {ASSUMED}")
    elif "sgd" in found.name.lower():
        out.append("SGD keeps a momentum")
    if found.width is None and not found.master and matrices != 4:
        out.append("mixed precision as ZeRO counts it")
    if not plan:
        out.append("nothing is divided among GPUs")
    elif inferred:
        out.append("the plan is that of the process groups")
    if stages:
        out.append("all stages have as many parameters")
    return out
