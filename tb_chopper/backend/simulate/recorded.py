"""What a profiler sees of a simulated rank: integer nanoseconds, identifiers, and the capture window."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from tb_chopper.backend.simulate.config import NS_PER_S, Config
from tb_chopper.backend.simulate.program import Program
from tb_chopper.backend.simulate.schedule import Timeline

EPOCH_NS = 1_764_400_000 * NS_PER_S
"""Wall clock at the start of the simulation."""
BOOT_NS = 3_000_000 * NS_PER_S
"""Age of the hosts at that moment."""
FIRST_CORRELATION, FIRST_EXTERNAL, FIRST_SEQ, FIRST_COLLECTIVE = 4_000, 1, 700, 40


@dataclass
class Step:
    """One sampled step of one rank. Times are wall-clock ns of the rank's host."""

    number: int
    program: Program
    points: np.ndarray
    start: np.ndarray
    end: np.ndarray
    correlation: int
    external: int
    seq: int
    collective: dict[str, int]
    """by channel and by counter: number of the step's first collective"""


@dataclass
class Rank:
    """One rank's capture."""

    config: Config
    rank: int
    pid: int
    steps: list[Step]
    warm: Step
    """the step before the capture: its host side is not recorded"""
    warm_items: np.ndarray
    """its items that started inside the window"""
    window_start: int
    window_end: int

    @property
    def host(self) -> str:
        return f"node{self.rank // self.config.gpus_per_host}"

    @property
    def local_rank(self) -> int:
        return self.rank % self.config.gpus_per_host

    @property
    def device(self) -> int:
        """Number that the trace gives the GPU: on ROCm a node id, which counts the CPU sockets first."""
        return self.local_rank + (2 if self.config.gpu.dialect == "rocm" else 0)

    def boot_ns(self, wall_ns: int) -> int:
        """CLOCK_BOOTTIME of the host at one of its wall-clock times."""
        return boot_ns(wall_ns - clock_offset(self.config, self.rank))

    @property
    def main_thread(self) -> int:
        return self.pid

    @property
    def autograd_thread(self) -> int:
        return self.pid + 97

    @property
    def stem(self) -> str:
        """File name of the trace without its ending."""
        return f"{self.host}_r{self.rank}_{self.pid}.{self.window_end}"


def clock_offset(config: Config, rank: int) -> int:
    """What the clock of the rank's host reads at the simulation's zero."""
    return EPOCH_NS + config.faults.clock_skew_ns * (rank // config.gpus_per_host)


def boot_ns(t_ns: int) -> int:
    """CLOCK_BOOTTIME (and CLOCK_MONOTONIC: the hosts never slept) at a time of the simulation."""
    return BOOT_NS + t_ns


def record(timeline: Timeline, rank: int) -> Rank:
    """The capture of one rank: everything after the warm-up step."""
    config, times = timeline.config, timeline.ranks[rank]
    zero = clock_offset(config, rank)
    start, end = np.rint(times.start).astype(np.int64) + zero, np.rint(times.end).astype(np.int64) + zero
    steps = []
    correlation, external, seq = FIRST_CORRELATION, FIRST_EXTERNAL, FIRST_SEQ
    programs = timeline.programs[rank]
    keys = {key for program in programs for c in program.collectives for key in (c.channel, c.counter)}
    collective = dict.fromkeys(sorted(keys), FIRST_COLLECTIVE)
    b = 0
    for k, program in enumerate(programs):
        a, b = b, b + len(program.items)
        points = np.floor(times.points[k]).astype(np.int64) + zero
        steps.append(
            Step(
                config.first_step + k - 1, program, points, start[a:b], end[a:b], correlation, external, seq,
                dict(collective),
            )
        )
        correlation += program.n_correlation + 7
        external += program.n_external if k else 0
        seq += program.n_seq
        for key, n in Counter(key for c in program.collectives for key in {c.channel, c.counter}).items():
            collective[key] += n
    warm, sampled = steps[0], steps[1:]
    window_start = int(warm.points[-1]) + 2_000
    return Rank(
        config,
        rank,
        4_700 + 131 * rank + config.seed % 97,
        sampled,
        warm,
        np.flatnonzero(warm.start >= window_start),
        window_start,
        int(max(sampled[-1].points[-1], max(s.end.max() for s in sampled))) + 50_000,
    )
