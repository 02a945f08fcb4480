"""Plots and pages of all benchmarks.

A benchmark ends with `records.finish`, which prints its tables and writes its results. `python -m benchmarks.report` makes a page and
plots from a folder of such files. `statistics` has the intervals, `records` says what a run was made with, `markdown` writes tables,
`plots` draws, `page` puts together. A benchmark of several modules has its tables beside them (`tables`); `costs` has the others'.
"""
