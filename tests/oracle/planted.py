"""Faults planted in a healthy simulated node, and what the diagnosis says of each; `python -m tests.oracle.planted`
prints the tables of docs/simulation.md.

The right size is what was planted; the right gain is what the same node (same seed) takes without the fault.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import pandas as pd

import tb_chopper
from tb_chopper.backend.metrics.throughput import iterations
from tb_chopper.backend.rules import RULES
from tb_chopper.backend.rules.diagnosis import Diagnosis
from tb_chopper.backend.run import Run
from tb_chopper.backend.simulate import Options, simulate
from tb_chopper.backend.simulate.config import MI300X

HEALTHY = Options("healthy", compress=False)
LINK_GBS = MI300X.link_bytes_per_s / 1e9
SMALL_NS, LAUNCH_NS = 10_000, 100_000


def evidence(label: str, scale: float = 1.0) -> Callable[[Diagnosis], float]:
    """A number of a diagnosis by its label, times `scale`."""
    return lambda d: float(next(e.value for e in d.evidence if e.label == label)) * scale


@dataclass(frozen=True)
class Fault:
    """What is planted, the rule that must find it, its size there and as planted, in `unit`; `gpus` and `steps` that it
    must name. `within`: of the gain; None where the rule claims another number than what the fault costs."""

    what: str
    options: Options
    rule: str
    size: Callable[[Diagnosis], float]
    planted: float
    unit: str
    gpus: tuple[int, ...] | None = None
    steps: tuple[int, ...] | None = None
    within: float | None = 0.05


FAULTS: dict[str, Fault] = {
    "slow GPU": Fault(
        "GPU 1 at 80 % of its clock", replace(HEALTHY, slow={1: 0.8}), "slow_gpu",
        evidence("GPU 1 slower than the others"), 1 / 0.8 - 1, "longer", gpus=(1,)),
    "slow GPUs": Fault(
        "GPUs 1 and 2 at 80 %", replace(HEALTHY, slow={1: 0.8, 2: 0.8}), "slow_gpu",
        evidence("GPU 2 slower than the others"), 1 / 0.8 - 1, "longer", gpus=(1, 2)),
    "late loader": Fault(
        "loader of GPU 2 late by 20 ms", replace(HEALTHY, late_loader={2: 20.0}), "data_stall",
        evidence("idle per step", 1e-3), 20.0, "ms per step", gpus=(2,)),
    "late every second": Fault(
        "the same in every second step", replace(HEALTHY, late_loader={2: 20.0}, late_every=2), "data_stall",
        evidence("idle in such a step", 1e-3), 20.0, "ms in such a step", gpus=(2,), within=None),
    "outlier step": Fault(
        "host of GPU 0 stops for 100 ms in step 14", replace(HEALTHY, stall=(14, 0, 100.0)), "outlier_step",
        evidence("longer than the median step", 1e-3), 100.0, "ms", gpus=(0,), steps=(14,)),
    "islands": Fault(
        "a fifth of the bandwidth between GPUs 0-1 and 2-3", replace(HEALTHY, islands=0.2), "islands",
        evidence("bus bandwidth, GB/s"), 0.2 * LINK_GBS, "GB/s", gpus=(0, 1, 2, 3)),
    "growing memory": Fault(
        "GPU 1 keeps 64 MiB in every step", replace(HEALTHY, memory_growth={1: 64.0}), "memory_growth",
        evidence("growth per step", 2.0**-20), 64.0, "MiB per step", gpus=(1,), within=None),
    "storm": Fault(
        "AdamW in 2000 small kernels", replace(HEALTHY, storm=2000), "small_kernels",
        evidence("kernels below 10 µs in a step"), 2000.0, "kernels", within=None),
}


class Found(NamedTuple):
    """One fault: all that was said, what its rule said (None: nothing), and what the fault costs, ms per step."""

    run: Run
    said: list[Diagnosis]
    diagnosis: Diagnosis | None
    cost_ms: float


def opened(options: Options, folder: Path) -> Run:
    return tb_chopper.open_run(simulate(folder, options)[0])


def step_ms(run: Run) -> float:
    """Mean time of a step, without the first: it still runs the warm-up step's kernels. All GPUs take the same on the
    whole."""
    times = iterations(run.steps)
    times = times[times["step"] > times["step"].min()]
    return float(times.groupby("gpu")["iteration_ns"].mean().mean()) / 1e6


def said(run: Run) -> list[Diagnosis]:
    return [d for d in run.diagnosis if isinstance(d, Diagnosis)]


def find(fault: Fault, folder: Path, clean: Run) -> Found:
    """`clean`: the same node without the fault."""
    run = opened(fault.options, folder)
    spoken = said(run)
    return Found(run, spoken, next((d for d in spoken if d.code == fault.rule), None), step_ms(run) - step_ms(clean))


def launch_waits_ms(folder: Path) -> float:
    """Of a simulated run, from its truth: time of a step in which the GPU waits for the launch of small kernels of the
    optimizer, mean over GPUs and over the steps that have a next one. A longer gap is not a launch's."""
    table = pd.read_parquet(folder / "truth/kernels.parquet")
    table = table[table["launched"] & (table["kind"] == "compute") & (table["step"] < table["step"].max())]
    small = table[(table["end_ns"] - table["start_ns"] < SMALL_NS) & (table["operation"] == "opt_step")]
    waits = small["prep_ns"] + small["call_ns"]
    return float(waits[waits <= LAUNCH_NS].sum()) / table.groupby(["rank", "step"]).ngroups / 1e6


def tables() -> str:
    """The tables of docs/simulation.md: size and gain of each fault, and rule × fault."""
    with tempfile.TemporaryDirectory() as folder:
        cleans: dict[int | None, Run] = {}
        rows, fired = [], {"none": {d.code for d in said(_clean(cleans, HEALTHY, Path(folder)))}}
        for name, fault in FAULTS.items():
            found = find(fault, Path(folder) / name, _clean(cleans, fault.options, Path(folder)))
            fired[name] = {d.code for d in found.said}
            rows.append(_row(name, fault, found))
    head = ("| fault | planted | rule | size planted | found | costs a step, ms | gain, ms |\n"
            "|---|---|---|--:|--:|--:|--:|\n")
    names = list(fired)
    spoken = [r for r in RULES if any(r in codes for codes in fired.values())]
    silent = [r for r in RULES if r not in spoken]
    matrix = [f"| rule | {' | '.join(names)} |", f"|---|{'|'.join([':-:'] * len(names))}|",
              *(f"| `{r}` | {' | '.join('●' if r in fired[n] else '' for n in names)} |" for r in spoken)]
    return (head + "\n".join(rows) + "\n\n" + "\n".join(matrix) +
            "\n\nSilent on all of them: " + ", ".join(f"`{r}`" for r in silent) + ".\n")


def _clean(cleans: dict[int | None, Run], options: Options, folder: Path) -> Run:
    if options.steps not in cleans:
        cleans[options.steps] = opened(replace(HEALTHY, steps=options.steps), folder / f"clean{options.steps}")
    return cleans[options.steps]


def _row(name: str, fault: Fault, found: Found) -> str:
    d = found.diagnosis
    size = f"{fault.size(d):.4g}" if d else "not found"
    gain = "–" if d is None or d.gain_ms is None else f"{d.gain_ms:.2f}"
    return (f"| {name} | {fault.what} | `{fault.rule}` | {fault.planted:.4g} {fault.unit} | {size} | "
            f"{found.cost_ms:.2f} | {gain} |")


if __name__ == "__main__":
    print(tables())
