"""Products in fp32: the gain is their time times 1 − the ratio of the peaks (µs)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders import TraceBuilder
from tests.unit.test_rules import compute, evidence, found, run_of

FP32, TF32, BF16 = 66.9, 494.7, 989.4
"""dense peaks of an H100 in TFLOP/s, by its data sheet"""


def product(trace: TraceBuilder, start: float, dur: float, kernel: str, kind: str = "float") -> None:
    trace.op("aten::mm", start - 8, 6, dims=[[256, 256], [256, 256]], **{"Input type": [kind] * 2})
    trace.launch(kernel, start - 6, start, dur)


@pytest.mark.parametrize(("dur", "speaks"), [(400, True), (30, False)])
def test_the_gain_is_the_time_at_the_faster_peak(tmp_path: Path, dur: float, speaks: bool) -> None:
    def step(trace: TraceBuilder, rank: int, start: float, number: int) -> None:
        product(trace, start + 10, dur, "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_ffma")
        product(trace, start + 10 + dur, 400, "nvjet_tst_128x256", "c10::BFloat16")
        compute(trace, start + 420 + dur, 100)

    said = found(run_of(tmp_path, 2, step), "low_precision")
    assert len(said) == speaks
    for d in said:
        assert d.gain_ms == pytest.approx(dur * (1 - FP32 / BF16) / 1000, rel=2e-3)
        assert evidence(d)["of GEMM and attention time"] == pytest.approx(dur / (dur + 400 + 100))
        assert evidence(d)["peak of fp32 / tf32"] == pytest.approx(FP32 / TF32, rel=5e-3)
        assert "set_float32_matmul_precision" in d.remedy and "autocast" in d.remedy


@pytest.mark.parametrize(("kernel", "kind"), [
    ("cutlass_80_tensorop_s1688gemm_128x64", "float"), ("nvjet_tst_128x256", "c10::BFloat16"), ("my_gemm", "float")])
def test_silent_for_tf32_and_bf16_and_names_that_tell_nothing(tmp_path: Path, kernel: str, kind: str) -> None:
    def step(trace: TraceBuilder, rank: int, start: float, number: int) -> None:
        product(trace, start + 10, 900, kernel, kind)

    assert found(run_of(tmp_path, 1, step), "low_precision") == []


def test_silent_where_the_peaks_are_not_known(tmp_path: Path) -> None:
    def step(trace: TraceBuilder, rank: int, start: float, number: int) -> None:
        trace.head["deviceProperties"][0]["name"] = "Tesla V100-SXM2-16GB"
        product(trace, start + 10, 900, "volta_sgemm_128x64_nn")

    assert found(run_of(tmp_path, 1, step), "low_precision") == []
