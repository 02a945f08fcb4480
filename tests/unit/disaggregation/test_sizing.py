"""The calculator against arithmetic by hand."""

import pytest

from sglang_patches.disaggregation.sizing import Demand, main, size

LOAD = {
    "requests": 4,
    "prompt_tokens": 2000,
    "output_tokens": 250,
    "prefill_rate": 10_000,
    "decode_rate": 2000,
    "itl_ms": 20,
}


def test_groups_are_as_large_as_the_rates_ask_for():
    found = size(Demand(**LOAD))
    # 8000 of 7000 usable prompt tokens a second, 1000 of 1400 usable output tokens; 4 requests of 5 seconds each.
    assert (found.prefill, found.decode, found.decoding) == (2, 1, 20)
    assert found.unsplit == 2  # 0.8 + 0.5 of an instance, of which 0.7 is used


def test_cached_prompts_need_no_prefill():
    assert size(Demand(**LOAD, cached=0.5)).prefill == 1


def test_kv_may_ask_for_more_than_the_rate():
    found = size(Demand(**LOAD, kv_tokens=20_500))
    # 20 requests hold 2125 tokens each: 42,500 of 14,350 usable.
    assert (found.decode, found.decode_by_kv) == (3, True)


def test_what_crosses_the_network():
    assert size(Demand(**LOAD, kv_bytes=131_072)).transfer == 4 * 2000 * 131_072


@pytest.mark.parametrize(
    ("name", "value"),
    [("requests", 0), ("itl_ms", -1), ("cached", 1), ("utilisation", 1.1), ("kv_tokens", float("nan"))],
)
def test_a_bad_number_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name}:"):
        Demand(**(LOAD | {name: value}))


def test_command(capsys):
    words = [word for name, value in LOAD.items() for word in ("--" + name.replace("_", "-"), str(value))]
    assert main([*words, "--kv-bytes", "131072"]) == 0
    printed = capsys.readouterr().out
    assert "prefill instances  2\ndecode instances   1\n" in printed and "1.05 GB/s" in printed
    assert main([*words, "--cached", "2"]) == 2
    assert "error: cached: 2.0" in capsys.readouterr().err
