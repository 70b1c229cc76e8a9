"""Memory of a simulated GPU: what the caching allocator hands out in a step, as profile_memory records it.

Parameters and the two moments of AdamW stay. Gathered parameters live from their collective to the second one after it,
activations from the operation that makes them to its backward, gradients from their reduction to the end of the
optimizer. Growing memory is a block of each step that nobody frees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tb_chopper.backend.simulate import plan
from tb_chopper.backend.simulate.config import Config
from tb_chopper.backend.simulate.program import Item, Program
from tb_chopper.backend.simulate.recorded import Rank
from tb_chopper.backend.simulate.workload import BF16, FP32

ROUND = 512
"""The allocator hands out multiples of this."""
SEGMENT = 2 << 20
"""The allocator asks the driver for multiples of this."""
FRAGMENTS = 0.04
"""of what is allocated: reserved, and of no use"""
FIRST_ADDRESS, KEPT_ADDRESS = 0x7E00_0000_0000, 0x7F00_0000_0000
ALIVE = 2
"""collectives for which a gathered unit, or a bucket of gradients, is kept"""


class Block(NamedTuple):
    """bytes, and the host points at which it is allocated and freed; `until` −1: not in this step."""

    bytes: int
    since: int
    until: int


class Levels(NamedTuple):
    """The events of one rank and step, in order: point, bytes (negative: freed), address, allocated and reserved."""

    point: np.ndarray
    bytes: np.ndarray
    address: np.ndarray
    allocated: np.ndarray
    reserved: np.ndarray


def base_bytes(config: Config, rank: int) -> int:
    """Parameters and both moments in bf16, of one shard."""
    shard = -(-plan.params(config, plan.place(config, rank).pipeline) // config.data)
    return 3 * _rounded(shard * BF16)


def activation_bytes(config: Config) -> dict[str, int]:
    """What each operation keeps for its backward, for all tokens that go through the model at once."""
    m, t = plan.part(config), config.tokens
    q, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    norm = m.dim * (BF16 if config.fused_norm else 2 * FP32 + BF16)
    each = {
        "ie": m.dim * BF16, "attn_n": norm, "qkv_ip": (q + 2 * kv) * BF16, "qkv_re": (q + kv) * BF16,
        "attn_c": (q + 2 * kv) * BF16, "attn_fa": q * BF16 + m.heads * FP32, "attn_op": m.dim * BF16,
        "attn_ra": m.dim * BF16, "mlp_n": norm, "mlp_gp": m.hidden * BF16, "mlp_gs": m.hidden * BF16,
        "mlp_up": m.hidden * BF16, "mlp_gu": m.hidden * BF16, "mlp_dp": m.dim * BF16, "mlp_ra": m.dim * BF16,
        "ln": norm, "lp": m.vocab * BF16, "cel": m.vocab * FP32,
    }
    return {operation: _rounded(t * n) for operation, n in each.items()}


def blocks(config: Config, program: Program) -> tuple[list[Block], list[Block]]:
    """What one step allocates: blocks that live inside it, and the gradients (freed with the optimizer, if it runs)."""
    inside = [*_activations(config, program.items)]
    gathered = [i for i in program.items if i.collective is not None and i.collective.name == "_allgather_base"]
    reduced = [i for i in program.items if i.collective is not None and i.collective.name == "_reduce_scatter_base"]
    end = program.items[-1].begin
    for several, n in ((gathered, "out_nelems"), (reduced, "in_nelems")):
        for k, item in enumerate(several):
            until = several[k + ALIVE].begin if k + ALIVE < len(several) else _end_of(program, item)
            if until > item.begin:
                inside.append(Block(_rounded(getattr(item.collective, n) * BF16), item.begin, until))
    last = next((i.begin for i in reversed(program.items) if i.phase == "optimizer"), -1)
    return inside, [Block(_rounded(i.collective.out_nelems * BF16), i.begin, end if last >= 0 else -1)
                    for i in reduced if i.collective is not None]


def _end_of(program: Program, item: Item) -> int:
    """Where what follows the phase of an item begins."""
    last = max(k for k, i in enumerate(program.items) if i.phase == item.phase)
    return program.items[min(last + 1, len(program.items) - 1)].begin


def _activations(config: Config, items: Sequence[Item]) -> Iterator[Block]:
    each = activation_bytes(config)
    made: dict[tuple[int, int, str], int] = {}
    freed: dict[tuple[int, int, str], int] = {}
    layer_end: dict[tuple[int, int], int] = {}
    for item in items:
        key = item.microbatch, item.layer, item.operation
        if item.phase == "forward" and item.operation in each:
            made.setdefault(key, item.begin)
        elif item.phase == "backward":
            freed[key] = layer_end[key[:2]] = item.begin
    for key, since in made.items():
        until = freed.get(key, layer_end.get(key[:2], -1))
        if until > since:
            yield Block(each[key[2]], since, until)


def levels(rank: Rank) -> list[Levels]:
    """The events of each captured step. Gradients of the warm-up step are there when the capture begins."""
    config = rank.config
    growth = _rounded(config.faults.growth.get(rank.rank, 0))
    first_inside, first_gradients = blocks(config, rank.warm.program)
    held = sum(b.bytes for b in first_gradients)
    allocated = base_bytes(config, rank.rank) + held
    made: list[Levels] = []
    plans = {id(step.program): blocks(config, step.program) for step in rank.steps}
    # The warm-up step has needed as much before.
    reserved = _segments(allocated + int(np.cumsum(_events(first_inside)[1]).max(initial=0)))
    for step in rank.steps:
        inside, gradients = plans[id(step.program)]
        stays = sum(b.bytes for b in gradients)
        if held:  # reduced into what is there, and freed by the next optimizer
            changed = [Block(stays, -1, gradients[0].until)] if gradients and gradients[0].until >= 0 else []
        else:
            changed = gradients
        leak = [Block(growth, step.program.items[-1].begin, -1)] if growth else []
        point, size, address = _events([*inside, *changed, *leak])
        if leak:
            address[-1] = KEPT_ADDRESS + growth * len(made)
        level = allocated + np.cumsum(size)
        kept = np.maximum.accumulate(np.maximum(_segments(level), reserved)) if len(level) else level
        made.append(Levels(point, size, address, level, kept))
        if len(level):
            allocated, reserved = int(level[-1]), int(kept[-1])
        held = 0 if gradients and gradients[0].until >= 0 else held or stays
    return made


def _events(several: Sequence[Block]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Point, bytes and address of what is allocated and freed, in order; what is freed at a point comes first."""
    size = np.asarray([b.bytes for b in several], np.int64)
    address = FIRST_ADDRESS + np.concatenate([[0], np.cumsum(size)[:-1]]) if len(size) else size
    since, until = (np.asarray([getattr(b, n) for b in several], np.int64) for n in ("since", "until"))
    point = np.concatenate([until, since])
    change, place = np.concatenate([-size, size]), np.concatenate([address, address])
    known = point >= 0
    order = np.argsort(point[known], kind="stable")
    return point[known][order], change[known][order], place[known][order]


def _rounded(n: float) -> int:
    return -(-int(n) // ROUND) * ROUND


def _segments(allocated: Any) -> Any:
    """What the allocator holds for so much."""
    return (allocated * (1 + FRAGMENTS) // SEGMENT + 1).astype(np.int64) * SEGMENT if isinstance(
        allocated, np.ndarray) else (int(allocated * (1 + FRAGMENTS)) // SEGMENT + 1) * SEGMENT


def text(rank: Rank, base: int, first_index: int) -> Iterator[str]:
    """The instant events of a rank, in the exporter's layout; times in µs from `base`."""
    index = first_index
    for step, made in zip(rank.steps, levels(rank), strict=True):
        times = (step.points[made.point] - base).tolist()
        for t, size, address, allocated, reserved in zip(times, *(a.tolist() for a in made[1:]), strict=True):
            yield (f'  {{\n    "ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": {rank.pid}, '
                   f'"tid": {rank.main_thread},\n    "ts": {t // 1000}.{t % 1000:03d},\n    "args": {{\n'
                   f'      "Total Reserved": {reserved}, "Total Allocated": {allocated}, "Bytes": {size}, '
                   f'"Addr": {address}, "Device Id": {rank.local_rank}, "Device Type": 1, "Ev Idx": {index}\n'
                   '    }\n  },\n')
            index += 1
