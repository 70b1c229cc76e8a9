"""`tb-chopper export` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tb_chopper import cli
from tests.builders import TraceBuilder
from tests.contract.chrome_json import load


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two ranks on a host with a name; the current directory is another one."""
    for rank in range(2):
        t = TraceBuilder(rank=rank, world_size=2)
        t.training_step(0, 0)
        t.head |= {"host_name": "secret-box", "environment": {"TOKEN": "secret-token"}}
        t.tail["job"] = {"user": "secret-user"}
        t.launch("/home/alice/model.py(3): kernel", 900, 910, 5)
        t.write(tmp_path / "my run" / f"secret-box_r{rank}_47{rank}.100.pt.trace.json.gz")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "my run"


def run(*arguments: object) -> int:
    return cli.main(["export", *map(str, arguments)])


def test_one_trace_goes_to_the_file_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder / "secret-box_r0_470.100.pt.trace.json.gz"
    assert run(source, "-o", "out.json") == 0
    assert capsys.readouterr().out == "out.json\n"
    assert len(load(Path("out.json"))["traceEvents"]) > len(load(source)["traceEvents"])
    assert run(source) == 0
    assert Path("augmented.secret-box_r0_470.100.chrome.json.gz").exists()


def test_several_traces_go_to_a_directory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, "-o", "out") == 0
    assert len(list(Path("out").iterdir())) == 2
    assert run(folder, "-o", "out.json.gz") == 2
    assert "2 traces" in capsys.readouterr().err


@pytest.mark.parametrize(("form", "name"), [
    ("parquet", "my_run.tables/kernels.parquet"), ("csv", "my_run.tables/kernels.csv"), ("perfetto", "my_run.pftrace")])
def test_other_formats_are_named_after_the_run(folder: Path, form: str, name: str) -> None:
    if form == "perfetto":
        pytest.importorskip("perfetto.protos")
    assert run(folder, "--format", form) == 0
    assert Path(name).stat().st_size > 0


@pytest.mark.parametrize("form", ["chrome", "perfetto", "csv"])
def test_redact_takes_out_hosts_and_folders(folder: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    if form == "perfetto":
        pytest.importorskip("perfetto.protos")
    assert run(folder, "--format", form, "-o", "out", "--redact") == 0
    out = Path("out")
    files = list(out.iterdir()) if out.is_dir() else [out]
    text = capsys.readouterr().out
    for file in files:
        if form == "chrome":
            text += json.dumps(load(file))
        elif form == "perfetto":
            from tests.contract import pftrace

            text += "".join(map(repr, pftrace.packets(file.read_bytes())))
        else:
            text += file.read_text()
    assert "secret" not in text and "alice" not in text and "model.py(3)" in text
    if form == "chrome":
        kept = load(files[0])
        assert kept["distributedInfo"]["world_size"] == 2 and kept["baseTimeNanoseconds"] > 0


def test_what_cannot_be_exported_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank0.pt.trace.json").write_text("{")
    assert run(tmp_path / "nothing.json") == 2 and run(tmp_path) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith("tb-chopper: ") for line in lines)
