"""Options of an injection: what a pod says goes before the defaults."""

from __future__ import annotations

import pytest

from sidecar.kubernetes.inject.options import Options, from_annotations, with_given


@pytest.mark.parametrize(
    ("defaults", "annotations", "left"),
    [
        ({"store": "s3://b-default/x", "secret": "s"}, {"store": "file:///store/run", "claim": "c"}, (None, "c", False)),
        ({"store": "file:///store/x", "claim": "c"}, {"store": "s3://bucket/run", "secret": "s"}, ("s", None, False)),
        ({"cloud-identity": "true"}, {"store": "s3://bucket/run", "secret": "s"}, ("s", None, False)),
        ({"secret": "s"}, {"store": "s3://bucket/run", "cloud-identity": "true"}, (None, None, True)),
        ({"secret": "s"}, {"store": "s3://bucket/run"}, ("s", None, False)),
    ],
)
def test_a_pod_with_another_store_does_not_get_the_default_access(
    defaults: dict[str, str], annotations: dict[str, str], left: tuple[str | None, str | None, bool]
) -> None:
    own = {f"checkpoint-sidecar/{name}": text for name, text in annotations.items()}
    found = from_annotations(with_given(Options(), defaults), own)
    assert (found.secret, found.claim, found.cloud_identity) == left
