"""The program of a training step under pipeline parallelism: forwards and backwards of microbatches, as the schedule
orders them, and the messages between the stages.

GPipe and 1F1B receive right before they compute, as the schedules of torch.distributed.pipelining with one stage per
rank do; the interleaved one receives ahead, as its runtime with one scope per action does. Sends are never waited for
before the end of the schedule. Under FSDP a stage gathers its parameters for its first microbatch, keeps them, and
reduces its gradients after its last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from tb_chopper.backend.simulate import pipeline_schedule, plan
from tb_chopper.backend.simulate.config import Config
from tb_chopper.backend.simulate.pipeline_schedule import FORWARD, GPIPE, INTERLEAVED, Action
from tb_chopper.backend.simulate.program import AUTOGRAD, MAIN, NO_LAYER, RECV_B, RECV_F, SEND_B, SEND_F
from tb_chopper.backend.simulate.training_step import ROOT, Recorded, TrainingStep, label
from tb_chopper.backend.simulate.workload import BF16, Collective, Workload
from torch_ext import sidecar

STREAMS = {"SEND_F": SEND_F, "RECV_F": RECV_F, "SEND_B": SEND_B, "RECV_B": RECV_B}
MESSAGE_BLOCKS = 8


class _Chunk(NamedTuple):
    """What the forward of a microbatch by a stage leaves for its backward."""

    before: list[Recorded]
    layers: list[list[Recorded]]
    after: list[Recorded]


class PipelineStep(TrainingStep):
    """Writes the program of one step of the ranks at one place of the pipeline."""

    def __init__(self, config: Config, workload: Workload, place: int) -> None:
        super().__init__(config, workload)
        self.plan, self.place = config.plan, place
        self.chunks: dict[tuple[int, int], _Chunk] = {}
        self.received: dict[Action, int] = {}
        self.sent: list[int] = []

    def _passes(self) -> None:
        p = self.plan
        name = pipeline_schedule.CLASSES[p.schedule]
        with self.record.scope(sidecar.pipeline_schedule_name(name, p.stages, p.microbatches, p.virtual)):
            for action in self._actions():
                if p.schedule == INTERLEAVED:
                    with self.record.scope(f"PP:{action}"):
                        self._run(action)
                elif p.schedule == GPIPE:
                    word = "Forward" if action.kind == FORWARD else "Backward"
                    with self.record.scope(f"{word} {action.microbatch}"):
                        self._run_alone(action)
                else:
                    self._run_alone(action)
        self.record.awaited += self.sent

    def _actions(self) -> list[Action]:
        p = self.plan
        orders = [pipeline_schedule.order(p.schedule, p.pipeline, p.virtual, p.microbatches, r)
                  for r in range(p.pipeline)]
        if p.schedule == INTERLEAVED:
            orders = pipeline_schedule.with_messages(orders, p.stages)
        return orders[self.place]

    def _run_alone(self, action: Action) -> None:
        """An action with its messages around it: one stage per rank."""
        kind, stage, _ = action
        step = 1 if kind == FORWARD else -1
        if 0 <= stage - step < self.plan.stages:
            self._run(action._replace(kind=f"RECV_{kind}"))
        self._run(action)
        if 0 <= stage + step < self.plan.stages:
            self._run(action._replace(kind=f"SEND_{kind}"))

    def _run(self, action: Action) -> None:
        record, kind = self.record, action.kind
        record.stage, record.microbatch = action.stage, action.microbatch
        record.phase, record.layer = "forward" if kind.endswith(FORWARD) else "backward", NO_LAYER
        if kind in STREAMS:
            self._message(action)
        else:
            if (received := self.received.pop(action, None)) is not None:
                record.awaited.append(received)
            if kind == FORWARD:
                self._forward(action)
            else:
                self._backward(action)
        record.stage = record.microbatch = -1
        record.layer = NO_LAYER

    # work

    @contextmanager
    def _scope(self, action: Action) -> Iterator[None]:
        with self.record.scope(sidecar.pipeline_action_name(*action)):
            yield

    def _forward(self, action: Action) -> None:
        record, stage = self.record, action.stage
        first = action.microbatch == 0
        with self._scope(action):
            root = self._has_root(stage)
            if root:
                self._use(ROOT, first)
            record.layer = NO_LAYER
            before = self._forward_ops(self.workload.before) if plan.has_embedding(self.config, stage) else []
            layers = []
            for i in plan.layers(self.config, stage):
                record.layer = i
                with record.scope(f"Layer{i}"):
                    self._use(i, first)
                    record.layer = i
                    layers.append(self._forward_ops(self.workload.layer))
                    if self.sharded:
                        with record.scope(f"FSDP::post_forward{label(i)}"):
                            pass
            record.layer = NO_LAYER
            head = plan.has_head(self.config, stage)
            after = self._forward_ops(self.workload.after) if head else []
        if head:  # the schedule calls it, after the stage's forward
            with self._scope(action):
                after += self._forward_ops(self.workload.loss)
        self.chunks[stage, action.microbatch] = _Chunk(before, layers, after)

    def _backward(self, action: Action) -> None:
        record, stage = self.record, action.stage
        chunk = self.chunks.pop((stage, action.microbatch))
        last = action.microbatch == self.plan.microbatches - 1
        with self._scope(action):
            record.thread = AUTOGRAD
            for recorded in reversed(chunk.after):
                self._backward_op(recorded)
            for i, layer in zip(reversed(plan.layers(self.config, stage)), reversed(chunk.layers), strict=True):
                for recorded in reversed(layer):
                    self._backward_op(recorded, gather=recorded is layer[-1])
                if last:
                    self._reduce_gradients(i)
            for recorded in reversed(chunk.before):
                self._backward_op(recorded)
            if last and self._has_root(stage):
                self._reduce_gradients(ROOT)
            record.thread = MAIN
        if last and (reduced := record.last_collectives.get(self.data_group)) is not None:
            self.sent.append(reduced)

    # sharding

    def _has_root(self, stage: int) -> bool:
        return plan.has_embedding(self.config, stage) or plan.has_head(self.config, stage)

    def _use(self, unit: int, first: bool) -> None:
        """Before the forward of a unit: gather its parameters, where no earlier microbatch has."""
        if first:
            self._unshard(unit)
        elif self.sharded:
            with self.record.scope(f"FSDP::pre_forward{label(unit)}"):
                pass

    def _pre_backward(self, unit: int) -> None:
        """The parameters are still there."""
        if self.sharded:
            with self.record.scope(f"FSDP::pre_backward{label(unit)}"):
                pass

    def _params(self, unit: int) -> int:
        if unit != ROOT:
            return super()._params(unit)
        return sum(plan.root_params(self.config, s) for s in plan.stages(self.config, self.place))

    # messages

    def _message(self, action: Action) -> None:
        """Send what the last action made, or receive for one to come; no message waits for another direction's."""
        record, config = self.record, self.config
        name, flow = action.kind.lower().split("_")
        flow = flow.upper()
        n = config.tokens * config.model.dim
        message = Collective(name, n, n, n * BF16, group=plan.PIPELINE, flow=flow, told=not self.plan.batched)
        peer = (self.place + (1 if message.to_next else -1)) % self.plan.pipeline
        arrow = "->" if name == "send" else "<-"
        deps = [record.last_compute] if record.last_compute >= 0 else []
        item = self._communicate(message, f"nccl:{name} {self.place}{arrow}{peer}", MESSAGE_BLOCKS,
                                 STREAMS[action.kind], deps, peer)
        if name == "send":
            self.sent.append(item)
        else:
            self.received[action._replace(kind=flow)] = item
