"""What specstore gains and what it costs, one command a question:

    python -m benchmarks.replay         tokens per step of every drafting method, on recorded answers
    python -m benchmarks.serve          throughput and latency of real servers, against plain decoding
    python -m benchmarks.engine         time of a draft by the size of the prior
    python -m benchmarks.rpc            time of a draft over gRPC
    python -m benchmarks.load           sessions and steps that one datastore service carries, and where its limit is
    python -m benchmarks.strangers      time of a draft while strangers hold the service's ports, or another tenant is noisy
    python -m benchmarks.sharing        drafts of services that share their outputs, and what sharing costs
    python -m benchmarks.upkeep         time and memory of building, merging, sessions and backups
    python -m benchmarks.host_time      time of a decode step on the host before the forward pass
    python -m benchmarks.pipeline       throughput of drafting beside the target, on a virtual clock
    python -m benchmarks.beside         the same on real servers, beside what the simulation says before
    python -m benchmarks.rows           rows by request against one width, on a virtual clock
    python -m benchmarks.rollouts       steps saved in a GRPO-like loop, and what text of older weights does
    python -m benchmarks.predictions    what a prediction saves by its edits, and what a wrong one costs
    python -m benchmarks.agent          an agent's loop over stock SGLang, NGRAM and SSSD
    python -m benchmarks.roofline       cost of verification on a GPU that is not at hand, by calculation
    python -m benchmarks.record         answers of a served model, which replay and serve need
    python -m benchmarks.report         page and plots from what the others wrote

Each prints its tables; `--json FILE` keeps the results with a manifest (versions, commit, machine, seeds). `make bench` runs
replay, serve and roofline in a short form and makes their page. What docs/ shows is made by:

    docs/benchmarks.md              report docs/benchmarks/two-cores --page docs/benchmarks.md
    docs/benchmarks/NAME/README.md  report docs/benchmarks/NAME; the page lists the commands that measure again
    docs/engine.png                 engine --tokenizer FILE --millions 1 2 4 8 16 32 64 --json var/E/engine.json, report var/E

docs/split-latency.png is by `split_latency` of commit bf49fff, which is no longer here.
"""
