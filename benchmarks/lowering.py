"""What torch.compile makes of a decoder block on CUDA, found out on a machine without a GPU.

`python -m benchmarks.lowering` lowers `Block.forward` for an H200 in every shape that matters: query heads per KV head,
nodes of a tree, head size; and a chunk of prompt for each head size and page size. It prints a line a shape and ends
with status 1 where something is wrong. Three things are asked of each:

- does torch.compile lower it, and to the attention kernel that is wanted? A tree belongs in the decode kernel, which
  splits the keys over the multiprocessors; in the prefill kernel it would be slow, and nobody would notice;
- does no other kernel touch the pool of keys and values, and has no buffer its size? Warm-up tunes kernels on copies
  of what they write;
- does Triton compile the attention kernel within a multiprocessor's shared memory, and without spilled registers?

It works because lowering needs tensors' shapes alone: they are fake (FakeTensorMode), the device's properties are
stated below, and Triton compiles for a target that need not be there. Matrix products stay calls of cuBLAS, which on a
GPU would be tuned. What is not found out is whether the kernel is right and how fast it is: that takes a GPU.

Needs triton (`pip install triton`) and, where PyTorch is a CPU build, a C++ compiler. Read next: `attention.py`, whose
kernel options these are.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import functools
import importlib.util
import itertools
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from minispec.attention import QUERY_BLOCK, FlexLayer, PagedFlex, Plan
from minispec.kv import KVShape, PagedKV
from minispec.model import Block, ModelConfig, Rope

CUDA = torch.device("cuda", 0)
SHARED_MEMORY = 232_448  # bytes a block may have on sm_90
H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, regs_per_multiprocessor=65_536, warp_size=32,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, total_memory=140 * 2**30,
    shared_memory_per_block_optin=SHARED_MEMORY, L2_cache_size=50 * 2**20, gcnArchName="",
)  # fmt: skip
GROUPS, NODES, HEAD_DIMS = (1, 2, 3, 4, 6, 7, 8), (1, 2, 6, 8, 16, 17, 31, 32, 33, 64, 127), (64, 128)
PAGES = 8 * 131  # of the pool: whole blocks of 128 rows, and no other tensor of a block has a multiple of this prime


class Cell(NamedTuple):
    """A shape of the compiled block: a step of one tree, or a chunk of prompt of four query blocks."""

    group: int  # query heads per KV head
    nodes: int
    head_dim: int
    prefill: bool = False
    page_size: int = 64
    dtype: torch.dtype = torch.bfloat16


class Built(NamedTuple):
    """What Triton's compiler says of a kernel."""

    shared: int  # bytes of shared memory a block
    registers: int  # a thread
    spilled: int  # bytes of registers stored to memory, a thread


def unavailable() -> str | None:
    """Return why nothing can be lowered here, None where it can."""
    if torch.__version__ < "2.13":
        return f"lowering for CUDA is written for the Inductor of torch 2.13, here is {torch.__version__}"
    try:
        import triton.backends
    except ImportError:
        return "triton is not installed, and PyTorch's CPU builds do not bring it"
    if "nvidia" not in triton.backends.backends:
        return f"triton {triton.__version__} has no backend for nvidia here"
    return no_fake_cuda()


def no_fake_cuda() -> str | None:
    """Return why no tensor can pretend to be on CUDA here, None where one can."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        if not torch.cuda._is_compiled():
            get_cpp_compiler()
    except InvalidCxxCompiler:
        return "a CPU build of PyTorch takes CUDA's place only with a C++ compiler, and there is none"
    return None


# ---- pretending to have a GPU --------------------------------------------------------------------------------------

NO_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
const c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
const c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
"""


@functools.cache
def allow_fake_cuda() -> None:
    """Let fake tensors on CUDA be indexed by a CPU build of PyTorch, from now on in this process.

    Indexing asks the device's guard, which makes a device current, even where no kernel runs. CPU builds have none for
    CUDA; the one that PyTorch itself uses on machines without a GPU does nothing, and is put in its place.
    """
    if torch.cuda._is_compiled():
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch.utils.cpp_extension import include_paths, library_paths

    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(NO_GUARD)
        flags = [*(f"-I{path}" for path in include_paths()), *(f"-L{path}" for path in library_paths()), "-lc10"]
        command = [get_cpp_compiler(), "-std=c++20", "-shared", "-fPIC", str(source), "-o", str(library), *flags]
        subprocess.run(command, check=True)
        ctypes.CDLL(str(library))


def fake_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Replace the tensors of a module, its children's and plain attributes included, by fake ones on CUDA."""

    def fake(tensor: Tensor) -> Tensor:
        """Return a tensor of the same shape; floats take the dtype asked for."""
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        return torch.empty(tensor.shape, dtype=kind, device=CUDA)

    for part in module.modules():
        for name, tensor in part._parameters.items():
            if tensor is not None:
                part._parameters[name] = nn.Parameter(fake(tensor), requires_grad=False)
        for values in (part._buffers, vars(part)):
            values.update({name: fake(tensor) for name, tensor in values.items() if isinstance(tensor, Tensor)})


class _Driver:
    """What Triton asks of the GPU it is to compile for."""

    def get_current_target(self) -> Any:
        """Return Hopper."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """Return the only device's number."""
        return 0

    def get_device_interface(self) -> Any:
        """Return PyTorch's, of which every question is answered below."""
        return torch.cuda


@contextmanager
def pretend_h200() -> Iterator[None]:
    """Let PyTorch's compiler find an H200 in this process. What it caches stays: use a process of its own."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes import joint_graph
    from triton.runtime.driver import driver

    allow_fake_cuda()
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_capability": (9, 0),
        "get_device_properties": H200, "_exchange_device": 0, "_maybe_exchange_device": 0, "synchronize": None,
        "get_rng_state": torch.zeros(1), "set_rng_state": None,
    }  # fmt: skip
    interface = ("is_available", "device_count", "current_device", "get_device_properties", "synchronize")
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=answer, **__: answer))
        for name in interface:
            answer = staticmethod(lambda *_, answer=answers[name]: answer)
            stack.enter_context(mock.patch.object(CudaInterface, name, answer))
        stack.enter_context(mock.patch.object(CudaInterface, "get_raw_stream", staticmethod(lambda _: 0)))
        # It prepares patterns of attention and of padded products with real tensors on the device.
        stack.enter_context(mock.patch.object(joint_graph, "lazy_init", lambda *_, **__: None))
        driver.set_active(_Driver())
        yield


# ---- lowering and compiling ----------------------------------------------------------------------------------------


class _Lowered(Exception):
    """The source is written; nothing is to be loaded."""


def make_layer(cell: Cell) -> tuple[Block, Tensor, Rope, FlexLayer]:
    """Return the arguments of `Block.forward` for a cell, all fake; call it under a FakeTensorMode."""
    kv_heads, (group, nodes, dim) = 8 if cell.group & (cell.group - 1) == 0 else 3, cell[:3]
    config = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=64, hidden_size=group * kv_heads * dim, intermediate_size=512,
        layers=1, heads=group * kv_heads, kv_heads=kv_heads, head_dim=dim, norm_eps=1e-5, rope_theta=1e4,
        rope_scaling=None, context_length=4096, qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False,
        tied=False, sliding_window=None, dtype=None,
    )  # fmt: skip
    with torch.device("meta"):
        block = Block(config).eval()
    fake_module(block, cell.dtype)
    like, sizes = torch.empty(0, dtype=cell.dtype, device=CUDA), {"slots": 4, "rows_per_slot": 4096}
    kv = PagedKV(KVShape(1, kv_heads, dim), pages=PAGES, page_size=cell.page_size, zeros=like.new_zeros, **sizes)
    plan = Plan(kv, 1, 4, QUERY_BLOCK, prompts=True) if cell.prefill else Plan(kv, 1, 1, nodes)
    rows = plan.blocks * plan.width
    new = functools.partial(torch.empty, dtype=cell.dtype, device=CUDA)
    rope = Rope(new(1, 1, rows, dim), new(1, 1, rows, dim))
    return block, new(1, rows, config.hidden_size), rope, PagedFlex(kv, plan, 1).layer(0)


def lower(cell: Cell) -> str:
    """Return the source that torch.compile writes for a cell; raises what it raises where it finds no kernel."""
    import torch._inductor.config
    from torch._inductor.graph import GraphLowering

    written: list[str] = []

    def stop(source: str) -> None:
        """Keep the source, and go no further: to load it takes a GPU."""
        written.append(source)
        raise _Lowered

    torch._dynamo.reset()
    with (
        pretend_h200(),
        torch.inference_mode(),
        FakeTensorMode(),
        mock.patch.object(GraphLowering, "save_output_code", staticmethod(stop)),
        torch._inductor.config.patch(force_disable_caches=True, compile_threads=1),
    ):
        try:
            torch.compile(Block.forward, fullgraph=True, dynamic=False)(*make_layer(cell))
        except Exception:
            if not written:
                raise
    return written[0]


class Source(NamedTuple):
    """What the checks read in the source of a block."""

    kernels: dict[str, str]  # Triton's, by name
    calls: dict[str, list[str]]  # by kernel: the names of the tensors it is run on
    sizes: dict[str, int]  # numbers of elements of inputs and buffers, by name


def parse(source: str) -> Source:
    """Read the kernels, their calls and the tensors' sizes out of a lowered source."""
    found = Source({}, {}, {})
    for node in ast.walk(ast.parse(source)):
        call = node.value if isinstance(node, (ast.Assign, ast.Expr)) else None
        if not isinstance(call, ast.Call):
            continue
        name, arguments = ast.unparse(call.func), [ast.unparse(argument) for argument in call.args]
        if name == "async_compile.triton":
            found.kernels[arguments[0].strip("'")] = ast.literal_eval(call.args[1])
        elif name.endswith(".run"):
            found.calls[name.removesuffix(".run")] = arguments
        elif name == "assert_size_stride":
            found.sizes[arguments[0]] = math.prod(ast.literal_eval(call.args[1]))
        elif name.startswith("empty_strided_") and isinstance(node, ast.Assign):
            found.sizes[ast.unparse(node.targets[0])] = math.prod(ast.literal_eval(call.args[0]))
    return found


def build(name: str, source: str) -> Built:
    """Compile one Triton kernel of a lowered source for sm_90."""
    import triton
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler.compiler import ASTSource

    with tempfile.TemporaryDirectory() as folder, pretend_h200():
        path = Path(folder, f"{name}.py")
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = getattr(module, name)
        (config,) = kernel.configs
        meta = kernel._create_compile_meta(config)
        binary = triton.compile(
            ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0]),
            target=_Driver().get_current_target(),
            options=kernel._create_compile_options(config, meta),
        )
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(binary.asm["ptx"])
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(ptx), "-o", str(ptx.with_suffix(".cubin"))]
        said = subprocess.run(command, check=True, capture_output=True, text=True)
    told = said.stdout + said.stderr
    registers, spilled = (re.findall(pattern, told) for pattern in (r"Used (\d+) reg", r"(\d+) bytes spill stores"))
    return Built(binary.metadata.shared, int(registers[0]), sum(map(int, spilled)))


# ---- the checks ----------------------------------------------------------------------------------------------------


def faults_of_source(cell: Cell, source: str) -> list[str]:
    """Return what is wrong with a lowered source: the wrong attention kernel, or the pool copied or tuned upon."""
    found, faults = parse(source), []
    pool = PAGES * cell.page_size * cell.head_dim
    attention = [text for name, text in found.kernels.items() if name.startswith("triton_tem")]
    if [("SPLIT_KV :" in text) for text in attention] != [not cell.prefill]:
        faults.append(f"not in the {'prefill' if cell.prefill else 'decode'} kernel")
    if cell.prefill and not all("IS_DIVISIBLE : tl.constexpr = True" in text for text in attention):
        faults.append("every key is checked against the pool's end")
    inputs = {name for name, size in found.sizes.items() if size % pool == 0 and name.startswith("arg")}
    if len(inputs) != 2:
        faults.append(f"{len(inputs)} inputs are keys or values, not 2")
    if buffers := [name for name, size in found.sizes.items() if size % pool == 0 and size and name not in inputs]:
        faults.append(f"{len(buffers)} buffers of the pool's size")
    for name, tensors in found.calls.items():
        if not name.startswith("triton_tem") and inputs.intersection(tensors):
            faults.append("a tuned kernel works on the pool")
    return faults


def check(cell: Cell, compiled: bool = True) -> tuple[Built | None, list[str]]:
    """Return what Triton says of a cell's attention kernel and all that is wrong with the cell.

    Without `compiled` the kernel is lowered only. Spilled registers count in 16 bits: in 32 the kernels serve tests.
    """
    try:
        source = lower(cell)
    except Exception as error:
        if "NoValidChoicesError" not in str(error):
            raise
        return None, ["NoValidChoicesError: no kernel takes this shape"]
    faults, built = faults_of_source(cell, source), None
    for name, kernel in parse(source).kernels.items() if compiled else ():
        if name.startswith("triton_tem"):
            built = build(name, kernel)
            if built.shared > SHARED_MEMORY:
                faults.append(f"{built.shared} bytes of shared memory, {SHARED_MEMORY} are there")
            if built.spilled and cell.dtype.itemsize == 2:
                faults.append(f"{built.spilled} bytes of registers spilled")
    return built, faults


def cells() -> list[Cell]:
    """Return all shapes: trees in bfloat16, prompts with every page size, and a few of either in other dtypes."""
    found = [Cell(*shape) for shape in itertools.product(GROUPS, NODES, HEAD_DIMS)]
    for dim, page in itertools.product(HEAD_DIMS, (16, 64, 128)):
        found += [Cell(4, QUERY_BLOCK, dim, prefill=True, page_size=page), Cell(4, 32, dim, page_size=page)]
    for dim, dtype in itertools.product(HEAD_DIMS, (torch.float16, torch.float32)):
        found += [Cell(4, QUERY_BLOCK, dim, prefill=True, dtype=dtype), Cell(4, 32, dim, dtype=dtype)]
    return found


def main() -> None:
    """Check every cell, print a line for each, and end with status 1 if one has a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--group", type=int, nargs="+", default=GROUPS, help="query heads per KV head")
    parser.add_argument("--nodes", type=int, nargs="+", default=(*NODES, QUERY_BLOCK), help="128: chunks of prompt")
    parser.add_argument("--head-dim", type=int, nargs="+", default=HEAD_DIMS)
    args = parser.parse_args()
    if why := unavailable():
        sys.exit(why)
    wrong = 0
    print("group nodes head page dtype     kernel   shared registers spilled")
    for cell in cells():
        if cell.group in args.group and cell.nodes in args.nodes and cell.head_dim in args.head_dim:
            built, faults = check(cell)
            wrong += bool(faults)
            kind, dtype = "prefill" if cell.prefill else "decode", str(cell.dtype).removeprefix("torch.")
            figures = "{:8} {:9} {:7}".format(*built) if built else " " * 26
            print(f"{cell.group:5} {cell.nodes:5} {cell.head_dim:4} {cell.page_size:4} {dtype:9} {kind:8}{figures}"
                  f"  {'; '.join(faults)}".rstrip(), flush=True)  # fmt: skip
    sys.exit(f"{wrong} shapes have faults" if wrong else 0)


if __name__ == "__main__":
    main()
