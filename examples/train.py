"""Train the small Llama on random tokens and record it for tb-chopper. Runs on any machine, with GPUs or without.

    python examples/train.py                                        one process
    torchrun --nproc-per-node 2 examples/train.py --parallel fsdp2  several
    torchrun --nproc-per-node 4 examples/train.py --parallel pp --schedule 1f1b --batch 8 --microbatches 8

The lines that a training of your own needs are marked with `# chopper`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama import Block, Config, Llama
from plans import SCHEDULES, Pipeline, parameter_groups, tensor_parallel
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule

from torch_ext import annotate, annotate_pipeline, chopper_trace_handler  # chopper

DIMENSIONS = {"fsdp2": "dp_shard", "fsdp1": "dp_shard", "ddp": "dp_replicate", "tp": "tp", "pp": "pp"}
"""What the processes divide among themselves."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", choices=(*DIMENSIONS, "none"), default="none")
    parser.add_argument("--schedule", choices=tuple(SCHEDULES), default="1f1b", help="of a pipeline (pp)")
    parser.add_argument("--microbatches", type=int, default=4, help="that a pipeline cuts the batch into")
    parser.add_argument("--checkpoint", action="store_true", help="recompute each layer in backward")
    parser.add_argument("--compile", action="store_true", help="torch.compile each layer (needs a C++ compiler on CPU)")
    parser.add_argument("--no-annotate", dest="annotate", action="store_false", help="no module scopes")
    parser.add_argument("--no-telemetry", dest="telemetry", action="store_false", help="no clocks, power, CPU use")
    parser.add_argument("--logdir", default="log/example")
    parser.add_argument("--worker", default=None, help="name of this worker's files instead of {host}_r{rank}_{pid}")
    parser.add_argument("--wait", type=int, default=1, help="steps before the profiler warms up")
    parser.add_argument("--warmup", type=int, default=1, help="steps that the profiler throws away")
    parser.add_argument("--active", type=int, default=3, help="steps that it records")
    parser.add_argument("--repeat", type=int, default=1, help="how often")
    parser.add_argument("--steps", type=int, default=None, help="training steps (default: as many as the above need)")
    parser.add_argument("--batch", type=int, default=2, help="sequences per step and process (tp, pp: of all together)")
    parser.add_argument("--sequence", type=int, default=128, help="tokens per sequence")
    for field, default in (("layers", 4), ("width", 256), ("hidden", 688), ("heads", 8), ("kv-heads", 2)):
        parser.add_argument(f"--{field}", type=int, default=default)
    parser.add_argument("--vocabulary", type=int, default=2048)
    args = parser.parse_args()
    if args.parallel == "pp" and args.batch % args.microbatches:
        parser.error(f"--batch {args.batch} cannot be cut into {args.microbatches} microbatches")
    if args.parallel == "pp" and (args.checkpoint or args.compile):
        parser.error("--checkpoint and --compile are not for --parallel pp")
    if args.steps is None:
        args.steps = (args.wait + args.warmup + args.active) * args.repeat
    return args


def start_processes(parallel: str) -> torch.device:
    """Joins the process group that torchrun set up, or makes one of this process alone."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if parallel != "none":
        alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
        os.environ.update({key: value for key, value in alone.items() if "RANK" not in os.environ})
        dist.init_process_group("nccl" if on_gpu else "gloo")
    return device


def distribute(model: Llama, args: argparse.Namespace, device: torch.device) -> nn.Module:
    """Checkpointing and compilation per layer, then the parallel wrapper around layers and model."""
    if args.checkpoint:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    if args.compile:
        for i, layer in enumerate(model.layers):
            model.layers[i] = torch.compile(layer)
    if args.parallel == "tp":
        return tensor_parallel(model, device)
    if args.parallel == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif args.parallel == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        return FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=device
        )
    elif args.parallel == "ddp":
        return nn.parallel.DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    return model


def random_tokens(args: argparse.Namespace, device: torch.device) -> Iterator[Tensor]:
    together = args.parallel in ("tp", "pp")  # on one and the same batch
    generator = torch.Generator().manual_seed(0 if together else int(os.environ.get("RANK", 0)))
    while True:
        shape = (args.batch, args.sequence + 1)
        yield torch.randint(args.vocabulary, shape, generator=generator).to(device, non_blocking=True)


def whole_step(model: nn.Module, tokens: Tensor) -> float:
    """Forward and backward; the loss."""
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.item()


def train(args: argparse.Namespace) -> None:
    device = start_processes(args.parallel)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    config = Config(args.layers, args.width, args.hidden, args.heads, args.kv_heads, args.vocabulary)
    pipeline = Pipeline(config, args.schedule, args.microbatches, device) if args.parallel == "pp" else None
    model = pipeline.model if pipeline else distribute(Llama(config).to(device), args, device)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=3e-4)
    if args.annotate:
        for part in model.values() if pipeline else [model]:
            annotate(part)  # chopper
        if pipeline:
            annotate_pipeline(pipeline.schedule)  # chopper
    dimension = DIMENSIONS.get(args.parallel)
    shares = world_size if args.parallel in ("tp", "pp") else 1
    gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with profile(
        activities=[ProfilerActivity.CPU, *gpu],
        schedule=schedule(wait=args.wait, warmup=args.warmup, active=args.active, repeat=args.repeat),
        on_trace_ready=chopper_trace_handler(  # chopper
            args.logdir,
            args.worker,
            tokens_per_step=args.batch * args.sequence // shares,
            model_flops_per_step=config.flops_per_step(args.batch, args.sequence) / shares,
            parallel={dimension: world_size} if dimension else None,
            telemetry=args.telemetry,
        ),
        record_shapes=True,
    ) as profiler:
        for step, tokens in zip(range(args.steps), random_tokens(args, device), strict=False):
            began = time.perf_counter()
            value = pipeline.step(tokens) if pipeline else whole_step(model, tokens)
            if not dimension or dimension.startswith("dp"):  # elsewhere the norm of the whole model is nowhere
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            took = time.perf_counter() - began
            profiler.step()
            if value is not None and rank == (world_size - 1 if pipeline else 0):
                print(f"step {step + 1}/{args.steps}  loss {value:.3f}  {took * 1e3:.0f} ms", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank == 0:
        print(f"recorded {world_size} process(es) into {args.logdir}", flush=True)


def main() -> None:
    args = arguments()
    warnings.filterwarnings("ignore", "Profiler clears events")  # each cycle's are in its own file
    if args.compile and not torch.cuda.is_available() and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        sys.exit("--compile on CPU needs a C++ compiler: none of g++, clang++, c++ found (Debian: apt install g++)")
    train(args)


if __name__ == "__main__":
    main()
