"""The sampler writes what the vendor's tool prints about links, or nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_ext import topology


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is the whole PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    return folder


def tool(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_the_answer_is_kept_as_it_is(tools: Path, tmp_path: Path):
    tool(tools, "amd-smi", 'test "$1" = topology && echo "LINK TYPE TABLE:"')
    topology.record(tmp_path, "node 0/a").join()
    written = tmp_path / "node_0_a.topology.txt"
    assert written.read_text() == "LINK TYPE TABLE:\n"
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_addresses_stand_below_the_matrix(tools: Path):
    tool(tools, "nvidia-smi", 'case "$1" in topo) echo matrix;; --query-gpu=*) echo "0, 00000000:18:00.0";; esac')
    assert topology.ask() == "matrix\n\n0, 00000000:18:00.0\n"


def test_a_tool_that_fails_gives_way_to_the_next(tools: Path):
    tool(tools, "nvidia-smi", "echo no devices; exit 9")
    tool(tools, "amd-smi", "exit 0")  # says nothing
    tool(tools, "rocm-smi", "echo links")
    assert topology.ask() == "links\n"


def test_nothing_is_written_without_a_tool(tools: Path, tmp_path: Path):
    topology.record(tmp_path, "node0").join()
    assert os.listdir(tmp_path) == ["bin"]


def test_what_cannot_be_written_is_told(tools: Path, tmp_path: Path):
    tool(tools, "rocm-smi", "echo links")
    told: list[str] = []
    topology.record(tmp_path / "gone", "node0", told.append).join()
    assert told == ["topology cannot be written: No such file or directory"]


def test_nothing_of_the_environment_is_kept(tools: Path, tmp_path: Path):
    tool(tools, "rocm-smi", "echo links")
    topology.record(tmp_path, "node0").join()
    assert "hunter2" not in "".join(p.read_text() for p in tmp_path.glob("*.topology.txt"))


def test_a_sampler_writes_it_beside_its_log(tools: Path, tmp_path: Path):
    tool(tools, "amd-smi", "echo LINK TYPE TABLE:")
    out = tmp_path / "run"
    subprocess.run([sys.executable, "-m", "torch_ext.sampler", "--out", str(out), "--seconds", "1"], check=True,
                   cwd=Path(topology.__file__).parents[1], timeout=60)
    (written,) = out.glob("*.topology.txt")
    assert written.read_text() == "LINK TYPE TABLE:\n"
    assert (out / written.name.replace(".topology.txt", ".telemetry.csv")).is_file()
