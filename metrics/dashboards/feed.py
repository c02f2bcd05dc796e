"""What a trainer gets: groups, how much they teach, and how far behind it is."""

from __future__ import annotations

from rollcage.metrics.dashboards.panels import RATE, Board, Graph, Row, Stat

FEED = Board(
    "rollcage-feed",
    "Feed and training signal",
    "What trainers get: groups, the share that teaches nothing, lag and writing.",
    (
        Row("Now", (
            Stat("Groups without variance", "Share of the complete groups of half an hour whose rewards are all equal: "
                 "they give an advantage of 0.",
                 (("cluster:rollcage_zero_variance_groups:ratio_rate30m", ""),), "percentunit", 0.5, 0.8, width=6),
            Stat("Groups waiting", "Groups that the slowest reader has not acknowledged, the most of any job.",
                 (("max(rollcage_feed_lag_groups)", ""),), width=6),
            Stat("Readers", "Readers that have acknowledged a group.",
                 (("sum(rollcage_feed_readers)", ""),), width=6),
            Stat("Trajectories", "Trajectories in the ledgers.",
                 (("rollcage_trajectories_written_total", ""),), width=6),
        )),
        Row("Signal", (
            Graph("Groups closed", "Groups a second: complete with all samples, or short after their budgets.",
                  ((f"sum by (state) (rate(rollcage_groups_total{RATE}))", "{{state}}"),), "ops", stacked=True),
            Graph("Groups without variance by agent", "Share of complete groups whose rewards are all equal.",
                  ((f"sum by (agent) (rate(rollcage_groups_zero_variance_total{RATE})) / "
                    f'(sum by (agent) (rate(rollcage_groups_total{{state="complete"}}{RATE})) > 0)', "{{agent}}"),),
                  "percentunit", 0.5, 0.8),
            Graph("Valid pass rate by agent", "Passed of passed and failed, over half an hour. Near 0 or 1 there is "
                  "little to learn.", (("agent:rollcage_valid_passed:ratio_rate30m", "{{agent}}"),), "percentunit"),
        )),
        Row("Lag", (
            Graph("Groups waiting", "Groups committed that a job's slowest reader has not acknowledged.",
                  (("rollcage_feed_lag_groups", "{{job_id}}"),)),
            Graph("Groups acknowledged", "How far each job's slowest reader is.",
                  (("rollcage_feed_acknowledged_groups", "{{job_id}}"),)),
            Graph("Staleness, p95", "Versions that a rollout's oldest turn was behind when it ended.",
                  ((f"histogram_quantile(0.95, sum by (le, policy) "
                    f"(rate(rollcage_policy_staleness_versions_bucket{RATE})))",
                    "{{policy}}"),), "short"),
        )),
        Row("Writing", (
            Graph("Trajectories", "Trajectories written a second.",
                  ((f"sum(rate(rollcage_trajectories_written_total{RATE}))", "trajectories"),), "ops"),
            Graph("Bytes", "Bytes of shards written a second.",
                  ((f"sum(rate(rollcage_trajectory_written_bytes_total{RATE}))", "bytes"),), "Bps"),
            Graph("Commits", "Commits of groups to shards a second.",
                  ((f"sum(rate(rollcage_ledger_commits_total{RATE}))", "commits"),), "ops"),
        )),
    ),
)  # fmt: skip
