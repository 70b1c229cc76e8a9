"""What real runs of the example leave in their log directory."""

from __future__ import annotations

import gzip
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.runs.record import KINDS, LAYERS, PIPELINES, STEPS
from torch_ext import sidecar

pytestmark = pytest.mark.torch

OPERATIONS = {
    "", "attn_norm", "attn", "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.rope", "attn.sdpa", "attn.o_proj",
    "mlp_norm", "mlp", "mlp.gate_proj", "mlp.act", "mlp.up_proj", "mlp.down_proj",
}  # fmt: skip


def load(path: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def traces(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.pt.trace.json.gz"))


def scope_counts(trace: Path) -> Counter[str]:
    """Module -> how often its scope was opened."""
    names = [e["name"] for e in load(trace) if e.get("cat") == "user_annotation"]
    return Counter(fqn for fqn in map(sidecar.scope_fqn, names) if fqn is not None)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in PIPELINES[1:]])  # others: test_pipeline_runs.py
def test_every_process_leaves_a_valid_trace_and_its_sidecar(kind: str, recorded: Callable[[str], Path]) -> None:
    if kind == "fsdp2+compile" and not shutil.which("g++"):
        pytest.skip("no C++ compiler")
    folder = recorded(kind)
    processes, _ = KINDS[kind]
    found = traces(folder)
    assert len(found) == processes
    assert len(list(folder.iterdir())) == 2 * processes
    records = [sidecar.read(sidecar.path_for(trace)) for trace in found]
    if processes > 1:
        ranks = {(r["identity"]["rank"], r["identity"]["world_size"]) for r in records}
        assert ranks == {(rank, processes) for rank in range(processes)}
        assert all(set(r["training"]["parallel"].values()) == {processes} for r in records)
    for trace, record in zip(found, records, strict=True):
        assert record["notes"] == []
        steps = {e["name"] for e in load(trace) if e.get("name", "").startswith("ProfilerStep#")}
        first, last = record["profiler"]["first_step"], record["profiler"]["last_step"]
        assert first is not None and last is not None and last - first + 1 == STEPS
        assert steps == {f"ProfilerStep#{i}" for i in range(first, last + 1)}


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("plain", "fsdp2+compile", *PIPELINES)])
def test_every_module_of_every_layer_has_its_scopes(kind: str, recorded: Callable[[str], Path]) -> None:
    per_step = 2 if "checkpoint" in kind else 1  # recompute in backward opens them again
    for trace in traces(recorded(kind)):
        counts = scope_counts(trace)
        for layer in range(LAYERS):
            inside = {name: n for name, n in counts.items() if f"{name}.".startswith(f"layers.{layer}.")}
            assert inside == {
                f"layers.{layer}.{operation}".rstrip("."): STEPS * per_step * (2 if operation == "attn.rope" else 1)
                for operation in OPERATIONS
            }
        assert {name: counts[name] for name in ("", "embed", "norm", "lm_head")} == dict.fromkeys(
            ("", "embed", "norm", "lm_head"), STEPS
        )


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
def test_compiled_layers_keep_their_own_scope(recorded: Callable[[str], Path]) -> None:
    for trace in traces(recorded("fsdp2+compile")):
        counts = scope_counts(trace)
        layers = {f"layers.{layer}" for layer in range(LAYERS)}
        assert counts == dict.fromkeys({"", "embed", "norm", "lm_head"} | layers, STEPS)
        assert any(e["name"].startswith("Torch-Compiled Region") for e in load(trace)), "it was compiled"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("plain", *PIPELINES)])
def test_the_module_table_counts_all_shards(kind: str, recorded: Callable[[str], Path]) -> None:
    if kind == "fsdp2+compile" and not shutil.which("g++"):
        pytest.skip("no C++ compiler")
    width, hidden, kv_width, vocabulary = 64, 176, 32, 256
    layer = 2 * width + 2 * width * width + 2 * width * kv_width + 3 * width * hidden
    for trace in traces(recorded(kind)):
        params = {row["fqn"]: row["params"] for row in sidecar.read(sidecar.path_for(trace))["modules"]}
        assert params["layers.0"] == params[f"layers.{LAYERS - 1}"] == layer
        assert params["layers.1.mlp.gate_proj"] == width * hidden
        assert params[""] == LAYERS * layer + 2 * width * vocabulary + width
