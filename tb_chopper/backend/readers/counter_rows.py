"""What the readers of counter files share: where a file stands, which rows are one dispatch, which GPU is meant."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from tb_chopper.backend import schema
from tb_chopper.backend.findings import Finding

_PASS = re.compile(r"(?:pass|pmc)_(\d+)", re.IGNORECASE)
_RANK = re.compile(r"(?:^|_)r(?:ank_?)?(\d+)(?=[_.]|$)")  # "r_4711" has no rank: the launcher wrote it
_PID = re.compile(r"(?:^|_)(\d+)_")


class Place(NamedTuple):
    """What folders and file name tell: `<pass>/<host>/r<rank>_<pid>_counter_collection.csv`."""

    number: int
    """of the pass, 0 where no folder names one"""
    host: str | None
    rank: int | None
    pid: int
    """-1 where the name does not tell"""


def place(path: Path) -> Place:
    passes = [match.group(1) for part in path.parts for match in [_PASS.fullmatch(part)] if match]
    rank, pid = _RANK.search(path.name), _PID.search(_RANK.sub("", path.name))
    # By default the profiler puts <pid>_... into a folder of the host's name.
    host = path.parent.name if pid and path.parent.name and not _PASS.fullmatch(path.parent.name) else None
    return Place(int(passes[-1]) if passes else 0, host, int(rank.group(1)) if rank else None,
                 int(pid.group(1)) if pid else schema.MISSING)


def placed(rows: pd.DataFrame, path: Path) -> pd.DataFrame:
    """The rows with pass, file, and, unless they have their own, host, rank and process."""
    at = place(path)
    told: dict[str, Any] = {"pass": at.number, "file": path.name, "rank": at.rank if at.rank is not None else pd.NA}
    own = {"host": at.host, "process": at.pid}
    return rows.assign(**told, **{c: v for c, v in own.items() if c not in rows})


# ---- rows to dispatches


def combine(dispatch: np.ndarray, counter: pd.Series, value: np.ndarray, when: np.ndarray,
            ) -> tuple[dict[str, np.ndarray], list[Finding]]:
    """Values of each counter by dispatch (numbered from 0), NaN where there is none.

    A counter that a dispatch has more than once was written once per hardware instance: the values are summed
    (`_max`, `_min` and rates of derived metrics: their maximum, minimum, mean). A dispatch that comes again later
    in the file with equal values and time `when` was merged into it twice, and counts once.
    """
    findings = []
    names = counter.cat.categories
    code = counter.cat.codes.to_numpy(np.int64)
    n, n_names = int(dispatch.max(initial=-1)) + 1, len(names)
    slot = dispatch * n_names + code
    repeated = len(np.unique(slot)) < len(slot)
    if repeated:
        keep = ~_merged_twice(dispatch, code, value, when)
        if not keep.all():
            findings.append(Finding("counters_twice", "warning", "rows that repeat others, value and time alike, are "
                                    "counted once: was this file merged with itself?", int((~keep).sum())))
        dispatch, code, value, slot = dispatch[keep], code[keep], value[keep], slot[keep]
    out = {}
    for c in np.unique(code):
        mine = code == c
        rows, values = dispatch[mine], value[mine]
        column = np.full(n, np.nan)
        if repeated and len(np.unique(rows)) < len(rows):
            grouped = pd.Series(values).groupby(rows)
            joined = getattr(grouped, _how(names[c]))()
            column[joined.index] = joined
        else:
            column[rows] = values
        out[str(names[c])] = column
    return out, findings


def instances(dispatch: np.ndarray, counter: pd.Series, wanted: str = "GRBM_GUI_ACTIVE") -> int:
    """How many rows each dispatch has of a counter, 0 where not the same number for all."""
    rows = dispatch[(counter == wanted).to_numpy()]
    counts = np.unique(np.bincount(rows)[np.unique(rows)]) if len(rows) else np.array([])
    return int(counts[0]) if len(counts) == 1 else 0


def _how(counter: str) -> str:
    for ending, how in (("_max", "max"), ("_min", "min"), ("_avr", "mean"), ("_avg", "mean")):
        if counter.endswith(ending):
            return how
    # Events of a block are upper case (SQ_WAVES, FETCH_SIZE, TCC_HIT_sum); ratios of them are not (MfmaUtil).
    return "sum" if counter.removesuffix("_sum").isupper() else "mean"


def _merged_twice(dispatch: np.ndarray, code: np.ndarray, value: np.ndarray, when: np.ndarray) -> np.ndarray:
    """Rows of a dispatch that stands in the file again, behind others, with the same counters, values and time."""
    run = np.concatenate(([0], np.cumsum(dispatch[1:] != dispatch[:-1])))
    first = np.unique(run, return_index=True)[1]
    table = pd.DataFrame({
        "dispatch": dispatch[first], "when": when[first], "n": np.bincount(run), "codes": np.bincount(run, code),
        "values": np.bincount(run, np.nan_to_num(value) * (code + 1))})
    return table.duplicated().to_numpy()[run]


# ---- agents


def gpu_indices(labels: pd.Series, agents: pd.DataFrame) -> np.ndarray:
    """Place among the GPU agents, by the label of the profiler: `Agent 2` is a node, `GPU 0` is the place itself;
    -1 where the agents do not tell."""
    by_logical, by_node = (dict(zip(agents[c], agents["gpu_index"], strict=True)) for c in ("logical_node", "node"))

    def place_of(label: str) -> int:
        kind, _, number = str(label).rpartition(" ")
        if not number.isdigit():
            return schema.MISSING
        if kind == "GPU":
            return int(number)
        found = by_logical.get(int(number), schema.MISSING)
        return found if found >= 0 else by_node.get(int(number), schema.MISSING)

    by_code = np.array([*(place_of(label) for label in labels.cat.categories), schema.MISSING], np.int64)
    return by_code[labels.cat.codes]


def with_agents(counters: pd.DataFrame, agents: pd.DataFrame) -> pd.DataFrame:
    """The counters with gpu_index and, where not known already, xcc of their agents."""
    index = gpu_indices(counters["agent"], agents)
    dies = {i: x for i, x in zip(agents["gpu_index"], agents["xcc"], strict=True) if i >= 0 and x > 0}
    xcc = pd.Series(index, counters.index).map(dies).astype("Int64")
    return counters.assign(gpu_index=index, xcc=counters["xcc"].fillna(xcc))


def gpu_places(is_gpu: Sequence[bool], order: Sequence[int]) -> list[int]:
    """Place of each agent among the GPUs, sorted by `order`; -1 for a CPU."""
    gpus = sorted(i for i, gpu in enumerate(is_gpu) if gpu)
    rank = {i: k for k, i in enumerate(sorted(gpus, key=lambda i: order[i]))}
    return [rank.get(i, schema.MISSING) for i in range(len(is_gpu))]


def amd_agents(fields: pd.DataFrame) -> pd.DataFrame:
    """AGENTS of rocprofiler's agent fields, whose names are lower case; those that are missing become null."""
    def number(name: str) -> pd.Series:
        column = fields.get(name, pd.Series(schema.MISSING, fields.index))
        return pd.to_numeric(column, errors="coerce").fillna(schema.MISSING).astype("int64")

    is_gpu = fields["agent_type"].astype(str).str.upper().isin(["GPU", "2"])
    logical = number("logical_node_id").where(number("logical_node_id") >= 0, number("node_id"))
    location, arrays = number("location_id"), number("array_count")
    engines = (arrays // number("simd_arrays_per_engine").where(number("simd_arrays_per_engine") > 0, 1))
    address = [f"{max(domain, 0):04x}:{at >> 8:02x}:{at >> 3 & 31:02x}.{at & 7}" if gpu and at > 0 else None
               for gpu, at, domain in zip(is_gpu, location, number("domain"), strict=True)]
    return schema.conform(pd.DataFrame({
        "node": number("node_id"), "logical_node": logical, "gpu_index": gpu_places(list(is_gpu), list(logical)),
        "arch": fields.get("name"), "product": fields.get("product_name"), "device_id": number("device_id"),
        "units": number("cu_count"), "simds": number("simd_count"), "xcc": number("num_xcc"),
        "shader_engines": engines, "wave_size": number("wave_front_size"), "waves_per_unit": number("max_waves_per_cu"),
        "max_clock_mhz": number("max_engine_clk_fcompute"), "pci_address": address, "kfd_id": number("gpu_id"),
    }), schema.AGENTS)
