"""Compiled graphs called directly: the bits of torch.compile, into the real pages, for as long as the engine lives.

The tokens of the direct path are tested in test_engine.py and test_standalone.py, which let nothing through Dynamo
after warm-up. Here every call of a block and of a draft head is made three ways, as `benchmarks/bits.py` does with the
default model.
"""

from __future__ import annotations

import gc
import random
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from exactness import CPU, Oracle, build, request, run, tiny_model, truth_of
from test_engine import MODEL, eagle3
from torch import Tensor, nn

from benchmarks.bits import ThreeWays
from minispec.compiled import Key
from minispec.cpu.gather import GatherLayer
from minispec.engine import Engine
from minispec.load.build import compile_step
from minispec.scheduler import Scheduler
from minispec.tree import Shape

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")
PROMPT = [3, 14, 15, 9, 2, 6, 5, 35, 8, 9, 7, 9]


def engine_of(drafter: Any, **options: Any) -> Scheduler:
    """Return a scheduler over a compiled tiny model, in the shapes of test_engine.py, whose compiled code it reuses."""
    model = tiny_model()
    model.compile_blocks(partial(compile_step, device=CPU))
    return build(model, drafter, compiled=True, **{"running": 2, "pages": 14, "chunk": 100, **options})


@pytest.mark.slow
def test_every_shape_has_the_bits_of_torch_compile_and_eager_is_near() -> None:
    with torch.inference_mode():
        drafter = eagle3()
    scheduler = engine_of(drafter)
    model = scheduler.engine.model
    target = model.run_block = ThreeWays(model.run_block, attend_at=2)
    head = drafter.run_network = ThreeWays(drafter.run_network, attend_at=3)
    paths = drafter.take_in = ThreeWays(drafter.take_in, attend_at=0)
    scheduler.policy.forced = random.Random(1).choice
    for number in range(2):  # one after the other, so that batches of two need not be compiled
        run(scheduler, [request(f"{number}", [*PROMPT, number], max_new_tokens=14)])
    seen = [{(shape.batch, shape.blocks * shape.width) for shape in ways.seen} for ways in (target, head, paths)]
    assert seen[0] == {(1, 128), (1, 6), (1, 3), (1, 1)}, "a prompt, both trees and a plain step"
    assert seen[1] == {(1, 2)}, "a frontier"
    assert seen[2] == {(1, 128), (1, drafter.depth + 1), (1, 3)}, "a prompt, both paths"


def keys_of(engine: Engine) -> list[Tensor]:
    """Return the tensors through which the target's layers reach their keys."""
    attends = [buffers.attend for buffers in (*engine.prefills.values(), *engine.decodes.values())]
    with torch.inference_mode():  # as steps have it, since layer 0 writes what a step reads
        return [attend.layer(index).keys for attend in attends for index in range(engine.model.config.layers)]


def test_engines_do_not_mix_and_their_memory_goes_with_them() -> None:
    torch._dynamo.reset()  # so that the first engine's tensors are those that the graphs are traced with
    schedulers = [engine_of(Oracle(truth_of(MODEL), nodes=6)) for _ in range(2)]
    models = [scheduler.engine.model for scheduler in schedulers]
    texts = []
    for scheduler in schedulers * 2:
        asked = request("r", PROMPT, max_new_tokens=9)
        run(scheduler, [asked])
        texts.append(asked.output_ids)
    assert texts[0] == texts[1] == texts[2] == texts[3]
    calls = [model.run_block.calls for model in models]
    assert len(calls[0]) == len(calls[1]) and not set(calls[0]) & set(calls[1])
    pages = [weakref.ref(keys) for scheduler in schedulers for keys in keys_of(scheduler.engine)]
    del schedulers, scheduler
    gc.collect()
    assert not any(keys() is not None for keys in pages) and not any(calls), "the models, which live on, hold no pages"
    weights = [weakref.ref(weight) for model in models for weight in model.parameters()]
    del models, calls
    gc.collect()
    assert not any(weight() is not None for weight in weights)


def test_other_shapes_and_modules_are_refused() -> None:
    scheduler = engine_of(Oracle(truth_of(MODEL), nodes=6))
    engine = scheduler.engine
    run(scheduler, [request("r", PROMPT, max_new_tokens=9)])
    model = engine.model
    with torch.inference_mode():
        attend = engine.decodes[1, Shape(6, True)].attend.layer(0)
        for nodes, layer, message in ((5, 0, "expected size 6==5|expected size 5==6"), (6, 1, "another module")):
            x, rope = torch.zeros(1, nodes, 72), model.rope(torch.zeros(1, nodes, dtype=torch.int64))
            with pytest.raises(AssertionError, match=message):
                model.run_block(model.layers[layer], x, rope, attend)


def test_an_argument_that_reaches_the_graph_as_another_tensor_is_noticed() -> None:
    def step(module: nn.Module, x: Tensor, attend: GatherLayer) -> Tensor:
        return x + attend.keys

    class Attend(Key):
        """A context whose keys are the argument's own memory."""

        def __init__(self, keys: Tensor) -> None:
            self.keys = keys

    direct, x = compile_step(step, CPU), torch.ones(4)
    with torch.inference_mode(), pytest.raises(AssertionError, match="reaches the graph as another tensor"):
        direct(nn.Identity(), x, Attend(x.view(4)))


def test_what_would_stay_as_it_was_at_the_first_call_is_refused() -> None:
    class Attend(Key):
        """A key."""

    def step(module: nn.Module, x: Any, attend: Attend) -> Tensor:
        return (x[0][0] if isinstance(x, tuple) else x) + torch.zeros(4)

    for given, said in ((((torch.ones(4),),), "a tuple holds tensors only"), (3, "a number would stay")):
        with torch.inference_mode(), pytest.raises(AssertionError, match=said):
            compile_step(step, CPU)(nn.Identity(), given, Attend())
