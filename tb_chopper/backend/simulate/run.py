"""Write simulated runs: the files that a profiled training would have left, and the truth behind them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from tb_chopper.backend.errors import InvalidSelection
from tb_chopper.backend.simulate import config as presets
from tb_chopper.backend.simulate import kineto, recorded, schedule, sidecar, training_step, truth, workload
from tb_chopper.backend.simulate.config import Config
from tb_chopper.backend.simulate.program import Program

Progress = Callable[[float, str], None]
"""Called with the share done (0 to 1) and a short text."""
PARALLEL_FROM = 20_000
"""Device activities from which several processes pay."""


@dataclass(frozen=True)
class Options:
    """What to simulate: a preset and what differs from it (None: as in the preset)."""

    preset: str = "tiny"
    shape: str | None = None
    """batch and sequence, e.g. b2s4"""
    fsdp: int | None = None
    all: bool = False
    """every shape of the published sweep under both versions of FSDP, one run each"""
    dialect: str | None = None
    """rocm or cuda: the GPU and its file dialect"""
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
    compress: bool = True


def configs(options: Options) -> list[Config]:
    """The configurations that the options ask for, checked. Raises InvalidSelection."""
    choices: list[tuple[str | None, int | None]] = (
        [(shape, version) for version in (1, 2) for shape in presets.SWEEP]
        if options.all
        else [(options.shape, options.fsdp)]
    )
    return [
        _configure(presets.preset(options.preset, shape=shape, fsdp=version), options) for shape, version in choices
    ]


def simulate(out_dir: Path | str, options: Options | None = None, progress: Progress | None = None) -> list[Path]:
    """Simulate and write one directory per configuration below `out_dir`, named after it; returns the directories.

    Files of an earlier simulation of the same name are replaced. Raises InvalidSelection for impossible options.
    """
    chosen = configs(options or Options())
    written = []
    for k, config in enumerate(chosen):
        directory = Path(out_dir) / config.run_name
        part = _part(progress, k / len(chosen), 1 / len(chosen), config.run_name)
        _clear(directory)
        _write_run(directory, config, part)
        written.append(directory)
    return written


def _configure(config: Config, options: Options) -> Config:
    changes: dict[str, Any] = {"seed": options.seed, "compress": options.compress}
    given = {
        "hosts": options.hosts,
        "gpus_per_host": options.ranks,
        "steps": options.steps,
        "optimizer_every": options.optimizer_every,
    }
    changes.update({name: value for name, value in given.items() if value is not None})
    if options.layers is not None:
        changes["model"] = replace(config.model, layers=options.layers)
    if options.dialect is not None:
        if options.dialect not in ("rocm", "cuda"):
            raise InvalidSelection(f"dialect {options.dialect!r} does not exist: choose rocm or cuda")
        changes["gpu"] = presets.MI300X if options.dialect == "rocm" else presets.H200
    faults = config.faults
    changes["faults"] = replace(
        faults,
        drop=options.drop,
        reorder=options.reorder,
        clock_skew_ns=round(options.clock_skew_us * 1000),
        jitter=faults.jitter if options.jitter is None else options.jitter,
        truncate=options.truncate,
        slow=dict(options.slow),
    )
    config = replace(config, **changes)
    _check(config)
    return config


def _check(config: Config) -> None:
    counts = {
        "hosts": config.hosts,
        "ranks": config.gpus_per_host,
        "layers": config.model.layers,
        "steps": config.steps,
    }
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


def programs(config: Config) -> list[Program]:
    """The warm-up step and the sampled steps; steps of one kind share a program."""
    work = workload.build(config)
    warm = training_step.build(config, work, optimizer=False, synchronize=False)
    kinds = {
        kind: training_step.build(config, work, optimizer=kind, synchronize=True)
        for kind in {_has_optimizer(config, step) for step in _steps(config)}
    }
    return [warm, *[kinds[_has_optimizer(config, step)] for step in _steps(config)]]


def _steps(config: Config) -> range:
    return range(config.first_step, config.first_step + config.steps)


def _has_optimizer(config: Config, step: int) -> bool:
    return bool(config.optimizer_every) and step % config.optimizer_every == 0


def _write_run(directory: Path, config: Config, progress: Progress) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    progress(0.0, "simulating")
    timeline = schedule.simulate(config, programs(config), lambda done: progress(0.4 * done, "simulating"))
    ranks = [recorded.record(timeline, r) for r in range(config.ranks)]
    files, tables = [], []
    jobs = [(directory, rank, timeline.ranks[rank.rank]) for rank in ranks]
    for done, (names, table) in enumerate(_map(jobs, len(timeline.ranks) * int(timeline.offsets[-1])), start=1):
        files.append(names)
        tables.append(table)
        progress(0.4 + 0.55 * done / len(ranks), "writing")
    truth.write(directory, truth.with_waits(tables, config), config, ranks, files)
    progress(1.0, "done")


def _write_rank(job: tuple[Path, recorded.Rank, schedule.RankTimes]) -> tuple[dict[str, Any], pd.DataFrame]:
    directory, rank, times = job
    trace = kineto.write(directory, rank)
    sidecar.write(trace, rank)
    return {"trace": trace.name}, truth.of_rank(rank, times)


def _map(jobs: list[Any], activities: int) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """Ranks in order, in several processes where that pays and the platform can fork."""
    workers = min(len(jobs), os.cpu_count() or 1, 8)
    if workers > 1 and activities >= PARALLEL_FROM and "fork" in multiprocessing.get_all_start_methods():
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
            yield from pool.map(_write_rank, jobs)
    else:
        yield from map(_write_rank, jobs)


def _clear(directory: Path) -> None:
    """Remove what an earlier simulation wrote here, and nothing else."""
    if not (directory / truth.NAME).is_file():
        if directory.is_dir() and any(directory.iterdir()):
            raise InvalidSelection(
                f"{directory} is not empty and holds no simulated run: choose another output directory"
            )
        return
    for pattern in (
        f"*{kineto.SUFFIX}*",
        "*.chopper.json",
        "*.telemetry.csv",
        "counters/**/*.csv",
        truth.TABLE,
        truth.NAME,
    ):
        for path in directory.glob(pattern):
            path.unlink()


def _part(progress: Progress | None, first: float, share: float, name: str) -> Progress:
    def report(done: float, doing: str) -> None:
        if progress is not None:
            progress(first + share * done, f"{name}: {doing}")

    return report
