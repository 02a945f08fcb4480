"""The noisy tenant of the benchmark of strangers, on a real service."""

import multiprocessing
from threading import Thread

from benchmarks.strangers import NOISY, be_noisy, set_quota
from tests.unit.server.service import running
from tests.waiting import eventually


def test_a_noisy_tenant_steps_until_it_is_told_to_end_and_keeps_to_its_quota():
    ours, theirs = multiprocessing.Pipe()
    with running() as service:
        set_quota(service.endpoint, 20)
        process = Thread(target=be_noisy, args=(service.endpoint, 2, theirs))
        process.start()
        ours.send(True)
        assert ours.recv() == 2
        use = service.namespaces.quotas.of(NOISY)
        eventually(lambda: use.refused["messages_per_second"] > 0, "no message has waited")
        assert use.used()["streams"] == 2
        ours.send(False)
        assert ours.recv() >= 2
        ours.send(False)
        process.join()
