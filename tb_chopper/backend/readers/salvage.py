"""What can be had from damaged text of trace events: element by element, with repairs that are reported.

Only text that does not parse comes here, so speed matters less than losing nothing that is whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import msgspec

T = TypeVar("T")


class Damage(NamedTuple):
    """One kind of damage: the byte where it is first, how often it is, and the parser's words."""

    code: str
    offset: int
    n: int = 1
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
# The array of events ends behind an object; arrays inside of events hold numbers and texts.
_ARRAY_END = re.compile(rb'[},]\s*(\]\s*(?:,\s*"[^"\\]*"\s*:|\}\s*\Z|\Z))')
_BETWEEN = re.compile(r"[,\s]*")
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
            found = _before_break(text[start : bounds[j]], decode, at_end=j == len(bounds) - 1)
        result.events += found.events
        damage += [d._replace(offset=start + d.offset) for d in found.damage]
        result.end = None if found.end is None else start + found.end
        result.unfinished = None if found.unfinished is None else start + found.unfinished
        i = j
    result.damage = merged(damage)
    return result


def _bounds(text: bytes) -> list[int]:
    starts = [m.start(1) for m in EVENT.finditer(text)]
    first_is_no_event = not starts or text[: starts[0]].strip(b", \t\r\n")
    return [*([0] if first_is_no_event else []), *starts, len(text)]


def merged(damage: Iterable[Damage]) -> list[Damage]:
    """One entry per kind, at the first of its places."""
    by_code: dict[str, Damage] = {}
    for d in damage:
        by_code[d.code] = by_code[d.code]._replace(n=by_code[d.code].n + d.n) if d.code in by_code else d
    return list(by_code.values())


def _elements(text: bytes, decode: Callable[[bytes], T | None], at_end: bool) -> Salvaged[T] | None:
    """The elements of `text`, an event and what is between it and the next; None if it cannot be made whole."""
    for repaired, codes in _repairs(text):
        values, stop = _values(repaired)
        ended = repaired[stop : stop + 1] == b"]"
        if stop < len(repaired) and not ended:
            continue
        try:
            decoded = [decode(v) for v in values]
        except (msgspec.DecodeError, RecursionError):
            continue
        damage = [Damage(code, 0) for code in codes]
        if decoded.count(None):
            damage.append(Damage("ignored_entries", 0, decoded.count(None)))
        end = None
        if ended and not at_end and not repaired[stop + 1 :].strip(b", \t\r\n"):
            damage.append(Damage("syntax_error", stop, 1, "a stray ]"))
        elif ended:
            end = stop + len(text) - len(repaired)  # repairs are before the end, and change the length
        return Salvaged([d for d in decoded if d is not None], damage, end)
    return None


def _before_break(text: bytes, decode: Callable[[bytes], T | None], at_end: bool) -> Salvaged[T]:
    """The elements before the place where `text` is broken beyond repair, and whether it breaks off there."""
    values, stop = _values(text)
    try:
        events = [d for v in values if (d := decode(v)) is not None]
    except (msgspec.DecodeError, RecursionError):
        events, stop = [], 0
    end = _end_behind(text) if at_end else None
    if at_end and end is None:
        return Salvaged(events, unfinished=stop)
    problem = _problem(text[stop:])
    return Salvaged(events, [problem._replace(offset=stop + problem.offset)], end)


def _values(text: bytes) -> tuple[list[bytes], int]:
    """The texts of the values in `a, b, c`, and where they stop: at the end, at a `]`, or before malformed text."""
    characters = text.decode("latin-1")
    parser = json.JSONDecoder(strict=False)
    values: list[bytes] = []
    position = _next(characters, 0)
    while position < len(characters) and characters[position] != "]":
        try:
            _, end = parser.raw_decode(characters, position)
        except (json.JSONDecodeError, RecursionError):
            break
        values.append(text[position:end])
        position = _next(characters, end)
    return values, position


def _next(characters: str, position: int) -> int:
    match = _BETWEEN.match(characters, position)
    return match.end() if match else position


def _end_behind(text: bytes) -> int | None:
    """Where the array ends behind a broken element: the first `]` behind which a whole rest of an object stands."""
    for m in _ARRAY_END.finditer(text):
        rest = text[m.start(1) :]
        try:
            if rest.strip() != b"]":
                msgspec.json.decode(b'{"":[' + rest, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, RecursionError):
            continue
        return m.start(1)
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
