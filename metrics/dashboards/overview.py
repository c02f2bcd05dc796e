"""Is the run healthy: what became of the work, whose fault failures were, and how fast it goes."""

from __future__ import annotations

from rollcage.metrics.dashboards.panels import RATE, Board, Graph, Row, Stat

_IDENTITY = (
    "abs(rollcage_attempts_dispatched_total - rollcage_attempts_ended_total"
    " - rollcage_attempts_abandoned_total - rollcage_attempts_in_flight)"
)

OVERVIEW = Board(
    "rollcage-overview",
    "Overview",
    "Is the run healthy: pass rate, outcomes, infra errors apart from agents' failures, throughput.",
    (
        Row("Now", (
            Stat("Infra errors", "Share of the attempts of five minutes that ended in an error of the domain infra. "
                 "They are tried again and charged to no agent.",
                 (("cluster:rollcage_infra_errors:ratio_rate5m", ""),), "percentunit", 0.02, 0.05),
            Stat("Valid pass rate", "Of the rollouts of half an hour that gave a valid reward, those that passed.",
                 (("agent:rollcage_valid_passed:ratio_rate30m", "{{agent}}"),), "percentunit"),
            Stat("Invalid rollouts", "Share of the rollouts of half an hour that never gave a valid reward.",
                 (("cluster:rollcage_invalid_rollouts:ratio_rate30m", ""),), "percentunit", 0.01, 0.05),
            Stat("Rollouts a second", "Rollouts that ended, over five minutes.",
                 (("sum(agent:rollcage_rollouts:rate5m)", ""),), "ops"),
            Stat("Attempts in flight", "Attempts begun and not ended, of all jobs.",
                 (("rollcage_attempts_in_flight", ""),)),
            Stat("Hosts down", "Hosts that have not been heard of for half a minute.",
                 (("count(rollcage_host_up) - sum(rollcage_host_up)", ""),), "short", None, 1),
        )),
        Row("Outcomes", (
            Graph("Rollouts by outcome", "Rollouts that ended a second: passed, failed, invalid (no attempt gave a "
                  "valid reward) or cancelled.",
                  ((f"sum by (outcome) (rate(rollcage_rollouts_total{RATE}))", "{{outcome}}"),), "ops", stacked=True),
            Graph("Attempts by domain", "Attempts that ended a second, by whose fault it was; none: passed or failed "
                  "without an error.", (("domain:rollcage_attempts:rate5m", "{{domain}}"),), "ops", stacked=True),
            Graph("Infra errors by class", "Share of all attempts that ended in each infra error class.",
                  (("error_class:rollcage_infra_errors:ratio_rate5m", "{{error_class}}"),), "percentunit", 0.02, 0.05,
                  stacked=True),
            Graph("Infra errors a second", "Attempts a second that ended in an infra error, by class. With "
                  "metrics.exemplars in the job, points name the last attempt of each: attempt_id in its run.",
                  ((f'sum by (error_class) (rate(rollcage_attempts_total{{domain="infra"}}{RATE}))',
                    "{{error_class}}"),), "ops", stacked=True, exemplars=True),
            Graph("Agents' limits by class", "Attempts a second in which the agent met a limit. They are graded.",
                  ((f'sum by (error_class) (rate(rollcage_attempts_total{{domain="agent"}}{RATE}))',
                    "{{error_class}}"),), "ops", stacked=True, exemplars=True),
            Graph("Task and verifier errors", "Attempts a second that say that a task or its verifier is broken.",
                  ((f'sum by (error_class) (rate(rollcage_attempts_total{{domain=~"task|verifier"}}{RATE}))',
                    "{{error_class}}"),), "ops", stacked=True, exemplars=True),
            Graph("Valid pass rate by agent", "Passed of passed and failed, over half an hour.",
                  (("agent:rollcage_valid_passed:ratio_rate30m", "{{agent}}"),), "percentunit"),
        )),
        Row("Progress", (
            Graph("Jobs", "Share of each job's rollouts that ended.",
                  (("rollcage_job_rollouts_ended / (rollcage_job_rollouts > 0)", "{{job_id}}"),), "percentunit"),
            Graph("Open rollouts", "Rollouts that have not ended: waiting for a place, delayed before a retry, or in "
                  "flight.", (("rollcage_rollouts_open", "{{state}}"),), stacked=True),
            Graph("Groups closed", "Groups a second: complete with all samples, or short after their budgets.",
                  ((f"sum by (state) (rate(rollcage_groups_total{RATE}))", "{{state}}"),), "ops", stacked=True),
            Graph("Retries", "Attempts a second that are tried again, by what ended them.",
                  ((f"sum by (error_class) (rate(rollcage_retries_total{RATE}))", "{{error_class}}"),), "ops",
                  stacked=True),
            Graph("Quarantined tasks", "Tasks taken out of their job, by why.",
                  (("sum by (error_class) (rollcage_tasks_quarantined_total)", "{{error_class}}"),)),
            Graph("Phases, p95", "Wall time of each phase of an attempt: 95 of a hundred took less.",
                  ((f"histogram_quantile(0.95, sum by (le, phase) (rate(rollcage_phase_seconds_bucket{RATE})))",
                    "{{phase}}"),), "s"),
            Graph("Time lost to infra", "Of the time in agents' phases, what infra took. No agent is charged.",
                  (("cluster:rollcage_infra_lost_seconds:ratio_rate15m", "lost"),), "percentunit", 0.05, 0.2),
            Graph("Counting identity", "Attempts dispatched less those ended, abandoned and in flight: 0 at any time, "
                  "or the counts are wrong.", ((_IDENTITY, "difference"),), "short", None, 1),
            Graph("Silence", "Since a job's driver, and the host longest silent, were last heard.",
                  (("rollcage_job_silent_seconds", "{{job_id}}"),
                   ('rollcage_exporter_silent_seconds{kind="host"}', "hosts")), "s", 10, 30),
        )),
    ),
)  # fmt: skip
