"""`SGLANG_USE_CPU_ENGINE=1 python -m tests.unit.step.step_classes`: the classes of ours whose code runs in a decode step, in the worker's
thread, for three set-ups. A newcomer meets so many concepts on the way of a token."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from types import FrameType

from datastore_service.client import Datastore, open_datastore
from datastore_service.protocol.types import Namespace
from sglang_patches.drafting.channel import ProcessChannel
from sglang_patches.step import decode
from tests.support.servers.datastore import DatastoreService
from tests.unit.step.recorded_sessions import Case, Load, StartDraft, configured, load_sessions

OURS = ("sglang_patches.", "datastore_service.")
NODES, REQUESTS, WARM_UP = 7, 4, 25
ROOT = Path(__file__).parents[3]


def classes_of(frame: FrameType) -> set[str]:
    """The classes whose method the frame runs; the class that is made if that is a constructor."""
    owner = frame.f_locals.get("self", frame.f_locals.get("cls"))
    made = owner if isinstance(owner, type) else type(owner)
    name = frame.f_code.co_qualname
    return {
        f"{kind.__module__}.{kind.__qualname__}"
        for kind in made.__mro__
        if kind.__module__.startswith(OURS)
        and (name.startswith(kind.__qualname__ + ".") or (kind is made and name.endswith("__init__")))
    }


def met(method: str, datastore: Datastore | None, start_draft: StartDraft | None) -> set[str]:
    """The classes of two decode steps."""
    found: set[str] = set()
    load = Load(load_sessions(), Case(method, NODES, REQUESTS, lag=True), datastore, start_draft)
    if start_draft is not None:  # what it waits is a part of a step, by one clock
        load.worker.sources.speculation._now = decode.time.monotonic
    for number in range(WARM_UP):
        load.step(number)
    sys.setprofile(lambda frame, event, _: found.update(classes_of(frame)) if event == "call" else None)
    load.step(WARM_UP)
    load.step(WARM_UP + 1)
    sys.setprofile(None)
    load.worker.clear_cache_pool()
    if start_draft is not None:
        load.worker.sources.channel.close()
    load.worker.sources.feed.datastore.close()
    return found


def main() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    vocabulary = load_sessions()["vocabulary"]
    with (
        tempfile.TemporaryDirectory() as folder,
        DatastoreService(Path(folder, "datastore.log")) as service,
        configured(NODES),
    ):

        def remote() -> Datastore:
            return open_datastore(service.endpoint, Namespace("model", "0" * 64), vocabulary)

        def draft_process(*_: object) -> ProcessChannel:
            command = [sys.executable, "-m", "tests.support.draft_programs", "drafting"]
            return ProcessChannel(command, {"PYTHONPATH": str(ROOT)}, Path(folder, "draft.log"))

        set_ups = {
            "SSSD, datastore embedded": met("SSSD", None, None),
            "SSSD, a datastore service": met("SSSD", remote(), None),
            "SAGUARO, a datastore service and a draft process": met("SAGUARO", remote(), draft_process),
        }
    for name, classes in set_ups.items():
        print(f"{name}: {len(classes)}", *sorted(classes), sep="\n  ")


if __name__ == "__main__":
    main()
