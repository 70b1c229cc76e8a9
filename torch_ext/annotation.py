"""Module scopes: which layer and operation the work of a training step belongs to.

`annotate(model)` opens a record_function scope around the forward of every submodule while a profiler records:

    chopper::(Llama)                          the model itself, by its class
    chopper::layers.3.mlp.gate_proj           a submodule, by its fully qualified name

Names are made by `torch_ext.sidecar.scope_name`: ASCII, no quotes, the names of wrappers (DDP, FSDP, activation
checkpointing, torch.compile) left out. A wrapper and what it wraps share a name and draw one scope: the outer one,
so that FSDP's gathering belongs to the layer; where activation checkpointing calls the inner one again, its own.
Backward needs no scopes: autograd's sequence numbers lead back to the forward.

Inside a torch.compile region scopes are compiled away (no graph break); the compiled module itself keeps its scope.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.autograd import _profiler_enabled, _record_function_with_args_enter, _record_function_with_args_exit

from torch_ext import sidecar

_WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
"""Children under these names stand for their parent."""
_WRAPPERS = {"DistributedDataParallel", "DataParallel", "DeepSpeedEngine", "Float16Module", "AveragedModel"}
"""Classes whose child `module` stands for themselves; elsewhere `module` is a name like any other."""

_hooks: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()
_tables: weakref.WeakKeyDictionary[nn.Module, list[sidecar.Module]] = weakref.WeakKeyDictionary()


class _OpenScopes(threading.local):
    """Scopes open on this thread, innermost last: (id of the module, name, its record or None)."""

    def __init__(self) -> None:
        self.stack: list[tuple[int, str, Any]] = []


_open_scopes = _OpenScopes()


class Annotation:
    """Removes the scopes again: `remove()`, or leave the `with` block."""

    def __init__(self, model: nn.Module, handles: list[Any], table: list[sidecar.Module]) -> None:
        self._model = weakref.ref(model)
        self._handles = handles
        self._table = table

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        model = self._model()
        # The table of a later annotation stays.
        if model is not None and _tables.get(model) is self._table:
            del _tables[model]

    def __enter__(self) -> Annotation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def annotate(model: nn.Module, name: str = "") -> Annotation:
    """Scope every submodule of `model`; the handler adds the module table to its sidecars.

    Call it on the finished model: after DDP and FSDP, and after torch.compile, which compiles earlier hooks away.
    `name` goes before the names of the submodules: give each model one where a process trains several. Annotating
    again replaces.
    """
    modules = list(_walk(model, name))
    classes = {fqn: _class_name(module) for fqn, module in modules}  # the innermost module comes last and wins
    handles = []
    for fqn, module in modules:
        for old in _hooks.get(module, ()):
            old.remove()
        _tables.pop(module, None)
        _hooks[module] = _hook(module, sidecar.scope_name(fqn, classes[fqn]))
        handles += _hooks[module]
    table = _tables[model] = module_table(model, name)
    return Annotation(model, handles, table)


def annotated_modules() -> list[sidecar.Module]:
    """The module tables of all annotated models that are still alive."""
    return [row for table in list(_tables.values()) for row in table]


def module_table(model: nn.Module, name: str = "") -> list[sidecar.Module]:
    """One row per module name, in order of definition; parameters are counted over all shards."""
    modules = list(_walk(model, name))
    classes = {fqn: _class_name(module) for fqn, module in modules}
    sizes = _parameter_sizes(modules)
    return [
        {"fqn": fqn, "cls": cls, "params": _count(sizes, fqn), "order": order}
        for order, (fqn, cls) in enumerate(classes.items())
    ]


def _hook(module: nn.Module, scope: str) -> list[Any]:
    """Hooks are partials of functions of this file, so that an annotated model can still be pickled."""
    handles: list[Any] = [
        # first in, last out: the scope holds what other hooks (FSDP2's gathering) do
        module.register_forward_pre_hook(functools.partial(_enter, scope), prepend=True),
        module.register_forward_hook(functools.partial(_leave, scope), always_call=True),
    ]
    if getattr(module, "_compiled_call_impl", None) is not None:
        handles.append(_CompiledCall(module, scope))
    return handles


def _enter(scope: str, module: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    if _profiler_enabled():
        _push(module, scope)


def _leave(scope: str, module: nn.Module, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    if _open_scopes.stack:
        _pop(module)


def _push(module: nn.Module, scope: str) -> None:
    stack = _open_scopes.stack
    # the same event as record_function's, in a fifth of its time: 2 instead of 8 us per scope
    drawn = bool(stack) and stack[-1][1] == scope and stack[-1][0] != id(module)  # by the wrapper around this module
    stack.append((id(module), scope, None if drawn else _record_function_with_args_enter(scope)))


def _pop(module: nn.Module) -> None:
    """Close the module's innermost scope, and any inside it that an interrupt left open."""
    stack = _open_scopes.stack
    if not any(key == id(module) for key, _, _ in stack):
        return  # opened before the profiler was
    while True:
        key, _, recorded = stack.pop()
        if recorded is not None:
            _record_function_with_args_exit(recorded)
        if key == id(module):
            return


class _CompiledCall:
    """A module compiled in place (`module.compile()`) runs its hooks inside the compiled region, where they vanish:
    the scope goes around the compiled call instead."""

    def __init__(self, module: nn.Module, scope: str) -> None:
        self._module = weakref.ref(module)
        self._original = original = module._compiled_call_impl
        key = weakref.ref(module)

        def scoped(*args: Any, **kwargs: Any) -> Any:
            target = key()
            if target is None or torch.compiler.is_compiling() or not _profiler_enabled():
                return original(*args, **kwargs)  # type: ignore[misc]
            _push(target, scope)
            try:
                return original(*args, **kwargs)  # type: ignore[misc]
            finally:
                _pop(target)

        module._compiled_call_impl = scoped

    def remove(self) -> None:
        module = self._module()
        if module is not None:
            module._compiled_call_impl = self._original


def _walk(module: nn.Module, fqn: str, seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Every module once with its name, parents first; a shared module goes by its first name."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    yield fqn, module
    for child_name, child in module.named_children():
        yield from _walk(child, _join(fqn, "" if _stands_for(module, child_name) else child_name), seen)


def _stands_for(parent: nn.Module, child_name: str) -> bool:
    if child_name == "module":
        return any(cls.__name__ in _WRAPPERS for cls in type(parent).__mro__)
    return child_name in _WRAPPED


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _class_name(module: nn.Module) -> str:
    """FSDP2 puts a class of its own before the module's: `FSDPBlock(FSDPModule, Block)`."""
    cls = type(module)
    if [base.__name__ for base in cls.__bases__[:1]] == ["FSDPModule"] and len(cls.__bases__) == 2:
        cls = cls.__bases__[1]
    return cls.__name__


def _parameter_sizes(modules: list[tuple[str, nn.Module]]) -> dict[str, tuple[int, int | None]]:
    """Parameter name -> (identity, elements over all shards); identity tells shared parameters."""
    sizes: dict[str, tuple[int, int | None]] = {}
    for fqn, module in modules:
        flat = getattr(getattr(module, "_handle", None), "flat_param", None)  # FSDP1 keeps whole sizes beside its shard
        for name, elements in zip(getattr(flat, "_fqns", ()), getattr(flat, "_numels", ()), strict=False):
            clean = [part for part in name.split(".") if part not in _WRAPPED]
            sizes[_join(fqn, *clean)] = (-len(sizes) - 1, int(elements))
    for fqn, module in modules:
        for name, parameter in module.named_parameters(recurse=False):
            if name != "_flat_param":
                lazy = torch.nn.parameter.is_lazy(parameter)
                sizes.setdefault(_join(fqn, name), (id(parameter), None if lazy else parameter.numel()))
    return sizes


def _count(sizes: dict[str, tuple[int, int | None]], fqn: str) -> int | None:
    inside = {key: n for name, (key, n) in sizes.items() if not fqn or name.startswith(fqn + ".")}
    counts = [n for n in inside.values() if n is not None]
    return sum(counts) if len(counts) == len(inside) else None
