"""One clock onto another: the telemetry of a host onto the clock of its traces.

A trace counts CLOCK_REALTIME; its sidecar holds pairs of CLOCK_REALTIME and CLOCK_MONOTONIC, read by the training
itself. A telemetry log counts CLOCK_MONOTONIC and holds pairs of its own. Both see the same CLOCK_MONOTONIC, so that
whatever the log's CLOCK_REALTIME is off by at the sidecar's pairs is known:

    correction(m) = a + b m     fitted to  realtime_sidecar(m) − realtime_log(m)  at the sidecar's pairs
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from tb_chopper.backend import schema
from tb_chopper.backend.readers.telemetry import to_realtime

UNRELATED_NS = 3_600 * 10**9
"""pairs that disagree by more come from another boot, or another machine of the same name"""
DRIFT_SPAN_NS = 2 * 10**9
"""shorter stretches between pairs say nothing about drift"""
NEAR_NS = 60 * 10**9
"""pairs further outside the log than this are used only where there are no others"""


@dataclass(frozen=True)
class Correction:
    """What to add to the log's times since the epoch. offset_ns: in the middle of the pairs; drift_ppm: change of it;
    residual_ns: largest distance of a pair from the line, reading errors included; n_pairs: sidecar pairs used.
    `known` is False where nothing ties the log to the trace but the hosts' own CLOCK_REALTIME."""

    offset_ns: int
    drift_ppm: float
    residual_ns: int
    n_pairs: int
    middle_ns: int
    known: bool

    def apply(self, t_ns: np.ndarray, monotonic_ns: np.ndarray) -> np.ndarray:
        """Corrected times; a row without a monotonic time (-1) gets the offset alone."""
        away = np.where(monotonic_ns == schema.MISSING, 0, monotonic_ns - self.middle_ns)
        return t_ns + self.offset_ns + np.rint(away * (self.drift_ppm * 1e-6)).astype(np.int64)


NONE = Correction(0, 0.0, 0, 0, 0, False)


def sidecar_pairs(sidecars: Iterable[Mapping[str, Any]], host: str | None) -> pd.DataFrame:
    """The clock pairs (CLOCKS) of the sidecars of one host."""
    names = ("realtime_ns", "monotonic_ns", "boottime_ns", "uncertainty_ns")
    pairs = (pair for s in sidecars for pair in s.get("clocks", []))
    rows = [[schema.MISSING if pair[n] is None else pair[n] for n in names] for pair in pairs]
    frame = pd.DataFrame(rows, columns=list(names), dtype="int64")
    return schema.conform(frame.assign(host=host, session=-1), schema.CLOCKS)


def correction(log: pd.DataFrame, sidecar: pd.DataFrame) -> Correction:
    """How the log's CLOCK_REALTIME differs from that of the trainings on the same host. Both tables: CLOCKS."""
    if not len(log) or not len(sidecar):
        return NONE
    at = log.sort_values("monotonic_ns")
    first, last = int(at["monotonic_ns"].iloc[0]), int(at["monotonic_ns"].iloc[-1])
    pairs = sidecar[sidecar["monotonic_ns"].between(first - NEAR_NS, last + NEAR_NS)]
    pairs = pairs if len(pairs) else sidecar
    m = pairs["monotonic_ns"].to_numpy()
    off = pairs["realtime_ns"].to_numpy() - to_realtime(
        m, at["monotonic_ns"].to_numpy(), at["realtime_ns"].to_numpy())
    if np.abs(np.median(off)) > UNRELATED_NS:
        return NONE
    middle = int(m.min() + (m.max() - m.min()) // 2)
    x = (m - middle).astype(np.float64)
    drifts = m.max() - m.min() >= DRIFT_SPAN_NS
    slope, offset = np.polyfit(x, off.astype(np.float64), 1) if drifts else (0.0, float(np.median(off)))
    reading = int(pairs["uncertainty_ns"].max()) + int(at["uncertainty_ns"].median())
    residual = int(np.abs(off - (offset + slope * x)).max()) + reading
    return Correction(round(offset), float(slope) * 1e6, residual, len(pairs), middle, True)


def anchor(sidecar: pd.DataFrame, clock: str = "monotonic_ns") -> tuple[int, int] | None:
    """(time on `clock`, time since the epoch) of the tightest pair: ties a log that counts from boot to the trace."""
    usable = sidecar[sidecar[clock] != schema.MISSING]
    if not len(usable):
        return None
    best = usable.loc[usable["uncertainty_ns"].idxmin()]
    return int(best[clock]), int(best["realtime_ns"])
