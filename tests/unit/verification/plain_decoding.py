"""Plain decoding as the oracle: SGLang's own penalizers, sampling parameters and sampler, one token at a time.

The model is a function from a token sequence to random logits, so every node of a tree has the logits that plain
decoding would see after the same tokens.
"""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler, top_k_top_p_min_p_sampling_from_probs_torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context, get_exec, get_parallel
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.ngram_info import NgramVerifyInput

from sglang_patches.verification.layout import PADDING, lay_out
from sglang_patches.verification.verifier import TargetDraws

EOS = 1


@contextmanager
def one_rank():
    """This process is a server's only rank."""
    group = SimpleNamespace(device_group=None, world_size=1)
    with (
        get_parallel().override(tp_group=group, tp_rank=0),
        mock.patch.object(parallel_state, "_TP", group),  # where SGLang 0.5.17 looks
    ):
        yield


@contextmanager
def sampler_on_cpu(deterministic=False):
    """SGLang's sampler as a CPU server builds it; compiled helpers run eagerly, which changes no arithmetic."""
    with (
        get_context().override_server_args(device="cpu", sampling_backend="pytorch"),
        get_exec().deterministic.override(enable_deterministic_inference=deterministic),
        get_exec().features.override(enable_custom_logit_processor=True),
        one_rank(),
        torch.compiler.set_stance("force_eager"),
    ):
        yield Sampler()


class RandomModel:
    """Logits ``[vocab]`` that depend on the whole sequence and on nothing else."""

    def __init__(self, vocab, seed=0, scale=2.0):
        self.vocab, self.seed, self.scale = vocab, seed, scale

    def __call__(self, tokens):
        rng = np.random.default_rng([self.seed, *tokens])
        return torch.from_numpy(rng.normal(scale=self.scale, size=self.vocab).astype(np.float32))


class Request(SimpleNamespace):
    """The part of a Req that sampling reads; like a Req, equal to itself alone."""

    __eq__, __hash__ = object.__eq__, object.__hash__


def make_request(prompt=(3, 4), output=(5,), processor=None, grammar=None, logprobs=(0, None), **params):
    top_logprobs_num, token_ids_logprob = logprobs
    return Request(
        sampling_params=SamplingParams(**params),
        origin_input_ids=list(prompt),
        output_ids=list(output),
        custom_logit_processor=processor,
        grammar=grammar,
        eos_token_ids={EOS},
        tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=EOS),
        return_sampling_mask=False,
        sampling_logprobs_mode=None,
        top_logprobs_num=top_logprobs_num,
        token_ids_logprob=token_ids_logprob,
    )


class Batch:
    """The part of a ScheduleBatch that sampling reads."""

    def __init__(self, reqs, vocab, return_logprob=False):
        self.reqs, self.device = reqs, "cpu"
        self.forward_mode = ForwardMode.TARGET_VERIFY
        self.return_logprob = return_logprob
        self.top_logprobs_nums = [r.top_logprobs_num for r in reqs]
        self.token_ids_logprobs = [r.token_ids_logprob for r in reqs]
        self.sampling_info = SamplingBatchInfo.from_schedule_batch(self, vocab)
        if any(r.grammar for r in reqs):
            self.sampling_info.grammars = [r.grammar for r in reqs]

    def cumulate(self, tokens):
        self.sampling_info.penalizer_orchestrator.cumulate_output_tokens(torch.tensor(tokens))


def _prepared(model, request, path, return_logprob=False):
    """Plain decoding's sampling info and adjusted logits ``[1, vocab]`` after the request's output and ``path``."""
    batch = Batch([request], model.vocab, return_logprob)
    generated = [*request.output_ids, *path]
    for token in generated:
        batch.cumulate([token])
    info = batch.sampling_info.copy_for_forward()
    info.update_regex_vocab_mask()
    logits = model([*request.origin_input_ids, *generated])[None].clone()
    info.apply_logits_bias(logits)
    position = torch.tensor([len(request.origin_input_ids) + len(generated) - 1])
    return batch, info, logits, position


def plain_token(model, sampler, request, path, return_logprob=False):
    """(token, the sampler's output) of one plain decode step."""
    batch, info, logits, position = _prepared(model, request, path, return_logprob)
    output = LogitsProcessorOutput(next_token_logits=logits)
    # Token synchronisation between ranks follows grammars; here there is one rank and no process group.
    info.grammars = None
    nums, ids = batch.top_logprobs_nums, batch.token_ids_logprobs
    return int(sampler(output, info, return_logprob, nums, ids, position)[0]), output


def plain_tokens(model, sampler, request, count):
    path = []
    for _ in range(count):
        path.append(plain_token(model, sampler, request, path)[0])
    return path


def plain_tokens_of_batch(model, sampler, requests, texts):
    """The next token of each request's text, from one plain decode step of all of them. Without penalties."""
    output = LogitsProcessorOutput(next_token_logits=torch.stack([model(text) for text in texts]))
    info = Batch(requests, model.vocab).sampling_info.copy_for_forward()
    none = [0] * len(texts), [None] * len(texts)
    return sampler(output, info, False, *none, torch.tensor([len(text) - 1 for text in texts])).tolist()


def plain_distribution(model, sampler, request, path):
    """float64 ``[vocab]``: the distribution plain decoding draws the next token from."""
    _, info, logits, _ = _prepared(model, request, path)
    sampler._preprocess_logits(logits, info)
    probs = torch.softmax(logits / info.temperatures, dim=-1)
    return filtered(probs, info.top_ks, info.top_ps, info.min_ps)[0].double().numpy()


def filtered(probs, top_ks, top_ps, min_ps):
    """``[rows, vocab]``: the distributions that SGLang's filters leave, taken from what it hands to the draw."""
    with mock.patch.object(torch, "multinomial", wraps=torch.multinomial) as draw:
        top_k_top_p_min_p_sampling_from_probs_torch(probs, top_ks, top_ps, min_ps, True, None, None)
    weights, ids = draw.call_args.args[0].double(), probs.sort(dim=-1, descending=True).indices
    return torch.zeros_like(weights).scatter_(1, ids, weights / weights.sum(dim=-1, keepdim=True))


class Tree:
    """A draft tree: node 0 is the last emitted token; ``parents[i] < i``, or None for unlinked padding."""

    def __init__(self, tokens, parents):
        self.tokens, self.parents = list(tokens), list(parents)

    def path(self, node):
        path = []
        while node != 0:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]

    def children(self, node):
        return [c for c, parent in enumerate(self.parents) if c and parent == node]

    def padded(self, size):
        extra = size - len(self.tokens)
        return Tree(self.tokens + [0] * extra, self.parents + [None] * extra)

    def longest_match(self, tokens):
        """Drafted tokens a target that emits ``tokens`` would accept."""
        node = 0
        for count, token in enumerate(tokens):
            node = next((c for c in self.children(node) if self.tokens[c] == token), None)
            if node is None:
                return count
        return len(tokens)


def random_tree(rng, model, request, size, follow=0.6):
    """A tree whose nodes often carry the model's favourite token, so that paths are accepted."""
    tree = Tree([request.output_ids[-1]], [None])
    for node in range(1, size):
        parent = int(rng.integers(max(0, node - 3), node))
        sequence = [*request.origin_input_ids, *request.output_ids, *tree.path(parent)]
        favourite = int(model(sequence).argmax())
        tree.tokens.append(favourite if rng.random() < follow else int(rng.integers(model.vocab)))
        tree.parents.append(parent)
    return tree


def verify_input_of(trees, requests):
    size = max(len(t.tokens) for t in trees)
    trees = [t.padded(size) for t in trees]
    first, sibling = np.full((2, len(trees), size), -1)
    depth = np.zeros((len(trees), size), dtype=int)
    for r, tree in enumerate(trees):
        for node in range(size):
            children = tree.children(node)
            first[r, node] = children[0] if children else -1
            for left, right in zip(children, children[1:], strict=False):
                sibling[r, left] = right
            depth[r, node] = 0 if tree.parents[node] is None else len(tree.path(node))
    root = np.array([[len(q.origin_input_ids) + len(q.output_ids) - 1] for q in requests])
    return NgramVerifyInput(
        draft_token=torch.tensor([t.tokens for t in trees]).flatten(),
        custom_mask=torch.ones(1, dtype=torch.bool),
        positions=torch.from_numpy((root + depth).flatten()),
        retrieve_index=torch.arange(len(trees) * size).view(len(trees), size),
        retrieve_next_token=torch.from_numpy(first),
        retrieve_next_sibling=torch.from_numpy(sibling),
        draft_token_num=size,
    )


def layout_of(trees, requests, by_request=False):
    """The same trees on the host, as the worker has them.

    by_request: whether each request has rows for its own nodes alone.
    """
    widths = np.array([len(t.tokens) for t in trees]) if by_request else None
    size = max(len(t.tokens) for t in trees)
    trees = [t.padded(size) for t in trees]
    parents = [[PADDING if p is None else p - 1 for p in t.parents[1:]] for t in trees]
    packed = np.array([[t.tokens[1:], p] for t, p in zip(trees, parents, strict=True)], np.int32)
    lengths = np.array([len(q.origin_input_ids) + len(q.output_ids) - 1 for q in requests])
    packed = packed.reshape(len(trees), 2, size - 1)
    return lay_out(packed, np.array([t.tokens[0] for t in trees]), lengths, widths)


def tree_logits(model, trees, requests):
    """``[requests * nodes, vocab]``; rows of padding are zero."""
    size = max(len(t.tokens) for t in trees)
    logits = torch.zeros(len(trees), size, model.vocab)
    for r, (tree, request) in enumerate(zip(trees, requests, strict=True)):
        for node, parent in enumerate(tree.parents):
            if node == 0 or parent is not None:
                sequence = [*request.origin_input_ids, *request.output_ids, *tree.path(node)]
                logits[r, node] = model(sequence)
    return logits.flatten(0, 1)


def verify(model, scheme, trees, requests, grammar_mask=None, return_logprob=False, by_request=False):
    """One step of a verifier, of `TargetDraws` if it is given a sampler; returns (emitted tokens per request, logits_output)."""
    scheme = TargetDraws(scheme) if isinstance(scheme, Sampler) else scheme
    verify_input, logits = verify_input_of(trees, requests), tree_logits(model, trees, requests)
    layout = layout_of(trees, requests, by_request)
    if by_request:  # as a forward with these rows leaves them
        verify_input.positions, logits = verify_input.positions[layout.rows], logits[layout.rows]
        if grammar_mask is not None:
            grammar_mask = grammar_mask._replace(vocab_mask=grammar_mask.vocab_mask[layout.rows])
    batch = Batch(requests, model.vocab, return_logprob)
    batch.sampling_info = batch.sampling_info.copy_for_forward()
    output = LogitsProcessorOutput(next_token_logits=logits)
    result = scheme.verify(verify_input, layout, batch, output, grammar_mask)
    return emitted_tokens(*result), output


def emitted_tokens(predict, accept_lens, accept_index):
    """As the worker commits them: predict[accept_index], the first accept_lens of each row."""
    tokens = predict[accept_index.long()].tolist()
    return [row[:n] for row, n in zip(tokens, accept_lens.tolist(), strict=True)]
