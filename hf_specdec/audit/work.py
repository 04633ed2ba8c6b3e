"""The pieces of work of an audit, each written into the journal once and never run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.audit.arms import KEYED, REJECTION, Arm
from hf_specdec.audit.controls import IDENTITY, Control
from hf_specdec.audit.differences import FAULT, compare
from hf_specdec.audit.documents import Encoded
from hf_specdec.audit.generation import generate_texts, inputs_for, sampling_arguments, stock_keyed, stock_sampled
from hf_specdec.audit.journal import Journal
from hf_specdec.audit.law import LawRecord, forced_probs, law_record
from hf_specdec.audit.metrics import is_right
from hf_specdec.audit.recording import Notes, Proposal, Recorder
from hf_specdec.audit.settings import AuditSettings

STOCK = "stock"
STOCK_BATCH = "stock, batch of 8"
BATCH_ROWS = 8
_INTACT_DOCUMENTS = 8

Progress = Callable[[str, int, int], None]


@dataclass
class Work:
    """Everything that runs a model.

    Attributes:
        model, tokenizer: the target.
        documents: encoded for it.
        arms: the strategies.
        settings: the audit's numbers.
        journal: what is done already.
        progress: told the stage, how much of it is done and how much there is.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    documents: Sequence[Encoded]
    arms: Sequence[Arm]
    settings: AuditSettings
    journal: Journal
    progress: Progress

    def identity(self) -> None:
        """Every document, temperature and arm: the same tokens as stock `generate`?"""
        cases = [(t, one) for one in self.documents for t in self.settings.temperatures]
        for done, (temperature, one) in enumerate(cases):
            self.progress("token identity", done, len(cases))
            self.reference(temperature, one)
            for arm in self.arms:
                self.identity_record(temperature, one, arm)
        for temperature in self.settings.temperatures:
            for start in range(0, len(self.documents), BATCH_ROWS):
                self._batch(temperature, self.documents[start : start + BATCH_ROWS])
        self.progress("token identity", len(cases), len(cases))

    def reference(self, temperature: float, one: Encoded) -> dict[str, Any]:
        """Stock `generate` on one document."""

        def run() -> dict[str, Any]:
            seed = self._identity_seed(temperature, one)
            inputs = inputs_for(self.model, [one.input_ids])
            (text,) = stock_keyed(self.model, inputs, self.settings.max_new_tokens, temperature, [seed])
            return {"tokens": text, "right": self._is_right(one, text)}

        return self._once(("identity", temperature, one.document.document_id, STOCK), run)

    def identity_record(self, temperature: float, one: Encoded, arm: Arm) -> dict[str, Any]:
        """One strategy on one document, compared with stock."""

        def run() -> dict[str, Any]:
            seed, notes = self._identity_seed(temperature, one), Notes()
            (text,) = self._generate(arm, [one], temperature, seed, KEYED, notes)
            return self._compared(temperature, one, text) | _counts(notes)

        return self._once(("identity", temperature, one.document.document_id, arm.name), run)

    def law(self) -> None:
        """Sampled texts of every arm, until there are enough tokens."""
        cases = [
            (temperature, verification, arm)
            for temperature in self.settings.sampled
            for verification, arm in [
                (STOCK, None),
                *((verification, arm) for verification in (KEYED, REJECTION) for arm in self.arms),
            ]
        ]
        total = len(cases) * self.settings.law_tokens
        for number, (temperature, verification, arm) in enumerate(cases):
            tokens = 0
            for record in self.law_records(temperature, verification, arm):
                tokens += record["law"]["tokens"]
                done = min(tokens, self.settings.law_tokens)
                self.progress("law of sampled tokens", number * self.settings.law_tokens + done, total)

    def law_records(
        self, temperature: float, verification: str, arm: Arm | None, num_tokens: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Batches of sampled texts, document after document and round again; `arm` None is stock sampling."""
        wanted, tokens, index = num_tokens or self.settings.law_tokens, 0, 0
        while tokens < wanted:
            record = self._law_record(temperature, verification, arm, index)
            tokens += record["law"]["tokens"]
            index += 1
            yield record

    def control_identity(self, control: Control) -> list[dict[str, Any]]:
        """Documents until one shows the fault; a few for the control without one."""
        temperature = min(self.settings.temperatures)
        records = []
        for one in self.documents[: _INTACT_DOCUMENTS if control.intact else None]:
            record = self.identity_record(temperature, one, control)
            records.append(record)
            if is_fault(record):
                break
        return records

    def control_law(self, control: Control) -> list[dict[str, Any]]:
        """Sampled texts of a control, at the highest temperature."""
        temperature = max(self.settings.sampled)
        return list(self.law_records(temperature, REJECTION, control, self.settings.control_tokens))

    def run_control(self, control: Control) -> list[dict[str, Any]]:
        """The records of its own check."""
        return self.control_identity(control) if control.check == IDENTITY else self.control_law(control)

    def _batch(self, temperature: float, group: Sequence[Encoded]) -> None:
        """The machine's own noise: the same documents in one batch of stock `generate`."""
        keys = [("identity", temperature, one.document.document_id, STOCK_BATCH) for one in group]
        if all(str(key) in self.journal for key in keys):
            return
        seeds = [self._identity_seed(temperature, one) for one in group]
        inputs = inputs_for(self.model, [one.input_ids for one in group])
        texts = stock_keyed(self.model, inputs, self.settings.max_new_tokens, temperature, seeds)
        for key, one, text in zip(keys, group, texts, strict=True):
            self.journal.add(str(key), self._compared(temperature, one, text))

    def _compared(self, temperature: float, one: Encoded, text: list[int]) -> dict[str, Any]:
        reference = self.reference(temperature, one)["tokens"]
        difference = compare(
            self.model,
            one.input_ids,
            reference,
            text,
            temperature=temperature,
            seed=self._identity_seed(temperature, one),
            tie_units=self.settings.tie_units,
        )
        return {
            "tokens": len(reference) if difference is None else difference.index + 1,
            "difference": None if difference is None else asdict(difference),
            "right": self._is_right(one, text),
        }

    def _law_record(self, temperature: float, verification: str, arm: Arm | None, index: int) -> dict[str, Any]:
        key = ("law", temperature, verification, STOCK if arm is None else arm.name, index)

        def run() -> dict[str, Any]:
            one = self.documents[index % len(self.documents)]
            seed, notes = self.settings.seed_of(*key), Notes()
            group = [one] * self.settings.rows
            if arm is None:
                inputs = inputs_for(self.model, [member.input_ids for member in group])
                texts = stock_sampled(self.model, inputs, self.settings.max_new_tokens, temperature, seed)
            else:
                texts = self._generate(arm, group, temperature, seed, verification, notes)
            law = LawRecord()
            generator = torch.Generator().manual_seed(seed)
            for row, text in enumerate(texts):
                # With keyed noise a draft may know the noise of the very token that it is asked about.
                proposals: Sequence[Proposal] | None = None
                if verification == REJECTION:
                    proposals = notes.rows[row][: len(text)]
                p = forced_probs(self.model, one.input_ids, text, temperature)
                law.merge(law_record(p, text, proposals, generator))
            return {
                "document": one.document.document_id,
                "law": law.to_dict(),
                "lengths": [len(text) for text in texts],
                "right": [self._is_right(one, text) for text in texts],
                **_counts(notes),
            }

        return self._once(key, run)

    def _generate(
        self, arm: Arm, group: Sequence[Encoded], temperature: float, seed: int, verification: str, notes: Notes
    ) -> list[list[int]]:
        speculation = arm.speculation(Recorder(arm.drafter, notes), seed, verification)
        return generate_texts(
            self.model,
            inputs_for(self.model, [one.input_ids for one in group]),
            max_new_tokens=self.settings.max_new_tokens,
            custom_generate=speculation,
            **sampling_arguments(temperature),
        )

    def _identity_seed(self, temperature: float, one: Encoded) -> int:
        """One for all arms."""
        return self.settings.seed_of("identity", temperature, one.document.document_id)

    def _is_right(self, one: Encoded, text: list[int]) -> bool | None:
        if one.document.answer is None:
            return None
        decoded: Any = self.tokenizer.decode(text, skip_special_tokens=True)
        return is_right(decoded, one.document.answer)

    def _once(self, key: tuple[object, ...], run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        name = str(key)
        record: dict[str, Any] = self.journal[name] if name in self.journal else self.journal.add(name, run())
        return record


def is_fault(record: dict[str, Any]) -> bool:
    """Whether a compared text differs by more than rounding."""
    return record["difference"] is not None and record["difference"]["kind"] == FAULT


def _counts(notes: Notes) -> dict[str, int]:
    return {"rounds": notes.rounds, "drafted": notes.drafted, "accepted": notes.accepted}
