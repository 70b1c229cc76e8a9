"""`chopper_trace_handler`: the `on_trace_ready` of torch.profiler that writes traces for tb-chopper."""

from __future__ import annotations

import math
import os
import platform
import re
import socket
import time
import warnings
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.profiler import ProfilerAction

from torch_ext import counter_pass, sidecar
from torch_ext.annotation import annotated_modules, module_table
from torch_ext.export import export, offers_python_export
from torch_ext.sampling import start_telemetry


def chopper_trace_handler(
    dir_name: str | os.PathLike[str],
    worker_name: str | None = None,
    use_gzip: bool = True,
    use_python_export: bool = False,
    *,
    tokens_per_step: int | None = None,
    model_flops_per_step: float | None = None,
    parallel: Mapping[str, int] | None = None,
    model: torch.nn.Module | None = None,
    telemetry: bool = True,
) -> Callable[[Any], None]:
    """Usable wherever `torch.profiler.tensorboard_trace_handler` is: `profile(on_trace_ready=...)`.

    Every capture writes two files into `dir_name`, the standard trace and its sidecar (torch_ext.sidecar):

        {worker}.{time_ns}.pt.trace.json[.gz]    {worker}.{time_ns}.chopper.json

    worker_name: unique in the run; by default `{host}_r{rank}_{pid}`.
    use_python_export: torch's slower exporter, which keeps names that are not ASCII.
    tokens_per_step: tokens that this rank trains on per step, for throughput.
    model_flops_per_step: theoretical FLOPs of this rank per step, for MFU.
    parallel: sizes of the parallel dimensions, e.g. {"dp_shard": 8, "tp": 2}.
    model: lists the model's modules in the sidecar; not needed for models that are annotated.
    telemetry: sample clocks, power and CPU use into `<host>.telemetry.csv` from now on, in one process per host
    (torch_ext.start_telemetry) that ends with the training.

    In a pass of torch_ext.counters neither is written, nor telemetry: see torch_ext.counter_pass.

    Nothing here stops the training: what fails is told in one warning, and the standard trace is still written where
    that is possible. The environment and the command line are never written.
    """
    if counter_pass.folder() is not None:
        counter_pass.leave_gpu_to_counters()
        counter_pass.write_identity(identity())
        # Again at the end of a capture: by then the rank is known for sure.
        return lambda prof: counter_pass.write_identity(identity())
    facts: sidecar.Training = {
        "tokens_per_step": _positive("tokens_per_step", tokens_per_step),
        "model_flops_per_step": _positive("model_flops_per_step", model_flops_per_step),
        "parallel": dict(parallel or {}),
    }
    if telemetry:
        start_telemetry(dir_name)
    start = clock_pair("start")
    last_saved_step: int | None = None

    def handler(prof: Any) -> None:
        nonlocal last_saved_step
        stop = clock_pair("stop")
        span_ns = time.time_ns()
        try:
            worker = _NO_FILE_NAME.sub("_", worker_name or default_worker_name())
            folder = Path(dir_name)
            folder.mkdir(parents=True, exist_ok=True)
            trace = folder / f"{sidecar.stem(worker, span_ns)}.pt.trace.json{'.gz' if use_gzip else ''}"
            notes = _write_trace(prof, trace, use_python_export)
            record = sidecar.empty()
            record["worker"], record["span_ns"] = worker, span_ns
            record["identity"] = identity()
            record["clocks"] = [start, stop]
            record["versions"] = versions()
            record["profiler"] = profiler_flags(prof, last_saved_step)
            record["training"] = facts
            record["modules"] = module_table(model) if model is not None else annotated_modules()
            record["notes"] = notes
            sidecar.write(sidecar.path_for(trace), record)
        except Exception as error:
            _warn(f"this capture is not complete in {dir_name}: {_one_line(error)}")
        last_saved_step = getattr(prof, "step_num", None)

    return handler


def _write_trace(prof: Any, trace: Path, use_python_export: bool) -> list[str]:
    """Writes the trace, by torch's own means where ours fail; returns what a reader should know."""
    try:
        return export(prof, trace, use_python_export)
    except Exception as error:
        note = f"the trace is as torch.profiler wrote it, unchecked: {_one_line(error)}"
        try:
            prof.export_chrome_trace(str(trace))
        except RuntimeError:  # its C++ exporter works once per capture
            if not offers_python_export(prof):
                raise
            prof.export_chrome_trace(str(trace), use_python_export=True)
    _warn(note)
    return [note]


_NO_FILE_NAME = re.compile(r"[/\\\x00-\x1f]")


def _positive(name: str, value: Any) -> Any:
    """The value, or None with a warning where no number of it can be made."""
    if value is None or (isinstance(value, (int, float)) and 0 < value < math.inf):
        return value
    _warn(f"{name}={value!r} is no positive number and is left out")
    return None


def _warn(message: str) -> None:
    warnings.warn(f"chopper_trace_handler: {message}; the training goes on", RuntimeWarning, stacklevel=3)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def default_worker_name() -> str:
    """`{host}_r{rank}_{pid}`; rank 0 where there is none."""
    host = re.sub(r"[^A-Za-z0-9_.-]", "_", socket.gethostname())
    return f"{host}_r{_rank_and_world_size()[0] or 0}_{os.getpid()}"


def identity() -> sidecar.Identity:
    rank, world_size = _rank_and_world_size()
    device = _device()
    local_rank = _number_from("LOCAL_RANK")
    return {
        "host": socket.gethostname(),
        "rank": rank,
        "world_size": world_size,
        "local_rank": local_rank if local_rank is not None else device["index"],
        "pid": os.getpid(),
        "device": device,
    }


def _rank_and_world_size() -> tuple[int | None, int | None]:
    """From torch.distributed, else from the launcher's variables; none for a process on its own."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return _number_from("RANK"), _number_from("WORLD_SIZE")


def _number_from(variable: str) -> int | None:
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else None


def _device() -> sidecar.Device:
    """The GPU that this process has used; asking must not start one up."""
    device: sidecar.Device = {
        "type": "cpu", "index": None, "name": None, "pci_address": None, "compute_units": None, "memory_bytes": None,
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        index = torch.cuda.current_device()
        gpu: Any = torch.cuda.get_device_properties(index)
        device |= {
            "type": "cuda", "index": index, "name": gpu.name, "compute_units": gpu.multi_processor_count,
            "memory_bytes": gpu.total_memory,
        }
        if hasattr(gpu, "pci_bus_id"):
            device["pci_address"] = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    elif hasattr(torch, "accelerator"):
        other = torch.accelerator.current_accelerator()
        device["type"] = other.type if other is not None and other.type != "cuda" else "cpu"
    return device


def versions() -> sidecar.Versions:
    try:
        own = metadata.version("tb-chopper")
    except metadata.PackageNotFoundError:
        own = None
    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "python": platform.python_version(),
        "tb_chopper": own,
    }


def profiler_flags(prof: Any, last_saved_step: int | None = None) -> sidecar.ProfilerFlags:
    first, last = captured_steps(prof, last_saved_step)
    return {
        "record_shapes": getattr(prof, "record_shapes", None),
        "with_stack": getattr(prof, "with_stack", None),
        "profile_memory": getattr(prof, "profile_memory", None),
        "with_flops": getattr(prof, "with_flops", None),
        "with_modules": getattr(prof, "with_modules", None),
        "first_step": first,
        "last_step": last,
    }


def captured_steps(prof: Any, last_saved_step: int | None = None) -> tuple[int | None, int | None]:
    """First and last step of the capture that just ended.

    The profiler calls the handler with `step_num` already at the next step, or, where it was stopped during a
    capture, at the step it was in. `last_saved_step`: `step_num` at the handler's previous call.
    """
    if not getattr(prof, "record_steps", False):
        return None, None
    now: int = prof.step_num
    ended_by_schedule = now > 0 and prof.schedule(now - 1) == ProfilerAction.RECORD_AND_SAVE and now != last_saved_step
    last = now - 1 if ended_by_schedule else now
    first = last
    while first > 0 and prof.schedule(first - 1) == ProfilerAction.RECORD:
        first -= 1
    return first, last


def clock_pair(where: str) -> sidecar.ClockPair:
    """The host's clocks at one moment: the tightest of a few readings."""
    return min((_read_clocks(where) for _ in range(5)), key=lambda pair: pair["uncertainty_ns"])


def _read_clocks(where: str) -> sidecar.ClockPair:
    before = time.monotonic_ns()
    realtime = time.time_ns()
    boottime = time.clock_gettime_ns(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else None
    after = time.monotonic_ns()
    return {
        "where": where,
        "realtime_ns": realtime,
        "monotonic_ns": (before + after) // 2,
        "boottime_ns": boottime,
        "uncertainty_ns": after - before,
    }
