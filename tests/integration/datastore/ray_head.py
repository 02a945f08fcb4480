"""A small Ray cluster: prints its address, and ends with its standard input."""

import sys
import tempfile

import ray

STORE_BYTES = 80 << 20


def main() -> None:
    # Its sockets have paths of at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        ray.init(num_cpus=2, object_store_memory=STORE_BYTES, include_dashboard=False, _temp_dir=folder)
        print(ray.get_runtime_context().gcs_address, flush=True)
        sys.stdin.read()
        ray.shutdown()


if __name__ == "__main__":
    main()
