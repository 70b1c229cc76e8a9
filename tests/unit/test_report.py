"""The report as a file: what it holds, what it leaves out, how large it is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import tb_chopper
from tb_chopper import cli
from tb_chopper.backend import analyze
from tb_chopper.backend.export import differences, report
from tb_chopper.backend.simulate import Options, simulate
from tb_chopper.backend.views import REGISTRY
from tests.builders import TraceBuilder
from tests.contract.test_augmented_trace import NAMES


def build(folder: Path, *, slower: float = 0.0, ranks: int = 2) -> Path:
    for rank in range(ranks):
        t = TraceBuilder(rank=rank, world_size=ranks)
        for i in range(2):
            t.training_step(i, 1000 * i)
            t.op("aten::extra", 1000 * i + 870, 10)
            t.launch("extra", 1000 * i + 875, 1000 * i + 900, 20 + slower)
        t.head["host_name"] = "secret-box"
        t.launch("/home/mallory9/model.py(3)", 2100, 2110, 5)
        t.write(folder / f"secret-box_r{rank}_47{rank}.100.pt.trace.json.gz")
    return folder


def page(path: Path) -> dict[str, Any]:
    """What the page draws, and the numbers it carries."""
    found = re.search(r'<script type="application/json" id="report">(.*?)</script>', path.read_text(), re.DOTALL)
    numbers = re.search(r'<script type="application/json" id="numbers">(.*?)</script>', path.read_text(), re.DOTALL)
    assert found and numbers
    return {**json.loads(found[1]), "numbers": json.loads(numbers[1])}


def column(table: dict[str, Any], name: str) -> list[Any]:
    return table["data"][[c["name"] for c in table["columns"]].index(name)]


def test_it_holds_every_view_and_the_numbers_of_analyze(tmp_path: Path) -> None:
    folder = build(tmp_path / "run")
    assert cli.main(["report", str(folder), "-o", str(tmp_path / "out.html")]) == 0
    found = page(tmp_path / "out.html")
    assert [v["name"] for v in found["views"]] == list(REGISTRY)
    (expected,) = analyze.analyze(folder)["runs"]
    assert found["numbers"] == json.loads(json.dumps(expected))
    overview = found["views"][0]["tables"]["gpus"]
    for worker in expected["workers"]:
        row = column(overview, "gpu").index(worker["rank"])
        for part in ("total", "compute", "exposed_communication", "exposed_memcpy", "idle"):
            assert column(overview, f"{part}_us")[row] == pytest.approx(worker["gpu_time_us"][part], abs=1e-3)


def test_differences_are_those_that_were_planted(tmp_path: Path) -> None:
    run, other = (tb_chopper.open_run(build(tmp_path / n, slower=s)) for n, s in (("slow", 30.0), ("fast", 0.0)))
    tables = differences.view(run, other).tables
    operations = tables["operations"].rows.set_index("operation")
    assert operations.index[0] == "aten::extra"
    assert operations.loc["aten::extra", ["us", "us_other", "difference_us"]].tolist() == [50, 20, 30]
    assert operations.loc["aten::extra", "change"] == 1.5
    assert (operations["difference_us"].drop("aten::extra") == 0).all()
    parts = tables["parts"].rows.set_index("part")
    assert parts.loc["Compute", "difference_us"] == pytest.approx(30)
    gpus = tables["gpus"].rows
    assert gpus[gpus["part"] == "Compute"]["difference_us"].tolist() == [pytest.approx(30)] * 2
    for name, frame in (("us", run.timeline(by=["gpu", "step"])), ("us_other", other.timeline(by=["gpu", "step"]))):
        expected = frame[frame["step"].notna()]["idle_us"].mean()
        assert parts.loc["Idle", name] == pytest.approx(expected)


def test_factors_of_the_breakdown_are_compared(tmp_path: Path) -> None:
    (slow,) = simulate(tmp_path / "slow", Options(preset="tiny", slow={0: 0.7, 1: 0.7}))
    (fast,) = simulate(tmp_path / "fast", Options(preset="tiny"))
    rows = differences.view(tb_chopper.open_run(slow), tb_chopper.open_run(fast)).tables["factors"].rows
    gemm = rows[rows["operation"] == "mlp_gp"].set_index("factor")["ratio"]
    # The same program at another clock: the same work, more time.
    assert gemm["Theoretical duration, µs"] == pytest.approx(1) and gemm["Instructions, ×"] == pytest.approx(1)
    assert gemm["Actual duration, µs"] > 1.05 and gemm["Frequency, ×"] > 1.05


def test_runs_without_steps_or_with_other_gpus_compare(tmp_path: Path) -> None:
    bare = TraceBuilder(rank=None)
    bare.op("aten::mm", 0, 10)
    bare.launch("gemm", 2, 20, 40)
    bare.write(tmp_path / "bare" / "w_1.pt.trace.json")
    run, other = tb_chopper.open_run(tmp_path / "bare"), tb_chopper.open_run(build(tmp_path / "run", ranks=1))
    for a, b in ((run, other), (other, run)):
        report.export(a, tmp_path / "out.html", compare=b)
        assert page(tmp_path / "out.html")["views"][0]["name"] == "differences"
    assert differences.view(run, other).tables["operations"].rows["us"].max() == 40


def test_findings_are_said_once(tmp_path: Path) -> None:
    folder = build(tmp_path / "run", ranks=2)
    (folder / "secret-box_r1_471.100.pt.trace.json.gz").unlink()
    report.export(tb_chopper.open_run(folder), tmp_path / "out.html")
    told = [v["name"] for v in page(tmp_path / "out.html")["views"] if v["findings"]]
    assert told == ["overview", "findings"]


@pytest.mark.parametrize("name", ["out.html", "out.md"])
def test_redact_takes_out_hosts_and_folders(tmp_path: Path, name: str) -> None:
    folder = build(tmp_path / "run")
    out = tmp_path / name
    assert cli.main(["report", str(folder), "-o", str(out)]) == 0
    plain = out.read_text()
    assert cli.main(["report", str(folder), "-o", str(out), "--redact"]) == 0
    redacted = out.read_text()
    assert "secret-box" in plain
    for secret in ("secret-box", "mallory9", str(tmp_path)):
        assert secret not in redacted


def test_any_name_is_text(tmp_path: Path) -> None:
    t = TraceBuilder()
    for i, name in enumerate([*NAMES, "</script><script>alert(1)</script>", "a | b `c` <i>"]):
        t.op(name, 30 * i, 20)
        t.launch(name, 30 * i + 5, 30 * i + 10, 15)
    run = tb_chopper.open_run(t.write(tmp_path / "<b>&.json"))
    report.export(run, tmp_path / "out.html")
    text = (tmp_path / "out.html").read_text()
    assert "alert(1)</script>" not in text and "<title>Chopper: &lt;b&gt;&amp;.json</title>" in text
    operations = next(v for v in page(tmp_path / "out.html")["views"] if v["name"] == "operations")
    shown = json.dumps(operations["tables"], ensure_ascii=False)
    assert "核 naïve 🚀" in shown and "k" * 1000 in shown
    report.export(run, tmp_path / "out.md", form="md")
    assert "<script" not in (tmp_path / "out.md").read_text().replace("\\<", "")


def test_markdown_is_well_formed(tmp_path: Path) -> None:
    run = tb_chopper.open_run(build(tmp_path / "run"))
    report.export(run, tmp_path / "out.md", form="md", compare=tb_chopper.open_run(build(tmp_path / "other")))
    text = (tmp_path / "out.md").read_text()
    assert text.startswith("# run\n") and "## Differences" in text and "## Overview" in text
    cells = [len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("|")]
    rows = [line for line in text.splitlines() if line.startswith("|")]
    for i, line in enumerate(rows):
        if "---" in line and set(line) <= set("| -"):  # a table: its header before, rows after, all with as many cells
            assert cells[i - 1] == cells[i] == cells[i + 1]


def test_long_tables_are_cut_and_say_so() -> None:
    n = 5000
    table = {"title": "t", "columns": [{"name": "a"}, {"name": "us"}], "sort": "us", "link": {}, "note": "Note.",
             "data": [list(range(n)), [float((i * 7919) % n) for i in range(n)]]}
    cut = report._first_rows(table)
    assert cut["data"][1] == sorted((float(i) for i in range(n)), reverse=True)[: report.MAX_ROWS]
    assert f"{report.MAX_ROWS} of {n} rows" in cut["note"] and cut["note"].startswith("Note.")


def test_what_cannot_be_reported_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(tmp_path / "no")]) == 2
    folder = build(tmp_path / "run")
    assert cli.main(["report", str(folder), "--compare", str(tmp_path / "no"), "-o", str(tmp_path / "x.html")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
