"""Host: what the CPU did while its GPU was idle, and how far ahead it launches."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from tb_chopper.backend.metrics import grouping, host
from tb_chopper.backend.views import context, figures, text
from tb_chopper.backend.views.palette import COLORS, LABELS
from tb_chopper.backend.views.view import KeyFigure, Missing, Selection, Table, TableColumn, View

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run

DEFINITIONS = {
    "dispatch": "Idle before the next launch call, while the host did none of the other things: Python and the "
    "framework.",
    "device": "Idle after the launch call: launched in time, started late.",
    "sync": "The host waited for the device and launched nothing meanwhile: cudaDeviceSynchronize, .item(), blocking "
    "copies.",
    "loader": "The host waited for data: enumerate(DataLoader), load_batch.",
    "allocation": "The host allocated or freed memory of the driver: cudaMalloc, hipFree, cuMemMap.",
    "compile": "torch.compile compiled code for the first time.",
    "recompile": "torch.compile compiled code again: a shape or a guard changed.",
    "gc": "Python collected garbage.",
    "profiler": "The profiler was at work itself: flushing its buffers, loading what it needs.",
    "unknown": "The launch call is not in the capture.",
    "idle": "Time in which nothing runs on the GPU.",
    "short": "Compute kernels below 10 µs: about as long to launch as to run.",
    "queue": "Launches begun − kernels started, per stream: mean over the step's window on the GPU.",
    "empty": "Share of the step's window in which nothing waits in the stream's queue: the host is behind.",
    "path": "What the end of a step waited for, and what that waited for, back to its beginning, across streams and "
    "ranks. Shortening anything else changes nothing.",
    "call_idle": "The part of the calls under which the GPU had nothing to do.",
    "caused": "Idle time of the GPU whose cause they are: every moment of idle time has one cause.",
    "uncovered": "Union of the calls that no GPU work covers.",
    "data_stall": "Data loading that no GPU work covers / length of the steps, on the GPU that has most of it.",
    "middle": "Waits before a kernel of the same step's forward or backward; the wait that ends a step is normal.",
}
STALLS = ("loader", "sync", "allocation", "gc", "profiler", "compile", "recompile")
ORDER = ("dispatch", "device", "sync", "loader", "allocation", "compile", "recompile", "gc", "profiler", "unknown")
REMEDIES = {
    "dispatch": "fewer and larger kernels (torch.compile, graphs) would help",
    "device": "it was launched in time",
    "sync": "fewer .item(), print and blocking copies would help",
    "loader": "more loader workers and pinned memory would help",
    "allocation": "the allocator frees and asks again: less fragmentation would help",
    "compile": "code is still being compiled",
    "recompile": "fixed or padded shapes would help",
    "gc": "collecting between steps would help",
    "profiler": "a run without profiler has none of it",
    "unknown": "it was launched before the capture",
}
PAUSE_NS = 100_000
PAUSED = "most of it in pauses of over 100 µs, in which the host launches nothing: what its code does there, not the " \
    "number of kernels"
NO_LAUNCHES = Missing(
    "Launch calls",
    "Operators on the CPU start where they are called: nothing is launched. Record a run on a GPU.",
    "torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], ...)",
)


def view(run: Run, selection: Selection) -> View:
    """Causes of idle time, host calls, short kernels and queues."""
    if context.is_cpu_only(run):
        return _on_cpu(run, selection)
    where, by = selection.where(), list(selection.by or ("operation",))
    by_gpu = run.idle_causes(by="gpu", where=where)
    total = float(run.timeline(by="gpu", where=where)["total_us"].sum()) if len(run.kernels) else 0.0
    if not len(by_gpu):
        missing = (context.NO_KERNELS,) if context.nothing_to_show(run) else ()
        return View("No GPU was idle in this selection.", missing=missing)
    small = run.launches(by="gpu", where=where)
    narrowed = {k: v for k, v in where.items() if k in ("gpu", "step")}
    calls = _calls(run, narrowed)
    by_step = grouping.select(run.step_stalls(), narrowed)
    n_steps = grouping.select(run.steps, narrowed).groupby("gpu")["step"].nunique()
    windows = run.timeline(by=["gpu", "step"], where=narrowed).dropna(subset=["step"]).groupby("gpu")["total_us"].sum()
    stalls = _per_step(by_step, n_steps, windows)
    queues = grouping.select(run.queues(), narrowed)
    path = run.path_shares(by=["gpu", "kind"], where={k: v for k, v in narrowed.items() if k == "step"})
    return View(
        _headline(by_gpu, total, small, _pauses_share(context.kernels(run, selection))),
        key_figures=_key_figures(by_gpu, total, small, queues, stalls),
        figures={
            "by_gpu": _by_gpu(by_gpu),
            **({"stalls": _stalls(by_step)} if by_step["idle_us"].sum() > 0 and by_step["step"].nunique() > 1 else {}),
            **({"queue": _queues(queues)} if len(queues) else {}),
        },
        tables={
            "causes": _causes_table(run.idle_causes(by=by, where=where), by),
            **({"stalls": _stalls_table(stalls)} if len(stalls) else {}),
            **({"calls": _calls_table(calls, n_steps)} if len(calls) else {}),
            **({"stall_steps": _stall_steps_table(by_step)} if len(by_step) else {}),
            **({"path": _path_table(path)} if len(path) else {}),
            "kernels": _kernels_table(run.launches(by=["gpu", "step"], where=where)),
            **({"queues": _queues_table(queues)} if len(queues) else {}),
        },
        definitions={LABELS[c]: DEFINITIONS[c] for c in ORDER if (by_gpu["cause"] == c).any()},
    )


def _on_cpu(run: Run, selection: Selection) -> View:
    """What the hosts did, without GPUs that could wait for them."""
    narrowed = {k: v for k, v in selection.where().items() if k in ("gpu", "step")}
    calls = run.host_calls(where=narrowed)
    n_steps = grouping.select(run.steps, narrowed).groupby("gpu")["step"].nunique()
    return View(
        "CPU operations are not launched, so no GPU waits for the host.",
        tables={"calls": _calls_table(calls, n_steps, on_gpu=False)} if len(calls) else {},
        missing=(NO_LAUNCHES,),
    )


def _calls(run: Run, where: dict[str, object]) -> pd.DataFrame:
    """`host_calls` with `at`, the kernel that ended the longest idle time that they caused, and middle_us: what waits
    in the middle of a step caused."""
    keys = ["gpu", "kind", "name"]
    calls = run.host_calls(where=where).astype({"kind": object, "name": object})
    found = grouping.select(run.stalls, where)
    found = found.assign(middle=found["idle_ns"].where(host.in_the_middle(found), 0) / 1000).astype(
        {"kind": object, "name": object})
    found = found.sort_values("idle_ns", ascending=False, kind="stable")
    extra = found.groupby(keys).agg(at=("at", "first"), middle_us=("middle", "sum")).reset_index()
    return calls.merge(extra.astype({"gpu": calls["gpu"].dtype}), on=keys, how="left").fillna({"middle_us": 0.0})


def _per_step(by_step: pd.DataFrame, n_steps: pd.Series, windows: pd.Series) -> pd.DataFrame:
    """One row per gpu and kind of call: means over the steps, shares of their length (`windows`), the worst step and
    where it is."""
    rows = []
    for (gpu, kind), own in by_step.groupby(["gpu", "kind"]):
        n, worst = max(int(n_steps.get(gpu, 1)), 1), own.loc[own["idle_us"].idxmax()]
        window = float(windows.get(gpu, 0.0))
        rows.append((gpu, kind, own["n"].sum() / n, *(own[c].sum() / n for c in ("time_us", "uncovered_us", "idle_us")),
                     own["uncovered_us"].sum() / window if window else np.nan,
                     own["idle_us"].sum() / window if window else np.nan, worst["step"], worst["idle_us"], worst["at"]))
    names = ["gpu", "kind", "n", "time_us", "uncovered_us", "idle_us", "uncovered_share", "idle_share", "worst",
             "worst_us", "at"]
    return pd.DataFrame(rows, columns=names).sort_values("idle_us", ascending=False, kind="stable", ignore_index=True)


def _pauses_share(kernels: pd.DataFrame) -> float:
    """Share of the time before launch calls that lies in gaps too long for the launch of a kernel."""
    waits = kernels["prep_ns"].astype("float64")
    return float(waits[waits > PAUSE_NS].sum() / waits.sum()) if waits.sum() else 0.0


def _headline(by_gpu: pd.DataFrame, total: float, small: pd.DataFrame, pauses: float) -> str:
    sums = by_gpu.groupby("cause")["idle_us"].sum()
    idle, cause = float(sums.sum()), str(sums.idxmax())
    share = text.share(idle / total) if total else text.DASH
    line = (f"The GPU is idle {share} of the time; {text.share(sums[cause] / idle)} of that is "
            f"{LABELS[cause].lower()}: {PAUSED if cause == 'dispatch' and pauses > 0.5 else REMEDIES[cause]}.")
    n = int(small["n"].sum())
    short = int(small["n_short"].sum())
    if n and short > n / 2:
        line += f" {text.share(short / n)} of {text.count(n, 'kernel')} take less than 10 µs."
    return line


def _key_figures(by_gpu: pd.DataFrame, total: float, small: pd.DataFrame, queues: pd.DataFrame,
                 stalls: pd.DataFrame) -> tuple[KeyFigure, ...]:
    sums = by_gpu.groupby("cause")["idle_us"].sum().sort_values(ascending=False)
    n, time = int(small["n"].sum()), float(small["time_us"].sum())
    busiest = queues.sort_values("n").drop_duplicates(["gpu", "step"], keep="last") if len(queues) else queues
    return (
        KeyFigure("Idle", float(sums.sum()), "us", DEFINITIONS["idle"], color=COLORS["idle"],
                  note=f"{text.share(sums.sum() / total)} of the time" if total else ""),
        *(KeyFigure(LABELS[c], float(v), "us", DEFINITIONS[c], color=COLORS[c],
                    note=f"{text.share(v / sums.sum())} of idle") for c, v in sums.head(3).items()),
        *_data_stall(stalls),
        KeyFigure("Short kernels", small["n_short"].sum() / n if n else None, "share", DEFINITIONS["short"],
                  note=f"{text.share((small['short_time_share'] * small['time_us']).sum() / time)} of kernel time"
                  if time else ""),
        KeyFigure("Queue empty", float(busiest["empty_share"].mean()) if len(busiest) else None, "share",
                  DEFINITIONS["empty"] + " Of each step's busiest stream."),
    )


def _data_stall(stalls: pd.DataFrame) -> tuple[KeyFigure, ...]:
    loading = stalls[(stalls["kind"] == "loader") & stalls["uncovered_share"].notna()]
    if not len(loading):
        return ()
    most = figures.largest(loading, "uncovered_share")
    return (KeyFigure("Data stall", most["uncovered_share"], "share", DEFINITIONS["data_stall"],
                      note=f"GPU {most['gpu']}: {text.duration(most['uncovered_us'])} a step", color=COLORS["loader"]),)


def _stalls(by_step: pd.DataFrame) -> go.Figure:
    """Of each step the GPU that its host kept idle longest, by what the host did."""
    idle = by_step.pivot_table(index=["gpu", "step"], columns="kind", values="idle_us", aggfunc="sum").fillna(0.0)
    worst = idle.sum(axis=1).groupby("step").idxmax()
    shown = idle.loc[list(worst)].reset_index()
    present = [k for k in STALLS if k in idle and (idle[k] > 0).any()]
    unit, divisor = text.time_unit(float(shown[present].sum(axis=1).max()))
    fig = figures.figure(
        "Stalls, step by step",
        "Idle time by the call that caused it, on the GPU that has most of it in each step.",
        height=300,
        barmode="stack",
        legend=[figures.entry(k, DEFINITIONS[k]) for k in present],
    )
    for kind in present:
        fig.add_trace(go.Bar(
            x=shown["step"].astype("int64"), y=shown[kind] / divisor, name=LABELS[kind], showlegend=False,
            marker={"color": COLORS[kind], "line": {"width": 0}},
            hovertext=[f"<b>step {s}</b>, GPU {g}<br>{LABELS[kind]}: {text.duration(v)}<br>measured"
                       for s, g, v in zip(shown["step"], shown["gpu"], shown[kind], strict=True)],
            hovertemplate="%{hovertext}<extra></extra>",
            customdata=[[json.dumps({"step": int(s)})] for s in shown["step"]]))
    fig.update_layout(xaxis=figures.steps_axis(shown["step"]),
                      yaxis={"title": {"text": unit}, "rangemode": "tozero"})
    return fig


def _by_gpu(by_gpu: pd.DataFrame) -> go.Figure:
    table = by_gpu.pivot(index="gpu", columns="cause", values="idle_us").fillna(0.0)
    table = table.loc[table.sum(axis=1).nlargest(figures.MAX_ROWS).index].sort_index()
    unit, divisor = text.time_unit(table.sum(axis=1).max())
    present = [c for c in ORDER if c in table]
    fig = figures.figure(
        "Idle time by cause",
        "What the host did while nothing ran on the GPU; every moment has one cause.",
        height=figures.height_of(len(table)),
        wide=True,
        barmode="stack",
        legend=[figures.entry(c, DEFINITIONS[c]) for c in present],
    )
    for cause in present:
        fig.add_trace(figures.bars(
            cause, range(len(table)), table[cause].tolist(), divisor,
            hover=[f"<b>GPU {g}</b><br>{LABELS[cause]}: {text.duration(v)} of {text.duration(t)} idle<br>measured"
                   for g, v, t in zip(table.index, table[cause], table.sum(axis=1), strict=True)],
            links=[json.dumps({"gpu": int(g)}) for g in table.index]))
    fig.update_layout(xaxis={"title": {"text": unit}}, yaxis=figures.rows_axis([f"GPU {g}" for g in table.index]))
    return fig


def _queues(queues: pd.DataFrame) -> go.Figure:
    """Mean queue of each GPU's busiest stream, step by step."""
    busiest = queues.sort_values("n", kind="stable").drop_duplicates(["gpu", "step"], keep="last")
    fig = figures.figure(
        "Launches waiting, step by step",
        "Mean length of the queue of the busiest stream. Near 0: the GPU runs what it gets at once and then waits.",
        height=300,
        legend=[figures.entry("dispatch", DEFINITIONS["queue"], label="One line per GPU", line=True)],
    )
    for gpu, own in busiest.sort_values("step").groupby("gpu"):
        fig.add_trace(go.Scatter(
            x=own["step"].astype("int64"), y=own["mean_length"].astype(np.float64), mode="lines+markers",
            showlegend=False, name=f"GPU {gpu}", line={"width": 1.4, "color": COLORS["dispatch"]},
            hovertext=[f"<b>GPU {gpu}</b>, step {s}, stream {stream}<br>mean {m:.1f}, at most {h:,}<br>empty "
                       f"{text.share(e)} of the step"
                       for s, stream, m, h, e in zip(own["step"], own["stream"], own["mean_length"],
                                                     own["max_length"], own["empty_share"], strict=True)],
            hovertemplate="%{hovertext}<extra></extra>"))
    fig.update_layout(xaxis=figures.steps_axis(busiest["step"]),
                      yaxis={"title": {"text": "launches"}, "rangemode": "tozero"})
    return fig


def _causes_table(rows: pd.DataFrame, by: list[str]) -> Table:
    groups = tuple(TableColumn(c, c.capitalize() if c != "gpu" else "GPU") for c in by)
    named = rows.assign(cause=[LABELS[c] for c in rows["cause"]])
    return Table(
        "Idle time by " + " and ".join(by) + " and cause",
        (*groups, TableColumn("cause", "Cause", "text"),
         TableColumn("idle_us", "Idle", "us", "Idle time before kernels of the group.", bar=True),
         TableColumn("n", "Gaps", "count", "Gaps with this cause.")),
        named,
        sort="idle_us",
        link={"focus": "operation"} if "operation" in by else {},
    )


def _stalls_table(rows: pd.DataFrame) -> Table:
    return Table(
        "What keeps the GPU waiting in a step",
        (
            TableColumn("gpu", "GPU"),
            TableColumn("kind", "What the host does", "text"),
            TableColumn("n", "Calls a step", "", "Calls that began in a step, mean over the steps."),
            TableColumn("time_us", "Time a step", "us", "Union of the calls, mean over the steps.", bar=True),
            TableColumn("uncovered_us", "Not covered", "us", DEFINITIONS["uncovered"]),
            TableColumn("uncovered_share", "Of the step", "share", DEFINITIONS["uncovered"] + " Of the steps' length."),
            TableColumn("idle_us", "Idle a step", "us", DEFINITIONS["caused"], bar=True),
            TableColumn("idle_share", "Idle of the step", "share", DEFINITIONS["caused"] + " Of the steps' length."),
            TableColumn("worst", "Worst step"),
            TableColumn("worst_us", "Idle there", "us", "Idle time that they caused in that step."),
        ),
        rows.assign(kind=[LABELS.get(k, k) for k in rows["kind"]], n=rows["n"].round(2)),
        sort="idle_us",
        link={"gpu": "gpu"},
        note="A stall of every step is a cause to remove; one of a single step is an outlier (Stragglers tab).",
        at="at",
    )


def _stall_steps_table(by_step: pd.DataFrame) -> Table:
    """One row per gpu and step, a column per kind of call."""
    idle = by_step.pivot_table(index=["gpu", "step"], columns="kind", values="idle_us", aggfunc="sum").fillna(0.0)
    present = [k for k in STALLS if k in idle]
    keys = ["gpu", "step"]
    loading = by_step[by_step["kind"] == "loader"][[*keys, "time_us", "uncovered_share"]]
    longest = by_step.sort_values("idle_us", ascending=False, kind="stable").drop_duplicates(keys)[[*keys, "at"]]
    rows = idle.reset_index().merge(loading, on=keys, how="left").merge(longest, on=keys, how="left")
    return Table(
        "Idle time by step and what the host did",
        (
            TableColumn("gpu", "GPU"),
            TableColumn("step", "Step"),
            *(TableColumn(k, LABELS[k], "us", f"{DEFINITIONS[k]} {DEFINITIONS['caused']}", bar=True) for k in present),
            *((TableColumn("time_us", "Loading", "us", "Union of the step's data loading."),
               TableColumn("uncovered_share", "Data stall", "share",
                           "Loading that no GPU work covers / length of the step.")) if len(loading) else ()),
        ),
        rows,
        sort=max(present, key=lambda k: float(idle[k].sum())),
        link={"step": "step"},
        at="at",
    )


def _calls_table(rows: pd.DataFrame, n_steps: pd.Series, on_gpu: bool = True) -> Table:
    n = rows["gpu"].map(n_steps).fillna(1).clip(lower=1)
    waits = on_gpu and bool((rows["middle_us"] > 0).any())
    return Table(
        "What the host did",
        (
            TableColumn("gpu", "GPU" if on_gpu else "Process"),
            TableColumn("kind", "Kind", "text"),
            TableColumn("name", "Call or scope", "text"),
            TableColumn("n", "Count", "count", "Calls in the selection."),
            TableColumn("time_us", "Time", "us", "Σ duration of the calls.", bar=True),
            TableColumn("step_us", "Time a step", "us", "Σ duration / number of steps."),
            TableColumn("longest_us", "Longest", "us", "Longest call."),
            *((TableColumn("idle_us", "GPU idle meanwhile", "us", DEFINITIONS["call_idle"]),
               TableColumn("caused_us", "Idle caused", "us", DEFINITIONS["caused"], bar=True),
               TableColumn("caused_step_us", "Idle caused a step", "us", DEFINITIONS["caused"])) if on_gpu else ()),
            *((TableColumn("middle_us", "In the middle of steps", "us", DEFINITIONS["middle"]),) if waits else ()),
        ),
        rows.assign(kind=[LABELS.get(k, k) for k in rows["kind"]], step_us=rows["time_us"] / n,
                    caused_step_us=rows["caused_us"] / n),
        sort="caused_us" if on_gpu else "time_us",
        link={"gpu": "gpu"},
        at="at" if on_gpu else "",
    )


PATH_KINDS = {"communication": "Transfer", "memcpy": "Copies", "launch": "Launch", "host": "Host"}


def _path_table(rows: pd.DataFrame) -> Table:
    return Table(
        "Critical path",
        (
            TableColumn("gpu", "GPU"),
            TableColumn("kind", "What", "text", "Compute, transfer of collectives and copies run; launch: from the "
                        "launch call to the kernel's start; host: nothing was launched."),
            TableColumn("time_us", "Time", "us", DEFINITIONS["path"], bar=True),
            TableColumn("share", "Share", "share", "Of the length of the steps."),
            TableColumn("n", "Pieces", "count", "Pieces of the path."),
        ),
        rows.assign(kind=[PATH_KINDS.get(k, LABELS.get(k, k)) for k in rows["kind"]]),
        sort="time_us",
        link={"gpu": "gpu"},
        note="Over all GPUs: what the end of each step waited for, back to its beginning.",
    )


def _kernels_table(rows: pd.DataFrame) -> Table:
    return Table(
        "Number and size of kernels",
        (
            TableColumn("gpu", "GPU"),
            TableColumn("step", "Step"),
            TableColumn("n", "Kernels", "count", "Compute kernels.", bar=True),
            TableColumn("n_calls", "Launch calls", "count", "Kernels of a graph share one."),
            TableColumn("mean_us", "Mean", "us", "Mean duration."),
            TableColumn("short_share", "Short", "share", DEFINITIONS["short"], bar=True),
            TableColumn("short_time_share", "Their time", "share", "Share of the kernel time in short kernels."),
            TableColumn("launch_us", "Launch overhead", "us", "Preparation + call, see the Launch tab."),
        ),
        rows,
        sort="launch_us",
        link={"step": "step"},
    )


def _queues_table(rows: pd.DataFrame) -> Table:
    return Table(
        "Queues",
        (
            TableColumn("gpu", "GPU"),
            TableColumn("stream", "Stream"),
            TableColumn("step", "Step"),
            TableColumn("n", "Kernels", "count", "Kernels launched in the step into this stream."),
            TableColumn("mean_length", "Mean waiting", "", DEFINITIONS["queue"]),
            TableColumn("max_length", "Most waiting", "count", "Longest queue."),
            TableColumn("empty_share", "Empty", "share", DEFINITIONS["empty"], bar=True),
        ),
        rows,
        sort="n",
        link={"step": "step"},
    )
