"""pytest in a process that finds few packages, as on a machine with a GPU and no network: `python tests/bare.py ARGS`.

It finds torch, transformers, safetensors, aiohttp, tiktoken, pytest and what these require, and nothing else.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

THERE = ("torch", "transformers", "safetensors", "aiohttp", "tiktoken", "pytest")
NEW = ("pydantic", "pydantic-core")  # what only newer versions of those above require


def plain(name: str) -> str:
    """Return the name of a distribution in its one spelling."""
    return re.sub(r"[-_.]+", "-", name).lower()


def required(names: tuple[str, ...]) -> set[str]:
    """Return the distributions of these names with all that they require and that is installed."""
    found: set[str] = set()
    todo = [*names]
    while todo:
        name = plain(todo.pop())
        try:
            requires = [] if name in found else metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        todo += [re.split(r"[^\w.-]", text)[0] for text in requires if "extra ==" not in text]
    return found - {*NEW}


class Bare:
    """Finds modules as Python does, but for those of the distributions that are to be lacking."""

    def __init__(self, there: set[str]) -> None:
        self.find, owners = PathFinder.find_spec, metadata.packages_distributions()
        self.lacking = {top for top, names in owners.items() if not there.intersection(map(plain, names))}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return where a module is; None if it is to be lacking."""
        return None if name.partition(".")[0] in self.lacking else self.find(name, path, target)


if __name__ == "__main__":
    PathFinder.find_spec = Bare(required(THERE) | {"minispec"}).find_spec
    import pytest

    sys.exit(pytest.main(sys.argv[1:]))
