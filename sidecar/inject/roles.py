"""Which pods of a workload train, where the document says so: others prepare, or only start what runs elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

from sidecar.inject.places import Fields, Kind, Place, Warning_, at

_TAKE_IT = "name it with --pods if it trains"


def without_helpers(document: Fields, kind: Kind, chosen: list[Place]) -> tuple[list[Place], list[Warning_]]:
    """Return the places that may train, and what is said of those that are left out.

    A helper's sidecar would take part in a run that it has nothing of. Where nothing but helpers would be left, all stay.
    """
    said = dict(_helpers(document, kind, chosen))
    trains = [place for place in chosen if place.name not in said]
    if not trains:
        return chosen, []
    return trains, [Warning_(place.path, said[place.name]) for place in chosen if place.name in said]


def _helpers(document: Fields, kind: Kind, chosen: list[Place]) -> Iterator[tuple[str, str]]:
    names = {place.name for place in chosen}
    for place in chosen if kind.has_replicated_jobs else ():
        for other in place.replicated_job.get("dependsOn") or ():
            if other.get("status") == "Complete":
                yield str(other.get("name")), f"gets no sidecar: {place.name} waits for its end, so it prepares; {_TAKE_IT}"
    launches = f"gets no sidecar: mpirun starts the ranks on other pods; {_TAKE_IT}"
    if kind.name == "MPIJob" and "launcher" in names and not at(document, "spec.runLauncherAsWorker"):
        yield "launcher", launches
    mpi = at(document, "spec.mlPolicy.mpi")
    if kind.group == "trainer.kubeflow.org" and mpi is not None and not mpi.get("runLauncherAsNode"):
        yield "launcher", launches
