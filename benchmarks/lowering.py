"""What torch.compile makes of a decoder block on CUDA, found out on a machine without a GPU.

`python -m benchmarks.lowering` lowers `Block.forward` for an H200 in every shape that matters: query heads per KV head,
nodes of a tree, head size; a chunk of prompt for each head size and page size; and an EAGLE-3 head's layer over a
frontier. It prints a line a shape and ends with status 1 where something is wrong. It asks:

- does torch.compile lower it, by the options that CUDA has, and to the one attention kernel that is wanted? A tree
  belongs in the decode kernel, which splits the keys over the multiprocessors; in the prefill kernel it would be slow,
  and nobody would notice;
- does no other kernel touch the pool of keys and values, and has no buffer its size? Warm-up tunes kernels on copies
  of what they write;
- does Triton compile the attention kernel within a multiprocessor's shared memory, without spilled registers, and with
  few instructions in its loop?
- how many instructions does a product of one row take for each weight? Above 16 an H200 computes for longer than it
  reads (docs/cuda.md). `weight_costs` says it for a given XBLOCK, the number of outputs of a thread block, which
  "coordinate descent" chooses on a GPU.

It works on fake tensors (`fake_gpu.py`), and Triton compiles for a target that need not be there. What is not found out
is whether the kernel is right and how fast it is: that takes a GPU.

Needs triton (`pip install triton`) and, where PyTorch is a CPU build, a C++ compiler. Read next: `kernels.py`,
which lowers a whole step.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.fake_gpu import (
    CUDA,
    SHARED_MEMORY,
    Driver,
    fake_module,
    pretend_h200,
    unavailable,
)
from benchmarks.lowered import Graph, Lowerings, autotuned
from minispec.attention import QUERY_BLOCK, FlexLayer, PagedFlex, Plan
from minispec.eagle import PairBlock
from minispec.kv import KVShape, PagedKV
from minispec.model import Block, ModelConfig, Rope

GROUPS, NODES, HEAD_DIMS = (1, 2, 3, 4, 6, 7, 8), (1, 2, 6, 8, 16, 17, 31, 32, 33, 64, 127), (64, 128)
# In the loop of the decode kernel, for a tile of 64 rows and 32 keys. With a byte of mask for each pair it had 947.
MOST_INSTRUCTIONS = 750
MOST_A_WEIGHT = 16  # instructions, at XBLOCK 1
PAGES = 8 * 131  # of the pool: whole blocks of 128 rows, and no other tensor of a block has a multiple of this prime


class Cell(NamedTuple):
    """A shape of the compiled block: a step of one tree, a chunk of prompt of four query blocks, or a head's frontier.

    A frontier runs an EAGLE-3 head's layer: its nodes also see some of the `window` nodes that were drafted before.
    """

    group: int  # query heads per KV head
    nodes: int
    head_dim: int
    prefill: bool = False
    page_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    inner: int = 512  # the width of the MLP


class Built(NamedTuple):
    """What the compilers say of a kernel."""

    shared: int  # bytes of shared memory a block
    registers: int  # a thread
    spilled: int  # bytes of registers stored to memory, a thread
    loop: int  # instructions of the longest loop that loads
    barriers: int  # of these, those at which the threads of a block wait for each other
    instructions: int  # of the kernel
    threads: int  # of a block
    sizes: dict[str, int]  # the sizes of its tile


# ---- lowering and compiling ----------------------------------------------------------------------------------------


def make_layer(cell: Cell) -> tuple[Block, *tuple[Tensor, ...], Rope, FlexLayer]:
    """Return the block of a cell and the arguments of its `forward`, all fake; call it under a FakeTensorMode."""
    kv_heads, (group, nodes, dim) = 8 if cell.group & (cell.group - 1) == 0 else 3, cell[:3]
    config = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=64, hidden_size=group * kv_heads * dim,
        intermediate_size=cell.inner, layers=1, heads=group * kv_heads, kv_heads=kv_heads, head_dim=dim, norm_eps=1e-5,
        rope_theta=1e4, rope_scaling=None, context_length=4096, qkv_bias=False, output_bias=False, mlp_bias=False,
        qk_norm=False, tied=False, sliding_window=None, dtype=None,
    )  # fmt: skip
    with torch.device("meta"):
        block = Block(config) if cell.window is None else PairBlock(config, norm_before_residual=False)
    fake_module(block.eval(), cell.dtype)
    like, sizes = torch.empty(0, dtype=cell.dtype, device=CUDA), {"slots": 4, "rows_per_slot": 4096}
    kv = PagedKV(KVShape(1, kv_heads, dim), pages=PAGES, page_size=cell.page_size, zeros=like.new_zeros, **sizes)
    plan = Plan(kv, 1, 4, QUERY_BLOCK, prompts=True) if cell.prefill else Plan(kv, 1, 1, nodes, cell.window)
    rows = plan.blocks * plan.width
    new = functools.partial(torch.empty, dtype=cell.dtype, device=CUDA)
    rope = Rope(new(1, 1, rows, dim), new(1, 1, rows, dim))
    streams = [new(1, rows, config.hidden_size) for _ in range(1 if cell.window is None else 2)]
    return block, *streams, rope, PagedFlex(kv, plan, 1).layer(0)


def lower(cell: Cell) -> Graph:
    """Return what torch.compile writes for a cell; raises what it raises where it finds no kernel."""
    lowerings = Lowerings()
    with lowerings.kept(), FakeTensorMode():
        block, *given = make_layer(cell)
        autotuned(type(block).forward)(block, *given)
    (graph,) = lowerings.graphs
    return graph


def build(name: str, source: str, **sizes: int) -> Built:
    """Compile one Triton kernel of a lowered source for sm_90; sizes: of its tile, in place of Inductor's."""
    import triton
    from triton import knobs
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler.compiler import ASTSource

    with tempfile.TemporaryDirectory() as folder, pretend_h200():
        path = Path(folder, f"{name}.py")
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = getattr(module, name)
        config = kernel.configs[0]
        config.kwargs.update(sizes)
        meta = kernel._create_compile_meta(config)
        binary = triton.compile(
            ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0]),
            target=Driver().get_current_target(),
            options=kernel._create_compile_options(config, meta),
        )
        ptx, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        ptx.write_text(binary.asm["ptx"])
        run = functools.partial(subprocess.run, check=True, capture_output=True, text=True)
        said = run([get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(ptx), "-o", str(cubin)])
        instructions, loop = read_assembly(run([knobs.nvidia.nvdisasm.path, "-c", str(cubin)]).stdout)
    told = said.stdout + said.stderr
    registers, spilled = (re.findall(pattern, told) for pattern in (r"Used (\d+) reg", r"(\d+) bytes spill stores"))
    return Built(
        binary.metadata.shared, int(registers[0]), sum(map(int, spilled)), len(loop),
        sum("BAR." in instruction for instruction in loop), len(instructions), 32 * config.num_warps,
        dict(config.kwargs),
    )  # fmt: skip


def read_assembly(text: str) -> tuple[list[str], list[str]]:
    """Return the instructions of a kernel, and of these the longest loop that loads; no loop: []."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    found: list[str] = []
    for line in text.splitlines():
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(instructions)
        elif re.search(r"/\*[0-9a-f]{4,}\*/", line) and "NOP" not in line:
            instructions.append(line)
            back = re.search(r"\bBRA\b.*`\((\.L\w+)\)", line)
            loop = instructions[labels[back[1]] :] if back and back[1] in labels else []
            if len(loop) > len(found) and any("LDG" in one for one in loop):
                found = loop
    return instructions, found


def weight_costs(xblock: int) -> dict[str, tuple[float, Built]]:
    """Return the instructions a weight of a layer's products of one row, of Llama-3.1-8B's sizes, by kernel."""
    costs = {}
    for name, kernel in lower(Cell(4, 1, 128, inner=14336)).source.kernels.items():
        lengths = [re.search(rf"\b{which}numel = (\d+)", kernel) for which in ("x", "r0_")]
        outputs, inputs = (int(found[1]) if found else 1 for found in lengths)
        if name.startswith("triton_red") and outputs > 1:
            built = build(name, kernel, XBLOCK=xblock)
            executed = built.instructions + built.loop * (-(-inputs // built.sizes["R0_BLOCK"]) - 1)
            costs[name] = executed * built.threads / (xblock * inputs), built
    return costs


# ---- the checks ----------------------------------------------------------------------------------------------------


def faults_of(cell: Cell, graph: Graph) -> list[str]:
    """Return what is wrong with a block's graph: the wrong attention kernel, a choice, the pool copied or tuned on."""
    found, faults = graph.source, []
    if graph.offered != [1]:
        faults.append(f"{graph.offered} attention kernels to choose from")
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
        graph = lower(cell)
    except Exception as error:
        if "NoValidChoicesError" not in str(error):
            raise
        return None, ["NoValidChoicesError: no kernel takes this shape"]
    faults, built = faults_of(cell, graph), None
    for name, kernel in graph.source.kernels.items() if compiled else ():
        if name.startswith("triton_tem"):
            built = build(name, kernel)
            if built.shared > SHARED_MEMORY:
                faults.append(f"{built.shared} bytes of shared memory, {SHARED_MEMORY} are there")
            if built.spilled and cell.dtype.itemsize == 2:
                faults.append(f"{built.spilled} bytes of registers spilled")
            if built.loop > MOST_INSTRUCTIONS and cell.dtype.itemsize == 2 and not cell.prefill:
                faults.append(f"{built.loop} instructions in the loop, at most {MOST_INSTRUCTIONS}")
    return built, faults


def cells() -> list[Cell]:
    """Return all shapes: trees in bfloat16, prompts with every page size, and a few of either in other dtypes."""
    found = [Cell(*shape) for shape in itertools.product(GROUPS, NODES, HEAD_DIMS)]
    found += [Cell(4, nodes, dim, window=32) for nodes, dim in itertools.product((1, 8), HEAD_DIMS)]
    for dim, page in itertools.product(HEAD_DIMS, (16, 64, 128)):
        found += [Cell(4, QUERY_BLOCK, dim, prefill=True, page_size=page), Cell(4, 32, dim, page_size=page)]
    for dim, dtype in itertools.product(HEAD_DIMS, (torch.float16, torch.float32)):
        found += [Cell(4, QUERY_BLOCK, dim, prefill=True, dtype=dtype), Cell(4, 32, dim, dtype=dtype)]
    return found


def main() -> None:
    """Check every cell, print a line for each, and end with status 1 if one has a fault."""
    if why := unavailable():
        sys.exit(why)
    wrong = 0
    print("group nodes head page dtype     kernel   shared registers spilled  loop barriers")
    for cell in cells():
        built, faults = check(cell)
        wrong += bool(faults)
        kind = "prefill" if cell.prefill else "decode" if cell.window is None else "frontier"
        dtype = str(cell.dtype).removeprefix("torch.")
        figures = "{:8} {:9} {:7} {:5} {:8}".format(*built[:5]) if built else " " * 41
        print(f"{cell.group:5} {cell.nodes:5} {cell.head_dim:4} {cell.page_size:4} {dtype:9} {kind:8}{figures}"
              f"  {'; '.join(faults)}".rstrip(), flush=True)  # fmt: skip
    for xblock in (1, 4, 8):
        for name, (cost, built) in weight_costs(xblock).items():
            print(f"XBLOCK {xblock}: {cost:5.1f} instructions a weight, {built.registers} registers, {built.spilled} "
                  f"bytes spilled, {built.barriers} barriers in the loop, {name}", flush=True)  # fmt: skip
    sys.exit(f"{wrong} shapes have faults" if wrong else 0)


if __name__ == "__main__":
    main()
