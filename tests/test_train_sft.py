"""Imitation: what is trained, that it learns, that the cold start is made once, and bad demonstration files."""
import json

import pytest
import torch

import train_sft
from conftest import ROOT
from train_sft import cold_start, demonstration_rows, imitate, load_demonstrations
from weights import load

DATA = ROOT / "data" / "demonstrations.jsonl"


def test_our_demonstrations_are_what_the_readme_says():
    """>= 64 dialogues on training scenarios, all eight intentions, several replies each, varied in form, none copied from another."""
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    scenarios = {json.loads(line)["id"]: json.loads(line) for line in (ROOT / "data" / "scenarios.jsonl").read_text().splitlines()}
    replies = [m["content"] for r in rows for m in r["messages"][1::2]]
    assert len(rows) >= 64 and len(load_demonstrations(DATA)) == len(rows)
    assert all(scenarios[r["scenario"]]["split"] == "train" and r["messages"][0]["content"] == scenarios[r["scenario"]]["opening"] for r in rows)
    assert len({scenarios[r["scenario"]]["intent"] for r in rows}) == 8 and min(len(r["messages"]) for r in rows) >= 8
    assert len(set(replies)) == len(replies)
    openings = [" ".join(r.lower().split()[:3]) for r in replies]
    assert len(set(openings)) > 0.95 * len(openings)


def test_the_supporter_is_trained_and_the_user_is_not(tiny_chat):
    """Pitfalls 1 and 2, for imitation: the mask decodes to the supporter's words, each with its end of turn."""
    _, chat = tiny_chat
    [row] = demonstration_rows(chat, ["I lost it.", "Tell me more.", "It was red.", "A red one."])
    trained = [i for i, m in zip(row.ids, row.mask) if m]
    assert chat.tokenizer.decode(trained) == "Tell me more.<|im_end|>A red one.<|im_end|>"
    assert [t for t in row.turn if t >= 0] == [0] * (len("Tell me more.") + 1) + [1] * (len("A red one.") + 1)


def test_it_learns_by_heart_and_repeats_itself_bit_for_bit(tiny_folder, tiny_chat):
    _, chat = tiny_chat
    dialogues = [(["hello", "yes yes", "really", "yes yes"],)] * 4
    results = []
    for _ in range(2):
        model, _ = load(tiny_folder)
        results.append((imitate(model, chat, dialogues, epochs=15, lr=0.01, batch=2, train_layers=0, seed=1), model.state_dict()))
    losses, weights = results[0]
    assert losses[-1] < 0.2 * losses[0] and losses == results[1][0]
    assert all(torch.equal(weights[k], results[1][1][k]) for k in weights)


def test_pitfall_17_micro_batches_change_nothing(tiny_folder, tiny_chat):
    _, chat = tiny_chat
    dialogues = [(["hello", "yes yes"],), (["well", "a much longer reply than the other", "and", "so"],)]
    one, two = ([imitate(m, chat, dialogues, 3, 0.01, 2, 0, 0, tokens_per_microbatch=budget), m.state_dict()] for budget in (10 ** 6, 1) for m in [load(tiny_folder)[0]])
    assert max(abs(a - b) for a, b in zip(one[0], two[0])) < 1e-4


def test_the_cold_start_is_made_once(tiny_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NANOEMPATHY_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "demo.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}) + "\n")
    first = cold_start(tiny_folder, file, torch.device("cpu"), torch.float32)
    monkeypatch.setattr(train_sft, "imitate", lambda *a, **k: pytest.fail("trained again"))
    assert cold_start(tiny_folder, file, torch.device("cpu"), torch.float32) == first and "kept from before" in capsys.readouterr().out
    file.write_text(file.read_text() * 2)
    with pytest.raises(pytest.fail.Exception):
        cold_start(tiny_folder, file, torch.device("cpu"), torch.float32)


GOOD = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}\n'


@pytest.mark.parametrize("text,word", [("", "empty"), (GOOD + "[" * 9999, ":2: broken JSON"), (GOOD.replace("yes", "\\ud800"), "surrogate"), (GOOD.replace("{", '{"scenario": [1], ', 1), "'scenario'"), (GOOD.replace("{", '{"id": 7, ', 1), "'id'"), (GOOD + "{oops\n", ":2: broken JSON"), (GOOD + '{"message": []}\n', ":2: field 'messages'"), ('{"messages": 3}\n', ":1: field 'messages'"),
                                       (GOOD.replace('"user"', '"system"'), "message 1"), (GOOD.replace('"yes"', '" "'), "message 2"), ('{"messages": [{"role": "user", "content": "hi"}]}\n', ":1: field 'messages'")])
def test_bad_demonstrations_are_named_by_line_and_field(text, word, tmp_path, capsys):
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    with pytest.raises(SystemExit) as e:
        load_demonstrations(file)
    err = capsys.readouterr().err
    assert e.value.code == 2 and word in err and err.count("\n") == 1 and "bad.jsonl" in err
