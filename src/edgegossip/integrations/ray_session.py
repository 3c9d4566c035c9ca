"""All uses of Ray: starting or finding a cluster, and calling functions on its cores."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edgegossip.contract.errors import NetworkError, TrainingError, UsageError
from edgegossip.machine.allocation import keep_freed_memory
from edgegossip.machine.quota import num_cores

_KNOCK_SECONDS = 5.0
_MOST_RETRIES = 4
_OURS = "EDGEGOSSIP_"
_SETTINGS = b"\0\0\0\4\0\0\0\0\0"
"""An empty HTTP/2 SETTINGS frame; the fourth byte is its type."""


class LostError(Exception):
    """A process, its machine, or a result in transit from it is lost."""


class NodeError(LostError):
    """A node has failed in a way that does not change when the work is repeated."""


class RaySession:
    """A connection to a Ray cluster.

    Args:
        address: As in `RayRuns`.
        max_cores: Maximum number of cores to use if Ray is started here; None for all cores.

    Attributes:
        folder: Folder that is removed when the session closes; None if Ray was not started
            here.

    Raises:
        UsageError: If ray is not installed.
        NetworkError: If there is no cluster at `address`.
    """

    def __init__(self, address: str | None, max_cores: int | None) -> None:
        self._ray = require_ray()
        self._functions: dict[Callable[..., Any], Any] = {}
        self.folder: str | None = None
        with ExitStack() as stack:
            if not self._ray.is_initialized():
                joined = self._started(max_cores) if address is None else self._joined(address)
                stack.enter_context(joined)
            self._open = stack.pop_all()

    def close(self) -> None:
        """Leave the cluster, and end it if it was started here."""
        self._open.close()

    def num_cores(self) -> int:
        """Total cores of the machines that are present."""
        with self._telling_of_losses():
            resources = [n.get("Resources", {}) for n in self._ray.nodes() if n["Alive"]]
        return sum(int(each.get("CPU", 0)) for each in resources)

    def start(self, function: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
        """Call a function on one core of any node, and retry lost calls; return a reference.

        Raises:
            TrainingError: If an argument cannot be pickled.
        """
        if function not in self._functions:
            own = {name: os.environ[name] for name in os.environ if name.startswith(_OURS)}
            self._functions[function] = self._ray.remote(function).options(
                num_cpus=1,
                max_retries=_MOST_RETRIES,
                runtime_env={"env_vars": own},
            )
        for module in _from_files():
            self._ray.cloudpickle.register_pickle_by_value(module)
        with self._telling_of_losses():
            try:
                return self._functions[function].remote(*arguments)
            except TypeError as error:
                raise TrainingError(
                    f"the task cannot be sent to other processes ({error}); give it no locks, "
                    "open files or other things that cannot be pickled, or leave out --pool ray"
                ) from error

    def queue(self) -> Any:  # noqa: ANN401
        """Make a queue on this machine that all nodes can use."""
        from ray.util.queue import Queue

        strategies = self._ray.util.scheduling_strategies
        node = self._ray.get_runtime_context().get_node_id()
        here = strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        return Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})

    def wait(self, references: Sequence[Any], seconds: float) -> list[Any]:
        """Wait at most `seconds` for a value to arrive; list its reference, if any."""
        with self._telling_of_losses():
            found, _ = self._ray.wait(list(references), timeout=seconds)
        return list(found)

    def cancel(self, references: Iterable[Any]) -> None:
        """End functions that were started, even in the middle of their work."""
        for reference in references:
            with suppress(self._ray.exceptions.RayError):
                self._ray.cancel(reference, force=True)

    def get(self, reference: Any) -> Any:  # noqa: ANN401
        """Wait for a return value.

        Raises:
            NodeError: If the function, or the transfer of its value, has failed.
            LostError: If the value will never arrive for another reason.
        """
        with self._telling_of_losses():
            return self._ray.get(reference)

    @contextmanager
    def _telling_of_losses(self) -> Iterator[None]:
        try:
            yield
        except self._ray.exceptions.RayError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            what = lines[-1] if lines else "no reason given"
            failures = (self._ray.exceptions.RayTaskError, self._ray.exceptions.RaySystemError)
            kind = NodeError if isinstance(error, failures) else LostError
            raise kind(f"{type(error).__name__}: {what:.400}") from error

    @contextmanager
    def _started(self, max_cores: int | None) -> Iterator[None]:
        """Start Ray on this machine, for this process."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Not the user's own: names of sockets in it must stay short.
        parent = "/tmp" if os.path.isdir("/tmp") else None
        self.folder = folder = tempfile.mkdtemp(prefix="eg-ray-", dir=parent)
        try:
            with self._initialized(
                address="local",
                num_cpus=min(max_cores or num_cores(), num_cores()),
                num_gpus=0,
                include_dashboard=False,
                _temp_dir=folder,
            ):
                yield
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def _joined(self, address: str) -> Iterator[None]:
        """Connect to a running cluster."""
        if address != "auto":
            _knock(address)
        with ExitStack() as stack:
            refusals = (OSError, RuntimeError, ValueError, self._ray.exceptions.RayError)
            try:
                stack.enter_context(self._initialized(address=address))
            except refusals as error:
                raise NetworkError(
                    f"no Ray cluster can be reached at --ray-address {address} ({error}); run "
                    "`ray start --head` on one machine, `ray start --address HOST:PORT` on "
                    "the others, this one included, and give HOST:PORT"
                ) from error
            yield

    @contextmanager
    def _initialized(self, **settings: Any) -> Iterator[None]:  # noqa: ANN401
        is_main = threading.current_thread() is threading.main_thread()
        on_sigterm = signal.getsignal(signal.SIGTERM) if is_main else None
        try:
            self._ray.init(log_to_driver=False, logging_level=logging.ERROR, **settings)
            if on_sigterm is not None:
                signal.signal(signal.SIGTERM, on_sigterm)  # Ray puts its own there
            yield
        finally:
            self._ray.shutdown()


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """PyTorch settings that affect results, except for the number of threads."""

    dtype: torch.dtype
    deterministic: int

    @classmethod
    def here(cls) -> TorchSettings:
        """The settings of this process."""
        return cls(torch.get_default_dtype(), torch.get_deterministic_debug_mode())

    def apply(self) -> None:
        """Let this process compute with these settings, on one thread."""
        torch.set_num_threads(1)
        torch.set_default_dtype(self.dtype)
        torch.set_deterministic_debug_mode(self.deterministic)
        keep_freed_memory(block_bytes=32 << 20, total_bytes=256 << 20, is_shared=False)


def require_versions(host: str, found: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Reject a node whose results may differ in the last bit.

    Args:
        host: Name of the node.
        found: Versions of Python and packages there.
        own: The same, where the run was started.

    Raises:
        NetworkError: If they differ.
    """
    for name, version in found.items():
        if version != own.get(name):
            raise NetworkError(
                f"{host} has {name} {version}, this machine {own.get(name)}, so results "
                "would depend on where they were computed; install the same versions on all "
                "machines of the cluster"
            )


def require_ray() -> Any:  # noqa: ANN401
    """Import ray, an optional dependency.

    Raises:
        UsageError: If ray is not installed.
    """
    try:
        import ray
        import ray.exceptions
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise UsageError(
            f"--pool ray needs the package ray; pip install 'edgegossip[ray]' ({error})"
        ) from error
    return ray


def _knock(address: str) -> None:
    """Raise at once if there is no cluster; Ray itself would take minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise NetworkError(
            f"--ray-address must be HOST:PORT or 'auto', got {address!r}; a machine that "
            "belongs to the cluster needs no ray:// address, and others cannot take part"
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _KNOCK_SECONDS) as peer:
            # The preface of HTTP/2 (RFC 9113, 3.4), which gRPC answers with its settings.
            peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS)
            answer = peer.recv(len(_SETTINGS))
    except (OSError, OverflowError) as error:
        raise NetworkError(
            f"no program answers at --ray-address {address} ({error}); on the machine for the "
            "head node: ray start --head --port PORT"
        ) from error
    if answer[3:4] != _SETTINGS[3:4] and "RAY_USE_TLS" not in os.environ:
        raise NetworkError(
            f"--ray-address {address}: the program that answers there is not a Ray cluster; "
            "give the address that `ray start --head` printed for other nodes to join"
        )


def _from_files() -> list[Any]:
    """Find modules whose name differs from that of their file, such as a user's recipes, and
    the package of studies, which is not installed.

    No other process could import them, so their definitions are sent along.
    """
    found = []
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None) or ""
        if "." not in name and name != "__main__" and file.endswith(".py"):
            stem = Path(file).stem
            if name == "studies" or stem not in (name, "__init__"):
                found.append(module)
    return found
