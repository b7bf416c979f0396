"""Have schemathesis make requests of /openapi.json, and check what comes back.

`python tests/clients/schemathesis_run.py` needs a server that runs, and schemathesis in the environment that runs the
script, best one of its own (`pip install schemathesis`). A server for it, with a short context because many requests
set no limit, and many running at once because some have 128 prompts:

    python -m minispec.server --disable-torch-compile --context-length 64 --max-running-requests 64

Three things are checked of every answer: no 5xx but 503, a status that is documented, a content type that is. Whether
valid bodies are taken and others refused is left to the test suite: ranges are not part of the description.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"
SETTINGS = """
[checks.not_a_server_error]
expected-statuses = ["2XX", "4XX", 503]
"""


def main() -> int:
    """Run schemathesis and return its exit status, 0 if every check held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="where the server is")
    parser.add_argument("--examples", type=int, default=500, help="most requests for each operation")
    parser.add_argument("--seed", type=int, default=1)
    given, more = parser.parse_known_args()
    command = Path(sys.executable).with_name("schemathesis")
    if not command.exists():
        parser.exit(2, f"schemathesis is not installed beside {sys.executable}: pip install schemathesis\n")
    with tempfile.TemporaryDirectory() as folder:  # an empty place, so that no other settings are found
        settings = Path(folder) / "schemathesis.toml"
        settings.write_text(SETTINGS, encoding="utf-8")
        return subprocess.call(
            [command, "--config-file", settings, "run", given.url + "/openapi.json", "--checks", CHECKS, "--phases",
             "examples,coverage,fuzzing", "--max-examples", str(given.examples), "--seed", str(given.seed),
             "--continue-on-failure", "--request-timeout", "600", "--suppress-health-check", "all", *more],
            cwd=folder, env={**os.environ, "PYTHONUTF8": "1"},
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
