"""A small web server that can do what servers on the way to a file do: resume, refuse, break off."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Server:
    """`files` by path. The next answers break off after so many bytes, or are these status codes."""

    files: dict[str, bytes] = field(default_factory=dict)
    breaks: list[int] = field(default_factory=list)
    refusals: list[int] = field(default_factory=list)
    resumes: bool = True
    says_length: bool = True
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self, server)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        server.url = f"http://127.0.0.1:{listener.server_port}/"
        try:
            yield server
        finally:
            listener.shutdown()
            thread.join()


def answer(request: BaseHTTPRequestHandler, server: Server) -> None:
    wanted = request.headers.get("Range")
    server.asked.append((request.path, wanted))
    content = server.files.get(request.path)
    if server.refusals or content is None:
        request.send_error(server.refusals.pop(0) if server.refusals else 404)
        return
    start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and server.resumes else 0
    if start and start >= len(content):
        request.send_response(416)
        request.send_header("Content-Range", f"bytes */{len(content)}")
        request.send_header("Content-Length", "0")
        request.end_headers()
        return
    request.send_response(206 if start else 200)
    if start:
        request.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
    if server.says_length:
        request.send_header("Content-Length", str(len(content) - start))
    request.end_headers()
    rest = content[start:]
    request.wfile.write(rest[: server.breaks.pop(0)] if server.breaks else rest)
