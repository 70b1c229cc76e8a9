"""The host events of a trace as one tree, each node with the meaning of its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tb_chopper.backend.attribution import names, tree
from tb_chopper.backend.attribution.names import Meaning, Role
from tb_chopper.backend.attribution.tree import Index, Int, Mask, Tree

_MEANING_OF: dict[str, Callable[[str], Meaning]] = {
    "cpu_op": names.of_operator, "annotation": names.of_annotation, "module": names.of_frame,
}
"""Kinds of host events that nest. Runtime calls are looked up in the tree instead; asynchronous annotations
begin when a collective is issued and end when it is complete, across everything else on the thread."""


@dataclass(frozen=True)
class Scopes:
    """`tree` over host events and FSDP2 brackets. Arrays are indexed by node, except `meanings` (by meaning id) and
    `node_of_row` (by HOST row; -1 for rows that do not nest). `is_operator`: recorded as one, whatever its role."""

    tree: Tree
    host_row: Index
    node_of_row: Index
    meaning: Index
    meanings: list[Meaning]
    role: NDArray[np.int8]
    is_operator: Mask
    seq: Int
    fwd_thread: Int

    def is_role(self, *roles: Role) -> Mask:
        """Nodes of any of these roles."""
        return np.isin(np.arange(len(Role)), roles)[self.role]

    def by_meaning(self, values: NDArray) -> NDArray:
        """A per-meaning array spread over the nodes."""
        return values[self.meaning]


def build(host: pd.DataFrame) -> Scopes:
    """The scopes of a HOST table."""
    kind_codes, name_codes = host["kind"].cat.codes.to_numpy(), host["name"].cat.codes.to_numpy()
    name_list = host["name"].cat.categories.tolist()
    meanings: list[Meaning] = []
    meaning_of_row = np.full(len(host), -1, np.intp)
    for kind, meaning in _MEANING_OF.items():
        if kind not in host["kind"].cat.categories:
            continue
        rows = np.flatnonzero(kind_codes == host["kind"].cat.categories.get_loc(kind))
        used = np.flatnonzero(np.bincount(name_codes[rows], minlength=len(name_list)))
        to_id = np.full(len(name_list), -1, np.intp)
        to_id[used] = np.arange(len(meanings), len(meanings) + len(used))
        meaning_of_row[rows] = to_id[name_codes[rows]]
        meanings += [meaning(name_list[code]) for code in used]

    rows = np.flatnonzero(meaning_of_row >= 0)
    start, end = host["start_ns"].to_numpy()[rows], host["end_ns"].to_numpy()[rows]
    thread, meaning_ids = host["thread"].to_numpy()[rows].astype(np.int64), meaning_of_row[rows]
    extra = _brackets(meanings, meaning_ids, thread, start, end)
    meanings += extra.meanings
    built = tree.build(*(np.concatenate(pair) for pair in
                         ((thread, extra.thread), (start, extra.start_ns), (end, extra.end_ns))))

    host_row = np.concatenate((rows, np.full(len(extra.thread), -1, np.intp)))[built.row]
    real = host_row >= 0
    node_of_row = np.full(len(host), -1, np.intp)
    node_of_row[host_row[real]] = np.flatnonzero(real)
    ids = np.concatenate((meaning_ids, extra.meaning_ids))[built.row]
    return Scopes(
        built, host_row, node_of_row, ids, meanings,
        np.asarray([m.role for m in meanings], np.int8)[ids] if meanings else np.empty(0, np.int8),
        real & (host["kind"] == "cpu_op").to_numpy()[host_row] if len(host) else np.empty(0, bool),
        np.where(real, host["seq"].to_numpy()[host_row], -1) if len(host) else np.empty(0, np.int64),
        np.where(real, host["fwd_thread"].to_numpy()[host_row], -1) if len(host) else np.empty(0, np.int64))


@dataclass(frozen=True)
class _Brackets:
    meanings: list[Meaning]
    meaning_ids: Index
    thread: Int
    start_ns: Int
    end_ns: Int


def _brackets(meanings: list[Meaning], ids: Index, thread: Int, start_ns: Int, end_ns: Int) -> _Brackets:
    """Scopes from FSDP::pre_forward (X) to the FSDP::post_forward (X) that follows it on the thread.

    FSDP2 records no scope around a module's forward, only before and after. A recomputed forward may stop early
    and leave out the second; such a pre_forward opens nothing.
    """
    fqns = sorted({m.fqn for m in meanings if m.role == Role.FSDP2 and m.fqn})
    edge = np.asarray([_EDGES.get(m.label, 0) if m.role == Role.FSDP2 and m.fqn else 0 for m in meanings], np.int8)
    module = np.asarray([fqns.index(m.fqn) if m.fqn in fqns else -1 for m in meanings], np.intp)
    at = np.flatnonzero(edge[ids]) if len(meanings) else np.empty(0, np.intp)
    at = at[np.lexsort((start_ns[at], module[ids[at]], thread[at]))]
    first, second = at[:-1], at[1:]
    pairs = ((edge[ids[first]] == 1) & (edge[ids[second]] == 2) & (module[ids[first]] == module[ids[second]])
             & (thread[first] == thread[second])) if len(at) else np.empty(0, bool)
    first, second = first[pairs], second[pairs]
    return _Brackets([names.bracket(fqn) for fqn in fqns], len(meanings) + module[ids[first]],
                     thread[first], start_ns[first], end_ns[second])


_EDGES = {"FSDP::pre_forward": 1, "FSDP::post_forward": 2}
