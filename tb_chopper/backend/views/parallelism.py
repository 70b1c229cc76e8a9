"""Parallelism: the schedule of a pipeline and its bubbles; what tensor, context and expert parallelism exchange."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pandas as pd

from tb_chopper.backend.metrics import grouping
from tb_chopper.backend.metrics import pipeline as pipelines
from tb_chopper.backend.views import context, parallelism_exchanges, pipeline_figures, text
from tb_chopper.backend.views.palette import COLORS
from tb_chopper.backend.views.view import KeyFigure, Missing, Selection, Table, TableColumn, View

if TYPE_CHECKING:
    from tb_chopper.backend.run import Run

DEFINITIONS = {
    "schedule": "Recognised by the order of the actions on every rank: GPipe runs all forwards first, 1F1B one forward "
    "and one backward in turn, interleaved has several stages per rank, zero bubble computes the gradients of the "
    "weights apart.",
    "bubble": "Time between the actions of a rank, from the first start to the last end of any action of the pipeline. "
    "Kernels that wait for a message count as bubble, gaps between the kernels of an action do not.",
    "theory": "(p − 1) / (v m + p − 1): p ranks, m microbatches, v stages per rank, all equal, messages that cost "
    "nothing; none for zero bubble.",
    "excess": "Length of a step of the schedule − that of the perfect schedule with the same mean work per rank.",
    "imbalance": "What unequal stages cost: the actions played again in their order without delays, with the mean "
    "durations of each stage and with those of all stages.",
    "variation": "What unequal microbatches cost: the same with their own durations and with the mean ones of each "
    "stage.",
    "transfer": "What messages and the host cost: length − that of the same actions played again, each as soon as its "
    "inputs are computed.",
    "fill": "Bubble before the rank's first backward.",
    "steady": "Bubble between the rank's first backward and its last forward.",
    "drain": "Bubble after the rank's last forward.",
    "slower": "Time per microbatch over the mean of the stages.",
}
COMMAND = "torch_ext.annotate_pipeline(schedule)  # on every rank, before the first step"
NO_ACTIONS = Missing(
    "Schedule and bubbles of the pipeline",
    "Ranks send messages to each other as a pipeline does, and no scope tells which stage works on which microbatch.",
    COMMAND,
)
NO_STEPS = Missing(
    "Schedule and bubbles of the pipeline",
    "The actions of the schedule lie outside every training step.",
    "call profiler.step() after each step of the training",
)
OTHER_STAGES = Missing(
    "The whole pipeline",
    "Some stages of the pipeline, or some of their microbatches, are not here: bubbles are at least what is shown, and "
    "what makes the schedule longer than its theory cannot be told.",
    "chopper_trace_handler on every rank, all writing to one directory",
)


def view(run: Run, selection: Selection) -> View:
    """The pipeline of the run, of one step; selected GPUs choose the pipeline and the rows of tables. Below it what is
    exchanged inside the layers."""
    if context.nothing_to_show(run):
        return View("No GPU ran anything here.", missing=(context.NO_KERNELS,))
    done = _chosen(run, selection)
    if not len(done):
        headline = parallelism_exchanges.headline(run, selection) or _without(run, selection)
        return _with_exchanges(View(headline, missing=_missing(run)), run, selection)
    return _with_exchanges(_pipeline(run, selection, done), run, selection)


def _with_exchanges(shown: View, run: Run, selection: Selection) -> View:
    key_figures, drawn, tables, missing = parallelism_exchanges.sections(run, selection)
    return replace(shown, key_figures=(*shown.key_figures, *key_figures), figures={**shown.figures, **drawn},
                   tables={**shown.tables, **tables}, missing=(*shown.missing, *missing))


def _chosen(run: Run, selection: Selection) -> pd.DataFrame:
    """The actions of the steps and of the pipelines that the selection asks for, with all their ranks."""
    where = {k: v for k, v in selection.where().items() if k in ("gpu", "step")}
    mine = run.pipeline_actions(where)["pipeline"].unique()
    where.pop("gpu", None)
    return run.pipeline_actions({**where, "pipeline": list(mine)})


def _without(run: Run, selection: Selection) -> str:
    if len(run.pipeline_actions()):
        return "No pipeline runs in the selected GPUs and steps."
    if len(run.workers.drop_duplicates("gpu")) == 1:
        return f"One {context.device(run)} alone is here: it shares a model with no other."
    if _has_pipeline(run):
        return "A pipeline runs here, and no scope tells what its stages do."
    if (run.process_groups()["role"] == "unknown").any():
        return "No pipeline runs here."
    them = "processes" if context.is_cpu_only(run) else "GPUs"
    return f"The {them} share no layers: no pipeline, and no tensor, context or expert parallelism."


def _has_pipeline(run: Run) -> bool:
    told = {p.get("pp", 1) for p in run._told_to_handler("parallel").values()}
    return bool((run.process_groups()["role"] == "pipeline").any()) or max(told, default=1) > 1


def _missing(run: Run) -> tuple[Missing, ...]:
    if len(run.pipeline_actions()):
        return ()
    if len(run.actions):
        return (NO_STEPS,)
    return (NO_ACTIONS,) if _has_pipeline(run) else ()


def _pipeline(run: Run, selection: Selection, done: pd.DataFrame) -> View:
    noun = context.device(run)
    first = done[done["pipeline"] == done["pipeline"].iloc[0]]
    step = _middle(first)
    drawn = first[first["step"] == step]
    steps = done["step"].unique()
    cost = _cost(grouping.select(run.pipeline_what_if, {
        "pipeline": list(done["pipeline"].unique()), "step": list(steps)}))
    rows = _per_step(pipelines.pipeline(done, ["pipeline", "position", "gpu"]), len(steps))
    rows = rows.assign(at=rows["gpu"].map(run.behind_bubbles({"step": list(steps)})))
    listed = rows[rows["gpu"].isin(selection.gpus)] if selection.gpus else rows
    stages = pipelines.stages(done)
    theory = float((rows["busy_us"] + rows["gaps_us"] + rows["theory_us"]).mean())
    same = rows[rows["pipeline"] == first["pipeline"].iloc[0]]
    return View(
        _headline(rows, cost, stages, noun),
        key_figures=_key_figures(rows, cost, stages, noun),
        figures={"pipeline": pipeline_figures.schedule(drawn, pipelines.bubbles(drawn), noun, _which(rows, first)),
                 "times": pipeline_figures.times(same, theory, noun)},
        tables={"ranks": _ranks_table(listed, noun), "stages": _stages_table(stages), "steps": _steps_table(cost)},
        definitions={"Bubble": DEFINITIONS["bubble"], "Theory": DEFINITIONS["theory"],
                     "Schedule": DEFINITIONS["schedule"]},
        missing=() if cost["complete"].all() else (OTHER_STAGES,),
    )


def _which(rows: pd.DataFrame, first: pd.DataFrame) -> str:
    """`, pipeline 0` where there are several."""
    return f", pipeline {first['pipeline'].iloc[0]}" if rows["pipeline"].nunique() > 1 else ""


def _middle(done: pd.DataFrame) -> int:
    """The middle one of the steps."""
    steps = sorted(done["step"].unique())
    return int(steps[len(steps) // 2])


def _per_step(rows: pd.DataFrame, n_steps: int) -> pd.DataFrame:
    """Sums over steps as times of a mean step."""
    times = [c for c in rows.columns if c.endswith("_us")]
    return rows.assign(**{c: rows[c] / n_steps for c in times})


def _cost(passes: pd.DataFrame) -> pd.DataFrame:
    """One row per step and pipeline: its passes (gradient accumulation) together."""
    sums = [c for c in passes.columns if c.endswith("_us")]
    grouped = passes.groupby(["pipeline", "step"])
    out = grouped[sums].sum(min_count=1).join(grouped.agg(
        schedule=("schedule", "first"), n_ranks=("n_ranks", "first"), virtual_stages=("virtual_stages", "first"),
        microbatches=("microbatches", "first"), passes=("turn", "size"), complete=("complete", "all")))
    return out.assign(excess_us=out["total_us"] - out["theory_us"]).reset_index()


def _headline(rows: pd.DataFrame, cost: pd.DataFrame, stages: pd.DataFrame, noun: str) -> str:
    shape = cost.iloc[0]
    share = rows["bubble_us"].sum() / rows["total_us"].sum()
    ranks = context.devices(int(shape["n_ranks"]), noun != "GPU")
    pipes, m = int(rows["pipeline"].nunique()), int(shape["microbatches"])
    several = f" ({text.count(pipes, 'pipeline')})" if pipes > 1 else ""
    line = (f"{_name(shape['schedule'])} over {ranks}{several}, {m} microbatch{'es' if m > 1 else ''}: "
            f"{text.share(share)} of the time is bubble")
    if not cost["complete"].all():
        line += ", of the stages that are here"
    if shape["schedule"] == pipelines.UNKNOWN:
        return f"{line}."
    line += f"; a perfect schedule would have {text.share(_theory_share(rows))}."
    if not cost["complete"].all():
        return line
    worst = {"unequal stages": cost["imbalance_us"].mean(), "unequal microbatches": cost["variation_us"].mean(),
             "messages and launches": cost["transfer_excess_us"].mean()}
    cause = max(worst, key=lambda c: worst[c])
    excess, total = cost["excess_us"].mean(), cost["total_us"].mean()
    if excess < 0.02 * total:
        return f"{line} The schedule runs as well as it can."
    slow = stages.loc[stages["slower"].idxmax()]
    which = f", stage {int(slow['stage'])} is the slowest" if cause == "unequal stages" else ""
    return f"{line} {text.duration(excess)} of a step are above that, mostly by {cause}{which}."


def _name(schedule: str) -> str:
    return {pipelines.INTERLEAVED: "Interleaved 1F1B", pipelines.ZERO_BUBBLE: "Zero bubble",
            pipelines.UNKNOWN: "An unknown schedule"}.get(schedule, schedule)


def _theory_share(rows: pd.DataFrame) -> float:
    ideal = (rows["busy_us"] + rows["gaps_us"] + rows["theory_us"]).sum()
    return float(rows["theory_us"].sum(min_count=1) / ideal)


def _key_figures(rows: pd.DataFrame, cost: pd.DataFrame, stages: pd.DataFrame, noun: str) -> tuple[KeyFigure, ...]:
    shape = cost.iloc[0]
    m = int(shape["microbatches"])
    per_rank = f" · {text.count(int(shape['virtual_stages']), 'stage')} per rank"
    slow = stages.loc[stages["slower"].idxmax()]
    theory = _theory_share(rows)
    known, whole = theory == theory, bool(cost["complete"].all())
    above = whole and known

    def extra(label: str, column: str, definition: str, told: bool, color: str = "") -> KeyFigure:
        return KeyFigure(label, cost[column].mean() if told else None, "us", definition,
                         "estimated" if told else "unavailable", color=color)

    return (
        KeyFigure("Schedule", _name(shape["schedule"]), "text", DEFINITIONS["schedule"],
                  note=f"{m} microbatch{'es' if m > 1 else ''}{per_rank}"),
        KeyFigure("Bubble", rows["bubble_us"].sum() / rows["total_us"].sum(), "share", DEFINITIONS["bubble"],
                  note=f"{text.duration(rows['bubble_us'].mean())} per step and {noun}", color=COLORS["bubble"]),
        KeyFigure("Perfect schedule", theory if known else None, "share", DEFINITIONS["theory"],
                  "estimated" if known else "unavailable"),
        extra("Above it, per step", "excess_us", DEFINITIONS["excess"], above),
        extra("By unequal stages", "imbalance_us", DEFINITIONS["imbalance"], whole),
        extra("By messages, launches", "transfer_excess_us", DEFINITIONS["transfer"], whole, COLORS["message"]),
        KeyFigure("Slowest stage", slow["slower"], "share", DEFINITIONS["slower"],
                  note=f"stage {int(slow['stage'])}, above the mean"),
    )


# ---- tables ----------------------------------------------------------------------------------------------------------


def _ranks_table(rows: pd.DataFrame, noun: str) -> Table:
    parts = pipeline_figures.DEFINITIONS
    return Table(
        "Ranks: a mean step",
        (
            TableColumn("gpu", noun),
            *((TableColumn("pipeline", "Pipeline", "", "Of several with the same stages, from 0."),)
              if rows["pipeline"].nunique() > 1 else ()),
            TableColumn("stages", "Stages", "text"),
            TableColumn("bubble_share", "Bubble", "share", DEFINITIONS["bubble"], bar=True),
            TableColumn("bubble_us", "Bubble", "us", DEFINITIONS["bubble"]),
            TableColumn("fill_us", "Fill", "us", DEFINITIONS["fill"]),
            TableColumn("steady_us", "Steady", "us", DEFINITIONS["steady"]),
            TableColumn("drain_us", "Drain", "us", DEFINITIONS["drain"]),
            TableColumn("theory_us", "Theory", "us", DEFINITIONS["theory"]),
            TableColumn("excess_us", "Above it", "us", "Bubble − the theory's."),
            TableColumn("wait_previous_us", "For previous stage", "us", parts["wait_previous"]),
            TableColumn("wait_next_us", "For next stage", "us", parts["wait_next"]),
            TableColumn("message_us", "Message, launch", "us", parts["message"]),
            TableColumn("own_us", "For no stage", "us", parts["own"]),
            TableColumn("end_us", "Done", "us", parts["end"]),
            TableColumn("busy_us", "Busy", "us", parts["busy"]),
            TableColumn("gaps_us", "Launch gaps", "us", parts["gaps"]),
        ),
        rows.reset_index(drop=True),
        link={"gpu": "gpu"},
        at="at",
    )


def _stages_table(rows: pd.DataFrame) -> Table:
    return Table(
        "Stages: a mean microbatch",
        (
            TableColumn("stage", "Stage"),
            TableColumn("where", "On", "text"),
            TableColumn("microbatch_us", "Microbatch", "us", "Forward and backward of one microbatch, first to last "
                        "kernel of each.", bar=True),
            TableColumn("slower", "Above the mean", "share", DEFINITIONS["slower"]),
            TableColumn("forward_us", "Forward", "us", "Forward of one microbatch."),
            TableColumn("backward_us", "Backward", "us", "Backward of one microbatch, gradients of weights included."),
        ),
        rows.assign(where=[", ".join(map(str, g)) for g in rows["gpus"]]),
    )


def _steps_table(rows: pd.DataFrame) -> Table:
    return Table(
        "Steps of the schedule",
        (
            TableColumn("step", "Step"),
            *((TableColumn("pipeline", "Pipeline"),) if rows["pipeline"].nunique() > 1 else ()),
            *((TableColumn("passes", "Passes", "count", "Calls of the schedule in the step: gradient accumulation."),)
              if (rows["passes"] > 1).any() else ()),
            TableColumn("total_us", "Length", "us", "First start to last end of any action.", bar=True),
            TableColumn("theory_us", "Perfect schedule", "us", DEFINITIONS["theory"]),
            TableColumn("excess_us", "Above it", "us", DEFINITIONS["excess"]),
            TableColumn("imbalance_us", "Unequal stages", "us", DEFINITIONS["imbalance"]),
            TableColumn("variation_us", "Unequal microbatches", "us", DEFINITIONS["variation"]),
            TableColumn("transfer_excess_us", "Messages, launches", "us", DEFINITIONS["transfer"]),
        ),
        rows,
        link={"step": "step"},
    )
