"""The profiler's trace as a whole, valid file.

torch up to 2.13 writes names into the JSON as they are: one double quote in a record_function name, one `inf` or one
careless metadata value, and no tool can open the file. The exporter's text is checked in blocks on its way to disk
and only what is broken is mended; the rest passes unchanged.
"""

from __future__ import annotations

import gzip
import inspect
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import torch

_BLOCK_BYTES = 4 << 20
_GZIP_LEVEL = 6
"""A quarter of the time of Python's default, 9, for a fifth more bytes: the training waits meanwhile."""

_EVENTS = b'"traceEvents": ['
_END_OF_EVENT = b"\n  },\n"
_NAME = re.compile(rb'("name": ")(.*)(",?[ \t]*(?=\n|"pid"))')
_NOT_FINITE = re.compile(rb"(:[ \t]*)[+-]?(?:inf(?:inity)?|nan)\b", re.IGNORECASE)
_CONTROL = re.compile(rb"[\x00-\x09\x0b-\x1f]")
_ARGS = re.compile(rb'"args": \{.*\}(?=\s*\}\s*,?\s*$)', re.DOTALL)
_METADATA = re.compile(rb'^ *("[^"\n]*": .*?),?$', re.MULTILINE)

_whole_events = msgspec.json.Decoder(list[msgspec.Raw])


def export(prof: Any, path: Path, use_python_export: bool = False) -> list[str]:
    """Write the trace to `path`, at once or not at all; gzip if the name says so.

    Returns what a reader of the trace should know. Raises what the exporter and the file system raise.
    """
    with tempfile.TemporaryDirectory(prefix="chopper-") as folder:
        raw = Path(folder, "trace.json")
        in_python = use_python_export and offers_python_export(prof)
        prof.export_chrome_trace(str(raw), **({"use_python_export": True} if in_python else {}))
        copy = _copy_python_export if in_python else _copy_mended
        try:
            mended = _write(raw, path, copy)
        except Exception as error:  # the exporter gives its trace away once only: keep it as it is
            _write(raw, path, _copy)
            return [f"the trace is as torch.profiler wrote it, unchecked: {type(error).__name__}: {error}"]
    return [f"{mended} places of the trace were not valid JSON and have been mended"] if mended else []


def offers_python_export(prof: Any) -> bool:
    return "use_python_export" in inspect.signature(prof.export_chrome_trace).parameters


def _write(raw: Path, path: Path, copy: Callable[[IO[bytes], IO[bytes]], int]) -> int:
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(raw, "rb") as source, _create(scratch, path.suffix == ".gz") as target:
            mended = copy(source, target)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    return mended


def _create(path: Path, zipped: bool) -> IO[bytes]:
    return gzip.open(path, "wb", compresslevel=_GZIP_LEVEL) if zipped else open(path, "wb")  # type: ignore[return-value]


def _copy_mended(source: IO[bytes], target: IO[bytes]) -> int:
    mended = 0
    last = b""  # held back: the comma after the last event has to go where the event behind it was lost
    for block, kind in _blocks(source):
        if kind == "tail":
            target.write(last.rstrip().removesuffix(b","))
            target.write(block)
            break
        block, n = _mend_head(block) if kind == "head" else _mend_events(block)
        mended += n
        if block.strip():
            target.write(last)
            last = block
    return mended


def _blocks(source: IO[bytes]) -> Iterator[tuple[bytes, str]]:
    """The file as head (up to the first event), runs of whole events, and tail (from the last event's end)."""
    text = b""
    while (cut := text.find(_EVENTS)) < 0:
        block = source.read(_BLOCK_BYTES)
        if not block:
            raise ValueError("the profiler's trace has no traceEvents")
        text += block
    cut += len(_EVENTS)
    yield text[:cut], "head"
    text = text[cut:]
    while block := source.read(_BLOCK_BYTES):
        text += block
        cut = text.rfind(_END_OF_EVENT)
        if cut >= 0:
            cut += len(_END_OF_EVENT)
            yield text[:cut], "events"
            text = text[cut:]
    end = text.rfind(b"\n  ]") if b"\n  ]" in text else text.rfind(b"]")
    yield text[:end], "events"
    yield text[end:], "tail"


def _mend_events(block: bytes) -> tuple[bytes, int]:
    if _is_events(block):
        return block, 0
    kept, mended = [], 0
    for event in _split(block):
        if _is_events(event):
            kept.append(event)
            continue
        mended += 1
        kept += [text for text in _attempts(event) if _is_events(text)][:1]
    return b"".join(kept), mended


def _split(block: bytes) -> list[bytes]:
    parts = block.split(_END_OF_EVENT)
    return [part + _END_OF_EVENT for part in parts[:-1]] + ([parts[-1]] if parts[-1].strip() else [])


def _attempts(event: bytes) -> Iterator[bytes]:
    """The event mended a little, then more."""
    event = _CONTROL.sub(b" ", event.decode("utf-8", "replace").encode())
    yield event
    event = _NAME.sub(lambda m: m[1] + re.sub(rb'(?<!\\)"', rb'\\"', m[2]) + m[3], event)
    yield event
    event = _NOT_FINITE.sub(rb"\1null", event)
    yield event
    yield _ARGS.sub(b'"args": {}', event)


def _is_events(text: bytes) -> bool:
    """Whether `text` is a run of JSON values, each followed by a comma (the last may do without)."""
    try:
        text.decode()
        _whole_events.decode(b"[" + text.rstrip().removesuffix(b",") + b"]")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


def _mend_head(head: bytes) -> tuple[bytes, int]:
    """Drops the metadata values that are not JSON, which users' add_metadata_json lets through."""
    if _is_events(head + b"]}"):
        return head, 0
    lines = [line for line in _METADATA.findall(head[: -len(_EVENTS)]) if _is_events(b"{" + line + b"}")]
    return b"{\n" + b"".join(b"    " + line + b",\n" for line in lines) + b"    " + _EVENTS, 1


def _copy_python_export(source: IO[bytes], target: IO[bytes]) -> int:
    """torch 2.13's Python exporter escapes properly, but writes the number of SMs where the threads per SM belong."""
    for line in source:
        if line.startswith(b'"deviceProperties": ['):
            line = b'"deviceProperties": ' + json.dumps(device_properties()).encode() + b",\n"
            target.write(line)
            break
        target.write(line)
    return _copy(source, target)


def _copy(source: IO[bytes], target: IO[bytes]) -> int:
    shutil.copyfileobj(source, target, _BLOCK_BYTES)
    return 0


def device_properties() -> list[dict[str, Any]]:
    """The visible GPUs, with the keys that Kineto gives them."""
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    keys = {
        "name": "name", "totalGlobalMem": "total_memory", "computeMajor": "major", "computeMinor": "minor",
        "maxThreadsPerBlock": "max_threads_per_block", "maxThreadsPerMultiprocessor": "max_threads_per_multi_processor",
        "regsPerMultiprocessor": "regs_per_multiprocessor", "warpSize": "warp_size",
        "sharedMemPerBlock": "shared_memory_per_block", "numSms": "multi_processor_count",
        "sharedMemPerMultiprocessor": "shared_memory_per_multiprocessor",
    }
    return [
        {"id": i} | {key: getattr(gpu, attribute) for key, attribute in keys.items() if hasattr(gpu, attribute)}
        for i, gpu in enumerate(gpus)
    ]
