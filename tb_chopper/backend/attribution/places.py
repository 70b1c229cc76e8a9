"""Phase, layer and operation of host scopes: the path from where a row was launched to what it belongs to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tb_chopper.backend.attribution import autograd, layers, names, operations
from tb_chopper.backend.attribution.autograd import Autograd
from tb_chopper.backend.attribution.layers import Layers
from tb_chopper.backend.attribution.names import Role
from tb_chopper.backend.attribution.scopes import Scopes
from tb_chopper.backend.attribution.tree import Index, Int, Mask, take

CONTAINMENT = "launch containment"
ANNOTATION = "annotation"
MODULE = "module scope"
FSDP2_SCOPE = "fsdp2 scope"
BRACKET = "fsdp2 bracket"
FSDP1 = "fsdp1 forward"
SEQUENCE = "sequence number"
NEIGHBOUR = "neighbour"

_HOW_OF_ROLE = {
    Role.MODULE: MODULE, Role.FRAME: MODULE, Role.LAYER: ANNOTATION, Role.SCOPE: ANNOTATION,
    Role.OPTIMIZER: ANNOTATION, Role.FSDP2: FSDP2_SCOPE, Role.BRACKET: BRACKET, Role.FSDP1_FORWARD: FSDP1,
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


def find(scopes: Scopes, node: Index, time_ns: Int, types: NDArray[np.int8]) -> Places:
    """Where each of `node` (-1: unknown) belongs, seen at `time_ns`. `types`: code of schema.OP_TYPES."""
    grad, layer = autograd.find(scopes), layers.find(scopes)
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

    how = np.where(node >= 0, CONTAINMENT, "").astype(object)
    for role, word in _HOW_OF_ROLE.items():
        how[own_scope & (take(scopes.role, scope) == role)] = word
    for role, word in _HOW_OF_ROLE.items():
        how[own_layer & ~own_scope & (take(scopes.role, layer_scope) == role)] = word
    how[in_backward & ~own_layer & ~own_scope & (forward >= 0)] = SEQUENCE
    how[in_backward & ~own_layer & ~own_scope & take(neighbour, root)] = NEIGHBOUR

    fsdp = nearest(node, scopes.role == Role.FSDP2)
    labels = pd.Categorical([m.label for m in scopes.meanings])
    return Places(
        _phases(scopes, node), pd.Categorical.from_codes(np.maximum(code, -1), layer.names),
        operations.name(scopes, layer, scope, operator, types),
        labels.take(np.where(fsdp >= 0, scopes.meaning[fsdp], -1), allow_fill=True) if len(labels) else labels,
        recompute, how)


def _phases(scopes: Scopes, node: Index) -> NDArray[np.int8]:
    """Phase by the closest scope that tells one; forward where none does; other outside every scope."""
    phase = scopes.by_meaning(np.asarray([m.phase for m in scopes.meanings], np.int8))
    marker = scopes.tree.nearest(node, phase != names.NO_PHASE)
    known = np.where(marker >= 0, take(phase, marker), names.FORWARD)
    return np.where(node >= 0, known, names.OTHER).astype(np.int8)


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

