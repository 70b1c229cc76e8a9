"""Arguments of events, rendered as JSON members in the exporter's order, and the runtime calls' names and numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tb_chopper.backend.simulate import plan
from tb_chopper.backend.simulate.config import Config
from tb_chopper.backend.simulate.workload import Call, Collective, Dims, Kernel

RANK, SEQ, CORRELATION, NEXT, PREVIOUS = "\x01R", "\x01S", "\x01C", "\x01X", "\x01Y"
"""Places that are filled per rank, per collective and per call, and per rank with the ranks of its neighbour stages."""
DTYPES = {"BFloat16": "c10::BFloat16", "Float": "float"}

LAUNCH: dict[str, dict[str, tuple[str, str]]] = {
    "rocm": {
        "launch": ("hipLaunchKernel", '"cid": 107'),
        "module": ("hipModuleLaunchKernel", '"cid": 138'),
        "ext_module": ("hipExtModuleLaunchKernel", '"cid": 65'),
        "ext": ("hipExtLaunchKernel", '"cid": 62'),
        "copy": ("hipMemcpyWithStream", '"cid": 153'),
    },
    "cuda": {
        "launch": ("cudaLaunchKernel", '"cbid": 211'),
        "driver": ("cuLaunchKernelEx", '"cbid": 652'),
        "ext": ("cudaLaunchKernelExC", '"cbid": 430'),
        "copy": ("cudaMemcpyAsync", '"cbid": 41'),
    },
}
WAIT_CALLS: dict[str, list[tuple[str, str]]] = {
    "rocm": [("hipStreamIsCapturing", '"cid": 290'), ("hipStreamWaitEvent", '"cid": 200')],
    "cuda": [("cudaStreamIsCapturing", '"cbid": 317'), ("cudaStreamWaitEvent", '"cbid": 147')],
}
SYNCHRONIZE = {"rocm": ("hipEventSynchronize", '"cid": 60'), "cuda": ("cudaEventSynchronize", '"cbid": 137')}


def grid(kernel: Kernel) -> int:
    """The grid's x as the runtime records it: threads for hipExtModuleLaunchKernel, blocks for the others."""
    return kernel.blocks * kernel.block if kernel.api == "ext_module" else kernel.blocks


def launch(kernel: Kernel, dialect: str) -> tuple[str, str]:
    """Name and arguments of the call that launches a kernel."""
    name, number = LAUNCH[dialect][kernel.api]
    if dialect == "cuda":
        return name, f"{number}, {CORRELATION}"
    if kernel.kind == "memcpy":
        direction = 2 if "DtoH" in kernel.name else 1
        return name, f'{number}, {CORRELATION}, "bytes": "{int(kernel.bytes)}", "kind": "{direction}"'
    shape = f'"grid": [{grid(kernel)}, 1, 1],      "block": [{kernel.block}, 1, 1],      "shared memory": 0'
    return name, f'"kernel": {json.dumps(kernel.name)}, {number}, {CORRELATION},      {shape}'


def shapes(call: Call) -> str:
    """What `record_shapes` adds to an operator: one entry per argument."""
    if not call.types:
        return ""
    n = len(call.types)
    dims = [*map(_listed, call.dims), *([[]] * (n - len(call.dims)))]
    return _members({
        "Concrete Inputs": [*call.concrete, *[""] * (n - len(call.concrete))], "Input type": list(call.types),
        "Input Strides": [_strides(d) for d in dims], "Input Dims": dims})


def buffers(collective: Collective) -> str:
    """What `record_shapes` adds to a collective's operator."""
    dtype = DTYPES[collective.dtype]
    return _members({"Concrete Inputs": ["", ""], "Input type": [dtype, dtype], "Input Strides": [[1], [1]],
                     "Input Dims": [[collective.out_nelems], [collective.in_nelems]]})


def comms(c: Collective, config: Config, peer: int = -1) -> str:
    """Arguments of record_param_comms; `peer`: the other end of a message, counted in its group."""
    empty: list[list[int]] = [[]] * 9
    size, step = str(plan.sizes(config).get(c.group, config.ranks)), plan.stride(config, c.group)
    before = _members({
        "Collective name": c.name, "Process Group Description": _mark(c.group, "description"), "dtype": c.dtype})
    after = _members({
        "Input Strides": [[[1]], *empty],
        "Concrete Inputs": ["", SEQ, "", "0", "", "[]", "[]", _mark(c.group, "start"), str(step), size],
        "Out msg nelems": c.out_nelems, "Process Group Name": _mark(c.group, "name"),
        "Input type": ["TensorList", "Scalar", "", "Scalar", "", *["ScalarList"] * 2, *["Scalar"] * 3],
        "Global rank stride": step, "Out split size": "[]", "In split size": "[]",
        "Process Group Ranks": _mark(c.group, "ranks"), "Group size": int(size),
        "Input Dims": [[[c.in_nelems]], *empty]})
    start = f', "Global rank start": {_mark(c.group, "start")}'
    rank = RANK if peer < 0 else f"{peer}{_other_end(c)}"
    return f'{before}, "Rank": {rank}{after}{start}, "Seq": {SEQ}, "In msg nelems": {c.in_nelems}'


def on_kernel(c: Collective, config: Config) -> str:
    """What the profiler copies from record_param_comms to the collective's kernel."""
    return _members({
        "Collective name": c.name, "In msg nelems": c.in_nelems, "Out msg nelems": c.out_nelems,
        "Group size": plan.sizes(config).get(c.group, config.ranks), "dtype": c.dtype, "In split size": "[]",
        "Out split size": "[]", "Process Group Name": _mark(c.group, "name"),
        "Process Group Description": _mark(c.group, "description"),
        "Process Group Ranks": _mark(c.group, "ranks")}) + f'{_other_end(c)}, "Seq": {SEQ}'


def _other_end(c: Collective) -> str:
    if not c.flow:
        return ""
    return f', "{"Dst" if c.name == "send" else "Src"} Rank": {NEXT if c.to_next else PREVIOUS}'


def _mark(group: str, what: str) -> str:
    """Place that is filled per rank with what its group of this kind has."""
    return f"\x01{what}:{group};"


def of_rank(config: Config, rank: int) -> dict[str, str]:
    """Values of the places that tell a rank's process groups and neighbours."""
    values = {NEXT: str(plan.neighbour(config, rank, True)), PREVIOUS: str(plan.neighbour(config, rank, False))}
    for kind, group in plan.groups(config, rank).items():
        texts = {"name": group.name, "description": group.description, "start": str(group.ranks[0]),
                 "ranks": group_ranks(group.ranks)}
        values |= {_mark(kind, what): text for what, text in texts.items()}
    return values


def group_ranks(ranks: Sequence[int]) -> str:
    """Ranks of a process group, cut after 30 as the profiler does."""
    return "[" + ", ".join(map(str, ranks[:30])) + (", ...]" if len(ranks) > 30 else "]")


def _members(values: dict[str, object]) -> str:
    return ", " + json.dumps(values)[1:-1].replace("\\u0001", "\x01")


def _listed(dims: Dims) -> list[Any]:
    return [list(d) if isinstance(d, tuple) else d for d in dims]


def _strides(dims: Sequence[Any]) -> list[Any]:
    if dims and isinstance(dims[0], list):
        return [_strides(d) for d in dims]
    strides, step = [], 1
    for size in reversed(dims):
        strides.append(step)
        step *= size
    return strides[::-1]
