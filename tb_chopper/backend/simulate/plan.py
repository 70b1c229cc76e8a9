"""Who does what under a parallel plan: the ranks' places, their process groups, and the layers of the stages.

Ranks are ordered as by Megatron and by DeviceMesh((pp, dp_shard, tp)): tensor-parallel neighbours first, then data
parallel, the stages of the pipeline last. Process groups are named as DeviceMesh names them: `0` is the world, then one
after the other the groups of each dimension.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from tb_chopper.backend.simulate.config import Config, Model

WORLD, PIPELINE, DATA, TENSOR = "world", "pp", "dp_shard", "tp"
"""Kinds of process groups; a rank is in one of each kind that the plan has."""
DIMENSIONS = (PIPELINE, DATA, TENSOR)
"""Slowest first."""


class Group(NamedTuple):
    name: str
    description: str
    ranks: tuple[int, ...]


class Place(NamedTuple):
    pipeline: int
    data: int
    tensor: int


def sizes(config: Config) -> dict[str, int]:
    """Size of each parallel dimension that is larger than one; FSDP over all ranks where the plan has no other."""
    plan = config.plan
    if plan.is_default:
        return {DATA: config.ranks}
    named = dict(zip(DIMENSIONS, (plan.pipeline, config.data, plan.tensor), strict=True))
    return {name: size for name, size in named.items() if size > 1}


def place(config: Config, rank: int) -> Place:
    """Place of a rank in each dimension."""
    rest, tensor = divmod(rank, config.plan.tensor)
    pipeline, data = divmod(rest, config.data)
    return Place(pipeline, data, tensor)


def rank_at(config: Config, at: Place) -> int:
    """The rank at a place."""
    return (at.pipeline * config.data + at.data) * config.plan.tensor + at.tensor


def groups(config: Config, rank: int) -> dict[str, Group]:
    """The process groups of a rank, by kind; FSDP over all ranks has but the world."""
    found = {WORLD: Group("0", "default_pg", tuple(range(config.ranks)))}
    if config.plan.is_default:
        return found
    first = 1
    for kind, size in sizes(config).items():
        step = stride(config, kind)
        block, inside = divmod(rank, step * size)
        start = block * step * size + inside % step
        name = first + block * step + inside % step
        found[kind] = Group(str(name), f"mesh_{kind}", tuple(range(start, start + step * size, step)))
        first += config.ranks // size
    return found


def stride(config: Config, kind: str) -> int:
    """Distance between neighbours of a group."""
    return {TENSOR: 1, DATA: config.plan.tensor, PIPELINE: config.plan.tensor * config.data, WORLD: 1}[kind]


def neighbour(config: Config, rank: int, forward: bool) -> int:
    """The rank that holds the next (or the previous) stage; the first follows the last."""
    at = place(config, rank)
    step = 1 if forward else -1
    return rank_at(config, at._replace(pipeline=(at.pipeline + step) % config.plan.pipeline))


# what a rank holds


def stages(config: Config, pipeline: int) -> range:
    """Stages of a place in the pipeline, over all ranks numbered in the order of the model."""
    return range(pipeline, config.plan.stages, config.plan.pipeline)


def layers(config: Config, stage: int) -> range:
    """Layers of a stage; where they do not divide evenly the first stages have one more."""
    each, more = divmod(config.model.layers, config.plan.stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def has_embedding(config: Config, stage: int) -> bool:
    """The stage begins with the embedding."""
    return stage == 0 and not config.plan.balanced


def has_head(config: Config, stage: int) -> bool:
    """The stage ends with norm, output projection and loss."""
    return stage == config.plan.stages - 1 and not config.plan.balanced


def part(config: Config) -> Model:
    """The model with the widths that one tensor-parallel rank holds: heads, hidden and vocabulary divided."""
    m, tp = config.model, config.plan.tensor
    return replace(m, heads=m.heads // tp, kv_heads=max(1, m.kv_heads // tp), hidden=m.hidden // tp,
                   vocab=-(-m.vocab // tp))


def root_params(config: Config, stage: int) -> int:
    """Parameters of a stage outside its layers, on one tensor-parallel rank, before sharding."""
    model = part(config)
    table = model.vocab * model.dim
    return table * has_embedding(config, stage) + (table + model.dim) * has_head(config, stage)


def params(config: Config, pipeline: int) -> int:
    """Parameters of all stages of a place, on one tensor-parallel rank, before sharding."""
    layer = part(config).layer_params
    return sum(layer * len(layers(config, s)) + root_params(config, s) for s in stages(config, pipeline))
