"""The package as others meet it: version, exported names, declared dependencies, commands of the README."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import hf_specdec

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCES = sorted((ROOT / "hf_specdec").rglob("*.py"))
TEXTS = [
    path
    for folder in ("hf_specdec", "tests", "docs", "evals", ".ci")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.is_file() and path.suffix in {"", ".md", ".py", ".toml", ".yaml"} and "_build" not in path.parts
] + [ROOT / name for name in ("README.md", "pyproject.toml", ".pre-commit-config.yaml", ".gitignore")]
# Written in two parts, so that this file does not hold what it forbids.
FORBIDDEN = re.compile(
    r"(?<![\w.*-])/(?:home|root|tm" + r"p|Users|mnt|opt|work)/\w|\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b"
)


def requirement_name(requirement: str) -> str:
    return re.split(r"[\[<>=!~; ]", requirement)[0].replace("-", "_")


def imported_packages() -> set[str]:
    packages = set()
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                packages |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                packages.add(node.module.split(".")[0])
    return packages - set(sys.stdlib_module_names) - {"hf_specdec"}


def test_version_is_the_installed_one() -> None:
    assert importlib.metadata.version("hf_specdec") == hf_specdec.__version__


@pytest.mark.parametrize("name", sorted(set(hf_specdec.__all__) - {"__version__"}))
def test_public_name_is_documented_and_ours(name: str) -> None:
    value = getattr(hf_specdec, name)
    assert inspect.getdoc(value)
    assert value.__module__.startswith("hf_specdec.")


def test_public_names_are_complete() -> None:
    """A name that is reachable without an underscore is public: export it, or hide it."""
    reachable = {
        name
        for name, value in vars(hf_specdec).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
    }
    assert reachable == set(hf_specdec.__all__) - {"__version__"}


def test_dependencies_are_those_imported() -> None:
    required = {requirement_name(requirement) for requirement in PYPROJECT["dependencies"]}
    optional = {
        requirement_name(requirement)
        for extra, requirements in PYPROJECT["optional-dependencies"].items()
        if extra != "dev"
        for requirement in requirements
    }
    imported = imported_packages()
    assert required <= imported
    assert imported <= required | optional


def test_import_leaves_optional_packages_alone() -> None:
    code = "import sys, hf_specdec; print({'bitsandbytes', 'gguf', 'matplotlib', 'peft', 'typer'} & set(sys.modules))"
    # A process of its own: other tests have imported these packages already.
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_continuous_integration_runs_the_readme_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^pip install -e .*$", readme, re.MULTILINE)
    assert len(commands) == 2
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    for command in commands:
        for part in command.split(" && "):
            assert re.search(rf"(?:^|&& ){re.escape(part)}", script, re.MULTILINE), part


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_text_holds_no_leftovers(path: Path) -> None:
    """Neither paths of one machine nor notes to oneself belong into a release."""
    assert not FORBIDDEN.findall(path.read_text(encoding="utf-8"))
