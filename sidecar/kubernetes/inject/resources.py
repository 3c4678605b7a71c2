"""Quantities of CPU and memory as Kubernetes counts them, and what they make of a pod."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from sidecar.kubernetes.inject.fields import containers_of
from sidecar.kubernetes.inject.pod_templates import InjectWarning

_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_UNITS = {unit: Decimal(10) ** power for unit, power in _DECIMAL.items()}
_UNITS |= {f"{unit}i": Decimal(1 << (10 * power)) for power, unit in enumerate("KMGTPE", 1)}
_QUANTITY = re.compile(r"([-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:([numkMGTPE]|[KMGTPE]i)|[eE]([-+]?[0-9]{1,2}))?", re.ASCII)
_COMPARED = ("cpu", "memory")


def quantity(value: Any) -> Decimal | None:
    """Return the number of CPUs or bytes of a quantity, such as ``500m`` or ``64Gi``; ``None``: it is no quantity."""
    match = _QUANTITY.fullmatch(str(value))
    return Decimal(match[1]) * _UNITS[match[2] or ""] * Decimal(10) ** int(match[3] or 0) if match else None


def is_guaranteed(spec: Mapping[str, Any], *, ours: frozenset[str]) -> bool:
    """Whether the pod is of class Guaranteed: all containers request exactly their limits, init containers among them.

    Args:
        spec: The pod's.
        ours: Names of containers that do not count.
    """
    found = [container.get("resources") or {} for _, container in containers_of(spec, "") if container.get("name") not in ours]
    return bool(found) and all(_requests_its_limits(resources) for resources in found)


def _requests_its_limits(resources: Mapping[str, Any]) -> bool:
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    return all(name in limits and quantity(requests.get(name, limits[name])) == quantity(limits[name]) for name in _COMPARED)


def _request(resources: Mapping[str, Any], name: str) -> Any:
    """Return what a container requests: where it says only a limit, that."""
    limit = (resources.get("limits") or {}).get(name, 0)
    return (resources.get("requests") or {}).get(name, limit)


def warning_of_pod_level(
    spec: Mapping[str, Any], path: str, *, sidecar: Mapping[str, Any], name: str
) -> Iterator[InjectWarning]:
    """Yield a warning where the sidecar does not fit into the requests of the whole pod (``spec.resources``).

    Args:
        spec: The pod's, with or without the sidecar.
        path: Of the pod's spec.
        sidecar: Resources of the sidecar.
        name: The sidecar's.
    """
    whole = (spec.get("resources") or {}).get("requests") or {}
    others = [container for container in spec.get("containers") or () if container.get("name") != name]
    for resource in (resource for resource in _COMPARED if resource in whole):
        asked = [_request(each.get("resources") or {}, resource) for each in others]
        own = _request(sidecar, resource)
        numbers = [quantity(value) for value in (whole[resource], own, *asked)]
        known = [number for number in numbers if number is not None]
        if len(known) == len(numbers) and sum(known[1:]) > known[0]:
            text = f"{whole[resource]} is less than all containers request with the sidecar's {own}"
            why = "the API server refuses the pod; raise it, and the limit"
            yield InjectWarning(f"{path}.resources.requests.{resource}", f"{text}: {why}")
