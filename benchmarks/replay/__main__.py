"""Entry point of `python -m benchmarks.replay`."""

from benchmarks.replay.command import main

if __name__ == "__main__":
    main()
