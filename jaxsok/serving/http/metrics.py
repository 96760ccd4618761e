"""Prometheus metrics of a server: its own requests, and the session's counters at the time of a scrape.

Each server has a registry of its own, so that two servers of one process stay apart.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import prometheus_client
from prometheus_client import core, registry

_log = logging.getLogger(__name__)

_MILLISECONDS = (0.5, 1, 2, 3, 5, 7.5, 10, 20, 30, 50, 100, 200, 500, 1000, 2000, 5000, 30000)
LATENCY_BUCKETS = tuple(bound / 1000 for bound in _MILLISECONDS)
SIZE_BUCKETS = tuple(float(2**i) for i in range(0, 21, 2))
REQUEST_BUCKETS = tuple(float(2**i) for i in range(11))

_COUNTERS = {
    "lookups": "calls of the session that read tables",
    "predicts": "calls of the session that ran the model",
    "keys": "keys that lookups and predictions read, padding among them",
    "padding": "keys that stand for none",
    "distinct": "over a cache: distinct keys of each call",
    "hits": "keys that are there; over a cache distinct ones that it has",
    "misses": "over a cache: distinct keys that it does not have",
    "missing": "keys that are not there; over a cache distinct ones that no tier has",
    "updates": "versions that came by an update",
}
_GAUGES = {
    "hit_rate": "hits over hits and missing, over a cache hits over distinct, since the session was opened",
    "bytes": "bytes of the tables on the device",
    "host_bytes": "bytes in host memory",
}


class Metrics:
    """Counters and histograms of one server."""

    content_type = prometheus_client.CONTENT_TYPE_LATEST

    def __init__(
        self, stats: Callable[[], Mapping[str, Mapping[str, Any]]], depths: Callable[[], Mapping[tuple[str, str], int]]
    ) -> None:
        """Registers all metrics. Each scrape calls `stats`, for the session's counters by model, and `depths`."""
        self.registry = prometheus_client.CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...]) -> prometheus_client.Counter:
            return prometheus_client.Counter(f"jaxsok_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> prometheus_client.Histogram:
            labels = ("endpoint", "model")
            return prometheus_client.Histogram(f"jaxsok_{name}", text, labels, buckets=buckets, registry=self.registry)

        self.requests = counter("requests", "requests answered, by status", ("endpoint", "model", "status"))
        self.latency = histogram("request_seconds", "from the head of a request to its response", LATENCY_BUCKETS)
        self.received = counter("received_bytes", "bytes of bodies received", ("endpoint", "model"))
        self.sent = counter("sent_bytes", "bytes of bodies sent", ("endpoint", "model"))
        self.batch_requests = histogram("batch_requests", "requests of one call of the session", REQUEST_BUCKETS)
        self.batch_size = histogram("batch_size", "keys (lookup) or samples (predict) of one call", SIZE_BUCKETS)
        self.splits = counter(
            "batch_splits", "calls that failed and were run request by request", ("endpoint", "model")
        )
        self.watched = counter("watched_updates", "folders that --watch found", ("model", "result"))
        self.unread = counter("unread_responses", "responses that were cut off, since they were read too slowly", ())
        self.in_flight = prometheus_client.Gauge(
            "jaxsok_requests_in_flight", "requests whose response is not sent", registry=self.registry
        )
        self.is_ready = prometheus_client.Gauge("jaxsok_ready", "1 while requests are taken", registry=self.registry)
        self.registry.register(_AtScrape(stats, depths))

    def count_watched(self, model: str, result: str) -> None:
        """Counts a folder that --watch found."""
        self.watched.labels(model, result).inc()

    def text(self) -> bytes:
        """All metrics in Prometheus' text format. Asks the session: call it off the event loop."""
        return prometheus_client.generate_latest(self.registry)


class _AtScrape(registry.Collector):
    def __init__(
        self, stats: Callable[[], Mapping[str, Mapping[str, Any]]], depths: Callable[[], Mapping[tuple[str, str], int]]
    ) -> None:
        self._stats, self._depths = stats, depths

    def describe(self) -> Iterable[core.Metric]:
        return ()  # known at a scrape only

    def collect(self) -> Iterable[core.Metric]:
        stats = self._stats()
        for name, text in _COUNTERS.items():
            family = core.CounterMetricFamily(f"jaxsok_session_{name}", text, labels=["model"])
            yield from _filled(family, name, stats)
        for name, text in _GAUGES.items():
            yield from _filled(core.GaugeMetricFamily(f"jaxsok_session_{name}", text, labels=["model"]), name, stats)
        yield from _filled(
            core.GaugeMetricFamily("jaxsok_version", "version that is served", labels=["model"]), "version", stats
        )
        family = core.GaugeMetricFamily("jaxsok_queue_depth", "requests that wait", labels=["endpoint", "model"])
        for labels, depth in self._depths().items():
            family.add_metric(list(labels), depth)
        yield family


def _filled(
    family: core.CounterMetricFamily | core.GaugeMetricFamily, name: str, stats: Mapping[str, Mapping[str, Any]]
) -> Iterable[core.Metric]:
    found = {model: values[name] for model, values in stats.items() if isinstance(values.get(name), int | float)}
    for model, value in found.items():
        family.add_metric([model], value)
    if found:
        yield family
