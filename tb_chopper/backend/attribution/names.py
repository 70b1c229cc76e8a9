"""What the name of a host event says about it: its role, its phase, the module it stands for.

Everything here is decided once per distinct name, never per event.
Names of the frameworks: PyTorch 2.0 to 2.13, torchtitan, Megatron, the Chopper paper's workload.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from tb_chopper.backend.schema import PHASES
from torch_ext.sidecar import scope_fqn

FORWARD, BACKWARD, OPTIMIZER, OTHER = range(len(PHASES))
"""Codes of `schema.PHASES`."""
NO_PHASE = -1


class Role(IntEnum):
    """What a host event is for attribution."""

    OP = 0  # an operator
    AUTOGRAD = 1  # autograd::engine::evaluate_function: X
    GRAD_FN = 2  # X itself: MmBackward0, torch::autograd::AccumulateGrad
    WRAPPER = 3  # an operator or scope that only surrounds others: compiled regions, checkpoint, DDP.forward
    STEP = 4  # one training step
    LAYER = 5  # Layer3
    MODULE = 6  # a module's scope, by its fully qualified name
    FRAME = 7  # nn.Module: X_3, of the Python tracer
    FSDP2 = 8  # FSDP::all_gather (layers.0)
    BRACKET = 9  # from FSDP::pre_forward (X) to FSDP::post_forward (X)
    FSDP1_FORWARD = 10  # FullyShardedDataParallel.forward
    OPTIMIZER = 11  # Optimizer.step#AdamW.step
    SCOPE = 12  # any other record_function: the author's name of an operation


@dataclass(frozen=True)
class Meaning:
    """What one name means. `label` is the operation name it gives, `fqn` the module it stands for, if any."""

    role: Role
    label: str
    phase: int = NO_PHASE
    fqn: str | None = None


def of_operator(name: str) -> Meaning:
    """Meaning of an operator's name. Old traces record scopes as operators: those are recognised by their names."""
    if name.startswith(_EVALUATE):
        return Meaning(Role.AUTOGRAD, name[len(_EVALUATE):], BACKWARD)
    if _GRAD_FN.search(name):
        return Meaning(Role.GRAD_FN, name.removeprefix("torch::autograd::"), BACKWARD)
    if _WRAPPER_OP.search(name):
        return Meaning(Role.WRAPPER, name, BACKWARD if REDUCER.search(name) else NO_PHASE)
    if _OLD_SCOPE.search(name):
        return of_annotation(name)
    return Meaning(Role.OP, _OVERLOAD.sub(r"\1", name), BACKWARD if REDUCER.search(name) else NO_PHASE)


def of_annotation(name: str) -> Meaning:
    """Meaning of a `record_function` name."""
    for pattern, make in _ANNOTATIONS:
        match = pattern.search(name)
        if match:
            return make(match)
    fqn = scope_fqn(name)
    return Meaning(Role.SCOPE, name) if fqn is None else Meaning(Role.MODULE, fqn, fqn=fqn)


def of_frame(name: str) -> Meaning:
    """Meaning of an `nn.Module: X_3` frame."""
    return Meaning(Role.FRAME, name.removeprefix("nn.Module: "))


def bracket(fqn: str) -> Meaning:
    """Meaning of the time between FSDP2's pre_forward and post_forward of a module."""
    return Meaning(Role.BRACKET, fqn, fqn=fqn)


def collective(name: str) -> str:
    """Plain name of a collective: `_allgather_base` and `ncclDevKernel_AllGather_RING` are both all_gather."""
    squeezed = re.sub(r"[^a-z0-9]", "", name.lower())
    return next((plain for key, plain in _COLLECTIVES.items() if key in squeezed), "")


_EVALUATE = "autograd::engine::evaluate_function: "
_GRAD_FN = re.compile(r"Backward\d*$|(^|::)AccumulateGrad$")
_WRAPPER_OP = re.compile(
    r"^(Torch-Compiled Region|CompiledFunction$|TorchDynamo |Pregraph bytecode|AOTDispatcher |CheckpointFunction$"
    r"|torch\.distributed\.ddp\.|## )|\(dynamo_timed\)$")
REDUCER = re.compile(r"^torch::?\.?distributed(::|\.ddp\.)reducer")
_OLD_SCOPE = re.compile(
    r"^(ProfilerStep#|Optimizer\.|enumerate\(DataLoader\)|DistributedDataParallel\.|FullyShardedDataParallel\.|FSDP::)")
_OVERLOAD = re.compile(r"^(\w+::\w+)\.\w+$")

_WRAPPERS = re.compile(
    r"^## Call CompiledFxGraph|\(dynamo_timed\)$|^DistributedDataParallel\.forward$|^execute_\w*(context|model)")
_FSDP2_BACKWARD = re.compile(r"^(pre_backward|backward_prefetch|post_backward|root_post_backward)")
_NOT_MODULES = ("FSDP", "PP", "aten", "c10d", "nccl", "gloo", "torch", "autograd")


def _fsdp2(match: re.Match[str]) -> Meaning:
    action, fqn = match["action"], match["fqn"] or match["target"]
    phase = BACKWARD if _FSDP2_BACKWARD.search(action) else NO_PHASE
    return Meaning(Role.FSDP2, f"FSDP::{action}", phase, fqn or "")


def _fsdp1(match: re.Match[str]) -> Meaning:
    phase = BACKWARD if "backward" in match["method"] else NO_PHASE
    return Meaning(Role.SCOPE, f"FSDP1::{match['method'].lstrip('_')}", phase)


def _pipeline(match: re.Match[str]) -> Meaning:
    """F, B (backward), I (its inputs' part), W (its weights' part), SEND_F, ..., of a pipeline stage."""
    action = match["action"] or ""
    phase = FORWARD if re.search(r"(^|_)F$", action) else BACKWARD if _PIPELINE_BACKWARD.search(action) else NO_PHASE
    return Meaning(Role.WRAPPER, match.string, phase)


_PIPELINE_BACKWARD = re.compile(r"(^|_)[BIW]$|^REDUCE_GRAD$")


def _wrapper(phase: int = NO_PHASE) -> Callable[[re.Match[str]], Meaning]:
    return lambda match: Meaning(Role.WRAPPER, match.string, phase)


def _module(match: re.Match[str]) -> Meaning:
    if match["kind"] in _NOT_MODULES:
        return Meaning(Role.SCOPE, match[0])
    return Meaning(Role.MODULE, match["fqn"], fqn=match["fqn"])


_ANNOTATIONS: list[tuple[re.Pattern[str], Callable[[re.Match[str]], Meaning]]] = [
    (re.compile(r"^(ProfilerStep#|Iteration_?)\d+$|^(## )?step\b.*|^torch_titan step.*"),
     lambda m: Meaning(Role.STEP, m[0])),
    (re.compile(r"^Layer_?\d+$"), lambda m: Meaning(Role.LAYER, m[0])),
    (re.compile(r"^Optimizer\.(?:step|zero_grad)#(?P<label>.*)$"),
     lambda m: Meaning(Role.OPTIMIZER, m["label"], OPTIMIZER)),
    (re.compile(r"^(opt_\w+|b_ga|b_ar)$"), lambda m: Meaning(Role.SCOPE, m[0], OPTIMIZER)),
    (re.compile(r"^(##\s*)?(optimizer|optim|zero_grad|optimizer_step|clip_grad\w*)(\s*##)?$"),
     lambda m: Meaning(Role.SCOPE, m[2], OPTIMIZER)),
    (re.compile(r"^enumerate\(DataLoader\)"), lambda m: Meaning(Role.SCOPE, "DataLoader", OTHER)),
    (re.compile(r"^(GetInputLabels|dl)$"), lambda m: Meaning(Role.SCOPE, m[0], OTHER)),
    (_WRAPPERS, _wrapper()),
    (re.compile(r"^(##\s*)?(b_l|l|backward|loss\.backward|bwd)(\s*##)?$"), _wrapper(BACKWARD)),
    (re.compile(r"^(##\s*)?(forward|fwd|train|train_step|training_step|model|iteration)(\s*##)?$"), _wrapper()),
    (re.compile(r"^FSDP::(?P<action>\w+)(?: for (?P<target>\S+))?(?: \((?P<fqn>[^)]*)\))?"), _fsdp2),
    (re.compile(r"^FullyShardedDataParallel\.forward$"), lambda m: Meaning(Role.FSDP1_FORWARD, m[0])),
    (re.compile(r"^FullyShardedDataParallel\.(?P<method>\w+)$"), _fsdp1),
    (re.compile(r"^PP:(\d+(?P<action>[A-Z_]+)\d*$|\()"), _pipeline),
    (re.compile(r"^chopper::pp::(?P<action>F|B|I|W|schedule)::"), _pipeline),
    (re.compile(r"^Forward \d+$"), _wrapper(FORWARD)),
    (re.compile(r"^Backward \d+$"), _wrapper(BACKWARD)),
    (re.compile(r"^(?P<kind>\w+)::(?P<fqn>[A-Za-z_]\w*(\.\w+)*)$"), _module),
]

_COLLECTIVES = {
    "crossdevicereduce": "all_reduce", "notify": "notify", "dispatchlayout": "layout",
    "reducescatter": "reduce_scatter", "allgather": "all_gather", "alltoall": "all_to_all", "allreduce": "all_reduce",
    "broadcast": "broadcast", "sendrecv": "send_recv", "barrier": "barrier", "reduce": "reduce", "gather": "gather",
    "scatter": "scatter", "send": "send", "recv": "recv", "wait": "wait", "dispatch": "dispatch", "combine": "combine",
}
