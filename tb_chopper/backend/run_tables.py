"""What the files of a run hold, as lazy tables over all of them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from tb_chopper.backend import capture as captures
from tb_chopper.backend import counter_run, hardware, logdir, schema, workers
from tb_chopper.backend.alignment import counters as counter_alignment
from tb_chopper.backend.alignment import ranks
from tb_chopper.backend.alignment.counters import Alignment
from tb_chopper.backend.alignment.telemetry import RunTelemetry, with_clocks
from tb_chopper.backend.alignment.telemetry import join as join_telemetry
from tb_chopper.backend.alignment.topology import Topology
from tb_chopper.backend.alignment.topology import join as join_topology
from tb_chopper.backend.capture import Capture, Progress
from tb_chopper.backend.errors import InvalidSelection, UnreadableFile
from tb_chopper.backend.findings import Finding
from tb_chopper.backend.hardware import Hardware
from tb_chopper.backend.lazy import lazy
from tb_chopper.backend.metrics import collectives, frequency, grouping, memory
from tb_chopper.backend.readers import memory_snapshot, telemetry_logs
from tb_chopper.backend.readers import topology as topology_files
from tb_chopper.backend.readers.counter_files import CounterRun
from tb_chopper.backend.readers.log_times import TimeBase

LOG = logging.getLogger(__name__)


class RunTables:
    """The tables of one run, made on first use and kept; several threads may ask at once."""

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

    # -- tables ------------------------------------------------------------------------------------------------------

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

    # -- what the GPUs and hosts are ---------------------------------------------------------------------------------

    @lazy
    def clocked_kernels(self) -> pd.DataFrame:
        """`kernels` with clock_mhz, memory_clock_mhz, power_w and clock_source; see alignment.telemetry.with_clocks."""
        return with_clocks(self.kernels, self.telemetry.samples)

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

    @property
    def link_bytes_per_s(self) -> float | None:
        """Peak of the links of the run's GPUs, where all have the same."""
        links = {h.link_bytes_per_s for h in self.hardware.values() if h and h.link_bytes_per_s}
        return links.pop() if len(links) == 1 else None

    def _memory_of_devices(self) -> dict[int, int]:
        """Memory of each GPU, by `gpu`, where it is known."""
        return {int(gpu): bytes_ for gpu, file, device in
                zip(self.workers["gpu"], self.workers["file"], self.workers["device"].astype(str), strict=True)
                if (bytes_ := self._capture_of(file).memory_bytes(device)) and device != "cpu"}

    def _hosts(self) -> dict[int, str | None]:
        """Host by gpu, None where the traces name none."""
        hosts = self.workers.drop_duplicates("gpu").set_index("gpu")["host"].astype(object)
        return {int(g): None if pd.isna(h) else str(h) for g, h in hosts.items()}

    def _members(self) -> dict[int, dict[str, list[int]]]:
        """By gpu and name of a process group: its ranks, as that gpu's trace tells them."""
        gpu = self.workers.drop_duplicates("file").set_index("file")["gpu"]
        return {int(gpu[c.file.path.name]): collectives.members(c.meta.get("distributedInfo", {}))
                for c in self.captures}

    def _sidecars(self) -> dict[int, Mapping[str, Any]]:
        """Sidecar by `workers.capture`, where there is one."""
        return {int(c): sidecar for c, f in zip(self.workers["capture"], self.workers["file"], strict=True)
                if (sidecar := self._capture_of(f).sidecar)}

    def _told_to_handler(self, key: str) -> dict[int, Any]:
        """A value that the user gave to the trace handler, by `gpu`, where it was given."""
        gpu = self.workers.drop_duplicates("file").set_index("file")["gpu"]
        told = {gpu[c.file.path.name]: c.sidecar.get("training", {}).get(key) for c in self.captures}
        return {int(g): value for g, value in told.items() if value}

    def _capture_of(self, file: str) -> Capture:
        return next(c for c in self.captures if c.file.path.name == file)

    # -- what can be compared ----------------------------------------------------------------------------------------

    @lazy
    def _comparable(self) -> tuple[list[int], list[Finding]]:
        return ranks.comparable(self.workers)

    @property
    def _comparable_kernels(self) -> pd.DataFrame:
        return grouping.select(self.kernels, {"capture": self._comparable[0]})

    @property
    def _comparable_steps(self) -> pd.DataFrame:
        return grouping.select(self.steps, {"capture": self._comparable[0]})

    @property
    def _samples_near(self) -> pd.DataFrame:
        """The samples from a second before the captures to a second after them: logs of other tools may hold days."""
        samples, times = self.telemetry.samples, self.workers[self.workers["start_ns"] >= 0]
        return samples[samples["t_ns"].between(times["start_ns"].min() - 10**9, times["end_ns"].max() + 10**9)]

    # -- loading -----------------------------------------------------------------------------------------------------

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
