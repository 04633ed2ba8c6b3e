"""One call of `generate`: its inputs read, checked and wired, before the loop starts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from hf_specdec.cache import CacheLoan
from hf_specdec.compat import dropped_mask_length, is_users_cache, pad_token
from hf_specdec.config import LOSSY, Verification
from hf_specdec.drafters.base import DraftContext, Drafter, RoundOutputs
from hf_specdec.emit import Emitter, StopRules
from hf_specdec.errors import ArgumentError, DrafterError
from hf_specdec.outputs import Recorder, SpeculativeOutput
from hf_specdec.processors import RowProcessors, score_processors
from hf_specdec.rope import check_rope
from hf_specdec.runner import ForwardOutput, ModelRunner
from hf_specdec.sampling import Sampling, Seed, noise_device, row_seeds
from hf_specdec.split import SplitRunner
from hf_specdec.stats import SpeculationStats
from hf_specdec.tree import DraftTree, chain_parents
from hf_specdec.verify import GreedyMatch, Rejection, SampleAndMatch, Scorer, Typical, Verifier


@dataclass(frozen=True)
class Prompt:
    """The text that the call starts from, in columns; the cache may hold the first of them already.

    Attributes:
        input_ids: int64 `[B, P]`.
        mask: int64 `[B, columns]` of 0 and 1 over cached and new columns, or None if nothing is padded.
        num_columns: columns in all; more than P if the caller left out what is cached.
        num_cached: columns that the cache holds.
        position_ids: int64 `[B, >= P - fed]`, the last ones for the last columns.
    """

    input_ids: Tensor
    mask: Tensor | None
    num_columns: int
    num_cached: int
    position_ids: Tensor

    @classmethod
    def read(
        cls, input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any], num_cached: int
    ) -> Prompt:
        """Take it from what `generate` prepared.

        Raises:
            ArgumentError: the cache does not fit the text.
        """
        mask = model_kwargs.get("attention_mask")
        num_columns = mask.shape[1] if mask is not None else dropped_mask_length(config) or input_ids.shape[1]
        positions = model_kwargs["position_ids"].expand(input_ids.shape[0], -1)
        prompt = cls(input_ids, mask, num_columns, num_cached, positions)
        if not 0 <= prompt.first_fed < input_ids.shape[1]:
            raise ArgumentError(
                f"cache holds {num_cached} tokens but input_ids with attention_mask describe a text of {num_columns}; "
                "pass the whole text including what is cached, at least one token longer than the cache "
                "(cache.crop(-1) drops one)"
            )
        empty = (~prompt.own_mask.any(dim=1)).nonzero().flatten().tolist()
        if empty:
            raise ArgumentError(f"attention_mask hides every token of row {empty[0]}; each row needs at least one")
        return prompt

    @property
    def first_fed(self) -> int:
        """Index in `input_ids` of the first token that is not cached."""
        return self.num_cached - (self.num_columns - self.input_ids.shape[1])

    @property
    def visible(self) -> Tensor | None:
        """bool `[B, columns]`, False for padding; None if there is none."""
        return None if self.mask is None else self.mask.bool()

    @property
    def own_mask(self) -> Tensor:
        """bool `[B, P]`, False where `input_ids` is padding."""
        if self.mask is None:
            return torch.ones_like(self.input_ids, dtype=torch.bool)
        return self.mask[:, -self.input_ids.shape[1] :].bool()

    def texts(self) -> list[list[int]]:
        """The tokens of each row without padding."""
        return [row[keep].tolist() for row, keep in zip(self.input_ids, self.own_mask, strict=True)]


@dataclass
class Call:
    """All nouns of one call. `Speculation` builds it and runs the loop over it."""

    prompt: Prompt
    loan: CacheLoan
    runner: ModelRunner
    emitter: Emitter
    verifier: Verifier
    drafter: Drafter
    context: DraftContext
    recorder: Recorder
    stats: SpeculationStats
    config: GenerationConfig
    cache_is_seen: bool
    keeps_last_logits: bool
    _drafting_rows: list[int] = field(default_factory=list)

    def prefill(self) -> tuple[DraftTree, ForwardOutput]:
        """Run the prompt. Its last token is the root of a first tree without guesses, so no forward is spent on it."""
        start, end = self.prompt.first_fed, self.prompt.input_ids.shape[1]
        chunk = self.config.prefill_chunk_size or end - start
        for first in range(start, end, chunk):
            output = self._prefill_chunk(first, min(first + chunk, end))
            self.recorder.add_prompt(output)
        self._drafting_rows = list(range(self.emitter.batch_size))
        return DraftTree.roots(self.context.pending_tokens), output.last_column()

    def _prefill_chunk(self, first: int, last: int) -> ForwardOutput:
        prompt = self.prompt
        width = prompt.input_ids.shape[1]
        skipped = prompt.position_ids.shape[1] - width
        inputs: dict[str, Any] = {"position_ids": prompt.position_ids[:, skipped + first : skipped + last]}
        if prompt.mask is not None:
            inputs["attention_mask"] = prompt.mask[:, : last + prompt.num_columns - width]
        if self.keeps_last_logits:
            inputs["logits_to_keep"] = 1
        if self._wanted_states:
            inputs["output_hidden_states"] = self._wanted_states
        return self.runner.prefill(prompt.input_ids[:, first:last], num_open=int(last == width), **inputs)

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Count the time spent inside as drafting."""
        start = time.perf_counter()
        yield
        self.stats.seconds_draft += time.perf_counter() - start

    def propose(self, drafter: Drafter) -> DraftTree:
        """The round's tree: the drafter's, checked, clipped to what the rows may still emit."""
        self._drafting_rows = [row for row in range(self.emitter.batch_size) if self.emitter.is_open(row)]
        tree = drafter.propose(self.context)
        if not isinstance(tree, DraftTree):
            raise DrafterError(f"{type(drafter).__name__}.propose must return a DraftTree, not {type(tree).__name__}")
        tree.check(self.context.pending_tokens, self.context.vocab_size)
        if drafter.chains_only and not tree.is_chain:
            raise DrafterError(f"{type(drafter).__name__} promises chains_only but proposed a node with two children")
        tree = tree.clip(self.context.budgets)
        if self.emitter.lockstep:
            depth = max(max(depths) for depths in tree.row_depths)
            for row in range(tree.batch_size):
                if self.emitter.is_finished(row):
                    padding = [self.context.texts[row][-1]] + [self.emitter.pad_token] * depth
                    tree = tree.replace_row(row, padding, chain_parents(depth + 1))
        return tree

    def forward(self, tree: DraftTree) -> ForwardOutput:
        """Run all nodes of all rows at once."""
        output = self.runner.forward(tree.padded_tokens(), tree.padded_depths(), tree.ancestors(), self._wanted_states)
        self.recorder.start_round(output)
        return output

    @property
    def _wanted_states(self) -> bool | int:
        """Whether forwards return hidden states: of all layers, or (-1) what the output matrix reads anyhow."""
        if self.recorder.hidden_states is not None:
            return True
        wanted = self.drafter.needs_hidden_states
        return -1 if wanted == "last" else wanted

    def keep(self, accepted: list[list[int]]) -> None:
        """Compact the cache to the accepted text and bring the context up to date."""
        self.runner.commit(accepted)
        self.runner.truncate([self._num_columns(row) - 1 for row in range(self.emitter.batch_size)])
        self._update_context()

    def _num_columns(self, row: int) -> int:
        return self.prompt.num_columns + len(self.emitter.generated[row])

    def _update_context(self) -> None:
        for row, (text, generated) in enumerate(zip(self.context.texts, self.emitter.generated, strict=True)):
            known = self.context.num_generated[row]
            # In step, rows that wait feed their padding to the model; at the end nothing of it is left.
            length = self.emitter.num_own(row) if self.emitter.done else len(generated)
            if length >= known:
                text.extend(generated[known:length])
            else:
                del text[length - known :]
            self.context.num_generated[row] = length
            self.context.budgets[row] = self.emitter.draft_budget(row)

    def observe(self, drafter: Drafter, tree: DraftTree, accepted: list[list[int]], output: ForwardOutput) -> None:
        """Let the drafter learn, and count."""
        rows = self._drafting_rows
        own_paths = [self._without_padding(row, path) if row in rows else [] for row, path in enumerate(accepted)]
        self.stats.count_round(
            [tree.num_drafted[row] for row in rows], [max(len(own_paths[row]) - 1, 0) for row in rows]
        )
        with self.drafting():
            drafter.observe(tree, own_paths, RoundOutputs(output.logits, output.hidden_states))

    def _without_padding(self, row: int, path: list[int]) -> list[int]:
        """The part of a path that came before the row's end."""
        num_padding = len(self.emitter.generated[row]) - self.emitter.num_own(row)
        return path[: len(path) - num_padding]

    def settle_cache(self) -> None:
        """Make all rows of the cache one column shorter than the released text, and return it to its owner."""
        if not self.cache_is_seen:
            return
        target = self.prompt.num_columns + self.emitter.num_released - 1
        missing = [list(range(length, target)) for length in self.runner.view.lengths]
        if any(missing):
            self._feed_padding(missing)
        self.loan.give_back()

    def abandon_cache(self) -> None:
        """After an exception: the rows' common part of the text so far goes back to the owner."""
        self.runner.view.drop_tail()
        self.runner.view.set_lengths([min(self.runner.view.lengths)] * self.emitter.batch_size)
        self.loan.give_back()

    def _feed_padding(self, missing: list[list[int]]) -> None:
        """Rows that ended early: plain generation ran their padding through the model, so the cache holds it."""
        offset = self.prompt.num_columns - self.prompt.input_ids.shape[1]
        text = self.emitter.sequences.tolist()
        tokens = [[text[row][column - offset] for column in columns] for row, columns in enumerate(missing)]
        fed = [row or [0] for row in tokens]
        chains = DraftTree(fed, [chain_parents(len(row)) for row in fed])
        self.runner.forward(chains.padded_tokens(), chains.padded_depths(), chains.ancestors())
        self.runner.commit([range(len(row)) for row in tokens])

    def finish_stats(self, seconds: float) -> None:
        """Complete the statistics of a call that took so long."""
        self.stats.emitted = sum(map(self.emitter.num_own, range(self.emitter.batch_size)))
        self.stats.seconds_verify = self.runner.seconds
        self.stats.seconds_rest = max(seconds - self.stats.seconds_draft - self.stats.seconds_verify, 0.0)

    def result(self) -> SpeculativeOutput | Tensor:
        """What `generate` returns."""
        if not self.config.return_dict_in_generate:
            return self.emitter.sequences
        return SpeculativeOutput(
            sequences=self.emitter.sequences,  # type: ignore[arg-type]  # annotated LongTensor
            scores=self.recorder.scores,  # type: ignore[arg-type]  # these three are annotated as 1-tuples
            logits=self.recorder.logits,  # type: ignore[arg-type]
            hidden_states=self.recorder.hidden_states,  # type: ignore[arg-type]
            cache=self.loan.lender,
            speculation=self.stats,
        )


@dataclass(frozen=True)
class Request:
    """One call of `generate`, checked: what transformers prepared, and what the caller asked of this package.

    Attributes:
        model: the target.
        input_ids: int64 `[B, P]`.
        processors, criteria, config, model_kwargs: as `generate` hands them to a decoding method.
        drafter: the strategy's settings.
        draft_model: `assistant_model`, if the strategy uses one.
        streamer, seed, verification: see `Speculation`.
        explicit: names of the generation settings that the caller gave in this very call.
    """

    model: PreTrainedModel
    input_ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    model_kwargs: dict[str, Any]
    drafter: Drafter
    draft_model: PreTrainedModel | None
    streamer: BaseStreamer | None
    seed: Seed | None
    verification: Verification
    explicit: frozenset[str]

    @property
    def batch_size(self) -> int:
        """Number of rows B."""
        return self.input_ids.shape[0]


def build_call(request: Request) -> Call:
    """Wire a call; no forward runs here.

    Raises:
        ArgumentError, UnsupportedError: the cache, the seed or the strategy does not fit.
    """
    input_ids, config, batch_size = request.input_ids, request.config, request.batch_size
    num_shared_layers = request.drafter.num_shared_layers(request.model)
    cache: Cache = request.model_kwargs["cache"]
    num_cached = int(cache.get_seq_length()) if cache.layers else 0
    prompt = Prompt.read(input_ids, config, request.model_kwargs, num_cached)
    recorder = Recorder(config)
    processors = RowProcessors(request.processors, batch_size)
    lockstep = processors.lockstep or (recorder.active and batch_size > 1)
    emitter = Emitter(input_ids, StopRules(request.criteria), pad_token(config), request.streamer, lockstep)
    is_users = is_users_cache(cache)
    final_length = prompt.num_columns + emitter.max_new_tokens - 1
    loan = CacheLoan(cache, final_length, keep_lender=is_users, batch_size=batch_size)
    sampling = _sampling(request)
    pending = prompt.position_ids[:, -1]
    check_rope(request.model, int(pending.min()), int(pending.max()) + emitter.max_new_tokens - 1)
    next_positions = pending - (input_ids.shape[1] - 1 - prompt.first_fed)
    scorer = Scorer(processors, emitter, partial(recorder.observe, emitter) if recorder.active else None)
    context = _context(request, prompt, emitter, sampling)
    runner = ModelRunner(request.model, loan.cache, batch_size, prompt.visible, next_positions)
    if num_shared_layers:
        runner = split = SplitRunner(
            request.model, num_shared_layers, loan.cache, batch_size, prompt.visible, next_positions
        )
        context.lower_layers = split.draft
    return Call(
        prompt=prompt,
        loan=loan,
        runner=runner,
        emitter=emitter,
        verifier=_rule(request, sampling, batched=not processors and not recorder.active)(scorer, emitter, sampling),
        drafter=request.drafter,
        context=context,
        recorder=recorder,
        stats=_stats(request, sampling),
        config=config,
        cache_is_seen=bool(config.return_dict_in_generate) or is_users,
        keeps_last_logits="logits_to_keep" in request.model_kwargs,
    )


def _context(request: Request, prompt: Prompt, emitter: Emitter, sampling: Sampling) -> DraftContext:
    rows = range(request.batch_size)
    return DraftContext(
        texts=prompt.texts(),
        num_generated=[0 for _ in rows],
        budgets=[emitter.draft_budget(row) for row in rows],
        vocab_size=request.model.config.get_text_config(decoder=True).vocab_size,
        sampling=sampling,
        score_processors=score_processors(request.processors),
        config=request.config,
        prompt=request.input_ids,
        prompt_mask=prompt.own_mask,
        target=request.model,
        draft_model=request.draft_model,
        explicit=request.explicit,
    )


def _sampling(request: Request) -> Sampling:
    if not request.config.do_sample:
        return Sampling(None)
    # By default from the global generator, so that set_seed governs it.
    seed = request.seed if request.seed is not None else int(torch.randint(2**63 - 1, ()))
    seeds = row_seeds(seed, request.batch_size)
    if request.verification != "rejection":
        return Sampling(seeds)
    if not isinstance(seed, Integral):
        raise ArgumentError(
            "verification='rejection' draws fresh randomness for the whole batch; pass one int as seed"
        )
    device = noise_device(request.input_ids.device)
    return Sampling(seeds, torch.Generator(device).manual_seed(int(seed) % 2**63))


def _rule(request: Request, sampling: Sampling, batched: bool) -> type[Verifier]:
    if sampling.greedy:
        return GreedyMatch if batched else SampleAndMatch
    rules: dict[Verification, type[Verifier]] = {"keyed": SampleAndMatch, "rejection": Rejection, LOSSY: Typical}
    return rules[request.verification]


def _stats(request: Request, sampling: Sampling) -> SpeculationStats:
    verification = "greedy" if sampling.greedy else request.verification
    return SpeculationStats(request.drafter.name, verification, lossless=verification != LOSSY)
