"""Drafting beside the target against plain decoding, SSSD and SGLang's own drafting with the same draft model, and against the
simulator's forecasts (benchmarks.pipeline), at several speed ratios.

`models` records what the two models say, `servers` what is served and on which core, `window` times one load, `costs` reads from the
servers what their parts take, `forecast` has what is forecast before a load is measured, `summary` is what came out, `tables` how it is shown.
"""
