"""The pictures in the documentation show what the package does now, and their page tells the same."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
PAGE = FIGURES.parent / "explanation" / "heads-and-trees.md"
PURL = "{http://purl.org/dc/elements/1.1/}"
CREATOR = f"creator//{PURL}title"
NAMES = ["cache", "heads", "mask", "tree"]


@pytest.fixture(scope="module")
def draw() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_figures", FIGURES / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def drawn(draw: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("figures")
    draw.draw_all(folder)
    return folder


def described(picture: Path, field: str) -> str:
    text = ElementTree.parse(picture).getroot().findtext(f".//{PURL}{field}")
    assert text is not None
    return text


@pytest.mark.parametrize("name", NAMES)
def test_committed_picture_is_what_the_script_draws(name: str, drawn: Path) -> None:
    committed, fresh = FIGURES / f"{name}.svg", drawn / f"{name}.svg"
    cure = "run: python docs/figures/draw.py"
    assert json.loads(described(committed, "description")) == json.loads(described(fresh, "description")), cure
    # Another matplotlib writes the same picture in other words.
    if described(committed, CREATOR) == described(fresh, CREATOR):
        assert committed.read_bytes() == fresh.read_bytes(), cure


def test_every_picture_is_shown_with_a_description() -> None:
    shown = dict(re.findall(r"!\[([^\]]+)\]\(\.\./figures/(\w+)\.svg\)", PAGE.read_text(encoding="utf-8")))
    assert sorted(shown.values()) == NAMES == sorted(path.stem for path in FIGURES.glob("*.svg"))
    assert min(map(len, shown)) > 100


def test_pictures_depend_on_the_package(draw: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn comes from the objects: a tree of other rates has another mask and keeps other slots."""
    before = draw.mask_facts()
    assert draw.cache_facts()["kept"] == [0, 1, 2, 3, 4, 6]
    monkeypatch.setattr(draw, "RATES", [[0.30, 0.28, 0.08], *draw.RATES[1:]])
    assert draw.mask_facts()["sees"] != before["sees"]
    # Now "the" comes fourth, and nothing is drafted behind it.
    monkeypatch.setattr(draw, "RATES", [[0.08, 0.16, 0.52], *draw.RATES[1:]])
    assert draw.cache_facts()["kept"] == [0, 1, 2, 3, 7]
