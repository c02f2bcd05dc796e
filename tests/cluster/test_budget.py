"""A job's budget: one count for all hosts, and a job that ends cleanly when it is spent."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import yaml
from local_ray import local_ray
from ray.exceptions import ActorDiedError, ActorUnavailableError

from rollcage.cluster import budget as budgets
from rollcage.cluster.anthropic_policy import anthropic_policy
from rollcage.cluster.budget import SharedBudget, shared_budgets, spending, stopping_when_spent
from rollcage.cluster.client_policies import client_policy
from rollcage.cluster.config_policies import AnthropicPolicyConfig
from rollcage.cluster.errors import CouldNotRun, InputError
from rollcage.rollout.arrow import read_attempts, read_rollouts
from rollcage.rollout.outcome import Cancelled, PolicyError

ROLLCAGE = Path(sys.executable).parent / "rollcage"
SETTINGS = '[environment]\nmemory_mb = 64\nnetwork_mode = "no-network"\n'
BODY = {"kind": "anthropic", "model": "claude-opus-5", "base_url": "http://127.0.0.1:9"}


class Messages(BaseHTTPRequestHandler):
    """The Messages API with one answer: a command that takes a moment. `server.answered` counts, `server.most` is how
    many were asked at once."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if self.path.endswith("/count_tokens"):
            self.answer(self.server.counts, "application/json", b'{"input_tokens": 9}')
            return
        with self.server.lock:
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        time.sleep(self.server.seconds)
        block = {"type": "text", "text": ""}
        said = {"type": "text_delta", "text": "```bash\nsleep 0.1\n```"}
        usage = {"input_tokens": 1000, "cache_read_input_tokens": 1000, "output_tokens": 1}
        events = [
            {"type": "message_start", "message": {"content": [], "usage": usage}},
            {"type": "content_block_start", "index": 0, "content_block": block},
            {"type": "content_block_delta", "index": 0, "delta": said},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 100}},
            {"type": "message_stop"},
        ]
        body = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events).encode()
        with self.server.lock:
            self.server.now -= 1
            self.server.answered += 1
        self.answer(200, "text/event-stream", body)

    def answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def messages() -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Messages)
    server.lock, server.now, server.most, server.answered, server.seconds = threading.Lock(), 0, 0, 0, 0.2
    server.counts = 200
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def run(job: dict[str, Any], folder: Path, **environ: str) -> tuple[int, dict[str, Any], str]:
    """Status, report and standard error of `rollcage run`."""
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    with tempfile.TemporaryDirectory(prefix="rc-", dir="/tmp") as scratch:
        done = subprocess.run(
            [ROLLCAGE, "run", file, "--output", folder / "run", "--json"],
            capture_output=True,
            text=True,
            env={**os.environ, "TMPDIR": scratch, "ANTHROPIC_API_KEY": "", **environ},
            timeout=200,
            check=False,
        )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


@pytest.mark.ray
@pytest.mark.docker
@pytest.mark.timeout(240)
def test_a_job_whose_budget_is_spent_ends_and_has_written_what_it_paid_for(
    messages: Any, write_task: Any, tmp_path: Path
) -> None:
    task = write_task("tasks/long", toml=SETTINGS)
    job = {
        "tasks": [str(task)],
        "agents": [{"name": "bash", "options": {"max_turns": 50}}],
        "policies": {
            "claude": {
                "kind": "anthropic",
                "model": "claude-opus-5",
                "base_url": f"http://127.0.0.1:{messages.server_address[1]}",
                "budget_usd": 0.1,
            }
        },
        "samples": 6,
        "concurrency": 2,
    }
    status, report, said = run(job, tmp_path)
    assert status == 3, said
    turn = (1000 * 5 + 1000 * 0.5 + 100 * 25) / 1e6
    rows = read_attempts(tmp_path / "run", ["cost_usd", "outcome", "error_class", "evidence"]).to_pylist()
    spent = report["budgets"]["claude"]["spent_usd"]
    assert sum(row["cost_usd"] for row in rows if row["cost_usd"]) == pytest.approx(spent)
    assert report["cost_usd"] == pytest.approx(spent)
    assert spent == pytest.approx(messages.answered * turn)
    assert 0.1 <= spent < 0.1 + messages.most * turn, "the overshoot is at most what was under way"
    assert messages.most <= 2
    assert {(row["outcome"], row["error_class"]) for row in rows} == {("cancelled", "cancelled")}
    assert {row["evidence"]["message"] for row in rows} == {"the job's budget of $0.1 is spent"}
    ended = read_rollouts(tmp_path / "run", ["outcome", "cost_usd", "turns", "evidence"]).to_pylist()
    assert {row["evidence"]["message"] for row in ended} == {"the job's budget of $0.1 is spent"}
    assert Counter(row["outcome"] for row in ended) == {"cancelled": 6}
    turns = [turn for row in ended for turn in row["turns"]]
    assert len(turns) == messages.answered
    assert {(t["prompt_tokens"], t["completion_tokens"], t["cached_tokens"]) for t in turns} == {
        (2000, 100, 1000)
    }
    assert sum(t["cost_usd"] for t in turns) == pytest.approx(spent)
    assert (report["finished"], said.count("budget of $0.1 is spent")) == (True, 1)


def test_a_missing_key_is_told_before_anything_begins(write_task: Any, tmp_path: Path) -> None:
    task = write_task("tasks/one", toml=SETTINGS)
    policy = {
        "kind": "anthropic",
        "model": "claude-opus-5",
        "base_url": "https://claude.example",
        "api_key_env": "MY_KEY",
    }
    job = {"tasks": [str(task)], "agents": ["bash"], "policies": {"claude": policy}}
    status, report, said = run(job, tmp_path)
    assert (status, report, (tmp_path / "run").exists()) == (1, {}, False)
    assert "policies.claude: the variable MY_KEY is not set" in said
    assert "starting Ray" not in said


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, "does not accept the key of MY_KEY"),
        (403, "does not accept the key of MY_KEY"),
        (404, ""),
        (529, ""),
    ],
)
def test_a_key_that_is_not_accepted_is_told_before_anything_begins(
    messages: Any, status: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "k")
    messages.counts = status
    url = f"http://127.0.0.1:{messages.server_address[1]}"
    settings = AnthropicPolicyConfig.model_validate({**BODY, "base_url": url, "api_key_env": "MY_KEY"})
    if said:
        with pytest.raises(InputError, match=rf"policies\.claude: .*{said}"):
            client_policy("claude", settings)
    else:  # a server that counts no tokens, or not now
        assert client_policy("claude", settings).name == "claude"
    assert messages.answered == 0


def test_a_server_that_is_not_there_is_told_before_anything_begins() -> None:
    settings = AnthropicPolicyConfig.model_validate({**BODY, "retry_sec": 0.01})
    with pytest.raises(CouldNotRun, match=r"policies\.claude: http://127\.0\.0\.1:9: policy_unavailable"):
        client_policy("claude", settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model": "my-own", "budget_usd": 1.0}, "set `prices"),
        ({"budget_usd": 0.0}, "greater than 0"),
        ({"budget_usd": 1.0, "extra_body": {"speed": "fast"}}, "set `prices`"),
        ({"sampling": {"seed": 1}}, "leave sampling.seed out"),
        ({"sampling": {"temperature": 1.5}}, "above 1"),
        ({"sampling": {"temperature": 0.5, "top_p": 0.9}}, "leave one out"),
        ({"thinking": {"type": "adaptive"}, "sampling": {"temperature": 0.5}}, "leave sampling.temperature"),
        ({"thinking": {"budget_tokens": 2000}}, "has no type"),
        ({"thinking": {"type": "enabled"}}, "at least 1024"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "raise sampling.max_tokens"),
        ({"extra_body": {"tools": []}}, "extra_body cannot set tools"),
        ({"thinking": {"type": "adaptive", "budget_tokens": "many"}}, "a number of tokens"),
        ({"base_url": "http://server/v1/"}, "leave /v1 out"),
        ({"base_url": "server:8000"}, "must be a URL"),
        ({"model": ""}, "at least 1 character"),
    ],
)
def test_settings_that_the_api_would_refuse_are_refused_at_once(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        AnthropicPolicyConfig.model_validate({**BODY, **settings})


def test_a_model_of_others_may_be_sampled_as_it_likes() -> None:
    settings = {
        "model": "my-own",
        "sampling": {"temperature": 1.5, "top_p": 0.9},
        "prices": {"input": 1.0, "output": 2.0},
    }
    made = anthropic_policy(
        "p", AnthropicPolicyConfig.model_validate({**BODY, **settings, "budget_usd": 1.0}), {}
    )
    assert made.budget is not None
    assert made.prices is not None


@pytest.mark.parametrize(
    ("url", "environ", "refused"),
    [
        (None, {}, True),
        (None, {"ANTHROPIC_API_KEY": "k"}, False),
        (None, {"ANTHROPIC_BASE_URL": "http://localhost:8000"}, False),
        ("http://[::1]:8000", {}, False),
        ("http://127.0.0.1.example", {}, True),
    ],
)
def test_a_key_is_needed_but_for_a_server_on_this_machine(
    url: str | None, environ: dict[str, str], refused: bool
) -> None:
    settings = AnthropicPolicyConfig.model_validate({**BODY, "base_url": url})
    if refused:
        with pytest.raises(ValueError, match="ANTHROPIC_API_KEY is not set"):
            anthropic_policy("p", settings, environ)
    else:
        assert anthropic_policy("p", settings, environ).endpoint.api_key == environ.get("ANTHROPIC_API_KEY")


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"ANTHROPIC_API_KEY": "secret\n"}, "ANTHROPIC_API_KEY holds white space"),
        ({"ANTHROPIC_API_KEY": "secrét"}, "ANTHROPIC_API_KEY holds white space or a letter"),
        ({"ANTHROPIC_API_KEY": "k", "ANTHROPIC_BASE_URL": "server:8000"}, "server:8000 .* no URL"),
    ],
)
def test_variables_that_cannot_be_used_are_named_and_keys_are_not_shown(
    environ: dict[str, str], said: str
) -> None:
    settings = AnthropicPolicyConfig.model_validate({**BODY, "base_url": None})
    with pytest.raises(ValueError, match=said) as error:
        anthropic_policy("p", settings, environ)
    assert "secr" not in str(error.value)


async def test_a_count_that_cannot_be_asked_for_a_moment_has_spent_nothing_and_ends_no_job() -> None:
    class Unreachable:
        """An actor behind a broken connection."""

        def remote(self) -> Any:
            lost: asyncio.Future[float] = asyncio.get_running_loop().create_future()
            lost.set_exception(ActorUnavailableError("no connection", None))
            return lost

    budget = SharedBudget(SimpleNamespace(spent=Unreachable()), 1.0)
    with pytest.raises(PolicyError) as error:
        await budget.admit()
    assert error.value.error_class == "policy_unavailable"
    assert await spending({"p": budget}) == {"p": {"limit_usd": 1.0, "spent_usd": None}}


async def test_a_job_that_has_ended_does_not_wait_for_ever_to_be_told_what_it_spent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Silent:
        """An actor of a Ray that is gone."""

        def remote(self) -> Any:
            return asyncio.get_running_loop().create_future()

    monkeypatch.setattr(budgets, "SPENDING_SEC", 0.1)
    silent = SharedBudget(SimpleNamespace(spent=Silent()), 1.0)
    assert await spending({"p": silent}) == {"p": {"limit_usd": 1.0, "spent_usd": None}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_ray():
        yield


@ray.remote(num_cpus=0)
class Host:
    """Another process of the job."""

    async def spend(self, budget: SharedBudget, usd: float) -> str:
        try:
            await budget.admit()
        except Cancelled as error:
            return error.message
        await budget.charge(usd)
        return ""


@pytest.mark.ray
async def test_all_hosts_pay_out_of_one_budget(cluster: None) -> None:
    policy = anthropic_policy("claude", AnthropicPolicyConfig.model_validate({**BODY, "budget_usd": 1.0}), {})
    hosts = [Host.remote() for _ in range(2)]
    told: list[str] = []
    async with shared_budgets({"claude": policy}) as (policies, budgets):
        assert policies["claude"].budget is budgets["claude"]  # type: ignore[attr-defined]
        budget = budgets["claude"]
        async with stopping_when_spent(budgets, told.append):
            assert await hosts[0].spend.remote(budget, 0.6) == ""
            assert told == []
            assert await hosts[1].spend.remote(budget, 0.6) == ""
            assert [await host.spend.remote(budget, 0.6) for host in hosts] == [
                "the job's budget of $1 is spent"
            ] * 2
            async with asyncio.timeout(20):
                while not told:
                    await budget.spent()
        assert told == ["the job's budget of $1 is spent"]
        assert await spending(budgets) == {"claude": {"limit_usd": 1.0, "spent_usd": pytest.approx(1.2)}}


@pytest.mark.ray
async def test_a_budget_that_is_not_spent_ends_without_a_word(cluster: None) -> None:
    policy = anthropic_policy("claude", AnthropicPolicyConfig.model_validate({**BODY, "budget_usd": 1.0}), {})
    loop, said, told = asyncio.get_running_loop(), [], []
    loop.set_exception_handler(lambda _, context: said.append(context["message"]))
    async with shared_budgets({"claude": policy}) as (_, budgets):
        async with stopping_when_spent(budgets, told.append):
            await budgets["claude"].charge(0.5)
        waiting = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    await asyncio.wait(waiting, timeout=20)
    del waiting
    gc.collect()
    assert (said, told) == ([], [])


@pytest.mark.ray
async def test_what_a_cancelled_caller_has_spent_is_counted(cluster: None) -> None:
    policy = anthropic_policy("claude", AnthropicPolicyConfig.model_validate({**BODY, "budget_usd": 1.0}), {})
    async with shared_budgets({"claude": policy}) as (_, budgets):
        charging = asyncio.ensure_future(budgets["claude"].charge(0.5))
        await asyncio.sleep(0)
        charging.cancel()
        await asyncio.wait({charging})
        assert charging.cancelled()
        async with asyncio.timeout(20):
            while not (
                spent := await budgets["claude"].spent()
            ):  # calls of one caller may overtake each other
                pass
        assert spent == 0.5


@pytest.mark.ray
async def test_where_the_count_is_lost_nothing_more_is_spent(cluster: None) -> None:
    policy = anthropic_policy("claude", AnthropicPolicyConfig.model_validate({**BODY, "budget_usd": 1.0}), {})
    told: list[str] = []
    async with shared_budgets({"claude": policy}) as (_, budgets):
        budget = budgets["claude"]
        await budget.charge(0.5)
        async with stopping_when_spent(budgets, told.append):
            ray.kill(budget._purse)
            with pytest.raises(ActorDiedError):
                while True:  # a call that comes before the kill is answered still
                    with suppress(ActorUnavailableError):
                        await budget._purse.spent.remote()
            with pytest.raises(Cancelled, match="not counted any more"):
                await budget.admit()
            async with asyncio.timeout(20):
                while not told:
                    await asyncio.wait({asyncio.ensure_future(budget.spent())})
        assert "not counted any more" in told[0]
        assert await spending(budgets) == {"claude": {"limit_usd": 1.0, "spent_usd": None}}
