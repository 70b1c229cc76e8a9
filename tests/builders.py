"""Small Kineto traces, written as the profilers of today and of 2021 write them, for tests of every part.

    t = TraceBuilder("rocm", rank=1, world_size=4)
    t.step(0, 0, 1000)
    t.op("aten::mm", 10, 50, dims=[[8, 8], [8, 8]])
    t.launch("Cijk_Ailk", at=20, start=100, dur=40)
    path = t.write(tmp_path / "rank1.pt.trace.json.gz")

Times are µs from the trace's zero (`zero_ns` since the epoch), exact to the ns.
"""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any, Literal

Dialect = Literal["cuda", "rocm", "legacy"]
Layout = Literal["indented", "compact", "pretty"]
Times = Literal["base", "absolute", "text"]

ZERO_NS = 1_763_990_928_000_000_000
PID, TID = 4711, 4711
CATEGORIES = {"cpu_op": "Operator", "cuda_runtime": "Runtime", "kernel": "Kernel", "gpu_memcpy": "Memcpy",
              "gpu_memset": "Memset", "user_annotation": "Operator"}
LAUNCH_NAMES = {"cuda": "cudaLaunchKernel", "rocm": "hipLaunchKernel", "legacy": "cudaLaunchKernel"}
GPU_NAMES = {"cuda": "NVIDIA H100 80GB HBM3", "rocm": "AMD Instinct MI300X", "legacy": "Tesla V100-SXM2-16GB"}
_NUMBER = re.compile(r'"@(-?[\d.]+)@"')


def us(time_ns: int) -> str:
    """A number of µs with three decimals, exact; becomes a bare JSON number in the text."""
    sign, digits = ("-", -time_ns) if time_ns < 0 else ("", time_ns)
    return f"@{sign}{digits // 1000}.{digits % 1000:03d}@"


def ns(time_us: float) -> int:
    return round(time_us * 1000)


class TraceBuilder:
    """Collects events; every method that adds an event returns it, so that a test can change or break it.

    `times`: µs relative to `baseTimeNanoseconds`; absolute µs since the epoch (files before 2024); the same as text.
    """

    def __init__(self, dialect: Dialect = "cuda", rank: int | None = 0, world_size: int = 1, *, times: Times = "base",
                 zero_ns: int = ZERO_NS, device: int | None = None):
        self.dialect, self.times, self.zero_ns = dialect, times, zero_ns
        self.device = (2 if dialect == "rocm" else 0) if device is None else device
        self.events: list[Any] = []
        self.correlation = 100
        self.external_id = 0
        self.head: dict[str, Any] = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": self.device, "name": GPU_NAMES[dialect], "numSms": 100}],
        }
        if rank is not None:
            self.head["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world_size}
        self.tail: dict[str, Any] = {"traceName": "trace.json", "displayTimeUnit": "ms"}
        if times == "base":
            self.tail["baseTimeNanoseconds"] = zero_ns

    # events

    def span(self, cat: str, name: str, start: float, dur: float | None, args: dict[str, Any] | None = None, *,
             pid: Any = PID, tid: Any = TID) -> dict[str, Any]:
        """Any complete event; `dur=None` leaves the duration out."""
        legacy = self.dialect == "legacy"
        event = {"ph": "X", "cat": CATEGORIES.get(cat, cat) if legacy else cat, "name": name, "pid": pid,
                 "tid": str(tid) if legacy else tid, "ts": self._time(start)}
        if dur is not None:
            event["dur"] = us(ns(dur))
        event["args"] = args or {}
        self.events.append(event)
        return event

    def op(self, name: str, start: float, dur: float, *, dims: list[Any] | None = None, seq: int | None = None,
           fwd_thread: int = 0, tid: int = TID, **args: Any) -> dict[str, Any]:
        """An operator; the launches after it carry its External id."""
        self.external_id += 1
        made: dict[str, Any] = self._external()
        if seq is not None:
            made |= {"Sequence number": seq, "Fwd thread id": fwd_thread}
        if dims is not None:
            made |= {"Concrete Inputs": [""] * len(dims), "Input type": ["float"] * len(dims),
                     "Input Strides": [[1]] * len(dims), "Input Dims": dims}
        return self.span("cpu_op", name, start, dur, made | args, tid=tid)

    def annotation(self, name: str, start: float, dur: float, tid: int = TID, **args: Any) -> dict[str, Any]:
        return self.span("user_annotation", name, start, dur, args, tid=tid)

    def step(self, number: int, start: float, dur: float) -> dict[str, Any]:
        return self.annotation(f"ProfilerStep#{number}", start, dur)

    def module(self, name: str, start: float, dur: float, tid: int = TID) -> dict[str, Any]:
        """A frame of the Python tracer: `nn.Module: X`, or any other."""
        return self.span("python_function", name, start, dur, {"Python id": 1}, tid=tid)

    def runtime(self, name: str, start: float, dur: float, correlation: int, tid: int = TID) -> dict[str, Any]:
        return self.span("cuda_runtime", name, start, dur, self._external() | {"correlation": correlation}, tid=tid)

    def kernel(self, name: str, start: float, dur: float | None, *, correlation: int | None = None, stream: int = 7,
               cat: str = "kernel", **args: Any) -> dict[str, Any]:
        """A device activity alone; without `correlation` it was launched before the capture."""
        made = {"device": self.device, "stream": stream}
        if correlation is not None:
            made |= self._external() | {"correlation": correlation}
        if self.dialect != "rocm" and cat == "kernel":
            made |= {"grid": [200, 1, 1], "block": [256, 1, 1], "blocks per SM": 2.0, "est. achieved occupancy %": 50}
        tid = f"stream {stream}" if self.dialect == "legacy" else stream
        event = self.span(cat, name, start, dur, made | args, pid=self.device, tid=tid)
        if self.dialect == "legacy":
            event["tid"] = tid
        return event

    def launch(self, name: str, at: float, start: float, dur: float, *, call: float = 5, stream: int = 7,
               tid: int = TID, api: str | None = None, cat: str = "kernel", **args: Any) -> int:
        """A launch call, its flow and its activity; returns the correlation."""
        self.correlation += 1
        self.runtime(api or LAUNCH_NAMES[self.dialect], at, call, self.correlation, tid)
        flow = {"cat": "async" if self.dialect == "legacy" else "ac2g", "name": "ac2g", "id": self.correlation}
        self.events.append({"ph": "s", **flow, "pid": PID, "tid": tid, "ts": self._time(at)})
        self.kernel(name, start, dur, correlation=self.correlation, stream=stream, cat=cat, **args)
        self.events.append({"ph": "f", "bp": "e", **flow, "pid": self.device, "tid": stream, "ts": self._time(start)})
        return self.correlation

    def collective(self, name: str, at: float, start: float, dur: float, *, stream: int = 20, **args: Any) -> int:
        """A communication kernel with what NCCL tells of it."""
        made = {"Collective name": "allreduce", "In msg nelems": 1024, "Out msg nelems": 1024, "Group size": 2,
                "dtype": "Float", "Process Group Name": "0", "Process Group Description": "default_pg", "Seq": 1}
        return self.launch(name, at, start, dur, stream=stream, **(made | args))

    def memory(self, at: float, size: int, allocated: int, reserved: int, device_type: int = 1) -> dict[str, Any]:
        event = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": PID, "tid": TID,
                 "ts": self._time(at), "args": {
                     "Total Reserved": reserved, "Total Allocated": allocated, "Bytes": size, "Addr": 2**47,
                     "Device Id": 0, "Device Type": device_type}}
        self.events.append(event)
        return event

    def thread_name(self, name: str, tid: int = TID) -> dict[str, Any]:
        event = {"ph": "M", "name": "thread_name", "pid": PID, "tid": tid, "ts": 0, "args": {"name": name}}
        self.events.append(event)
        return event

    def training_step(self, number: int, start: float, layers: int = 2) -> TraceBuilder:
        """A small whole step of 1000 µs: forward, backward, one collective, the optimizer."""
        self.step(number, start, 990)
        for i in range(layers):
            at = start + 10 + 50 * i
            self.op("aten::mm", at, 30, dims=[[8, 8], [8, 8]], seq=i)
            self.launch("gemm_fwd", at + 5, at + 60, 45)
            back = start + 400 + 50 * (layers - 1 - i)
            self.op("autograd::engine::evaluate_function: MmBackward0", back, 40, seq=i, fwd_thread=1, tid=TID + 1)
            self.launch("gemm_bwd", back + 5, back + 60, 45.5, tid=TID + 1)
        self.collective("ncclDevKernel_AllReduce_Sum_f32_RING_LL", start + 500, start + 520, 100)
        self.annotation("Optimizer.step#AdamW.step", start + 700, 100)
        self.op("aten::_fused_adamw_", start + 710, 50)
        self.launch("fused_adamw", start + 720, start + 760, 60.25)
        return self

    # the file

    def as_dict(self) -> dict[str, Any]:
        return {**self.head, "traceEvents": self.events, **self.tail}

    def text(self, layout: Layout = "indented", as_list: bool = False) -> str:
        """`indented`: one event after the other; `compact`: no white space; `pretty`: json.dumps(indent=2)."""
        if layout != "indented":
            form: dict[str, Any] = {"indent": 2} if layout == "pretty" else {"separators": (",", ":")}
            return self._plain(json.dumps(self.events if as_list else self.as_dict(), **form))
        events = ",\n".join("  " + json.dumps(e, indent=2).replace("\n", "\n  ") for e in self.events)
        if as_list:
            return self._plain(f"[\n{events}\n]\n")
        head = json.dumps(self.head, indent=2)[:-2] + "," if self.head else "{"
        tail = ",\n" + json.dumps(self.tail, indent=2)[2:] if self.tail else "\n}"
        return self._plain(f'\n{head}\n  "traceEvents": [\n{events}\n  ]{tail}\n')

    def write(self, path: Path, layout: Layout = "indented", as_list: bool = False) -> Path:
        """Write the file, gzipped where its name says so."""
        data = self.text(layout, as_list).encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)
        return path

    def _time(self, time_us: float) -> str:
        return us(ns(time_us) if self.times == "base" else self.zero_ns + ns(time_us))

    def _plain(self, text: str) -> str:
        return _NUMBER.sub(r'"\1"' if self.times == "text" else r"\1", text)

    def _external(self) -> dict[str, Any]:
        return {"external id" if self.dialect == "legacy" else "External id": self.external_id}
