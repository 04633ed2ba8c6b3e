"""Files that are whole at every moment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_specdec.atomic import replace_file


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_others_may_read_what_a_library_writes_for_its_owner_alone(tmp_path: Path) -> None:
    plain, tensors = tmp_path / "plain", tmp_path / "model.safetensors"
    plain.touch()
    replace_file(tensors, lambda path: save_file({"a": torch.ones(2)}, path))
    assert tensors.stat().st_mode == plain.stat().st_mode


def test_a_write_inside_another_one_of_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As two processes do that begin together."""
    place = tmp_path / "record"

    def write(path: Path) -> None:
        path.write_text("first")
        with monkeypatch.context() as patched:
            patched.setattr(os, "getpid", lambda: 0)
            replace_file(place, lambda other: other.write_text("second"))
        assert place.read_text() == "second"

    replace_file(place, write)
    assert place.read_text() == "first"
    assert list(tmp_path.iterdir()) == [place]


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path: Path) -> None:
    place = tmp_path / "record"
    place.write_text("old")

    def fail(path: Path) -> None:
        path.write_text("half")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        replace_file(place, fail)
    assert place.read_text() == "old"
    assert list(tmp_path.iterdir()) == [place]
