"""Memory of real traces against the `[memory]` events of the files, read with `json`."""

from __future__ import annotations

import gzip
import json

import pytest

import tb_chopper

NAMES = ["vit_h100", "vit_mi300x", "timesformer_h100", "timesformer_mi300x", "bert_small_h100", "bert_small_mi300x"]


@pytest.mark.parametrize("name", NAMES)
def test_peak_floor_and_fragmentation(shared, name: str):
    file = next((shared / "traces" / name).glob("*.gz"))
    content = json.loads(gzip.decompress(file.read_bytes()))
    args = [e["args"] for e in content["traceEvents"] if e.get("name") == "[memory]" and e["args"]["Device Type"] != 0]
    peak = max(args, key=lambda a: a["Total Allocated"])
    row = tb_chopper.open_run(file.parent).memory().iloc[0]
    assert row["peak_bytes"] == peak["Total Allocated"]
    assert row["reserved_bytes"] == max(a["Total Reserved"] for a in args)
    assert row["fragmentation"] == pytest.approx(1 - peak["Total Allocated"] / peak["Total Reserved"])
    assert row["total_bytes"] == content["deviceProperties"][0]["totalGlobalMem"]
    assert row["headroom_bytes"] == row["total_bytes"] - row["reserved_bytes"]


def test_a_trace_of_2021_has_levels_but_no_totals(shared):
    file = next((shared / "traces/resnet50_v100").glob("*.gz"))
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    sizes = [e["args"]["Bytes"] for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == 1]
    level, levels = 0, []
    for size in sizes:
        level += size
        levels.append(level)
    run = tb_chopper.open_run(file.parent)
    row = run.memory().iloc[0]
    assert row["peak_bytes"] == max(levels) - min(0, *levels)
    assert not row["total_known"]
    assert row["phase"] == "backward"
    assert run.step_memory()["peak_bytes"].nunique() == 1  # every step is the same
