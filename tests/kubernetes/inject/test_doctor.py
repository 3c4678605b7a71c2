from __future__ import annotations

import copy

import pytest

from sidecar.kubernetes.inject import inject
from tests.deploy.building import asked, job, named, pod_of, sidecar_of, values
from tests.deploy.schemas import VERSIONS, complaints

ALONE = {"initContainers": [{"name": "fetch", "image": "i"}]}


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        ("native", ["checkpoint-doctor", "checkpoint-sidecar", "fetch"]),
        ("classic", ["checkpoint-hook", "checkpoint-doctor", "fetch"]),
    ],
)
def test_it_ends_before_the_sidecar_begins(mode: str, names: list[str]) -> None:
    pod = pod_of(inject(job(**copy.deepcopy(ALONE)), asked(doctor="true", install_hook="true", mode=mode)))
    assert [container["name"] for container in pod["initContainers"]] == names
    assert "restartPolicy" not in named(pod["initContainers"], "checkpoint-doctor")


def test_it_stands_before_the_trainer_where_the_sidecar_is_beside_it() -> None:
    pod = pod_of(inject(job(), asked(doctor="true", mode="classic")))
    assert [container["name"] for container in pod["initContainers"]] == ["checkpoint-doctor"]
    assert [container["name"] for container in pod["containers"]] == ["main", "checkpoint-sidecar"]


def test_it_sees_what_the_sidecar_will_see() -> None:
    done = inject(job(), asked(doctor="true", secret="data-connection", image="x:1", metrics_port="9471"))
    pod = pod_of(done)
    doctor, sidecar = named(pod["initContainers"], "checkpoint-doctor"), sidecar_of(pod)
    assert doctor["command"] == ["checkpoint-sidecar", "doctor"]
    assert {name: value for name, value in values(sidecar).items() if name != "CKPT_METRICS_BIND"} == values(doctor)
    for key in ("image", "volumeMounts", "securityContext"):
        assert doctor[key] == sidecar[key]
    assert [complaints(done.document, version) for version in VERSIONS] == [[] for _ in VERSIONS]


def test_a_later_injection_keeps_it_and_gives_it_what_the_sidecar_gets() -> None:
    once = inject(job(), asked(doctor="true", secret="data-connection"))
    assert inject(once.document, asked(doctor="true", secret="data-connection")).document == once.document
    again = pod_of(inject(once.document, asked(store="s3://bucket/other", install_hook="true")))
    doctor, sidecar = again["initContainers"]
    assert (doctor["name"], sidecar["name"]) == ("checkpoint-doctor", "checkpoint-sidecar")
    assert values(doctor) == values(sidecar)
    assert values(doctor)["CKPT_STORE"] == "s3://bucket/other"


def test_it_can_be_added_later_and_moves_with_the_sidecars_mode() -> None:
    later = inject(inject(job(), asked(install_hook="true")).document, asked(doctor="true"))
    names = ["checkpoint-doctor", "checkpoint-sidecar"]
    assert [container["name"] for container in pod_of(later)["initContainers"]] == names
    classic = inject(later.document, asked(mode="classic"))
    assert [container["name"] for container in pod_of(classic)["initContainers"]] == ["checkpoint-hook", "checkpoint-doctor"]
    native = inject(classic.document, asked(mode="native"))
    assert [container["name"] for container in pod_of(native)["initContainers"]] == names


def test_it_gets_the_identity_that_the_other_containers_are_denied() -> None:
    given = {"doctor": "true", "cloud_identity": "true", "install_hook": "true"}
    once = inject(job(), asked(**given))
    for done in (once, inject(once.document, asked(**given))):
        annotations = done.document["spec"]["template"]["metadata"]["annotations"]
        assert annotations["eks.amazonaws.com/skip-containers"].split(",") == ["main"]
