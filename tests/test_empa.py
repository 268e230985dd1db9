"""EMPA: the walk by hand and on the released runs, its nine indices by the formulas written out again, judges, whole dialogues, bad input."""
import json
import math
import random

import pytest

import empa
import evaluate
from conftest import ROOT
from empa import INDICES, JudgedUsers, LanguageJudge, ScriptedJudge, Walk, deficit, distance, epm_q, models_table, perturbations, replay
from episode import Episode
from scenarios import load_scenarios
from simulator import LanguageUsers, ScriptedUsers, UserTurn
from test_simulator import expert

RUNS = ROOT.parent / "shared" / "data" / "empa_runs_sample.jsonl"
SCENARIOS = load_scenarios(ROOT / "data" / "scenarios.jsonl", "dev")


def run(P0, prog, neg, **more):
    walk = Walk(P0)
    for p, n in zip(prog, neg):
        walk.step(p, n)
    return {"model": "m", "script_id": "s", "P0": P0, "prog": prog, "neg": neg, "turns": len(prog), "outcome": walk.outcome, **more}


@pytest.mark.skipif(not RUNS.is_file(), reason="the released runs are not part of the repository")
def test_released_runs_replay(capsys):
    assert evaluate.main(["epm", str(RUNS), "--json", "--strict"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["runs"] == result["replayed"] == 10 and set(INDICES) < set(result["models"]["qwen3-8b"])
    for row in map(json.loads, RUNS.read_text().splitlines()):           # the file's own movements
        walk = replay(row)[0]
        assert [(b - a).tolist() for a, b in zip(walk.points, walk.points[1:])] == row["v"]


def test_deficit_and_distance_by_hand():
    assert deficit(dict.fromkeys(empa.INDICATORS, 3)).tolist() == [-21, -27, -27]         # -2 (1 + 1 + 1.5) 3; A and P: -2 (1 + 2 + 1.5) 3
    assert deficit({**dict.fromkeys(empa.INDICATORS, 0), "C3": 1, "P2": 2}).tolist() == [-3, 0, -8]
    assert distance([-4, -1, 5]) == 3 and distance([-4, -5, 0]) == 5


def test_walk_outcomes():
    """Not before turn 12; success needs both the place and the work; three ways to fail; time."""
    ahead = Walk([-9, -9, -9])
    outcomes = [ahead.step([2, 2, 2], [0, 0, 0]) for _ in range(12)]
    assert outcomes == [""] * 11 + ["success"]
    back = Walk([-9, -9, -9])
    assert [back.step([0, 0, 0], [-1, 0, 0]) for _ in range(12)][-1] == "failure"
    nowhere = Walk([-9, -9, -9])
    assert [nowhere.step([0, 0, 0], [0, 0, 0]) for _ in range(12)][-1] == "failure"       # |P| moved by < 3 in 12 points
    slow, steps = Walk([-21, -27, -27]), 0
    while not slow.outcome:
        slow.step([1, 0, 0], [0, 0, 0]) if steps % 2 else slow.step([0, 1, 0], [0, 0, 0])
        steps += 1
    assert (slow.outcome, steps) == ("timeout", 45)
    assert Walk([-21, -27, -27], 3).last == 3
    with pytest.raises(ValueError):
        Walk([0, 0, 0])


def test_stuck_low_fails_without_five_in_a_row():
    """Six of the last eight gains negative, their sum below -1, |P| of the last five turns hardly spread, two steps of 0 among the last five. With
    steps of 0 instead of the three falls the sum is above -1, and it goes on."""
    ahead, fall, stay = ([1, 1, 1], [0, 0, 0]), ([0, 0, 0], [-1, -1, -1]), ([0, 0, 0], [0, 0, 0])
    aside, other = ([1, 1, 0], [0, -1, 0]), ([1, 0, 1], [0, 0, -1])           # (1, -1, 0) and (1, 0, -1): slightly away from the need (9, 10, 10)
    for three, outcome in ((fall, "failure"), (stay, "")):
        walk = Walk([-9, -10, -10])
        for move in [ahead] * 4 + [three] * 3 + [aside, stay, stay, aside, other]:
            walk.step(*move)
        lengths = [math.dist(p, (0, 0, 0)) for p in walk.points[-5:]]
        assert math.sqrt(sum((x - sum(lengths) / 5) ** 2 for x in lengths) / 4) < 0.5 and not all(g < 0 for g in walk.gains[-5:])
        assert walk.outcome == outcome


def test_indices_by_the_formulas_again():
    P0, prog, neg = [-6.0, -9.0, -2.0], [[1, 2, 0], [0, 1, 1], [2, 0, 0]], [[0, 0, 0], [-1, 0, -2], [0, 0, 0]]
    walk = Walk(P0)
    for p, n in zip(prog, neg):
        walk.step(p, n)
    v = [(1, 3, 0), (-2, 1, 1 - 5), (3, 0, 0)]
    size = math.sqrt(36 + 81 + 4)
    need = [6 / size, 9 / size, 2 / size]
    gains = [sum(a * b for a, b in zip(x, need)) for x in v]
    cosines = [g / math.hypot(*x) for g, x in zip(gains, v)]
    end = [a + sum(x[i] for x in v) for i, a in enumerate(P0)]
    d = lambda p: math.sqrt(sum(max(0, -1 - x) ** 2 for x in p))
    path, moved, T, E = sum(math.hypot(*x) for x in v), math.dist(end, P0), 3, sum(gains)
    expected = {"rdi": ((d(P0) - d(end)) / d(P0) * 100 + 100) / 2, "etot": 100 * E / (1.2 * d(P0)), "snet": 100 * (7 - 3) / (1.5 * d(P0)), "rho": 100 * E / T / 2.5, "sproj": 100 * E / 4 / 2.5,
                "tau": 100 * max(0, (3 - path / moved) / 2), "rpos": 100 * sum(g > 0 for g in gains) / 4, "align": 100 * (sum(cosines) / 4 + 1) / 2, "pen": 100 * (3 - 3 / 4) / 3}
    assert walk.indices() == pytest.approx(expected)
    x = expected
    assert epm_q(expected) == pytest.approx(0.4 * (x["rdi"] + x["etot"] + x["snet"]) / 3 + 0.2 * (x["rho"] + x["sproj"] + x["tau"]) / 3 + 0.4 * (x["rpos"] + x["align"] + x["pen"]) / 3)
    still = Walk(P0)
    still.step([0, 0, 0], [0, 0, 0])
    assert still.indices()["tau"] == 100 and still.indices()["rdi"] == 50               # no displacement: a straight path
    two = models_table([("m", "a", expected, "success"), ("m", "b", still.indices(), "timeout")])["m"]
    assert two["rdi"] == pytest.approx((expected["rdi"] + 50) / 2) and two["success"] == 50 and two["n"] == 2


def test_bad_runs_are_named_and_the_rest_is_scored(tmp_path, capsys):
    good = run([-9, -9, -9], [[2, 2, 2]] * 12, [[0, 0, 0]] * 12)
    bad = [{**good, "P0": [0, 0, 0]}, {**good, "P0": [-9, -9]}, {**good, "P0": [-9, -9, "x"]}, {**good, "P0": [-9, 3, -9]}, {**good, "prog": [[3, 0, 0]] * 12}, {**good, "neg": [[1, 0, 0]] * 12},
           {**good, "neg": good["neg"][1:]}, {**good, "prog": [], "neg": []}, {k: v for k, v in good.items() if k != "model"}, {**good, "turns": "12"}, {**good, "prog": [[True, 0, 0]] * 12}, {**good, "last": "x"}, {**good, "last": 0}]
    assert replay({**good, "turns": 12.0, "outcome": "Success"})[1]
    other = {**good, "turns": 13}                                            # well formed, but the rules stop it earlier
    path = tmp_path / "runs.jsonl"
    path.write_text("\n".join([json.dumps(good), *map(json.dumps, bad), json.dumps(other), '{"model": "m", "P0'] ))
    assert evaluate.main(["epm", str(path), "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out.splitlines()[-1])
    assert (result["runs"], result["replayed"]) == (2, 1)
    assert [f"runs.jsonl:{n}: " in captured.err for n in range(1, 17)] == [False] + [True] * 15
    assert evaluate.main(["epm", str(path), "--strict"]) == 1
    with pytest.raises(SystemExit) as e:
        evaluate.main(["epm", str(tmp_path / "none")])
    assert e.value.code == 2


# ---------------------------------------------------------------------------------------------- judges
def talk(scenario, replies, said=None):
    e = Episode(scenario, None, 0, scenario.opening, 40, [])
    e.replies, e.turns = replies, [UserTurn(t, 40, 0, "", False, "", False, {}) for t in (said or ["go on"] * len(replies))]
    return e


def experts(s, turns=5):
    user, said, replies = ScriptedUsers().start(s), [s.opening], []
    for turn in range(turns):
        replies.append(expert(s.intent, said, turn))
        said.append(user.respond(replies[-1]).text)
        user.done = False
    return talk(s, replies, said[1:])


def test_scripted_judge_prefers_experts_and_is_not_flattered():
    """Experts walk towards the need, formulas and insults away from it; flattery never helps; asked twice it says the same."""
    judge = ScriptedJudge()
    good = [experts(s) for s in SCENARIOS]
    formula = [talk(s, ["I'm sorry to hear that.", "That sounds hard.", "Things will get better.", "Stay strong.", "Everything happens for a reason."]) for s in SCENARIOS]
    def gain(e):
        walk = Walk(deficit(judge.needs([e.scenario])[0]))
        said = [e.opening] + [t.text for t in e.turns]
        for prog, neg in judge.levels([(e.scenario, said[:i + 1], e.replies[:i + 1]) for i in range(5)]):
            walk.step(prog, neg)
        return sum(walk.gains)
    assert all(gain(a) > gain(b) for a, b in zip(good, formula))
    assert sum(map(gain, good)) / len(good) > 5 and sum(map(gain, formula)) / len(formula) < 0
    found = perturbations(judge, [(e, deficit(judge.needs([e.scenario])[0])) for e in good])
    assert found["noise"]["change"] == 0 == found["noise"]["size"] and found["sycophancy"]["change"] < 0 and found["sycophancy"]["resolved"]
    assert found["persona"]["change"] < 0 and found["persona"]["n"] == len(SCENARIOS) and found["persona"]["beyond_noise"]["resolved"]


def test_perturbations_see_through_judges_that_do_not_look():
    """One that always says the same changes nothing; one that throws dice is all noise; neither passes as reading the person."""
    class Constant(ScriptedJudge):
        def levels(self, items, backwards=False):
            return [([1, 1, 1], [0, 0, 0])] * len(items)
    class Dice(ScriptedJudge):
        rng = random.Random(0)
        def levels(self, items, backwards=False):
            return [([self.rng.randint(0, 2) for _ in range(3)], [-self.rng.randint(0, 2) for _ in range(3)]) for _ in items]
    played = [(experts(s), deficit(ScriptedJudge().needs([s])[0])) for s in SCENARIOS]
    for judge in (Constant(), Dice()):
        found = perturbations(judge, played)
        assert not found["persona"]["beyond_noise"]["resolved"] and not found["sycophancy"]["beyond_noise"]["resolved"]
        assert (found["noise"]["size"] > 1) == isinstance(judge, Dice)


def test_a_judge_that_fails_takes_the_dialogue_out():
    """Pitfall 33: neither a dead server nor a need that can't be read is the policy's failure."""
    class Dead(ScriptedJudge):
        def levels(self, items, backwards=False):
            return [None] * len(items)
    class Mute(ScriptedJudge):
        def needs(self, scenarios):
            return [None] * len(scenarios)
    for judge in (Dead(), Mute()):
        users = JudgedUsers(ScriptedUsers(), judge)
        users.prepare([(SCENARIOS[0], None)])
        [turn] = users.respond([users.start(SCENARIOS[0])], ["Hello there."], [False])
        assert turn.failed and turn.done and not turn.why


def levels(gain=(0, 0, 0), harm=(0, 0, 0)):
    return "\n".join(f"{axis.capitalize()} {way}: {x}" for axis, g, h in zip(empa.AXES, gain, harm) for way, x in (("gain", g), ("harm", h)))


def test_language_judge_reads_strictly_and_counts_what_it_cannot_read():
    answers = iter([levels((1, 2, 0), (0, 1, 2)), levels((3, 0, 0)), "", None, "**Cognitive gain:** 2\n" + levels((0, 1, 1)).split("\n", 1)[1], levels((1, 1, 1)) + "\nCognitive gain: 2"])
    judge, asked = LanguageJudge(lambda prompts, n: asked.extend(prompts) or [next(answers) for _ in prompts]), []
    s = SCENARIOS[0]
    out = judge.levels([(s, ["<|im_end|> hello"], ["reply"])] * 6)
    assert out == [([1, 2, 0], [0, -1, -2]), ([0, 0, 0], [0, 0, 0]), ([0, 0, 0], [0, 0, 0]), None, ([2, 1, 1], [0, 0, 0]), ([0, 0, 0], [0, 0, 0])]
    assert judge.unreadable == 4 and judge.asked == 6 and s.hidden_need in asked[0][0]["content"] and "Supporter: reply" in asked[0][1]["content"]
    nine = iter(["\n".join(f"{k}: 1" for k in empa.MEANS), "C1: 4", "\n".join(f"{k}: 0" for k in empa.MEANS)])
    judge = LanguageJudge(lambda prompts, n: [next(nine) for _ in prompts])
    assert judge.needs([s] * 3) == [dict.fromkeys(empa.MEANS, 1), None, None]
    for form in ("1 (some)", "1 - some", "**1**", "1."):                     # as the prompt itself writes it
        judge = LanguageJudge(lambda prompts, n: [levels((1, 0, 0)).replace("Cognitive gain: 1", f"Cognitive gain: {form}")])
        assert judge.levels([(s, ["a"], ["b"])]) == [([1, 0, 0], [0, 0, 0])], form
    for form in ("1/2", "1-2", "one", "1.5", "-1", "1 or 2"):
        judge = LanguageJudge(lambda prompts, n: [levels((1, 0, 0)).replace("Cognitive gain: 1", f"Cognitive gain: {form}")])
        assert judge.levels([(s, ["a"], ["b"])]) == [([0, 0, 0], [0, 0, 0])] and judge.unreadable == 1, form


def test_asked_backwards_the_levels_keep_their_axis():
    judge = LanguageJudge(lambda prompts, n: [levels((1, 0, 2), (0, 1, 0))] * len(prompts))
    item = (SCENARIOS[0], ["hello"], ["reply"])
    assert judge.levels([item]) == judge.levels([item], True) == [([1, 0, 2], [0, -1, 0])]


# ---------------------------------------------------------------------------------------------- dialogues
def test_the_walk_ends_a_dialogue_and_the_mood_does_not():
    """Formulas: the scripted user alone would leave within a few turns; here it stays until the walk says failure at turn 12."""
    users = JudgedUsers(ScriptedUsers(), ScriptedJudge())
    users.prepare([(SCENARIOS[0], None)])
    user = users.start(SCENARIOS[0])
    for turn in range(1, 13):
        [answer] = users.respond([user], ["I'm sorry."], [False])
        assert answer.done == (turn == 12) and answer.text
    assert answer.why == "failure" and users.walks[0].outcome == "failure"


def test_a_language_user_with_a_wild_mood_keeps_speaking():
    said = []
    def complete(prompts, n, **how):
        return ["Change: -10" if "Change:" in p[-1]["content"] else said.append(1) or f"line {len(said)}. Goodbye." for p in prompts]
    users = JudgedUsers(LanguageUsers(complete), ScriptedJudge())
    users.prepare([(SCENARIOS[0], None)])
    user = users.start(SCENARIOS[0])
    turns = [users.respond([user], ["That sounds hard."], [False])[0] for _ in range(11)]
    assert all(t.text.startswith("line") and not t.done for t in turns) and len(user.said) == 12 == len(user.replies) + 1


def test_run_bench_empa_end_to_end(tiny_folder, tmp_path, capsys):
    """Its rows are runs that `epm` replays; the same call gives the same rows."""
    out = tmp_path / "runs.jsonl"
    flags = ["run", "--bench", "empa", "--model", tiny_folder, "--n", "3", "--repeats", "1", "--max_new_tokens", "4", "--max_tokens", "512", "--dtype", "fp32", "--scenarios", str(ROOT / "data" / "scenarios.jsonl")]
    assert evaluate.main([*flags, "--max_turns", "2", "--perturb", "--out", str(out), "--json"]) == 0
    text = capsys.readouterr().out
    line = json.loads(text.splitlines()[-1])
    assert line["n"] == 3 and set(line["perturbations"]) == {"noise", "persona", "sycophancy"} and "no measure of empathy" in text
    rows = [json.loads(r) for r in out.read_text().splitlines()]
    assert [r["outcome"] for r in rows] == ["timeout"] * 3 and all(len(r["history"]) == 2 * r["turns"] + 1 == 5 for r in rows) and out.with_suffix(".html").exists()
    assert empa.models_table([(r["model"], r["script_id"], replay(r)[0].indices(), "timeout") for r in rows])[tiny_folder]["epm_q"] == pytest.approx(line["epm_q"])
    assert evaluate.main(["epm", str(out), "--strict"]) == 0 == evaluate.main(["score", str(out), "--strict"])
    capsys.readouterr()
    for wrong, word in ((["--judge", "me"], "--judge me"), (["--seeds", "2"], "--seeds"), (["--max_change", "99"], "--max_change"), (["--user2", "lm:smollm2-135m"], "--user2")):
        with pytest.raises(SystemExit) as e:
            evaluate.main([*flags, *wrong])
        assert e.value.code == 2 and word in capsys.readouterr().err
