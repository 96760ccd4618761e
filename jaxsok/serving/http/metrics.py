"""Prometheus metrics of a server, in its own registry; the session's counters are read at the time of a scrape."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import prometheus_client
from prometheus_client import core, registry

Stats: TypeAlias = Callable[[], Mapping[str, Mapping[str, Any]]]
Depths: TypeAlias = Callable[[], Mapping[tuple[str, str], int]]

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


_STREAM = {
    "lag_versions": ("lag_versions", "versions of update_source that are not served"),
    "lag_seconds": ("lag_s", "how long ago the first of them was published"),
    "delay_seconds": ("delay_s", "of the last version: from its publication until it was served"),
    "is_following": ("is_following", "1 while Redis answers and no version is refused"),
}


class Metrics:
    """Counters and histograms of one server."""

    content_type = prometheus_client.CONTENT_TYPE_LATEST

    def __init__(self, stats: Stats, depths: Depths) -> None:
        self.registry = prometheus_client.CollectorRegistry()

        def metric(kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
            return kind(f"jaxsok_{name}", text, labels, registry=self.registry, **options)

        counter, histogram, gauge = prometheus_client.Counter, prometheus_client.Histogram, prometheus_client.Gauge
        asked = "endpoint", "model"
        self.requests = metric(counter, "requests", "requests answered, by status", *asked, "status")
        text = "from the head of a request to its response"
        self.latency = metric(histogram, "request_seconds", text, *asked, buckets=LATENCY_BUCKETS)
        self.received = metric(counter, "received_bytes", "bytes of bodies received", *asked)
        self.sent = metric(counter, "sent_bytes", "bytes of bodies sent", *asked)
        text = "requests of one call of the session"
        self.batch_requests = metric(histogram, "batch_requests", text, *asked, buckets=REQUEST_BUCKETS)
        text = "keys (lookup) or samples (predict) of one call"
        self.batch_size = metric(histogram, "batch_size", text, *asked, buckets=SIZE_BUCKETS)
        self.splits = metric(counter, "batch_splits", "calls that failed and were run request by request", *asked)
        self.watched = metric(counter, "watched_updates", "folders that --watch found", "model", "result")
        text = "responses that were cut off, since they were read too slowly"
        self.unread = metric(counter, "unread_responses", text)
        self.in_flight = metric(gauge, "requests_in_flight", "requests whose response is not sent")
        self.is_ready = metric(gauge, "ready", "1 while requests are taken")
        self.registry.register(_AtScrape(stats, depths))

    def text(self) -> bytes:
        """Formats all metrics for Prometheus. Asks the session: call it off the event loop."""
        return prometheus_client.generate_latest(self.registry)


class _AtScrape(registry.Collector):
    def __init__(self, stats: Stats, depths: Depths) -> None:
        self._stats, self._depths = stats, depths

    def describe(self) -> Iterable[core.Metric]:
        return ()  # known at a scrape only

    def collect(self) -> Iterable[core.Metric]:
        stats = self._stats()
        counter, gauge = core.CounterMetricFamily, core.GaugeMetricFamily
        for kind, metric, name, text in (
            *((counter, f"session_{name}", name, text) for name, text in _COUNTERS.items()),
            *((gauge, f"session_{name}", name, text) for name, text in _GAUGES.items()),
            (gauge, "version", "version", "version that is served"),
            *((gauge, f"stream_{metric}", name, text) for metric, (name, text) in _STREAM.items()),
        ):
            values = {(model,): found.get(name) for model, found in stats.items()}
            numbers = {labels: value for labels, value in values.items() if isinstance(value, int | float)}
            if numbers:
                yield _fill(kind(f"jaxsok_{metric}", text, labels=["model"]), numbers)
        yield _fill(gauge("jaxsok_queue_depth", "requests that wait", labels=["endpoint", "model"]), self._depths())


def _fill(family: Any, values: Mapping[tuple[str, ...], float]) -> core.Metric:
    for labels, value in values.items():
        family.add_metric(list(labels), value)
    return family
