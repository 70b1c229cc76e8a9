"""What is simulated: model, machine, framework and faults, as plain values, and the presets.

Everything here is a cause. What follows from the causes (durations, overlap, waiting, clocks) is computed by
`physics` and `schedule` and is never set.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tb_chopper.backend.errors import InvalidSelection

NS_PER_S = 1_000_000_000


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer with grouped-query attention and a gated MLP (Llama 3)."""

    name: str
    layers: int
    dim: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def layer_params(self) -> int:
        qkv = self.dim * (self.heads + 2 * self.kv_heads) * self.head_dim
        return qkv + self.heads * self.head_dim * self.dim + 3 * self.dim * self.hidden + 2 * self.dim

    @property
    def root_params(self) -> int:
        """Embedding, final norm and output projection."""
        return 2 * self.vocab * self.dim + self.dim

    @property
    def params(self) -> int:
        return self.layers * self.layer_params + self.root_params


@dataclass(frozen=True)
class Gpu:
    name: str
    arch: str  # gfx942, sm_90
    dialect: str  # rocm | cuda
    units: int
    """CUs or SMs"""
    max_clock_mhz: int
    flop_per_clock_per_unit: int
    """dense bf16"""
    memory_bytes: int
    memory_bytes_per_s: float
    memory_clock_mhz: int
    compute_dies: int
    """XCCs: counters that exist once per die are summed over them"""
    power_cap_w: float
    idle_w: float
    dynamic_w: float
    """power of the cores at the maximum clock and full activity; falls with the third power of the clock"""
    memory_w: float
    """power of the memory under a training load"""
    link_bytes_per_s: float
    """bus bandwidth that a ring collective reaches inside a host"""
    peer_bytes_per_s: float
    """bandwidth of a message between two GPUs of a host"""

    @property
    def peak_flop_per_s(self) -> float:
        return self.flop_per_clock_per_unit * self.units * self.max_clock_mhz * 1e6


MI300X = Gpu(
    "AMD Instinct MI300X",
    "gfx942",
    "rocm",
    304,
    2100,
    2048,
    206_141_652_992,
    5.3248e12,
    1300,
    8,
    power_cap_w=750,
    idle_w=140,
    dynamic_w=1500,
    memory_w=105,
    link_bytes_per_s=285e9,
    peer_bytes_per_s=46e9,
)
H200 = Gpu(
    "NVIDIA H200",
    "sm_90",
    "cuda",
    132,
    1830,
    4096,
    150_754_820_096,
    4.8e12,
    3201,
    1,
    power_cap_w=700,
    idle_w=110,
    dynamic_w=860,
    memory_w=110,
    link_bytes_per_s=360e9,
    peer_bytes_per_s=330e9,
)


@dataclass(frozen=True)
class Host:
    """The CPU side. `threads` are (utilization in percent, count) per rank: what the training keeps awake."""

    physical_cores: int = 192
    siblings: int = 2
    threads: tuple[tuple[float, int], ...] = ((96.0, 1), (9.0, 1), (4.0, 1))
    system_thread: float = 6.0
    """utilization of the rest of the system, one thread, which the scheduler puts beside a busy one"""
    dispatch_ns: float = 3_200
    """cost of one operator on the launching thread"""
    launch_call_ns: float = 4_200
    launch_latency_ns: float = 5_500
    """from the start of the launch call to the earliest start of the kernel on an idle stream"""
    dispatch_gap_ns: float = 900
    """between two kernels of one stream"""
    step_preparation_ns: float = 2_600_000
    """Python between two steps: data loader, logging, bookkeeping"""
    optimizer_preparation_ns: float = 3_800_000
    queue_depth: int = 1024
    """launches that may wait on the device before the launch call blocks"""


@dataclass(frozen=True)
class Fsdp:
    """What the two versions of FSDP do differently."""

    version: int
    copies: bool
    """per-parameter sharding copies in and out of the collective's buffers"""
    rate_limiter: bool
    """the host waits before it gathers more than two layers ahead"""
    allocator_w: float
    """power that block reuse in the caching allocator adds on average (spikes of memory traffic)"""
    allocator_swing_w: float
    """standard deviation of that power"""


FSDP1 = Fsdp(1, copies=False, rate_limiter=True, allocator_w=215.0, allocator_swing_w=70.0)
FSDP2 = Fsdp(2, copies=True, rate_limiter=False, allocator_w=0.0, allocator_swing_w=6.0)


@dataclass(frozen=True)
class Silicon:
    """How the GPUs of one host differ: extra static power in W (leakage, heat), one per local rank, repeated."""

    extra_w: tuple[float, ...] = (-10.0, -18.0, 74.0, -13.0, -22.0, -9.0, 71.0, -16.0)

    def of(self, local_rank: int) -> float:
        return self.extra_w[local_rank % len(self.extra_w)]


@dataclass(frozen=True)
class Plan:
    """How the ranks divide a model: tensor parallel inside layers, a pipeline of layers, FSDP over the rest."""

    tensor: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"
    """gpipe, 1f1b or interleaved"""
    microbatches: int = 1
    """that a step of the pipeline cuts its batch into; `Config.batch` is the size of one"""
    virtual: int = 1
    """stages per rank, where interleaved"""
    balanced: bool = False
    """stages of layers alone: no embedding, no head and no loss, which make the first and the last stage longer"""

    batched: bool = False
    """messages by batch_isend_irecv, as torch.distributed.pipelining sends them: their kernels tell no process group"""

    @property
    def is_default(self) -> bool:
        """FSDP over all ranks."""
        return self.tensor == self.pipeline == 1

    @property
    def stages(self) -> int:
        return self.pipeline * self.virtual


@dataclass(frozen=True)
class Faults:
    """Damage and noise for tests."""

    drop: float = 0.0
    """share of the counter dispatches that are missing"""
    reorder: float = 0.0
    """share of neighbouring counter dispatches of different streams written in the other order"""
    jitter: float = 0.0
    """relative standard deviation of a kernel's work from one instance to the next"""
    clock_skew_ns: int = 0
    """clock of host k runs k times this ahead of host 0"""
    truncate: int | None = None
    """rank whose trace is cut off in the middle"""
    slow: dict[int, float] = field(default_factory=dict)
    """rank -> factor on its clock: on its limit, and by a lower power cap on what the cap allows"""
    late_loader: dict[int, float] = field(default_factory=dict)
    """rank -> ns that its host waits for the data loader at the beginning of a step"""
    late_every: int = 1
    """the loader is late in every so many steps"""
    stall: tuple[int, int, float] | None = None
    """(step, rank, ns): once, the host stops for so long before the forward pass"""
    islands: float | None = None
    """factor on the bandwidth between the two halves of a host"""
    growth: dict[int, int] = field(default_factory=dict)
    """rank -> bytes that it keeps in every step"""
    storm: int = 0
    """kernels that an optimizer without fused or foreach kernels launches; 0: it has fused ones"""


@dataclass(frozen=True)
class Config:
    preset: str
    model: Model
    gpu: Gpu
    batch: int
    sequence: int
    fsdp: Fsdp = FSDP2
    hosts: int = 1
    gpus_per_host: int = 8
    steps: int = 10
    first_step: int = 10
    optimizer_every: int = 15
    """the optimizer runs in steps whose number divides by this; 0: never"""
    host: Host = Host()
    silicon: Silicon = Silicon()
    plan: Plan = Plan()
    profile_memory: bool = False
    """the traces have the events of the caching allocator"""
    fused_norm: bool = False
    """RMSNorm is one kernel, not written in pieces"""
    faults: Faults = Faults()
    seed: int = 0
    tick_ns: int = 1_000_000
    """period of the power controller"""
    sample_ns: int = 10_000_000
    """period of the telemetry sampler"""
    counter_steps: int = 1
    """steps of the counter runs"""
    counter_overhead_cycles: int = 16_000
    """cycles per die that starting and stopping the counters adds to GRBM_GUI_ACTIVE of each dispatch"""
    counter_columns: str = "7.0"
    """rocprofv3 of ROCm 6.2, 6.4 or 7.0"""
    counter_passes: int = 3
    code_object_names: bool = False
    """the trace's kernel names end in .kd, as the rocprofiler-sdk backend of the profiler leaves them"""
    compress: bool = True

    @property
    def ranks(self) -> int:
        return self.hosts * self.gpus_per_host

    @property
    def data(self) -> int:
        """Ranks of a data-parallel group."""
        return self.ranks // (self.plan.tensor * self.plan.pipeline)

    @property
    def step_numbers(self) -> range:
        return range(self.first_step, self.first_step + self.steps)

    @property
    def tokens(self) -> int:
        """Tokens that go through the model at once: of a step, or of a microbatch of a pipeline."""
        return self.batch * self.sequence

    @property
    def run_name(self) -> str:
        name = f"simulated_{self.preset}_b{self.batch}s{self.sequence >> 10}"
        if self.plan.is_default:
            return f"{name}_fsdp{self.fsdp.version}"
        plan = self.plan
        name += f"_tp{plan.tensor}_pp{plan.pipeline}_dp{self.data}"
        if plan.pipeline == 1:
            return name
        name += f"_{plan.schedule}_m{plan.microbatches}" + (f"_v{plan.virtual}" if plan.virtual > 1 else "")
        return name + "_batched" * plan.batched


LLAMA3_8B = Model("llama3-8b", layers=32, dim=4096, hidden=14336, heads=32, kv_heads=8, head_dim=128, vocab=128_256)
LLAMA_WIDE = Model("llama-wide", layers=3, dim=4096, hidden=14336, heads=32, kv_heads=8, head_dim=128, vocab=16_000)
LLAMA_SMALL = Model("llama-small", layers=2, dim=2048, hidden=7168, heads=16, kv_heads=4, head_dim=128, vocab=32_000)

SWEEP = ("b1s4", "b2s4", "b4s4", "b1s8", "b2s8")
"""Batch and sequence (in 1024 tokens) of the published sweep."""

PRESETS: dict[str, Config] = {
    "tiny": Config(
        "tiny",
        LLAMA_SMALL,
        MI300X,
        batch=1,
        sequence=2048,
        gpus_per_host=2,
        steps=3,
        optimizer_every=1,
        host=Host(step_preparation_ns=300_000, optimizer_preparation_ns=200_000, queue_depth=64),
        tick_ns=100_000,
        sample_ns=500_000,
        counter_overhead_cycles=0,
    ),
    "mi300x-llama3-8b": Config(
        "mi300x-llama3-8b", LLAMA3_8B, MI300X, batch=2, sequence=4096, faults=Faults(jitter=0.004)
    ),
    "h200-llama3-8b": Config(
        "h200-llama3-8b",
        LLAMA3_8B,
        H200,
        batch=2,
        sequence=4096,
        faults=Faults(jitter=0.004),
        host=Host(physical_cores=96),
    ),
    # Nothing to find: equal GPUs below their power cap, work that hides communication. Faults are planted on it.
    "healthy": Config(
        "healthy",
        LLAMA_WIDE,
        replace(MI300X, power_cap_w=2000),
        batch=4,
        sequence=4096,
        gpus_per_host=4,
        steps=8,
        optimizer_every=1,
        host=Host(step_preparation_ns=800_000, optimizer_preparation_ns=600_000),
        silicon=Silicon((0.0,)),
        fused_norm=True,
        faults=Faults(jitter=0.004),
    ),
}


def preset(name: str = "tiny", *, shape: str | None = None, fsdp: int | None = None) -> Config:
    """A preset, with another batch and sequence (`b2s4`: batch 2, 4 x 1024 tokens) and FSDP version where given.

    Raises InvalidSelection for an unknown name or a shape that cannot be read.
    """
    if name not in PRESETS:
        raise InvalidSelection(f"no preset {name!r}: choose one of {', '.join(PRESETS)}")
    config = PRESETS[name]
    if shape is not None:
        batch, sequence = _parse_shape(shape)
        config = replace(config, batch=batch, sequence=sequence)
    if fsdp is not None:
        if fsdp not in (1, 2):
            raise InvalidSelection(f"FSDP version {fsdp} does not exist: choose 1 or 2")
        config = replace(config, fsdp=FSDP1 if fsdp == 1 else FSDP2)
    return config


def _parse_shape(shape: str) -> tuple[int, int]:
    batch, mark, sequence = shape.removeprefix("b").partition("s")
    if not (mark and batch.isdigit() and sequence.isdigit() and int(batch) and int(sequence)):
        raise InvalidSelection(f"shape {shape!r} is not like b2s4 (batch 2, sequence 4 x 1024)")
    return int(batch), int(sequence) * 1024
