"""Have schemathesis make requests of /openapi.json, and check what comes back.

A server for it, with a short context because many requests set no limit, and many running at once because some have
128 prompts:

    python -m minispec.server --disable-torch-compile --context-length 64 --max-running-requests 64
    python tests/clients/run.py schemathesis [--examples 500] [--fields guided_json stream]

`--fields` keeps to the operations that have one of these fields, and to bodies of these and of those that must be
there. Name one field that constrains the output at a time, since two are refused. Options of schemathesis' own may
follow, as `--include-path /v1/responses`.

Three things are checked of every answer: no 5xx but 503 (529 in messages), which a server gives before it is ready, a
status that is documented, a content type that is. Whether valid bodies are taken and others refused is left to the test
suite: ranges are not part of the description.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"
SETTINGS = """
[checks.not_a_server_error]
expected-statuses = ["2XX", "4XX", 503, 529]
"""


def pared(described: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Return the description with the operations that have one of these fields, and no other fields but required."""
    kinds, paths = described["components"]["schemas"], {}
    for path, operations in described["paths"].items():
        body = operations.get("post", {}).get("requestBody", {"content": {}})["content"].get("application/json")
        kind = kinds[body["schema"]["$ref"].rpartition("/")[2]] if body else {"properties": {}}
        if names & kind["properties"].keys():
            kept = names.union(kind.get("required", ()))
            kind["properties"] = {name: field for name, field in kind["properties"].items() if name in kept}
            kind["additionalProperties"] = False
            paths[path] = {"post": operations["post"]}
            body.pop("example", None)  # it has other fields
    return {**described, "paths": paths}


def main() -> int:
    """Run schemathesis and return its exit status, 0 if every check held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="where the server is")
    parser.add_argument("--examples", type=int, default=500, help="most requests for each operation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fields", nargs="+", default=[], help="bodies of these fields alone, beside the required")
    given, more = parser.parse_known_args()
    with urllib.request.urlopen(given.url + "/openapi.json") as answer:
        described = json.load(answer)
    with tempfile.TemporaryDirectory() as folder:  # an empty place, so that no other settings are found
        settings = Path(folder) / "schemathesis.toml"
        settings.write_text(SETTINGS, encoding="utf-8")
        description = Path(folder) / "openapi.json"
        description.write_text(json.dumps(pared(described, set(given.fields)) if given.fields else described))
        return subprocess.call(
            [Path(sys.executable).with_name("schemathesis"), "--config-file", settings, "run", description, "--url",
             given.url, "--checks", CHECKS, "--phases", "examples,coverage,fuzzing", "--max-examples",
             str(given.examples), "--seed", str(given.seed), "--continue-on-failure", "--request-timeout", "600",
             "--suppress-health-check", "all", *more],
            cwd=folder, env={**os.environ, "PYTHONUTF8": "1"},
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
