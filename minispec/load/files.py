"""Compiled functions: kept in files, loaded by every later process in a tenth of a second, and called directly.

torch.compile checks what a graph takes for granted, its guards, at every call: some 100 microseconds a layer, a fifth
of a plain step on a CPU. But between two steps of one shape only the activations change. So a `DirectStep` asks once
for every layer and plan, and later calls go straight to the code, which refuses other sizes and strides and checks
nothing else. One argument, the key (`compiled.Key`), stands for all that stays. What was found for it ends with it.

Guards become facts, which stand in the file beside the code: an expression over the function's arguments, and what it
gave; checksums of the sources are facts too. They are checked before the code is called for new arguments
(`Loaded.fits`), so a wrong file is never run. A file's name begins with what finds it (`label_of`) and ends with the
checksum of its content. A file is code, since loading unpickles, so nobody but this user and root may be able to write
it (`machine.trusted`).

Read next: `model.py`, `beam.py` and `engine.py`, whose functions these are; `makers.py`, processes that make files.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import io
import logging
import os
import pickle
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from filelock import FileLock, Timeout
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from minispec.compiled import Key, NotMade, Step, calling, mode
from minispec.cpu import template
from minispec.cpu.joined import join_kernels
from minispec.load.machine import code_folder, is_ours, trusted

logger = logging.getLogger("minispec")

ENDING = ".code"  # of a file's name
HEADERS = "headers"  # the folder of compiled headers, of 150 MB each
BACKEND: Any = "inductor"  # of torch.compile

# Attributes of a tensor by which Dynamo knows that a dimension may have any length.
MARKS = ("_dynamo_weak_dynamic_indices", "_dynamo_propagated_dynamic_indices", "_has_dynamo_dim_marking")
# Guards that say nothing about the graph's inputs: no module of ours has hooks, and a type is described with its value.
_IGNORED = ("EMPTY_NN_MODULE_HOOKS_DICT", "NOT_PRESENT_IN_GENERIC_DICT")

Facts = Mapping[str, Any]  # by expressions over a function's arguments


class DirectStep:
    """A function compiled for inference; see the head of this file."""

    def __init__(self, function: Step) -> None:
        self.function = function
        self.calls: weakref.WeakKeyDictionary[Key, dict[tuple, Step]] = weakref.WeakKeyDictionary()
        self._at: int | None = None  # where the key is among the arguments

    def __call__(self, *args: Any) -> Any:
        """Return function(*args), the owner first; what the function writes is written in place."""
        if mode.eager:
            return self.function(*args)
        if self._at is None:
            self._at = next(at for at, arg in enumerate(args) if isinstance(arg, Key))
        key: Key = args[self._at]
        if mode.outputs is not None:
            return self._rehearse(args, key, mode.outputs)
        calls, given = self.calls.get(key.original or key), _given(args)
        if calls is None:
            calls = self.calls[key.original or key] = {}
        call = calls.get(given)
        if call is None:
            call = calls[given] = self._find(args, key).call
        return call(*args)

    def _find(self, args: Sequence[Any], key: Key) -> Loaded:
        """Return the compiled function for a key: one that is loaded already, or that of a file, or a new one."""
        prepare()
        with any_size(args[1:], key):
            label = label_of(self.function, args)
            graphs = loaded.setdefault((self.function, label), [])
            found = next((graph for graph in graphs if graph.fits(args)), None)
            if found is None:
                graphs.append(found := find(self.function, args, label))
            return found

    def _rehearse(self, args: Sequence[Any], key: Key, outputs: dict[Any, Any]) -> Any:
        """Have a file made; run eagerly, once for each graph, and return later what was returned then."""
        label = label_of(self.function, args)  # with all sizes, those that a graph leaves open too
        at: tuple[Any, Any] = (NotMade, label)  # if another process makes it
        with suppress(NotMade):
            at = (id(self._find(args, key)), label)
        if at not in outputs:
            with calling(eager=True):
                outputs[at] = self.function(*args)
        # A function that runs returns a tensor of its own each time, and what is compiled behind it may rely on that.
        return tree_map_only(Tensor, Tensor.clone, outputs[at])


@contextmanager
def any_size(args: Sequence[Any], key: Key) -> Iterator[None]:
    """Within this, a graph that is traced for such a key takes other batch sizes and lengths as well.

    Of the key's tensors it says which dimensions those are. With `of_batch` it is dimension 0 of the arguments. With
    `any_size` they are 0 and 1, as in x [B, T, d], or 2, as in the rotary factors [B, 1, T, D]; none where there are
    few rows. A size of one stays a constant of the graph. Others read some of these tensors too, so marks are removed.
    """
    from torch.fx.experimental import _config  # here, since importing it takes a while

    members = [member for member in tree_leaves(args) if isinstance(member, Tensor)]
    marked: list[tuple[Tensor, tuple[int, ...]]] = []
    how = {}
    if key.of_batch:
        marked = [(tensor, (0,)) for tensor in (*key.of_batch, *members) if tensor.dim()]
    elif key.any_size:
        marked = [*key.any_size, *((m, (0, 2 if m.dim() == 4 else 1)) for m in members if not key.few)]
        # Two sizes that happen to be equal now need not be so later, and one that is one now need not stay so.
        how = {"use_duck_shape": False, "backed_size_oblivious": True}
    for tensor, dimensions in marked:
        torch._dynamo.maybe_mark_dynamic(tensor, [at for at in dimensions if tensor.shape[at] != 1])
    try:
        with cast(Any, _config).patch(**how):
            yield
    finally:
        for tensor, _ in marked:
            for mark in MARKS:
                vars(tensor).pop(mark, None)


def _given(args: Sequence[Any]) -> tuple:
    """Return what decides which graph serves these arguments: sets, and which arguments and members are None."""
    return tuple([
        arg if isinstance(arg, frozenset)
        else tuple([member is None for member in arg]) if isinstance(arg, tuple) else arg is None
        for arg in args
    ])  # fmt: skip


# ---- facts -----------------------------------------------------------------------------------------------------------


def described(value: Any) -> Any:
    """Return all that a graph may take for granted of a value; None stands for a size that `any_size` opens."""
    if isinstance(value, Tensor):
        opened = getattr(value, MARKS[0], ())
        sizes = tuple(None if at in opened else size for at, size in enumerate(value.shape))
        # Strides but for dimensions of one; where a size is open, only whether the tensor is contiguous.
        steps = [step for step, size in zip(value.stride(), sizes, strict=True) if size != 1]
        kind = "Parameter" if isinstance(value, torch.nn.Parameter) else type(value).__name__.removeprefix("Fake")
        kind = f"{kind} {value.dtype} {value.device} {value.requires_grad}"
        return kind, sizes, value.is_contiguous() if None in sizes else steps
    if isinstance(value, (set, frozenset)):
        return repr(sorted(map(repr, value)))
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        return repr(value)
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__} {len(value) if isinstance(value, (tuple, list, dict)) else ''}"


def _facts(values: Mapping[str, Any]) -> Facts:
    """Return the facts of these values: what is described, and the first expression that gave the same tensor."""
    first: dict[int, str] = {}
    return {
        name: (described(value), first.setdefault(id(value), name) if isinstance(value, Tensor) else name)
        for name, value in sorted(values.items())
    }


class Loaded(NamedTuple):
    """A compiled function, and what it takes for granted."""

    function: Step  # before it was compiled
    facts: Facts
    call: Step

    def fits(self, args: Sequence[Any]) -> bool:
        """Return whether the code is right for these arguments, the owner included; to be called in `any_size`."""
        names = {**_signature(self.function).bind(*args).arguments, **inspect.getclosurevars(self.function).nonlocals}
        names |= {"G": _Globals(self.function.__globals__), "_checksum": _checksum}
        try:
            return self.facts == _facts({name: eval(_code(name), names) for name in self.facts})
        except (AttributeError, LookupError, NameError, TypeError):  # something that the code reads is not there
            return False


class _Globals(dict[str, Any]):
    """A function's globals, and modules by the names that Dynamo gives those of functions which it calls."""

    def __missing__(self, name: str) -> Any:
        return sys.modules[name.removeprefix("__import_").replace("_dot_", ".")]


_code = functools.cache(functools.partial(compile, filename="<guard>", mode="eval"))
_signature = functools.cache(inspect.signature)
loaded: dict[tuple[Step, str], list[Loaded]] = {}  # the graphs of this process, by function and label


def compile_function(function: Step, args: Sequence[Any]) -> tuple[Loaded, Any]:
    """Compile a function for these arguments, without running it; return it, and PyTorch's object for it."""
    values: dict[str, Any] = {}

    def note(guards: Sequence[Any]) -> list[bool]:
        """Note what guards are about, in the place of keeping them; names with __ are Dynamo's own."""
        for guard in guards:
            telling = guard.name and "___" not in guard.name and not guard.name.startswith("__import__(")
            if guard.has_value and telling and guard.guard_type not in _IGNORED:
                values[guard.name] = guard.value
        return [False] * len(guards)

    options = {**tuning(function, args), "guard_filter_fn": note}
    compiler: Any = torch.compile(function, backend=BACKEND, fullgraph=True, dynamic=False, options=options)
    made = compiler.aot_compile((tuple(args), {}))
    modules = {part.module for part in made.source_info().inlined_sources}
    values |= {f"_checksum({module!r})": _checksum(module) for module in modules}
    return Loaded(function, _facts(values), made.fn), made


def tuning(function: Step, args: Sequence[Any]) -> dict[str, Any]:
    """Return Inductor's options for a function of these arguments.

    On CUDA a layer's products of one row become kernels that read the weights once and belong to their neighbours.
    "Coordinate descent" finds the sizes of their blocks, at the first run. Nothing else is tuned (docs/cuda.md).
    """
    x = next((arg for arg in args if isinstance(arg, Tensor) and arg.dim() > 1), None)  # [B, N, ...]
    one_row = x is not None and x.is_cuda and x.shape[:2].numel() == 1 and function.__name__ == "forward"
    return {"coordinate_descent_tuning": True} if one_row else {}


# ---- files -----------------------------------------------------------------------------------------------------------


def label_of(function: Step, args: Sequence[Any]) -> str:
    """Return how the name of a file begins: what is known without tracing, and what facts do not show (`machine`)."""
    from torch._inductor import config

    leaves = tree_leaves(args)
    device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_cuda), None)
    gpu = "" if device is None else torch.cuda.get_device_name(device)
    known = [described(leaf) for leaf in leaves], machine(gpu, config.get_hash())
    return f"{function.__qualname__}-{_sum(repr(known).encode())[:32]}"


def find(function: Step, args: Sequence[Any], label: str) -> Loaded:
    """Return a function compiled for these arguments, the owner first: from a file, or compiled and kept in one.

    Raises NotMade if it is in no file and `mode` forbids to compile, or in a rehearsal if another process is making it.
    """
    if found := _look(label, function, args):
        return found
    if not mode.compiles:
        raise NotMade(f"{function.__qualname__} is in no file yet")
    try:  # a killed process's lock is released
        with FileLock(code_folder() / f"{label}.lock", timeout=-1 if mode.outputs is None else 0):
            return _look(label, function, args) or _make(label, function, args)  # as another may have made it meanwhile
    except Timeout:
        raise NotMade(f"another process makes {label}") from None


def _look(label: str, function: Step, args: Sequence[Any]) -> Loaded | None:
    """Return the function of the first file of a label that is right for these arguments; a rehearsal gets no code."""
    for path in sorted(code_folder().glob(f"{label}.*{ENDING}")):
        try:
            with open(path, "rb") as file:
                if not is_ours(os.fstat(file.fileno())):
                    raise PermissionError("it can be written by others")
                content = file.read()
            if _sum(content) not in path.name:
                raise ValueError("it is not whole")
            facts, code = pickle.loads(content)
            found = Loaded(function, facts, function)
            if not found.fits(args):
                continue
            if mode.outputs is None:
                made: Any = torch.compiler.load_compiled_function(io.BytesIO(code), f_globals=function.__globals__)
                found = found._replace(call=made.fn)
            return found
        except Exception as error:  # unpickling a file of another release may raise anything
            logger.warning("%s cannot be loaded and is made anew: %s: %s", path, type(error).__name__, error)
            path.unlink(missing_ok=True)
    return None


def _make(label: str, function: Step, args: Sequence[Any]) -> Loaded:
    try:
        found, made = compile_function(function, args)
    except Exception as error:
        cut = re.search(r"ImportError: (/\S+\.so): ", str(error))
        if cut is None or not Path(cut[1]).exists():
            raise
        Path(cut[1]).unlink()  # what a compiler that was killed left of a library, which Inductor tries to load
        return _make(label, function, args)
    try:
        content = pickle.dumps((found.facts, type(made).serialize(made).serialized_data))
        _write(code_folder() / f"{label}.{_sum(content)}{ENDING}", content)
    except Exception as error:  # a full disk, say, or a function that holds what cannot be pickled
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        logger.warning("compiled code of %s is not kept: %s", function.__qualname__, why)
    return found


def _write(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


def _sum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@functools.cache
def _checksum(module: str) -> str:
    """Return the checksum of a module's source; empty if it has none, or is none of this process."""
    path = getattr(sys.modules.get(module), "__file__", None)
    return _sum(Path(path).read_bytes()) if path else ""


@functools.cache
def machine(gpu: str, options: bytes) -> str:
    """Return what compiled code takes for granted of processor or GPU, PyTorch, its options, and our operators.

    options: a hash that changes with Inductor's options, and with some on which no code depends.
    """
    from torch._inductor import config

    package = Path(__file__).parent.parent
    ours = ("*.py", "cpu/*.py", "cuda/*.py", "load/files.py")
    sources = sorted(path for pattern in ours for path in package.glob(pattern))
    return repr((
        torch.__version__, platform.python_version(), platform.machine(), gpu,
        sorted(torch.cpu.get_capabilities().items()), _sum(b"".join(path.read_bytes() for path in sources)),
        sorted((name, str(value)) for name, value in config.save_config_portable().items()),
    ))  # fmt: skip


def prepare() -> None:
    """Import Dynamo and Inductor, and tell them what all of ours must agree on, as it is in names of files.

    They are told once for each thread, since their settings belong to a thread. A start does not wait for this import
    of two seconds, so the first function that is looked for calls this.
    """
    if mode.prepared:
        return
    mode.prepared = True
    os.environ.setdefault("TORCH_WARM_POOL", "0")  # processes that compile for CUDA alone
    from torch._dynamo import config as dynamo
    from torch._dynamo import utils
    from torch._inductor import codecache, compile_fx, config, cpp_builder, cpu_vec_isa  # noqa: F401

    dynamo.enable_aot_compile = True  # the default since PyTorch 2.13
    # Every function is traced once, so what the operations of one trace tell the next is not worth keeping.
    dynamo.fake_tensor_cache_enabled = False
    # At each call of a graph a profiler is told, and each size that is a symbol asked for, by functions that first have
    # Dynamo look away: a fifth of a millisecond in thirty layers.
    dynamo.record_runtime_overhead = False
    for name in ("call_size", "call_stride"):
        setattr(utils, name, inspect.unwrap(getattr(utils, name)))
    # Unset, it would be missing from the key, and code be made for another number of threads.
    config.cpp.threads = torch.get_num_threads()
    # PyTorch keeps compiled headers in a folder that all users share, and others could put code there.
    headers = code_folder() / HEADERS
    vars(codecache).update(_HEADER_DIR=str(headers), _HEADER_LOCK_DIR=str(headers / "locks"))
    template.lower()
    join_kernels()
    if not has_compiler():  # what is in files is loaded all the same, if nothing asks the compiler
        loader, kinds = cast(Any, codecache.CppPythonBindingsCodeCache), cast(Any, cpu_vec_isa.VecISA)
        cpp_builder.get_cpp_compiler = codecache.get_cpp_compiler = lambda: "g++"
        loader._get_uncompiled_header = lambda device: None
        kinds.check_build = lambda kind, code: True
        config.cpp.vec_isa_ok = True
        return
    # A compiler that knows the newest instructions knows all. Unless told so, Inductor compiles a long file for each
    # kind, which takes fifteen seconds.
    newest = [cpp_builder.get_cpp_compiler(), "-mavx512bf16", "-mamx-bf16", "-E", "-x", "c++", os.devnull]
    if config.cpp.vec_isa_ok is None and subprocess.run(newest, capture_output=True, check=False).returncode == 0:
        config.cpp.vec_isa_ok = True


def has_compiler() -> bool:
    """Return whether there is the C++ compiler that Inductor would call."""
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def is_empty() -> bool:
    """Return whether there is no file at all."""
    return not any(code_folder().glob(f"*{ENDING}"))


def take_from(source: Path) -> None:
    """Copy what a folder that `minispec.compile` filled has and our cache lacks, with the machine code beside it."""
    try:
        source = trusted(source)
        found = [path for path in source.rglob("*") if stat.S_ISREG(path.lstat().st_mode) and is_ours(path.lstat())]
    except OSError as error:
        logger.warning("--compiled-files %s is not used: %s", source, error)
        return
    for path in found:
        place = code_folder().parent / path.relative_to(source)
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            _write(place, path.read_bytes())
