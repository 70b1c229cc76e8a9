"""Pipeline schedules written by hand (µs): recognition, bubbles, theory, and what would help."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import tb_chopper
from tb_chopper.backend import schema
from tb_chopper.backend.metrics import pipeline
from tests.builders import TraceBuilder

Row = tuple[int, str, int, int, float, float]
"""gpu, kind, stage, microbatch, start, end"""

# Two stages, the second twice as slow; two microbatches:
#   GPU 0  F0 F1 .............. B0 .. B1      F 10, B 20
#   GPU 1     F0-- F1-- B0---- B1----         F 20, B 40
UNEVEN: list[Row] = [
    (0, "F", 0, 0, 0, 10), (0, "F", 0, 1, 10, 20), (0, "B", 0, 0, 90, 110), (0, "B", 0, 1, 130, 150),
    (1, "F", 1, 0, 10, 30), (1, "F", 1, 1, 30, 50), (1, "B", 1, 0, 50, 90), (1, "B", 1, 1, 90, 130),
]  # fmt: skip


def table(rows: list[Row], step: int = 0, told: str | None = None, gaps: float = 0) -> pd.DataFrame:
    """An ACTIONS table; `gaps`: idle µs within each action."""
    return schema.conform(pd.DataFrame([{
        "gpu": gpu, "capture": gpu, "device": "0", "step": step, "kind": kind, "stage": stage, "microbatch": mb,
        "start_ns": round(start * 1000), "end_ns": round(end * 1000), "first_ns": round(start * 1000),
        "last_ns": round(end * 1000), "busy_ns": round((end - start - gaps) * 1000), "schedule": told,
    } for gpu, kind, stage, mb, start, end in rows]), schema.ACTIONS)


def played(orders: list[list[tuple[str, int, int]]], f: float, b: float, latency: float = 0) -> list[Row]:
    """The schedule with these orders per gpu and equal stages, each action as soon as its inputs are there."""
    last = max(stage for order in orders for _, stage, _ in order)
    length = {"F": f, "B": b, "I": b / 2, "W": b / 2}
    end: dict[tuple[str, int, int], float] = {}
    at, free, rows = [0] * len(orders), [0.0] * len(orders), []
    while any(i < len(order) for i, order in zip(at, orders, strict=True)):
        for gpu, order in enumerate(orders):
            if at[gpu] == len(order):
                continue
            kind, stage, mb = order[at[gpu]]
            back = "I" if kind in "IW" else "B"
            need = {"F": ("F", stage - 1, mb) if stage else None, "W": (back, stage, mb)}.get(
                kind, (back, stage + 1, mb) if stage < last else ("F", stage, mb))
            if need is not None and need not in end:
                continue
            own = need is None or need in [a[1:4] for a in rows if a[0] == gpu]
            start = max(free[gpu], 0 if need is None else end[need] + (0 if own else latency))
            end[kind, stage, mb] = free[gpu] = start + length[kind]
            rows.append((gpu, kind, stage, mb, start, free[gpu]))
            at[gpu] += 1
    return rows


def gpipe(p: int, m: int) -> list[list[tuple[str, int, int]]]:
    return [[(kind, r, k) for kind in "FB" for k in range(m)] for r in range(p)]


def one_f_one_b(p: int, m: int) -> list[list[tuple[str, int, int]]]:
    orders = []
    for r in range(p):
        warm = min(p - 1 - r, m)
        order = [("F", r, k) for k in range(warm)]
        for k in range(m - warm):
            order += [("F", r, warm + k), ("B", r, k)]
        orders.append(order + [("B", r, k) for k in range(m - warm, m)])
    return orders


# Two ranks with two stages each, four microbatches, as in Narayanan et al. (2021), figure 4.
INTERLEAVED = [
    [(k, 2 * c, m) for k, c, m in [
        ("F", 0, 0), ("F", 0, 1), ("F", 1, 0), ("F", 1, 1), ("F", 0, 2), ("B", 1, 0), ("F", 0, 3), ("B", 1, 1),
        ("F", 1, 2), ("B", 0, 0), ("F", 1, 3), ("B", 0, 1), ("B", 1, 2), ("B", 1, 3), ("B", 0, 2), ("B", 0, 3)]],
    [(k, 2 * c + 1, m) for k, c, m in [
        ("F", 0, 0), ("F", 0, 1), ("F", 1, 0), ("B", 1, 0), ("F", 1, 1), ("B", 1, 1), ("F", 0, 2), ("B", 0, 0),
        ("F", 0, 3), ("B", 0, 1), ("F", 1, 2), ("B", 1, 2), ("F", 1, 3), ("B", 1, 3), ("B", 0, 2), ("B", 0, 3)]],
]  # fmt: skip


def of(rows: list[Row], **more: object) -> pd.DataFrame:
    return pipeline.actions(table(rows, **more))  # type: ignore[arg-type]


# ---- bubbles and theory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "m"), [(4, 8), (2, 2), (3, 7)])
def test_equal_stages_have_the_bubble_of_the_theory(p: int, m: int) -> None:
    """f 10, b 20. Fill and drain by hand: a 1F1B rank r waits r forwards for its first input and p-1-r backwards for
    its first gradient; at the end p-1-r forwards between its last backwards, and r backwards until all are done."""
    for name, orders in (("1F1B", one_f_one_b(p, m)), ("GPipe", gpipe(p, m))):
        found = pipeline.pipeline(of(played(orders, 10, 20)))
        assert set(found["schedule"]) == {name}
        assert (found["total_us"] == 30 * (m + p - 1)).all()
        assert (found["busy_us"] == 30 * m).all()
        assert found["bubble_share"].tolist() == pytest.approx([(p - 1) / (m + p - 1)] * p)
        assert found["theory_share"].tolist() == pytest.approx(found["bubble_share"].tolist())
        assert found["excess_us"].tolist() == pytest.approx([0] * p)
        assert (found["steady_us"] == 0).all()
        r = np.arange(p)
        if name == "1F1B":
            assert found["fill_us"].tolist() == (10 * r + 20 * (p - 1 - r)).tolist()
            assert found["drain_us"].tolist() == (10 * (p - 1 - r) + 20 * r).tolist()
        else:
            assert found["fill_us"].tolist() == (10 * r + 30 * (p - 1 - r)).tolist()
            assert found["drain_us"].tolist() == (20 * r).tolist()


def test_interleaving_divides_the_bubble_by_the_stages_per_rank() -> None:
    found = pipeline.pipeline(of(played(INTERLEAVED, 10, 20)))
    assert found[["schedule", "stages", "virtual_stages", "microbatches"]].to_numpy().tolist() == [
        ["interleaved", "0, 2", 2, 4], ["interleaved", "1, 3", 2, 4]]
    # 4 microbatches of 2 stages of 30 µs, and a bubble of one stage: half of what one stage of 60 µs would have
    assert (found["total_us"] == 4 * 60 + 30).all()
    assert found["theory_us"].tolist() == pytest.approx([30, 30])
    assert found["excess_us"].tolist() == pytest.approx([0, 0])


def test_weights_apart_are_zero_bubble() -> None:
    orders = [[("F", r, 0), ("F", r, 1), ("I", r, 0), ("W", r, 0), ("I", r, 1), ("W", r, 1)] for r in range(2)]
    found = pipeline.pipeline(of(played(orders, 10, 20)))
    assert set(found["schedule"]) == {"zero bubble"}
    assert found["theory_us"].tolist() == [0, 0]
    assert (found["excess_us"] == found["bubble_us"]).all()


def test_uneven_stages() -> None:
    done = of(UNEVEN)
    found = pipeline.pipeline(done, "gpu").set_index("gpu")
    assert found["total_us"].tolist() == [150, 150]
    assert found["bubble_us"].tolist() == [90, 30]
    assert found["fill_us"].tolist() == [70, 10]
    assert found["drain_us"].tolist() == [20, 20]
    assert found["wait_next_us"].tolist() == [90, 0]
    assert found["wait_previous_us"].tolist() == [0, 10]
    assert found["end_us"].tolist() == [0, 20]
    # Mean work 90 µs, so at best 90 · (1 + 1/2) = 135 µs with a bubble of 45.
    assert found["theory_us"].tolist() == pytest.approx([45, 45])
    assert found["theory_share"].tolist() == pytest.approx([1 / 3, 1 / 3])
    assert found["excess_us"].tolist() == pytest.approx([45, -15])
    cost = pipeline.what_if(done).iloc[0]
    assert cost[["prompt_us", "balanced_us", "theory_us"]].tolist() == pytest.approx([150, 135, 135])
    parts = ["imbalance_us", "variation_us", "transfer_excess_us", "halved_gain_us"]
    assert cost[parts].tolist() == pytest.approx([15, 0, 0, 22.5])
    stages = pipeline.stages(done)
    assert stages["microbatch_us"].tolist() == [30, 60]
    assert stages["slower"].tolist() == pytest.approx([-1 / 3, 1 / 3])


def test_uneven_microbatches() -> None:
    """p 2, m 2, equal stages, f 10 and 30, b 20. With f 20 for both microbatches: (2 + 1) · 40 = 120 µs."""
    rows: list[Row] = [
        (0, "F", 0, 0, 0, 10), (0, "F", 0, 1, 10, 40), (0, "B", 0, 0, 90, 110), (0, "B", 0, 1, 110, 130),
        (1, "F", 1, 0, 10, 20), (1, "F", 1, 1, 40, 70), (1, "B", 1, 0, 70, 90), (1, "B", 1, 1, 90, 110)]
    cost = pipeline.what_if(of(rows)).iloc[0]
    parts = ["total_us", "variation_us", "imbalance_us", "transfer_excess_us"]
    assert cost[parts].tolist() == pytest.approx([130, 10, 0, 0])


def test_every_bubble_names_whom_it_waits_for() -> None:
    gone = pipeline.bubbles(of(UNEVEN))
    shown = gone.assign(start=gone["start_ns"] / 1000)[["gpu", "start", "bubble_us", "phase", "reason", "wait_us"]]
    assert shown.to_numpy().tolist() == [
        [0, 20, 70, "fill", "next stage", 70], [0, 110, 20, "drain", "next stage", 20],
        [1, 0, 10, "fill", "previous stage", 10], [1, 130, 20, "drain", "end", 0]]
    assert gone["waits_for"].tolist() == [1, 1, 0, pd.NA]


def test_late_messages_are_no_waiting_for_a_neighbour() -> None:
    """p 2, m 2: the first input and each gradient come 5 µs late."""
    done = of(played(gpipe(2, 2), 10, 20, latency=5))
    found = pipeline.pipeline(done, "gpu").set_index("gpu")
    assert found["message_us"].tolist() == [5, 5]
    assert found["wait_next_us"].tolist() == [35, 0]  # from 20 to 60, of which the last 5 are the message's
    cost = pipeline.what_if(done).iloc[0]
    assert cost["prompt_us"] == 90
    assert cost["transfer_excess_us"] == found["total_us"][0] - 90 == 10
    assert cost["imbalance_us"] == pytest.approx(0)


def test_gaps_within_actions_are_no_bubble() -> None:
    found = pipeline.pipeline(of(UNEVEN, gaps=2), "gpu")
    assert found["gaps_us"].tolist() == [8, 8]
    assert found["bubble_us"].tolist() == [90, 30]
    assert (found["busy_us"] + found["gaps_us"] + found["bubble_us"]).tolist() == found["total_us"].tolist()


def test_several_passes_in_a_step() -> None:
    """Gradient accumulation: the time between two passes is no bubble of either."""
    later = [(g, k, s, m, a + 1000, e + 1000) for g, k, s, m, a, e in UNEVEN]
    done = of([*UNEVEN, *later])
    assert sorted(done["turn"].unique()) == [0, 1]
    assert pipeline.pipeline(done, "gpu")["bubble_us"].tolist() == [180, 60]


def test_clocks_of_hosts_are_corrected() -> None:
    ahead = table(UNEVEN)
    by = 7000 * (ahead["gpu"] == 1)
    for column in ("first_ns", "last_ns"):
        ahead[column] += by
    found = pipeline.pipeline(pipeline.actions(ahead, {0: 0, 1: 7000}), "gpu")
    assert found["bubble_us"].tolist() == [90, 30]


# ---- who is in which pipeline, and which schedule --------------------------------------------------------------------


def test_data_parallel_pipelines_are_told_apart_by_their_groups() -> None:
    """GPUs 0 and 3 are one pipeline, 1 and 2 the other: against the order, as their groups tell."""
    gpu = {0: {0: 0, 1: 3}, 1: {0: 1, 1: 2}}
    rows = [(gpu[d][g], k, s, m, a + 500 * d, e + 500 * d) for d in range(2) for g, k, s, m, a, e in UNEVEN]
    members = {g: {"0": [0, 1, 2, 3], "dp": [0, 1] if g < 2 else [2, 3], "pp": [0, 3] if g in (0, 3) else [1, 2]}
               for g in range(4)}
    done = pipeline.actions(table(rows), None, members)
    places = done.drop_duplicates("gpu").set_index("gpu")[["pipeline", "position"]].sort_index()
    assert places.to_numpy().tolist() == [[0, 0], [1, 0], [1, 1], [0, 1]]
    assert pipeline.pipeline(done, "gpu")["bubble_us"].tolist() == [90, 90, 30, 30]
    peers = pd.DataFrame([(0, 3), (3, 0), (1, 2)], columns=["gpu", "peer"])
    by_message = pipeline.actions(table(rows), peers=peers).drop_duplicates("gpu").set_index("gpu").sort_index()
    assert by_message["pipeline"].tolist() == [0, 1, 1, 0]
    by_order = pipeline.actions(table(rows)).drop_duplicates("gpu").set_index("gpu").sort_index()
    assert by_order["pipeline"].tolist() == [0, 1, 0, 1]


def test_stages_without_number_stand_in_the_order_of_the_gpus() -> None:
    """ScheduleGPipe's own scopes, `Forward 0`, tell no stage."""
    rows = [(g, k, -1, m, a, e) for g, k, _, m, a, e in UNEVEN]
    found = pipeline.pipeline(of(rows))
    assert found["stages"].tolist() == ["0", "1"]
    assert found["wait_next_us"].tolist() == [90, 0]


@pytest.mark.parametrize(("orders", "here", "name"), [
    (one_f_one_b(4, 8), [1, 2], "1F1B"), (gpipe(4, 8), [1, 2], "GPipe"), (one_f_one_b(4, 4), [0], "unknown"),
    (one_f_one_b(4, 1), [0, 1, 2, 3], "GPipe"), (one_f_one_b(4, 2), [0, 1, 2, 3], "1F1B"),
])  # fmt: skip
def test_schedules_are_recognised_by_order(
        orders: list[list[tuple[str, int, int]]], here: list[int], name: str) -> None:
    """Also from some of the ranks; where both fit, nothing is claimed. One microbatch has but one order."""
    rows = [row for row in played(orders, 10, 20) if row[0] in here]
    shape = pipeline.shapes(of(rows, told="Schedule::stages4::mb8::v1")).iloc[0]
    assert (shape["schedule"], shape["n_ranks"], shape["complete"]) == (name, 4, len(here) == 4)


def test_a_missing_microbatch_makes_it_incomplete() -> None:
    assert pipeline.shapes(of(UNEVEN))["complete"].tolist() == [True]
    assert pipeline.shapes(of(UNEVEN[:5] + UNEVEN[6:]))["complete"].tolist() == [False]  # F1 of stage 1


def test_an_order_of_no_known_schedule_has_no_theory() -> None:
    order = [("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("F", 0, 2), ("B", 0, 1), ("B", 0, 2)]
    found = pipeline.pipeline(of(played([order, [(k, 1, m) for k, _, m in order]], 10, 20)))
    assert set(found["schedule"]) == {"unknown"}
    assert found["theory_us"].isna().all()


def test_nothing() -> None:
    done = pipeline.actions(schema.empty(schema.ACTIONS))
    for made in (done, pipeline.pipeline(done), pipeline.bubbles(done), pipeline.what_if(done), pipeline.stages(done)):
        assert len(made) == 0


# ---- from a trace ----------------------------------------------------------------------------------------------------


def traced(folder: Path, scopes: str = "own") -> Path:
    """UNEVEN on two GPUs: a GEMM per action, launched in its scope; GPU 1 receives first, in a kernel that spins."""
    for rank in range(2):
        trace = TraceBuilder(rank=rank, world_size=2)
        trace.step(3, 0, 400)
        if scopes == "own":
            trace.annotation("chopper::pp::schedule::ScheduleGPipe::stages2::mb2::v1", 0.5, 160)
        for i, (_, kind, stage, mb, start, end) in enumerate(r for r in UNEVEN if r[0] == rank):
            at = 1 + 20 * i
            name = {"own": f"chopper::pp::{kind}::stage{stage}::mb{mb}", "torch": f"PP:{stage}{kind}{mb}",
                    "gpipe": f"{'Forward' if kind == 'F' else 'Backward'} {mb}"}[scopes]
            trace.annotation(name, at, 15)
            if rank == 1 and kind == "F":
                trace.collective("ncclDevKernel_SendRecv(...)", at + 0.5, start - 9, 9, **{
                    "Collective name": "recv", "Src Rank": 0, "Seq": mb + 1})
            if rank == 0 and kind == "B":
                trace.collective("ncclDevKernel_SendRecv(...)", at + 0.5, start - 9, 9, **{
                    "Collective name": "recv", "Src Rank": 1, "Seq": mb + 1})
            trace.op("aten::mm", at + 2, 8, seq=i)
            trace.launch("gemm", at + 3, start, end - start)
        trace.op("aten::add", 200, 10)
        trace.launch("add", 202, 205, 50)  # outside of every action
        trace.write(folder / f"rank{rank}.pt.trace.json")
    return folder


@pytest.mark.parametrize("scopes", ["own", "torch", "gpipe"])
def test_a_trace(tmp_path: Path, scopes: str) -> None:
    run = tb_chopper.open_run(traced(tmp_path, scopes))
    found = run.pipeline()
    assert found[["gpu", "step", "schedule", "n_stages", "microbatches"]].to_numpy().tolist() == [
        [0, 3, "GPipe", 2, 2], [1, 3, "GPipe", 2, 2]]
    assert found["busy_us"].tolist() == [60, 120]
    assert found["bubble_us"].tolist() == [90, 30]
    assert set(found["told"]) == ({"ScheduleGPipe"} if scopes == "own" else {None})
    # The scopes tell the phase, and do not become operations or modules.
    gemms = run.kernels[run.kernels["name"] == "gemm"].sort_values(["gpu", "start_ns"])
    assert gemms["phase"].tolist() == ["forward", "forward", "backward", "backward"] * 2
    assert gemms["layer"].isna().all()
    assert set(gemms["operation"]) == {"aten::mm"}
    assert sorted(run.kernels.loc[run.kernels["kind"] == "communication", "peer"]) == [0, 0, 1, 1]
    # a second time, from the cache
    again = tb_chopper.open_run(tmp_path).pipeline()
    assert again["bubble_us"].tolist() == [90, 30]


def test_steps_that_the_capture_cut_are_left_out(tmp_path: Path) -> None:
    """On one rank the third step ends early: nobody's third step counts."""
    for rank in range(2):
        trace = TraceBuilder(rank=rank, world_size=2)
        for step in range(3):
            trace.step(step, 400 * step, 399)
            for i, (_, kind, stage, mb, start, end) in enumerate(r for r in UNEVEN if r[0] == rank):
                if step == 2 and rank == 1 and i:
                    continue
                at = 400 * step + 1 + 20 * i
                trace.annotation(f"chopper::pp::{kind}::stage{stage}::mb{mb}", at, 15)
                trace.launch("gemm", at + 3, 400 * step + start + 50, end - start)
        trace.write(tmp_path / f"rank{rank}.pt.trace.json")
    run = tb_chopper.open_run(tmp_path)
    assert len(run.actions) == 4 * 3 + 4 * 2 + 1
    assert run.pipeline("step")["step"].tolist() == [0, 1]
    assert run.pipeline_what_if["complete"].all()


def test_all_to_all_is_no_message(tmp_path: Path) -> None:
    """Its kernel is called SendRecv, too; it is work of the action."""
    trace = TraceBuilder()
    trace.step(0, 0, 100)
    trace.annotation("chopper::pp::F::stage0::mb0", 1, 50)
    trace.collective("ncclDevKernel_SendRecv(...)", 5, 10, 30, **{"Collective name": "all_to_allv"})
    trace.collective("ncclDevKernel_SendRecv(...)", 15, 60, 30, **{"Collective name": "coalesced"})
    run = tb_chopper.open_run(trace.write(tmp_path / "w.pt.trace.json"))
    assert run.actions["busy_ns"].tolist() == [30_000]


def test_scopes_called_forward_are_no_pipeline_without_messages(tmp_path: Path) -> None:
    trace = TraceBuilder()
    trace.step(0, 0, 100)
    trace.annotation("Forward 0", 1, 50)
    trace.launch("gemm", 5, 10, 30)
    run = tb_chopper.open_run(trace.write(tmp_path / "w.pt.trace.json"))
    assert len(run.actions) == 0
    assert run.kernels["phase"].tolist() == ["forward"]
