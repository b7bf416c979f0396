"""Replicas on two machines, as far as one can show it: two raylets, each with room for one replica, and one is killed.

It starts a cluster of Ray's own making, so it runs in a process of its own, with `python tests/test_raylets.py`, which
the test calls; it takes a minute.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.slow
def test_a_machine_that_dies_changes_no_text_and_its_replica_comes_back_with_another() -> None:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    done = subprocess.run([sys.executable, __file__], env={**os.environ, "PYTHONPATH": path}, capture_output=True,
                          text=True, timeout=500)  # fmt: skip
    assert done.returncode == 0 and done.stdout.endswith("as alone\n"), done.stdout + done.stderr


def main() -> None:
    """Serve from two raylets, kill one, add another."""
    folder, temporary = Path(tempfile.mkdtemp(prefix="raylets-")), tempfile.mkdtemp(prefix="raylets-")
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["RAY_health_check_failure_threshold"] = "2"
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # it would kill a replica where memory is nearly full
    from transformers import AutoTokenizer

    from minispec.load.default_model import ensure_default_model

    demo = ensure_default_model(lambda line: None)
    from test_server import Running, options, ready, script, scripted

    from minispec.config import Config

    ids = script(AutoTokenizer.from_pretrained(demo))
    scripted(demo, folder / "tiny", [*ids, ids[0]])
    Path("/tmp/ray").mkdir(exist_ok=True)  # where Ray notes the address of a cluster
    from ray.cluster_utils import Cluster

    store = 80 * 2**20
    head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": temporary, "object_store_memory": store}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=store) for _ in range(2)]
    flags = options(folder / "tiny", speculative_algorithm="deadly:Deadly", log_level="warning")
    alone = ready(Running(Config(**flags)))
    served = ready(Running(Config(**flags, dp_size=2, ray_address=cluster.address)))
    places = served.server.engine.places

    def until(condition: object, seconds: float = 180) -> None:
        end = time.monotonic() + seconds
        while not condition():  # type: ignore[operator]
            assert time.monotonic() < end, [(p.state, p.known) for p in places]
            time.sleep(0.05)

    from deadly import PACED

    until(lambda: [place.state for place in places] == ["ready"] * 2)
    params = {"max_new_tokens": 250, "temperature": 0.5, "ignore_eos": True}
    bodies = [{"input_ids": [PACED, 50 + i, 4027, 1980], "sampling_params": {**params, "sampling_seed": i}}
              for i in range(6)]  # fmt: skip
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(served.ok, "/generate", body) for body in bodies]
        until(lambda: all(len(place.requests) >= 2 for place in places))
        until(lambda: all(r.output_ids for place in places for r in place.requests.values()))
        moved = [len(place.requests) for place in places]
        cluster.remove_node(nodes[0], allow_graceful=False)
        killed = time.monotonic()
        until(lambda: any(place.state == "starting" for place in places))
        print(f"seen after {time.monotonic() - killed:.1f} s, with {moved} requests", flush=True)
        found = [future.result() for future in futures]
    assert served.call("/health")[0] == 200
    assert [f["text"] for f in found] == [alone.ok("/generate", body)["text"] for body in bodies]
    assert any(f["meta_info"]["total_retractions"] for f in found)
    cluster.add_node(num_cpus=1, object_store_memory=store)
    until(lambda: [place.state for place in places] == ["ready"] * 2)
    print(f"the second is back after {time.monotonic() - killed:.1f} s", flush=True)
    served.stop()
    alone.stop()
    cluster.shutdown()
    print("as alone", flush=True)


if __name__ == "__main__":
    main()
