"""The small Llama spread over processes by tensor or by pipeline parallelism."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama import Config, Llama
from torch import Tensor, nn

SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B",
             "zero-bubble": "ScheduleInterleavedZeroBubble"}  # fmt: skip
"""Name on the command line -> class of torch.distributed.pipelining; the last two give each process two stages."""
TWO_STAGES = ("interleaved", "zero-bubble")


def tensor_parallel(model: Llama, device: torch.device) -> Llama:
    """Every linear layer cut over the processes: the first of a pair by its outputs, the second by its inputs, so that
    each pair needs one all-reduce in forward and one in backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    n, config = dist.get_world_size(), model.config
    if config.heads % n or config.kv_heads % n:
        sys.exit(f"--parallel tp: {config.heads} heads and {config.kv_heads} KV heads cannot be cut in {n}")
    mesh = init_device_mesh(device.type, (n,), mesh_dim_names=("tp",))
    plan: dict[str, Any] = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    for i in range(config.layers):
        for name in ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"layers.{i}.{name}"] = ColwiseParallel()
        for name in ("attn.o_proj", "mlp.down_proj"):
            plan[f"layers.{i}.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    return model


def parameter_groups(model: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    """Parameters that are cut and those that are not, apart: an optimizer's fused operations cannot mix them."""
    whole = [p for p in model.parameters() if type(p.data) is Tensor]
    cut = [p for p in model.parameters() if type(p.data) is not Tensor]
    return [{"params": group} for group in (whole, cut) if group]


class Pipeline:
    """The stages of this process and the schedule that runs them: `step(tokens)` is forward and backward of a batch,
    cut into microbatches."""

    def __init__(self, config: Config, name: str, microbatches: int, device: torch.device) -> None:
        from torch.distributed import pipelining

        n, rank = dist.get_world_size(), dist.get_rank()
        per_process = 2 if name in TWO_STAGES else 1
        n_stages = n * per_process
        if config.layers < n_stages:
            sys.exit(f"--layers {config.layers}: {n_stages} stages need at least one each")
        borders = [i * config.layers // n_stages for i in range(n_stages + 1)]
        indices = range(rank, n_stages, n)
        whole = Llama(config)
        self.model = nn.ModuleDict(
            {f"stage{i}": copy.deepcopy(whole).keep(borders[i], borders[i + 1]).to(device) for i in indices})
        stages = [pipelining.PipelineStage(module, i, n_stages, device)
                  for i, module in zip(indices, self.model.values(), strict=True)]
        make: Callable[..., Any] = getattr(pipelining, SCHEDULES[name])
        self.schedule = make(stages if name in TWO_STAGES else stages[0], microbatches, loss_fn=loss)
        self.is_first, self.is_last = rank == 0, rank == n - 1

    def step(self, tokens: Tensor) -> float | None:
        """Mean loss over the microbatches; None on processes without the last stage."""
        losses: list[Tensor] = []
        inputs: Sequence[Tensor] = (tokens[:, :-1],) if self.is_first else ()
        target = tokens[:, 1:] if self.is_last else None
        self.schedule.step(*inputs, target=target, losses=losses if self.is_last else None, return_outputs=False)
        return torch.stack(losses).mean().item() if losses else None


def loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
