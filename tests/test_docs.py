"""The pages keep their word: every Python block in README and docs runs, page by page, top to bottom."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

import hf_specdec
from docs_hub import build_hub
from hf_specdec import registry

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """The line number and the code of each ```python block."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, match.start(1)), match.group(1)) for match in PYTHON_BLOCK.finditer(text)]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    build_hub(folder)
    return folder


@pytest.fixture(autouse=True)
def _keep_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strategies that a page registers vanish with it."""
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))


@pytest.fixture
def _at_hub(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in the folder of the tiny models; whoever reaches for the network is stopped."""

    def refuse(*arguments: object) -> None:
        raise AssertionError("the documentation's code must not use the network in tests")

    monkeypatch.chdir(hub)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.usefixtures("_at_hub")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_page_runs(page: Path) -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    for line, code in python_blocks(page):
        # Leading newlines make a traceback point at the line of the page.
        exec(compile("\n" * line + code, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_is_fenced_as_python(page: Path) -> None:
    """Another spelling of the fence would hide a block from the test above."""
    fences = re.findall(r"^ *(?:```|~~~)(?:\{code-block\} *)?(\S*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert not {"py", "python3", "Python", "pycon"} & set(fences)


def test_every_public_name_is_in_the_reference() -> None:
    reference = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\.\. auto\w+:: hf_specdec\.(\w+)$", reference, re.MULTILINE))
    assert documented == set(hf_specdec.__all__) - {"__version__"}


def test_every_strategy_is_in_the_table() -> None:
    table = (ROOT / "docs/reference/strategies.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `(\w+)` \| `\w+\(\)` \|", table, re.MULTILINE))
    assert rows == set(hf_specdec.drafter_names())
