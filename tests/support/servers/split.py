"""Real prefill and decode instances behind a real router, for tests and benchmarks. `servers` has a single instance."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from sglang_patches.launch.processes import Child, free_port, wait_until
from sglang_patches.launch.serve import CPU_SPLIT_ENVIRONMENT, role_flags
from sglang_patches.launch.serve_pd import router_part
from tests.support.servers.engine import START_SECONDS, Endpoint, ServerSpec, SglangServer, healthy


class Split(Endpoint):
    """The router's endpoint, and the instances behind it. spec: of every instance; the flags of its role are added.

    of_the_last: further environment of the last decode instance. bootstrap: port of each prefill instance's bootstrap
    server."""

    server: type[SglangServer] = SglangServer

    def __init__(
        self,
        spec: ServerSpec,
        folder: Path,
        prefills: int = 1,
        decodes: int = 1,
        of_the_last: dict[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self.bootstrap = [free_port() for _ in range(prefills)]
        self.prefills = [self._start(spec, "prefill", i, port) for i, port in enumerate(self.bootstrap)]
        last = replace(spec, environment=spec.environment | (of_the_last or {}))
        self.decodes = [self._start(last if i == decodes - 1 else spec, "decode", i) for i in range(decodes)]
        self._port = free_port()
        super().__init__(f"http://127.0.0.1:{self._port}")
        self.router: Child | None = None

    def _start(self, spec: ServerSpec, role: str, index: int, bootstrap_port: int = 0) -> SglangServer:
        own = replace(
            spec,
            name=f"{spec.name}-{role}-{index + 1}",
            flags=(*spec.flags, *role_flags(role, "cpu", bootstrap_port)),
            environment=spec.environment | CPU_SPLIT_ENVIRONMENT,
        )
        return self.server(own, self._folder / f"{own.name}.log")

    @property
    def instances(self) -> list[SglangServer]:
        return [*self.prefills, *self.decodes]

    @property
    def pids(self) -> list[int]:
        """Also their process groups; the router's among them."""
        return [instance.pid for instance in self.instances] + ([self.router.pid] if self.router else [])

    def wait_until_healthy(self) -> None:
        """Starts the router beside the instances. Raises ChildDiedError if one ends, TimeoutError if it is not ready in time."""
        self.start_router()
        for instance in self.instances:
            instance.wait_until_healthy()
        self.wait_until_routed()

    def start_router(self) -> None:
        prefills = dict(zip([instance.port for instance in self.prefills], self.bootstrap, strict=True))
        part = router_part(self._port, prefills, [instance.port for instance in self.decodes])
        self.router = Child("router", part.command, part.environment, self._folder / "router.log", show=False)

    def wait_until_routed(self) -> None:
        """Raises ChildDiedError if the router ends, TimeoutError if it finds no instances."""
        router = [self.router] if self.router else []
        wait_until(lambda: self.answers("readiness"), router, seconds=START_SECONDS)

    def generate_at(self, decode: int, input_ids: Sequence[int], **sampling) -> dict:
        """One /generate call for the first prefill instance and this decode instance, as the router would make it."""
        meeting = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap[0],
            "bootstrap_room": random.getrandbits(63),
        }
        body = sampling | {"top": meeting}
        with ThreadPoolExecutor(1) as pool:
            prefilled = pool.submit(self.prefills[0].generate, input_ids, **body)
            answer = self.decodes[decode].generate(input_ids, **body)
            prefilled.result()
        return answer

    def stop(self) -> None:
        if self.router is not None:
            self.router.stop()
        for instance in self.instances:
            instance.stop()


def split(spec: ServerSpec, folder: Path, **size) -> AbstractContextManager[Split]:
    """A split that answers, for the duration of the block; `size` as for `Split`."""
    return healthy(Split(spec, folder, **size))
