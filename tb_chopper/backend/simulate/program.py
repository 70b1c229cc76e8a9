"""One training step as a program: what the host does, in order, and what the device is asked to do.

The host side is a list of time points with the cost before each; an event spans two points. The device side is a
list of items in launch order, each on a stream and waiting for earlier items. Ranks at one place of the pipeline run
the same program; times are found by `schedule`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tb_chopper.backend.simulate import event_args
from tb_chopper.backend.simulate.config import Config
from tb_chopper.backend.simulate.workload import Call, Collective, Kernel

COMPUTE, GATHER, REDUCE, RECV_F, SEND_F, RECV_B, SEND_B = range(7)
"""Streams; the last four are of a pipeline's messages: activations forth, gradients back."""
N_STREAMS, N_STREAMS_ALONE = 7, 3
"""of a pipeline, and without one"""
MAIN, AUTOGRAD = 0, 1
"""Host threads."""
UNBLOCK_EVERY = 32
"""Launches between two looks at the queue's depth."""
NO_LAYER = -1
STEP_NAME = "ProfilerStep#"
"""The number of the step follows in the trace."""
SHORT_CALL_NS = 1_500
"""Duration of a runtime call that launches nothing."""


class HostEvent(NamedTuple):
    category: str
    name: str
    thread: int
    begin: int
    end: int
    external: int
    """External id, counted from the step's first"""
    seq: int = -1
    """autograd sequence number, counted from the step's first; -1: none"""
    fwd_thread: int = 0
    args: str = ""
    """rendered JSON members"""
    correlation: int = -1
    item: int = -1
    """item that the call launches"""
    collective: int = -1
    """place of the collective"""


class Item(NamedTuple):
    """One device activity."""

    kernel: Kernel
    stream: int
    correlation: int
    external: int
    begin: int
    """host point where the launch call begins"""
    deps: tuple[int, ...]
    operation: str
    layer: int
    phase: str
    cpu_op: str
    scope: int
    """event of the innermost annotation, -1 on the backward thread, whose annotations the device does not mirror"""
    collective: Collective | None = None
    stage: int = -1
    """of a pipeline's action: stage and microbatch, -1: none"""
    microbatch: int = -1


@dataclass
class Program:
    cost_ns: np.ndarray
    events: list[HostEvent]
    items: list[Item]
    blocks: list[tuple[int, int]]
    """(point, item): the host may not pass the point before the item has ended; negative items are the last ones of
    the step before"""
    flows: list[tuple[int, int]]
    """(point of the forward operator, point of its backward node)"""
    n_external: int
    n_correlation: int
    n_seq: int
    collectives: list[Collective]
    step_event: int
    loader_point: int = -1
    """point before which the host waits for a late data loader"""
    stall_point: int = -1
    """point before which the host of an outlier step stops"""


class Recorder:
    """Writes a program down in the order in which the host runs it. The labels (`operation`, `layer`, `phase`,
    `thread`) hold for what is recorded next."""

    def __init__(self, config: Config) -> None:
        self.config, self.host, self.dialect = config, config.host, config.gpu.dialect
        self.cost: list[float] = []
        self.events: list[HostEvent] = []
        self.items: list[Item] = []
        self.blocks: list[tuple[int, int]] = []
        self.flows: list[tuple[int, int]] = []
        self.operation, self.layer, self.phase, self.thread = "", NO_LAYER, "other", MAIN
        self.stage = self.microbatch = -1
        self.external = self.correlation = self.seq = 0
        self.collectives: list[Collective] = []
        self._counts: Counter[str] = Counter()
        self.awaited: list[int] = []
        """items that the compute stream has been told to wait for"""
        self.last_collectives: dict[str, int] = {}
        """last item of each channel"""
        self.loader_point = self.stall_point = -1
        self._open: list[tuple[int, str]] = []  # (External id, name), innermost last
        self._scopes: list[int] = []

    @property
    def last_item(self) -> int:
        return len(self.items) - 1

    @property
    def last_compute(self) -> int:
        """Last item of the compute stream, -1: none."""
        return next((i for i in reversed(range(len(self.items))) if self.items[i].stream == COMPUTE), -1)

    def program(self, step_event: int) -> Program:
        return Program(np.asarray(self.cost), self.events, self.items, self.blocks, self.flows, self.external,
                       self.correlation, self.seq, self.collectives, step_event, self.loader_point, self.stall_point)

    # host

    def point(self, cost_ns: float) -> int:
        self.cost.append(cost_ns)
        return len(self.cost) - 1

    @contextmanager
    def op(self, name: str, *, seq: int = -1, fwd_thread: int = 0, args: str = "",
           collective: int = -1) -> Iterator[None]:
        with self._event("cpu_op", name, 0.6, seq, fwd_thread, args, collective):
            yield

    @contextmanager
    def scope(self, name: str, operation: str = "", args: str = "") -> Iterator[None]:
        """A record_function scope; `operation` labels what is launched inside."""
        before, self.operation = self.operation, operation or self.operation
        self._scopes.append(len(self.events))
        with self._event("user_annotation", name, 0.25, -1, 0, args, -1):
            yield
        self._scopes.pop()
        self.operation = before

    @contextmanager
    def _event(self, category: str, name: str, share: float, seq: int, fwd_thread: int, args: str,
               collective: int) -> Iterator[None]:
        index, external = len(self.events), self.external
        begin = self.point(self.host.dispatch_ns * share)
        self.events.append(HostEvent(category, name, self.thread, begin, begin, external))  # parents before children
        self.external += 1
        self._open.append((external, name))
        yield
        self._open.pop()
        end = self.point(self.host.dispatch_ns * share / 3)
        self.events[index] = HostEvent(category, name, self.thread, begin, end, external, seq, fwd_thread, args,
                                       collective=collective)

    def runtime(self, name: str, args: str, *, item: int = -1, duration_ns: float = SHORT_CALL_NS,
                wait_for: int | None = None) -> int:
        """A call into the driver; with `wait_for` it returns when that item has ended. Returns its begin."""
        begin, end = self.point(500), self.point(duration_ns)
        if wait_for is not None:
            self.blocks.append((end, wait_for))
        external = self._open[-1][0] if self._open else -1
        category = "cuda_driver" if name.startswith("cuLaunch") else "cuda_runtime"
        self.events.append(HostEvent(category, name, self.thread, begin, end, external, args=args,
                                     correlation=self.correlation, item=item))
        self.correlation += 1
        return begin

    def call(self, call: Call, *, seq: int = -1, stream: int = COMPUTE, deps: Sequence[int] = ()) -> None:
        with self.op(call.name, seq=seq, args=event_args.shapes(call)):
            for child in call.children:
                self.call(child, stream=stream, deps=deps)
            for kernel in call.kernels:
                self.launch(kernel, stream, deps)

    def communicate(self, collective: Collective) -> Collective:
        """Give the next collective its numbers."""
        channel, counter = collective.channel, collective.counter
        numbered = collective._replace(number=self._counts[channel], seq=self._counts[counter],
                                       place=len(self.collectives))
        self._counts.update({channel, counter})
        self.collectives.append(numbered)
        return numbered

    # device

    def launch(self, kernel: Kernel, stream: int = COMPUTE, deps: Sequence[int] = (),
               collective: Collective | None = None, *, blocking: bool = False) -> int:
        """Launch an item; `blocking`: the call returns when it has ended. Returns the item."""
        index, waits = len(self.items), list(deps)
        if stream == COMPUTE:
            waits, self.awaited = [*waits, *self.awaited], []
        if collective is not None:
            self.last_collectives[collective.channel] = index
        wait_for = index if blocking else index - self.host.queue_depth if index % UNBLOCK_EVERY == 0 else None
        external, cpu_op = self._open[-1]
        correlation = self.correlation
        name, args = event_args.launch(kernel, self.dialect)
        begin = self.runtime(name, args, item=index, wait_for=wait_for, duration_ns=self.host.launch_call_ns)
        mirrored = self._scopes[-1] if self.thread == MAIN and self._scopes else -1
        self.items.append(Item(kernel, stream, correlation, external, begin, tuple(sorted(set(waits))), self.operation,
                               self.layer, self.phase, cpu_op, mirrored, collective, self.stage, self.microbatch))
        return index
