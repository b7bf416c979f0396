"""The code that torch.compile writes for CUDA, kept as text and never loaded, and the kernels that this code launches.

Inside `Lowerings.kept` each graph is compiled by Inductor as on a GPU, up to the text of its code. What would be
measured on a GPU is decided here: a matrix product is the library's (cuBLAS), since nothing else is known of the times.
In the code's place the graph's operations run on fake tensors, so what comes after the graph gets tensors of the right
shapes and strides. Read next: `lowering.py` and `kernels.py`, which use it.
"""

from __future__ import annotations

import ast
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.fake_gpu import pretend_h200
from minispec.compiled import Key, Step
from minispec.load.files import MARKS, any_size, tuning

OWN = "minispec"  # the namespace of this project's operators
REGION = "repeated_subgraph"  # so begin the names of functions that torch.compile makes of regions
# Operations that launch nothing and are not views.
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "sym_size", "device"}


class Source(NamedTuple):
    """What the checks read in the code of a graph."""

    kernels: dict[str, str]  # Triton's, by name
    calls: dict[str, list[str]]  # by kernel: the names of the tensors it is run on
    sizes: dict[str, int]  # numbers of elements of inputs and buffers, by name
    launches: list[str]  # all calls that launch a kernel: Triton's kernels, the libraries', operators


def parse(source: str) -> Source:
    """Read the kernels, their calls and the tensors' sizes out of the code of a graph."""
    module = ast.parse(source)
    functions = (node for node in module.body if isinstance(node, ast.FunctionDef))
    regions = {node.name: node for node in functions if node.name.startswith(REGION)}
    found = Source({}, {}, {}, launched(module, regions))
    for node in ast.walk(module):
        call = node.value if isinstance(node, (ast.Assign, ast.Expr)) else None
        if not isinstance(call, ast.Call):
            continue
        name, arguments = ast.unparse(call.func), [ast.unparse(argument) for argument in call.args]
        if name == "async_compile.triton":
            found.kernels[arguments[0].strip("'")] = ast.literal_eval(call.args[1])
        elif name.endswith(".run"):
            found.calls[name.removesuffix(".run")] = arguments
        elif name == "assert_size_stride":
            found.sizes[arguments[0]] = elements(arguments[1])
        elif name.startswith("empty_strided_") and isinstance(node, ast.Assign):
            found.sizes[ast.unparse(node.targets[0])] = elements(arguments[0])
    return found


def launched(code: ast.AST, regions: Mapping[str, ast.FunctionDef]) -> list[str]:
    """Return the calls in `code` that launch a kernel; a region's count as often as the region is called."""
    names = []
    for part in ast.iter_child_nodes(code):
        if isinstance(part, ast.Call) and launches(name := ast.unparse(part.func)):
            names.append(name)
        if isinstance(part, ast.Call) and (region := regions.get(ast.unparse(part.func))):
            names += launched(region, regions)
        if part not in regions.values():
            names += launched(part, regions)
    return names


class _Ones(dict[str, int]):
    """Names that all stand for 1."""

    def __missing__(self, name: str) -> int:
        return 1


def elements(shape: str) -> int:
    """Return the number of elements of a shape, written as in code; dimensions of any length count as 1."""
    return math.prod(eval(shape, {}, _Ones()))


def launches(name: str) -> bool:
    """Return whether a call of this name in the code of a graph launches a kernel."""
    library = name.startswith(("extern_kernels.", "torch.ops.", "aten."))
    return library or name.startswith("triton_") and name.endswith(".run") or name.endswith(".zero_")


class Launches(TorchDispatchMode):
    """Counts the operations that launch a kernel; an operator of this project counts as what it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Count one operation, then run it."""
        kwargs = kwargs or {}
        with self:
            if func is torch.ops.minispec.write_rows.default:  # it looks at addresses, which fake tensors have not
                self.names.append("aten.index_copy_")
                return None
            if func.namespace == OWN:
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
            if func.namespace == "aten":  # in inference mode some come whole
                if (parts := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return parts
        views = [part.alias_info for part in func._schema.returns if part.alias_info is not None]
        if func.overloadpacket.__name__ not in FREE and all(view.is_write for view in views):
            self.names.append(str(func))
        return func(*args, **kwargs)


@dataclass
class Graph:
    """What torch.compile writes for one graph."""

    text: str
    offered: list[int]  # by call of FlexAttention: how many kernels there are to choose from
    own: list[str] = field(default_factory=list)  # what this project's operators in the graph launch

    def __post_init__(self) -> None:
        self.source = parse(self.text)

    @property
    def launches(self) -> list[str]:
        """All that the graph launches, by name."""
        return [name for name in self.source.launches if not name.startswith(f"torch.ops.{OWN}.")] + self.own


def autotuned(function: Step) -> Step:
    """Return a function compiled for CUDA with the options and open batches of `DirectStep`, and kept in no file."""
    compiled: dict[bool, Step] = {}

    def call(*args: Any) -> Any:
        options = tuning(function, args)
        if bool(options) not in compiled:
            compiled[bool(options)] = torch.compile(function, fullgraph=True, dynamic=False, options=options or None)
        key = next((arg for arg in args if isinstance(arg, Key)), Key())
        with any_size(args, key):
            result = compiled[bool(options)](*args)
        for leaf in tree_leaves(result):
            for mark in MARKS if isinstance(leaf, Tensor) else ():
                vars(leaf).pop(mark, None)
        return result

    return call


class _Written(Exception):
    """The code is written; nothing is to be loaded."""


class Lowerings:
    """All graphs that torch.compile has written, and those that ran since `ran` was emptied, in order."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self.ran: list[Graph] = []
        self._offered: list[int] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Let torch.compile write code for an H200 within this context; use a process of its own."""
        import torch._inductor.config
        from torch._inductor import compile_fx as module
        from torch._inductor.graph import GraphLowering
        from torch._inductor.select_algorithm import AlgorithmSelectorCache

        torch._dynamo.reset()
        whole = partial(module.compile_fx, inner_compile=partial(self._inner, module.compile_fx_inner))
        settings = {"fx_graph_cache": False, "fx_graph_remote_cache": False, "compile_threads": 1}
        settings |= {"joint_graph_constant_folding": False}  # it computes constants on the device
        with ExitStack() as stack:
            stack.enter_context(pretend_h200())
            stack.enter_context(torch.inference_mode())
            stack.enter_context(torch._inductor.config.patch(settings))
            stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
            stack.enter_context(mock.patch.object(module, "compile_fx", whole))
            stack.enter_context(mock.patch.object(GraphLowering, "save_output_code", staticmethod(self._keep)))
            stack.enter_context(mock.patch.object(AlgorithmSelectorCache, "__call__", self._choose))
            yield

    def _choose(self, name: str, choices: Sequence[Any], *args: Any, **options: Any) -> tuple[Any, Any]:
        """Choose a kernel where a GPU would measure: the library's if there is one, else the first."""
        from torch._inductor.select_algorithm import ExternKernelCaller, NoValidChoicesError

        if not choices:
            raise NoValidChoicesError(f"No choices for {name}")
        if name.startswith("flex"):
            self._offered.append(len(choices))
        choice = next((choice for choice in choices if isinstance(choice, ExternKernelCaller)), choices[0])
        return choice.output_node(), choice

    def _keep(self, text: str) -> None:
        """Keep the code of a graph, and go no further: to load it takes a GPU."""
        from torch._inductor.virtualized import V

        self.graphs.append(Graph(text, self._offered, _own_launches(V.graph.module)))
        raise _Written

    def _inner(self, compile_inner: Callable[..., Any], graph: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        """Compile a graph as far as its code, and return a function that runs its operations in place of that."""
        # Inductor changes the graph. Its tensors are shared with the copy, since fake ones cannot be copied.
        whole, before, self._offered = fx.GraphModule(graph, copy.deepcopy(graph.graph)), len(self.graphs), []
        try:
            compile_inner(graph, inputs, **options)
        except Exception:
            if len(self.graphs) == before:
                raise
        written = self.graphs[-1]

        def run(given: list[Any]) -> Any:
            self.ran.append(written)
            made = whole(*given)
            given.clear()
            return made

        run._boxed_call = True
        return run


def _own_launches(graph: fx.GraphModule) -> list[str]:
    """Return what this project's operators in a graph launch, those of a region at each of its calls."""
    calls = [node for node in graph.graph.nodes if node.target is torch.ops.higher_order.invoke_subgraph]
    regions = [_own_launches(getattr(graph, call.args[0].target)) for call in calls]
    with Launches() as counted:
        for node in graph.graph.nodes:
            if isinstance(node.target, OpOverload) and node.target.namespace == OWN:
                value = lambda given: given.meta["val"] if isinstance(given, fx.Node) else given  # noqa: E731
                node.target(*tree_map(value, node.args), **tree_map(value, node.kwargs))
    return sum(regions, counted.names)
