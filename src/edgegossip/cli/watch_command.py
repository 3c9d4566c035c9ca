"""The command that serves a page about a run."""

from __future__ import annotations

import logging
import tempfile
import threading
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tyro

from edgegossip.cli.printing import LogOptions, log_to_console
from edgegossip.contract.errors import UsageError
from edgegossip.net.address import Address
from edgegossip.net.identity.certificates import OBSERVER
from edgegossip.net.identity.tls import load_tls
from edgegossip.net.zenoh.observer import Observer, Reader
from edgegossip.real.metrics_server import metrics_address
from edgegossip.real.mirror import Mirror
from edgegossip.report.watching import WatchServer
from edgegossip.runs.process import on_stop_signal


@dataclass(frozen=True, kw_only=True)
class MeshOptions:
    """Options that name a run, by its folder or as an observer.

    Args:
        folder: Folder of a run, a comparison or a study, simulated or with the folders of real
            workers.
        connect: Instead of a folder, a worker or router of the run, e.g. tls/server:7447.
            Workers are asked for what they log, and nothing else is sent.
        tls: Folder with ca.pem and an observer's certificate, for --connect; see `edgegossip
            certs issue --observer`.
        run: Name of a run with its own certificates (certs issue --run); repeatable.
        insecure: Allow plain links beyond this machine.
        num_workers: Number of workers in the largest run.
    """

    folder: tyro.conf.Positional[Path | None] = None
    connect: tuple[str, ...] = ()
    tls: Path | None = None
    run: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    insecure: bool = False
    num_workers: int = 64

    def check(self, command: str) -> None:
        """Require one of the two.

        Raises:
            UsageError: If there is none, or both, or no such folder.
        """
        if (self.folder is None) != bool(self.connect):
            raise UsageError(
                f"{command} needs the FOLDER of a run, or --connect ENDPOINT, and not both"
            )
        if self.folder is not None and not self.folder.is_dir():
            raise UsageError(f"there is no folder {self.folder}; give the folder of a run")

    def observer(
        self, reader: Reader, is_wanted: Callable[[], bool] = lambda: True
    ) -> Observer:
        """Observe the run at `connect`.

        Raises:
            NetworkError: If the certificate is invalid, or is missing beyond this machine.
        """
        return Observer(
            Address(connect=self.connect),
            reader,
            security=load_tls(self.tls, OBSERVER, self.run),
            run_names=self.run,
            num_workers=self.num_workers,
            insecure=self.insecure,
            is_wanted=is_wanted,
        )


@dataclass(frozen=True, kw_only=True)
class WatchOptions(MeshOptions, LogOptions):
    """Show a run in the browser while it happens, or replay one that has ended, until Ctrl+C.

    Args:
        at: PORT or HOST:PORT of the page; a port alone is for this machine only, and 0 chooses
            a free one.
        open: Open the page in a browser.
    """

    at: str = "8470"
    open: bool = False

    def __post_init__(self) -> None:
        metrics_address(self.at, "the page's address")


def watch_command(arguments: list[str]) -> int:
    """`edgegossip watch`."""
    options = tyro.cli(WatchOptions, prog="edgegossip watch", args=arguments)
    options.check("watch")
    address, stop = metrics_address(options.at, "the page's address"), threading.Event()
    with on_stop_signal(stop.set), watching(options, address.host, address.port) as server:
        what = ", ".join(options.connect) or options.folder
        print(f"watch: {what} is at {server.url}; Ctrl+C ends it", flush=True)
        if options.open:
            webbrowser.open(server.url)
        stop.wait()
    return 0


@contextmanager
def watching(options: WatchOptions, host: str, port: int) -> Iterator[WatchServer]:
    """Serve the page of a folder, or of a mesh, within the block."""
    if options.folder is not None:
        with WatchServer(options.folder.resolve(), host, port) as server:
            yield server
        return
    log_to_console(logging.WARNING, "%(levelname)s %(message)s", options)
    with tempfile.TemporaryDirectory(prefix="edgegossip-watch-") as folder:
        copies = Path(folder) / "mesh"
        copies.mkdir()
        with (
            WatchServer(copies, host, port) as server,
            options.observer(Mirror(copies), lambda: server.is_watched),
        ):
            yield server
