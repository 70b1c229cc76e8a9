"""Write a Kineto trace of any size: one training step of a small transformer, repeated with moving clocks and ids.

    python benchmarks/make_trace.py OUT.pt.trace.json[.gz] --mb 1000 [--layout indented|compact]

The mix of events is that of a real step (operators with shapes, runtime calls, kernels, flows, FSDP scopes,
memory events); about 300 bytes an event. Steps are rendered by one `%` on a whole step, so 1 GB takes seconds.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

BASE_NS = 1_763_990_928_000_000_000
PID, BACKWARD_TID, STREAM, COMM_STREAM = 4711, 4790, 7, 20
LAYERS, LAYER_US, TAIL_US = 16, 1500, 4000
HEAD = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85017624576, "numSms": 132}],
    "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8}, "record_shapes": 1, "displayTimeUnit": "ms",
    "baseTimeNanoseconds": BASE_NS,
}
INDENTED = {
    "X": '  {{\n    "ph": "X", "cat": "{cat}", "name": "{name}", "pid": {pid}, "tid": {tid},\n'
         '    "ts": {ts}, "dur": {dur},\n    "args": {{\n      {args}\n    }}\n  }}',
    "flow": '  {{\n    "ph": "{ph}", "id": {id}, "pid": {pid}, "tid": {tid}, "ts": {ts},\n'
            '    "cat": "{cat}", "name": "{cat}"{end}\n  }}',
}
COMPACT = {
    "X": '{{"ph":"X","cat":"{cat}","name":"{name}","pid":{pid},"tid":{tid},"ts":{ts},"dur":{dur},"args":{{{args}}}}}',
    "flow": '{{"ph":"{ph}","id":{id},"pid":{pid},"tid":{tid},"ts":{ts},"cat":"{cat}","name":"{cat}"{end}}}',
}


@dataclass
class Step:
    """A step as one template; every hole is a time, a correlation, an External id or a sequence number."""

    layout: dict[str, str]
    events: list[str] = field(default_factory=list)
    holes: list[tuple[str, float]] = field(default_factory=list)
    n_launches: int = 0
    n_ops: int = 0

    def hole(self, kind: str, offset: float) -> str:
        self.holes.append((kind, offset))
        return "%.3f" if kind == "ts" else "%d"

    def span(self, cat: str, name: str, tid: int, start: float, dur: float, args: dict[str, object],
             *ids: tuple[str, str, int], pid: int = PID) -> None:
        ts = self.hole("ts", start)
        fields = [f'"{key}": {self.hole(kind, offset)}' for key, kind, offset in ids]
        fields += [f"{json.dumps(k)}: {json.dumps(v)}".replace("%", "%%") for k, v in args.items()]
        self.events.append(self.layout["X"].format(
            cat=cat, name=name, pid=pid, tid=tid, ts=ts, dur=f"{dur:.3f}", args=", ".join(fields)))

    def flow(self, ph: str, cat: str, correlation: int, pid: int, tid: int, start: float) -> None:
        self.events.append(self.layout["flow"].format(
            ph=ph, id=self.hole("corr", correlation), pid=pid, tid=tid, ts=self.hole("ts", start), cat=cat,
            end=', "bp": "e"' if ph == "f" else ""))

    def op(self, name: str, tid: int, start: float, dur: float, dims: list[list[int]], seq: int = -1,
           backward: bool = False) -> None:
        self.n_ops += 1
        ids = [("External id", "ext", self.n_ops)]
        if seq >= 0:
            ids.append(("Sequence number", "seq", seq))
        args: dict[str, object] = {"Fwd thread id": int(backward)} if seq >= 0 else {}
        args |= {"Record function id": 0, "Concrete Inputs": [""] * len(dims),
                 "Input type": ["c10::BFloat16"] * len(dims),
                 "Input Strides": [[d[-1], 1] for d in dims], "Input Dims": dims, "Ev Idx": self.n_ops}
        self.span("cpu_op", name, tid, start, dur, args, *ids)

    def launch(self, kernel: str, tid: int, start: float, gpu_start: float, dur: float, stream: int = STREAM,
               extra: dict[str, object] | None = None) -> None:
        self.n_launches += 1
        n = self.n_launches
        ids = (("External id", "ext", self.n_ops), ("correlation", "corr", n))
        self.span("cuda_runtime", "cudaLaunchKernel", tid, start, 4.2, {"cbid": 211}, *ids)
        self.flow("s", "ac2g", n, PID, tid, start)
        self.span("kernel", kernel, stream, gpu_start, dur, {
            "queued": 0, "device": 0, "context": 1, "stream": stream, "registers per thread": 64, "shared memory": 2112,
            "blocks per SM": 15.515152, "warps per SM": 124.121216, "grid": [2048, 1, 1], "block": [256, 1, 1],
            "est. achieved occupancy %": 75, **(extra or {})}, *ids, pid=0)
        self.flow("f", "ac2g", n, 0, stream, gpu_start)


GEMM = ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x256x64_warpgroupsize2x1x1_execute_segment_k_off_kernel"
        "__5x_cublas")
VECTOR = ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, "
          "std::array<char*, 3ul> >(int)")
FLASH = ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, 4, false, false, "
         "cutlass::bfloat16_t> >")
COMM = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
FORWARD = (
    ("native_layer_norm", VECTOR), ("linear", GEMM), ("scaled_dot_product_attention", FLASH), ("linear", GEMM),
    ("add", VECTOR), ("native_layer_norm", VECTOR), ("linear", GEMM), ("silu", VECTOR), ("mul", VECTOR),
    ("linear", GEMM), ("add", VECTOR),
)


def step_template(layout: dict[str, str]) -> Step:
    """One step: forward and backward of all layers on their own threads, then the optimizer."""
    s = Step(layout)
    length = 2 * LAYERS * LAYER_US + TAIL_US
    s.span("user_annotation", "ProfilerStep#%d", PID, 0, length - 2, {}, ("External id", "ext", 0))
    s.holes.insert(0, ("step", 0))
    for half, tid in enumerate((PID, BACKWARD_TID)):
        for i in range(LAYERS):
            layer = i if half == 0 else LAYERS - 1 - i
            t = 100.0 + (half * LAYERS + i) * LAYER_US
            scope = f"FSDP::{'pre_backward' if half else 'pre_forward'} (layers.{layer})"
            s.span("user_annotation", scope, tid, t, 60, {}, ("External id", "ext", s.n_ops))
            s.op("c10d::_allgather_base_", tid, t + 5, 40, [[4096, 4096], [32768, 4096]])
            s.launch(COMM, tid, t + 20, t + 300, 700, COMM_STREAM, {
                "Collective name": "_allgather_base", "In msg nelems": 16777216, "Out msg nelems": 134217728,
                "Group size": 8, "dtype": "BFloat16", "Process Group Name": "0",
                "Process Group Description": "default_pg"})
            for k, (name, kernel) in enumerate(FORWARD):
                u, seq = t + 80 + 120 * k, layer * len(FORWARD) + k
                dims = [[4, 4096, 4096], [4096, 14336 if kernel is GEMM else 4096]]
                if half:
                    node = f"{name.title()}Backward0"
                    s.op(f"autograd::engine::evaluate_function: {node}", tid, u, 100, dims, seq, backward=True)
                    u += 2
                s.op(node if half else f"aten::{name}", tid, u, 90, dims, seq, backward=bool(half))
                s.op("aten::empty", tid, u + 5, 8, [[4096, 4096]])
                for repeat in range(2 if half else 1):
                    s.op("aten::mm" if kernel is GEMM else f"aten::{name}_", tid, u + 20 + 30 * repeat, 28, dims)
                    s.launch(kernel, tid, u + 25 + 30 * repeat, u + 130 + 55 * repeat, 50.123)
    for k in range(24):
        t = length - TAIL_US + 150.0 * k
        s.op("aten::_fused_adamw_", PID, t + 110, 60, [[4096, 4096]] * 4)
        s.launch(VECTOR, PID, t + 130, t + 160, 100)
    return s


def steps(step: Step, indented: bool) -> Iterator[bytes]:
    """Step after step, without end; each ends in a comma."""
    template = (",\n" if indented else ",").join(step.events) + (",\n" if indented else ",")
    length = 2 * LAYERS * LAYER_US + TAIL_US
    per_step = {"ts": length, "corr": step.n_launches, "ext": step.n_ops, "seq": LAYERS * len(FORWARD), "step": 1}
    first = {"ts": 1_000_000.0, "corr": 1, "ext": 1, "seq": 0, "step": 2}
    n = 0
    while True:
        shift = {kind: first[kind] + n * per_step[kind] for kind in first}
        yield (template % tuple(shift[kind] + offset for kind, offset in step.holes)).encode()
        n += 1


def write(out: BinaryIO, size_bytes: int, indented: bool = True) -> int:
    """Write about `size_bytes` of trace (whole steps, at least one); returns the number of events."""
    step = step_template(INDENTED if indented else COMPACT)
    head = json.dumps(HEAD, indent=2 if indented else None).rstrip("\n ")[:-1].rstrip() + ',\n"traceEvents": [\n'
    written, n_steps = out.write(head.encode()), 0
    for text in steps(step, indented):
        written += out.write(text)
        n_steps += 1
        if written >= size_bytes:
            break
    names = [{"ph": "M", "name": "thread_name", "pid": PID, "tid": tid, "args": {"name": name}}
             for tid, name in ((PID, "python"), (BACKWARD_TID, "pt_autograd_0"))]
    out.write(",\n".join(json.dumps(e) for e in names).encode() + b'\n],\n"traceName": "benchmark"\n}\n')
    return n_steps * len(step.events) + len(names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--mb", type=float, default=100)
    parser.add_argument("--layout", choices=("indented", "compact"), default="indented")
    args = parser.parse_args()
    with args.out.open("wb") as file, gzip.open(file, "wb", 3) if args.out.suffix == ".gz" else file as out:
        n = write(out, int(args.mb * 1e6), args.layout == "indented")
    print(f"{args.out}: {n:,} events")


if __name__ == "__main__":
    main()
