"""The roofline calculator against the SSSD paper's own example (appendix B)."""

import json

import pytest

from benchmarks import roofline
from benchmarks.roofline import LLAMA_3_8B, Hardware, Model, operations, speculation_length, step_seconds

PAPER = Hardware(teraflops=165, bandwidth=0.95)


def test_papers_example_has_a_free_budget_of_174():
    assert PAPER.ridge == pytest.approx(174, abs=0.5)
    assert speculation_length(PAPER, 8) == 21  # 173.7 / 8 = 21.7; the paper rounds up
    assert speculation_length(PAPER, 1) == 32


def test_step_is_almost_free_up_to_the_ridge_and_linear_beyond():
    """Figure 3a: short context, batch 8, the slope changes near s_q = 22."""
    time = [step_seconds(LLAMA_3_8B, PAPER, 8, rows, 200) for rows in range(1, 61)]
    assert time[19] / time[0] < 1.15
    assert time[59] / time[29] == pytest.approx(2, rel=0.1)


def test_arithmetic_intensity_is_table_2s():
    """With p = 1; b s_q is `rows_in_all`. Attention's expression neglects nothing that matters here."""
    batch, rows, context = 4, 8, 2000
    costs = {
        name: flops / moved for name, (flops, moved) in operations(LLAMA_3_8B, batch, rows, context).items()
    }
    h, mlp, rows_in_all = LLAMA_3_8B.hidden, LLAMA_3_8B.intermediate, batch * rows
    assert costs["query"] == pytest.approx(1 / (2 / h + 1 / rows_in_all))
    assert costs["gate and up"] == pytest.approx(1 / (1 / (2 * h) + 1 / (2 * mlp) + 1 / rows_in_all))
    assert costs["down"] == pytest.approx(1 / (1 / h + 1 / mlp + 1 / rows_in_all))
    attention = 1 / (1 / (LLAMA_3_8B.group * rows) + 1 / (context + rows) + 1 / (4 * h))
    assert costs["attention"] == pytest.approx(attention, rel=0.01)


def test_long_context_is_bound_by_the_cache(tmp_path):
    """Figure 3b: with a long context more rows are almost free, because reading keys and values dominates."""
    short, long = (
        step_seconds(LLAMA_3_8B, PAPER, 8, 30, context) / step_seconds(LLAMA_3_8B, PAPER, 8, 1, context)
        for context in (200, 32_000)
    )
    assert long < short


def test_command_reads_a_config_and_writes_a_report(tmp_path, capsys):
    fields = {
        "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
        "num_hidden_layers": 30, "vocab_size": 49152,
    }  # fmt: skip
    config = tmp_path / "config.json"
    config.write_text(json.dumps(fields))
    assert Model.from_config(config).group == 3
    roofline.main(
        ["--config", str(config), "--batch", "1", "8", "--json", str(tmp_path / "r" / "roofline.json")]
    )
    assert "The ridge point is 174" in capsys.readouterr().out
    report = json.loads((tmp_path / "r" / "roofline.json").read_text())
    assert [row["batch"] for row in report["results"]] == [1, 8]


@pytest.mark.parametrize(
    ("words", "named"), [(["--bandwidth", "0"], "--bandwidth"), (["--batch", "0"], "--batch")]
)
def test_bad_input_is_named(words, named, capsys):
    with pytest.raises(SystemExit):
        roofline.main(words)
    assert named in capsys.readouterr().err


def test_config_without_a_field_is_named(tmp_path):
    config = tmp_path / "config.json"
    config.write_text("{}")
    with pytest.raises(ValueError, match="hidden_size"):
        Model.from_config(config)
