"""What is wrong in telemetry of any origin, and what can be mended: readings that stand for "unknown", energy
counters that wrap, dies that share a power sensor, times out of order."""

from __future__ import annotations

import numpy as np
import pandas as pd

from tb_chopper.backend import schema
from tb_chopper.backend.findings import Finding

MAX_MHZ = 6000.0
MAX_W = 5000.0
MAX_BYTES = 2.0**50
"""far above any device: such a reading is a sentinel or another unit"""
ENERGY_TOLERANCE = 0.2
"""share by which the energy counter may differ from the integral of power before that is told"""
_S = 1e9


def check(samples: pd.DataFrame, file: str) -> tuple[pd.DataFrame, list[Finding]]:
    """`samples` (TELEMETRY) in order of gpu and time, unknown readings missing, energy rising; and what was done."""
    findings: list[Finding] = []
    samples, n = _in_order(samples)
    if n:
        findings.append(Finding("telemetry_repeated", "info", f"{file}: {n} samples repeat another of the same GPU and "
                                "time and are left out", n))
    for step in (_sentinels, _percentages, _zero_power, _energy):
        samples, found = step(samples, file)
        findings += found
    return samples, findings


def _in_order(samples: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    ordered = samples.sort_values(["gpu", "t_ns"], kind="stable")
    kept = ordered.drop_duplicates(["gpu", "t_ns"])
    return kept.reset_index(drop=True), len(ordered) - len(kept)


def _sentinels(samples: pd.DataFrame, file: str) -> tuple[pd.DataFrame, list[Finding]]:
    """Clocks of 0 or 65535 MHz, powers of 65535 W and memories of all bits set are no readings."""
    limits = {"clock_mhz": MAX_MHZ, "memory_clock_mhz": MAX_MHZ, "clock_limit_mhz": MAX_MHZ,
              "power_w": MAX_W, "power_limit_w": MAX_W, "memory_used_bytes": MAX_BYTES}
    findings = []
    columns = {}
    for column, highest in limits.items():
        values = samples[column].to_numpy()
        wrong = (values < 0) | (values > highest) | ((values == 0) & (column != "power_w"))
        too_high = int((values > highest).sum())
        columns[column] = np.where(wrong, np.nan, values)
        if too_high:
            findings.append(Finding("telemetry_sentinel", "info", f"{file}: {too_high} readings of {column} above "
                                    f"{highest:g} stand for \"unknown\" and are left out", too_high))
    return samples.assign(**columns), findings


def _percentages(samples: pd.DataFrame, file: str) -> tuple[pd.DataFrame, list[Finding]]:
    """A percentage above 100 is a running total under the same name."""
    findings = []
    columns = {}
    for column in (c.name for c in schema.TELEMETRY if c.unit == "%"):
        values = samples[column].to_numpy()
        wrong = (values < 0) | (values > 100)
        columns[column] = np.where(wrong, np.nan, values)
        if wrong.any():
            n = int(wrong.sum())
            findings.append(Finding("telemetry_not_a_percentage", "info",
                                    f"{file}: {n} values of {column} are no percentages and are left out", n))
    return samples.assign(**columns), findings


def _zero_power(samples: pd.DataFrame, file: str) -> tuple[pd.DataFrame, list[Finding]]:
    """No device in use draws 0 W. A GPU that always reads 0 is not measured; a single 0 is a missed reading."""
    zero = (samples["power_w"] == 0).to_numpy()
    if not zero.any():
        return samples, []
    power = samples["power_w"].fillna(0)
    never = power.groupby(samples["gpu"]).max() == 0
    findings = [
        Finding("power_not_measured", "warning", f"{file}: GPU {gpu} reads 0 W throughout: its power is not measured "
                "and is missing in every total")
        for gpu in never.index[never] if zero[(samples["gpu"] == gpu).to_numpy()].any()]
    return samples.assign(power_w=samples["power_w"].mask(zero)), findings


def _energy(samples: pd.DataFrame, file: str) -> tuple[pd.DataFrame, list[Finding]]:
    """Energy counters restart with the driver: a fall is the start of a new count, which goes on from the last value.
    (Wraps of counters of known width are undone by the readers that know the width.)"""
    energy = samples["energy_j"]
    if energy.notna().sum() < 2:
        return samples, []
    known = samples.loc[energy.notna(), ["gpu", "energy_j"]]
    rise = known.groupby("gpu")["energy_j"].diff().fillna(0)
    falls = int((rise < 0).sum())
    mended = samples["energy_j"].copy()
    if falls:
        first = known.groupby("gpu")["energy_j"].transform("first")
        mended.loc[known.index] = first + rise.clip(lower=0).groupby(known["gpu"]).cumsum()
    findings = [] if not falls else [Finding(
        "energy_restarted", "warning", f"{file}: an energy counter fell {falls} times and was continued from its last "
        "value: the energy of those intervals is missing", falls)]
    samples, disagreements = _energy_against_power(samples.assign(energy_j=mended), file)
    return samples, findings + disagreements


def _energy_against_power(samples: pd.DataFrame, file: str) -> tuple[pd.DataFrame, list[Finding]]:
    """The counter against the integral of power, over each GPU's log. A counter a thousand times too high counts mJ."""
    findings = []
    energy = samples["energy_j"].copy()
    for gpu, rows in samples.groupby("gpu"):
        counted = rows["energy_j"].dropna()
        integral = _integral_j(rows.loc[counted.index])
        if len(counted) < 2 or not integral > 0:
            continue
        ratio = float(counted.iloc[-1] - counted.iloc[0]) / integral
        if abs(ratio / 1000 - 1) <= ENERGY_TOLERANCE:
            energy.loc[rows.index] = rows["energy_j"] / 1000
            findings.append(Finding("energy_in_mj", "warning", f"{file}: GPU {gpu}: the energy counter is a thousand "
                                    "times the integral of power: it counts mJ and is read so"))
        elif abs(ratio - 1) > ENERGY_TOLERANCE:
            findings.append(Finding(
                "energy_disagrees", "warning", f"{file}: GPU {gpu}: the energy counter gives {ratio:.3g} times the "
                "integral of power: the counter's unit is wrong, or power misses part of the device"))
    return samples.assign(energy_j=energy), findings


def _integral_j(rows: pd.DataFrame) -> float:
    known = rows["power_w"].notna().to_numpy()
    t, power = rows["t_ns"].to_numpy()[known], rows["power_w"].to_numpy()[known]
    return float(np.sum((power[1:] + power[:-1]) / 2 * np.diff(t) / _S)) if len(t) > 1 else 0.0
