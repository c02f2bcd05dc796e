"""Every metric family of Rollcage: the one list that code, documentation, rules, dashboards and tests are held to.

A label's values are a closed set. Most sets are constants, taken from the outcome table where it has them. Those of
`host`, `policy`, `agent` and `job_id` are names that a job's configuration declares, as many as `MOST` says at the
most; whatever else is counted under one of them raises `UnknownLabel`. A task, a rollout, a container or any text is
never a label (one series a task would outlive the task by weeks).

A job's label is `job_id`: Prometheus gives `job` and `instance` to each target and would rename ours.

Nothing here needs `prometheus_client`: drivers and hosts count (`counts.py`) without it, the exporter alone has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import version
from itertools import product

from rollcage.rollout.outcome import TABLE, Domain, Outcome
from rollcage.rollout.trajectory import Phase

PREFIX = "rollcage_"
NONE = "none"
"""The error class, and its domain, of an attempt that simply passed or failed."""
OTHER = "other"
"""What agents and policies are counted as that are too many to be labels of their own."""


class Kind(StrEnum):
    """Prometheus' types of metrics."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Sender(StrEnum):
    """Who counts a family: the driver of a job, a host, or the exporter itself."""

    JOB = "job"
    HOST = "host"
    EXPORTER = "exporter"


MOST: Mapping[str, int] = {"host": 256, "policy": 8, "agent": 16, "job_id": 64}
"""Declared labels, and how many values each may have at once, `OTHER` among them. See `room.py` for what is beyond."""

_CLASSES: tuple[tuple[str, str], ...] = ((NONE, NONE), *((row.domain.value, row.name) for row in TABLE))
"""Each domain and error class."""

LABELS: Mapping[str, tuple[str, ...]] = {
    "outcome": tuple(Outcome),
    "domain": (*Domain, NONE),
    "error_class": tuple(name for _, name in _CLASSES),
    "phase": tuple(Phase),
    "rollout_state": ("waiting", "delayed", "in_flight"),
    "group_state": ("complete", "short"),
    "sandbox_state": ("warm", "in_use", "removing"),
    "start": ("warm", "cold"),
    "build_result": ("built", "cached", "task_fault", "infra_fault"),
    "network_kind": ("shared", "private", "allowlist"),
    "resource": ("containers", "networks", "images", "volumes"),
    "token_kind": ("prompt", "cached", "completion"),
    "request_state": ("running", "waiting"),
    "replica_state": ("ready", "starting", "draining", "lost"),
    "source_kind": ("job", "host"),
    "version": (version("rollcage"),),
}
"""The values of the labels that are constants. A label is called in Prometheus as here, less the word before `_state`,
`_kind` and `_result` (see `Label.name`)."""


@dataclass(frozen=True)
class Label:
    """One label of a family. `values` names its set in `LABELS`; None: its values are declared."""

    name: str
    values: str | None = None

    def closed(self, declared: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
        """Its values, where `declared` has those of the declared labels."""
        return declared.get(self.name, ()) if self.values is None else LABELS[self.values]


@dataclass(frozen=True)
class Family:
    """One metric family. `name` is without the prefix and, of a counter, without `_total`. `unit` is the base unit and
    the end of the name. `buckets` are a histogram's upper bounds, without +Inf. `combinations`: of labels that depend
    on one another, the only values that go together (in the order of `labels`, before those that follow)."""

    name: str
    kind: Kind
    help: str
    sender: Sender
    labels: tuple[Label, ...] = ()
    unit: str = ""
    buckets: tuple[float, ...] = ()
    combinations: tuple[tuple[str, ...], ...] = ()
    combine: str = "sum"
    """Of a gauge that several sources have: `sum`, or `max`."""
    silent: float | None = None
    """Of a gauge: what it is while its source is not heard. None: it has no value then."""
    ledger: bool = False
    """Of a job's counter: it follows from the ledger, so that a driver that goes on with the run begins where the run
    is and not at 0."""

    @property
    def full_name(self) -> str:
        """The name of its samples in Prometheus; of a histogram without `_bucket`, `_sum` and `_count`."""
        return PREFIX + self.name + ("_total" if self.kind is Kind.COUNTER else "")

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of its labels, in order."""
        return tuple(label.name for label in self.labels)

    def series(self, declared: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
        """The label values of each of its series."""
        together = len(self.combinations[0]) if self.combinations else 0
        alone = product(*(label.closed(declared) for label in self.labels[together:]))
        if not together:
            yield from alone
            return
        for rest in alone:
            for tied in self.combinations:
                yield (*tied, *rest)

    def samples_of_a_series(self) -> int:
        """How many samples Prometheus stores for one series."""
        return len(self.buckets) + 3 if self.kind is Kind.HISTOGRAM else 1


def _endings() -> tuple[tuple[str, ...], ...]:
    """Every outcome with the domains and error classes that it can have."""
    found = []
    for outcome in Outcome:
        for domain, name in _CLASSES:
            graded = name == NONE or domain == Domain.AGENT
            match outcome:
                case Outcome.PASSED | Outcome.FAILED:
                    fits = graded
                case Outcome.CANCELLED:
                    fits = name == "cancelled"
                case Outcome.INVALID:
                    fits = not graded and name != "cancelled"
            if fits:
                found.append((outcome.value, domain, name))
    return tuple(found)


_ENDINGS = _endings()
_FAULTS = tuple(pair for pair in _CLASSES if pair[1] != NONE)
_OUTCOME = (Label("outcome", "outcome"), Label("domain", "domain"), Label("error_class", "error_class"))
_ERROR = (Label("domain", "domain"), Label("error_class", "error_class"))
_AGENT, _POLICY, _HOST, _JOB = Label("agent"), Label("policy"), Label("host"), Label("job_id")

SHORT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Seconds of what should take milliseconds."""
LONG = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Seconds of what may take an hour."""
VERSIONS = (0.0, 1.0, 2.0, 3.0, 4.0, 8.0, 16.0)


def _job(name: str, kind: Kind, help: str, *labels: Label, **more: object) -> Family:
    return Family(name, kind, help, Sender.JOB, labels, **more)  # type: ignore[arg-type]


def _host(name: str, kind: Kind, help: str, *labels: Label, **more: object) -> Family:
    return Family(name, kind, help, Sender.HOST, labels, **more)  # type: ignore[arg-type]


C, G, H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

FAMILIES: tuple[Family, ...] = (
    # What became of the work.
    _job("rollouts", C, "Rollouts that ended, by how.", *_OUTCOME, _AGENT,
         combinations=_ENDINGS, ledger=True),
    _job("attempts", C, "Attempts that ended, by how.", *_OUTCOME, _AGENT,
         combinations=_ENDINGS, ledger=True),
    _job("retries", C, "Attempts that are tried again, if nothing calls that off, by what ended them.", *_ERROR,
         combinations=_FAULTS, ledger=True),
    _job("tasks_quarantined", C, "Tasks that a driver took out of its job, by why.", *_ERROR, combinations=_FAULTS),
    _job("attempts_dispatched", C, "Attempts begun: at any scrape those ended, abandoned and in flight together.",
         ledger=True),
    _job("attempts_ended", C, "Attempts that ended and are in the ledger.", ledger=True),
    _job("attempts_abandoned", C, "Attempts that were in flight when their driver died."),
    _job("attempts_in_flight", G, "Attempts begun and not ended."),
    _job("rollouts_open", G, "Rollouts that have not ended, by what they do.", Label("state", "rollout_state")),
    _job("groups", C, "Groups closed: every sample valid, or short after its budgets.",
         Label("state", "group_state"), _AGENT, ledger=True),
    _job("groups_zero_variance", C, "Complete groups whose rewards are all equal.", _AGENT,
         ledger=True),
    _job("phase_seconds", H, "Wall time of an attempt's phases; `queue` is the wait for room on its host.",
         Label("phase", "phase"), unit="seconds", buckets=LONG),
    _job("infra_lost_seconds", C, "Time in agents' phases that was lost to infra and not charged to them: "
         "waits for the policy, and all of what an infra error ended.", unit="seconds"),
    # What agents and policies did.
    _job("commands", C, "Commands run in sandboxes by agents.", _AGENT),
    _job("command_seconds", H, "Wall time of a command.", unit="seconds", buckets=SHORT),
    _job("command_output_bytes", C, "Output of commands, kept and left out.", unit="bytes"),
    _job("policy_turns", C, "Answers of policies.", _POLICY),
    _job("policy_malformed_turns", C, "Answers that held no action that could be read.", _POLICY),
    _job("policy_tokens", C, "Tokens of prompts (cached ones are among them), and sampled.",
         Label("kind", "token_kind"), _POLICY),
    _job("policy_queue_seconds", H, "Wait of a turn before an engine worked on it, retries included.", _POLICY,
         unit="seconds", buckets=SHORT),
    _job("policy_generate_seconds", H, "An engine's own time for a turn.", _POLICY, unit="seconds", buckets=LONG),
    _job("policy_staleness_versions", H, "Versions that a rollout's oldest turn was behind when it ended.", _POLICY,
         unit="versions", buckets=VERSIONS),
    _job("policy_cost_usd", C, "What answers cost, by the policy's prices.", _POLICY, unit="usd"),
    _job("policy_version", G, "Version of the weights that new turns begin on.", _POLICY, combine="max"),
    _job("policy_requests", G, "Turns at the engines.", Label("state", "request_state"), _POLICY),
    _job("policy_kv_cache_usage_ratio", G, "Use of the KV cache, the fullest replica's.", _POLICY, unit="ratio",
         combine="max"),
    _job("policy_replicas", G, "Replicas. Where none is ready any more, those that start again are lost until one is.",
         Label("state", "replica_state"), _POLICY),
    _job("policy_replica_restarts", C, "Engines that were started anew.", _POLICY),
    # What was written and read.
    _job("trajectories_written", C, "Trajectories in the ledger.", ledger=True),
    _job("trajectory_written_bytes", C, "Bytes of shards written.", unit="bytes"),
    _job("ledger_commits", C, "Commits of groups to shards."),
    _job("feed_lag_groups", G, "Groups committed and not acknowledged by a job's slowest reader, or by nobody.",
         _JOB, unit="groups"),
    _job("feed_acknowledged_groups", G, "Groups that a job's slowest reader has acknowledged.", _JOB, unit="groups"),
    _job("feed_readers", G, "Readers of a job that have acknowledged a group.", _JOB),
    # One job's progress: gone with it.
    _job("job_rollouts", G, "Rollouts that a job that runs has to run; one that goes on has those that were left.",
         _JOB),
    _job("job_rollouts_ended", G, "Of those the ones that ended.", _JOB),
    _job("job_started_timestamp_seconds", G, "When a job that runs began.", _JOB, unit="seconds"),
    _job("job_progress_timestamp_seconds", G, "When a rollout of a job that runs last ended, or the job began.", _JOB,
         unit="seconds"),
    _job("job_silent_seconds", G, "Since the driver of a job that has not ended was last heard.", _JOB,
         unit="seconds"),
    # Hosts.
    _host("host_up", G, "1 while the host's actor answers.", _HOST, silent=0.0),
    _host("sandboxes", G, "Sandboxes on a host.", Label("state", "sandbox_state"), _HOST),
    _host("sandbox_acquire_seconds", H, "From asking for a sandbox to having it.", Label("start", "start"),
          unit="seconds", buckets=SHORT),
    _host("sandbox_remove_seconds", H, "Removal of a sandbox.", unit="seconds", buckets=SHORT),
    _host("image_builds", C, "Images asked for, by what came of it.", Label("result", "build_result")),
    _host("image_build_seconds", H, "Builds that were done.", unit="seconds", buckets=LONG),
    _host("network_leases", G, "Network leases held.", Label("kind", "network_kind"), _HOST),
    _host("network_capacity", G, "Network leases that can be held at once.", Label("kind", "network_kind"), _HOST),
    _host("bridge_ports_in_use", G, "Ports of bridges that sandboxes have.", _HOST),
    _host("bridge_ports", G, "Ports that the bridges have.", _HOST),
    _host("resources_leaked", G, "Resources of dead jobs that could not be removed yet.",
          Label("resource", "resource"), _HOST),
    _host("resources_reaped", C, "Resources of dead jobs that were removed.", Label("resource", "resource")),
    _host("disk_free_bytes", G, "Free space where the engine keeps its data.", _HOST, unit="bytes"),
    # The exporter itself.
    Family("build_info", G, "1, and the version of Rollcage that the exporter is of.", Sender.EXPORTER,
           (Label("version", "version"),)),
    Family("exporter_sources", G, "Sources that the exporter has heard of and not to the end.", Sender.EXPORTER,
           (Label("kind", "source_kind"),)),
    Family("exporter_snapshots", C, "Snapshots taken in.", Sender.EXPORTER, (Label("kind", "source_kind"),)),
    Family("exporter_silent_seconds", G, "Since the source longest silent was last heard.", Sender.EXPORTER,
           (Label("kind", "source_kind"),), "seconds"),
)  # fmt: skip

BY_NAME: Mapping[str, Family] = {family.name: family for family in FAMILIES}


def most_series(**most: int) -> int:
    """Samples in a scrape where every declared label has all the values that it may have, or as many as `most` says."""
    declared = {name: tuple(map(str, range(count))) for name, count in {**MOST, **most}.items()}
    return sum(family.samples_of_a_series() * sum(1 for _ in family.series(declared)) for family in FAMILIES)
