"""The autograd nodes of a trace: which forward operator each belongs to, and which repeat forward work."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tb_chopper.backend import classify
from tb_chopper.backend.attribution.names import Meaning, Role
from tb_chopper.backend.attribution.scopes import Scopes
from tb_chopper.backend.attribution.tree import Index, Int, Mask, take


@dataclass(frozen=True)
class Autograd:
    """Backward nodes in tree order; all arrays but `is_root` (by tree node) are indexed like `node`.

    `forward`: tree node of the forward operator, -1 where unknown. `has_seq`: the trace says which forward
    operator it was (it may have run before the capture). Between `recompute_start_ns` and `recompute_end_ns` the
    node repeats forward work (empty where it does not). `threads`: those that run nothing but backward.
    """

    node: Index
    is_root: Mask
    forward: Index
    has_seq: Mask
    recompute_start_ns: Int
    recompute_end_ns: Int
    threads: Int

    def index(self, nodes: Index) -> Index:
        """Position in `node` of each tree node; -1 for -1."""
        return np.where(nodes >= 0, np.searchsorted(self.node, nodes), -1)


def find(scopes: Scopes) -> Autograd:
    """Backward nodes with their forward operators, by Sequence number.

    The number counts per forward thread. A forward operator and those inside it share it: the one that started
    last made the node. Backward nodes name the thread by a logical id of their own; the thread that explains most
    of an id's nodes is taken for it. `evaluate_function` without a number (custom Python functions) has that of
    its node inside.
    """
    parent, role = scopes.tree.parent, scopes.role
    parent_role = take(role, parent)
    is_root = (role == Role.AUTOGRAD) | ((role == Role.GRAD_FN) & (parent_role != Role.AUTOGRAD))
    node = np.flatnonzero(is_root)
    seq, logical = _keys(scopes, node, is_root)
    is_forward = scopes.is_role(Role.OP, Role.WRAPPER) & (scopes.seq >= 0) & (scopes.fwd_thread <= 0)
    forward = _link(scopes, node, seq, logical, np.flatnonzero(is_forward))
    inside = np.flatnonzero(is_forward | scopes.is_role(Role.MODULE, Role.FRAME))
    around = scopes.tree.nearest(inside, is_root)
    start, end = _recompute(scopes, node, inside[around >= 0], np.searchsorted(node, around[around >= 0]))
    threads = np.setdiff1d(scopes.tree.thread[node], scopes.tree.thread[inside[around < 0]])
    return Autograd(node, is_root, forward, seq >= 0, start, end, threads)


def _keys(scopes: Scopes, node: Index, is_root: Mask) -> tuple[Int, Int]:
    """Sequence number and logical thread of each root: its own, else those of the node inside it."""
    seq, logical = scopes.seq[node].copy(), scopes.fwd_thread[node].copy()
    parent = scopes.tree.parent
    inner = np.flatnonzero((scopes.role == Role.GRAD_FN) & (scopes.seq >= 0) & ~is_root)
    outer = np.searchsorted(node, parent[inner])
    missing = seq[outer] < 0
    # Backwards, so that the first of several inner nodes stays.
    seq[outer[missing][::-1]] = scopes.seq[inner[missing][::-1]]
    logical[outer[missing][::-1]] = scopes.fwd_thread[inner[missing][::-1]]
    return seq, logical


def _link(scopes: Scopes, node: Index, seq: Int, logical: Int, forward: Index) -> Index:
    """Forward operator of each root by (thread, seq); -1 where it is not in the trace."""
    linked = np.full(len(node), -1, np.intp)
    thread, start = scopes.tree.thread, scopes.tree.start_ns
    tables = {}
    for t in np.unique(thread[forward]):
        rows = forward[thread[forward] == t]
        keys, first_from_end = np.unique(scopes.seq[rows][::-1], return_index=True)
        tables[t] = keys, rows[len(rows) - 1 - first_from_end]
    bare = np.asarray([_bare(m) for m in scopes.meanings], object)
    for group in np.unique(logical[seq >= 0]):
        asked = np.flatnonzero((logical == group) & (seq >= 0))
        best, best_score = None, 0
        for keys, ops in tables.values():
            at = np.minimum(np.searchsorted(keys, seq[asked]), len(keys) - 1)
            found = np.where((keys[at] == seq[asked]) & (start[ops[at]] < start[node[asked]]), ops[at], -1)
            hit = found >= 0
            same_name = bare[scopes.meaning[found[hit]]] == bare[scopes.meaning[node[asked[hit]]]]
            score = int(hit.sum() + same_name.sum())
            if score > best_score:
                best, best_score = found, score
        if best is not None:
            linked[asked] = best
    return linked


def _recompute(scopes: Scopes, node: Index, inside: Index, root: Index) -> tuple[Int, Int]:
    """Span of the repeated forward in each root (activation checkpointing); empty where there is none.

    `inside`: forward operators and modules that run in a root, `root`: which. Among them must be a module or a
    matrix product, attention or convolution: gradient hooks, too, run a few operators that autograd records.
    """
    start, end = np.zeros(len(node), np.int64), np.zeros(len(node), np.int64)
    if len(inside) == 0:
        return start, end
    is_module = scopes.is_role(Role.MODULE, Role.FRAME)
    heavy = np.asarray([bool(_HEAVY.search(m.label)) for m in scopes.meanings])[scopes.meaning]
    proven = np.zeros(len(node), bool)
    proven[root[is_module[inside] | heavy[inside]]] = True
    inside, root = inside[proven[root]], root[proven[root]]
    start[root[::-1]] = scopes.tree.start_ns[inside[::-1]]
    np.maximum.at(end, root, scopes.tree.end_ns[inside])
    return start, end


_HEAVY = re.compile("|".join([*classify.OP_GEMM_PATTERNS, *classify.OP_ATTENTION_PATTERNS]), re.IGNORECASE)


def _bare(meaning: Meaning) -> str:
    """MmBackward0 and aten::mm are both mm."""
    name = re.sub(r"Backward\d*$", "", meaning.label).rpartition("::")[2]
    return name.replace("_", "").lower()


def neighbours(autograd: Autograd, thread: Int, known: NDArray[np.intp]) -> NDArray[np.intp]:
    """`known` per root, where roots without a sequence number take the value of the root before them on the
    thread: AccumulateGrad runs right after the node that made the gradient."""
    if len(known) == 0:
        return known
    at = np.where(autograd.has_seq, np.arange(len(known)), -1)
    last = np.maximum.accumulate(at)
    same = (last >= 0) & (thread[autograd.node[last]] == thread[autograd.node])
    return np.where(autograd.has_seq, known, np.where(same, known[last], -1))
