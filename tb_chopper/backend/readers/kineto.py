"""Kineto traces (torch.profiler) into the tables of schema.py."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pandas as pd

from tb_chopper.backend import schema
from tb_chopper.backend.schema import Trace

_DEVICE = {"kernel": "kernel", "Kernel": "kernel", "gpu_memcpy": "memcpy", "Memcpy": "memcpy",
           "gpu_memset": "memset", "Memset": "memset"}
_HOST = {"cpu_op": "cpu_op", "Operator": "cpu_op", "user_annotation": "annotation", "cuda_runtime": "runtime",
         "cuda_driver": "runtime", "Runtime": "runtime"}


def read(path: Path) -> Trace:
    """Interim: whole-file reader; to be replaced by the streaming one with the same result."""
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        raw = gzip.decompress(raw)
    d = json.loads(raw)
    events = d if isinstance(d, list) else d.get("traceEvents", [])
    meta: dict[str, Any] = {} if isinstance(d, list) else {
        k: v for k, v in d.items() if k in ("deviceProperties", "distributedInfo", "host_name", "baseTimeNanoseconds")}
    base = int(meta.get("baseTimeNanoseconds", 0))
    host, device, threads = [], [], {}
    for e in events:
        if e.get("ph") != "X":
            continue
        a, c = e.get("args", {}), e.get("cat")
        start = base + round(float(e["ts"]) * 1000)
        end = start + round(float(e.get("dur") or 0) * 1000)
        if c in _DEVICE:
            device.append(dict(
                start_ns=start, end_ns=end, raw_end_ns=end, name=e["name"], activity=_DEVICE[c],
                device=str(a.get("device", e.get("pid"))), stream=int(str(a.get("stream", e.get("tid"))).split()[-1]),
                correlation=a.get("correlation", -1), external_id=a.get("External id", a.get("external id", -1)),
                bytes=a.get("bytes", -1), collective=a.get("Collective name")))
        elif c in _HOST:
            key = (str(e["pid"]), str(e["tid"]))
            kind = _HOST[c]
            if kind == "annotation" and e["name"].startswith(("nccl:", "gloo:")):
                kind = schema.ASYNC
            shapes = {k: a[k] for k in ("Input Dims", "Input type", "Concrete Inputs") if k in a}
            host.append(dict(
                start_ns=start, end_ns=end, name=e["name"], kind=kind, thread=threads.setdefault(key, len(threads)),
                correlation=a.get("correlation", -1), external_id=a.get("External id", a.get("external id", -1)),
                seq=a.get("Sequence number", -1), fwd_thread=a.get("Fwd thread id", -1),
                args=json.dumps(shapes) if shapes else None, finished=a.get("finished", True)))
    return Trace(
        path, schema.conform(pd.DataFrame(host), schema.HOST),
        schema.conform(pd.DataFrame(list(threads), columns=["pid", "tid"]), schema.THREADS),
        schema.conform(pd.DataFrame(device), schema.DEVICE), schema.empty(schema.MEMORY), meta)
