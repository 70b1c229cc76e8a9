"""When everything happens: a discrete-event simulation of all ranks together.

A rank's launching thread runs its program until it has to wait for the device; its streams run their items in order
once launched and once what they wait for has ended; a collective ends, on all ranks of its group at once, a transfer
time after the last of them has reached it, and so does a message between two stages of a pipeline at its two ends;
running kernels slow down while a collective runs on their GPU and follow the clock that the power controller sets at
every tick.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tb_chopper.backend.simulate import faults, physics, plan
from tb_chopper.backend.simulate.config import Config
from tb_chopper.backend.simulate.program import N_STREAMS, Program
from tb_chopper.backend.simulate.workload import Collective

HOST_NOISE = 0.08
"""Relative spread of the cost of one piece of host code."""
STREAM_DELAY = 0.17
"""An event between streams takes longer than the next kernel of the same stream, so that starts do not coincide."""
_START, _FINISH, _TICK, _WAKE = 0, 1, 2, 3


@dataclass
class RankTimes:
    """One rank's times, in float ns since the start of the simulation."""

    points: list[np.ndarray]
    """per step: time of each host point"""
    start: np.ndarray
    """per item, over all steps"""
    end: np.ndarray
    work: np.ndarray
    """cycles of each item"""
    clock_mhz: np.ndarray
    """per tick: clock in [tick, tick + 1)"""
    power_w: np.ndarray
    """per tick: mean power of the tick that ends there"""
    activity: np.ndarray


@dataclass
class Timeline:
    config: Config
    programs: list[list[Program]]
    """by rank, one per step, the first is the warm-up step"""
    ranks: list[RankTimes]


def simulate(config: Config, programs: Sequence[list[Program]],
             progress: Callable[[float], None] | None = None) -> Timeline:
    """Run the programs, one after the other, on all ranks. `programs`: by place in the pipeline, one per step."""
    engine = _Engine(config, programs)
    engine.run(progress)
    return Timeline(config, [rank.script.programs for rank in engine.ranks], [rank.times() for rank in engine.ranks])


class _Script:
    """What ranks at one place of the pipeline have in common: their programs, item by item over all steps."""

    def __init__(self, programs: list[Program], config: Config) -> None:
        self.programs = programs
        self.offsets: list[int] = np.cumsum([0, *[len(p.items) for p in programs]]).tolist()
        items = [item for p in programs for item in p.items]
        self.cycles = np.asarray([physics.cycles(i.kernel, config.gpu) for i in items])
        self.contention = [i.kernel.contention for i in items]
        self.activity = [i.kernel.activity for i in items]
        self.deps = _dependencies(programs, self.offsets)
        self.collective = [i.collective for i in items]
        self.occurrence = _occurrences(programs)
        self.streams = range(1 + max(item.stream for item in items))
        self.queues: list[list[int]] = [
            [g for g, item in enumerate(items) if item.stream == stream] for stream in self.streams
        ]
        self.launch_points = [np.asarray([i.begin for i in p.items]) for p in programs]


class _Rank:
    """State of one rank."""

    def __init__(self, config: Config, script: _Script, rank: int) -> None:
        n = script.offsets[-1]
        self.number, self.script = rank, script
        self.groups = plan.groups(config, rank)
        self.next, self.previous = (plan.neighbour(config, rank, forward) for forward in (True, False))
        self.rng = np.random.default_rng([config.seed, rank])
        self.controller = physics.PowerController(config, rank, np.random.default_rng([config.seed, rank, 1]))
        base = script.cycles
        jitter = config.faults.jitter
        self.work_array = base * np.clip(1.0 + jitter * self.rng.standard_normal(n), 0.5, 1.5) if jitter else base
        self.work: list[float] = self.work_array.tolist()
        self.launch: list[float] = [-1.0] * n
        self.start: list[float] = [-1.0] * n
        self.end: list[float] = [-1.0] * n
        self.points: list[np.ndarray] = []
        self.costs: np.ndarray = np.empty(0)
        self.step, self.block, self.host_t = 0, 0, 0.0
        self.from_point = 0
        self.waiting_for = -1
        self.cursor = [0] * N_STREAMS
        self.busy = [False] * N_STREAMS
        self.free_at = [0.0] * N_STREAMS
        # running compute: per stream item, remaining cycles, version of the prediction
        self.item = [-1] * N_STREAMS
        self.remaining = [0.0] * N_STREAMS
        self.version = [0] * N_STREAMS
        self.last_t = 0.0
        self.collectives = self.messages = 0
        self.active_ns = 0.0
        self.ticks: list[tuple[float, float, float]] = []

    def instance(self, g: int, c: Collective) -> tuple[tuple[object, ...], tuple[int, ...]]:
        """Name of a collective or message that all its ranks have for it, and these ranks."""
        if not c.flow:
            group = self.groups[c.group]
            return (group.name, self.script.occurrence[g]), group.ranks
        other = self.next if c.to_next else self.previous
        ends = (self.number, other) if c.name == "send" else (other, self.number)
        return (c.flow, *ends, self.script.occurrence[g]), ends

    def times(self) -> RankTimes:
        ticks = np.asarray(self.ticks).reshape(-1, 3)
        return RankTimes(
            self.points,
            np.asarray(self.start),
            np.asarray(self.end),
            self.work_array,
            ticks[:, 0],
            ticks[:, 1],
            ticks[:, 2],
        )


class _Engine:
    def __init__(self, config: Config, programs: Sequence[list[Program]]) -> None:
        self.config = config
        scripts = [_Script(of_place, config) for of_place in programs]
        self.ranks = [_Rank(config, scripts[plan.place(config, r).pipeline], r) for r in range(config.ranks)]
        self.arrivals: dict[tuple[object, ...], list[tuple[int, int, int]]] = {}
        """by instance: rank, stream and item of those that have arrived"""
        self.heap: list[tuple[float, int, int, int, int, int]] = []
        self.count = 0
        self.unfinished = sum(rank.script.offsets[-1] for rank in self.ranks)

    def run(self, progress: Callable[[float], None] | None) -> None:
        for r, rank in enumerate(self.ranks):
            rank.host_t = float(rank.rng.uniform(0, 20_000))
            self._begin_step(rank)
            self._host(r, rank.host_t)
        self._push(0.0, _TICK, 0, 0, 0)
        total, shown = self.unfinished, 0.0
        while self.unfinished or any(rank.step < len(rank.script.programs) for rank in self.ranks):
            t, _, kind, r, a, b = heapq.heappop(self.heap)
            if kind == _START:
                self._start(t, r, a, b)
            elif kind == _FINISH:
                rank = self.ranks[r]
                if rank.version[a] == b and rank.item[a] >= 0:
                    self._finish(t, r, a)
            elif kind == _WAKE:
                self._host(r, t)
            else:
                self._tick(t)
                done = 1.0 - self.unfinished / total
                if progress is not None and done - shown > 0.02:
                    shown = done
                    progress(done)
        self._tick(t)

    def _push(self, t: float, kind: int, r: int, a: int, b: int) -> None:
        self.count += 1
        heapq.heappush(self.heap, (t, self.count, kind, r, a, b))

    # host

    def _begin_step(self, rank: _Rank) -> None:
        program = rank.script.programs[rank.step]
        noise = rank.rng.lognormal(0.0, HOST_NOISE, len(program.cost_ns))
        rank.costs = program.cost_ns * noise
        for point, delay_ns in faults.delays(self.config, program, rank.number, rank.step):
            rank.costs[point] += delay_ns
        rank.points.append(np.empty(len(program.cost_ns)))
        rank.block, rank.from_point = 0, 0

    def _host(self, r: int, t: float) -> None:
        """Run the launching thread from `t` on until it waits for the device or the program ends."""
        rank = self.ranks[r]
        programs = rank.script.programs
        while rank.step < len(programs):
            program, offset = programs[rank.step], rank.script.offsets[rank.step]
            points = rank.points[-1]
            blocked = rank.block < len(program.blocks)
            stop = program.blocks[rank.block][0] if blocked else len(points)
            begin = rank.from_point
            if stop > begin:
                points[begin:stop] = t + np.cumsum(rank.costs[begin:stop])
                t = float(points[stop - 1])
                self._launched(rank, offset, begin, stop)
                rank.from_point = stop
                self._wake_streams(r)
            if not blocked:
                rank.step += 1
                rank.host_t = t
                if rank.step < len(programs):
                    self._begin_step(rank)
                continue
            waited = program.blocks[rank.block][1] + offset
            if waited >= 0 and rank.end[waited] < 0:
                rank.waiting_for, rank.host_t = waited, t
                return
            if waited >= 0:
                t = max(t, rank.end[waited])
            rank.block += 1

    def _launched(self, rank: _Rank, offset: int, begin: int, stop: int) -> None:
        launch_points = rank.script.launch_points[rank.step]
        first, last = np.searchsorted(launch_points, [begin, stop])
        times = rank.points[-1][launch_points[first:last]].tolist()
        rank.launch[offset + first : offset + last] = times

    # device

    def _wake_streams(self, r: int) -> None:
        rank = self.ranks[r]
        for stream in rank.script.streams:
            if not rank.busy[stream]:
                self._try(r, rank, stream)

    def _try(self, r: int, rank: _Rank, stream: int) -> None:
        """Schedule the next item of an idle stream if all it waits for is known to have happened."""
        queue, cursor = rank.script.queues[stream], rank.cursor[stream]
        if cursor >= len(queue):
            return
        g = queue[cursor]
        if rank.launch[g] < 0:
            return
        t = rank.free_at[stream]
        for d in rank.script.deps[g]:
            end = rank.end[d]
            if end < 0:
                return
            if end > t:
                t = end
        host = self.config.host
        gap = host.dispatch_gap_ns * (1.0 + STREAM_DELAY * stream)
        t = max(t + gap, rank.launch[g] + host.launch_latency_ns)
        rank.busy[stream] = True
        self._push(t, _START, r, stream, g)

    def _start(self, t: float, r: int, stream: int, g: int) -> None:
        rank = self.ranks[r]
        rank.start[g] = t
        self._advance(rank, t)
        if (collective := rank.script.collective[g]) is not None:
            self._arrive(t, r, stream, g, collective)
            return
        rank.item[stream], rank.remaining[stream] = g, rank.work[g]
        self._predict(r, rank, stream, t)

    def _arrive(self, t: float, r: int, stream: int, g: int, collective: Collective) -> None:
        """A rank has come to a collective or message; the last one to come sets when it ends."""
        rank = self.ranks[r]
        if collective.flow:
            rank.messages += 1
        else:
            rank.collectives += 1
            self._predict_all(r, rank, t)
        name, members = rank.instance(g, collective)
        arrived = self.arrivals.setdefault(name, [])
        arrived.append((r, stream, g))
        if len(arrived) == len(members):
            end = t + physics.transfer_ns(collective.name, collective.n_bytes, self.config, members)
            for other, its_stream, its_item in sorted(self.arrivals.pop(name)):
                state = self.ranks[other]
                state.item[its_stream], state.version[its_stream] = its_item, state.version[its_stream] + 1
                self._push(end, _FINISH, other, its_stream, state.version[its_stream])

    def _advance(self, rank: _Rank, t: float) -> None:
        """Work done since the last change of clock or contention."""
        elapsed = t - rank.last_t
        if elapsed <= 0:
            return
        rank.last_t = t
        clock = rank.controller.clock_mhz * 1e-3  # cycles per ns
        activity, script = 0.0, rank.script
        for stream in rank.script.streams:
            g = rank.item[stream]
            if g >= 0 and script.collective[g] is None:
                contention = script.contention[g] if rank.collectives else 0.0
                rank.remaining[stream] -= elapsed * clock / (1.0 + contention)
                activity += script.activity[g]
        if rank.collectives or rank.messages:
            activity += 0.06
        rank.active_ns += elapsed * min(1.0, activity)

    def _predict_all(self, r: int, rank: _Rank, t: float) -> None:
        for stream in rank.script.streams:
            g = rank.item[stream]
            if g >= 0 and rank.script.collective[g] is None:
                self._predict(r, rank, stream, t)

    def _predict(self, r: int, rank: _Rank, stream: int, t: float) -> None:
        g = rank.item[stream]
        contention = rank.script.contention[g] if rank.collectives else 0.0
        rank.version[stream] += 1
        left = max(0.0, rank.remaining[stream]) * (1.0 + contention) / (rank.controller.clock_mhz * 1e-3)
        self._push(t + left, _FINISH, r, stream, rank.version[stream])

    def _finish(self, t: float, r: int, stream: int) -> None:
        rank = self.ranks[r]
        g = rank.item[stream]
        self._advance(rank, t)
        rank.item[stream] = -1
        rank.end[g], rank.free_at[stream], rank.busy[stream] = t, t, False
        rank.cursor[stream] += 1
        self.unfinished -= 1
        collective = rank.script.collective[g]
        if collective is not None and collective.flow:
            rank.messages -= 1
        elif collective is not None:
            rank.collectives -= 1
            self._predict_all(r, rank, t)
        if rank.waiting_for == g:
            rank.waiting_for = -1
            self._push(max(t, rank.host_t), _WAKE, r, 0, 0)
        self._wake_streams(r)

    def _tick(self, t: float) -> None:
        for r, rank in enumerate(self.ranks):
            self._advance(rank, t)
            activity = rank.active_ns / self.config.tick_ns if t else 0.0
            rank.active_ns = 0.0
            rank.controller.update(activity)
            rank.ticks.append((rank.controller.clock_mhz, rank.controller.power_w, activity))
            self._predict_all(r, rank, t)
        if self.unfinished and not self.heap:
            raise RuntimeError("the simulated ranks wait for each other")
        self._push(t + self.config.tick_ns, _TICK, 0, 0, 0)


def _dependencies(programs: list[Program], offsets: list[int]) -> list[tuple[int, ...]]:
    """Per item, over all steps, the items that it waits for. The collectives of one communicator run in launch order,
    whatever their streams."""
    deps: list[tuple[int, ...]] = []
    last: dict[str, int] = {}
    for program, offset in zip(programs, offsets, strict=False):
        for item in program.items:
            waits = [d + offset for d in item.deps]
            if item.collective is not None:
                channel = item.collective.channel
                waits += [last[channel]] if channel in last else []
                last[channel] = len(deps)
            deps.append(tuple(waits))
    return deps


def _occurrences(programs: list[Program]) -> list[int]:
    """Per item, over all steps, how many of its channel came before; -1: no collective."""
    seen: Counter[str] = Counter()
    found = []
    for item in (item for program in programs for item in program.items):
        channel = item.collective.channel if item.collective else None
        found.append(-1 if channel is None else seen[channel])
        if channel is not None:
            seen[channel] += 1
    return found
