"""The folder `interpreted` holds tests for a process in which Triton interprets its kernels; see test_interpreted.py."""

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
