"""Text of `nvidia-smi dmon -o DT`: columns apart by blanks, a header of two lines (names, units) every few samples,
`-` for what a device does not tell, local time without a zone."""

from __future__ import annotations

import pandas as pd

from tb_chopper.backend.errors import UnreadableFile
from tb_chopper.backend.readers import log_times, text_table
from tb_chopper.backend.readers.log_times import TimeBase
from tb_chopper.backend.readers.smi_columns import Interpreted, interpret

SOURCE = "nvidia-smi dmon"


def recognises(head: str) -> bool:
    first = head.lstrip("\ufeff \n").split("\n", 1)[0].lower()
    return first.startswith("#") and "gpu" in first.replace("#", " ").split() and "," not in first


def read(content: bytes, file: str, base: TimeBase) -> Interpreted:
    """Raises UnreadableFile, in one line, where nothing can be used or the log has no time."""
    lines, _ = text_table.lines(content, file)
    names: list[str] = []
    rows: list[list[str]] = []
    for line in lines:
        fields = line.lstrip("#").lower().split() if line.startswith("#") else line.split()
        if line.startswith("#"):
            names = fields if "gpu" in fields else names
        elif names and len(fields) == len(names):
            rows.append(fields)
    if not rows:
        raise UnreadableFile(f"{file}: no whole row below a header")
    frame = pd.DataFrame(rows, columns=names, dtype=object)
    time = log_times.joined(frame["date"], frame["time"]) if {"date", "time"} <= {*names} else None
    if time is None:
        frame = frame.drop(columns=[c for c in ("time", "date") if c in frame])
    return interpret(frame, SOURCE, base, file, time)
