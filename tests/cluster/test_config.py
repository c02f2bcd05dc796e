"""A job's YAML: what is accepted, and what is said about what is not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rollcage.cluster.config import ConfigError, JobConfig, job_schema, load_job
from rollcage.cluster.config_policies import VllmPolicyConfig
from rollcage.cluster.errors import InputError
from rollcage.cluster.job_metrics import exporter_config
from rollcage.rollout.policies.base import Sampling

DEMO = Path(__file__).parents[2] / "examples" / "demo.yaml"


@pytest.fixture
def job(tmp_path: Path):
    """Writes a job next to a directory `tasks` and a script `answers.yaml`, and returns its path."""
    (tmp_path / "tasks" / "hello").mkdir(parents=True)
    (tmp_path / "answers.yaml").write_text("default: ['x']\n")

    def write(text: str) -> Path:
        path = tmp_path / "job.yaml"
        path.write_text(text)
        return path

    return write


def problems(path: Path | None, *overrides: str, options: dict[str, Any] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_job(path, overrides, options)
    assert isinstance(caught.value, InputError)
    prefix = f"{path.parent}/" if path else ""
    return [problem.removeprefix(prefix) for problem in caught.value.problems]


def test_the_shortest_job_has_tasks_and_an_agent(job) -> None:
    config = load_job(job("tasks: tasks\nagent: oracle\n"))
    assert [agent.called for agent in config.agents] == ["oracle"]
    assert (config.name, config.samples, config.concurrency, config.pass_threshold) == ("job", 1, 8, 1.0)
    assert config.output is None


def test_paths_start_at_the_files_folder_and_those_of_the_command_line_at_ones_own(
    job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.md").write_text("Be brief.")
    (tmp_path / "elsewhere" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    path = job(
        "tasks: [tasks, ./tasks/*]\noutput: out\nagents:\n"
        "  - {name: bash, policy: s, options: {system_prompt: prompt.md, task_prompt: 'Do {instruction}'}}\n"
        "policies:\n  s: {kind: scripted, file: answers.yaml}\n  m: {kind: vllm, model: org/some-model}\n"
        "  d: {kind: vllm, model: ./weights}\n"
    )
    config = load_job(path)
    assert config.tasks == [str(tmp_path / "tasks"), str(tmp_path / "tasks/*")]
    assert config.output == str(tmp_path / "out")
    assert config.agents[0].options == {
        "system_prompt": str(tmp_path / "prompt.md"),
        "task_prompt": "Do {instruction}",
    }
    assert config.policies["s"].model_dump()["file"] == str(tmp_path / "answers.yaml")
    assert config.policies["m"].model_dump()["model"] == "org/some-model"
    assert config.policies["d"].model_dump()["model"] == str(tmp_path / "weights")
    changed = load_job(path, ["tasks.0=mine"], {"output": Path("runs/x")})
    assert changed.tasks[0] == str(tmp_path / "elsewhere" / "mine")
    assert changed.output == str(tmp_path / "elsewhere" / "runs" / "x")
    assert load_job(path, ["output=s3://bucket/run"]).output == "s3://bucket/run"


def test_unknown_settings_are_refused_with_their_line_and_the_nearest_name(job) -> None:
    path = job(
        "tasks: tasks\n"
        "sampels: 4\n"
        "agents:\n"
        "  - oracle\n"
        "  - name: bash\n"
        "    polcy: small\n"
        "policies:\n"
        "  small:\n"
        "    kind: vllm\n"
        "    model: smollm2\n"
        "    sampling:\n"
        "      temprature: 1.0\n"
        "n_concurrent_trials: 4\n"
        "build_slots: 3\n"
        "sandbox: {network: {cdir: 10.0.0.0/8}}\n"
    )
    assert sorted(problems(path)) == sorted(
        [
            "job.yaml:2: sampels: there is no such setting (did you mean 'samples'?)",
            "job.yaml:6: agents.1.polcy: there is no such setting (did you mean 'policy'?)",
            "job.yaml:12: policies.small.sampling.temprature: there is no such setting "
            "(did you mean 'temperature'?)",
            "job.yaml:13: n_concurrent_trials: there is no such setting (here it is called 'concurrency')",
            "job.yaml:14: build_slots: there is no such setting (it is a setting of `sandbox`)",
            "job.yaml:15: sandbox.network.cdir: there is no such setting (did you mean 'cidr'?)",
        ]
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("concurrency: 0", "concurrency: must be greater than or equal to 1, not 0"),
        ("samples: '4'", 'samples: must be a valid integer, not "4"'),
        ("samples: true", "samples: must be a valid integer, not true"),
        ("agent_timeout_sec: -1", "agent_timeout_sec: must be greater than 0, not -1"),
        ("pass_threshold: .nan", "pass_threshold: must be a finite number"),
        ("name: a/b", 'name: cannot be a name: "a/b"'),
        ("retries: {docker_timeuot: 1}", "no error class is called so (did you mean 'docker_timeout'?)"),
        ("retries: {image_build: 1}", "task errors of this class are never tried again"),
        ("retries: {agent_oom: 1}", "agent errors of this class are never tried again"),
        ("retries: {docker_timeout: -1}", "retries.docker_timeout: must be greater than or equal to 0"),
        ("policies: {p: {kind: vlm}}", "policies.p.kind: there is no kind \"vlm\" (did you mean 'vllm'?)"),
        ("policies: {p: {model: x}}", "policies.p: does not say its kind"),
        ("policies: {p: {kind: vllm}}", "policies.p.model: is required and not there"),
        ("policies: {p: {kind: scripted, file: no.yaml}}", "policies.p.file: there is no file"),
        ("policies: {p: {kind: recorded, run: nowhere}}", "policies.p.run: there is no run"),
        ("policies: {a b: {kind: vllm, model: x}}", 'policies.a b: cannot be a name: "a b"'),
        ("policies: {p: {kind: vllm, model: x, file: y}}", "policies.p.file: there is no such setting"),
        ("sandbox: {network: {cidr: 10.0.0.0/99}}", "sandbox.network.cidr: "),
        ("sandbox: {network: {cidr: 10.0.0.0/27}}", "10.0.0.0/27 is too small: at least a /26"),
        ("sandbox: {network: {allow_private: [8.8.8.0/24]}}", "8.8.8.0/24 is in none of 10.0.0.0/8, "),
        ("sandbox: {network: {allow_private: [169.254.0.0/16]}}", "169.254.0.0/16 is in none of"),
        (
            "sandbox: {network: {allow_private: [10.0.0.0/24], insecure_network: true}}",
            "allow_private opens nothing where insecure_network opens everything",
        ),
        ("sandbox: {image_disk_gb: 0}", "sandbox.image_disk_gb: must be greater than 0"),
        (
            "sandbox: {ca_bundle: ca.pem}",
            "sandbox.ca_bundle: must be an absolute path, the same on each host",
        ),
        ("sandbox: {proxies: {http: 'proxy:3128'}}", "must be a URL such as http://proxy.example:3128"),
        (
            "sandbox: {https: x}",
            "sandbox.https: there is no such setting (it is a setting of `sandbox.proxies`)",
        ),
        ("sandbox: 3", "sandbox: must be a valid dictionary or instance of SandboxConfig, not 3"),
        ("tasks: {a: b}", "'tasks' was set before, at"),
    ],
)
def test_wrong_values_are_refused_with_their_line(job, line: str, said: str) -> None:
    (problem,) = problems(job(f"tasks: tasks\nagent: oracle\n\n{line}\n"))
    assert problem.startswith("job.yaml:4: ")
    assert said in problem
    assert problem.endswith(")")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("agent: oracle", "job.yaml: tasks: is required and not there (name the tasks)"),
        ("tasks: []\nagent: oracle", "job.yaml:1: tasks: is empty (name at least one)"),
        ("tasks: tasks", "job.yaml: agents: is required and not there (add `agents`)"),
        ("tasks: tasks\nagents: []", "job.yaml:2: agents: is empty (name at least one)"),
        ("tasks:\n- tasks\n- nope\nagent: oracle", "job.yaml:3: tasks.1: there is no "),
        ("tasks:\n- tasks\n- nope*\nagent: oracle", "job.yaml:3: tasks.1: there is no "),
        ("tasks:\n- tasks\n- ./tasks\nagent: oracle", "job.yaml:3: tasks.1: "),
        ("tasks: tasks\nagents: [nop, oracle, nop]", "job.yaml:2: agents.0: 2 agents are called 'nop'"),
        (
            "tasks: tasks\nagent: orcale",
            "job.yaml:2: agents.0.name: no agent is called 'orcale' (did you mean 'oracle'?)",
        ),
        (
            "tasks: tasks\nagent: no.module:Agent",
            "job.yaml:2: agents.0.name: agent 'no.module:Agent' cannot be",
        ),
        ("tasks: tasks\nagent: bash", "job.yaml:2: agents.0: agent 'bash' needs a policy and names none"),
        (
            "tasks: tasks\nagents:\n- name: bash\n  policy: smal\npolicies: {small: {kind: vllm, model: x}}",
            "job.yaml:4: agents.0.policy: no policy is called 'smal' (did you mean 'small'?)",
        ),
        (
            "tasks: tasks\nagents:\n- name: bash\n  options: {max_turn: 3}\npolicy: x",
            "job.yaml:4: agents.0.options.max_turn: agent 'bash' does not take these options: there is no 'max_turn'",
        ),
        (
            "tasks: tasks\nagents:\n- name: bash\n  options:\n    summarize: true\n    max_turns: ten\npolicy: x",
            "job.yaml:6: agents.0.options.max_turns: agent 'bash' does not take this value: max_turns must be a",
        ),
        (
            "tasks: tasks\nagents:\n- name: bash\n  options:\n    task_prompt: Do it.\npolicy: x",
            "job.yaml:5: agents.0.options.task_prompt: agent 'bash' does not take this value: task_prompt",
        ),
        ("", "job.yaml: a job is a mapping of settings"),
        ("- tasks", "job.yaml: a job is a mapping of settings"),
        ("tasks: tasks\nagent: [oracle", "job.yaml:"),
        ("tasks: tasks\n\tagent: oracle", "job.yaml:2: this is not YAML"),
        ("tasks: tasks\nname: !!python/name:os.system x", "job.yaml:2: this is not YAML"),
        ("tasks: &a [*a]\nagent: oracle", "job.yaml:1: these anchors never end"),
    ],
)
def test_a_job_that_cannot_be_says_why(job, text: str, said: str) -> None:
    found = problems(job(text))
    assert any(problem.startswith(said) for problem in found), found


def test_anchors_that_multiply_are_stopped(job) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    assert "these anchors never end" in problems(job("\n".join(lines)))[0]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert problems(tmp_path / "no.yaml") == [
        "no.yaml: cannot be read: No such file or directory (name the YAML file of a job; give tasks with --tasks)"
    ]


def test_an_agent_takes_the_only_policy_and_one_that_needs_none_has_none(job) -> None:
    config = load_job(
        job(
            "tasks: tasks\nagents: [oracle, bash, {name: bash, label: bash-2, policy: p}]\n"
            "policies: {p: {kind: vllm, model: x}}\n"
        )
    )
    assert [config.policy_of(agent) for agent in config.agents] == [None, "p", "p"]
    assert list(config.used_policies()) == ["p"]
    idle = load_job(job("tasks: tasks\nagent: oracle\npolicies: {p: {kind: vllm, model: x}}\n"))
    assert idle.used_policies() == {}


def test_overrides_change_one_setting_and_are_named_when_they_are_wrong(job) -> None:
    path = job(
        "tasks: tasks\nagents: [oracle, {name: bash, policy: p}]\npolicies: {p: {kind: vllm, model: x}}\n"
    )
    config = load_job(
        path,
        [
            "samples=16",
            "policies.p.sampling.temperature=0.5",
            "agents.bash.options.max_turns=3",
            "agents.0=nop",
        ],
    )
    assert config.samples == 16
    assert config.policies["p"].sampling.sampling() == Sampling(temperature=0.5)
    assert [agent.name for agent in config.agents] == ["nop", "bash"]
    assert config.agents[1].options == {"max_turns": 3}
    assert problems(path, "sampels=4") == [
        "--set sampels=4: sampels: there is no such setting (did you mean 'samples'?)"
    ]
    assert problems(path, "samples=0")[0].startswith("--set samples=0: samples: must be greater")
    assert "this is no override" in problems(path, "samples")[0]
    assert "nothing here is called 'nobody'" in problems(path, "agents.nobody.samples=2")[0]
    assert "the value is not YAML" in problems(path, "name=[")[0]
    assert "has no 'x'" in problems(path, "name=a", "name.x=1")[0]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("listen: '9410'", "HOST:PORT, such as 0.0.0.0:9410 or [::1]:9410"),
        ("listen: '::1'", "HOST:PORT"),
        ("listen: '[::1:9410'", "HOST:PORT"),
        ("listen: 'http://127.0.0.1:1'", "HOST:PORT"),
        ("listen: 127.0.0.1:65536", "HOST:PORT"),
        ("user: u", "user and password_env go together"),
        ("user: 'a:b'\n  password_env: P", "a name without a colon"),
        ("user: ''\n  password_env: P", "a name without a colon"),
        ("user: u\n  password_env: ''", "the name of an environment variable"),
        ("state: s3://bucket/x", "a whole path"),
        ("state: here", "a whole path"),
        ("targets: ''", "a whole path"),
        ("certificate: /c.pem", "certificate and key go together"),
    ],
)
def test_settings_of_metrics_that_cannot_be_are_named_with_their_line(job, setting: str, said: str) -> None:
    [problem] = problems(job(f"tasks: tasks\nagent: oracle\nmetrics:\n  {setting}\n"))
    assert said in problem
    assert re.search(r"job\.yaml:[3-5]: metrics", problem)


def test_addresses_and_paths_of_metrics_are_taken_as_they_are_meant(
    job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    text = "tasks: tasks\nagent: oracle\nmetrics: {listen: '[::1]:9511', state: ~/counted, targets: /sd}\n"
    made = exporter_config(load_job(job(text)).metrics)
    assert (made.host, made.port) == ("::1", 9511)
    assert (made.state, made.targets) == (Path("/home/me/counted"), Path("/sd"))


def test_a_job_needs_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "answers.yaml").write_text("default: ['x']\n")
    options = {
        "tasks": ["tasks"],
        "agents": ["bash", "oracle"],
        "policy": "answers.yaml",
        "samples": 4,
        "output": None,
    }
    config = load_job(None, ["concurrency=3"], options)
    assert (config.name, config.samples, config.concurrency) == ("job", 4, 3)
    assert config.policies["answers"].model_dump()["file"] == str(tmp_path / "answers.yaml")
    assert [config.policy_of(agent) for agent in config.agents] == ["answers", None]
    model = load_job(None, (), options | {"policy": "org/Some-Model_1"})
    assert model.policies["Some-Model_1"].model_dump()["model"] == "org/Some-Model_1"
    assert problems(None, options=options | {"samples": 0})[0].startswith("--samples: samples: must be")
    assert problems(None, options={"agents": ["oracle"]}) == [
        "the job: tasks: is required and not there (name the tasks)"
    ]
    assert "no agent is called 'orcale'" in problems(None, options=options | {"agents": ["orcale"]})[0]


def test_options_of_the_command_line_win_over_the_file_and_overrides_over_both(job) -> None:
    path = job("tasks: tasks\nagent: bash\npolicy: org/a\nsamples: 2\n")
    config = load_job(path, ["seed=5"], {"agents": ["oracle"], "samples": 3, "policy": None})
    assert [agent.name for agent in config.agents] == ["oracle"]
    assert (config.samples, config.seed) == (3, 5)
    assert load_job(path, ["samples=9"], {"samples": 3}).samples == 9
    ray = load_job(path, ["ray.num_cpus=2"], {"ray": {"address": "head:6379"}}).ray
    assert (ray.address, ray.num_cpus) == ("head:6379", 2)
    assert load_job(path, (), {"skip_unready": None, "ray": {"address": None}}).ray.address is None


def test_a_script_of_a_short_form_policy_is_found_beside_the_file(job, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir("/")
    config = load_job(job("tasks: tasks\nagent: bash\npolicy: answers.yaml\n"))
    assert config.policies["answers"].model_dump()["file"] == str(tmp_path / "answers.yaml")


ADAPTER = {"adapter_config.json": '{"r": 8}', "adapter_model.safetensors": "\2\0\0\0\0\0\0\0{}"}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("tool_parser: hermess", ": vLLM has no tool parser 'hermess' (did you mean 'hermes'?)"),
        ("reasoning_parser: qwen33", ": vLLM has no reasoning parser 'qwen33' (did you mean 'qwen3"),
        ("engine_args: {max_modle_len: 1}", ".max_modle_len: vLLM has no such engine argument (did you mean 'max_"),
        ("engine_args: {zzz: 1}", ".zzz: vLLM has no such engine argument (they are the fields of"),
        ("engine_args: {tokenizer: ./no}", ".tokenizer: there is no directory HERE/no (name a tokenizer's"),
        ("model: ./no", ": there is no directory HERE/no (name a model's directory, or its"),
        ("model: checkpoints/step/40", ": checkpoints/step/40 is no directory here, and no Hugging Face id"),
        ("model: ./tasks", ": HERE/tasks holds no config.json: it is no model's directory"),
        ("lora: {name: a, path: none}", ".path: there is no directory HERE/none (name a LoRA"),
        ("lora: {name: a, path: tasks}", ".path: HERE/tasks holds no adapter_config.json"),
        ("tokenizer: /no/such", ": there is no directory /no/such (name a tokenizer's"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_model_is_told_before_anything_is_started(
    job, tmp_path: Path, setting: str, said: str
) -> None:
    kind = "{kind: openai, base_url: 'http://a/v1'," if setting.startswith("tokenizer") else "{kind: vllm,"
    model = "" if setting.startswith("model") else "model: x,"
    path = job(f"tasks: tasks\nagents: [bash]\npolicies:\n  p: {kind} {model}\n    {setting}}}\n")
    (problem,) = problems(path)
    name = setting.partition(":")[0]
    assert problem.startswith(f"job.yaml:5: policies.p.{name}" + said.replace("HERE", str(tmp_path)))
    idle = path.read_text().replace("[bash]", "[oracle]")
    assert load_job(job(idle)).used_policies() == {}, "of a policy that nobody uses it is not asked"


def test_a_models_directory_is_looked_for_on_this_machine_only_where_it_is_served_here(
    job, tmp_path: Path
) -> None:
    (tmp_path / "adapter").mkdir()
    for name, text in ADAPTER.items():
        (tmp_path / "adapter" / name).write_text(text)
    (tmp_path / "tasks" / "config.json").write_text("{}")
    path = job(
        "tasks: tasks\nagents: [bash]\npolicies:\n  p: {kind: vllm, model: ./tasks, lora: {name: a, path: adapter},"
        " tool_parser: hermes, reasoning_parser: qwen3, engine_args: {max_model_len: 1, enable_log_requests: true}}\n"
    )
    assert list(load_job(path).used_policies()) == ["p"]
    assert load_job(path, ["policies.p.model=/no/such", "ray.address=head:6379"]).ray.address == "head:6379"


@pytest.mark.parametrize(
    ("said", "setting"),
    [
        ("no room: raise gpu_memory_utilization", ("engine_args", "gpu_memory_utilization")),
        ("8192 is too long, see --max-model-len.", ("engine_args", "max_model_len")),
        ("tool_parser: there is no hermes2", ("tool_parser",)),
        ("the lora is of another model", ("model",)),
    ],
)
def test_an_engine_that_does_not_start_is_told_with_the_setting_that_it_names(
    said: str, setting: tuple[str, ...]
) -> None:
    engine_args = {"max_model_len": 8192, "gpu_memory_utilization": 0.1}
    config = VllmPolicyConfig(kind="vllm", model="m", engine_args=engine_args, tool_parser="hermes2")
    assert config.setting_of(said) == setting


def test_every_setting_is_described() -> None:
    schema = job_schema()
    found = [
        f"{name}.{setting}"
        for name, model in {"the job": schema, **schema["$defs"]}.items()
        for setting, about in model.get("properties", {}).items()
        if not about.get("description")
    ]
    assert found == []


def test_the_schema_takes_what_is_accepted_and_refuses_what_is_not(job) -> None:
    schema = json.loads(json.dumps(job_schema()))
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    for text in (
        DEMO.read_text(),
        "tasks: a\nagent: oracle",
        "tasks: [a]\nagents: [nop, {name: bash}]\npolicy: x",
    ):
        assert not list(validator.iter_errors(yaml.safe_load(text)))
    for text in ("tasks: a", "agent: oracle", "tasks: a\nagent: oracle\nsampels: 4", "tasks: a\nagents: []"):
        assert list(validator.iter_errors(yaml.safe_load(text)))


def test_the_demo_is_six_tasks_by_three_agents_and_every_line_of_it_is_explained() -> None:
    config = load_job(DEMO)
    assert [agent.called for agent in config.agents] == ["oracle", "nop", "bash"]
    assert list(config.used_policies()) == ["small"]
    assert config.samples == 4
    assert len(list(Path(config.tasks[0]).glob("*/task.toml"))) == 6
    lines = DEMO.read_text().splitlines()
    for number, line in enumerate(lines):
        if line.strip() and not line.strip().startswith(("#", "- tasks", "- {instruction")):
            assert lines[number - 1].strip().startswith("#"), f"line {number + 1} is not explained: {line}"
    assert (
        load_job(DEMO, ["policies.small.model=org/other"]).policies["small"].model_dump()["model"]
        == "org/other"
    )


def test_a_configuration_can_be_shipped_and_read_back(job) -> None:
    config = load_job(job("tasks: tasks\nagent: oracle\nretries: {docker_timeout: 1}\n"))
    assert JobConfig.model_validate_json(config.model_dump_json()) == config


def test_an_agent_that_calls_tools_needs_a_policy_whose_calls_are_told_from_its_text(job) -> None:
    text = "tasks: tasks\nagents: [tools]\npolicies: {{p: {{kind: vllm, model: x{}}}}}\n"
    (said,) = problems(job(text.format("")))
    assert said.startswith("job.yaml:3: policies.p: agent 'tools' calls tools, and nothing tells")
    assert load_job(job(text.format(", tool_parser: hermes"))).agents[0].name == "tools"
    structured = text.replace("[tools]", "[{{name: tools, options: {{structured: true}}}}]").format("")
    assert load_job(job(structured)).agents[0].options == {"structured": True}
