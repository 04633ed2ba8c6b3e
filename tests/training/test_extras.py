"""The training commands without the packages of the extra `train`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hf_specdec.training.extras import require_extras
from hf_specdec.training.records import TrainingDependencyError

# In a process of its own: transformers looks only once at what is installed.
_PROGRAM = """
import sys
sys.modules[{package!r}] = None
from hf_specdec.cli.app import app
app(sys.argv[1:], prog_name="hf-specdec")
"""


@pytest.mark.parametrize("package", ["accelerate", "matplotlib"])
def test_missing_packages_are_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require_extras()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(TrainingDependencyError, match=rf"needs {package}: pip install 'hf_specdec\[train\]'"):
        require_extras()


@pytest.mark.parametrize("command", ["train-medusa --output z", "distill-draft --output z", "tune-tree --heads z"])
def test_commands_say_so_before_anything_else(command: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(package="accelerate"), *command.split(), "--model=x", "--data=y"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "Error: training needs accelerate: pip install 'hf_specdec[train]'"
