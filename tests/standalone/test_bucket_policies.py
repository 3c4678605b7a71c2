"""Commands against buckets that refuse requests without a header: they work with the setting, and name it without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar.standalone import transfer_rate
from tests import servers
from tests.servers import Proxy, Rule
from tests.standalone.conftest import Person, checkpoint, old

POLICIES = [
    (servers.wants_acl, "CKPT_S3_ACL", "bucket-owner-full-control"),
    (servers.wants_encryption, "CKPT_SSE", "AES256"),
    (servers.requester_pays, "CKPT_S3_REQUEST_PAYER", "requester"),
]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_rate, "OBJECTS", 2)
    monkeypatch.setattr(transfer_rate, "OBJECT_BYTES", 1 << 20)


def push_and_pull(person: Person, tmp_path: Path) -> None:
    folder = old(checkpoint(tmp_path / "out", 10))
    assert person.run("push", str(folder.parent), person.url) == 0, person.err
    assert person.run("pull", person.url, str(tmp_path / "in")) == 0, person.err
    assert (tmp_path / "in/checkpoint-10/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_bucket_with_object_lock_is_used_by_all_commands(
    person_of: Callable[[str], Person], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    person = person_of("moto")
    with Proxy(person.endpoint, servers.object_lock).running() as endpoint:
        monkeypatch.setenv("AWS_S3_ENDPOINT", endpoint)
        answer = person.json("doctor", person.url)
        assert [found for found in answer["findings"] if found["severity"] == "failure"] == []
        push_and_pull(person, tmp_path)


@pytest.mark.parametrize(("rule", "name", "value"), POLICIES)
def test_a_policy_is_met_by_its_setting_and_without_it_the_setting_is_named(
    person_of: Callable[[str], Person], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rule: Rule, name: str, value: str
) -> None:
    person = person_of("moto")
    with Proxy(person.endpoint, rule).running() as endpoint:
        monkeypatch.setenv("AWS_S3_ENDPOINT", endpoint)
        assert person.run("doctor", person.url) == 2
        assert f"{name}={value}" in person.out
        assert person.run("push", str(old(checkpoint(tmp_path / "early", 5)).parent), person.url) == 2
        assert f"{name}={value}" in person.err
        if rule is servers.requester_pays:
            assert person.run("pull", person.url, str(tmp_path / "none")) == 2
            assert f"{name}={value}" in person.err
        monkeypatch.setenv(name, value)
        answer = person.json("doctor", person.url)
        assert [found for found in answer["findings"] if found["severity"] == "failure"] == []
        push_and_pull(person, tmp_path)
