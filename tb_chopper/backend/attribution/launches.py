"""Which runtime call launched a device activity, and which host scope made that call."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from tb_chopper.backend.attribution.scopes import Scopes
from tb_chopper.backend.attribution.tree import Index, Int, Mask, take

_AGREEMENT = 0.95
"""Share of launched rows whose External id must name the operator found by containment before it may be
trusted for the others: in old traces it counts in another id space and names wrong operators."""


def launch_rows(host: pd.DataFrame, correlation: Int) -> Index:
    """HOST row of the first runtime call with each correlation id, in file order; -1 where there is none."""
    own = host["correlation"].to_numpy()
    calls = np.flatnonzero((host["kind"] == "runtime").to_numpy() & (own >= 0))
    ids, first = np.unique(own[calls], return_index=True)
    return _lookup(ids, calls[first], correlation)


def by_external_id(host: pd.DataFrame, scopes: Scopes, external_id: Int, operator_row: Index) -> Index:
    """Node of the operator with the External id of each device row, -1 where unknown.

    `operator_row` holds the HOST row of the innermost operator around the launch, -1 where unknown. All -1 when
    the two disagree too often, or when nothing can be compared.
    """
    own = host["external_id"].to_numpy()
    known = (operator_row >= 0) & (external_id >= 0)
    agree = own[operator_row[known]] == external_id[known]
    if len(agree) == 0 or agree.mean() < _AGREEMENT:
        return np.full(len(external_id), -1, np.intp)
    ops = np.flatnonzero((host["kind"] == "cpu_op").to_numpy() & (own >= 0))
    ids, first = np.unique(own[ops], return_index=True)
    rows = _lookup(ids, ops[first], external_id)
    return take(scopes.node_of_row, rows)


def lost_launch(device: pd.DataFrame, launched: Mask) -> Mask:
    """Rows without a launch record that cannot have been launched before the capture.

    A stream runs in order: what starts after a row that was launched inside the capture was so too. The same
    holds for everything when no row at all has a launch record.
    """
    if not launched.any():
        return np.ones(len(device), bool)
    start = device["start_ns"].to_numpy()
    queue = device.groupby(["device", "stream"], observed=True, sort=False).ngroup().to_numpy()
    first = np.full(queue.max() + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, queue[launched], start[launched])
    return ~launched & (start > first[queue])


def calls(host: pd.DataFrame) -> Index:
    """HOST rows of the runtime calls that put kernels or graphs on a device."""
    is_launch = np.asarray([bool(_LAUNCH.search(n)) for n in host["name"].cat.categories], bool)
    if not is_launch.any():
        return np.empty(0, np.intp)
    is_call = (host["kind"] == "runtime").to_numpy() & (host["correlation"].to_numpy() >= 0)
    return np.flatnonzero(is_call & is_launch[host["name"].cat.codes.to_numpy()])


_LAUNCH = re.compile(r"^(cuda|cu|hip)(Ext)?(Module)?(Launch(?!Host)|GraphLaunch)")


def lost_calls(launch_calls: Index, used: Index) -> Index:
    """Launch calls that no device row came from."""
    is_used = np.zeros(max(launch_calls.max(initial=-1), used.max(initial=-1)) + 1, bool)
    is_used[used[used >= 0]] = True
    return launch_calls[~is_used[launch_calls]]


def _lookup(keys: Int, values: Index, asked: Int) -> Index:
    """Value of each asked key, -1 where it is missing or negative; `keys` ascending and distinct."""
    if len(keys) == 0:
        return np.full(len(asked), -1, np.intp)
    at = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
    return np.where((keys[at] == asked) & (asked >= 0), values[at], -1)
