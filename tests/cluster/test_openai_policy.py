"""A job's policy on somebody's server: what is wrong with it is said before anything is begun."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console

from rollcage.cluster import asked
from rollcage.cluster.client_policies import client_policy
from rollcage.cluster.config_policies import AnthropicPolicyConfig, OpenAIPolicyConfig
from rollcage.cluster.errors import CouldNotRun, InputError
from rollcage.cluster.job import RunOptions, run_job


class Handler(BaseHTTPRequestHandler):
    """Has the model `m`, and gives no token ids."""

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "m", "owned_by": "someone"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["model"] != "m":
            self.answer({"type": "error", "error": {"type": "not_found_error", "message": "unknown"}}, 404)
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
    with pytest.raises(InputError, match=r"^policies\.small: .* has no model 'n'; it has m$"):
        client_policy("small", config(url, model="n"))


def test_a_model_that_a_server_of_the_messages_api_does_not_have_is_named_with_url_and_settings(
    url: str,
) -> None:
    there = url.removesuffix("/v1")
    claude = AnthropicPolicyConfig(kind="anthropic", model="n", base_url=there, retry_sec=0.2)
    said = (
        rf"^policies\.claude: {re.escape(there)}: the server has no model 'n': correct `model`, or `base_url`"
    )
    with pytest.raises(InputError, match=said) as refused:
        client_policy("claude", claude)
    assert refused.value.setting == ("policies", "claude")


def test_https_to_a_server_without_it_says_what_to_write(url: str) -> None:
    with pytest.raises(CouldNotRun, match="the server speaks http, not TLS: write http:// in base_url"):
        client_policy("small", config(url.replace("http:", "https:")))


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


def test_a_server_that_is_not_there_is_no_fault_of_the_job_and_is_waited_for_with_a_word(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(asked, "WORD_SEC", 0.0)
    told: list[str] = []
    said = r"policies\.small: http://127\.0\.0\.1:9/v1: policy_unavailable: .* \(nothing answers there: start"
    with pytest.raises(CouldNotRun, match=said):
        client_policy("small", config("http://127.0.0.1:9/v1", retry_sec=2.0), told.append)
    assert told == [
        "http://127.0.0.1:9/v1 does not answer yet (Connection refused): waiting for it, up to 2 s (Ctrl-C ends that)"
    ]


def test_what_a_server_lacks_is_told_with_the_line_of_the_setting(tmp_path: Path, write_task: Any) -> None:
    write_task("tasks/one")
    job = tmp_path / "job.yaml"
    policy = (
        "  small:\n    kind: openai\n    model: m\n    base_url: http://127.0.0.1:9/v1\n    retry_sec: 0.1\n"
    )
    job.write_text(f"tasks: tasks\nagents: [bash]\noutput: out\npolicies:\n{policy}")
    options = RunOptions(job, [], [], None, None, None, None, [], None, False)
    with pytest.raises(CouldNotRun, match=rf"^{re.escape(str(job))}:8: policies\.small: http://127"):
        run_job(options, Console(file=StringIO()))
    assert not (tmp_path / "out").exists()
