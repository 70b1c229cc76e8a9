"""The operations of a transformer's training step: which kernels they launch, with FLOPs and bytes.

An `Op` is one autograd node: its forward calls, and the calls of its backward node. Names of operations are those
of the published workload (attn_n, qkv_ip, attn_fa, mlp_gp, ...).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tb_chopper.backend.simulate import kernel_names, plan
from tb_chopper.backend.simulate.config import Config

BF16, FP32 = 2, 4
DTYPE = {BF16: "c10::BFloat16", FP32: "float"}
MIN_BYTES = 1 << 20  # a kernel cannot be shorter than its start and drain: about 2 us


SMALL_KERNEL_S = 2e-6
"""a kernel of a storm of small ones is no shorter than that alone at the maximum clock"""
_VECTOR_UTILIZATION = 0.70


@dataclass(frozen=True)
class Kernel:
    """One device activity. `flop` is what the mathematics asks for, `flop_performed` what the matrix cores do
    (padded tiles); `bytes` what a memory-bound kernel moves. `utilization`: share of the matrix cores' (or of the
    memory's) peak that the kernel reaches while it runs alone."""

    name: str
    kind: str  # gemm | attention | vector | memcpy | collective
    flop: float = 0.0
    flop_performed: float = 0.0
    bytes: float = 0.0
    utilization: float = 1.0
    blocks: int = 1
    block: int = 256
    contention: float = 0.0
    """slow-down while a collective runs on the same GPU: rate = 1 / (1 + contention)"""
    activity: float = 0.4
    """share of the cores' dynamic power"""
    api: str = "launch"  # launch | module | ext_module | ext | copy


Dims = tuple[int, ...] | tuple[tuple[int, ...], ...]
"""Shape of a tensor, or the shapes of a list of tensors."""


class Collective(NamedTuple):
    """A collective of a process group, or one end of a message between two stages of a pipeline."""

    name: str
    in_nelems: int
    out_nelems: int
    n_bytes: int
    dtype: str = "BFloat16"
    group: str = plan.WORLD
    """kind of its process group"""
    flow: str = ""
    """of a message: F, activations to the next stage, or B, gradients to the one before"""
    number: int = 0
    """occurrence on its channel in the step, counted from 0"""
    seq: int = 0
    """number by its counter in the step"""
    place: int = 0
    """occurrence in the step over all channels"""
    told: bool = True
    """the kernel carries what the operator was asked for"""

    @property
    def channel(self) -> str:
        """What both ends count alike: group, or direction of a message."""
        return f"{self.name}_{self.flow}" if self.flow else self.group

    @property
    def counter(self) -> str:
        """What the process group numbers it by: it counts all of a rank's messages together."""
        return "messages" if self.flow else self.group

    @property
    def to_next(self) -> bool:
        """The other end of a message is the rank of the next stage."""
        return (self.name == "send") == (self.flow == "F")


class Reduction(NamedTuple):
    """An all-reduce over the tensor-parallel ranks."""

    elements: int
    dtype: str = "BFloat16"


@dataclass(frozen=True)
class Call:
    """One operator call on the host: children first, then its own kernels."""

    name: str
    dims: tuple[Dims, ...] = ()
    """of all arguments, keywords included; `()` for what is no tensor; those at the end may be left out"""
    types: tuple[str, ...] = ()
    concrete: tuple[str, ...] = ()
    """values of what is no tensor, as the profiler writes them"""
    children: tuple[Call, ...] = ()
    kernels: tuple[Kernel, ...] = ()


@dataclass(frozen=True)
class Op:
    operation: str
    call: Call
    node: str = ""
    """autograd node, e.g. MmBackward0; empty: nothing to differentiate"""
    backward: tuple[Call, ...] = ()
    outer: tuple[str, ...] = field(default=())
    """composite operators around the call"""
    parameter: bool = False
    """the backward also accumulates the gradient of a parameter"""
    reduce_forward: Reduction | None = None
    """what its forward, or its backward, sums over the tensor-parallel ranks"""
    reduce_backward: Reduction | None = None


@dataclass(frozen=True)
class Workload:
    before: tuple[Op, ...]
    """embedding"""
    layer: tuple[Op, ...]
    after: tuple[Op, ...]
    """final norm and output projection"""
    loss: tuple[Op, ...]
    optimizer: tuple[Call, ...]
    clip: tuple[Call, ...]
    clip_scale: tuple[Call, ...]


def build(config: Config, pipeline: int = 0) -> Workload:
    """The operations of one training step of one rank; `pipeline`: its place in the pipeline."""
    make = _Maker(config, pipeline)
    return Workload(
        before=tuple(make.embedding()),
        layer=tuple(make.layer()),
        after=(*make.norm("ln"), *make.copied("lp"), make.linear("lp", config.model.dim, make.model.vocab)),
        loss=tuple(make.loss()),
        optimizer=tuple(make.adamw()),
        clip=tuple(make.clip_norms()),
        clip_scale=(make.foreach("aten::_foreach_mul_", _SCALE_ALL, make.shard * BF16 * 2),),
    )


_MORE: dict[str, tuple[tuple[str, str], ...]] = {
    "aten::add": (("Scalar", "1"),),
    "aten::add_": (("Scalar", "1"),),
    "aten::pow": (("Scalar", "2"),),
    "aten::mean": (("ScalarList", "[-1]"), ("Scalar", "True"), ("", "")),
    "aten::sum": (("ScalarList", "[0]"), ("Scalar", "False"), ("", "")),
    "aten::linalg_vector_norm": (("Scalar", "2."), ("", ""), ("Scalar", "False"), ("", "")),
    "aten::cat": (("Scalar", "0"),),
    "aten::lerp_": (("Scalar", "0.1"),),
    "aten::addcmul_": (("Scalar", "0.05"),),
    "aten::addcdiv_": (("Scalar", "-0.0003"),),
    "aten::_foreach_add_": (("Scalar", "1."),),
    "aten::_foreach_mul_": (("float", ""),),
    "aten::_foreach_norm": (("Scalar", "2"), ("", "")),
    "aten::_fused_adamw_": (
        *(("TensorList", ""),) * 5, ("Scalar", "0.0003"), ("Scalar", "0.9"), ("Scalar", "0.95"), ("Scalar", "0.1"),
        ("Scalar", "1e-08"), ("Scalar", "False"), ("Scalar", "False"), ("", ""), ("", "")),
}
"""Type and value of the arguments behind the tensors, as record_shapes writes them; null has no type."""
_PLAIN_ADAMW = (
    ("aten::mul_", "AUnaryFunctor<c10::BFloat16, c10::BFloat16, c10::BFloat16, MulFunctor<float> >", 1),
    ("aten::lerp_", "lerp_scalar_kernel<c10::BFloat16>", 2),
    ("aten::mul_", "AUnaryFunctor<c10::BFloat16, c10::BFloat16, c10::BFloat16, MulFunctor<float> >", 1),
    ("aten::addcmul_", "addcmul_cuda_kernel<c10::BFloat16>", 3),
    ("aten::sqrt", "sqrt_kernel_cuda<c10::BFloat16>", 1),
    ("aten::div", "BUnaryFunctor<c10::BFloat16, c10::BFloat16, c10::BFloat16, MulFunctor<float> >", 1),
    ("aten::add_", "CUDAFunctorOnSelf_add<c10::BFloat16>", 1),
    ("aten::addcdiv_", "addcdiv_cuda_kernel<c10::BFloat16>", 3),
)
"""AdamW with foreach=False and fused=False, for one tensor: operator, functor, tensors read"""
_BINARY = ("aten::mul", "aten::div", "aten::add", "aten::mul_", "aten::add_")
_SCALE_ALL = "BinaryOpScalarTensorFunctor<c10::BFloat16, 1, 1, 0>"
_ADD = "CUDAFunctor_add<c10::BFloat16>"
_MUL = "BinaryFunctor<c10::BFloat16, c10::BFloat16, c10::BFloat16, MulFunctor<float> >"
_MUL_FP32 = "BinaryFunctor<float, float, float, MulFunctor<float> >"
_MUL_COMPLEX = "BinaryFunctor<c10::complex<float>, c10::complex<float>, c10::complex<float>, MulFunctor<float> >"


class _Maker:
    """Builds the operations of one configuration, with the names of its GPU's libraries. Under tensor parallelism as
    Megatron's: QKV, gate, up and output projections are divided by columns, the ones behind them and the embedding by
    rows, whose results are summed over the ranks; gradients of what the former read are summed in backward."""

    def __init__(self, config: Config, pipeline: int) -> None:
        self.config = config
        self.model = plan.part(config)
        self.dialect = config.gpu.dialect
        self.t = config.tokens
        self.bs = (config.batch, config.sequence)
        self.layers = sum(len(plan.layers(config, s)) for s in plan.stages(config, pipeline))
        self.shard = -(-plan.params(config, pipeline) // config.data)

    # kernels

    def vector(self, name: str, n_bytes: float, elements: float, per_block: int = 1024) -> Kernel:
        return Kernel(name, "vector", bytes=max(n_bytes, MIN_BYTES), utilization=_VECTOR_UTILIZATION, contention=0.32,
                      activity=0.45, blocks=max(1, math.ceil(elements / per_block)))

    def gemm(self, m: int, n: int, k: int, layout: str, operation: str = "") -> Kernel:
        """C[m, n] = A[m, k] B[k, n] in row-major terms; the library sees it transposed, so n runs along the first
        tile dimension."""
        tile = self._tile(m, n, operation)
        tiles = math.ceil(n / tile[0]) * math.ceil(m / tile[1])
        performed = 2.0 * tiles * tile[0] * tile[1] * math.ceil(k / tile[2]) * tile[2]
        cuda = self.dialect == "cuda"
        return Kernel(kernel_names.gemm(self.dialect, layout, tile), "gemm", 2.0 * m * n * k, performed,
                      utilization=0.80, blocks=tiles, block=384 if cuda else 256, contention=0.30, activity=1.0,
                      api="driver" if cuda else "ext_module")

    def _tile(self, m: int, n: int, operation: str) -> tuple[int, int, int]:
        """Tile (n, m, k): large where the matrix is large; the library picks an odd one for the down projection of
        few tokens."""
        if self.dialect == "rocm" and operation == "mlp_dp" and m <= 4096:
            return 224, 256, 64
        if min(m, n) < 2048:
            return 128, 128, 64
        return (256, 128, 64) if self.dialect == "cuda" else (256, 256, 64)

    # operators

    def call(self, name: str, kernel: str, elements: float, *, size: int = BF16, reads: int = 1, writes: float = 1.0,
             per_block: int = 1024) -> Call:
        """A memory-bound operator over tensors of one size: `reads` in, `writes` out."""
        shape = (*self.bs, max(1, int(elements) // self.t))
        n_bytes = elements * size * (reads + writes)
        dims: tuple[Dims, ...] = (shape,) * reads if name != "aten::cat" else ((shape,) * reads,)
        types = (DTYPE[size],) * reads
        if name == "aten::cat":
            types = ("TensorList",)
        elif name in _BINARY and reads == 1:  # the other operand is a number
            dims, types = (*dims, ()), (*types, "double")
        more = _MORE.get(name, ())
        return Call(name, dims, (*types, *(kind for kind, _ in more)), ("",) * len(types) + tuple(v for _, v in more),
                    kernels=(self.vector(kernel, n_bytes, elements, per_block),))

    def point(self, name: str, functor: str, elements: float, *, size: int = BF16, reads: int = 1) -> Call:
        return self.call(name, kernel_names.elementwise(functor, reads + 1), elements, size=size, reads=reads)

    def total(self, name: str, functor: str, elements: float, *, size: int = BF16) -> Call:
        return self.call(name, kernel_names.reduction(functor), elements, size=size, writes=0, per_block=4096)

    def cast(self, operation: str, elements: float) -> Op:
        shape = (*self.bs, max(1, int(elements) // self.t))
        kernel = self.vector(kernel_names.elementwise("LoadWithCast_copy", 2), elements * (BF16 + FP32), elements)
        call = Call("aten::copy_", (shape, shape), (DTYPE[FP32], DTYPE[BF16], "Scalar"), ("", "", "False"),
                    kernels=(kernel,))
        return Op(operation, call, "ToCopyBackward0", (call,), outer=("aten::to", "aten::_to_copy"))

    def contiguous(self, operation: str, elements: float) -> Op:
        shape = (*self.bs, max(1, int(elements) // self.t))
        kernel = self.vector(kernel_names.elementwise("direct_copy_kernel", 2), 2 * elements * BF16, elements)
        call = Call("aten::copy_", (shape, shape), (DTYPE[BF16], DTYPE[BF16], "Scalar"), ("", "", "False"),
                    kernels=(kernel,))
        return Op(operation, call, "CloneBackward0", (), outer=("aten::contiguous", "aten::clone"))

    # operations

    def linear(self, operation: str, k: int, n: int) -> Op:
        m, types = self.t, (DTYPE[BF16],) * 2

        def mm(a: tuple[int, int], b: tuple[int, int], kernel: Kernel) -> Call:
            return Call("aten::mm", (a, b), types, ("", ""), kernels=(kernel,))

        forward = mm((m, k), (k, n), self.gemm(m, n, k, "TN", operation))
        weight = mm((n, m), (m, k), self.gemm(n, k, m, "NT"))
        data = mm((m, n), (n, k), self.gemm(m, k, n, "NN"))
        return Op(operation, forward, "MmBackward0", (weight, data), ("aten::linear", "aten::matmul"), parameter=True)

    def norm(self, operation: str) -> Iterator[Op]:
        """RMSNorm as written in plain PyTorch: in float32, six large kernels and two small ones; or fused."""
        n, rows = float(self.t * self.model.dim), float(self.t)
        if self.config.fused_norm:
            yield self.fused_norm(operation, n)
            return
        mul = self.point("aten::mul", _MUL_FP32, n, size=FP32, reads=2)
        small = self.point("aten::mul", _MUL_FP32, rows, size=FP32, reads=2)
        scale = self.point("aten::mul", "AUnaryFunctor<float, float, float, MulFunctor<float> >", n, size=FP32)
        power = "pow_tensor_scalar_functor<float>"
        yield self.cast(operation, n)
        yield Op(operation, self.point("aten::pow", power, n, size=FP32), "PowBackward0", (scale, mul))
        mean = self.total("aten::mean", "MeanOps<float, float, float, float>", n, size=FP32)
        yield Op(operation, mean, "MeanBackward1",
                 (self.point("aten::div", "BUnaryFunctor<float, float, float, DivFunctor<float> >", n, size=FP32),))
        yield Op(operation, self.point("aten::add", "CUDAFunctorOnSelf_add<float>", rows, size=FP32), "AddBackward0")
        yield Op(operation, self.point("aten::rsqrt", "rsqrt_functor<float>", rows, size=FP32), "RsqrtBackward0",
                 (self.point("aten::pow", power, rows, size=FP32), small))
        yield Op(operation, mul, "MulBackward0",
                 (mul, mul, self.total("aten::sum", "func_wrapper_t<float, sum_functor>", n, size=FP32)))
        yield self.cast(operation, n)
        half = self.point("aten::mul", _MUL, n, reads=2)
        yield Op(operation, half, "MulBackward0",
                 (half, half, self.total("aten::sum", "func_wrapper_t<c10::BFloat16, sum_functor>", n)), parameter=True)

    def fused_norm(self, operation: str, n: float) -> Op:
        """torch.nn.functional.rms_norm: one kernel, and two in the backward."""
        width, shape, weight, row = str(self.model.dim), (*self.bs, self.model.dim), (self.model.dim,), (*self.bs, 1)
        half = DTYPE[BF16]
        forward = Call("aten::_fused_rms_norm", (shape, (), weight, ()), (half, "ScalarList", half, "Scalar"),
                       ("", f"[{width}]", "", "1e-05"),
                       kernels=(self.vector(kernel_names.RMS_NORM, 2 * n * BF16, n),))
        backward = Call("aten::_fused_rms_norm_backward", (shape, shape, (), row, weight),
                        (half, half, "ScalarList", DTYPE[FP32], half, ""),
                        ("", "", f"[{width}]", "", "", "[True, True]"), kernels=(
                            self.vector(kernel_names.RMS_NORM_BACKWARD, 3 * n * BF16, n),
                            self.vector(kernel_names.RMS_NORM_GAMMA, 2 * n * BF16, n)))
        return Op(operation, forward, "FusedRmsNormBackward0", (backward,), ("aten::rms_norm",), parameter=True)

    def copied(self, operation: str) -> Iterator[Op]:
        """Before a projection divided by columns: all ranks read the same, so the gradient is a sum over them."""
        if self.config.plan.tensor > 1:
            shape = ((*self.bs, self.model.dim),)
            yield Op(operation, Call("_CopyToModelParallelRegion", shape, (DTYPE[BF16],), ("",)),
                     "_CopyToModelParallelRegionBackward", reduce_backward=Reduction(self.t * self.model.dim))

    def reduced(self, operation: str) -> Iterator[Op]:
        """Behind a projection divided by rows: every rank has a summand."""
        if self.config.plan.tensor > 1:
            shape = ((*self.bs, self.model.dim),)
            yield Op(operation, Call("_ReduceFromModelParallelRegion", shape, (DTYPE[BF16],), ("",)),
                     "_ReduceFromModelParallelRegionBackward", reduce_forward=Reduction(self.t * self.model.dim))

    def residual(self, operation: str) -> Op:
        n = float(self.t * self.model.dim)
        return Op(operation, self.point("aten::add", _ADD, n, reads=2), "AddBackward0",
                  (self.point("aten::add_", _ADD, n, reads=2),))

    def rotary(self, elements: float) -> Iterator[Op]:
        yield self.cast("qkv_re", elements)
        mul = self.point("aten::mul", _MUL_COMPLEX, elements, size=FP32)
        yield Op("qkv_re", mul, "MulBackward0", (mul,))
        yield self.cast("qkv_re", elements)

    def attention(self) -> Op:
        m, c = self.model, self.config
        q = (c.batch, m.heads, c.sequence, m.head_dim)
        kv = (c.batch, m.kv_heads, c.sequence, m.head_dim)
        length = str(c.sequence)
        # causal: half of 4 b h s^2 d; the backward has five matrix products where the forward has two
        flop = 2.0 * c.batch * m.heads * c.sequence**2 * m.head_dim
        blocks = math.ceil(c.sequence / 128) * c.batch * m.heads
        tuned = min(1.0, 0.30 * (c.sequence / 4096) ** 0.5) if c.batch == 1 else 1.0  # badly tuned for batch 1
        names = kernel_names.ATTENTION[self.dialect]
        width = float(self.t * m.heads * m.head_dim)

        def kernel(name: str, flop: float, utilization: float) -> Kernel:
            return Kernel(name, "attention", flop, flop, utilization=utilization, blocks=blocks, contention=0.16,
                          activity=0.8, api="launch" if self.dialect == "cuda" else "module")

        before = self.vector(names[1], 2 * width * BF16, width)
        if self.dialect == "cuda":  # one matrix kernel, then a conversion
            after = self.vector(names[3], width * (FP32 + BF16), width)
            backward = (before, kernel(names[2], flop * 2.5, 0.36 * tuned), after)
        else:
            backward = (before, kernel(names[2], flop * 1.5, 0.21 * tuned), kernel(names[3], flop, 0.21 * tuned))
        # Inside, the kernels' own layout: [batch, length, heads, dim].
        inner_q, inner_kv = ((d[0], d[2], d[1], d[3]) for d in (q, kv))
        rows, three = (c.batch, m.heads, c.sequence), (DTYPE[BF16],) * 3
        number, null = "Scalar", ""
        scale = f"{m.head_dim ** -0.5:.17g}"
        lengths = (null, null, number, number, number, number)  # cum_seq_q, cum_seq_k, max_q, max_k, dropout, is_causal
        values = ("", "", length, length, "0.", "True")
        flash = Call("aten::_flash_attention_forward", (inner_q, inner_kv, inner_kv),
                     (*three, *lengths, number, number, *(null,) * 6), ("",) * 3 + values + ("False", scale),
                     kernels=(kernel(names[0], flop, 0.34),))
        flash_attention = "aten::_scaled_dot_product_flash_attention"
        forward = Call(flash_attention, (q, kv, kv), (*three, number, number, number, null),
                       ("", "", "", "0.", "True", "False", ""), children=(flash,))
        five = (*(DTYPE[BF16],) * 5, "float")  # grad_out, query, key, value, out, logsumexp
        seeds = ((2,), ()), ("long int", "long int")
        inner = Call("aten::_flash_attention_backward",
                     (inner_q, inner_q, inner_kv, inner_kv, inner_q, rows, *((),) * 6, *seeds[0]),
                     (*five, *lengths, *seeds[1], number, null, null), ("",) * 6 + values + ("", "", scale),
                     kernels=backward)
        back = Call(f"{flash_attention}_backward", (q, q, kv, kv, q, rows, *((),) * 6, *seeds[0]),
                    (*five, *lengths, *seeds[1], null), ("",) * 6 + values, children=(inner,))
        return Op("attn_fa", forward, "ScaledDotProductFlashAttentionBackward0", (back,),
                  ("aten::scaled_dot_product_attention",))

    def embedding(self) -> Iterator[Op]:
        m, n = self.model, float(self.t * self.model.dim)
        forward = Call("aten::index_select", ((m.vocab, m.dim), (), (self.t,)), (DTYPE[BF16], "Scalar", "long int"),
                       ("", "0", ""), kernels=(self.vector(kernel_names.GATHER, 2 * n * BF16, n),))
        backward = Call("aten::embedding_dense_backward", ((*self.bs, m.dim), self.bs), 
                        (DTYPE[BF16], "long int", "Scalar", "Scalar", "Scalar"),
                        ("", "", str(m.vocab), "-1", "False"), kernels=(
                            self.vector(kernel_names.SORT[self.dialect], self.t * 32.0, self.t),
                            self.vector(kernel_names.EMBEDDING_BACKWARD, (n + m.vocab * m.dim) * BF16, n)))
        yield Op("ie", forward, "EmbeddingBackward0", (backward,), ("aten::embedding",), parameter=True)
        yield from self.reduced("ie")

    def layer(self) -> Iterator[Op]:
        m = self.model
        q, kv = float(self.t * m.heads * m.head_dim), float(self.t * m.kv_heads * m.head_dim)
        wide = float(self.t * m.hidden)
        fused = (m.heads + 2 * m.kv_heads) * m.head_dim
        yield from self.norm("attn_n")
        yield from self.copied("qkv_ip")
        yield self.linear("qkv_ip", m.dim, fused)
        split = Call("aten::split_with_sizes", ((*self.bs, fused),), (DTYPE[BF16], "ScalarList", "Scalar"),
                     ("", f"[{int(q) // self.t}, {int(kv) // self.t}, {int(kv) // self.t}]", "-1"))
        yield Op("qkv_s", split, "SplitWithSizesBackward0", (self.call("aten::cat", kernel_names.CAT, q + 2 * kv),))
        yield from self.rotary(q)
        yield from self.rotary(kv)
        for elements in (q, kv, kv):
            yield self.contiguous("attn_c", elements)
        yield self.attention()
        yield self.contiguous("attn_or", q)
        yield self.linear("attn_op", m.heads * m.head_dim, m.dim)
        yield from self.reduced("attn_op")
        yield self.residual("attn_ra")
        yield from self.norm("mlp_n")
        yield from self.copied("mlp_gp")
        yield self.linear("mlp_gp", m.dim, m.hidden)
        yield Op("mlp_gs", self.point("aten::silu", "silu_functor<c10::BFloat16>", wide), "SiluBackward0",
                 (self.point("aten::silu_backward", "silu_backward_functor<c10::BFloat16>", wide, reads=2),))
        yield self.linear("mlp_up", m.dim, m.hidden)
        product = self.point("aten::mul", _MUL, wide, reads=2)
        yield Op("mlp_gu", product, "MulBackward0", (product, product))
        yield self.linear("mlp_dp", m.hidden, m.dim)
        yield from self.reduced("mlp_dp")
        yield self.residual("mlp_ra")
        # a look at the activations: no autograd node, but it carries the sequence number of the next operator's
        yield Op("mlp_ra", Call("aten::detach", ((*self.bs, m.dim),), (DTYPE[BF16],), ("",)))

    def loss(self) -> Iterator[Op]:
        n, rows, fp32 = float(self.t * self.model.vocab), (self.t, self.model.vocab), DTYPE[FP32]
        yield self.cast("cel", n)
        forward = Call("aten::_log_softmax", (rows,), (fp32, "Scalar", "Scalar"), ("", "1", "False"),
                       kernels=(self.vector(kernel_names.LOG_SOFTMAX, 3 * n * FP32, n),))
        backward = Call("aten::_log_softmax_backward_data", (rows, rows), (fp32, fp32, "Scalar", "Scalar"),
                        ("", "", "1", "6"), kernels=(self.vector(kernel_names.LOG_SOFTMAX_BACKWARD, 3 * n * FP32, n),))
        yield Op("cel", forward, "LogSoftmaxBackward0", (backward,), ("aten::cross_entropy_loss", "aten::log_softmax"))
        if self.config.plan.tensor > 1:  # the largest logit, the target's and the sum of exponentials of each token
            for _ in range(3):
                yield Op("cel", Call("_VocabParallelCrossEntropy"), reduce_forward=Reduction(self.t, "Float"))
        forward = Call("aten::nll_loss_forward", (rows, (self.t,)), (fp32, "long int", "", "Scalar", "Scalar"),
                       ("", "", "", "1", "-100"), kernels=(self.vector(kernel_names.NLL, self.t * 8.0, self.t),))
        backward = Call("aten::nll_loss_backward", ((), rows, (self.t,)),
                        (fp32, fp32, "long int", "", "Scalar", "Scalar", fp32), ("", "", "", "", "1", "-100"),
                        kernels=(self.vector(kernel_names.NLL_BACKWARD, n * FP32, self.t),))
        yield Op("cel", forward, "NllLossBackward0", (backward,), ("aten::nll_loss_nd", "aten::nll_loss"))

    # optimizer

    def foreach(self, name: str, functor: str, n_bytes: float) -> Call:
        kernel = self.vector(kernel_names.foreach(functor), n_bytes, self.shard)
        more = _MORE[name]
        dims = (((int(self.shard),),),) * (1 + sum(kind == "TensorList" for kind, _ in more))
        return Call(name, dims, ("TensorList", *(kind for kind, _ in more)), ("", *(v for _, v in more)),
                    kernels=(kernel,))

    def clip_norms(self) -> Iterator[Call]:
        norms = float(max(1, self.layers))
        yield self.foreach("aten::_foreach_norm", "LpNormFunctor<c10::BFloat16, 2, float, 1, 1, 0>", self.shard * BF16)
        yield self.call("aten::cat", kernel_names.CAT, norms, size=FP32)
        yield self.total("aten::linalg_vector_norm", "NormTwoOps<float, float>", norms, size=FP32)

    def adamw(self) -> Iterator[Call]:
        """Fused AdamW: parameter, gradient and two moments in bf16, 7 accesses an element, in several launches; with
        a storm neither fused nor foreach: eight small kernels for every tensor, 20 accesses."""
        if storm := self.config.faults.storm:
            elements = self.shard * len(_PLAIN_ADAMW) / storm
            least = SMALL_KERNEL_S * self.config.gpu.memory_bytes_per_s * _VECTOR_UTILIZATION
            for k in range(storm):
                name, functor, reads = _PLAIN_ADAMW[k % len(_PLAIN_ADAMW)]
                n = max(elements, least / (BF16 * (reads + 1)))
                call = self.point(name, functor, n, reads=reads)
                yield replace(call, dims=tuple((int(n),) if d else () for d in call.dims))
            return
        launches = self.layers // 4 + 2
        yield self.foreach("aten::_foreach_add_", "BinaryOpScalarFunctor<float, 1, 1, 0>", 4096.0)
        for _ in range(launches):
            yield self.foreach("aten::_fused_adamw_", "FusedAdamMathFunctor<c10::BFloat16, 4, (ADAM_MODE)1, false>",
                               self.shard * BF16 * 7 / launches)
