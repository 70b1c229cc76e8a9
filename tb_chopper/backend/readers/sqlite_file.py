"""SQLite files of profilers: opened without ever writing, read by the columns they happen to have."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pandas as pd

from tb_chopper.backend.errors import UnreadableFile


def connect(path: Path) -> sqlite3.Connection:
    """The database, never written to: not even a journal appears beside it."""
    if not Path(path).is_file():
        raise UnreadableFile(f"{path}: no such file; a database is read from a local disk only")
    return sqlite3.connect(f"{Path(path).resolve().as_uri()}?mode=ro&immutable=1", uri=True)


def table(database: sqlite3.Connection, name: str, columns: list[str]) -> pd.DataFrame:
    """The columns of a table that exist; those that do not are missing values. Empty where there is no table."""
    quoted = '"' + name.replace('"', '""') + '"'
    there = [row[1] for row in database.execute(f"PRAGMA table_info({quoted})")]
    some = [c for c in columns if c in there]
    if not some:
        return pd.DataFrame(columns=columns)
    listed = ", ".join(f'"{c}"' for c in some)
    return pd.read_sql_query(f"SELECT {listed} FROM {quoted}", database).reindex(columns=columns)
