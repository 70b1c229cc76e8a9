"""Busy and not efficient: few SMs with work, or far below the peak, while the GPU is never idle (µs)."""

from __future__ import annotations

from pathlib import Path

import pytest

import tb_chopper
from tb_chopper.backend.run import Run
from tests.builders import TraceBuilder
from tests.unit.test_rules import evidence, found, reduce, run_of

BIG = [[4096, 4096], [4096, 4096]]
AT_PEAK = 2 * 4096**3 / 989.4e12 * 1e6
"""µs that this product needs on an H100 in bf16"""


def product(trace: TraceBuilder, start: float, dur: float, blocks: float, op: str = "aten::mm",
            dims: list[list[int]] = BIG) -> None:
    trace.op(op, start - 8, 6, dims=dims, **{"Input type": ["c10::BFloat16"] * len(dims)})
    trace.launch("nvjet_tst", start - 6, start, dur, **{"blocks per SM": blocks})


def filled(folder: Path, share: float, busy: float = 950, exposed: float = 0) -> Run:
    """A large product that fills the SMs and reaches 60 % of the peak, then a small one that fills `share` of them."""

    def step(trace: TraceBuilder, rank: int, start: float, number: int) -> None:
        large = AT_PEAK / 0.6
        product(trace, start + 10, large, 4.0)
        product(trace, start + 10 + large, busy - large - exposed, share, "aten::bmm", [[2, 64, 64], [2, 64, 64]])
        if exposed:
            reduce(trace, number, start + 10 + busy - exposed, exposed, 1000)

    return run_of(folder, 1, step)


def test_few_sms_with_work(tmp_path: Path) -> None:
    (said,) = found(filled(tmp_path, 0.25), "busy_not_efficient")
    small = 950 - AT_PEAK / 0.6
    assert said.gain_ms == pytest.approx(0.75 * small / 1000)
    numbers = evidence(said)
    assert numbers["GPU utilization"] == pytest.approx(0.95)
    assert numbers["SMs with work"] == pytest.approx((AT_PEAK / 0.6 + 0.25 * small) / 1000)
    assert numbers["lost to SMs without work"] == numbers["lost in aten::bmm"] == pytest.approx(0.75 * small)
    assert "blocks" in said.cause and said.selection == {"by": "operation", "focus": "aten::bmm"}


def test_far_below_the_peak(tmp_path: Path) -> None:
    """The SMs are full, MFU is not: what it would gain is not known."""
    (said,) = found(filled(tmp_path, 2.0), "busy_not_efficient")
    assert said.gain_ms is None and evidence(said)["MFU"] == pytest.approx(AT_PEAK / 1000, rel=1e-2)
    assert "stay below the peak" in said.cause


@pytest.mark.parametrize("busy", [890, 905])
def test_silent_below_ninety_percent_utilization(tmp_path: Path, busy: float) -> None:
    assert len(found(filled(tmp_path, 0.25, busy), "busy_not_efficient")) == (busy > 900)


def test_silent_where_communication_keeps_the_gpu_busy(tmp_path: Path) -> None:
    assert found(filled(tmp_path, 0.25, exposed=200), "busy_not_efficient") == []


def test_silent_where_the_gpu_is_used_well_and_where_nothing_is_known(tmp_path: Path) -> None:
    def good(trace: TraceBuilder, rank: int, start: float, number: int) -> None:
        for i in range(4):
            product(trace, start + 10 + 240 * i, 240, 0.7)  # 58 % of the peak, 70 % of the SMs

    assert found(run_of(tmp_path / "good", 1, good), "busy_not_efficient") == []

    def unknown(trace: TraceBuilder, rank: int, start: float, number: int) -> None:
        trace.op("mylib::op", start + 2, 6)
        trace.launch("kernel", start + 4, start + 10, 950, **{"blocks per SM": "unknown"})

    assert found(run_of(tmp_path / "unknown", 1, unknown), "busy_not_efficient") == []


def test_silent_where_another_rule_names_the_cause(tmp_path: Path) -> None:
    """A softmax between two products takes most of the step: fusing it is the remedy."""
    trace = TraceBuilder()
    trace.head["deviceProperties"][0]["numSms"] = 132
    for number in range(4):
        start = 1000 * number
        trace.step(number, start, 995)
        product(trace, start + 10, 100, 4.0, "aten::bmm", [[1, 256, 256], [1, 256, 256]])
        trace.op("aten::_softmax", start + 6, 1, dims=[[1, 256, 256]], **{"Input type": ["c10::BFloat16"]})
        trace.launch("softmax_warp_forward", start + 6.5, start + 111, 700, call=0.2)
        product(trace, start + 812, 180, 4.0, "aten::bmm", [[1, 256, 256], [1, 256, 256]])
    trace.write(tmp_path / "rank0.pt.trace.json")
    run = tb_chopper.open_run(tmp_path)
    assert len(found(run, "busy_not_efficient")) == 1
    assert [d.code for d in run.diagnosis if d.code in ("busy_not_efficient", "fusion")] == ["fusion"]
