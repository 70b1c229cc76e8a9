"""Steps that take much longer than the others (reference: outlier steps by a robust z, and what in them grew)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pandas as pd

from tb_chopper.backend.rules import thresholds
from tb_chopper.backend.rules.diagnosis import Diagnosis, Evidence, severity, step_ms

if TYPE_CHECKING:
    from tb_chopper.backend.findings import Finding
    from tb_chopper.backend.run import Run

CAUSES = {
    "loader": ("its host waited for data",
               "look for a slow file or a shuffle at this place; prefetch_factor= hides one late batch"),
    "allocation": ("the driver was asked for memory", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
                   "(PYTORCH_HIP_ALLOC_CONF on AMD); keep the shapes of batches equal, so that the cache fits"),
    "gc": ("Python collected garbage", "gc.disable() and gc.collect() on all ranks in the same, rare steps"),
    "recompile": ("torch.compile compiled again", "mark what varies as dynamic (torch._dynamo.mark_dynamic), or pad to "
                  "equal shapes; TORCH_LOGS=recompiles tells the guard"),
    "compile": ("torch.compile compiled", "let the warm-up steps meet every shape before the steps that count"),
    "sync": ("its host waited for the device in the middle of the step", "read values on the host (.item(), printing, "
             "checkpoints) after the step, or copy them with non_blocking=True"),
    "idle": ("its host launched nothing, and no call in the trace says why", "look for what else ran on the host then: "
             "checkpoints, logging, evaluation, other jobs on its cores; with_stack=True names the code"),
    "exposed_communication": ("communication took longer",
                              "look at the error counters of links and network, and at other jobs on it"),
    "exposed_memcpy": ("copies took longer", "pin the memory they read (pin_memory=True), or copy beside computation"),
    "compute": ("the same kernels took longer", "look at the clock and temperature at that moment (DVFS tab)"),
}
"""By what caused it: a kind of host call, or the class of time that grew."""
HOW = ("time of these steps on the GPU that took longest, without its waiting for others, - the median step; divided "
       "by the number of steps measured")
OTHER_WORK = 0.05
"""of the kernels of a step: one that runs more has other work to do and is no outlier"""
BUSY = ("exposed_communication", "exposed_memcpy", "compute")
"""classes in which the GPU does something: the step is that of the window on the GPU"""


class _Cause(NamedTuple):
    name: str
    us: float
    call: str
    """host call or scope, "" where none is known"""


def rule(run: Run) -> list[Finding]:
    """One diagnosis per cause, for all steps that have it."""
    rows, step = run.outlier_steps(), step_ms(run)
    if not len(rows) or step is None or (run.workers["device"] == "cpu").all():
        return []
    odd = rows[rows["outlier"].astype(bool) & ~_other_work(run, rows)]
    causes = [_cause(run, row) for _, row in odd.iterrows()]
    odd = odd.assign(cause=[c.name for c in causes], call=[c.call for c in causes], cause_us=[c.us for c in causes])
    # A host that began a step late lengthened the window of the step before.
    odd["number"] = odd["step"].where(odd["cause"].isin(BUSY) | odd["at_step"].isna(), odd["at_step"])
    n_steps = int(rows["z"].notna().sum())
    found = [_diagnosis(part, str(cause), n_steps, step) for cause, part in odd.groupby("cause", sort=True)]
    return [d for d in found if d.gain_ms is not None and d.gain_ms >= thresholds.SMALL_GAIN * step]


def _diagnosis(odd: pd.DataFrame, name: str, n_steps: int, step: float) -> Diagnosis:
    worst = odd.loc[odd["excess_us"].idxmax()]
    excess, gain = float(worst["excess_us"]) / 1000, float(odd["excess_us"].sum()) / 1000 / n_steps
    cause, remedy = CAUSES[name]
    grew = str(worst["grew"])
    call = f" ({worst['call']})" if worst["call"] else ""
    more = f"; {len(odd)} steps of {n_steps} are like this" if len(odd) > 1 else ""
    evidence = [
        Evidence("longer than the median step", excess * 1000, "us"),
        Evidence("robust z", float(worst["z"])),
        Evidence("grew most", grew.replace("_", " "), "text"),
        Evidence("that class, against the median", float(worst[f"{grew}_delta_us"]), "us"),
        Evidence("such steps", f"{len(odd)} of {n_steps}", "text")]
    if isinstance(worst["operation"], str):
        evidence.append(Evidence("before" if grew == "idle" else "in", worst["operation"], "text"))
    if worst["call"]:
        evidence.append(Evidence(f"idle by {name}", float(worst["cause_us"]), "us"))
    return Diagnosis(
        "outlier_step", severity(gain, step),
        f"step {worst['number']} takes {excess:.3g} ms longer than the median step of {step:.3g} ms, by "
        f"GPU {worst['gpu']}: {cause}{call}{more}",
        title=f"Step {worst['number']} takes much longer than the others", evidence=tuple(evidence),
        cause=cause, remedy=remedy, gain_ms=gain, gain_how=HOW, gpus=tuple(sorted(set(map(int, odd["gpu"])))),
        steps=tuple(map(int, odd["number"])), view="stragglers",
        selection={"gpu": int(worst["gpu"]), "step": int(worst["step"])},
        kernel=str(worst["at"]) if isinstance(worst["at"], str) else "")


def _cause(run: Run, row: pd.Series) -> _Cause:
    """The host call that kept this GPU idle for most of what grew, else the class that grew."""
    grew = str(row["grew"])
    if grew != "idle" or pd.isna(row["at_step"]):
        return _Cause(grew, float(row[f"{grew}_delta_us"]), "")
    mine = run.stalls[run.stalls["gpu"] == row["gpu"]]
    kind = mine["kind"].astype(str)
    table = (mine["idle_ns"].groupby([kind, mine["next_step"]]).sum().unstack(fill_value=0) / 1000).astype("float64")
    if row["at_step"] not in table.columns:
        return _Cause("idle", float(row["idle_delta_us"]), "")
    more = table[row["at_step"]] - table.drop(columns=row["at_step"]).median(axis=1).fillna(0.0)
    if more.max() < thresholds.EXPLAINED * row["idle_delta_us"]:
        return _Cause("idle", float(row["idle_delta_us"]), "")
    name = str(more.idxmax())
    there = mine[(kind == name) & (mine["next_step"] == row["at_step"])]
    return _Cause(name, float(more.max()), str(there.loc[there["idle_ns"].astype("int64").idxmax(), "name"]))


def _other_work(run: Run, rows: pd.DataFrame) -> pd.Series:
    """Which steps launched more kernels than the median step, on the GPU that took longest."""
    steps = run.steps.drop_duplicates(["gpu", "step"])
    table = steps.pivot(index="step", columns="gpu", values="n_kernels").astype("float64")
    usual = table.median()
    return pd.Series([table.loc[s, g] > (1 + OTHER_WORK) * usual[g] for s, g in zip(rows["step"], rows["gpu"],
                                                                                  strict=True)], index=rows.index)
