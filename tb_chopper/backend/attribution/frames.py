"""Module frames of the Python tracer (`nn.Module: BertLayer_2`): which repeat, and what to call them.

Frames carry a class and a number counted over the whole trace in order of first call, not a module's name. What
is the same from layer to layer is the position: the k-th frame of its class inside the frame around it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tb_chopper.backend.attribution.names import Role
from tb_chopper.backend.attribution.scopes import Scopes
from tb_chopper.backend.attribution.tree import Index, take

_NOT_A_SCOPE = -2


def layers(scopes: Scopes, index: dict[str, int]) -> NDArray[np.intp]:
    """Layer code per node: outermost frames that hold others and stand beside frames of their class.

    In backward, checkpointing calls modules again without the frames around them; those take the layer that they
    have in forward.
    """
    code = np.full(len(scopes.role), _NOT_A_SCOPE, np.intp)
    module = _Modules.of(scopes)
    layer_of = module.layers()
    for node in np.flatnonzero((scopes.role == Role.FRAME)
                               & np.isin(scopes.meaning, [m for m, layer in layer_of.items() if layer == m])):
        code[node] = index.setdefault(module.label[scopes.meaning[node]], len(index))
    for node in module.frame[module.outer < 0]:
        layer = layer_of.get(int(scopes.meaning[node]))
        if layer is not None:
            code[node] = index.setdefault(module.label[layer], len(index))
    return code


def paths(scopes: Scopes, layer_code: NDArray[np.intp]) -> tuple[Index, list[str]]:
    """Per node the position of its path in the list, -1 for other nodes: the classes from below the layer (or the
    outermost frame) down to the frame, numbered where the frame around holds several of the class."""
    position = np.full(len(scopes.role), -1, np.intp)
    module = _Modules.of(scopes)
    index: dict[str, int] = {}
    path_of: dict[int, str] = {}
    usual: dict[int, str] = {}
    for node, above in zip(module.frame.tolist(), module.outer.tolist(), strict=True):
        mine = int(scopes.meaning[node])
        if above < 0:
            path = usual.get(mine, "")
        elif layer_code[node] >= 0:
            path = ""
        else:
            path = f"{path_of[above]}.{module.name_within(mine, int(scopes.meaning[above]))}".lstrip(".")
        usual.setdefault(mine, path)
        path_of[node] = path
        position[node] = index.setdefault(path, len(index))
    return position, list(index)


@dataclass(frozen=True)
class _Modules:
    """Frames (nodes), the frame around each (-1: none), and per meaning: its label and its class, and in
    `inside` for each module the modules called in it, by class, in order of first call."""

    frame: Index
    outer: Index
    label: list[str]
    cls: list[str]
    inside: dict[int, dict[str, dict[int, int]]]

    @classmethod
    def of(cls, scopes: Scopes) -> _Modules:
        is_frame = scopes.role == Role.FRAME
        frame = np.flatnonzero(is_frame)
        outer = scopes.tree.nearest(scopes.tree.parent[frame], is_frame)
        label = [m.label for m in scopes.meanings]
        classes = [re.sub(r"_\d+$", "", name) for name in label]
        inside: dict[int, dict[str, dict[int, int]]] = {}
        pair = take(scopes.meaning, outer) * len(label) + scopes.meaning[frame]
        _, first = np.unique(pair, return_index=True)
        for above, mine in (divmod(p, len(label)) for p in pair[np.sort(first)].tolist()):
            if above >= 0:
                group = inside.setdefault(above, {}).setdefault(classes[mine], {})
                group.setdefault(mine, len(group))
        return cls(frame, outer, label, classes, inside)

    def layers(self) -> dict[int, int]:
        """Layer of each module (meaning ids) that is one or lies in one."""
        layer: dict[int, int] = {}
        inner = {m for groups in self.inside.values() for group in groups.values() for m in group}
        waiting: list[tuple[int, int | None]] = [(top, None) for top in self.inside if top not in inner]
        while waiting:
            module, around = waiting.pop()
            for group in self.inside.get(module, {}).values():
                holds = [m for m in group if m in self.inside]
                for m in group:
                    own = around if around is not None else m if len(holds) > 1 and m in self.inside else None
                    if own is not None:
                        layer.setdefault(m, own)
                    waiting.append((m, own))
        return layer

    def name_within(self, module: int, around: int) -> str:
        """Class of a module, numbered where `around` holds several of that class."""
        group = self.inside[around][self.cls[module]]
        return f"{self.cls[module]}_{group[module]}" if len(group) > 1 else self.cls[module]
