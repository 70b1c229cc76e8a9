"""A run: every metric, the diagnosis and every view of its tables."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from tb_chopper.backend import logdir, rules, workers
from tb_chopper.backend.alignment import ranks
from tb_chopper.backend.capture import Progress
from tb_chopper.backend.errors import NotFound
from tb_chopper.backend.findings import Finding, by_severity
from tb_chopper.backend.lazy import lazy
from tb_chopper.backend.metrics import (
    breakdown,
    collectives,
    contention,
    counter_ratios,
    cpu,
    critical_path,
    efficiency,
    exchanges,
    frequency,
    fusion,
    graph_breaks,
    grouping,
    host,
    launch,
    memory,
    model_state,
    overlap,
    pipeline,
    power,
    precision,
    process_groups,
    roofline,
    stragglers,
    throughput,
    timeline,
    topology,
)
from tb_chopper.backend.metrics.grouping import By, Where
from tb_chopper.backend.metrics.stragglers import Gain
from tb_chopper.backend.readers.log_times import TimeBase
from tb_chopper.backend.run_tables import RunTables

if TYPE_CHECKING:
    from tb_chopper.backend.views.view import View

Roles = Mapping[str, str] | None
"""Process group, by name or description, to what it is for."""


def open_run(path: str | Path, *, communication: Sequence[str] = (), telemetry: Sequence[str | Path] = (),
             time_base: TimeBase | None = None, hardware: Mapping[str, float] | None = None,
             progress: Progress | None = None) -> Run:
    """The run in a directory, or one trace file as a run of its own; `path` may be an fsspec URL.

    Nothing is read before it is asked for. `communication`: regular expressions of communication kernels beyond
    the known ones. `telemetry`: logs of amd-smi, rocm-smi, nvidia-smi or dmon beside those in the run's directory;
    `time_base`: what is known of their times, where they do not tell. `hardware`: peaks and clock of the GPUs where
    the peak table does not know them or has others; keys of hardware.OVERRIDES, as in
    `hardware={"peak_tflops": 1307.4, "f_peak_mhz": 2100}`. Raises NotFound where there is no trace, or
    more than one run: then the message lists them.
    """
    runs = logdir.find_runs(path)
    if not runs:
        raise NotFound(logdir.why_no_run(path))
    if len(runs) > 1:
        raise NotFound(f"{path} holds {len(runs)} runs; open one of them: {', '.join(r.name for r in runs)}")
    return Run(runs[0], communication, progress, telemetry, time_base, hardware)


class Run(RunTables):
    """One run: its tables, every metric of them, the diagnosis and the views."""

    # -- what to know of it ------------------------------------------------------------------------------------------

    @lazy
    def findings(self) -> list[Finding]:
        """What is to be known about the data of this run, the worst first."""
        captures, failed = self._load()
        return by_severity([*failed, *(f for c in captures for f in c.findings), *workers.findings(self.workers),
                            *overlap.findings(self.kernels),
                            *self._comparable[1], *collectives.findings(*self._arrived()),
                            *self._snapshots[1], *self.topology.findings, *self.telemetry.findings])

    @lazy
    def counter_findings(self) -> list[Finding]:
        """What is to be known about counters and how they fit the trace. Not among `findings`: those must not cost
        the reading of the counters."""
        if not len(self.counters.counters):
            return by_severity(self.counters.findings)
        return by_severity([*self.counters.findings, *self.counter_alignment.findings])

    @lazy
    def diagnosis(self) -> list[Finding]:
        """What costs time in this training and what to do about it, the largest gain first (docs/diagnosis.md)."""
        return rules.diagnose(self)

    # -- where the time goes: definitions of all metrics in docs/metrics.md ------------------------------------------

    def timeline(self, by: By = "gpu", where: Where = None) -> pd.DataFrame:
        """Compute, exposed communication, exposed copies and idle; see metrics.timeline.timeline."""
        return timeline.timeline(self.kernels, self.steps, by, where)

    def exclusive(self, by_step: bool = True) -> pd.DataFrame:
        """Every ns of every step given to one phase and class; see metrics.timeline.exclusive."""
        return timeline.exclusive(self.kernels, self.steps, by_step)

    def overlap(self, by: By = "operation", where: Where = None) -> pd.DataFrame:
        """Overlap of operations with communication; see metrics.overlap.overlap."""
        return overlap.overlap(self.kernels, by, where)

    def hidden_communication(self, by: By = "gpu", where: Where = None) -> pd.DataFrame:
        """Share of communication hidden under computation; see metrics.overlap.hidden_communication."""
        return overlap.hidden_communication(self.kernels, by, where)

    def launch_overhead(self, by: By = "operation", where: Where = None, scope: str = "across") -> pd.DataFrame:
        """Preparation and call overhead of launches; see metrics.launch.launch_overhead."""
        return launch.launch_overhead(self.kernels, by, where, scope)

    def throughput(self) -> pd.DataFrame:
        """Iteration time, tokens/s and steps/s per GPU and of the run; see metrics.throughput.throughput."""
        return throughput.throughput(self.steps, self._told_to_handler("tokens_per_step"))

    # -- clocks, power and the host's cores --------------------------------------------------------------------------

    def frequency(self, by: By = "operation", where: Where = None) -> pd.DataFrame:
        """Clock, power, energy and time lost to the clock; see metrics.frequency.frequency."""
        return frequency.frequency(self.clocked_kernels, self.steps, self.telemetry.samples, by, where, self.f_peak_mhz)

    def power(self, by: By = "gpu", where: Where = None) -> pd.DataFrame:
        """Mean power and energy; see metrics.power.power."""
        return power.power(self.kernels, self.steps, self.telemetry.samples, by, where)

    def step_energy(self) -> pd.DataFrame:
        """Energy of each step, and per token where the handler was told tokens; see metrics.power.step_energy."""
        return power.step_energy(self.kernels, self.steps, self.telemetry.samples,
                                 self._told_to_handler("tokens_per_step"))

    def cpu_utilization(self) -> pd.DataFrame:
        """Active cores against the lower bound, one row per sample; see metrics.cpu.cpu_utilization."""
        return cpu.cpu_utilization(self.telemetry.cpu, self.telemetry.cores)

    # -- efficiency --------------------------------------------------------------------------------------------------

    def overhead_breakdown(self, by: By = "operation", where: Where = None,
                           overlap_method: breakdown.Method = "auto") -> pd.DataFrame:
        """From theoretical to actual time, factor by factor; see metrics.breakdown.overhead_breakdown."""
        return breakdown.overhead_breakdown(self.clocked_kernels, self.counters.counters, self.counter_alignment.pairs,
                                            self.hardware, by, where, overlap_method)

    def counter_ratios(self, by: By = "operation", where: Where = None) -> pd.DataFrame:
        """Utilizations from hardware counters; see metrics.counter_ratios.counter_ratios."""
        return counter_ratios.counter_ratios(self.kernels, self.counters.counters, self.counters.agents,
                                             self.counter_alignment.pairs, by, where)

    def roofline(self, by: By = "operation", where: Where = None) -> pd.DataFrame:
        """FLOP/s and FLOPs per byte against the peaks; see metrics.roofline.roofline."""
        return roofline.roofline(self.clocked_kernels, self.hardware, by, where)

    def efficiency(self, by: By = "gpu", where: Where = None) -> pd.DataFrame:
        """Utilization, SM efficiency, occupancy, MFU and HFU side by side; see metrics.efficiency.efficiency."""
        return efficiency.efficiency(self.kernels, self.steps, self.hardware, by, where,
                                     self._told_to_handler("model_flops_per_step"))

    def precision(self, by: By = ("op_type", "dtype"), where: Where = None) -> pd.DataFrame:
        """Data types in which GEMMs and attention run; see metrics.precision.precision."""
        return precision.precision(self.kernels, self.hardware, by, where)

    @lazy
    def chains(self) -> pd.DataFrame:
        """Runs of memory-bound kernels that could be one kernel each; see metrics.fusion.chains."""
        return fusion.chains(self.kernels, self.hardware)

    def fusion(self, by: By = ("pattern",), where: Where = None) -> pd.DataFrame:
        """`chains` by group, with the time that fusing them would save; see metrics.fusion.candidates."""
        windows = {k: v for k, v in (where or {}).items() if k in grouping.WINDOW_COLUMNS}
        return fusion.candidates(self.chains, fusion.windows_of(grouping.select(self.kernels, windows)), by, where)

    def fused(self, by: By = ("how",), where: Where = None) -> pd.DataFrame:
        """Kernels that are fused already; see metrics.fusion.fused."""
        return fusion.fused(self.kernels, by, where)

    def graph_breaks(self, by: By = ("gpu", "step"), where: Where = None) -> pd.DataFrame:
        """Regions of torch.compile, their graph breaks and what they cost; see metrics.graph_breaks.graph_breaks."""
        return graph_breaks.graph_breaks(self.compiled, self.kernels, by, where)

    def eager_in_breaks(self, by: By = ("place", "operation"), where: Where = None) -> pd.DataFrame:
        """What runs eagerly between compiled graphs; see metrics.graph_breaks.eager."""
        return graph_breaks.eager(self.compiled, self.kernels, by, where)

    def with_hardware(self, override: Mapping[str, float]) -> Run:
        """This run with other peaks (keys of hardware.OVERRIDES); what was read is shared."""
        _ = self.clocked_kernels, self.counter_alignment
        other = copy.copy(self)
        other._override = {**(self._override or {}), **override}
        for name in ("hardware", "f_peak_mhz", "chains"):
            other.__dict__.pop(name, None)
        return other

    # -- many GPUs ---------------------------------------------------------------------------------------------------

    def arrivals(self, where: Where = None, correct_clocks: bool = True) -> pd.DataFrame:
        """One row per collective and GPU: when it arrived, how long it waited; see metrics.collectives.arrivals."""
        return grouping.select(self._arrived(correct_clocks)[0], where)

    def collectives(self, by: By | None = None, where: Where = None, roles: Roles = None,
                    correct_clocks: bool = True) -> pd.DataFrame:
        """Waiting, transfer and bandwidth of collectives across ranks; see metrics.collectives.collectives.

        `roles`: of process groups, where those inferred are wrong. `correct_clocks=False`: hosts keep their clocks.
        """
        return collectives.collectives(self._arrived(correct_clocks)[0], by, where, self._roles(roles),
                                       self.link_bytes_per_s)

    def exchanges(self, by: By = ("role", "layer"), where: Where = None, roles: Roles = None) -> pd.DataFrame:
        """What parallelism exchanges inside the layers, and what that costs them; see metrics.exchanges.exchanges."""
        return exchanges.exchanges(self._arrived()[0], self.collectives(roles=roles), self._comparable_kernels,
                                   self._comparable_steps, by, where)

    def process_groups(self, roles: Roles = None) -> pd.DataFrame:
        """What each process group is for; see metrics.process_groups.process_groups."""
        return self._process_groups.copy() if roles is None else process_groups.process_groups(self._matched[0], roles)

    @lazy
    def _process_groups(self) -> pd.DataFrame:
        return process_groups.process_groups(self._matched[0], None)

    def group_islands(self, roles: Roles = None) -> pd.DataFrame:
        """Which process groups span islands or hosts, and how fast they are there; see metrics.topology.group_islands.
        """
        return topology.group_islands(self._arrived()[0], self.collectives(roles=roles), self.process_groups(roles),
                                      self.topology.islands, self._hosts(), self.link_bytes_per_s,
                                      self.own_times["step"].unique(), self.contention)

    @lazy
    def contention(self) -> float:
        """Share of the time beside communication that computation loses; see metrics.contention.contention."""
        return contention.contention(self._comparable_kernels)

    def gradient_barrier(self, roles: Roles = None) -> pd.DataFrame:
        """The last reduction of gradients of each step; see metrics.collectives.gradient_barrier."""
        return collectives.gradient_barrier(self._arrived()[0], self.kernels, self._roles(roles))

    @property
    def clock_offsets(self) -> pd.DataFrame:
        """The clocks of the hosts against the first one's; see alignment.ranks.Matched."""
        return self._arrived()[1].clocks

    def _offsets_ns(self) -> dict[int, int]:
        """How far the clock of each gpu's host runs ahead of the first host's."""
        clocks = self.clock_offsets
        return {int(gpu): round(us * 1000) for gpus, us in zip(clocks["gpus"], clocks["offset_us"], strict=True)
                for gpu in gpus}

    def _arrived(self, correct_clocks: bool = True) -> tuple[pd.DataFrame, ranks.Matched]:
        return self._matched if correct_clocks else self._matched_as_told

    @lazy
    def _matched(self) -> tuple[pd.DataFrame, ranks.Matched]:
        return collectives.arrivals(self._comparable_kernels, self._hosts(), self._members())

    @lazy
    def _matched_as_told(self) -> tuple[pd.DataFrame, ranks.Matched]:
        return collectives.arrivals(self._comparable_kernels, self._hosts(), self._members(), correct_clocks=False)

    def _roles(self, given: Roles) -> dict[str, str]:
        groups = self.process_groups(given)
        return dict(zip(groups["group"], groups["role"], strict=True))

    # -- pipelines ---------------------------------------------------------------------------------------------------

    @lazy
    def _pipelined(self) -> pd.DataFrame:
        ranks = {p.get("pp") for p in self._told_to_handler("parallel").values()}
        steps, world = self._comparable_steps, self.workers["world_size"].max()
        cut = steps.loc[~steps["complete"], "step"].unique()
        actions = grouping.select(self.actions, {"capture": self._comparable[0]})
        whole = actions[~actions["step"].isin(cut)]
        here = pd.isna(world) or self.workers["gpu"].nunique() >= int(world)
        return pipeline.actions(whole if len(whole) else actions, self._offsets_ns(), self._members(),
                                ranks.pop() if len(ranks) == 1 else None, bool(here),
                                self.kernels.loc[self.kernels["peer"] >= 0, ["gpu", "peer"]].drop_duplicates())

    def pipeline_actions(self, where: Where = None) -> pd.DataFrame:
        """What each stage of a pipeline did with each microbatch; see metrics.pipeline.actions."""
        return grouping.select(self._pipelined, where)

    def pipeline(self, by: By = ("gpu", "step"), where: Where = None) -> pd.DataFrame:
        """Bubbles of the pipeline, and what they would be at best; see metrics.pipeline.pipeline."""
        return pipeline.pipeline(self._pipelined, by, where)

    def pipeline_bubbles(self, where: Where = None) -> pd.DataFrame:
        """Every bubble: when, where, and who is waited for; see metrics.pipeline.bubbles."""
        return grouping.select(pipeline.bubbles(self._pipelined), where)

    def behind_bubbles(self, where: Where = None) -> dict[int, str]:
        """By gpu: the kernel that its largest bubble ends with; see metrics.pipeline.behind_largest."""
        return pipeline.behind_largest(self.pipeline_bubbles(where), self._offsets_ns())

    def pipeline_stages(self) -> pd.DataFrame:
        """How long each stage takes for a microbatch; see metrics.pipeline.stages."""
        return pipeline.stages(self._pipelined)

    @lazy
    def pipeline_what_if(self) -> pd.DataFrame:
        """What makes the pipeline longer than its theory; see metrics.pipeline.what_if."""
        return pipeline.what_if(self._pipelined)

    # -- who holds the others up -------------------------------------------------------------------------------------

    def stragglers(self) -> pd.DataFrame:
        """Which GPU the others wait for, how much that costs and why; see metrics.stragglers.stragglers."""
        return stragglers.stragglers(self._arrived()[0], self.leads, self.what_if(), self.imbalance())

    @lazy
    def leads(self) -> pd.DataFrame:
        """How far each GPU is ahead of the last one, kernel by kernel; see metrics.stragglers.leads."""
        return stragglers.leads(self._comparable_kernels, self._offsets_ns())

    def step_leads(self) -> pd.DataFrame:
        """Lead summed per GPU and step, beside its time; see metrics.stragglers.step_leads."""
        return stragglers.step_leads(self.leads, self._comparable_steps)

    @lazy
    def own_times(self) -> pd.DataFrame:
        """Time of each GPU's steps, with and without waiting for others; see metrics.stragglers.own_times."""
        return stragglers.own_times(self._arrived()[0], self._comparable_steps)

    def what_if(self) -> pd.DataFrame:
        """The step time if a GPU, or all, were as fast as the median; see metrics.stragglers.what_if."""
        return stragglers.what_if(self.own_times, self.imbalance(), self._remaining_wait_us)

    def gain(self, gpus: Sequence[int]) -> Gain:
        """What a step would gain if these GPUs were as fast as the median of the others; see metrics.stragglers.gain.
        """
        return stragglers.gain(self.own_times, self.imbalance(), gpus, self._remaining_wait_us)

    @lazy
    def _remaining_wait_us(self) -> float:
        return stragglers.remaining_wait(self._comparable_kernels, self.own_times, self.imbalance())

    def imbalance(self) -> pd.DataFrame:
        """Compute, clock, power and temperature of the GPUs side by side; see metrics.stragglers.imbalance."""
        return self._imbalance.copy()

    @lazy
    def _imbalance(self) -> pd.DataFrame:
        kernels = grouping.select(self.clocked_kernels, {"capture": self._comparable[0]})
        return stragglers.imbalance(kernels, self._comparable_steps, self.leads, self.telemetry.samples)

    def outlier_steps(self) -> pd.DataFrame:
        """Steps that took much longer than the others, and what in them grew; see metrics.stragglers.outlier_steps."""
        return stragglers.outlier_steps(self._comparable_kernels, self._comparable_steps, self.own_times)

    @lazy
    def critical_path(self) -> pd.DataFrame:
        """What the end of each step waited for, back to its beginning; see metrics.critical_path.critical_path."""
        return critical_path.critical_path(self._comparable_kernels, self._comparable_steps, self._arrived()[0],
                                           self._offsets_ns())

    def path_shares(self, by: By = "kind", where: Where = None) -> pd.DataFrame:
        """The critical path by kind, gpu, operation, ...; see metrics.critical_path.path_shares."""
        return critical_path.path_shares(self.critical_path, by, where)

    # -- memory ------------------------------------------------------------------------------------------------------

    def memory(self) -> pd.DataFrame:
        """Peak, floor, growth, fragmentation and headroom of each GPU's memory; see metrics.memory.memory."""
        return self._memory

    @lazy
    def _memory(self) -> pd.DataFrame:
        return memory.memory(self.memory_events, self.kernels, self._memory_of_devices(), self._samples_near,
                             self.steps, self._stages())

    def _stages(self) -> dict[int, int]:
        """The stage of a pipeline that each gpu has first, by its actions, else by its place in its largest group."""
        if len(self._pipelined):
            return dict(zip(self._pipelined["gpu"], self._pipelined["position"], strict=True))
        groups = self.process_groups()
        pipelines = groups[groups["role"] == "pipeline"].sort_values("size", kind="stable")
        return {gpu: place for gpus in pipelines["gpus"] for place, gpu in enumerate(gpus)}

    def step_memory(self) -> pd.DataFrame:
        """Lowest and highest level of memory in each step; see metrics.memory.step_memory."""
        return memory.step_memory(self.memory_events)

    def used_memory(self) -> pd.DataFrame:
        """Used memory of the GPUs as the driver counts, sample by sample; see metrics.memory.used_samples."""
        return memory.used_samples(self._samples_near, self.steps)

    def model_state(self) -> pd.DataFrame:
        """Parameters, gradients and optimizer states that each GPU should hold; see metrics.model_state.model_state."""
        gpu = self.workers.drop_duplicates("file").set_index("file")["gpu"]
        modules = {int(gpu[c.file.path.name]): c.sidecar["modules"] for c in self.captures if c.sidecar.get("modules")}
        plans = self._told_to_handler("parallel")
        alone = {"dp": 1} if (self.workers["world_size"].fillna(len(modules)) == 1).all() else {}
        inferred = model_state.plan_of_groups(self.process_groups()) if modules and not plans else {}
        plans = plans or dict.fromkeys(modules, inferred or alone)
        return model_state.model_state(modules, plans, self.kernels, self.memory(),
                                       memory.activations(self.memory_events, self.kernels),
                                       self._memory_of_devices(), bool(inferred))

    # -- the host ----------------------------------------------------------------------------------------------------

    def queue_length(self) -> pd.DataFrame:
        """Launches waiting in each stream over time; see metrics.host.queue_length."""
        return host.queue_length(self.kernels)

    def queues(self) -> pd.DataFrame:
        """How full each stream's queue was, by step; see metrics.host.queues."""
        return host.queues(self.kernels, self.steps)

    def launches(self, by: By = ("gpu", "step"), where: Where = None) -> pd.DataFrame:
        """Number and size of kernels, the share of short ones; see metrics.host.launches."""
        return host.launches(self.kernels, by, where)

    @lazy
    def stalls(self) -> pd.DataFrame:
        """Every call that kept its GPU idle, for how long, and what came after; see metrics.host.stalls."""
        return host.stalls(self.kernels, self.calls)

    def step_stalls(self) -> pd.DataFrame:
        """Data loading, waits, allocations and collections of garbage in each step; see metrics.host.step_stalls."""
        return host.step_stalls(self.kernels, self.steps, self.calls, self.stalls)

    def host_calls(self, by: By = ("gpu", "kind", "name"), where: Where = None) -> pd.DataFrame:
        """Waits, allocations, loading, compilation and collection of garbage; see metrics.host.host_calls."""
        return host.host_calls(self.calls, self.kernels, by, where, self.stalls)

    def idle_causes(self, by: By = "gpu", where: Where = None) -> pd.DataFrame:
        """What the host did while its GPU was idle; see metrics.host.idle_causes."""
        return host.idle_causes(self.kernels, self.calls, by, where)

    # -- views -------------------------------------------------------------------------------------------------------

    def view(self, name: str, **selection: Any) -> View:
        """What tab `name` shows, for a notebook: `run.view("overlap", gpu=0).figures["by_gpu"].show()`."""
        from tb_chopper.backend import views

        return views.build(name, self, **selection)
