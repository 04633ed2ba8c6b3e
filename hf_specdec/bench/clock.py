"""Counting and timing the forwards of a target and a draft, from outside and alike for every method."""

from __future__ import annotations

from time import perf_counter
from types import TracebackType
from typing import Any

import torch
from torch import nn


def synchronize(device: torch.device) -> None:
    """Wait until `device` has finished what was queued on it, so that a clock read afterwards is true."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class ForwardClock:
    """While open, counts the forwards of `target` and `draft` and adds up the seconds spent inside them.

    Hooks on the two modules do the counting, so stock `generate` and speculation are measured by the same means. On an
    accelerator each forward is synchronized on both sides.
    """

    def __init__(self, target: nn.Module, draft: nn.Module | None = None) -> None:
        self.target_forwards = 0
        self.draft_forwards = 0
        self.forward_seconds = 0.0
        self._target = target
        self._modules = [target] if draft is None else [target, draft]
        self._device = next(target.parameters()).device
        self._depth = 0
        self._started = 0.0
        self._handles: list[Any] = []

    def __enter__(self) -> ForwardClock:
        for module in self._modules:
            self._handles.append(module.register_forward_pre_hook(self._enter_forward))
            # always_call: a forward that raises must not leave the clock running.
            self._handles.append(module.register_forward_hook(self._leave_forward, always_call=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter_forward(self, module: nn.Module, arguments: Any) -> None:
        self._depth += 1
        # A forward inside a forward belongs to the outer one.
        if self._depth == 1:
            synchronize(self._device)
            self._started = perf_counter()

    def _leave_forward(self, module: nn.Module, arguments: Any, outputs: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        synchronize(self._device)
        self.forward_seconds += perf_counter() - self._started
        if module is self._target:
            self.target_forwards += 1
        else:
            self.draft_forwards += 1
