"""Dashboard: a live page on this machine's loopback, and the same page as a file."""

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from spardl.dashboard.history import History
from spardl.dashboard.page import POLICY, render
from spardl.errors import ConfigError

HOST = "127.0.0.1"  # and nothing else: whoever is on another machine comes through ssh -L
NAMES = (HOST, "localhost")


class Dashboard:
    """What a rank sees of a run, as a page. Costs a thread that sleeps, and some microseconds per step.

    Args:
        title: of the page.
        workers: of the run.
        facts: settings that are shown, by name.
    """

    def __init__(self, title: str, *, workers: int = 1, facts: Mapping[str, str] | None = None) -> None:
        self.history = History(title, workers, facts or {})
        self._server: ThreadingHTTPServer | None = None

    def serve(self, port: int = 0) -> str:
        """Show the page at this port of 127.0.0.1, or at one that is free; return its address.

        Raises:
            ConfigError: the port cannot be used.
        """
        history = self.history

        class Handler(_Handler):
            source = history

        try:
            self._server = ThreadingHTTPServer((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"the dashboard cannot use port {port} ({error}); choose another, or 0.") from error
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="spardl dashboard", daemon=True).start()
        return self.url

    @property
    def url(self) -> str:
        """Where the page is; empty if it is not served."""
        return "" if self._server is None else f"http://{HOST}:{self._server.server_address[1]}/"

    def log(self, step: int, **values: float) -> None:
        """Add a point to the curve of each name: `board.log(step, loss=loss.item())`."""
        self.history.log(step, {name.replace("_", " "): value for name, value in values.items()})

    def export(self, path: str | Path) -> None:
        """Write the page as it is now: one file that needs no server."""
        Path(path).write_text(render(self.history.snapshot(), live=False), encoding="utf-8")

    def close(self) -> None:
        """Stop showing it. What was seen is kept."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class _Handler(BaseHTTPRequestHandler):
    """Two addresses to read, and nothing to write."""

    source: History

    def do_GET(self) -> None:
        # A page of somebody else's that has its name resolve to loopback could read along otherwise.
        if self.headers.get("Host", "").rpartition(":")[0] not in NAMES:
            self._answer(403, "text/plain", "This page is for this machine alone.")
        elif self.path == "/":
            self._answer(200, "text/html", render(self.source.snapshot(live=True), live=True))
        elif self.path == "/data.json":
            self._answer(200, "application/json", json.dumps(self.source.snapshot(live=True), allow_nan=False))
        else:
            self._answer(404, "text/plain", "There is / and /data.json.")

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is the base class's
        """Say nothing: requests come every second."""
