"""What a user may ask for, checked and made into configurations."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tb_chopper.backend.errors import InvalidSelection
from tb_chopper.backend.simulate import config as presets
from tb_chopper.backend.simulate.config import Config

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
    seed: int = 0
    drop: float = 0.0
    reorder: float = 0.0
    jitter: float | None = None
    clock_skew_us: float = 0.0
    truncate: int | None = None
    slow: dict[int, float] = field(default_factory=dict)
    """rank -> share of its maximum clock"""
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
        slow=dict(options.slow))
    config = replace(config, faults=faults, seed=options.seed, code_object_names=options.code_object_names,
                     compress=options.compress, **changes)
    _check(config)
    return config


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
    for rank in [*config.faults.slow, *([] if config.faults.truncate is None else [config.faults.truncate])]:
        if not 0 <= rank < config.ranks:
            raise InvalidSelection(f"rank {rank} does not exist: there are {config.ranks}")
    if config.counter_columns not in COUNTER_COLUMNS:
        known = ", ".join(COUNTER_COLUMNS)
        raise InvalidSelection(f"no counter columns of ROCm {config.counter_columns}: choose one of {known}")
