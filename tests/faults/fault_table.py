"""What is injected, how, and the class that it must be given: the rows of the table in docs/outcomes.md.

Each test of this folder says with `record` what a row was given, and fails where that is not what is expected. `pytest
tests/faults --write-fault-table` also writes what was given to `rollout/faults.json`, from which the page is made.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """`expected`: an error class, or an outcome where there must be none. `not_injected`: why it cannot be."""

    fault: str
    how: str
    expected: str
    not_injected: str = ""


ENGINE = {
    "pool": Row("address pools used up", "another tenant takes both networks of a private engine, and one more is"
                " asked of it", "network_pool"),
    "pool_rollout": Row("address pools used up", "the same engine, a rollout with internet", "passed"),
    "range": Row("our range used up", "another tenant takes all of `network.cidr` and gives it back later",
                 "passed"),
    "overlap": Row("pools overlap", "a network is asked for in the range of another", "network_setup"),
    "bridge": Row("bridge removed", "the bridge that rollouts share is deleted under a running engine",
                  "network_setup"),
    "restart": Row("engine stopped and started", "a private engine, under 20 rollouts of a job: each of them ends"
                   " well", "docker_unavailable"),
    "frozen": Row("engine frozen", "SIGSTOP of a private engine, before a start", "docker_timeout"),
    "frozen_agent": Row("engine frozen for a while", "the same, while a command runs, and then SIGCONT", "passed"),
    "disk_build": Row("disk full in a build", "a private engine on a loopback disk of its own", "disk_full"),
    "disk_start": Row("disk full in a start", "a private engine on a loopback disk of its own", "disk_full"),
    "shim": Row("shim killed", "kill -9 of a container's shim, while a command runs", "container_lost"),
}  # fmt: skip

REGISTRY = {
    "refused": Row("registry: connection refused", "a loopback port that nobody listens at", "image_pull"),
    "dropped": Row("registry: packets dropped", "a rule of iptables on loopback", "image_pull"),
    "closed": Row("registry: connection closed", "a registry on loopback that hangs up", "image_pull"),
    "http_500": Row("registry: 500", "a registry on loopback", "image_pull"),
    "http_503": Row("registry: 503", "a registry on loopback", "image_pull"),
    "limited": Row("registry: 429", "a registry on loopback; asked again after 120 s at the soonest", "image_pull"),
    "unauthorized": Row("registry: 401", "a registry on loopback", "image_pull"),
    "no_tls": Row("registry without TLS", "a registry at an address that is not loopback's", "image_pull"),
    "cut": Row("registry: layer cut short", "a registry on loopback that hangs up within a layer", "image_pull"),
    "no_name": Row("registry's name does not resolve", "`registry.invalid`", "image_pull"),
    "add": Row("a file's server is not there", "`ADD http://127.0.0.1:1/x /x`", "build_infra"),
    "no_manifest": Row("no such tag", "a registry on loopback: 404, MANIFEST_UNKNOWN", "base_image_missing"),
    "no_repository": Row("no such repository", "a registry on loopback: 404, NAME_UNKNOWN", "base_image_missing"),
    "denied": Row("no such repository, as registries put it", "a registry on loopback: 403, DENIED",
                  "base_image_missing"),
}  # fmt: skip

CONTAINER = {
    "killed": Row("container killed", "`docker kill` by somebody else, while a command runs", "container_lost"),
    "killed_pid": Row("PID 1 killed", "kill -9 from the host, while a command runs", "container_lost"),
    "removed": Row("container removed", "`docker rm -f` while the verifier runs", "container_lost"),
    "paused": Row("container frozen", "`docker pause` while a command runs, past the command's time", "passed"),
    "freezer": Row("container frozen for good", "the cgroup's freezer, while a command runs", "container_lost"),
    "deadline": Row("deadline reached", "`deadline_sec` passes while a command runs", "container_lost"),
    "oom": Row("out of memory", "a command takes more than the task's limit", "agent_oom"),
    "oom_pid_1": Row("out of memory, PID 1 too", "the agent fills /dev/shm up to the task's limit", "agent_oom"),
    "oom_then_killed": Row("out of memory, killed later", "a command takes too much; later `docker kill` by"
                           " somebody else", "container_lost"),
    "oom_then_killed_pid": Row("out of memory, PID 1 killed later", "a command takes too much; later kill -9 from"
                               " the host", "container_lost"),
    "runtime": Row("runtime missing", "`runtime: no-such-runtime`", "container_start"),
    "image_gone": Row("image removed", "between its build and the start", "container_start"),
    "user": Row("no such user", "`agent.user = \"ghost\"`", "container_config"),
    "workdir": Row("workdir is a file", "`environment.workdir = \"/etc/passwd\"`", "container_config"),
    "storage": Row("storage budget passed", "the agent writes more than `environment.storage_mb`",
                   "agent_killed_sandbox"),
    "host_killed": Row("host's process killed", "kill -9 of a host with live sandboxes; the next one clears up",
                       "nothing left"),
}  # fmt: skip

TASK = {
    "parse": Row("Dockerfile that is none", "`COPY` without a source", "dockerfile_parse"),
    "step": Row("step fails", "`RUN exit 7`, asked for by 8 samples: one build", "image_build"),
    "step_message": Row("step prints an engine's words", "`RUN echo no space left on device; exit 1`", "image_build"),
    "build_time": Row("build hangs", "`RUN sleep 600` past `build_timeout_sec`", "image_build"),
    "malformed": Row("task.toml does not parse", "`[environment`", "task_malformed"),
    "unsupported": Row("instruction that no engine here can do", "`RUN --mount=type=ssh`", "unsupported"),
    "unhealthy": Row("healthcheck never passes", "`command = \"false\"`", "healthcheck"),
}  # fmt: skip

VERIFIER = {
    "missing": Row("no reward", "test.sh ends and writes none", "reward_missing"),
    "malformed_reward": Row("reward is no number", "`echo nan`", "reward_malformed"),
    "tampered": Row("reward planted", "the agent writes one, the verifier none", "reward_tampered"),
    "hangs": Row("verifier hangs", "`sleep 600` past the verifier's time", "verifier_timeout"),
    "pipe": Row("verifier's pipe held open", "a daemon holds the pipe to `tee`, past the verifier's time",
                "verifier_timeout"),
    "crash": Row("verifier's interpreter missing", "`exec /no/such/python`", "verifier_crash"),
}  # fmt: skip

AGENT = {
    "timeout": Row("agent's time runs out", "`sleep 600`, its child writing on", "agent_timeout"),
    "turns": Row("turns used up", "scripted policy, `max_turns: 2`", "turn_limit"),
    "tokens": Row("tokens used up", "scripted policy, `max_tokens: 8`", "token_limit"),
    "form": Row("answers without an action", "scripted policy", "malformed_actions"),
    "context": Row("context full", "scripted policy that says so", "context_overflow"),
    "no_shell": Row("every shell removed", "`rm` of sh and bash, then `exit`", "agent_killed_sandbox"),
    "policy_gone": Row("policy gone", "scripted policy that says so", "policy_unavailable"),
    "policy_slow": Row("policy too slow", "scripted policy that says so", "policy_timeout"),
    "policy_error": Row("policy fails", "scripted policy that says so", "policy_error"),
    "policy_limit": Row("policy asks for fewer requests", "scripted policy that says so", "rate_limited"),
    "stale": Row("weights move on", "an engine in this process, newer at each turn; `max_staleness` 0", "stale"),
    "bug": Row("a bug of ours", "an agent that divides by zero", "internal_error"),
    "called_off": Row("called off", "the host is told to cancel", "cancelled"),
    "host_lost": Row("host lost", "kill -9 of the actor of a host on Ray", "host_lost"),
    "host_oom": Row("host out of memory", "", "host_oom", "would take the memory of the whole machine"),
}  # fmt: skip

POLICY = {
    "openai_storm": Row("429 storm", "OpenAI's API on loopback: 429 to every request", "rate_limited"),
    "openai_storm_wait": Row("429 that asks for a long wait", "OpenAI's API on loopback: `Retry-After: 120`",
                             "rate_limited"),
    "openai_storm_passes": Row("429 storm that passes", "OpenAI's API on loopback: 429 to the first 3 requests",
                               "passed"),
    "openai_500": Row("model server: 500", "OpenAI's API on loopback", "policy_error"),
    "openai_dead": Row("engine dead, its port answers", "CASES 29: OpenAI's API on loopback: 500, and 503 at `/health`",
                       "policy_unavailable"),
    "openai_503": Row("model server: 503", "OpenAI's API on loopback", "policy_unavailable"),
    "openai_504": Row("model server: 504", "OpenAI's API on loopback", "policy_timeout"),
    "openai_reset": Row("model server: connection closed in an answer", "OpenAI's API on loopback",
                        "policy_unavailable"),
    "openai_endless": Row("answer that never ends", "OpenAI's API on loopback, past `request_timeout_sec`",
                          "policy_timeout"),
    "openai_refused": Row("model server: 400", "OpenAI's API on loopback", "policy_refused"),
    "openai_long": Row("conversation too long", "CASES 28: OpenAI's API on loopback: 400, `max_tokens must be at least"
                       " 1, got -186`", "context_overflow"),
    "anthropic_storm": Row("429 storm", "the Messages API on loopback: 429 to every request", "rate_limited"),
    "anthropic_overloaded": Row("model server overloaded", "the Messages API on loopback: 529", "rate_limited"),
    "anthropic_500": Row("model server: 500", "the Messages API on loopback", "policy_error"),
    "anthropic_dead": Row("engine dead, its port answers", "the Messages API on loopback: 500, and 503 at `/health`",
                          "policy_unavailable"),
    "anthropic_reset": Row("model server: connection closed in an answer", "the Messages API on loopback",
                           "policy_unavailable"),
    "anthropic_endless": Row("answer that never ends", "the Messages API on loopback, past `request_timeout_sec`",
                             "policy_timeout"),
    "anthropic_long": Row("conversation too long", "the Messages API on loopback: 400", "context_overflow"),
    "vllm_long": Row("conversation too long", "vLLM's own server, by each of its APIs", "context_overflow"),
    "vllm_endless": Row("answer that never ends", "vLLM's own server, by each of its APIs; it is aborted there",
                        "policy_timeout"),
    "vllm_stopped": Row("model server stopped in an answer", "SIGSTOP of vLLM's own server", "policy_unavailable"),
    "vllm_stopped_messages": Row("model server stopped in an answer", "the same, by its Messages API",
                                 "policy_timeout"),
    "vllm_engine": Row("engine dead, its port answers", "CASES 29: kill -9 of the engine of vLLM's own server, by each"
                       " of its APIs", "policy_unavailable"),
    "vllm_gone": Row("model server killed", "kill -9 of vLLM's own server", "policy_unavailable"),
    "replica_killed": Row("engine killed", "kill -9 of a replica's engine in Ray, in an answer: another one takes its"
                          " place", "passed"),
    "replica_killed_late": Row("engine killed", "the same, with no time left for another one (`retry_sec`)",
                               "policy_unavailable"),
    "replica_long": Row("conversation too long", "a replica of vLLM in Ray", "context_overflow"),
    "retried": Row("model server fails one attempt", "OpenAI's API on loopback, in a job: the rollout is tried again",
                   "passed"),
}  # fmt: skip

SPOOFS = {
    "pkill": Row("spoof: pkill -9 -f of its own shell", "CASES 14", "passed"),
    "words": Row("spoof: the engine's words on stdout, exit 1", "CASES 16", "failed"),
    "words_stderr": Row("spoof: the engine's words on stderr and in Docker's JSON", "the agent prints them", "failed"),
    "words_files": Row("spoof: the engine's words in files", "in /logs, /tmp, the answer and a file's name", "failed"),
    "words_test": Row("spoof: the engine's words as the test's output", "test.sh prints them and writes 0", "failed"),
    "words_reward": Row("spoof: the engine's words as the reward", "test.sh writes them to reward.txt",
                        "reward_malformed"),
    "words_names": Row("spoof: the engine's words as names", "a user and a directory of the task are called so",
                       "failed"),
    "exits": Row("spoof: exit 137, 125, 126, 127, 143, 255", "the agent's shell ends so, one after the other",
                 "passed"),
    "kill_pid_1": Row("spoof: every signal to PID 1", "SIGTERM and SIGKILL among them, and to all others", "passed"),
    "oom_words": Row("spoof: prints OOMKilled, exits 137", "a command's own status", "failed"),
    "own_limit": Row("spoof: a limit of its own", "`ulimit -v`, allocation fails, exit 137", "failed"),
    "full_tmpfs": Row("spoof: No space left on device", "the agent fills /dev/shm", "failed"),
    "flood": Row("spoof: floods stdout", "100 MB without a newline", "passed"),
    "closed_stdio": Row("spoof: closes its streams", "`exec <&- >&- 2>&-`", "passed"),
    "replaced_bash": Row("spoof: replaces bash and sh", "by a script that prints the engine's words, exits 125",
                         "agent_killed_sandbox"),
    "pids": Row("spoof: no process left", "a fork bomb up to the limit on processes", "failed"),
    "stops": Row("spoof: stops every process", "`kill -STOP -1`, past the command's time", "passed"),
    "deadline_status": Row("spoof: exit 124", "as PID 1 does at its deadline", "failed"),
}  # fmt: skip

TABLE: dict[str, Row] = {**ENGINE, **REGISTRY, **CONTAINER, **TASK, **VERIFIER, **AGENT, **POLICY, **SPOOFS}
