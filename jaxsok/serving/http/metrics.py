"""Prometheus metrics of a server, in its own registry; the session's counters are read at the time of a scrape."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import prometheus_client
from prometheus_client import core, multiprocess, registry

_SUMS, _GAUGES = ("counter", "histogram"), ("gauge_livesum", "gauge_livemin")  # prometheus_client's names of files
_FILE_BYTES, _MODEL_BYTES = 1 << 16, 1 << 14  # of such a file, and for each model: its series take some 10 KB

Stats: TypeAlias = Callable[[], Mapping[str, Mapping[str, Any]]]

_MILLISECONDS = (0.5, 1, 2, 3, 5, 7.5, 10, 20, 30, 50, 100, 200, 500, 1000, 2000, 5000, 30000)
LATENCY_BUCKETS = tuple(bound / 1000 for bound in _MILLISECONDS)
SIZE_BUCKETS = tuple(float(2**i) for i in range(0, 21, 2))
REQUEST_BUCKETS = tuple(float(2**i) for i in range(11))

_COUNTER, _GAUGE = core.CounterMetricFamily, core.GaugeMetricFamily
_OF_SESSION = (  # kind, metric, its name in `Session.stats`, and its text
    (_COUNTER, "session_lookups", "lookups", "calls of the session that read tables"),
    (_COUNTER, "session_predicts", "predicts", "calls of the session that ran the model"),
    (_COUNTER, "session_keys", "keys", "keys that lookups and predictions read, padding among them"),
    (_COUNTER, "session_padding", "padding", "keys that stand for none"),
    (_COUNTER, "session_distinct", "distinct", "over a cache: distinct keys of each call"),
    (_COUNTER, "session_hits", "hits", "keys that are there; over a cache distinct ones that it has"),
    (_COUNTER, "session_misses", "misses", "over a cache: distinct keys that it does not have"),
    (_COUNTER, "session_missing", "missing", "keys that are not there; over a cache distinct ones that no tier has"),
    (_COUNTER, "session_updates", "updates", "versions that came by an update"),
    (_GAUGE, "session_hit_rate", "hit_rate", "hits over hits and missing (a cache: over distinct) since the opening"),
    (_GAUGE, "session_bytes", "bytes", "bytes of the tables on the device"),
    (_GAUGE, "session_host_bytes", "host_bytes", "bytes in host memory"),
    (_GAUGE, "version", "version", "version that is served"),
    (_GAUGE, "stream_lag_versions", "lag_versions", "versions of update_source that are not served"),
    (_GAUGE, "stream_lag_seconds", "lag_s", "how long ago the first of them was published"),
    (_GAUGE, "stream_delay_seconds", "delay_s", "of the last version: from its publication until it was served"),
    (_GAUGE, "stream_is_following", "is_following", "1 while Redis answers, and neither it nor the server refuses"),
)


class Metrics(registry.Collector):
    """Counters and histograms of one server.

    Front ends (processes.py) count requests in files below `front_ends`, each by its number; the process of the session
    adds these up.
    """

    content_type = prometheus_client.CONTENT_TYPE_LATEST

    def __init__(self, stats: Stats, front_ends: str | None = None) -> None:
        self._stats, self.registry = stats, prometheus_client.CollectorRegistry()
        of_requests = self.registry
        if front_ends is not None:
            multiprocess.MultiProcessCollector(self.registry, front_ends)
            of_requests = prometheus_client.CollectorRegistry()  # never read: this process takes no requests

        def metric(kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
            return kind(f"jaxsok_{name}", text, labels, **{"registry": of_requests, **options})

        counter, histogram, gauge = prometheus_client.Counter, prometheus_client.Histogram, prometheus_client.Gauge
        asked = "endpoint", "model"
        self.requests = metric(counter, "requests", "requests answered, by status", *asked, "status")
        text = "from the head of a request to its response"
        self.latency = metric(histogram, "request_seconds", text, *asked, buckets=LATENCY_BUCKETS)
        self.received = metric(counter, "received_bytes", "bytes of bodies received", *asked)
        self.sent = metric(counter, "sent_bytes", "bytes of bodies sent", *asked)
        text, summed = "responses that were cut off, since they were read too slowly", {"multiprocess_mode": "livesum"}
        self.unread = metric(counter, "unread_responses", text)
        self.depth = metric(gauge, "queue_depth", "requests that wait", *asked, **summed)
        self.in_flight = metric(gauge, "requests_in_flight", "requests whose response is not sent", **summed)
        self.is_ready = metric(gauge, "ready", "1 while requests are taken", multiprocess_mode="livemin")
        here = {"registry": self.registry}
        text = "requests of one call of the session"
        self.batch_requests = metric(histogram, "batch_requests", text, *asked, buckets=REQUEST_BUCKETS, **here)
        text = "keys (lookup) or samples (predict) of one call"
        self.batch_size = metric(histogram, "batch_size", text, *asked, buckets=SIZE_BUCKETS, **here)
        text = "calls that failed and were run request by request"
        self.splits = metric(counter, "batch_splits", text, *asked, **here)
        self.watched = metric(counter, "watched_updates", "folders that --watch found", "model", "result", **here)
        self.registry.register(self)
        self._children = functools.cache(
            lambda *labels: [family.labels(*labels) for family in (self.latency, self.received, self.sent)]
        )
        self._answers = functools.cache(self.requests.labels)

    def add(self, labels: tuple[str, str], status: int, seconds: float, received: int, sent: int) -> None:
        """Counts a request that is answered, by endpoint and model."""
        self._answers(*labels, str(status)).inc()
        latency, received_bytes, sent_bytes = self._children(*labels)
        latency.observe(seconds)
        received_bytes.inc(received)
        sent_bytes.inc(sent)

    def text(self) -> bytes:
        """Formats all metrics for Prometheus. Asks the session: call it off the event loop."""
        return prometheus_client.generate_latest(self.registry)

    def collect(self) -> Iterable[core.Metric]:
        stats = self._stats()
        for kind, metric, name, text in _OF_SESSION:
            values = {model: found.get(name) for model, found in stats.items()}
            numbers = {model: value for model, value in values.items() if isinstance(value, int | float)}
            if numbers:
                family = kind(f"jaxsok_{metric}", text, labels=["model"])
                for model, value in numbers.items():
                    family.add_metric([model], value)
                yield family


def reserve_files(folder: str, num_front_ends: int, num_models: int) -> None:
    """Makes the files of front ends with all their blocks: a process that writes to one ends if the disk is full."""
    for number in range(num_front_ends):
        for kind in (*_SUMS, *_GAUGES):
            with open(_file_of(folder, kind, number), "xb") as file:
                os.posix_fallocate(file.fileno(), 0, _FILE_BYTES + num_models * _MODEL_BYTES)


def clear_gauges(folder: str, number: int) -> None:
    """Clears the gauges of a front end that has ended; the next of its number goes on with its sums."""
    for kind in _GAUGES:
        # Without a file there is nothing to clear: a program that removes old files has taken it.
        with contextlib.suppress(FileNotFoundError), open(_file_of(folder, kind, number), "r+b") as file:
            file.write(bytes(8))  # how many bytes are used


def _file_of(folder: str, kind: str, number: int) -> str:
    return os.path.join(folder, f"{kind}_{number}.db")
