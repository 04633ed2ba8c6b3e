"""The process behind `measure_memory`: loads a model, generates once, writes one JSON line to stdout.

python -m hf_specdec.bench.memory_probe '{"model": "...", "arm": "stock", ...}'
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from hf_specdec.bench.arms import Setup, run_arm
from hf_specdec.bench.memory import MemoryTask
from hf_specdec.bench.rows import MemoryRow
from hf_specdec.demo_model import make_layer_draft
from hf_specdec.drafts import load_assistant
from hf_specdec.heads import MedusaHeads

_PROCESS = Path("/proc/self")


def probe(task: MemoryTask) -> MemoryRow:
    """Do `task` in this process, whose memory must not have been used for anything else."""
    device = torch.device(task.device)
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=getattr(torch, task.dtype)).to(device)  # type: ignore[arg-type]
    draft = make_layer_draft(model, task.draft_layers) if task.draft_layers and task.draft is None else None
    if task.draft is not None:
        draft = load_assistant(task.draft, model, dtype=model.dtype)
    heads = None if task.heads is None else MedusaHeads.from_pretrained(task.heads).to(device, model.dtype)
    setup = Setup(model, draft, task.draft_tokens, task.new_tokens, task.seed, heads=heads)
    generator = torch.Generator().manual_seed(task.seed)
    prompt = torch.randint(model.config.vocab_size, (1, task.context_tokens), generator=generator).to(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        loaded = torch.cuda.memory_allocated(device)
    else:
        loaded = _forget_peak()
    new_tokens = run_arm(task.arm, setup, prompt, torch.ones_like(prompt)).tokens
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _peak_resident_bytes()
    return MemoryRow(
        arm=task.arm,
        context_tokens=task.context_tokens,
        new_tokens=new_tokens.shape[1],
        kind="cuda" if device.type == "cuda" else "resident",
        loaded_bytes=loaded,
        peak_bytes=peak,
    )


def _forget_peak() -> int:
    """Bytes resident now; where the system allows it, the peak starts again from here."""
    if sys.platform != "linux":
        return _peak_resident_bytes()
    (_PROCESS / "clear_refs").write_text("5", encoding="ascii")
    return _status_bytes("VmRSS")


def _peak_resident_bytes() -> int:
    # Not getrusage on Linux: its figure is inherited from the parent across exec and never falls.
    if sys.platform == "linux":
        return _status_bytes("VmHWM")
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _status_bytes(name: str) -> int:
    for line in (_PROCESS / "status").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"{_PROCESS / 'status'} has no line {name}")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(probe(MemoryTask(**json.loads(sys.argv[1]))))) + "\n")
