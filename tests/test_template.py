"""Products by Inductor's template: those of the weight, each row with its own bits, or oneDNN's in its place."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from minispec.cpu import template
from minispec.cpu.linear import PackedHead, PackedLinear
from minispec.cpu.onednn import Reordered
from minispec.cpu.template import Blocks, blocked, reason_against, unblocked
from minispec.load.files import DirectStep

BF16 = torch.bfloat16
needs_template = pytest.mark.skipif(reason_against(BF16) is not None, reason=f"no template: {reason_against(BF16)}")
# (out, in): outputs that do not fill the last block, a layer's inputs, and those of Llama-3.1-8B's down projection.
SHAPES = [(100, 96), (64, 576), (64, 14336)]


def linear_of(features: int, inputs: int, bias: bool = False) -> nn.Linear:
    """Return a layer in bfloat16 whose every weight differs from its neighbours."""
    torch.manual_seed(features)
    return nn.Linear(inputs, features, bias=bias).to(BF16).requires_grad_(False)


def exact(linear: nn.Linear, x: Tensor) -> Tensor:
    """Return the product in float64."""
    out = x.double() @ linear.weight.double().T
    return out if linear.bias is None else out + linear.bias.double()


def test_the_private_names_of_this_pytorch_are_there() -> None:
    assert torch.__version__.startswith(template.KNOWN), "else a start waits for Inductor"
    template._lower()
    from torch._inductor.lowering import lowerings  # after the first import of Inductor, which has its own order

    assert torch.ops.minispec.blocked_linear.default in lowerings


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_hold_the_weight_in_pairs_and_are_filled_up_with_zeros(shape: tuple[int, int]) -> None:
    weight, size = linear_of(*shape).weight, template.columns()
    blocks = blocked(weight)
    assert blocks.shape == (-(-shape[0] // size), shape[1], size)
    assert torch.equal(unblocked(blocks, shape[0]), weight)
    assert torch.equal(blocks[0].view(-1, size, 2)[3, 5], weight[5, 6:8]), "two inputs of an output lie side by side"
    assert not unblocked(blocks, len(blocks) * size)[shape[0] :].any()


@needs_template
@pytest.mark.parametrize(("shape", "bias"), zip(SHAPES, (True, False, False), strict=True), ids=str)
def test_a_row_has_the_same_bits_among_any_number_and_they_are_those_of_the_product(
    shape: tuple[int, int], bias: bool
) -> None:
    torch._dynamo.reset()
    linear = linear_of(*shape, bias=bias)
    layer = PackedLinear(linear)
    assert isinstance(layer.several, Blocks)
    run = torch.compile(lambda x: layer(x), fullgraph=True, dynamic=False)
    x = torch.randn(1, 70, shape[1]).to(BF16)
    with torch.inference_mode():
        one = torch.cat([run(x[:, at : at + 1].clone()) for at in (0, 7, 69)], 1)
        want = exact(linear, x)
        for rows in (2, 8, 33, 70):
            given = x[:, -rows:].clone()
            torch._dynamo.maybe_mark_dynamic(given, 1)
            found = run(given)
            assert found.dtype == BF16 and (found - want[:, -rows:]).abs().max() < 2**-7 * want.abs().max()
            assert torch.equal(found[:, -1], one[:, 2]), f"{rows} rows"
            assert torch.equal(layer(given), found), "not compiled"
        assert torch.equal(found[:, [0, 7]], one[:, :2])


@needs_template
def test_a_layer_that_keeps_its_weight_multiplies_by_it_in_eager_steps() -> None:
    linear = linear_of(100, 96)
    layer = PackedLinear(linear, keep=True)
    x = torch.randn(2, 5, 96).to(BF16)
    assert torch.equal(layer(x), linear(x))


@needs_template
def test_an_lm_head_has_one_graph_of_its_own_for_all_numbers_of_rows() -> None:
    torch._dynamo.reset()
    linear = linear_of(100, 96)
    head = PackedHead(linear, keep=True)
    made = []

    def compiler(function):
        step = DirectStep(function)
        made.append(step)
        return step

    head.compile_alone(compiler)
    with torch.inference_mode():
        for shape in ((2, 1), (8, 2), (1, 5), (2, 1)):
            x = torch.randn(*shape, 96).to(BF16)
            out = head(x)
            assert out.dtype == torch.float32 and (out - exact(linear, x)).abs().max() < 1e-5
        assert torch.equal(head(x[:1]), linear(x[:1])), "one row is not worth a graph"
    assert len({call for calls in made[0].calls.values() for call in calls.values()}) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_have_no_template_and_the_reason_names_them(dtype: torch.dtype) -> None:
    assert reason_against(dtype) == f"{str(dtype).removeprefix('torch.')} has none"
    assert isinstance(PackedLinear(nn.Linear(96, 64)).several, Reordered)


def test_a_pytorch_that_lacks_a_name_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = partial(getattr, template, "no_such_name")
    monkeypatch.setattr(template, "_lower", lacking)
    monkeypatch.setattr(template, "KNOWN", "of no release")
    monkeypatch.setattr(template, "has_tiles", lambda: True)
    reason_against.cache_clear()
    try:
        assert "no_such_name" in (reason_against(BF16) or "")
        assert isinstance(PackedLinear(linear_of(64, 96)).several, Reordered)
    finally:
        reason_against.cache_clear()
