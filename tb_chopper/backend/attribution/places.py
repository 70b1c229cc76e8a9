"""Phase, layer and operation of host scopes: the path from where a row was launched to what it belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tb_chopper.backend.attribution import autograd, layers, names, operations, reasons
from tb_chopper.backend.attribution.autograd import Autograd
from tb_chopper.backend.attribution.layers import Layers
from tb_chopper.backend.attribution.names import Role
from tb_chopper.backend.attribution.scopes import Scopes
from tb_chopper.backend.attribution.tree import Index, Int, Mask, take

_REASON_OF_ROLE = {
    Role.MODULE: reasons.MODULE, Role.FRAME: reasons.MODULE, Role.LAYER: reasons.ANNOTATION,
    Role.SCOPE: reasons.ANNOTATION, Role.OPTIMIZER: reasons.ANNOTATION, Role.FSDP2: reasons.FSDP2_SCOPE,
    Role.BRACKET: reasons.BRACKET, Role.FSDP1_FORWARD: reasons.FSDP1,
}


@dataclass(frozen=True)
class Places:
    """One entry per asked node. `phase`: code of schema.PHASES. `fsdp_scope`: name of the FSDP2 scope, or null.
    `how`: what told the layer, else the operation."""

    phase: NDArray[np.int8]
    layer: pd.Categorical
    operation: pd.Categorical
    fsdp_scope: pd.Categorical
    recompute: Mask
    how: NDArray


def find(scopes: Scopes, node: Index, time_ns: Int, types: NDArray[np.int8], modules: Sequence[str] = ()) -> Places:
    """Where each of `node` (-1: unknown) belongs, seen at `time_ns`. `types`: code of schema.OP_TYPES.
    `modules`: fully qualified names of the model's modules, where they are known."""
    grad, layer = autograd.find(scopes), layers.find(scopes, modules)
    nearest = scopes.tree.nearest
    root_node = nearest(node, grad.is_root)
    root = grad.index(root_node)
    in_backward = root >= 0
    recompute = in_backward.copy()
    recompute[in_backward] = ((grad.recompute_start_ns[root[in_backward]] <= time_ns[in_backward])
                              & (time_ns[in_backward] < grad.recompute_end_ns[root[in_backward]]))
    forward = np.where(in_backward & ~recompute, take(grad.forward, root), -1)

    layer_scope = nearest(node, layer.code != layers.NOT_A_SCOPE)
    own_layer = (layer_scope >= 0) & (layer_scope > root_node)
    of_root, neighbour = _layers_of_roots(scopes, grad, layer)
    code = np.where(own_layer, take(layer.code, layer_scope), np.where(in_backward, take(of_root, root), -1))

    naming = operations.naming_scopes(scopes, layer)
    scope = nearest(node, naming)
    own_scope = (scope >= 0) & (scope > root_node)
    linked = (forward >= 0) & ~own_scope
    scope = np.where(own_scope, scope, np.where(linked, nearest(forward, naming), -1))
    by_forward = linked & (take(scopes.role, forward) == Role.OP)
    operator = operations.outermost_operator(scopes, np.where(by_forward, forward, node))
    surroundings = scopes.is_role(Role.AUTOGRAD, Role.GRAD_FN) | (scopes.is_role(Role.WRAPPER) & scopes.is_operator)
    operator = np.where((operator < 0) & take(surroundings, node), node, operator)

    how = np.where(node >= 0, reasons.CONTAINMENT, reasons.NOTHING).astype(object)
    for role, word in _REASON_OF_ROLE.items():
        how[own_scope & (take(scopes.role, scope) == role)] = word
    for role, word in _REASON_OF_ROLE.items():
        how[own_layer & ~own_scope & (take(scopes.role, layer_scope) == role)] = word
    how[in_backward & ~own_layer & ~own_scope & (forward >= 0)] = reasons.SEQUENCE
    how[in_backward & ~own_layer & ~own_scope & take(neighbour, root)] = reasons.NEIGHBOUR

    fsdp = nearest(node, scopes.role == Role.FSDP2)
    labels = pd.Categorical([m.label for m in scopes.meanings])
    return Places(
        _phases(scopes, node, time_ns, grad),
        pd.Categorical.from_codes(np.maximum(code, -1), pd.Index(layer.names, dtype=object)),
        operations.name(scopes, layer, scope, operator, types),
        pd.Categorical.from_codes(take(labels.codes, take(scopes.meaning, fsdp)), labels.categories),
        recompute, how)


def _phases(scopes: Scopes, node: Index, time_ns: Int, grad: Autograd) -> NDArray[np.int8]:
    """Phase by the closest scope that tells one; other outside every scope. Where no scope tells, forward, but
    optimizer between the last backward node and the optimizer's step (the gradients are clipped and scaled there),
    and backward on threads that run nothing else and for DDP's bucket copies.
    """
    phase = scopes.by_meaning(np.asarray([m.phase for m in scopes.meanings], np.int8))
    marker = scopes.tree.nearest(node, phase != names.NO_PHASE)
    told = take(phase, marker)
    is_step = scopes.by_meaning(np.asarray([m.role == Role.OPTIMIZER and "step" in m.label for m in scopes.meanings]))
    backward, update = (np.sort(scopes.tree.start_ns[at]) for at in (grad.node, np.flatnonzero(is_step)))
    module = scopes.tree.nearest(node, scopes.is_role(Role.MODULE, Role.FRAME, Role.BRACKET, Role.FSDP1_FORWARD))
    free = (node >= 0) & (marker < 0) & (module < 0)
    tail = free & (_next(update, time_ns) < _next(backward, time_ns)) & (time_ns > backward.min(initial=_NEVER))
    hook = free & (np.isin(take(scopes.tree.thread, node), grad.threads) | (tail & _bucket_copies(scopes, node)))
    untold = np.select([node < 0, hook, tail], [names.OTHER, names.BACKWARD, names.OPTIMIZER], names.FORWARD)
    return np.where(marker >= 0, told, untold).astype(np.int8)


def _bucket_copies(scopes: Scopes, node: Index) -> Mask:
    """DDP copies its buckets back into the gradients after the last backward node, in no scope of its own."""
    if not any(names.REDUCER.search(m.label) for m in scopes.meanings):
        return np.zeros(len(node), bool)
    is_copy = np.asarray([m.label in ("aten::copy_", "aten::as_strided") for m in scopes.meanings])
    return take(scopes.by_meaning(is_copy), node)


_NEVER = np.iinfo(np.int64).max


def _next(times: Int, after: Int) -> Int:
    """The first of the sorted `times` not before each of `after`."""
    return np.append(times, _NEVER)[np.searchsorted(times, after)]


def _layers_of_roots(scopes: Scopes, grad: Autograd, layer: Layers) -> tuple[Index, Mask]:
    """Layer code of each backward node, and whether it was taken from its neighbour.

    The layer is that of the forward operator; a forward operator inside another backward node (checkpointing)
    without a layer of its own has that node's.
    """
    forward_scope = scopes.tree.nearest(grad.forward, layer.code != layers.NOT_A_SCOPE)
    outer = grad.index(scopes.tree.nearest(grad.forward, grad.is_root))
    own = (forward_scope >= 0) & (forward_scope > take(grad.node, outer))
    code = np.where(own, take(layer.code, forward_scope), -1)
    inherits = ~own & (outer >= 0)
    for _ in range(_CHECKPOINT_DEPTH):
        code = np.where(inherits, take(code, outer), code)
    spread = autograd.neighbours(grad, scopes.tree.thread, code)
    return spread, ~grad.has_seq & (spread >= 0)


_CHECKPOINT_DEPTH = 3
"""Checkpoints inside checkpoints that are followed."""

