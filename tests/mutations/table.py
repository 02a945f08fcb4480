"""The changes: each gives a line of the product another meaning, as an edit might by mistake."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """file: has `old` once, of which the change makes `new`. tests: below tests/unit, that must notice."""

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
        "storage/test_data_directory.py",
    ),
    Mutant(
        "w01",  # two tenants, one key of cached prompts
        "datastore_service/protocol/names.py",
        'return f"{len(tenant)}:{tenant}:{name}"',
        'return f"{tenant}:{name}"',
        "entry/test_request_tenants.py",
    ),
    Mutant(
        "w02",  # two tenants, one name of a session
        "sglang_patches/entry/request_conversations.py",
        "hashed_name(tenant, session)",
        'hashed_name("", session)',
        "entry/test_request_conversations.py",
    ),
    Mutant(
        "w03",  # what is not to be remembered joins a session
        "sglang_patches/entry/request_conversations.py",
        ' or wishes.get("publish") is False',
        "",
        "entry/test_request_conversations.py",
    ),
    Mutant(
        "w04",  # every wish is permitted
        "sglang_patches/entry/request_wishes.py",
        "if name in WISHES and name not in _permitted:",
        "if name in WISHES and not _permitted:",
        "entry/test_request_wishes.py",
    ),
    Mutant(
        "r03",  # a prior that no tenant may read but one
        "datastore_service/server/engine_factory.py",
        "if namespace.tenant in tenants and prior.fits(namespace)",
        "if prior.fits(namespace)",
        "server/test_priors.py",
    ),
    Mutant(
        "l07",  # what is withheld enters the workspace
        "datastore_service/engine/open_sessions.py",
        'publish=False, workspace="", group="")',
        'publish=False, group="")',
        "engine/test_workspaces.py",
    ),
    Mutant(
        "guest-publishes",  # who may not publish writes into a session of who may
        "datastore_service/server/entry_rights.py",
        " or len(entry.tokens)):",
        "):",
        "server/test_entry_rights.py",
    ),
    Mutant(
        "full-asks-again",  # a session for which there is no room is sent whole in every step
        "datastore_service/engine/open_sessions.py",
        "full = entry.opening or not self._may_open()",
        "full = entry.opening",
        "engine/test_engine.py",
    ),
    Mutant(
        "gap-asks-again",
        "datastore_service/engine/open_sessions.py",
        "Status.GAP if fits else Status.OVER_BUDGET",
        "Status.GAP",
        "engine/test_engine.py",
    ),
    Mutant(
        "moved-and-published",
        "datastore_service/protocol/types.py",
        "tenant=self.tenant, withheld=True)",
        "tenant=self.tenant)",
        "client/test_fleet.py",
    ),
    Mutant(
        "unknown-snapshot-ignored",
        "datastore_service/server/forgetting.py",
        "    if faults:  #",
        "    if False:  #",
        "server/test_forget.py",
    ),
    Mutant(
        "warmed-up-in-one",
        "datastore_service/engine/live/merge_policy.py",
        "if part and size + len(document) + 1 > most:",
        "if False:",
        "engine/test_live.py",
    ),
    Mutant(
        "forget-of-no-tenant",
        "datastore_service/server/forgetting.py",
        'if not request.HasField("namespace"):',
        "if False:",
        "server/test_forget.py",
    ),
    Mutant(
        "called-again-dropped",  # a forget that is called for while it is told
        "datastore_service/server/sharing/forgetting.py",
        "if self._calls[tenant, subject] == calls:",
        "if True:",
        "server/test_share_forgets.py",
    ),
    Mutant(
        "own-message-forgets",  # what was published after the answer is forgotten, too
        "datastore_service/server/sharing/stream.py",
        "elif not self._forgets.is_own(self._keys.texts, number):",
        "else:",
        "server/test_share_forgets.py",
    ),
    Mutant(
        "taken-though-forgotten",
        "datastore_service/server/sharing/stream.py",
        "if self._forgets.covers(self._hosted.namespace.tenant, self._keys.texts, provenance):",
        "if False:",
        "server/test_share_forgets.py",
    ),
    Mutant(
        "hosted-not-told",  # the server came back empty
        "datastore_service/server/sharing/forgetting.py",
        "for digest in known}.union(digests)",
        "for digest in known}",
        "server/test_share_forgets.py",
    ),
    Mutant(
        "audit-made-anew",
        "datastore_service/server/audit.py",
        "except OSError:",
        "except ZeroDivisionError:",
        "server/test_audit.py",
    ),
    Mutant(
        "sibling-stays",  # what is withheld stays with its group
        "datastore_service/engine/open_sessions.py",
        "keeps_text=False)",
        "keeps_text=True)",
        "engine/test_groups.py",
    ),
    Mutant(
        "sibling-twice",  # a session finds its own output among its siblings'
        "datastore_service/engine/groups.py",
        "        self.owner = owner\n",
        "",
        "engine/test_groups.py",
    ),
    Mutant(
        "belief-stays",  # an update of the weights does not shake what was learned
        "sglang_patches/ledger/rates.py",
        "        self._came *= share\n",
        "",
        "step/test_acceptance_learned.py",
    ),
    Mutant(
        "old-stays",  # one epoch more than was asked for stays
        "datastore_service/engine/live/epochs.py",
        "self.ages(provenance) >= keep",
        "self.ages(provenance) > keep",
        "engine/test_epochs.py",
    ),
    Mutant(
        "epoch-late",  # the first output of an epoch is of the one before
        "datastore_service/engine/live/epochs.py",
        'side="right"',
        'side="left"',
        "engine/test_epochs.py",
    ),
    Mutant(
        "epoch-again",  # one update begins an epoch with each request
        "sglang_patches/step/epoch.py",
        "            self._changed = False\n",
        "",
        "step/test_epoch.py",
    ),
    Mutant(
        "epoch-withheld",  # who may not publish ages what others have published
        "datastore_service/server/entry_rights.py",
        ', group="", epoch=0)',
        ', group="")',
        "server/test_entry_rights.py",
    ),
    Mutant(
        "forgotten-late",  # a session that has closed publishes after its user was forgotten
        "datastore_service/engine/open_sessions.py",
        "[*self._open.values(), *self._closing]",
        "[*self._open.values()]",
        "engine/test_forget.py",
    ),
    Mutant(
        "snapshot-stays",  # the old file of a snapshot keeps what was forgotten
        "datastore_service/storage/snapshots.py",
        "            path.unlink()\n",
        "            pass\n",
        "storage/test_forget.py",
    ),
    Mutant(
        "r04",  # tenants that differ by case
        "datastore_service/server/drafting.py",
        "replace(self._hosted.namespace, tenant=tenant)",
        "replace(self._hosted.namespace, tenant=tenant.lower())",
        "test_tenants.py",
    ),
    Mutant(
        "c05",  # the client's own engine learns outputs
        "datastore_service/client/resilient.py",
        "Opening(publish=False, ",
        "Opening(",
        "client/test_resilient.py",
    ),
    Mutant(
        "d06",
        "sglang_patches/drafting/speculation.py",
        "sampling, published_from, state.tenant)",
        "sampling, published_from)",
        "drafting/test_speculation.py",
    ),
    Mutant(
        "d01",
        "sglang_patches/drafting/datastore.py",
        "start, state.text.after(start), opening=opening, tenant=state.tenant)",
        "start, state.text.after(start), opening=opening)",
        "drafting/test_datastore.py",
    ),
    Mutant(
        "d03",
        "sglang_patches/drafting/datastore.py",
        "[Entry(state.session, closing=True, tenant=state.tenant) for state in states]",
        "[Entry(state.session, closing=True) for state in states]",
        "drafting/test_datastore.py",
    ),
    Mutant(
        "g01",
        "sglang_patches/disaggregation/prefill_worker.py",
        "opening=opening, tenant=self._tenant_of(req))",
        "opening=opening)",
        "disaggregation/test_prefill_worker.py",
    ),
    Mutant(
        "g02",
        "sglang_patches/disaggregation/prefill_worker.py",
        "replace(request_opening(req, self._publish), handing_over=True)",
        "request_opening(req, self._publish)",
        "disaggregation/test_prefill_worker.py",
    ),
    Mutant(
        "r13",
        "datastore_service/server/wire.py",
        'tenant=read_name(entry.tenant, "tenant", limits)',
        "tenant=entry.tenant",
        "server/test_wire.py",
    ),
    Mutant(
        "v12",  # the steps of the rows at hand decide which noise a seed yields
        "sglang_patches/verification/target_sampling.py",
        "if info.sampling_seed is not None:",
        "if False:",
        "verification/test_verification_distribution.py",
    ),
    Mutant(
        "v08",
        "sglang_patches/verification/filters.py",
        "before <= limits",
        "before < limits",
        "verification/test_filters.py",
    ),
    Mutant(
        "s08",
        "datastore_service/storage/folder_store.py",
        "                _sync_file(path)\n",
        "",
        "storage/test_live_store.py",
    ),
    Mutant(
        "c16",  # a step waits although its stream broke and another is open
        "datastore_service/client/remote.py",
        "if reply is None and step <= self._lost:",
        "if reply is None and self._outbound is None:",
        "client/test_remote.py",
    ),
    Mutant(
        "c15",
        "datastore_service/client/remote.py",
        "until = time.monotonic() + deadline",
        "until = time.monotonic() + 100 * deadline",
        "client/test_remote.py",
    ),
    Mutant(
        "p03",
        "sglang_patches/exchange/connection.py",
        "BEAT_SECONDS = 1.0",
        "BEAT_SECONDS = 20.0",
        "exchange/test_connection.py",
    ),
    Mutant(
        "l02",
        "sglang_patches/launch/halves.py",
        "sock_connect=CONNECT_SECONDS",
        "sock_connect=None",
        "launch/test_halves.py",
    ),
    Mutant(
        "w10",  # nothing is told where no draft is wanted
        "sglang_patches/step/sources.py",
        "if not wanted and self.feed.has_news(states):",
        "if False:",
        "../conformance/test_in_process.py::test_the_datastore_hears_all_but_the_text_of_requests_that_want_no_draft",
    ),
    Mutant(
        "w12",  # a reference follows text that was taken back
        "sglang_patches/ledger/requests.py",
        "                state.reference.begin_anew()",
        "                pass",
        "drafting/test_references.py",
    ),
    Mutant(
        "w13",  # a drafted token's chance is another request's
        "sglang_patches/drafting/references.py",
        "made[row] = tree",
        "made[rows[0]] = tree",
        "drafting/test_references.py",
    ),
    Mutant(
        "d08",
        "sglang_patches/draft_side/side.py",
        "            draft.verified_at = None\n",
        "",
        "draft_side/test_draft_side.py",
    ),
    Mutant(
        "d17",
        "sglang_patches/draft_side/draft.py",
        "self.wanted, self.told = self.told, False",
        "self.wanted, self.told = True, False",
        "draft_side/test_draft_side.py",
    ),
    Mutant(
        "d18",
        "sglang_patches/draft_process/sequences.py",
        "if node not in cached.nodes:\n                    break",
        "if node not in cached.nodes:\n                    continue",
        "draft_process/test_sequences.py",
    ),
    Mutant(
        "d20",
        "sglang_patches/draft_process/sequences.py",
        "if cached.length == start:",
        "if True:",
        "draft_process/test_sequences.py",
    ),
)
OTHERS = (
    Mutant(
        "normalized-by-client",
        "sglang_patches/entry/request_checks.py",
        "    _check_given(obj.sampling_params)\n",
        "",
        "entry/test_request_checks.py",
    ),
    Mutant(
        "columns-vocabulary",
        "datastore_service/server/wire.py",
        "self._tokens.max(initial=0) >= vocab_size",
        "self._tokens.max(initial=0) > vocab_size",
        "server/test_wire.py",
    ),
    Mutant(
        "columns-to-all",  # also to a service that ignores them
        "datastore_service/client/remote.py",
        "not greeting.without_rejected, greeting.columns",
        "not greeting.without_rejected, True",
        "client/test_columns.py",
    ),
    Mutant(
        "path-chance",  # of a node after its parent, not of its path
        "sglang_patches/drafting/cache.py",
        "(negative * p, child, len(found), below, level + 1)",
        "(-p, child, len(found), below, level + 1)",
        "drafting/test_cache.py",
    ),
    Mutant(
        "known-again",
        "sglang_patches/drafting/cache.py",
        "news = tokens[trie.length - start :].tolist()",
        "news = tokens.tolist()",
        "drafting/test_cache.py",
    ),
    Mutant(
        "name-taken",
        "sglang_patches/ledger/requests.py",
        "next(name for name in map(bounded_name, names) if name not in taken)",
        "next(map(bounded_name, names))",
        "drafting/test_datastore.py",
    ),
    Mutant(
        "unread-awaited",  # a step waits for a text that the draft model has not read
        "sglang_patches/drafting/speculation.py",
        "awaited = [row for row in missing if self._sessions[states[row].session].read]",
        "awaited = missing",
        "drafting/test_speculation.py",
    ),
    Mutant(
        "told-otherwise",  # what the courier told is not compared
        "sglang_patches/drafting/speculation.py",
        "if start == outcome.start and np.array_equal(tokens, outcome.tokens[: len(tokens)]):",
        "if start == outcome.start:",
        "drafting/test_early_outcomes.py",
    ),
    Mutant(
        "refused-place",
        "sglang_patches/ledger/outcome.py",
        "Rejected(starts[tree] + depth, ",
        "Rejected(starts[tree] + depth + 1, ",
        "ledger/test_outcome.py",
    ),
    Mutant(
        "taken-back-published",
        "sglang_patches/drafting/datastore.py",
        "tenant=state.tenant, withheld=True)",
        "tenant=state.tenant)",
        "drafting/test_datastore.py",
    ),
    Mutant(
        "guesses-of-each",  # each session has the guesses of all
        "sglang_patches/draft_side/side.py",
        "max(1, self._outcomes // max(1, len(asked)))",
        "max(1, self._outcomes)",
        "draft_side/test_draft_side.py",
    ),
    Mutant(
        "wait-in-vain",
        "sglang_patches/methods/saguaro.py",
        "self._in_time.append(GRACE * seconds)",
        "self._in_time.append(seconds)",
        "methods/saguaro/test_fallback.py",
    ),
    Mutant(
        "child-likelier",
        "sglang_patches/drafting/union.py",
        "limit = 1.0 if parent < 0 else out_probs[request, taken[parent]]",
        "limit = 1.0",
        "methods/double/test_guidance.py",
    ),
    Mutant(
        "asked-published",
        "sglang_patches/methods/double.py",
        "else Opening(publish=False)",
        "else Opening()",
        "methods/double/test_phrases.py",
    ),
    Mutant(
        "silence-awaited",
        "sglang_patches/drafting/channel.py",
        "self._overdue() > LATE_SECONDS",
        "self._overdue() > self._stall_seconds",
        "drafting/test_channel.py",
    ),
    Mutant(
        "slots-leak",
        "sglang_patches/draft_process/sequences.py",
        "[*cached.slots[: cached.held].tolist(), *cached.nodes.values()]",
        "cached.slots[: cached.held].tolist()",
        "draft_process",
    ),
    Mutant(
        "mask-place",
        "sglang_patches/verification/layout.py",
        "(starts + seq_lens)[:, None, None]",
        "starts[:, None, None]",
        "verification/test_layout.py",
    ),
    Mutant(
        "ends-late",
        "sglang_patches/verification/penalties.py",
        "generated + depths < req.sampling_params.min_new_tokens",
        "generated + depths <= req.sampling_params.min_new_tokens",
        "verification/test_penalties.py",
    ),
    Mutant(
        "noise-place",
        "sglang_patches/verification/noise_verifier.py",
        "seeds, positions + 1).int()",
        "seeds, positions).int()",
        "verification/test_noise_verifier.py",
    ),
    Mutant(
        "filters-of-another",  # FlashInfer's kernels filter, and the noise is drawn by PyTorch's filters
        "sglang_patches/verification/noise_verifier.py",
        "            flashinfer=self._flashinfer,\n",
        "",
        "verification/test_noise_verifier.py",
    ),
    Mutant(
        "waited-counted",
        "sglang_patches/step/length.py",
        "last_rows, now - started - waited)",
        "last_rows, now - started)",
        "step/test_length.py",
    ),
    Mutant(
        "rows-of-one",
        "sglang_patches/step/length.py",
        "w * batch <= self._most_rows",
        "w <= self._most_rows",
        "step/test_length.py",
    ),
    Mutant(
        "tasks-left",  # a stopped service leaves its calls' tasks pending
        "datastore_service/server/rpc_server.py",
        "            task.cancel()\n",
        "            pass\n",
        "server/test_service.py",
    ),
    Mutant(
        "tenants-learned",
        "sglang_patches/step/acceptance.py",
        "self.observe(tenant, ",
        'self.observe("", ',
        "step/test_length.py",
    ),
    Mutant(
        "end-early",
        "sglang_patches/step/ends.py",
        "enumerate(run[:-1], start=1)",
        "enumerate(run[:-1])",
        "step/test_first_end.py",
    ),
    Mutant(
        "exit-place",
        "sglang_patches/early_exit/tap.py",
        "positions[rows] + 1)",
        "positions[rows])",
        "early_exit/test_tap.py",
    ),
    Mutant(
        "exit-over",  # what a later step has written is taken for this one's
        "sglang_patches/early_exit/graph_tap.py",
        "if begun[0] == step.number:",
        "if done[0] >= step.number:",
        "early_exit",
    ),
    Mutant(
        "exit-prompt",  # the answer's first token teaches nothing
        "sglang_patches/training/answers.py",
        "first = len(prompt) - 1",
        "first = len(prompt)",
        "training/test_exits.py",
    ),
    Mutant(
        "room-counted-late",
        "datastore_service/engine/open_sessions.py",
        "not counted or self._tokens + extra <= self._limits.tokens",
        "not counted or self._tokens <= self._limits.tokens",
        "engine/test_engine.py",
    ),
    Mutant(
        "refused-again",
        "datastore_service/engine/session.py",
        "if place <= last or kept <= 0:",
        "if place < last or kept <= 0:",
        "engine/test_rejected.py",
    ),
    Mutant(
        "newest-evicted",
        "datastore_service/engine/live/view.py",
        "segments=view.segments[1:]",
        "segments=view.segments[:-1]",
        "engine/test_live.py",
    ),
    Mutant(
        "run-without-end",  # a flood of one namespace holds up all others
        "datastore_service/engine/live/compactor.py",
        "        for text in reversed(self._view.current.fresh[1:]):\n            self._seal(text)\n",
        "        while self._view.current.fresh[1:]:\n            self._seal(self._view.current.fresh[-1])\n",
        "engine/test_live.py",
    ),
    Mutant(
        "oldest-is-first",
        "datastore_service/engine/live/view.py",
        "self.oldest = min(self.oldest, float(",
        "self.oldest = min(self.oldest, math.inf if self._provenance[40:] else float(",
        "engine/test_live.py",
    ),
    Mutant(
        "evicted-late",
        "datastore_service/engine/live/compactor.py",
        "            self._evict()\n",
        "            pass\n",
        "engine/test_live.py",
    ),
    Mutant(
        "limit-exceeded-at-rest",
        "datastore_service/engine/live/compactor.py",
        "        self._attempt(self._evict)\n",
        "",
        "engine/test_live.py",
    ),
    Mutant(
        "conversation-stays",
        "datastore_service/engine/conversations.py",
        "or next(iter(self._kept.values()))[0] < oldest_allowed",
        "",
        "engine/test_engine.py",
    ),
    Mutant(
        "torn-stays",
        "datastore_service/storage/log.py",
        "        if self._torn:\n            self._cut()\n",
        "",
        "storage/test_log.py",
    ),
    Mutant(
        "padding-unread",
        "datastore_service/storage/segment_file.py",
        "if any(file.read(end - file.tell())):",
        "if False:",
        "storage/test_damage.py",
    ),
    Mutant(
        "built-twice",
        "datastore_service/storage/parts.py",
        "islice(corpus, part.skipped, None)",
        "islice(corpus, 0, None)",
        "storage/test_build.py",
    ),
    Mutant(
        "claim-unheard",  # a session that was handed over ends although a stream has gone on with it
        "datastore_service/server/leases.py",
        "                for session in held:\n                    self._unclaimed.pop(session, None)\n",
        "                pass\n",
        "server/test_leases.py",
    ),
    Mutant(
        "link-out",
        "datastore_service/server/corpora.py",
        "if not path.is_relative_to(os.path.realpath(self._folder)):",
        "if False:",
        "server/test_corpora.py",
    ),
    Mutant(
        "probe-lost",  # a probe whose stream broke counts as answered
        "datastore_service/client/link.py",
        "if state is StepState.ANSWERED:",
        "if state is not StepState.PENDING:",
        "client/test_resilient.py",
    ),
    Mutant(
        "left-behind",
        "datastore_service/client/placement.py",
        "            old.post([entry.end_of_session()])  # it may only be slow, and still have the session\n",
        "",
        "client/test_fleet.py",
    ),
    Mutant(
        "conversation-elsewhere",
        "datastore_service/client/affinity.py",
        'return (opening.group or opening.conversation if opening else "") or entry.session',
        "return entry.session",
        "client/test_fleet.py",
    ),
    Mutant(
        "answer-held-whole",
        "sglang_patches/disaggregation/sizing.py",
        "demand.prompt_tokens + demand.output_tokens / 2",
        "demand.prompt_tokens + demand.output_tokens",
        "disaggregation/test_sizing.py",
    ),
    Mutant(
        "late-half",  # the second half of a request comes after the first has failed
        "sglang_patches/launch/halves.py",
        "asyncio.get_running_loop().call_later(REMEMBER_SECONDS, self._rooms.pop, name, None)",
        "self._rooms.pop(name, None)",
        "launch/test_halves.py",
    ),
    Mutant(
        "stopped-in-order",  # the datastore before the engine that uses it
        "sglang_patches/launch/processes.py",
        "for child in reversed(children):",
        "for child in children:",
        "launch/test_processes.py",
    ),
    Mutant(
        "told-beyond",  # what a service has lost is told with more than it was sent
        "sglang_patches/drafting/datastore.py",
        "state.text.between(known, sent.tokens)",
        "state.text.after(known)",
        "drafting/test_datastore.py",
    ),
    Mutant(
        "ended-told",
        "sglang_patches/drafting/datastore.py",
        "            self._sent.pop(entry.session, None)\n",
        "            pass\n",
        "drafting/test_datastore.py",
    ),
    Mutant(
        "lost-twice",  # a text that was sent again is sent once more for what was lost before
        "sglang_patches/drafting/speculation.py",
        "not came and answer.epoch >= session.opened",
        "not came",
        "drafting/test_lies.py",
    ),
    Mutant(
        "token-prefix",  # any token whose digest begins alike
        "datastore_service/server/identities.py",
        "if hmac.compare_digest(token, digest) and found is None:",
        "if hmac.compare_digest(token[:0], digest[:0]) and found is None:",
        "server/test_identities.py",
    ),
    Mutant(
        "certificate-instead",  # a wrong token is made up for by the certificate
        "datastore_service/server/identities.py",
        "        if proof.authorization:\n            return self._by",
        "        if proof.authorization and not proof.names:\n            return self._by",
        "server/test_identity_calls.py",
    ),
    Mutant(
        "dots-in-labels",
        "datastore_service/server/identities.py",
        '{"dns:": "[^.]+"',
        '{"dns:": ".+"',
        "server/test_identities.py",
    ),
    Mutant(
        "jwt-without-end",
        "datastore_service/server/json_web_tokens.py",
        '{"require": ["exp"], ',
        '{"require": [], ',
        "server/test_identities.py",
    ),
    Mutant(
        "jwt-for-anybody",
        "datastore_service/server/json_web_tokens.py",
        '"verify_aud": self._audience is not None',
        '"verify_aud": False',
        "server/test_identities.py",
    ),
    Mutant(
        "right-of-the-past",  # a stream keeps the rights with which it began
        "datastore_service/server/admission.py",
        "if (known := self._identities()) is not self._known:",
        "if (known := self._known) is not self._known:",
        "server/test_identity_changes.py",
    ),
    Mutant(
        "closing-published",  # a right to publish that was withdrawn meanwhile
        "datastore_service/server/entry_rights.py",
        "return replace(entry, opening=opening, withheld=True)",
        "return replace(entry, opening=opening)",
        "server/test_identity_changes.py",
    ),
    Mutant(
        "lists-of-all",
        "datastore_service/server/admin.py",
        "if identity.may(Right.READ, each.namespace.tenant))",
        "if identity.may(Right.READ, None))",
        "server/test_identity_calls.py",
    ),
    Mutant(
        "unread-certificate",  # the one of the start for ever
        "datastore_service/server/credentials.py",
        "if (now := tls.value) is shown:",
        "if (now := shown) is shown:",
        "server/test_identity_changes.py",
    ),
    Mutant(
        "place-not-given-back",  # sessions that end count for ever
        "datastore_service/engine/open_sessions.py",
        "self._share.end_sessions(1)",
        "self._share.end_sessions(0)",
        "server/test_quotas.py",
    ),
    Mutant(
        "text-under-way",  # two outputs at once exceed the quota
        "datastore_service/server/tenant_use.py",
        "self._live_tokens() + self._adding + tokens",
        "self._live_tokens() + tokens",
        "server/test_quotas.py",
    ),
    Mutant(
        "two-in-one-place",  # two data directories back up to one place
        "datastore_service/storage/backup.py",
        "if owner and owner != own:",
        "if owner and not own:",
        "storage/test_backup.py",
    ),
    Mutant(
        "earlier-name",  # a copy takes its own text again
        "datastore_service/engine/live/view.py",
        'own = found[of["origin"][found] == 0]',
        "own = found[:0]",
        "engine/test_sharing.py",
    ),
    Mutant(
        "copy-not-told",  # a process with a copy of the data directory waits for ever, and says nothing
        "datastore_service/server/sharing/lease.py",
        "if now > self._refused + LEASE_SECONDS:",
        "if now > self._refused + 1000 * LEASE_SECONDS:",
        "server/test_sharing.py",
    ),
    Mutant(
        "lease-of-the-killed",  # what a killed process has left is taken for another that runs
        "datastore_service/server/sharing/lease.py",
        "if now > self._refused + LEASE_SECONDS:",
        "if now >= self._refused:",
        "server/test_sharing.py",
    ),
    Mutant(
        "lost-before-it-is-added",  # the server has lost what it was told, and the output after that is added
        "datastore_service/server/sharing/stream.py",
        "if self._told(transaction) < (self._sent or 0):",
        "if False:",
        "server/test_sharing.py",
    ),
    Mutant(
        "stream-that-ended",
        "datastore_service/server/drafting.py",
        "self._counted.end_stream()",
        "self._counted.turn()",
        "server/test_quotas.py",
    ),
    Mutant(
        "counter-began-anew",  # one that fell is said to have counted down
        "datastore_service/server/metric_points.py",
        "if value < before:",
        "if before == inf:",
        "server/test_metrics_export.py",
    ),
    Mutant(
        "signal-of-its-own",  # the endpoint of spans switches metrics on
        "datastore_service/server/otlp.py",
        'own, common = f"OTEL_EXPORTER_OTLP_{signal.upper()}_{name}"',
        'own, common = f"OTEL_EXPORTER_OTLP_TRACES_{name}"',
        "server/test_otlp.py",
    ),
    Mutant(
        "files-of-the-start",  # what replaces a certificate is not looked at
        "datastore_service/server/sharing/address.py",
        "self.files.check()  #",
        "pass  #",
        "server/test_share_address.py",
    ),
    Mutant(
        "own-quota",  # who may read a tenant lifts its bounds
        "datastore_service/server/admission.py",
        'Right.QUOTA: ("SetQuota",),',
        'Right.READ: ("SetQuota",),',
        "server/test_identity_calls.py",
    ),
    Mutant(
        "number-used-twice",  # what a full disk has of a record is encrypted as the record after it
        "datastore_service/storage/log.py",
        "            self._number += 1\n            place",
        "            self._number = size + 1\n            place",
        "storage/test_encrypted_files.py",
    ),
    Mutant(
        "file-anywhere",  # a log can take another's place
        "datastore_service/storage/file_cipher.py",
        'b"file " + kind.encode()',
        'b"file " + kind.encode()[:1]',
        "storage/test_encrypted_files.py",
    ),
    Mutant(
        "one-salt",  # two files have one key and the same nonces
        "datastore_service/storage/file_cipher.py",
        "os.urandom(_SALT_BYTES)",
        "bytes(_SALT_BYTES)",
        "storage/test_encrypted_files.py",
    ),
    Mutant(
        "one-tenant",  # two tenants have one key
        "datastore_service/storage/encryption_keys.py",
        "namespace.tokenizer, namespace.tenant]",
        "namespace.tokenizer]",
        "storage/test_encrypted_files.py",
    ),
    Mutant(
        "earlier-key-stays",
        "datastore_service/storage/rewriting.py",
        "_key_of(path, own) != own.newest",
        "not _key_of(path, own) and own.newest",
        "storage/test_encryption.py",
    ),
    Mutant(
        "written-through-a-link",  # a start after a kill empties the live tier's segment
        "datastore_service/storage/rewriting.py",
        "    _temporary(due.path).unlink(missing_ok=True)\n",
        "",
        "storage/test_encryption.py",
    ),
    Mutant(
        "damage-encrypted",  # as if it were whole
        "datastore_service/storage/rewriting.py",
        "    if find_encrypted(path, keys) is None:\n        _verify(path, content)\n",
        "",
        "storage/test_encryption.py",
    ),
    Mutant(
        "snapshot-without-its-key",  # a start goes on without it
        "datastore_service/storage/rewriting.py",
        'if error.field == "key":',
        "if False:",
        "storage/test_encryption.py",
    ),
    Mutant(
        "found-unencrypted-alone",  # a search for forgotten text finds nothing in what is encrypted
        "datastore_service/storage/search.py",
        "finder.found_in(data) | finder.found_in(content.decrypted)",
        "finder.found_in(data)",
        "storage/test_encryption.py",
    ),
    Mutant(
        "provenance-unencrypted",
        "datastore_service/storage/live_segment.py",
        "with writing(provenance_path(segment), keys, ",
        "with writing(provenance_path(segment), UNENCRYPTED, ",
        "storage/test_encryption.py",
    ),
)
MUTANTS = SURVIVORS + OTHERS
