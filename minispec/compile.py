"""`python -m minispec.compile FLAGS --out FOLDER`: compile all that a server with these flags needs, and end.

A server on a CPU reads such a folder by `--compiled-files FOLDER`, so that it need not compile. What was made for
another processor, PyTorch or source is left aside, and made anew in the user's own cache.

Read next: `load/files.py`, for what is in the folder.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from minispec.load.flags import config_from_args
from minispec.load.machine import CACHE, code_folder


def main(argv: Sequence[str] | None = None) -> None:
    """Load the model that the flags name, compile everything, and leave the files in the folder."""
    parser = argparse.ArgumentParser(prog="python -m minispec.compile", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="where the files go; made if missing")
    args, flags = parser.parse_known_args(argv)
    config = config_from_args(flags)
    if config.tp_size > 1 or config.device == "cuda":
        parser.error("--tp-size and --device cuda: files are made for one process on a CPU")
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    args.out.mkdir(mode=0o755, parents=True, exist_ok=True)
    os.environ[CACHE] = str(args.out.resolve())
    from minispec.llm import LLM  # here, since --help need not wait for torch
    from minispec.load.files import HEADERS

    llm = LLM(config=config)
    shutil.rmtree(code_folder() / HEADERS, ignore_errors=True)  # which only a compiler reads
    if not llm.compiled:
        sys.exit("minispec: error: nothing was compiled: see above")


if __name__ == "__main__":
    main()
