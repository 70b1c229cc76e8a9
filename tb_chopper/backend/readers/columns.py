"""Columns of many chunks into one table, in memory that is little more than the result."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tb_chopper.backend.readers.kineto_events import Coded, Columns


@dataclass
class Merged:
    """A table that grows chunk by chunk; values of coded columns are kept once."""

    n_rows: int = 0
    parts: dict[str, list[np.ndarray]] = field(default_factory=dict)
    index: dict[str, dict[Hashable, int]] = field(default_factory=dict)

    def add(self, columns: Columns) -> None:
        if not columns:
            return
        for name, column in columns.items():
            if isinstance(column, Coded):
                index = self.index.setdefault(name, {})
                codes = [index.setdefault(value, len(index)) for value in column.values]
                part = np.array([*codes, -1], np.int32)[column.codes]
            else:
                part = column
            self.parts.setdefault(name, []).append(part)
        self.n_rows += len(part)

    def take(self, name: str, dtype: Any) -> np.ndarray:
        """The whole column (for coded ones the codes), which the table then forgets."""
        parts = self.parts.pop(name, [])
        whole = np.empty(self.n_rows, dtype)
        filled = 0
        for part in parts:
            whole[filled : filled + len(part)] = part
            filled += len(part)
        return whole

    def values(self, name: str) -> list[Any]:
        return list(self.index.get(name, {}))
