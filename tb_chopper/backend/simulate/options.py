"""What a user may ask for, checked and made into configurations."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tb_chopper.backend.errors import InvalidSelection
from tb_chopper.backend.simulate import config as presets
from tb_chopper.backend.simulate import pipeline_schedule
from tb_chopper.backend.simulate.config import Config, Plan

DIALECTS = {"rocm": presets.MI300X, "cuda": presets.H200}
COUNTER_COLUMNS = ("6.2", "6.4", "7.0")


@dataclass(frozen=True)
class Options:
    """What to simulate: a preset and what differs from it (None: as in the preset)."""

    preset: str = "tiny"
    shape: str | None = None
    """batch and sequence (in 1024 tokens), e.g. b2s4"""
    fsdp: int | None = None
    all: bool = False
    """every shape of the published sweep under both versions of FSDP, one run each"""
    dialect: str | None = None
    """rocm or cuda: the GPU and its file formats"""
    hosts: int | None = None
    ranks: int | None = None
    """GPUs per host"""
    layers: int | None = None
    steps: int | None = None
    optimizer_every: int | None = None
    tensor: int = 1
    """tensor-parallel GPUs"""
    pipeline: int = 1
    """GPUs of a pipeline; data parallel over the rest"""
    schedule: str | None = None
    """of a pipeline: gpipe, 1f1b (if not told otherwise) or interleaved"""
    microbatches: int | None = None
    """of a pipeline; None: twice as many as it has GPUs"""
    virtual: int | None = None
    """stages per GPU of an interleaved pipeline; None: 2"""
    balanced: bool = False
    """stages of layers alone, without embedding, head and loss"""
    batched: bool = False
    """messages of a pipeline in batches, whose kernels tell no process group"""
    seed: int = 0
    drop: float = 0.0
    reorder: float = 0.0
    jitter: float | None = None
    clock_skew_us: float = 0.0
    truncate: int | None = None
    equal_gpus: bool = False
    """no GPU has more leakage than another"""
    slow: dict[int, float] = field(default_factory=dict)
    """rank -> share of the clock that it would have"""
    late_loader: dict[int, float] = field(default_factory=dict)
    """rank -> ms that its host waits for the data loader in a step"""
    late_every: int = 1
    stall: tuple[int, int, float] | None = None
    """(step, rank, ms): once, the host stops for so long"""
    storm: int = 0
    """kernels of an optimizer that is neither fused nor foreach"""
    islands: float | None = None
    """factor on the bandwidth between the two halves of a host"""
    memory: bool = False
    """the traces have the events of the caching allocator"""
    memory_growth: dict[int, float] = field(default_factory=dict)
    """rank -> MiB that it keeps in every step; with `memory`"""
    counter_columns: str | None = None
    """rocprofv3 of which ROCm: 6.2, 6.4 or 7.0"""
    counter_steps: int | None = None
    code_object_names: bool = False
    """kernel names of the trace end in .kd, as some profilers leave them"""
    compress: bool = True


def configs(options: Options) -> list[Config]:
    """The configurations that the options ask for, checked. Raises InvalidSelection."""
    choices: list[tuple[str | None, int | None]] = [(options.shape, options.fsdp)]
    if options.all:
        choices = [(shape, version) for version in (1, 2) for shape in presets.SWEEP]
    return [_configure(presets.preset(options.preset, shape=shape, fsdp=fsdp), options) for shape, fsdp in choices]


def _configure(config: Config, options: Options) -> Config:
    given = {
        "hosts": options.hosts, "gpus_per_host": options.ranks, "steps": options.steps,
        "optimizer_every": options.optimizer_every, "counter_columns": options.counter_columns,
        "counter_steps": options.counter_steps,
    }
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if options.layers is not None:
        changes["model"] = replace(config.model, layers=options.layers)
    if options.dialect is not None:
        if options.dialect not in DIALECTS:
            raise InvalidSelection(f"dialect {options.dialect!r} does not exist: choose one of {', '.join(DIALECTS)}")
        changes["gpu"] = DIALECTS[options.dialect]
    faults = replace(
        config.faults, drop=options.drop, reorder=options.reorder, clock_skew_ns=round(options.clock_skew_us * 1000),
        jitter=config.faults.jitter if options.jitter is None else options.jitter, truncate=options.truncate,
        slow=dict(options.slow), late_every=options.late_every, storm=options.storm,
        islands=options.islands, growth={rank: round(mib * 2**20) for rank, mib in options.memory_growth.items()},
        late_loader={rank: ms * 1e6 for rank, ms in options.late_loader.items()},
        stall=None if options.stall is None else (*options.stall[:2], options.stall[2] * 1e6))
    changes["plan"] = _plan(options)
    if options.equal_gpus:
        changes["silicon"] = presets.Silicon((0.0,))
    config = replace(config, faults=faults, seed=options.seed, code_object_names=options.code_object_names,
                     compress=options.compress, profile_memory=options.memory or bool(options.memory_growth),
                     **changes)
    _check(config)
    _check_plan(config)
    return config


def _plan(options: Options) -> Plan:
    if options.pipeline == 1:
        told = {"schedule": options.schedule, "microbatches": options.microbatches, "virtual": options.virtual,
                "balanced": options.balanced or None, "batched": options.batched or None}
        for name, value in told.items():
            if value is not None:
                raise InvalidSelection(f"{name} is of a pipeline: ask for one with --pipeline N")
        return Plan(options.tensor)
    schedule = options.schedule or pipeline_schedule.ONE_F_ONE_B
    interleaved = schedule == pipeline_schedule.INTERLEAVED
    return Plan(options.tensor, options.pipeline, schedule,
                2 * options.pipeline if options.microbatches is None else options.microbatches,
                (2 if interleaved else 1) if options.virtual is None else options.virtual, options.balanced,
                options.batched)


def _check_plan(config: Config) -> None:
    plan, model = config.plan, config.model
    if plan.is_default:
        return
    counts = {"tensor": plan.tensor, "pipeline": plan.pipeline, "microbatches": plan.microbatches,
              "virtual": plan.virtual}
    for name, count in counts.items():
        if count < 1:
            raise InvalidSelection(f"{name} is {count}: it must be at least 1")
    if plan.schedule not in pipeline_schedule.CLASSES:
        known = ", ".join(pipeline_schedule.CLASSES)
        raise InvalidSelection(f"no pipeline schedule {plan.schedule!r}: choose one of {known}")
    if config.ranks % (plan.tensor * plan.pipeline):
        raise InvalidSelection(f"{config.ranks} GPUs cannot be divided into tensor {plan.tensor} x pipeline "
                               f"{plan.pipeline}: choose --ranks and --hosts that are a multiple of their product")
    if model.heads % plan.tensor or model.hidden % plan.tensor:
        raise InvalidSelection(f"{model.heads} heads and a width of {model.hidden} cannot be divided by tensor "
                               f"{plan.tensor}")
    if plan.stages > model.layers:
        raise InvalidSelection(f"{plan.stages} stages need as many layers: there are {model.layers}, choose --layers")
    interleaved = plan.schedule == pipeline_schedule.INTERLEAVED
    if plan.virtual > 1 and not interleaved:
        raise InvalidSelection(f"{plan.schedule} has one stage per GPU: several need --schedule interleaved")
    if interleaved and plan.microbatches % plan.pipeline:
        raise InvalidSelection(f"interleaved needs microbatches that are a multiple of the pipeline's "
                               f"{plan.pipeline} GPUs: {plan.microbatches} are not")
    if plan.schedule == pipeline_schedule.ONE_F_ONE_B and plan.microbatches < plan.pipeline > 1:
        raise InvalidSelection(f"1f1b needs as many microbatches as GPUs of the pipeline: "
                               f"{plan.microbatches} are fewer than {plan.pipeline}")
    if config.fsdp.version != 2:
        raise InvalidSelection("tensor and pipeline parallelism go with FSDP version 2 only")


def _check(config: Config) -> None:
    counts = {"hosts": config.hosts, "ranks": config.gpus_per_host, "layers": config.model.layers,
              "steps": config.steps, "counter steps": config.counter_steps}
    for name, count in counts.items():
        if count < 1:
            raise InvalidSelection(f"{name} is {count}: it must be at least 1")
    if config.gpus_per_host > 8:
        raise InvalidSelection(f"{config.gpus_per_host} GPUs per host: a host has at most 8, choose more hosts")
    shares = {"drop": config.faults.drop, "reorder": config.faults.reorder, "jitter": config.faults.jitter}
    for name, share in shares.items():
        if not 0 <= share < 1:
            raise InvalidSelection(f"{name} is {share}: it must be a share from 0 to below 1")
    truncated = [] if config.faults.truncate is None else [config.faults.truncate]
    stalled = [] if config.faults.stall is None else [config.faults.stall[1]]
    of_ranks = (config.faults.slow, config.faults.late_loader, config.faults.growth)
    for rank in [*(rank for planted in of_ranks for rank in planted), *truncated, *stalled]:
        if not 0 <= rank < config.ranks:
            raise InvalidSelection(f"rank {rank} does not exist: there are {config.ranks}")
    for rank, factor in config.faults.slow.items():
        if not 0 < factor <= 1:
            raise InvalidSelection(f"slow GPU {rank}: {factor} is no share of a clock above 0 and up to 1")
    delays = [*config.faults.late_loader.values(), *([config.faults.stall[2]] if config.faults.stall else [])]
    if any(ns < 0 for ns in delays) or config.faults.late_every < 1 or config.faults.storm < 0 or any(
            n < 0 for n in config.faults.growth.values()):
        raise InvalidSelection("late loaders, stalls, storms and growing memory need sizes above 0")
    if config.faults.islands is not None and not (0 < config.faults.islands <= 1 and config.gpus_per_host % 2 == 0):
        raise InvalidSelection(f"islands: {config.faults.islands} is no share of a bandwidth, or "
                               f"{config.gpus_per_host} GPUs cannot be halved")
    if config.faults.stall is not None and config.faults.stall[0] not in config.step_numbers:
        first, last = config.step_numbers[0], config.step_numbers[-1]
        raise InvalidSelection(f"step {config.faults.stall[0]} is not captured: choose one of {first} to {last}")
    if config.counter_columns not in COUNTER_COLUMNS:
        known = ", ".join(COUNTER_COLUMNS)
        raise InvalidSelection(f"no counter columns of ROCm {config.counter_columns}: choose one of {known}")
