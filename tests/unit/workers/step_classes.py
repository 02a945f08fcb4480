"""`SGLANG_USE_CPU_ENGINE=1 python -m tests.unit.workers.step_classes`: the classes of ours whose code runs in a decode step with an
embedded datastore. A newcomer meets so many concepts on the way of a token."""

from __future__ import annotations

import sys
from types import FrameType

from tests.unit.workers.recorded_sessions import Load, configured, load_sessions

OURS = ("sglang_patches.", "datastore_service.")
NODES, REQUESTS, WARM_UP = 7, 4, 25


def classes_of(frame: FrameType) -> set[str]:
    """Of the method that the frame runs; of a constructor also the class that is made."""
    owner = frame.f_locals.get("self", frame.f_locals.get("cls"))
    made = owner if isinstance(owner, type) else type(owner)
    name = frame.f_code.co_qualname
    return {
        f"{kind.__module__}.{kind.__qualname__}"
        for kind in made.__mro__
        if kind.__module__.startswith(OURS)
        and (name.startswith(kind.__qualname__ + ".") or (kind is made and name.endswith("__init__")))
    }


def main() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    met: set[str] = set()
    with configured(NODES):
        load = Load(load_sessions(), REQUESTS, True, NODES + 1)
        for number in range(WARM_UP):
            load.step(number)
        sys.setprofile(lambda frame, event, _: met.update(classes_of(frame)) if event == "call" else None)
        load.step(WARM_UP)
        load.step(WARM_UP + 1)
        sys.setprofile(None)
    print("\n".join(sorted(met)))
    print(len(met))


if __name__ == "__main__":
    main()
