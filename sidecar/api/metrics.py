"""Prometheus metrics, collected from the running services at each scrape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from sidecar.api import views
from sidecar.core.lifecycle.phases import Phase
from sidecar.core.lifecycle.states import State
from sidecar.daemon.services import Services


class _Metrics(Collector):
    def __init__(self, services: Services) -> None:
        self._services = services

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        services = self._services
        yield from self._gauges()
        yield _counter("sent_bytes", "Bytes that the store has confirmed", services.executor.sent_bytes)
        yield _counter("store_retries", "Retried requests to the store", services.executor.retries)
        states = Counter(t.state for t in services.catalog.all())
        by_state = GaugeMetricFamily("checkpoint_sidecar_checkpoints", "Checkpoints on the volume, by state", labels=["state"])
        for state in State:
            by_state.add_metric([state.value], states.get(state, 0))
        yield by_state
        phases = GaugeMetricFamily(
            "checkpoint_sidecar_phase", "1 for the current phase of the sidecar, 0 for all others", labels=["phase"]
        )
        for phase in Phase:
            phases.add_metric([phase.value], float(phase is services.state.phase))
        yield phases

    def _gauges(self) -> Iterator[GaugeMetricFamily]:
        services, risk = self._services, self._services.risk_monitor.risk()
        values: dict[tuple[str, str], float | None] = {
            ("degraded", "1 while the store is not reachable or refuses requests"): float(services.health.trouble is not None),
            ("newest_durable_step", "Newest step that is committed"): services.catalog.newest_durable_step,
            ("seconds_at_risk", "Seconds of training lost if the pod were killed now"): risk.seconds_at_risk,
            ("steps_at_risk", "Training steps lost if the pod were killed now"): risk.steps_at_risk,
            (
                "predicted_flush_seconds",
                "Predicted seconds to upload a checkpoint at the measured rate",
            ): risk.predicted_flush_s,
            (
                "predicted_save_seconds",
                "Predicted seconds from SIGTERM until the trainer has written a checkpoint",
            ): risk.predicted_save_s,
            (
                "predicted_durable_seconds",
                "Predicted seconds from SIGTERM until that checkpoint is durable",
            ): risk.predicted_durable_s,
            ("grace_seconds", "Grace period in seconds"): services.settings.grace_seconds,
            ("fits_grace", "1 if a just-in-time save fits into the grace period, else 0"): risk.fits_grace,
            ("throughput_bytes_per_second", "Measured upload rate in bytes per second"): services.executor.sent.bytes_per_s(),
            ("volume_free_bytes", "Free bytes of the shared volume"): views.volume(services).free_bytes,
            ("quarantined", "Committed checkpoints that failed verification"): len(services.resume_service.quarantined),
        }
        for (name, text), value in values.items():
            if value is not None:
                yield GaugeMetricFamily(f"checkpoint_sidecar_{name}", text, value=float(value))


def exposition(services: Services) -> bytes:
    """Return the metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Metrics(services))
    return generate_latest(registry)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"checkpoint_sidecar_{name}", text, value=float(value))
