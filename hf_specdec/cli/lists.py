"""Options that take several values at once: `--temperatures 0 0.7 1.0`."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand


class ListCommand(TyperCommand):
    """A command whose repeatable options may be given once, with all values behind them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the option's name in front of its further values, then parse as usual."""
        repeatable = {name for param in self.params if getattr(param, "multiple", False) for name in param.opts}
        spelled: list[str] = []
        option, has_value = None, False
        for arg in args:
            if arg in repeatable:
                option, has_value = arg, False
            elif arg.startswith("-"):
                option = None
            elif option is not None:
                spelled += [option] if has_value else []
                has_value = True
            spelled.append(arg)
        rest: list[str] = super().parse_args(ctx, spelled)
        return rest
