"""The events of a trace as text, in the order of the file: for what passes events on instead of reading them.

Sound text comes out as it stands. Damaged text goes through the same repairs as in the reader (`salvage`), so that
every element that comes out is valid JSON; what was repaired or lost is in the reader's findings.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import msgspec

from tb_chopper.backend.errors import UnreadableFile
from tb_chopper.backend.readers import event_chunks, kineto_damage, top_level
from tb_chopper.backend.readers.byte_stream import BLOCK_BYTES, Decompressed, is_url, open_binary
from tb_chopper.backend.readers.salvage import salvage

Event = bytes | msgspec.Raw
"""Text of one element: both kinds are bytes to `bytes.join` and to regular expressions."""

_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


class RawEvents:
    """Iterate over lists of events. `head` is the text between the file's opening brace and its events (empty, or
    ending in a comma), `tail` the text between the end of the array and the closing brace (empty, or beginning with a
    comma); `tail` is known once the events are exhausted. `share` is how much of the file has been read (0 to 1).
    `known_keys`: of head and tail only the keys that the reader knows; others may hold the environment of the job.

    Raises UnreadableFile, in one line, where there are no events.
    """

    def __init__(self, path: str | Path, *, known_keys: bool = False) -> None:
        self._known_keys = known_keys
        self._opened = open_binary(path)
        self._size = 0 if is_url(path) else Path(path).stat().st_size
        self._stream = Decompressed(self._opened.__enter__(), BLOCK_BYTES)
        try:
            self._head, self._texts = event_chunks.split(self._stream)
        except event_chunks.NoEvents as missing:
            self._opened.__exit__(None, None, None)
            raise UnreadableFile(f"{path}: {kineto_damage.no_events(missing.text, self._stream.cut)}") from None
        self.head = b"" if self._head.is_list else _head(self._head.text, known_keys)
        self.tail = b""

    @property
    def share(self) -> float:
        return min(1.0, self._stream.read_bytes / self._size) if self._size else 0.0

    def __enter__(self) -> RawEvents:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self._opened.__exit__(kind, error, traceback)

    def __iter__(self) -> Iterator[list[Event]]:
        carry = b""
        for text, last in self._texts:
            text = carry + text
            carry = b""
            sound = self._sound_rest(text) if last else _sound(text)
            if sound is not None:
                yield sound
                continue
            found = salvage(text, _element)
            yield list(found.events)
            if found.end is not None:
                behind = b"".join((text[found.end :], *(rest for rest, _ in self._texts)))
                self.tail = _scalars(top_level.of_tail(behind, self._head.is_list)[0])
                return
            if found.unfinished is not None and not last:
                carry = text[found.unfinished :]

    def _sound_rest(self, text: bytes) -> list[Event] | None:
        """The last events where all of the file's rest is in order."""
        if not _is_utf8(text):
            return None
        try:
            if self._head.is_list:
                return list(_LIST.decode(b"[" + text))
            raw = bytes(_OBJECT.decode(b'{"":[' + text)[""])
            self.tail = text[len(raw) - 1 :].rstrip()[:-1].rstrip()
            if self._known_keys:
                keys, _ = top_level.of_tail(text[len(raw) - 2 :], is_list=False)
                self.tail = b"," + msgspec.json.encode(keys)[1:-1] if keys else b""
            return list(_LIST.decode(raw))
        except (msgspec.DecodeError, RecursionError):
            return None


def _head(text: bytes, known_keys: bool) -> bytes:
    """The keys before the events as they stand; of damaged text those that are legible."""
    keys, sound = top_level.of_head(text)
    if sound and not known_keys:
        return text[text.index(b"{") + 1 : text.rindex(b'"traceEvents"')].strip()
    inner = msgspec.json.encode(keys)[1:-1]
    return inner + b"," if inner else b""


def _scalars(keys: top_level.Keys) -> bytes:
    """Legible keys behind the events; lists would break viewers that look for the file's last `]`."""
    inner = msgspec.json.encode({k: v for k, v in keys.items() if isinstance(v, str | int | float)})[1:-1]
    return b"," + inner if inner else b""


def _sound(text: bytes) -> list[Event] | None:
    body = b"".join((b"[", memoryview(text)[:-1] if text.endswith(b",") else text, b"]"))
    try:
        return list(_LIST.decode(body)) if _is_utf8(text) else None
    except (msgspec.DecodeError, RecursionError):
        return None


def _element(text: bytes) -> bytes | None:
    """The text of an element, None for what is no object; raises DecodeError on malformed text."""
    if not _is_utf8(text):
        raise msgspec.DecodeError("not UTF-8")
    return text if isinstance(msgspec.json.decode(text), dict) else None


def _is_utf8(text: bytes) -> bool:
    # The JSON decoder does not look into the strings that it skips.
    if text.isascii():
        return True
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
