"""Pictures of the documentation: drawn from committed results, readable in both schemes, without anything from the network."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks import plots, results

IMAGES = Path(__file__).parents[2] / "docs/images"
DRAWN = sorted(source for source in plots.PICTURES if (results.FOLDER / source).exists())


@pytest.mark.parametrize("source", DRAWN)
def test_committed_pictures_show_the_committed_results(source: str) -> None:
    drawn = plots.PICTURES[source](*results.read(results.FOLDER / source))
    assert drawn
    for name, text in drawn.items():
        assert (IMAGES / name).read_text() == text, "run: make plots"


@pytest.mark.parametrize("source", DRAWN)
def test_results_carry_date_machine_and_versions(source: str) -> None:
    conditions, found = results.read(results.FOLDER / source)
    assert found
    assert {"date", "machine", "load", "versions"} <= conditions.keys()
    assert conditions["versions"]["python"]


@pytest.mark.parametrize("picture", sorted(IMAGES.glob("*.svg")), ids=lambda picture: picture.name)
def test_pictures_are_well_formed_have_a_dark_scheme_and_load_nothing(picture: Path) -> None:
    root = ET.fromstring(picture.read_text())
    names = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert "title" in names
    assert "prefers-color-scheme: dark" in picture.read_text()
    assert not names & {"script", "image", "foreignObject", "use"}
    assert "url(" not in picture.read_text()
