"""The operators of a simulated trace take the arguments that torch's own operators take, in their places."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tb_chopper.backend.simulate import Options, simulate

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

TENSORS = {"float", "double", "c10::BFloat16", "long int"}


@pytest.fixture(scope="module", params=["rocm", "cuda"])
def operators(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Each distinct call of a torch operator with recorded arguments."""
    directory = simulate(tmp_path_factory.mktemp("run"), Options(dialect=request.param, ranks=1, steps=1))[0]
    with gzip.open(next(Path(directory).glob("*.pt.trace.json.gz")), "rt") as stream:
        events = json.load(stream)["traceEvents"]
    own = [e for e in events if e.get("cat") == "cpu_op" and e["name"].startswith("aten::")]
    found = [{"name": e["name"], **{k: e["args"][k] for k in ("Input Dims", "Input type", "Concrete Inputs")}}
             for e in own if "Input type" in e["args"]]
    return list({json.dumps(f): f for f in found}.values())


def fits(call: dict[str, Any], schema: Any) -> bool:
    """Whether the recorded arguments are those of the schema: count, and what each one is."""
    dims, types, values = (call[k] for k in ("Input Dims", "Input type", "Concrete Inputs"))
    if not len(schema.arguments) == len(dims) == len(types) == len(values):
        return False
    for argument, shape, kind, value in zip(schema.arguments, dims, types, values, strict=True):
        wanted = str(argument.type)
        if kind == "":
            ok = wanted.startswith("Optional") or (wanted == "Tensor" and shape == [])  # an undefined tensor
        elif wanted.endswith("List[Tensor]"):
            ok = kind == "TensorList" and all(isinstance(s, list) for s in shape)
        elif "Tensor" in wanted:
            ok = kind in TENSORS and value == "" and all(isinstance(n, int) for n in shape)
        elif wanted.startswith(("List[", "Optional[List[")):
            ok = kind == "ScalarList" and shape == [] and value.startswith("[")
        else:
            ok = kind == "Scalar" and shape == [] and value != ""
        if not ok:
            return False
    return True


def schemas(name: str) -> list[Any]:
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"))
    return [getattr(packet, overload)._schema for overload in packet.overloads()]


def test_arguments_are_those_of_an_overload(operators):
    assert len({c["name"] for c in operators}) > 25
    wrong = [c for c in operators if not any(fits(c, s) for s in schemas(c["name"]))]
    assert not wrong, [c["name"] for c in wrong]


def test_attention_is_causal_where_torch_has_that_argument_and_in_its_layout(operators):
    attention = [c for c in operators if "flash_attention" in c["name"]]
    assert {c["name"].rpartition("::")[2] for c in attention} == {
        "_flash_attention_forward", "_flash_attention_backward", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward"}
    for call in attention:
        names = [a.name for a in schemas(call["name"])[0].arguments]
        assert call["Concrete Inputs"][names.index("is_causal")] == "True"
        heads, length = (2, 1) if "_scaled_dot" not in call["name"] else (1, 2)
        q, k = (call["Input Dims"][names.index(n)] for n in ("query", "key"))
        assert (q[heads], k[heads], q[length], q[3]) == (16, 4, 2048, 128)
