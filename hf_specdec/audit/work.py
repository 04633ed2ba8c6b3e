"""The pieces of work of an audit, each written into the journal once and never run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.audit.arms import KEYED, REJECTION, Arm
from hf_specdec.audit.controls import IDENTITY, Control
from hf_specdec.audit.differences import FAULT, classify
from hf_specdec.audit.documents import Encoded, mixed
from hf_specdec.audit.generation import (
    Inputs,
    generate_texts,
    inputs_for,
    read_prompt,
    sampling_arguments,
    stock_keyed,
    stock_sampled,
)
from hf_specdec.audit.journal import Journal
from hf_specdec.audit.law import LawRecord, forced_logits, law_record
from hf_specdec.audit.metrics import is_right
from hf_specdec.audit.recording import Notes, Recorder
from hf_specdec.audit.settings import AuditSettings
from hf_specdec.bench.difference import first_difference
from hf_specdec.sampling import Seed

STOCK = "stock"
BATCH_ROWS = 8
STOCK_BATCH = f"stock, batch of {BATCH_ROWS}"
_INTACT_DOCUMENTS = 8


@dataclass
class Work:
    """Everything that runs a model.

    A piece's key names all that it depends on besides what the journal's first line says, so that pieces stay good
    when strategies, documents or temperatures are added.

    Attributes:
        model, tokenizer: the target.
        documents: encoded for it.
        arms: the strategies.
        settings: the audit's numbers.
        journal: what is done already.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    documents: Sequence[Encoded]
    arms: Sequence[Arm]
    settings: AuditSettings
    journal: Journal

    def groups(self) -> list[list[Encoded]]:
        """Batches of documents of like lengths."""
        ordered = sorted(self.documents, key=lambda one: one.input_ids.shape[1])
        return [ordered[start : start + BATCH_ROWS] for start in range(0, len(ordered), BATCH_ROWS)]

    def samples(self) -> list[tuple[str, Arm | None]]:
        """What law tests sample at each temperature: verification and arm; None is stock sampling."""
        return [(STOCK, None), *((verification, arm) for verification in (KEYED, REJECTION) for arm in self.arms)]

    def reference(self, temperature: float, one: Encoded) -> dict[str, Any]:
        """Stock `generate` on one document."""

        def run() -> dict[str, Any]:
            seed = self._identity_seed(temperature, one)
            inputs = inputs_for(self.model, [one.input_ids])
            (text,) = stock_keyed(self.model, inputs, self.settings.max_new_tokens, temperature, [seed])
            return {"tokens": text, "right": self._is_right(one, text)}

        return self._once(_identity_key(temperature, one, STOCK), run)

    def stock_batch_records(self, temperature: float, group: Sequence[Encoded]) -> list[dict[str, Any]]:
        """The machine's own noise: documents in one batch of stock `generate`, each compared with stock alone."""

        def run() -> list[dict[str, Any]]:
            seeds = [self._identity_seed(temperature, one) for one in group]
            inputs = inputs_for(self.model, [one.input_ids for one in group])
            texts = stock_keyed(self.model, inputs, self.settings.max_new_tokens, temperature, seeds)
            return [self._compared(temperature, one, text) for one, text in zip(group, texts, strict=True)]

        return self._all_at_once([_identity_key(temperature, one, STOCK_BATCH) for one in group], run)

    def identity_records(self, temperature: float, group: Sequence[Encoded], arm: Arm) -> list[dict[str, Any]]:
        """One strategy on some documents in one batch, each compared with stock alone."""

        def run() -> list[dict[str, Any]]:
            seeds, notes = [self._identity_seed(temperature, one) for one in group], Notes()
            inputs = inputs_for(self.model, [one.input_ids for one in group])
            texts = self._generate(arm, inputs, temperature, seeds, KEYED, notes)
            return [
                self._compared(temperature, one, text) | counts
                for one, text, counts in zip(group, texts, notes.counts, strict=True)
            ]

        return self._all_at_once([_identity_key(temperature, one, arm.key) for one in group], run)

    def law_records(
        self, temperature: float, verification: str, arm: Arm | None, num_tokens: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Batches of sampled texts, document after document and round again; `arm` None is stock sampling."""
        wanted, tokens, index = num_tokens or self.settings.law_tokens, 0, 0
        documents = mixed(self.documents)
        while tokens < wanted:
            record = self._law_record(temperature, verification, arm, documents[index % len(documents)], index)
            tokens += record["law"]["tokens"]
            index += 1
            yield record

    def control_records(self, control: Control) -> list[dict[str, Any]]:
        """Of its own check."""
        return self._control_identity(control) if control.check == IDENTITY else self._control_law(control)

    def _control_identity(self, control: Control) -> list[dict[str, Any]]:
        """Documents until one shows the fault; a few for the control without one."""
        temperature = min(self.settings.temperatures)
        records = []
        for one in self.documents[: _INTACT_DOCUMENTS if control.intact else None]:
            records += self.identity_records(temperature, [one], control)
            if is_fault(records[-1]):
                break
        return records

    def _control_law(self, control: Control) -> list[dict[str, Any]]:
        """Sampled texts of a control, at the highest temperature."""
        temperature = max(self.settings.sampled)
        return list(self.law_records(temperature, REJECTION, control, self.settings.control_tokens))

    def _compared(self, temperature: float, one: Encoded, text: list[int]) -> dict[str, Any]:
        reference = self.reference(temperature, one)["tokens"]
        index = first_difference(reference, text)
        return {
            "tokens": len(reference) if index is None else index + 1,
            "difference": None if index is None else self._difference(temperature, one, text, index),
            "right": self._is_right(one, text),
        }

    def _difference(self, temperature: float, one: Encoded, text: list[int], index: int) -> dict[str, Any]:
        """A piece of its own: strategies often part from stock in one place, to say the same."""

        def run() -> dict[str, Any]:
            difference = classify(
                self.model,
                one.input_ids,
                self.reference(temperature, one)["tokens"],
                text,
                index,
                temperature=temperature,
                seed=self._identity_seed(temperature, one),
                tie_units=self.settings.tie_units,
            )
            return asdict(difference)

        return self._once(str(("difference", temperature, one.key, index, *text[index : index + 1])), run)

    def _law_record(
        self, temperature: float, verification: str, arm: Arm | None, one: Encoded, index: int
    ) -> dict[str, Any]:
        rows = self.settings.rows

        def run() -> dict[str, Any]:
            seed = self.settings.seed_of("law", temperature, verification, STOCK if arm is None else arm.name, index)
            notes = Notes()
            inputs = inputs_for(self.model, [one.input_ids] * rows)
            inputs["cache"] = read_prompt(self.model, one.input_ids, rows)
            if arm is None:
                texts = stock_sampled(self.model, inputs, self.settings.max_new_tokens, temperature, seed)
            else:
                texts = self._generate(arm, inputs, temperature, seed, verification, notes)
            law = LawRecord()
            # Not the seed of the texts: the PIT must not see their very random bits again.
            generator = torch.Generator().manual_seed(self.settings.seed_of("PIT", seed))
            for row, logits in enumerate(forced_logits(self.model, one.input_ids, texts)):
                # With keyed noise a draft may know the noise of the very token that it is asked about.
                proposals = notes.proposals[row][: len(texts[row])] if verification == REJECTION else None
                law.merge(law_record(logits, temperature, texts[row], proposals, generator))
            return {
                "document": one.document.document_id,
                "law": law.to_dict(),
                "lengths": [len(text) for text in texts],
                "right": [self._is_right(one, text) for text in texts],
            }

        name = STOCK if arm is None else arm.key
        return self._once(str(("law", temperature, verification, name, rows, one.key, index)), run)

    def _generate(
        self, arm: Arm, inputs: Inputs, temperature: float, seed: Seed, verification: str, notes: Notes
    ) -> list[list[int]]:
        return generate_texts(
            self.model,
            inputs,
            max_new_tokens=self.settings.max_new_tokens,
            custom_generate=arm.speculation(Recorder(arm.drafter, notes), seed, verification),
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

    def _once(self, key: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        return self._all_at_once([key], lambda: [run()])[0]

    def _all_at_once(self, keys: Sequence[str], run: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """The records under some keys; if one is missing, those that `run` makes."""
        if not all(key in self.journal for key in keys):
            for key, record in zip(keys, run(), strict=True):
                self.journal.add(key, record)
        return [self.journal[key] for key in keys]


def _identity_key(temperature: float, one: Encoded, arm: str) -> str:
    return str(("identity", temperature, one.key, arm))


def is_fault(record: dict[str, Any]) -> bool:
    """Whether a compared text differs by more than rounding."""
    return record["difference"] is not None and record["difference"]["kind"] == FAULT
