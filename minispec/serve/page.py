"""The page at /: one file, sent as it is, with a policy under which it can run nothing but its own script.

The policy is computed from the file: its script and its style are admitted by their hashes and nothing else is. So text
that a model writes can neither run nor fetch anything, even if `page.html` made markup of it, which it does not.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path


@cache
def page() -> tuple[str, dict[str, str]]:
    """Return the page and its headers, with the policy among them."""
    text = Path(__file__).with_name("page.html").read_text("utf-8")
    script, style = (_hashes(text, tag) for tag in ("script", "style"))
    policy = (f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
              "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")  # fmt: skip
    return text, {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff",
                  "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}  # fmt: skip


def _hashes(text: str, tag: str) -> str:
    """Return the policy's sources for the inline elements of a tag."""
    bodies = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in bodies)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
