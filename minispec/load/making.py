"""A process that makes files of compiled functions for a server (`makers.py`).

It builds the same engine, of tensors without meaning (`build.rehearse`), and goes through the same steps in the same
order as the other such processes. It makes each function that is in no file and that no other process is making, so
nobody waits. When its standard input closes, it kills itself and the compilers that it runs.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import threading
import time

from minispec.load.makers import MADE, Task

# Were it nicer, a stream would be faster meanwhile, and leave it next to nothing once the stream's steps are compiled.
NICENESS = 5


def main() -> None:
    """Make the files of the task on standard input."""
    os.nice(NICENESS)
    logging.disable(logging.WARNING)  # the server has said it all, and the last line here is why the process ended
    task: Task = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_the_server, daemon=True).start()
    make_files(task)


def _end_with_the_server() -> None:
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)


def make_files(task: Task) -> None:
    """Make the files of all steps; prints a line for each step that is complete."""
    import torch  # here, and what needs it: the process is nice by now, and ends with the server

    from minispec.load.build import rehearse
    from minispec.load.warm_up import rehearse_step, steps_of

    torch.set_num_threads(task.threads)
    with rehearse(task.config, task.pages) as engine:
        todo = steps_of(engine)
        while todo:
            for step in list(todo):
                if rehearse_step(engine, step):
                    todo.remove(step)
                    print(f"{MADE}{step.name}", flush=True)
            time.sleep(0.1 if todo else 0)  # what is left is being made by others


if __name__ == "__main__":
    main()
