"""What all tests share: `cuda` tests are skipped where there is no such device, and the default model's folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minispec.load.default_model import DefaultModelError, ensure_default_model


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--drafter module:Class` runs test_exactness.py on a drafter of one's own, docs/adding-a-drafter.md."""
    parser.addoption("--drafter", help="module:Class of a drafter to run the exactness suite on")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The converted default model, made once per machine; skips where neither cache nor network has it."""
    try:
        return ensure_default_model(lambda line: None)
    except DefaultModelError as error:
        pytest.skip(str(error))
