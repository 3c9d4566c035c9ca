"""The command that serves a page about a run."""

from __future__ import annotations

import threading
import webbrowser
from dataclasses import dataclass
from pathlib import Path

import tyro

from edgegossip.contract.errors import UsageError
from edgegossip.real.metrics_server import metrics_address
from edgegossip.report.watching import WatchServer
from edgegossip.runs.process import on_stop_signal


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Show a run in the browser while it happens, or replay one that has ended, until Ctrl+C.

    Args:
        folder: Folder of a run, a comparison or a study, simulated or with the folders of real
            workers.
        at: PORT or HOST:PORT of the page; a port alone is for this machine only, and 0 chooses
            a free one.
        open: Open the page in a browser.
    """

    folder: tyro.conf.Positional[Path]
    at: str = "8470"
    open: bool = False

    def __post_init__(self) -> None:
        metrics_address(self.at, "the page's address")


def watch_command(arguments: list[str]) -> int:
    """`edgegossip watch`."""
    options = tyro.cli(WatchOptions, prog="edgegossip watch", args=arguments)
    if not options.folder.is_dir():
        raise UsageError(f"there is no folder {options.folder}; give the folder of a run")
    address, stop = metrics_address(options.at, "the page's address"), threading.Event()
    with (
        on_stop_signal(stop.set),
        WatchServer(options.folder.resolve(), address.host, address.port) as server,
    ):
        print(f"watch: {options.folder} is at {server.url}; Ctrl+C ends it", flush=True)
        if options.open:
            webbrowser.open(server.url)
        stop.wait()
    return 0
