"""CPU and memory of a pod and of the sidecar in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sidecar.kubernetes.inject.fields import containers_of
from sidecar.kubernetes.inject.quantity import quantity
from sidecar.kubernetes.inject.reports import InjectWarning

_COMPARED = ("cpu", "memory")


def is_guaranteed(spec: Mapping[str, Any], *, ours: frozenset[str]) -> bool:
    """Whether the pod is of class Guaranteed: all containers request exactly their limits, init containers among them.

    ``ours``: names of containers that do not count.
    """
    found = [container.get("resources") or {} for _, container in containers_of(spec, "") if container.get("name") not in ours]
    return bool(found) and all(_requests_its_limits(resources) for resources in found)


def _requests_its_limits(resources: Mapping[str, Any]) -> bool:
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    return all(name in limits and quantity(requests.get(name, limits[name])) == quantity(limits[name]) for name in _COMPARED)


def with_given(
    resources: Mapping[str, Any], given: Mapping[str, tuple[str | None, str | None]], *, guaranteed: bool
) -> dict[str, Any]:
    """Return resources with the given requests and limits, by name. No request is above its limit.

    Args:
        resources: Those without an option.
        given: Request and limit of ``cpu`` and ``memory``; ``None``: not given.
        guaranteed: The pod is of class Guaranteed: where only the request or the limit is given, it is both.
    """
    requests, limits = dict(resources.get("requests") or {}), dict(resources.get("limits") or {})
    for name, (request, limit) in given.items():
        if guaranteed:
            request, limit = request or limit, limit or request
        if request and not limit and name in limits and _is_above(request, limits[name]):
            limit = request
        if limit and not request and name in requests and _is_above(requests[name], limit):
            request = limit
        requests |= {name: request} if request else {}
        limits |= {name: limit} if limit else {}
    return {**({"requests": requests} if requests else {}), **({"limits": limits} if limits else {})}


def _is_above(one: Any, other: Any) -> bool:
    numbers = quantity(one), quantity(other)
    return numbers[0] is not None and numbers[1] is not None and numbers[0] > numbers[1]


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
