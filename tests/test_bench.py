"""The bench measures what it says: costs from shapes against brute force, the same work on both sides, a JSON line last. No timed test."""
import json
import sys

import pytest
import torch

import bench
import machine
from conftest import hf_model, ours


def line(monkeypatch, capsys, *argv):
    monkeypatch.setattr(sys, "argv", ["bench.py", *argv, "--threads", "1"])
    bench.main()
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


@pytest.mark.parametrize("arch,heads,kv,tied", [("qwen2", 4, 2, True), ("llama", 6, 2, False)])
def test_the_cost_of_a_decode_step_by_brute_force(arch, heads, kv, tied):
    """Bytes: every weight matrix that multiplies (biases and norms are left out, under 1 %) and every key and value; operations: two a weight and row, two products an attended slot."""
    model = ours(hf_model(arch, heads, kv, tied, width=heads * 8))
    c, B, context = model.config, 3, 20
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name) + (c.vocab * c.width if tied else 0)
    cache = machine.Cache(model, B, context + 1)
    moved, flop = machine.decode_cost(c, B, context, 4)
    assert moved == 4 * (matrices + cache.k.numel() + cache.v.numel())
    assert flop == 2 * B * matrices + sum(2 * 2 * context * c.head_dim for _ in range(B * c.layers * c.heads))


def test_synthetic_episodes_can_be_learned_from():
    model = ours(hf_model("llama", 4, 2, True, width=32, vocab=1200))
    episodes, rewards, chat = machine.synthetic(model, 8, 30, 0.3, 0, 4)
    assert [sum(e.rows[0].mask) for e in episodes] == [9] * 8 and [e.group for e in episodes] == [0] * 4 + [1] * 4 and max(max(e.rows[0].ids) for e in episodes) < 1200
    before = [p.detach().clone() for p in model.parameters()]
    advantages, _ = machine.train_grpo.trajectory_advantages(rewards, 4, 1e-4)
    machine.train_grpo.update(machine.grpo_settings(), model, None, torch.optim.AdamW(model.parameters(), lr=1e-3), chat, episodes, advantages)
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


@pytest.fixture
def small(monkeypatch):
    """random:tiny, a Qwen2 small enough for a test."""
    monkeypatch.setitem(bench.SHAPES, "tiny", (32, 2, 4, 2, 64))
    return ["--model", "random:tiny", "--repeats", "1"]


def test_both_sides_say_the_same_tokens(small, monkeypatch, capsys):
    found = line(monkeypatch, capsys, "decode", *small, "--batch", "1", "3", "--prompt", "5", "9", "--new", "6")
    assert found["agreement"] == 1 and [r["batch"] for r in found["rows"]] == [1, 3] and all(r["ours"] > 0 < r["transformers"] for r in found["rows"])
    found = line(monkeypatch, capsys, "turns", *small, "--dialogues", "2", "--turns", "5", "--chunk", "3", "6", "--reply", "4")
    assert found["agreement"] == 1 and found["late_over_early"] > 0 and len(found["turn_seconds"]) == 5


def test_the_roofline_names_its_bound(small, monkeypatch, capsys):
    for speeds, bound in (((1e9, 1e12), "memory"), ((1e12, 1e9), "compute")):
        monkeypatch.setattr(machine, "speeds", lambda *_: speeds)
        found = line(monkeypatch, capsys, "roofline", *small, "--batch", "1", "2", "--context", "8", "--new", "4")
        assert [r["bound"] for r in found["rows"]] == [bound] * 2 and all(0 < r["share"] for r in found["rows"]) and found["copy_gb_s"] == speeds[0] / 1e9


@pytest.mark.parametrize("flags,word", [(["decode", "--batch", "0"], "--batch"), (["decode", "--prompt", "8", "4"], "--prompt 8 4"), (["turns", "--chunk", "0", "3"], "--chunk"), (["step", "--micro_trl", "7"], "--micro_trl 7"),
                                        (["scale", "--rows", "12", "--threads", "2"], "multiple of 8"), (["scale", "--threads", "1"], "a thread for each"), (["memory", "--rows", "3"], "groups of four"), (["memory", "--train_layers", "-1"], "--train_layers")])
def test_sizes_that_cannot_be_measured_are_named(flags, word, monkeypatch, capsys):
    with pytest.raises(SystemExit) as e:
        line(monkeypatch, capsys, *flags)
    assert e.value.code == 2 and word in capsys.readouterr().err


def test_the_last_words_of_a_process_are_its_error_not_torchruns_ruler():
    assert machine.last_words("Traceback\nValueError: no\nrank: 0\n=====\n") == "ValueError: no" and machine.last_words("error: give x\n====") == "error: give x" and machine.last_words("") == "it said nothing"


def test_what_needs_a_gpu_says_so_and_unknown_shapes_are_named(small, monkeypatch, capsys):
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            line(monkeypatch, capsys, "gpu")
        assert "CUDA" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        line(monkeypatch, capsys, "roofline", "--model", "random:9b")
    assert "random:0.5b" in capsys.readouterr().err
