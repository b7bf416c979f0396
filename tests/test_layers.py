"""The shape of the code, read from its syntax trees: who imports whom, what the model knows, what occurs nowhere.

A rule that finds nothing anywhere proves nothing. So each rule is a function from source to complaints, and it runs
over the package and also over a few lines that break it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "minispec"
SOURCES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path.read_text(encoding="utf-8")
    for path in sorted(PACKAGE.rglob("*.py"))
}

# Floors from the ground up. A file imports from its own folder and from the floors below, never from above or beside.
# "" is the core, the files at the top of the package but for those named here, which put folders together.
FLOORS = (
    ("",), ("asked", "replies", "cpu", "cuda"), ("ranks",), ("config",), ("load",), ("llm",),
    ("serve", "train", "explain", "compile"), ("replicas",), ("server",), ("__init__",),
)  # fmt: skip
FLOOR = {place: floor for floor, places in enumerate(FLOORS) for place in places}
TABLES = ("load.chat_templates", "replies.formats", "load.sglang_flags")  # import nothing: the flags read them
ALGORITHMS = {"NONE", "NGRAM", "EAGLE", "EAGLE3", "NEXTN", "MTP", "DFLASH", "DSPARK", "STANDALONE"}

Rule = Callable[[str, str], Iterator[str]]


def imported(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and full name of everything a source imports, wherever the import stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def place_of(module: str) -> str:
    """Return the folder or the file at the top that a module belongs to, as FLOORS names it; "" for the core."""
    first, _, rest = module.partition(".")
    return first if rest or first in FLOOR else ""


def named_module(name: str) -> str:
    """Return the module of the package that a full name, as `imported` yields it, lies in."""
    parts = name.split(".")
    return next((".".join(parts[1:n]) for n in (3, 2) if ".".join(parts[1:n]) in SOURCES), "__init__")


def imports_point_down(module: str, source: str) -> Iterator[str]:
    """No file imports from a floor above its own or from another place of its floor; imports are absolute."""
    for line, name in imported(source):
        if name.startswith("."):
            yield f"{module}:{line}: relative import {name}"
        elif name.split(".")[0] == "minispec" and (other := named_module(name)) not in TABLES:
            here, there = place_of(module), place_of(other)
            if here != there and FLOOR[there] >= FLOOR[here]:
                yield f"{module}:{line}: imports {name}, which is not below it"


def tables_import_nothing(module: str, source: str) -> Iterator[str]:
    """The tables that flags are made of need nothing of the package."""
    if module in TABLES:
        yield from (f"{module}:{line}: {name}" for line, name in imported(source) if name.startswith("minispec"))


def only_attention_knows_flex_attention(module: str, source: str) -> Iterator[str]:
    """FlexAttention is imported in one file."""
    if module != "attention":
        yield from (f"{module}:{line}: {name}" for line, name in imported(source) if "flex_attention" in name)


def only_the_schema_knows_pydantic(module: str, source: str) -> Iterator[str]:
    """`LLM` and all that it is made of work without pydantic; only what a server asks of a reply parses by it too."""
    if not module.startswith(("serve.", "replies.")):
        yield from (f"{module}:{line}: {name}" for line, name in imported(source) if name.startswith("pydantic"))


def model_knows_attend_alone(module: str, source: str) -> Iterator[str]:
    """The model imports its experts, its config and operators; none of these names what lies behind `attend`."""
    parts = ("model", "experts", "model_config", "operators")
    if module not in parts:
        return
    allowed = {f"minispec.{part}" for part in parts[parts.index(module) + 1 :]}
    for line, name in imported(source):
        if name.startswith(("minispec", ".")) and name.rpartition(".")[0] not in allowed:
            yield f"{module}:{line}: {name}"
    hidden = re.compile(r"page|tree|slot|draft|quant|pack(?!age)|parallel", re.IGNORECASE)
    for node in ast.walk(ast.parse(source)):
        name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None)
        name = name or (node.name if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else None)
        if isinstance(name, str) and hidden.search(name):
            yield f"{module}:{node.lineno}: {name}"


def steps_know_one_interface_of_drafters(module: str, source: str) -> Iterator[str]:
    """Engine, scheduler and buffers import no drafter, and nothing that attaches at `seams.py` to some requests."""
    if module not in ("engine", "scheduler", "buffers"):
        return
    drafters = {name for name in SOURCES if re.search(r"^class .*Drafter\)", SOURCES[name], re.MULTILINE)} - {"drafter"}
    for line, name in imported(source):
        other = named_module(name) if name.startswith("minispec.") else ""
        if "." in other or other in drafters | {"corpora"}:
            yield f"{module}:{line}: imports {name}"


def errors_are_caught_by_type(module: str, source: str) -> Iterator[str]:
    """No bare except; BaseException only to pass it on."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler):
            name = node.type.id if isinstance(node.type, ast.Name) else None
            raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            if node.type is None or (name == "BaseException" and not raises):
                yield f"{module}:{node.lineno}: catches everything"


def public_things_have_docstrings(module: str, source: str) -> Iterator[str]:
    """Module, public classes, public functions and methods, but for those that another place or the name describes.

    These are a Protocol's stubs, properties of one statement, and methods of one statement in a class that has bases.
    """
    tree = ast.parse(source)
    if not module.endswith("__init__") and not ast.get_docstring(tree):
        yield f"{module}: no docstring"
    scopes: list[tuple[ast.AST, str]] = [(tree, module)]
    for scope, name in scopes:
        for node in ast.iter_child_nodes(scope):
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            if node.name.startswith("_"):
                continue
            if isinstance(node, ast.ClassDef):
                scopes.append((node, f"{name}.{node.name}"))
            if not ast.get_docstring(node) and not is_stub(node) and not needs_none(node, scope):
                yield f"{name}.{node.name}: no docstring"


def needs_none(node: ast.AST, scope: ast.AST) -> bool:
    """Return whether this is a property or, in a class with bases, a method, of one statement."""
    if isinstance(node, ast.ClassDef) or not isinstance(scope, ast.ClassDef) or len(node.body) > 1:
        return False
    return bool(scope.bases) or any(ast.unparse(one) == "property" for one in node.decorator_list)


def is_stub(node: ast.AST) -> bool:
    """A body that is `...` alone."""
    body = getattr(node, "body", [])
    return len(body) == 1 and isinstance(body[0], ast.Expr) and getattr(body[0].value, "value", None) is ...


def signatures_are_typed(module: str, source: str) -> Iterator[str]:
    """Every parameter and every return has a type."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        arguments = node.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        bare = [a.arg for a in named if a is not None and a.annotation is None and a.arg not in ("self", "cls")]
        if bare or node.returns is None:
            yield f"{module}:{node.lineno}: {node.name} lacks types for {bare or 'its return'}"


def functions_are_short_and_take_few_things(module: str, source: str) -> Iterator[str]:
    """No function has more than six parameters besides self, or more than sixty lines."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if (count := sum(a.arg not in ("self", "cls") for a in named)) > 6:
            yield f"{module}:{node.lineno}: {node.name} has {count} parameters"
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > 60:
            yield f"{module}:{node.lineno}: {node.name} has {lines} lines"


def methods_are_named_in_one_table(module: str, source: str) -> Iterator[str]:
    """Nobody but the flags and the table of drafters compares with the name of a speculation method."""
    if module in ("config", "load.drafters"):
        return
    for node in ast.walk(ast.parse(source)):
        compared = []
        if isinstance(node, ast.Compare):
            compared = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            compared = [node.value]
        strings = {leaf.value for side in compared for leaf in ast.walk(side) if isinstance(leaf, ast.Constant)}
        if found := {s for s in strings if isinstance(s, str) and s.upper() in ALGORITHMS}:
            yield f"{module}:{node.lineno}: compares with {found}"


def nothing_forbidden_is_named(module: str, source: str) -> Iterator[str]:
    """No code from model folders is run, no attribute smells of a mode.

    Files of compiled functions are code, which is loaded only if nobody else can have written them.
    """
    runs = () if module == "load.files" else ("eval", "exec")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in runs:
            yield f"{module}:{node.lineno}: {node.func.id}"
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and getattr(node.value, "value", None):
            yield f"{module}:{node.value.lineno}: trust_remote_code"
        if isinstance(node, (ast.Name, ast.Attribute)):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if "is_speculative" in name:
                yield f"{module}:{node.lineno}: {name}"


def docstrings_name_files_that_exist(module: str, source: str) -> Iterator[str]:
    """'Read next: x.py' leads somewhere."""
    yield from (f"{module}: {name}" for name in missing_files(ast.get_docstring(ast.parse(source)) or ""))


def missing_files(text: str) -> Iterator[str]:
    """Yield the Python and Markdown files a text names that are nowhere in the project."""
    folders = [ROOT, *(ROOT / name for name in ("tests", "benchmarks", "docs"))]
    folders += [PACKAGE, *(path for path in PACKAGE.iterdir() if path.is_dir())]
    for name in re.findall(r"(?<![\w/.*-])(?:[\w.-]+/)*[\w-]+\.(?:py|md)\b", text):
        if not any((folder / name).is_file() for folder in folders):
            yield name


RULES: dict[Rule, tuple[str, str]] = {  # rule: a module name and lines in it that break the rule
    imports_point_down: ("kv", "def f():\n    from minispec.cpu import huge_pages"),
    tables_import_nothing: ("replies.formats", "from minispec.tree import PADDING"),
    only_attention_knows_flex_attention: ("engine", "from torch.nn.attention.flex_attention import BlockMask"),
    only_the_schema_knows_pydantic: ("request", "from pydantic import BaseModel"),
    model_knows_attend_alone: ("model", "def forward(x, page_table): pass"),
    steps_know_one_interface_of_drafters: ("engine", "from minispec.beam import BeamDrafter"),
    errors_are_caught_by_type: ("kv", "try:\n    pass\nexcept:\n    pass"),
    public_things_have_docstrings: ("kv", '"""A file."""\nclass A:\n    """A."""\n    def f(self): return 1'),
    signatures_are_typed: ("kv", "def f(x) -> int: return x"),
    functions_are_short_and_take_few_things: ("kv", "def f(a, b, c, d, *, e, f, g): ..."),
    methods_are_named_in_one_table: ("scheduler", "if algorithm == 'NGRAM': pass"),
    nothing_forbidden_is_named: ("weights", "AutoModel.from_pretrained(x, trust_remote_code=True)"),
    docstrings_name_files_that_exist: ("kv", '"""Read next: `nowhere.py`."""'),
}


def test_every_folder_has_its_floor() -> None:
    folders = {module.partition(".")[0] for module in SOURCES if "." in module}
    assert folders <= set(FLOOR), "a new folder takes its place in FLOORS"
    assert len(SOURCES) > 15 and set(FLOOR) - {""} <= {place_of(module) for module in SOURCES}


def circles(imports: dict[str, set[str]]) -> list[str]:
    """Return the modules that import each other round about: those left when modules without imports are taken away."""
    left = dict(imports)
    while ready := [module for module, needs in left.items() if not needs & left.keys()]:
        for module in ready:
            del left[module]
    return sorted(left)


def test_no_imports_go_round_about() -> None:
    """Within a folder there are no floors; a circle would mean that two of its files are one."""
    outside = {path.stem: path for path in (ROOT / "bench.py", *sorted((ROOT / "benchmarks").glob("*.py")))}
    names = {f"minispec.{module}": source for module, source in SOURCES.items() if module != "__init__"}
    names |= {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path.read_text("utf-8")
              for path in outside.values()}  # fmt: skip
    imports = {}
    for name, source in names.items():
        found = {part for _, full in imported(source) for part in (full, full.rpartition(".")[0]) if part in names}
        imports[name] = found - {name}
    assert not circles(imports) and sum(map(len, imports.values())) > 300
    assert circles(imports | {"minispec.tree": {"minispec.kv"}, "minispec.kv": {"minispec.tree"}})[:2] != []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()}) == ["a", "b", "c"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps(rule: Rule) -> None:
    complaints = [line for module, source in SOURCES.items() for line in rule(module, source)]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_breach_is_seen_of(rule: Rule) -> None:
    assert list(rule(*RULES[rule])), "the rule misses its own example"


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("asked.steps", "from minispec.cpu.linear import own_heads"),  # beside
        ("kv", "import minispec.config"),  # up
        ("engine", "from minispec import LLM"),  # round about
        ("kv", "from .tree import ancestors"),
        ("server", "from minispec.nowhere import main"),  # no file
        ("load.weights", "from minispec.serve.auth import keys"),  # up, between folders
        ("load.weights", "from minispec.serve import auth"),
        ("ranks.link", "from minispec.config import Config"),
    ],
)
def test_forbidden_imports_are_seen(module: str, line: str) -> None:
    assert list(imports_point_down(module, line))


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("engine", "from minispec.lookup import Lookups"),
        ("scheduler", "import minispec.ngram"),
        ("buffers", "from minispec.corpora import Corpora"),
        ("scheduler", "from minispec.asked.steps import Asking"),
    ],
)
def test_drafters_are_not_imported_by_what_runs_steps(module: str, line: str) -> None:
    assert list(steps_know_one_interface_of_drafters(module, line))
    assert not list(steps_know_one_interface_of_drafters("asked.steps", line))
    assert not list(steps_know_one_interface_of_drafters(module, "from minispec.drafter import Drafter"))


def test_a_long_function_is_seen() -> None:
    lines = ["def f() -> None:", *["    pass"] * 60]
    assert list(functions_are_short_and_take_few_things("kv", "\n".join(lines)))
    assert not list(functions_are_short_and_take_few_things("kv", "\n".join(lines[:-1])))


def test_allowed_imports_pass() -> None:
    assert not list(imports_point_down("engine", "from minispec.kv import PagedKV\nimport torch"))
    assert not list(imports_point_down("load.build", "from minispec.cpu.linear import own_heads"))
    assert not list(imports_point_down("config", "from minispec.replies.formats import CALLS"))


def unlisted_files(page: str) -> list[str]:
    """Return the package's Python files that a page's list of files lacks, each under the folder it is in."""
    block = re.search(r"^```\nminispec/\n(.*?)^bench\.py", page, re.DOTALL | re.MULTILINE)[1]
    listed, folder = set(), ""
    for line in block.splitlines():
        if heading := re.match(r"  (\w+/)  ", line):
            folder = heading[1]
        depth = len(line) - len(line.lstrip())
        names = re.match(r"\s*((?:\w+\.\w+ ?)+)(?: |$)", line)
        listed |= {(folder if depth == 4 else "") + name for name in names[1].split()} if names else set()
    found = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if not path.stem.startswith("__")}
    return sorted(found - listed)


def test_the_page_on_architecture_lists_every_file_of_the_package() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert not unlisted_files(page)
    assert unlisted_files(page.replace("  kv.py ", "  vk.py ")) == ["kv.py"]
    assert unlisted_files(page.replace("info.py ", "")) == ["serve/info.py"]


def test_heads_of_modules_follow_the_readme_s_path() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    path = re.findall(r"`(\w+)\.py`", re.search(r"A reader's path: (.*?) last\.", page)[1])
    named = re.search(r"Read next: (.*?)last\.", SOURCES["__init__"], re.DOTALL)[1]
    assert len(path) > 7 and re.findall(r"`(\w+)\.py`", named) == path
    for module, following in zip(path, path[1:], strict=False):
        said = (ast.get_docstring(ast.parse(SOURCES[module])) or "").partition("Read next:")[2]
        assert f"`{following}.py`" in said, f"{module} does not lead to {following}"


def test_what_is_imported_is_declared() -> None:
    declared = set(re.findall(r"[\"\[, ]([\w-]+)(?:>=|\"|\[)", (ROOT / "pyproject.toml").read_text("utf-8")))
    names = {name.split(".")[0] for source in SOURCES.values() for _, name in imported(source)}
    outside = {name.replace("_", "-") for name in names - sys.stdlib_module_names - {"minispec", "__future__"}}
    outside.discard("pydantic-core")  # a part of pydantic
    assert len(outside) > 8 and not {name for name in outside if not declared & {name, name.replace("-", "_")}}


def test_pages_of_heads_and_docs_run_modules_that_exist() -> None:
    pages = [*ROOT.glob("docs/*.md"), *PACKAGE.glob("heads/*/README.md"), ROOT / "README.md"]
    named = {
        name
        for page in pages
        if page.stem != "log"
        for name in re.findall(r"`(?:python -m )?(minispec(?:\.\w+)+)`", page.read_text(encoding="utf-8"))
    }
    places = {name: ROOT / name.replace(".", "/") for name in named}
    assert named and not [n for n, place in places.items() if not place.is_dir() and not Path(f"{place}.py").is_file()]


@pytest.mark.parametrize("page", ["architecture", "cpu", "cuda", "glossary", "README"])
def test_pages_name_files_that_exist(page: str) -> None:
    path = ROOT / "README.md" if page == "README" else ROOT / f"docs/{page}.md"
    assert not list(missing_files(path.read_text(encoding="utf-8")))


def test_what_the_package_exports_brings_torch_only_when_it_is_asked_for() -> None:
    code = ("import sys, minispec; print('torch' in sys.modules, *(getattr(minispec, n).__name__ for n in "
            "minispec.__all__), 'torch' in sys.modules)")  # fmt: skip
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert said.split() == ["False", "LLM", "Draft", "Drafter", "HostDrafter", "RequestError", "SamplingParams", "True"]
