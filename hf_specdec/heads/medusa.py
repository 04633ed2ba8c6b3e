"""Medusa heads: small networks that guess the tokens after the next one from the target's last hidden state."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from huggingface_hub import ModelCard, ModelCardData, PyTorchModelHubMixin
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specdec.atomic import replace_file
from hf_specdec.checks import require_whole
from hf_specdec.errors import ArgumentError
from hf_specdec.heads.card import MARK, medusa_card
from hf_specdec.heads.checks import checked_base_model, checked_dtype, checked_notes, checked_token_map
from hf_specdec.heads.choices import Choices, checked_rates, checked_tree
from hf_specdec.heads.files import CONFIG
from hf_specdec.heads.output import output_device, output_sizes, output_weight, shared_output
from hf_specdec.heads.reading import read_heads


class ResidualBlock(nn.Module):
    """x + SiLU(Wx + b), which is the identity until it is trained.

    Args:
        hidden_size: H.
        bias: whether there is a b.
    """

    def __init__(self, hidden_size: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size, bias=bias)
        nn.init.zeros_(self.linear.weight)
        if bias:
            nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[..., H]` to the same."""
        moved: Tensor = hidden_states + nn.functional.silu(self.linear(hidden_states))
        return moved


class MedusaHeads(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="hf_specdec",
    paper_url="https://arxiv.org/abs/2401.10774",
    tags=["medusa", "speculative-decoding"],
):
    """K heads of L residual blocks each (Cai et al. 2024, "Medusa").

    The target's own head says what follows the last token it has read; head i (from 0) says what comes i + 1 tokens
    after that. All read the hidden state that the target's output matrix reads, so guessing needs no further forward.

    Args:
        hidden_size: H, that of the target.
        vocab_size: V, that of the target; None where a published checkpoint does not say.
        num_heads: K.
        num_layers: L, residual blocks of each head.
        bias: whether blocks have a bias.
        own_output: whether each head has an output matrix of its own; otherwise all use the target's.
        draft_vocab_size: D; heads guess only tokens of this many, those in `token_map`. None: all V.
        tree: the tree to draft, as one tuple of ranks for each node: `(0, 2)` is the third guess of head 1 behind the
            best guess of head 0.
        rank_rates: for each head how often its guess of each rank came true, as measured on held-out text.
        base_model: name of the target.
        notes: further sections of the model card, in their order: title to text in Markdown.

    Raises:
        ArgumentError: a size below 1, own matrices or a reduced vocabulary of an unknown one, a tree or rates that do
            not fit the heads, or a name or notes that are no texts.
    """

    strategy: ClassVar[str] = "medusa"
    """Name of the strategy that drafts with these heads."""

    token_map: Tensor | None
    """int64 `[D]`: the tokens that heads can guess, or None for all."""

    def __init__(
        self,
        *,
        hidden_size: int,
        vocab_size: int | None,
        num_heads: int = 4,
        num_layers: int = 1,
        bias: bool = True,
        own_output: bool = False,
        draft_vocab_size: int | None = None,
        tree: Sequence[Sequence[int]] | None = None,
        rank_rates: Sequence[Sequence[float]] | None = None,
        base_model: str | None = None,
        notes: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        sizes = {"hidden_size": hidden_size, "num_heads": num_heads, "num_layers": num_layers}
        optional = {"vocab_size": vocab_size, "draft_vocab_size": draft_vocab_size}
        require_whole(**sizes, **{name: size for name, size in optional.items() if size is not None})
        if vocab_size is None and (own_output or draft_vocab_size is not None):
            raise ArgumentError("vocab_size=None: own output matrices and a draft vocabulary need its number")
        if vocab_size is not None and draft_vocab_size is not None and draft_vocab_size > vocab_size:
            raise ArgumentError(f"draft_vocab_size={draft_vocab_size} is more than vocab_size={vocab_size}")
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.num_heads, self.num_layers, self.bias = num_heads, num_layers, bias
        self.base_model, self.notes = checked_base_model(base_model), checked_notes(notes)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(hidden_size, bias) for _ in range(num_layers))) for _ in range(num_heads)
        )
        self.register_buffer("token_map", None if draft_vocab_size is None else torch.arange(draft_vocab_size))
        self.outputs = nn.ModuleList(
            nn.Linear(hidden_size, self.num_guessable or 0, bias=False) for _ in range(num_heads if own_output else 0)
        )
        self.tree, self.rank_rates = tree, rank_rates

    @classmethod
    def for_target(
        cls, target: PreTrainedModel, *, token_map: Tensor | Sequence[int] | None = None, **settings: Any
    ) -> Self:
        """Untrained heads for a model, in float32 on the CPU.

        Args:
            target: the model.
            token_map: int64 `[D]` or a sequence, the tokens that heads can guess; None: all.
            **settings: as for the class. With `own_output`, matrices start as the target's.

        Raises:
            ArgumentError: as for the class, or `token_map` holds something that is no token, or a token twice.
        """
        hidden_size, vocab_size = output_sizes(target)
        tokens = None if token_map is None else checked_token_map(token_map, vocab_size)
        size = None if tokens is None else len(tokens)
        name = target.config.name_or_path or ""
        # A folder's path says nothing to those with whom heads are shared.
        settings = {"base_model": (Path(name).name if Path(name).is_dir() else name) or None, **settings}
        heads = cls(hidden_size=hidden_size, vocab_size=vocab_size, draft_vocab_size=size, **settings)
        if tokens is not None:
            heads.token_map = tokens
        if heads.own_output:
            heads.set_output(target)
        return heads

    @property
    def own_output(self) -> bool:
        """Whether each head has an output matrix of its own."""
        return len(self.outputs) > 0

    @property
    def num_guessable(self) -> int | None:
        """D: how many tokens heads can guess; None where that is all of an unknown vocabulary."""
        return self.vocab_size if self.token_map is None else len(self.token_map)

    @property
    def tree(self) -> Choices | None:
        """The tree to draft; whatever is assigned is checked against the heads."""
        return self._tree

    @tree.setter
    def tree(self, tree: Sequence[Sequence[int]] | None) -> None:
        self._tree = None if tree is None else checked_tree(tree, self.num_heads, self.num_guessable)

    @property
    def rank_rates(self) -> tuple[tuple[float, ...], ...] | None:
        """For each head how often its guess of each rank came true; checked when assigned."""
        return self._rank_rates

    @rank_rates.setter
    def rank_rates(self, rank_rates: Sequence[Sequence[float]] | None) -> None:
        self._rank_rates = None if rank_rates is None else checked_rates(rank_rates, self.num_heads)

    @property
    def config(self) -> dict[str, Any]:
        """What `config.json` says: the arguments that make these heads, weights aside."""
        return {
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "num_heads": self.num_heads,
            "num_layers": self.num_layers,
            "bias": self.bias,
            "own_output": self.own_output,
            "draft_vocab_size": None if self.token_map is None else len(self.token_map),
            "tree": self.tree,
            "rank_rates": self.rank_rates,
            "base_model": self.base_model,
            "notes": self.notes,
        }

    def check(self, target: PreTrainedModel) -> None:
        """See that these heads were made for such a model.

        Raises:
            ArgumentError: its hidden size or vocabulary is another; both numbers are named.
        """
        hidden_size, vocab_size = output_sizes(target)
        cure = "load heads trained for this model" + (f", not for {self.base_model!r}" if self.base_model else "")
        if hidden_size != self.hidden_size:
            raise ArgumentError(
                f"heads read hidden states of size {self.hidden_size}, but {type(target).__name__} has {hidden_size}; "
                f"{cure}"
            )
        if self.vocab_size not in (vocab_size, None):
            raise ArgumentError(
                f"heads have a vocabulary of {self.vocab_size} tokens, but {type(target).__name__} has {vocab_size}; "
                f"{cure}"
            )

    def placed(self, target: PreTrainedModel) -> Self:
        """These heads in the target's dtype, where its output matrix is: themselves if they are, else a copy.

        A copy takes time and memory at every call of `generate`; `heads.to(model.device, model.dtype)` saves it.
        """
        device, dtype = output_device(target), target.dtype
        if all(weight.device == device and weight.dtype == dtype for weight in self.parameters()):
            return self
        return copy.deepcopy(self).requires_grad_(False).to(device, dtype)

    def features(self, hidden_states: Tensor) -> Tensor:
        """What the output matrix reads: `[..., H]` to `[K, ..., H]`, in the heads' dtype and on their device."""
        hidden_states = hidden_states.to(next(self.blocks.parameters()))
        return torch.stack([block(hidden_states) for block in self.blocks])

    def output_of(self, target: PreTrainedModel) -> Callable[[Tensor], Tensor]:
        """What turns features into logits: the heads' own matrices, or the target's for the tokens of `token_map`.

        Make it once and use it often: where a draft vocabulary is shared, this copies a part of the target's matrix.

        Returns:
            A function from `[K, ..., H]` to `[K, ..., D]`. A shared matrix takes any `[..., H]`. No gradient reaches
            the target.
        """
        return self._own_logits if self.own_output else shared_output(target, self.token_map)

    def logits(self, hidden_states: Tensor, output: Callable[[Tensor], Tensor]) -> Tensor:
        """What each head thinks of each token that it can guess.

        Args:
            hidden_states: `[..., H]`, the target's, behind its last norm.
            output: from `output_of`.

        Returns:
            `[K, ..., D]`; the tokens of its columns are said by `token_ids`.
        """
        return output(self.features(hidden_states))

    def token_ids(self, columns: Tensor) -> Tensor:
        """The tokens that columns of `logits` stand for, int64 of the same shape."""
        return columns if self.token_map is None else self.token_map.to(columns.device)[columns]

    @torch.no_grad()
    def set_output(self, target: PreTrainedModel) -> None:
        """Give each head an output matrix of its own, a copy of the target's for the tokens of `token_map`.

        Raises:
            ArgumentError: the heads were made for another model.
            UnsupportedModelError: the target's output has a bias, which heads' own matrices lack.
        """
        self.check(target)
        self.vocab_size = output_sizes(target)[1]
        weight = output_weight(target, self.token_map).to(next(self.blocks.parameters()))
        self.outputs = nn.ModuleList(self._output(weight.clone()) for _ in range(self.num_heads))

    def _output(self, weight: Tensor) -> nn.Linear:
        output = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        output.weight = nn.Parameter(weight)
        return output

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        revision: str | None = None,
        cache_dir: str | PathLike[str] | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
        token: str | bool | None = None,
    ) -> Self:
        """Read heads in the own layout or in that of FasterDecoding, TGI or vLLM.

        How many heads and layers there are is counted from the weights. Nothing that a pickle holds is run.

        Args:
            pretrained_model_name_or_path: a folder, a file in one, or the name of a repository on the Hub. Of a whole
                model that holds heads, the heads alone are read.
            dtype: a floating type or its name; None or "auto": that of the file.
            revision, cache_dir, force_download, local_files_only, token: as for any `from_pretrained`.

        Returns:
            Heads on the CPU, in evaluation mode.

        Raises:
            ArgumentError: no heads there, two sets of them, or none of the known layouts.
        """
        options = {
            "revision": revision,
            "cache_dir": cache_dir,
            "force_download": force_download,
            "local_files_only": local_files_only,
            "token": token,
        }
        weights = read_heads(pretrained_model_name_or_path, options)
        with torch.device("meta"):
            heads = cls(
                hidden_size=weights.hidden_size,
                vocab_size=weights.vocab_size,
                num_heads=len(weights.blocks),
                num_layers=len(weights.blocks[0]),
                bias=weights.biases is not None,
                own_output=weights.outputs is not None,
                draft_vocab_size=None if weights.token_map is None else len(weights.token_map),
                **weights.settings,
            )
        heads.load_state_dict(weights.state(), assign=True)
        number_format = checked_dtype(dtype)
        return heads.eval() if number_format is None else heads.to(number_format).eval()

    def save_pretrained(self, save_directory: str | PathLike[str], **kwargs: Any) -> str | None:
        """Write `config.json`, `model.safetensors` and a model card into a folder.

        The card says what is known from the heads and what `notes` hold. It replaces an earlier card, unless a person
        wrote that.

        Args:
            save_directory: the folder; made if need be.
            **kwargs: as for any model of the Hub, such as `push_to_hub` and `repo_id`. `model_card_kwargs` takes
                `sections`, like `notes` but for this card alone.

        Raises:
            ArgumentError: a file is in the folder's place.
        """
        folder = Path(save_directory)
        if file := next((path for path in (folder, *folder.parents) if path.is_file()), None):
            raise ArgumentError(
                f"save_directory={str(save_directory)!r} must be a folder, but {str(file)!r} is a file; "
                "give another name"
            )
        card = folder / "README.md"
        if card.is_file() and MARK.encode() in card.read_bytes():
            card.unlink()
        return super().save_pretrained(folder, **kwargs)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> str:
        """Upload what `save_pretrained` writes; arguments and result as for any model of the Hub."""
        options = {"repo": repo_id} | (kwargs.pop("model_card_kwargs", None) or {})
        return super().push_to_hub(repo_id, model_card_kwargs=options, **kwargs)

    def generate_model_card(self, *, sections: Mapping[str, str] | None = None, repo: str | None = None) -> ModelCard:
        """The model card.

        Args:
            sections: further ones, behind those of `notes`: title to Markdown.
            repo: where the heads can be loaded from, for the example.
        """
        metadata: dict[str, Any] = vars(self._hub_mixin_info.model_card_data)
        on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", self.base_model or "")
        data = ModelCardData(**metadata | {"base_model": self.base_model if on_hub else None})
        return medusa_card(self, data, self.notes | dict(sections or {}), repo or "name-of-this-repository")

    def _save_pretrained(self, save_directory: Path) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        replace_file(save_directory / "model.safetensors", lambda path: save_file(tensors, path, {"format": "pt"}))
        text = json.dumps(self.config, indent=2, ensure_ascii=False) + "\n"
        replace_file(save_directory / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))

    def _own_logits(self, features: Tensor) -> Tensor:
        return torch.stack([output(feature) for output, feature in zip(self.outputs, features, strict=True)])
