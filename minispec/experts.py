"""A mixture of experts: many small MLPs side by side; a router picks the few that each token goes through.

The router is a matrix with a row for each expert. With `norm_topk_prob` the weights p are divided by their sum. A token
reads K of E experts, and its result depends on no other token.

    chosen, p = top K of softmax(router(x))     out = sum of p_i * down_i(silu(gate_i(x)) * up_i(x)) over the chosen

There are three ways to the same result. Only in the first, on a CPU, does the host read which experts were chosen:

    chosen_experts   a CPU: each chosen expert multiplies its own tokens. This is one operator, which a compiler does
                     not look into. Weights that were reordered for the processor's matrix kernel (packed) have
                     `PackedExperts` instead (`cpu/linear.py`)
    _grouped         CUDA, compiled, in bfloat16: PyTorch's product of many matrices, tokens sorted by their experts
    _gathered        CUDA otherwise: for a few tokens the chosen experts' weights are copied; many tokens go through
                     all experts

N is the number of tokens, E the number of experts, K how many a token goes through, I an expert's inner width, d the
hidden size.

Papers: Mixtral (arXiv 2401.04088), Switch Transformers (arXiv 2101.03961). Read next: `model.py`, whose blocks contain
the experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minispec.model_config import ModelConfig
from minispec.operators import operator

PIECE = 128  # the most tokens that one product sends through all experts, to bound the memory

Product = Callable[[Tensor, int], Tensor]  # (rows [n, in], an expert's number) -> rows times its matrix [n, out]


class Experts(nn.Module):
    """The experts of one layer, their matrices stacked: gate_up_proj [E, 2 I, d], gate first, and down_proj [E, d, I].

    The router is a linear layer of the block, not of this module: it is packed like any linear layer and is whole on
    every rank, while the experts have a packing of their own and are sliced.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        count, size, d = config.experts, config.expert_size, config.hidden_size
        self.per_token, self.renormalises = config.experts_per_token, config.norm_topk_prob
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * size, d))
        self.down_proj = nn.Parameter(torch.empty(count, d, size))

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        """Return the mixture's output [..., d] for x [..., d] with the router's scores [..., E]."""
        return self.mix(x, *self.choose(scores))

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's experts [..., K] int64, the likeliest first, and their weights [..., K] fp32."""
        weights, chosen = scores.float().softmax(-1).topk(self.per_token)
        return chosen, weights / weights.sum(-1, keepdim=True) if self.renormalises else weights

    def mix(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum [..., d] of what the chosen experts make of x [..., d]."""
        if not x.is_cuda:
            return torch.ops.minispec.chosen_experts(x, chosen, weights, self.gate_up_proj, self.down_proj)
        is_grouped = x.dtype == torch.bfloat16 and torch.compiler.is_compiling()
        return (_grouped if is_grouped else _gathered)(x, chosen, weights, self.gate_up_proj, self.down_proj)


def through_chosen(x: Tensor, chosen: Tensor, weights: Tensor, first: Product, second: Product) -> Tensor:
    """Return the weighted sum [..., d] of what the chosen experts [..., K] make of x [..., d], expert by expert.

    first: the product with an expert's gate and up matrices. second: the product with its down matrix. The tensors are
    on a CPU, since Python reads which experts were chosen.
    """
    pairs = chosen.flatten()
    order = pairs.argsort(stable=True)
    numbers, counts = pairs[order].unique_consecutive(return_counts=True)
    experts, lengths = numbers.tolist(), counts.tolist()

    def each(product: Product, rows: Tensor) -> Tensor:
        parts = zip(rows.split(lengths), experts, strict=True)
        return torch.cat([product(part, expert) for part, expert in parts])

    rows = x.reshape(-1, x.shape[-1])[order // chosen.shape[-1]]
    gate, up = each(first, rows).chunk(2, dim=-1)
    return _summed(each(second, F.silu(gate) * up)[order.argsort()], weights)


def _grouped(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Compute the result of `through_chosen` in two grouped products; each expert's tokens are a group."""
    pairs = chosen.flatten()
    order = pairs.argsort(stable=True)
    ends = torch.searchsorted(pairs[order], torch.arange(len(down), device=x.device), right=True).int()
    rows = x.reshape(-1, x.shape[-1])[order // chosen.shape[-1]]
    gate, up = F.grouped_mm(rows, gate_up.mT, offs=ends).chunk(2, dim=-1)
    return _summed(F.grouped_mm(F.silu(gate) * up, down.mT, offs=ends)[order.argsort()], weights)


def _gathered(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Compute the result of `through_chosen` from copies of the chosen experts' weights.

    If there would be more copies than experts, all experts read all rows instead.
    """
    pairs, rows = chosen.flatten(), x.reshape(-1, x.shape[-1])
    if len(pairs) > len(down):
        return _by_all(rows, chosen, weights, gate_up, down).view(x.shape)
    rows = rows[:, None].expand(-1, chosen.shape[-1], -1).reshape(len(pairs), 1, -1)
    gate, up = torch.bmm(rows, gate_up[pairs].mT).chunk(2, dim=-1)
    return _summed(torch.bmm(F.silu(gate) * up, down[pairs].mT), weights)


def _by_all(rows: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Let all experts read all rows [N, d], and drop the outputs of experts not chosen; returns [N, d]."""
    is_chosen = chosen[..., None] == torch.arange(len(down), device=chosen.device)
    of_all = (weights[..., None] * is_chosen).sum(-2).view(len(rows), -1).T[..., None]  # weights [E, N, 1]
    sums = []
    for piece, part in zip(rows.split(PIECE), of_all.split(PIECE, 1), strict=True):
        gate, up = torch.matmul(piece, gate_up.mT).chunk(2, dim=-1)  # [E, n, I] each
        out = torch.matmul(F.silu(gate) * up, down.mT).float() * part
        sums.append(out.masked_fill(part == 0, 0).sum(0))  # an output not chosen may be an infinity in float16
    return torch.cat(sums).to(rows.dtype)


def _summed(out: Tensor, weights: Tensor) -> Tensor:
    """Return the sum [..., d] of the experts' outputs [N * K, ..., d], weighted by [..., K], rounded once."""
    parts = out.view(*weights.shape, -1)
    return (parts.float() * weights[..., None]).sum(-2).to(out.dtype)


@operator(
    "chosen_experts(Tensor x, Tensor chosen, Tensor weights, Tensor gate_up, Tensor down) -> Tensor",
    lambda x, *_: x.new_empty(x.shape),
    "CPU",
)
def _chosen_experts(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Do `through_chosen` with weights as they came from the file."""
    first: Product = lambda rows, expert: F.linear(rows, gate_up[expert])  # noqa: E731
    second: Product = lambda rows, expert: F.linear(rows, down[expert])  # noqa: E731
    return through_chosen(x, chosen, weights, first, second)
