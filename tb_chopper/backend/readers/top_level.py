"""The keys of a trace besides its events: before them, behind them, whole or damaged."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

KEPT = {
    "schemaVersion", "deviceProperties", "distributedInfo", "host_name", "baseTimeNanoseconds", "trace_id",
    "displayTimeUnit", "record_shapes", "with_stack", "with_flops", "with_modules", "profile_memory",
}
"""Keys that are kept, besides versions and our own; the rest may hold the environment of the profiled job."""
SHAPES: dict[str, type] = {"deviceProperties": list, "distributedInfo": dict, "host_name": str}
"""What these keys must be to be of use."""
COUNTS = {"rank", "world_size"}
MAX_CANDIDATES = 1000

_KEY = re.compile(rb'"([^"\\]+)"\s*:\s*')

Keys = dict[str, Any]
_UNDECODABLE = (msgspec.DecodeError, RecursionError)
"""What msgspec raises for text that is no JSON, or nested too deeply."""


def of_head(text: bytes) -> tuple[Keys, bool]:
    """The keys before the events (`text` ends with the `[` of the array), and whether all of it was in order."""
    try:
        return _decoded(text + b"]}"), True
    except _UNDECODABLE:
        return _legible(text), False


def of_rest(text: bytes, is_list: bool) -> tuple[Keys, bytes] | None:
    """The keys behind the events and the text of the last events, where `text` is the whole, sound rest of a file."""
    try:
        if is_list:
            events = msgspec.json.decode(b"[" + text, type=list[msgspec.Raw])
            return {}, text[: text.rindex(b"]")] if events else b""
        rest = b'{"":[' + text
        raw = msgspec.json.decode(rest, type=dict[str, msgspec.Raw])
        return _decoded(rest), bytes(raw[""])[1:-1]
    except _UNDECODABLE:
        return None


def of_tail(text: bytes, is_list: bool) -> tuple[Keys, str]:
    """The keys behind the events, `text` beginning with the array's `]`, and what is wrong: "", "truncated"
    (the file ends too early) or "trailing_garbage" (something follows its end)."""
    if is_list:
        return {}, "trailing_garbage" if text.lstrip()[1:].strip() else ""
    rest = b'{"":[' + text
    ends = (m.end() for m in re.finditer(rb"\}", rest))
    for end in [len(rest), *(end for _, end in zip(range(MAX_CANDIDATES), ends, strict=False))]:
        try:
            return _decoded(rest[:end]), "trailing_garbage" if rest[end:].strip() else ""
        except _UNDECODABLE:
            continue
    return _legible(text), "truncated"


def _decoded(text: bytes) -> Keys:
    raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    return usable({key: msgspec.json.decode(value) for key, value in raw.items() if _kept(key)})


def _legible(text: bytes) -> Keys:
    """The kept keys of damaged text whose values are whole."""
    keys: Keys = {}
    characters = text.decode("latin-1")
    parser = json.JSONDecoder(strict=False)
    for m in _KEY.finditer(text):
        key = m[1].decode("utf-8", "replace")
        if _kept(key):
            try:
                value, end = parser.raw_decode(characters, m.end())
            except (json.JSONDecodeError, RecursionError):
                continue
            # A number at the very end may go on in what was lost.
            whole = end < len(characters) or not isinstance(value, int | float)
            if whole:
                keys.setdefault(key, value)
    return usable(keys)


def usable(keys: Keys) -> Keys:
    """The keys whose values can be what they say, without entries that cannot: a file may hold anything."""
    kept = {key: value for key, value in keys.items() if isinstance(value, SHAPES.get(key, object))}
    devices: Any = kept.get("deviceProperties", [])
    job: Any = kept.get("distributedInfo", {})
    if devices:
        kept["deviceProperties"] = [{k: v for k, v in d.items() if isinstance(v, (str, int, float))}
                                    for d in devices if isinstance(d, dict)]
    if job:
        kept["distributedInfo"] = {k: v for k, v in job.items() if k not in COUNTS or _is_count(v)}
    return kept


def _is_count(value: Any) -> bool:
    """No job has more ranks than fit 32 bits; a larger number is damage."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _kept(key: str) -> bool:
    return key in KEPT or key.endswith("_version") or key.startswith("chopper")
