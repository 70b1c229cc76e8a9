"""Attribution of real GPU traces against plain Python over the raw JSON: stack walks, flow arrows, External ids."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tb_chopper.backend import schema
from tb_chopper.backend.attribution import attribute, autograd, scopes
from tb_chopper.backend.readers import kineto
from tests.conftest import DATA

FILES = sorted(str(p.relative_to(DATA / "traces")) for p in (DATA / "traces").glob("*/*.gz")) if DATA.is_dir() else []
ONE_PER_RUN = [f for f in FILES if "rank0" in f or "worker0" in f or f.startswith("ads")]
OPERATORS, CALLS = ("cpu_op", "Operator"), ("cuda_runtime", "cuda_driver", "Runtime")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset")
BEFORE_2023 = ("ads_a100", "dlrm8", "resnet18", "resnet50", "torchrec4")
"""Traces with ids of an older kind, or µs clocks in which the ends of neighbours coincide."""

OTHER_IDS = ("megatron", "dlrm8")
"""Traces whose launch calls count External ids apart from operators."""

pytestmark = pytest.mark.skipif(not FILES, reason="the folder of real files is not beside this checkout")


@cache
def raw(file: str) -> list[dict[str, Any]]:
    content = json.loads(gzip.decompress((DATA / "traces" / file).read_bytes()))
    return [e for e in (content if isinstance(content, list) else content["traceEvents"]) if "ts" in e]


@cache
def ours(file: str) -> tuple[schema.Trace, pd.DataFrame, pd.DataFrame]:
    trace = kineto.read(DATA / "traces" / file)
    result = attribute(trace)
    return trace, result.kernels, result.steps


def ns(event: dict[str, Any]) -> int:
    return round(float(event["ts"]) * 1000)


@cache
def base(file: str) -> int:
    """Our times minus those of the file, in ns."""
    _, kernels, _ = ours(file)
    return int(kernels["start_ns"].min()) - min(
        ns(e) for e in raw(file) if e.get("ph") == "X" and e.get("cat") in DEVICE)


@cache
def innermost_operators(file: str) -> dict[Any, list[tuple[str, int] | None]]:
    """correlation -> (operator, External id) around each launch call, by a stack per thread; None where none."""
    threads: dict[Any, list[tuple[float, int, float, dict[str, Any]]]] = defaultdict(list)
    for e in raw(file):
        if e.get("ph") == "X" and e.get("cat") in OPERATORS + CALLS:
            is_call = e["cat"] in CALLS
            threads[e["pid"], e["tid"]].append((float(e["ts"]), is_call, -float(e.get("dur", 0)), e))
    found: dict[Any, list[tuple[str, int] | None]] = defaultdict(list)
    for events in threads.values():
        stack: list[tuple[float, dict[str, Any]]] = []
        for start, is_call, minus_dur, e in sorted(events, key=lambda x: x[:3]):
            while stack and stack[-1][0] <= start:
                stack.pop()
            if is_call:
                top = stack[-1][1] if stack else None
                args = top.get("args", {}) if top else {}
                found[e.get("args", {}).get("correlation")].append(
                    (top["name"], args.get("External id", args.get("external id", -1))) if top else None)
            else:
                stack.append((start - minus_dur, e))
    return found


@pytest.mark.parametrize("file", FILES)
def test_every_row_has_a_step_an_operation_and_a_reason(file: str) -> None:
    trace, kernels, steps = ours(file)
    assert len(kernels) == len(trace.device)
    assert kernels["operation"].notna().all() and kernels["attributed_by"].notna().all()
    assert kernels["phase"].notna().all()
    counted = kernels[kernels["activity"] == "kernel"].groupby("step")["name"].size()
    for row in steps.itertuples():
        assert row.n_kernels == counted.get(row.step, 0)
    assert steps["step"].is_unique and steps["start_ns"].is_monotonic_increasing


@pytest.mark.parametrize("file", FILES)
def test_rows_belong_to_the_profiler_step_around_their_launch(file: str) -> None:
    _, kernels, _ = ours(file)
    shift, marks = base(file), {}
    for e in raw(file):
        if str(e["name"]).startswith("ProfilerStep#") and e.get("ph") == "X" and "gpu" not in e["cat"]:
            start = ns(e) + shift
            marks[int(e["name"].split("#")[1])] = start, start + round(float(e["dur"]) * 1000)
    if not marks:
        pytest.skip("no ProfilerStep in this file")
    for launch, step in zip(kernels["launch_ns"], kernels["step"], strict=True):
        around = [] if pd.isna(launch) else [s for s, (a, b) in marks.items() if a <= launch < b]
        assert around == ([] if pd.isna(step) else [step])


@pytest.mark.parametrize("file", FILES)
def test_launches_and_operators_equal_a_stack_walk(file: str) -> None:
    _, kernels, _ = ours(file)
    expected = innermost_operators(file)
    launched = kernels[kernels["launch_ns"].notna()]
    known = kernels["correlation"].isin([c for c in expected if c is not None])
    assert set(launched.index) == set(kernels.index[known]), "every row whose call is in the file has its launch"
    wrong = [
        (row.name, row.cpu_op, expected[row.correlation]) for row in launched.itertuples()
        if row.attributed_by != "external id"
        and (row.cpu_op if isinstance(row.cpu_op, str) else None) not in [
            found[0] if found else None for found in expected[row.correlation]]
    ]
    # Scopes are recorded as operators in the oldest traces; here they are scopes.
    wrong = [w for w in wrong if not (w[2] and w[2][0] and w[2][0][0].startswith(("Optimizer.", "ProfilerStep#",
             "DistributedDataParallel.", "enumerate(")))]
    assert not wrong[:5]


@pytest.mark.parametrize("file", [f for f in FILES if not f.startswith(BEFORE_2023)])
def test_all_kernels_launched_in_the_window_have_an_operator(file: str) -> None:
    """Modern traces: 100 %, but for launches outside every operator, which graph replays and schedulers make."""
    _, kernels, _ = ours(file)
    launched = kernels[kernels["launch_ns"].notna() & (kernels["attributed_by"] != "graph replay")]
    expected = innermost_operators(file)
    without = sum(expected[c] == [None] for c in launched["correlation"])
    assert launched["cpu_op"].isna().sum() == without
    before = kernels["launch_ns"].isna()
    assert set(kernels.loc[before, "operation"]) <= {schema.BEFORE_CAPTURE, schema.UNATTRIBUTED}


@pytest.mark.parametrize("file", [f for f in ONE_PER_RUN if not f.startswith((*BEFORE_2023, *OTHER_IDS))])
def test_external_ids_agree_with_containment(file: str) -> None:
    trace, kernels, _ = ours(file)
    own = trace.host["external_id"].to_numpy()
    shift = base(file)
    ids = {(ns(e) + shift, e["name"], e["args"].get("correlation")): e["args"].get("External id")
           for e in raw(file) if e.get("cat") in DEVICE and e.get("ph") == "X"}
    agree = Counter(
        ids[row.start_ns, row.name, row.correlation] == own[row.op_id]
        for row in kernels.itertuples()
        if row.op_id >= 0 and ids.get((row.start_ns, row.name, row.correlation)) is not None)
    assert agree[False] == 0 and agree[True] > 0


@pytest.mark.parametrize("file", [f for f in ONE_PER_RUN if f.startswith(OTHER_IDS)])
def test_external_ids_of_another_space_are_not_followed(file: str) -> None:
    assert "external id" not in set(ours(file)[1]["attributed_by"])


@pytest.mark.parametrize("file", ONE_PER_RUN)
def test_forward_links_equal_the_flow_arrows(file: str) -> None:
    """torch draws fwdbwd arrows itself: one oracle for the rule by Sequence number."""
    starts = {e["id"]: e for e in raw(file) if e.get("cat") == "fwdbwd" and e["ph"] == "s"}
    ends = {e["id"]: e for e in raw(file) if e.get("cat") == "fwdbwd" and e["ph"] == "f"}
    pairs = [(starts[i], ends[i]) for i in starts.keys() & ends.keys()]
    if not pairs:
        pytest.skip("no flow arrows in this file")
    trace = ours(file)[0]
    tree = scopes.build(trace.host)
    grad = autograd.find(tree)
    thread = {(str(t.pid), str(t.tid)): i for i, t in enumerate(trace.threads.itertuples())}
    shift = base(file)
    backward = tree.tree.locate(np.array([thread[str(e["pid"]), str(e["tid"])] for _, e in pairs]),
                                np.array([ns(e) + shift for _, e in pairs]))
    root = grad.index(tree.tree.nearest(backward, grad.is_root))
    assert (root >= 0).all()
    forward = grad.forward[root]
    wrong = [(s["ts"], e["ts"]) for (s, e), f in zip(pairs, forward, strict=True)
             if f < 0 or tree.tree.start_ns[f] != ns(s) + shift]
    assert len(wrong) <= 0.002 * len(pairs), wrong[:5]
