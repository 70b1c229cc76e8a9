"""Module scopes: names, nesting, removal, and what wrappers, compilers and exceptions do to them."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from torch_ext import annotate
from torch_ext.annotation import _open_scopes, _tables, annotated_modules, module_table

pytestmark = pytest.mark.torch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


LAYER = ["layers.{0}", "layers.{0}.up", "layers.{0}.down"]
FORWARD = ["(Net)", *(name.format(i) for i in (0, 1) for name in LAYER)]


@pytest.fixture(autouse=True)
def _no_scope_stays_open() -> Iterator[None]:
    yield
    _tables.clear()  # of models that wait for the garbage collector
    assert _open_scopes.stack == []


def captured(work: Callable[[], Any], folder: Path) -> list[dict[str, Any]]:
    """The module scopes of `work`, in order of start, their prefix removed."""
    with profile(activities=[ProfilerActivity.CPU]) as p:
        work()
    path = folder / "trace.json"
    p.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") == "user_annotation"]
    path.unlink()
    scopes = [e | {"name": e["name"].removeprefix("chopper::")} for e in events if e["name"].startswith("chopper::")]
    assert all(scope.get("args", {}).get("finished", "true") != "false" for scope in scopes)
    return sorted(scopes, key=lambda e: e["ts"])


def scopes(model: nn.Module, folder: Path, backward: bool = False) -> list[str]:
    def work() -> None:
        y = model(torch.ones(2, 4, requires_grad=True))
        if backward:
            y.sum().backward()

    return [e["name"] for e in captured(work, folder)]


def test_scopes_are_named_and_nested_as_the_modules_are(tmp_path: Path) -> None:
    model = Net()
    with annotate(model):
        events = captured(lambda: model(torch.ones(2, 4)), tmp_path)
    assert [e["name"] for e in events] == FORWARD
    ends = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events}
    for child, parent in [("layers.1.up", "layers.1"), ("layers.1", "(Net)"), ("layers.0.down", "layers.0")]:
        assert ends[parent][0] <= ends[child][0] <= ends[child][1] <= ends[parent][1]


def test_removed_is_removed(tmp_path: Path) -> None:
    model = Net()
    annotation = annotate(model)
    annotation.remove()
    assert scopes(model, tmp_path) == []
    assert annotated_modules() == []
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    annotation.remove()


def test_a_with_block_removes_even_after_an_error() -> None:
    model = Net()
    with pytest.raises(ZeroDivisionError), annotate(model):
        assert annotated_modules()
        raise ZeroDivisionError
    assert annotated_modules() == []


def test_annotating_again_replaces(tmp_path: Path) -> None:
    model = Net()
    annotate(model.layers[0], "old")
    annotate(model)
    with annotate(model):
        assert scopes(model, tmp_path) == FORWARD
        assert [row["fqn"] for row in annotated_modules()].count("layers.0") == 1
        assert not any(row["fqn"].startswith("old") for row in annotated_modules())


def test_nothing_is_recorded_or_kept_without_a_profiler() -> None:
    model = Net()
    with annotate(model):
        model(torch.ones(2, 4))
        assert _open_scopes.stack == []


def test_a_profiler_that_starts_or_stops_inside_a_forward(tmp_path: Path) -> None:
    class Switch(nn.Module):
        def __init__(self, act: Callable[[], Any]) -> None:
            super().__init__()
            self.act = act

        def forward(self, x: Tensor) -> Tensor:
            self.act()
            return x

    p = profile(activities=[ProfilerActivity.CPU])
    model = nn.Sequential(Switch(p.start), nn.Linear(4, 4), Switch(p.stop), nn.Linear(4, 4))
    with annotate(model):
        model(torch.ones(2, 4))
    p.export_chrome_trace(str(tmp_path / "t.json"))
    names = [e["name"] for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"]]
    assert [n for n in names if n.startswith("chopper::")] == ["chopper::1", "chopper::2"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_an_error_in_forward_closes_its_scopes(tmp_path: Path, error: type[BaseException]) -> None:
    class Fails(nn.Module):
        fail = True

        def forward(self, x: Tensor) -> Tensor:
            if self.fail:
                raise error
            return x

    class Catches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.risky = nn.Sequential(Fails())
            self.safe = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.risky(x)
            except BaseException:
                return self.safe(x)

    model = Catches()
    with annotate(model):
        events = captured(lambda: model(torch.ones(2, 4)), tmp_path)
    assert [e["name"] for e in events] == ["(Catches)", "risky", "risky.0", "safe"]
    if issubclass(error, Exception):  # torch runs no hooks for the others: their scopes end with their parent's
        by_name = {e["name"]: e for e in events}
        assert by_name["risky"]["ts"] + by_name["risky"]["dur"] <= by_name["safe"]["ts"]


def test_a_module_may_call_itself_and_others_many_times(tmp_path: Path) -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf = nn.Linear(4, 4)

        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            return self(x, depth - 1) if depth else self.leaf(x)

    model = nn.Sequential(Recursive(), nn.Identity())
    model.append(model[1])  # shared: goes by its first name
    with annotate(model):
        assert scopes(model, tmp_path) == ["(Sequential)", "0", "0", "0", "0.leaf", "1", "1"]


def test_odd_names_become_safe_ones(tmp_path: Path) -> None:
    model = nn.Sequential()
    model.add_module('a "b"', nn.Linear(4, 4))
    model.add_module("层", nn.Linear(4, 4))
    with annotate(model):
        assert scopes(model, tmp_path) == ["(Sequential)", "a__b_", "_"]
        assert [row["fqn"] for row in annotated_modules()] == ["", 'a "b"', "层"]


def test_an_annotated_model_can_be_copied_and_pickled(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with annotate(model):
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert scopes(twin, tmp_path) == ["(Sequential)", "0"]


def test_results_and_gradients_do_not_change() -> None:
    model = Net()
    x = torch.randn(3, 4)
    model(x).sum().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with annotate(model), profile(activities=[ProfilerActivity.CPU]):
        model(x).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, model.parameters(), strict=True))


def test_module_table_counts_shared_parameters_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight
            self.lazy = nn.LazyLinear(3)

    rows = {row["fqn"]: row for row in module_table(Tied())}
    assert rows["embed"]["params"] == rows["head"]["params"] == 40
    assert rows["lazy"]["params"] is rows[""]["params"] is None
    del (tied := Tied()).lazy
    assert module_table(tied)[0]["params"] == 40
    assert [(row["fqn"], row["cls"], row["order"]) for row in module_table(tied)] == [
        ("", "Tied", 0), ("embed", "Embedding", 1), ("head", "Linear", 2),
    ]  # fmt: skip


def test_tables_of_models_that_are_gone_go_too() -> None:
    annotate(Net())
    import gc

    gc.collect()
    assert annotated_modules() == []


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("whole", ["(Net)"]),
        ("whole in place", ["(Net)"]),
        ("layers", ["(Net)", "layers.0", "layers.1"]),
        ("layers in place", ["(Net)", "layers.0", "layers.1"]),
    ],
)
def test_compiled_modules_keep_their_scope_and_their_graph(
    tmp_path: Path, backend: str, how: str, expected: list[str]
) -> None:
    torch._dynamo.reset()
    model = net = Net()
    options: dict[str, Any] = {"backend": backend, "fullgraph": True}  # fullgraph: a graph break is an error
    if how == "whole":
        model = torch.compile(net, **options)
    elif how == "whole in place":
        net.compile(**options)
    for i in range(2):
        if how == "layers":
            net.layers[i] = torch.compile(net.layers[i], **options)
        elif how == "layers in place":
            net.layers[i].compile(**options)
    x = torch.ones(2, 4)
    y = model(x)
    annotation = annotate(model)
    model(x)
    assert scopes(model, tmp_path, backward=True) == expected
    assert [row["fqn"] for row in annotated_modules()] == [row["fqn"] for row in module_table(Net())]
    annotation.remove()
    assert scopes(model, tmp_path) == []
    assert torch.equal(model(x), y)


def test_hooks_from_before_compilation_neither_break_it_nor_graphs(tmp_path: Path) -> None:
    torch._dynamo.reset()
    net = Net()
    with annotate(net):
        model = torch.compile(net, backend="eager", fullgraph=True)
        assert torch.equal(model(torch.ones(2, 4)), net(torch.ones(2, 4)))
        scopes(model, tmp_path)


def test_graph_breaks_inside_a_compiled_module_are_harmless(tmp_path: Path) -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            torch._dynamo.graph_break()
            return self.b(x)

    torch._dynamo.reset()
    model = torch.compile(Breaks(), backend="eager")
    with annotate(model):
        model(torch.ones(2, 4))
        assert scopes(model, tmp_path)[0] == "(Breaks)"


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_layers_draw_their_scopes_again(tmp_path: Path, use_reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=use_reentrant)
            return x

    model = Checkpointed()
    with annotate(model):
        found = scopes(model, tmp_path, backward=True)
    assert found[:7] == ["(Checkpointed)", *FORWARD[1:]]
    assert found[7:] == [name.format(i) for i in (1, 0) for name in LAYER]


def test_a_wrapped_layer_draws_one_scope_in_forward_and_one_in_recompute(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Net()
    for i in range(2):
        model.layers[i] = checkpoint_wrapper(model.layers[i])
    with annotate(model):
        found = scopes(model, tmp_path, backward=True)
        table = annotated_modules()
    assert found == [*FORWARD, *(name.format(i) for i in (1, 0) for name in LAYER)]
    assert {row["fqn"]: row["cls"] for row in table}["layers.0"] == "Block"


@pytest.fixture
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("when", ["before", "after"])
def test_fsdp2_layers_are_called_what_they_were(tmp_path: Path, when: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Net()
    if when == "before":
        annotate(model)
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if when == "after":
        annotate(model)
    assert scopes(model, tmp_path, backward=True) == FORWARD
    assert annotated_modules() == module_table(Net())


@pytest.mark.filterwarnings("ignore:FSDP is switching to use")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_fsdp1_layers_are_called_what_they_were(tmp_path: Path, use_orig_params: bool) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({Block})
    model = FullyShardedDataParallel(
        Net(), auto_wrap_policy=policy, use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )
    with annotate(model):
        assert scopes(model, tmp_path, backward=True) == FORWARD
        assert annotated_modules() == module_table(Net())


@pytest.mark.usefixtures("process_group")
def test_ddp_leaves_no_trace_in_the_names(tmp_path: Path) -> None:
    net = Net()
    net.module = nn.Identity()  # a name like any other where it is no wrapper's
    model = nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
    with annotate(model):
        assert scopes(model, tmp_path, backward=True) == FORWARD
        assert [row["fqn"] for row in annotated_modules()][-1] == "module"
