"""Statistics against brute force and by hand, playing, rows, bad input, and both command lines on a tiny random model."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import chat as chat_script
import evaluate
from conftest import ROOT
from episode import Episode, Row
from evaluate import play, spread, summary
from appraisal import INTENTS
from scenarios import load_scenarios
from simulator import ScriptedUser, ScriptedUsers, UserTurn

FILE = str(ROOT / "data" / "scenarios.jsonl")
HELDOUT = load_scenarios(FILE, "heldout")


def episode(scenario, emotions, replies=None, finish="max_turns", cuts=None, start=40, tokens=3):
    """A hand-made dialogue: emotions after each reply, `tokens` sampled tokens a reply."""
    e = Episode(scenario, None, 0, scenario.opening, start, [Row()])
    e.rows[0].environment([1, 2])
    before = start
    for i, x in enumerate(emotions):
        e.rows[0].policy([3] * tokens, [-1.0] * tokens, i)
        e.turns.append(UserTurn("go on", x, x - before, "", False, "", False, {"listening": 1.0} if i == 0 else {}))
        before = x
    e.replies, e.cuts, e.finish = replies or ["a b c"] * len(emotions), cuts or [False] * len(emotions), finish
    return e


# ---------------------------------------------------------------------------------------------- statistics
def test_summary_by_hand():
    a, b = next(s for s in HELDOUT if s.intent == "advice"), next(s for s in HELDOUT if s.intent == "praise")
    one = episode(a, [45, 50], ["You sold the car", "you sold it"], cuts=[False, True])
    two = episode(a, [60, 100], ["so it goes", "fine"], "success", tokens=5)
    three = episode(b, [9], ["no"], "failure")
    broken = episode(b, [70, 80, 90], finish="user_failed")
    s = summary([one, two, three, broken])
    assert (s["n"], s["scenarios"], s["failed"]) == (3, 2, 1)
    assert s["emotion"] == 159 / 3 and s["success"] == pytest.approx(100 / 3) == s["failure"]
    assert s["intents"] == {"advice": {"n": 2, "emotion": 75.0, "low": None, "high": None}, "praise": {"n": 1, "emotion": 9.0, "low": None, "high": None}}
    assert s["finish"] == {"max_turns": 1, "success": 1, "failure": 1} and s["cut"] == 20
    assert s["tokens"] == (2 * 3 + 2 * 5 + 3) / 5
    assert s["distinct_2"] == 6 / 7                          # you-sold twice; single words make no pair
    assert s["curve"] == [40, (45 + 60 + 9) / 3, (50 + 100 + 9) / 3]     # the dialogue that ended at 9 stays there
    assert s["parts"] == {"listening": 3 / 5}
    assert s["low"] == 9 and s["high"] == 75                 # two scenarios: the resampled means lie between the two of them
    json.dumps(s)
    assert all(piece in evaluate.table(s, "what it is") for piece in ("53.0", "1 left out", "what it is"))
    empty = summary([broken])
    assert empty["n"] == 0 and empty["failed"] == 1 and empty["emotion"] is None
    json.dumps(empty)
    evaluate.table(empty, "what it is")


def test_bounds_of_success_and_failure():
    a = HELDOUT[0]
    s = summary([episode(a, [x]) for x in (99, 100, 9, 10)])
    assert s["success"] == 25 and s["failure"] == 25


def test_spread_takes_every_intent_before_a_second_one():
    assert [len({s.intent for s in spread(HELDOUT, n)}) for n in (1, 3, 8, 16)] == [1, 3, 8, 8]
    assert {s.intent for s in spread(HELDOUT, 8)} == set(INTENTS) and sorted(s.id for s in spread(HELDOUT)) == sorted(s.id for s in HELDOUT)


# ---------------------------------------------------------------------------------------------- playing
def said(episodes):
    return [(e.scenario.id, e.group, e.replies, e.emotion) for e in episodes]


def test_the_same_call_plays_the_same_dialogues(tiny_chat):
    """Whatever torch's global state is, and without moving it; another seed gives others; repeats differ from each other."""
    how = dict(scenarios=HELDOUT[:3], repeats=2, max_turns=2, max_new_tokens=6, batch=4)
    torch.manual_seed(1)
    one = play(*tiny_chat, ScriptedUsers(), **how)
    state = torch.random.get_rng_state()
    assert said(play(*tiny_chat, ScriptedUsers(), **how)) == said(one)
    assert torch.equal(state, torch.random.get_rng_state())
    assert said(play(*tiny_chat, ScriptedUsers(), seed=1, **how)) != said(one)
    assert [(e.scenario.id, e.group) for e in one] == [(s.id, i) for i, s in enumerate(HELDOUT[:3]) for _ in range(2)]
    assert one[0].replies != one[1].replies


def test_batch_size_changes_nothing_when_greedy(tiny_chat):
    """With sampling it does: the draws belong to a place in the batch (play says so)."""
    sizes = []
    how = dict(scenarios=HELDOUT[:4], max_turns=2, max_new_tokens=6, temperature=0, finished=lambda done: sizes.append(len(done)))
    assert said(play(*tiny_chat, ScriptedUsers(), batch=1, **how)) == said(play(*tiny_chat, ScriptedUsers(), batch=3, **how))
    assert sizes == [1, 1, 1, 1, 3, 1]


def test_a_budget_no_dialogue_fits_into_is_refused_at_once(tiny_chat, capsys):
    for budget in (60, 100_000):
        with pytest.raises(SystemExit):
            play(*tiny_chat, ScriptedUsers(), HELDOUT[:2], max_tokens=budget)
        assert f"--max_tokens {budget}" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- the command lines
RUN = ["--scenarios", FILE, "--n", "3", "--repeats", "2", "--max_turns", "2", "--max_new_tokens=6", "--dtype", "fp32"]


def test_run_end_to_end(tiny_folder, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    assert evaluate.main(["run", "--model", tiny_folder, *RUN, "--batch", "4", "--out", str(out), "--show", "1", "--json"]) == 0
    text = capsys.readouterr().out
    result = json.loads(text.splitlines()[-1])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == result["n"] == 6 and result["scenarios"] == 3
    assert result["emotion"] == sum(r["emo_point"] for r in rows) / 6 and result["low"] <= result["emotion"] <= result["high"]
    assert [r["repeat"] for r in rows] == [0, 1] * 3 and [r["id"] for r in rows[::2]] == [s.id for s in spread(HELDOUT, 3)]
    theirs = json.loads((ROOT / "tests" / "data" / "sage_row.json").read_text())        # the fields of the released result files
    assert set(theirs) <= set(rows[0]) and set(theirs["history"][0]) <= set(rows[0]["history"][0]) and set(theirs["history"][2]["planning"]) == set(rows[0]["history"][2]["planning"])
    for r in rows:                                           # a row can be replayed: the same replies move a user the same way
        user = ScriptedUser(next(s for s in HELDOUT if s.id == r["id"]), max_turns=2)
        replies, lines = r["history"][1::2], r["history"][2::2]
        assert [x["role"] for x in r["history"]] == ["user", "assistant"] * len(replies) + ["user"] and r["emo_point"] == lines[-1]["emotion-point"]
        for reply, line in zip(replies, lines):
            turn = user.respond(reply["content"], reply["cut"])
            assert (turn.emotion, turn.change, turn.text) == (line["emotion-point"], line["planning"]["change"], line["content"])
        assert r["emo_state"][-1] == ("S" if r["emo_point"] >= 100 else "A" if r["emo_point"] >= 70 else "B" if r["emo_point"] >= 40 else "C" if r["emo_point"] >= 10 else "F")
    for piece in ("3 scenarios x 2 repeats = 6", "rule score of a scripted user, not empathy", "---- best", "---- median", "---- worst", "95 % CI", "by scenario"):
        assert piece in text
    with pytest.raises(SystemExit) as e:
        evaluate.main(["run", "--model", tiny_folder, *RUN, "--out", str(out)])
    assert e.value.code == 2 and "--overwrite" in capsys.readouterr().err and len(out.read_text().splitlines()) == 6
    assert evaluate.main(["run", "--model", tiny_folder, *RUN, "--n", "1", "--out", str(out), "--overwrite"]) == 0
    assert len(out.read_text().splitlines()) == 2


def test_a_run_folder_stands_for_its_best(tiny_folder, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(SystemExit) as e:
        evaluate.resolve(str(tmp_path))
    assert e.value.code == 2 and "best/" in capsys.readouterr().err
    (tmp_path / "best").symlink_to(tiny_folder)
    assert evaluate.resolve(str(tmp_path)) == tmp_path / "best"
    assert str(evaluate.resolve(tiny_folder)) == tiny_folder


def test_ctrl_c_keeps_what_is_finished(tiny_folder, tmp_path, monkeypatch, capsys):
    calls, real = [], evaluate.rollout

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)
    monkeypatch.setattr(evaluate, "rollout", interrupted)
    assert evaluate.main(["run", "--model", tiny_folder, *RUN, "--batch", "2", "--out", str(tmp_path / "rows")]) == 130
    assert len((tmp_path / "rows").read_text().splitlines()) == 4 and "stopped: 4 of 6" in capsys.readouterr().out


BAD = [(["--temperatur", ".5"], "did you mean --temperature?"), (["--temp", ".5"], "unknown flag --temp"), (["--n", "0"], "--n"), (["--repeats", "-1"], "--repeats"),
       (["--max_turns", "0"], "--max_turns"), (["--max_new_tokens", "x"], "--max_new_tokens"), (["--batch", "0"], "--batch"), (["--temperature", "-1"], "--temperature"),
       (["--temperature", "nan"], "--temperature"), (["--seed", "-1"], "--seed"), (["--split", "test"], "heldout"), (["--scenarios", "nowhere.jsonl"], "nowhere.jsonl"),
       (["--model", "nowhere/at/all"], "nowhere/at/all"), (["--dtype", "fp16"], "fp16"), (["--dynamics", "slow"], "rlver"), (["--out", "nowhere/rows.jsonl"], "nowhere/rows.jsonl"),
       (["--out", "."], "--out"), (["--out", "rows.html"], "rows.jsonl"), (["--resume"], "--out"), (["--perturb"], "--bench empa"), (["--judge", "lm:x"], "--bench empa"), (["stray"], "stray")]


@pytest.mark.parametrize("flags,word", BAD, ids=[" ".join(f) for f, _ in BAD])
def test_bad_input_is_one_line_before_any_weight(flags, word, tiny_folder, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "load", lambda *a: pytest.fail("weights were loaded"))
    with pytest.raises(SystemExit) as e:
        evaluate.main(["run", "--model", tiny_folder, "--scenarios", FILE, *flags])
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and word in err


def test_bad_scenario_files_and_commands(tiny_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluate, "load", lambda *a: pytest.fail("weights were loaded"))
    line = open(FILE, encoding="utf-8").readline()
    for text, word in (("", "empty"), (line + "{", "rows.jsonl:2"), (line + line, "id"), (line, "heldout")):
        (tmp_path / "rows.jsonl").write_text(text)
        with pytest.raises(SystemExit) as e:
            evaluate.main(["run", "--model", tiny_folder, "--scenarios", str(tmp_path / "rows.jsonl")])
        err = capsys.readouterr().err
        assert e.value.code == 2 and err.count("\n") == 1 and word in err
    for argv in ([], ["rnu"]):
        with pytest.raises(SystemExit) as e:
            evaluate.main(argv)
        assert e.value.code == 2 and "there are: run" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- chat.py
def converse(monkeypatch, capsys, folder, lines, *flags):
    """Types these lines, then Ctrl-D. -> what was printed."""
    typed = iter(lines)

    def enter(prompt=""):
        try:
            return next(typed)
        except StopIteration:
            raise EOFError
    monkeypatch.setattr("builtins.input", enter)
    assert chat_script.main(["--model", folder, "--scenarios", FILE, "--dtype", "fp32", "--max_new_tokens", "8", *flags]) == 0
    return capsys.readouterr().out


def test_meter():
    assert chat_script.meter(52, 4) == "[#####-----] 52 (+4)" and chat_script.meter(100, 10).startswith("[##########] 100") and chat_script.meter(0, -3) == "[----------] 0 (-3)"


def test_free_chat_has_no_meter_and_reset_starts_again(tiny_folder, monkeypatch, capsys):
    text = converse(monkeypatch, capsys, tiny_folder, ["hello", "", "/reset", "hello", "/what", "/quit", "never read"], "--temperature", "0")
    replies = [line for line in text.splitlines() if line.startswith("policy >")]
    assert len(replies) == 2 and replies[0] == replies[1] and "(+" not in text and "#" not in text and "/reset, /quit" in text


def test_a_cached_conversation_equals_one_full_forward(tiny_folder, tiny_chat):
    """Each reply on the live cache is the greedy continuation of the whole dialogue computed from scratch."""
    model, pieces = tiny_chat
    talk, ids = chat_script.Talk(model, pieces, 4096, 7, temperature=0), []
    for turn, line in enumerate(("hello there", "I lost it", "yes")):
        ids += pieces.between(line) if turn else pieces.opening(line)
        text, cut = talk.reply(line)
        mine = []
        while len(mine) < 7 and mine[-1:] != [pieces.eot]:
            with torch.no_grad():
                logits = model.logits(model(torch.tensor([ids + mine]))[0, -1])
            mine.append(int(logits.masked_fill(pieces.banned, float("-inf")).argmax()))
        assert (text, cut) == (pieces.text(mine), mine[-1] != pieces.eot)
        ids += mine + ([pieces.eot] if cut else [])


def test_playing_along_shows_the_scripted_user(tiny_folder, monkeypatch, capsys):
    s = HELDOUT[0]
    text = converse(monkeypatch, capsys, tiny_folder, ["", "my own line about the boat", ""], "--user", s.id)
    flat = " ".join(text.split())
    assert s.persona in flat and s.opening in flat and s.hidden_need not in flat and "not empathy" in text
    replies = [line for line in text.splitlines() if line.startswith("policy >")]
    meters = [line for line in text.splitlines() if line.strip().startswith("[") and "(" in line]
    assert len(replies) == 3 == len(meters)


def test_a_user_who_ends_ends_the_meter_only(tiny_folder, monkeypatch, capsys):
    """An untrained model soon annoys the user: the chat goes on without the meter, and /reset brings both back."""
    text = converse(monkeypatch, capsys, tiny_folder, ["hm"] * 9 + ["/reset", ""], "--user", HELDOUT[0].id)
    assert "the scripted user ends here" in text and text.count("policy >") == 10
    assert text.count("[") < 10 + 9 and "a new dialogue" in text


def test_a_conversation_beyond_the_context_says_so(tiny_folder, monkeypatch, capsys):
    text = converse(monkeypatch, capsys, tiny_folder, ["hello", "x" * 300, "/reset", "hello"], "--max_tokens", "320")
    assert text.count("does not fit into 320 tokens") == 1 and text.count("policy >") == 2


@pytest.mark.parametrize("flags,word", [(["--user", "heldout-prase-01"], "heldout-praise-01"), (["--temprature", "1"], "did you mean --temperature?"), (["--top_p", "0"], "--top_p"),
                                        (["--max_new_tokens", "0"], "--max_new_tokens"), (["--model", "nowhere/at/all"], "nowhere"), (["--dtype", "fp16"], "fp16")])
def test_chat_bad_input(flags, word, tiny_folder, monkeypatch, capsys):
    monkeypatch.setattr(chat_script, "load", lambda *a: pytest.fail("weights were loaded"))
    with pytest.raises(SystemExit) as e:
        chat_script.main(["--model", tiny_folder, "--scenarios", FILE, *flags])
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and word in err


def test_chat_with_piped_input_and_with_ctrl_c(tiny_folder):
    """As a newcomer runs it: a pipe that ends, and an interrupt at the prompt; neither shows a traceback."""
    command = [sys.executable, str(ROOT / "chat.py"), "--model", tiny_folder, "--max_new_tokens", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, input="hello\n", capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0 and "policy >" in done.stdout and "Traceback" not in done.stderr
    process = subprocess.Popen([*command[:1], "-u", *command[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert any("/quit" in line for line in iter(process.stdout.readline, ""))          # weights are loaded, the prompt comes
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in err


# ---------------------------------------------------------------------------------------------- several seeds, a second user, going on
def test_a_stopped_evaluation_goes_on_and_ends_as_the_unbroken_one(tiny_folder, tmp_path, monkeypatch, capsys):
    """Stopped in the third of six batches, the last line of the file cut: the same rows and the same figures, and no batch played twice."""
    flags = ["run", "--model", tiny_folder, *RUN, "--batch", "2", "--seeds", "2", "--states", "--json"]
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    assert evaluate.main([*flags, "--out", str(whole)]) == 0
    expected = json.loads(capsys.readouterr().out.splitlines()[-1])
    calls, real = [], evaluate.rollout

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*args)
    monkeypatch.setattr(evaluate, "rollout", interrupted)
    assert evaluate.main([*flags, "--out", str(part)]) == 130 and "--resume" in capsys.readouterr().out
    part.write_text(part.read_text()[:-40])                                  # killed in the middle of a line
    assert evaluate.main([*flags, "--out", str(part), "--resume"]) == 0
    captured = capsys.readouterr()
    assert len(calls) == 4 + 4 and "part.jsonl:6" in captured.err            # batches 3 to 6: the third is not whole
    assert json.loads(captured.out.splitlines()[-1]) == expected
    rows = lambda path: sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda r: (r["seed"], r["id"], r["repeat"]))
    assert rows(part) == rows(whole) and {r["seed"] for r in rows(whole)} == {0, 1}
    assert len(expected["by_seed"]) == 2 and expected["n"] == 12 and np.mean(expected["by_seed"]) == pytest.approx(expected["emotion"])
    for wrong, word in ((["--temperature", ".5"], "other settings"), (["--max_turns", "1"], "other settings"), (["--n", "2"], "other settings"), (["--seed", "1"], "seed 0"), (["--seeds", "1"], "seed 1")):
        with pytest.raises(SystemExit) as e:
            evaluate.main([*flags, *wrong, "--out", str(part), "--resume"])
        assert e.value.code == 2 and word in capsys.readouterr().err and rows(part) == rows(whole)
    changed = tmp_path / "model"                                             # the same path, other weights: a run that went on
    shutil.copytree(tiny_folder, changed)
    assert evaluate.main([*flags, "--model", str(changed), "--out", str(tmp_path / "other.jsonl")]) == 0
    os.utime(changed / "model.safetensors", (1, 1))
    with pytest.raises(SystemExit):
        evaluate.main([*flags, "--model", str(changed), "--out", str(tmp_path / "other.jsonl"), "--resume"])
    assert "other settings, weights" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        evaluate.main([*flags, "--resume"])
    assert "--out" in capsys.readouterr().err
    for text in ("notes\nof mine\n", "notes of mine", part.read_text().replace('"id"', '"no"', 1), '{"model": "m", "P0": []}\n'):
        (tmp_path / "notes.txt").write_text(text)                            # what is no evaluation is never touched
        with pytest.raises(SystemExit) as e:
            evaluate.main([*flags, "--out", str(tmp_path / "notes.txt"), "--resume"])
        assert e.value.code == 2 and (tmp_path / "notes.txt").read_text() == text and "give another --out" in capsys.readouterr().err
    damaged = [json.loads(line) for line in part.read_text().splitlines()]
    damaged[0]["history"], damaged[2]["history"][1] = [], {"role": "assistant", "content": "no tokens"}
    (tmp_path / "damaged.jsonl").write_text("".join(json.dumps(r) + "\n" for r in damaged))
    before = len(calls)
    assert evaluate.main([*flags, "--out", str(tmp_path / "damaged.jsonl"), "--resume"]) == 0 and len(calls) == before + 2        # their two batches again
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == expected


def test_a_revived_episode_has_the_summary_of_the_first(tiny_chat):
    played = play(*tiny_chat, ScriptedUsers(), HELDOUT[:3], repeats=2, max_turns=3, max_new_tokens=6, states=True)
    again = [evaluate.revive(json.loads(json.dumps(evaluate.row(e, 0))), {s.id: s for s in HELDOUT}, {str(z): z for z in evaluate.STATES}) for e in played]
    assert summary(again) == summary(played)


def test_two_users_in_one_command(tiny_folder, tmp_path, monkeypatch, capsys):
    """The second user plays everything again: rows and a summary of its own, the same dialogues otherwise."""
    class Grumpy(ScriptedUsers):
        note = "a second user"
        def respond(self, users, replies, cuts):
            return [UserTurn("no", 5, -35, "no", True, "failure", False, {"no": -35.0}) for _ in users]
    real = evaluate.make_users
    monkeypatch.setattr(evaluate, "check_user", lambda *a: None)
    monkeypatch.setattr(evaluate, "make_users", lambda args, *a: Grumpy("sage", 2) if args.user == "grumpy" else real(args, *a))
    out = tmp_path / "rows.jsonl"
    assert evaluate.main(["run", "--model", tiny_folder, *RUN, "--user2", "grumpy", "--out", str(out), "--json"]) == 0
    text = capsys.readouterr().out
    line = json.loads(text.splitlines()[-1])
    assert line["user"] == "scripted" and line["user2"]["user"] == "grumpy" and line["user2"]["emotion"] == 5 and line["emotion"] > 5 and line["n"] == line["user2"]["n"] == 6
    assert "user grumpy" in text and len(out.read_text().splitlines()) == 12
    page = out.with_suffix(".html").read_text()
    assert "user scripted" in page and "user grumpy" in page
    class Mute(Grumpy):
        def respond(self, users, replies, cuts):
            return [UserTurn("", 5, 0, "", True, "", True, {}) for _ in users]
    monkeypatch.setattr(evaluate, "make_users", lambda args, *a: Mute("sage", 2) if args.user == "grumpy" else real(args, *a))
    assert evaluate.main(["run", "--model", tiny_folder, *RUN, "--user2", "grumpy", "--out", str(tmp_path / "mute.jsonl"), "--json"]) == 0        # the first user's work stays
    text = capsys.readouterr().out
    assert "user grumpy: failed in every dialogue" in text and json.loads(text.splitlines()[-1])["emotion"] == line["emotion"]
    (tmp_path / "dir.html").mkdir()                                          # a page that can't be written costs a warning
    assert evaluate.main(["run", "--model", tiny_folder, *RUN, "--out", str(tmp_path / "dir.jsonl"), "--json"]) == 0
    text = capsys.readouterr().out
    assert "warning" in text and json.loads(text.splitlines()[-1])["n"] == 6
    monkeypatch.undo()
    for wrong in ("scripted", "nobody"):
        with pytest.raises(SystemExit):
            evaluate.main(["run", "--model", tiny_folder, *RUN, "--user2", wrong])
        assert "--user2" in capsys.readouterr().err
