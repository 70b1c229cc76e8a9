"""Real trainings of the example on CPU: every leaf operation of every layer, forward and backward.

The oracle is plain Python over the raw file: leaf operators, and those that do their work themselves, by a stack
walk; forward layers by the module scopes around them, backward layers by the flow arrows that torch draws from a
forward operator to its backward node.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tb_chopper.backend import schema
from tb_chopper.backend.attribution import attribute
from tb_chopper.backend.readers import kineto

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

KINDS = ("fsdp2", "fsdp1", "ddp", "fsdp2+checkpoint", "fsdp2+compile")
LAYERS = [f"layers.{k}" for k in range(4)]
EVALUATE = "autograd::engine::evaluate_function: "
SHARDING = ("FSDP::", "FullyShardedDataParallel._")


@dataclass
class Entry:
    """One raw event in the nesting of its thread."""

    event: dict[str, Any]
    outer: Entry | None
    calls_operator: bool = False

    def around(self) -> Iterator[Entry]:
        """The entry itself, then outwards."""
        at: Entry | None = self
        while at is not None:
            yield at
            at = at.outer

    @property
    def node(self) -> Entry | None:
        """The closest autograd node."""
        return next((e for e in self.around() if e.event["name"].startswith(EVALUATE)), None)

    def scope(self, prefix: str | tuple[str, ...]) -> str | None:
        """The closest scope with that prefix, not beyond the closest autograd node."""
        for e in self.around():
            if e is self.node:
                return None
            if e.event["name"].startswith(prefix):
                return str(e.event["name"])
        return None

    @property
    def layer(self) -> str | None:
        found = self.scope("chopper::layers.")
        return None if found is None else ".".join(found.removeprefix("chopper::").split(".")[:2])


@dataclass
class Run:
    trace: schema.Trace
    kernels: pd.DataFrame
    leaves: dict[tuple[int, str], Entry]
    """(start in ns, name) -> leaf operator"""
    forward_of: dict[int, Entry]
    """id() of an autograd node's entry -> its forward operator, by the flow arrows"""


def nested(events: list[dict[str, Any]]) -> list[Entry]:
    threads = defaultdict(list)
    for e in events:
        if e.get("ph") == "X" and e.get("cat") in ("cpu_op", "user_annotation") and not e["name"].startswith("gloo:"):
            threads[e["tid"]].append(e)
    entries = []
    for thread in threads.values():
        top: Entry | None = None
        for e in sorted(thread, key=lambda e: (e["ts"], -e["dur"])):
            while top is not None and top.event["ts"] + top.event["dur"] <= e["ts"]:
                top = top.outer
            top = Entry(e, top)
            entries.append(top)
            if e["cat"] == "cpu_op":
                for outer in list(top.around())[1:]:
                    outer.calls_operator = True
    return entries


def kinds_that_work(entries: list[Entry]) -> set[str]:
    """Names of library operators that spend most of their time outside the operators they call."""
    own, called = Counter[str](), Counter[str]()
    for e in entries:
        if e.event["cat"] == "cpu_op":
            if e.calls_operator:
                own[e.event["name"]] += e.event["dur"]
            caller = next((o for o in list(e.around())[1:] if o.event["cat"] == "cpu_op"), None)
            if caller is not None:
                called[caller.event["name"]] += e.event["dur"]
    frames = ("autograd::", "torch::", "c10d::", "_c10d_functional::", "c10d_functional::", "fsdp::")
    return {n for n in own if 2 * called[n] < own[n] and re.match(r"\w+::", n) and not n.startswith(frames)}


def load(folder: Path) -> Run:
    file = sorted(folder.glob("*_r0_*.json.gz"))[0]
    trace = kineto.read(file)
    content = json.loads(gzip.decompress(file.read_bytes()))
    base, events = content["baseTimeNanoseconds"], content["traceEvents"]
    entries = nested(events)
    starts = {(e.event["tid"], e.event["ts"]): e for e in entries}
    arrows: dict[int, dict[str, Entry]] = defaultdict(dict)
    for e in events:
        if e.get("cat") == "fwdbwd":
            arrows[e["id"]][e["ph"]] = starts[e["tid"], e["ts"]]
    forward_of = {id(pair["f"].node): pair["s"] for pair in arrows.values() if "f" in pair and "s" in pair}
    working = kinds_that_work(entries)

    def works(e: Entry) -> bool:
        return e.event["cat"] == "cpu_op" and e.calls_operator and e.event["name"] in working

    leaves = {(base + round(e.event["ts"] * 1000), e.event["name"]): e for e in entries
              if e.event["cat"] == "cpu_op" and (not e.calls_operator or works(e))
              and not any(map(works, list(e.around())[1:]))}
    return Run(trace, attribute(trace).kernels, leaves, forward_of)


@pytest.fixture(scope="module")
def run_of(recorded: Callable[[str], Path]) -> Callable[[str], Run]:
    def once(kind: str) -> Run:
        if "compile" in kind and not shutil.which("g++"):
            pytest.skip("no C++ compiler")
        return load(recorded(kind))

    return cache(once)


def rows(run: Run) -> Iterator[tuple[Any, Entry]]:
    for row in run.kernels[run.kernels["activity"] == "cpu_op"].itertuples():
        entry = run.leaves.get((row.start_ns, row.name))
        if entry is not None:
            yield row, entry


@pytest.mark.parametrize("kind", KINDS)
def test_every_leaf_operation_is_a_row_in_one_step(kind: str, run_of: Callable[[str], Run]) -> None:
    run = run_of(kind)
    ours = Counter((r.start_ns, r.name) for r in run.kernels.itertuples() if not r.name.startswith("gloo:"))
    assert ours == Counter(run.leaves.keys())
    assert set(run.kernels["step"]) == {2, 3}
    assert (run.kernels["operation"] != schema.UNATTRIBUTED).all()


@pytest.mark.parametrize("kind", KINDS)
def test_forward_work_is_in_the_layer_of_its_module_scope(kind: str, run_of: Callable[[str], Run]) -> None:
    wrong, checked = [], Counter[str]()
    for row, entry in rows(run_of(kind)):
        if entry.node is None and entry.layer and not entry.scope(SHARDING):
            checked[entry.layer] += 1
            if (row.layer, row.phase, row.recompute) != (entry.layer, "forward", False):
                wrong.append((row.name, row.layer, row.phase, entry.layer))
    assert not wrong[:5]
    assert set(checked) == set(LAYERS) and len(set(checked.values())) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_backward_work_is_in_the_layer_of_its_forward_operator(kind: str, run_of: Callable[[str], Run]) -> None:
    run, wrong, checked = run_of(kind), [], Counter[str]()
    for row, entry in rows(run):
        forward = run.forward_of.get(id(entry.node))
        if forward is None or entry.layer or entry.scope(SHARDING):
            continue
        checked[str(forward.layer)] += 1
        if (None if pd.isna(row.layer) else row.layer, row.phase) != (forward.layer, "backward"):
            wrong.append((row.name, row.layer, row.phase, forward.layer))
    assert not wrong[:5]
    assert set(LAYERS) <= set(checked) and len({checked[layer] for layer in LAYERS}) == 1
    assert checked["layers.0"] >= 20


@pytest.mark.parametrize("kind", KINDS)
def test_recompute_is_forward_work_inside_backward(kind: str, run_of: Callable[[str], Run]) -> None:
    repeated = Counter()
    for row, entry in rows(run_of(kind)):
        expected = entry.node is not None and entry.layer is not None
        if expected:
            repeated[entry.layer] += 1
            assert (row.layer, row.phase) == (entry.layer, "backward")
        assert row.recompute == expected, (row.name, row.attributed_by)
    if "checkpoint" in kind:
        assert set(repeated) == set(LAYERS) and len(set(repeated.values())) == 1 and repeated["layers.0"] >= 30
    else:
        assert not repeated


@pytest.mark.parametrize("kind", KINDS)
def test_counts_are_equal_from_layer_to_layer(kind: str, run_of: Callable[[str], Run]) -> None:
    """By step, phase and operation; FSDP1 gathers a layer's weights in the backward of the layer after it."""
    kernels = run_of(kind).kernels.astype({"operation": str, "layer": str, "phase": str})
    kernels = kernels[kernels["layer"].isin(LAYERS) & ~kernels["operation"].str.startswith("FSDP1::")]
    kernels = kernels[~((kernels["kind"] == "communication") & (kind == "fsdp1"))]
    counts = kernels.pivot_table(index=["step", "phase", "operation", "recompute"], columns="layer", values="name",
                                 aggfunc="size", fill_value=0)
    different = counts[counts.nunique(axis=1) > 1]
    assert list(counts.columns) == LAYERS and different.empty, different
    assert {"forward", "backward"} <= set(counts.index.get_level_values("phase"))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_accumulated_in_the_layer_that_they_come_from(kind: str, run_of: Callable[[str], Run]) -> None:
    """AccumulateGrad has no Sequence number; DDP scales and FSDP reduces the gradients there."""
    found = Counter()
    for row, entry in rows(run_of(kind)):
        if entry.node is not None and "AccumulateGrad" in entry.node.event["name"] and not entry.scope(SHARDING):
            found[row.layer] += 1
    assert len({found[layer] for layer in LAYERS}) == 1
    assert found["layers.0"] > 0 or kind == "fsdp2+compile"


@pytest.mark.parametrize(("kind", "layer"), [
    ("fsdp2", "layers"), ("fsdp2+checkpoint", "layers"), ("fsdp2+compile", "layers"), ("fsdp1", "fsdp_unit")])
def test_layers_without_module_scopes(kind: str, layer: str, run_of: Callable[[str], Run]) -> None:
    """A training that was not annotated: FSDP2's brackets and FSDP1's nested forwards give the same layers."""
    run = run_of(kind)
    host = run.trace.host[~run.trace.host["name"].astype(str).str.startswith("chopper::")]
    bare = attribute(replace(run.trace, host=host.reset_index(drop=True))).kernels
    leaf = ["start_ns", "end_ns", "stream"]
    both = run.kernels.merge(bare, on=leaf, suffixes=("", "_bare"))
    inside = both[both["layer"].notna() & ~both["operation"].astype(str).str.startswith(("FSDP", "all_", "reduce"))]
    renamed = inside["layer_bare"].astype(str).str.replace(re.escape(layer), "layers", regex=True)
    assert (renamed == inside["layer"].astype(str)).all()
    assert (inside["phase_bare"].astype(str) == inside["phase"].astype(str)).all()
    assert (inside["recompute_bare"] == inside["recompute"]).all()
