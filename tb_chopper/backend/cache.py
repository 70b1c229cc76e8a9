"""Results of reading a file, as Parquet beside it: the second open takes a moment.

    <directory of the file>/.chopper-cache/<file name>.<file state>.<settings>/
        <table>.parquet, <table>.categories.parquet    rows; the values of its categorical columns
        meta.json                                      whatever JSON the caller stores with them

`file state` is a digest of size, modification time and `schema.VERSION`; `settings` one of the caller's key. An
entry is written aside and moved into place, so it is whole or not there; what cannot be read counts as not there.
Off with TB_CHOPPER_CACHE=0. Where the directory is read-only the user's cache directory serves.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tb_chopper.backend import schema

FOLDER = ".chopper-cache"
SWITCH = "TB_CHOPPER_CACHE"
FORMAT = 1
"""Raised whenever the layout of an entry changes."""
MAX_ENTRIES = 4
"""Entries kept per file: one for each of the last settings."""

logger = logging.getLogger(__name__)

Frames = dict[str, pd.DataFrame]


def load(path: Path, key: str = "") -> tuple[Frames, dict[str, Any]] | None:
    """What was stored for this file in its present state and for these settings; None if nothing (whole) is there."""
    entry_name = _entry_name(path, key)
    if entry_name is None:
        return None
    for folder in _folders(path):
        entry = folder / entry_name
        try:
            meta = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
            return {name: _read(entry, name) for name in meta["tables"]}, meta["meta"]
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError, IndexError, pa.ArrowException) as error:
            logger.warning("%s: cache entry left aside: %s", entry, error)
            shutil.rmtree(entry, ignore_errors=True)
    return None


def store(path: Path, key: str, frames: Frames, meta: dict[str, Any]) -> None:
    """Keep tables and JSON-able `meta` for this file and these settings. Never fails: the cache is a convenience."""
    entry_name = _entry_name(path, key)
    if entry_name is None:
        return
    for folder in _folders(path):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            aside = Path(tempfile.mkdtemp(prefix=".new-", dir=folder))
        except OSError:
            continue
        try:
            for name, frame in frames.items():
                _write(aside, name, frame)
            (aside / "meta.json").write_text(json.dumps({"tables": list(frames), "meta": meta}), encoding="utf-8")
            _prune(folder, path.name, keep=entry_name)
            os.replace(aside, folder / entry_name)
        except (OSError, pa.ArrowException) as error:
            logger.info("%s: not cached: %s", path, error)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return


def _entry_name(path: Path, key: str) -> str | None:
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        stat = Path(path).stat()
    except OSError:
        return None
    state = f"{stat.st_size},{stat.st_mtime_ns},{stat.st_ctime_ns},{schema.VERSION},{FORMAT}"
    return f"{path.name}.{_digest(state)}.{_digest(key)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:12]


def _folders(path: Path) -> list[Path]:
    """Beside the file, else in the user's cache directory under a name for the file's own directory."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    own = home / "tb-chopper" / _digest(str(path.parent.absolute()))
    return [path.parent / FOLDER, own] if _is_writable(path.parent) else [own]


def _is_writable(directory: Path) -> bool:
    """By the mode bits: root may write anywhere, and still should not into what its owner made read-only."""
    return bool(directory.stat().st_mode & 0o222) and os.access(directory, os.W_OK)


def _prune(folder: Path, file_name: str, keep: str) -> None:
    """Drop entries of other states of the file, and the oldest settings."""
    state = keep.rsplit(".", 1)[0]
    own = [e for e in folder.glob("*") if e.name.rsplit(".", 2)[0] == file_name]
    stale = [e for e in own if e.name.rsplit(".", 1)[0] != state or e.name == keep]
    current = sorted(set(own) - set(stale), key=lambda e: e.stat().st_mtime)
    for entry in stale + current[: max(0, len(current) - MAX_ENTRIES + 1)]:
        shutil.rmtree(entry, ignore_errors=True)


def _write(entry: Path, name: str, frame: pd.DataFrame) -> None:
    columns: dict[str, pa.Array] = {}
    values: dict[str, str] = {}
    for column, series in frame.items():
        if isinstance(series.dtype, pd.CategoricalDtype):
            # As codes and values: Parquet's own dictionaries keep neither order nor unused values.
            columns[str(column)] = pa.array(series.cat.codes.to_numpy())
            kept = series.cat.categories
            values[str(column)] = json.dumps(
                {"dtype": str(kept.dtype), "ordered": series.cat.ordered, "values": kept.tolist()})
        else:
            columns[str(column)] = pa.array(series, from_pandas=pd.api.types.is_extension_array_dtype(series.dtype))
    dtypes = {str(c): str(d) for c, d in frame.dtypes.items()}
    table = pa.table(columns).replace_schema_metadata({"dtypes": json.dumps(dtypes), "rows": str(len(frame))})
    # Opened here: pyarrow takes no path that is not UTF-8.
    with (entry / f"{name}.parquet").open("wb") as file:
        pq.write_table(table, file, compression="lz4", use_dictionary=list(values))
    texts = pa.table({"column": list(values), "values": list(values.values())})
    with (entry / f"{name}.categories.parquet").open("wb") as file:
        pq.write_table(texts, file, compression="lz4")


def _read(entry: Path, name: str) -> pd.DataFrame:
    with (entry / f"{name}.parquet").open("rb") as file:
        table = pq.ParquetFile(file).read()
    with (entry / f"{name}.categories.parquet").open("rb") as file:
        categories = pq.ParquetFile(file).read().to_pydict()
    values = dict(zip(categories["column"], map(json.loads, categories["values"]), strict=True))
    dtypes = json.loads(table.schema.metadata[b"dtypes"])
    data = {column: _column(table.column(column), dtype, values.get(column)) for column, dtype in dtypes.items()}
    return pd.DataFrame(data, index=pd.RangeIndex(int(table.schema.metadata[b"rows"])), copy=False)


def _column(column: pa.ChunkedArray, dtype: str, values: dict[str, Any] | None) -> Any:
    if values is not None:
        kept = pd.Index(values["values"], dtype=object).astype(values["dtype"])
        return pd.Categorical.from_codes(column.to_numpy(), kept, ordered=values["ordered"])
    if dtype == "Int64":
        missing = column.is_null().to_numpy()
        return pd.arrays.IntegerArray(column.fill_null(0).to_numpy().copy(), missing)
    if dtype in ("str", "object", "string"):
        return pd.array(column.to_pylist(), dtype=dtype)
    return column.to_numpy().astype(np.dtype(dtype), copy=False)
