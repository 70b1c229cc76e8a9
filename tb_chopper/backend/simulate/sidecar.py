"""The sidecar of a simulated trace: what the handler would have written beside it."""

from __future__ import annotations

from pathlib import Path

from tb_chopper.backend.simulate import pipeline_schedule, plan
from tb_chopper.backend.simulate.config import Config
from tb_chopper.backend.simulate.recorded import Rank
from torch_ext import sidecar

SUFFIX = sidecar.SUFFIX


def write(trace: Path, rank: Rank) -> Path:
    """Write the sidecar of a rank's trace; returns its path."""
    path = sidecar.path_for(trace)
    sidecar.write(path, build(rank))
    return path


def build(rank: Rank) -> sidecar.Sidecar:
    config = rank.config
    content = sidecar.empty()
    content.update(
        {
            "worker": f"{rank.host}_r{rank.rank}_{rank.pid}",
            "span_ns": rank.window_end,
            "identity": {
                "host": rank.host,
                "rank": rank.rank,
                "world_size": config.ranks,
                "local_rank": rank.local_rank,
                "pid": rank.pid,
                "device": {
                    "type": "cuda",
                    "index": rank.local_rank,
                    "name": config.gpu.name,
                    "pci_address": pci_address(rank.local_rank),
                    "compute_units": config.gpu.units,
                    "memory_bytes": config.gpu.memory_bytes,
                },
            },
            "clocks": [_clocks(where, t, rank.boot_ns(t))
                   for where, t in (("start", rank.window_start), ("stop", rank.window_end))],
            "versions": {
                "torch": "2.13.0",
                "cuda": None if config.gpu.dialect == "rocm" else "12.8",
                "hip": "7.0" if config.gpu.dialect == "rocm" else None,
                "python": "3.12",
                "tb_chopper": None,
            },
            "profiler": {
                "record_shapes": True,
                "with_stack": False,
                "profile_memory": config.profile_memory,
                "with_flops": False,
                "with_modules": False,
                "first_step": rank.steps[0].number,
                "last_step": rank.steps[-1].number,
            },
            "training": {
                "tokens_per_step": config.tokens * config.plan.microbatches // (config.ranks // config.data),
                "model_flops_per_step": model_flop(config, plan.place(config, rank.rank).pipeline),
                "parallel": plan.sizes(config),
            },
            "modules": _modules(config, plan.place(config, rank.rank).pipeline),
            "simulated": True,
            "notes": [
                f"simulated: preset {config.preset}, batch {config.batch}, sequence {config.sequence}, "
                f"FSDP{config.fsdp.version}, seed {config.seed}{_plan(config)}"
            ],
        }
    )
    return content


def _plan(config: Config) -> str:
    if config.plan.is_default:
        return ""
    sizes = ", ".join(f"{name} {size}" for name, size in plan.sizes(config).items())
    schedule = pipeline_schedule.CLASSES[config.plan.schedule]
    return f", {sizes}" + (f", {schedule} of {config.plan.microbatches} microbatches"
                           if config.plan.pipeline > 1 else "")


def pci_address(local_rank: int) -> str:
    return f"0000:{0x05 + 0x20 * local_rank:02x}:00.0"


def model_flop(config: Config, pipeline: int = 0) -> float:
    """Model FLOPs of one rank and step: 6 per parameter outside the embedding and token, and attention, causal half; of
    what its stages hold, divided by the tensor-parallel ranks."""
    m, tokens = config.model, config.tokens * config.plan.microbatches
    stages = plan.stages(config, pipeline)
    layers = sum(len(plan.layers(config, s)) for s in stages)
    dense = layers * (m.layer_params - 2 * m.dim) + any(plan.has_head(config, s) for s in stages) * m.vocab * m.dim
    attention = 7.0 * config.batch * m.heads * config.sequence**2 * m.head_dim * layers * config.plan.microbatches
    return (6.0 * dense * tokens + attention) / config.plan.tensor


def _clocks(where: str, wall_ns: int, boot_ns: int) -> sidecar.ClockPair:
    return {
        "where": where,
        "realtime_ns": wall_ns,
        "monotonic_ns": boot_ns, "boottime_ns": boot_ns,
        "uncertainty_ns": 200,
    }


def _modules(config: Config, pipeline: int) -> list[sidecar.Module]:
    """The modules of the stages that the rank holds."""
    m = config.model
    stages = plan.stages(config, pipeline)
    first, last = (any(has(config, s) for s in stages) for has in (plan.has_embedding, plan.has_head))
    qkv = m.dim * (m.heads + 2 * m.kv_heads) * m.head_dim
    rows: list[tuple[str, str, int]] = [("tok_embeddings", "Embedding", m.vocab * m.dim)] * first
    for i in (i for s in stages for i in plan.layers(config, s)):
        rows += [
            (f"layers.{i}", "TransformerBlock", m.layer_params),
            (f"layers.{i}.attention_norm", "RMSNorm", m.dim),
            (f"layers.{i}.attention", "Attention", qkv + m.heads * m.head_dim * m.dim),
            (f"layers.{i}.ffn_norm", "RMSNorm", m.dim),
            (f"layers.{i}.feed_forward", "FeedForward", 3 * m.dim * m.hidden),
        ]
    rows += [("norm", "RMSNorm", m.dim), ("output", "Linear", m.vocab * m.dim)] * last
    total = sum(params for fqn, _, params in rows if fqn.count(".") < 2)
    rows = [("", "Transformer", total), *rows]
    return [{"fqn": fqn, "cls": cls, "params": params, "order": order} for order, (fqn, cls, params) in enumerate(rows)]
