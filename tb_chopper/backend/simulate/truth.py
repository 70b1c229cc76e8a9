"""The right answers: per kernel, what caused its time, and what a correct analysis must find in the files.

`truth/kernels.parquet` has one row per device activity in the capture windows (`COLUMNS`), joined to a trace by
(rank, correlation); `truth/dispatches.parquet` tells which kernel each row of the counter files is;
`truth/pipeline.parquet` when each GPU worked on which microbatch (`pipeline_truth`);
`truth/truth.json` tells the configuration, the ranks and their files. Times are ns on the clock of the rank's host.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tb_chopper.backend import intervals
from tb_chopper.backend.simulate import faults, physics, pipeline_truth, plan
from tb_chopper.backend.simulate.config import Config
from tb_chopper.backend.simulate.program import Item, Program
from tb_chopper.backend.simulate.recorded import Rank, Step, clock_offset
from tb_chopper.backend.simulate.schedule import RankTimes

DIRECTORY = "truth"
"""Inside the run, out of the way of tools that take every JSON file of a directory for a trace."""
SUMMARY, KERNELS, DISPATCHES = "truth.json", "kernels.parquet", "dispatches.parquet"
PIPELINE = "pipeline.parquet"

COLUMNS: dict[str, str] = {
    "rank": "rank",
    "step": "ProfilerStep the kernel was launched in; the warm-up step's number for kernels launched before",
    "correlation": "correlation id in the rank's trace",
    "launched": "False: launched before the capture",
    "name": "kernel name",
    "kind": "compute | communication | memcpy",
    "type": "gemm | attention | vector | collective | memcpy",
    "operation": "operation (attn_fa, FSDP::all_gather_copy_out, ...)",
    "layer": "layer number, -1: none",
    "phase": "forward | backward | optimizer | other",
    "cpu_op": "innermost operator that launched it",
    "stream": "0 compute, 1 gather, 2 reduce; messages: 3 receives and 4 sends activations, 5 and 6 gradients",
    "start_ns": "start",
    "end_ns": "end",
    "launch_ns": "start of the launch call, -1 where launched before the capture",
    "overlap_ns": "part of a kernel or copy that runs under communication",
    "prep_ns": "O_prep",
    "call_ns": "O_call",
    "call_under_communication_ns": "part of call_ns under communication",
    "unattributed_ns": "gap before a kernel that was launched before the capture",
    "flop": "theoretical FLOPs",
    "flop_performed": "FLOPs of the matrix cores, padding included",
    "bytes": "bytes moved, or bytes of the message",
    "work_cycles": "cycles needed alone",
    "clock_mhz": "mean clock while it ran",
    "power_w": "mean power while it ran",
    "energy_j": "energy while it ran",
    "d_thr_ns": "time at peak",
    "ovr_inst": "padding",
    "ovr_util": "1 / utilization",
    "ovr_overlap": "contention",
    "ovr_freq": "maximum clock / clock",
    "seq": "sequence number of a collective or message in its process group, else -1",
    "group": "name of its process group, else empty",
    "role": "what the group is for: dp_shard, tp, pp, or world; empty: no collective",
    "peer": "the other rank of a message, else -1",
    "instance": "same for all ranks' rows of one collective or message, -1: none",
    "wait_ns": "collectives: from this rank's arrival to the last one's",
    "stage": "stage of the pipeline, -1: none",
    "microbatch": "microbatch of the pipeline, -1: none",
}
"""d_thr_ns * ovr_inst * ovr_util * ovr_overlap * ovr_freq = end_ns - start_ns, for compute kernels."""


@dataclass
class Part:
    """What one rank contributes."""

    trace: str
    counters: list[str]
    kernels: pd.DataFrame
    dispatches: pd.DataFrame


def of_rank(rank: Rank, times: RankTimes) -> pd.DataFrame:
    """One row per device activity of the rank's trace, `wait_ns` still missing."""
    parts = [
        _of_step(rank, rank.warm, False).iloc[rank.warm_items],
        *(_of_step(rank, step, True) for step in rank.steps),
    ]
    table = pd.concat(parts, ignore_index=True)
    table = table.sort_values("start_ns", kind="stable", ignore_index=True)
    offsets = np.cumsum([0, len(rank.warm.program.items), *[len(s.program.items) for s in rank.steps]])
    work = np.concatenate([times.work[: offsets[1]][rank.warm_items], times.work[offsets[1] :]])
    table["work_cycles"] = work[table.pop("row").to_numpy()]
    _gaps(table)
    _power(table, rank, times)
    _factors(table, rank.config)
    return table


def with_waits(tables: Sequence[pd.DataFrame], config: Config) -> pd.DataFrame:
    """All ranks' tables as one; a collective's wait lasts until its last rank has arrived."""
    table = pd.concat(tables, ignore_index=True)
    true_start = table["start_ns"] - table["rank"].map(lambda r: clock_offset(config, r))
    table["instance"] = table.groupby("key", dropna=True).ngroup()
    instances = true_start.groupby(table["instance"])
    complete = (table["instance"] >= 0) & (instances.transform("size") == table["members"])
    table["wait_ns"] = (instances.transform("max") - true_start).where(complete, -1).astype("int64")
    return table[list(COLUMNS)]


def write(directory: Path, config: Config, ranks: Sequence[Rank], parts: Sequence[Part]) -> None:
    folder = directory / DIRECTORY
    folder.mkdir(exist_ok=True)
    kernels = with_waits([part.kernels for part in parts], config)
    texts = ("name", "kind", "type", "operation", "phase", "cpu_op", "group", "role")
    kernels.astype(dict.fromkeys(texts, "category")).to_parquet(folder / KERNELS, index=False)
    pd.concat([part.dispatches for part in parts], ignore_index=True).to_parquet(folder / DISPATCHES, index=False)
    pipeline = {}
    if config.plan.pipeline > 1:
        actions = pipeline_truth.actions(kernels, config)
        actions.to_parquet(folder / PIPELINE, index=False)
        pipeline = {"pipeline": pipeline_truth.summary(actions, config)}
    summary = {
        "simulated": True, "config": asdict(config), "peak_flop_per_s": config.gpu.peak_flop_per_s, "columns": COLUMNS,
        "planted": faults.planted(config),
        **pipeline,
        "ranks": [_summary(rank, part) for rank, part in zip(ranks, parts, strict=True)],
    }
    (folder / SUMMARY).write_text(json.dumps(summary, indent=1), encoding="utf-8")


def _summary(rank: Rank, part: Part) -> dict[str, Any]:
    steps = []
    for step in rank.steps:
        event = step.program.events[step.program.step_event]
        start, end = int(step.points[event.begin]), int(step.points[event.end])
        steps.append({"step": step.number, "start_ns": start, "end_ns": end})
    return {
        "rank": rank.rank, "host": rank.host, "pid": rank.pid, "device": rank.device, "trace": part.trace,
        "counters": part.counters, "clock_offset_ns": clock_offset(rank.config, rank.rank),
        "window_ns": [rank.window_start, rank.window_end], "steps": steps,
    }


def _of_step(rank: Rank, step: Step, launched: bool) -> pd.DataFrame:
    static = _static(step.program, rank.config)
    table = static.copy()
    n = len(table)
    table["rank"], table["step"], table["launched"] = rank.rank, step.number, launched
    table["start_ns"], table["end_ns"] = step.start, step.end
    table["correlation"] += step.correlation
    table["launch_ns"] = step.points[table.pop("begin")] if launched else -1
    _communication(table, rank, step)
    first = (
        (len(rank.warm_items) + sum(len(s.program.items) for s in rank.steps if s.number < step.number))
        if launched
        else 0
    )
    table["row"] = first + np.arange(n) if launched else np.searchsorted(rank.warm_items, np.arange(n))
    return table


def _communication(table: pd.DataFrame, rank: Rank, step: Step) -> None:
    """seq, group, role, peer; key and members: what names an instance on every rank, and how many ranks have it."""
    groups = plan.groups(rank.config, rank.rank)
    rows: list[tuple[int, str, str, int, str | None, int]] = []
    for c in (item.collective for item in step.program.items):
        if c is None:
            rows.append((-1, "", "", -1, None, 0))
            continue
        group = groups[c.group]
        peer, members = -1, len(group.ranks)
        ends: tuple[object, ...] = (group.name,)
        if c.flow:
            peer = plan.neighbour(rank.config, rank.rank, c.to_next)
            ends = (c.flow, rank.rank, peer) if c.name == "send" else (c.flow, peer, rank.rank)
            members = 2
        role = plan.DATA if rank.config.plan.is_default else c.group
        key = " ".join(map(str, (*ends, step.collective[c.channel] + c.number)))
        rows.append((step.collective[c.counter] + c.seq, group.name, role, peer, key, members))
    names = ["seq", "group", "role", "peer", "key", "members"]
    table[names] = pd.DataFrame(rows, columns=names, index=table.index)


def _static(program: Program, config: Config) -> pd.DataFrame:
    items: list[Item] = program.items
    kinds = {"collective": "communication", "memcpy": "memcpy"}
    return pd.DataFrame(
        {
            "correlation": [i.correlation for i in items],
            "begin": [i.begin for i in items],
            "name": [i.kernel.name for i in items],
            "kind": [kinds.get(i.kernel.kind, "compute") for i in items],
            "type": [i.kernel.kind for i in items],
            "operation": [i.operation for i in items],
            "layer": [i.layer for i in items],
            "phase": [i.phase for i in items],
            "cpu_op": [i.cpu_op for i in items],
            "stream": [i.stream for i in items],
            "flop": [i.kernel.flop for i in items],
            "flop_performed": [i.kernel.flop_performed for i in items],
            "bytes": [i.kernel.bytes for i in items],
            "d_thr_ns": [physics.theoretical_ns(i.kernel, config.gpu) for i in items],
            "stage": [i.stage for i in items],
            "microbatch": [i.microbatch for i in items],
        }
    )


def _covered(begin: np.ndarray, end: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Length of the disjoint sorted intervals that lies before each t."""
    total = np.concatenate([[0], np.cumsum(end - begin)])
    before = np.searchsorted(begin, t, side="right")
    running = np.maximum(0, end[np.maximum(before - 1, 0)] - t) if len(begin) else np.zeros_like(t)
    return total[before] - np.where(before > 0, running, 0)


def _gaps(table: pd.DataFrame) -> None:
    """Overlap and launch overhead of the compute kernels, as defined in the documentation of the metrics."""
    rows = table.loc[table["kind"] == "communication", ["start_ns", "end_ns"]].to_numpy()
    comm = np.stack(intervals.union(rows[:, 0], rows[:, 1]), axis=1)
    compute = (table["kind"] == "compute").to_numpy()
    start, end = table["start_ns"].to_numpy(), table["end_ns"].to_numpy()
    overlap = _covered(comm[:, 0], comm[:, 1], end) - _covered(comm[:, 0], comm[:, 1], start)
    table["overlap_ns"] = np.where(table["kind"] == "communication", 0, overlap)
    gaps = {
        name: np.zeros(len(table), np.int64)
        for name in ("prep_ns", "call_ns", "call_under_communication_ns", "unattributed_ns")
    }
    rows = np.flatnonzero(compute)
    if len(rows) > 1:
        launch = table["launch_ns"].to_numpy()[rows[1:]]
        begin = start[rows[1:]]
        free = np.maximum.accumulate(end[rows])[:-1]
        gap = np.maximum(0, begin - free)
        known = launch >= 0
        prep = np.where(known, np.minimum(np.maximum(0, launch - free), gap), 0)
        call = np.where(known, gap - prep, 0)
        under = _covered(comm[:, 0], comm[:, 1], begin) - _covered(comm[:, 0], comm[:, 1], begin - call)
        for name, values in zip(gaps, (prep, call, np.where(call > 0, under, 0), np.where(known, 0, gap)), strict=True):
            gaps[name][rows[1:]] = values
    for name, values in gaps.items():
        table[name] = values


def _power(table: pd.DataFrame, rank: Rank, times: RankTimes) -> None:
    """Mean clock and power over each kernel, from the controller's ticks."""
    tick = rank.config.tick_ns
    edges = np.arange(len(times.clock_mhz)) * float(tick)
    zero = clock_offset(rank.config, rank.rank)
    start, end = (table[c].to_numpy() - zero for c in ("start_ns", "end_ns"))
    length = np.maximum(end - start, 1)
    for name, values in (("clock_mhz", times.clock_mhz[:-1]), ("power_w", times.power_w[1:])):
        total = np.concatenate([[0.0], np.cumsum(values) * tick])
        table[name] = (np.interp(end, edges, total) - np.interp(start, edges, total)) / length
    table["energy_j"] = table["power_w"] * length * 1e-9


def _factors(table: pd.DataFrame, config: Config) -> None:
    compute = (table["kind"] == "compute").to_numpy()
    duration = (table["end_ns"] - table["start_ns"]).to_numpy()
    f_peak = config.gpu.max_clock_mhz
    matrix = (table["flop"] > 0).to_numpy()
    inst = np.where(matrix, table["flop_performed"] / table["flop"].where(matrix, 1), 1.0)
    work_ns = table["work_cycles"].to_numpy() / (f_peak * 1e-3)
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = {
            "ovr_inst": inst,
            "ovr_util": work_ns / (table["d_thr_ns"].to_numpy() * inst),
            "ovr_overlap": duration * table["clock_mhz"].to_numpy() / (f_peak * work_ns),
            "ovr_freq": f_peak / table["clock_mhz"].to_numpy(),
        }
    for name, values in factors.items():
        table[name] = np.where(compute, values, np.nan)
