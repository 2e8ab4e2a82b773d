"""Metrics of a server in Prometheus' format."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from megatron_ds.inference.serving.scheduler import Scheduler

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class ServerMetrics:
    """The metrics; the scheduler's are read when they are asked for.

    Attributes:
        responses: Counts responses, by path and status.
        seconds: Durations of the requests with a result.
        first_token: Times until their first tokens.
    """

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(self, scheduler: Scheduler) -> None:
        disable_created_metrics()  # a second time series of each metric
        self._registry = CollectorRegistry()
        prefix = "megatron_ds"
        registry = self._registry
        self.responses = Counter(
            f"{prefix}_responses", "Responses", ["path", "status"], registry=registry
        )
        self.seconds = Histogram(
            f"{prefix}_request_seconds", "Duration", registry=registry, buckets=SECONDS
        )
        self.first_token = Histogram(
            f"{prefix}_time_to_first_token_seconds",
            "Time to the first token",
            registry=registry,
            buckets=SECONDS,
        )
        running = Gauge(f"{prefix}_sequences_running", "Sequences in the batch", registry=registry)
        running.set_function(lambda: scheduler.running)
        waiting = Gauge(f"{prefix}_requests_waiting", "Requests that wait", registry=registry)
        waiting.set_function(lambda: scheduler.waiting)

        class Tokens(Collector):
            def collect(self) -> list[CounterMetricFamily]:
                return [
                    CounterMetricFamily(f"{prefix}_{name}_tokens", text, value=value)
                    for name, text, value in (
                        ("generated", "New tokens", scheduler.generated),
                        ("prompt", "Tokens of prompts", scheduler.prompted),
                    )
                ]

        registry.register(Tokens())

    def text(self) -> bytes:
        return generate_latest(self._registry)
