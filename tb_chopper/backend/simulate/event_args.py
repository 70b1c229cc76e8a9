"""Arguments of events, rendered as JSON members in the exporter's order, and the runtime calls' names and numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tb_chopper.backend.simulate.config import Config
from tb_chopper.backend.simulate.workload import Call, Collective, Dims, Kernel

RANK, SEQ, CORRELATION = "\x01R", "\x01S", "\x01C"
"""Places that are filled per rank, per collective and per call."""
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


def comms(c: Collective, config: Config) -> str:
    """Arguments of record_param_comms."""
    empty: list[list[int]] = [[]] * 9
    before = _members({
        "Collective name": c.name, "Process Group Description": "default_pg", "dtype": c.dtype})
    after = _members({
        "Input Strides": [[[1]], *empty],
        "Concrete Inputs": ["", SEQ, "", "0", "", "[]", "[]", "0", "1", str(config.ranks)],
        "Out msg nelems": c.out_nelems, "Process Group Name": "0",
        "Input type": ["TensorList", "Scalar", "", "Scalar", "", *["ScalarList"] * 2, *["Scalar"] * 3],
        "Global rank stride": 1, "Out split size": "[]", "In split size": "[]",
        "Process Group Ranks": group_ranks(config), "Group size": config.ranks,
        "Input Dims": [[[c.in_nelems]], *empty], "Global rank start": 0}).replace(json.dumps(SEQ)[1:-1], SEQ)
    return f'{before}, "Rank": {RANK}{after}, "Seq": {SEQ}, "In msg nelems": {c.in_nelems}'


def on_kernel(c: Collective, config: Config) -> str:
    """What the profiler copies from record_param_comms to the collective's kernel."""
    return _members({
        "Collective name": c.name, "In msg nelems": c.in_nelems, "Out msg nelems": c.out_nelems,
        "Group size": config.ranks, "dtype": c.dtype, "In split size": "[]", "Out split size": "[]",
        "Process Group Name": "0", "Process Group Description": "default_pg",
        "Process Group Ranks": group_ranks(config)}) + f', "Seq": {SEQ}'


def group_ranks(config: Config) -> str:
    """Ranks of the process group, cut after 30 as the profiler does."""
    ranks = [str(r) for r in range(config.ranks)]
    return "[" + ", ".join(ranks[:30]) + (", ...]" if len(ranks) > 30 else "]")


def _members(values: dict[str, object]) -> str:
    return ", " + json.dumps(values)[1:-1]


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
