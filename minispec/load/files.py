"""Compiled functions as files: made once by any process, loaded by every later one in a tenth of a second.

`torch.compile(f).aot_compile(arguments)` traces and compiles a function and runs nothing. What it returns can be saved,
and loaded without asking Dynamo (the tracer of torch.compile) again.

A graph takes much for granted: sizes and dtypes of tensors, numbers, types, which tensors are one. Dynamo lists all of
it as its guards, which it would check at each call. Here guards become facts, which stand in the file beside the code:
an expression over the function's arguments and what it gave, as text. They are checked once, before a file's code is
called for new arguments (`Loaded.fits`), so a wrong file is never run. A file's name only has to find it: it holds what
can be seen without tracing. Files of one name that differ in facts are numbered.

What facts do not show stands in the name (`machine`): PyTorch, processor, threads, Inductor's options, the code that
lowers our operators. And a file knows the source that was traced, by checksum.

A file is code, since loading unpickles. So the folder and all above it must be writable by this user or root alone, and
so must the file. The folder lies in Inductor's own cache, where each file's machine code is.

Read next: `direct.py`, which calls what is loaded; `makers.py`, the processes that make files for a server.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import hashlib
import inspect
import io
import json
import logging
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minispec.cpu import template
from minispec.load.machine import own_compile_cache

logger = logging.getLogger("minispec")

CACHE = "TORCHINDUCTOR_CACHE_DIR"  # the variable that names Inductor's cache
FORMAT = 1  # to be raised when what a file holds changes
HEAD = 64  # bytes at the front of a file, which say how many bytes of facts follow

BACKEND: Any = "inductor"  # of torch.compile

Facts = Mapping[str, Any]  # expressions over a function's arguments, and what `described` says of each value
# Guards that say nothing about the graph's inputs: no module of ours has hooks, and a type is described with its value.
_IGNORED = ("EMPTY_NN_MODULE_HOOKS_DICT", "NOT_PRESENT_IN_GENERIC_DICT")


# ---- facts -----------------------------------------------------------------------------------------------------------


def described(value: Any) -> Any:
    """Return all that a graph may take for granted of a value, in JSON's types; None stands for an open size.

    A size is open from two on, in a dimension that is marked as one of any length.
    """
    if isinstance(value, Tensor):
        marked = getattr(value, "_dynamo_weak_dynamic_indices", ())
        sizes = [None if at in marked and size != 1 else size for at, size in enumerate(value.shape)]
        return [_kind(value), sizes, _layout(value, sizes)]
    if isinstance(value, (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType)):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, (set, frozenset)):
        return repr(sorted(map(repr, value)))
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        return repr(value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return f"{kind} of {len(value)}" if isinstance(value, (tuple, list, dict)) else kind


def _holds(fact: Any, value: Any) -> bool:
    """Return whether what a file describes holds for this value."""
    if not isinstance(fact, list) or not isinstance(value, Tensor):
        return bool(fact == described(value))
    kind, sizes, layout = fact
    if kind != _kind(value) or len(sizes) != value.dim():
        return False
    now = [size if wanted is not None or size == 1 else None for wanted, size in zip(sizes, value.shape, strict=True)]
    return bool(now == sizes and layout == _layout(value, sizes))


def _kind(tensor: Tensor) -> str:
    kind = "Parameter" if isinstance(tensor, torch.nn.Parameter) else type(tensor).__name__.removeprefix("Fake")
    return f"{kind} {tensor.dtype} {tensor.device} {tensor.requires_grad}"


def _layout(tensor: Tensor, sizes: Sequence[int | None]) -> bool | list[int]:
    """Return the strides, but for dimensions of one; where a size is open, only whether the tensor is contiguous."""
    if None in sizes:
        return tensor.is_contiguous()
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]


def _same(values: Mapping[str, Any]) -> dict[str, str]:
    """Return {expression: the earlier expression that gives the same tensor}."""
    first: dict[int, str] = {}
    pairs = {name: first.setdefault(id(value), name) for name, value in values.items() if isinstance(value, Tensor)}
    return {name: other for name, other in pairs.items() if name != other}


class Loaded(NamedTuple):
    """A compiled function, and what it takes for granted."""

    function: Callable[..., Any]  # before it was compiled
    facts: Facts
    same: Mapping[str, str]  # expressions that give one tensor
    call: Callable[..., Any]

    def fits(self, args: Sequence[Any]) -> bool:
        """Return whether the code is right for these arguments, the owner included."""
        names = dict(zip(_parameters(self.function), args, strict=True))
        cells = zip(self.function.__code__.co_freevars, self.function.__closure__ or (), strict=True)
        names |= {name: cell.cell_contents for name, cell in cells} | {"G": _Globals(self.function.__globals__)}
        values = {}
        try:
            for name, fact in self.facts.items():
                values[name] = eval(_code(name), names)
                if not _holds(fact, values[name]):
                    return False
        except (AttributeError, LookupError, NameError, TypeError):  # something that the code reads is not there
            return False
        return _same(values) == self.same


class _Globals(dict[str, Any]):
    """A function's globals, and modules by the names that Dynamo gives those of functions which it calls."""

    def __missing__(self, name: str) -> Any:
        return sys.modules[name.removeprefix("__import_").replace("_dot_", ".")]


@functools.cache
def _code(expression: str) -> types.CodeType:
    return compile(expression, "<guard>", "eval")


def compile_function(function: Callable[..., Any], args: Sequence[Any]) -> tuple[Loaded, Any]:
    """Compile a function for these arguments, without running it; return it, and PyTorch's object for it.

    A PyTorch without `aot_compile` gives None for the latter, so there is nothing to save. What its torch.compile
    returns has guards of its own and serves all arguments.
    """
    values: dict[str, Any] = {}

    def note(guards: Sequence[Any]) -> list[bool]:
        """Note what guards are about, in the place of keeping them; names with __ are Dynamo's own."""
        for guard in guards:
            telling = guard.name and "___" not in guard.name and not guard.name.startswith("__import__(")
            if guard.has_value and telling and guard.guard_type not in _IGNORED:
                values[guard.name] = guard.value
        return [False] * len(guards)

    how: dict[str, Any] = {"backend": BACKEND, "fullgraph": True, "dynamic": False}
    options = tuning(function, args)
    compiler: Any = torch.compile(function, **how, options={**options, "guard_filter_fn": note})
    if not hasattr(compiler, "aot_compile"):
        return Loaded(function, {}, {}, torch.compile(function, **how, options=options or None)), None
    made = compiler.aot_compile((tuple(args), {}))
    values = dict(sorted(values.items()))
    return Loaded(function, {name: described(value) for name, value in values.items()}, _same(values), made.fn), made


def _compile(function: Callable[..., Any], args: Sequence[Any]) -> tuple[Loaded, Any]:
    """Do the same; what a compiler that was killed left of a library is removed, which Inductor would try to load."""
    while True:
        try:
            return compile_function(function, args)
        except Exception as error:
            cut = re.search(r"ImportError: (/\S+\.so): ", str(error))
            if cut is None or not (library := Path(cut[1])).exists():
                raise
            library.unlink()


def tuning(function: Callable[..., Any], args: Sequence[Any]) -> dict[str, Any]:
    """Return Inductor's options for a function of these arguments.

    On CUDA a layer's products of one row become kernels that read the weights once and belong to their neighbours.
    "Coordinate descent" finds the sizes of their blocks, at the first run. Nothing else is tuned (docs/cuda.md).
    """
    x = next((arg for arg in args if isinstance(arg, Tensor) and arg.dim() > 1), None)  # [B, N, ...]
    one_row = x is not None and x.is_cuda and x.shape[:2].numel() == 1 and function.__name__ == "forward"
    return {"coordinate_descent_tuning": True} if one_row else {}


def _content(loaded: Loaded, made: Any) -> bytes:
    """Return what a file is to hold."""
    sources = {part.module: _checksum(part.module) for part in made.source_info().inlined_sources}
    code = type(made).serialize(made).serialized_data
    head = {"facts": loaded.facts, "same": loaded.same, "sources": sources, "code": hashlib.sha256(code).hexdigest()}
    text = json.dumps(head).encode()
    return str(len(text)).encode().ljust(HEAD) + text + code


@functools.cache
def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


@functools.cache
def _checksum(module: str) -> str:
    """Return the checksum of a module's source; empty if it has none, or is none of this process."""
    if (found := sys.modules.get(module)) is None:
        return ""
    path = getattr(found, "__file__", None)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""


# ---- files -----------------------------------------------------------------------------------------------------------


class NotMade(RuntimeError):
    """No file has the compiled function, and it was not to be compiled here."""


def find(
    function: Callable[..., Any], args: Sequence[Any], name: str, compiles: bool = True, rehearses: bool = False
) -> Loaded:
    """Return a function compiled for these arguments, the owner first: from a file, or compiled and kept in one.

    name: of the file, without what `machine` says. compiles: False raises NotMade in place of compiling. rehearses: the
    function is not to be called, and NotMade is raised in place of waiting for a process that is making it.
    """
    prepare()
    path = folder() / f"{function.__qualname__}-{hashlib.sha256(f'{name} {machine(args)}'.encode()).hexdigest()[:32]}"
    found, _ = _look(path, function, args, not rehearses)
    if found is not None:
        return found
    if not compiles:
        raise NotMade(f"{function.__qualname__} is in no file yet")
    with _alone(path, not rehearses):
        found, place = _look(path, function, args, not rehearses)
        if found is not None:  # another process has made it meanwhile
            return found
        loaded, made = _compile(function, args)
        if made is None:
            return loaded
        try:
            content = _content(loaded, made)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(content)
            os.replace(file.name, place)
        except Exception as error:  # a full disk, say, or a function that holds what cannot be pickled
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            logger.warning("compiled code of %s is not kept: %s", function.__qualname__, why)
        return loaded


@functools.cache
def prepare() -> None:
    """Import Dynamo and Inductor, and tell them what every process of ours must agree on, as it is in names of files.

    A start does not wait for this import of two seconds, so `direct.py` calls this with the first function.
    """
    os.environ.setdefault("TORCH_WARM_POOL", "0")  # processes that compile for CUDA alone
    from torch._dynamo import config as dynamo
    from torch._inductor import compile_fx, config, cpp_builder, cpu_vec_isa  # noqa: F401

    dynamo.enable_aot_compile = True  # the default since PyTorch 2.13
    # Every function is traced once, so what the operations of one trace tell the next is not worth keeping.
    dynamo.fake_tensor_cache_enabled = False
    dynamo.recompile_limit = max(dynamo.recompile_limit, 1000)  # of a PyTorch without `aot_compile`: a graph a shape
    # Unset, it would be missing from the key, and code be made for another number of threads.
    config.cpp.threads = torch.get_num_threads()
    template.lower()
    if not has_compiler():
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
    gpu = next((torch.cuda.get_device_name(arg.device) for arg in args if isinstance(arg, Tensor) and arg.is_cuda), "")
    return f"{_fixed()} {gpu} {hashlib.sha256(repr(_options()).encode()).hexdigest()}"


def _options() -> Any:
    from torch._inductor import config

    return sorted((name, str(value)) for name, value in config.save_config_portable().items())


@functools.cache
def _fixed() -> str:
    """Return the part of `machine` that stays while this process lives."""
    package = Path(__file__).parent.parent
    lowerings = sorted(path for place in (".", "cpu", "cuda") for path in (package / place).glob("*.py"))
    code = hashlib.sha256(b"".join(path.read_bytes() for path in lowerings)).hexdigest()
    cpu = torch.cpu.get_capabilities()
    parts = (FORMAT, torch.__version__, platform.python_version(), platform.machine(), sorted(cpu.items()), code)
    return repr(parts)


def _look(path: Path, function: Callable[..., Any], args: Sequence[Any], loads: bool) -> tuple[Loaded | None, Path]:
    """Return the function of the first file of a name that is right for these arguments, if any, and the file's place.

    If there is none, it is the place of a new file. loads: whether the function will be called.
    """
    number = -1
    while True:
        number += 1
        place = path.with_name(f"{path.name}.{number}")
        try:
            with open(place, "rb") as file:
                if not _ours(os.fstat(file.fileno())):
                    raise PermissionError("it can be written by others")
                head = json.loads(file.read(int(file.read(HEAD))))
                loaded = Loaded(function, head["facts"], head["same"], function)
                stale = any(_checksum(module) != checksum for module, checksum in head["sources"].items())
                if stale or not loaded.fits(args):
                    continue
                if not loads:
                    return loaded, place
                code = file.read()
            if hashlib.sha256(code).hexdigest() != head["code"]:
                raise ValueError("it is not whole")
            made: Any = torch.compiler.load_compiled_function(io.BytesIO(code), f_globals=function.__globals__)
            return loaded._replace(call=made.fn), place
        except FileNotFoundError:
            return None, place
        except Exception as error:  # unpickling a damaged file, or one of another release, may raise anything
            logger.warning("%s cannot be loaded and is made anew: %s: %s", place, type(error).__name__, error)
            place.unlink(missing_ok=True)
            return None, place


@contextmanager
def _alone(path: Path, waits: bool) -> Iterator[None]:
    """Within this, no other process makes a file of this name; raises NotMade if one does and this is not to wait."""
    with open(f"{path}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))  # a killed process's lock is released
        except BlockingIOError:
            raise NotMade(f"another process makes {path.name}") from None
        yield


# ---- the folder ------------------------------------------------------------------------------------------------------


def folder() -> Path:
    """Return the folder of the files, in Inductor's cache; it exists.

    A cache that others can write is replaced by one that only this process and its children have.
    """
    if CACHE not in os.environ and (temporary := own_compile_cache()) is not None:
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
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
    own = tempfile.mkdtemp(prefix="minispec-inductor-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    logger.warning("compiled code is not kept in %s, since %s; it is in %s until the end", cache, why, own)
    os.environ[CACHE] = own
    return _folder(own)


def is_empty() -> bool:
    """Return whether there is no file at all."""
    return not any(folder().glob("*.0"))


def take_from(source: Path) -> None:
    """Copy what a folder that `minispec.compile` filled has and our cache lacks, with the machine code beside it."""
    source, into = source.resolve(), folder().parent
    if not source.is_dir() or (why := untrusted(source)) is not None:
        logger.warning("--compiled-files %s is not used: %s", source, why if source.is_dir() else "it is no folder")
        return
    for found in source.rglob("*"):
        place = into / found.relative_to(source)
        if place.exists() or not stat.S_ISREG(found.lstat().st_mode) or not _ours(found.lstat()):
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
            shutil.copyfile(found, file.name)
        os.replace(file.name, place)


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
