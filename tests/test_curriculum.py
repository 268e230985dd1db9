"""The outer loop's numbers by hand on 2 x 3 units, its properties, the bench without a model, and the loop inside both train scripts."""
import json
import math

import numpy as np
import pytest
import torch

import curriculum
import evaluate
import train_grpo
import train_ppo
from curriculum import Curriculum, Settings, simulate
from scenarios import STATES, load_scenarios
from simulator import ScriptedUser, ScriptedUsers
from test_simulator import HELDOUT, INTENTS, expert
from test_train_grpo import SCENARIOS, TINY, metrics


@pytest.fixture
def small():
    """Two intentions, three states; groups of 4 with final emotions around eta = 50."""
    c = Curriculum(Settings(), 2, 3)
    c.update([(0, 0, [60, 60, 40, 40]), (0, 0, [60, 60, 60, 40]), (0, 1, [10, 10, 10, 10]), (1, 0, [90, 90, 90, 90]), (1, 2, [50, 0, 0, 0])])
    return c


def test_the_whole_formula_by_hand(small):
    """S, N; phat with what the *other* intention saw; triangle, bonus, floor, normalisation, rehearsal: one unit each, written out."""
    assert small.S.tolist() == [[1.25, 0, 0], [1.0, 0, 0.25]] and small.N.tolist() == [[2, 1, 0], [1, 0, 1]]          # 50 passes: R >= eta
    shared = (1.0 + 2) / (1 + 4)                            # intention 1 in state 0: one group, all passed; alpha 4
    p00 = (1.25 + 4 * shared) / (2 + 4)
    p01 = (0 + 4 * (0 + 2) / (0 + 4)) / (1 + 4)
    p02 = (0 + 4 * (0.25 + 2) / (1 + 4)) / (0 + 4)
    assert np.allclose(small.pass_rate()[0], [p00, p01, p02])
    B, U = small.utility()
    assert np.allclose(B[0], [1 - 2 * abs(p - 0.5) for p in (p00, p01, p02)]) and np.allclose(U[0], [math.sqrt(math.log(6) / (n + 1)) for n in (2, 1, 0)])
    A = [max(0.05, 1 - 2 * abs(p - 0.5) + 0.15 * math.sqrt(math.log(6) / (n + 1))) for p, n in ((p00, 2), (p01, 1), (p02, 0))]
    assert np.allclose(small.probabilities()[0], [0.9 * a / sum(A) + 0.1 / 3 for a in A])
    assert np.allclose(small.probabilities().sum(1), 1)


def test_leave_one_intent_out(small):
    """An intention's own counts do not move the estimate that it borrows."""
    before = small.pass_rate()
    small.N[0, 2], small.S[0, 2] = 5, 5
    after = small.pass_rate()
    assert after[0, 2] != before[0, 2] and after[0, 0] == before[0, 0]
    borrowed = (after * (small.N + 4) - small.S) / 4        # what phat took from the others, taken back out of it
    assert np.isclose(borrowed[0, 2], (0.25 + 2) / 5) and np.isclose(borrowed[1, 2], (5 + 2) / (5 + 4)) and after[1, 2] != before[1, 2]


@pytest.mark.parametrize("group", [[60, 60, 40], [60, 60, 40, float("nan")], [60, float("inf"), 40, 40], []])
def test_groups_that_are_not_complete_are_dropped(small, group):
    before = small.state_dict()
    small.update([(0, 0, group)])
    assert small.state_dict() == {**before, "dropped": 1}


def test_an_update_is_all_or_nothing(small):
    before = json.dumps(small.state_dict())
    with pytest.raises(IndexError):
        small.update([(0, 0, [60] * 4), (0, 7, [60] * 4)])
    assert json.dumps(small.state_dict()) == before


def test_json_round_trip_and_refusals(small, capsys):
    again = Curriculum(Settings(), 2, 3)
    again.load_state_dict(json.loads(json.dumps(small.state_dict())))
    assert again.state_dict() == small.state_dict() and np.array_equal(again.probabilities(), small.probabilities())
    for other, word in ((Curriculum(Settings(eta=60.0), 2, 3), "eta"), (Curriculum(Settings(), 2, 4), "other intentions"), (Curriculum(Settings(), 2, ["0", "2", "1"]), "other intentions"), (Curriculum(Settings(soft_outcome=True), 2, 3), "soft_outcome"),
                        (Curriculum(Settings(group_size=8), 2, 3), "group_size")):
        with pytest.raises(SystemExit) as e:
            other.load_state_dict(small.state_dict())
        assert e.value.code == 2 and word in capsys.readouterr().err


def test_the_warm_up_is_uniform_then_the_floor_holds():
    """Chi-square of 4,800 draws over 24 states in the warm-up; afterwards no state falls below eps / 24, whatever was seen."""
    rng = np.random.default_rng(0)
    c = Curriculum(Settings(warmup=1600))
    c.update([(0, 0, [60, 40, 60, 40])] * 1599)
    counts = np.bincount(c.sample([0] * 4800, rng), minlength=24)
    assert ((counts - 200) ** 2 / 200).sum() < 49.7         # chi-square, 23 degrees of freedom, p = .001
    c.update([(i, z, [100] * 4) for i in range(8) for z in range(1, 24)] * 20)
    p = c.probabilities()
    assert c.seen > 1600 and p.min() >= 0.1 / 24 - 1e-12 and p[0, 0] > 1.5 / 24
    counts = np.bincount(c.sample([0] * 4800, rng), minlength=24) / 4800
    assert np.abs(counts - p[0]).max() < 0.03


def test_permuting_states_permutes_probabilities(small):
    order = [2, 0, 1]
    other = Curriculum(Settings(), 2, 3)
    other.S, other.N = small.S[:, order], small.N[:, order]
    assert np.allclose(other.probabilities(), small.probabilities()[:, order])


def test_evidence_at_the_edge_attracts():
    """The same number of groups, half of them passed, or all, or none: only the first raises p(z|c)."""
    def p_after(emotions):
        c = Curriculum()
        c.update([(i, 0, emotions) for i in range(8)] * 10 + [(i, z, [100, 100, 100, 0]) for i in range(8) for z in range(1, 24)] * 10)
        return c.probabilities()[0, 0]
    edge, all_, none = p_after([100, 100, 0, 0]), p_after([100] * 4), p_after([0] * 4)
    assert edge > 1 / 24 > all_ and 1 / 24 > none


def test_a_flat_temperature_is_uniform(small):
    small.settings = Settings(gamma=1e9)
    assert np.allclose(small.probabilities(), 1 / 3)


@pytest.mark.parametrize("how", [dict(arm="uniform"), dict(arm="no-states"), dict(arm="bandit"), dict(utility="p(1-p)"), dict(soft_outcome=True), dict(half_life=2.0), dict(beta=0.0), dict(eps=0.0)])
def test_the_arms(how):
    c = Curriculum(Settings(**how), 2, 3)
    c.update([(0, 0, [60, 60, 40, 40]), (0, 1, [100, 100, 100, 100]), (0, 1, [100, 100, 100, 100])])
    p = c.probabilities()
    assert np.allclose(p.sum(1), 1)
    if how.get("arm") == "uniform":
        assert np.allclose(p, 1 / 3)
    elif how.get("arm") == "no-states":
        assert p.tolist() == [[1, 0, 0]] * 2
    else:
        assert p[0, 0] > p[0, 1]
    if how.get("soft_outcome"):
        assert np.isclose(c.S[0, 0], np.mean([1 / (1 + math.exp(-x / 10)) for x in (10, 10, -10, -10)]))
    if how.get("half_life"):
        assert np.isclose(c.N[0, 0], 0.5) and np.isclose(c.N[0, 1], 1 + 0.5 ** 0.5) and c.seen == 3
    if how.get("beta") == 0.0:
        assert np.allclose(p, 0.9 * np.maximum(0.05, c.utility()[0]) / np.maximum(0.05, c.utility()[0]).sum(1, keepdims=True) + 0.1 / 3)
    if how.get("eps") == 0.0:
        A = c.utility()[0] + 0.15 * c.utility()[1]
        assert np.allclose(p, A / A.sum(1, keepdims=True))
    if how.get("arm") == "bandit":
        assert np.isclose(c.A[0, 0], 10 / 50) and c.A[0, 1] == 0


def test_sharing_helps_an_intention_that_has_seen_nothing():
    shared, alone = Curriculum(Settings(), 2, 3), Curriculum(Settings(), 2, 3, sharing=False)
    for c in (shared, alone):
        c.update([(1, 0, [100] * 4)] * 10 + [(1, 1, [100, 100, 0, 0])] * 10)
    assert shared.probabilities()[0, 1] > shared.probabilities()[0, 0] + 0.1 and np.isclose(alone.probabilities()[0, 0], alone.probabilities()[0, 1])


def test_metrics_are_plain_numbers(small):
    m = json.loads(json.dumps(small.metrics()))
    assert m["groups"] == 5 and m["pass_rate"] == [[0.625, 0.0, None], [1.0, None, 0.25]] and 1 <= m["pool"] <= 3 and 0 < m["entropy"] <= math.log(3)


@pytest.mark.parametrize("spread,drift", [(1.0, 0.0), (2.0, 0.0), (3.0, 0.0), (1.0, 0.02)])
def test_simulated_dual_beats_uniform(spread, drift):
    """Where difficulty is spread by a logit or more, practice at the edge holds more mixed groups; CIs apart over 20 learners."""
    runs = {arm: np.array([simulate(arm, seed, spread, drift=drift) for seed in range(20)]) for arm in ("dual", "uniform")}
    low, high = (runs[a][:, 0].mean() + s * 2.1 * runs[a][:, 0].std(ddof=1) / 20 ** 0.5 for a, s in (("dual", -1), ("uniform", 1)))
    assert low > high and np.allclose(runs["uniform"][:, 2], 24) and (runs["dual"][:, 2] < 24).all()


def test_the_bench_ends_with_one_line(capsys):
    assert curriculum.main(["simulate", "--spread", "1", "--seeds", "2", "--steps", "20", "--json"]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(line) == set(curriculum.SIMULATED) and all(set(v) == {"mixed", "pass", "pool"} and len(v["mixed"]) == 3 for v in line.values())


# ---------------------------------------------------------------------------------------------- states in the scripted user
def ends(policy, state, scenarios=HELDOUT, turns=8):
    """Final emotions of policy(scenario, said, turn) -> reply with users in one state, and how many facts each was told."""
    out = []
    for s in scenarios:
        user = ScriptedUser(s, state, max_turns=turns)
        for turn in range(turns):
            if user.respond(policy(s, list(user.said), turn)).done:
                break
        out.append((user.emotion, user.told))
    return np.array(out).T


@pytest.mark.parametrize("state", STATES, ids=str)
def test_the_expert_succeeds_in_every_state(state):
    """No state is hopeless: one that sees only the transcript ends at 70 and more, 80 on average, in 8 turns."""
    emotions, _ = ends(lambda s, said, turn: expert(s.intent, said, turn), state)
    assert emotions.mean() >= 80 and (emotions >= 70).mean() >= 0.9, (emotions.mean(), emotions.min())


def middling(s, said, turn):
    """Now the expert, now a formula: what a half-trained policy is like."""
    return expert(s.intent, said, turn) if turn % 2 else ["I'm sorry to hear that.", "That sounds really hard.", "Things will get better."][turn // 2 % 3]


def test_each_axis_does_what_its_clause_says():
    """Disclosure: who volunteers more is told more. Activation: the same reply moves a heated user further, either way, and shows in the wording.
    Trust: a middling supporter ends higher the more it is trusted; empty comfort costs most where it is trusted least."""
    found = {z: ends(middling, z, HELDOUT[::3]).mean(1) for z in STATES}      # state -> mean emotion, mean facts told
    told = {d: np.mean([found[z][1] for z in STATES if z.disclosure == d]) for d in ("delayed", "conditional", "proactive")}
    assert told["delayed"] < told["conditional"] < told["proactive"]
    by_trust = [np.mean([found[z][0] for z in STATES if z.trust == t]) for t in "1234"]
    assert by_trust == sorted(by_trust) and by_trust[3] > by_trust[0] + 15
    for s in HELDOUT[::7]:
        calm, heated = (ScriptedUser(s, next(z for z in STATES if z.disclosure == "conditional" and z.activation == a and z.trust == "3")) for a in ("moderate", "high"))
        good = expert(s.intent, [s.opening], 0)
        first = calm.respond(good), heated.respond(good)
        assert first[1].change >= first[0].change > 0 and len(first[1].text) > len(first[0].text)
        worse = [ScriptedUser(s, z).respond("I'm sorry to hear that, stay strong.").change for z in STATES if z.disclosure == "delayed" and z.activation == "moderate"]
        assert worse == sorted(worse) and worse[0] < worse[3]


def test_a_state_is_no_secret_in_words_only():
    """The 24 states are distinct in what they do to one middling dialogue, and no clause names an axis, a level or a number."""
    seen = {tuple(map(tuple, ends(middling, z, HELDOUT[:8]))) for z in STATES}
    assert len(seen) == len(STATES) == 24 == len({z.clause for z in STATES})
    for z in STATES:
        assert not any(word in z.clause.lower() for word in ("disclos", "activation", "trust", "delayed", "conditional", "proactive", "moderate", "level")) and not any(c.isdigit() for c in z.clause)


def test_evaluation_covers_all_states_equally(tiny_chat):
    """24 scenarios x 2: each state twice, the same at each call and in any order of scenarios; no intention meets one sort of user only."""
    model, chat = tiny_chat
    scenarios = evaluate.spread(load_scenarios(SCENARIOS, "dev"))
    how = dict(repeats=2, max_turns=1, max_new_tokens=4, seed=3, states=True)
    episodes = evaluate.play(model, chat, ScriptedUsers(), scenarios, **how)
    found = evaluate.summary(episodes)
    assert len(found["states"]) == 24 and all(v["n"] == 2 for v in found["states"].values()) and [e.group for e in episodes] == [i // 2 for i in range(48)]
    assert all(len({e.state.trust for e in episodes if e.scenario.intent == i}) >= 3 for i in INTENTS)
    other = evaluate.play(model, chat, ScriptedUsers(), sorted(scenarios, key=lambda s: s.opening), **how)
    assert {(e.scenario.id, str(e.state)) for e in other} == {(e.scenario.id, str(e.state)) for e in episodes}
    assert all(e.scenario is scenarios[e.group] for e in episodes) and evaluate.row(episodes[5], 1)["state"] == str(episodes[5].state)
    assert [e.replies for e in evaluate.play(model, chat, ScriptedUsers(), scenarios, batch=64, **how)] == [e.replies for e in episodes]
    assert "delayed/high/1" in evaluate.table(found, "x") and evaluate.summary(evaluate.play(model, chat, ScriptedUsers(), scenarios[:2], max_turns=1, max_new_tokens=4))["states"] == {}


# ---------------------------------------------------------------------------------------------- in the train scripts
DUAL = [*TINY, "--curriculum", "dual", "--curriculum_warmup", "0"]


@pytest.mark.parametrize("script,more", [(train_grpo, []), (train_ppo, ["--critic_warmup", "1"])], ids=["grpo", "ppo"])
def test_the_outer_loop_resumes_bit_for_bit(script, more, tiny_folder, tmp_path, capsys):
    for name, stops in (("six", [6]), ("three", [3, 6])):
        script.main(["--model", tiny_folder, "--run", str(tmp_path / name), "--steps", str(stops[0]), *DUAL, *more])
        for steps in stops[1:]:
            script.main(["--resume", str(tmp_path / name), "--steps", str(steps)])
    rows = metrics(tmp_path / "six")
    assert [r.get("curriculum", {}).get("groups") for r in rows] == [None, 2, 4, 6, 8, 10, 12]
    assert all(len(r["curriculum"]["outcomes"]) == 2 and np.shape(r["curriculum"]["p"]) == (8, 24) for r in rows[1:])
    assert metrics(tmp_path / "three") == rows
    a, b = (torch.load(tmp_path / name / "checkpoint" / "state.pt", weights_only=True) for name in ("six", "three"))
    assert a["curriculum"] == b["curriculum"] and all(torch.equal(a["model"][k], b["model"][k]) for k in a["model"])
    with pytest.raises(SystemExit):
        script.main(["--resume", str(tmp_path / "six"), "--eta", "60"])
    assert "--eta" in capsys.readouterr().err


def test_the_table_and_the_figures_of_a_run(tiny_folder, tmp_path, capsys, monkeypatch):
    """curriculum.py RUN: every unit that was practised stands in the table; heat maps and curves are drawn; a run without an outer loop is refused."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    for name, arm in (("dual", "dual"), ("uniform", "uniform"), ("plain", "no-states")):
        train_grpo.main(["--model", tiny_folder, "--run", str(tmp_path / name), "--steps", "4", *TINY, "--curriculum", arm])
    capsys.readouterr()
    assert curriculum.main([str(tmp_path / "dual"), str(tmp_path / "uniform"), "--curves", str(tmp_path / "c.svg")]) == 0
    said = capsys.readouterr().out
    assert "8 groups" in said and all(str(z) in said for z in STATES) and "uniform, mean of 1" in (tmp_path / "c.svg").read_text()
    assert all((tmp_path / n / "curriculum.svg").read_text().startswith("<?xml") for n in ("dual", "uniform"))
    rows = metrics(tmp_path / "dual")
    [(rate, count, p)] = curriculum.windows(rows, 1)
    assert count.sum() == 8 and np.isnan(rate).sum() == 192 - (count > 0).sum() and np.allclose(p, rows[-1]["curriculum"]["p"])
    assert sum(w[1].sum() for w in curriculum.windows(rows, 3)) == 8
    for folder, word in ((tmp_path / "plain", "no outer loop"), (tmp_path / "none", "no run")):
        with pytest.raises(SystemExit):
            curriculum.main([str(folder)])
        assert word in capsys.readouterr().err


def test_flags_become_settings(capsys):
    """Each flag reaches its own constant; nonsense is refused before anything is made."""
    def read(*flags):
        args, _ = train_grpo.p.parse(["--group_size", "8", "--curriculum", "dual", *flags])
        return curriculum.read_settings(args, 100)
    assert read() == Settings(warmup=20, group_size=8)
    for flag, value, name in (("eta", 60.0, "eta"), ("sharing", 2.0, "lam"), ("prior", 3.0, "alpha"), ("uncertainty", 0.3, "beta"), ("rehearsal", 0.2, "eps"), ("flatness", 3.0, "gamma"),
                              ("least_utility", 0.01, "floor"), ("utility", "p(1-p)", "utility"), ("half_life", 9.0, "half_life")):
        assert read(f"--{flag}", str(value)) == Settings(**{"warmup": 20, "group_size": 8, name: value}), flag
    assert read("--no_uncertainty") == Settings(warmup=20, group_size=8, beta=0.0) and read("--no_rehearsal").eps == 0.0 and read("--soft_outcome").soft_outcome
    for flags in (["--rehearsal", "2"], ["--curriculum_warmup", "20"], ["--eta", "200"], ["--curriculum", "bandit", "--group_size", "1"]):
        with pytest.raises(SystemExit):
            read(*flags)
        assert capsys.readouterr().err.count("\n") == 1


def test_a_tiny_temperature_is_still_a_distribution(small):
    small.settings = Settings(gamma=1e-5)
    assert np.allclose(small.probabilities().sum(1), 1) and small.probabilities().max() > 0.9


def test_no_sharing_is_a_flag_of_the_run(tiny_folder, tmp_path):
    train_grpo.main(["--model", tiny_folder, "--run", str(tmp_path / "run"), "--steps", "1", *DUAL, "--no_sharing"])
    assert torch.load(tmp_path / "run" / "checkpoint" / "state.pt", weights_only=True)["curriculum"]["sharing"] is False


def test_the_state_that_was_sampled_is_the_one_that_is_played(tiny_folder, tmp_path):
    """metrics.jsonl names the unit of every group, samples/ the state of its user: the same, group by group, and not always one."""
    train_grpo.main(["--model", tiny_folder, "--run", str(tmp_path / "run"), "--steps", "4", *DUAL])
    seen = []
    for row, sample in zip(metrics(tmp_path / "run")[1:], sorted((tmp_path / "run" / "samples").iterdir())):
        heads = [line for line in sample.read_text().splitlines() if line.startswith("train-")]
        for (c, z, passed), head in zip(row["curriculum"]["outcomes"], heads, strict=True):
            assert f"({INTENTS[c]}), {STATES[z]}: 40 -> " in head and 0 <= passed <= 1
            seen.append(z)
    assert len(set(seen)) > 3


def test_scenarios_stay_uniform_whatever_the_outer_loop_does(tiny_folder, tmp_path):
    """Only the state is chosen: both arms practise the same scenarios in the same order."""
    texts = []
    for arm in ("dual", "uniform"):
        train_grpo.main(["--model", tiny_folder, "--run", str(tmp_path / arm), "--steps", "3", *TINY, "--curriculum", arm, "--curriculum_warmup", "0"])
        texts.append([line.split(" ")[0] for f in sorted((tmp_path / arm / "samples").iterdir()) for line in f.read_text().splitlines() if " (" in line and line.startswith("train-")])
    assert len(texts[0]) == 6 and texts[0] == texts[1]


@pytest.mark.parametrize("config,lines,word", [
    ("null", [], "config.json:1: a JSON object"), ("{", [], "config.json:1: broken JSON"), ('{"curriculum": "dual", "eta": "x"}', None, "damaged"), ('{"eta": 50}', None, "no outer loop"), ('{"curriculum": "dual", "eta": 50}', ['{"step": 0}'], "no step yet"),
    (None, ['{"step": 0}', "{bro", "{}"], "metrics.jsonl:2: broken JSON"), (None, ['{"step": 0}', "5"], "metrics.jsonl:2: a JSON object"), (None, ['{"step": 0}', '{"step": 1, "curriculum": {"p": [[1]], "outcomes": [[9, 9, 1.0]]}}'], "damaged"),
    (None, ['{"step": 0}', '{"step": 1, "curriculum": null}'], "damaged"), (None, ['{"step": 0}', '{"step": 1, "dev_emotion": null, "curriculum": {"p": [[1.0]], "outcomes": []}}'], "damaged")])
def test_a_damaged_run_is_named(config, lines, word, tmp_path, capsys):
    good = ['{"step": 0}', json.dumps({"step": 1, "curriculum": {"p": np.full((8, 24), 1 / 24).tolist(), "outcomes": [[0, 0, 1.0]]}})]
    (tmp_path / "config.json").write_text(config or '{"curriculum": "dual", "eta": 50, "soft_outcome": false}')
    (tmp_path / "metrics.jsonl").write_text("".join(line + "\n" for line in (good if lines is None else lines)) + '{"half')
    with pytest.raises(SystemExit) as e:
        curriculum.main([str(tmp_path)])
    err = capsys.readouterr().err
    assert e.value.code == 2 and word in err and err.count("\n") == 1


@pytest.mark.parametrize("flags,word", [(["simulate", "runs/x"], "stands alone"), (["runs/none"], "no run"), (["simulate", "--record", "/proc/nope/x"], "cannot be written"), (["runs/x", "--curves", "/proc/nope/x.svg"], "cannot be written"),
                                        (["runs/x", "--curves", "x.png"], ".svg"), (["simulate", "--seeds", "1"], "--seeds")])
def test_bad_flags_are_one_line(flags, word, capsys):
    with pytest.raises(SystemExit) as e:
        curriculum.main(flags)
    err = capsys.readouterr().err
    assert e.value.code == 2 and word in err and err.count("\n") == 1
