"""Products of few rows by Inductor's C++ GEMM template, which "max-autotune" means on a CPU.

The template multiplies eight rows in little more than the time of one, with AMX tiles or with AVX-512's instruction for
pairs of bfloat16. By itself Inductor takes it only for weights that are constants of a module, and for no weight that
is a graph's input, as ours are: one graph serves all layers. So the operator below has a lowering of its own. It builds
the template over a weight that was put into the template's blocks at load. There is one choice, so nothing is searched.

A row has the same bits among any number of rows: its sums run over all inputs in one order, whatever stands beside it.

This is the only file with private names of Inductor's templates. `reason_against` says why a release of PyTorch or a
processor does without them.

Read next: `linear.py`, whose layers call the operator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec.operators import operator

PAIR = 2  # inputs whose weights lie side by side: the instructions multiply pairs of bfloat16
KNOWN = ("2.12.", "2.13.")  # releases of PyTorch that have all of the names
KNOWN_INT4 = "2.13."  # the release on which products of 4 bits were seen to be right
ROWS, INPUTS = 32, 32  # of a register block; its columns differ by processor
GROUP = 32  # inputs that share a scale, of weights of 4 bits


def has_tiles() -> bool:
    """Return whether the processor has AMX tiles for bfloat16."""
    return torch.cpu._is_amx_tile_supported()


def columns() -> int:
    """Return how many outputs of a weight form a block. Wider blocks were slower (docs/log.md)."""
    return 16 if has_tiles() else 32


@functools.cache
def reason_against(dtype: torch.dtype) -> str | None:
    """Return why products of `dtype` cannot go by the template; None: they can."""
    if dtype != torch.bfloat16:
        return f"{str(dtype).removeprefix('torch.')} has none"
    if not (has_tiles() or torch.cpu.get_capabilities().get("avx512_bf16")):
        return "the processor has neither AMX nor AVX512_BF16"
    if torch.__version__.startswith("2.11."):  # seen where a head is compiled: an assertion of Inductor's
        return f"PyTorch {torch.__version__} takes two names of one size for two sizes"
    try:
        if not torch.__version__.startswith(KNOWN):  # else a start need not wait for Inductor
            _lower()
    except (ImportError, AttributeError) as error:
        return f"PyTorch {torch.__version__} lacks a name: {error}"
    return None


def reason_against_int4(dtype: torch.dtype) -> str | None:
    """Return why weights of 4 bits cannot be multiplied by activations of `dtype`; None: they can."""
    if dtype != torch.bfloat16:
        return f"it is for --dtype bfloat16, and the dtype is {str(dtype).removeprefix('torch.')}"
    if (able := torch.backends.cpu.get_cpu_capability()) != "AVX512":
        return f"it needs a processor with AVX512, and PyTorch finds {able}"
    if not torch.__version__.startswith(KNOWN_INT4):
        return f"it needs PyTorch {KNOWN_INT4}x, and this is {torch.__version__}"
    return None


def lower() -> None:
    """Let what is compiled in this process have the template, if it can."""
    if reason_against(torch.bfloat16) is None:
        _lower()
    if reason_against_int4(torch.bfloat16) is None:
        _lower_int4()


def blocked(weight: Tensor) -> Tensor:
    """Return a weight [out, in] bf16 in blocks of columns, [out / columns, in, columns], filled up with zeros.

    Within a block the weights of two inputs lie side by side: [in / 2, columns, 2] in memory.
    """
    size, (features, inputs) = columns(), weight.shape
    padded = F.pad(weight, (0, 0, 0, -features % size))
    return padded.view(-1, size, inputs // PAIR, PAIR).transpose(1, 2).reshape(-1, inputs, size)


def unblocked(weight: Tensor, features: int) -> Tensor:
    """Return the weight [features, in] whose blocks these are."""
    count, inputs, size = weight.shape
    return weight.view(count, inputs // PAIR, size, PAIR).transpose(1, 2).reshape(count * size, inputs)[:features]


def fits(weight: Tensor) -> bool:
    """Return whether a weight [out, in] can be multiplied by the template."""
    return reason_against(weight.dtype) is None and weight.shape[1] % INPUTS == 0


class Blocks(nn.Module):
    """A weight [out, in] in blocks."""

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.features = len(weight)
        self.register_buffer("weight", blocked(weight), persistent=False)

    def forward(self, x: Tensor, wide: bool = False) -> Tensor:
        """Return x [..., in] times the weight, [..., out]: float32 if `wide`, else of the dtype of x."""
        rows = x.reshape(-1, x.shape[-1])
        out = torch.ops.minispec.blocked_linear(rows, self.weight, self.features, wide)
        return out.view(*x.shape[:-1], self.features)


@operator(
    "blocked_linear(Tensor x, Tensor weight, int features, bool wide) -> Tensor",
    lambda x, weight, features, wide: x.new_empty(x.shape[0], features, dtype=torch.float32 if wide else x.dtype),
    "CPU",
)
def _blocked_linear(x: Tensor, weight: Tensor, features: int, wide: bool) -> Tensor:
    """Return x [rows, in] times blocks of a weight, [rows, features]: float32 if `wide`, else of x's dtype."""
    return of_any_rows(_compiled(features, wide), x, weight)


@operator(
    "int4_linear(Tensor x, Tensor weight, Tensor scales) -> Tensor",
    lambda x, weight, scales: x.new_empty(x.shape[0], len(weight)),
    "CPU",
)
def _int4_linear(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Return x [rows, in] bf16 times a weight of 4 bits, [rows, out]."""
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), weight, GROUP, scales)


def of_any_rows(compiled: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
    """Call a compiled function of x [rows, ...], of which one graph serves all numbers of rows."""
    rows = x.shape[0]  # not len(x), which would make a graph for each number of rows
    x = x.contiguous() if rows > 1 else x.expand(2, -1).contiguous()  # torch.compile has graphs of one row apart
    torch._dynamo.maybe_mark_dynamic(x, 0)
    return compiled(x, *others)[:rows]


@functools.cache
def _compiled(features: int, wide: bool) -> Any:
    _lower()

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return torch.ops.minispec.blocked_linear(x, weight, features, wide)

    return torch.compile(product, fullgraph=True, dynamic=False)


@functools.cache
def _lower() -> None:
    """Tell Inductor how to lower the operator."""
    from torch._inductor import ir, lowering
    from torch._inductor.codegen import cpp_gemm_template as templates
    from torch._inductor.codegen import cpp_micro_gemm as kernels
    from torch._inductor.codegen.cpp_utils import GemmBlocking
    from torch._inductor.select_algorithm import realize_inputs

    class Brgemm(kernels.CppMicroBrgemm):
        """oneDNN's kernel for one block, which Inductor offers for float16 alone."""

        def get_b_layout(self) -> Any:
            return kernels.LayoutType.VNNI2

    blocking = GemmBlocking(ROWS, columns(), INPUTS)
    kind = kernels.CppMicroGemmAMX if has_tiles() else Brgemm

    def kernel(name: str, *_: Any, input2_dtype: torch.dtype, **options: Any) -> Any:
        return kind(name, torch.bfloat16, input2_dtype, torch.float32, torch.float32, blocking, 1)

    def capabilities(inputs: int) -> dict[str, Any]:
        # The template wants to hold a block of outputs in 0.8 of the first cache, and two or four blocks of rows in
        # half of the second. Where that has less room, it divides by zero.
        size = max(able["l2_cache_size"], 10 * 2 * ROWS * inputs)
        return able | {"l1d_cache_size": size, "l2_cache_size": size}

    able = dict(torch.cpu.get_capabilities())

    class Blocked(templates.CppGemmTemplate):
        """The template with our kernel, which reads a block's weights for all inputs in one call.

        Otherwise a call would read as many as the first cache holds. Few rows read each weight once, so that gains
        nothing, and the calls took a quarter of the time.
        """

        def render(self, *args: Any, **options: Any) -> str:
            known = capabilities(int(self.input_nodes[0].get_size()[1]))
            with (
                patch.object(templates, "create_micro_gemm", kernel),
                patch.object(torch.cpu, "get_capabilities", lambda: known),
            ):
                return super().render(*args, **options)

    @lowering.register_lowering(torch.ops.minispec.blocked_linear.default, type_promotion_kind=None)
    def lower(x: Any, weight: Any, features: int, wide: bool) -> Any:
        """Return the node of the template over these inputs, which Inductor fuses what follows into."""
        x, weight = (ir.ExternKernel.require_contiguous(part) for part in realize_inputs(x, weight))
        layout = ir.FixedLayout(x.get_device(), torch.float32 if wide else x.get_dtype(), [x.get_size()[0], features])
        return _node(Blocked, [x, weight], layout, blocking, should_block_weights=True)


@functools.cache
def _lower_int4() -> None:
    """Tell Inductor how to lower products of 4 bits: by its template for them, whose weight is packed by ATen."""
    from torch._inductor import ir, lowering
    from torch._inductor.codegen import cpp_gemm_template as templates
    from torch._inductor.codegen import cpp_micro_gemm as kernels
    from torch._inductor.codegen.cpp_utils import GemmBlocking
    from torch._inductor.select_algorithm import realize_inputs
    from torch._inductor.virtualized import V

    blocking = GemmBlocking(4, 64, 32)
    base: Any = templates.CppWoqInt4GemmTemplate

    def kernel(name: str, *_: Any, input_dtype: torch.dtype, **options: Any) -> Any:
        kind = kernels.CppMicroGemmWoQInt4Avx512  # on every processor: that of AMX rounds weights to bfloat16
        return kind(name, input_dtype, torch.uint8, torch.float32, torch.float32, blocking, 1)

    class Grouped(base[GROUP]):  # type: ignore[misc]
        """The template with this kernel."""

        def render(self, *args: Any, **options: Any) -> str:
            with patch.object(templates, "create_micro_gemm", kernel):
                return str(super().render(*args, **options))

    @lowering.register_lowering(torch.ops.minispec.int4_linear.default, type_promotion_kind=None)
    def lower(x: Any, weight: Any, scales: Any) -> Any:
        """Return the node of the template over these inputs."""
        x, weight, scales = (ir.ExternKernel.require_contiguous(part) for part in realize_inputs(x, weight, scales))
        layout = ir.FixedLayout(x.get_device(), x.get_dtype(), [x.get_size()[0], weight.get_size()[0]])
        group = V.graph.add_tensor_constant(torch.tensor(GROUP), name=None)
        return _node(Grouped, [x, weight, group, scales], layout, blocking, should_block_weights=False)


def _node(template: Any, inputs: list[Any], layout: Any, blocking: Any, should_block_weights: bool) -> Any:
    """Return the node of a template over these inputs: the only choice there is, so nothing is searched."""
    from torch._inductor.select_algorithm import DataProcessorTemplateWrapper, autotune_select_algorithm
    from torch._inductor.utils import parallel_num_threads

    choices: list[Any] = []
    DataProcessorTemplateWrapper(
        template, lambda inputs, layout: (inputs, layout), None, input_nodes=inputs, layout=layout,
        num_threads=parallel_num_threads(), register_blocking=blocking, beta=1, alpha=1, has_bias=False,
        epilogue_creator=None, should_block_weights=should_block_weights, name="linear",
    ).maybe_append_choice(choices)  # fmt: skip
    node, _ = autotune_select_algorithm("linear", choices, inputs, layout)
    return node
