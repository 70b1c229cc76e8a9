"""Device rows of a profile without a GPU: the operators that do the work on the CPU stand in for kernels."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tb_chopper.backend import classify, schema
from tb_chopper.backend.attribution.names import Role
from tb_chopper.backend.attribution.scopes import Scopes
from tb_chopper.backend.attribution.tree import Index

DEVICE = "cpu"
ACTIVITY = "cpu_op"


def leaves(host: pd.DataFrame, scopes: Scopes) -> tuple[pd.DataFrame, Index]:
    """DEVICE rows made of leaf operators and of asynchronous collectives (gloo), and the HOST row of each. Streams are
    threads.

    A leaf calls no other operator, or is of a kind that spends most of its time in none: `aten::addmm` multiplies
    itself and calls `aten::expand` before. What it calls is then part of it and has no row of its own. The kind
    decides, not the call, so that every layer has the same leaves.
    """
    is_op = scopes.is_operator & ~scopes.is_role(Role.STEP, Role.OPTIMIZER, Role.SCOPE)
    node = np.flatnonzero(is_op)
    outer = scopes.tree.nearest(scopes.tree.parent[node], is_op)
    calls = np.zeros(len(is_op), bool)
    calls[outer[outer >= 0]] = True
    works = np.zeros(len(is_op), bool)
    works[node] = calls[node] & _works_itself(host, scopes, node, outer)
    is_part = scopes.tree.nearest(scopes.tree.parent[node], works) >= 0
    rows = np.concatenate((scopes.host_row[node[(~calls | works)[node] & ~is_part]],
                           np.flatnonzero((host["kind"] == schema.ASYNC).to_numpy())))
    rows = rows[np.argsort(host["start_ns"].to_numpy()[rows], kind="stable")]
    chosen = host.iloc[rows].reset_index(drop=True)
    device = schema.conform(pd.DataFrame({
        "start_ns": chosen["start_ns"], "end_ns": chosen["end_ns"], "raw_end_ns": chosen["end_ns"],
        "name": chosen["name"].cat.remove_unused_categories(), "activity": ACTIVITY, "device": DEVICE,
        "stream": chosen["thread"], "external_id": chosen["external_id"]}), schema.DEVICE)
    return device, rows


def _works_itself(host: pd.DataFrame, scopes: Scopes, node: Index, outer: Index) -> NDArray[np.bool_]:
    """Which operators are of a kind that spends less than half of the time of its calling calls in the called."""
    names = host["name"].cat.categories
    name = host["name"].cat.codes.to_numpy()[scopes.host_row]
    duration = scopes.tree.end_ns - scopes.tree.start_ns
    callers = np.unique(outer[outer >= 0])
    own = np.bincount(name[callers], duration[callers], len(names))
    called = np.bincount(name[outer[outer >= 0]], duration[node[outer >= 0]], len(names))
    works = (2 * called < own) & np.asarray([bool(_LIBRARY.match(n)) for n in names], bool)
    return works[name[node]]


def issued_by(host: pd.DataFrame, rows: Index) -> Index:
    """HOST row that asked for the work of each of `rows`: itself for operators. Asynchronous collectives run on
    threads of their backend in the order in which they were issued; -1 where they were issued before the capture.
    """
    issued, start = rows.copy(), host["start_ns"].to_numpy()
    is_call = np.asarray([bool(_COLLECTIVE_CALL.search(n)) for n in host["name"].cat.categories], bool)
    calls = np.flatnonzero(is_call[host["name"].cat.codes.to_numpy()] & (host["kind"] == "cpu_op").to_numpy())
    calls = calls[np.argsort(start[calls], kind="stable")]
    records = np.flatnonzero((host["kind"] == schema.ASYNC).to_numpy()[rows])
    k = 0
    for record in records:
        fits = k < len(calls) and start[calls[k]] <= start[rows[record]]
        issued[record] = calls[k] if fits else -1
        k += fits
    return issued


_LIBRARY = re.compile(r"^(?!autograd::|torch::|c10d::|_?c10d_functional::|fsdp::)\w+::")
"""Operators of a library; not the frames around them (autograd nodes, compiled regions, collectives)."""

_COLLECTIVE_CALL = re.compile(r"^c10d::_?(all|reduce|broadcast|gather|scatter|send|recv|barrier)")


def kinds(names: pd.Series) -> NDArray[np.int8]:
    """Code of schema.KINDS: compute, or communication for collectives and the operators that wait for them."""
    is_communication = np.asarray([bool(_COMMUNICATION.search(n)) for n in names.cat.categories], bool)
    kind = np.where(is_communication, classify.COMMUNICATION, classify.COMPUTE).astype(np.int8)
    return kind[names.cat.codes.to_numpy()]


_COMMUNICATION = re.compile(
    r"^(c10d::|_?c10d_functional::(?!_wrap)|record_param_comms$|(gloo|nccl|mpi|ucc|xccl|hccl):)")
