"""Graph breaks of torch.compile in which the GPU waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tb_chopper.backend.metrics.graph_breaks import INSIDE
from tb_chopper.backend.rules import thresholds
from tb_chopper.backend.rules.diagnosis import Diagnosis, Evidence, severity, step_ms

if TYPE_CHECKING:
    from tb_chopper.backend.findings import Finding
    from tb_chopper.backend.run import Run

HOW = ("idle time of the GPU before the kernels launched in graph breaks and before the first one after each, in a "
       "step, mean over GPUs")


def rule(run: Run) -> list[Finding]:
    """One diagnosis for all graph breaks of the forward pass."""
    step = step_ms(run)
    if step is None or not len(run.compiled) or (run.kernels["device"] == "cpu").all():
        return []
    steps = run.own_times["step"].unique().tolist()
    rows = run.graph_breaks(where={"step": steps})
    rows = rows[rows["n_regions"] > 0]
    if not len(rows) or not rows["n_breaks"].sum():
        return []
    gain = float(rows["idle_us"].mean()) / 1000
    if not gain >= thresholds.GRAPH_BREAKS * step:
        return []
    eager = run.eager_in_breaks(where={"step": steps, "place": INSIDE})
    breaks, kernels = float(rows["n_breaks"].mean()), float(rows["eager_kernels"].mean())
    what = f"; most of what runs there is {eager['operation'].iloc[0]}" if len(eager) else ""
    return [Diagnosis(
        "graph_breaks", severity(gain, step),
        f"compiled code leaves its graphs {breaks:.0f} times in a step, where the GPU is idle for {gain:.3g} ms of a "
        f"step of {step:.3g} ms{what}",
        title="Graph breaks",
        evidence=(Evidence("graph breaks in a step", breaks),
                  Evidence("compiled regions in a step", float(rows["n_regions"].mean())),
                  Evidence("eager kernels in a step", kernels),
                  Evidence("their time in a step", float(rows["eager_us"].mean()), "us"),
                  Evidence("GPU idle in a step", gain * 1000, "us")),
        cause="code that torch.compile cannot trace: .item(), print, data-dependent branches, unsupported calls",
        remedy="TORCH_LOGS=graph_breaks names the lines; torch.compile(fullgraph=True) fails at the first of them",
        gain_ms=gain, gain_how=HOW, view="fusion", kernel=str(eager["at"].iloc[0]) if len(eager) else "")]
