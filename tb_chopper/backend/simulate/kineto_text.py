"""The text of trace events in the exporter's layout, with marks where numbers go.

A mark is a kind of number and its index in the step: `\\x02start_us17\\x03`. `kineto` fills marks for a whole step
at once. Times are in µs with three decimals.
"""

from __future__ import annotations

import json

from tb_chopper.backend.simulate.config import Config
from tb_chopper.backend.simulate.event_args import CORRELATION, RANK, SEQ, grid, on_kernel
from tb_chopper.backend.simulate.program import MAIN, STEP_NAME, HostEvent, Item

PID, DEVICE = "\x01P", "\x01D"
THREADS = ("\x01M", "\x01A")
CONSTANTS = (PID, DEVICE, *THREADS, RANK)
"""Filled per rank."""
STREAM_IDS = {"rocm": (0, 3, 4, 5, 6, 7, 8), "cuda": (7, 20, 24, 28, 32, 36, 40)}
"""Stream numbers of the trace, for compute, gather, reduce and a pipeline's messages."""


def mark(kind: str, index: int) -> str:
    return f"\x02{kind}{index}\x03"


def time(kind: str, index: int) -> str:
    return f"{mark(kind + '_us', index)}.{mark(kind + '_ns', index)}"


def host_event(index: int, event: HostEvent) -> str:
    name = _host_name(event)
    tid = THREADS[event.thread]
    head = (f'  {{\n    "ph": "X", "cat": "{event.category}", "name": {name}, "pid": {PID}, "tid": {tid},\n'
            f'    "ts": {time("point", event.begin)}, "dur": {time("duration", index)},\n    "args": {{\n      ')
    external = f'"External id": {mark("external", event.external)},' if event.external >= 0 else ""
    if event.correlation >= 0:
        return head + _runtime_tail(event, f"{external}      " if external else "", tid)
    seq = ""
    if event.seq >= 0:
        seq = f'"Sequence number": {mark("seq", event.seq)}, "Fwd thread id": {event.fwd_thread}, '
    args = event.args.replace(SEQ, mark("collective", event.collective)) if event.collective >= 0 else event.args
    return f'{head}{external}{seq}"Record function id": 0{args}, "Ev Idx": {mark("index", index)}\n    }}\n  }},\n'


def _host_name(event: HostEvent) -> str:
    return f'"{STEP_NAME}{mark("step", 0)}"' if event.name == STEP_NAME else json.dumps(event.name)


def _runtime_tail(event: HostEvent, external: str, tid: str) -> str:
    correlation = mark("correlation", event.correlation)
    number = f'"correlation": {correlation}'
    args = event.args.replace(CORRELATION, number) if CORRELATION in event.args else f"{event.args}, {number}"
    phase, end = ("s", "") if event.item >= 0 else ("f", ', "bp": "e"')
    return (f'{external}{args}\n    }}\n  }},\n'
            f'  {{\n    "ph": "{phase}", "id": {correlation}, "pid": {PID}, "tid": {tid}, '
            f'"ts": {time("point", event.begin)},\n    "cat": "ac2g", "name": "ac2g"{end}\n  }},\n')


def backward_flow(index: int, forward: int, backward: int) -> str:
    """Two events: from the forward operator to its backward node."""
    ends = ((forward, "s", THREADS[MAIN], ""), (backward, "f", THREADS[1 - MAIN], ', "bp": "e"'))
    return "".join(
        f'  {{\n    "ph": "{phase}", "id": {mark("flow", index)}, "pid": {PID}, "tid": {tid}, '
        f'"ts": {time("point", point)},\n'
        f'    "cat": "fwdbwd", "name": "fwdbwd"{end}\n  }},\n' for point, phase, tid, end in ends)


def device_event(index: int, item: Item, config: Config, *, launched: bool = True) -> str:
    """The activity and the end of the flow from its launch. Where the launch was not recorded there is no External
    id, and on ROCm no grid."""
    external = f'"External id": {mark("external", item.external)},      ' if launched else ""
    category = "gpu_memcpy" if item.kernel.kind == "memcpy" else "kernel"
    stream = STREAM_IDS[config.gpu.dialect][item.stream]
    correlation, start = mark("correlation", item.correlation), time("start", index)
    args = (_rocm_args if config.gpu.dialect == "rocm" else _cuda_args)(item, config, launched)
    args = args.replace(CORRELATION, f'"stream": {stream},      "correlation": {correlation}')
    if item.collective is not None and item.collective.told and launched:
        args += on_kernel(item.collective, config).replace(SEQ, mark("collective", item.collective.place))
    name, length = json.dumps(_device_name(item, config)), time("length", index)
    return (f'  {{\n    "ph": "X", "cat": "{category}", "name": {name}, "pid": {DEVICE}, "tid": {stream},\n'
            f'    "ts": {start}, "dur": {length},\n    "args": {{\n      {external}{args}\n    }}\n  }},\n'
            f'  {{\n    "ph": "f", "id": {correlation}, "pid": {DEVICE}, "tid": {stream}, "ts": {start},\n'
            '    "cat": "ac2g", "name": "ac2g", "bp": "e"\n  },\n')


def _device_name(item: Item, config: Config) -> str:
    """Suffix as of a code object's kernel descriptor: demangled names carry it as a clone."""
    name = item.kernel.name
    if not config.code_object_names or item.kernel.kind == "memcpy":
        return name
    return f"{name} [clone .kd]" if "(" in name else f"{name}.kd"


def _rocm_args(item: Item, config: Config, launched: bool) -> str:
    kernel, before = item.kernel, f'"device": {DEVICE}, {CORRELATION}'
    if kernel.kind == "memcpy":
        size = f', "bytes": {int(kernel.bytes)}' if launched else ""
        return f'{before}, "kind": "{"DtoH" if "DtoH" in kernel.name else "HtoD"}"{size}'
    shape = f',      "grid": [{grid(kernel)}, 1, 1], "block": [{kernel.block}, 1, 1]' if launched else ""
    return f'{before}, "kind": "Dispatch Kernel"{shape}'


def _cuda_args(item: Item, config: Config, launched: bool) -> str:
    kernel = item.kernel
    before = f'"device": {DEVICE}, "context": 1,      {CORRELATION}'
    if kernel.kind == "memcpy":
        return f'{before}, "bytes": {int(kernel.bytes)}'
    per_unit = kernel.blocks / config.gpu.units
    resident, registers, shared = (8, 32, 0) if kernel.kind == "vector" else (1, 168, 213_248)
    occupancy = min(100, round(100 * min(resident, per_unit) * kernel.block / 2048))
    return (f'"queued": 0, {before},      "registers per thread": {registers},      "shared memory": {shared},      '
            f'"blocks per SM": {per_unit:.6f},      "warps per SM": {per_unit * kernel.block / 32:.6f},      '
            f'"grid": [{kernel.blocks}, 1, 1],      "block": [{kernel.block}, 1, 1],      '
            f'"est. achieved occupancy %": {occupancy}')


def scope(index: int, annotation: HostEvent, stream: int) -> str:
    """The device's mirror of an annotation: from its first kernel to its last, on each stream."""
    name, length = _host_name(annotation), time("scope_length", index)
    return (f'  {{\n    "ph": "X", "cat": "gpu_user_annotation", "name": {name}, "pid": {DEVICE}, "tid": {stream},\n'
            f'    "ts": {time("scope", index)}, "dur": {length},\n    "args": {{\n'
            f'      "External id": {mark("external", annotation.external)}\n    }}\n  }},\n')
