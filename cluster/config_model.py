"""The settings of a job, as pydantic models: types, ranges, defaults, and what each means.

`config.load_job` reads them from a file; what one setting alone cannot show is checked there.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from rollcage.cluster.config_policies import PolicyConfig
from rollcage.cluster.config_settings import Count, Seconds, Settings
from rollcage.cluster.errors import InputError
from rollcage.cluster.stream import MAX_LAG_GROUPS
from rollcage.rollout.agents.base import load_agent
from rollcage.rollout.sandbox.subnets import LEAST_RANGE_PREFIX

PRIVATE_RANGES = tuple(
    map(ipaddress.IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10"))
)
"""What `allow_private` may open; link-local addresses, the metadata service's among them, stay shut."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,62}$")]
Factor = Annotated[float, Field(gt=0)]


KeepStates = Literal["none", "failed", "all"]


class AgentConfig(Settings):
    """One agent of the job; a bare name stands for `{name: ...}`."""

    name: str = Field(min_length=1, description="An agent's name, or module:Class.")
    label: Name | None = Field(
        default=None, description="What records call it; needed where a name is used twice."
    )
    options: dict[str, Any] = Field(default={}, description="The agent's own: limits, prompts.")
    policy: str | None = Field(
        default=None, description="None: the job's only policy, where the agent needs one."
    )
    samples: Count | None = Field(default=None, description="None: the job's.")

    @property
    def called(self) -> str:
        """The label, else the name; of a `module:Class` the class."""
        return self.label or self.name.rpartition(":")[2]


class NetworkConfig(Settings):
    """The networks of sandboxes: those that sandboxes with internet share, and private ones."""

    cidr: str | None = Field(
        default=None, description="Addresses for them, at least a /26; None: private ranges that nobody uses."
    )
    leases_per_bridge: int = Field(default=900, ge=1, le=1000, description="A Linux bridge has 1,023 ports.")
    allow_private: list[str] = Field(
        default=[],
        description="Private ranges (CIDRs) that sandboxes with internet reach all the same: a mirror of yours. "
        "An allowlist must name them, too. The machine's own addresses are never reached.",
    )
    insecure_network: bool = Field(
        default=False,
        description="Set no rules: sandboxes with internet reach whatever the machine reaches, and itself.",
    )

    @field_validator("cidr")
    @classmethod
    def _is_cidr(cls, cidr: str | None) -> str | None:
        if cidr is not None and ipaddress.IPv4Network(cidr).prefixlen > LEAST_RANGE_PREFIX:
            raise ValueError(f"{cidr} is too small: at least a /{LEAST_RANGE_PREFIX}")
        return cidr

    @field_validator("allow_private")
    @classmethod
    def _are_private(cls, ranges: list[str]) -> list[str]:
        for text in ranges:
            if not any(ipaddress.IPv4Network(text).subnet_of(private) for private in PRIVATE_RANGES):
                raise ValueError(f"{text} is in none of {', '.join(map(str, PRIVATE_RANGES))}")
        return ranges

    @model_validator(mode="after")
    def _agree(self) -> NetworkConfig:
        if self.insecure_network and self.allow_private:
            raise ValueError(
                "allow_private opens nothing where insecure_network opens everything: leave one out"
            )
        return self


class ProxiesConfig(Settings):
    """The way to the internet, for builds and for sandboxes that have it. A proxy in a private network must be named in
    `network.allow_private` too."""

    http: str | None = Field(default=None, description="URL.")
    https: str | None = Field(default=None, description="URL.")
    no: list[str] = Field(default=[], description="Names and networks that are reached without them.")

    @field_validator("http", "https")
    @classmethod
    def _is_url(cls, url: str | None) -> str | None:
        parts = urlsplit(url or "http://none")
        if not parts.scheme or not parts.hostname:
            raise ValueError("must be a URL such as http://proxy.example:3128")
        return url


class SandboxConfig(Settings):
    """Sandboxes. `cpus`, `memory_mb`, `storage_mb` stand in where a task sets none."""

    docker_host: str | None = Field(
        default=None, description="The engine's address; None: DOCKER_HOST or the socket."
    )
    build_slots: Count = Field(default=2, description="Image builds at once on a host.")
    pids: Count = Field(default=1024, description="Processes that a sandbox may have at once.")
    cpus: float | None = Field(
        default=None, gt=0, description="CPUs, a fraction too; None: as many as are free."
    )
    memory_mb: int | None = Field(default=None, ge=6, description="MiB; an engine takes no less than 6.")
    storage_mb: Count | None = Field(default=None, description="MiB.")
    deadline_sec: Seconds = Field(
        default=6 * 3600.0, description="A sandbox ends by itself so long after its start."
    )
    runtime: str | None = Field(default=None, description="An OCI runtime that the engine has: runsc, kata.")
    memory_reserve_mb: Count | None = Field(
        default=None, description="MiB that a sandbox counts for in admission; None: its memory_mb."
    )
    admit_memory_mb: Count | None = Field(
        default=None, description="MiB admitted at once on a host; None: 0.9 of its memory."
    )
    admit_cpus: float | None = Field(
        default=None, gt=0, description="CPUs admitted at once on a host; None: 16 for each that it has."
    )
    least_disk_mb: int = Field(
        default=1024, ge=0, description="MiB that the engine's disk must have left for a sandbox to start."
    )
    image_disk_gb: float | None = Field(
        default=None,
        gt=0,
        description="GiB that images which rollcage built or pulled may take on a host: the least recently used go. "
        "None: while less than a tenth of the engine's disk, and less than 20 GiB, is free.",
    )
    keep_states: KeepStates = Field(
        default="none",
        description="Save what agents leave of their sandboxes, as images on the hosts, for `rollcage regrade`: of all "
        "rollouts, or of those that did not pass. `rollcage gc --states` removes them.",
    )
    states_disk_gb: float | None = Field(
        default=20.0,
        gt=0,
        description="GiB that saved states may take on a host; past them no more are kept. None: any number.",
    )
    ca_bundle: str | None = Field(
        default=None,
        description="A file of CA certificates on each host, that builds and sandboxes trust in the place of their "
        "image's own: the host's whole bundle.",
    )
    proxies: ProxiesConfig = Field(default=ProxiesConfig(), description="The way to the internet.")
    warm: int | None = Field(
        default=None,
        ge=0,
        description="Sandboxes started ahead on a host; None: an eighth of concurrency, 2 at least.",
    )
    network: NetworkConfig = Field(default=NetworkConfig(), description="What sandboxes with internet share.")

    @field_validator("ca_bundle")
    @classmethod
    def _is_absolute(cls, path: str | None) -> str | None:
        if path is not None and not path.startswith("/"):
            raise ValueError("must be an absolute path, the same on each host")
        return path


LOCAL = "local"
"""The address that is no cluster's."""


class RayConfig(Settings):
    """Ray. Without an address it is started on this machine and ended with the job."""

    address: str | None = Field(
        default=None, description="HOST:PORT of a cluster to join; None, or local: Ray is started here."
    )
    num_cpus: Count | None = Field(
        default=None,
        description="CPUs that Ray counts on where it is started here; None: all of this machine.",
    )

    @field_validator("address")
    @classmethod
    def _here(cls, address: str | None) -> str | None:
        return None if address == LOCAL else address


LISTEN = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")
"""An address of IP version 6 is in brackets."""


class MetricsConfig(Settings):
    """What Prometheus can scrape. See docs/metrics.md. The cluster's first job starts the exporter; a later one finds
    it as it is, with that one's settings. Paths are of the head node."""

    enabled: bool = Field(default=True, description="Count for Prometheus.")
    listen: str | None = Field(
        default=None,
        description="HOST:PORT of the exporter; None: 127.0.0.1:9410, or another port where that is taken. vLLM's own "
        "metrics are on any port of HOST.",
    )
    state: str | None = Field(
        default=None, description="A directory for what was counted; None: it goes with the Ray cluster."
    )
    targets: str | None = Field(
        default=None,
        description="A directory for the file that Prometheus' file_sd_configs reads; None: rollcage/targets in the "
        "user's state directory.",
    )
    user: str | None = Field(
        default=None, description="Who may scrape (basic authentication); None: anybody."
    )
    password_env: str | None = Field(
        default=None, description="The variable with the password, where the job is started."
    )
    certificate: str | None = Field(
        default=None, description="A PEM file, on each node with vLLM too: what is scraped speaks TLS."
    )
    key: str | None = Field(default=None, description="The certificate's.")
    exemplars: bool = Field(
        default=False,
        description="Name the last attempt of each ending (job_id, attempt_id) in an exemplar of "
        "rollcage_attempts_total.",
    )

    @field_validator("listen")
    @classmethod
    def _has_a_port(cls, listen: str | None) -> str | None:
        if listen is not None:
            found = LISTEN.fullmatch(listen)
            if found is None or int(found["port"]) > 65535:
                raise ValueError("must be HOST:PORT, such as 0.0.0.0:9410 or [::1]:9410")
        return listen

    @field_validator("user")
    @classmethod
    def _can_be_sent(cls, user: str | None) -> str | None:
        if user is not None and (not user.isprintable() or not user or ":" in user):
            raise ValueError("must be a name without a colon: basic authentication ends it there")
        return user

    @field_validator("password_env")
    @classmethod
    def _is_a_variable(cls, name: str | None) -> str | None:
        if name is not None and not name.isidentifier():
            raise ValueError("must be the name of an environment variable, such as SCRAPE_PASSWORD")
        return name

    @field_validator("state", "targets", "certificate", "key")
    @classmethod
    def _is_a_whole_path(cls, path: str | None) -> str | None:
        if path is not None and (not path.startswith(("/", "~/")) or "\0" in path):
            raise ValueError("must be a whole path, /... or ~/..., on the head node")
        return path

    @model_validator(mode="after")
    def _are_pairs(self) -> MetricsConfig:
        if (self.user is None) != (self.password_env is None):
            raise ValueError("user and password_env go together: set both, or none")
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key go together: set both, or none")
        return self

    def password(self) -> str | None:
        """The user's, from the environment. Raises `InputError` where it is not there."""
        if self.password_env is None:
            return None
        if password := os.environ.get(self.password_env):
            return password
        said = f"the variable {self.password_env} is not set: set it, or leave out user and password_env"
        raise InputError(said).about("metrics", "password_env")


class StreamConfig(Settings):
    """A job of `mode: stream`. See docs/feed.md."""

    max_lag_groups: Count = Field(
        default=MAX_LAG_GROUPS,
        description="Groups, begun or finished, that the slowest reader of the run has not taken yet, at most. While "
        "nobody reads, all that there are.",
    )
    draws: Count | None = Field(
        default=None,
        description="Draws of all tasks together, each a group of every agent; None: until the trainer has enough.",
    )
    curriculum: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default={},
        description="How often tasks are drawn, by name, against 1 of the others; 0: not at all. May be changed while "
        "the job runs.",
    )

    @field_validator("curriculum", mode="before")
    @classmethod
    def _whole_numbers_are_weights(cls, weights: Any) -> Any:
        if not isinstance(weights, Mapping):
            return weights
        return {
            task: float(weight) if isinstance(weight, int) and not isinstance(weight, bool) else weight
            for task, weight in weights.items()
        }


class JobConfig(Settings):
    """A job: every task by every agent, `samples` times; or, as a stream, again and again."""

    name: Name = Field(
        default="job", description="What run directories are called after; without it, the YAML's own name."
    )
    mode: Literal["batch", "stream"] = Field(
        default="batch",
        description="`batch`: each task once. `stream`: tasks are drawn for as long as a trainer reads.",
    )
    stream: StreamConfig = Field(
        default=StreamConfig(), description="Of `mode: stream`: how tasks are drawn."
    )
    tasks: list[str] = Field(min_length=1, description="Task directories, directories of them, or globs.")
    agents: list[AgentConfig] = Field(min_length=1, description="Each does every task.")
    policies: dict[Name, PolicyConfig] = Field(
        default={}, description="What agents work with, by names of one's own."
    )
    samples: Count = Field(default=1, description="Rollouts of each task and agent: a group.")
    seed: int = Field(default=0, description="Every draw of chance in the job comes from it.")
    concurrency: Count = Field(default=8, description="Rollouts at once.")
    pass_threshold: float = Field(default=1.0, description="A primary reward of at least so much has passed.")
    reward_key: str | None = Field(
        default=None, description="The primary reward of a reward.json with several keys."
    )
    skip_unready: bool = Field(default=False, description="Leave out tasks whose variables are not set.")
    output: str | None = Field(
        default=None,
        description="The run directory, or a URI such as s3://bucket/run; None: runs/<name>-<time>.",
    )
    journal: str | None = Field(
        default=None,
        description="Where on this machine the journal of a run at a URI lies; None: in the user's state directory.",
    )
    agent_timeout_sec: Seconds | None = Field(default=None, description="In the place of every task's own.")
    agent_timeout_multiplier: Factor = Field(default=1.0, description="Of what each task gives its agent.")
    verifier_timeout_multiplier: Factor = Field(
        default=1.0, description="Of what each task gives its verifier."
    )
    keep_processes: list[str] = Field(
        default=[],
        description="Names of tasks, or patterns of names, whose tests grade services that the agent started: "
        "what it left running is not stopped before the verifier.",
    )
    retries: dict[str, Annotated[int, Field(ge=0, le=100)]] = Field(
        default={}, description="Retries by error class, in the place of the outcome table's."
    )
    max_quarantined_tasks: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Stop the job when more tasks than this are quarantined."
    )
    sandbox: SandboxConfig = Field(
        default=SandboxConfig(), description="Containers, their limits and networks."
    )
    ray: RayConfig = Field(default=RayConfig(), description="Where the job's actors run.")
    metrics: MetricsConfig = Field(default=MetricsConfig(), description="What Prometheus can scrape.")

    def policy_of(self, agent: AgentConfig) -> str | None:
        """The policy that the agent works with: its own, or the job's only one; None where it needs none."""
        if not load_agent(agent.name, agent.options).needs_policy:
            return None
        return agent.policy or (next(iter(self.policies)) if len(self.policies) == 1 else None)

    def used_policies(self) -> dict[str, PolicyConfig]:
        """The policies that some agent works with: only they need to be started."""
        used = {self.policy_of(agent) for agent in self.agents}
        return {name: policy for name, policy in self.policies.items() if name in used}
