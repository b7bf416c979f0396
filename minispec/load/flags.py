"""From a command line to a `Config`, and docs/flags.md, which `python -m minispec.load.flags` prints.

The parser is made of the fields of `Config` and of the tables of SGLang's flags, and so is the page.

Read next: `sglang_flags.py`, the tables of SGLang's flags that have no use here.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from minispec.config import FLAGS, Config, flag_name
from minispec.load.sglang_flags import ARGUMENTS, GREEDY, INSTEAD, READ, RECORD, SPEC_V2, VARIABLES, foreign_flags

_TYPES = {"str": str, "int": int, "float": float, "Ints": int}  # of a field -> of a word on the command line
_ALIASES = {  # other spellings, SGLang's own and those of its documents' history
    "model_path": ("--model",),
    "tp_size": ("--tp", "--tensor-parallel-size"),
    "dp_size": ("--dp", "--data-parallel-size"),
    "mem_fraction_static": ("--mem-fraction", "--mem-frac"),
    "cuda_graph_max_bs": ("--cuda-graph-max", "--cuda-graph-max-bs-decode"),
    "cuda_graph_bs": ("--cuda-graph-bs-decode",),
    "disable_cuda_graph": ("--disable-decode-cuda-graph",),
    "speculative_algorithm": ("--speculative-algo",),
    "speculative_draft_model_path": ("--speculative-draft-model", "--speculative-draft"),
    "speculative_ngram_branch_length": ("--speculative-ngram-max-trie-depth",),  # its newer name
    "speculative_draft_window_size": ("--speculative-dflash-draft-window-size",),
}


def config_from_args(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> Config:
    """Parse a command line (default: the process's own); a bad one prints one line and exits with status 2.

    The line says what is missing before it complains of a flag: a model family first, then a method of drafting.
    environ: looked through for SGLang's variables; two act, and the others are noted.
    """
    parser = _parser()
    given, unknown = parser.parse_known_args(None if argv is None else list(argv))
    values = vars(given)
    notes, wrong = values.pop("notes", []), values.pop("refused", [])
    if unknown:
        known = [name for action in parser._actions for name in action.option_strings]
        close = difflib.get_close_matches(unknown[0].partition("=")[0], known, n=1, cutoff=0.8)
        hint = f"; did you mean {close[0]}?" if close else "; --help lists the flags"
        wrong = [*wrong, f"unknown argument {unknown[0]}{hint}"]
    if values.get("trust_remote_code"):
        notes = [*notes, "--trust-remote-code is without effect: code of a model repository never runs here"]
    asked, said = _variables(environ, values.get("speculative_eagle_topk"))
    notes, values = [*notes, *said], values | asked
    try:
        config = Config(**values, notes=tuple(notes))
    except ValueError as error:
        wrong = [str(error), *wrong]
    if wrong:
        parser.error(_unserved(values.get("model_path")) or wrong[0])
    return config


def _unserved(path: str | None) -> str:
    """Return the sentence on a model that is not served, by its config.json or else by its name; empty for others."""
    if path is None:
        return ""
    from minispec.load.architectures import NAMES, what_it_needs  # here, since it imports torch

    try:
        said = json.loads((Path(path) / "config.json").read_text("utf-8"))
        needs = what_it_needs(said.get("architectures") or [])
    except (OSError, ValueError, AttributeError):  # it is on the hub, say, which is asked when the flags are right
        bare = re.sub(r"[^a-z0-9]", "", path.rpartition("/")[2].lower())
        needs = next((need for name, need in NAMES.items() if name in bare), "")
    return f"{path} is not served: it needs {needs} (docs/models.md)" if needs else ""


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line; --help tells the rest."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse with underscores accepted for dashes in flag names."""
        words = []
        for word in sys.argv[1:] if args is None else args:
            name, equals, value = word.partition("=")
            words.append(name.replace("_", "-") + equals + value if word.startswith("--") else word)
        return super().parse_known_args(words, namespace)


class _Foreign(argparse.Action):
    """A flag of SGLang's with no meaning here: a note, or a line in `refused` where it asks for what is refused."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        accepted, reason = self.const
        given = " ".join([option_string or "", *values])
        if accepted is not None and " ".join(values) not in accepted:
            also = "".join(f"; {v} is accepted" for v in sorted(accepted) if v)
            namespace.refused = [*getattr(namespace, "refused", []), f"{given}: {reason}{also}"]
            return
        namespace.notes = [*getattr(namespace, "notes", []), f"{given} changes nothing: {reason}"]


def _variables(environ: Mapping[str, str], topk: int | None) -> tuple[dict[str, bool], list[str]]:
    """Return the fields that SGLang's environment variables set, and the notes on the others that are set."""
    names = sorted(name for name in environ if name.startswith("SGLANG_"))
    on = [name for name in names if environ[name].lower() in ("1", "true", "yes", "y")]
    notes = []
    if SPEC_V2 in on:
        trees = f"; with --speculative-eagle-topk {topk} trees are served all the same" if (topk or 1) > 1 else ""
        notes.append(
            f"{SPEC_V2} changes nothing: on CUDA steps overlap without it, unless --disable-overlap-schedule "
            f"is given{trees}"
        )
    if others := [name for name in names if name not in on or name not in (SPEC_V2, GREEDY, RECORD)]:
        notes.append(f"these environment variables of SGLang's are not read here: {', '.join(others)}")
    return {"force_greedy": GREEDY in on, "record_step_time": RECORD in on}, notes


@cache
def _parser() -> _Parser:
    """Build the command-line parser from the fields of `Config` and the table of foreign flags."""
    parser = _Parser(
        prog="python -m minispec.server", allow_abbrev=False, argument_default=argparse.SUPPRESS,
        description="Serve a language model over HTTP, OpenAI's and SGLang's endpoints, with speculative decoding.",
        epilog="Underscores may stand for dashes. docs/flags.md says what SGLang's other flags do here.",
        formatter_class=lambda prog: argparse.HelpFormatter(
            prog, max_help_position=min(44, shutil.get_terminal_size().columns // 3)
        ),
    )  # fmt: skip
    for title, flags in groupby(FLAGS, lambda f: f.metadata["group"]):
        group = parser.add_argument_group(title)
        for f in flags:
            meta, kind = f.metadata, f.type.split(" ")[0]
            names = (flag_name(f.name), *_ALIASES.get(f.name, ()))
            if kind == "bool":
                action = "store_true" if f.default is False else argparse.BooleanOptionalAction
                group.add_argument(*names, dest=f.name, action=action, help=meta["help"])
                continue
            shown = "" if f.default is None else f" (default: {f.default})"
            several = {"nargs": "+"} if kind == "Ints" else {}
            choices, word = ",".join(map(str, meta["choices"])), _TYPES[kind]
            metavar = f"{{{choices}}}" if choices else word.__name__.upper()
            kwargs = {"type": word, "metavar": metavar, "help": meta["help"] + shown, **several}
            group.add_argument(*names, dest=f.name, **kwargs)
    for flag, const in foreign_flags().items():
        parser.add_argument(flag, dest="notes", action=_Foreign, nargs="*", const=const, help=argparse.SUPPRESS)
    return parser


def flags_page() -> str:
    """Return the text of docs/flags.md: what each flag and environment variable of SGLang's does here."""
    foreign: dict[str, list[tuple[str, frozenset[str] | None]]] = {}  # by reason
    for flag, (accepted, reason) in foreign_flags().items():
        foreign.setdefault(reason, []).append((flag, accepted))
    lines, refused = [], []
    for reason, flags in foreign.items():
        names = f"`{' '.join(flag for flag, _ in flags)}`"
        values = ", ".join(f"`{flag} {value}`" for flag, accepted in flags for value in sorted(accepted or ()))
        lines.append((names, reason)) if flags[0][1] is None else refused.append((names, reason, values))
    acting = []
    for f in FLAGS:
        off = (flag_name(f"no_{f.name}"),) if f.type == "bool | None" else ()
        names = ", ".join(f"`{name}`" for name in (flag_name(f.name), *off, *_ALIASES.get(f.name, ())))
        what, _, unset = f.metadata["help"].partition("; default: ")
        acting.append((names, unset if f.default is None else f"`{f.default}`", what))
    instead = [
        (f"`{flag_name(name)} {value}`", f"`{taken}`", why)
        for name, values in INSTEAD.items() for value, (taken, why) in values.items()
    ]  # fmt: skip
    return "\n\n".join([
        "# Launch flags",
        "Written by `python -m minispec.load.flags` from the tables that the command line is parsed with; do not "
        "edit.\n"
        "A flag acts, or one line at start says what is done instead. A flag is refused if it would change what "
        "clients get, or would open or close a door; so are a value that cannot be, a model that is not served, and a "
        "flag that nobody knows. Underscores may stand for dashes.\n\n"
        f"The page follows SGLang's documentation on speculative decoding as read in {READ}, five older versions of "
        f"it, and the server arguments of {ARGUMENTS}. All launch commands of that documentation start "
        "(`python -m benchmarks.launch_commands`), but for those that need DeepSeek-V4.",
        "## Flags that act", markdown_table(("flag", "default", "what it does"), acting),
        "## Values taken as another one, with a line at start",
        markdown_table(("given", "taken as", "why"), instead),
        "A chain (`--speculative-eagle-topk 1`) needs no `--speculative-num-draft-tokens`: it has one node more than "
        "steps. A flag of another drafter than the one that runs does nothing, and a line says so.",
        "NGRAM on a CPU and lookups beside a head read two sources, a dictionary of each request's own text and the "
        "trie of all texts. The two match window sizes bound both, except that the dictionary knows no suffix of one "
        "token; what begins with \"trie:\" is of the trie alone. NGRAM on CUDA reads the trie alone, and so it does "
        "on a CPU with `--no-speculative-adaptive` or a number of draft tokens.",
        "The file of `--speculative-adaptive-config` has SGLang's form: `{\"1\": {\"candidate_steps\": [1, 3]}, \"8\": "
        "{\"candidate_steps\": [1]}}`. A key is the least batch of a range, and its list bounds the rounds that a step "
        "may draft there; plain steps are always allowed. Trees have two sizes: `--speculative-num-steps`, and the "
        "smallest number of the file below it. `ema_alpha`, `warmup_batches`, `update_interval`, `up_hysteresis`, "
        "`down_hysteresis` and `ceiling_coeff` are accepted and have no effect: here a smoothed accept length does not "
        "choose, but the expected tokens over the measured times of steps (docs/architecture.md, Steps).",
        "## Flags with a line at start, whatever their value",
        markdown_table(("flags", "what is done instead"), lines),
        "## Flags that are refused",
        markdown_table(("flags", "why", "accepted"), refused),
        "## SGLang's environment variables",
        f"`{GREEDY}` and `{RECORD}` act. The others are not read, and those that are set are named in a line at start.",
        markdown_table(("variable", "what holds here"), [(f"`{name}`", text) for name, text in VARIABLES.items()]),
    ]) + "\n"  # fmt: skip


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    cells = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells)


if __name__ == "__main__":
    sys.stdout.write(flags_page())
