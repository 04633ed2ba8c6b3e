"""Measuring speed and memory: arms that are run, rows with provenance, tables made of rows."""

from __future__ import annotations

from hf_specdec.bench.arms import (
    DEFAULT_ARMS,
    HEADED,
    ArmOutput,
    Setup,
    check_arms,
    named_strategy,
    run_arm,
    split_arms,
    takes_heads,
    with_settings,
)
from hf_specdec.bench.batch import measure_batch
from hf_specdec.bench.clock import ForwardClock
from hf_specdec.bench.difference import first_difference, score_gap
from hf_specdec.bench.memory import MemoryTask, measure_memory
from hf_specdec.bench.prompts import Prompt, encode_prompt, read_prompts, select_prompts
from hf_specdec.bench.provenance import (
    Provenance,
    collect_provenance,
    device_name,
    package_versions,
    usable_cores,
)
from hf_specdec.bench.rows import BatchRow, MemoryRow, Results, SpeedRow, read_results, write_results
from hf_specdec.bench.speed import measure_speed
from hf_specdec.bench.tables import Summary, report, summarize

__all__ = [
    "DEFAULT_ARMS",
    "HEADED",
    "ArmOutput",
    "BatchRow",
    "ForwardClock",
    "MemoryRow",
    "MemoryTask",
    "Prompt",
    "Provenance",
    "Results",
    "Setup",
    "SpeedRow",
    "Summary",
    "check_arms",
    "collect_provenance",
    "device_name",
    "encode_prompt",
    "first_difference",
    "measure_batch",
    "measure_memory",
    "measure_speed",
    "named_strategy",
    "package_versions",
    "read_prompts",
    "read_results",
    "report",
    "run_arm",
    "score_gap",
    "select_prompts",
    "split_arms",
    "summarize",
    "takes_heads",
    "usable_cores",
    "with_settings",
    "write_results",
]
