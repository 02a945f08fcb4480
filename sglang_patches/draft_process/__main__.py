"""`python -m sglang_patches.draft_process`: a draft model beside the target, started and watched by the target's worker."""

from __future__ import annotations

import argparse
import logging
import os
import time

from sglang_patches.draft_process.metric_files import make_them_whole
from sglang_patches.draft_process.settings import DraftSettings
from sglang_patches.exchange.connection import ParentConnection


def main() -> None:
    settings = DraftSettings.parse(argparse.ArgumentParser(description=__doc__))
    connection = ParentConnection()
    if settings.cores:
        os.sched_setaffinity(0, map(int, settings.cores.split(",")))
    logging.basicConfig(
        level=logging.INFO, format="[%(asctime)s draft] %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
    )
    began = time.monotonic()
    make_them_whole()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    # Only now: it imports SGLang, which must find the plugin's CPU support in place.
    from sglang_patches.draft_process.server import DraftServer

    DraftServer(settings, connection).serve(began)


if __name__ == "__main__":
    main()
