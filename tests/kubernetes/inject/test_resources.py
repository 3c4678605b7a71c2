"""Quantities as Kubernetes counts them: the class of a pod, and the resources of a whole pod."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from sidecar.kubernetes.inject import inject
from sidecar.kubernetes.inject.resources import quantity
from tests.deploy.building import STORE, job, pod_of, sidecar_of


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *((8, "8"), ("8000m", "8"), ("0.5", "0.5"), (".5", "0.5"), ("64Gi", str(64 << 30)), ("65536Mi", str(64 << 30))),
        *(("1e3", "1000"), ("1E", "1E18"), ("5k", "5000"), ("1.", "1")),
    ],
)
def test_a_quantity_is_read_as_kubernetes_reads_it(text: Any, number: str) -> None:
    assert quantity(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "8 ", "eight", "1KiB", "1K", None, "1e", "٣"])
def test_what_is_no_quantity_is_none(text: Any) -> None:
    assert quantity(text) is None


def guaranteed(**spec: Any) -> bool:
    document = job(**spec)
    limits = {"cpu": "8000m", "memory": "65536Mi"}
    document["spec"]["template"]["spec"]["containers"][0]["resources"] = {
        "requests": {"cpu": 8, "memory": "64Gi"},
        "limits": limits,
    }
    found = sidecar_of(pod_of(inject(document, STORE)))["resources"]
    return bool(found["limits"] == found["requests"])


def test_a_pod_is_guaranteed_also_where_requests_and_limits_are_spelt_differently() -> None:
    assert guaranteed()


def test_an_init_container_without_limits_makes_it_burstable() -> None:
    init = {"name": "fetch", "image": "i"}
    assert not guaranteed(initContainers=[init])
    assert guaranteed(initContainers=[init | {"resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}])


@pytest.mark.parametrize(("whole", "fits"), [("8", False), ("8.5", True), ("8100m", True), (None, True)])
def test_requests_of_the_whole_pod_must_hold_the_sidecar_too(whole: str | None, fits: bool) -> None:
    document = job(**({"resources": {"requests": {"cpu": whole}, "limits": {"cpu": "16"}}} if whole else {}))
    document["spec"]["template"]["spec"]["containers"][0]["resources"] = {"limits": {"cpu": "8"}}
    warnings = [str(warning) for warning in inject(document, STORE).warnings if "the API server refuses" in warning.text]
    assert (not warnings) == fits
    if warnings:
        assert warnings[0].startswith("spec.template.spec.resources.requests.cpu: 8 is less than")
