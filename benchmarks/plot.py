"""What bench.py measured, as a picture: `python bench.py --plot FILE.png`, or of rows that were written before:

    python bench.py --json rows.json
    python -m benchmarks.plot rows.json FILE.png

For each set of prompts and temperature there is a line of three panels: tokens/s by batch and method; the share of
drafts accepted at each depth, of those steps that reached it; and the mean time of a decode step by the nodes of its
trees, where 1 is plain decoding. A method has one colour everywhere. `pip install 'minispec[plot]'` brings matplotlib.

Read next: `bench.py`, whose rows these are.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMATS = (".png", ".svg", ".pdf")


@dataclass
class Row:
    """A line of bench.py's table and an object of its --json: one contestant, batch, set of prompts and temperature.

    A new figure is a field here, its value in `Results.row` of bench.py, and its column in `COLUMNS` there.
    """

    name: str
    batch: int
    prompts: str
    temperature: float
    tokens_per_s: float
    decode_tokens_per_s: float | None
    accept_length: float | None
    accept_length_without_loops: float | None
    accepted_by_depth: list[float]
    speedup: float | None
    tokens: int
    same_as_none: float | None
    drafter_ms_per_step: float | None
    host_ms_per_step: float | None
    forwards_per_s: float | None
    shapes: dict[str, float] | None  # shares of decode steps by the nodes of their trees
    lookup_shares: tuple[float, float] | None  # of verify steps, and of their tokens
    step_ms: dict[str, float] | None = None  # mean of a decode step by the nodes of its trees; drawn, not in the table


def objection(path: Path) -> str | None:
    """Return why no picture can be written to this path, in one line; None if it can."""
    if importlib.util.find_spec("matplotlib") is None:
        return "needs matplotlib: pip install 'minispec[plot]'"
    if path.suffix.lower() not in FORMATS:
        return f"{path}: must end in {', '.join(FORMATS)}"
    return None if path.absolute().parent.is_dir() else f"{path}: there is no folder {path.absolute().parent}"


def draw(rows: Sequence[Row], path: Path, caption: str = "") -> None:
    """Draw rows to a file whose ending says its format; the caption says on what they were measured."""
    from matplotlib.figure import Figure  # not pyplot, which would look for a screen

    groups = {(row.prompts, row.temperature): [] for row in rows}
    for row in rows:
        groups[row.prompts, row.temperature].append(row)
    names = list(dict.fromkeys(row.name for row in rows))
    colours = {name: f"C{i % 10}" for i, name in enumerate(names)}
    figure = Figure(figsize=(15, 4.2 * len(groups) + 0.6), layout="constrained")
    for axes, ((prompts, heat), several) in zip(figure.subplots(len(groups), 3, squeeze=False), groups.items(),
                                                strict=True):  # fmt: skip
        speeds(axes[0], several, colours)
        depths(axes[1], several, colours)
        times(axes[2], several, colours)
        what = f"{prompts} prompts" + (f", temperature {heat:g}" if heat else "")
        for ax, title in zip(axes, ("tokens/s", "drafts accepted, by depth", "decode step, by tree"), strict=True):
            ax.set_title(f"{title} ({what})", fontsize=11)
            ax.spines[["top", "right"]].set_visible(False)
    handles = [figure.axes[0].plot([], [], color=colours[name], linewidth=6)[0] for name in names]
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 6), frameon=False)
    figure.suptitle(caption, fontsize=9, color="0.35")
    figure.savefig(path, dpi=120)


def speeds(ax: Any, rows: Sequence[Row], colours: dict[str, str]) -> None:
    """Bars of tokens/s, side by side for each batch size, with their numbers."""
    batches = sorted({row.batch for row in rows})
    here = [name for name in colours if any(row.name == name for row in rows)]
    for i, name in enumerate(here):
        mine = [row for row in rows if row.name == name]
        places = [batches.index(row.batch) + (i - (len(here) - 1) / 2) * 0.8 / len(here) for row in mine]
        bars = ax.bar(places, [row.tokens_per_s for row in mine], 0.76 / len(here), color=colours[name])
        ax.bar_label(bars, fmt="%.0f", fontsize=8, padding=1)
    ax.set_xticks(range(len(batches)), [f"batch {batch}" for batch in batches])
    ax.margins(y=0.1)


def depths(ax: Any, rows: Sequence[Row], colours: dict[str, str]) -> None:
    """Lines of the share accepted at each depth, for the smallest batch, since texts are the same at all."""
    smallest = min(row.batch for row in rows)
    deepest = 1
    for row in rows:
        if row.batch == smallest and row.accepted_by_depth:
            deepest = max(deepest, len(row.accepted_by_depth))
            ax.plot(range(1, len(row.accepted_by_depth) + 1), row.accepted_by_depth, "o-", color=colours[row.name])
    ax.set(ylim=(0, 1.03), xlabel="depth in the tree", ylabel=f"share of steps that reached it, batch {smallest}")
    ax.set_xticks(range(1, deepest + 1))


def times(ax: Any, rows: Sequence[Row], colours: dict[str, str]) -> None:
    """Mean milliseconds of a decode step by nodes; the batch size stands beside the points, and joins them."""
    sizes: set[int] = set()
    for row in rows:
        points = sorted((int(nodes), ms) for nodes, ms in (row.step_ms or {}).items())
        if points:
            sizes |= {nodes for nodes, _ in points}
            ax.plot(*zip(*points, strict=True), "o-", color=colours[row.name], linewidth=1)
            ax.annotate(f" {row.batch}", points[-1], fontsize=8, color="0.35")
    ax.set(ylim=(0, None), xlabel="nodes of a tree; 1 is plain; the batch size beside the points", ylabel="ms")
    ax.set_xticks(sorted(sizes))


def main(argv: Sequence[str] | None = None) -> None:
    """Draw what `bench.py --json` wrote."""
    commands = argparse.ArgumentParser(prog="python -m benchmarks.plot", description="Draw what bench.py --json wrote.")
    commands.add_argument("rows", type=Path, help="the file that bench.py --json wrote")
    commands.add_argument("picture", type=Path, help=f"the file to write, {', '.join(FORMATS)}")
    args = commands.parse_args(argv)
    if said := objection(args.picture):
        commands.exit(2, f"{commands.prog}: error: {said}\n")
    report = json.loads(args.rows.read_text())
    draw([Row(**row) for row in report["results"]], args.picture, report["hardware"])


if __name__ == "__main__":
    main()
