"""A training whose counters are being collected: nothing is traced, and every process says which rank it is."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

TRAINING = """
import sys, torch
from torch.profiler import ProfilerActivity, profile, schedule
from torch_ext import chopper_trace_handler
handler = chopper_trace_handler(sys.argv[1])
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], schedule=schedule(wait=0, warmup=1, active=1),
             on_trace_ready=handler) as profiler:
    for _ in range(3):
        torch.ones(4, 4) @ torch.ones(4, 4)
        profiler.step()
print(sorted(a.name for a in profiler.activities), len(profiler.key_averages()) >= 0)
"""


def train(log: Path, folder: Path | None, **environment: str) -> str:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TB_CHOPPER_PASS")}
    told = {"TB_CHOPPER_PASS": str(folder)} if folder else {}
    done = subprocess.run([sys.executable, "-c", TRAINING, str(log)], env={**clean, **told, **environment}, check=True,
                          capture_output=True, text=True)
    return done.stdout


def test_in_a_pass_nothing_is_traced_and_the_rank_is_told(tmp_path: Path):
    from tb_chopper.backend.readers import counter_files

    folder = tmp_path / "run" / "counters" / "pass_2"
    folder.mkdir(parents=True)
    assert train(tmp_path / "run", folder, RANK="3", WORLD_SIZE="8") == "['CPU'] True\n"
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["counters"]
    [path] = folder.iterdir()
    told = json.loads(path.read_text())
    assert told == {"host": socket.gethostname(), "pid": told["pid"], "rank": 3}
    assert counter_files.read(tmp_path / "run").ranks == {(2, socket.gethostname(), told["pid"]): 3}


def test_a_process_without_a_rank_says_nothing_and_a_lost_folder_stops_nobody(tmp_path: Path):
    (tmp_path / "pass_1").mkdir()
    train(tmp_path / "run", tmp_path / "pass_1")
    train(tmp_path / "run", tmp_path / "gone", RANK="0")
    assert not list((tmp_path / "pass_1").iterdir()) and not (tmp_path / "run").exists()


def test_outside_a_pass_it_is_a_training_as_usual(tmp_path: Path):
    assert "'CUDA'" in train(tmp_path / "run", None)
    assert len(list((tmp_path / "run").glob("*.pt.trace.json.gz"))) == 2
