"""Pictures of the documentation: drawn from committed results, readable in both schemes, without anything from the network."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks import plots, results

IMAGES = Path(__file__).parents[2] / "docs/images"


def test_the_committed_picture_shows_the_committed_results() -> None:
    conditions, outcome = results.read(plots.RESULTS)
    assert plots.PICTURE.read_text() == plots.demo(outcome), "run: make plots"
    assert {"date", "machine", "load", "versions"} <= conditions.keys()
    assert conditions["versions"]["python"]


def test_the_screenshot_is_small() -> None:
    assert (IMAGES / "page.png").stat().st_size < 200_000


@pytest.mark.parametrize("picture", sorted(IMAGES.glob("*.svg")), ids=lambda picture: picture.name)
def test_pictures_are_well_formed_have_a_dark_scheme_and_load_nothing(picture: Path) -> None:
    root = ET.fromstring(picture.read_text())
    names = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert "title" in names
    assert "prefers-color-scheme: dark" in picture.read_text()
    assert not names & {"script", "image", "foreignObject", "use"}
    assert "url(" not in picture.read_text()
