"""The program of a training step under FSDP: who gathers what when, forward, backward, clip and AdamW."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from tb_chopper.backend.simulate import event_args, kernel_names, plan
from tb_chopper.backend.simulate.config import Config
from tb_chopper.backend.simulate.program import (
    AUTOGRAD,
    COMPUTE,
    GATHER,
    MAIN,
    NO_LAYER,
    REDUCE,
    STEP_NAME,
    Program,
    Recorder,
)
from tb_chopper.backend.simulate.workload import BF16, FP32, Call, Collective, Kernel, Op, Reduction, Workload

LOADER_SHARE = 0.2
"""of the preparation of a step: the data loader, where it is in time"""
_EVALUATE = "autograd::engine::evaluate_function: "
_ACCUMULATE = "torch::autograd::AccumulateGrad"
_POST_BACKWARD = "RegisterPostBackwardFunctionBackward"
_FSDP1 = "FullyShardedDataParallel."
_CHANNELS = {
    "_allgather_base": ("c10d::_allgather_base_", "nccl:_all_gather_base"),
    "_reduce_scatter_base": ("c10d::_reduce_scatter_base_", "nccl:_reduce_scatter_base"),
    "allreduce": ("c10d::allreduce_", "nccl:all_reduce"),
    "send": ("c10d::send", "nccl:send"),
    "recv": ("c10d::recv_", "nccl:recv"),
}
ROOT = NO_LAYER
"""The FSDP unit of what is outside the layers; the others go by their layer."""


class Recorded(NamedTuple):
    """A forward operator that waits for its backward."""

    op: Op
    seq: int
    point: int
    """begin of the operator that made the autograd node"""
    layer: int


class TrainingStep:
    """Writes the program of one step: the whole model on every rank, or a tensor-parallel part of each layer."""

    def __init__(self, config: Config, workload: Workload) -> None:
        self.config, self.workload, self.fsdp = config, workload, config.fsdp
        self.model = plan.part(config)
        self.record = Recorder(config)
        self.data_group = plan.WORLD if config.plan.is_default else plan.DATA
        self.sharded = config.plan.is_default or config.data > 1
        self.last_copy_out: int | None = None
        self.free_after: int | None = None
        """FSDP1: item whose end frees the memory for one more gathered unit"""
        self.prefetched: int | None = None

    def build(self, *, optimizer: bool, synchronize: bool) -> Program:
        """`optimizer`: clip and AdamW at the end of the step; `synchronize`: the loss is read at its end."""
        record, host = self.record, self.config.host
        record.point(host.step_preparation_ns * 0.1)
        step_event = len(record.events)
        with record.scope(STEP_NAME):
            with record.scope("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"):
                record.loader_point = record.point(host.step_preparation_ns * LOADER_SHARE)
            record.point(host.step_preparation_ns * (1 - LOADER_SHARE))
            with record.scope("GetInputLabels", "GetInputLabels"):
                self._copy_inputs()
            record.stall_point = record.point(0)
            self._passes()
            if optimizer:
                self._optimizer_pass()
            record.phase, record.layer = "other", NO_LAYER
            if synchronize:
                self._read_scalar()
        return record.program(step_event)

    # passes

    def _passes(self) -> None:
        recorded = self._forward_pass()
        with self.record.scope("b_l"):
            self.record.thread = AUTOGRAD
            self._backward_pass(*recorded)
            self.record.thread = MAIN

    def _forward_pass(self) -> tuple[list[Recorded], list[list[Recorded]], list[Recorded]]:
        record = self.record
        record.phase = "forward"
        self._unshard(ROOT)
        before = self._forward_ops(self.workload.before)
        layers, ends = [], [record.last_item]
        for i in range(self.config.model.layers):
            record.layer = i
            self.free_after = ends[-2] if i else None
            with record.scope(f"Layer{i}"):
                self._unshard(i)
                layers.append(self._forward_ops(self.workload.layer))
                if self.fsdp.version == 2:
                    with record.scope(f"FSDP::post_forward{label(i)}"):
                        pass
            ends.append(record.last_item)
        record.layer = NO_LAYER
        return before, layers, self._forward_ops((*self.workload.after, *self.workload.loss))

    def _forward_ops(self, ops: Sequence[Op]) -> list[Recorded]:
        """Operators under the scopes of their operations; neighbours of one operation share a scope. Returns those
        that have a backward."""
        done: list[Recorded] = []
        for name, group in itertools.groupby(ops, lambda op: op.operation):
            with self.record.scope(name, name):
                done += [self._forward_op(op, op.outer) for op in group]
        return [recorded for recorded in done if recorded.op.node]

    def _forward_op(self, op: Op, outer: Sequence[str]) -> Recorded:
        record = self.record
        if outer:
            with record.op(outer[0], seq=record.seq):
                return self._forward_op(op, outer[1:])
        recorded = Recorded(op, record.seq, len(record.cost), record.layer)
        record.seq += bool(op.node)
        if op.reduce_forward is None:
            record.call(op.call, seq=recorded.seq)
        else:
            with record.op(op.call.name, seq=recorded.seq, args=event_args.shapes(op.call)):
                self._all_reduce(op.reduce_forward)
        return recorded

    def _backward_pass(self, before: list[Recorded], layers: list[list[Recorded]], after: list[Recorded]) -> None:
        record = self.record
        record.phase = "backward"
        for recorded in reversed(after):
            self._backward_op(recorded)
        end = record.last_item
        for i in reversed(range(len(layers))):
            self.free_after = end
            for recorded in reversed(layers[i]):
                self._backward_op(recorded, gather=recorded is layers[i][-1])
            end = record.last_item
            self._reduce_gradients(i)
        for recorded in reversed(before):
            self._backward_op(recorded)
        self._reduce_gradients(ROOT)
        record.awaited += [item for item in [record.last_collectives.get(self.data_group)] if item is not None]

    def _backward_op(self, recorded: Recorded, *, gather: bool = False) -> None:
        """The autograd node of an operator; `gather`: it is the first of its layer, whose parameters it asks for."""
        record, op = self.record, recorded.op
        record.layer, record.operation = recorded.layer, op.operation
        with record.op(_EVALUATE + op.node, seq=recorded.seq, fwd_thread=1):
            if gather:
                self._pre_backward(recorded.layer)
                record.layer, record.operation = recorded.layer, op.operation
            record.flows.append((recorded.point, len(record.cost)))
            with record.op(op.node, seq=recorded.seq, fwd_thread=1):
                for call in op.backward:
                    record.call(call)
                if op.reduce_backward is not None:
                    self._all_reduce(op.reduce_backward)
        if op.parameter:
            with record.op(_EVALUATE + _ACCUMULATE), record.op(_ACCUMULATE), record.op("aten::detach"):
                pass

    def _optimizer_pass(self) -> None:
        record, host = self.record, self.config.host
        record.phase, record.layer = "optimizer", NO_LAYER
        with record.scope("b_ga", "b_ga"):
            self._read_scalar()
            record.point(host.optimizer_preparation_ns * 0.4)
            for call in self.workload.clip:
                record.call(call)
            record.awaited.append(self._collective("allreduce", 1, 1, REDUCE, [record.last_item], "Float", plan.WORLD))
            for call in self.workload.clip_scale:
                record.call(call)
            self._read_scalar()
            with record.scope("Optimizer.step#AdamW.step", "opt_step"):
                record.point(host.optimizer_preparation_ns)
                for call in self.workload.optimizer:
                    record.call(call)
            with record.scope("Optimizer.zero_grad#AdamW.zero_grad"):
                pass

    def _copy_inputs(self) -> None:
        name = "Memcpy HtoD (Pinned -> Device)" if self.record.dialect == "cuda" else "Memcpy HtoD (Host -> Device)"
        kernel = Kernel(name, "memcpy", bytes=self.config.tokens * 8, utilization=0.005, activity=0.05, api="copy")
        shape = (self.config.batch, self.config.sequence)
        copy = Call("aten::copy_", (shape, shape), ("long int", "long int", "Scalar"), ("", "", "False"),
                    kernels=(kernel,))
        with self.record.op("aten::to"), self.record.op("aten::_to_copy"):
            self.record.call(copy)

    def _read_scalar(self) -> None:
        """`.item()`: the host waits until all work so far is done."""
        record = self.record
        name = "Memcpy DtoH (Device -> Pageable)" if record.dialect == "cuda" else "Memcpy DtoH (Device -> Host)"
        deps = list(record.last_collectives.values())
        with record.op("aten::item"), record.op("aten::_local_scalar_dense"):
            record.launch(Kernel(name, "memcpy", bytes=4, activity=0.05, api="copy"), COMPUTE, deps, blocking=True)

    # sharding

    def _unshard(self, unit: int) -> None:
        """Before the forward of a unit: gather its parameters and let the compute stream wait for them."""
        if not self.sharded:
            return
        if self.fsdp.version == 2:
            with self.record.scope(f"FSDP::pre_forward{label(unit)}", "FSDP::pre_forward"):
                self._copy_out(unit, self._all_gather(unit))
        else:
            with self.record.scope(f"{_FSDP1}_pre_forward", f"{_FSDP1}_pre_forward"):
                self.record.awaited.append(self._all_gather(unit))

    def _pre_backward(self, unit: int) -> None:
        """Before the backward of a unit: use its parameters, and gather those of the next one."""
        if not self.sharded:
            return
        record, ready = self.record, self.prefetched
        if self.fsdp.version == 2:
            with record.scope(f"FSDP::pre_backward{label(unit)}", "FSDP::pre_backward"):
                self._copy_out(unit, self._all_gather(unit) if ready is None else ready)
                if unit > 0:
                    with record.scope(f"FSDP::backward_prefetch for layers.{unit - 1}", "FSDP::backward_prefetch"):
                        self.prefetched = self._all_gather(unit - 1)
        else:
            with record.scope(f"{_FSDP1}_pre_backward_hook", f"{_FSDP1}_pre_backward_hook"):
                record.awaited.append(self._all_gather(unit) if ready is None else ready)
                if unit > 0:
                    with record.scope(f"{_FSDP1}_pre_backward_prefetch", f"{_FSDP1}_pre_backward_prefetch"):
                        self.prefetched = self._all_gather(unit - 1)

    def _all_gather(self, unit: int) -> int:
        """Gather the parameters of a unit; returns the collective."""
        record, shard = self.record, self._shard(unit)
        record.layer = unit
        if self.fsdp.version == 2:
            with record.scope(f"FSDP::all_gather{label(unit)}", "FSDP::all_gather"):
                copy = _copy("fsdp::all_gather_copy_in", kernel_names.COPY_IN, shard)
                record.call(copy, stream=GATHER, deps=[] if self.last_copy_out is None else [self.last_copy_out])
                return self._collective("_allgather_base", shard, shard * self.config.data, GATHER)
        free = [] if self.free_after is None else [self.free_after]
        if free and self.fsdp.rate_limiter:
            with record.scope(f"{_FSDP1}rate_limiter"):
                record.runtime(*event_args.SYNCHRONIZE[record.dialect], wait_for=self.free_after)
        return self._collective("_allgather_base", shard, shard * self.config.data, GATHER, free)

    def _copy_out(self, unit: int, gathered: int) -> None:
        record = self.record
        record.layer = unit
        with record.scope(f"FSDP::all_gather_copy_out{label(unit)}", "FSDP::all_gather_copy_out"):
            copy = _copy("fsdp::split_with_sizes_copy", kernel_names.COPY_OUT, self._params(unit))
            record.call(copy, deps=[gathered])
        self.last_copy_out = record.last_item

    def _reduce_gradients(self, unit: int) -> None:
        """After the backward of a unit: reduce-scatter its gradients."""
        if not self.sharded:
            return
        record, last, shard = self.record, self.record.last_item, self._shard(unit)
        record.layer = unit
        if self.fsdp.version == 2:
            with record.op(_EVALUATE + _POST_BACKWARD), record.op(_POST_BACKWARD):
                with record.scope(f"FSDP::post_backward_reshard{label(unit)}"):
                    pass
                with record.scope(f"FSDP::post_backward_reduce{label(unit)}", "FSDP::post_backward_reduce"):
                    copy = _copy("fsdp::chunk_cat", kernel_names.CHUNK_CAT, self._params(unit))
                    record.call(copy, stream=REDUCE, deps=[last])
                    self._collective("_reduce_scatter_base", shard * self.config.data, shard, REDUCE)
        else:
            hook = f"{_FSDP1}_post_backward_hook"
            with record.op(_EVALUATE + _ACCUMULATE), record.op(_ACCUMULATE), record.scope(hook, hook):
                self._collective("_reduce_scatter_base", shard * self.config.data, shard, REDUCE, [last])

    # communication

    def _collective(self, name: str, n_in: int, n_out: int, stream: int, deps: Sequence[int] = (),
                    dtype: str = "BFloat16", group: str | None = None) -> int:
        n_bytes = max(n_in, n_out) * (BF16 if dtype == "BFloat16" else FP32)
        collective = Collective(name, n_in, n_out, n_bytes, dtype, self.data_group if group is None else group)
        blocks = min(56, 7 * plan.sizes(self.config).get(collective.group, self.config.ranks))
        return self._communicate(collective, _CHANNELS[name][1], blocks, stream, deps)

    def _all_reduce(self, reduction: Reduction) -> None:
        """Over the tensor-parallel ranks, and waited for: it runs on the compute stream."""
        n = reduction.elements
        self._collective("allreduce", n, n, COMPUTE, (), reduction.dtype, plan.TENSOR)

    def _communicate(self, collective: Collective, annotation: str, blocks: int, stream: int, deps: Sequence[int],
                     peer: int = -1) -> int:
        """The operator, its record of parameters and its kernel. `peer`: of a message, in its group."""
        record = self.record
        collective = record.communicate(collective)
        buffers = event_args.buffers(collective)
        comms = event_args.comms(collective, self.config, peer)
        name = kernel_names.collective(record.dialect, collective.name, collective.dtype)
        kernel = Kernel(name, "collective", bytes=collective.n_bytes, blocks=blocks, activity=0.06, api="ext")
        waits = event_args.WAIT_CALLS[record.dialect]
        with (
            record.op(_CHANNELS[collective.name][0], args=buffers),
            record.op("record_param_comms", args=comms, collective=collective.place),
        ):
            if collective.told:
                with record.scope(annotation, args=buffers):
                    for call in waits:
                        record.runtime(*call)
                    return record.launch(kernel, stream, deps, collective)
        with record.scope("nccl:coalesced"):  # the end of a batch launches its kernel, outside of its operators
            for call in waits:
                record.runtime(*call)
            return record.launch(kernel, stream, deps, collective)

    def _params(self, unit: int) -> int:
        return self.model.root_params if unit == ROOT else self.model.layer_params

    def _shard(self, unit: int) -> int:
        return -(-self._params(unit) // self.config.data)


def label(unit: int) -> str:
    """How the names of FSDP2's scopes end."""
    return "" if unit == ROOT else f" (layers.{unit})"


def _copy(name: str, kernel_name: str, elements: int) -> Call:
    """One of FSDP2's copies between parameters and the buffers of collectives: reads and writes every element."""
    kernel = Kernel(kernel_name, "vector", bytes=2.0 * elements * BF16, utilization=0.55, contention=0.32,
                    activity=0.35, blocks=max(1, elements // 16_384))
    return Call(name, (((elements,),),), ("TensorList",), ("",), kernels=(kernel,))
