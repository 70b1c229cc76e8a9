"""The trace on its way to disk: broken JSON is mended, everything else passes byte for byte."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from torch_ext import export as export_module
from torch_ext.export import export

pytestmark = pytest.mark.torch


def event(name: str = "aten::mm", args: str = '"External id": 7') -> str:
    """One event as torch 2.13's exporter lays it out: nothing in `name` is escaped."""
    return (
        '\n  {\n    "ph": "X",\n    "cat": "cpu_op",\n    "name": "' + name + '",\n    "pid": 1,\n    "tid": 2,\n'
        '    "ts": 10.500,\n    "dur": 2.250\n    ,\n    "args": {\n      ' + args + "\n    }\n  }"
    )


def trace_text(events: list[str], metadata: str = '"record_shapes": 1') -> str:
    head = (
        ' {\n    "schemaVersion": 1,\n    "deviceProperties": [\n    {\n      "id": 0, "name": "GPU", "numSms": 132\n'
        '    }\n  ],\n      ' + metadata + ',\n    "displayTimeUnit": "ms",\n'
        '    "baseTimeNanoseconds": 1790857026000000000,\n    "traceEvents": ['
    )
    return head + ",".join(events) + '\n  ],"traceName": "/tmp/x.json" }\n'


class Profiler:
    """Hands out a given text once, as torch's profiler does."""

    def __init__(self, text: str) -> None:
        self.text: str | None = text

    def export_chrome_trace(self, path: str, use_python_export: bool = False) -> None:
        if self.text is None:
            raise RuntimeError("Trace is already saved.")
        Path(path).write_bytes(self.text.encode("utf-8", "surrogateescape"))
        self.text = None


@pytest.fixture(params=[64, 1000, 4 << 20], ids="block_{}".format)
def any_block_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "_BLOCK_BYTES", request.param)


def exported(text: str, folder: Path) -> tuple[dict[str, Any], list[str]]:
    path = folder / "w.1.pt.trace.json"
    notes = export(Profiler(text), path)
    assert os.listdir(folder) == [path.name]
    return json.loads(path.read_bytes()), notes


@pytest.mark.usefixtures("any_block_size")
@pytest.mark.parametrize("n", [0, 1, 2, 50])
def test_a_valid_trace_passes_byte_for_byte(tmp_path: Path, n: int) -> None:
    text = trace_text([event(f"aten::op{i}", '"Input Dims": [[], [2, 3]], "t": "}\\n  },"') for i in range(n)])
    path = tmp_path / "w.1.pt.trace.json"
    assert export(Profiler(text), path) == []
    assert path.read_text() == text


@pytest.mark.usefixtures("any_block_size")
@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize(
    "name",
    ['say "hi"', '"', 'ends"', '", "pid": 3', '{"a": [1, "b"]}', 'already \\"fine\\"'],
)
def test_quotes_in_a_name_are_escaped(tmp_path: Path, name: str, position: int) -> None:
    events = [event("aten::a"), event("aten::b")]
    events.insert(position, event(name))
    content, notes = exported(trace_text(events), tmp_path)
    names = [e["name"] for e in content["traceEvents"]]
    assert names.pop(position) == name.replace('\\"', '"')
    assert names == ["aten::a", "aten::b"]
    assert [e["ts"] for e in content["traceEvents"]] == [10.5] * 3
    assert bool(notes) == ("\\" not in name)


@pytest.mark.usefixtures("any_block_size")
@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "-nan", "NaN", "Infinity", "-Infinity"])
def test_what_is_not_finite_becomes_null(tmp_path: Path, value: str) -> None:
    args = f'"External id": 7, "blocks per SM": {value}, "stream": 3, "note": "an inf: inf here"'
    content, notes = exported(trace_text([event(), event(args=args), event()]), tmp_path)
    mended = content["traceEvents"][1]["args"]
    assert {k: mended[k] for k in ("External id", "blocks per SM", "stream")} == {
        "External id": 7, "blocks per SM": None, "stream": 3,
    }  # fmt: skip
    assert notes == ["1 places of the trace were not valid JSON and have been mended"]


@pytest.mark.parametrize("name", ["tab\there", "bell\x07", "latin \udce9"])
def test_characters_that_json_forbids_cost_themselves_alone(tmp_path: Path, name: str) -> None:
    content, _ = exported(trace_text([event(), event(name)]), tmp_path)
    assert content["traceEvents"][1]["name"][:3] == name[:3]
    assert content["traceEvents"][1]["args"] == {"External id": 7}


@pytest.mark.usefixtures("any_block_size")
def test_args_beyond_repair_go_and_the_event_stays(tmp_path: Path) -> None:
    content, _ = exported(trace_text([event(), event("aten::einsum", '"kwarg": "a "quoted" b"')]), tmp_path)
    assert content["traceEvents"][1]["name"] == "aten::einsum"
    assert content["traceEvents"][1]["args"] == {}


@pytest.mark.usefixtures("any_block_size")
@pytest.mark.parametrize("position", [0, 1, 2])
def test_an_event_beyond_repair_goes_and_the_others_stay(tmp_path: Path, position: int) -> None:
    events = [event("aten::a"), event("aten::b")]
    events.insert(position, '\n  {\n    "ph": "X" "name" nothing\n  }')
    content, notes = exported(trace_text(events), tmp_path)
    assert [e["name"] for e in content["traceEvents"]] == ["aten::a", "aten::b"]
    assert notes


@pytest.mark.usefixtures("any_block_size")
@pytest.mark.parametrize("value", ["not json", "NaN", '"back\\slash"', '"a "b""'])
def test_a_metadata_value_that_is_no_json_goes_alone(tmp_path: Path, value: str) -> None:
    content, notes = exported(trace_text([event()], f'"mine": {value},\n      "record_shapes": 1'), tmp_path)
    assert "mine" not in content
    assert content["record_shapes"] == 1
    assert content["baseTimeNanoseconds"] == 1790857026000000000
    assert len(content["traceEvents"]) == 1
    assert notes


def test_the_name_decides_about_gzip(tmp_path: Path) -> None:
    path = tmp_path / "w.1.pt.trace.json.gz"
    text = trace_text([event()] * 100)
    export(Profiler(text), path)
    assert gzip.decompress(path.read_bytes()).decode() == text


def test_a_layout_we_do_not_know_is_kept_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "w.1.pt.trace.json"
    notes = export(Profiler("a new format"), path)
    assert path.read_text() == "a new format"
    assert "unchecked" in notes[0]


def test_a_full_disk_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        export(Profiler(trace_text([event()])), tmp_path / "w.1.pt.trace.json")
    assert os.listdir(tmp_path) == []


def test_the_python_exporters_device_properties_are_put_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.13 writes the number of SMs as maxThreadsPerMultiprocessor and leaves numSms out."""
    gpu = SimpleNamespace(
        name="AMD Instinct MI300X", total_memory=206141652992, major=9, minor=4, max_threads_per_block=1024,
        max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, warp_size=64, multi_processor_count=304,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    wrong = json.dumps([{"id": 0, "name": gpu.name, "maxThreadsPerMultiprocessor": 304}])
    text = (
        '{\n"schemaVersion": 1,\n"deviceProperties": ' + wrong + ',\n"displayTimeUnit": "ms",\n"traceEvents": [\n'
        '{"ph":"X","name":"deviceProperties","ts":1.0}\n]}\n'
    )
    path = tmp_path / "w.1.pt.trace.json"
    export(Profiler(text), path, use_python_export=True)
    content = json.loads(path.read_bytes())
    assert content["deviceProperties"] == [{
        "id": 0, "name": "AMD Instinct MI300X", "totalGlobalMem": 206141652992, "computeMajor": 9, "computeMinor": 4,
        "maxThreadsPerBlock": 1024, "maxThreadsPerMultiprocessor": 2048, "regsPerMultiprocessor": 65536,
        "warpSize": 64, "numSms": 304,
    }]  # fmt: skip
    assert content["traceEvents"] == [{"ph": "X", "name": "deviceProperties", "ts": 1.0}]
