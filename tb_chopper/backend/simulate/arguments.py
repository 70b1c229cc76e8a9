"""The arguments of `tb-chopper simulate`."""

from __future__ import annotations

import argparse
from pathlib import Path

from tb_chopper.backend.simulate import pipeline_schedule
from tb_chopper.backend.simulate.config import PRESETS
from tb_chopper.backend.simulate.options import COUNTER_COLUMNS, DIALECTS, Options
from tb_chopper.backend.simulate.run import Progress, simulate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write the run or runs into")
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="machine and model (default: tiny)")
    parser.add_argument("--shape", metavar="bBsS", help="batch B and sequence S x 1024 per GPU, e.g. b2s4")
    parser.add_argument("--fsdp", type=int, choices=(1, 2), help="FSDP version")
    parser.add_argument("--all", action="store_true", help="all five published shapes under both FSDP versions")
    parser.add_argument("--dialect", choices=DIALECTS, help="AMD or NVIDIA GPUs and file formats")
    parser.add_argument("--hosts", type=int, help="number of hosts")
    parser.add_argument("--ranks", type=int, help="GPUs per host, 8 at most")
    parser.add_argument("--layers", type=int, help="transformer layers")
    parser.add_argument("--steps", type=int, help="captured steps")
    parser.add_argument("--optimizer-every", type=int, metavar="N",
                        help="run the optimizer in steps divisible by N; 0: never")
    parser.add_argument("--seed", type=int, default=0)
    plan = parser.add_argument_group("parallel plan (default: FSDP over all GPUs)")
    plan.add_argument("--tensor", type=int, default=1, metavar="N", help="tensor parallel over N GPUs")
    plan.add_argument("--pipeline", type=int, default=1, metavar="N",
                      help="a pipeline over N GPUs; FSDP over what tensor and pipeline leave")
    plan.add_argument("--schedule", choices=pipeline_schedule.CLASSES, help="of the pipeline (default: 1f1b)")
    plan.add_argument("--microbatches", type=int, metavar="M",
                      help="of the pipeline, each of the preset's batch (default: 2 per GPU of the pipeline)")
    plan.add_argument("--virtual", type=int, metavar="V", help="stages per GPU where interleaved (default: 2)")
    plan.add_argument("--balanced", action="store_true",
                      help="stages of layers alone: without embedding, head and loss, that make two of them longer")
    plan.add_argument("--batched", action="store_true",
                      help="messages by batch_isend_irecv: their kernels do not tell what they are")
    faults = parser.add_argument_group("damage and noise, for tests")
    faults.add_argument("--drop", type=float, default=0.0, metavar="SHARE", help="share of counter dispatches missing")
    faults.add_argument("--reorder", type=float, default=0.0, metavar="SHARE",
                        help="share of counter dispatches that run in another order between streams")
    faults.add_argument("--jitter", type=float, metavar="SHARE", help="spread of a kernel's work between instances")
    faults.add_argument("--clock-skew", type=float, default=0.0, metavar="US", help="host k's clock is k x US ahead")
    faults.add_argument("--truncate", type=int, metavar="RANK", help="cut this rank's trace off")
    planted = parser.add_argument_group("faults of the training, with a known size: docs/simulation.md")
    planted.add_argument("--equal-gpus", action="store_true", help="no GPU has more leakage than another")
    planted.add_argument("--slow", action="append", default=[], metavar="RANK:FACTOR", type=_of_rank,
                         help="a GPU at this share of its clock, e.g. 3:0.8")
    planted.add_argument("--late-loader", action="append", default=[], metavar="RANK:MS", type=_of_rank,
                         help="a host that waits so long for its data loader, e.g. 2:15")
    planted.add_argument("--late-every", type=int, default=1, metavar="N", help="... in every N-th step (default: 1)")
    planted.add_argument("--stall", metavar="STEP:RANK:MS", type=_stall, help="a host that stops once, e.g. 13:0:80")
    planted.add_argument("--islands", type=float, metavar="FACTOR",
                         help="two islands of GPUs in each host, between which the bandwidth has this factor, e.g. 0.2")
    planted.add_argument("--memory", action="store_true", help="record the events of the caching allocator")
    planted.add_argument("--memory-growth", action="append", default=[], metavar="RANK:MIB", type=_of_rank,
                         help="a GPU that keeps so much in every step, e.g. 1:64; with --memory")
    planted.add_argument("--storm", type=int, default=0, metavar="N", help="an optimizer of N small kernels")
    parser.add_argument("--counter-columns", choices=COUNTER_COLUMNS, help="columns of the rocprofv3 of this ROCm")
    parser.add_argument("--counter-steps", type=int, help="steps of the counter runs")
    parser.add_argument("--code-object-names", action="store_true", help="kernel names of the traces end in .kd")
    parser.add_argument("--no-compress", action="store_true", help="write .json instead of .json.gz")


def options(args: argparse.Namespace) -> Options:
    return Options(
        preset=args.preset, shape=args.shape, fsdp=args.fsdp, all=args.all, dialect=args.dialect, hosts=args.hosts,
        ranks=args.ranks, layers=args.layers, steps=args.steps, optimizer_every=args.optimizer_every, seed=args.seed,
        drop=args.drop, reorder=args.reorder, jitter=args.jitter, clock_skew_us=args.clock_skew, truncate=args.truncate,
        equal_gpus=args.equal_gpus, slow=dict(args.slow), late_loader=dict(args.late_loader),
        tensor=args.tensor, pipeline=args.pipeline, schedule=args.schedule, microbatches=args.microbatches,
        virtual=args.virtual, balanced=args.balanced, batched=args.batched, late_every=args.late_every,
        stall=args.stall, storm=args.storm, islands=args.islands, memory=args.memory,
        memory_growth=dict(args.memory_growth), counter_columns=args.counter_columns,
        counter_steps=args.counter_steps,
        code_object_names=args.code_object_names, compress=not args.no_compress)


def run(args: argparse.Namespace, progress: Progress | None = None) -> list[Path]:
    """Simulate as the arguments ask; returns the run directories. Raises InvalidSelection."""
    return simulate(args.out, options(args), progress)


def _of_rank(text: str) -> tuple[int, float]:
    rank, _, size = text.partition(":")
    try:
        return int(rank), float(size)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 3:0.8 (rank 3, and a size)") from None


def _stall(text: str) -> tuple[int, int, float]:
    try:
        step, rank, ms = text.split(":")
        return int(step), int(rank), float(ms)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 13:0:80 (step 13 of rank 0 by 80 ms)") from None
