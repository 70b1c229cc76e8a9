"""The log of a simulated host: clocks, power and temperature of its GPUs, utilization of its CPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tb_chopper.backend.simulate import physics
from tb_chopper.backend.simulate.config import Config
from tb_chopper.backend.simulate.recorded import Rank, boot_ns, clock_offset
from tb_chopper.backend.simulate.schedule import RankTimes
from tb_chopper.backend.simulate.sidecar import pci_address
from torch_ext import telemetry_format as log

SUFFIX = log.SUFFIX
READING_NS = 40_000
"""Time that it takes to read one GPU."""
CPU_EVERY = 5
"""GPU samples per CPU sample."""
CLOCKS_EVERY_NS = 1_000_000_000
ROOM_C, SPOT_C_PER_W, LEAK_C_PER_W = 34.0, 0.052, 0.12


def write(directory: Path, ranks: Sequence[Rank], times: Sequence[RankTimes]) -> Path:
    """Write the log of the host that `ranks` share, in the order of its GPUs; returns its path."""
    path = directory / log.file_name(ranks[0].host)
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write(log.header())
        file.writelines(line for _, line in sorted(_lines(ranks, times), key=lambda entry: entry[0]))
    return path


def _lines(ranks: Sequence[Rank], times: Sequence[RankTimes]) -> Iterator[tuple[int, str]]:
    """(monotonic time, line) in any order."""
    config = ranks[0].config
    end_ns = (min(len(t.clock_mhz) for t in times) - 1) * config.tick_ns
    begin = boot_ns(0)
    yield begin, log.line("start", begin, begin, text=ranks[0].host)
    cores, siblings = config.host.physical_cores, config.host.siblings
    topology = log.pairs((cpu, cpu % cores) for cpu in range(cores * siblings))
    yield begin, log.line("cpu_info", begin, begin, cpu_cores=topology)
    for rank in ranks:
        yield begin, log.line("gpu_info", begin, begin, gpu=rank.local_rank, pci_address=pci_address(rank.local_rank),
                              source="simulated", text=config.gpu.name)
    for t in range(0, end_ns, CLOCKS_EVERY_NS):
        yield boot_ns(t), log.line("clock", boot_ns(t), boot_ns(t) + 200, boottime_ns=boot_ns(t) + 100,
                                   realtime_ns=clock_offset(config, ranks[0].rank) + t + 100)
    for rank, rank_times in zip(ranks, times, strict=True):
        yield from _gpu_lines(rank, rank_times, end_ns)
    yield from _cpu_lines(config, ranks, end_ns)
    yield boot_ns(end_ns), log.line("stop", boot_ns(end_ns), boot_ns(end_ns), text="end of the run")


def _gpu_lines(rank: Rank, times: RankTimes, end_ns: int) -> Iterator[tuple[int, str]]:
    """One sample every `sample_ns`. The clock is read at an instant; power is the mean of the last tick, as the
    firmware reports it; the reading of one GPU follows that of the one before."""
    config = rank.config
    gpu, tick = config.gpu, config.tick_ns
    first = config.sample_ns + rank.local_rank * READING_NS + READING_NS // 2
    at = np.arange(first, end_ns - READING_NS, config.sample_ns)
    now = at // tick
    energy = np.concatenate([[0.0], np.cumsum(times.power_w[1:]) * tick * 1e-9])
    edges = np.arange(len(energy)) * tick
    joule = np.interp(at, edges, energy)
    heat = joule / (at * 1e-9)  # the heat sink averages over seconds
    temperature = ROOM_C + SPOT_C_PER_W * heat + LEAK_C_PER_W * config.silicon.of(rank.local_rank)
    busy, capped = times.activity > 0.02, times.clock_mhz < 0.995 * gpu.max_clock_mhz
    before = (at - config.sample_ns) // tick
    spans = np.maximum(now - before, 1)

    def share(flags: np.ndarray) -> np.ndarray:
        total = np.concatenate([[0], np.cumsum(flags)])
        return 100.0 * (total[before + spans] - total[before]) / spans

    columns = (at, times.clock_mhz[now], times.power_w[now], joule, temperature, share(busy), share(capped))
    for t, clock, watt, energy_j, celsius, active, throttled in zip(*(c.tolist() for c in columns), strict=True):
        yield boot_ns(t), log.line(
            "gpu", boot_ns(t) - READING_NS // 2, boot_ns(t) + READING_NS // 2, gpu=rank.local_rank,
            clock_mhz=round(clock, 1), memory_clock_mhz=round(clock / gpu.max_clock_mhz * gpu.memory_clock_mhz, 1),
            power_w=round(watt, 2), energy_j=round(energy_j, 4), temperature_c=round(celsius, 1),
            memory_temperature_c=round(celsius - 6.0, 1), activity_pct=round(active, 1),
            clock_limit_mhz=gpu.max_clock_mhz, power_limit_w=round(physics.power_cap_w(config, rank.rank), 1),
            throttle=log.throttle({"power": round(throttled, 1)}))


def _cpu_lines(config: Config, ranks: Sequence[Rank], end_ns: int) -> Iterator[tuple[int, str]]:
    """Each rank keeps a few threads awake, each on a physical core of its own, from which it moves now and then."""
    host = config.host
    rng = np.random.default_rng([config.seed, 7, ranks[0].rank])
    mean = np.repeat([u for u, n in host.threads for _ in range(n)], len(ranks))
    core = rng.permutation(host.physical_cores)[: len(mean)]
    period = CPU_EVERY * config.sample_ns
    for t in range(period, end_ns, period):
        if rng.random() < 0.1:
            free = np.setdiff1d(np.arange(host.physical_cores), core)
            core[rng.integers(len(core))] = rng.choice(free)
        used = np.clip(mean * (1.0 + 0.06 * rng.standard_normal(len(mean))), 0.5, 100.0)
        beside = int(core[rng.integers(len(core))]) + host.physical_cores * (host.siblings - 1)
        pairs = sorted([*zip(core.tolist(), used.round(1).tolist(), strict=True),
                        (beside, round(host.system_thread * rng.uniform(0.5, 1.5), 1))])
        yield boot_ns(t), log.line("cpu", boot_ns(t), boot_ns(t) + 20_000, cpu_pct=log.pairs(pairs))
