"""Hosts: sandboxes, their networks and images, and what was left behind."""

from __future__ import annotations

from rollcage.metrics.dashboards.panels import RATE, Board, Graph, Row, Stat

_HERE = '{host=~"$host"}'

SANDBOXES = Board(
    "rollcage-sandboxes",
    "Sandboxes",
    "Hosts: pools of sandboxes, networks, image builds, leaks and disks.",
    (
        Row("Now", (
            Stat("Sandboxes in use", "Sandboxes in which a rollout runs, on the chosen hosts.",
                 (('sum(rollcage_sandboxes{state="in_use",host=~"$host"})', ""),), width=6),
            Stat("Warm hits", "Sandboxes that were ready when asked for, over five minutes, on all hosts.",
                 (("cluster:rollcage_sandbox_warm:ratio_rate5m", ""),), "percentunit", width=6),
            Stat("Leaked", "Resources of dead jobs that could not be removed yet.",
                 ((f"sum(rollcage_resources_leaked{_HERE})", ""),), "short", 1, 10, width=6),
            Stat("Least free disk", "Where an engine keeps its data, on the fullest of the chosen hosts.",
                 ((f"min(rollcage_disk_free_bytes{_HERE})", ""),), "bytes", 20 * 2**30, 10 * 2**30, width=6),
        )),
        Row("Pool", (
            Graph("Sandboxes by state", "Sandboxes on the chosen hosts.",
                  ((f"sum by (state) (rollcage_sandboxes{_HERE})", "{{state}}"),), stacked=True),
            Graph("Acquire time", "From asking for a sandbox to having it: median and p95, warm and cold, all hosts.",
                  tuple((f"histogram_quantile({q}, sum by (le, start) (rate(rollcage_sandbox_acquire_seconds_bucket"
                         f"{RATE})))", f"{{{{start}}}} p{q * 100:g}") for q in (0.5, 0.95)), "s"),
            Graph("Removal time", "Removal of a sandbox: median and p95, all hosts.",
                  tuple((f"histogram_quantile({q}, sum by (le) (rate(rollcage_sandbox_remove_seconds_bucket{RATE})))",
                         f"p{q * 100:g}") for q in (0.5, 0.95)), "s"),
            Graph("Sandboxes in use by host", "How even the load is.",
                  (('rollcage_sandboxes{state="in_use",host=~"$host"}', "{{host}}"),)),
            Graph("Commands", "Commands a second that agents run in sandboxes.",
                  ((f"sum by (agent) (rate(rollcage_commands_total{RATE}))", "{{agent}}"),), "ops"),
            Graph("Command time, p95", "Wall time of a command: 95 of a hundred took less.",
                  ((f"histogram_quantile(0.95, sum by (le) (rate(rollcage_command_seconds_bucket{RATE})))", "p95"),),
                  "s"),
        )),
        Row("Networks", (
            Graph("Leases of capacity", "Network leases held, of those that there can be. Rollouts wait at 100%.",
                  ((f"host_kind:rollcage_network_leases:ratio{_HERE}", "{{host}} {{kind}}"),), "percentunit", 0.8, 0.9),
            Graph("Bridge ports of capacity", "Ports of bridges in use; the kernel gives a bridge about a thousand.",
                  ((f"host:rollcage_bridge_ports:ratio{_HERE}", "{{host}}"),), "percentunit", 0.8, 0.9),
            Graph("Network errors", "Attempts a second that ended because of a network.",
                  ((f'sum by (error_class) (rate(rollcage_attempts_total{{error_class=~"network_.*"}}{RATE}))',
                    "{{error_class}}"),), "ops"),
        )),
        Row("Images", (
            Graph("Images asked for", "By what came of it: built, in the cache, or a fault of the task or of infra.",
                  ((f"sum by (result) (rate(rollcage_image_builds_total{RATE}))", "{{result}}"),), "ops", stacked=True),
            Graph("Build time", "Builds that were done: median and p95.",
                  tuple((f"histogram_quantile({q}, sum by (le) (rate(rollcage_image_build_seconds_bucket{RATE})))",
                         f"p{q * 100:g}") for q in (0.5, 0.95)), "s"),
            Graph("Builds failed by infra", "Share of the images asked for in a quarter of an hour.",
                  (("cluster:rollcage_image_builds_infra_fault:ratio_rate15m", "failed"),), "percentunit", 0.05, 0.1),
        )),
        Row("What is left behind", (
            Graph("Leaked", "Resources of dead jobs that could not be removed yet.",
                  ((f"sum by (host, resource) (rollcage_resources_leaked{_HERE})", "{{host}} {{resource}}"),),
                  "short", 1, 10),
            Graph("Reaped", "Resources of dead jobs that were removed, a second.",
                  ((f"sum by (resource) (rate(rollcage_resources_reaped_total{RATE}))", "{{resource}}"),), "ops"),
            Graph("Free disk", "Where each engine keeps its data.",
                  ((f"rollcage_disk_free_bytes{_HERE}", "{{host}}"),), "bytes", 20 * 2**30, 10 * 2**30),
        )),
    ),
    {"host": "rollcage_host_up"},
)  # fmt: skip
