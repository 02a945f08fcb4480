"""Starts and watches the datastore, engines and the router on one machine: `make serve`, the images, the benchmarks."""
