"""Device rows of a profile without a GPU: the leaf operators of the CPU stand in for kernels."""

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
    """DEVICE rows made of operators that call no other operator and of asynchronous collectives (gloo), and the
    HOST row of each. Streams are threads."""
    is_op = scopes.is_operator & ~scopes.is_role(Role.STEP, Role.OPTIMIZER, Role.SCOPE)
    node = np.flatnonzero(is_op)
    outer = scopes.tree.nearest(scopes.tree.parent[node], is_op)
    calls = np.zeros(len(is_op), bool)
    calls[outer[outer >= 0]] = True
    rows = np.concatenate((scopes.host_row[node[~calls[node]]],
                           np.flatnonzero((host["kind"] == schema.ASYNC).to_numpy())))
    rows = rows[np.argsort(host["start_ns"].to_numpy()[rows], kind="stable")]
    chosen = host.iloc[rows].reset_index(drop=True)
    device = schema.conform(pd.DataFrame({
        "start_ns": chosen["start_ns"], "end_ns": chosen["end_ns"], "raw_end_ns": chosen["end_ns"],
        "name": chosen["name"].cat.remove_unused_categories(), "activity": ACTIVITY, "device": DEVICE,
        "stream": chosen["thread"], "external_id": chosen["external_id"]}), schema.DEVICE)
    return device, rows


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


_COLLECTIVE_CALL = re.compile(r"^c10d::_?(all|reduce|broadcast|gather|scatter|send|recv|barrier)")


def kinds(names: pd.Series) -> NDArray[np.int8]:
    """Code of schema.KINDS: compute, or communication for collectives and the operators that wait for them."""
    is_communication = np.asarray([bool(_COMMUNICATION.search(n)) for n in names.cat.categories], bool)
    kind = np.where(is_communication, classify.COMMUNICATION, classify.COMPUTE).astype(np.int8)
    return kind[names.cat.codes.to_numpy()]


_COMMUNICATION = re.compile(
    r"^(c10d::|_?c10d_functional::(?!_wrap)|record_param_comms$|(gloo|nccl|mpi|ucc|xccl|hccl):)")
