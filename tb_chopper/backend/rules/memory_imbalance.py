"""A GPU that needs more memory than its peers: it decides how large the batch of all can be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tb_chopper.backend.rules import thresholds
from tb_chopper.backend.rules.diagnosis import Diagnosis, Evidence

if TYPE_CHECKING:
    from tb_chopper.backend.findings import Finding
    from tb_chopper.backend.run import Run

REMEDY = ("balance what the GPUs hold: experts, sequence lengths, what only one of them keeps; or recompute more on "
          "this GPU alone; if all processes appear on it in nvidia-smi or amd-smi, set the device before anything is "
          "loaded (map_location, set_device)")


def rule(run: Run) -> list[Finding]:
    """One diagnosis for all GPUs whose peak lies above the median of their peers (those of the same stage, in a
    pipeline) by the factor, and by a share of the device that matters. Peaks of the allocator; where only the driver's
    count is known for all, that."""
    rows = run.memory()
    if len(rows) < 2:
        return []
    level = "peak_bytes" if rows["peak_bytes"].notna().all() else "used_bytes"
    usual = (rows[level] / rows["of_peers"]).astype("float64")
    more = (rows[level] - usual).astype("float64")
    matters = more >= thresholds.MEMORY_UNEVEN_OF_DEVICE * rows["total_bytes"].astype("float64")
    uneven = rows[(rows["of_peers"].astype("float64") > thresholds.MEMORY_UNEVEN) & matters]
    if not len(uneven):
        return []
    worst = uneven.loc[uneven["of_peers"].astype("float64").idxmax()]
    median = float(usual[worst.name])
    factor, gpu, peak = float(worst["of_peers"]), int(worst["gpu"]), float(worst[level])
    return [Diagnosis(
        "memory_imbalance", "info",
        f"GPU {gpu} needs {factor:.2f} times the memory of the median GPU ({peak / 2**30:.3g} GiB against "
        f"{median / 2**30:.3g} GiB)",
        title=f"GPU {gpu} needs more memory than the others",
        evidence=(Evidence("of the median", factor, "factor"), Evidence("peak", peak, "bytes"),
                  Evidence("median", median, "bytes")),
        cause="an uneven division of layers, experts or sequences, or buffers that only this GPU holds",
        remedy=REMEDY, gain_how="no time by itself: the GPUs have room for a larger batch but for this one",
        gpus=tuple(map(int, uneven["gpu"])), view="memory", selection={"gpu": gpu})]
