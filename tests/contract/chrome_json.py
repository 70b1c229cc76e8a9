"""Chrome traces as plain Python values, for tests that compare files."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any


def load(path: Path) -> dict[str, Any]:
    """A trace by the standard parser; a bare list as an object of events."""
    data = path.read_bytes()
    if data.startswith(b"\x1f\x8b"):
        data = gzip.decompress(data)
    found = json.loads(data.decode("utf-8-sig"))
    return {"traceEvents": found} if isinstance(found, list) else found


def without_ours(event: Any) -> Any:
    """An event as the source had it: without `chopper` in its args."""
    if isinstance(event, dict) and isinstance(event.get("args"), dict) and "chopper" in event["args"]:
        args = {k: v for k, v in event["args"].items() if k != "chopper"}
        return {**event, "args": args} if args else {k: v for k, v in event.items() if k != "args"}
    return event


def multiset(events: list[Any]) -> Counter[str]:
    return Counter(json.dumps(without_ours(e), sort_keys=True) for e in events)


def is_ours(event: Any) -> bool:
    """An event that the export added."""
    return isinstance(event, dict) and (
        event.get("cat") == "chopper" or str(event.get("args", {}).get("name", "")).startswith("chopper: ")
        or (event.get("name") == "thread_sort_index" and int(event.get("tid", 0)) >= 900_000_000))
