"""The Ray cluster that replicas live on: one of this server's own, or one that is there already.

The server's own is this machine alone: it listens on the loopback interface, with a token that nobody else has, reports
nothing to anyone, has no dashboard, and ends with the server. docs/scaling.md says whom a cluster must trust.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Sequence
from typing import Any

from minispec.config import Config
from minispec.load.machine import core_count
from minispec.replicas.replica import Replica, given_flags

OBJECT_STORE = 80 * 2**20  # bytes, about the least that Ray takes: updates are small and stay out of it
PATIENCE = 5.0  # seconds for an address to answer
VARIABLES = {  # of Ray's, for a cluster of our own
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # keeps a cluster on this machine, on Linux too
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # it would kill a replica that loads weights into the last of memory
    "RAY_timeout_ms_task_wait_for_death_info": "100",  # a stream waits so long to learn why its replica is gone
}  # fmt: skip


class Cluster:
    """A connection to a cluster with room for the replicas; raises ValueError, in one line, where there is none."""

    def __init__(self, config: Config) -> None:
        self.config, self._folder = config, ""
        if config.ray_address is None:
            os.environ.update(VARIABLES)
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        try:
            import ray
        except ImportError:
            raise ValueError(f"--dp-size {config.dp_size} needs Ray, which is not installed here: pip install "
                             "'minispec[cluster]'") from None  # fmt: skip
        self.ray, self.error = ray, ray.exceptions.RayError
        logging.getLogger("ray").setLevel(logging.ERROR)
        if config.ray_address is None:
            cores = [core_count()]
            self.threads = max(_threads(config, cores), 1)
            # The paths of its sockets are 60 characters longer, and 107 is the most.
            short = None if len(tempfile.gettempdir()) < 30 else "/tmp"
            self._folder = tempfile.mkdtemp(prefix="minispec-ray-", dir=short)
            ray.init(num_cpus=config.dp_size * config.tp_size * self.threads, include_dashboard=False,
                     object_store_memory=OBJECT_STORE, _temp_dir=self._folder, configure_logging=False)  # fmt: skip
        else:
            self._join(config.ray_address)
            cores = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
            self.threads = _threads(config, cores)
            if not self.threads:
                ray.shutdown()
                raise ValueError(f"--dp-size {config.dp_size}: the machines of --ray-address {config.ray_address} have "
                                 f"{', '.join(map(str, cores))} CPUs, too few for so many replicas with --tp-size "
                                 f"{config.tp_size}; give a smaller --dp-size, or add a machine")  # fmt: skip

    def _join(self, address: str) -> None:
        """Become a part of a cluster that is there."""
        host, _, port = address.rpartition(":")
        if host:
            try:
                socket.create_connection((host.strip("[]"), int(port)), PATIENCE).close()
            except OSError as error:
                raise ValueError(f"--ray-address {address}: nobody answers there ({error}); start Ray on that machine, "
                                 f"`ray start --head --port {port}`, and see that it can be reached from here"
                                 ) from None  # fmt: skip
        try:
            self.ray.init(address=address, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError, AssertionError, self.error) as error:
            said = " ".join(str(error).split())[:300]
            raise ValueError(f"--ray-address {address}: this machine cannot join: {said}; it must be one of the "
                             f"cluster's, `ray start --address {address}`, with the same version of Ray"
                             ) from None  # fmt: skip

    def actor(self) -> Any:
        """Return a new replica; Ray starts it where there is room, and starts it again whenever it has died."""
        config = self.config
        kind = self.ray.remote(Replica).options(
            num_cpus=self.threads * config.tp_size, num_gpus=config.tp_size if _on_cuda(config) else 0,
            max_restarts=-1, max_task_retries=0, max_concurrency=1000, scheduling_strategy="SPREAD",
        )  # fmt: skip
        flags = given_flags(config)
        if config.ray_address is None and config.mem_fraction_static is not None and not _on_cuda(config):
            flags["mem_fraction_static"] = config.mem_fraction_static / config.dp_size  # of one memory
        return kind.remote(flags, self.threads)

    def leave(self) -> None:
        """End the replicas, and the cluster if it is our own."""
        self.ray.shutdown()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _threads(config: Config, cores: Sequence[int]) -> int:
    """Return the threads of each rank, as many as machines with so many cores allow, the same everywhere.

    Sums are added up in an order that follows their number, so a text would depend on the replica. 0 where there is no
    room; OMP_NUM_THREADS says otherwise.
    """
    room = lambda threads: sum(count // (threads * config.tp_size) for count in cores)  # noqa: E731
    given = os.environ.get("OMP_NUM_THREADS", "")
    tried = [int(given)] if given.isdecimal() and int(given) else range(max(cores, default=0), 0, -1)
    found = next((threads for threads in tried if room(threads) >= config.dp_size), 0)
    return found or (tried[0] if given and config.ray_address is None else 0)


def _on_cuda(config: Config) -> bool:
    """Return whether replicas are to have GPUs."""
    if config.device != "auto":
        return config.device == "cuda"
    from torch import cuda

    return cuda.is_available()
