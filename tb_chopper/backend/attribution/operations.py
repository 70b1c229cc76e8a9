"""What the author would call the work of a row: the operation's name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tb_chopper.backend import classify
from tb_chopper.backend.attribution import frames, layers, names
from tb_chopper.backend.attribution.layers import Layers
from tb_chopper.backend.attribution.names import Role
from tb_chopper.backend.attribution.scopes import Scopes
from tb_chopper.backend.attribution.tree import Index, Mask, take

_MANY_OPERATORS = 4
"""A scope with matrix products among so many operators is not one operation (`forward`); it is named with each."""


def naming_scopes(scopes: Scopes, found: Layers) -> Mask:
    """Nodes that give an operation its name. Frames do only where nothing better tells the modules apart."""
    roles = [Role.MODULE, Role.FSDP2, Role.OPTIMIZER, Role.SCOPE]
    return scopes.is_role(*roles, *([Role.FRAME] if found.source in (Role.FRAME, None) else []))


def outermost_operator(scopes: Scopes, nodes: Index) -> Index:
    """The outermost operator around each node that no scope or autograd node separates from it; -1 where none."""
    is_op = scopes.role == Role.OP
    parent = scopes.tree.parent
    top = is_op & ~take(is_op, parent)
    return scopes.tree.nearest(np.where(take(is_op, nodes), nodes, -1), top)


def name(scopes: Scopes, found: Layers, scope: Index, operator: Index, types: NDArray[np.int8]) -> pd.Categorical:
    """Operation of each row from its naming scope and its operator (nodes; -1 where there is none).

    A module's scope gives its path below the layer, `attention.wq`. Scopes that hold other modules, or launch work
    of different types, are named with the operator: `attention: aten::scaled_dot_product_attention`. `types`: code
    of schema.OP_TYPES per row. Rows without scope and operator are null.
    """
    text, texts = _scope_texts(scopes, found)
    scope_id = take(text, scope)
    operator_labels = pd.Categorical([m.label for m in scopes.meanings])
    operator_id = take(np.asarray(operator_labels.codes, np.intp), take(scopes.meaning, operator))
    split = _containers(scopes, text, len(texts)) | _mixed(scopes, text, texts, scope_id, operator_id, types)

    n_operators = len(operator_labels.categories) + 1
    pair, first = np.unique((scope_id + 1) * n_operators + operator_id + 1, return_inverse=True)
    labels = []
    for scope_at, operator_at in zip(pair // n_operators - 1, pair % n_operators - 1, strict=True):
        outer = texts[scope_at] if scope_at >= 0 else ""
        inner = operator_labels.categories[operator_at] if operator_at >= 0 else ""
        labels.append(f"{outer}: {inner}" if outer and inner and split[scope_at] else outer or inner or None)
    return pd.Categorical(labels).take(first) if len(labels) else pd.Categorical([])


def _scope_texts(scopes: Scopes, found: Layers) -> tuple[Index, list[str]]:
    """Per node the position of the name it gives in the list of names; -1 for nodes that give none."""
    path, paths = frames.paths(scopes, found.code) if (scopes.role == Role.FRAME).any() else (None, [])
    index: dict[str, int] = {p: i for i, p in enumerate(paths)}
    of_meaning = np.full(len(scopes.meanings), -1, np.intp)
    for i, meaning in enumerate(scopes.meanings):
        if meaning.role in (Role.MODULE, Role.FSDP2, Role.OPTIMIZER, Role.SCOPE):
            label = layers.inside(meaning.label) if meaning.role == Role.MODULE else meaning.label
            of_meaning[i] = index.setdefault(label, len(index))
    text = scopes.by_meaning(of_meaning)
    return (text if path is None else np.where(scopes.role == Role.FRAME, path, text)), list(index)


def _containers(scopes: Scopes, text: Index, n: int) -> Mask:
    """Names of modules that hold other modules."""
    is_module = scopes.is_role(Role.MODULE, Role.FRAME)
    node = np.flatnonzero(is_module)
    outer = scopes.tree.nearest(scopes.tree.parent[node], is_module)
    result = np.zeros(n, bool)
    result[text[outer[outer >= 0]]] = True
    return result


def _mixed(scopes: Scopes, text: Index, texts: Sequence[str], scope_id: Index, operator_id: Index,
           types: NDArray[np.int8]) -> Mask:
    """Names whose own rows hold attention beside matrix products, or these among many operators."""
    fixed = {m.label for m in scopes.meanings if m.role in (Role.FSDP2, Role.OPTIMIZER)}
    rows = pd.DataFrame({"scope": scope_id, "operator": operator_id, "type": types})[scope_id >= 0].drop_duplicates()
    result = np.zeros(len(texts), bool)
    for scope, group in rows.groupby("scope"):
        gemm, attention = ((group["type"] == t).any() for t in (classify.GEMM, classify.ATTENTION))
        many = group["operator"].nunique() >= _MANY_OPERATORS
        mixed = bool((gemm and attention) or ((gemm or attention) and many))
        result[int(scope)] = mixed and texts[int(scope)] not in fixed
    return result


def collectives(device: pd.DataFrame, operator: pd.Series, scope_label: pd.Series) -> pd.Series:
    """Operation of communication rows: FSDP's scope, else the collective and its group, `all_reduce (mesh_tp)`.

    `operator` and `scope_label` (FSDP2 scopes only): strings or null, on the index of `device`.
    """
    described = device["group_desc"].astype(object)
    group = described.where(described.notna() & ~described.isin(["", "undefined"]), device["group"].astype(object))
    keys = pd.DataFrame({"collective": device["collective"].astype(object), "operator": operator,
                         "name": device["name"].astype(object), "group": group, "scope": scope_label})
    distinct = keys.drop_duplicates()
    label = []
    for row in distinct.itertuples(index=False):
        sources = filter(_is_text, (row.collective, row.operator, row.name))
        found = next(filter(None, map(names.collective, sources)), "communication")
        group = f" ({row.group})" if _is_text(row.group) and row.group else ""
        label.append(row.scope if _is_text(row.scope) else f"{found}{group}")
    return keys.merge(distinct.assign(label=label), how="left").set_axis(keys.index)["label"]


def _is_text(value: object) -> bool:
    return isinstance(value, str)
