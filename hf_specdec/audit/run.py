"""One audit from models and documents to results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.audit.arms import Arm, choose_arms
from hf_specdec.audit.controls import LAW, Control, controls
from hf_specdec.audit.documents import Document, Encoded, encode_documents
from hf_specdec.audit.findings import collect
from hf_specdec.audit.fingerprints import package_fingerprint, weights_fingerprint
from hf_specdec.audit.generation import clean_generation_config
from hf_specdec.audit.jobs import Progress, all_jobs, run_jobs
from hf_specdec.audit.journal import Journal
from hf_specdec.audit.results import AuditResults
from hf_specdec.audit.settings import AuditSettings
from hf_specdec.audit.work import STOCK, STOCK_BATCH, Work
from hf_specdec.bench import Provenance, collect_provenance
from hf_specdec.compat import num_positions
from hf_specdec.drafters import Drafter
from hf_specdec.drafters.settings import eos_tokens
from hf_specdec.errors import ArgumentError
from hf_specdec.heads import MedusaHeads

JOURNAL = "journal.jsonl"


@dataclass(frozen=True)
class Names:
    """What the report calls things.

    Attributes:
        model, assistant: the models in words.
        command: what repeats the run.
    """

    model: str
    assistant: str | None = None
    command: str = ""


def run_audit(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[Document],
    folder: Path,
    *,
    strategies: Mapping[str, Drafter] | None = None,
    assistant: PreTrainedModel | None = None,
    heads: MedusaHeads | None = None,
    settings: AuditSettings | None = None,
    names: Names | None = None,
    chat: bool | None = None,
    max_prompt_tokens: int | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> AuditResults:
    """Compare strategies with stock `generate`.

    Processes that run the same audit in the same folder at the same time share its work; each returns all results.

    Args:
        model: the target, in the dtype and on the device that are to be audited. Left as it was.
        tokenizer: its tokenizer.
        documents: prompts; see `read_documents`.
        folder: holds the journal. A run that was interrupted goes on from there, and strategies, documents and
            temperatures that are added later take what is done as done.
        strategies: by name; None: every registered strategy that can run.
        assistant: the draft model of the strategies that use one.
        heads: trained heads of the registered strategies that use some; strategies that are named hold their own.
        settings: the numbers; see `AuditSettings`.
        names: for the report; by default what the models' configs say.
        chat: whether documents are wrapped in the chat template; None: if there is one.
        max_prompt_tokens: longer prompts keep their last tokens.
        progress: called with a stage, how much of it is done and how much there is.

    Raises:
        ArgumentError: documents, strategies or the folder's journal do not fit, or a document is too long.
        SpecDecError: a strategy that was named cannot run on this model.
    """
    settings = settings or AuditSettings()
    names = names or Names(model.name_or_path or type(model).__name__, assistant.name_or_path if assistant else None)
    encoded = encode_documents(documents, tokenizer, chat=chat, max_prompt_tokens=max_prompt_tokens)
    _check_lengths(model, encoded, settings)
    arms, skipped = choose_arms(model, assistant, strategies, heads)
    _check_names(arms)
    provenance = collect_provenance(
        model, name=names.model, draft=names.assistant, seed=settings.seed, command=names.command
    )
    known = _applicable(settings)
    journal = Journal(folder / JOURNAL, _identity(model, provenance, settings))
    with clean_generation_config(model):
        work = Work(model, tokenizer, encoded, arms, settings, journal)
        run_jobs(all_jobs(work, known), journal, progress)
        return collect(work, provenance, skipped, known)


def _identity(model: PreTrainedModel, provenance: Provenance, settings: AuditSettings) -> dict[str, Any]:
    """What all pieces of work depend on. Neither date nor thread count belongs to it."""
    config = model.config.to_json_string(), sorted(eos_tokens(model.generation_config))
    return {
        "model": provenance.model,
        "weights": weights_fingerprint(model, config),
        "dtype": provenance.dtype,
        "attention": provenance.attention,
        "device": provenance.device,
        "versions": provenance.versions,
        "code": package_fingerprint(),
        "seed": settings.seed,
        "max_new_tokens": settings.max_new_tokens,
        "tie_units": settings.tie_units,
    }


def _check_lengths(model: PreTrainedModel, documents: Sequence[Encoded], settings: AuditSettings) -> None:
    room = num_positions(model)
    longest = max(documents, key=lambda one: one.input_ids.shape[1])
    length = longest.input_ids.shape[1]
    if room is not None and length + settings.max_new_tokens > room:
        left = room - settings.max_new_tokens
        raise ArgumentError(
            f"document {longest.document.document_id} has {length} tokens, which with "
            f"max_new_tokens={settings.max_new_tokens} is more than the model's {room} positions: give "
            + (f"max_prompt_tokens={left} or less" if left > 0 else "fewer new tokens")
        )


def _check_names(arms: Sequence[Arm]) -> None:
    taken = {STOCK, STOCK_BATCH, *(control.name for control in controls())}
    for arm in arms:
        if arm.name in taken:
            raise ArgumentError(f"strategy name {arm.name!r} is one of the audit's own; choose another")


def _applicable(settings: AuditSettings) -> list[Control]:
    """Without sampling there is no law to get wrong."""
    return [control for control in controls() if settings.sampled or control.check != LAW]
