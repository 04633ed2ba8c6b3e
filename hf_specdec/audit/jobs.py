"""The audit's work as jobs, which several processes share."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from hf_specdec.audit.arms import Arm
from hf_specdec.audit.controls import Control
from hf_specdec.audit.documents import Encoded
from hf_specdec.audit.journal import Journal
from hf_specdec.audit.work import Work

Progress = Callable[[str, int, int], None]

_IDENTITY, _LAW, _CONTROLS = "token identity", "law of sampled tokens", "negative controls"
_SECONDS_BETWEEN_LOOKS = 0.5


@dataclass(frozen=True)
class Job:
    """What one process does in one go. Of a job that is done already, nothing is done again.

    Attributes:
        stage: of the audit.
        name: the same in every process.
        size: in the stage's own measure.
        run: does it, and yields after each piece how much of the size is done.
    """

    stage: str
    name: str
    size: int
    run: Callable[[], Iterator[int]]


def all_jobs(work: Work, controls: Sequence[Control]) -> list[Job]:
    """The whole audit in order."""
    temperatures, wanted = work.settings.temperatures, work.settings.law_tokens
    jobs = []
    if 0 in temperatures:
        jobs += [Job(_IDENTITY, f"greedy {one.key}", 1, partial(_greedy, work, one)) for one in work.documents]
    for temperature in temperatures:
        for number, group in enumerate(work.groups()):
            name = f"batch {number} at {temperature}"
            jobs.append(Job(_IDENTITY, name, len(group), partial(_batch, work, temperature, group)))
    for temperature in work.settings.sampled:
        for verification, arm in work.samples():
            name = f"{verification} {arm and arm.key} at {temperature}"
            jobs.append(Job(_LAW, name, wanted, partial(_law, work, temperature, verification, arm)))
    jobs += [Job(_CONTROLS, one.key, 1, partial(_control, work, one)) for one in controls]
    return jobs


def run_jobs(jobs: Sequence[Job], journal: Journal, progress: Progress) -> None:
    """Do all jobs, leaving out those that other processes are at; returns when everything is done."""
    total: Counter[str] = Counter()
    done: Counter[str] = Counter()
    for job in jobs:
        total[job.stage] += job.size
    while jobs:
        others = []
        for job in jobs:
            with journal.claim(job.name) as mine:
                if not mine:
                    others.append(job)
                    continue
                for part in job.run():
                    progress(job.stage, done[job.stage] + min(part, job.size), total[job.stage])
                done[job.stage] += job.size
        if len(others) == len(jobs):
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        jobs = others


def _greedy(work: Work, one: Encoded) -> Iterator[int]:
    """One document at a time, as most people decode."""
    for arm in work.arms:
        work.identity_records(0.0, [one], arm)
    yield 1


def _batch(work: Work, temperature: float, group: Sequence[Encoded]) -> Iterator[int]:
    """Stock's own noise, and above temperature 0 the strategies."""
    work.stock_batch_records(temperature, group)
    if temperature > 0:
        for arm in work.arms:
            work.identity_records(temperature, group, arm)
    yield len(group)


def _law(work: Work, temperature: float, verification: str, arm: Arm | None) -> Iterator[int]:
    tokens = 0
    for record in work.law_records(temperature, verification, arm):
        tokens += record["law"]["tokens"]
        yield tokens


def _control(work: Work, control: Control) -> Iterator[int]:
    work.control_records(control)
    yield 1
