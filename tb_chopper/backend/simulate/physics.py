"""What the device makes of a kernel: its work in clock cycles, and the clock that the power cap allows.

A kernel is a number of cycles: a matrix kernel's follow from its FLOPs, a memory-bound one's from its bytes (the
memory's clock is scaled with the cores' under a power cap). It progresses with `clock / (1 + contention)` cycles a
second while a collective runs on the same GPU and with `clock` otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tb_chopper.backend.simulate.config import Config, Gpu
from tb_chopper.backend.simulate.workload import Kernel

COLLECTIVE_LATENCY_NS = 24_000
MESSAGE_LATENCY_NS = 9_000
BETWEEN_HOSTS = 6.0
"""How many times slower than inside a host a transfer through the network is."""
COPY_LATENCY_NS = 1_800
"""Start and completion of a copy between host and device."""
POWER_MEMORY_NS = 20_000_000
"""Time constant of the controller's view of power."""
MIN_CLOCK_SHARE = 0.3


def cycles(kernel: Kernel, gpu: Gpu) -> float:
    """Clock cycles that the kernel needs while it runs alone; 0 for a collective, which takes as long as it takes."""
    if kernel.kind == "collective":
        return 0.0
    if kernel.flop_performed:
        return kernel.flop_performed / (gpu.flop_per_clock_per_unit * gpu.units * kernel.utilization)
    seconds = kernel.bytes / (gpu.memory_bytes_per_s * kernel.utilization)
    if kernel.kind == "memcpy":
        seconds += COPY_LATENCY_NS * 1e-9
    return seconds * gpu.max_clock_mhz * 1e6


def theoretical_ns(kernel: Kernel, gpu: Gpu) -> float:
    """Time at the peak of the matrix cores, or of the memory, at the maximum clock."""
    if kernel.flop:
        return kernel.flop / gpu.peak_flop_per_s * 1e9
    return kernel.bytes / gpu.memory_bytes_per_s * 1e9


def transfer_ns(name: str, n_bytes: float, config: Config, members: Sequence[int] = ()) -> float:
    """Time of a collective, or of a message (`send`, `recv`), from the arrival of the last of its ranks on.

    `members`: the ranks that take part; of a message its sender and receiver; empty: all ranks. A collective moves
    (n - 1) / n of its bytes, an all-reduce twice that, over the bus bandwidth of a ring; a message moves all of its
    bytes over the link of two GPUs.
    """
    n = len(members) or config.ranks
    message = name in ("send", "recv")
    factor = 1.0 if message else (2.0 if name == "allreduce" else 1.0) * (n - 1) / n
    link = config.gpu.peer_bytes_per_s if message else config.gpu.link_bytes_per_s
    latency = MESSAGE_LATENCY_NS if message else COLLECTIVE_LATENCY_NS
    return latency + n_bytes * factor / link * 1e9 * slowdown(config, members)


def slowdown(config: Config, members: Sequence[int] = ()) -> float:
    """How many times slower than the links inside a host the slowest link between these ranks is."""
    ranks = members or range(config.ranks)
    if len({rank // config.gpus_per_host for rank in ranks}) > 1:
        return BETWEEN_HOSTS
    halves = {rank % config.gpus_per_host < config.gpus_per_host // 2 for rank in ranks}
    return 1.0 / config.faults.islands if config.faults.islands is not None and len(halves) > 1 else 1.0


def power_cap_w(config: Config, rank: int) -> float:
    """Power cap of a GPU. A slow one's leaves its cores so much less that its clock falls by the planted factor where
    the cap limits it: power of the cores goes with the third power of the clock."""
    gpu = config.gpu
    fixed = gpu.idle_w + config.silicon.of(rank % config.gpus_per_host) + gpu.memory_w + config.fsdp.allocator_w
    return fixed + (gpu.power_cap_w - fixed) * config.faults.slow.get(rank, 1.0) ** 3


class PowerController:
    """The firmware of one GPU: lowers the clock while the averaged power is above the cap, raises it below.

    `update` is called every tick with the activity (0 to 1, time-weighted) since the last one.
    """

    def __init__(self, config: Config, rank: int, rng: np.random.Generator) -> None:
        gpu, fsdp = config.gpu, config.fsdp
        self.static_w = gpu.idle_w + config.silicon.of(rank % config.gpus_per_host)
        self.memory_w = gpu.memory_w
        self.dynamic_w, self.cap_w = gpu.dynamic_w, power_cap_w(config, rank)
        self.max_mhz = gpu.max_clock_mhz * config.faults.slow.get(rank, 1.0)
        self.share = 1.0 / gpu.max_clock_mhz
        self.allocator_w, self.swing_w = fsdp.allocator_w, fsdp.allocator_swing_w
        self.rng = rng
        self.weight = min(1.0, config.tick_ns / POWER_MEMORY_NS)
        self.average_w = self.cap_w
        self.clock_mhz = min(self.max_mhz, self._balanced())
        self.power_w = self.static_w

    def _balanced(self) -> float:
        """Clock at which a typical mix of kernels just meets the cap: where the controller starts."""
        left = self.cap_w - self.static_w - self.memory_w - self.allocator_w
        return float(np.cbrt(left / (0.85 * self.dynamic_w)) / self.share)

    def update(self, activity: float) -> None:
        swing = max(-self.allocator_w, self.swing_w * self.rng.standard_normal()) if self.swing_w else 0.0
        busy = min(1.0, activity * 4)
        cube = (self.clock_mhz * self.share) ** 3
        self.power_w = (
            self.static_w + activity * self.dynamic_w * cube + busy * (self.memory_w + self.allocator_w + swing)
        )
        self.average_w += self.weight * (self.power_w - self.average_w)
        error = (self.cap_w - self.average_w) / self.cap_w
        jump = (
            swing / self.cap_w if self.allocator_w else 0.0
        )  # spikes pull the clock down before the average sees them
        clock = self.clock_mhz * (1.0 + (0.5 * error - 0.2 * max(0.0, jump)) * self.weight * 4)
        self.clock_mhz = min(self.max_mhz, max(MIN_CLOCK_SHARE * self.max_mhz, clock))
