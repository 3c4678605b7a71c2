"""Prometheus metrics, collected from the running services at each scrape. ``docs/metrics.md`` is made of this module."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from sidecar import __version__
from sidecar.api import views
from sidecar.api.safety import safety_now
from sidecar.core.lifecycle.histogram import Histogram
from sidecar.core.lifecycle.phases import Phase
from sidecar.core.lifecycle.safety import Level
from sidecar.core.lifecycle.states import State
from sidecar.daemon.services import Services

PREFIX = "checkpoint_sidecar_"


class Description(NamedTuple):
    """What a metric means, without its prefix."""

    name: str
    kind: str
    """gauge, counter or histogram."""
    text: str
    labels: tuple[str, ...] = ()


DESCRIPTIONS = (
    Description("build_info", "gauge", "1; the labels are the versions of the sidecar and of Python", ("version", "python")),
    Description("phase", "gauge", "1 for the current phase of the sidecar, 0 for all others", ("phase",)),
    Description("degraded", "gauge", "1 while the store is not reachable or refuses requests"),
    Description("newest_durable_step", "gauge", "Newest step that is committed"),
    Description(
        "seconds_at_risk", "gauge", "Seconds of training lost if the pod were killed now; stands still while nobody trains"
    ),
    Description("steps_at_risk", "gauge", "Training steps lost if the pod were killed now"),
    Description(
        "fits_grace",
        "gauge",
        "1 if a save at SIGTERM would be durable within the grace period, 0 if not; absent while that is not known",
    ),
    Description("safety", "gauge", "1 for the answer to whether training is safe now, 0 for the other answers", ("level",)),
    Description("predicted_save_seconds", "gauge", "Predicted seconds from SIGTERM until the trainer has written a checkpoint"),
    Description("predicted_flush_seconds", "gauge", "Predicted seconds to upload a checkpoint at the measured rate"),
    Description("predicted_durable_seconds", "gauge", "Predicted seconds from SIGTERM until that checkpoint is durable"),
    Description("grace_seconds", "gauge", "Grace period in seconds"),
    Description("checkpoints", "gauge", "Checkpoints on the volume, by state", ("state",)),
    Description("bad", "gauge", "Checkpoints in the store that failed verification"),
    Description("ranks", "gauge", "Training processes of this pod that hold their lease"),
    Description("trainer_step", "gauge", "Step that the hook reported last; absent without a hook"),
    Description(
        "trainer_planned_steps", "gauge", "Steps that the training is planned for; absent where the hook does not know it"
    ),
    Description(
        "throughput_bytes_per_second", "gauge", "Measured upload rate in bytes per second; absent before 4 MB were sent"
    ),
    Description("volume_free_bytes", "gauge", "Free bytes of the shared volume"),
    Description("volume_size_bytes", "gauge", "Size of the shared volume in bytes"),
    Description("sent_bytes", "counter", "Bytes that the store has confirmed"),
    Description("store_retries", "counter", "Retried requests to the store"),
    Description("save_seconds", "histogram", "Seconds from the first file of a checkpoint to its marker", ("reason",)),
    Description(
        "upload_seconds",
        "histogram",
        "Seconds of sending a checkpoint, until this node's manifest is in the store",
        ("reason",),
    ),
    Description(
        "commit_seconds", "histogram", "Seconds from this node's manifest to the commit, with the wait for other nodes"
    ),
    Description(
        "durable_seconds", "histogram", "Seconds from the marker to the commit, with the wait in the queue", ("reason",)
    ),
    Description(
        "resume_seconds", "histogram", "Seconds from a resume request to its answer: ready, none or failed", ("outcome",)
    ),
    Description(
        "api_request_seconds", "histogram", "Seconds of API calls, but for streams and calls that wait on purpose", ("call",)
    ),
)
Simple = GaugeMetricFamily | CounterMetricFamily


class _Metrics(Collector):
    def __init__(self, services: Services) -> None:
        self._services = services

    def collect(self) -> Iterator[Simple | HistogramMetricFamily]:
        services = self._services
        values = self._values()
        safety = safety_now(services, durable_step=services.catalog.newest_durable_step)
        states = Counter(t.state for t in services.catalog.all())
        labelled: dict[str, dict[tuple[str, ...], float]] = {
            "build_info": {(__version__, platform.python_version()): 1.0},
            "phase": {(phase.value,): float(phase is services.state.phase) for phase in Phase},
            "safety": {(level.value,): float(level.value == safety.level) for level in Level},
            "checkpoints": {(state.value,): states.get(state, 0) for state in State},
        }
        histograms = self._histograms()
        for description in DESCRIPTIONS:
            if description.name in histograms:
                yield _histogram(description, histograms[description.name])
            elif (samples := labelled.get(description.name)) is not None:
                yield _family(description, samples.items())
            elif (value := values[description.name]) is not None:
                yield _family(description, [((), float(value))])

    def _values(self) -> dict[str, float | None]:
        services, risk = self._services, self._services.risk_monitor.risk()
        volume, trainer = views.volume(services), views.trainer(services)
        return {
            "degraded": services.health.trouble is not None,
            "newest_durable_step": services.catalog.newest_durable_step,
            "seconds_at_risk": risk.seconds_at_risk,
            "steps_at_risk": risk.steps_at_risk,
            "predicted_flush_seconds": risk.predicted_flush_s,
            "predicted_save_seconds": risk.predicted_save_s,
            "predicted_durable_seconds": risk.predicted_durable_s,
            "grace_seconds": services.settings.grace_seconds,
            "fits_grace": risk.fits_grace,
            "ranks": trainer.ranks,
            "trainer_step": trainer.step,
            "trainer_planned_steps": trainer.total_steps,
            "throughput_bytes_per_second": services.executor.sent.telling_bytes_per_s(),
            "volume_free_bytes": volume.free_bytes,
            "volume_size_bytes": volume.total_bytes,
            "bad": len(services.quarantine.quarantined),
            "sent_bytes": services.executor.sent_bytes,
            "store_retries": services.executor.retries,
        }

    def _histograms(self) -> dict[str, dict[str, Histogram]]:
        durations = self._services.durations
        return {
            "save_seconds": durations.save,
            "upload_seconds": durations.upload,
            "commit_seconds": durations.commit,
            "durable_seconds": durations.durable,
            "resume_seconds": durations.resume,
            "api_request_seconds": durations.api,
        }


def exposition(services: Services) -> bytes:
    """Return the metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Metrics(services))
    return generate_latest(registry)


def _family(description: Description, samples: Iterable[tuple[tuple[str, ...], float]]) -> Simple:
    kinds: dict[str, Any] = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
    family: Simple = kinds[description.kind](f"{PREFIX}{description.name}", description.text, labels=description.labels)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def _histogram(description: Description, histograms: Mapping[str, Histogram]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(f"{PREFIX}{description.name}", description.text, labels=description.labels)
    for label, histogram in sorted(histograms.items()):
        buckets = [("+Inf" if bound_s == float("inf") else f"{bound_s:g}", count) for bound_s, count in histogram.buckets()]
        family.add_metric((label,)[: len(description.labels)], buckets, sum_value=histogram.sum_s)
    return family
