"""A call, such as kubelet's probe, is answered at a limit of processes, too: none needs a thread."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from sidecar.api.app import calls, health
from sidecar.api.page import page


def called_by(dependant: Dependant) -> Iterator[object]:
    yield dependant.call
    for each in dependant.dependencies:
        yield from called_by(each)


def test_nothing_that_a_call_runs_is_run_in_a_thread() -> None:
    routes = [route for router in (calls, health, page) for route in router.routes if isinstance(route, APIRoute)]
    assert len(routes) > 10
    run = {call for route in routes for call in called_by(route.dependant)}
    assert [call for call in run if not inspect.iscoroutinefunction(call)] == []
