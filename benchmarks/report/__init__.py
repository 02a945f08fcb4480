"""Tables, plots and pages of all benchmarks.

A benchmark ends with `records.finish`, which prints its tables and writes its results. `python -m benchmarks.report` makes a page and
plots from a folder of such files. `statistics` has the intervals, `records` says what a run was made with, the other modules
know each benchmark's tables, `plots` draws them, `markdown` and `page` put them together.
"""
