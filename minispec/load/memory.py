"""Where memory goes: estimated before anything is allocated, measured when the engine stands, and told if it runs out.

The one idea: the estimate is made by the constructors that make the engine, on PyTorch's meta device, whose tensors
have sizes and no memory. So nothing here knows what a layer, a page table or a sampling table is made of.

The static share of a GPU (--mem-fraction-static) holds the weights of target and draft and the KV pools of both. The
rest is for what a step needs besides: activations, CUDA graphs, sampling tables. SGLang keeps the draft's weights and
pool in that rest, which is why its default subtracts 2 GiB for a head and 6 GiB for a draft model. A CPU's memory has
other users, and a share of all of it says nothing of what is there. So on a CPU the weights come first, and the flag
bounds the pool by a share of what is free then.

Read next: `machine.py` for a CPU's memory, `build.py` for the caller.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minispec.attention import QUERY_BLOCK
from minispec.buffers import Sizes
from minispec.config import NUMBERS, Config, flag_name
from minispec.cpu import huge_pages
from minispec.cpu.onednn import Reordered
from minispec.drafter import Drafter
from minispec.engine import Engine
from minispec.kv import KVShape, PagedKV
from minispec.late import Late
from minispec.load.machine import host_memory
from minispec.model import Model
from minispec.sampling import SamplingState

logger = logging.getLogger("minispec")

MIB, GIB = 2**20, 2**30
GRAPH_TIERS = ((20_000, 8), (35_000, 24), (60_000, 32), (160_000, 256))  # SGLang's: below so many MiB, largest batch
MOST_GRAPHS = 512  # on a GPU with more memory
# What PyTorch's allocators, the CUDA runtime and cuBLAS say; errors of the compiler quote it.
SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True)
class Memory:
    """Bytes by what they are for; None where that is not known."""

    target_weights: int
    draft_weights: int
    target_kv_pool: int
    draft_kv_pool: int
    graphs_and_workspace: int | None
    sampling_tables: int
    plain_steps_taps: int  # what a drafter takes in later

    @property
    def total(self) -> int:
        """All that is known."""
        return sum(part for part in asdict(self).values() if part is not None)

    def __str__(self) -> str:
        parts = (f"{name.replace('_', ' ').replace('kv', 'KV')} {_shown(n)}" for name, n in asdict(self).items())
        return f"{', '.join(parts)}; together {_shown(self.total)}"


def _shown(count: int | None) -> str:
    """Return a number of bytes in the unit that suits it."""
    if count is None:
        return "not known"
    if 0 < count < MIB / 10:
        return f"{count / 1024:.1f} KiB"
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"


def size_of(thing: Any, seen: set[int] | None = None) -> int:
    """Return the bytes of all tensors in a tensor, module or container, every storage once.

    seen: storages that are counted already, to which those found are added.
    """
    seen = set() if seen is None else seen
    if isinstance(thing, Tensor):
        storage = thing.untyped_storage()
        if storage._cdata in seen:
            return 0
        seen.add(storage._cdata)
        return storage.nbytes()
    own = thing.nbytes if isinstance(thing, Reordered) else 0
    if isinstance(thing, nn.Module):
        thing = vars(thing)  # its parameters, buffers and submodules, and tensors that are neither
    if isinstance(thing, (list, tuple, Mapping)):
        return own + sum(size_of(part, seen) for part in (thing.values() if isinstance(thing, Mapping) else thing))
    return own


def measure(engine: Engine) -> Memory:
    """Return what an engine that stands takes, by its tensors; on CUDA graphs and workspace are what torch holds else.

    On a CPU nobody counts the workspace.
    """
    seen: set[int] = set()
    known = {
        "target_weights": size_of(engine.model, seen),
        "draft_weights": size_of((engine.drafter.network, engine.unsplit), seen),
        "draft_kv_pool": size_of(engine.kv.pools[1:], seen),
        "target_kv_pool": size_of(vars(engine.kv), seen),
        "sampling_tables": size_of(vars(engine.sampling), seen),
        "plain_steps_taps": size_of([engine.late.tokens, engine.late.features]),
    }
    rest = torch.cuda.memory_reserved(engine.device) - sum(known.values()) if engine.device.type == "cuda" else None
    return Memory(**known, graphs_and_workspace=rest)


# ---- how much is for what -------------------------------------------------------------------------------------------


def free_bytes(device: torch.device) -> tuple[int, int]:
    """Return (free, total) memory of the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading and quantizing no longer use
        return torch.cuda.mem_get_info(device)
    return host_memory()


def largest_graph(config: Config, total: int) -> int:
    """Return the largest batch that is captured on a GPU of `total` bytes; 0: none is."""
    if config.disable_cuda_graph:
        return 0
    return config.cuda_graph_max_bs or next((most for mib, most in GRAPH_TIERS if total < mib * MIB), MOST_GRAPHS)


def auto_fraction(total: int, chunk_size: int, largest: int) -> float:
    """Return the share of a GPU's `total` bytes for weights and pools, where no flag names it.

    What is kept back is SGLang's: 640 MiB, 1.5 MiB for each token of a prefill step, 2 for each request of the largest
    captured batch, and at least 10 GiB of a GPU with more than 60.
    """
    kept = 512 + 1.5 * max(chunk_size, 2048) + 2 * largest + 1024 / 8
    kept = max(kept, 10 * 1024) if total > 60 * GIB else kept
    return max(round(1 - kept * MIB / total, 3), 0.0)


def coarse(pages: int) -> int:
    """Round a number of pages down to five binary digits and zeros behind them, so by less than a sixteenth.

    The number of pages is part of every compiled graph's shape, and free memory is another number at every start: the
    exact quotient would find nothing in the compile cache.
    """
    shift = max(pages.bit_length() - 5, 0)
    return pages >> shift << shift


def make_kv(config: Config, network: Model, sizes: Sizes, pages: int) -> PagedKV:
    """Return the target's pool of `pages` pages; a drafter's is its sibling."""
    shape, weight = network.config, network.norm.weight
    return PagedKV(
        KVShape(shape.layers, shape.kv_heads, shape.head_dim),
        pages=pages,
        page_size=config.page_size,
        slots=sizes.max_running + 1,
        rows_per_slot=sizes.context_length + sizes.tree_rows,
        zeros=partial(huge_pages.zeros, dtype=weight.dtype, device=weight.device),
    )


class Budget:
    """The memory of one start: its estimate, the pages that fit, and the one message for when it is not enough.

    network and drafter may be outlines on the meta device; `device` is the one to run on.
    """

    def __init__(
        self, config: Config, device: torch.device, sizes: Sizes, network: Model, drafter: Drafter,
        unsplit: Model | None = None,
    ) -> None:  # fmt: skip
        """`unsplit`: what a drafter reads of a target that is spread over ranks (`Engine.unsplit`)."""
        self.unsplit = unsplit
        self.config, self.device, self.sizes, self.network, self.drafter = config, device, sizes, network, drafter
        self.free, self.total = free_bytes(device)  # at the start
        self.largest_graph = largest_graph(config, self.total) if device.type == "cuda" else 0
        self.fraction = config.mem_fraction_static
        if self.fraction is None and device.type == "cuda":
            self.fraction = auto_fraction(self.total, sizes.chunk_size, self.largest_graph)
        self.estimate = self._estimate()

    def _estimate(self) -> Memory:
        """Return what the engine will take, computed on the meta device."""
        seen: set[int] = set()
        weights, draft = size_of(self.network, seen), size_of((self.drafter.network, self.unsplit), seen)
        pages = max(self._fitting(self.free - weights - draft), 0) + 1
        # From pools of one page and of two: the host's list of free pages would be as long as a pool is large.
        (own, kv), (own_of_two, kv_of_two) = (self._pool_sizes(count) for count in (1, 2))
        pool, draft_pool = own + (pages - 1) * (own_of_two - own), kv + (pages - 1) * (kv_of_two - kv)
        sampling = SamplingState(self.sizes.max_running + 1, self.network.config.vocab_size, "meta")
        rest = int(self.total * (1 - self.fraction)) if self.device.type == "cuda" and self.fraction else None
        late = Late(self.drafter, self.sizes.max_running + 1, self.network.norm.weight)
        taps = size_of([late.tokens, late.features])
        return Memory(weights, draft, pool, draft_pool, rest, size_of(vars(sampling)), taps)

    def _pool_sizes(self, pages: int) -> tuple[int, int]:
        """Return the bytes of the target's pool of so many pages, tables included, and of the drafter's beside it."""
        kv = make_kv(self.config, self.network, self.sizes, pages)
        kv.sibling(self.drafter.kv_shape)
        seen: set[int] = set()
        draft = size_of(kv.pools[1:], seen)
        return size_of(vars(kv), seen), draft

    def check(self) -> None:
        """Raise ValueError where the estimate is more than the device has.

        On CUDA that is what is free, since nobody gives memory back; a CPU's free memory is a guess, its total is not.
        """
        needed = self.estimate.total - (self.estimate.graphs_and_workspace or 0)
        missing = needed - (self.free if self.device.type == "cuda" else self.total)
        if missing > 0:
            raise ValueError(self.message("before loading", f"{_shown(missing)} are missing"))

    def pages(self) -> int:
        """Return the pages of the KV pool, the trash page included; raises ValueError when not one tree fits.

        To be called when the weights are loaded. On a CPU: running requests times min(context, 4096) rows, or
        --max-total-tokens; without it at most a quarter of what is free then, and at most --mem-fraction-static of it,
        but never less than one tree needs. On CUDA: what is left of --mem-fraction-static of all memory beside the
        weights of target and draft. What follows from free memory is `coarse`. On CUDA the pool holds a multiple of 128
        rows: in another one the kernel for prompts would check at every key whether the pool ends.
        """
        free = free_bytes(self.device)[0]
        pages, size, needed = self._fitting(free), self.config.page_size, self._needed
        if pages < needed:
            missing = _shown(max(needed * self._page_bytes - max(free, 0), 0))
            short = f"the KV pool would hold {max(pages, 0) * size} tokens and needs {needed * size}"
            short += "" if self.device.type == "cuda" else f"; {missing} are missing"
            raise ValueError(self.message("sizing the KV pool", short, pool_is_short=True))
        wanted = self.config.max_total_tokens
        if wanted is not None and pages * size < wanted:
            logger.warning("--max-total-tokens %d does not fit; using %d", wanted, pages * size)
        whole = QUERY_BLOCK // math.gcd(QUERY_BLOCK, size) if self.device.type == "cuda" else 1
        return -(-(pages + 1) // whole) * whole

    @property
    def _page_bytes(self) -> int:
        """The bytes of a page, which holds rows of target and draft."""
        shape, dtype = self.network.config, self.network.norm.weight.dtype
        kinds = (KVShape(shape.layers, shape.kv_heads, shape.head_dim), self.drafter.kv_shape)
        return sum(kind.bytes(self.config.page_size, dtype) for kind in kinds)

    @property
    def _needed(self) -> int:
        """The pages that one request with one tree needs."""
        return -(-(self.sizes.tree_rows + 1) // self.config.page_size)

    def _fitting(self, free: int) -> int:
        """Return how many pages are made where `free` bytes are, the trash page not included."""
        config, sizes, size, page_bytes = self.config, self.sizes, self.config.page_size, self._page_bytes
        wanted, free = None if config.max_total_tokens is None else -(-config.max_total_tokens // size), max(free, 0)
        if self.device.type == "cuda":
            assert self.fraction is not None
            pages = coarse(max(int(free - self.total * (1 - self.fraction)), 0) // page_bytes)
            pages = pages if wanted is None else min(pages, wanted)
        else:
            rows = sizes.max_running * (min(sizes.context_length, 4096) + sizes.tree_rows)
            pages = min(-(-rows // size), coarse(free // 4 // page_bytes)) if wanted is None else wanted
            if self.fraction is not None:  # of what is free, since others' memory is no part of this server's share
                pages = min(pages, coarse(int(free * self.fraction) // page_bytes))
            if wanted is None or self.fraction is not None:
                pages = max(pages, min(self._needed, free // page_bytes))
        most = sizes.max_running * -(-(sizes.context_length + sizes.tree_rows) // size)  # more could never be used
        return min(pages, most) if wanted is None else pages

    # ---- when it is not enough ---------------------------------------------------------------------------------------

    @contextmanager
    def watch(self, stage: str) -> Iterator[None]:
        """Raise RuntimeError with the one message where memory runs out within; other errors pass."""
        try:
            yield
            return
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            said = " ".join(str(error).split())[:200]
        raise RuntimeError(self.message(stage, said or "no memory")) from None

    def message(self, stage: str, said: str = "", pool_is_short: bool = False) -> str:
        """Return the one message: when it happened, the numbers, and the flags to lower, typed ones first."""
        free, total = free_bytes(self.device)
        advice = sorted(self._flags(pool_is_short), key=lambda one: not one[2])
        flags = ", ".join(f"{flag} {value}" for flag, value, _ in advice)
        return (f"not enough memory on {self.device.type}, {stage}{f' ({said})' if said else ''}: estimated are "
                f"{self.estimate}; {_shown(free)} of {_shown(total)} are free; lower, in this order: "
                f"{flags or 'none'}")  # fmt: skip

    def _flags(self, pool_is_short: bool) -> Iterator[tuple[str, object, bool]]:
        """Yield the flags that can help, in the order of SGLang's documentation: name, value, whether it was given."""
        config, sizes, cuda = self.config, self.sizes, self.device.type == "cuda"
        raised, given = " (raise this one)" if pool_is_short else "", config.mem_fraction_static is not None
        if self.fraction is not None and (cuda or not pool_is_short):
            yield "--mem-fraction-static", f"{self.fraction:g}{raised}", given
        if config.max_total_tokens is not None:
            yield "--max-total-tokens", f"{config.max_total_tokens}{raised if cuda else ''}", True
        if self.largest_graph > 1:
            yield "--cuda-graph-max-bs", self.largest_graph, config.cuda_graph_max_bs is not None
        shape = ((sizes.nodes, 2), (self.drafter.topk, 1), (self.drafter.rounds, 1))
        for name, (now, least) in zip(reversed(NUMBERS), shape, strict=True):
            if now is not None and now > least:
                yield flag_name(name), now, getattr(config, name) is not None
        if sizes.max_running > 1:
            yield "--max-running-requests", sizes.max_running, config.max_running_requests is not None
        if config.quantization is None:
            yield "--quantization", f"none ({'fp8' if cuda else 'int8'} halves the weights)", False
        dtype = self.network.norm.weight.dtype
        if dtype.itemsize > 2:
            name = str(dtype).removeprefix("torch.")
            yield "--dtype", f"{name} (bfloat16 is half of it)", config.dtype != "auto"
        head = self.drafter.network
        if head is not None and getattr(head, "lm_head", head) is None:  # it drafts with the target's LM head
            yield "--speculative-token-map", "none (a map makes draft logits narrow)", False


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, whoever says it."""
    says_so = isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)
    return says_so or isinstance(error, (torch.OutOfMemoryError, MemoryError))


@contextmanager
def unsaid() -> Iterator[None]:
    """Log nothing from this thread: the load itself will log what an outline would."""
    here = threading.get_ident()
    others = lambda record: record.thread != here  # noqa: E731
    logger.addFilter(others)
    try:
        yield
    finally:
        logger.removeFilter(others)
