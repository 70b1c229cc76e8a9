"""`by` and `where`: the two arguments that every metric takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from tb_chopper.backend.errors import InvalidSelection

By = str | Sequence[str]
Where = Mapping[str, Any] | None

ALIASES = {"kernel": "name"}
"""`by="kernel"` groups by the kernel's name; the result's column is called kernel."""

MAX_INT = 2**63 - 1
WINDOW_COLUMNS = {"gpu", "worker", "span", "capture", "device", "step"}
"""Columns that cut time, not work: grouped by these alone, a group has a window and so an idle time."""


def columns(by: By) -> list[str]:
    """`by` as a list of public column names, without repetition."""
    names = [by] if isinstance(by, str) else by
    if not isinstance(names, Sequence) or not all(isinstance(n, str) for n in names):
        raise InvalidSelection(f"by is a column's name or a list of them, not {by!r}")
    return list(dict.fromkeys(n for n in names if n != "name" or "kernel" not in names))


def source(column: str, frame: pd.DataFrame) -> str:
    """The frame's column behind a public name."""
    # A result has the public name already.
    name = column if column in frame.columns else ALIASES.get(column, column)
    if name not in frame.columns:
        known = sorted({*ALIASES, *frame.columns})
        raise InvalidSelection(f"no column {column!r} to group or filter by; known: {', '.join(known)}")
    return name


def select(frame: pd.DataFrame, where: Where) -> pd.DataFrame:
    """The rows that match every filter: a value, several values (list, range, array, ...), or None for missing."""
    if not where:
        return frame
    if not isinstance(where, Mapping):
        raise InvalidSelection(f"where is a mapping of columns to values, not {where!r}")
    keep = np.ones(len(frame), bool)
    for column, wanted in where.items():
        values = frame[source(column, frame)]
        if wanted is None:
            keep &= values.isna().to_numpy()
        elif isinstance(wanted, range) and wanted.step == 1:
            # Not spelled out: a range may be of any length.
            keep &= ((values >= wanted.start) & (values < min(wanted.stop, MAX_INT))).fillna(False).to_numpy(bool)
        else:
            keep &= values.isin(_values(column, values, wanted)).to_numpy()
    return frame[keep]


def _values(column: str, values: pd.Series, wanted: Any) -> list[Any]:
    """What a filter asks for as a list. Text never equals a number: asking for it is a mistake, not an empty result."""
    single = isinstance(wanted, (str, bytes)) or not isinstance(wanted, Iterable)
    if isinstance(wanted, Mapping):
        raise InvalidSelection(f"{column}: a value or a list of values, not {wanted!r}")
    listed = [wanted] if single else list(wanted)
    if pd.api.types.is_numeric_dtype(values.dtype) and not pd.api.types.is_bool_dtype(values.dtype):
        for value in listed:
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float, np.number))):
                raise InvalidSelection(f"{column} holds numbers; {value!r} is none")
    return listed


def number(frame: pd.DataFrame, by: list[str]) -> tuple[np.ndarray, pd.DataFrame]:
    """A dense group number per row, and the table of groups (one row per number, columns as in `by`).

    Groups stand in natural order: numbers by value, names so that layers.2 comes before layers.10. Missing
    values are groups of their own.
    """
    if not by:
        return np.zeros(len(frame), np.int64), pd.DataFrame(index=range(1 if len(frame) else 0))
    code = np.zeros(len(frame), np.int64)
    parts: list[tuple[int, pd.Series]] = []
    for column in by:
        codes, values = _factorize(frame[source(column, frame)])
        code = code * max(len(values), 1) + codes
        parts.append((max(len(values), 1), values))
    present, dense = np.unique(code, return_inverse=True)
    groups: dict[str, pd.Series] = {}
    rest = present
    for column, (size, values) in zip(reversed(by), reversed(parts), strict=True):
        groups[column] = values.iloc[rest % size].reset_index(drop=True)
        rest = rest // size
    return dense.astype(np.int64), pd.DataFrame({c: groups[c] for c in by})


def _factorize(values: pd.Series) -> tuple[np.ndarray, pd.Series]:
    """Codes in natural order and the sorted distinct values; a missing value comes last."""
    if isinstance(values.dtype, pd.CategoricalDtype):
        categories = values.cat.categories
        codes = values.cat.codes.to_numpy()
        used = np.unique(codes[codes >= 0])
        order = sorted(used, key=lambda i: natural_key(categories[i]))
        distinct = pd.Series([categories[i] for i in order], dtype=object)
        place = np.full(len(categories) + 1, len(order), np.int64)
        place[order] = np.arange(len(order))
        codes = place[codes]
        missing = bool((codes == len(order)).any())
    else:
        raw, uniques = pd.factorize(values, sort=True)
        codes = np.where(raw < 0, len(uniques), raw).astype(np.int64)
        distinct = pd.Series(uniques, dtype=values.dtype)
        missing = bool((raw < 0).any())
    if missing:
        distinct = pd.concat([distinct, pd.Series([pd.NA if distinct.dtype != object else None], dtype=distinct.dtype)])
    return codes, distinct.reset_index(drop=True)


def natural_key(name: object) -> list[tuple[int, int, str]]:
    """Sort key in which digits count as numbers: layers.2 before layers.10."""
    key: list[tuple[int, int, str]] = []
    digits = ""
    for char in [*str(name), ""]:
        if char.isascii() and char.isdigit():
            digits += char
            continue
        if digits:
            key.append((0, int(digits), ""))
            digits = ""
        key.append((1, 0, char))
    return key


def sums(codes: np.ndarray, n: int, values: np.ndarray) -> np.ndarray:
    """Sum of int64 `values` per group, exact."""
    out = np.zeros(n, np.int64)
    np.add.at(out, codes, values)
    return out
