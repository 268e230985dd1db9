"""The generator of CARE's rubrics: its data, what a rubric is worth, imitation and preference RL on a tiny model, and what analyse makes of it."""
import json
import os
import signal
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import care
from appraisal import INTENTS
from backend import LocalModel, generator_folder
from conftest import ROOT
from rubric import FIXED, Generated, Moment, Rubric, ScriptedRater, prior, prompt, read

PREFERENCES, DEMONSTRATIONS = ROOT / "data" / "preferences.jsonl", ROOT / "data" / "demonstrations.jsonl"
ROW = {"id": "a-1", "split": "train", "intent": "advice", "emotion": 40, "messages": [{"role": "user", "content": "My shop floods."}], "chosen": "Water again.", "rejected": "Cheer up."}


# ---------------------------------------------------------------------------------------------- data
def test_the_preferences_cover_intentions_stages_and_moods_and_are_held_out_by_dialogue():
    pairs = care.load_preferences(PREFERENCES)
    assert len(pairs) >= 300
    for split in ("train", "heldout"):
        mine = [p for p in pairs if p.split == split]
        assert {p.moment.intent for p in mine} == set(INTENTS) and {p.moment.stage for p in mine} == {"heard", "understood", "helped"} and {p.moment.band for p in mine} == {"low", "middle", "high"}
    dialogues = {split: {p.id.rsplit("-", 1)[0] for p in pairs if p.split == split} for split in ("train", "heldout")}
    texts = {split: {line for p in pairs if p.split == split for line in (*p.moment.said, p.chosen, p.rejected)} for split in ("train", "heldout")}
    assert not dialogues["train"] & dialogues["heldout"] and not texts["train"] & texts["heldout"]
    turned, single = [p for p in pairs if p.fault == "wrong_moment"], [p for p in pairs if p.fault != "wrong_moment"]
    assert max(Counter(t for p in single for t in (p.chosen, p.rejected)).values()) == 1
    couples = list(zip(turned[::2], turned[1::2]))         # the same two replies, twice: what comes too early at one moment has its time at the other, so that no reply tells by itself
    assert len(couples) >= 20 and all((a.chosen, a.rejected) == (b.rejected, b.chosen) and b.moment.said[:len(a.moment.said)] == a.moment.said and a.split == b.split for a, b in couples)
    assert {(p.moment.stage, p.moment.band) for p in pairs} >= {(s, b) for s in ("understood", "helped") for b in ("low", "middle", "high")} | {("heard", "low"), ("heard", "middle")}
    shorter = np.mean([len(p.chosen.split()) < len(p.rejected.split()) for p in pairs])
    assert 0.35 < shorter < 0.65                           # length alone tells nothing


@pytest.mark.parametrize("change,word", [({"chosen": " "}, "'chosen'"), ({"rejected": None}, "'rejected'"), ({"split": "dev"}, "'split'"), ({"intent": "listenn"}, "listenn"), ({"emotion": 101}, "'emotion'"),
                                         ({"emotion": True}, "'emotion'"), ({"messages": []}, "'messages'"), ({"messages": [{"role": "assistant", "content": "x"}]}, "message 1"), ({"messages": [{"role": "user"}]}, "message 1"),
                                         ({"messages": "x"}, "'messages'"), ({"rejected": "Water again. "}, "chosen one"), ({"dialogue": 3}, "'dialogue'"), ({"fault": ["a"]}, "'fault'"), ({"id": 3}, "'id'")])
def test_bad_preferences_are_named_by_line_and_field(change, word, tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps({**ROW, "id": "b-1", **change}) + "\n")
    with pytest.raises(SystemExit) as e:
        care.load_preferences(path)
    error = capsys.readouterr().err
    assert e.value.code == 2 and "p.jsonl:2:" in error and word in error


def test_preferences_need_both_splits_and_other_files_are_read(tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW) + "\n")
    with pytest.raises(SystemExit):
        care.load_preferences(path)
    assert "used before" in capsys.readouterr().err
    path.write_text(json.dumps(ROW) + "\n")
    with pytest.raises(SystemExit):
        care.load_preferences(path)
    assert "heldout" in capsys.readouterr().err
    path.write_text(json.dumps(ROW) + "\n\n" + json.dumps({**ROW, "id": "p-7", "dialogue": "d7", "split": "heldout", "fault": "cheerful"}))
    assert [(p.split, p.dialogue, p.fault, p.moment.said) for p in care.load_preferences(path)] == [("train", "a", "", ("My shop floods.",)), ("heldout", "d7", "cheerful", ("My shop floods.",))]


# ---------------------------------------------------------------------------------------------- what a rubric is worth
def test_the_preference_reward_by_hand():
    r = Rubric((0.2, 0.5, 0.3), ((("facts", "abc"),),) * 3)
    assert care.preference_reward(0.1, r) == pytest.approx(1 + 0.3 * np.tanh(1) + 0.1) and care.preference_reward(0, r) == pytest.approx(0.6)
    assert care.preference_reward(-0.1, r) == pytest.approx(-0.3 * np.tanh(1) + 0.1) and care.preference_reward(None, r) is None
    assert care.preference_reward(1.0, None) < min(care.preference_reward(-9, Rubric(w, r.criteria)) for w in ((0.9, 0.05, 0.05), (0.4, 0.3, 0.3)))          # no rubric at all is worse than the worst one
    narrow = Rubric((0.9, 0.05, 0.05), r.criteria)
    assert care.preference_reward(0, narrow) == pytest.approx(0.6 - (0.5 - narrow.entropy)) and 0 < narrow.entropy < 0.5
    long = SimpleNamespace(size=18, entropy=1.0)           # more than nine criteria can't be read; the formula has the term all the same
    assert care.preference_reward(0, long) == pytest.approx(0.5)


def test_margins_do_not_depend_on_the_order_of_marking():
    pairs = care.load_preferences(PREFERENCES)[:40]
    rubrics = [prior(p.moment) for p in pairs]
    a, b = (care.margins(ScriptedRater(), pairs, rubrics, np.random.default_rng(s)) for s in (0, 1))
    assert a == b and any(a) and max(map(abs, a)) <= 1
    turned = [p._replace(chosen=p.rejected, rejected=p.chosen) for p in pairs]
    assert care.margins(ScriptedRater(), turned, rubrics) == pytest.approx([-x for x in a])


def test_a_constant_rubric_and_rote_readers_are_told_apart():
    """Baselines by their own definition: the constant is the best of its draws on the training pairs, so not below FIXED there; neither rote reader can be right about both halves of a couple."""
    pairs = care.load_preferences(PREFERENCES)
    train = [p for p in pairs if p.split == "train"]
    best = care.constant(train, ScriptedRater(), 300)
    right = {name: np.mean([r["right"] for r in care.measure(name, train, [rubric] * len(train), ScriptedRater())]) for name, rubric in (("best", best), ("fixed", FIXED))}
    assert right["best"] >= right["fixed"] and sum(best.weights) == pytest.approx(1) and read(str(best)) is not None
    turned = [p for p in pairs if p.fault == "wrong_moment"]
    found = care.rote(train, turned)
    assert np.mean([(m > 0) + 0.5 * (m == 0) for m in found["words alone"]]) == 0.5 and set(found) == {"overlap", "words alone"}


def test_the_table_beats_the_fixed_rubric_on_the_training_pairs():
    """That the table does more than the untuned FIXED, with the scripted judge, on pairs that its author had not seen. Whether adapting beats the best constant rubric is measured (analyse), not assumed."""
    pairs = [p for p in care.load_preferences(PREFERENCES) if p.split == "train"]
    right = {name: np.mean([r["right"] for r in care.measure(name, pairs, rubrics, ScriptedRater())]) for name, rubrics in (("fixed", [FIXED] * len(pairs)), ("prior", [prior(p.moment) for p in pairs]))}
    assert right["prior"] > right["fixed"] > 0.5


def test_strict_shares_leave_ties_out():
    rows = [{"weights": w} for w in ([0.5, 0.3, 0.2], [0.4, 0.4, 0.2], [0.1, 0.2, 0.7], [0.2, 0.1, 0.7])]
    assert care.strict_share(rows) == [0.25, 0.0, 0.5]


# ---------------------------------------------------------------------------------------------- the two trainings, on a tiny model
@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A few pairs and dialogues, so that a run takes seconds."""
    folder = tmp_path_factory.mktemp("care")
    rows = [json.loads(line) for line in PREFERENCES.read_text(encoding="utf-8").splitlines()]
    few = [r for r in rows if r["split"] == "train" and len(r["messages"]) == 1][:6] + [r for r in rows if r["split"] == "heldout"][:6]
    (folder / "p.jsonl").write_text("".join(json.dumps(r) + "\n" for r in few))
    (folder / "d.jsonl").write_text("".join(line + "\n" for line in DEMONSTRATIONS.read_text(encoding="utf-8").splitlines()[:2]))
    return folder


def run(files, what, *flags):
    common = ["--preferences", str(files / "p.jsonl"), "--dtype", "fp32", "--threads", "1"]
    return care.main([what, *common, *flags] + (["--demonstrations", str(files / "d.jsonl")] if what == "sft" else []))


def test_the_prompt_is_what_a_frozen_generator_will_be_asked(tiny_chat):
    """Imitation and preference RL build the prompt as ids, the frozen generator is asked through LocalModel: the same next token, and the same text as by hand."""
    model, chat = tiny_chat
    m = care.load_preferences(PREFERENCES)[0].moment
    with torch.no_grad():
        hidden = model(torch.tensor([chat.prompt(prompt(m.context()))]))[0, -1]
        _, other = LocalModel(model, chat).read([prompt(m.context())], 4)
    assert torch.allclose(hidden, other[0], atol=1e-4)


def test_imitate_prefer_analyse_and_use(files, tiny_folder, tmp_path, monkeypatch, capsys):
    out = tmp_path / "care"
    assert run(files, "sft", "--model", tiny_folder, "--out", str(out), "--epochs", "1", "--train_layers", "1", "--batch", "4") == 0
    text = capsys.readouterr().out
    assert "10 moments to imitate, 6 held-out pairs" in text and all(stage in text for stage in ("fixed", "care-prior", "base", "sft"))
    assert generator_folder(out) == out / "sft"
    # the tiny model writes no rubric; let its text be read as one, so that groups differ
    weights = ((0.6, 0.3, 0.1), (0.1, 0.3, 0.6), (0.05, 0.9, 0.05))
    monkeypatch.setattr(care, "read", lambda text: Rubric(weights[len(text) % 3], FIXED.criteria))
    assert run(files, "prefer", "--run", str(out), "--steps", "2", "--pairs", "2", "--group_size", "4", "--train_layers", "1") == 0
    log = [json.loads(line) for line in (out / "prefer.jsonl").read_text().splitlines()]
    assert [r["step"] for r in log] == [1, 2] and all(0 < r["weight_entropy"] <= 1.1 and r["invalid"] == 0 and r["canary"] < 1e-3 for r in log) and log[1]["kl_reference"] > 0
    assert generator_folder(out) == out / "preferred"
    assert care.main(["analyse", str(out), "--record", str(tmp_path / "r.jsonl")]) == 0
    text = capsys.readouterr().out
    assert "preferred, by turn" in (out / "rubrics.svg").read_text() and "turn 1" in text and "accuracy by what the rejected reply did wrong" in text
    kept = json.loads((tmp_path / "r.jsonl").read_text())
    stages = kept["runs"][str(out)]
    assert set(stages) == {"overlap", "words alone", "fixed", "constant", "care-prior", "base", "sft", "preferred"} and all(a["pairs"] == 6 for a in stages.values()) and stages["base"]["invalid"] == 100
    with pytest.raises(SystemExit):                        # a second time nothing is overwritten
        run(files, "prefer", "--run", str(out))
    assert "preferred exists" in capsys.readouterr().err


def test_imitation_stopped_before_it_was_measured_is_measured_by_the_same_command(files, tiny_folder, tmp_path, monkeypatch, capsys):
    a, b, real = tmp_path / "a", tmp_path / "b", care.measure
    flags = ("--model", tiny_folder, "--epochs", "1", "--train_layers", "1")
    run(files, "sft", "--out", str(a), *flags)

    def killed(stage, *args):
        if stage == "sft":
            raise KeyboardInterrupt
        return real(stage, *args)
    monkeypatch.setattr(care, "measure", killed)
    with pytest.raises(KeyboardInterrupt):
        run(files, "sft", "--out", str(b), *flags)
    monkeypatch.setattr(care, "measure", real)
    monkeypatch.setattr(care, "fit", lambda *a: pytest.fail("trained again"))
    with pytest.raises(SystemExit):
        run(files, "sft", "--out", str(b), *flags, "--seed", "4")
    assert "another --seed" in capsys.readouterr().err
    assert run(files, "sft", "--out", str(b), *flags) == 0 and care.kept(a) == care.kept(b)
    with pytest.raises(SystemExit):
        run(files, "sft", "--out", str(b), *flags)


@pytest.mark.parametrize("how", ["Ctrl-C", "budget", "unmeasured"])
def test_prefer_stopped_half_way_goes_on_to_the_same_generator(how, files, tiny_folder, tmp_path, monkeypatch, capsys):
    import shutil
    from backend import BudgetSpent
    a, b = tmp_path / "a", tmp_path / "b"
    assert run(files, "sft", "--model", tiny_folder, "--out", str(a), "--epochs", "1", "--train_layers", "1") == 0
    shutil.copytree(a, b)
    weights = ((0.6, 0.3, 0.1), (0.1, 0.3, 0.6), (0.05, 0.9, 0.05))
    monkeypatch.setattr(care, "read", lambda text: Rubric(weights[len(text) % 3], FIXED.criteria))
    flags = ("--steps", "3", "--pairs", "2", "--group_size", "4", "--train_layers", "1")
    assert run(files, "prefer", "--run", str(a), *flags) == 0 and not (a / "prefer.pt").exists()
    real, calls = care.margins, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == {"budget": 2, "unmeasured": 4}.get(how):                                    # the fourth is of the held-out pairs, after three steps
            raise BudgetSpent("12 calls are spent")
        if len(calls) == 2 and how == "Ctrl-C":
            os.kill(os.getpid(), signal.SIGINT)
        return real(*args)

    monkeypatch.setattr(care, "margins", interrupted)
    if how == "unmeasured":
        with pytest.raises(SystemExit):
            run(files, "prefer", "--run", str(b), *flags)
        assert "--server_calls" in capsys.readouterr().err and generator_folder(b) == b / "preferred"
    else:
        assert run(files, "prefer", "--run", str(b), *flags) == 130 and "goes on" in capsys.readouterr().err and generator_folder(b) == b / "sft"
    monkeypatch.setattr(care, "margins", real)
    with pytest.raises(SystemExit):                        # another learning rate would be neither the one run nor the other
        run(files, "prefer", "--run", str(b), *flags, "--lr", "1e-4")
    assert "--lr" in capsys.readouterr().err
    generator = b / "sft" / "model.safetensors"
    made = generator.stat()
    os.utime(generator, (1, 1))                            # another generator than the adapters were begun on
    with pytest.raises(SystemExit):
        run(files, "prefer", "--run", str(b), *flags)
    assert "another sft/" in capsys.readouterr().err
    os.utime(generator, ns=(made.st_atime_ns, made.st_mtime_ns))
    if how != "budget":                                    # which has one
        with pytest.raises(SystemExit):
            run(files, "prefer", "--run", str(b), *flags, "--steps", "1")
        assert "steps already" in capsys.readouterr().err
    assert run(files, "prefer", "--run", str(b), *flags) == 0
    assert f"has { {'budget': 1, 'Ctrl-C': 2, 'unmeasured': 3}[how]} steps" in capsys.readouterr().out and not (b / "prefer.pt").exists()
    assert (a / "preferred" / "model.safetensors").read_bytes() == (b / "preferred" / "model.safetensors").read_bytes()
    numbers = lambda folder: [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in (folder / "prefer.jsonl").read_text().splitlines()]
    assert numbers(a) == numbers(b) and len(numbers(a)) == 3


def test_accuracy_by_hand():
    """Two pairs of each of six dialogues: `sft` is right about all, `fixed` about the first of each (the same for each dialogue: no spread), `preferred` about one dialogue only."""
    row = lambda stage, d, i, right: {"stage": stage, "dialogue": f"d{d}", "right": right, "valid": stage != "sft" or d > 0, "entropy": 1.0 + d}
    rows = [row(stage, d, i, right) for d in range(6) for i in (0, 1) for stage, right in (("fixed", float(i == 0)), ("sft", 1.0), ("preferred", float(d == 3)))]
    a = care.accuracy(rows)
    assert a["fixed"] | {"over_fixed": 0, "over_sft": 0} == {"pairs": 12, "right": 50.0, "low": 50.0, "high": 50.0, "invalid": 0.0, "entropy": 3.5, "over_fixed": 0, "over_sft": 0}
    assert a["sft"]["invalid"] == pytest.approx(100 / 6) and a["sft"]["over_fixed"]["difference"] == 50 and a["sft"]["over_fixed"]["resolved"] and not a["sft"]["over_sft"]["resolved"]
    assert a["preferred"]["over_sft"]["difference"] == pytest.approx(-500 / 6) and a["preferred"]["over_fixed"]["difference"] == pytest.approx(-200 / 6) and a["preferred"]["low"] == 0.0 < a["preferred"]["high"]
    assert a["sft"]["entropy"] == 3.5 + 0.5 and care.accuracy([{**r, "valid": False} for r in rows])["sft"]["entropy"] is None      # of d1 to d5: what is no rubric has no entropy
    assert "*" in care.table(rows) and care.table([r for r in rows if r["stage"] == "sft"]).count("*") == 1          # alone: nothing to compare with, only the heading's


def test_sft_teaches_the_form(tiny_chat):
    """A tiny model overfitted to one moment writes a valid rubric, the one it was shown: prompt, mask and end of turn are right."""
    from copy import deepcopy
    from episode import Row
    from train_sft import fit
    model, chat = deepcopy(tiny_chat[0]), tiny_chat[1]
    m = Moment(("Hm.",), (), 50, "advice")
    row, target = Row(), Rubric((0.2, 0.5, 0.3), ((("facts", "abc"),), (("feeling", "abc"),), (("question", "abc"),)))
    ids = chat.plain(str(target)) + [chat.eot]
    row.environment(chat.prompt(prompt(m.context())))
    row.policy(ids, [0.0] * len(ids), 0)
    fit(model, chat, [row], 120, 1e-2, 1, 0)
    g = Generated(LocalModel(model, chat).complete)
    [found] = g.rubrics([m])
    assert str(found) == str(target) == str(read(str(target))) and g.invalid == 0


@pytest.mark.parametrize("flags,word", [(["sft", "--preferences", "none.jsonl"], "none.jsonl"), (["prefer", "--run", "runs/none-such"], "rubric.py sft"), (["analyse", "runs/none-such"], "rubric.py sft"),
                                        (["show", "--rubric", "care", "--generator", "runs/none-such"], "rubric.py sft"), (["show", "--id", "nobody"], "nobody"), (["show", "--judge", "oracle"], "--judge"), (["shw"], "shw"), ([], "what"),
                                        (["show", "--rows", "none.jsonl"], "none.jsonl"), (["show", "--row", "1"], "--rows FILE"), (["show", "--judge_by", "logits"], "--judge_by"), (["analyse", "runs/x", "runs/../runs/x"], "twice"), (["sft", "--seed", str(2**64)], "--seed"),
                                        (["sft", "--seed", "x"], "whole number"), (["sft", "--epochs", "0"], "--epochs")])
def test_mistakes_are_named(flags, word, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as e:
        care.main(flags)
    assert e.value.code in (1, 2) and word in capsys.readouterr().err


@pytest.mark.parametrize("line", ["{", "[1]", "{}", '{"stage": "sft"}', json.dumps({"stage": "sft", "dialogue": "d", "band": "low", "fault": "", "turn": 1, "valid": True, "entropy": 1.0, "right": 7, "weights": [0.3, 0.3, 0.4]})])
def test_damaged_rows_are_named_before_anything_is_trained(line, tmp_path, capsys):
    (tmp_path / "sft").mkdir()
    (tmp_path / "rubrics.jsonl").write_text("\n" + line + "\n")
    for flags in (["analyse", str(tmp_path)], ["prefer", "--run", str(tmp_path), "--preferences", str(PREFERENCES)]):
        with pytest.raises(SystemExit) as e:
            care.main(flags)
        assert e.value.code == 2 and "rubrics.jsonl:2:" in capsys.readouterr().err


def test_what_cannot_be_compared_or_does_not_fit_is_named_first(files, tiny_folder, tmp_path, capsys):
    out = tmp_path / "care"
    (out / "sft").mkdir(parents=True)
    (out / "config.json").write_text(json.dumps({"judge": "scripted", "judge_by": "text", "preferences": "other.jsonl"}))
    with pytest.raises(SystemExit):                        # the stages of one run are compared pair by pair
        run(files, "prefer", "--run", str(out))
    assert "--preferences" in capsys.readouterr().err
    rows = [json.loads(line) for line in (files / "p.jsonl").read_text().splitlines()]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows + [{**ROW, "id": "long-1", "messages": [{"role": "user", "content": "Oh no. " * 3000}]}]))
    (tmp_path / "d.jsonl").write_text((files / "d.jsonl").read_text())
    for word, flags in (("'Oh no.", ()), ("--train_layers 9", ("--train_layers", "9"))):
        with pytest.raises(SystemExit):
            run(tmp_path, "sft", "--model", tiny_folder, "--out", str(tmp_path / "new"), "--train_layers", "1", *flags)
        assert word in capsys.readouterr().err and not (tmp_path / "new").exists()
    assert "3 of 4" in care.unread(SimpleNamespace(unreadable=3, asked=4)) and care.unread(ScriptedRater()) == ""


@pytest.mark.parametrize("flag", ["--group_size", "--lora"])
def test_prefer_needs_something_to_compare_and_to_train(flag, tmp_path, capsys):
    (tmp_path / "sft").mkdir()
    with pytest.raises(SystemExit):
        care.main(["prefer", "--run", str(tmp_path), "--preferences", str(PREFERENCES), flag, "1" if flag == "--group_size" else "0"])
    assert flag in capsys.readouterr().err


def test_show_prints_a_rubric_per_turn(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert care.main(["show", "--id", "demo-advice-01"]) == 0
    text = capsys.readouterr().out
    assert text.count("   worth     ") == text.count("   rubric    cognitive") >= 4 and "stage helped" in text
