"""Entry point of `python -m benchmarks.serve`."""

from benchmarks.serve.command import main

if __name__ == "__main__":
    main()
