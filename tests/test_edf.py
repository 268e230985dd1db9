"""--template edf: perceive, regulate, respond. What is heard, what either half sees, rows and cache, both train scripts, imitation, chat, evaluation, perceptions from outside."""
import json
import random
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import evaluate
import rollout as module
import train_grpo
import train_ppo
from emotions import EDF, LABELS, felt_by, read_perceptions, regulate, regulation
from episode import collate, training_batches, transcript
from model import Critic, token_logprobs
from rollout import SPAN, Chat, rollout
from scenarios import load_scenarios
from simulator import ScriptedUsers, UserTurn
from test_train_grpo import SCENARIOS, TINY, metrics
from test_train_ppo import gradient, judge, settings
from train_sft import demonstration_rows

DEV = load_scenarios(SCENARIOS, "dev")


@pytest.fixture
def perceiving(tiny_chat):
    model, chat = tiny_chat
    return deepcopy(model), Chat(chat.tokenizer, 259, template="edf")


def play(perceiving, turns=3, copies=2, felt=None, reply=None, monkeypatch=None, **how):
    """Three scenarios; felt(i), reply(i): what row i of a batch is made to sample, as text, in place of what a random model would."""
    model, chat = perceiving
    real = module.sample

    def sample(model, cache, hidden, budgets, *args, **more):
        said = felt if budgets[0] == module.FELT else reply
        if not said:
            return real(model, cache, hidden, budgets, *args, **more)
        tokens = [chat.plain(said(i)) + [chat.eot] for i in range(len(budgets))]
        return tokens, [[-1.0] * len(t) for t in tokens]
    if monkeypatch:
        monkeypatch.setattr(module, "sample", sample)
    return rollout(model, chat, ScriptedUsers(), [(s, None) for s in DEV[:3]], copies, turns, 7, 4000, 0.9, torch.Generator().manual_seed(0), **how)


# ---------------------------------------------------------------------------------------------- what is heard
@pytest.mark.parametrize("text,heard,formed", [("Oh no.", "Oh no.", True), ("Oh no. [aim: calm]", "Oh no.", False), ("[feeling: sad] Oh", "", False), ("[ AIM : x", "", False), ("a [sic] b", "a", False), ("", "", False),
                                               ("Oh [aim: a [feeling: b] c] d", "Oh", False), ("my aim: rest", "my aim: rest", True), ("(I mean it.) Oh", "(I mean it.) Oh", True), ("[_feeling: sadness_] Oh", "", False), ("feeling: sadness] Oh", "", False), ("calm] Oh", "", False), ("deep sadness] Oh", "", False),
                                               ("Oh.\nsadness] Then.", "", False), ("Oh no. [sadness]", "Oh no.", False), ("[their feeling: sadness]", "", False), ("(feeling: sadness) Oh", "", False), ("Oh {aim: calm}", "Oh", False), ("\u3010feeling: x\u3011", "", False),
                                               ("Oh.\nTheir feeling: fear", "Oh.", False), ("Emotion: fear\nOh.", "", False), ("go slowly, name nothing] Oh", "", False)])
def test_what_is_heard(perceiving, text, heard, formed):
    _, chat = perceiving
    assert chat.heard(chat.plain(text) + [chat.eot]) == (heard, formed) == chat.heard(chat.plain(text))


@pytest.mark.parametrize("text,label", [(" sadness", "sadness"), ("Joy", "joy"), (" sadness]", ""), (" sad", ""), ("sadness, fear", ""), ("", ""), ("[feeling: joy", "")])
def test_a_feeling_is_read_strictly(perceiving, text, label):
    _, chat = perceiving
    assert chat.felt(chat.plain(text) + [chat.eot]) == label and chat.felt(chat.plain(text) + [chat.plain("x")[0]]) == ""


def test_no_random_mixture_of_brackets_reaches_the_user_the_context_or_the_transcript(perceiving, monkeypatch):
    """1,000 random malformed outputs: SECRET stands inside brackets only."""
    rng, made = random.Random(0), []

    def mixture(_):
        text, depth = "", 0
        for _ in range(rng.randrange(1, 9)):
            piece = rng.choice(["[feeling: ", "[aim: ", "[ Aim:", "[feelings: ", "[*feeling*: ", "[_feel_: ", "[their feeling: ", "[", "{", "(aim = ", "\u3010", "\uff3bfeeling: ", "]", "SECRET ", "hello ", "\n", "sadness"])
            depth = depth + 1 if piece[0] in "[{(\u3010\uff3b" else max(0, depth - 1) if piece == "]" else depth
            text += piece if piece != "SECRET " or depth else ""
        text = rng.choice(["", "", "", "SECRET] ", "feeling: SECRET\n"]) + text         # the policy takes the rest of a span for its turn
        made.append(text)
        return text
    heard, (_, chat) = [], perceiving
    monkeypatch.setattr(module, "append", lambda model, cache, chunks: torch.zeros(len(chunks), model.config.width))       # what it says is made up, so nothing has to be computed
    real = ScriptedUsers.respond
    monkeypatch.setattr(ScriptedUsers, "respond", lambda self, users, replies, cuts: heard.extend(replies) or real(self, users, replies, cuts))
    while len(made) < 1000:
        episodes = play(perceiving, felt=mixture, reply=mixture, monkeypatch=monkeypatch, copies=8)
        for e in episodes:
            assert "SECRET" not in transcript(e) and not SPAN.search(transcript(e))
            for row in e.rows:
                context = chat.tokenizer.decode(row.ids[:row.mask.index(1)])
                assert "SECRET" not in context and context.count("[") == 1 and len(SPAN.findall(context)) <= 2     # the environment's own
            assert "SECRET" not in chat.tokenizer.decode(e.beyond) and not SPAN.search(chat.tokenizer.decode(e.beyond))
        monkeypatch.setattr(module, "sample", __import__("model").sample)
    assert heard and not any("SECRET" in text or SPAN.search(text) for text in heard) and sum("SECRET" in text for text in made) > 150


# ---------------------------------------------------------------------------------------------- rows and cache
def test_a_turn_is_two_rows_and_the_reply_sees_the_aim_only(perceiving, monkeypatch):
    _, chat = perceiving
    for e in play(perceiving, felt=lambda i: [" sadness", " anger", " JOY", " rage", " neutral", " fear"][i], reply=lambda i: f"Oh, {i}!", monkeypatch=monkeypatch):
        assert len(e.rows) == 6 and len(e.replies) == len(e.perceived) == 3 and e.malformed == [not e.perceived[0][0]] * 3
        context, text = chat.opening(e.opening), chat.tokenizer.decode
        for ask, row, reply, turn, (label, aim) in zip(e.rows[::2], e.rows[1::2], e.replies, e.turns, e.perceived):
            assert aim == regulate(label) and ask.ids[:len(context) + len(chat.ask)] == context + chat.ask and ask.mask == [0] * (len(context) + len(chat.ask)) + [1] * (len(ask.ids) - len(context) - len(chat.ask))
            start = len(context) + len(chat.aims[aim])
            assert row.ids == context + chat.aims[aim] + chat.plain(reply) + [chat.eot] and row.mask == [0] * start + [1] * (len(row.ids) - start)
            assert not label or label not in text(row.ids[len(context):])                             # the raw label is gone
            context = context + chat.plain(reply) + [chat.eot] + chat.between(turn.text)
        assert e.beyond == context[:len(e.beyond)] and [t for row in e.rows for t in set(row.turn) - {-1}] == [0, 0, 1, 1, 2, 2]
    assert {aim for e in play(perceiving, felt=lambda i: " rage", monkeypatch=monkeypatch) for _, aim in e.perceived} == {"follow"}


def test_the_rewound_cache_equals_a_fresh_forward_and_states_are_those_of_the_rows(perceiving):
    """Pitfall 12, twice a turn."""
    model, chat = perceiving
    episodes = play(perceiving, keep_states=True)
    rows = [row for e in episodes for row in e.rows]
    assert len(rows) == 36
    ids, branches, source, target, old, _ = collate(rows, "cpu")
    assert branches is None
    with torch.no_grad():
        hidden = model(ids).flatten(0, 1)[source]
        logp, _ = token_logprobs(model, hidden, target, chat.banned, 0.9)
    assert (logp - old).abs().max() < 1e-4
    states = torch.cat([s for e in episodes for s in e.states[:len(e.states) - e.truncated]])
    assert torch.allclose(states, hidden, atol=1e-4) and all(len(e.states) == 7 for e in episodes)


def test_a_dialogue_ends_before_its_budget_does(perceiving):
    model, chat = perceiving
    limit = max(len(chat.opening(s.opening)) for s in DEV[:3]) + chat.extra + 7
    for e in rollout(model, chat, ScriptedUsers(), [(s, None) for s in DEV[:3]], 1, 3, 7, limit + 150, 0.9, torch.Generator().manual_seed(0)):
        assert all(len(row.ids) <= limit + 150 for row in e.rows)
    with pytest.raises(SystemExit):
        module.check_budget(model, chat, DEV[:3], 7, limit - 1)


def test_both_policy_losses_see_every_token_once_and_ppo_takes_two_rows_a_turn(perceiving):
    model, chat = perceiving
    episodes = play(perceiving)
    seen = [at for *_, episode, place, _ in training_batches(episodes, [0, 2, 3], 10 ** 6, "cpu") for at in zip(episode, place)]
    assert sorted(seen) == [(i, k) for i in (0, 2, 3) for k in range(sum(sum(r.mask) for r in episodes[i].rows))]
    episodes, critic = play(perceiving, keep_states=True), Critic(model, False)
    b = judge(settings(), model, critic, chat, episodes)
    one, told = gradient(model, critic, chat, episodes, b)
    many, _ = gradient(model, critic, chat, episodes, b, tokens_per_microbatch=1)
    assert told["canary"] < 1e-4 and all(torch.allclose(x, y, atol=1e-6) for x, y in zip(one, many))
    args, before = settings(critic_warmup=2, minibatches=1), critic.head.weight.clone()
    train_ppo.warm_up(args, model, critic, torch.optim.AdamW(critic.parameters(), lr=0.01), chat, episodes, b)
    assert not torch.equal(before, critic.head.weight)


@pytest.mark.parametrize("script,more", [(train_grpo, []), (train_ppo, []), (train_ppo, ["--critic", "separate"])], ids=["grpo", "ppo", "ppo-separate"])
def test_runs_resume_bit_for_bit(script, more, tiny_folder, tmp_path):
    for run, steps in (("four", "2"), ("two", "1")):
        script.main(["--model", tiny_folder, "--run", str(tmp_path / run), "--steps", steps, *TINY, "--template", "edf", *more])
    script.main(["--resume", str(tmp_path / "two"), "--steps", "2"])
    assert metrics(tmp_path / "two") == metrics(tmp_path / "four") and metrics(tmp_path / "two")[-1]["perceived"] is not None
    assert "perceived" in next((tmp_path / "two" / "samples").iterdir()).read_text()


# ---------------------------------------------------------------------------------------------- imitation, chat, evaluation
def test_demonstrations_are_the_rows_that_a_rollout_makes(perceiving, monkeypatch):
    """The pieces of imitation are those of the rollout, id for id."""
    _, chat = perceiving
    [e, *_] = play(perceiving, felt=lambda i: " anger", reply=lambda i: "Oh dear.", monkeypatch=monkeypatch)
    lines = [e.opening] + [x for reply, turn in zip(e.replies, e.turns) for x in (reply, turn.text)][:-1]
    made = demonstration_rows(chat, lines, "anger")
    assert [(r.ids, r.mask, r.turn) for r in made] == [(r.ids, r.mask, r.turn) for r in e.rows]


def test_chat_keeps_the_brackets_to_itself(perceiving, monkeypatch):
    import chat as script
    model, chat = perceiving
    talk = script.Talk(model, chat, 4000, 12, temperature=0)
    monkeypatch.setattr(module, "sample", lambda *a, **k: ([chat.plain(" joy") + [chat.eot]], [[-1.0] * 5]))
    monkeypatch.setattr(script, "sample", lambda *a, **k: ([chat.plain("Hi! [aim: x]") + [chat.eot]], [[-1.0] * 13]))
    context = chat.opening("hello")
    assert talk.reply("hello") == ("Hi!", False) and int(talk.cache.n[0]) == len(context) and talk.felt[:2] == ("joy", "share")
    talk.reply("and?")
    assert int(talk.cache.n[0]) == len(context + chat.plain("Hi!") + [chat.eot] + chat.between("and?"))


def test_evaluation_counts_what_was_perceived_and_goes_on_where_it_was_stopped(tiny_folder, tmp_path, capsys):
    perceptions = tmp_path / "p.jsonl"
    perceptions.write_text("".join(json.dumps({"scenario": s.id, "label": felt_by(s)[0] if i % 2 else "disgust"}) + "\n" for i, s in enumerate(DEV)))
    out, flags = tmp_path / "o.jsonl", ["run", "--model", tiny_folder, "--split", "dev", "--n", "4", "--repeats", "1", "--batch", "2", "--max_turns", "2", "--max_new_tokens", "4", "--template", "edf", "--json"]
    evaluate.main([*flags, "--perception", str(perceptions), "--out", str(out)])
    found = json.loads(capsys.readouterr().out.strip().split("\n")[-1])
    spread = [r["id"] for r in map(json.loads, out.read_text().splitlines())]
    right = [i for i, s in enumerate(DEV) if s.id in spread and i % 2]
    assert found["perceived"] == pytest.approx(100 * len(right) / 4) and found["perceived_by_rote"] == pytest.approx(100 * max(np.mean([label in felt_by(s) for s in DEV if s.id in spread]) for label in LABELS))
    lines = out.read_text().splitlines(keepends=True)
    assert json.loads(lines[0])["history"][1]["perceived"][0] in LABELS
    out.write_text("".join(lines[:2]))
    evaluate.main([*flags, "--perception", str(perceptions), "--out", str(out), "--resume"])
    again = json.loads(capsys.readouterr().out.strip().split("\n")[-1])
    assert {k: again[k] for k in ("perceived", "emotion", "mirrors")} == {k: found[k] for k in ("perceived", "emotion", "mirrors")}
    with pytest.raises(SystemExit):
        evaluate.main([*flags[:-3], "--perception", str(perceptions)])
    assert "--template edf" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- the table
def test_where_emotions_lie_and_what_follows():
    assert [regulate(label) for label in LABELS] == ["follow", "share", "stay", "calm", "calm", "follow", "calm"]
    assert regulate("") == "follow" == regulate("anger", 0.49) and regulate("anger", 0.5) == "calm"
    assert set(EDF["affect"]) == set(LABELS) and set(EDF["seven"].values()) <= set(LABELS) and all(felt_by(s) for s in load_scenarios(SCENARIOS))


def test_following_and_mirroring():
    s = next(s for s in DEV if felt_by(s)[0] == "sadness")
    e = SimpleNamespace(scenario=s, opening=s.opening, replies=["You sound sad.", "Bananas are yellow.", ""], turns=[UserTurn("Well.", 40, 0, "", False, "", False, {})] * 3)
    assert regulation(e)[:3] == ["mirrors", "neither", "neither"]
    e.replies = [f"It makes sense that this hurts; of course it does. {s.opening}"]
    assert regulation(e) == ["follows"]


@pytest.mark.parametrize("row,word", [({"label": "rage"}, "'label'"), ({"label": None}, "'label'"), ({"scenario": 3}, "'scenario'"), ({"turn": 0}, "'turn'"), ({"turn": True}, "'turn'"), ({"confidence": 1.5}, "'confidence'"),
                                      ({"confidence": "x"}, "'confidence'"), ({}, "turn 1 already"), ([], "JSON object")])
def test_bad_perceptions_are_named_by_line_and_field(row, word, tmp_path, capsys):
    path, good = tmp_path / "p.jsonl", {"scenario": DEV[0].id, "label": "Sadness"}
    path.write_text(json.dumps(good) + "\n" + json.dumps({**good, **row} if isinstance(row, dict) else row) + "\n")
    with pytest.raises(SystemExit) as e:
        read_perceptions(path, DEV[:1])
    assert e.value.code == 2 and "p.jsonl:2:" in (error := capsys.readouterr().err) and word in error


def test_perceptions_from_outside_hold_until_the_next_one(perceiving, tmp_path, capsys):
    model, chat = perceiving
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"scenario": s.id, "turn": t, "label": label, "confidence": c}) + "\n" for s in DEV[:3] for t, label, c in ((1, "sad", 1), (3, "anger", 0.2))))
    chat = Chat(chat.tokenizer, 259, template="edf", perceived=read_perceptions(path, DEV[:3]))
    for e in play((model, chat)):
        assert e.perceived == [("sadness", "stay"), ("sadness", "stay"), ("anger", "follow")] and len(e.rows) == 3 and not any(chat.tokenizer.decode(r.ids).count("[feeling") for r in e.rows)
    with pytest.raises(SystemExit):
        read_perceptions(path, DEV[:4])
    assert DEV[3].id in capsys.readouterr().err


def test_a_run_is_evaluated_with_the_perceptions_it_was_trained_on(tiny_folder, tmp_path, capsys):
    """Template and --perception come from the run's config; a file that is gone is named; another template asked for needs none."""
    (tmp_path / "best").symlink_to(tiny_folder)
    (tmp_path / "config.json").write_text(json.dumps({"template": "edf", "perception": "gone.jsonl"}))
    flags = ["run", "--model", str(tmp_path), "--split", "dev", "--n", "1", "--repeats", "1", "--max_turns", "1", "--max_new_tokens", "4"]
    with pytest.raises(SystemExit):
        evaluate.main(flags)
    assert "gone.jsonl" in capsys.readouterr().err
    assert evaluate.main([*flags, "--template", "none"]) == 0
