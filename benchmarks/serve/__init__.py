"""Real servers under real load: plain decoding, SGLang's NGRAM and SSSD in one interleaved run.

`variants` says what is served, `cases` what is asked, `measure` how it is timed, `prediction` what is expected before,
`summary` what came out, `tables` how it is shown; benchmarks.report has the raw record and plots.
"""
