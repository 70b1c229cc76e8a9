"""Matrix products in fp32 on a GPU that multiplies faster in another type."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tb_chopper.backend import flops
from tb_chopper.backend.metrics.precision import MATRIX_TYPES, matrix_types, named_types
from tb_chopper.backend.rules import thresholds
from tb_chopper.backend.rules.diagnosis import Diagnosis, Evidence, largest, severity, step_ms

if TYPE_CHECKING:
    from tb_chopper.backend.findings import Finding
    from tb_chopper.backend.run import Run

HOW = ("time of the fp32 products in a step x (1 - peak of fp32 / peak of bf16), mean over GPUs: if they reach the "
       "same part of the peak; products so small that memory or the launch is their limit gain less")


def rule(run: Run) -> list[Finding]:
    """One diagnosis for all products in fp32 whose GPU has a faster bf16. The operands are recorded as fp32 and the
    kernels' names say that they are multiplied as such: a name that tells nothing may stand for tf32."""
    step = step_ms(run)
    if step is None or (run.kernels["device"] == "cpu").all():
        return []
    steps = run.own_times["step"].unique().tolist()
    types = run.precision(by=["gpu", "dtype", "kernel"], where={"step": steps})
    windows = len(run.launches(by=["gpu", "step"], where={"step": steps}))
    plain = named_types(types["kernel"].astype("category")) == "fp32"
    slow = types[plain & (types["dtype"] == "fp32").to_numpy()].groupby("gpu")["time_us"].sum()
    faster = {gpu: ratio for gpu in slow.index if (ratio := _peak_ratio(run, gpu, "bf16"))}
    time = slow[list(faster)]
    if not len(time):
        return []
    gain = float((time * [1 - ratio for ratio in faster.values()]).sum()) / windows / 1000
    if not gain >= thresholds.LOW_PRECISION * step:
        return []
    gpu = int(time.idxmax())
    with_tf32 = _peak_ratio(run, gpu, "tf32")
    us = float(time.sum()) / windows
    share = float(slow.sum() / types["time_us"].sum())
    rows = run.kernels[run.kernels["op_type"].isin(MATRIX_TYPES) & run.kernels["step"].isin(steps)]
    recorded = flops.operator_costs(rows["cpu_op"], rows["op_args"])["dtype"]
    products = rows[(matrix_types(rows, recorded) == "fp32").to_numpy() & (named_types(rows["name"]) == "fp32")]
    return [Diagnosis(
        "low_precision", severity(gain, step),
        f"{share:.0%} of the GEMM and attention time is fp32 ({us / 1000:.3g} ms of a step of {step:.3g} ms), which "
        f"this GPU multiplies {1 / faster[gpu]:.1f} times slower than bf16",
        title="Matrix products in fp32",
        evidence=(Evidence("fp32 products in a step", us, "us"), Evidence("of GEMM and attention time", share, "share"),
                  Evidence("peak of fp32 / bf16", faster[gpu], "share"),
                  *((Evidence("peak of fp32 / tf32", with_tf32, "share"),) if with_tf32 else ())),
        cause="the operands are fp32, and no autocast is around them",
        remedy="torch.autocast(\"cuda\", dtype=torch.bfloat16) around the model" + (
            "; torch.set_float32_matmul_precision(\"high\") keeps fp32 operands and multiplies them as tf32"
            if with_tf32 else ""),
        gain_ms=gain, gain_how=HOW, view="efficiency", kernel=largest(products))]


def _peak_ratio(run: Run, gpu: int, faster: str) -> float | None:
    """Peak of fp32 over that of a faster type, None where either is not known or it is not faster."""
    hardware = run.hardware.get(gpu)
    slow, fast = (hardware.peak("fp32"), hardware.peak(faster)) if hardware else (None, None)
    return slow.flop_per_s / fast.flop_per_s if slow and fast and fast.flop_per_s > slow.flop_per_s else None

