"""Real servers under real load: plain decoding, SGLang's NGRAM and SSSD in one interleaved run.

`arms` says what is served, `cases` what is asked, `load` and `measure` how it is timed, `prediction` what is expected before,
`summary`, `tables` and `plots` what came out.
"""
