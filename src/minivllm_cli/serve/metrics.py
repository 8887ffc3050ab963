"""Figures for Prometheus, under the names that vLLM has given them, and some of our own."""

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from minivllm_engine.core.outputs import FinishReason, RequestOutput

if TYPE_CHECKING:
    from minivllm_engine.core.stats import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The figures of one server. Registers nowhere else.

    Args:
        model: the label `model_name` of all of them.
    """

    def __init__(self, model: str) -> None:
        self._registry, self._model = CollectorRegistry(), model

        def gauge(name: str, help: str) -> Gauge:
            return Gauge(name, help, ["model_name"], registry=self._registry)

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(name, help, ["model_name", *labels], registry=self._registry)

        def seconds(name: str, help: str) -> Histogram:
            return Histogram(name, help, ["model_name"], registry=self._registry, buckets=_SECONDS)

        self._running = gauge("vllm:num_requests_running", "Sequences that are computed now")
        self._waiting = gauge("vllm:num_requests_waiting", "Sequences that wait for room")
        self._kv_used = gauge("vllm:kv_cache_usage_perc", "Part of the KV blocks in use, 0 to 1")
        self._preempted = counter("vllm:num_preemptions", "Sequences that gave up their blocks")
        self._queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up")
        self._hits = counter("vllm:prefix_cache_hits", "Prompt tokens that were reused")
        self._prompt = counter("vllm:prompt_tokens", "Prompt tokens")
        self._generated = counter("vllm:generation_tokens", "Tokens of answers")
        self._success = counter("vllm:request_success", "Requests answered", "finished_reason")
        self._ttft = seconds("vllm:time_to_first_token_seconds", "Until the first token")
        self._itl = seconds(
            "vllm:inter_token_latency_seconds", "A token after the first, on average"
        )
        self._e2e = seconds("vllm:e2e_request_latency_seconds", "Until the end")
        self._queue = seconds("vllm:request_queue_time_seconds", "Until the first step")
        self._misses = counter(
            "minivllm:cache_misses", "Requests that could reuse no more", "reason"
        )
        self._rejected = counter("minivllm:rejected", "Requests turned away", "code")
        self._aborted = counter("minivllm:aborted", "Requests that nobody waited for any more")
        self._preemptions_told = 0

    def reject(self, code: str) -> None:
        """Count a request that was answered with an error."""
        self._rejected.labels(self._model, code).inc()

    def end(self, output: RequestOutput) -> None:
        """Count a request that has ended."""
        model, usage, timing = self._model, output.usage, output.timing
        self._prompt.labels(model).inc(usage.prompt_tokens)
        self._generated.labels(model).inc(usage.completion_tokens)
        self._queries.labels(model).inc(usage.prompt_tokens)
        self._hits.labels(model).inc(usage.cached_tokens)
        if usage.miss_reason is not None:
            self._misses.labels(model, usage.miss_reason).inc()
        reason = output.finish_reason
        if reason in (None, FinishReason.ABORT):
            self._aborted.labels(model).inc()
        elif reason != FinishReason.ERROR:
            self._success.labels(model, str(reason)).inc()
        for histogram, value in (
            (self._ttft, timing.ttft_s),
            (self._itl, timing.tpot_s),
            (self._e2e, timing.e2e_s),
            (self._queue, timing.queue_s),
        ):
            if value is not None:
                histogram.labels(model).observe(value)

    def text(self, stats: "EngineStats") -> bytes:
        """Return all figures, those of the engine as they are now."""
        model = self._model
        self._running.labels(model).set(stats.num_running)
        self._waiting.labels(model).set(stats.num_waiting)
        self._kv_used.labels(model).set(stats.kv_blocks_used / max(stats.kv_blocks_total, 1))
        self._preempted.labels(model).inc(stats.num_preemptions - self._preemptions_told)
        self._preemptions_told = stats.num_preemptions
        return generate_latest(self._registry)
