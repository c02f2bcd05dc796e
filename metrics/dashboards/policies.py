"""Policies: tokens, queues, replicas and the versions of their weights, and beside them what vLLM says of itself.

Names of vLLM's metrics are those of `vllm.v1.metrics.loggers`; its label `model_name` is the name that it serves.
"""

from __future__ import annotations

from rollcage.metrics.dashboards.panels import RATE, Board, Graph, Row, Stat

_HERE = '{policy=~"$policy"}'


def _quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (
            f"histogram_quantile({q}, sum by (le, policy) (rate({metric}_bucket{_HERE}{RATE})))",
            f"{{{{policy}}}} p{q * 100:g}",
        )
        for q in (0.5, 0.95)
    )


def _vllm_quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (
            f"histogram_quantile({q}, sum by (le, model_name) (rate(vllm:{metric}_bucket{RATE})))",
            f"{{{{model_name}}}} p{q * 100:g}",
        )
        for q in (0.5, 0.95)
    )


def _vllm_rate(counter: str, by: str = "model_name") -> str:
    return f"sum by ({by}) (rate(vllm:{counter}_total{RATE}))"


POLICIES = Board(
    "rollcage-policies",
    "Policies",
    "Policies: tokens a second, queues, KV cache, replicas, staleness and cost.",
    (
        Row("Now", (
            Stat("Tokens a second", "Tokens sampled, over a minute.",
                 ((f"policy:rollcage_policy_completion_tokens:rate1m{_HERE}", "{{policy}}"),), "short", width=6),
            Stat("Replicas ready", "Replicas that take turns.",
                 (('rollcage_policy_replicas{state="ready",policy=~"$policy"}', "{{policy}}"),), "short", 1, 0.5,
                 width=6),
            Stat("Turns waiting", "Turns that no engine works on yet.",
                 (('rollcage_policy_requests{state="waiting",policy=~"$policy"}', "{{policy}}"),), width=6),
            Stat("Version", "Version of the weights that new turns begin on.",
                 ((f"rollcage_policy_version{_HERE}", "{{policy}}"),), "none", width=6),
        )),
        Row("Throughput", (
            Graph("Tokens by kind", "Tokens a second: of prompts, those of them found in the cache, and sampled.",
                  ((f"sum by (policy, kind) (rate(rollcage_policy_tokens_total{_HERE}{RATE}))",
                    "{{policy}} {{kind}}"),), "short"),
            Graph("Prefix cache hits", "Share of prompts' tokens that an engine had in its cache.",
                  ((f"policy:rollcage_policy_cached_prompt:ratio_rate5m{_HERE}", "{{policy}}"),), "percentunit"),
            Graph("Turns", "Answers a second.",
                  ((f"sum by (policy) (rate(rollcage_policy_turns_total{_HERE}{RATE}))", "{{policy}}"),), "ops"),
            Graph("Malformed answers", "Share of answers that held no action that could be read.",
                  ((f"sum by (policy) (rate(rollcage_policy_malformed_turns_total{_HERE}{RATE})) / "
                    f"(sum by (policy) (rate(rollcage_policy_turns_total{_HERE}{RATE})) > 0)", "{{policy}}"),),
                  "percentunit"),
            Graph("Queue time", "Wait of a turn before an engine worked on it, retries included.",
                  _quantiles("rollcage_policy_queue_seconds"), "s"),
            Graph("Generation time", "An engine's own time for a turn.",
                  _quantiles("rollcage_policy_generate_seconds"), "s"),
        )),
        Row("Engines", (
            Graph("Turns at the engines", "Running, and waiting for a place.",
                  ((f"rollcage_policy_requests{_HERE}", "{{policy}} {{state}}"),)),
            Graph("KV cache", "Use of the fullest replica's; new turns wait when it is full.",
                  ((f"rollcage_policy_kv_cache_usage_ratio{_HERE}", "{{policy}}"),), "percentunit", 0.9, 0.98),
            Graph("Replicas", "By state; lost ones are started anew.",
                  ((f"rollcage_policy_replicas{_HERE}", "{{policy}} {{state}}"),)),
            Graph("Restarts", "Engines that were started anew.",
                  ((f"rollcage_policy_replica_restarts_total{_HERE}", "{{policy}}"),)),
            Graph("Policy errors", "Attempts a second that ended because of a model server.",
                  (("sum by (error_class) "
                    f'(rate(rollcage_attempts_total{{error_class=~"policy_.*|rate_limited"}}{RATE}))',
                    "{{error_class}}"),), "ops"),
            Graph("Cost", "US dollars an hour, by the policies' prices.",
                  ((f"3600 * sum by (policy) (rate(rollcage_policy_cost_usd_total{_HERE}{RATE}))", "{{policy}}"),),
                  "currencyUSD"),
        )),
        Row("Weights", (
            Graph("Versions", "Version of the weights that new turns begin on.",
                  ((f"rollcage_policy_version{_HERE}", "{{policy}}"),), "none", width=12),
            Graph("Staleness", "Versions that a rollout's oldest turn was behind when it ended.",
                  _quantiles("rollcage_policy_staleness_versions"), "short", width=12),
        )),
        Row("vLLM's own", (
            Graph("vLLM: requests", "As vLLM itself counts them: in a batch, and waiting for a place in one.",
                  tuple((f"sum by (model_name) (vllm:num_requests_{state})", f"{{{{model_name}}}} {state}")
                        for state in ("running", "waiting"))),
            Graph("vLLM: KV cache", "Use of each engine's KV cache.",
                  (("max by (model_name, instance) (vllm:kv_cache_usage_perc)", "{{model_name}} {{instance}}"),),
                  "percentunit", 0.9, 0.98),
            Graph("vLLM: preemptions", "Requests a second whose KV cache was taken from them, to be computed again.",
                  ((_vllm_rate("num_preemptions"), "{{model_name}}"),), "ops"),
            Graph("vLLM: tokens", "Tokens a second, whoever asked: of prompts, and generated.",
                  tuple((_vllm_rate(f"{kind}_tokens"), f"{{{{model_name}}}} {kind}")
                        for kind in ("prompt", "generation"))),
            Graph("vLLM: prefix cache hits", "Share of the tokens looked up in the prefix cache that were in it.",
                  ((f"{_vllm_rate('prefix_cache_hits')} / ({_vllm_rate('prefix_cache_queries')} > 0)",
                    "{{model_name}}"),), "percentunit"),
            Graph("vLLM: requests ended", "Requests a second, by why they ended.",
                  ((_vllm_rate("request_success", "model_name, finished_reason"),
                    "{{model_name}} {{finished_reason}}"),), "ops"),
            Graph("vLLM: time to first token", "From a request's arrival to its first token.",
                  _vllm_quantiles("time_to_first_token_seconds"), "s"),
            Graph("vLLM: time between tokens", "Between two tokens of one request.",
                  _vllm_quantiles("inter_token_latency_seconds"), "s"),
            Graph("vLLM: queue time", "A request's time in vLLM's own queue; ours, above, has retries in it.",
                  _vllm_quantiles("request_queue_time_seconds"), "s"),
        )),
    ),
    {"policy": "rollcage_policy_turns_total"},
)  # fmt: skip
