"""The cache gives back exactly what was stored, or nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tb_chopper.backend import cache, schema

META = {"findings": [{"code": "x", "message": "层 <b>"}], "complete": True, "n": None}


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TB_CHOPPER_CACHE", raising=False)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "log" / "w.pt.trace.json"
    path.parent.mkdir()
    path.write_text("{}")
    return path


def kernels(n: int = 1000) -> pd.DataFrame:
    """A table with every column of KERNELS, nulls and unused categories included."""
    rng = np.random.default_rng(0)
    names = pd.Index(["gemm", "层", "a" * 5000, "", "a\tb", "unused", "<script>"], dtype=object).astype("str")
    columns = {
        "category": lambda: pd.Categorical.from_codes(rng.integers(-1, 5, n), names),
        "Int64": lambda: pd.arrays.IntegerArray(rng.integers(-(2**63), 2**63 - 1, n), rng.random(n) < 0.3),
        "int64": lambda: rng.integers(-(2**63), 2**63 - 1, n),
        "int32": lambda: rng.integers(-5, 5, n).astype("int32"),
        "float64": lambda: np.where(rng.random(n) < 0.3, np.nan, rng.random(n)),
        "bool": lambda: rng.random(n) < 0.5,
    }
    return pd.DataFrame({c.name: columns[c.dtype]() for c in schema.KERNELS})


def test_tables_come_back_exactly(trace: Path) -> None:
    frames = {"kernels": kernels(), "empty": schema.empty(schema.STEPS), "host": schema.empty(schema.HOST)}
    frames["kernels"]["phase"] = pd.Categorical(["forward"] * 1000, list(schema.PHASES), ordered=True)
    cache.store(trace, "k", frames, META)
    loaded = cache.load(trace, "k")
    assert loaded is not None
    assert loaded[1] == META
    assert list(loaded[0]) == list(frames)
    for name, frame in frames.items():
        pd.testing.assert_frame_equal(loaded[0][name], frame, check_exact=True)


def test_another_state_of_the_file_is_a_miss(trace: Path) -> None:
    cache.store(trace, "k", {"t": kernels(3)}, {})
    os.utime(trace, ns=(1, 1))
    assert cache.load(trace, "k") is None
    cache.store(trace, "k", {"t": kernels(3)}, {})
    assert len(list((trace.parent / cache.FOLDER).iterdir())) == 1, "the stale entry goes"
    trace.write_text("{} ")
    assert cache.load(trace, "k") is None


def test_other_settings_and_other_versions_are_a_miss(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.store(trace, "k", {"t": kernels(3)}, {})
    assert cache.load(trace, "other") is None
    monkeypatch.setattr(schema, "VERSION", schema.VERSION + 1)
    assert cache.load(trace, "k") is None


def test_settings_live_side_by_side_up_to_a_limit(trace: Path) -> None:
    for key in "abcdefgh":
        cache.store(trace, key, {"t": kernels(3)}, {"key": key})
    assert len(list((trace.parent / cache.FOLDER).iterdir())) == cache.MAX_ENTRIES
    loaded = cache.load(trace, "h")
    assert loaded is not None
    assert loaded[1]["key"] == "h"


def test_storing_again_replaces(trace: Path) -> None:
    cache.store(trace, "k", {"t": kernels(3)}, {"n": 1})
    cache.store(trace, "k", {"t": kernels(4)}, {"n": 2})
    loaded = cache.load(trace, "k")
    assert loaded is not None
    assert (len(loaded[0]["t"]), loaded[1]["n"]) == (4, 2)


@pytest.mark.parametrize("file", ["meta.json", "t.parquet", "t.categories.parquet"])
@pytest.mark.parametrize("content", [None, b"", b"garbage", b"PAR1garbagePAR1", b"{}", b"[1]", b"\xff\xfe"])
def test_a_damaged_entry_is_a_miss(trace: Path, file: str, content: bytes | None) -> None:
    cache.store(trace, "k", {"t": kernels(3)}, {})
    (entry,) = (trace.parent / cache.FOLDER).iterdir()
    if content is None:
        (entry / file).unlink()
    else:
        (entry / file).write_bytes(content)
    assert cache.load(trace, "k") is None
    cache.store(trace, "k", {"t": kernels(3)}, {})
    assert cache.load(trace, "k") is not None


def test_a_cut_table_is_a_miss(trace: Path) -> None:
    cache.store(trace, "k", {"t": kernels()}, {})
    (entry,) = (trace.parent / cache.FOLDER).iterdir()
    data = (entry / "t.parquet").read_bytes()
    (entry / "t.parquet").write_bytes(data[: len(data) // 2])
    assert cache.load(trace, "k") is None


def test_a_failed_store_leaves_no_trace(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.pq, "write_table", full)
    cache.store(trace, "k", {"t": kernels(3)}, {})
    assert list((trace.parent / cache.FOLDER).iterdir()) == []
    assert cache.load(trace, "k") is None


def test_a_read_only_directory_uses_the_users_own(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = Path.mkdir

    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        if self.is_relative_to(trace.parent):
            raise PermissionError(13, "Read-only")
        mkdir(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", refuse)
    cache.store(trace, "k", {"t": kernels(3)}, META)
    assert not (trace.parent / cache.FOLDER).exists()
    loaded = cache.load(trace, "k")
    assert loaded is not None
    assert loaded[1] == META


def test_off_means_off(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TB_CHOPPER_CACHE", "0")
    cache.store(trace, "k", {"t": kernels(3)}, {})
    assert list(trace.parent.iterdir()) == [trace]
    monkeypatch.delenv("TB_CHOPPER_CACHE")
    cache.store(trace, "k", {"t": kernels(3)}, {})
    monkeypatch.setenv("TB_CHOPPER_CACHE", "0")
    assert cache.load(trace, "k") is None


def test_a_missing_file_is_a_miss(tmp_path: Path) -> None:
    assert cache.load(tmp_path / "gone.json", "k") is None
    cache.store(tmp_path / "gone.json", "k", {}, {})


def test_meta_is_plain_json(trace: Path) -> None:
    cache.store(trace, "k", {}, META)
    (entry,) = (trace.parent / cache.FOLDER).iterdir()
    assert json.loads((entry / "meta.json").read_text())["meta"] == META
