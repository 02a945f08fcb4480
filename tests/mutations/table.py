"""The changes: each gives a line of the product another meaning, as an edit might by mistake."""

from __future__ import annotations

from typing import NamedTuple

_CLIENT, _SERVER, _STORAGE, _ENGINE = (
    f"tests/unit/{name}" for name in ("client", "server", "storage", "engine")
)
_DRAFTING, _WORKERS, _VERIFICATION = (
    f"tests/unit/{name}" for name in ("drafting", "workers", "verification")
)
_EARLY_EXIT, _DISAGGREGATION, _LAUNCH = (
    f"tests/unit/{name}" for name in ("early_exit", "disaggregation", "launch")
)


_DOUBLE, _PROCESS, _SAGUARO = (f"tests/unit/drafting/{name}" for name in ("double", "process", "saguaro"))
_TENANTS = "tests/unit/test_tenants.py"


class Mutant(NamedTuple):
    """file: has `old` once, of which the change makes `new`. tests: that must notice."""

    name: str
    file: str
    old: str
    new: str
    tests: str


# What an audit of the tests found that none of them noticed.
SURVIVORS = (
    Mutant(
        "s12",  # two tenants, one folder
        "datastore_service/storage/data_directory.py",
        "names = [namespace.model, namespace.tokenizer, namespace.tenant]\n    digest",
        "names = [namespace.model, namespace.tokenizer]\n    digest",
        _STORAGE,
    ),
    Mutant(
        "w01",  # two tenants, one key of cached prompts
        "sglang_patches/workers/request_tenants.py",
        'return f"{len(tenant)}:{tenant}:{name}"',
        'return f"{tenant}:{name}"',
        _WORKERS,
    ),
    Mutant(
        "r04",  # tenants that differ by case
        "datastore_service/server/drafting.py",
        "replace(self._hosted.namespace, tenant=tenant)",
        "replace(self._hosted.namespace, tenant=tenant.lower())",
        _TENANTS,
    ),
    Mutant(
        "c05",  # the client's own engine learns outputs
        "datastore_service/client/resilient.py",
        'conversation="", publish=False)',
        'conversation="")',
        _CLIENT,
    ),
    Mutant(
        "d06",
        "sglang_patches/drafting/speculation.py",
        "sampling, published_from, state.tenant)",
        "sampling, published_from)",
        _DRAFTING,
    ),
    Mutant(
        "d01",
        "sglang_patches/drafting/datastore.py",
        "start, state.text.after(start), closing=True, tenant=state.tenant)",
        "start, state.text.after(start), closing=True)",
        _DRAFTING,
    ),
    Mutant(
        "d03",
        "sglang_patches/drafting/datastore.py",
        "[Entry(state.session, closing=True, tenant=state.tenant) for state in states]",
        "[Entry(state.session, closing=True) for state in states]",
        _DRAFTING,
    ),
    Mutant(
        "g01",
        "sglang_patches/disaggregation/prefill_worker.py",
        "opening=opening, tenant=self._tenant_of(req))",
        "opening=opening)",
        _DISAGGREGATION,
    ),
    Mutant(
        "g02",
        "sglang_patches/disaggregation/prefill_worker.py",
        "replace(request_opening(req, self._publish), handing_over=True)",
        "request_opening(req, self._publish)",
        _DISAGGREGATION,
    ),
    Mutant(
        "r13",
        "datastore_service/server/wire.py",
        'tenant=read_name(entry.tenant, "tenant", limits)',
        "tenant=entry.tenant",
        _SERVER,
    ),
    Mutant(
        "v12",  # the steps of the rows at hand decide which noise a seed yields
        "sglang_patches/verification/target_sampling.py",
        "if info.sampling_seed is not None:",
        "if False:",
        _VERIFICATION,
    ),
    Mutant(
        "v08",
        "sglang_patches/verification/filters.py",
        "before <= limits",
        "before < limits",
        _VERIFICATION,
    ),
    Mutant(
        "s08",
        "datastore_service/storage/folder_store.py",
        "                _sync_file(path)\n",
        "",
        _STORAGE,
    ),
    Mutant(
        "c16",  # a step waits although its stream broke and another is open
        "datastore_service/client/remote.py",
        "if reply is None and step <= self._lost:",
        "if reply is None and self._outbound is None:",
        _CLIENT,
    ),
    Mutant(
        "c15",
        "datastore_service/client/remote.py",
        "until = time.monotonic() + deadline",
        "until = time.monotonic() + 100 * deadline",
        _CLIENT,
    ),
    Mutant(
        "p03",
        "sglang_patches/drafting/process/connection.py",
        "BEAT_SECONDS = 1.0",
        "BEAT_SECONDS = 20.0",
        _DRAFTING,
    ),
    Mutant(
        "l02",
        "sglang_patches/launch/halves.py",
        "sock_connect=CONNECT_SECONDS",
        "sock_connect=None",
        _LAUNCH,
    ),
    Mutant(
        "c09",
        "datastore_service/client/resilient.py",
        "        self._forget([closing])\n",
        "",
        _CLIENT,
    ),
    Mutant(
        "w10",  # nothing is told where no draft is wanted
        "sglang_patches/workers/decode.py",
        "if self.datastore.has_news(states):",
        "if False:",
        _WORKERS,
    ),
    Mutant(
        "d08",
        "sglang_patches/drafting/draft_side.py",
        "            draft.verified_at = None\n",
        "",
        _DRAFTING,
    ),
    Mutant(
        "d17",
        "sglang_patches/drafting/draft.py",
        "self.wanted, self.told = self.told, False",
        "self.wanted, self.told = True, False",
        _DRAFTING,
    ),
    Mutant(
        "d18",
        "sglang_patches/drafting/process/sequences.py",
        "if node not in cached.nodes:\n                    break",
        "if node not in cached.nodes:\n                    continue",
        _PROCESS,
    ),
    Mutant(
        "d20",
        "sglang_patches/drafting/process/sequences.py",
        "if cached.length == start:",
        "if True:",
        _PROCESS,
    ),
)
OTHERS = (
    Mutant(
        "path-chance",  # of a node after its parent, not of its path
        "sglang_patches/drafting/cache.py",
        "(negative * p, child, len(found), below, level + 1)",
        "(-p, child, len(found), below, level + 1)",
        _DRAFTING,
    ),
    Mutant(
        "known-again",
        "sglang_patches/drafting/cache.py",
        "trie.advance(tokens[trie.length - start :].tolist())",
        "trie.advance(tokens.tolist())",
        _DRAFTING,
    ),
    Mutant(
        "name-taken",
        "sglang_patches/drafting/requests.py",
        "next(name for name in map(bounded_name, names) if name not in taken)",
        "next(map(bounded_name, names))",
        _DRAFTING,
    ),
    Mutant(
        "unread-awaited",  # a step waits for a text that the draft model has not read
        "sglang_patches/drafting/speculation.py",
        "awaited = [row for row in missing if states[row].session in self._read]",
        "awaited = missing",
        _DRAFTING,
    ),
    Mutant(
        "told-otherwise",  # what the courier told is not compared
        "sglang_patches/drafting/speculation.py",
        "if start == outcome.start and np.array_equal(tokens, outcome.tokens[: len(tokens)]):",
        "if start == outcome.start:",
        _DRAFTING,
    ),
    Mutant(
        "refused-place",
        "sglang_patches/drafting/outcome.py",
        "Rejected(starts[tree] + depth, ",
        "Rejected(starts[tree] + depth + 1, ",
        _DRAFTING,
    ),
    Mutant(
        "taken-back-published",
        "sglang_patches/drafting/datastore.py",
        "tenant=state.tenant, withheld=True)",
        "tenant=state.tenant)",
        _DRAFTING,
    ),
    Mutant(
        "guesses-of-each",  # each session has the guesses of all
        "sglang_patches/drafting/draft_side.py",
        "max(1, self._outcomes // max(1, len(asked)))",
        "max(1, self._outcomes)",
        _DRAFTING,
    ),
    Mutant(
        "wait-in-vain",
        "sglang_patches/drafting/saguaro/fallback.py",
        "self._in_time.append(GRACE * seconds)",
        "self._in_time.append(seconds)",
        _SAGUARO,
    ),
    Mutant(
        "child-likelier",
        "sglang_patches/drafting/double/union.py",
        "limit = 1.0 if parent < 0 else out_probs[request, taken[parent]]",
        "limit = 1.0",
        _DOUBLE,
    ),
    Mutant(
        "asked-published",
        "sglang_patches/drafting/double/phrases.py",
        "else Opening(publish=False)",
        "else Opening()",
        _DOUBLE,
    ),
    Mutant(
        "silence-awaited",
        "sglang_patches/drafting/process_channel.py",
        "self._overdue() > LATE_SECONDS",
        "self._overdue() > self._stall_seconds",
        _DRAFTING,
    ),
    Mutant(
        "slots-leak",
        "sglang_patches/drafting/process/sequences.py",
        "[*cached.slots[: cached.held].tolist(), *cached.nodes.values()]",
        "cached.slots[: cached.held].tolist()",
        _PROCESS,
    ),
    Mutant(
        "mask-place",
        "sglang_patches/verification/layout.py",
        "(starts + seq_lens)[:, None, None]",
        "starts[:, None, None]",
        _VERIFICATION,
    ),
    Mutant(
        "ends-late",
        "sglang_patches/verification/penalties.py",
        "sum(axis=1) < req.sampling_params.min_new_tokens",
        "sum(axis=1) <= req.sampling_params.min_new_tokens",
        _VERIFICATION,
    ),
    Mutant(
        "noise-place",
        "sglang_patches/verification/noise_verifier.py",
        "seeds, positions + 1).int()",
        "seeds, positions).int()",
        _VERIFICATION,
    ),
    Mutant(
        "filters-of-another",  # FlashInfer's kernels filter, and the noise is drawn by PyTorch's filters
        "sglang_patches/verification/noise_verifier.py",
        "            flashinfer=self._flashinfer,\n",
        "",
        _VERIFICATION,
    ),
    Mutant(
        "waited-counted",
        "sglang_patches/workers/length.py",
        "last_width, now - started - waited)",
        "last_width, now - started)",
        _WORKERS,
    ),
    Mutant(
        "rows-of-one",
        "sglang_patches/workers/length.py",
        "w * batch <= self._most_rows",
        "w <= self._most_rows",
        _WORKERS,
    ),
    Mutant(
        "pending-first",
        "sglang_patches/workers/base.py",
        "row[count - lag : count]",
        "row[:lag]",
        _WORKERS,
    ),
    Mutant(
        "tenants-learned",
        "sglang_patches/workers/acceptance.py",
        "self.of(tenant).observe(",
        'self.of("").observe(',
        _WORKERS,
    ),
    Mutant(
        "end-early",
        "sglang_patches/workers/first_end.py",
        "enumerate(run[:-1], start=1)",
        "enumerate(run[:-1])",
        _WORKERS,
    ),
    Mutant(
        "exit-place",
        "sglang_patches/early_exit/tap.py",
        "positions[rows] + 1)",
        "positions[rows])",
        _EARLY_EXIT,
    ),
    Mutant(
        "exit-over",  # what a later step has written is taken for this one's
        "sglang_patches/early_exit/graph_tap.py",
        "if begun[0] == step.number:",
        "if done[0] >= step.number:",
        _EARLY_EXIT,
    ),
    Mutant(
        "exit-prompt",  # the answer's first token teaches nothing
        "sglang_patches/early_exit/states.py",
        "first = len(prompt) - 1",
        "first = len(prompt)",
        _EARLY_EXIT,
    ),
    Mutant(
        "room-counted-late",
        "datastore_service/engine/open_sessions.py",
        "if self._tokens + extra > self._limits.tokens:",
        "if self._tokens > self._limits.tokens:",
        _ENGINE,
    ),
    Mutant(
        "refused-again",
        "datastore_service/engine/session.py",
        "if place <= last or kept <= 0:",
        "if place < last or kept <= 0:",
        _ENGINE,
    ),
    Mutant(
        "newest-evicted",
        "datastore_service/engine/live/view.py",
        "segments=view.segments[1:]",
        "segments=view.segments[:-1]",
        _ENGINE,
    ),
    Mutant(
        "conversation-stays",
        "datastore_service/engine/conversations.py",
        "or next(iter(self._kept.values()))[0] < oldest_allowed",
        "",
        _ENGINE,
    ),
    Mutant(
        "torn-stays",
        "datastore_service/storage/log.py",
        "        if self._torn:\n            os.ftruncate(self._descriptor, self.size)\n",
        "",
        _STORAGE,
    ),
    Mutant(
        "padding-unread",
        "datastore_service/storage/segment_file.py",
        "if any(file.read(end - file.tell())):",
        "if False:",
        _STORAGE,
    ),
    Mutant(
        "built-twice",
        "datastore_service/storage/parts.py",
        "islice(corpus, part.skipped, None)",
        "islice(corpus, 0, None)",
        _STORAGE,
    ),
    Mutant(
        "claim-unheard",  # a session that was handed over ends although a stream has gone on with it
        "datastore_service/server/leases.py",
        "                for session in held:\n                    self._unclaimed.pop(session, None)\n",
        "                pass\n",
        _SERVER,
    ),
    Mutant(
        "link-out",
        "datastore_service/server/corpora.py",
        "if not path.is_relative_to(os.path.realpath(self._folder)):",
        "if False:",
        _SERVER,
    ),
    Mutant(
        "probe-lost",  # a probe whose stream broke counts as answered
        "datastore_service/client/link.py",
        "if state is StepState.ANSWERED:",
        "if state is not StepState.PENDING:",
        _CLIENT,
    ),
    Mutant(
        "left-behind",
        "datastore_service/client/placement.py",
        "            old.post([entry.end_of_session()])  # it may only be slow, and still have the session\n",
        "",
        _CLIENT,
    ),
    Mutant(
        "conversation-elsewhere",
        "datastore_service/client/affinity.py",
        'return (opening.conversation if opening else "") or entry.session',
        "return entry.session",
        _CLIENT,
    ),
    Mutant(
        "answer-held-whole",
        "sglang_patches/disaggregation/sizing.py",
        "demand.prompt_tokens + demand.output_tokens / 2",
        "demand.prompt_tokens + demand.output_tokens",
        _DISAGGREGATION,
    ),
    Mutant(
        "late-half",  # the second half of a request comes after the first has failed
        "sglang_patches/launch/halves.py",
        "asyncio.get_running_loop().call_later(REMEMBER_SECONDS, self._rooms.pop, name, None)",
        "self._rooms.pop(name, None)",
        _LAUNCH,
    ),
    Mutant(
        "stopped-in-order",  # the datastore before the engine that uses it
        "sglang_patches/launch/processes.py",
        "for child in reversed(children):",
        "for child in children:",
        _LAUNCH,
    ),
)
MUTANTS = SURVIVORS + OTHERS
