"""Tables of text as command-line tools print them: preambles, headers that come again, ragged and cut lines."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd

from tb_chopper.backend.errors import UnreadableFile

_LIST = re.compile(r"\[[^\[\]\n]*\]")
_LIST_COMMA = "\x1f"


@dataclass(frozen=True)
class TextTable:
    """Rows as strings under the header's names; `skipped` lines were no rows, `cut`: the last line had no end."""

    rows: pd.DataFrame
    skipped: int
    cut: bool


def decoded(content: bytes) -> str:
    """UTF-8, or the UTF-16 that a redirect under Windows writes; line ends as line feeds."""
    text = content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig", "replace")
    return text.replace("\r\n", "\n").replace("\x00", "")


def lines(content: bytes, file: str) -> tuple[list[str], bool]:
    """The whole lines of a text, and whether a last one without an end was left out. Raises UnreadableFile."""
    if not content.strip():
        raise UnreadableFile(f"{file}: the file is empty: the tool was stopped before it wrote anything")
    found = decoded(content).split("\n")
    last = found.pop()
    return found, bool(last.strip())


def comma_separated(content: bytes, file: str, is_header: Callable[[Sequence[str]], bool]) -> TextTable:
    """A CSV file. Lines before the first header are a preamble; a header that comes again is skipped, one with other
    names starts a new table whose rows are put below. Rows may be shorter than the header; commas inside `[...]`
    separate the entries of one value. Raises UnreadableFile where there is no header."""
    found, cut = lines(content, file)
    parts: list[tuple[list[str], list[list[str]]]] = []
    skipped = 0
    for line in found:
        fields = split(line)
        if is_header(fields):
            names = _unique(fields)
            if not parts or parts[-1][0] != names:
                parts.append((names, []))
        elif parts and 0 < len(fields) <= len(parts[-1][0]) and any(fields):
            parts[-1][1].append(fields)
        else:
            skipped += bool(line.strip())
    if not parts:
        raise UnreadableFile(f"{file}: no header with a column for the time or the GPU")
    frames = [pd.DataFrame([r + [""] * (len(names) - len(r)) for r in rows], columns=names, dtype=object)
              for names, rows in parts if rows]
    if not frames:
        raise UnreadableFile(f"{file}: no row below the header")
    return TextTable(pd.concat(frames, ignore_index=True).fillna(""), skipped, cut)


def split(line: str) -> list[str]:
    """The fields of a CSV line, without blanks around them."""
    protected = _LIST.sub(lambda m: m.group().replace(",", _LIST_COMMA), line)
    return [f.strip().replace(_LIST_COMMA, ",") for f in next(csv.reader([protected], skipinitialspace=True), [])]


def _unique(names: Sequence[str]) -> list[str]:
    """A name that stands twice gets a number: both columns are kept."""
    seen: dict[str, int] = {}
    out = []
    for name in names:
        seen[name] = n = seen.get(name, 0) + 1
        out.append(name if n == 1 else f"{name}.{n}")
    return out
