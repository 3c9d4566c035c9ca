"""A page that shows a run while it happens, and replays one that has ended.

The server passes the lines of the run's logs on as they are written, unread; the page adds them
up. The logs are the only source, so nothing is lost when the server or the page restarts, and
nothing is read while nobody watches.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from jinja2 import Environment, PackageLoader, StrictUndefined

from edgegossip.contract.errors import NetworkError, RunFolderError
from edgegossip.contract.protocol import Seconds
from edgegossip.machine.http_server import ThreadedServer
from edgegossip.report.folder import EVENTS
from edgegossip.runs.events import to_line
from edgegossip.runs.files import EVALUATIONS, read_json

INTERVAL: Seconds = 0.2
"""Seconds between two looks at the logs, while somebody watches."""
_HEARTBEAT: Seconds = 10.0
"""Seconds after which a silent stream says something, to notice that its reader has left."""
_READ_AT_ONCE = 2**18
_LOCAL = ("127.0.0.1", "::1", "localhost")


def run_names(folder: Path) -> list[str]:
    """Paths of the runs in a folder, "." for the folder itself; the newest one is first."""
    found: dict[str, float] = {}
    for log in folder.rglob(EVENTS):
        inside = log.parent.relative_to(folder).parts
        # The logs in workers/R belong to the run above.
        own = inside[:-2] if inside[-2:-1] == ("workers",) else inside
        name = "/".join(own) or "."
        try:
            found[name] = max(found.get(name, 0.0), log.stat().st_mtime)
        except OSError:  # the run was deleted between the two looks
            continue
    return sorted(found, key=lambda name: (-found[name], name))


def logs_of(run: Path) -> list[Path]:
    """The log of a run; until real workers are gathered, the log of each."""
    if (own := run / EVENTS).exists():
        return [own]
    return sorted(run.glob(f"workers/*/{EVENTS}"))


@dataclass(slots=True)
class _Log:
    """How far a log has been read."""

    path: Path
    file_id: int
    position: int = 0

    def new_lines(self) -> bytes:
        """Some complete lines that are new; an incomplete one is left for the next call.

        Raises:
            OSError: If the file cannot be read.
            EOFError: If it is another file than before, or is shorter.
        """
        status = self.path.stat()
        if status.st_ino != self.file_id or status.st_size < self.position:
            raise EOFError(self.path)
        if status.st_size == self.position:
            return b""
        with self.path.open("rb") as file:
            file.seek(self.position)
            found = file.read(_READ_AT_ONCE)
            while b"\n" not in found and (more := file.read(_READ_AT_ONCE)):
                found += more
        found = found[: found.rfind(b"\n") + 1]
        self.position += len(found)
        return found


@dataclass(slots=True)
class _Measured:
    """The measurements of the averaged model that a launcher has made so far."""

    path: Path
    written_at: int = 0
    told: set[str] = field(default_factory=set)

    def new_lines(self) -> bytes:
        """Those that are new, as lines of the run's log to be; none if there is no launcher."""
        try:
            written_at = self.path.stat().st_mtime_ns
            if written_at == self.written_at:
                return b""
            found = read_json(self.path)
        except (OSError, RunFolderError):
            return b""
        new = [each for each in found if each not in self.told]
        self.written_at, self.told = written_at, {*found}
        return b"".join(to_line({"type": "evaluated", **found[each]}) for each in new)


@dataclass(slots=True)
class Stream:
    """The server-sent events of one page.

    `reset` begins anew and names the runs; `lines` has lines of a log; `live` says that all
    lines that exist have been passed on.

    Args:
        folder: Folder of a run, a comparison or a study; it may come later.
        run: Path of the run in it; by default the newest one.
    """

    folder: Path
    run: str | None = None
    _logs: list[_Log] = field(default_factory=list)
    _measured: _Measured | None = None
    _was_told: tuple[str | None, list[Path]] | None = None
    _is_live: bool = False

    def news(self) -> Iterator[bytes]:
        """Everything that is new since the last call."""
        names: list[str] = []
        if self.run is None or self._was_told is None:
            names = run_names(self.folder)
            run = self.run if self.run in names else next(iter(names), None)
        else:
            run = self._was_told[0]
        paths = [] if run is None else logs_of(self.folder / run)
        if self._was_told != (run, paths):
            # A run that has ended gets a log of its own, which replaces those of its workers.
            grown = self._was_told is not None and run == self._was_told[0]
            known = {log.path: log for log in self._logs} if grown else {}
            if not known or not known.keys() <= set(paths):
                known = {}
                names = names or run_names(self.folder)
                yield _event("reset", json.dumps({"run": run, "runs": names}))
                self._measured = None
            self._logs = [
                known.get(path) or _Log(path, path.stat().st_ino)
                for path in paths
                if path.exists()
            ]
            if run is not None and self.folder / run / EVENTS not in paths:
                self._measured = self._measured or _Measured(self.folder / run / EVALUATIONS)
            self._was_told, self._is_live = (run, paths), False
        yield from self._lines()

    def _lines(self) -> Iterator[bytes]:
        try:
            had_some = True
            while had_some:  # in turn, so that no worker's curve is far behind the others'
                had_some = False
                for log in self._logs:
                    if found := log.new_lines():
                        had_some = True
                        yield _event("lines", found.decode(errors="replace"))
        except (OSError, EOFError):  # begun again, as by a resumed run
            self._was_told = None
            return
        if self._measured is not None and (found := self._measured.new_lines()):
            yield _event("lines", found.decode())
        if not self._is_live:
            self._is_live = True
            yield _event("live", "")


def _event(name: str, data: str) -> bytes:
    lines = "".join(f"data: {line}\n" for line in data.rstrip("\n").split("\n"))
    return f"event: {name}\n{lines}\n".encode()


class WatchServer:
    """Serves the page of a folder until it is closed.

    Args:
        folder: Folder of a run, a comparison or a study; it may come later.
        host: Interface at which it listens.
        port: Port; 0 chooses a free one.

    Attributes:
        url: Address of the page.

    Raises:
        NetworkError: If it cannot listen there.
    """

    def __init__(self, folder: Path, host: str = "127.0.0.1", port: int = 0) -> None:
        try:
            self._server = _Server((host, port), _Handler)
        except OSError as error:
            raise NetworkError(
                f"cannot serve the page at port {port} of {host}: {error.strerror or error}; "
                "choose another PORT or HOST:PORT"
            ) from error
        self._server.folder = folder
        self._server.is_local = host in _LOCAL
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_address[1]}/"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="watch", daemon=True
        )
        self._thread.start()

    @property
    def is_watched(self) -> bool:
        """Whether a page is open."""
        return self._server.num_readers > 0

    def close(self) -> None:
        """Stop listening, and end all streams."""
        self._server.is_closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> WatchServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Server(ThreadedServer):
    folder: Path
    is_local: bool

    def __init__(self, address: tuple[str, int], handler: type[_Handler]) -> None:
        self.is_closed = threading.Event()
        self.num_readers = 0
        self._counting = threading.Lock()
        super().__init__(address, handler)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count a page within the block."""
        with self._counting:
            self.num_readers += 1
        try:
            yield
        finally:
            with self._counting:
                self.num_readers -= 1


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10  # seconds; a silent client must not hold a thread for ever

    def do_GET(self) -> None:
        # A page from elsewhere could otherwise read ours, by its own name for this machine.
        name = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        if self.server.is_local and name not in _LOCAL:
            self.send_error(HTTPStatus.FORBIDDEN, "this page is for this machine only")
            return
        asked = urlsplit(self.path)
        if asked.path == "/":
            self._send_page()
        elif asked.path == "/events":
            with self.server.reading():
                self._stream(parse_qs(asked.query).get("run", [None])[0])
        else:
            self.send_error(HTTPStatus.NOT_FOUND, "there are / and /events")

    def _send_page(self) -> None:
        nonce = secrets.token_urlsafe(16)
        page = render_watch_page(self.server.folder.name, nonce).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.send_header(
            "Content-Security-Policy",
            "default-src 'none'; img-src data:; style-src 'unsafe-inline'; connect-src 'self'; "
            f"script-src 'nonce-{nonce}'; frame-ancestors 'none'; base-uri 'none'",
        )
        self.end_headers()
        self.wfile.write(page)

    def _stream(self, run: str | None) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        stream, last = Stream(self.server.folder, run), time.monotonic()
        try:
            self.wfile.write(b"retry: 500\n\n")
            while not self.server.is_closed.is_set():
                for event in stream.news():
                    self.wfile.write(event)
                    last = time.monotonic()
                if time.monotonic() - last > _HEARTBEAT:
                    self.wfile.write(b": still here\n\n")
                    last = time.monotonic()
                self.server.is_closed.wait(INTERVAL)
        except OSError:  # the reader has left
            return

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a request is no news."""


def render_watch_page(title: str, nonce: str) -> str:
    """The page, whose script may run by `nonce`."""
    environment = Environment(
        loader=PackageLoader("edgegossip", "report"),
        autoescape=True,
        undefined=StrictUndefined,
    )
    return environment.get_template("watch.html").render(title=title, nonce=nonce)
