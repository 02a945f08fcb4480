"""Training on a tiny model: what is learned, what is held out, and that an interrupted run goes on."""

import io
import json

import pytest

pytest.importorskip("torch")

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from sglang_patches.training import exits as module  # noqa: E402
from sglang_patches.training.answers import States, Text, collect, read_answers  # noqa: E402
from sglang_patches.training.exits import OtherRunError, Run, Training, train  # noqa: E402
from tests.support.tiny_exits import train_tiny_exits  # noqa: E402
from tests.support.tiny_model import write_spelling_model  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_spelling_model(tmp_path_factory.mktemp("model"))


def states(tokens=2000, hidden=16, vocabulary=40, seed=0):
    """The expected token is a linear function of a layer's state; of the other layer's it is not."""
    noise = torch.Generator().manual_seed(seed)
    head = torch.randn(vocabulary, hidden, generator=noise)
    known = torch.randn(tokens, hidden, generator=noise)
    turned = known @ torch.linalg.qr(torch.randn(hidden, hidden, generator=noise))[0]
    expected = (known @ head.T).argmax(-1)
    text = torch.arange(tokens) // 100
    return States({1: torch.randn(tokens, hidden, generator=noise), 3: turned}, expected, text), head


def make(of, folder, epochs=2, **identity):
    states, head = of
    return Training(states, head, epochs, {"run": "a", **identity}, folder / "checkpoint")


def test_what_a_layer_knows_is_learned(tmp_path):
    """Of the paper's three depths the deepest knows most: here one layer knows everything, the other nothing."""
    of = states()
    training, losses = make(of, tmp_path, epochs=30), []
    training.run(lambda step, loss: losses.append(loss))
    recall = training.recall(of[0])
    assert losses[-1] < losses[0] and len(losses) == training.steps == training.step
    assert recall[3][0] > 2 * recall[1][0]
    assert all(recall[layer] == sorted(recall[layer]) for layer in recall), "proposition 1: monotone in kappa"
    assert recall[3][7] > 0.7


@pytest.mark.parametrize("at", [3, 8, 11])  # the last of an epoch is among them
def test_an_interrupted_run_ends_as_one_that_was_not(tmp_path, at):
    of = states()
    whole = make(of, tmp_path)
    whole.run(lambda step, loss: None)
    whole.checkpoint.unlink()

    def interrupt(step, loss):
        if step == at:
            raise KeyboardInterrupt

    first = make(of, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        first.run(interrupt)
    second, steps = make(of, tmp_path), []
    second.run(lambda step, loss: steps.append(step))
    assert steps == list(range(at + 1, whole.steps + 1))
    for layer, adapter in whole.adapters.items():
        for name, weight in adapter.state_dict().items():
            assert torch.equal(second.adapters[layer].state_dict()[name], weight)


def test_another_run_s_checkpoint_is_refused(tmp_path):
    of = states()
    make(of, tmp_path).save()
    with pytest.raises(OtherRunError, match="checkpoint is of a run with other settings: remove it"):
        make(of, tmp_path, run="b")


def test_the_states_are_those_before_each_token_of_the_answer(model):
    loaded = AutoModelForCausalLM.from_pretrained(model).eval()
    told = []
    found = collect(loaded, [Text([2, 3], [4, 5, 6]), Text([7], [8])], [1], told.append)
    out = loaded(torch.tensor([[2, 3, 4, 5, 6]]), output_hidden_states=True)
    assert told == [3, 1] and found.text.tolist() == [0, 0, 0, 1]
    assert torch.equal(found.states[1][:3], out.hidden_states[1][0, 1:4])
    assert torch.equal(found.expected[:3], out.logits[0, 1:4].argmax(-1))


def test_a_run_leaves_the_file_and_a_report(model, tmp_path):
    out = train_tiny_exits(model, tmp_path / "exits.safetensors")
    assert {file.name for file in tmp_path.iterdir()} == {
        f"exits.{kind}" for kind in ("safetensors", "json", "png")
    }
    told = json.loads((tmp_path / "exits.json").read_text())
    assert told["layers"] == 2 and told["held_out_tokens"] == 2 * 60
    (recall,) = told["recall"].values()
    assert 0.1 < recall[0] < recall[7] <= 1, "of 46 tokens"
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_what_is_held_out_is_not_trained_on(model, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        module.Training, "run", lambda self, told: seen.append(self.states.text.unique().tolist())
    )
    texts = [Text([2, 3], [4 + number % 20, 5]) for number in range(25)]
    train(Run(model, texts, tmp_path / "exits.safetensors"), Console(file=io.StringIO()))
    assert seen == [[number for number in range(25) if number not in (9, 19)]]


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ({"texts": [Text([2], [3])]}, "answers: 1, give at least 2"),
        ({"out": "missing/exits.safetensors"}, "out: no folder .*missing"),
        ({"device": "cuda:7"}, "device: cuda:7, and torch finds no GPU"),
    ],
)
def test_what_would_fail_in_the_end_is_named_at_once(model, tmp_path, monkeypatch, fault, named):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = {"texts": [Text([2], [3])] * 3, "out": "exits.safetensors", **fault}
    run = Run(model, given["texts"], tmp_path / given["out"], device=given.get("device", "cpu"))
    with pytest.raises(ValueError, match=named):
        train(run, Console(file=io.StringIO()))


def test_answers_are_read_as_collect_writes_them(model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(model)
    file = tmp_path / "answers.jsonl"
    rows = [{"prompt": "ab", "answer": "cd", "round": 1}, {"prompt": "ab", "answer": "?", "tokens": [7, 1]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = read_answers([file], tokenizer)
    assert first == (tokenizer("ab")["input_ids"], tokenizer("cd")["input_ids"]) and second.answer == [7, 1]
    for bad in ("{", '{"prompt": "ab"}', "[]"):
        file.write_text(json.dumps(rows[0]) + f"\n{bad}\n")
        with pytest.raises(ValueError, match="answers.jsonl: line 2: no JSON object"):
            read_answers([file], tokenizer)
    file.write_text("")
    with pytest.raises(ValueError, match="no answers in"):
        read_answers([file], tokenizer)
