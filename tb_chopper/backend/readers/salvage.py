"""What can be had from damaged text of trace events: element by element, with repairs that are reported.

Only text that does not parse comes here, so speed matters less than losing nothing that is whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import msgspec

T = TypeVar("T")


class Damage(NamedTuple):
    """One kind of damage in a chunk: where it is first (byte in the chunk), how often, and the parser's words."""

    code: str
    offset: int
    count: int = 1
    detail: str = ""


KEYS = rb"(?:ph|name|cat|pid|tid|ts|dur|args|id|s|bp)"
# An object behind a colon is somebody's `args`; everywhere else one of these keys opens an event.
EVENT = re.compile(rb"(?:\A|[^:\s])\s*(\{\s*\"" + KEYS + rb"\"\s*:)")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_STRING_OR_NONFINITE = re.compile(rb'("(?:[^"\\]|\\.)*")|[-+]?\b(?:inf(?:inity)?|nan)\b', re.DOTALL | re.IGNORECASE)
_BAD_ESCAPE = re.compile(rb'\\(?!["\\/bfnrt]|u[0-9a-fA-F]{4})')
_LITERAL_BACKSLASH = re.compile(rb'\\(?!["\\])')
_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_CONTROL = re.compile(rb"[\x00-\x1f]")
_NAME = re.compile(rb'("name"\s*:\s*")(.*?)("\s*(?:,\s*"' + KEYS + rb'"\s*:|\}))', re.DOTALL)
_BARE_QUOTE = re.compile(rb'(?<!\\)"')
_ARRAY_END = re.compile(rb'\]\s*(?:,\s*"[^"\\]*"\s*:|\}\s*\Z)')
_WHITE = " \t\r\n"
MAX_JOINED = 3
"""Elements tried as one, where a name holds text that looks like the start of an event."""


@dataclass
class Salvaged(Generic[T]):
    """Events and damage. `end`: byte of the `]` that ends the array, if it is in this text; `unfinished`: byte of an
    element that the text breaks off in, if it does."""

    events: list[T] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    end: int | None = None
    unfinished: int | None = None


def salvage(text: bytes, decode: Callable[[bytes], T | None]) -> Salvaged[T]:
    """`decode` makes an event of the text of one element, None of an element that is no event, and raises
    `msgspec.DecodeError` on malformed text."""
    bounds = _bounds(text)
    result: Salvaged[T] = Salvaged()
    damage: list[Damage] = []
    i = 0
    while i < len(bounds) - 1 and result.end is None:
        start = bounds[i]
        for j in range(i + 1, min(i + 1 + MAX_JOINED, len(bounds))):
            found = _elements(text[start : bounds[j]], decode, at_end=j == len(bounds) - 1)
            if found is not None:
                break
        else:
            j = i + 1
            if j == len(bounds) - 1:
                end = _end_behind(text[start:])
                found = Salvaged([], [_problem(text[start:])], end, None if end is not None else 0)
            else:
                found = Salvaged([], [_problem(text[start : bounds[j]])])
        result.events += found.events
        damage += [d._replace(offset=start + d.offset) for d in found.damage]
        result.end = None if found.end is None else start + found.end
        result.unfinished = None if found.unfinished is None else start + found.unfinished
        i = j
    result.damage = _merged(damage)
    return result


def _bounds(text: bytes) -> list[int]:
    starts = [m.start(1) for m in EVENT.finditer(text)]
    first_is_no_event = not starts or text[: starts[0]].strip(b", \t\r\n")
    return [*([0] if first_is_no_event else []), *starts, len(text)]


def _merged(damage: list[Damage]) -> list[Damage]:
    merged: dict[str, Damage] = {}
    for d in damage:
        merged[d.code] = merged[d.code]._replace(count=merged[d.code].count + d.count) if d.code in merged else d
    return list(merged.values())


def _elements(text: bytes, decode: Callable[[bytes], T | None], at_end: bool) -> Salvaged[T] | None:
    """The elements at the start of `text` (an event, and what is between it and the next), None if malformed."""
    for repaired, codes in _repairs(text):
        found = _values(repaired)
        if found is None:
            continue
        values, end = found
        try:
            decoded = [decode(v) for v in values]
        except msgspec.DecodeError:
            continue
        damage = [Damage(code, 0) for code in codes]
        if decoded.count(None):
            damage.append(Damage("ignored_entries", 0, decoded.count(None)))
        if end is not None and not at_end and not repaired[end + 1 :].strip(b", \t\r\n"):
            damage.append(Damage("syntax_error", end, 1, "a stray ]"))
            end = None
        elif end is not None:
            end += len(text) - len(repaired)  # repairs change what is before the end, nothing behind it is used
        return Salvaged([d for d in decoded if d is not None], damage, end)
    return None


def _values(text: bytes) -> tuple[list[bytes], int | None] | None:
    """The texts of the values in `a, b, c`, and the byte of a `]` that ends the list; None if malformed."""
    characters = text.decode("latin-1")
    parser = json.JSONDecoder(strict=False)
    values: list[bytes] = []
    position = 0
    while True:
        position += len(characters) - position - len(characters[position:].lstrip(_WHITE + ","))
        if position == len(characters):
            return values, None
        if characters[position] == "]":
            return values, position
        try:
            _, end = parser.raw_decode(characters, position)
        except (json.JSONDecodeError, RecursionError):
            return None
        values.append(text[position:end])
        position = end


def _end_behind(text: bytes) -> int | None:
    """Where the array ends behind a broken element: the first `]` behind which a whole rest of an object stands."""
    for m in _ARRAY_END.finditer(text):
        try:
            msgspec.json.decode(b'{"":[' + text[m.start() :], type=dict[str, msgspec.Raw])
        except msgspec.DecodeError:
            continue
        return m.start()
    return None


def _repairs(text: bytes) -> list[tuple[bytes, list[str]]]:
    """`text` as it is, then with the known defects of exporters mended, each with the names of what was mended."""
    attempts: list[tuple[bytes, list[str]]] = [(text, [])]
    codes: list[str] = []
    valid = text.decode("utf-8", "replace").encode()
    if valid != text:
        codes.append("bad_utf8")
        attempts.append((valid, list(codes)))
    for quoted in (valid, _NAME.sub(lambda m: m[1] + _BARE_QUOTE.sub(rb'\"', m[2]) + m[3], valid)):
        notes = [*codes, *(["unescaped_quotes"] if quoted != valid else [])]
        mended = _STRING.sub(lambda m, notes=notes: _mend_string(m[0], notes), quoted)  # type: ignore[misc]
        finite = _STRING_OR_NONFINITE.sub(lambda m: m[1] or b"null", mended)
        if finite != mended:
            notes.append("non_finite_number")
        if finite != valid:
            attempts.append((finite, list(dict.fromkeys(notes))))
    return attempts


def _mend_string(string: bytes, notes: list[str]) -> bytes:
    if _BAD_ESCAPE.search(string):
        # A Windows path: its `\n` and `\t` are no line feed and no tab either.
        notes.append("escaped_backslash")
        string = _LITERAL_BACKSLASH.sub(rb"\\\\", string)
    elif _LONE_SURROGATE.search(string):
        notes.append("bad_utf8")
        string = _LONE_SURROGATE.sub(rb"\\ufffd", string)
    if _CONTROL.search(string):
        notes.append("control_characters")
        string = _CONTROL.sub(lambda m: b"\\u%04x" % m[0][0], string)
    return string


def _problem(text: bytes) -> Damage:
    """Where and why the text of an event does not parse, in the words of the standard parser."""
    try:
        json.JSONDecoder(strict=False).raw_decode(text.decode("latin-1"))
    except json.JSONDecodeError as error:
        return Damage("syntax_error", error.pos, 1, error.msg)
    return Damage("syntax_error", 0, 1, "the event is followed by something that is no event")
