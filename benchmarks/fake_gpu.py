"""A GPU that is not there: PyTorch's compiler finds an H200 here, and tensors say that they are on CUDA.

What torch.compile makes of a function for CUDA depends on tensors' shapes and on properties of the device. So tensors
may be fake (FakeTensorMode), and the device's properties are stated below. Nothing runs.

Read next: `lowering.py` and `kernels.py`, which look at the code that torch.compile writes here.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

CUDA = torch.device("cuda", 0)
SHARED_MEMORY = 232_448  # bytes a block may have on sm_90
H200 = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, regs_per_multiprocessor=65_536, warp_size=32,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, total_memory=140 * 2**30,
    shared_memory_per_block_optin=SHARED_MEMORY, L2_cache_size=50 * 2**20, gcnArchName="",
)  # fmt: skip


def unavailable() -> str | None:
    """Return why nothing can be lowered here, None where it can."""
    if torch.__version__ < "2.13":
        return f"lowering for CUDA is written for the Inductor of torch 2.13, here is {torch.__version__}"
    try:
        import triton.backends
    except ImportError:
        return "triton is not installed, and PyTorch's CPU builds do not bring it"
    if "nvidia" not in triton.backends.backends:
        return f"triton {triton.__version__} has no backend for nvidia here"
    return no_fake_cuda()


def no_fake_cuda() -> str | None:
    """Return why no tensor can pretend to be on CUDA here, None where one can."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        if not torch.cuda._is_compiled():
            get_cpp_compiler()
    except InvalidCxxCompiler:
        return "a CPU build of PyTorch takes CUDA's place only with a C++ compiler, and there is none"
    return None


NO_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
const c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
const c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
"""


@functools.cache
def allow_fake_cuda() -> None:
    """Let fake tensors on CUDA be indexed by a CPU build of PyTorch, from now on in this process.

    Indexing asks the device's guard, which makes a device current, even where no kernel runs. CPU builds have none for
    CUDA; the one that PyTorch itself uses on machines without a GPU does nothing, and is put in its place.
    """
    if torch.cuda._is_compiled():
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch.utils.cpp_extension import include_paths, library_paths

    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(NO_GUARD)
        flags = [*(f"-I{path}" for path in include_paths()), *(f"-L{path}" for path in library_paths()), "-lc10"]
        command = [get_cpp_compiler(), "-std=c++20", "-shared", "-fPIC", str(source), "-o", str(library), *flags]
        subprocess.run(command, check=True)
        ctypes.CDLL(str(library))


def fake_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Replace the tensors of a module, its children's and plain attributes included, by fake ones on CUDA."""

    def fake(tensor: Tensor) -> Tensor:
        """Return a tensor of the same shape; floats take the dtype asked for."""
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        return torch.empty(tensor.shape, dtype=kind, device=CUDA)

    for part in module.modules():
        for name, tensor in part._parameters.items():
            if tensor is not None:
                part._parameters[name] = nn.Parameter(fake(tensor), requires_grad=False)
        for values in (part._buffers, vars(part)):
            values.update({name: fake(tensor) for name, tensor in values.items() if isinstance(tensor, Tensor)})


class Driver:
    """What Triton asks of the GPU it is to compile for."""

    utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": SHARED_MEMORY})

    def get_current_target(self) -> Any:
        """Return Hopper."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """Return the only device's number."""
        return 0

    def get_device_interface(self) -> Any:
        """Return PyTorch's, of which every question is answered below."""
        return torch.cuda


@contextmanager
def pretend_h200() -> Iterator[None]:
    """Let PyTorch's compiler find an H200 in this process. What it caches stays: use a process of its own."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.runtime import triton_helpers
    from triton.runtime.driver import driver

    allow_fake_cuda()
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "get_device_capability": (9, 0),
        "get_device_properties": H200, "_exchange_device": 0, "_maybe_exchange_device": 0, "synchronize": None,
        "get_rng_state": torch.zeros(1), "set_rng_state": None,
    }  # fmt: skip
    interface = ("is_available", "device_count", "current_device", "get_device_properties", "synchronize")
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=answer, **__: answer))
        for name in interface:
            answer = staticmethod(lambda *_, answer=answers[name]: answer)
            stack.enter_context(mock.patch.object(CudaInterface, name, answer))
        stack.enter_context(mock.patch.object(CudaInterface, "get_raw_stream", staticmethod(lambda _: 0)))
        # Otherwise fake mode would have real tensors made and moved to the device.
        stack.enter_context(mock.patch.object(FakeTensorMode, "avoid_device_init", True))
        # It prepares patterns of attention and of padded products with real tensors on the device.
        stack.enter_context(mock.patch.object(joint_graph, "lazy_init", lambda *_, **__: None))
        stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        driver.set_active(Driver())
        yield
