"""The sidecar's schema: what is written comes back; what is damaged costs itself alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_ext import sidecar


def full() -> sidecar.Sidecar:
    return {
        "schema_version": 1,
        "worker": "node0_r3_4711",
        "span_ns": 1764400000000000001,
        "identity": {
            "host": "node0", "rank": 3, "world_size": 8, "local_rank": 3, "pid": 4711,
            "device": {"type": "cuda", "index": 0, "name": "AMD Instinct MI300X", "pci_address": "0000:c1:00.0",
                       "compute_units": 304, "memory_bytes": 206141652992},
        },
        "clocks": [{"where": "start", "realtime_ns": 1764400000000000000, "monotonic_ns": 5, "boottime_ns": None,
                    "uncertainty_ns": 300}],
        "versions": {"torch": "2.13.0", "cuda": None, "hip": "7.2", "python": "3.12.1", "tb_chopper": "0.1.0"},
        "profiler": {"record_shapes": True, "with_stack": False, "profile_memory": False, "with_flops": False,
                     "with_modules": False, "first_step": 10, "last_step": 12},
        "training": {"tokens_per_step": 16384, "model_flops_per_step": 2.1e14, "parallel": {"dp_shard": 8, "tp": 1}},
        "modules": [{"fqn": "", "cls": "Llama", "params": 8030261248, "order": 0},
                    {"fqn": "layers.0", "cls": "Block", "params": None, "order": 1}],
        "simulated": True,
        "notes": ["made up"],
    }  # fmt: skip


def written(folder: Path, content: object) -> Path:
    path = folder / "w.1.chopper.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "node0_r3_4711.1764400000000000001.chopper.json"
    sidecar.write(path, full())
    assert sidecar.read(path) == full()
    assert os.listdir(tmp_path) == [path.name]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "w.1.chopper.json"
    sidecar.write(path, full())
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        sidecar.write(path, sidecar.empty())
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]


def test_missing_parts_are_null_or_empty(tmp_path: Path) -> None:
    read = sidecar.read(written(tmp_path, {"identity": {"rank": 2}, "something_new": [1]}))
    expected = sidecar.empty()
    expected["schema_version"] = 0
    expected["identity"]["rank"] = 2
    assert read == expected


@pytest.mark.parametrize(
    ("part", "value", "note"),
    [
        ("identity", {"rank": "three", "pid": 7}, "identity.rank"),
        ("identity", {"rank": True}, "identity.rank"),
        ("identity", {"rank": 1.5}, "identity.rank"),
        ("identity", [], "identity"),
        ("training", {"tokens_per_step": "many"}, "training.tokens_per_step"),
        ("clocks", [{"where": "start"}], "clocks[0]"),
        ("clocks", {}, "clocks"),
        ("modules", [{"fqn": "a", "cls": "B", "params": None, "order": "x"}], "modules[0]"),
        ("simulated", "yes", "simulated"),
        ("worker", 5, "worker"),
    ],
)
def test_a_part_of_the_wrong_type_costs_itself_alone(tmp_path: Path, part: str, value: object, note: str) -> None:
    read = sidecar.read(written(tmp_path, full() | {part: value}))
    added = [line for line in read["notes"] if line != "made up"]
    assert len(added) == 1
    assert added[0].startswith(f"{note}:")
    untouched = {key: content for key, content in read.items() if key not in (part, "notes")}
    assert untouched == {key: content for key, content in full().items() if key not in (part, "notes")}


def test_good_rows_survive_a_bad_one(tmp_path: Path) -> None:
    rows = [*full()["modules"], 5, {"fqn": "x"}]
    assert sidecar.read(written(tmp_path, full() | {"modules": rows}))["modules"] == full()["modules"]


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ('{"schema_version": 1,\n "worker": }', "line 2 column 12"),
        ("", "line 1 column 1"),
        ("[1, 2]", "expected an object, found list"),
        ('{"schema_version": 99}', "schema version 99 is newer"),
        ("[" * 100_000, ""),
    ],
)
def test_an_unusable_file_is_one_line_with_file_and_place(tmp_path: Path, content: str, place: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ValueError) as caught:
        sidecar.read(path)
    message = str(caught.value)
    assert str(path) in message
    assert place in message
    assert "\n" not in message


def test_files_that_cannot_be_read_are_one_line_too(tmp_path: Path) -> None:
    (tmp_path / "latin.chopper.json").write_bytes(b'{"worker": "\xff\xfe"}')
    for name in ("absent.chopper.json", "latin.chopper.json", "."):
        with pytest.raises(ValueError) as caught:
            sidecar.read(tmp_path / name)
        assert "\n" not in str(caught.value)
        assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("trace", "expected"),
    [
        ("node0.lab_r0_7.123.pt.trace.json.gz", "node0.lab_r0_7.123.chopper.json"),
        ("node0.lab_r0_7.123.pt.trace.json", "node0.lab_r0_7.123.chopper.json"),
        ("rank0.json", "rank0.chopper.json"),
    ],
)
def test_a_trace_knows_its_sidecar(trace: str, expected: str) -> None:
    assert sidecar.path_for(Path("log/run", trace)) == Path("log/run", expected)


def test_scopes_say_which_module() -> None:
    assert sidecar.scope_name("layers.3.mlp.gate_proj", "Linear") == "chopper::layers.3.mlp.gate_proj"
    assert sidecar.scope_name("", "Llama") == "chopper::(Llama)"
    assert sidecar.scope_fqn("chopper::layers.3") == "layers.3"
    assert sidecar.scope_fqn("chopper::(Llama)") == ""
    assert sidecar.scope_fqn("## Call CompiledFxGraph f2 ##") is None
    assert sidecar.scope_fqn("compute::layers.3") is None


@pytest.mark.parametrize("fqn", ['a"b', "a\\b", "层0", "a\nb", "x{}[]", "(Llama)", "a b,c:d", "'<script>'"])
def test_scope_names_survive_every_exporter(fqn: str) -> None:
    name = sidecar.scope_name(fqn, "Odd")
    assert name.isascii() and name.isprintable()
    assert not set(name) & set("\"\\'<>{}")
    assert sidecar.scope_fqn(name), "a submodule is never taken for the model itself"


def test_reading_sidecars_needs_no_torch() -> None:
    code = "import sys, torch_ext.sidecar; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
