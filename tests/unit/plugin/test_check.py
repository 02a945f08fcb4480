"""`python -m sglang_patches.check`: what it calls wrong, and the kernels of a CPU. tests/e2e/test_check.py runs it whole."""

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("sglang")

from sglang_patches.check import made  # noqa: E402
from sglang_patches.check.comparison import Answers, compare, greedy_margin, noise_margin  # noqa: E402
from sglang_patches.check.engines import Engine, EngineFailedError, Engines  # noqa: E402
from sglang_patches.check.parts import Part, engine_parts, in_order, run  # noqa: E402
from sglang_patches.check.results import OtherRunError, Result, Results  # noqa: E402
from sglang_patches.check.setup import PLAIN, Setup, value_of  # noqa: E402
from sglang_patches.early_exit.file import EarlyExits  # noqa: E402
from sglang_patches.early_exit.fingerprint import model_fingerprint  # noqa: E402
from sglang_patches.methods.registry import METHODS  # noqa: E402
from sglang_patches.verification.shared_noise import draw  # noqa: E402
from tests.support.tiny_model import write_tiny_model  # noqa: E402


def answers(tokens, logprobs=(), margins=(), dtype="float32", prompt=4):
    return Answers(
        dtype,
        [prompt] * len(tokens),
        tokens,
        logprobs or [[]] * len(tokens),
        margins or [[]] * len(tokens),
        2.0,
    )


def compared(plain, ours, margins, dtype="float32"):
    return compare(answers(plain, margins=margins, dtype=dtype), answers(ours, dtype=dtype), greedy_margin)[0]


def test_equal_answers_pass_in_every_round():
    assert compared([[1, 2, 3], [4]], [[1, 2, 3], [4]] * 3, [[1.0, 1.0, 1.0], [1.0]]) == "ok"


@pytest.mark.parametrize("ours", [[1, 9, 3], [1, 2], [1, 2, 3, 4]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_token_or_another_end_is_named(ours, dtype):
    wrong = compared([[1, 2, 3]], [[1, 2, 3], ours], [[1.0, 0.7, 0.0]], dtype)
    assert "1 of 2 answers differ" in wrong


def test_where_plain_decoding_was_undecided_a_difference_is_counted_as_rounding():
    counted = compared([[1, 2]], [[1, 3]], [[1.0, 0.1]], dtype="bfloat16")
    assert counted == "ok, 1 of 1 answers part by rounding"
    assert "more than rounding" in compared([[1, 2]], [[1, 3]], [[1.0, 0.1]], dtype="float32")


def test_sampled_tokens_part_by_rounding_where_noise_and_model_leave_it_open():
    """Two tokens between which the noise decides by a hair: either engine's rounding may choose the other one."""
    seed, position, logits = 5, 9, torch.zeros(40)
    margin = noise_margin(seed)
    first = int(draw(logits.softmax(-1)[None], torch.tensor([seed]), torch.tensor([position])))
    logits[first] = -30.0
    second = int(draw(logits.softmax(-1)[None], torch.tensor([seed]), torch.tensor([position])))
    drawn, other = (
        Answers("float32", [position], [[token]], [[-3.0]], [[]], 1.0) for token in (first, second)
    )
    lead = margin(drawn[0], other[0], 0)
    assert lead > 1e-3
    level = Answers("float32", [position], [[second]], [[-3.0 + lead]], [[]], 1.0)
    assert margin(drawn[0], level[0], 0) == pytest.approx(0.0, abs=1e-5)
    assert compare(drawn, level, margin)[0] == "ok, 1 of 1 answers part by rounding"
    assert "more than rounding" in compare(drawn, other, margin)[0]
    assert "more than rounding" in compare(drawn, level, noise_margin(seed + 1))[0]


def setup(flags="", device="cuda", model="model"):
    return Setup(model, device, 3, tuple(flags.split()))


def words(method, flags="", **others):
    return setup(flags, **others).engine_flags(method, "target", "exits")


@pytest.fixture
def gpus(monkeypatch):
    """How many there are."""

    def see(count):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    see(2)
    return see


def test_plain_decoding_has_the_flags_that_are_not_drafting_s(gpus):
    flags = "--dtype bfloat16 --speculative-algorithm SAGUARO --speculative-draft-model-path draft --specstore-nodes 7 --tp 2"
    assert words(PLAIN, flags) == [
        "--model-path",
        "target",
        "--device",
        "cuda",
        "--dtype",
        "bfloat16",
        "--tp",
        "2",
    ]


def test_methods_have_what_they_need_and_what_is_given(gpus):
    flags = "--speculative-draft-model-path draft --specstore-nodes 7"
    assert words("SSSD", flags)[4:] == ["--speculative-algorithm", "SSSD", "--specstore-nodes", "7"]
    assert words("SAGUARO", flags)[4:] == f"--speculative-algorithm SAGUARO {flags}".split()
    assert words("SAGUARO")[4:] == [
        "--speculative-algorithm",
        "SAGUARO",
        "--speculative-draft-model-path",
        "model",
    ]
    assert value_of(words("MIRROR"), "--specstore-early-exit") == "exits"
    assert value_of(words("MIRROR", "--specstore-early-exit mine"), "--specstore-early-exit") == "mine"
    assert "--specstore-early-exit" not in words("SAGUARO")


def test_a_head_has_retrieval_beside_it_and_what_is_given(gpus):
    flags = "--speculative-draft-model-path head --speculative-num-steps 3"
    asked = f"--speculative-algorithm EAGLE3 {flags}"
    assert (
        words("EAGLE3", asked)[4:]
        == f"--speculative-algorithm EAGLE3 --specstore-beside-head {flags}".split()
    )
    assert words(PLAIN, f"{asked} --specstore-beside-head --tp 2")[4:] == ["--tp", "2"]
    assert setup(asked).has_head and not setup(asked).lacks_head
    assert setup("--speculative-algorithm STANDALONE").lacks_head
    assert not setup("--speculative-algorithm NEXTN").lacks_head  # the target's own layers
    assert not setup().has_head


def test_a_draft_model_shares_the_only_gpu(gpus):
    device = "--specstore-draft-device"
    assert device not in words("SAGUARO")
    gpus(1)
    assert value_of(words("SAGUARO"), device) == "cuda:0"
    assert value_of(words("SAGUARO", f"{device} cpu"), device) == "cpu"
    assert device not in words("DUO") and device not in words("SAGUARO", device="cpu")


def test_the_method_is_the_flags_or_the_default():
    assert setup().method == "SSSD"
    assert setup("--speculative-algorithm=DUO").method == setup("--speculative-algorithm DUO").method == "DUO"
    assert setup("--speculative-algorithm SPECSTORE").method == "ADAPTIVE"


@pytest.fixture
def results(tmp_path):
    return Results(tmp_path / "out", {"model": "m"})


def planned(results, device="cuda", everything=True):
    return [part for part in engine_parts(setup(device=device), results, Engines(results.folder), everything)]


def test_all_methods_are_asked_and_an_engine_is_started_once(results):
    for device, starts in (("cuda", 1 + len(METHODS) + 3), ("cpu", 1 + len(METHODS))):
        engines = [part.engine for part in planned(results, device)]
        changes = [
            engine for engine, before in zip(engines, [None, *engines], strict=False) if engine != before
        ]
        assert len(changes) == len(set(changes)) == starts
        assert {*METHODS, PLAIN} <= set(engines)


def test_a_head_is_asked_in_the_place_of_all_methods(results):
    asked = setup("--speculative-algorithm EAGLE3 --speculative-draft-model-path head", device="cpu")
    parts = engine_parts(asked, results, Engines(results.folder), everything=True)
    rows = ["start", "greedy answers", "sampled answers", "tokens a second"]
    assert [part.name for part in parts] == [f"{who}: {row}" for who in (PLAIN, "EAGLE3") for row in rows]


def test_what_a_part_needs_comes_before_it(results):
    for device in ("cuda", "cpu"):
        names: list[str] = []
        for part in planned(results, device):
            assert set(part.needs) <= set(names), part
            names.append(part.name)


def test_what_is_new_to_a_gpu_comes_first(results):
    order = list(dict.fromkeys(part.engine for part in planned(results)))
    assert order[:7] == ["plain", "SAGUARO", "DUO", "SSSD", "plain, timed", "SSSD, timed", "SAGUARO, timed"]


def part(name, *needs, found="ok"):
    def give():
        if isinstance(found, Exception):
            raise found
        return Result(found, data={"is": 1})

    return Part(name, give, needs)


def test_what_has_not_run_comes_before_what_failed_and_what_needs_it(results):
    chain = [part("a"), part("b"), part("c", "b"), part("d"), part("e", "a")]
    results.add("a", Result("ok"))
    results.add("b", Result("wrong"))
    assert [one.name for one in in_order(chain, results)] == ["d", "e", "b", "c"]


def test_nothing_is_kept_of_a_part_whose_needs_are_not_met(results):
    run(part("b", "a"), results)
    assert results.rows == {}
    results.add("a", Result("wrong"))
    run(part("b", "a"), results)
    assert list(results.rows) == ["a"]


def test_a_part_that_raises_is_a_row_and_one_that_is_stopped_is_none(results):
    run(part("a", found=ValueError("bad luck")), results)
    assert results.rows["a"].state == "ValueError: bad luck" and not results.rows["a"].fine
    stopped = Part("b", lambda: signal_stop())
    with pytest.raises(KeyboardInterrupt):
        run(stopped, results)
    assert list(results.rows) == ["a"]


def signal_stop():
    raise KeyboardInterrupt


def test_results_are_read_again_and_those_of_another_run_refused(results):
    run(part("a"), results)
    again = Results(results.folder, {"model": "m"})
    assert again.rows == results.rows and again.rows["a"].data == {"is": 1}
    with pytest.raises(OtherRunError, match="another model: give another folder"):
        Results(results.folder, {"model": "n"})


SAID = {"dtype": "float32", "prompts": [3], "tokens": [[5, 6]], "logprobs": [[]], "margins": [[1.0, 1.0]]}


class Scripted:
    """In the place of `Engines`: an engine that says what it is told."""

    def __init__(self, **said):
        self.said, self.asked = said, []

    def ask(self, name, flags, task, **arguments):
        self.asked.append((name, task, arguments))
        return dict(self.said[name])


def test_a_method_that_accepts_no_draft_is_named(results):
    engines = Scripted(plain=SAID | {"tokens_per_step": 1.0}, SSSD=SAID | {"tokens_per_step": 1.0})
    for one in engine_parts(setup(device="cpu"), results, engines, everything=False):
        if one.name.endswith("start"):
            results.add(one.name, Result("ok"))
        else:
            run(one, results)
    assert results.rows["plain: greedy answers"].state == "ok"
    assert "no drafted token was accepted (1.00" in results.rows["SSSD: greedy answers"].state
    logprobs = {name: arguments["logprobs"] for name, _, arguments in engines.asked}
    assert logprobs == {"plain": True, "SSSD": False}  # a method is asked as it is served


@pytest.mark.parametrize(
    ("accepted", "state"),
    [
        ({"head": 2, "live": 3}, "ok"),
        ({"live": 3}, "no token of the head was accepted: it may be another model's"),
    ],
)
def test_a_head_of_which_nothing_is_accepted_is_named(results, accepted, state):
    said = SAID | {"tokens_per_step": 2.0}
    engines = Scripted(plain=said, EAGLE3=said | {"accepted": accepted})
    asked = setup("--speculative-algorithm EAGLE3 --speculative-draft-model-path head", device="cpu")
    for one in engine_parts(asked, results, engines, everything=False):
        if one.name.endswith("start"):
            results.add(one.name, Result("ok"))
        else:
            run(one, results)
    assert results.rows["EAGLE3: greedy answers"].state == state
    assert results.rows["EAGLE3: greedy answers"].data["accepted"] == accepted


class Dying(Engine):
    """An engine whose program is a few words of Python."""

    def _start(self, command, log):
        program = f"path = {command[3]!r}\n{self.program}"
        with log.open("w") as file:
            return subprocess.Popen(
                [sys.executable, "-c", program], stdout=file, stderr=file, start_new_session=True
            )


CALL = """
import socket
from multiprocessing.connection import Connection
calling = socket.socket(socket.AF_UNIX)
calling.connect(path)
connection = Connection(calling.detach())
"""
DIES = "print('RuntimeError: specstore: it is broken', flush=True); raise SystemExit(1)"


@pytest.mark.parametrize(
    "program", [DIES, CALL + DIES, CALL + "connection.send(None)\nconnection.recv()\n" + DIES]
)
def test_an_engine_that_ends_is_told_by_its_words(program, tmp_path, monkeypatch):
    monkeypatch.setattr(Dying, "program", program, raising=False)
    with pytest.raises(EngineFailedError, match="specstore: it is broken"):
        Dying([], tmp_path / "log").ask("answer")


def test_an_engine_is_kept_for_the_same_flags(tmp_path, monkeypatch):
    serving = CALL + "connection.send(None)\nwhile True:\n    connection.send(connection.recv()[0])\n"
    monkeypatch.setattr(Dying, "program", serving, raising=False)
    monkeypatch.setattr("sglang_patches.check.engines.Engine", Dying)
    with Engines(tmp_path) as engines:
        first = engines.get("a", ["x"])
        assert engines.ask("a", ["x"], "answer") == "answer" and engines.get("a", ["x"]) is first
        second = engines.get("b", ["y"])
        assert first._process.poll() is not None and second._process.poll() is None
    assert second._process.poll() is not None


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))


def test_an_untrained_exit_belongs_to_the_target(tiny_model, tmp_path):
    exits = EarlyExits.load(made.early_exit(tiny_model, tmp_path / "exits.safetensors"))
    assert exits.about.fingerprint == model_fingerprint(tiny_model)
    assert exits.layer(0) == 1


def test_a_small_model_is_widened_once_for_a_gpu(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(made, "WIDENED_TIMES", 3)
    assert made.timed_target(tiny_model, "cpu", tmp_path / "wide") == tiny_model
    wide = made.timed_target(tiny_model, "cuda", tmp_path / "wide")
    assert json.loads((wide / "config.json").read_text())["intermediate_size"] == 3 * 128
    monkeypatch.setattr(made, "write_widened", None)
    assert made.timed_target(tiny_model, "cuda", tmp_path / "wide") == wide
    monkeypatch.setattr(made, "SMALL_BYTES", 1)
    assert made.timed_target(tiny_model, "cuda", tmp_path / "other") == tiny_model


@pytest.fixture(scope="module")
def found() -> dict[str, list[str | None]]:
    """What each kernel check finds: as things are, and with a fault in the kernel."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.plugin.faulty_kernels"],
        env=os.environ | {"SGLANG_USE_CPU_ENGINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_kernels_of_a_cpu_pass(found):
    assert len(found) == 5
    assert all(wrong is None for wrong, _ in found.values()), found


def test_kernel_with_a_fault_is_noticed(found):
    assert all(wrong is not None for _, wrong in found.values()), found


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ("--device cpu --model /nope", "--model: /nope: no such folder"),
        ("--device cpu", "--device needs --model"),
        ("--all", "--all and --out need --device"),
        ("--device cpu --model . --all --speculative-algorithm DUO", "--all checks every method"),
        (
            "--device cpu --model . --speculative-algorithm EAGLE3",
            "EAGLE3 needs --speculative-draft-model-path",
        ),
    ],
)
def test_what_cannot_be_checked_is_refused_before_anything_runs(arguments, refusal):
    command = [sys.executable, "-m", "sglang_patches.check", *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and refusal in done.stderr and done.stdout == ""


def test_what_the_check_is_told_is_read_without_torch():
    """`--help` and a wrong word are answered at once."""
    program = (
        "import sys, sglang_patches.check.setup, sglang_patches.check.made; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
