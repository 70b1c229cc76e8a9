"""Device rows of a profile without a GPU: the leaf operators of the CPU stand in for kernels."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd

from tb_chopper.backend import schema
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


def kinds(names: pd.Series) -> pd.Series:
    """compute, or communication for collectives and the operators that wait for them."""
    is_communication = np.asarray([bool(_COMMUNICATION.search(n)) for n in names.cat.categories], bool)
    return pd.Series(np.where(is_communication[names.cat.codes], "communication", "compute"), dtype=pd.CategoricalDtype(
        list(schema.KINDS)))


_COMMUNICATION = re.compile(r"^(c10d::|_?c10d_functional::|record_param_comms$|gloo:|nccl:|mpi:|ucc:|xccl:|hccl:)")
