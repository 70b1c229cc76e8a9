"""Write simulated runs: the files that a profiled training would have left, and the truth behind them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tb_chopper.backend.errors import InvalidSelection
from tb_chopper.backend.simulate import (
    kineto,
    pipeline_step,
    recorded,
    rocprofv3,
    schedule,
    sidecar,
    telemetry,
    topology,
    training_step,
    truth,
    workload,
)
from tb_chopper.backend.simulate.config import Config
from tb_chopper.backend.simulate.options import Options, configs
from tb_chopper.backend.simulate.program import Program

Progress = Callable[[float, str], None]
"""Called with the share done (0 to 1) and a short text."""
PARALLEL_FROM = 20_000
"""Device activities from which several processes pay."""


def simulate(out_dir: Path | str, options: Options | None = None, progress: Progress | None = None) -> list[Path]:
    """Simulate and write one directory per configuration below `out_dir`, named after it; returns the directories.

    Files of an earlier simulation of the same name are replaced. Raises InvalidSelection for impossible options.
    """
    chosen = configs(options or Options())
    written = []
    for k, config in enumerate(chosen):
        directory = Path(out_dir) / config.run_name
        _clear(directory)
        _write_run(directory, config, _part(progress, k / len(chosen), 1 / len(chosen), config.run_name))
        written.append(directory)
    return written


def programs(config: Config, pipeline: int = 0) -> list[Program]:
    """The warm-up step and the sampled steps of the ranks at a place in the pipeline; steps of one kind share a
    program."""
    work = workload.build(config, pipeline)

    def build(optimizer: bool, synchronize: bool) -> Program:
        step = (pipeline_step.PipelineStep(config, work, pipeline) if config.plan.pipeline > 1 else
                training_step.TrainingStep(config, work))
        return step.build(optimizer=optimizer, synchronize=synchronize)

    every = config.optimizer_every
    optimizer = [bool(every) and step % every == 0 for step in config.step_numbers]
    kinds = {kind: build(kind, True) for kind in set(optimizer)}
    return [build(False, False), *(kinds[kind] for kind in optimizer)]


def _write_run(directory: Path, config: Config, progress: Progress) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    progress(0.0, "simulating")
    of_places = [programs(config, place) for place in range(config.plan.pipeline)]
    timeline = schedule.simulate(config, of_places, lambda done: progress(0.4 * done, "simulating"))
    ranks = [recorded.record(timeline, r) for r in range(config.ranks)]
    for host in range(config.hosts):
        members = slice(host * config.gpus_per_host, (host + 1) * config.gpus_per_host)
        telemetry.write(directory, ranks[members], timeline.ranks[members])
        topology.write(directory, config, ranks[members][0].host, members.start)
    job = _Job(directory, ranks, timeline, kineto.Templates(config, [p for steps in of_places for p in steps[1:]]))
    parts = []
    for part in _map(job):
        parts.append(part)
        progress(0.4 + 0.55 * len(parts) / len(ranks), "writing")
    truth.write(directory, config, ranks, parts)
    progress(1.0, "done")


@dataclass(frozen=True)
class _Job:
    """What is common to the files of all ranks."""

    directory: Path
    ranks: list[recorded.Rank]
    timeline: schedule.Timeline
    templates: kineto.Templates

    def write(self, rank: int) -> truth.Part:
        record = self.ranks[rank]
        trace = kineto.write(self.directory, record, self.templates)
        sidecar.write(trace, record)
        counters, dispatches = rocprofv3.write(self.directory, record)
        return truth.Part(trace.name, counters, truth.of_rank(record, self.timeline.ranks[rank]), dispatches)


def _map(job: _Job) -> Iterator[truth.Part]:
    """Ranks in order, in several processes where that pays and the platform can fork."""
    n = len(job.ranks)
    workers = min(n, os.cpu_count() or 1, 8)
    activities = sum(len(times.start) for times in job.timeline.ranks)
    if workers > 1 and activities >= PARALLEL_FROM and "fork" in multiprocessing.get_all_start_methods():
        fork = multiprocessing.get_context("fork")  # the job is inherited, not sent
        with ProcessPoolExecutor(workers, mp_context=fork, initializer=_inherit, initargs=(job,)) as pool:
            yield from pool.map(_write_inherited, range(n))
    else:
        yield from map(job.write, range(n))


_inherited: list[_Job] = []


def _inherit(job: _Job) -> None:
    _inherited[:] = [job]


def _write_inherited(rank: int) -> truth.Part:
    return _inherited[0].write(rank)


def _clear(directory: Path) -> None:
    """Remove what an earlier simulation wrote here, and nothing else."""
    if directory.is_dir() and any(directory.iterdir()) and not (directory / truth.DIRECTORY / truth.SUMMARY).is_file():
        raise InvalidSelection(f"{directory} is not empty and holds no simulated run: choose another output directory")
    written = (f"*{kineto.SUFFIX}*", f"*{sidecar.SUFFIX}", f"*{telemetry.SUFFIX}", f"*{topology.SUFFIX}",
               f"{rocprofv3.DIRECTORY}/**/*.csv", f"{truth.DIRECTORY}/*")
    for pattern in written:
        for path in directory.glob(pattern):
            path.unlink()


def _part(progress: Progress | None, first: float, share: float, name: str) -> Progress:
    def report(done: float, doing: str) -> None:
        if progress is not None:
            progress(first + share * done, f"{name}: {doing}")

    return report
