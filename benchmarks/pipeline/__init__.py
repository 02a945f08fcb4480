"""`python -m benchmarks.pipeline`: drafting beside the target, on a virtual clock.

The draft side, the worker's end of it, the cache, the predictor, the drafter and the fallbacks are the product's. What is made up
is time (`simulation.Times`), and the two models: recorded or synthetic pairs of them (`pairs`).
"""
