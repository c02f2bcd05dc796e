"""The exporter's port: HTTP, basic authentication and TLS around what `prometheus_client` answers.

server = serve(exporter, port=9410)
...
server.close()
"""

from __future__ import annotations

import hmac
import logging
import ssl
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from socket import AF_INET6, SHUT_RDWR, socket
from threading import BoundedSemaphore, Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import REGISTRY, CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

PORT = 9410
"""Where it listens when nobody says otherwise."""

METRICS_PATH = "/metrics"
TARGETS_PATH = "/targets"

WAITING = 128
"""Connections that the kernel holds until they are taken; Python's own 5 make others try again after seconds."""

REQUEST_SEC = 10.0
"""A client that says nothing for so long, or takes nothing, is left alone."""

ANSWERED_SEC = 30.0
"""From the first byte to the last of a request and its answer, however slowly they come."""

AT_ONCE = 32
"""Connections that are answered at once: each has a thread. Those past them are closed."""


_log = logging.getLogger(__name__)


class _Handler(WSGIRequestHandler):
    """Answers without a line for each scrape on standard error."""

    timeout = REQUEST_SEC

    def log_message(self, format: str, *args: Any) -> None:
        return


class _Four(ThreadingWSGIServer):
    request_queue_size = WAITING

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._free = BoundedSemaphore(AT_ONCE)
        self._until: dict[socket, float] = {}
        super().__init__(*arguments, **options)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a client of the metrics' port went away: %s", client_address, exc_info=True)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        self._until[request] = time.monotonic() + ANSWERED_SEC
        try:
            super().process_request_thread(request, client_address)
        finally:
            del self._until[request]
            self._free.release()

    def service_actions(self) -> None:
        """Called twice a second."""
        now = time.monotonic()
        for connection, until in list(self._until.items()):
            if now > until:
                with suppress(OSError):  # it has ended just now
                    connection.shutdown(SHUT_RDWR)


class _Six(_Four):
    address_family = AF_INET6


class Server:
    """An exporter's HTTP server, until `close`. `port` is the one that it got."""

    def __init__(self, server: WSGIServer, thread: Thread) -> None:
        self._server = server
        self._thread = thread
        self.port: int = server.server_port

    def close(self) -> None:
        """Take no more scrapes."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(
    exporter: Collector,
    *,
    host: str = "127.0.0.1",
    port: int = PORT,
    user: str | None = None,
    password: str | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
    plain: bool = False,
    targets: Callable[[], str] | None = None,
) -> Server:
    """Answer scrapes at `http://host:port/metrics`, on loopback unless told; and at `/targets` with what `targets`
    says, for Prometheus' `http_sd_configs`. With `user` and `password`, only those who
    give them (basic authentication); with `certificate` and `key` (PEM), by TLS. `plain`: in Prometheus' text format,
    whatever else a scraper likes better.

    Raises `OSError` where the port is taken, and for a certificate or key that cannot be read or do not fit;
    `ValueError` for half of a pair.
    """
    if (user is None) != (password is None) or (certificate is None) != (key is None):
        raise ValueError("user and password, and certificate and key, go together")
    registry = CollectorRegistry()
    registry.register(exporter)
    app = make_wsgi_app(registry)
    if plain:
        app = _plain(app)
    app = _at_their_paths(app, targets)
    if user is not None:
        app = _guarded(app, f"{user}:{password}")
    context = None
    if certificate is not None and key is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(certificate, key)
        except OSError as error:  # it names no file
            raise OSError(f"the certificate {certificate} with the key {key}: {error}") from error
    kind = _Six if ":" in host else _Four
    server = make_server(host, port, app, kind, handler_class=_Handler)
    if context is not None:
        # Shaking hands on accept would let one silent client hold up all others: each connection's thread does it.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    return Server(server, thread)


def serve_process(**settings: Any) -> Server:
    """Answer scrapes with what libraries of this process have put into `prometheus_client`'s own registry, as vLLM
    does, on any free port. `settings` are those of `serve`; its errors are raised."""
    return serve(REGISTRY, port=0, plain=True, **settings)


def _plain(app: Callable[..., Any]) -> Callable[..., Any]:
    """`app` without its choice of formats: in OpenMetrics, which Prometheus 2 asks for, `prometheus_client` writes the
    colons of vLLM's names as underscores."""
    return lambda environ, start_response: app(
        {name: value for name, value in environ.items() if name != "HTTP_ACCEPT"}, start_response
    )


def _at_their_paths(app: Callable[..., Any], targets: Callable[[], str] | None) -> Callable[..., Any]:
    """`app` at `/metrics`, `targets` at `/targets`, and nothing elsewhere."""

    def answer(environ: Mapping[str, Any], start_response: Callable[..., Any]) -> Any:
        path, method = environ.get("PATH_INFO", ""), environ.get("REQUEST_METHOD")
        if method not in ("GET", "HEAD"):
            status, kind, text = "405 Method Not Allowed", "text/plain; charset=utf-8", "GET it\n"
        elif path == METRICS_PATH:
            body = app({**environ, "REQUEST_METHOD": "GET"}, start_response)
            return body if method == "GET" else []
        elif path == TARGETS_PATH and targets is not None:
            status, kind, text = "200 OK", "application/json", targets()
        else:
            there = METRICS_PATH if targets is None else f"{METRICS_PATH} and {TARGETS_PATH}"
            status, kind, text = "404 Not Found", "text/plain; charset=utf-8", f"there is {there}\n"
        answered = text.encode()
        start_response(status, [("Content-Type", kind), ("Content-Length", str(len(answered)))])
        return [answered] if method != "HEAD" else []

    return answer


def _guarded(app: Callable[..., Any], credentials: str) -> Callable[..., Any]:
    """`app` for those who know the credentials."""
    wanted = b64encode(credentials.encode())

    def guard(environ: Mapping[str, Any], start_response: Callable[..., Any]) -> Any:
        scheme, _, given = environ.get("HTTP_AUTHORIZATION", "").partition(" ")
        if scheme.lower() == "basic" and hmac.compare_digest(given.strip().encode(), wanted):
            return app(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", 'Basic realm="rollcage"')])
        return [b"say who you are: this exporter asks for a user and a password\n"]

    return guard
