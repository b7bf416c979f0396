"""The CUDA path on a machine without a GPU: nothing in a step makes the host wait, and every kernel can be built.

Two means. A dispatch mode sees every operation of a step and raises where the host would look at a value, on real CPU
tensors and, once more, on fake ones that say they are on CUDA; there copies between the devices count as well, and the
branches for CUDA are taken. And `benchmarks/lowering.py` lets torch.compile and Triton compile a block for an H200.
Whether a kernel computes the right thing is what the tests marked `cuda` ask, where there is a GPU.

Pretending changes PyTorch for good, so it is done in a process of its own, which all tests here share.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections import Counter as Counted
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import conformance
import exactness
import fake_gpu
import kernels
import lowering
import pytest
import torch
from conftest import slow_unless
from exactness import CPU, MIXTURE, WINDOWED, run
from lowered import parse
from lowering import Cell
from test_attention import LAYERS, World, check, eager, tree_scene
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import minispec.attention as attention_module
import minispec.experts as experts_module
import minispec.model as model_module
from minispec.asked.scores import Scores
from minispec.attention import QUERY_BLOCK, FlexLayer, Plan, most_nodes
from minispec.config import Config
from minispec.cpu.gather import PagedGather
from minispec.cuda.fp8 import Fp8Linear, use_fp8
from minispec.engine import Engine, Pending
from minispec.experts import Experts
from minispec.kv import KVShape, PagedKV
from minispec.load.drafters import make_drafter
from minispec.load.warm_up import step_seconds
from minispec.request import Logprobs, Request
from minispec.scheduler import Scheduler
from minispec.tree import PLAIN

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def pretender() -> Iterator[ProcessPoolExecutor]:
    """The process that pretends to have a GPU."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        yield executor


# ---- the host never waits ------------------------------------------------------------------------------------------

LOOKS = {  # operations whose result the host must know, a size included
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim,
    aten.unique_consecutive, aten.equal,
}  # fmt: skip


class HostWaits(BaseException):  # no handler of the engine may take it
    """A step made the host wait for the device."""


class NoWaiting(TorchDispatchMode):
    """Raises HostWaits where an operation makes the host look at a value, or copies between devices and waits."""

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        """Look at one operation, then run it."""
        kwargs = kwargs or {}
        if func.namespace == "aten":  # in inference mode `item` and `to` come whole
            with self:
                if (parts := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return parts
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.overloadpacket in LOOKS:
            raise HostWaits(f"{func} looks at a value")
        if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
            if any(index is not None and index.dtype == torch.bool for index in args[1]):
                raise HostWaits(f"{func} with a mask: its size is a value")
        target = torch.device(kwargs.get("device") or (args[0].device if func.overloadpacket is aten.copy_ else "meta"))
        if func.overloadpacket in (aten.copy_, aten._to_copy) and target.type != "meta":
            source = tensors[-1]
            # From pinned memory nobody waits, and what `to` allocates on the host without blocking is pinned.
            pinned = getattr(source, "pinned", False) or source.device.type == "cuda"
            unblocked = kwargs.get("non_blocking", False) or (func.overloadpacket is aten.copy_ and True in args[2:])
            if source.device.type != target.type and not (unblocked and pinned):
                raise HostWaits(f"{func} from {source.device} to {target}, and waits for it")
        return func(*args, **kwargs)


SUBJECTS = ("none", "ngram", "eagle-chain", "eagle-tree", "eagle3-tree", "mtp-tree", "standalone-chain",
            "standalone-tree")  # fmt: skip
EVERYTHING = {
    "temperature": 0.8, "top_k": 7, "top_p": 0.9, "min_p": 0.01, "frequency_penalty": 0.1, "presence_penalty": 0.1,
    "repetition_penalty": 1.1, "logit_bias": {3: 1.0}, "min_new_tokens": 3,
}  # fmt: skip
LAWS: dict[str, tuple[dict, tuple[float, float] | None]] = {
    "greedy": ({}, None), "sampled": (EVERYTHING, None), "lossy": (EVERYTHING, (0.9, 0.9)),
    "scored": ({"logprobs": Logprobs(top=2, ids=(1,), start=0)}, None),
}  # fmt: skip


def serve(scheduler: Scheduler, requests: Sequence[Request]) -> int:
    """Serve the requests under the check; returns the number of decode steps."""
    with torch.inference_mode(), NoWaiting():
        run(scheduler, requests)
    return scheduler.metrics.shapes.total()


def some_requests(name: str, law: str) -> list[Request]:
    """Return two requests; the prompt of one takes two chunks."""
    return conformance.SUBJECTS[name].requests(max_new_tokens=3, **LAWS[law][0])[:2]


# What a law needs is in the engine, whoever drafts; two other subjects draft with noise in ways of their own.
STEPS = [(name, law) for name in SUBJECTS for law in LAWS if law == "greedy" or name == "eagle3-tree"]


@pytest.mark.parametrize(("name", "law"), [*STEPS, ("none", "sampled"), ("standalone-tree", "sampled")])
def test_no_step_looks_at_a_value(name: str, law: str) -> None:
    # The looks that are free on a CPU, at how far requests reach and who still walks down a tree, are switched off.
    scheduler = conformance.SUBJECTS[name].build(running=2, thresholds=LAWS[law][1], host_looks=False)
    assert serve(scheduler, some_requests(name, law)) > 1


def tensor_without_pinning(values: object, pin_memory: bool = False, **options: object) -> Tensor:
    """Stand in for torch.tensor, remembering what would be pinned."""
    made = MAKE_TENSOR(values, **options)
    made = torch.empty(made.shape, dtype=made.dtype, device=made.device)  # one that fake mode holds no values of
    made.pinned = pin_memory
    return made


class Rows(list):
    """Rows of numbers that answer as a tensor does."""

    def __getitem__(self, which: slice) -> Rows:
        """Return some of them."""
        return Rows(super().__getitem__(which))

    def tolist(self) -> list:
        """Return them as they are."""
        return list(self)


MAKE_TENSOR = torch.tensor


def serve_on_fake_cuda(
    name: str, law: str, fault: Callable[[ExitStack], None] | None = None, switches: Mapping[str, object] = {}
) -> int:
    """Serve requests whose tensors are fake and on CUDA; every token is the same, since none is computed.

    switches: fields of the model's config.
    """
    subject = conformance.SUBJECTS[name]
    model = exactness.tiny_model(**switches)
    with torch.inference_mode():
        drafter = subject.drafter(model)
    fake_gpu.allow_fake_cuda()
    collect = Engine.collect

    def collected(engine: Engine, pending: Pending) -> list[list[int]]:
        """Emit a token a row, but none for a chunk that is not its request's last."""
        counts = [int(chunk.last) for chunk in pending.chunks] or [1] * len(pending.slots)
        width = pending.most
        told = Rows([[5] * width + [count, 0] for count in counts])
        return collect(engine, dataclasses.replace(pending, outputs=told, ready=None))

    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        stack.enter_context(mock.patch.object(torch, "tensor", tensor_without_pinning))
        stack.enter_context(mock.patch.object(torch.cuda, "Event", mock.Mock))
        stack.enter_context(mock.patch.object(Engine, "collect", collected))
        stack.enter_context(mock.patch.object(Scores, "read", lambda scores, most: {}))
        stack.enter_context(mock.patch.object(exactness, "CPU", CUDA))
        fake_gpu.fake_module(model, torch.float32)
        if (network := getattr(drafter, "network", None)) is not None:
            fake_gpu.fake_module(network, torch.float32)
        for key, value in list(vars(drafter).items()):
            if isinstance(value, Tensor):
                setattr(drafter, key, torch.empty(value.shape, dtype=value.dtype, device=CUDA))
        if fault is not None:
            fault(stack)
        scheduler = exactness.build(model, drafter, running=2, thresholds=LAWS[law][1])
        assert scheduler.engine.lens.is_cuda
        return serve(scheduler, some_requests(name, law))


needs_fake_cuda = pytest.mark.skipif(bool(why := fake_gpu.no_fake_cuda()), reason=str(why))


@needs_fake_cuda
@pytest.mark.parametrize(
    ("name", "law", "switches"),
    slow_unless(
        [
            *((name, "greedy", {}) for name in SUBJECTS),
            *((name, "sampled", {}) for name in ("none", "eagle3-tree", "standalone-tree")),
            ("eagle3-tree", "lossy", {}),
            ("none", "scored", {}),
            ("eagle3-tree", "greedy", MIXTURE),
            ("standalone-tree", "greedy", WINDOWED),
        ],
        lambda name, law, switches: name in ("none", "eagle3-tree") or switches,
    ),
)
def test_no_step_waits_on_cuda(
    name: str, law: str, switches: Mapping[str, object], pretender: ProcessPoolExecutor
) -> None:
    assert pretender.submit(serve_on_fake_cuda, name, law, None, switches).result() > 1


def padding_by_a_number(stack: ExitStack) -> None:
    """The length of slot 0 is set from a number on the host."""

    def clear(engine: Engine) -> None:
        engine.lens[0] = 0

    stack.enter_context(mock.patch.object(Engine, "_clear_padding", clear))


def length_by_a_number(stack: ExitStack) -> None:
    """A slot that is given back gets its length from a number on the host."""
    release = Engine.release

    def changed(engine: Engine, slot: int) -> None:
        release(engine, slot)
        engine.lens[slot] = 0

    stack.enter_context(mock.patch.object(Engine, "release", changed))


def pageable_upload(stack: ExitStack) -> None:
    """Sampling parameters come from memory that is not pinned."""

    def upload(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    stack.enter_context(mock.patch("minispec.sampling.upload", upload))


def rows_by_a_mask(stack: ExitStack) -> None:
    """Rows are looked up for the live positions only."""
    rows = PagedKV.rows

    def changed(kv: PagedKV, slots: Tensor, positions: Tensor, live: Tensor) -> Tensor:
        positions[live]
        return rows(kv, slots, positions, live)

    stack.enter_context(mock.patch.object(PagedKV, "rows", changed))


def longest_block_by_a_look(stack: ExitStack) -> None:
    """PagedGather asks the device how far the longest request goes."""

    def reach(attend: PagedGather) -> int:
        return int(attend.plan.ends.max())

    stack.enter_context(mock.patch.object(PagedGather, "_reach", reach))


def experts_by_a_look(stack: ExitStack) -> None:
    """Every expert multiplies its own tokens, so the host asks how many those are."""

    def looking(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return experts_module._chosen_experts(x, chosen, weights, gate_up, down)

    stack.enter_context(mock.patch.object(experts_module, "_gathered", looking))


FAULTS = (
    padding_by_a_number, length_by_a_number, pageable_upload, rows_by_a_mask, longest_block_by_a_look,
    experts_by_a_look,
)  # fmt: skip


@needs_fake_cuda
@pytest.mark.parametrize("fault", FAULTS)
def test_what_waits_on_cuda_is_seen(fault: Callable[[ExitStack], None], pretender: ProcessPoolExecutor) -> None:
    switches = MIXTURE if fault is experts_by_a_look else {}
    with pytest.raises(HostWaits):
        pretender.submit(serve_on_fake_cuda, "none", "greedy", fault, switches).result()


def test_a_look_is_seen_on_the_cpu() -> None:
    with ExitStack() as stack:
        rows_by_a_mask(stack)
        with pytest.raises(HostWaits, match="mask"):
            scheduler = conformance.SUBJECTS["none"].build(running=2, host_looks=False)
            serve(scheduler, some_requests("none", "greedy"))
    with NoWaiting():
        for look in (lambda t: t.item(), lambda t: t.nonzero(), lambda t: t.unique(), lambda t: bool(t.any())):
            with pytest.raises(HostWaits):
                look(torch.ones(1))


def test_times_are_read_after_the_step_is_done() -> None:
    engine = conformance.SUBJECTS["none"].build(running=1).engine
    pending, waited = engine.pending, []

    def under_way(*args: object, **what: object) -> Pending:
        """Return a step whose count is filled in when it is waited for."""
        made = pending(*args, **what)
        ready = SimpleNamespace(synchronize=lambda: waited.append(True))
        late = SimpleNamespace(tolist=lambda: [] if waited else pytest.fail("read before the step was done"))
        outputs = mock.MagicMock()
        outputs.__getitem__.return_value = late
        return dataclasses.replace(made, ready=ready, outputs=outputs)

    with torch.inference_mode(), mock.patch.object(engine, "pending", under_way):
        assert step_seconds(engine, [1], PLAIN, 8) > 0
    assert waited == [True]


# ---- pages, rows and trees -----------------------------------------------------------------------------------------


class Counter(TorchDispatchMode):
    """Counts the operations that copy rows, with the dimensions of what they copy into or from."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        """Note one operation, then run it."""
        if func.overloadpacket in (aten.index_select, aten.index_copy_, aten.index_copy, torch.ops.minispec.move_rows):
            self.copies.append((func.overloadpacket.__name__, args[0].dim()))
        return func(*args, **(kwargs or {}))


def test_an_accepted_path_is_copied_as_rows_of_one_table() -> None:
    kv = World(3).kv
    one = torch.ones(1, dtype=torch.int64)
    with Counter() as counter:
        kv.compact(one, one, torch.tensor([[0, 2]]), 2 * one)
    assert counter.copies == [("move_rows", 2)], "one gather and one scatter, of rows"


def test_the_operator_for_cuda_writes_what_index_copy_writes() -> None:
    torch.manual_seed(0)
    kv = World(3, slots=2).kv
    kv.pool.normal_()
    before, rows, (k, v) = kv.pool.clone(), torch.randperm(kv.pool.shape[2])[:6], torch.randn(2, 2, 2, 3, 16)
    attention_module.write_rows(*kv.layer(1), rows, k, v)
    expected = kv.pool.clone()
    kv.pool.copy_(before)
    copies, index_copy = [], torch.Tensor.index_copy_

    def counted(pool: torch.Tensor, *given: object) -> torch.Tensor:
        copies.append(pool.shape)
        return index_copy(pool, *given)

    with mock.patch.object(torch.Tensor, "index_copy_", counted):
        attention_module.write_at_once(*kv.layer(1), rows, k, v)
    assert torch.equal(kv.pool, expected) and not torch.equal(before, expected)
    assert len(copies) == 1, "keys and values in one copy"
    keys, values = kv.layer(1)
    with pytest.raises(AssertionError, match="right behind"):
        attention_module.write_at_once(keys.clone(), values, rows, k, v)


@pytest.mark.parametrize("nodes", [1, 8, 33])
def test_gather_reads_enough_pages_without_a_look(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedGather, "_reach", lambda attend: attend._mapped_pages() * attend.kv.page_size)
    world = World(3, seed=nodes)
    plan = Plan(world.kv, 3, 1, nodes)
    check(world, plan, PagedGather(world.kv, plan, LAYERS), eager, tree_scene(world, nodes, 3))


def pages_read_on_fake_cuda(mapped: int, window: int) -> int:
    """Return how many rows PagedGather reads where the longest slot has `mapped` pages of 16 rows."""
    fake_gpu.allow_fake_cuda()
    with FakeTensorMode(), mock.patch.object(torch, "tensor", tensor_without_pinning):
        like = torch.empty(0, device=CUDA)
        kv = PagedKV(KVShape(1, 1, 8), pages=200, page_size=16, slots=3, rows_per_slot=2048, zeros=like.new_zeros)
        kv.map(1, 0, kv.allocate(1))
        kv.map(2, 0, kv.allocate(mapped - 1))
        kv.map(2, mapped - 1, kv.allocate(1))
        attend = PagedGather(kv, Plan(kv, 2, 1, window), 1)
        before = attend._strips()[0].rows.shape[1]
        kv.unmap(2)
        return before, attend._strips()[0].rows.shape[1]


@needs_fake_cuda
def test_gather_reads_the_longest_request_s_pages_on_cuda(pretender: ProcessPoolExecutor) -> None:
    assert pretender.submit(pages_read_on_fake_cuda, 20, 8).result() == (20 * 16, 64)
    assert pretender.submit(pages_read_on_fake_cuda, 2, 100).result() == (128, 128), "padding sees itself"


@pytest.mark.parametrize(
    ("batch", "nodes", "splits"),
    [(1, 1, 32), (1, 8, 32), (1, 32, 16), (1, 127, 4), (8, 32, 2), (48, 1, 1), (48, 32, 1)],
)
def test_the_decode_kernel_has_two_thread_blocks_a_multiprocessor(batch: int, nodes: int, splits: int) -> None:
    kv = World(4).kv
    layer = FlexLayer(*kv.layer(0), kv.logical, Plan(kv, batch, 1, nodes))
    with FakeTensorMode():
        q = torch.empty(batch, 32, nodes, 128, device=CUDA)
    assert layer._kernel_options(q, 8)["SPLIT_KV"] == splits


def test_trees_end_at_127_nodes_on_cuda() -> None:
    assert most_nodes(CUDA) == 127 and most_nodes(CPU) == 128

    def nodes(count: int, device: torch.device) -> int:
        """Return the nodes of an n-gram drafter for a target on a device."""
        config = Config(model_path="tiny", speculative_algorithm="NGRAM", speculative_num_draft_tokens=count)
        weight = SimpleNamespace(weight=SimpleNamespace(device=device, is_meta=False))
        target = SimpleNamespace(embed_tokens=weight, config=SimpleNamespace(vocab_size=exactness.VOCAB))
        return make_drafter(config, target, Path("tiny"), None).nodes

    assert nodes(127, CUDA) == 127 and nodes(128, CPU) == 128
    with pytest.raises(ValueError, match="--speculative-num-draft-tokens: .*128.* on cuda .*127"):
        nodes(128, CUDA)


# ---- every kernel can be built -------------------------------------------------------------------------------------

needs_triton = pytest.mark.skipif(bool(why := fake_gpu.unavailable()), reason=str(why))
CELLS = (
    Cell(3, 6, 64), Cell(3, 64, 64), Cell(4, 1, 128), Cell(4, 64, 128), Cell(7, 19, 128), Cell(1, 64, 128),
    Cell(8, 127, 128), Cell(4, QUERY_BLOCK, 128, True), Cell(4, 8, 128, window=32),
)  # fmt: skip


def test_what_a_region_launches_counts_at_each_of_its_calls() -> None:
    code = """
def repeated_subgraph0(args):
    triton_poi_a.run(args[0])
    extern_kernels.mm(args[0], args[1])

class Runner:
    def call(self, args):
        triton_red_b.run(args[0])
        repeated_subgraph0([args[0]])
        (buf0,) = repeated_subgraph0([args[1]])
"""
    assert Counted(parse(code).launches) == {"triton_poi_a.run": 2, "extern_kernels.mm": 2, "triton_red_b.run": 1}


@needs_triton
@pytest.mark.parametrize("cell", slow_unless([(cell,) for cell in CELLS], lambda cell: cell == CELLS[0]),
                         ids=lambda cell: "-".join(map(str, (*cell[:3], cell.window or cell.prefill))))  # fmt: skip
def test_block_compiles_for_an_h200(cell: Cell, pretender: ProcessPoolExecutor) -> None:
    built, faults = pretender.submit(lowering.check, cell).result()
    assert not faults
    assert built is not None and built.shared > 0 and built.registers > 16


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "eagle3"])
def test_a_step_of_llama_launches_no_more_kernels_than_its_budget(drafts: bool, pretender: ProcessPoolExecutor) -> None:
    found = pretender.submit(kernels.counted, drafts).result()
    assert min(launched["Block.forward"] for launched in found.values()) >= 10 * 32, "ten kernels a layer and more"
    assert not kernels.over_budget(drafts, found)
    too_many = {name: launched + Counted({"more": 500}) for name, launched in found.items()}
    assert len(kernels.over_budget(drafts, too_many)) == 1
    assert kernels.over_budget(drafts, {**found, "sampled": too_many["sampled"]}) != []


def within_the_loop(stack: ExitStack) -> None:
    """What precedes a product of one row is computed in its loop."""
    stack.enter_context(mock.patch.object(model_module, "stored", lambda x: x))


def costs_with(fault: Callable[[ExitStack], None] | None) -> dict[str, float]:
    """Return the instructions a weight of a layer's products of one row, with a fault put back or without."""
    with ExitStack() as stack:
        if fault is not None:
            fault(stack)
        return {name: cost for name, (cost, _) in lowering.weight_costs(xblock=1).items()}


@pytest.mark.slow
@needs_triton
def test_a_product_of_one_row_takes_few_instructions_a_weight(pretender: ProcessPoolExecutor) -> None:
    costs = pretender.submit(costs_with, None).result()
    assert len(costs) == 4 and max(costs.values()) < lowering.MOST_A_WEIGHT, costs
    worse = pretender.submit(costs_with, within_the_loop).result()
    assert min(worse.values()) > lowering.MOST_A_WEIGHT, worse


def fp8_block() -> tuple[list[str], int]:
    """Return the faults of a block with fp8 layers, and how many products of fp8 rows it calls."""
    make, cell = lowering.make_layer, Cell(4, 8, 64)

    def made(cell: Cell) -> tuple:
        """Return a cell's block with fp8 layers, and the other arguments."""
        layer = make(cell)
        use_fp8(layer[0])
        return layer

    with mock.patch.object(lowering, "make_layer", made):
        graph = lowering.lower(cell)
    return lowering.faults_of(cell, graph), graph.launches.count("extern_kernels._scaled_mm")


@pytest.mark.slow
@needs_triton
def test_a_block_with_fp8_layers_is_one_graph_for_an_h200(pretender: ProcessPoolExecutor) -> None:
    assert pretender.submit(fp8_block).result() == ([], 4)


def mixture_block(cell: Cell) -> tuple[list[str], int, int]:
    """Return the faults of a block with experts, how many grouped products it calls, and how many other ones."""
    make = lowering.make_layer

    def made(cell: Cell) -> tuple:
        """Return a cell's block with experts in place of its MLP, and the other arguments."""
        block, x, rope, attend = make(cell)
        config = SimpleNamespace(hidden_size=x.shape[-1], experts=16, expert_size=96, experts_per_token=4,
                                 norm_topk_prob=True)  # fmt: skip
        with torch.device("meta"):
            block.router, block.experts = nn.Linear(x.shape[-1], 16, bias=False), Experts(config)
        block.sparse = True
        fake_gpu.fake_module(block, cell.dtype)
        return block.eval(), x, rope, attend

    with mock.patch.object(lowering, "make_layer", made):
        graph = lowering.lower(cell)
    others = sum(name in ("extern_kernels.bmm", "extern_kernels.baddbmm") for name in graph.launches)
    return lowering.faults_of(cell, graph), graph.launches.count("extern_kernels._grouped_mm"), others


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(
    ("cell", "grouped", "others"),
    [
        (Cell(4, 8, 64), 2, 0),
        (Cell(4, QUERY_BLOCK, 64, prefill=True), 2, 0),
        (Cell(4, 4, 64, dtype=torch.float16), 0, 2),  # as many pairs as experts: gathered, one row a product of two
        (Cell(4, QUERY_BLOCK, 64, prefill=True, dtype=torch.float16), 0, 8),  # four pieces, by all experts
    ],
)
def test_a_block_with_experts_is_one_graph_for_an_h200(
    cell: Cell, grouped: int, others: int, pretender: ProcessPoolExecutor
) -> None:
    assert pretender.submit(mixture_block, cell).result() == ([], grouped, others)


def fp8_rows(size: int, rows: int, by_columns: bool) -> list[int]:
    """Return the shape of a product with fp8 rows on a fake GPU, which asks for what a real one asks for."""
    with fake_gpu.pretend_h200(), FakeTensorMode(), torch.inference_mode():
        linear = Fp8Linear(nn.Linear(size, 32, bias=False, dtype=torch.bfloat16, device=CUDA))
        x = torch.empty(size, rows, dtype=torch.bfloat16, device=CUDA).t()
        return list(linear(x if by_columns else x.contiguous()).shape)


@needs_triton
def test_fp8_products_take_any_number_of_rows_on_cuda(pretender: ProcessPoolExecutor) -> None:
    for rows in (1, 2, 17, 130):
        assert pretender.submit(fp8_rows, 64, rows, rows in (1, 17)).result() == [rows, 32]
    with pytest.raises(RuntimeError, match="divisible by 16"):
        pretender.submit(fp8_rows, 72, 3, False).result()


def no_tiles(stack: ExitStack) -> None:
    """The decode kernel is left to choose its tile, all rows in one."""
    options = lambda layer, q, kv_heads: {"BACKEND": "TRITON_DECODE"}  # noqa: E731
    stack.enter_context(mock.patch.object(FlexLayer, "_kernel_options", options))


def folded_to_a_query_block(stack: ExitStack) -> None:
    """Rows are folded whatever the group, up to 128, which the decode kernel does not take."""
    folds = lambda layer, q, group: layer.plan.blocks == 1 and group * q.shape[2] <= QUERY_BLOCK  # noqa: E731
    stack.enter_context(mock.patch.object(FlexLayer, "_folds", folds))


def two_warps(stack: ExitStack) -> None:
    """A tile of 64 by 64 is computed by two warps, as the decode kernel's own choice is."""
    options = {"BACKEND": "TRITON_DECODE", "BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 2}
    stack.enter_context(mock.patch.object(FlexLayer, "_kernel_options", lambda layer, q, kv_heads: options))


def rows_written_by_a_kernel(stack: ExitStack) -> None:
    """New rows are written by a kernel that torch.compile makes, and would tune."""

    def write(keys: Tensor, values: Tensor, rows: Tensor, k: Tensor, v: Tensor) -> None:
        for part, new in ((keys, k), (values, v)):
            part.index_copy_(2, rows, new.transpose(0, 1).reshape(1, new.shape[1], -1, new.shape[3]))

    stack.enter_context(mock.patch.object(attention_module, "write_rows", write))


def pool_copied(stack: ExitStack) -> None:
    """A graph copies the keys before it reads them."""
    call = FlexLayer.__call__

    def changed(layer: FlexLayer, *qkv: Tensor) -> Tensor:
        return call(FlexLayer(layer.keys.clone(), layer.values, layer.logical, layer.plan), *qkv)

    stack.enter_context(mock.patch.object(FlexLayer, "__call__", changed))


def attention_tuned(stack: ExitStack) -> None:
    """Everything is autotuned, attention too."""
    stack.enter_context(torch._inductor.config.patch(max_autotune=True))


def faults_with(fault: Callable[[ExitStack], None], cell: Cell, compiled: bool) -> list[str]:
    """Return what the check says of a cell with a fault put back."""
    with ExitStack() as stack:
        fault(stack)
        return lowering.check(cell, compiled)[1]


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (no_tiles, "NoValidChoicesError"),
        (folded_to_a_query_block, "not in the decode kernel"),
        (two_warps, "registers spilled"),
        (rows_written_by_a_kernel, "a tuned kernel works on the pool"),
        (pool_copied, "buffers of the pool's size"),
        (attention_tuned, "attention kernels to choose from"),
    ],
)
def test_a_block_that_runs_badly_is_seen(
    fault: Callable[[ExitStack], None], said: str, pretender: ProcessPoolExecutor
) -> None:
    cell = Cell(4, 64 if fault is no_tiles else 32, 128)
    faults = pretender.submit(faults_with, fault, cell, fault is two_warps).result()
    assert any(said in line for line in faults), faults
