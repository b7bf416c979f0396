"""aider: one question, answered in its `ask` mode, with its repository map and default settings.

python tests/clients/scripted.py --call '{"name": "none", "arguments": {}}'
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    subprocess.run(["git", "init", "-q", folder], check=True)
    Path(folder, "a.py").write_text("x = 1\n")
    ran = subprocess.run(
        ["aider", "--model", "openai/any", "--yes-always", "--no-check-update", "--analytics-disable",
         "--no-show-model-warnings", "--message", "/ask What is x?"], cwd=folder, capture_output=True, text=True,
        timeout=170, env={**os.environ, "OPENAI_API_BASE": f"{sys.argv[1]}/v1", "OPENAI_API_KEY": "None",
        "HOME": folder},
        check=False,
    )  # fmt: skip
print(ran.stdout[-3000:], ran.stderr[-2000:])
assert ran.returncode == 0 and "<tool_call>" in ran.stdout
