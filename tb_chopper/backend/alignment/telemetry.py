"""Telemetry onto a run: which worker a sampled GPU belongs to, its times on the trace's clock, and the clock, memory
clock and power of every kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from tb_chopper.backend import schema
from tb_chopper.backend.alignment import clock, devices
from tb_chopper.backend.alignment.clock import Correction
from tb_chopper.backend.alignment.curve import GAP, Curve, Grid
from tb_chopper.backend.alignment.devices import Sidecars
from tb_chopper.backend.findings import Finding, Severity
from tb_chopper.backend.schema import TelemetryLog

KERNEL_COLUMNS = ("clock_mhz", "memory_clock_mhz", "power_w")
CLOCK_COLUMNS = ("host", "file", "offset_us", "drift_ppm", "residual_us", "n_pairs", "known")
SAMPLED = "sampled"
SKEW_NS = 200_000
"""a correction below this is not worth a word"""
RESIDUAL_NS = 1_000_000


@dataclass
class RunTelemetry:
    """A run's telemetry. samples: TELEMETRY with `gpu` as in KERNELS and times on the trace's clock; cpu and cores:
    CPU, CPU_CORES; clocks: one row per log with host, offset_us, drift_ppm, residual_us, n_pairs, known."""

    samples: pd.DataFrame
    cpu: pd.DataFrame
    cores: pd.DataFrame
    clocks: pd.DataFrame
    findings: list[Finding] = field(default_factory=list)


def join(logs: Sequence[TelemetryLog], workers: pd.DataFrame, sidecars: Sidecars) -> RunTelemetry:
    """Logs onto the workers of a run. workers: WORKERS; sidecars: torch_ext.sidecar by `workers.capture`, those that
    exist. What cannot be placed is left aside with a finding."""
    samples, cpus, cores, clocks, findings = [], [], [], [], []
    for log in logs:
        findings += log.findings
        host, found = _host(log, workers)
        findings += found
        if host is _NOWHERE:
            continue
        mine = workers if host is None else workers[workers["host"] == host]
        own_sidecars = [sidecars[c] for c in mine["capture"] if c in sidecars]
        fit = clock.correction(log.clocks, clock.sidecar_pairs(own_sidecars, host))
        findings += _clock_findings(log, fit, bool(own_sidecars))
        gpus, found = _gpus(log, mine, sidecars)
        findings += found
        placed = log.samples[log.samples["gpu"].isin(list(gpus))]
        placed = _moved(placed.assign(gpu=placed["gpu"].map(gpus).astype("int64")), fit)
        findings += _gaps(placed, log)
        samples.append(placed)
        cpus.append(_moved(log.cpu, fit))
        cores.append(log.cores)
        clocks.append((host, log.name, fit.offset_ns / 1000, fit.drift_ppm, fit.residual_ns / 1000, fit.n_pairs,
                       fit.known))
    return RunTelemetry(
        _merged(samples), _concat(cpus, schema.CPU), _concat(cores, schema.CPU_CORES).drop_duplicates(["host", "cpu"]),
        pd.DataFrame(clocks, columns=list(CLOCK_COLUMNS)), findings)


def with_clocks(kernels: pd.DataFrame, samples: pd.DataFrame) -> pd.DataFrame:
    """`kernels` with clock_mhz, memory_clock_mhz, power_w and clock_source: the time-weighted mean of the samples of
    their GPU over [start, end). A kernel that is shorter than the samples are apart shares the mean of the stretch
    around it. `sampled`, or null where less than half of the kernel is covered by samples."""
    gpu = kernels["gpu"].to_numpy()
    start, end = kernels["start_ns"].to_numpy(), kernels["end_ns"].to_numpy()
    columns = {name: np.full(len(kernels), np.nan) for name in KERNEL_COLUMNS}
    for number, rows in samples.groupby("gpu"):
        mine = np.flatnonzero(gpu == number)
        known = {}  # quantities that were sampled at the same times share the search
        for name, out in columns.items():
            valid = rows[name].notna().to_numpy()
            if valid.tobytes() not in known:
                grid = Grid(rows["t_ns"].to_numpy()[valid])
                known[valid.tobytes()] = grid, grid.place(start[mine], end[mine])
            grid, places = known[valid.tobytes()]
            out[mine] = Curve(grid, rows[name].to_numpy(np.float64)[valid]).mean(places)
    source = pd.Categorical.from_codes(np.where(np.isnan(columns["clock_mhz"]), -1, 0), categories=[SAMPLED])
    return kernels.assign(**columns, clock_source=source)


def curve(samples: pd.DataFrame, column: str) -> Curve:
    """One column of one GPU's samples as a function of time."""
    values = samples[column].to_numpy(np.float64)
    valid = ~np.isnan(values)
    return Curve(Grid(samples["t_ns"].to_numpy()[valid]), values[valid])


_NOWHERE = "\x00nowhere"


def _finding(log: TelemetryLog, code: str, severity: Severity, text: str, count: int = 1) -> Finding:
    return Finding(code, severity, f"{log.name}: {text}", count, log.name)


def _host(log: TelemetryLog, workers: pd.DataFrame) -> tuple[str | None, list[Finding]]:
    """The host of the run that a log was taken on, None for a run without host names, _NOWHERE where it has none."""
    named = next((h for table in (log.samples, log.cpu, log.gpus) for h in table["host"].dropna().unique()), None)
    hosts = list(map(str, workers["host"].dropna().unique()))
    if named in hosts:
        return str(named), []
    if not hosts:
        return None, []
    if len(hosts) == 1:
        text = f"taken on host {named}, the traces on {hosts[0]}: read as the same"
        return hosts[0], [] if named is None else [_finding(log, "telemetry_other_host", "warning", text)]
    return _NOWHERE, [_finding(log, "telemetry_no_host", "warning", f"left aside: its host ({named or 'not named'}) is "
                               f"none of the run's: {', '.join(hosts)}")]


def _gpus(log: TelemetryLog, workers: pd.DataFrame, sidecars: Sidecars) -> tuple[dict[int, int], list[Finding]]:
    """The log's GPU numbers with the run's: by PCI address, else by order where there are as many of both, else by
    the device index that the training saw."""
    addresses = dict(zip(map(int, log.gpus["gpu"]), log.gpus["pci_address"], strict=True))
    present = sorted(map(int, log.samples["gpu"].unique()))
    found, how = devices.matched(present, addresses, workers, sidecars)
    if how == devices.ADDRESS:
        return found, _unused(log, found)
    if not present:
        return {}, []
    if not how:
        return {}, [_finding(log, "telemetry_gpus", "warning", f"left aside: {len(present)} GPUs in the log, "
                             f"{workers['gpu'].nunique()} in the run, and no PCI address to tell which is which")]
    text = f"no PCI address: its GPUs are matched to the run's by {how}"
    alone = len(found) == len(present) == 1
    return found, ([] if alone else [_finding(log, "telemetry_gpus", "info", text)]) + _unused(log, found)


def _unused(log: TelemetryLog, used: Mapping[int, int]) -> list[Finding]:
    others = sorted(set(map(int, log.samples["gpu"].unique())) - set(used))
    text = f"GPUs {', '.join(map(str, others))} of the host are not part of the run"
    return [_finding(log, "telemetry_other_gpus", "info", text, len(others))] if others else []


def _moved(rows: pd.DataFrame, fit: Correction) -> pd.DataFrame:
    return rows.assign(t_ns=fit.apply(rows["t_ns"].to_numpy(), rows["monotonic_ns"].to_numpy()))


def _clock_findings(log: TelemetryLog, fit: Correction, has_sidecar: bool) -> list[Finding]:
    if not fit.known and has_sidecar and len(log.clocks):
        return [_finding(log, "telemetry_clock_unrelated", "warning", "its clocks and the training's are not of one "
                         "boot of one machine: its times are taken as they are")]
    if not fit.known:
        why = "no clock pairs in it" if has_sidecar else "the traces have no sidecar"
        return [_finding(log, "telemetry_clock_unchecked", "info", f"{why}: an offset of its clock to the trace's "
                         "can be neither seen nor undone")]
    findings = []
    if abs(fit.offset_ns) > SKEW_NS:
        findings.append(_finding(log, "telemetry_clock_offset", "info", f"its clock is {-fit.offset_ns / 1e6:.3g} ms "
                                 f"ahead of the trace's (drift {fit.drift_ppm:.2g} ppm); corrected"))
    if fit.residual_ns > RESIDUAL_NS:
        findings.append(_finding(log, "telemetry_clock_residual", "warning", "its clock and the trace's disagree by up "
                                 f"to {fit.residual_ns / 1e6:.3g} ms after correction: a clock was set during the run"))
    return findings


def _gaps(samples: pd.DataFrame, log: TelemetryLog) -> list[Finding]:
    """Pauses that are not bridged."""
    findings = []
    for gpu, rows in samples.groupby("gpu"):
        steps = np.diff(rows["t_ns"].to_numpy())
        wide = steps[steps > GAP * max(np.median(steps), 1)] if len(steps) else steps
        if len(wide):
            text = f"GPU {gpu}: {len(wide)} pauses, {wide.sum() / 1e9:.3g} s: kernels there have no sampled clock"
            findings.append(_finding(log, "telemetry_gaps", "warning", text, len(wide)))
    return findings


def _merged(parts: list[pd.DataFrame]) -> pd.DataFrame:
    """All samples, by GPU and time. Logs of one GPU that hold different quantities of the same moments stay rows of
    their own: each quantity is read from the rows that have it."""
    return _concat(parts, schema.TELEMETRY).sort_values(["gpu", "t_ns"], kind="stable", ignore_index=True)


def _concat(parts: list[pd.DataFrame], table: schema.Table) -> pd.DataFrame:
    parts = [p for p in parts if len(p)]
    return schema.conform(pd.concat(parts, ignore_index=True), table) if parts else schema.empty(table)
