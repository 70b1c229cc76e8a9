"""Pipeline scopes: which stage works on which microbatch, forward or backward.

`annotate_pipeline(schedule)` opens record_function scopes in a schedule of torch.distributed.pipelining while a
profiler records:

    chopper::pp::schedule::Schedule1F1B::stages4::mb8::v1    the whole step(): stages over all ranks, microbatches,
                                                             stages per rank
    chopper::pp::F::stage2::mb5                              the forward of one microbatch by one stage
    chopper::pp::B::stage2::mb5                              its backward; I and W where the gradients of the inputs
                                                             and of the weights are computed apart

torch names nothing in Schedule1F1B, and what it names elsewhere (`Forward 5`, `PP:2F5`) includes waiting for the
neighbours. The names are made by `torch_ext.sidecar`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch.autograd import _profiler_enabled, _record_function_with_args_enter, _record_function_with_args_exit

from torch_ext import sidecar

_wrapped: weakref.WeakKeyDictionary[Any, list[str]] = weakref.WeakKeyDictionary()
"""Schedule or stage -> the methods that have a scope around them, as attributes of the object itself."""


class PipelineAnnotation:
    """Removes the scopes again: `remove()`, or leave the `with` block."""

    def __init__(self, objects: list[Any]) -> None:
        self._objects = [weakref.ref(one) for one in objects]

    def remove(self) -> None:
        for reference in self._objects:
            one = reference()
            if one is not None:
                _unwrap(one)

    def __enter__(self) -> PipelineAnnotation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def annotate_pipeline(schedule: Any) -> PipelineAnnotation:
    """Scope every action of a pipeline schedule (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ...) and its `step()`.

    Call it once, on every rank; annotating again replaces. Raises TypeError for what is no schedule of stages.
    """
    stages = _stages(schedule)
    for one in (schedule, *stages):
        _unwrap(one)
    for stage in stages:
        index = int(stage.stage_index)
        _wrap(stage, "forward_one_chunk", functools.partial(_forward, index))
        _wrap(stage, "backward_one_chunk", functools.partial(_backward, index))
        _wrap(stage, "backward_weight_one_chunk", functools.partial(_weight, index))
    _wrap(schedule, "_maybe_compute_loss", _loss)
    name = sidecar.pipeline_schedule_name(
        type(schedule).__name__, int(stages[0].num_stages), int(schedule._n_microbatches), len(stages))
    _wrap(schedule, "step", lambda args, kwargs: name)
    return PipelineAnnotation([schedule, *stages])


def _stages(schedule: Any) -> list[Any]:
    one = getattr(schedule, "_stage", None)
    stages = [one] if one is not None else list(getattr(schedule, "_stages", None) or [])
    if not stages or not hasattr(schedule, "step") or not all(hasattr(s, "forward_one_chunk") for s in stages):
        raise TypeError(f"annotate_pipeline takes a schedule of torch.distributed.pipelining, not {type(schedule)}")
    return stages


Name = Callable[[tuple[Any, ...], dict[str, Any]], "str | None"]
"""The scope's name by the arguments of a call; None: no scope."""


def _forward(stage: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return sidecar.pipeline_action_name("F", stage, args[0] if args else kwargs["fwd_chunk_id"])


def _backward(stage: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    full = args[2] if len(args) > 2 else kwargs.get("full_backward", True)
    return sidecar.pipeline_action_name("B" if full else "I", stage, args[0] if args else kwargs["bwd_chunk_id"])


def _weight(stage: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return sidecar.pipeline_action_name("W", stage, args[0] if args else kwargs["bwd_chunk_id"])


def _loss(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The loss belongs to the last stage's forward, right after which it is computed."""
    if len(args) < 4 or not args[0].is_last:
        return None
    return sidecar.pipeline_action_name("F", int(args[0].stage_index), args[3])


def _wrap(one: Any, method: str, name: Name) -> None:
    original = getattr(one, method, None)
    if original is None:
        return

    @functools.wraps(original)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        scope = name(args, kwargs) if _profiler_enabled() else None
        if scope is None:
            return original(*args, **kwargs)
        # the same event as record_function's, in a fifth of its time
        record = _record_function_with_args_enter(scope)
        try:
            return original(*args, **kwargs)
        finally:
            _record_function_with_args_exit(record)

    setattr(one, method, scoped)
    _wrapped.setdefault(one, []).append(method)


def _unwrap(one: Any) -> None:
    for method in _wrapped.pop(one, ()):
        one.__dict__.pop(method, None)
