"""A registry on a socket that fails in the way that the first part of a repository's name asks for.

https://distribution.github.io/distribution/spec/api/
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ERRORS = {
    "http_500": (500, "UNKNOWN", "unknown error"),
    "http_503": (503, "UNAVAILABLE", "service unavailable"),
    "limited": (429, "TOOMANYREQUESTS", "You have reached your pull rate limit"),
    "unauthorized": (401, "UNAUTHORIZED", "authentication required"),
    "no_manifest": (404, "MANIFEST_UNKNOWN", "manifest unknown"),
    "no_repository": (404, "NAME_UNKNOWN", "repository name not known to registry"),
    "denied": (403, "DENIED", "requested access to the resource is denied"),
}


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


LAYER = bytes(1 << 20)
CONFIG = json.dumps(
    {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": [_digest(LAYER)]}}
).encode()
MANIFEST = json.dumps(
    {
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "config": {
            "mediaType": "application/vnd.docker.container.image.v1+json",
            "size": len(CONFIG),
            "digest": _digest(CONFIG),
        },
        "layers": [
            {
                "mediaType": "application/vnd.docker.image.rootfs.diff.tar",
                "size": len(LAYER),
                "digest": _digest(LAYER),
            }
        ],
    }
).encode()


class Registry(ThreadingHTTPServer):
    """Serves on a socket that listens already, which may be another network namespace's."""

    def __init__(self, listening: socket.socket) -> None:
        super().__init__(listening.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.name = "{}:{}".format(*listening.getsockname())
        self.asked: list[str] = []
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Registry

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        fault = self.path.split("/")[2] if self.path.startswith("/v2/") else ""
        if self.path == "/v2/":
            self._answer(200, b"{}")
        elif fault == "closed":
            self._hang_up()
        elif fault in ERRORS:
            status, code, message = ERRORS[fault]
            self._answer(status, json.dumps({"errors": [{"code": code, "message": message}]}).encode())
        elif "/manifests/" in self.path:
            self._answer(200, MANIFEST, "application/vnd.docker.distribution.manifest.v2+json")
        elif self.path.endswith(_digest(CONFIG)):
            self._answer(200, CONFIG)
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(len(LAYER)))
            self.end_headers()
            self.wfile.write(LAYER[:1000])
            self._hang_up()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is said."""

    def _answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Docker-Distribution-Api-Version", "registry/2.0")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
