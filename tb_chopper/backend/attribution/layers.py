"""Which layer a host scope belongs to. A layer is a repeated module: layers.3, Layer3, BertLayer_2."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tb_chopper.backend.attribution import frames
from tb_chopper.backend.attribution.names import Role
from tb_chopper.backend.attribution.scopes import Scopes

NOT_A_SCOPE, NO_LAYER = -2, -1
"""Codes of nodes that say nothing about the layer, and of nodes that say that there is none."""


@dataclass(frozen=True)
class Layers:
    """`code` per node: a position in `names`, NO_LAYER or NOT_A_SCOPE. `source` is the role that defines layers."""

    code: NDArray[np.intp]
    names: list[str]
    source: Role | None


_SOURCES = (Role.MODULE, Role.LAYER, Role.BRACKET, Role.FRAME, Role.FSDP1_FORWARD)
"""Where layers are taken from: the first that gives any. One source per trace, so that a layer has one name."""


def find(scopes: Scopes, modules: Sequence[str] = ()) -> Layers:
    """The layers of a trace, from the best source that it has; communication scopes of FSDP2 name theirs.
    `modules`: fully qualified names of the model's modules, where they are known."""
    names = of_modules([*modules, *(m.fqn for m in scopes.meanings if m.fqn)])
    index: dict[str, int] = {}
    source: Role | None = None
    code = np.full(len(scopes.role), NOT_A_SCOPE, np.intp)
    for candidate in _SOURCES:
        code = _codes(scopes, candidate, names, index)
        if index:
            source = candidate
            break
    numbered = _by_number(index) if source in (Role.LAYER, Role.FRAME) else {}
    of_meaning = np.full(len(scopes.meanings), NO_LAYER, np.intp)
    for i, meaning in enumerate(scopes.meanings):
        layer = names.get(meaning.fqn or "") if meaning.role == Role.FSDP2 else None
        if layer is not None:
            of_meaning[i] = index.setdefault(numbered.get(_number(layer), layer), len(index))
    code = np.where(scopes.role == Role.FSDP2, scopes.by_meaning(of_meaning), code)
    return Layers(code, list(index), source)


def _codes(scopes: Scopes, source: Role, names: dict[str, str], index: dict[str, int]) -> NDArray[np.intp]:
    """Layer code per node as `source` tells it; `index` gains the layers."""
    if source == Role.FRAME:
        return frames.layers(scopes, index)
    if source == Role.FSDP1_FORWARD:
        return _nested_forwards(scopes, index)
    code = np.full(len(scopes.meanings), NOT_A_SCOPE, np.intp)
    for i, meaning in enumerate(scopes.meanings):
        if meaning.role == source:
            layer = meaning.label if source == Role.LAYER else names.get(meaning.fqn or "")
            if layer is not None:
                code[i] = index.setdefault(layer, len(index))
    return scopes.by_meaning(code) if len(code) else code


def _nested_forwards(scopes: Scopes, index: dict[str, int]) -> NDArray[np.intp]:
    """FSDP1 names no module: the k-th forward directly inside the root's is unit k."""
    code = np.full(len(scopes.role), NOT_A_SCOPE, np.intp)
    unit = np.flatnonzero(scopes.role == Role.FSDP1_FORWARD)
    root = scopes.tree.nearest(scopes.tree.parent[unit], scopes.role == Role.FSDP1_FORWARD)
    direct = np.isin(root, unit[root < 0])
    nested, root = unit[direct], root[direct]
    k = np.arange(len(nested)) - np.searchsorted(root, root)
    index.update({f"fsdp_unit.{i}": i for i in range(int(k.max(initial=-1)) + 1)})
    code[nested] = k
    return code


def of_modules(fqns: Iterable[str]) -> dict[str, str]:
    """Layer of each fully qualified module name that lies in one: `model.layers.3.mlp` in layers.3.

    A layer is the path up to the first number whose container has a usual name (layers, h, blocks, ...) or holds
    several numbers. Its name starts at the container, or at the top where two containers share a name.
    """
    split = {fqn: m for fqn in dict.fromkeys(fqns) if (m := _layer_match(fqn))}
    numbers: dict[str, set[str]] = defaultdict(set)
    for m in split.values():
        numbers[m["container"]].add(m["number"])
    kept = {fqn: m for fqn, m in split.items()
            if len(numbers[m["container"]]) > 1 or _USUAL.search(m["container"])}
    containers = {m["container"] for m in kept.values()}
    last = [c.rpartition(".")[2] for c in containers]
    short = {c: c.rpartition(".")[2] if last.count(c.rpartition(".")[2]) == 1 else c for c in containers}
    return {fqn: f"{short[m['container']]}.{m['number']}".lstrip(".") for fqn, m in kept.items()}


def inside(fqn: str) -> str:
    """The module's path below its layer, as far as the name tells: `attention.wq` of layers.3.attention.wq."""
    m = _layer_match(fqn)
    return clean(fqn) if m is None else clean(fqn)[m.end():].lstrip(".")


def clean(fqn: str) -> str:
    """The name without what wrappers add to it."""
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPER_PARTS)


def _layer_match(fqn: str) -> re.Match[str] | None:
    return _USUAL_PATH.match(clean(fqn)) or _NUMBERED_PATH.match(clean(fqn))


_WRAPPER_PARTS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "module"}
_USUAL = re.compile(r"(^|\.)(layers?|h|blocks?|decoder_layers|encoder_layers)$")
_USUAL_PATH = re.compile(r"(?P<container>(?:[^.]+\.)*?(?:layers?|h|blocks?))\.(?P<number>\d+)(?=\.|$)")
_NUMBERED_PATH = re.compile(r"(?P<container>(?:[^.]+\.)*?[^.]*?)\.?(?<![^.])(?P<number>\d+)(?=\.|$)")


def _number(layer: str) -> str:
    return re.sub(r".*?(\d+)$", r"\1", layer)


def _by_number(index: dict[str, int]) -> dict[str, str]:
    """Layers that differ by number only, by that number."""
    stems = {re.sub(r"\d+$", "", layer) for layer in index}
    return {_number(layer): layer for layer in index} if len(stems) == 1 else {}
