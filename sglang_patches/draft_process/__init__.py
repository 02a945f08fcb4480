"""The program that runs a draft model beside the target: `python -m sglang_patches.draft_process`.

Read the modules in this order:

- `settings`: what it is told at its start; `arguments`: SGLang's arguments of its model;
- `metric_files`: how its metrics reach those who scrape the server;
- `server`: its loop;
- `runner`: SGLang's model runner, alone in a process;
- `model`: draft forwards, and what the model would go on with, as the target will draw;
- `sequences`: the KV slots of each session; `batches`: what a forward gives SGLang;
- `limits`: which texts and tokens it can take.
"""
