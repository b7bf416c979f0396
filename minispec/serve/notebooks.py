"""The helpers that cells of SGLang's older documentation call, so that a cell runs with one import changed.

    from minispec.serve.notebooks import launch_server_cmd, print_highlight, terminate_process, wait_for_server

A command that begins with `python3 -m sglang.launch_server` starts this package's server, in this interpreter.
"""

from __future__ import annotations

import html
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

Process = subprocess.Popen[bytes]


def execute_shell_command(command: str) -> Process:
    """Start a command, with minispec's server in place of SGLang's, and return its process; it prints where we do."""
    words = shlex.split(command.replace("\\\n", " "))
    if words[:1] and os.path.basename(words[0]).startswith("python"):
        words[0] = sys.executable
    words = ["minispec.server" if word == "sglang.launch_server" else word for word in words]
    return subprocess.Popen(words, start_new_session=True)  # a group of its own, which `terminate_process` ends


def launch_server_cmd(command: str, host: str = "0.0.0.0", port: int | None = None) -> tuple[Process, int]:
    """Start a server on `port`, by default a free one; return its process and the port. The command names no port."""
    if port is None:
        with socket.socket() as free:
            free.bind((host, 0))
            port = free.getsockname()[1]
    named = "" if "--host" in shlex.split(command.replace("\\\n", " ")) else f" --host {host}"
    return execute_shell_command(f"{command}{named} --port {port}"), port


def wait_for_server(base_url: str, timeout: float | None = None, process: Process | None = None) -> None:
    """Wait until a server is ready; raises TimeoutError after `timeout` seconds, RuntimeError if `process` ends."""
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        try:
            with urllib.request.urlopen(f"{base_url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):  # nobody listens yet, or 503
            pass
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode} before it was ready")
        if end is not None and time.monotonic() > end:
            raise TimeoutError(f"{base_url} was not ready within {timeout:g} seconds")
        time.sleep(0.3)


def print_highlight(text: object) -> None:
    """Print a text in bold: as HTML in a notebook, by a terminal's codes elsewhere."""
    notebook = sys.modules.get("IPython.display")  # imported where the cell runs in a notebook
    if notebook is not None:
        notebook.display(notebook.HTML(f"<strong>{html.escape(str(text))}</strong>"))
    else:
        print(f"\033[1m{text}\033[0m" if sys.stdout.isatty() else text)


def terminate_process(process: Process, seconds: float = 30.0) -> None:
    """End a server in an orderly way, and after `seconds` at once, with the processes that it started."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
