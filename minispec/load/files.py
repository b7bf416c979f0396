"""Compiled functions as files: made once by any process, loaded by every later one in a tenth of a second.

`torch.compile(f).aot_compile(arguments)` traces and compiles a function and runs nothing. What it returns can be saved,
and loaded without asking Dynamo (the tracer of torch.compile) again.

A graph takes much for granted: sizes and dtypes of tensors, numbers, types, which tensors are one. Dynamo lists all of
it as its guards, which it would check at each call. Here guards become facts, which stand in the file beside the code:
an expression over the function's arguments and what it gave. They are checked once, before a file's code is called for
new arguments (`Loaded.fits`), so a wrong file is never run. A file's name only has to find it: it holds what can be
seen without tracing, and a checksum of the facts.

What facts do not show stands in the name (`machine`): PyTorch, processor, threads, Inductor's options, the code that
lowers our operators. And a file knows the source that was traced, by checksum.

A file is code, since loading unpickles. So the folder and all above it must be writable by this user or root alone, and
so must the file. The folder lies in Inductor's own cache, where each file's machine code is.

Read next: `direct.py`, which calls what is loaded; `makers.py`, the processes that make files for a server.
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
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from minispec.compiled import NotMade, mode
from minispec.cpu import template
from minispec.load.machine import CACHE, own_compile_cache, temporary_cache

logger = logging.getLogger("minispec")

FORMAT = 2  # to be raised when what a file holds changes
ENDING = ".code"  # of a file's name
HEADERS = "headers"  # the folder of compiled headers, of 150 MB each
BACKEND: Any = "inductor"  # of torch.compile

Facts = Mapping[str, Any]  # for expressions over a function's arguments: what `_fact` says of their values
# Guards that say nothing about the graph's inputs: no module of ours has hooks, and a type is described with its value.
_IGNORED = ("EMPTY_NN_MODULE_HOOKS_DICT", "NOT_PRESENT_IN_GENERIC_DICT")


# ---- facts -----------------------------------------------------------------------------------------------------------


def described(value: Any, like: Any = None) -> Any:
    """Return all that a graph may take for granted of a value.

    None stands for an open size, of two or more: in a dimension that is marked as one of any length, or open in `like`,
    a description.
    """
    if isinstance(value, Tensor):
        marked = getattr(value, "_dynamo_weak_dynamic_indices", ())
        if isinstance(like, tuple):
            marked = [at for at, size in enumerate(like[1]) if size is None]
        sizes = tuple(None if at in marked and size != 1 else size for at, size in enumerate(value.shape))
        # Strides but for dimensions of one; where a size is open, only whether the tensor is contiguous.
        steps = [step for step, size in zip(value.stride(), sizes, strict=True) if size != 1]
        kind = "Parameter" if isinstance(value, torch.nn.Parameter) else type(value).__name__.removeprefix("Fake")
        kind = f"{kind} {value.dtype} {value.device} {value.requires_grad}"
        return kind, sizes, value.is_contiguous() if None in sizes else steps
    if isinstance(value, (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType)):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, (set, frozenset)):
        return repr(sorted(map(repr, value)))
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        return repr(value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return f"{kind} of {len(value)}" if isinstance(value, (tuple, list, dict)) else kind


def _fact(name: str, value: Any, seen: dict[int, Any], like: Any = None) -> tuple[Any, str]:
    """Return a value's description, and the first expression that gave the same tensor; seen: what was given so far."""
    return described(value, like), seen.setdefault(id(value), (name, value))[0] if isinstance(value, Tensor) else name


class Loaded(NamedTuple):
    """A compiled function, and what it takes for granted."""

    function: Callable[..., Any]  # before it was compiled
    facts: Facts
    call: Callable[..., Any]

    def fits(self, args: Sequence[Any]) -> bool:
        """Return whether the code is right for these arguments, the owner included."""
        names = dict(_signature(self.function).bind(*args).arguments)
        cells = zip(self.function.__code__.co_freevars, self.function.__closure__ or (), strict=True)
        names |= {name: cell.cell_contents for name, cell in cells} | {"G": _Globals(self.function.__globals__)}
        seen: dict[int, Any] = {}
        try:
            facts = self.facts.items()
            return all(fact == _fact(name, eval(_code(name), names), seen, fact[0]) for name, fact in facts)
        except (AttributeError, LookupError, NameError, TypeError):  # something that the code reads is not there
            return False


class _Globals(dict[str, Any]):
    """A function's globals, and modules by the names that Dynamo gives those of functions which it calls."""

    def __missing__(self, name: str) -> Any:
        return sys.modules[name.removeprefix("__import_").replace("_dot_", ".")]


_code = functools.cache(functools.partial(compile, filename="<guard>", mode="eval"))
_signature = functools.cache(inspect.signature)


def compile_function(function: Callable[..., Any], args: Sequence[Any]) -> tuple[Loaded, Any]:
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
    made, seen = compiler.aot_compile((tuple(args), {})), dict[int, Any]()
    return Loaded(function, {name: _fact(name, values[name], seen) for name in sorted(values)}, made.fn), made


def _compile(function: Callable[..., Any], args: Sequence[Any]) -> tuple[Loaded, Any]:
    """Do the same; what a compiler that was killed left of a library is removed, which Inductor would try to load."""
    try:
        return compile_function(function, args)
    except Exception as error:
        cut = re.search(r"ImportError: (/\S+\.so): ", str(error))
        if cut is None or not Path(cut[1]).exists():
            raise
        Path(cut[1]).unlink()
        return _compile(function, args)


def tuning(function: Callable[..., Any], args: Sequence[Any]) -> dict[str, Any]:
    """Return Inductor's options for a function of these arguments.

    On CUDA a layer's products of one row become kernels that read the weights once and belong to their neighbours.
    "Coordinate descent" finds the sizes of their blocks, at the first run. Nothing else is tuned (docs/cuda.md).
    """
    x = next((arg for arg in args if isinstance(arg, Tensor) and arg.dim() > 1), None)  # [B, N, ...]
    one_row = x is not None and x.is_cuda and x.shape[:2].numel() == 1 and function.__name__ == "forward"
    return {"coordinate_descent_tuning": True} if one_row else {}


@functools.cache
def _checksum(module: str) -> str:
    """Return the checksum of a module's source; empty if it has none, or is none of this process."""
    path = getattr(sys.modules.get(module), "__file__", None)
    return _sum(Path(path).read_bytes()).decode() if path else ""


def _sum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


# ---- files -----------------------------------------------------------------------------------------------------------


def find(function: Callable[..., Any], args: Sequence[Any], name: str) -> Loaded:
    """Return a function compiled for these arguments, the owner first: from a file, or compiled and kept in one.

    name: of the file, without what `machine` says. Raises NotMade if it is in no file and `mode` forbids to compile, or
    in a rehearsal if another process is making it.
    """
    prepare()
    label = f"{function.__qualname__}-{_sum(f'{name} {machine(args)}'.encode()).decode()[:32]}"
    if (found := _look(label, function, args)) is not None:
        return found
    if not mode.compiles:
        raise NotMade(f"{function.__qualname__} is in no file yet")
    try:  # a killed process's lock is released
        with FileLock(folder() / f"{label}.lock", timeout=-1 if mode.outputs is None else 0):
            return _look(label, function, args) or _make(label, function, args)  # as another may have made it meanwhile
    except Timeout:
        raise NotMade(f"another process makes {label}") from None


def _look(label: str, function: Callable[..., Any], args: Sequence[Any]) -> Loaded | None:
    """Return the function of the first file of a label that is right for these arguments; a rehearsal gets no code."""
    for path in sorted(folder().glob(f"{label}.*{ENDING}")):
        try:
            with open(path, "rb") as file:
                if not _ours(os.fstat(file.fileno())):
                    raise PermissionError("it can be written by others")
                checksum, content = file.read(64), file.read()
            if checksum != _sum(content):
                raise ValueError("it is not whole")
            facts, sources, code = pickle.loads(content)
            loaded = Loaded(function, facts, function)
            if any(_checksum(module) != known for module, known in sources.items()) or not loaded.fits(args):
                continue
            if mode.outputs is None:
                made: Any = torch.compiler.load_compiled_function(io.BytesIO(code), f_globals=function.__globals__)
                loaded = loaded._replace(call=made.fn)
            return loaded
        except Exception as error:  # unpickling a file of another release may raise anything
            logger.warning("%s cannot be loaded and is made anew: %s: %s", path, type(error).__name__, error)
            path.unlink(missing_ok=True)
    return None


def _make(label: str, function: Callable[..., Any], args: Sequence[Any]) -> Loaded:
    loaded, made = _compile(function, args)
    try:
        sources = {part.module: _checksum(part.module) for part in made.source_info().inlined_sources}
        content = pickle.dumps((loaded.facts, sources, type(made).serialize(made).serialized_data))
        number = _sum(repr(loaded.facts).encode()).decode()[:16]
        _write(folder() / f"{label}.{number}{ENDING}", _sum(content) + content)
    except Exception as error:  # a full disk, say, or a function that holds what cannot be pickled
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        logger.warning("compiled code of %s is not kept: %s", function.__qualname__, why)
    return loaded


def _write(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


def prepare() -> None:
    """Import Dynamo and Inductor, and tell them what all of ours must agree on, as it is in names of files.

    They are told once for each thread, since their settings belong to a thread. A start does not wait for this import
    of two seconds, so `find` calls this with the first function.
    """
    if mode.prepared:
        return
    mode.prepared = True
    os.environ.setdefault("TORCH_WARM_POOL", "0")  # processes that compile for CUDA alone
    from torch._dynamo import config as dynamo
    from torch._inductor import codecache, compile_fx, config, cpp_builder, cpu_vec_isa  # noqa: F401

    dynamo.enable_aot_compile = True  # the default since PyTorch 2.13
    # Every function is traced once, so what the operations of one trace tell the next is not worth keeping.
    dynamo.fake_tensor_cache_enabled = False
    # Unset, it would be missing from the key, and code be made for another number of threads.
    config.cpp.threads = torch.get_num_threads()
    # PyTorch keeps compiled headers in a folder that all users share, and others could put code there.
    vars(codecache).update(_HEADER_DIR=str(folder() / HEADERS), _HEADER_LOCK_DIR=str(folder() / HEADERS / "locks"))
    template.lower()
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


def machine(args: Sequence[Any]) -> str:
    """Return what compiled code takes for granted of processor or GPU, PyTorch, its options, and our operators."""
    from torch._inductor import config

    gpu = next((torch.cuda.get_device_name(arg.device) for arg in args if isinstance(arg, Tensor) and arg.is_cuda), "")
    return f"{_fixed()} {gpu} {sorted((name, str(value)) for name, value in config.save_config_portable().items())}"


@functools.cache
def _fixed() -> str:
    """Return the part of `machine` that stays while this process lives."""
    package = Path(__file__).parent.parent
    lowerings = sorted(path for place in (".", "cpu", "cuda") for path in (package / place).glob("*.py"))
    code, cpu = _sum(b"".join(path.read_bytes() for path in lowerings)), sorted(torch.cpu.get_capabilities().items())
    return repr((FORMAT, torch.__version__, platform.python_version(), platform.machine(), cpu, code))


# ---- the folder ------------------------------------------------------------------------------------------------------


def folder() -> Path:
    """Return the folder of the files, in Inductor's cache; it exists.

    A cache that others can write is replaced by one that only this process and its children have.
    """
    own_compile_cache()
    return _folder(os.environ[CACHE])


@functools.cache
def _folder(cache: str) -> Path:
    path = Path(cache) / "minispec"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = path.resolve()
        if (why := untrusted(path)) is None and os.access(path, os.W_OK):
            return path
        why = why or "it cannot be written"
    except OSError as error:
        why = str(error)
    own = temporary_cache()
    logger.warning("compiled code is not kept in %s, since %s; it is in %s until the end", cache, why, own)
    return _folder(own)


def is_empty() -> bool:
    """Return whether there is no file at all."""
    return not any(folder().glob(f"*{ENDING}"))


def take_from(source: Path) -> None:
    """Copy what a folder that `minispec.compile` filled has and our cache lacks, with the machine code beside it."""
    source, into = source.resolve(), folder().parent
    if (why := untrusted(source) if source.is_dir() else "it is no folder") is not None:
        logger.warning("--compiled-files %s is not used: %s", source, why)
        return
    for found in source.rglob("*"):
        place = into / found.relative_to(source)
        if not place.exists() and stat.S_ISREG(found.lstat().st_mode) and _ours(found.lstat()):
            place.parent.mkdir(parents=True, exist_ok=True)
            _write(place, found.read_bytes())


def untrusted(path: Path) -> str | None:
    """Return why code in a folder must not be run; None if only this user and root can put it there.

    path: resolved, so that no link above it is left. A sticky folder's entries cannot be replaced by others.
    """
    for part in (path, *path.parents):
        status = part.stat()
        if not _ours(status) and not (status.st_uid in (0, os.getuid()) and status.st_mode & stat.S_ISVTX):
            return f"{part} can be written by others"
    return None


def _ours(status: os.stat_result) -> bool:
    """Return whether a file or folder belongs to this user or root, and nobody else can write it."""
    return status.st_uid in (0, os.getuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
