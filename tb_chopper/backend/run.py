"""A run: lazy tables over all its files, and every metric and view of them."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from tb_chopper.backend import capture as captures
from tb_chopper.backend import counter_run, hardware, logdir, rules, schema, workers
from tb_chopper.backend.alignment import counters as counter_alignment
from tb_chopper.backend.alignment import ranks
from tb_chopper.backend.alignment.counters import Alignment
from tb_chopper.backend.alignment.telemetry import RunTelemetry, with_clocks
from tb_chopper.backend.alignment.telemetry import join as join_telemetry
from tb_chopper.backend.alignment.topology import Topology
from tb_chopper.backend.alignment.topology import join as join_topology
from tb_chopper.backend.capture import Capture, Progress
from tb_chopper.backend.errors import InvalidSelection, NotFound, UnreadableFile
from tb_chopper.backend.findings import Finding, by_severity
from tb_chopper.backend.hardware import Hardware
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
from tb_chopper.backend.readers import memory_snapshot, telemetry_logs
from tb_chopper.backend.readers import topology as topology_files
from tb_chopper.backend.readers.counter_files import CounterRun
from tb_chopper.backend.readers.log_times import TimeBase

if TYPE_CHECKING:
    from tb_chopper.backend.views.view import View

Roles = Mapping[str, str] | None
"""Process group, by name or description, to what it is for."""


LOG = logging.getLogger(__name__)


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


class Run:
    """One run. Its tables are made on first use and kept; several threads may ask at once."""

    def __init__(self, files: logdir.RunFiles, communication: Sequence[str] = (), progress: Progress | None = None,
                 telemetry: Sequence[str | Path] = (), time_base: TimeBase | None = None,
                 hardware: Mapping[str, float] | None = None):
        self.files = files
        self.name = files.name if files.name != "." else files.path.name or "."
        self._communication = tuple(communication)
        self._progress = progress
        self._telemetry = [(f.path, f.path.name) for f in files.telemetry] + [(p, Path(p).name) for p in telemetry]
        self._time_base = time_base
        self._override = hardware
        self._lock = threading.Lock()
        self._read: tuple[list[Capture], list[Finding]] | None = None
        self._arrivals: dict[bool, tuple[pd.DataFrame, ranks.Matched]] = {}

    # -- tables ---------------------------------------------------------------------------------------------------

    @property
    def captures(self) -> list[Capture]:
        """Every file that could be read, in order of worker and span."""
        return self._load()[0]

    @lazy
    def workers(self) -> pd.DataFrame:
        """One row per (file, device); columns of schema.WORKERS."""
        return workers.table(self.captures)

    @lazy
    def kernels(self) -> pd.DataFrame:
        """One row per device activity; columns of schema.KERNELS."""
        return self._numbered([c.kernels for c in self.captures], schema.KERNELS)

    @lazy
    def steps(self) -> pd.DataFrame:
        """One row per (file, device, step); columns of schema.STEPS."""
        return self._numbered([c.steps for c in self.captures], schema.STEPS)

    @lazy
    def telemetry(self) -> RunTelemetry:
        """Clocks, power and CPU use sampled during the run, on the clock of its traces; empty tables where there
        is no log."""
        logs, failed = [], []
        times = self.workers[self.workers["start_ns"] >= 0]
        within = (times["start_ns"].min(), times["end_ns"].max()) if len(times) else None
        base = self._time_base or TimeBase(near_ns=within and int(within[0]))
        for path, name in self._telemetry:
            try:
                logs.append(telemetry_logs.read(path, base, within=within))
            except UnreadableFile as error:
                failed.append(Finding("unreadable_telemetry", "error", str(error), file=name))
        joined = join_telemetry(logs, self.workers, self._sidecars())
        joined.findings[:0] = failed
        return joined

    @lazy
    def topology(self) -> Topology:
        """The links between the GPUs of each host and the islands they make; empty tables where none are recorded
        (docs/topology.md)."""
        files, failed = [], []
        for file in self.files.topology:
            try:
                files.append(topology_files.read(file.path))
            except UnreadableFile as error:
                failed.append(Finding("unreadable_topology", "warning", str(error), file=file.path.name))
        joined = join_topology(files, self.workers, self._sidecars())
        joined.findings[:0] = failed
        return joined

    @lazy
    def counters(self) -> CounterRun:
        """Hardware counters of the run's counters folder: seconds on first use; empty tables where there are none."""
        return counter_run.load(self.files)

    @lazy
    def counter_alignment(self) -> Alignment:
        """Which dispatch of the counter run is which kernel; see alignment.counters.align."""
        return counter_alignment.align(self.kernels, self.counters.counters, self.counters.ranks)

    @lazy
    def counter_findings(self) -> list[Finding]:
        """What is to be known about counters and how they fit the trace. Not among `findings`: those must not cost
        the reading of the counters."""
        if not len(self.counters.counters):
            return by_severity(self.counters.findings)
        return by_severity([*self.counters.findings, *self.counter_alignment.findings])

    @lazy
    def memory_events(self) -> pd.DataFrame:
        """What the allocators did, from memory snapshots, else profile_memory; see metrics.memory.allocations."""
        return memory.allocations([*self._profiled_memory(), *self._snapshots[0]], self.steps)

    @property
    def calls(self) -> pd.DataFrame:
        """What the hosts did that may keep their GPUs waiting; columns of schema.CALLS."""
        return self._calls[0]

    @property
    def compiled(self) -> pd.DataFrame:
        """The regions of torch.compile and the graphs in them; columns of schema.CALLS."""
        return self._calls[1]

    @lazy
    def _calls(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        gpu = self.workers.drop_duplicates("file").set_index("file")["gpu"]
        every = schema.concat([c.calls.assign(gpu=int(gpu[c.file.path.name])) for c in self.captures], schema.CALLS)
        compiled = every["kind"].isin(schema.COMPILED_KINDS)
        return every[~compiled].reset_index(drop=True), every[compiled].reset_index(drop=True)

    @lazy
    def actions(self) -> pd.DataFrame:
        """What pipeline schedules did; columns of schema.ACTIONS."""
        return self._numbered([c.actions for c in self.captures], schema.ACTIONS)

    @lazy
    def _snapshots(self) -> tuple[list[memory.Source], list[Finding]]:
        sources, findings = [], []
        gpu_of_rank = {int(r): int(g) for r, g in zip(self.workers["rank"], self.workers["gpu"], strict=True)
                       if not pd.isna(r)}
        gpus = sorted(map(int, self.workers["gpu"].unique()))
        for file in self.files.snapshots:
            name = file.path.name
            rank = logdir.rank_hint(name)
            gpu = gpus[0] if rank is None and len(gpus) == 1 else gpu_of_rank.get(-1 if rank is None else rank)
            if gpu is None:
                findings.append(Finding("memory_snapshot_unplaced", "warning", f"{name}: left aside: no rank of this "
                                        "run in its name; call it rank<N>_memory_snapshot.pickle", file=name))
                continue
            try:
                snapshot = memory_snapshot.read(file.path)
            except UnreadableFile as error:
                findings.append(Finding("unreadable_memory_snapshot", "warning", str(error), file=name))
                continue
            sources.append(memory.Source(snapshot.events, {"0": gpu}, memory.SNAPSHOT))
            findings += snapshot.findings
        return sources, findings

    def _profiled_memory(self) -> list[memory.Source]:
        workers = self.workers[self.workers["device"].astype(object) != ""]
        return [memory.Source(c.memory, dict(zip(own["device"].astype(str), own["gpu"], strict=True)), memory.PROFILER)
                for c in self.captures if len(own := workers[workers["file"] == c.file.path.name])]

    @lazy
    def findings(self) -> list[Finding]:
        """What is to be known about the data of this run, the worst first."""
        captures, failed = self._load()
        return by_severity([*failed, *(f for c in captures for f in c.findings), *workers.findings(self.workers),
                            *overlap.findings(self.kernels),
                            *self._comparable[1], *collectives.findings(*self._arrived()),
                            *self._snapshots[1], *self.topology.findings, *self.telemetry.findings])

    @lazy
    def diagnosis(self) -> list[Finding]:
        """What costs time in this training and what to do about it, the largest gain first (docs/diagnosis.md)."""
        return rules.diagnose(self)

    # -- metrics: definitions in docs/metrics.md -------------------------------------------------------------------

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

    def throughput(self) -> pd.DataFrame:
        """Iteration time, tokens/s and steps/s per GPU and of the run; see metrics.throughput.throughput."""
        return throughput.throughput(self.steps, self._told_to_handler("tokens_per_step"))

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

    def arrivals(self, where: Where = None, correct_clocks: bool = True) -> pd.DataFrame:
        """One row per collective and GPU: when it arrived, how long it waited; see metrics.collectives.arrivals."""
        return grouping.select(self._arrived(correct_clocks)[0], where)

    @lazy
    def _pipelined(self) -> pd.DataFrame:
        ranks = {p.get("pp") for p in self._told_to_handler("parallel").values()}
        steps, world = self._comparable_steps, self.workers["world_size"].max()
        cut = steps.loc[~steps["complete"], "step"].unique()
        actions = grouping.select(self.actions, {"capture": self._comparable[0]})
        whole = actions[~actions["step"].isin(cut)]
        here = pd.isna(world) or self.workers["gpu"].nunique() >= int(world)
        return pipeline.actions(whole if len(whole) else actions, self._offsets_ns(), self._members(),
                                ranks.pop() if len(ranks) == 1 else None, bool(here))

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

    def process_groups(self, roles: Roles = None) -> pd.DataFrame:
        """What each process group is for; see metrics.process_groups.process_groups."""
        return process_groups.process_groups(self._arrived()[0], roles)

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

    def stragglers(self) -> pd.DataFrame:
        """Which GPU the others wait for, how much that costs and why; see metrics.stragglers.stragglers."""
        return stragglers.stragglers(self._arrived()[0], self.leads, self.what_if(), self.imbalance())

    @lazy
    def leads(self) -> pd.DataFrame:
        """How far each GPU is ahead of the last one, kernel by kernel; see metrics.stragglers.leads."""
        return stragglers.leads(self._comparable_kernels, self._offsets_ns())

    def _offsets_ns(self) -> dict[int, int]:
        """How far the clock of each gpu's host runs ahead of the first host's."""
        clocks = self.clock_offsets
        return {int(gpu): round(us * 1000) for gpus, us in zip(clocks["gpus"], clocks["offset_us"], strict=True)
                for gpu in gpus}

    @lazy
    def critical_path(self) -> pd.DataFrame:
        """What the end of each step waited for, back to its beginning; see metrics.critical_path.critical_path."""
        return critical_path.critical_path(self._comparable_kernels, self._comparable_steps, self._arrived()[0],
                                           self._offsets_ns())

    def path_shares(self, by: By = "kind", where: Where = None) -> pd.DataFrame:
        """The critical path by kind, gpu, operation, ...; see metrics.critical_path.path_shares."""
        return critical_path.path_shares(self.critical_path, by, where)

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
        kernels = grouping.select(self.clocked_kernels, {"capture": self._comparable[0]})
        return stragglers.imbalance(kernels, self._comparable_steps, self.leads, self.telemetry.samples)

    def outlier_steps(self) -> pd.DataFrame:
        """Steps that took much longer than the others, and what in them grew; see metrics.stragglers.outlier_steps."""
        return stragglers.outlier_steps(self._comparable_kernels, self._comparable_steps, self.own_times)

    def memory(self) -> pd.DataFrame:
        """Peak, floor, growth, fragmentation and headroom of each GPU's memory; see metrics.memory.memory."""
        return memory.memory(self.memory_events, self.kernels, self._memory_of_devices(), self._samples_near,
                             self.steps)

    def _memory_of_devices(self) -> dict[int, int]:
        """Memory of each GPU, by `gpu`, where it is known."""
        return {int(gpu): bytes_ for gpu, file, device in
                zip(self.workers["gpu"], self.workers["file"], self.workers["device"].astype(str), strict=True)
                if (bytes_ := self._capture_of(file).memory_bytes(device)) and device != "cpu"}

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

    def used_memory(self) -> pd.DataFrame:
        """Used memory of the GPUs as the driver counts, sample by sample; see metrics.memory.used_samples."""
        return memory.used_samples(self._samples_near, self.steps)

    @property
    def _samples_near(self) -> pd.DataFrame:
        """The samples from a second before the captures to a second after them: logs of other tools may hold days."""
        samples, times = self.telemetry.samples, self.workers[self.workers["start_ns"] >= 0]
        return samples[samples["t_ns"].between(times["start_ns"].min() - 10**9, times["end_ns"].max() + 10**9)]

    def step_memory(self) -> pd.DataFrame:
        """Lowest and highest level of memory in each step; see metrics.memory.step_memory."""
        return memory.step_memory(self.memory_events)

    def queue_length(self) -> pd.DataFrame:
        """Launches waiting in each stream over time; see metrics.host.queue_length."""
        return host.queue_length(self.kernels)

    def queues(self) -> pd.DataFrame:
        """How full each stream's queue was, by step; see metrics.host.queues."""
        return host.queues(self.kernels, self.steps)

    def launches(self, by: By = ("gpu", "step"), where: Where = None) -> pd.DataFrame:
        """Number and size of kernels, the share of short ones; see metrics.host.launches."""
        return host.launches(self.kernels, by, where)

    def host_calls(self, by: By = ("gpu", "kind", "name"), where: Where = None) -> pd.DataFrame:
        """Waits, allocations, loading, compilation and collection of garbage; see metrics.host.host_calls."""
        return host.host_calls(self.calls, self.kernels, by, where, self.stalls)

    @lazy
    def stalls(self) -> pd.DataFrame:
        """Every call that kept its GPU idle, for how long, and what came after; see metrics.host.stalls."""
        return host.stalls(self.kernels, self.calls)

    def step_stalls(self) -> pd.DataFrame:
        """Data loading, waits, allocations and collections of garbage in each step; see metrics.host.step_stalls."""
        return host.step_stalls(self.kernels, self.steps, self.calls, self.stalls)

    def idle_causes(self, by: By = "gpu", where: Where = None) -> pd.DataFrame:
        """What the host did while its GPU was idle; see metrics.host.idle_causes."""
        return host.idle_causes(self.kernels, self.calls, by, where)

    @property
    def clock_offsets(self) -> pd.DataFrame:
        """The clocks of the hosts against the first one's; see alignment.ranks.Matched."""
        return self._arrived()[1].clocks

    @lazy
    def _comparable(self) -> tuple[list[int], list[Finding]]:
        return ranks.comparable(self.workers)

    @property
    def _comparable_kernels(self) -> pd.DataFrame:
        return grouping.select(self.kernels, {"capture": self._comparable[0]})

    @property
    def _comparable_steps(self) -> pd.DataFrame:
        return grouping.select(self.steps, {"capture": self._comparable[0]})

    def _arrived(self, correct_clocks: bool = True) -> tuple[pd.DataFrame, ranks.Matched]:
        if correct_clocks not in self._arrivals:
            self._arrivals[correct_clocks] = collectives.arrivals(
                self._comparable_kernels, self._hosts(), self._members(), correct_clocks)
        return self._arrivals[correct_clocks]

    def _members(self) -> dict[int, dict[str, list[int]]]:
        """By gpu and name of a process group: its ranks, as that gpu's trace tells them."""
        gpu = self.workers.drop_duplicates("file").set_index("file")["gpu"]
        return {int(gpu[c.file.path.name]): collectives.members(c.meta.get("distributedInfo", {}))
                for c in self.captures}

    def _roles(self, given: Roles) -> dict[str, str]:
        groups = self.process_groups(given)
        return dict(zip(groups["group"], groups["role"], strict=True))

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

    @lazy
    def hardware(self) -> dict[int, Hardware | None]:
        """The peaks of each GPU, by `gpu`; None for one that the peak table does not know and the user did not tell."""
        gpus = self.workers.drop_duplicates("gpu")[["gpu", "gpu_name", "file", "device"]]
        return {int(gpu): None if device == "cpu" else hardware.find(
                    None if pd.isna(name) else str(name), units=self._capture_of(file).units(device),
                    override=self._override)
                for gpu, name, file, device in gpus.itertuples(index=False)}

    @lazy
    def f_peak_mhz(self) -> dict[int, float]:
        """The clock of each GPU's peak rate: the peak table's, else the limit that the telemetry names, else NaN."""
        known = {gpu: found.f_peak_mhz for gpu, found in self.hardware.items() if found}
        return frequency.peaks(self.telemetry.samples, known)

    @lazy
    def clocked_kernels(self) -> pd.DataFrame:
        """`kernels` with clock_mhz, memory_clock_mhz, power_w and clock_source; see alignment.telemetry.with_clocks."""
        return with_clocks(self.kernels, self.telemetry.samples)

    def with_hardware(self, override: Mapping[str, float]) -> Run:
        """This run with other peaks (keys of hardware.OVERRIDES); what was read is shared."""
        _ = self.clocked_kernels, self.counter_alignment
        other = copy.copy(self)
        other._override = {**(self._override or {}), **override}
        for name in ("hardware", "f_peak_mhz", "chains"):
            other.__dict__.pop(name, None)
        return other

    def _sidecars(self) -> dict[int, Mapping[str, Any]]:
        """Sidecar by `workers.capture`, where there is one."""
        return {int(c): sidecar for c, f in zip(self.workers["capture"], self.workers["file"], strict=True)
                if (sidecar := self._capture_of(f).sidecar)}

    def _hosts(self) -> dict[int, str | None]:
        """Host by gpu, None where the traces name none."""
        hosts = self.workers.drop_duplicates("gpu").set_index("gpu")["host"].astype(object)
        return {int(g): None if pd.isna(h) else str(h) for g, h in hosts.items()}

    @property
    def link_bytes_per_s(self) -> float | None:
        """Peak of the links of the run's GPUs, where all have the same."""
        links = {h.link_bytes_per_s for h in self.hardware.values() if h and h.link_bytes_per_s}
        return links.pop() if len(links) == 1 else None

    def _capture_of(self, file: str) -> Capture:
        return next(c for c in self.captures if c.file.path.name == file)

    def _told_to_handler(self, key: str) -> dict[int, Any]:
        """A value that the user gave to the trace handler, by `gpu`, where it was given."""
        gpu = self.workers.drop_duplicates("file").set_index("file")["gpu"]
        told = {gpu[c.file.path.name]: c.sidecar.get("training", {}).get(key) for c in self.captures}
        return {int(g): value for g, value in told.items() if value}

    # -- views ----------------------------------------------------------------------------------------------------

    def view(self, name: str, **selection: Any) -> View:
        """What tab `name` shows, for a notebook: `run.view("overlap", gpu=0).figures["by_gpu"].show()`."""
        from tb_chopper.backend import views

        return views.build(name, self, **selection)

    # -- loading --------------------------------------------------------------------------------------------------

    def _load(self) -> tuple[list[Capture], list[Finding]]:
        with self._lock:
            if self._read is None:
                self._read = self._read_files()
            return self._read

    def _read_files(self) -> tuple[list[Capture], list[Finding]]:
        good: list[Capture] = []
        failed: list[Finding] = []
        for i, file in enumerate(self.files.traces):
            try:
                good.append(captures.load(file, self._communication, self._share(i)))
            except UnreadableFile as error:
                failed.append(Finding("unreadable_file", "error", str(error), file=file.path.name))
            except InvalidSelection:
                raise
            except Exception as error:
                # Whatever a file holds, it costs only itself. The log has what a developer needs.
                LOG.exception("%s cannot be read", file.path)
                failed.append(Finding("unreadable_file", "error", f"{file.path.name}: nothing of it is used: reading "
                                      f"failed with {type(error).__name__}: {error}", file=file.path.name))
        return good, failed

    def _share(self, i: int) -> Progress | None:
        """Progress of the i-th file as a share of the whole run."""
        report, n = self._progress, len(self.files.traces)
        return None if report is None else lambda share, text: report((i + share) / n, text)

    def _numbered(self, frames: list[pd.DataFrame], table: schema.Table) -> pd.DataFrame:
        """The frames of all files as one, with the columns that only the whole run knows."""
        first, parts = 0, []
        names = {c.name for c in table}
        for capture, frame in zip(self.captures, frames, strict=True):
            devices = capture.devices
            place = first + pd.Series(range(len(devices)), index=devices, dtype="int64")
            at = frame["device"].astype(object).map(place).to_numpy("int64")
            own = self.workers.iloc[at]
            parts.append(frame.assign(**{
                c: own[c].set_axis(frame.index) for c in ("capture", "gpu", "worker", "span") if c in names}))
            first += max(len(devices), 1)
        return schema.concat(parts, table)
