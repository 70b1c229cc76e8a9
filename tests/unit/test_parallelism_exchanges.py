"""The exchanges in the tab Parallelism, the links in the tab Collectives: what they say of runs known by hand (µs)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tb_chopper
from tb_chopper.backend.run import Run
from tb_chopper.backend.views import parallelism_exchanges, topology
from tb_chopper.backend.views.view import Selection, View
from tests.builders import TraceBuilder
from tests.unit.test_topology import FOUR

STEP, STEPS, LAYERS, RANKS = 1000, 3, 2, 4


def record(folder: Path, ranks: int = RANKS, desc: str = "mesh_tp", links: str | None = FOUR) -> Run:
    """Each of two layers: 100 of computation, 60 of exchange, 20 of them under other computation; rank 1 arrives 10
    late for the exchange of layer 1. The ranks receive 1, 1, 1 and 5 million floats."""
    for rank in range(ranks):
        trace = TraceBuilder(rank=rank, world_size=ranks)
        trace.head["deviceProperties"][0]["numSms"] = 132
        for step in range(STEPS):
            at = STEP * step
            trace.step(step, at, STEP - 5)
            for layer in range(LAYERS):
                start = at + 20 + 300 * layer
                late = 10 if (layer, rank) == (1, 1) else 0
                trace.annotation(f"chopper::layers.{layer}", start - 12, 200)
                trace.op("aten::mm", start - 10, 4, seq=layer)
                trace.launch("gemm", start - 9, start, 100 + late, call=2)
                trace.op("nccl:all_to_all", start - 5, 4)
                trace.collective("ncclDevKernel_SendRecv(x)", start - 4, start + 100 + late, 60 - late, call=1, **{
                    "Collective name": "all_to_allv", "Process Group Name": "3", "Process Group Description": desc,
                    "Group size": ranks, "Seq": 10 * step + layer, "In msg nelems": 2_000_000,
                    "Out msg nelems": 5_000_000 if rank == 3 else 1_000_000})
                trace.op("aten::add", start, 4)
                trace.launch("add", start + 1, start + 140, 20, call=1, stream=9)
        trace.write(folder / f"rank{rank}.pt.trace.json")
    if links:
        (folder / "topology.txt").write_text(links)
    return tb_chopper.open_run(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return record(tmp_path_factory.mktemp("tp"))


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return record(tmp_path_factory.mktemp("ep"), desc="mesh_ep")


def figure(view: View, label: str) -> object:
    return next(k.value for k in view.key_figures if k.label == label)


def test_parts_of_the_exchanges_by_layer(run: Run):
    """A layer's time on a GPU: 100 + 20 of computation, 40 exposed; of layer 1 rank 1 has 10 more, and 10 fewer
    exposed, and all others wait for it. Idle: 140 before layer 1, 540 before layer 0 of the next step."""
    view = run.view("parallelism")
    drawn = view.figures["exchanges"]
    waiting, transfer, hidden = (list(t.x) for t in drawn.data)
    n = RANKS * STEPS
    assert waiting == [0, 3 * STEPS * 10]
    assert transfer == [n * 40, 3 * STEPS * 30 + STEPS * 30]
    assert hidden == [n * 20, n * 20]
    assert list(drawn.layout.yaxis.ticktext) == ["layers.0", "layers.1"]
    elapsed = n * (120 + 40) * 2 + RANKS * ((STEPS - 1) * 540 + STEPS * 140)
    exposed = n * 40 + 3 * STEPS * 40 + STEPS * 30
    assert figure(view, "Tensor exchange, exposed") == pytest.approx(exposed / elapsed)
    assert figure(view, "Tensor exchange, transfer") == pytest.approx((exposed - 90) / elapsed)
    key = next(k for k in view.key_figures if k.label == "Tensor exchange, exposed")
    assert key.note == "1 per layer and step"
    assert "waiting for late ranks" in view.headline


def test_rows_of_the_tables(run: Run):
    tables = run.view("parallelism").tables
    rows = tables["exchanges"].rows
    assert rows[["role", "layer", "n"]].to_numpy().tolist() == [["tensor", "layers.0", 3], ["tensor", "layers.1", 3]]
    assert tables["exchange_groups"].rows[["group", "name", "n"]].to_numpy().tolist() == [["3", "all_to_all", 6]]


def test_selection(run: Run):
    view = run.view("parallelism", step=1, gpu=1)
    assert view.tables["exchanges"].rows["duration_us"].tolist() == [60, 50]
    assert view.tables["exchanges"].rows["exposed_wait_us"].tolist() == [0, 0]


def test_imbalance_of_experts(moe: Run):
    """Of 2 million floats on average one rank receives 5."""
    view = moe.view("parallelism")
    assert figure(view, "Expert imbalance") == 2.5
    assert view.headline.startswith("Exchanges of expert parallelism")


def test_what_nothing_is_told_of(tmp_path: Path):
    """An all-to-all of a group without a name: no role is guessed, and the tab says how to give one."""
    view = record(tmp_path, desc="undefined").view("parallelism")
    assert view.headline == "No pipeline runs here."
    assert "exchanges" not in view.figures
    assert [m.what for m in view.missing] == ["Exchanges of tensor, context and expert parallelism"]
    assert view.missing[0].command == 'run.exchanges(roles={"3": "tensor"})'


def test_one_rank_alone(tmp_path: Path):
    one = record(tmp_path, ranks=1, links=None)
    view = one.view("parallelism")
    assert figure(view, "Tensor exchange, transfer") is None
    assert parallelism_exchanges.OTHER_RANKS in view.missing
    assert [t.name for t in view.figures["exchanges"].data] == ["Exposed communication", "Hidden communication"]
    assert topology.sections(one, Selection()) == ({}, {}, ())


def test_ring_attention(tmp_path: Path):
    """Keys and values go round by send and recv beside the attention: no rank's half tells a wait."""
    for rank in range(2):
        trace = TraceBuilder(rank=rank, world_size=2)
        for step in range(STEPS):
            at = STEP * step
            trace.step(step, at, STEP - 5)
            trace.annotation("chopper::layers.0", at + 5, 200)
            trace.op("aten::_scaled_dot_product_flash_attention", at + 8, 20, seq=step)
            trace.launch("flash_fwd_kernel", at + 10, at + 30, 100, call=1)
            for i, half in enumerate(("send", "recv")):
                trace.op(f"nccl:{half}", at + 12 + 3 * i, 2)
                trace.collective("ncclDevKernel_SendRecv(x)", at + 12 + 3 * i, at + 40, 120, call=1, stream=20 + i, **{
                    "Collective name": half, "Process Group Name": "4", "Process Group Description": "mesh_cp",
                    "Group size": 2, "Seq": 2 * step + i})
        trace.write(tmp_path / f"rank{rank}.pt.trace.json")
    view = tb_chopper.open_run(tmp_path).view("parallelism")
    rows = view.tables["exchanges"].rows
    assert rows[["role", "layer", "n_per_step"]].to_numpy().tolist() == [["context", "layers.0", 2]]
    assert rows["exposed_us"].tolist() == [2 * 2 * STEPS * 30]  # 120 of which 90 lie under the attention
    assert figure(view, "Context exchange, transfer") is None
    assert parallelism_exchanges.HALVES in view.missing
    assert parallelism_exchanges.OTHER_RANKS not in view.missing


def test_views_can_travel(run: Run):
    for name in ("parallelism", "collectives"):
        json.dumps(run.view(name).as_dict(), allow_nan=False)


# ---- links -----------------------------------------------------------------------------------------------------------

def test_links_and_islands(run: Run):
    view = run.view("collectives")
    heat = view.figures["links"].data[0]
    assert [[w or "" for w in row] for row in heat.text] == [
        ["", "NV4", "SYS", "SYS"], ["NV4", "", "SYS", "SYS"], ["SYS", "SYS", "", "NV4"], ["SYS", "SYS", "NV4", ""]]
    assert heat.hovertext[0][1] == "<b>GPU 0 – GPU 1</b><br>4 NVLinks (NVLink)"
    assert [(s.x0, s.x1, s.y0, s.y1) for s in view.figures["links"].layout.shapes] == [
        (-0.5, 1.5, -0.5, 1.5), (1.5, 3.5, 1.5, 3.5)]
    row = view.tables["islands"].rows.iloc[0]
    assert row[["islands", "spans"]].tolist() == ["0-1 | 2-3", "yes"]
    assert not [m for m in view.missing if m.what == "Islands of GPUs"]


def test_links_of_the_selected_gpus(run: Run):
    drawn = run.view("collectives", gpu=[0, 2]).figures["links"]
    assert list(drawn.layout.xaxis.ticktext) == ["GPU 0", "GPU 2"]


def test_links_not_recorded(tmp_path: Path):
    view = record(tmp_path, links=None).view("collectives")
    assert "links" not in view.figures
    missing = next(m for m in view.missing if m.what == "Islands of GPUs")
    assert missing.command.startswith("nvidia-smi topo -m > ")
    assert view.tables["islands"].rows["spans"].tolist() == ["–"]
