"""How much there is to read: lines, statements and tokens of a package (`python -m benchmarks.yardstick_lines`).

Lines are those of the file, empty ones included. Statements are the nodes of `ast.stmt`; a docstring is one, since it
is an expression statement, and is left out. Tokens are those of `tokenize` that Python acts on: neither comments nor
docstrings, nor what stands for line ends and indentation. So a line that is joined with another one lowers the lines
and not the statements, and an aim on lines counts only where statements fall too.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
          tokenize.ENDMARKER}  # fmt: skip
HOLDERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Size(NamedTuple):
    """What reading takes."""

    files: int
    lines: int
    statements: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.files} files, {self.lines:,} lines, {self.statements:,} statements, {self.tokens:,} tokens"


def docstrings(tree: ast.Module) -> set[tuple[int, int]]:
    """Return where the docstrings of a module begin: line from 1, column from 0 in bytes."""
    return {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(tree)
        if isinstance(node, HOLDERS) and ast.get_docstring(node, clean=False) is not None
    }


def size_of(source: str) -> Size:
    """Return the size of one file."""
    tree = ast.parse(source)
    documented = docstrings(tree)
    statements = sum(isinstance(node, ast.stmt) for node in ast.walk(tree)) - len(documented)
    tokens = sum(token.type not in LAYOUT and token.start not in documented
                 for token in tokenize.generate_tokens(io.StringIO(source).readline))  # fmt: skip
    return Size(1, len(source.splitlines()), statements, tokens)


def size_of_files(paths: Iterable[Path]) -> Size:
    """Return the size of several files together."""
    sizes = [size_of(path.read_text(encoding="utf-8")) for path in paths]
    return Size(*map(sum, zip(*sizes, strict=True))) if sizes else Size(0, 0, 0, 0)


def sizes(package: Path) -> dict[str, Size]:
    """Return the sizes of a package and of its top level."""
    return {"package": size_of_files(package.rglob("*.py")), "top level": size_of_files(package.glob("*.py"))}


if __name__ == "__main__":
    for part, size in sizes(Path(__file__).resolve().parent.parent / "minispec").items():
        print(f"{part}: {size}")
