"""Every table of a run as Parquet or CSV, with the unit and the meaning of each column."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from tb_chopper.backend import schema
from tb_chopper.backend.export.output import open_atomic
from tb_chopper.backend.export.redact import Redactor
from tb_chopper.backend.findings import Finding
from tb_chopper.backend.run import Run

Format = Literal["parquet", "csv"]

FINDINGS: schema.Table = (
    schema.Column("severity", "category", "", "error, warning or info"),
    schema.Column("code", "category", "", "kind of finding; stable, for machines"),
    schema.Column("message", "category", "", "what, where, and what to do"),
    schema.Column("count", "int64", "", "events concerned"),
    schema.Column("file", "category", "", "file concerned, or empty"),
)

TABLES: dict[str, tuple[schema.Table, Callable[[Run], pd.DataFrame]]] = {
    "workers": (schema.WORKERS, lambda run: run.workers),
    "kernels": (schema.KERNELS, lambda run: run.kernels),
    "steps": (schema.STEPS, lambda run: run.steps),
    "memory": (
        (*schema.MEMORY, schema.Column("file", "category", "", "trace file, relative to the run")),
        lambda run: _memory(run)),
    "telemetry": (schema.TELEMETRY, lambda run: run.telemetry.samples),
    "cpu": (schema.CPU, lambda run: run.telemetry.cpu),
    "cpu_cores": (schema.CPU_CORES, lambda run: run.telemetry.cores),
    "counters": (schema.COUNTERS, lambda run: run.counters.counters),
    "dispatches": (schema.COUNTERS, lambda run: run.counters.dispatches),
    "agents": (schema.AGENTS, lambda run: run.counters.agents),
    "findings": (FINDINGS, lambda run: _findings(run.findings)),
}
"""Name -> columns and where the run has it. Tables without rows are not written. What a table holds beyond its columns
(hardware counters by their own names) is written too."""


def export(run: Run, directory: Path, form: Format, *, redactor: Redactor | None = None) -> list[Path]:
    """Write the tables of `run` to `directory`, one file each, and return the files. Raises Unwritable.

    Parquet: every field has `unit` and `meaning` as metadata. CSV: the header is `name [unit]`, missing values are
    empty, times stay integers.
    """
    written = []
    for name, (columns, table_of) in TABLES.items():
        frame = table_of(run)
        if not len(frame):
            continue
        table = _arrow(frame, columns, redactor)
        path = directory / f"{name}.{form}"
        with open_atomic(path) as out:
            if form == "parquet":
                pyarrow.parquet.write_table(table, out, compression="zstd")
            else:
                pyarrow.csv.write_csv(table.rename_columns(_headers(table.schema)), out)
        written.append(path)
    return written


def _arrow(frame: pd.DataFrame, columns: schema.Table, redactor: Redactor | None) -> pa.Table:
    arrays, fields = [], []
    known = {c.name for c in columns}
    more = [schema.Column(str(c), "float64", "", "hardware counter") for c in frame if c not in known]
    for column in (*columns, *more):
        values = frame[column.name]
        if redactor and column.dtype == "category":
            values = _redacted(values, redactor)
        array = pa.Array.from_pandas(values)
        metadata = {"unit": column.unit, "meaning": column.meaning}
        arrays.append(array)
        fields.append(pa.field(column.name, array.type, metadata=metadata))
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _redacted(values: pd.Series, redactor: Redactor) -> pd.Series:
    """Categories may become equal, so the column is made anew."""
    texts = {v: redactor.text(str(v)) for v in values.cat.categories}
    return values.astype(object).map(texts, na_action="ignore").astype("category")


def _headers(fields: pa.Schema) -> list[str]:
    units = [(f.name, f.metadata[b"unit"].decode()) for f in fields]
    return [f"{name} [{unit}]" if unit else name for name, unit in units]


def _memory(run: Run) -> pd.DataFrame:
    parts = [c.memory.assign(file=c.file.path.name) for c in run.captures if len(c.memory)]
    return pd.concat(parts, ignore_index=True).astype({"file": "category"}) if parts else schema.empty(schema.MEMORY)


def _findings(findings: list[Finding]) -> pd.DataFrame:
    return schema.conform(pd.DataFrame([f.as_dict() for f in findings], columns=[c.name for c in FINDINGS]), FINDINGS)
