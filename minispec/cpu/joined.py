"""The kernels of a compiled function in one C++ file.

Inductor calls the compiler once for each kernel. Each call first reads 150 MB of compiled headers and instantiates
templates of theirs, and links in the end: half a second, and a second for products. So here a call compiles several
kernels, each in a namespace of its own. Code and options are Inductor's, so bits stay.

The names that this needs of Inductor are private. A release without them compiles kernels one by one.

Read next: `load/files.py`, which asks for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

MOST = 8  # kernels in a file; a function's files are compiled side by side
COUNTED = "!= {arg_len}"  # Inductor's check of how many arguments a call has


class Kernel(NamedTuple):
    """What stands in the place of a kernel until all kernels of a function are known."""

    types: Sequence[str]  # of its arguments
    source: str


@functools.cache
def join_kernels() -> None:
    """Have Inductor compile kernels together from now on, if this release can."""
    from torch._inductor import async_compile, codecache

    compiler: Any = async_compile.AsyncCompile
    bindings: Any = getattr(codecache, "CppPythonBindingsCodeCache", None)
    if not hasattr(compiler, "cpp_pybinding") or COUNTED not in getattr(bindings, "suffix_template", ""):
        return
    stock = compiler.wait

    def wait(self: Any, scope: dict[str, Any]) -> None:
        """Compile the kernels among a module's globals, and put them in."""
        found = [(name, kernel) for name, kernel in scope.items() if isinstance(kernel, Kernel)]
        parts = [found[at : at + MOST] for at in range(0, len(found), MOST)]
        loads = [_load([kernel for _, kernel in part], bindings, compiler.submit) for part in parts]
        for part, load in zip(parts, loads, strict=True):
            scope |= {name: functools.partial(load(), number) for number, (name, _) in enumerate(part)}
        stock(self, scope)

    compiler.wait, compiler.cpp_pybinding = wait, lambda self, types, source: Kernel(types, source)


def _load(kernels: Sequence[Kernel], bindings: Any, submit: Any) -> Callable[[], Callable[..., None]]:
    """Start compiling; returns what waits for it and returns a function of a kernel's number and its arguments."""
    included: dict[str, None] = {}
    spaces, cases = [], []
    for number, (types, source) in enumerate(kernels):
        lines = source.replace('extern "C"', "static").splitlines()  # else all kernels would have one name
        included |= dict.fromkeys(line for line in lines if line.startswith("#include"))
        spaces += [f"namespace kernel{number} {{", *(line for line in lines if not line.startswith("#include")), "}"]
        args = [f"parse_arg<{kind.replace('const ', '')}>(args, {at})" for at, kind in enumerate(types, 1)]
        cases.append(f"case {number}: kernel{number}::kernel({', '.join(args)}); break;")
    call = f"switch (parse_arg<int64_t>(args, 0)) {{ {' '.join(cases)} }} Py_RETURN_NONE;"
    joined: Any = type("Joined", (bindings,), {
        "call_entry_function": call.replace("{", "{{").replace("}", "}}"),
        "suffix_template": bindings.suffix_template.replace(COUNTED, "< {arg_len}"),
    })  # fmt: skip
    return joined.load_pybinding_async(["int64_t"], "\n".join([*included, *spaces]), submit_fn=submit)
