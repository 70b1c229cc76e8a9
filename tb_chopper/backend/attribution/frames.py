"""Module frames of the Python tracer (`nn.Module: BertLayer_2`): which repeat, and what to call them.

Frames carry a class and a number counted over the whole trace in order of first call, not a module's name. What
is the same from layer to layer is the position: the k-th frame of its class inside the frame around it.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from tb_chopper.backend.attribution.names import Role
from tb_chopper.backend.attribution.scopes import Scopes
from tb_chopper.backend.attribution.tree import Index

_NOT_A_SCOPE = -2


def layers(scopes: Scopes, index: dict[str, int]) -> NDArray[np.intp]:
    """Layer code per node: outermost frames of which the frame around them holds several of one class."""
    code = np.full(len(scopes.role), _NOT_A_SCOPE, np.intp)
    frame, outer = _frames(scopes)
    if len(frame) == 0:
        return code
    label = [m.label if m.role == Role.FRAME else "" for m in scopes.meanings]
    cls = np.asarray([re.sub(r"_\d+$", "", name) for name in label], object)
    siblings: dict[tuple[int, str], set[int]] = {}
    for f, o in zip(scopes.meaning[frame], np.where(outer >= 0, scopes.meaning[outer], -1), strict=True):
        siblings.setdefault((int(o), cls[f]), set()).add(int(f))
    repeated = {f for group in siblings.values() if len(group) > 1 for f in group}
    is_repeated = np.asarray([i in repeated for i in range(len(label))])
    candidate = np.zeros(len(scopes.role), bool)
    candidate[frame] = is_repeated[scopes.meaning[frame]]
    chosen = frame[candidate[frame]]
    chosen = chosen[scopes.tree.nearest(scopes.tree.parent[chosen], candidate) < 0]
    for node in chosen:
        code[node] = index.setdefault(label[scopes.meaning[node]], len(index))
    return code


def _frames(scopes: Scopes) -> tuple[Index, Index]:
    """All frames, and the closest frame around each (-1 where none)."""
    is_frame = scopes.role == Role.FRAME
    frame = np.flatnonzero(is_frame)
    return frame, scopes.tree.nearest(scopes.tree.parent[frame], is_frame)


def paths(scopes: Scopes, layer_code: NDArray[np.intp]) -> tuple[Index, list[str]]:
    """Per node the position of its path in the list, -1 for other nodes: the classes from below the layer (or the
    outermost frame) down to the frame, numbered where the frame around holds several of the class."""
    position = np.full(len(scopes.role), -1, np.intp)
    frame, outer = _frames(scopes)
    label = [m.label for m in scopes.meanings]
    ordinal: dict[tuple[int, str], dict[int, int]] = {}
    for f, o in zip(scopes.meaning[frame], np.where(outer >= 0, scopes.meaning[outer], -1), strict=True):
        group = ordinal.setdefault((int(o), re.sub(r"_\d+$", "", label[f])), {})
        group.setdefault(int(f), len(group))
    index: dict[str, int] = {}
    path_of: dict[int, str] = {}
    for node, above in zip(frame.tolist(), outer.tolist(), strict=True):
        if layer_code[node] >= 0 or above < 0:
            path = ""
        else:
            mine, around = int(scopes.meaning[node]), int(scopes.meaning[above])
            name = re.sub(r"_\d+$", "", label[mine])
            group = ordinal[around, name]
            name = f"{name}_{group[mine]}" if len(group) > 1 else name
            path = f"{path_of[above]}.{name}".lstrip(".")
        path_of[node] = path
        position[node] = index.setdefault(path, len(index))
    return position, list(index)
