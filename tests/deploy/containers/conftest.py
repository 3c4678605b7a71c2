from __future__ import annotations

import pytest

from tests.deploy.containers import building


@pytest.fixture(scope="session")
def docker() -> None:
    """A Docker daemon with Compose."""
    if (why_not := building.why_not()) is not None:
        if building.is_required():
            pytest.fail(why_not)
        pytest.skip(why_not)


@pytest.fixture(scope="session")
def sidecar_image(docker: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The sidecar's image, without the others where no test of this run needs them."""
    if any("images" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("images")
    else:
        building.build(tmp_path_factory.mktemp("wheels"), ["sidecar"])
    return building.IMAGES["SIDECAR_IMAGE"]


@pytest.fixture(scope="session")
def images(docker: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The images of ``building.IMAGES``, built from this working copy."""
    building.build(tmp_path_factory.mktemp("wheels"))
    return building.IMAGES
