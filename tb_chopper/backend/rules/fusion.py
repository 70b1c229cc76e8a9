"""Memory-bound kernels one after the other that one kernel could do (see metrics.fusion)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tb_chopper.backend.metrics import fusion
from tb_chopper.backend.rules import thresholds
from tb_chopper.backend.rules.diagnosis import Diagnosis, Evidence, severity, step_ms

if TYPE_CHECKING:
    from tb_chopper.backend.findings import Finding
    from tb_chopper.backend.run import Run

HOW = ("Σ duration of the kernels - the bytes that one fused kernel moves / memory bandwidth (at least the shortest of "
       "them), in a step of one GPU; of attention in pieces all kernels between the products: at most this")
N_NAMED = 3


def rule(run: Run) -> list[Finding]:
    """One diagnosis for all patterns outside of the optimizer, whose small kernels another rule looks at."""
    step = step_ms(run)
    if step is None or (run.kernels["device"] == "cpu").all():
        return []
    steps = run.own_times["step"].unique().tolist()
    found = run.fusion(where={"step": steps})
    found = found[(found["pattern"] != fusion.OPTIMIZER).to_numpy() & (found["per_step_us"] > 0)]
    gain = float(found["per_step_us"].sum()) / 1000
    if not gain >= thresholds.FUSION * step:
        return []
    windows = len(run.launches(by=["gpu", "step"], where={"step": steps}))
    first = found.iloc[0]
    pattern = str(first["pattern"])
    return [Diagnosis(
        "fusion", severity(gain, step),
        f"{found['n'].sum() / windows:.0f} runs of memory-bound kernels in a step could be one kernel each, which "
        f"would save about {gain:.3g} ms of a step of {step:.3g} ms; most of it is {pattern}",
        title="Kernels that could run as one",
        evidence=(Evidence("runs of kernels in a step", float(found["n"].sum()) / windows),
                  Evidence("their time in a step", float(found["time_us"].sum()) / windows, "us"),
                  *(Evidence(f"saved: {p}", float(us), "us") for p, us in
                    zip(found["pattern"].head(N_NAMED), found["per_step_us"].head(N_NAMED), strict=True))),
        cause="each kernel writes its result to memory for the next one to read",
        remedy=fusion.REMEDIES[pattern], gain_ms=gain, gain_how=HOW, view="fusion", kernel=str(first["at"]))]
