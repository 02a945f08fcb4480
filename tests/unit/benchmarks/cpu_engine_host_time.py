"""The measured worker is the real one: it goes through the recorded answers, and what can wait waits for the launch."""

from unittest import mock

import pytest

pytest.importorskip("sglang")

from benchmarks.host_time.step import PARTS, VOCABULARY, Load, Marks, configured, measure  # noqa: E402
from benchmarks.traces import SHIPPED, load_traces  # noqa: E402
from datastore_service.engine.engine import Engine  # noqa: E402


@pytest.mark.parametrize("length", ["static", "adaptive"])
def test_a_step_learns_between_its_launch_and_its_verification(plugin, length):
    events = []

    def noted(name, function):
        return lambda *args, **kwargs: (events.append(name), function(*args, **kwargs))[1]

    with configured(7, length):
        load = Load(load_traces(SHIPPED), 3, Engine(VOCABULARY), Marks())
        load.worker.policy.acceptance.observe = noted("learn", lambda *_: None)
        target = load.target
        with (
            mock.patch.object(
                target, "forward_batch_generation", noted("launch", target.forward_batch_generation)
            ),
            mock.patch.object(load.worker.verifier, "verify", noted("verify", target.verify)),
        ):
            for _ in range(60):
                load.step()
        for place in load._places:
            known = [*place.req.output_ids, *place.unreported]
            assert known == place.text[len(place.req.origin_input_ids) : place.length].tolist()
    steps = " ".join(events).replace("launch", "\n").split("\n")[1:]
    assert len(steps) == 60 and {step.strip() for step in steps} == {"verify", "learn verify"}


@pytest.mark.parametrize("method", ["SSSD", "SAGUARO"])
def test_every_part_is_measured(plugin, method):
    row = measure(load_traces(SHIPPED), Engine(VOCABULARY), 2, 7, "static", 3, method)
    drafting = {"look_up", "united", "nodes"}
    assert set(row) == {*PARTS, "all", "_settle", "verification_launched"} | drafting
    assert all((value > 0) == (method == "SAGUARO" or name not in drafting) for name, value in row.items())
