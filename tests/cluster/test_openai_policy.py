"""A job's policy on somebody's server: what is wrong with it is said before anything is begun."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from pydantic import ValidationError

from rollcage.cluster.client_policies import client_policy
from rollcage.cluster.config_policies import OpenAIPolicyConfig
from rollcage.cluster.errors import CouldNotRun, InputError


class Handler(BaseHTTPRequestHandler):
    """Has the model `m`, and gives no token ids."""

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "m", "owned_by": "someone"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["model"] != "m":
            self.answer({"error": {"message": "unknown"}}, 404)
            return
        message = {"role": "assistant", "content": "A"}
        self.answer({"choices": [{"index": 0, "finish_reason": "length", "message": message}]})

    def answer(self, body: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Tests are quiet."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def config(url: str, **changed: Any) -> OpenAIPolicyConfig:
    return OpenAIPolicyConfig(
        **{"kind": "openai", "base_url": url, "model": "m", "retry_sec": 0.2, **changed}
    )


async def test_a_policy_is_made_with_a_running_loop_or_without_and_goes_to_each_host(url: str) -> None:
    policy = client_policy("small", config(url))
    assert pickle.loads(pickle.dumps(policy)).name == "small"


def test_a_server_without_ids_is_refused_where_they_are_required(url: str) -> None:
    with pytest.raises(InputError, match=r"^policies\.small: .*answers without the ids of the prompt"):
        client_policy("small", config(url, tokens="required"))


def test_a_model_that_the_server_does_not_have_is_named_with_those_that_it_has(url: str) -> None:
    with pytest.raises(InputError, match=r"^policies\.small: .* has no model 'n'; it has m"):
        client_policy("small", config(url, model="n"))


def test_a_server_that_does_not_answer_does_not_hold_back_ctrl_c() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        held = []  # else the connection is closed with its last name

        def interrupt() -> None:
            held.append(silent.accept())
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            client_policy("small", config(f"http://127.0.0.1:{silent.getsockname()[1]}/v1"))
        thread.join()
    assert time.monotonic() - started < 20, "the server's list of models is waited for 30 s"


@pytest.mark.parametrize("headers", [{"X y": "a"}, {"X": "a\nb"}, {"X": "é"}, {"X": " a"}])
def test_headers_that_cannot_be_sent_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match=r"headers\."):
        config("http://127.0.0.1:9/v1", headers=headers)
    assert config("http://127.0.0.1:9/v1", headers={"X-S": "a {session}\tb", "Y": ""}).headers["Y"] == ""


def test_a_server_that_is_not_there_is_no_fault_of_the_job() -> None:
    with pytest.raises(CouldNotRun, match=r"policies\.small: http://127\.0\.0\.1:9/v1: policy_unavailable"):
        client_policy("small", config("http://127.0.0.1:9/v1"))
