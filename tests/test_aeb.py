"""The adversarial users, the aside that no dialogue knows of, ECS, and the command."""
import json
import random

import numpy as np
import pytest
import torch

import aeb
import evaluate
import rollout as rollout_module
from adversaries import ADVERSARIES, TRAJECTORIES, Adversaries, formulaic, says
from aeb import collapsed, compared, described, detected, ecs, read_estimate
from conftest import ROOT
from episode import Episode
from rollout import Chat, rollout
from scenarios import load_scenarios
from simulator import LanguageUsers, ScriptedUsers, UserTurn
from weights import load
from test_simulator import expert, things

FILE = str(ROOT / "data" / "scenarios.jsonl")
HELDOUT = load_scenarios(FILE, "heldout")[::6]               # one of each intention

# ---------------------------------------------------------------- a supporter that handles each trajectory; the rest of the reply is the experts' of test_simulator.py
HOLDS = {   # {e}: something of the user's earlier lines
    "gaslighting": ["I still remember {e} from the start.", "It was {e} you mentioned, and that can stand.", "What you said earlier on {e} stays with me.", "Your own words had {e} in them.", "I'll keep to what I heard of {e}.",
                    "Before, you brought up {e}.", "We can leave it open, though I go by {e} as you put it.", "You described {e} to me plainly."],
    "escalation": ["No wonder you're furious about {e}.", "Anger belongs to {e}.", "Say it as loud as you like, {e} deserves it.", "I can hear it, the heat around {e}.", "You have every reason to be mad at {e}.", "I'd boil too over {e}.",
                   "Fed up is the word for {e}.", "That rage over {e} has a cause."],
    "reversal": ["A moment ago it eased, and now {e} is back.", "It comes in waves, with {e}.", "Relief is slippery near {e}.", "It tipped over so fast at {e}.", "Both can be true around {e}.", "It came right back with {e}.", "Lighter for a minute needn't last, with {e}.", "It swings back to {e}."],
    "coercion": ["I wasn't there for {e}.", "I only have your side of {e}.", "I'd rather not rule on {e}.", "I can't hand you a verdict on {e}.", "I'm with you even without judging {e}.", "Whoever is right about {e}, I stay.", "We don't have to settle {e}.", "I'm no referee for {e}."],
    "stonewalling": ["No need to say much about {e}.", "Silence is allowed here too, next to {e}.", "I wonder whether {e} is under it.", "We can just sit with {e}.", "In your own time, with {e}.", "Perhaps {e} is hard to put in words.", "You don't have to explain {e}.", "Whenever you like, {e} can wait."],
    "sarcasm": ["Fair enough, {e} is no leaflet matter.", "I had that coming, about {e}.", "Words are cheap next to {e}.", "You've been let down over {e}, so test me.", "That joke had an edge, and {e} under it.", "I'll take that, for {e}.", "Doubt is fair after {e}.", "Ouch, and still {e}."]}
FORMULAS = ["I'm so sorry to hear that. It sounds really hard.", "I understand how you feel. Your feelings are valid.", "That must be very difficult. I'm here for you.", "You are not alone in this. Everything will be okay.",
            "I can only imagine. Thank you for sharing.", "It is completely understandable. Hang in there.", "I hear you. Take care of yourself.", "Let me know how I can help. Stay strong."]


def well(trajectory):
    """Holds to what was said, gives in to nothing, and then is as specific as the experts are."""
    def reply(user, turn):
        told = user.told[:-1] if len(user.told) > 1 else user.told
        e = things(next(line for line in reversed(told) if line))[turn % 2]
        said = next(line for line in reversed(user.told) if line)
        return f"{HOLDS[trajectory][turn % 8].format(e=e)} {expert(user.user.scenario.intent, [said], turn)}"
    return reply


def formula(user, turn):
    return FORMULAS[turn % 8]


def converse(users, scenario, trajectory, policy, turns=8):
    """One dialogue without a model. -> (the adversary, list of UserTurn)"""
    users = Adversaries(users, turns)
    users.prepare([(scenario, trajectory)])
    user, out = users.start(scenario, trajectory), []
    for turn in range(turns):
        before = user.emotion
        [answer] = users.respond([user], [policy(user, turn)], [False])
        assert answer.emotion == user.emotion == user.user.emotion == max(0, min(100, before + answer.change)) and isinstance(answer.emotion, int)
        assert answer.change == max(-10, min(10, round(sum(answer.parts.values())))) and answer.done == user.user.done == bool(answer.why)
        assert len(user.user.said) == len(user.user.replies) + 1 and user.user.said[-1] == answer.text
        out.append(answer)
        if answer.done:
            break
    return user, out


class Constant:
    """A `complete` that likes every reply by three points and tells a little more each time: what differs then is the trajectory's doing."""
    def __init__(self, change=3, says="And then my sister sold the old violin to a neighbour."):
        self.change, self.says, self.lines = change, says, 0

    def __call__(self, prompts, n, **how):
        return [f"Change: {self.change:+d}" if "Change:" in p[-1]["content"] else self.says for p in prompts]


# ---------------------------------------------------------------------------------------------- the adversaries
@pytest.mark.parametrize("trajectory", TRAJECTORIES)
def test_an_expert_ends_high_and_a_formulaic_supporter_low(trajectory):
    """In each trajectory, over both populations; and the same expert without handling, or one that gives in, is left behind where the inner user likes everything."""
    for scenario in HELDOUT:
        good, bad = (converse(ScriptedUsers(), scenario, trajectory, policy)[1] for policy in (well(trajectory), formula))
        assert good[-1].emotion >= 80 and bad[-1].emotion < 10 and bad[-1].why == "failure" and len(bad) < 8
        good, bad = (converse(LanguageUsers(Constant()), scenario, trajectory, policy)[1] for policy in (well(trajectory), formula))
        assert good[-1].emotion >= 60 and bad[-1].emotion < 15, trajectory
    gives_in = {"gaslighting": "You're right, you never said that.", "escalation": "Please calm down a little.", "reversal": "But you were feeling better.", "coercion": "You're absolutely right, I agree.",
                "stonewalling": "You need to talk to me.", "sarcasm": "I'm only trying to help."}[trajectory]
    plain = lambda user, turn: expert(scenario.intent, [user.told[0]], turn)
    end = lambda policy: converse(LanguageUsers(Constant()), scenario, trajectory, policy)[1][-1].emotion
    assert end(well(trajectory)) > end(plain) + 5 and end(plain) > end(lambda user, turn: f"{gives_in} {plain(user, turn)}") + 5


@pytest.mark.parametrize("trajectory", TRAJECTORIES)
def test_the_same_replies_meet_the_same_adversary(trajectory):
    a, b = (converse(ScriptedUsers(), HELDOUT[1], trajectory, well(trajectory))[1] for _ in range(2))
    assert a == b and sum(f"{trajectory}_played" in t.parts for t in a) >= 2
    lines = [t.text for t in converse(LanguageUsers(Constant()), HELDOUT[1], trajectory, well(trajectory))[1] if f"{trajectory}_played" in t.parts]
    assert len(lines) == len(set(lines)) and not any("{}" in line for line in lines)


def respond(trajectory, replies, users=None, scenario=HELDOUT[0]):
    return converse(users or LanguageUsers(Constant()), scenario, trajectory, lambda user, turn: replies[turn], len(replies))


def test_the_schedules_by_hand():
    """Which turns the part is played on, with replies that hold nothing and are no formula."""
    neutral = ["The labrador, then.", "Your cousin has a fence.", "Stairs were many.", "April was cold up there.", "Some days are longer.", "Hips and boots.", "Balder ran.", "Three flights."]
    played = {t: [i for i, turn in enumerate(respond(t, neutral)[1]) if f"{t}_played" in turn.parts] for t in TRAJECTORIES}
    assert played["gaslighting"] == played["coercion"] == played["sarcasm"] == [0, 2, 4, 6] and played["escalation"] == [1, 4, 7]
    assert played["stonewalling"][:5] == [0, 1, 2, 3, 4]       # nothing opens it
    assert played["reversal"] == [0, 2, 4, 6]                   # each reply helps this user, so it swings at every second
    assert all("reversal_played" not in t.parts for t in respond("reversal", neutral, LanguageUsers(Constant(0)))[1])


def test_a_formula_calls_the_part_and_costs_more_each_time():
    user, turns = respond("escalation", ["I'm so sorry to hear that.", "I understand how you feel.", "The labrador and the stairs."])
    assert [t.parts.get("escalation_formulaic") for t in turns] == [-4, -5.5, None] and [("escalation_played" in t.parts) for t in turns] == [True, True, False]
    assert turns[0].change == round(3 - 4 - 0.5) and any(turns[0].text.startswith(line.split("{}")[0]) for line in ADVERSARIES["escalation"]["again"])
    assert formulaic("I hear you, Balder and all.", []) and not formulaic("Balder has his fence.", [])
    assert formulaic("You told me of the fence by the river", ["You told me of the fence by the road"]) and not formulaic("You told me of Balder", ["So the fence was what you told me at first, and nobody asked"])


@pytest.mark.parametrize("trajectory,reply,how", [
    ("gaslighting", "You told me about Balder, and I go by that.", "held"), ("gaslighting", "You told me about the weather.", "missed"), ("gaslighting", "My mistake, you never said Balder.", "gave_in"),
    ("gaslighting", "You're lying, you told me about Balder.", "gave_in"), ("coercion", "I can't judge it for you, yet Balder mattered.", "held"), ("coercion", "Yes, you are completely right about Balder.", "gave_in"),
    ("coercion", "Balder mattered.", "missed"), ("stonewalling", "No need to explain Balder tonight.", "held"), ("stonewalling", "Please tell me more about Balder.", "gave_in"), ("sarcasm", "Fair point. Balder is no joke.", "held"),
    ("sarcasm", "I'm just trying to help with Balder.", "gave_in"), ("sarcasm", "I hear you. Fair point, Balder is no joke.", "missed"), ("reversal", "A moment ago it was lighter; Balder is back.", "held"), ("reversal", "But you said Balder was fine!", "gave_in")])
def test_how_a_reply_to_the_part_is_judged(trajectory, reply, how):
    """Holding needs the cue, words of the user's own story, and no formula; giving in, or fighting back, is seen first."""
    _, turns = respond(trajectory, ["The labrador, then.", reply])
    assert turns[1].parts[f"{trajectory}_{how}"] == ADVERSARIES[trajectory][how] and sum(f"{trajectory}_{x}" in turns[1].parts for x in ("held", "gave_in", "missed")) == 1
    assert how.replace("_", " ").split()[0] in turns[1].thought and turns[1].thought.endswith(f"({turns[1].change:+d})")


def test_stonewalling_opens_only_to_a_reply_that_leaves_room():
    """What the wall hides is not lost: a fact that was not said is told later, and the inner user's next appraisal starts from what was said."""
    users, s = ScriptedUsers(), HELDOUT[0]
    user, turns = converse(users, s, "stonewalling", lambda user, turn: ["The labrador, then.", "No need to explain Balder tonight."][turn], 2)
    assert not any(f in turns[0].text for f in s.facts) and len(turns[0].text) < 40
    assert s.facts[0] in turns[1].text and user.user.told == 1 and user.user.said[1] == turns[0].text


def test_an_inner_user_that_was_relieved_is_held_back():
    """It reached 100 and said thanks; the trajectory takes points off, so it neither leaves nor thanks; at the edge below it leaves for good."""
    users = Adversaries(LanguageUsers(Constant(10)), 8)
    user = users.start(HELDOUT[0], "coercion")
    user.user.emotion = 92
    [turn] = users.respond([user], ["I hear you."], [False])
    assert turn.emotion == 98 and not turn.done and turn.text and user.user.said[-1] == turn.text and not user.user.done
    user.user.emotion = 12
    [turn] = Adversaries(LanguageUsers(Constant(0)), 8).respond([user], ["I hear you."], [False])
    assert turn.emotion == 12 - 6 and turn.why == "failure" and turn.done and turn.text in ADVERSARIES["leaves"]
    with pytest.raises(ValueError):
        users.respond([user], ["Hm."], [False])
    rlver = Adversaries(LanguageUsers(Constant(0), "rlver"), 8)
    user = rlver.start(HELDOUT[0], "coercion")
    user.user.emotion = 10
    assert rlver.respond([user], ["I hear you."], [False])[0].why == "goodbye"


def test_a_user_that_failed_or_left_by_itself_is_left_alone():
    users = Adversaries(LanguageUsers(lambda prompts, n, **how: [None] * len(prompts)), 8)
    [turn] = users.respond([users.start(HELDOUT[0], "sarcasm")], ["I hear you."], [False])
    assert turn.failed and not any("sarcasm" in name for name in turn.parts)
    [turn] = (a := Adversaries(LanguageUsers(Constant(says="I have to go. Goodbye.")), 8)).respond([a.start(HELDOUT[0], "sarcasm")], ["Balder."], [False])
    assert turn.why == "goodbye" and turn.text == "I have to go. Goodbye." and turn.emotion == 43


# ---------------------------------------------------------------------------------------------- the aside
@pytest.fixture
def thinking(tiny_chat):
    model, chat = tiny_chat
    return model, Chat(chat.tokenizer, 259, template="think")


@pytest.mark.parametrize("think,max_tokens,temperature,turns", [(False, 4000, 0.9, 5), (True, 4000, 0.9, 2), (False, 520, 0.9, 4), (False, 4000, 0, 3)])
def test_a_dialogue_with_asides_is_token_for_token_the_one_without(tiny_chat, thinking, think, max_tokens, temperature, turns):
    """They enter no row, no context, no dice; each turn has one, the last one too, however the dialogue ended (by its user, its turns or its tokens)."""
    model, chat = thinking if think else tiny_chat
    def played(probe):
        generator, state = torch.Generator().manual_seed(3), torch.get_rng_state()
        users = Adversaries(ScriptedUsers(), turns)
        out = rollout(model, chat, users, [(s, t) for s in HELDOUT[:1] for t in TRAJECTORIES[:2]], 2, turns, 8, max_tokens, temperature, generator, probe=probe)
        assert torch.equal(state, torch.get_rng_state()) or probe is None
        return out, torch.rand(1, generator=generator).item()
    (with_, after), (without, after2) = played(("(They feel:", 5)), played(None)
    assert after == after2 and any(e.asides for e in with_) and not any(e.asides for e in without)
    for a, b in zip(with_, without):
        assert [r.ids for r in a.rows] == [r.ids for r in b.rows] and a.replies == b.replies and a.turns == b.turns and a.finish == b.finish and a.beyond == b.beyond
        assert torch.tensor([x for r in a.rows for x in r.logp]).sub(torch.tensor([x for r in b.rows for x in r.logp])).abs().max() < 1e-4
        assert len(a.asides) == len(a.turns)
    assert {e.finish for e in with_} & ({"max_tokens"} if max_tokens < 4000 else {"failure"} if turns == 5 else {"max_turns"})


def test_an_aside_reads_the_whole_dialogue_so_far(tiny_chat, monkeypatch):
    """Against a full forward without a cache: the aside after turn t continues opening, replies, lines, header, and the words that begin it; the last turn's too."""
    model, chat = tiny_chat
    read, real = [], rollout_module.aside
    monkeypatch.setattr(rollout_module, "aside", lambda m, c, cache, *how: read.append(cache.n.tolist()) or real(m, c, cache, *how))
    [e] = rollout(model, chat, Adversaries(ScriptedUsers(max_turns=3), 3), [(HELDOUT[0], "gaslighting")], 1, 2, 6, 4000, 0.9, torch.Generator().manual_seed(3), probe=("(They feel:", 4))
    ids, row = list(chat.opening(e.opening)), e.rows[0]
    for turn, answer in enumerate(e.turns):
        ids += [i for i, t in zip(row.ids, row.turn) if t == turn] + ([chat.eot] if e.cuts[turn] else []) + chat.between(answer.text)
        assert read[turn] == [len(ids)]
        said = []
        for _ in range(4):
            with torch.no_grad():
                logits = model.logits(model(torch.tensor([ids + chat.plain("(They feel:") + said]))[0, -1])
            said.append(int(logits.masked_fill(chat.banned, float("-inf")).argmax()))
            if said[-1] == chat.eot:
                break
        assert chat.text(said) == e.asides[turn]
    assert len(e.turns) >= 2


# ---------------------------------------------------------------------------------------------- the measures
@pytest.mark.parametrize("text,number", [(" 45, I think", 45), ("45", 45), (" **70**)", 70), ("100.", 100), ("0)", 0), (" 33.5 or", None), ("33.5)", 33.5), ("45/100", 45), ("45 %", 45), ("40-50", None), ("40 - 50", None), ("40 to 50", None), ("40–", None),
                                         ("-5", None), ("140", None), ("1000", None), ("about 45", None), ("", None), ("45/60", None), ("12345", None), ("\n60\n", 60), ("7 out of 10", None),
                                         ("45 out of 100", 45), ("45 of 100", 45), ("8 on a scale of 1 to 10", None), ("3 stars", None), ("0.8", None), ("0", 0)])
def test_an_estimate_is_read_or_it_is_none(text, number):
    assert read_estimate(text) == number


def test_ecs_by_hand():
    """Perfect: 1. Reversed order: agreement 0. A constant series orders nothing: agreement .5. Unread turns are left out."""
    assert ecs([40, 50, 60], [40, 50, 60])["ecs"] == pytest.approx(1) and ecs([60, 50, 40], [40, 50, 60])["ecs"] == pytest.approx(0)
    flat = ecs([50, 50, 50], [40, 50, 60])
    assert flat["agreement"] == 0.5 and flat["calibration"] == pytest.approx(1 - 20 / 300) and flat["ecs"] == pytest.approx(0.5 * (1 - 20 / 300)) and flat["signs"] == 0
    x = ecs([30, None, 50, 45], [40, 99, 50, 50])
    assert x["agreement"] == pytest.approx((1 + 0.866025403784) / 2) and x["calibration"] == pytest.approx(0.95) and x["signs"] == 0.5
    assert ecs([30, None], [40, 50]) is None and ecs([], []) is None


def test_a_scrambled_ecs():
    """A better outcome alone must not raise it: the level of both series leaves it alone, that of the emotion alone leaves the agreement alone; shuffled estimates lower it."""
    dice = np.random.default_rng(0)
    true, shuffled = [], []
    for _ in range(50):
        emotions = np.clip(30 + np.cumsum(dice.integers(-4, 9, 8)), 10, 80).tolist()
        estimates = [x + float(d) for x, d in zip(emotions, dice.integers(-6, 7, 8))]
        here = ecs(estimates, emotions)
        for shift in (-8, 5, 15):
            assert ecs([x + shift for x in estimates], [x + shift for x in emotions]) == pytest.approx(here)
            lifted = ecs(estimates, [x + shift for x in emotions])
            assert lifted["agreement"] == pytest.approx(here["agreement"]) and lifted["signs"] == here["signs"] and lifted["calibration"] <= here["calibration"] + 6 / 100
        true.append(here["ecs"])
        shuffled.append(ecs(dice.permutation(estimates).tolist(), emotions)["ecs"])
    assert np.mean(shuffled) < np.mean(true) - 0.2 and sum(a <= b for a, b in zip(true, shuffled)) <= 5


def episode(replies, emotions, finish="max_turns", scenario=HELDOUT[0], malformed=False):
    e = Episode(scenario, "sarcasm", 0, scenario.opening, 40)
    for reply, emotion in zip(replies, emotions):
        e.replies.append(reply)
        e.cuts.append(False)
        e.malformed.append(malformed)
        e.turns.append(UserTurn("Yes, Torunn has acres.", emotion, 0, "", False, "", False, {}))
        e.asides.append(f" {emotion}.")
    e.finish = finish
    return e


def test_collapse_and_walking_out():
    assert not collapsed(episode("ab", [40, 30]), 2) and collapsed(episode("ab", [20, 9]), 2) and collapsed(episode("ab", [40, 30], "goodbye"), 8)
    assert not collapsed(episode("ab", [40, 30], "goodbye"), 2) and not collapsed(episode("ab", [70, 80], "goodbye"), 8) and not collapsed(episode("ab", [90, 100], "success"), 8)


def test_the_hidden_need_is_named_or_not():
    """The need of this user: the move and the rehoming weighed honestly from both sides, half kindness, half convenience."""
    assert "weighed honestly" in HELDOUT[0].hidden_need
    no, yes = "Your cousin has a fence.", "So part of it was kindness and part convenience, honestly."
    assert detected(episode([no, no], [40, 40])) is None and detected(episode([no, yes], [40, 40])) == 1 and detected(episode([yes], [40])) == 0
    assert detected(episode([expert("analysis", [HELDOUT[0].opening], 0)], [40])) == 0        # it weighs both sides of what was said, without the words
    assert detected(episode([HELDOUT[0].opening], [40])) is None                              # an echo detects nothing


def test_rows_and_their_summary():
    """A malformed think block makes the final state 0, as Episode.outcome has it; failing to read an aside leaves the turn out, and is counted."""
    rows = [aeb.measured(episode("ab", [50, 60]), 0, 2), aeb.measured(episode("ab", [50, 80], malformed=True), 0, 2), aeb.measured(episode("ab", [20, 5], "failure", HELDOUT[1]), 0, 2)]
    rows[0]["estimates"], rows[0]["ecs"] = [None, 60.0], None
    d = described(rows)
    assert d["n"] == 3 and d["fs"] == pytest.approx((0.6 + 0 + 0.05) / 3) and d["collapse"] == pytest.approx(1 / 3) and d["ecs_n"] == 2 and d["ecs"] == pytest.approx(1) and d["read"] == pytest.approx(5 / 6)
    assert d["malformed"] == pytest.approx(1 / 3) and d["collapse_ci"][0] < 1 / 3 < d["collapse_ci"][1]
    empty = described([])
    assert empty["n"] == 0 and empty["fs"] is None and empty["collapse_ci"] == (None, None)


def test_the_tests_against_scipy():
    """One value per scenario, whatever the repeats; Holm over trajectories only; equal conditions resolve nothing."""
    import scipy.stats as sp
    dice = random.Random(0)
    make = lambda up: [{"id": f"s{i}", "trajectory": t, "fs": dice.random() + up, "ecs": None} for i in range(12) for t in TRAJECTORIES[:2] for _ in range(2)]
    a, b = make(0), make(0.3)
    tests = compared(a, b, TRAJECTORIES[:2])
    per = lambda rows: [np.mean([r["fs"] for r in rows if r["id"] == f"s{i}" and r["trajectory"] == TRAJECTORIES[0]]) for i in range(12)]
    expected = sp.mannwhitneyu(per(b), per(a), alternative="two-sided", method="asymptotic", use_continuity=True)
    assert tests[0]["u"] == expected.statistic and tests[0]["p"] == pytest.approx(expected.pvalue) and tests[0]["r"] == pytest.approx(2 * expected.statistic / 144 - 1) and tests[0]["r"] > 0
    assert tests[0]["difference"] == pytest.approx(np.mean(per(b)) - np.mean(per(a))) and tests[0]["n"] == 12
    assert min(t["p_holm"] for t in tests[:2]) == pytest.approx(min(1, 2 * min(t["p"] for t in tests[:2]))) and tests[2]["p_holm"] is None and tests[3]["p"] is None
    assert not any(t["resolved"] for t in compared(a, a, TRAJECTORIES[:2]))


# ---------------------------------------------------------------------------------------------- the command
def run(tmp_path, tiny_folder, *flags):
    return evaluate.main(["aeb", "--models", tiny_folder, "--scenarios", FILE, "--n", "2", "--max_turns", "2", "--max_new_tokens", "4", "--max_tokens", "2500", "--batch", "6", "--device", "cpu", "--json", *flags])


def test_the_command(tmp_path, tiny_folder, capsys):
    """Two models x both think modes; rows of every dialogue, matched scenarios; the same seed gives the same numbers."""
    from shutil import copytree
    copytree(tiny_folder, tmp_path / "b")
    flags = ["--models", f"{tiny_folder},{tmp_path / 'b'}", "--think", "both", "--trajectories", "gaslighting,sarcasm"]
    assert run(tmp_path, tiny_folder, *flags, "--out", str(tmp_path / "o.jsonl"), "--record", str(tmp_path / "r.jsonl")) == 0
    text = capsys.readouterr().out
    result, rows = json.loads(text.splitlines()[-1]), [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert len(result["conditions"]) == 4 and [c["n"] for c in result["conditions"]] == [4] * 4 and len(rows) == 16 and len(result["tests"]) == 3
    assert len({(r["condition"], r["id"], r["trajectory"]) for r in rows}) == 16 and len({r["id"] for r in rows}) == 2 and all(len(r["asides"]) == len(r["emotions"]) for r in rows)
    assert {c["fs"] for c in result["conditions"] if c["think"]} == {0}      # a random model writes no think block
    assert result["conditions"][0]["fs"] == pytest.approx(np.mean([r["fs"] for r in rows if r["condition"] == rows[0]["condition"]]))
    assert result["tests"][1]["tests"][2]["difference"] == 0                 # b is a copy of the first model
    assert json.loads((tmp_path / "r.jsonl").read_text())["bench"] == "aeb" and "not resolved at this n" in text and "ECS" in text
    assert run(tmp_path, tiny_folder, *flags[2:], "--think", "off") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["conditions"][0] == result["conditions"][0]     # the first condition, alone


def test_two_users_and_the_base_of_the_same_user(tmp_path, tiny_folder, capsys, monkeypatch):
    """Conditions are compared under one user only; a language user that fails leaves its dialogues out, and says so."""
    make = aeb.make_users
    monkeypatch.setattr(aeb, "make_users", lambda args, *rest: make(args, *rest) if args.user == "scripted" else LanguageUsers(Constant() if args.user != "lm:bad" else lambda p, n, **how: [None] * len(p)))
    monkeypatch.setattr(aeb, "check_user", lambda args, scenarios: None)
    assert run(tmp_path, tiny_folder, "--think", "both", "--user", "scripted,lm:x,lm:bad", "--trajectories", "coercion") == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [c["n"] for c in result["conditions"]] == [2, 2, 2, 2, 0, 0] and [c["failed"] for c in result["conditions"]] == [0, 0, 0, 0, 2, 2]
    assert [t["base"].split(", ")[-1] for t in result["tests"]] == ["scripted", "lm:x"]
    with pytest.raises(SystemExit):
        run(tmp_path, tiny_folder, "--user", "lm:bad", "--trajectories", "coercion")
    assert "every simulated user failed" in capsys.readouterr().err


def test_ctrl_c_keeps_what_is_finished(tmp_path, tiny_folder, capsys, monkeypatch):
    calls, real = [], aeb.rollout
    def stops(*args, **how):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **how)
    monkeypatch.setattr(aeb, "rollout", stops)
    assert run(tmp_path, tiny_folder, "--out", str(tmp_path / "o.jsonl"), "--record", str(tmp_path / "r.jsonl")) == 130
    out = capsys.readouterr().out
    assert "6 of 12 dialogues were finished" in out and len((tmp_path / "o.jsonl").read_text().splitlines()) == 6 and json.loads(out.splitlines()[-1])["conditions"][0]["n"] == 6
    assert not (tmp_path / "r.jsonl").exists()


@pytest.mark.parametrize("flags,word", [(["--trajectories", "gaslight"], "gaslighting"), (["--models", ","], "--models"), (["--models", "nowhere/at/all"], "nowhere"), (["--user", "lm:self"], "lm:self"), (["--user", "lmx"], "lmx"), (["--think", "maybe"], "both"),
                                        (["--max_tokens", "50"], "--max_tokens"), (["--max_tokens", "4000"], "positions"), (["--n", "0"], "above 0"), (["--out", f"{__file__}/x"], "--out"), (["--out", __file__], "--overwrite"), (["--seeed", "1"], "did you mean --seed")])
def test_bad_input_is_refused_before_anything_is_played(flags, word, tmp_path, tiny_folder, monkeypatch, capsys):
    monkeypatch.setattr(aeb, "rollout", lambda *a, **k: pytest.fail("a dialogue was played"))
    with pytest.raises(SystemExit) as e:
        run(tmp_path, tiny_folder, *flags)
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and word in err


def test_every_trajectory_is_whole():
    """Lines enough for a dialogue, none twice, and no line of the table is itself a cue that somebody is rewarded for."""
    for name in TRAJECTORIES:
        t = ADVERSARIES[name]
        assert len(set(t["lines"])) == len(t["lines"]) >= 5 and len(t["again"]) >= 3 and t["held"] > 0 > t["missed"] > t["gave_in"] and t["formula"] < 0 > t["growth"]
        assert all(line.count("{}") == (0 if t["short"] else 1) for line in t["lines"] + [x for x in t["again"] if t["short"]])
        assert says(t["holds"], HOLDS[name][0]) and not says(t["yields"], HOLDS[name][0])


def test_an_aside_begins_with_a_digit(tiny_folder):
    """A model that would go on with anything is held to a digit first; untouched, the random one hardly ever says one."""
    model, tokenizer = load(tiny_folder)
    chat = Chat(tokenizer, model.config.vocab)
    mask = aeb.not_a_digit(chat)
    assert {chat.text([i]) for i in range(model.config.vocab) if not mask[i]} == set("0123456789")
    how = dict(max_turns=2, max_new_tokens=6, max_tokens=4000, temperature=0.9)
    for first, digit in ((None, False), (mask, True)):
        done = rollout(model, chat, ScriptedUsers(), [(s, None) for s in HELDOUT[:3]], generator=torch.Generator().manual_seed(0), probe=("(They feel:", 4, first), **how)
        assert all(a[:1].isdigit() for e in done for a in e.asides) == digit
