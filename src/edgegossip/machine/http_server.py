"""An HTTP server whose threads end with the process."""

from __future__ import annotations

import os
from http.server import HTTPServer
from socket import AF_INET, AF_INET6
from socketserver import BaseRequestHandler, TCPServer, ThreadingMixIn


class ThreadedServer(ThreadingMixIn, HTTPServer):
    """Answers each request in a daemon thread, at an address of IPv4 or IPv6.

    Args:
        address: Interface, as a name or an address, and port; port 0 chooses a free one.
        handler: Class that answers a request.

    Raises:
        OSError: If it cannot listen there.
    """

    daemon_threads = True
    block_on_close = False
    # On Windows, it would let two processes listen at one port.
    allow_reuse_address = os.name == "posix"

    def __init__(self, address: tuple[str, int], handler: type[BaseRequestHandler]) -> None:
        self.address_family = AF_INET6 if ":" in address[0] else AF_INET
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks the name service for this machine's name and may wait.
        TCPServer.server_bind(self)
        host, port = self.server_address[:2]
        self.server_name, self.server_port = str(host), port
