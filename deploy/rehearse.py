"""Run the lines of a Dockerfile in a fresh Debian, for want of docker: each RUN in its place, and the ENTRYPOINT last.

    python deploy/rehearse.py deploy/Dockerfile.cpu /var/tmp/rehearsal -- --help

It needs root, Debian's debootstrap and unshare, and no daemon. In place of the base image, debootstrap's minimal
system of the same release is put into the folder; ENV, WORKDIR, COPY and USER are done as docker does them, VOLUME,
EXPOSE and HEALTHCHECK are passed over, and any other instruction is an error. What stands after -- is added to the
ENTRYPOINT. The folder stays, for a look at it.

--bring copies a file or folder of this machine to the same place, certificates or pip.conf say. Of the environment the
variables of pip, certificates and proxies are handed on.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PASSED_OVER = ("VOLUME", "EXPOSE", "HEALTHCHECK")
HANDED_ON = re.compile(r"PIP_\w+|SSL_CERT_\w+|REQUESTS_CA_BUNDLE|(?i:https?|no)_(?i:proxy)")


def instructions(text: str) -> list[tuple[str, str]]:
    """Return a Dockerfile's instructions in order, each with what follows it, in one line."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\s*\\\n\s*", " ", lines)
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


class Rehearsal:
    """A root folder, and what the instructions so far have set."""

    def __init__(self, root: Path, brought: list[Path]) -> None:
        self.root, self.brought, self.folder, self.user = root, brought, "/", "root"
        self.environ = {key: value for key, value in os.environ.items() if HANDED_ON.fullmatch(key)}
        self.environ |= {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}

    def begin(self, image: str) -> None:
        """Put a minimal Debian into the root."""
        suite = re.fullmatch(r"debian:(\w+)-slim", image)
        if suite is None:
            raise ValueError(f"FROM {image}: only debian:RELEASE-slim can be stood in for")
        subprocess.run(["debootstrap", "--variant=minbase", suite[1], self.root], check=True, stdout=subprocess.DEVNULL)
        for path in (Path("/etc/resolv.conf"), Path("/etc/hosts"), *self.brought):
            self._copy(path, self.root / path.relative_to("/"))

    def copy(self, sources: list[str], target: str) -> None:
        """Copy files of the repository into the root, as COPY does."""
        place = self.root / (Path(self.folder) / target).relative_to("/")
        for name in sources:
            source = HERE.parent / name
            self._copy(source, place / source.name if len(sources) > 1 or target.endswith("/") else place)

    def _copy(self, source: Path, target: Path) -> None:
        """Copy a file or a folder; links become what they lead to."""
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, target)

    def run(self, command: str) -> None:
        """Run a shell command inside the root as the user; mounts and processes of it end with it."""
        inside = ["chroot", f"--userspec={self.user}", str(self.root), "env", "-i",
                  *(f"{key}={value}" for key, value in self.environ.items()),
                  "sh", "-c", f"cd {shlex.quote(self.folder)} && {command}"]  # fmt: skip
        devices = f"mount --rbind /dev {shlex.quote(str(self.root))}/dev && exec {shlex.join(inside)}"
        subprocess.run(["unshare", "--mount", "--pid", "--fork", "--kill-child", f"--mount-proc={self.root}/proc",
                        "sh", "-c", devices], check=True)  # fmt: skip

    def follow(self, name: str, rest: str, more: list[str]) -> None:
        """Do what one instruction says."""
        if name == "FROM":
            self.begin(rest)
        elif name == "RUN":
            self.run(rest)
        elif name == "COPY":
            *sources, target = shlex.split(rest)
            self.copy(sources, target)
        elif name == "ENV":
            self.environ |= dict(word.split("=", 1) for word in shlex.split(rest))
        elif name == "WORKDIR":
            self.folder = rest
            (self.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif name == "USER":
            self.user = rest
        elif name == "ENTRYPOINT":
            self.run(shlex.join([*json.loads(rest), *more]))
        elif name not in PASSED_OVER:
            raise ValueError(f"{name} is not known here")


def main() -> int:
    """Follow a Dockerfile, saying each instruction, and how long it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("root", type=Path, help="a folder to make, which becomes the file system")
    parser.add_argument("--bring", type=Path, action="append", default=[], help="a path to copy to the same place")
    own = sys.argv[1:]
    cut = own.index("--") if "--" in own else len(own)
    given = parser.parse_args(own[:cut])
    if given.root.exists():
        parser.error(f"{given.root} is there already")
    rehearsal = Rehearsal(given.root.absolute(), [path.absolute() for path in given.bring])
    for name, rest in instructions(given.dockerfile.read_text(encoding="utf-8")):
        started = time.monotonic()
        print(f"{name} {rest}", flush=True)
        try:
            rehearsal.follow(name, rest, own[cut + 1 :])
        except subprocess.CalledProcessError as error:
            print(f"it ended with {error.returncode}", file=sys.stderr)
            return 1
        if (seconds := time.monotonic() - started) > 1:
            print(f"    {seconds:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
