"""Locks between processes: the other process here loads the module alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import audits
from hf_specdec.audit import locks
from hf_specdec.audit.jobs import Job, run_jobs
from hf_specdec.audit.journal import Journal
from hf_specdec.audit.locks import Locks

HOLD = """
import importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("locks", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
with module.Locks(pathlib.Path(sys.argv[2])).hold(sys.argv[3]):
    print("held", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def held(path: Path, name: str) -> Iterator[subprocess.Popen[str]]:
    """Another process has a lock meanwhile."""
    command = [sys.executable, "-c", HOLD, str(locks.__file__), str(path), name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_lock_is_free_for_one_process_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "locks"
    mine = Locks(folder)
    with held(folder, "a") as other:
        with mine.attempt("a") as got:
            assert not got
        with mine.attempt("b") as got:
            assert got
        other.kill()
        other.wait()
        with mine.attempt("a") as got:  # who dies lets go
            assert got


def test_a_lock_is_given_back(tmp_path: Path) -> None:
    folder = tmp_path / "locks"
    mine = Locks(folder)
    with pytest.raises(KeyError), mine.hold("a"):
        raise KeyError
    with mine.attempt("b"):
        pass
    for name in ("a", "b"):
        with held(folder, name):
            pass


def test_jobs_of_others_are_left_to_them(tmp_path: Path) -> None:
    """Another process is at one of three jobs; it dies meanwhile, and the job is done after the others."""
    path = tmp_path / "journal.jsonl"
    order: list[str] = []
    seen: list[tuple[str, int, int]] = []
    journal = Journal(path, {})
    with held(path.with_suffix(".locks"), "job one") as other:

        def job(name: str) -> Job:
            def run() -> Iterator[int]:
                order.append(name)
                if name == "three":
                    other.kill()
                    other.wait()
                journal.add(name, name)
                yield 2

            return Job("stage", name, 2, run)

        run_jobs([job("one"), job("two"), job("three")], journal, lambda *now: seen.append(now))
    assert order == ["two", "three", "one"]
    assert seen == [("stage", 2, 6), ("stage", 4, 6), ("stage", 6, 6)]


@pytest.mark.slow
def test_two_processes_share_an_audit(tmp_path: Path) -> None:
    """Both end with all results, and no strategy decodes anything twice."""
    code = (
        "import json, sys, pathlib, audits; from hf_specdec import NoDraft, PromptLookup\n"
        "from hf_specdec.audit.journal import Journal\n"
        "add, keys = Journal.add, []\n"
        "Journal.add = lambda self, key, value: keys.append(key) or add(self, key, value)\n"
        "strategies = {'none': NoDraft(), 'lookup': PromptLookup(max_ngram=2)}\n"
        "changes = {'law_tokens': 300, 'control_tokens': 300, 'max_new_tokens': 8}\n"
        "results = audits.audit(pathlib.Path(sys.argv[1]), audits.make(), strategies, changes=changes)\n"
        "print(json.dumps([[check.detail for check in results.checks], keys]))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    folder = Path(audits.__file__).parent
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) for _ in range(2)]
    first, second = (process.communicate()[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    (first_details, first_keys), (second_details, second_keys) = json.loads(first), json.loads(second)
    assert first_details == second_details
    decoded = [key for key in first_keys + second_keys if "'stock'" not in key and "('difference'" not in key]
    assert len(set(decoded)) == len(decoded)
