"""What travels to a machine that has a GPU and no network, and what comes back: pieces of 15 MiB, in few loads.

At most 64 MiB travel there at a time, the tree of sources included, and at most eight files of 16 MiB come back.

    here   python -m benchmarks.carry pack --model MODEL.gguf --wheels FOLDER --cache FOLDER
    there  python -m benchmarks.carry unpack .carry/0                  after each load, and at the start of each command
    there  python -m benchmarks.carry collect OUT --cache FOLDER       after the stages of `benchmarks.gpu`
    here   python -m benchmarks.carry unpack .carry/* OUT              puts heads and results into the tree

`pack` takes minispec/heads out of the tree, since 47 MiB would travel each time, and deals its pieces and those of the
options, each of which may be left out, into the loads .carry/0, .carry/1 and so on. One load travels at a time, beside
the tree. `unpack` keeps pieces outside the tree, puts in place what is complete, and says what is missing. `collect`
writes one archive of results and logs, and compiled code where that is at most four pieces. Nothing but Python's own
library is needed, since other packages may have to be carried first.

Read next: `gpu.py`, which is to run there.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PIECE, TRAVELS, MOST_BACK = 15 << 20, 64 << 20, 4
LOG = 200_000  # bytes of a log's end that come back
STORE = Path(tempfile.gettempdir()) / "minispec-carried"
PACKAGES = ("torch", "triton", "transformers", "safetensors", "aiohttp", "tiktoken", "numpy", "jinja2", "pytest",
            "gguf", "pydantic", "openai")  # fmt: skip


# ---- pieces ------------------------------------------------------------------------------------------------------


def cut(whole: bytes, folder: Path, name: str) -> int:
    """Write bytes as files NAME.000, NAME.001, ... in place of earlier ones; returns their number."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{name}.[0-9]*"):
        old.unlink()
    starts = range(0, len(whole), PIECE)
    for number, start in enumerate(starts):
        (folder / f"{name}.{number:03}").write_bytes(whole[start : start + PIECE])
    return len(starts)


def joined(folder: Path, name: str) -> bytes:
    """Return the bytes of the pieces of this name that are there."""
    return b"".join(part.read_bytes() for part in sorted(folder.glob(f"{name}.[0-9]*")))


def archive(folder: Path, **compression: Any) -> bytes:
    """Return a folder's files as an archive; compression: options of `tarfile.open`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, **{"mode": "w", **compression}) as tar:
        tar.add(folder, arcname=".")
    return buffer.getvalue()


def extract(whole: bytes, folder: Path) -> None:
    """Write the files of an archive, compressed or not, into a folder."""
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        tar.extractall(folder, filter="data")


# ---- the way there -----------------------------------------------------------------------------------------------


def heads() -> Path:
    """Return the folder of the heads that ship."""
    return ROOT / "minispec" / "heads"


def git(*command: str) -> str:
    """Return what git says of the tree; nothing where it is none of git's."""
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else ""


def sources() -> list[Path]:
    """Return the files that travel as the tree: all that git knows or does not ignore, without the heads."""
    names = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    files = (ROOT / name for name in dict.fromkeys(names) if name)
    return [file for file in files if file.is_file() and heads() not in file.parents]


def pack(loads: Path, model: Path | None, wheels: Path | None, cache: Path | None) -> int:
    """Write the loads, take the heads out of the tree, and return the number of loads."""
    if not heads().is_dir():
        raise SystemExit(f"{heads()} is not there; python -m benchmarks.carry unpack {loads}/* puts it back")
    parts = {"heads.tar": archive(heads())}
    parts |= {f"{name}.tar": archive(folder) for name, folder in (("wheels", wheels), ("compiled", cache)) if folder}
    parts |= {"model.gguf": model.read_bytes()} if model else {}
    shutil.rmtree(loads, ignore_errors=True)
    index = {"revision": git("describe", "--always", "--dirty", "--abbrev=40").strip(), "parts": {
        name: {"sha256": hashlib.sha256(whole).hexdigest(), "pieces": cut(whole, loads, name)}
        for name, whole in parts.items()
    }}  # fmt: skip
    a_load = (TRAVELS - sum(file.stat().st_size for file in sources())) // PIECE  # the rest is for what lies around it
    if a_load < 1:
        raise SystemExit(f"the tree takes all but {PIECE} of the {TRAVELS} bytes that may travel")
    pieces = sorted(loads.iterdir())
    for number, first in enumerate(range(0, len(pieces), a_load)):
        (loads / f"{number}").mkdir()
        (loads / f"{number}" / "index.json").write_text(json.dumps(index, indent=1) + "\n")
        for piece in pieces[first : first + a_load]:
            piece.rename(loads / f"{number}" / piece.name)
    shutil.rmtree(heads())
    return number + 1


def unpack(folder: Path, store: Path) -> list[str]:
    """Take in a load, or what `collect` wrote; put in place what is complete, and return what is missing, in words."""
    if (results := folder / "results.tar.gz").is_file():
        extract(results.read_bytes(), ROOT / "benchmarks" / "results")
    if not (folder / "index.json").is_file():
        return []
    store.mkdir(parents=True, exist_ok=True)
    if (store / "index.json").is_file() and (store / "index.json").read_text() != (folder / "index.json").read_text():
        for old in store.iterdir():  # another pack's; what was compiled here stays
            if old.is_file():
                old.unlink()
            elif old.name != "compiled":
                shutil.rmtree(old)
    for file in folder.iterdir():
        shutil.copy(file, store)
    missing = []
    for name, stated in json.loads((store / "index.json").read_text())["parts"].items():
        lacking = [piece for i in range(stated["pieces"]) if not (store / (piece := f"{name}.{i:03}")).is_file()]
        if lacking:
            missing.append(f"{name}: {len(lacking)} of {stated['pieces']} pieces")
        elif hashlib.sha256(whole := joined(store, name)).hexdigest() != stated["sha256"]:
            missing.append(f"{name}: its pieces do not make what was cut")
        elif name == "heads.tar":
            extract(whole, heads())
        elif name.endswith(".tar") and not (target := store / name.removesuffix(".tar")).is_dir():
            extract(whole, target)
    site, wheels = store / "site", sorted((store / "wheels").glob("*.whl"))
    if wheels and not site.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(site)]
        subprocess.run([*pip, *map(str, wheels)], check=True)
    sys.path.append(str(site))
    lacking = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    return missing + [f"package {package}" for package in lacking]


# ---- the way back ------------------------------------------------------------------------------------------------


def collect(out: Path, cache: Path | None) -> list[str]:
    """Write results and the ends of logs as one archive, and beside it compiled code; returns the files' names."""
    results = ROOT / "benchmarks" / "results"
    out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out / "results.tar.gz", "w:gz") as tar:
        for file in sorted(path for path in results.rglob("*") if path.suffix in (".json", ".log")):
            whole = file.read_bytes()[-LOG if file.suffix == ".log" else 0 :]
            member = tarfile.TarInfo(str(file.relative_to(results)))
            member.size = len(whole)
            tar.addfile(member, io.BytesIO(whole))
    pieces = sorted(cache.glob("compiled.*")) if cache else []
    if len(pieces) <= MOST_BACK + 1:  # with the file that describes them
        for piece in pieces:
            shutil.copy(piece, out)
    return sorted(file.name for file in out.iterdir())


def main(argv: Sequence[str] | None = None) -> None:
    """Run one of the three."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.carry", description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("pack", help="cut what is large into loads, and take the heads out of the tree")
    one.add_argument("--to", type=Path, default=ROOT / ".carry", help="FOLDER of the loads")
    one.add_argument("--model", type=Path, help="the default model's GGUF file")
    one.add_argument("--wheels", type=Path, help="FOLDER of wheels to install there")
    one.add_argument("--cache", type=Path, help="FOLDER of compiled code that came back")
    one = verbs.add_parser("unpack", help="put in place what is complete, and say what is missing")
    one.add_argument("folders", nargs="+", type=Path)
    one.add_argument("--store", type=Path, default=STORE, help="FOLDER in which pieces are kept between loads")
    one = verbs.add_parser("collect", help="write what is to come back")
    one.add_argument("out", type=Path)
    one.add_argument("--cache", type=Path, help="FOLDER of compiled code, as given to benchmarks.gpu")
    args = parser.parse_args(argv)
    if args.verb == "pack":
        print(f"{pack(args.to, args.model, args.wheels, args.cache)} loads in {args.to}")
    elif args.verb == "collect":
        print("\n".join(collect(args.out, args.cache)))
    else:
        missing = [unpack(folder, args.store) for folder in args.folders][-1]
        print("\n".join(f"missing: {what}" for what in missing) or "nothing is missing")
        if (index := args.store / "index.json").is_file():
            revision = json.loads(index.read_text())["revision"]
            print(f"PYTHONPATH={args.store / 'site'} python -m benchmarks.gpu --revision {revision} "
                  f"--model {args.store} --cache {args.store / 'compiled'}")  # fmt: skip


if __name__ == "__main__":
    main()
