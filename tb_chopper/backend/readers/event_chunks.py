"""Cut the text of a trace into chunks of whole events without parsing it.

A cut is only a guess (a name may hold text that looks like the border of two events). What proves it is that the
chunk before it parses: a prefix that is balanced ends where an element ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from tb_chopper.backend.readers.salvage import KEYS

CHUNK_BYTES = 2 << 20
"""Events of such a chunk stay in the processor's cache while they are decoded: smaller and larger are slower."""
HEAD_BYTES = 256 << 20
"""A file without events in its first 256 MiB is given up: memory is not for looking further."""

_BORDER = re.compile(rb"\}\s*,(?=\s*\{\s*\"" + KEYS + rb"\"\s*:)")
_ARRAY = re.compile(rb'"traceEvents"\s*:\s*\[')
_FIRST_EVENT = re.compile(rb"\s*(?:\{\s*\"" + KEYS + rb"\"\s*:|\])")
_BOM = b"\xef\xbb\xbf"


@dataclass
class Head:
    """What stands before the first event. `offset` is the byte of the first event in the text."""

    is_list: bool
    offset: int
    text: bytes


class NoEvents(Exception):
    """The text holds no array of events; `text` is what was read of it."""

    def __init__(self, text: bytes) -> None:
        super().__init__()
        self.text = text


def split(blocks: Iterable[bytes], chunk_bytes: int = CHUNK_BYTES) -> tuple[Head, Iterator[tuple[bytes, bool]]]:
    """The head, and chunks of the rest with a mark at the last one, which holds all behind its events too.

    Chunks follow one another without a gap: their sum is the text behind the head. Raises NoEvents.
    """
    source = iter(blocks)
    buffer = bytearray()
    head = None
    while head is None:
        block = next(source, b"")
        buffer += block
        head = _head(buffer, at_end=not block)
        if head is None and (not block or len(buffer) > HEAD_BYTES):
            raise NoEvents(bytes(buffer))
    return head, _chunks(bytes(buffer[head.offset :]), source, chunk_bytes)


def _head(text: bytearray, at_end: bool) -> Head | None:
    start = len(_BOM) if text.startswith(_BOM) else 0
    stripped = text[start : start + 4096].lstrip()
    if stripped.startswith(b"["):
        offset = text.index(b"[") + 1
        return Head(True, offset, b"[")
    for m in _ARRAY.finditer(text):
        head = bytes(text[start : m.end()])
        # Damage in the head (metadata is written as the user gave it) must not cost the events.
        if at_end or _FIRST_EVENT.match(text, m.end()) or _is_object(head + b"]}"):
            return Head(False, m.end(), head)
    return None


def _is_object(text: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(text, type=dict[str, msgspec.Raw]), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


def _chunks(begun: bytes, source: Iterator[bytes], chunk_bytes: int) -> Iterator[tuple[bytes, bool]]:
    # One chunk is held back: the last one shall hold the whole tail of an ordinary file.
    held = b""
    parts, size = [begun], len(begun)
    for block in source:
        parts.append(block)
        size += len(block)
        if size >= chunk_bytes and (cut := _cut(parts)) is not None:
            chunk, rest = cut
            if held:
                yield held, False
            held, parts, size = chunk, [rest], len(rest)
    yield b"".join((held, *parts)), True


def _cut(parts: list[bytes]) -> tuple[bytes, bytes] | None:
    """The parts as whole events, and what is left over; None without a border."""
    border = _last_border(parts[-1])
    if border is None and len(parts) > 1:
        parts[:] = [b"".join(parts)]
        border = _last_border(parts[0])
    if border is None:
        return None
    return b"".join((*parts[:-1], memoryview(parts[-1])[:border])), parts[-1][border:]


def _last_border(text: bytes) -> int | None:
    """The last border of two events, looked for from behind; None if there is none."""
    window, upper = 1 << 14, len(text)
    while upper > 0:
        lower = max(0, upper - window)
        borders = [m.end() for m in _BORDER.finditer(text, lower)]
        if borders:
            return borders[-1]
        upper, window = lower, window * 4
    return None
