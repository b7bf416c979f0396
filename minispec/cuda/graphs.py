"""CUDA graphs: the kernels of a step, recorded once and then launched together.

A step of EAGLE-3 is some hundreds of launches, and for a small batch the host takes longer to make them than the device
to run them. The one idea: a step is a function of tensors that stay where they are (`buffers.py`), so the list of its
kernels with their arguments never changes. It is recorded for each shape, and from then on one launch does it all.

What a recording may not contain: a look at a value, a tensor made at the first call that is to outlive it, a number
from Python that changes. `tests/test_capture.py` replays steps on a CPU in the way that a graph would. And as long as a
graph lives, every tensor that it reads must stay the same object: a graph does not notice that a weight or a table was
replaced.

Read next: `engine.py`, whose steps are recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch

from minispec.buffers import DecodeBuffers, PrefillBuffers
from minispec.engine import Engine
from minispec.sampling import Needs
from minispec.tree import Shape

logger = logging.getLogger("minispec")


class CaptureFailed(RuntimeError):
    """A step cannot be recorded; the message is the first error."""


class Recorder:
    """Makes CUDA graphs that share one pool of memory for what they compute in between; they never run side by side."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def record(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Return the graph of a step. It is run twice before, so that nothing is tuned, loaded or made while recording.

        Other threads may use the device meanwhile, which is why only this thread's unsafe calls are errors. Raises
        CaptureFailed if the recording fails, not if one of the two runs does.
        """
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):  # a recording that fails leaves its stream the current one
            step()
            step()
            current.wait_stream(self.stream)
            try:
                with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                    step()
            except Exception as error:
                self.pool = torch.cuda.graph_pool_handle()  # the allocator takes the old one for still recorded to
                first = error.__context__ or error  # the end of a failed recording raises an error of its own
                raise CaptureFailed(f"{type(first).__name__}: {first}") from error
        return graph


def capture(engine: Engine, batches: Sequence[int], progress: Callable[[str], None]) -> None:
    """Capture the decode steps of these batch sizes and the smallest prefill step, on CUDA and after warm-up.

    Each is captured for the needs that `Engine.needs_of` names. The largest batches and then the largest trees come
    first, so that the smaller ones fit into the memory that those leave to the pool, and steps whose trees are all the
    host's come last of a batch size.
    A step that cannot be captured, on this or on another rank, runs uncaptured; a warning says so.
    """
    engine.link.tell("capture", batches)
    recorder = Recorder(engine.device)
    decodes = [engine.decodes[key] for key in sorted(engine.decodes, key=_turn) if key[0] in batches]
    steps: list[DecodeBuffers | PrefillBuffers] = [*decodes, engine.prefills[engine.sizes.prefill_sizes[0]]]
    for done, step in enumerate(steps, start=1):
        progress(f"capture {done}/{len(steps)}: {step.name}")
        engine.graphs |= {(step, needs): graph for needs, graph in _record(engine, recorder, step).items()}


def _record(
    engine: Engine, recorder: Recorder, step: DecodeBuffers | PrefillBuffers
) -> dict[Needs, torch.cuda.CUDAGraph]:
    """Return the graphs of a step; none if a recording fails."""
    graphs: dict[Needs, torch.cuda.CUDAGraph] = {}
    for needs in engine.needs_of(getattr(step, "batch", 1)):
        why = None
        try:
            graphs[needs] = recorder.record(partial(engine.run_here, step, needs, None, None))
        except CaptureFailed as error:
            if engine.is_lost(error):
                raise
            why = str(error)
        if not engine.link.all_have(why is None):
            logger.warning("%s runs uncaptured, since its capture failed: %s", step.name, why or "on another rank")
            return {}
    return graphs


def _turn(key: tuple[int, Shape]) -> tuple[int, bool, int]:
    """Return the key that puts decode steps in the order that `capture` describes."""
    batch, shape = key
    return -batch, shape.of_host, shape.nodes if shape.of_host else -shape.nodes
