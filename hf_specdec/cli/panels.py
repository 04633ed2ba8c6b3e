"""Two texts side by side on the terminal while they grow."""

from __future__ import annotations

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

# Lines that a panel's frame, the prompt line and the cursor take off the terminal's height.
_RESERVED_LINES = 5


class TokenCollector(BaseStreamer):
    """A streamer that only stores token ids: decoding happens when the screen is drawn, not between two forwards."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finished = False
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt (first call) or new tokens of one row, int64 of any shape."""
        if self._prompt_seen:
            self.tokens.extend(value.flatten().tolist())
        self._prompt_seen = True

    def end(self) -> None:
        """Mark the text as complete."""
        self.finished = True


class GrowingPanel:
    """One titled panel whose text is whatever its collector holds when it is drawn."""

    def __init__(self, title: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self.collector = TokenCollector()
        self.waiting = True
        self._title = title
        self._tokenizer = tokenizer

    @property
    def text(self) -> str:
        """The text so far, without special tokens."""
        return str(self._tokenizer.decode(self.collector.tokens, skip_special_tokens=True))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.waiting:
            yield Panel(Text("waiting", style="dim"), title=self._title, border_style="dim")
            return
        lines = list(Text(self.text).wrap(console, options.max_width - 4))
        if not self.collector.finished:
            # While it grows, its end is what one wants to see; the whole text is drawn once it is complete.
            del lines[: max(0, len(lines) - (console.height - _RESERVED_LINES))]
        border = "green" if self.collector.finished else "yellow"
        yield Panel(Text("\n").join(lines), title=self._title, border_style=border)


def side_by_side(left: GrowingPanel, right: GrowingPanel) -> Table:
    """Both panels in columns of equal width."""
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(left, right)
    return grid
