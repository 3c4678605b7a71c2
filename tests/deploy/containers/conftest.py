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
def images(docker: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The images of ``building.IMAGES``, built from this working copy."""
    building.build(tmp_path_factory.mktemp("wheels"))
    return building.IMAGES
