"""The one schema of `*.chopper.json`, the file that the handler writes beside each trace.

Pure Python, no torch: the training writes sidecars, the analysis and the simulator read and write them too.
Names of files and of module scopes live here for the same reason.

    {worker}.{span_ns}.pt.trace.json[.gz]     the trace
    {worker}.{span_ns}.chopper.json           its sidecar
    chopper::layers.3.mlp.gate_proj           scope of a submodule, by its fully qualified name
    chopper::(Llama)                          scope of the model itself, by its class
    chopper::pp::F::stage2::mb5               scope of an action of a pipeline schedule (torch_ext.pipeline)
"""

from __future__ import annotations

import json
import os
import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict, Union, get_args, get_origin, get_type_hints, is_typeddict

SCHEMA_VERSION = 1
SUFFIX = ".chopper.json"
_TRACE_SUFFIX = re.compile(r"\.pt\.trace\.json(\.gz)?$|\.json(\.gz)?$")

SCOPE_PREFIX = "chopper::"
PIPELINE_PREFIX = "chopper::pp::"
_NOT_SAFE = re.compile(r"[^A-Za-z0-9_.:+-]")


class Device(TypedDict):
    """The device of this process. `index` counts the devices visible to the process, so it is no identity across
    processes; `pci_address` is (`0000:c1:00.0`)."""

    type: str | None
    """cuda (NVIDIA and AMD), xpu, ..., or cpu"""
    index: int | None
    name: str | None
    pci_address: str | None
    compute_units: int | None
    """SMs or CUs"""
    memory_bytes: int | None


class Identity(TypedDict):
    host: str | None
    rank: int | None
    world_size: int | None
    local_rank: int | None
    pid: int | None
    device: Device


class ClockPair(TypedDict):
    """The host's clocks read together: all readings lie within `uncertainty_ns`."""

    where: str
    """start: when the handler was made; stop: when a capture ended"""
    realtime_ns: int
    monotonic_ns: int
    boottime_ns: int | None
    uncertainty_ns: int


class Versions(TypedDict):
    torch: str | None
    cuda: str | None
    hip: str | None
    python: str | None
    tb_chopper: str | None


class ProfilerFlags(TypedDict):
    record_shapes: bool | None
    with_stack: bool | None
    profile_memory: bool | None
    with_flops: bool | None
    with_modules: bool | None
    first_step: int | None
    """first and last step of this capture as in ProfilerStep#N; null without a schedule"""
    last_step: int | None


class Training(TypedDict):
    """What the user told the handler; null where not told."""

    tokens_per_step: int | None
    """tokens that this rank trains on per step"""
    model_flops_per_step: float | None
    """theoretical FLOPs of this rank per step, forward and backward, no recompute"""
    parallel: dict[str, int]
    """size of each parallel dimension: dp, dp_shard, dp_replicate, tp, pp, cp, ep, ..."""


class Module(TypedDict):
    fqn: str
    """name inside the model, wrappers (DDP, FSDP, checkpoint, compile) left out; "" is the model itself"""
    cls: str
    params: int | None
    """parameters of the module and all it contains, over all shards; null where unknown"""
    order: int
    """position in the model, from 0, parents before children"""


class Sidecar(TypedDict):
    schema_version: int
    worker: str | None
    span_ns: int | None
    """time in the file's name: tells the captures of one worker apart"""
    identity: Identity
    clocks: list[ClockPair]
    versions: Versions
    profiler: ProfilerFlags
    training: Training
    modules: list[Module]
    simulated: bool
    notes: list[str]


def stem(worker: str, span_ns: int) -> str:
    """File name without its endings, shared by trace and sidecar."""
    return f"{worker}.{span_ns}"


def path_for(trace: Path) -> Path:
    """Where the sidecar of a trace file lies."""
    return trace.with_name(_TRACE_SUFFIX.sub("", trace.name) + SUFFIX)


def scope_name(fqn: str, cls: str) -> str:
    """Name of the record_function scope around a module's forward.

    ASCII without quotes or backslashes: exporters of torch up to 2.13 write broken JSON for quotes, change
    backslashes and replace a whole name that has any other character. Unsafe characters become `_`. A model's own
    scope is its class in parentheses, which no submodule can be called.
    """
    return SCOPE_PREFIX + (_NOT_SAFE.sub("_", fqn) if fqn else f"({_NOT_SAFE.sub('_', cls)})")


def scope_fqn(name: str) -> str | None:
    """The module that a scope belongs to, "" for the model itself; None if `name` is no module scope."""
    if not name.startswith(SCOPE_PREFIX) or name.startswith(PIPELINE_PREFIX):
        return None
    fqn = name[len(SCOPE_PREFIX):]
    return "" if fqn.startswith("(") else fqn


def pipeline_action_name(kind: str, stage: int, microbatch: int) -> str:
    """Name of the scope around one action of a pipeline schedule. kind: F forward, B backward, I its part for the
    inputs, W its part for the weights; stage: counted over all ranks."""
    return f"{PIPELINE_PREFIX}{kind}::stage{stage}::mb{microbatch}"


def pipeline_schedule_name(cls: str, stages: int, microbatches: int, per_rank: int) -> str:
    """Name of the scope around one step of a pipeline schedule; stages: over all ranks."""
    return f"{PIPELINE_PREFIX}schedule::{_NOT_SAFE.sub('_', cls)}::stages{stages}::mb{microbatches}::v{per_rank}"


def empty() -> Sidecar:
    """A sidecar that knows nothing."""
    sidecar: Sidecar = _conform({"schema_version": SCHEMA_VERSION}, Sidecar, "", [])
    return sidecar


def write(path: Path, sidecar: Sidecar) -> None:
    """Write at once or not at all: readers never see half a file. Raises OSError."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        scratch.write_text(json.dumps(sidecar, indent=1, ensure_ascii=True, allow_nan=False), encoding="utf-8")
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def read(path: Path) -> Sidecar:
    """`parse` of a local file. Raises ValueError in one line when nothing can be used."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    return parse(raw, str(path))


def parse(raw: bytes, path: str) -> Sidecar:
    """Read leniently: what is missing is null or empty, what has the wrong type is left out and told in `notes`,
    what is not known is ignored. Raises ValueError (one line: `path`, place) when nothing can be used."""
    try:
        content = json.loads(raw)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: line {error.lineno} column {error.colno}: not JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not UTF-8 text of sensible depth: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: line 1: expected an object, found {type(content).__name__}")
    version = content.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise ValueError(f"{path}: schema version {version} is newer than {SCHEMA_VERSION}: update tb-chopper")
    problems: list[str] = []
    sidecar: Sidecar = _conform(content, Sidecar, "", problems)
    sidecar["notes"] += problems
    return sidecar


def _conform(value: Any, hint: Any, place: str, problems: list[str]) -> Any:
    """`value` as `hint` asks, or the hint's null; `problems` gains a line for each value left out."""
    if is_typeddict(hint):
        fields = value if isinstance(value, Mapping) else {}
        if value is not None and not isinstance(value, Mapping):
            problems.append(f"{place}: expected an object, left out")
        return {
            key: _conform(fields.get(key), sub, f"{place}.{key}".lstrip("."), problems)
            for key, sub in get_type_hints(hint).items()
        }
    if get_origin(hint) is list:
        return _conform_list(value, get_args(hint)[0], place, problems)
    if get_origin(hint) is dict:
        items = value.items() if isinstance(value, Mapping) else ()
        kinds = get_args(hint)
        return {k: v for k, v in items if _is(k, kinds[0]) and _is(v, kinds[1])}
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if any(_is(value, option) for option in options):
        return value
    if value is not None:
        problems.append(f"{place}: unexpected {type(value).__name__}, left out")
    return None if type(None) in options else hint()


def _conform_list(value: Any, item_hint: Any, place: str, problems: list[str]) -> list[Any]:
    """The items that fit; an item that lacks a required value is of no use and is left out."""
    kept = []
    for i, item in enumerate(value if isinstance(value, list) else []):
        found: list[str] = []
        conformed = _conform(item, item_hint, f"{place}[{i}]", found)
        missing = is_typeddict(item_hint) and isinstance(item, Mapping) and not _required(item_hint) <= item.keys()
        if found or missing:
            problems.append(f"{place}[{i}]: left out, expected {item_hint.__name__}")
        else:
            kept.append(conformed)
    if value is not None and not isinstance(value, list):
        problems.append(f"{place}: expected a list, left out")
    return kept


def _required(hint: Any) -> set[str]:
    return {key for key, sub in get_type_hints(hint).items() if type(None) not in get_args(sub)}


def _is(value: Any, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))
