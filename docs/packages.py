"""`make packages`: draws which package imports which as an SVG, from the imports in the source (grimp reads them).

`python docs/packages.py [--checkout DIR] [--out FILE]`. Every package has a box in one layer of LAYERS. An arrow points
from the package that imports to the one it imports; a browser shows the number of imports beside the pointer. An arrow
that follows from others is left out. One that does not point down is red, and the picture counts them. The same source
gives the same bytes.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import grimp

ROOTS = ("datastore_service", "proto_gen", "sglang_patches")


@dataclass(frozen=True)
class Box:
    """Packages and modules that are drawn as one. x: its middle, in percent of the width."""

    label: str
    x: float
    members: tuple[str, ...]

    @property
    def root(self) -> str:
        return self.members[0].partition(".")[0]


def _plugin(x: float, *names: str) -> Box:
    return Box(", ".join(names), x, tuple(f"sglang_patches.{name}" for name in names))


def _datastore(x: float, *names: str) -> Box:
    return Box(", ".join(names), x, tuple(f"datastore_service.{name}" for name in names))


# Top to bottom. A package that is new in the source needs a box here.
LAYERS = (
    (
        _plugin(26, "plugin", "algorithm", "beside_head", "entry", "reports"),
        _plugin(66, "launch", "check", "demo"),
    ),
    (_plugin(26, "disaggregation", "head"),),
    (_plugin(26, "step"), _plugin(62, "training")),
    (_plugin(16, "draft_process"),),
    (_plugin(33, "methods"),),
    (_plugin(37, "drafting"), _plugin(56, "draft_side"), _datastore(84, "cli", "server", "answers")),
    (_plugin(14, "verification", "early_exit", "start"), _plugin(46, "ledger", "exchange")),
    (_plugin(30, "host", "options", "namespace", "metrics", "cpu"),),
    (_datastore(50, "client"),),
    (_datastore(64, "storage", "engine"),),
    (
        Box(
            "protocol, endpoint, tls, proto_gen",
            56,
            tuple(f"datastore_service.{name}" for name in ("protocol", "endpoint", "tls")) + ("proto_gen",),
        ),
    ),
)
FILLS = {"sglang_patches": "#d6e4f7", "datastore_service": "#dcefd5"}
STROKES = {"sglang_patches": "#5b83bd", "datastore_service": "#5c9a47"}
UPWARD = "#d00000"
WIDTH, ROW, TOP, HEIGHT, CHARACTER = (
    1180,
    84,
    50,
    34,
    7.6,
)  # of the picture, a layer, the first, a box, a letter

Arrows = Counter[tuple[Box, Box]]


def imports(checkout: Path) -> Arrows:
    """(importing box, imported box) -> imports. Raises ValueError for a module that has no box."""
    sys.path.insert(0, str(checkout))
    for root in ROOTS:
        origin = importlib.util.find_spec(root).origin
        if not Path(origin).is_relative_to(checkout):
            raise ValueError(f"{root} is imported from {origin}, not from {checkout}")
    graph = grimp.build_graph(*ROOTS, cache_dir=None)
    arrows: Arrows = Counter()
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            tail, head = _box(module), _box(imported)
            if tail != head:
                arrows[tail, head] += 1
    return arrows


def _box(module: str) -> Box:
    for box in (box for layer in LAYERS for box in layer):
        if any(f"{module}.".startswith(f"{member}.") for member in box.members):
            return box
    raise ValueError(f"{module}: give it a box in LAYERS of docs/packages.py")


def level(box: Box) -> int:
    """The box's layer, 0 being the top one."""
    return next(i for i, layer in enumerate(LAYERS) if box in layer)


def points_down(tail: Box, head: Box) -> bool:
    return level(head) > level(tail)


def _is_implied(tail: Box, head: Box, arrows: Arrows) -> bool:
    """Whether other arrows lead from one box to the other too."""
    waiting = [box for box in _heads(tail, arrows) if box != head]
    seen = set(waiting)
    while waiting:
        further = _heads(waiting.pop(), arrows) - seen
        seen |= further
        waiting += further
    return head in seen


def _heads(tail: Box, arrows: Arrows) -> set[Box]:
    return {head for start, head in arrows if start == tail and points_down(tail, head)}


def draw(arrows: Arrows) -> str:
    """The picture as SVG."""
    boxes = [box for layer in LAYERS for box in layer if any(box in arrow for arrow in arrows)]
    shown = {arrow: number for arrow, number in arrows.items() if not _is_implied(*arrow, arrows)}
    ordered = sorted(shown.items(), key=lambda item: (points_down(*item[0]), _key(item[0])), reverse=True)
    count = sum(not points_down(*arrow) for arrow in arrows)
    height = TOP + ROW * len(LAYERS)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
        ' font-family="sans-serif" font-size="13">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
        ' markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 8 4 0 8z" fill="context-stroke"/>'
        "</marker></defs>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="20" y="28" font-size="16">{len(arrows)} arrows, {count} upward. Those that follow from others are left out.'
        " Blue: plugin. Green: datastore.</text>",
        *(_arrow(tail, head, number) for (tail, head), number in ordered),
        *(_rectangle(box) for box in boxes),
    ]
    return "\n".join([*lines, "</svg>", ""])


def _key(arrow: tuple[Box, Box]) -> tuple[str, str]:
    return arrow[0].label, arrow[1].label


def _rectangle(box: Box) -> str:
    middle, top, width = _middle(box), _top(box), _width(box)
    fill = FILLS.get(box.root, "#f2f2f2")
    return (
        f'<rect x="{middle - width / 2:.0f}" y="{top}" width="{width:.0f}" height="{HEIGHT}" rx="5" fill="{fill}"'
        f' stroke="#555"/><text x="{middle:.0f}" y="{top + 22}" text-anchor="middle">{box.label}</text>'
    )


def _arrow(tail: Box, head: Box, number: int) -> str:
    down = points_down(tail, head)
    x1, x2 = _anchor(tail, head), _anchor(head, tail)
    y1, y2 = _top(tail) + HEIGHT * down, _top(head) + HEIGHT * (not down)
    colour = STROKES[tail.root] if down else UPWARD
    bend = (y2 - y1) * 0.35
    return (
        f'<path d="M{x1:.0f} {y1}C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2}" fill="none"'
        f' stroke="{colour}" stroke-width="{1.2 if down else 3}" marker-end="url(#tip)">'
        f"<title>{tail.label} imports {head.label}: {number}</title></path>"
    )


def _anchor(box: Box, other: Box) -> float:
    """Where an arrow leaves the box: shifted towards the other one, so that arrows do not share a point."""
    return _middle(box) + (_width(box) / 2 - 8) * max(-1.0, min(1.0, (other.x - box.x) / 40))


def _middle(box: Box) -> float:
    return box.x * WIDTH / 100


def _top(box: Box) -> int:
    return TOP + ROW * level(box)


def _width(box: Box) -> float:
    return CHARACTER * len(box.label) + 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--checkout", type=Path, default=Path(__file__).parents[1], help="whose imports to draw"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".svg"))
    options = parser.parse_args()
    arrows = imports(options.checkout.resolve())
    options.out.write_text(draw(arrows))
    upward = sorted((arrow for arrow in arrows if not points_down(*arrow)), key=_key)
    print(f"{options.out.name}: {len(arrows)} arrows, {len(upward)} upward")
    for tail, head in upward:
        print(f"upward: {tail.label} imports {head.label} ({arrows[tail, head]})")


if __name__ == "__main__":
    main()
