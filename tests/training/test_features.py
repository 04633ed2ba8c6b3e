from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, PreTrainedModel

import zoo
from hf_specdec.errors import ArgumentError
from hf_specdec.training import feature_cache, features
from hf_specdec.training.features import TargetFeatures
from hf_specdec.training.fingerprints import examples_fingerprint, model_fingerprint
from hf_specdec.training.texts import Example

TOP_K = 4


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    """Thirty texts of 5 to 40 tokens, some without a prompt."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 41, (30,), generator=generator).tolist()
    return [
        Example(torch.randint(zoo.VOCAB_SIZE, (length,), generator=generator).tolist(), index % 4)
        for index, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def half() -> PreTrainedModel:
    """A target in bfloat16."""
    return zoo.make("llama").to(torch.bfloat16)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache files of a few texts each."""
    monkeypatch.setattr(features, "PART_BYTES", 10_000)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts the target read, forward by forward."""
    counted: list[int] = []
    run = features.target_outputs

    def counting(target: PreTrainedModel, texts: Any, *wanted: Any) -> dict[str, Tensor]:
        if texts.input_ids.shape[1] > 2:  # not the probe
            counted.append(len(texts.input_ids))
        return run(target, texts, *wanted)

    monkeypatch.setattr(features, "target_outputs", counting)
    return counted


def batch_of(found: TargetFeatures, indices: list[int], num_targets: int = 1) -> dict[str, Tensor]:
    return found.collator(num_targets)([found[index] for index in indices])


def assert_same(batch: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert batch.keys() == other.keys()
    for name, value in batch.items():
        assert value.dtype == other[name].dtype, name
        torch.testing.assert_close(value, other[name], msg=name)


class TestBatches:
    @pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "opt", "cohere", "qwen2-mixed", "gpt-j"])
    def test_values_are_those_of_each_text_alone(self, family: str, examples: list[Example]) -> None:
        target = zoo.make(family)
        batch = batch_of(TargetFeatures(target, examples, top_k=TOP_K), [1, 4, 0, 7])
        first = 0
        for index in (1, 4, 0, 7):
            one = examples[index]
            with torch.no_grad():
                alone = target(torch.tensor([one.input_ids]), output_hidden_states=True)
            read = slice(max(one.num_prompt, 1) - 1, len(one.input_ids) - 1)
            found = {name: batch[name][first : first + one.num_learned] for name in NAMES}
            first += one.num_learned
            logits = alone.logits[0, read]
            torch.testing.assert_close(found["hidden_states"], alone.hidden_states[-1][0, read], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(found["top_logits"], logits.topk(TOP_K).values, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(found["log_normaliser"], logits.logsumexp(-1), atol=1e-4, rtol=1e-4)
            assert found["top_ids"].dtype == torch.int32
            told = logits.gather(1, found["top_ids"].long())
            torch.testing.assert_close(found["top_logits"], told, atol=1e-4, rtol=1e-4)
        assert first == len(batch["positions"])

    def test_positions_and_targets(self, target: PreTrainedModel) -> None:
        found = TargetFeatures(target, [Example([5, 6, 7, 8], 2), Example([9, 10, 11], 0), Example([1, 2], 1)])
        batch = batch_of(found, [0, 1, 2], num_targets=3)
        assert batch["input_ids"].tolist() == [[5, 6, 7, 8], [9, 10, 11, 0], [1, 2, 0, 0]]
        assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]]
        assert batch["positions"].tolist() == [1, 2, 4, 5, 8]
        assert batch["targets"].tolist() == [
            [7, 8, -100],
            [8, -100, -100],
            [10, 11, -100],
            [11, -100, -100],
            [2, -100, -100],
        ]
        assert batch["hidden_states"].shape == (5, 32)
        assert not batch["hidden_states"].requires_grad
        assert "top_ids" not in batch
        flat = batch["input_ids"].flatten()
        assert torch.equal(flat[batch["positions"] + 1], batch["targets"][:, 0])

    def test_lengths_and_positions_are_known(self, target: PreTrainedModel, examples: list[Example]) -> None:
        found = TargetFeatures(target, examples)
        assert found.lengths == [len(one.input_ids) for one in examples]
        assert found.num_positions == sum(len(found.collator()([found[i]])["positions"]) for i in range(len(found)))

    def test_the_format_is_the_targets(self, half: PreTrainedModel, examples: list[Example]) -> None:
        batch = batch_of(TargetFeatures(half, examples, top_k=TOP_K), [0, 1])
        assert batch["hidden_states"].dtype == batch["top_logits"].dtype == torch.bfloat16
        assert batch["log_normaliser"].dtype == torch.float32

    def test_scores_in_several_pieces(
        self, target: PreTrainedModel, examples: list[Example], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = TargetFeatures(target, examples, top_k=TOP_K)
        whole = batch_of(found, [0, 1, 2])
        monkeypatch.setattr("hf_specdec.training.target_outputs._CHUNK_SCORES", 5 * zoo.VOCAB_SIZE)
        assert_same(batch_of(found, [0, 1, 2]), whole)

    def test_models_without_logits_to_keep(self, examples: list[Example], monkeypatch: pytest.MonkeyPatch) -> None:
        target = zoo.make("llama")
        found = TargetFeatures(target, examples, top_k=TOP_K)
        before = batch_of(found, [0, 1, 2])
        monkeypatch.setattr("hf_specdec.training.target_outputs.forward_parameters", lambda model: frozenset())
        assert_same(batch_of(found, [0, 1, 2]), before)

    @pytest.mark.parametrize(
        ("texts", "options", "message"),
        [
            ([], {}, "there are no examples"),
            ([Example([1, 2], 1), Example([1, 2], 2)], {}, "example 1 has no token to learn behind its prompt of 2"),
            ([Example([1, 97], 0)], {}, "the data hold token 97, and the target's vocabulary has 97"),
            ([Example([1] * 129, 0)], {}, "a text of 129 tokens, and the target takes 128: .* max_length=128"),
            ([Example([1, 2], 0)], {"top_k": 98}, "top_k=98 must be between 0 and the target's 97"),
            ([Example([1, 2], 0)], {"hidden_states": False}, "hidden_states=False needs top_k"),
            ([Example([1, 2], 0)], {"cache_max_gb": 1}, "cache_max_gb=1 needs cache_dir"),
            ([Example([1, 2], 0)], {"cache_dir": "x", "cache_max_gb": 0}, "cache_max_gb=0 must be above 0"),
            (
                [Example([1, 2], 0)],
                {"cache_dir": "x", "cache_max_gb": float("inf")},
                "cache_max_gb=inf must be above 0 and",
            ),
        ],
    )
    def test_refusals(
        self, target: PreTrainedModel, texts: list[Example], options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ArgumentError, match=message):
            TargetFeatures(target, texts, **options)

    def test_a_target_in_training_is_refused(self, examples: list[Example]) -> None:
        target = zoo.make("llama")
        found = TargetFeatures(target, examples)
        target.train()
        with pytest.raises(ArgumentError, match=r"call target.eval\(\)"):
            batch_of(found, [0])

    def test_the_target_does_not_run_in_workers(self, target: PreTrainedModel, examples: list[Example]) -> None:
        found = TargetFeatures(target, examples)
        loader = DataLoader(found, 4, collate_fn=found.collator(), num_workers=1, multiprocessing_context="fork")
        with pytest.raises(ArgumentError, match="use dataloader_num_workers=0, or cache all features"):
            next(iter(loader))


NAMES = ("hidden_states", "top_ids", "top_logits", "log_normaliser")


@pytest.mark.usefixtures("small_parts")
class TestCache:
    @pytest.fixture
    def cached(self, half: PreTrainedModel, examples: list[Example], tmp_path: Path) -> Callable[..., TargetFeatures]:
        def cached(**options: Any) -> TargetFeatures:
            return TargetFeatures(half, examples, cache_dir=tmp_path / "cache", **{"top_k": TOP_K} | options)

        return cached

    @staticmethod
    def parts(tmp_path: Path) -> list[Path]:
        return sorted((tmp_path / "cache").glob("*.safetensors"))

    def test_batches_are_the_same(
        self, cached: Callable[..., TargetFeatures], half: PreTrainedModel, examples: list[Example], tmp_path: Path
    ) -> None:
        found = cached()
        told: list[tuple[int, int]] = []
        found.fill_cache(lambda *state: told.append(state))
        assert told[-1] == (30, 30)
        assert len(self.parts(tmp_path)) > 2
        again, fresh = cached(), TargetFeatures(half, examples, top_k=TOP_K)
        for indices in ([0, 1, 2], [29, 3], [17]):
            batch = batch_of(again, indices, 2)
            assert_same(batch, batch_of(found, indices, 2))
            expected = batch_of(fresh, indices, 2)
            assert torch.equal(batch["positions"], expected["positions"])
            # Batches of other shapes round otherwise.
            torch.testing.assert_close(batch["hidden_states"], expected["hidden_states"], atol=0.1, rtol=0.05)
            torch.testing.assert_close(batch["log_normaliser"], expected["log_normaliser"], atol=0.1, rtol=0.05)

    def test_scores_alone(
        self, cached: Callable[..., TargetFeatures], half: PreTrainedModel, examples: list[Example], tmp_path: Path
    ) -> None:
        """For drafts, which do not read the target's hidden states: half full, as computed and as kept."""
        found = cached(hidden_states=False, cache_max_gb=1e-5)
        found.fill_cache()
        assert "top_ids" in found[0]
        assert "top_ids" not in found[29]
        assert all("hidden_states" not in load_file(path) for path in self.parts(tmp_path))
        batch, whole = batch_of(found, [0, 29]), batch_of(TargetFeatures(half, examples, top_k=TOP_K), [0, 29])
        assert whole.keys() - batch.keys() == {"hidden_states"}
        assert torch.equal(batch["positions"], whole["positions"])
        torch.testing.assert_close(batch["log_normaliser"], whole["log_normaliser"], atol=0.1, rtol=0.05)
        with pytest.raises(ArgumentError, match="holds features that differ in: hidden_states;"):
            cached()

    def test_the_target_does_not_run_again(self, cached: Callable[..., TargetFeatures], runs: list[int]) -> None:
        cached().fill_cache()
        assert sum(runs) == 30
        again = cached()
        again.fill_cache()
        batch_of(again, [0, 1, 29])
        assert sum(runs) == 30

    def test_workers_may_read_a_full_cache(self, cached: Callable[..., TargetFeatures]) -> None:
        found = cached()
        found.fill_cache()
        found[0]
        loader = DataLoader(found, 30, collate_fn=found.collator(), num_workers=1, multiprocessing_context="fork")
        (batch,) = loader
        assert_same(batch, batch_of(found, list(range(30))))
        # As where workers are not forked.
        copied, collate = pickle.loads(pickle.dumps((found, found.collator())))
        assert_same(collate([copied[0], copied[5]]), batch_of(found, [0, 5]))

    def test_float32_is_kept_as_bfloat16(
        self, target: PreTrainedModel, examples: list[Example], tmp_path: Path
    ) -> None:
        found = TargetFeatures(target, examples, top_k=TOP_K, cache_dir=tmp_path / "cache")
        found.fill_cache()
        kept = load_file(self.parts(tmp_path)[0])
        assert kept["hidden_states"].dtype == torch.bfloat16
        assert kept["top_logits"].dtype == torch.float32
        batch, fresh = batch_of(found, [0, 1]), batch_of(TargetFeatures(target, examples, top_k=TOP_K), [0, 1])
        assert batch["hidden_states"].dtype == torch.float32
        torch.testing.assert_close(batch["hidden_states"], fresh["hidden_states"], atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(batch["top_logits"], fresh["top_logits"], atol=1e-4, rtol=1e-4)

    def test_the_bound_holds_and_the_rest_is_computed(
        self,
        cached: Callable[..., TargetFeatures],
        half: PreTrainedModel,
        examples: list[Example],
        runs: list[int],
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        bound = 30_000
        found = cached(cache_max_gb=bound / 1e9)
        found.fill_cache()
        sizes = [path.stat().st_size for path in self.parts(tmp_path)]
        assert 0.8 * bound < sum(sizes) <= bound
        num_cached = sum(runs)
        assert 0 < num_cached < 30
        assert f"has room for {num_cached} of 30 texts; the target runs again for the others" in caplog.text
        batch = batch_of(found, [29, 0, num_cached, num_cached - 1])
        assert runs[-1] == 2
        expected = batch_of(TargetFeatures(half, examples, top_k=TOP_K), [29, 0, num_cached, num_cached - 1])
        for name in ("positions", "targets"):
            assert torch.equal(batch[name], expected[name])
        torch.testing.assert_close(batch["hidden_states"], expected["hidden_states"], atol=0.1, rtol=0.05)

    def test_a_bound_below_one_text(self, cached: Callable[..., TargetFeatures], runs: list[int]) -> None:
        found = cached(cache_max_gb=1e-9)
        found.fill_cache()
        assert runs == []
        assert len(batch_of(found, [0, 1])["positions"]) > 0

    def test_the_bound_may_be_raised(self, cached: Callable[..., TargetFeatures], runs: list[int]) -> None:
        cached(cache_max_gb=30_000 / 1e9).fill_cache()
        before = sum(runs)
        cached().fill_cache()
        # All but the last file, which was cut at the bound, are used again.
        assert sum(runs) < before + 30
        fresh = cached()
        assert all("hidden_states" in fresh[index] for index in range(30))

    def test_the_bound_may_be_lowered(self, cached: Callable[..., TargetFeatures], tmp_path: Path) -> None:
        cached().fill_cache()
        assert sum(path.stat().st_size for path in self.parts(tmp_path)) > 30_000
        cached(cache_max_gb=30_000 / 1e9).fill_cache()
        assert 20_000 < sum(path.stat().st_size for path in self.parts(tmp_path)) <= 30_000
        cached(cache_max_gb=1e-9).fill_cache()
        assert not self.parts(tmp_path)

    def test_a_kill_loses_no_finished_file(
        self, cached: Callable[..., TargetFeatures], tmp_path: Path, runs: list[int]
    ) -> None:
        def stop(done: int, total: int) -> None:
            if done > 20:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            cached().fill_cache(stop)
        finished = {path: path.stat().st_mtime_ns for path in self.parts(tmp_path)}
        assert finished
        (tmp_path / "cache" / ".features-00009.safetensors.7.unfinished").write_bytes(b"half")
        before = sum(runs)
        found = cached()
        found.fill_cache()
        assert sum(runs) < before + 30
        assert all(path.stat().st_mtime_ns == written for path, written in finished.items())
        assert all("hidden_states" in found[index] for index in range(30))

    def test_a_kill_before_the_first_file(self, cached: Callable[..., TargetFeatures], tmp_path: Path) -> None:
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / ".identity.json.7.unfinished").write_bytes(b"{")
        cached().fill_cache()
        assert json.loads((tmp_path / "cache" / "identity.json").read_text(encoding="utf-8"))["top_k"] == TOP_K

    @pytest.mark.parametrize("damage", ["cut", "empty", "other"])
    def test_damaged_files_are_written_anew(
        self,
        cached: Callable[..., TargetFeatures],
        tmp_path: Path,
        damage: str,
        runs: list[int],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        cached().fill_cache()
        path = self.parts(tmp_path)[1]
        whole = path.read_bytes()
        if damage == "other":
            save_file({"hidden_states": torch.zeros(1, 32)}, path)
        else:
            path.write_bytes(whole[: len(whole) - 100] if damage == "cut" else b"")
        before = sum(runs)
        found = cached()
        found.fill_cache()
        assert 0 < sum(runs) - before < 30
        assert "is not as it should be and will be written anew" in caplog.text
        assert path.read_bytes() == whole

    def test_until_it_is_filled_the_target_runs(self, cached: Callable[..., TargetFeatures], runs: list[int]) -> None:
        found = cached()
        batch_of(found, [0, 1])
        assert runs == [2]

    def test_processes_share_the_work(
        self, cached: Callable[..., TargetFeatures], runs: list[int], tmp_path: Path
    ) -> None:
        cached().fill_cache(rank=1, num_ranks=2)
        second = sum(runs)
        assert 0 < second < 30
        found = cached()
        found.fill_cache(rank=0, num_ranks=2)
        assert sum(runs) == 30
        assert all("hidden_states" in found[index] for index in range(30))

    @pytest.mark.parametrize("changed", ["model", "texts", "top_k"])
    def test_features_of_something_else_are_refused(
        self,
        cached: Callable[..., TargetFeatures],
        half: PreTrainedModel,
        examples: list[Example],
        tmp_path: Path,
        changed: str,
    ) -> None:
        cached().fill_cache()
        target = copy.deepcopy(half)
        target.model.layers[0].mlp.up_proj.weight.data *= 1.1
        with pytest.raises(ArgumentError, match=f"holds features that differ in: {changed}; choose another folder"):
            TargetFeatures(
                target if changed == "model" else half,
                examples[:-1] if changed == "texts" else examples,
                top_k=3 if changed == "top_k" else TOP_K,
                cache_dir=tmp_path / "cache",
            )

    def test_strange_folders_are_refused(self, cached: Callable[..., TargetFeatures], tmp_path: Path) -> None:
        folder = tmp_path / "cache"
        folder.write_text("notes", encoding="utf-8")
        with pytest.raises(ArgumentError, match="holds something else than cached features"):
            cached()
        folder.unlink()
        folder.mkdir()
        (folder / "notes.txt").touch()
        with pytest.raises(ArgumentError, match="holds something else than cached features"):
            cached()
        (folder / "identity.json").write_text("[]", encoding="utf-8")
        with pytest.raises(ArgumentError, match="does not say what the cached features were made from"):
            cached()

    def test_a_full_disk_is_seen_before_work_begins(
        self, cached: Callable[..., TargetFeatures], monkeypatch: pytest.MonkeyPatch, runs: list[int]
    ) -> None:
        usage = type("Usage", (), {"free": 1000})
        monkeypatch.setattr(feature_cache.shutil, "disk_usage", lambda folder: usage)
        with pytest.raises(ArgumentError, match="set a smaller cache_max_gb"):
            cached().fill_cache()
        assert runs == []


class TestFingerprints:
    def test_a_saved_model_is_the_same(self, tmp_path: Path) -> None:
        model = zoo.make("llama")
        model.save_pretrained(tmp_path)
        assert model_fingerprint(type(model).from_pretrained(tmp_path)) == model_fingerprint(model)

    def test_other_models_differ(self) -> None:
        names = [model_fingerprint(zoo.make("llama", seed)) for seed in (0, 1)]
        names.append(model_fingerprint(zoo.make("llama").to(torch.bfloat16)))
        changed = zoo.make("llama")
        assert isinstance(changed.config, LlamaConfig)
        changed.config.rms_norm_eps = 0.1
        names.append(model_fingerprint(changed))
        assert len(set(names)) == 4

    def test_texts(self) -> None:
        texts = [[Example([1, 2], 1)], [Example([1, 2], 0)], [Example([1], 0), Example([2], 0)], [Example([2, 1], 1)]]
        assert len({examples_fingerprint(one) for one in texts}) == 4
