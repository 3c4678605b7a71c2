"""Which pods of a workload train, where the document says so: others prepare, or only start what runs elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

from sidecar.kubernetes.inject.pod_templates import Fields, InjectWarning, Kind, Place, at
from sidecar.kubernetes.inject.warnings import warnings_of_shell

_TAKE_IT = "name it with --pods if it trains"


def without_helpers(document: Fields, kind: Kind, chosen: list[Place]) -> tuple[list[Place], list[InjectWarning]]:
    """Return the places that may train, and what is said of those that are left out.

    A helper's sidecar would take part in a run that it has nothing of. Where nothing but helpers would be left, all stay.
    """
    said = dict(_helpers(document, kind, chosen))
    trains = [place for place in chosen if place.name not in said]
    if not trains:
        return chosen, []
    warnings = []
    for place in chosen:
        if place.name in said:
            warnings += [InjectWarning(place.path, said[place.name]), *_of_launcher(place)]
    return trains, warnings


def _of_launcher(place: Place) -> Iterator[InjectWarning]:
    """Yield what the launcher's shell makes of the exit code of mpirun, which is the job's."""
    containers = (place.template.get("spec") or {}).get("containers") or () if place.name == "launcher" else ()
    for index, container in enumerate(containers):
        yield from warnings_of_shell(container, f"{place.spec_path}.containers[{index}]", gets_signals=False)


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
