"""What botocore loads about services: without what S3 does not need, and otherwise the same."""

from __future__ import annotations

from typing import Any

import botocore.session
import pytest
from botocore.loaders import Loader

from sidecar.store.s3.service_data import LISTED_MEMBERS, SERVICES, ReducedLoader


@pytest.fixture(scope="module")
def whole() -> Loader:
    return Loader()


@pytest.fixture(scope="module")
def reduced() -> ReducedLoader:
    return ReducedLoader()


def _without_documentation(node: Any) -> Any:
    if isinstance(node, dict):
        return {
            name: "" if name == "documentation" and isinstance(value, str) else _without_documentation(value)
            for name, value in node.items()
        }
    return [_without_documentation(item) for item in node] if isinstance(node, list) else node


@pytest.mark.parametrize("service", SERVICES)
def test_descriptions_of_services_lack_only_the_text_of_documentation(
    service: str, whole: Loader, reduced: ReducedLoader
) -> None:
    wanted = _without_documentation(whole.load_service_model(service, "service-2"))
    if service == "s3":
        members = wanted["shapes"]["Object"]["members"]
        wanted["shapes"]["Object"]["members"] = {name: members[name] for name in members if name in LISTED_MEMBERS}
    assert reduced.load_service_model(service, "service-2") == wanted
    rules = "endpoint-rule-set-1"
    assert reduced.load_service_model(service, rules) == _without_documentation(whole.load_service_model(service, rules))


def test_partitions_keep_the_endpoints_of_these_services(whole: Loader, reduced: ReducedLoader) -> None:
    wanted = whole.load_data("endpoints")
    for partition in wanted["partitions"]:
        partition["services"] = {name: kept for name, kept in partition["services"].items() if name in SERVICES}
    assert any(partition["services"] for partition in wanted["partitions"])
    assert reduced.load_data("endpoints") == wanted
    assert reduced.load_data("partitions") == whole.load_data("partitions")


@pytest.mark.parametrize("region", ["us-east-1", "eu-central-1", "cn-north-1", "us-gov-west-1"])
@pytest.mark.parametrize("service", ["s3", "sts"])
def test_a_client_has_the_address_that_botocore_gives_it(service: str, region: str) -> None:
    addresses = set()
    for loader in (Loader(), ReducedLoader()):
        session = botocore.session.Session()
        session.register_component("data_loader", loader)
        client = session.create_client(service, region_name=region, aws_access_key_id="a", aws_secret_access_key="b")
        addresses.add(client.meta.endpoint_url)
        client.close()
    assert len(addresses) == 1
