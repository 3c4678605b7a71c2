"""Quantities as Kubernetes counts them: the class of a pod, and the resources of a whole pod."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from sidecar.errors import ConfigurationError
from sidecar.kubernetes.inject import inject
from sidecar.kubernetes.inject.quantity import quantity
from tests.deploy.building import STORE, asked, job, pod_of, sidecar_of


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


@pytest.mark.parametrize(
    ("whole", "given", "requests", "limits"),
    [
        (False, {"cpu": "1"}, {"cpu": "1", "memory": "256Mi"}, {"memory": "512Mi"}),
        (False, {"cpu_limit": "2"}, {"cpu": "100m", "memory": "256Mi"}, {"cpu": "2", "memory": "512Mi"}),
        (False, {"cpu_limit": "50m"}, {"cpu": "50m", "memory": "256Mi"}, {"cpu": "50m", "memory": "512Mi"}),
        (False, {"memory": "1Gi"}, {"cpu": "100m", "memory": "1Gi"}, {"memory": "1Gi"}),
        (False, {"memory": "300Mi", "memory_limit": "2Gi"}, {"cpu": "100m", "memory": "300Mi"}, {"memory": "2Gi"}),
        (True, {"cpu": "2"}, {"cpu": "2", "memory": "512Mi"}, {"cpu": "2", "memory": "512Mi"}),
        (True, {"memory_limit": "1Gi"}, {"cpu": "500m", "memory": "1Gi"}, {"cpu": "500m", "memory": "1Gi"}),
    ],
)
def test_the_sidecar_gets_the_resources_that_are_given(
    whole: bool, given: dict[str, str], requests: dict[str, str], limits: dict[str, str]
) -> None:
    document = job()
    trainers = {"limits": {"cpu": "8", "memory": "64Gi"}} if whole else {}
    document["spec"]["template"]["spec"]["containers"][0]["resources"] = trainers
    once = inject(document, asked(**given))
    wanted = {"requests": requests, "limits": limits}
    assert sidecar_of(pod_of(once))["resources"] == wanted
    assert sidecar_of(pod_of(inject(once.document, STORE)))["resources"] == wanted, "an injection anew keeps them"


def test_given_resources_replace_those_of_an_earlier_injection_and_leave_the_others() -> None:
    once = inject(job(), asked(doctor="true", mode="classic", install_hook="true"))
    sidecar_of(pod_of(once))["resources"] = {"requests": {"memory": "300Mi"}, "limits": {"memory": "1Gi", "vendor/nic": 1}}
    again = pod_of(inject(once.document, asked(cpu_limit="1", memory="400Mi")))
    found = {container["name"]: container["resources"] for container in again["initContainers"]}
    assert sidecar_of(again)["resources"] == {
        "requests": {"memory": "400Mi"},
        "limits": {"memory": "1Gi", "vendor/nic": 1, "cpu": "1"},
    }
    assert {name: resources["limits"].get("cpu") for name, resources in found.items()} == {
        "checkpoint-hook": "1",
        "checkpoint-doctor": "1",
    }


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"cpu": "fast"}, "--cpu='fast' must be a quantity of at least 10m"),
        ({"memory_limit": "64Mi"}, "--memory-limit='64Mi' must be a quantity of at least 256Mi"),
        ({"cpu": "2", "cpu_limit": "1500m"}, "--cpu 2 is more than --cpu-limit 1500m"),
    ],
)
def test_resources_that_cannot_be_are_refused(given: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        asked(**given)
