"""The GPU waits for data (reference: data-loader stalls)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tb_chopper.backend.rules import stall
from tb_chopper.backend.rules.diagnosis import Diagnosis, Evidence, severity

if TYPE_CHECKING:
    from tb_chopper.backend.findings import Finding
    from tb_chopper.backend.run import Run

REMEDY = ("DataLoader(num_workers=, prefetch_factor=, persistent_workers=True, pin_memory=True) and copies with "
          "non_blocking=True; where decoding is the limit, decode on the GPU (DALI) or store what is decoded")
NO_WORKERS = "_SingleProcessDataLoaderIter"
"""the iterator that PyTorch takes for num_workers=0"""
REMEDY_ONE = "look at the loader, the disk and the CPU cores of this process first; if all is equal: "


def rule(run: Run) -> list[Finding]:
    """One diagnosis for the run: the loader of one GPU, or of all."""
    found = stall.find(run, run.stalls[run.stalls["kind"] == "loader"], first=False)
    if found is None:
        return []
    loading, windows = run.step_stalls(), run.timeline(by=["gpu", "step"])
    loading = loading[(loading["kind"] == "loader") & loading["gpu"].isin(found.gpus)]
    window = float(windows.loc[windows["step"].notna() & windows["gpu"].isin(found.gpus), "total_us"].sum())
    share = float(loading["uncovered_us"].sum()) / window if window else 0.0
    in_process = any(NO_WORKERS in name for name in found.names)
    late = f"; the others wait for GPU {found.gpu}" if found.alone else ""
    return [Diagnosis(
        "data_stall", severity(found.gain_ms, found.step_ms),
        f"{found.said}, while the host waits for data{late}",
        title=f"The data loader of GPU {found.gpu} is late" if found.alone else
        "The GPU waits for data" if len(found.gpus) == 1 else "The GPUs wait for data",
        evidence=(*found.evidence(), Evidence("loading that no GPU work covers", share, "share")),
        cause="the loader of this process is slower than those of the others" if found.alone else
        "the training's own process loads the data between its steps (num_workers=0)" if in_process else
        "the next batch is not ready when the step begins",
        remedy=(REMEDY_ONE if found.alone else "") + REMEDY,
        gain_ms=found.gain_ms, gain_how=found.how, gpus=found.gpus, steps=found.steps, view="host",
        selection={"gpu": found.gpu, "by": "step"}, kernel=found.at)]
