"""Draws the pictures of `docs/explanation/heads-and-trees.md` from the package's own objects.

Run it without arguments to write the SVG files anew. Each file holds the facts that it shows as JSON in its
description, so that a test can tell whether it has fallen behind, whatever matplotlib drew it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from hf_specdec import DraftTree, MedusaHeads
from hf_specdec.cache import CacheView, TreeCache
from hf_specdec.cache.view import AttentionKinds
from hf_specdec.heads.choices import best_tree, expected_tokens, node_value

Facts = dict[str, Any]

# The example: "on" is chosen but not yet read, heads have guessed what follows, and the model will say "the mat by".
TEXT, PENDING, ANSWER = ["the", "cat", "sat"], "on", ["the", "mat", "by"]
GUESSES = [["the", "a", "my"], ["mat", "sofa", "bed"], ["and", "with"]]
RATES = [[0.52, 0.16, 0.08], [0.30, 0.12, 0.05], [0.20, 0.08]]
NUM_NODES, NUM_LEFT_OUT = 8, 2

# Readable on white and on black.
INK, BLUE, GREEN = "#777c85", "#3577b5", "#2e8b57"
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "hf_specdec", "font.size": 9, "font.family": "DejaVu Sans"}
WIDTH = 518  # in points, as all coordinates


def chosen(num_nodes: int) -> list[tuple[int, ...]]:
    """The best tree in the order in which it is drafted: by falling value, parents first."""
    return sorted(best_tree(RATES, num_nodes), key=lambda node: -node_value(node, RATES))


def draft() -> DraftTree:
    words = sorted({*TEXT, PENDING, *ANSWER, *sum(GUESSES, [])})
    paths = [[words.index(word(node[: end + 1])) for end in range(len(node))] for node in chosen(NUM_NODES)]
    return DraftTree.from_paths([words.index(PENDING)], [paths])


def word(node: tuple[int, ...]) -> str:
    return GUESSES[len(node) - 1][node[-1]] if node else PENDING


def node_words() -> list[str]:
    return [word(node) for node in [(), *chosen(NUM_NODES)]]


def filled_view(num_nodes: int) -> CacheView:
    """A cache in which each slot's key is the number of the slot, as after the forward of the tree."""
    cache = TreeCache()
    view = CacheView(cache, AttentionKinds({"attention": None}, takes_dict=False), 1, None)
    slots = torch.arange(len(TEXT) + num_nodes).view(1, 1, -1, 1)
    cache.update(slots, slots, 0)
    view.commit_prefill(num_nodes)
    return view


def heads_facts() -> Facts:
    heads = MedusaHeads(hidden_size=8, vocab_size=32, num_heads=len(GUESSES))
    blocks = [[type(block).__name__ for block in head] for head in heads.blocks]
    return {"text": TEXT, "chosen": PENDING, "guesses": GUESSES, "blocks": blocks, "own output": heads.own_output}


def tree_facts() -> Facts:
    nodes = chosen(NUM_NODES + NUM_LEFT_OUT)
    values = [round(node_value(node, RATES), 4) for node in nodes]
    tokens = round(expected_tokens(nodes[:NUM_NODES], RATES), 4)
    return {"rates": RATES, "nodes": nodes, "values": values, "drafted": NUM_NODES, "tokens per forward": tokens}


def mask_facts() -> Facts:
    tree = draft()
    depths = tree.padded_depths()
    view = filled_view(tree.width)
    view.cut_tail(0)
    sees = view.masks(depths, tree.ancestors(), None)
    assert isinstance(sees, torch.Tensor)
    return {
        "columns": TEXT,
        "nodes": node_words(),
        "parents": tree.parents[0],
        "depths": tree.row_depths[0],
        "positions": [len(TEXT) + depth for depth in tree.row_depths[0]],
        "sees": sees[0, 0].int().tolist(),
    }


def cache_facts() -> Facts:
    tree = draft()
    words, path = node_words(), [0]
    for token in ANSWER:
        matching = [child for child in tree.children[0][path[-1]] if words[child] == token]
        path += matching
    view = filled_view(tree.width)
    view.commit([path])
    kept = view.cache.layers[0].keys.flatten().tolist()
    return {"before": TEXT + words, "cached": len(TEXT), "kept": kept, "pending": ANSWER[len(path) - 1]}


def canvas(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH / 72, height / 72))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(height, 0))  # y grows downwards
    axes.axis("off")
    return figure, axes


def box(axes: Axes, x: float, y: float, label: str, *, width: float = 36, height: float = 18, **style: Any) -> None:
    """A box around its centre: filled with white text, or with `fill=False` an outline with grey text."""
    color, filled = style.pop("color", INK), style.pop("fill", True)
    patch = FancyBboxPatch(
        (x - width / 2, y - height / 2), width, height, boxstyle="round,pad=0,rounding_size=3", **style
    )
    patch.set(edgecolor=color, facecolor=color if filled else "none", linewidth=1)
    axes.add_patch(patch)
    write(axes, x, y, label, color="white" if filled else INK)


def write(axes: Axes, x: float, y: float, label: str, **style: Any) -> None:
    axes.text(x, y, label, **{"color": INK, "ha": "center", "va": "center", **style})


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **style: Any) -> None:
    look = {"arrowstyle": "->", "color": INK, "shrinkA": 0, "shrinkB": 0, **style}
    axes.annotate("", xy=end, xytext=start, arrowprops=look)


def line(axes: Axes, start: tuple[float, float], end: tuple[float, float], **style: Any) -> None:
    axes.plot((start[0], end[0]), (start[1], end[1]), **{"color": INK, "linewidth": 1, "zorder": 0, **style})


def draw_heads(facts: Facts) -> Figure:
    lanes = [30 + 38 * lane for lane in range(1 + len(facts["blocks"]))]
    middle = (lanes[0] + lanes[-1]) / 2
    figure, axes = canvas(lanes[-1] + 32)
    for row, token in enumerate(facts["text"]):
        y = middle + 24 * (row - 1)
        box(axes, 22, y, token, fill=False)
        arrow(axes, (42, y), (58, y))
    box(axes, 84, middle, "model", width=50, height=86)
    arrow(axes, (110, middle), (126, middle))
    box(axes, 136, middle, "", width=16, height=86, color=BLUE)
    write(axes, 122, middle + 62, "last hidden state\nat “sat”")
    output = (352, 52)
    if not facts["own output"]:
        box(axes, *(output[0], middle), "output\nmatrix", width=output[1], height=lanes[-1] - lanes[0] + 28)
    for lane, y in enumerate(lanes):
        line(axes, (144, middle + (lane - (len(lanes) - 1) / 2) * 14), (168, y))
        reach = 168
        for _ in facts["blocks"][lane - 1] if lane else ():
            arrow(axes, (reach, y), (reach + 14, y))
            box(axes, reach + 78, y, f"head {lane - 1}:  x + SiLU(Wx+b)", width=128, height=22, color=GREEN)
            reach += 142
        arrow(axes, (reach, y), (output[0] - output[1] / 2, y))
        arrow(axes, (output[0] + output[1] / 2, y), (394, y))
        if lane:
            write(axes, 400, y - 6, " ,  ".join(facts["guesses"][lane - 1]), ha="left")
            write(axes, 400, y + 6, f"guesses, {lane} token{'s' * (lane > 1)} later", ha="left", size=7.5)
        else:
            write(axes, 400, y - 6, facts["chosen"], ha="left", weight="bold", color=BLUE)
            write(axes, 400, y + 6, "the next token: chosen", ha="left", size=7.5)
    return figure


def draw_tree(facts: Facts) -> Figure:
    nodes = [tuple(node) for node in facts["nodes"]]
    leaves = sorted(node for node in nodes if not any(other[:-1] == node for other in nodes))
    columns = [44, 178, 322, 466]
    figure, axes = canvas(62 + 30 * len(leaves))

    def height(node: tuple[int, ...]) -> float:
        if node in leaves:
            return 64.0 + 30 * leaves.index(node)
        below = [height(other) for other in nodes if len(other) == len(node) + 1 and other[:-1] == node]
        return (min(below) + max(below)) / 2

    write(axes, columns[0], 22, "chosen")
    for head, rates in enumerate(facts["rates"]):
        write(axes, columns[head + 1], 14, f"head {head}: rates by rank", size=8)
        write(axes, columns[head + 1], 28, "   ".join(f"{rate:.2f}" for rate in rates))
    box(axes, columns[0], height(()), f"{PENDING}   1", width=76, color=BLUE)
    for number, (node, value) in enumerate(zip(nodes, facts["values"], strict=True)):
        drafted = number < facts["drafted"]
        style = {} if drafted else {"linestyle": (0, (3, 2))}
        x, y = columns[len(node)], height(node)
        line(axes, (columns[len(node) - 1] + 38, height(node[:-1])), (x - 38, y), **style)
        box(
            axes, x, y, f"{word(node)}   {value:.3f}", width=76, color=GREEN if drafted else INK, fill=drafted, **style
        )
    return figure


def draw_mask(facts: Facts) -> Figure:
    top, left, step = 66, 272, 20
    nodes, columns = facts["nodes"], [*facts["columns"], *facts["nodes"]]
    figure, axes = canvas(top + step * len(nodes) + 8)

    def place(node: int) -> tuple[float, float]:
        return 22 + 62 * facts["depths"][node], top + step * (node + 0.5)

    write(axes, 248, top - 12, "position", size=8)
    for node, token in enumerate(nodes):
        x, y = place(node)
        if node:
            above = place(facts["parents"][node])
            line(axes, (above[0] + 18, above[1]), (x - 18, y))
        box(axes, x, y, token, height=15, color=GREEN if node else BLUE)
        write(axes, 248, y, str(facts["positions"][node]))
        for column, sees in enumerate(facts["sees"][node]):
            corner = (left + step * column + 1, top + step * node + 1)
            cached, itself = column < len(facts["columns"]), column == len(facts["columns"]) + node
            color = INK if cached else BLUE if itself else GREEN
            cell = Rectangle(corner, step - 2, step - 2, linewidth=0.5, edgecolor=INK, facecolor="none")
            if sees:
                cell.set(facecolor=color, edgecolor=color)
            axes.add_patch(cell)
    for column, token in enumerate(columns):
        write(axes, left + step * (column + 0.5), top - 6, token, rotation=60, va="bottom")
    edge = left + step * len(facts["columns"])
    for start, end, label in ((left, edge, "cached"), (edge, left + step * len(columns), "nodes of the tree")):
        line(axes, (start + 2, 20), (end - 2, 20))
        write(axes, (start + end) / 2, 11, label, size=8)
    return figure


def draw_cache(facts: Facts) -> Figure:
    step, left = 36, 72
    figure, axes = canvas(132)
    before, kept, cached = facts["before"], facts["kept"], facts["cached"]
    write(axes, 4, 36, "after the\nforward", ha="left")
    write(axes, 4, 108, "after the\nverdict", ha="left")

    def middle(slot: int) -> float:
        return left + step * (slot + 0.5)

    for slot, token in enumerate(before):
        write(axes, middle(slot), 14, str(slot), size=7.5)
        color = INK if slot < cached else GREEN
        style = {} if slot in kept else {"linestyle": (0, (3, 2))}
        box(
            axes,
            middle(slot),
            36,
            token,
            width=step - 4,
            color=color if slot in kept else INK,
            fill=slot in kept,
            **style,
        )
    for slot, origin in enumerate(kept):
        box(axes, middle(slot), 108, before[origin], width=step - 4, color=INK if slot < cached else GREEN)
        if slot >= cached:
            arrow(axes, (middle(origin), 47), (middle(slot), 97))
    box(axes, middle(len(kept)) + 12, 108, facts["pending"], width=step - 4, color=BLUE)
    write(axes, middle(len(kept)) + 36, 108, "not in the cache: root of the next tree", ha="left", size=8)
    return figure


PICTURES: dict[str, tuple[Callable[[], Facts], Callable[[Facts], Figure]]] = {
    "heads": (heads_facts, draw_heads),
    "tree": (tree_facts, draw_tree),
    "mask": (mask_facts, draw_mask),
    "cache": (cache_facts, draw_cache),
}


def draw_all(folder: Path) -> None:
    for name, (facts, draw) in PICTURES.items():
        known = facts()
        with rc_context(STYLE):
            metadata = {"Date": None, "Description": json.dumps(known)}
            draw(known).savefig(folder / f"{name}.svg", transparent=True, metadata=metadata)


if __name__ == "__main__":
    draw_all(Path(__file__).parent)
