"""A drafter that fails in the ways that a step can fail, if a prompt's first token says so; for servers under test."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import torch

from minispec.drafter import Draft, HostDrafter

HANG, HANG_WITH_THE_INTERPRETER, BREAK_CUDA, COMPILE, SLOW = range(100, 105)
LONG = 3600
COMPILING = 4.0  # seconds that a compilation takes


def slow_compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
    """A backend of torch.compile that takes its time."""
    time.sleep(COMPILING)
    return graph


class Faulty(HostDrafter):
    """Drafts nothing; before a decode step it does what the first token of one of the texts wants."""

    name, nodes, depth = "faulty", 4, 3

    def __init__(self, *given: object) -> None:
        self.texts: dict[int, list[int]] = {}
        self.compiled = torch.compile(lambda x: x + 1, backend=slow_compiler)

    def draft(self, slots: Sequence[int]) -> list[Draft]:
        """Return roots, or fail."""
        wanted = {self.texts[slot][0] for slot in slots if len(self.texts[slot]) > 12}  # first some tokens come out
        if HANG in wanted:
            time.sleep(LONG)
        if HANG_WITH_THE_INTERPRETER in wanted:
            ctypes.PyDLL(None).sleep(LONG)
        if BREAK_CUDA in wanted:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        if SLOW in wanted:
            time.sleep(0.05)
        if COMPILE in wanted:
            with torch.compiler.set_stance("default"):  # a server does not compile in a step, but between two
                self.compiled(torch.zeros(3))
        return [Draft([self.texts[slot][-1]], [-1]) for slot in slots]

    def observe(self, slot: int, tokens: Sequence[int], again: bool = False) -> None:
        """Remember the text."""
        self.texts.setdefault(slot, []).extend(tokens)

    def release(self, slot: int) -> None:
        """Forget the slot."""
        self.texts.pop(slot, None)
