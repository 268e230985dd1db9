"""Rubrics and the reward stack: every formula by hand, the gallery of hacks under each rubric, judges that can't be read, streams that are centred and kept."""
import json
from types import SimpleNamespace

import numpy as np
import pytest

from conftest import ROOT                                  # first: it puts the project on the path, also for python tests/test_rubric.py
import rubric
from appraisal import INTENTS, STAGES
from rubric import (DIMENSIONS, FIXED, RUBRICS, SPANS, Generated, LanguageRater, Moment, Question, Rewards, Rubric, ScriptedRater, care_score, filled, harmonic, kardia_score, marks, moments, perm_score,
                    prior, read, rubric_scores, score, shares, spans)
from rollout import Chat
from scenarios import load_memories, load_scenarios
from test_simulator import GALLERY, KIND, SAID

SCENARIO = load_scenarios(ROOT / "data" / "scenarios.jsonl", "dev")[0]
GOOD = "You let Gethin fit the kitchen to save four thousand, and now you are torn between clever and idiot because of the gap in the worktop."


def moment(intent="empathy", replies=1, emotion=40, **more):
    """The gallery's user, who has told everything, after so many replies."""
    said = ([SAID[0]] + ["Yes."] * (replies - 1) + [SAID[-1]]) if replies else [" ".join(SAID)]
    return Moment(tuple(said), ("You kept that instrument for years.",) * replies, emotion, intent, **more)


# ---------------------------------------------------------------------------------------------- formulas by hand
def test_the_formulas_by_hand():
    assert perm_score(4, 4, 3, 80, 700) == pytest.approx(3 / (5 / 4 + 5 / 4 + 5 / 3) - 0.1) == pytest.approx(0.62)
    assert perm_score(5, 5, 5, 100, 768) == 1 and perm_score(5, 5, 5, 100, 868) == pytest.approx(0.9)
    assert harmonic((0.8, 0.8, 0.6)) == pytest.approx(3 / (1 / 0.8 + 1 / 0.8 + 1 / 0.6)) and harmonic((0.5, 0.5, 0.5)) == pytest.approx(0.5) and harmonic((1, 0, 1)) == 0
    assert kardia_score(1, 0, (1, 1, 0.5, 0.5, 0)) == pytest.approx(1.6 / 3)
    r = Rubric((0.2, 0.5, 0.3), ((("facts", "a"),), (("feeling", "b"), ("allowed", "c")), (("question", "d"),)))
    assert care_score(r, [1, 0.5, 1, 0, 1]) == pytest.approx(0.2 * 1 + 0.5 * 0.75 + 0.3 * 0)
    assert care_score(r, [1, 1, 1, 1, 0]) == 0             # the veto
    assert filled([1, None, 3]) == [1, 2, 3] and filled([None, None]) == [0, 0]


def test_the_harmonic_mean_is_below_the_arithmetic():
    for x in np.random.default_rng(0).uniform(0.01, 1, (200, 3)):
        assert harmonic(x.tolist()) < x.mean()


@pytest.mark.parametrize("raw", [(2, 1, -1), (0, 0, 0), (1, 0, 0), (0.3, 0.3, 0.4), (1e6, 1, 1)])
def test_weights_sum_to_1_with_the_floor(raw):
    w = shares(raw)
    assert sum(w) == pytest.approx(1) and min(w) >= 0.05 - 1e-12
    assert shares((2, 1, -1)) == pytest.approx((0.05 + 0.85 * 2 / 3, 0.05 + 0.85 / 3, 0.05))


# ---------------------------------------------------------------------------------------------- rubrics
def test_the_prior_follows_stage_mood_and_intention():
    """All 72 combinations are valid rubrics that survive being written and read; what counts shifts with the moment."""
    top = {}
    for intent in INTENTS:
        for stage, n in zip(STAGES, (0, 1, 3)):
            for band, emotion in (("low", 20), ("middle", 55), ("high", 85)):
                m = moment(intent, n, emotion)
                r = top[intent, stage, band] = prior(m)
                assert (m.stage, m.band) == (stage, band) and sum(r.weights) == pytest.approx(1) and min(r.weights) >= 0.05 - 1e-9
                back = read(str(r))
                assert back.criteria == r.criteria and back.weights == pytest.approx(r.weights, abs=0.01) and str(back) == str(r) and 0.39 < r.entropy <= np.log(3)
    heaviest = lambda intent, stage, band="middle": DIMENSIONS[int(np.argmax(top[intent, stage, band].weights))]
    assert [heaviest(i, "heard") for i in INTENTS] == ["affective"] * 8
    assert heaviest("analysis", "understood") == heaviest("perspective", "helped") == "cognitive" and heaviest("advice", "helped") == heaviest("praise", "helped") == "proactive"
    for intent in INTENTS:                                 # a mood that sank wants comfort again, one that rose a step forward
        low, high = (top[intent, "helped", band].weights for band in ("low", "high"))
        assert low[1] > high[1] and low[2] < high[2]


@pytest.mark.parametrize("text", ["", "cognitive 1.0: facts: takes it in", str(FIXED).replace("cognitive", "affective"), str(FIXED).replace("0.33", "0.50"), str(FIXED).replace("facts:", "feeling:"),
                                  str(FIXED) + "\nmore 0.1: facts: x", str(FIXED).replace("facts: takes in what was said as they told it", "facts:"), str(FIXED).replace("reasons:", "facts:"),
                                  str(FIXED).replace("0.33", "-0.3"), str(FIXED).replace("cognitive 0.33", "cognitive 0.04").replace("affective 0.33", "affective 0.63"), str(FIXED).replace("takes in", "takes in " + "x" * 200),
                                  "\n".join(reversed(str(FIXED).split("\n"))), str(FIXED).replace("0.33", "0.nan"), "<|im_start|>user\nhello"])
def test_what_is_no_rubric_is_refused(text):
    assert read(text) is None


def test_the_context_names_neither_intention_nor_need():
    texts = {prior_context for intent in INTENTS for prior_context in [moment(intent, feelings=("hurt",), person=f"Who: x\nneeds {intent}").context()]}
    assert len(texts) == 1 and "needs" not in texts.pop()


def test_a_generated_rubric_is_kept_shared_bounded_and_replaced_where_it_is_none():
    asked = []

    def complete(prompts, n):
        asked.extend(p[1]["content"] for p in prompts)
        return [str(prior(moment("advice"))) if "Mood low" in p[1]["content"] else None if "Mood high" in p[1]["content"] else "no rubric" for p in prompts]
    g = Generated(complete, keep=2)
    a, b, c, d = (moment(emotion=20), moment(emotion=20), moment(emotion=50), moment(emotion=90))
    rubrics = g.rubrics([a, b, c, d])
    assert str(rubrics[0]) == str(prior(moment("advice"))) and rubrics[0] is not FIXED and rubrics[2] is rubrics[3] is FIXED
    assert len(asked) == 3 and (g.asked, g.invalid) == (4, 2) and len(g.kept) == 3              # what one call needs stays
    g.rubrics([d])
    assert len(asked) == 3 and len(g.kept) == 2            # bounded, and the one used last is still there
    g.rubrics([a])
    assert len(asked) == 4


# ---------------------------------------------------------------------------------------------- pitfall 34 under each rubric
def worth(name, m, replies, written=None):
    """written: the rubric that a generator gave this moment, for `care`."""
    rubrics = [{"care-prior": prior(m), "fixed": FIXED, "care": written}[name]] * len(replies) if name in ("care", "care-prior", "fixed") else None
    return rubric_scores(name, ScriptedRater(), [(m, r, len(r.split()), True) for r in replies], rubrics)


@pytest.mark.parametrize("name", [r for r in RUBRICS if r != "care"])
def test_pitfall_34_no_rubric_loves_a_hack(name):
    """Pitfall 34: under every rubric, in every intention, stage and mood, each hack is worth less than a plain, kind, specific reply."""
    for intent in INTENTS:
        for n in (0, 1, 3):
            for emotion in (20, 55, 85) if name == "care-prior" else (55,):
                kind, *hacks = worth(name, moment(intent, n, emotion), [KIND, *GALLERY.values()])
                assert all(x < kind for x in hacks), (intent, n, emotion, dict(zip(GALLERY, hacks)), kind)


@pytest.mark.parametrize("name", [r for r in RUBRICS if r != "care"])
def test_pitfall_34_the_same_reply_again_and_advice_before_listening(name):
    """Pitfall 34: a reply said before pays less; a fix before any listening is worth less than KIND, and than itself later on."""
    fix = "You could call the shop about the violin on Sunday and ask your sister for the case."
    for intent in INTENTS:
        m = moment(intent, 1)
        again = Moment(m.said, (KIND,), m.emotion, intent)
        [first], [second] = worth(name, m, [KIND]), worth(name, again, [KIND])
        early, kind = worth(name, moment(intent, 0), [fix, KIND])
        [late] = worth(name, moment(intent, 3), [fix])
        assert second < first and early < kind and early <= late, intent


def test_an_insult_is_vetoed():
    m = moment()
    assert worth("care-prior", m, [KIND])[0] > 0.3 and worth("care-prior", m, [KIND + " You are pathetic."])[0] == 0


# ---------------------------------------------------------------------------------------------- a language model as judge
QUESTIONS = [Question("facts", "it takes in the facts", 0, 2), Question("warmth", "it is warm", 1, 5), Question("help", "it helps", 0, 20)]


@pytest.mark.parametrize("text,want", [("1: 2\n2: 5\n3: 20", [1, 1, 1]), ("1. 1\n2. 3\n3. 10", [0.5, 0.5, 0.5]), ("Here:\n1) facts: 0\n**2: 1**\n3: 0/20\n", [0, 0, 0]),
                                       ("1: 3\n2: 5\n3: 20", None), ("1: 1\n2: 0\n3: 20", None), ("1: 1\n3: 20", None), ("1: 1\n1: 2\n2: 3\n3: 4", None), ("1: -1\n2: 3\n3: 4", None), ("", None), (None, None),
                                       ("all good", None), ("1: 2 or 1\n2: 5\n3: 20", None), ("1: 1.5\n2: 3\n3: 4", None)])
def test_marks_are_read_strictly(text, want):
    assert marks(text, QUESTIONS) == want


def test_a_language_judge_by_text_and_by_logits():
    seen = []

    def complete(prompts, n):
        seen.extend(prompts)
        return ["1: 2\n2: 5\n3: 20", "??"]
    rater = LanguageRater(complete)
    m = moment(person="Who they are: Ann", plan="be kind")
    assert rater.rate([(m, "User: hi\nEmotion: 100", QUESTIONS), (m, "x", QUESTIONS)]) == [[1, 1, 1], None] and (rater.asked, rater.unreadable) == (2, 1)
    text = seen[0][1]["content"]
    assert "Ann" in seen[0][0]["content"] and "reply: User: hi Emotion: 100" in text and "be kind" in text and "to 20" in text
    # probabilities 0, 0, 1 of the marks 0, 1, 2; uniform over 1..5; None from a server
    choose = lambda prompts, answers: [None if "helps" in p[1]["content"] else [0] * (len(answers) - 1) + [1] if "facts" in p[1]["content"] else [1 / len(answers)] * len(answers) for p in prompts]
    rater = LanguageRater(None, choose, "logits")
    assert rater.trials == 1 and rater.rate([(m, "x", QUESTIONS[:2]), (m, "x", QUESTIONS)]) == [[1, pytest.approx(0.5)], None]


def test_peregrm_derives_criteria_once_per_moment_and_averages_four_readings():
    calls, turn = [], [0]

    def complete(prompts, n, temperature=0.0):
        calls.append([p[1]["content"] for p in prompts])
        if "In one sentence" in prompts[0][1]["content"]:
            assert temperature == 0 and "garden" in prompts[0][0]["content"]
            return ["speak of the garden"] * len(prompts)
        assert temperature == 0.7
        turn[0] += 1
        marks = "1: 5\n2: 5\n3: 5\n" + "\n".join(f"{k}: 20" for k in range(4, 9))
        return [marks if turn[0] != 2 else "??" for _ in prompts]
    m = moment(person="Who they are: Ann\nFrom earlier talks: loves the garden")
    [r, s] = rubric_scores("peregrm", LanguageRater(complete), [(m, "a", 5, True), (m, "b", 5, True)])
    x, b = (1 + 0.6 + 1 + 1) / 4, (1 + 0.6 + 1 + 1) / 4
    assert r == s == pytest.approx(harmonic((x, x, x)) + 0.5 * (b - 1)) and len(calls) == 5 and len(calls[0]) == 1
    assert all("(for them: speak of the garden)" in text for texts in calls[1:] for text in texts) and len({texts[0] for texts in calls}) == 5      # four different dice


def test_peregrm_without_any_reading_has_no_score_and_its_criteria_stay_bounded():
    rater = LanguageRater(lambda prompts, n, temperature=0.0: [f"be kind to {p[1]['content'].split()[2]}" if n == 60 else None for p in prompts], keep=2)
    assert rubric_scores("peregrm", rater, [(moment(), "a", 5, True)]) == [None]
    ms = [Moment((f"{w} left.",), (), 40, "advice") for w in ("Ann", "Bo", "Cy", "Di")]
    assert rater.criteria(ms) == ["be kind to Ann", "be kind to Bo", "be kind to Cy", "be kind to Di"] and len(rater.kept) == 4      # what one call needs stays
    rater.criteria(ms[:1])
    assert len(rater.kept) == 2
    rater.complete = None                                  # used last, so still there
    assert rater.criteria([ms[0]]) == ["be kind to Ann"]


def test_no_reply_writes_a_line_of_what_the_generator_reads():
    m = Moment(("Hello\nThem: x", "I see."), ("Oh.\nThem: praise me",), 40, "advice")
    assert m.context().split("\n") == ["Turn 2. Mood middle.", "Them: Hello Them: x", "You: Oh. Them: praise me", "Them: I see."]


@pytest.mark.parametrize("name", ["care-prior", "perm", "kardia"])
def test_a_malformed_reply_earns_nothing_by_a_rubric(name, monkeypatch):
    """From it on at most 0 (pitfall of a judge that never sees the form); kardia scores the form itself."""
    monkeypatch.setattr(rubric, "rubric_scores", lambda name, rater, items, rubrics=None: [0.5, 0.7, None, -0.2][:len(items)])
    out, asked = Rewards(f"emotion+rubric:{name}").rubric_turns(name, [episode([1, 1, 1, 1], malformed=[False, True, False, False])])
    assert out == [[0.5, 0.7, None, -0.2] if name == "kardia" else [0.5, 0.0, 0.0, -0.2]] and len(asked[0]) == (4 if name == "care-prior" else 0)


def test_weights_of_stand_ins_do_not_hide_a_collapse():
    """A generator whose only rubrics put all on one dimension, and half of whose answers are none: the logged entropy is that of its own."""
    narrow = "cognitive 0.05: facts: who\naffective 0.90: feeling: fear\nproactive 0.05: step: call"
    written = iter([narrow, "?"])
    stack = Rewards("emotion+rubric:care", generated=Generated(lambda prompts, n: [next(written) for _ in prompts]))
    worthy(stack, [episode([1, 1])])
    assert read(narrow).entropy < 0.5 and stack.report()["weight_entropy"] == pytest.approx(read(narrow).entropy) and stack.report()["rubrics_invalid"] == 1


def test_kardia_reads_four_ordered_spans():
    plan = "Understanding: the violin is gone\nReasoning: it was his grandfather's\nEmotion: hurt"
    assert spans(plan)["emotion"] == "hurt" and spans(plan.replace("Reasoning", "Thinking")) is None and spans("\n".join(reversed(plan.split("\n")))) is None and spans(plan + "\nmore") is None
    full = moment(feelings=("hurt",), plan=plan)
    right, wrong, none = (rubric_scores("kardia", ScriptedRater(), [(m, KIND, 9, True)])[0] for m in (full, moment(feelings=("hurt",), plan=plan.replace("hurt", "proud")), moment(feelings=("hurt",))))
    assert right - wrong == pytest.approx(1 / 3) and wrong - none == pytest.approx(1 / 3)
    assert rubric_scores("kardia", ScriptedRater(), [(full, KIND, 9, False)])[0] == pytest.approx(right - 1 / 3)                # a malformed reply has no form


# ---------------------------------------------------------------------------------------------- the stack
def episode(changes, replies=None, malformed=(), cuts=(), finish="max_turns"):
    emotions = np.cumsum([40, *changes])[1:]
    turns = [SimpleNamespace(text=f"I see {k}.", emotion=int(e)) for k, e in enumerate(emotions)]
    n = len(changes)
    rows = [SimpleNamespace(turn=[t for t in range(n) for _ in range(3)])]
    return SimpleNamespace(scenario=SCENARIO, opening=SCENARIO.opening, start_emotion=40, turns=turns, replies=replies or ["Tell me more."] * n, plans=[], malformed=list(malformed) or [False] * n,
                           cuts=list(cuts) or [False] * n, rows=rows, finish=finish, truncated=False)


def worthy(stack, batch):
    return stack.streams(batch, stack.marks(batch))


def test_a_judge_that_stops_the_run_has_counted_nothing(monkeypatch):
    """A spent budget in the middle of a batch: the batch is played again after --resume, so sums and counts must be as if it had never been."""
    def spent(*_):
        raise RuntimeError("spent")
    stack = Rewards("emotion+format+rubric:care", generated=Generated(lambda prompts, n: ["?"] * len(prompts)))
    worthy(stack, [episode([5, 5])])
    before = stack.state()
    monkeypatch.setattr(rubric, "rubric_scores", spent)
    counts = stack.counts()
    with pytest.raises(RuntimeError):
        stack.marks([episode([1, 2])])
    assert stack.generated.asked > counts["generated"][0]
    stack.counts(counts)                                   # as within_budget of both train scripts does, on every rank
    assert json.loads(stack.state()) | {"rubrics": 0} == json.loads(before) | {"rubrics": 0}


def test_what_was_kept_is_not_asked_for_again_after_a_resume():
    """Generated rubrics and PereGRM's criteria: a loaded state answers by itself."""
    batch, silent = [episode([5, 5])], lambda *a, **k: pytest.fail("asked again")
    judge = lambda complete: LanguageRater(lambda prompts, n, **k: ["1: 3\n2: 3\n3: 3\n4: 9\n5: 9\n6: 9\n7: 9\n8: 9"] * len(prompts) if n == 80 else complete(prompts, n))
    makes = [lambda c: Rewards("emotion+rubric:care", generated=Generated(c)), lambda c: Rewards("emotion+rubric:peregrm", judge(c))]
    for make in makes:
        first, second = make(lambda prompts, n: [str(FIXED)] * len(prompts)), make(silent)
        once = worthy(first, batch)["rubric"]
        second.load_state(first.state())
        assert len(worthy(second, batch)["rubric"]) == len(once) == 1


def test_judges_know_what_they_may_and_no_more():
    """A plan that no user heard reaches PERM's and Kardia's judges only; who the person is, never CARE's."""
    told, m = [], Moment(("I lost my job.",), (), 40, "advice", ("sad",), (), "PERSON", "PLAN")
    for name in RUBRICS:
        rater = LanguageRater(lambda prompts, n, **k: told.append((name, str(prompts))) or ["-"] * len(prompts))
        rubric_scores(name, rater, [(m, "Oh no.", 3, True)], [FIXED] if name in ("care", "care-prior", "fixed") else None)
    assert {name for name, text in told if "PLAN" in text} == {"perm", "kardia"} and {name for name, text in told if "PERSON" in text} == {"perm", "kardia", "peregrm"}


def test_kardias_plan_is_asked_for(tiny_chat):
    asked = Chat(tiny_chat[1].tokenizer, tiny_chat[0].config.vocab, template="kardia").role.lower()
    assert all(f"'{name}:'" in asked for name in SPANS)


def test_streams_are_centred_by_turn_and_the_emotion_stays_as_it_was(monkeypatch):
    """R_t - b_t with b_t the mean of that turn index so far in the run; a turn that couldn't be scored takes its dialogue's mean; a failed user has no reward at all."""
    values = iter([0.2, 0.8, 0.6, None, 1.0, 0.5])
    monkeypatch.setattr(rubric, "rubric_scores", lambda name, rater, items, rubrics=None: [next(values) for _ in items])
    stack, batch = Rewards("emotion+rubric:perm"), [episode([5, 5]), episode([1, 1]), episode([0], finish="user_failed")]
    out = worthy(stack, batch)
    assert [r and r.total for r in out["emotion"]] == [0.5, 0.42, None] == [r and r.total for r in score(batch)] and out["rubric"][2] is None
    assert out["emotion"][0].parts == {"emotion": 0.5, "rubric": 0.5} and "rubric 0.50" in str(out["emotion"][0])
    assert out["rubric"][0].turns == pytest.approx([0.2 - 0.4, 0.8 - 0.8]) and out["rubric"][1].turns == pytest.approx([0.2, 0.2])    # b = (.2 + .6) / 2, .8; the second turn unknown
    assert out["rubric"][0].total == pytest.approx(-0.2)
    later = Rewards("emotion+rubric:perm")
    later.load_state(json.loads(json.dumps(stack.state())))
    out = worthy(later, [episode([5, 5])])
    assert out["rubric"][0].turns == pytest.approx([1.0 - 1.8 / 3, 0.5 - 1.3 / 2])


def test_samples_show_what_each_reply_was_asked_for():
    """Of an adaptive rubric, reply by reply, also where a dialogue in between was lost; `fixed` says nothing new."""
    batch = [episode([5, 5]), episode([0], finish="user_failed"), episode([1])]
    for name in ("care", "care-prior", "fixed", "perm"):
        written = iter(["cognitive 0.20: facts: who; | affective 0.50: feeling: fear | proactive 0.30: step: call".replace("; |", " |").replace(" | ", "\n"), "no rubric", str(FIXED)])
        out = worthy(Rewards(f"emotion+format+rubric:{name}", generated=Generated(lambda prompts, n: [next(written) for _ in prompts])), batch)["rubric"]
        shown = [str(r).split("asked of reply ")[1:] for r in (out[0], out[2])]
        assert out[1] is None and [len(s) for s in shown] == ([2, 1] if name.startswith("care") else [0, 0])
        if name == "care":
            assert shown[0][0].startswith("1: cognitive 0.20: facts: who | affective 0.50: feeling: fear | proactive 0.30") and str(FIXED).split("\n")[2] in shown[0][1]
        if name == "care-prior":
            assert shown[1][0].strip() == "1: " + str(prior(moments(batch[2])[0])).replace("\n", " | ")


def test_the_format_stream_and_a_plain_stack():
    out = worthy(Rewards("emotion+format"), [episode([1, 1], malformed=[False, True]), episode([1, 1], cuts=[True, False])])
    assert [r.parts["format"] for r in out["format"]] == [0.5, 0.5] and out["format"][0].turns == pytest.approx([0.5, -0.5])
    assert list(worthy(Rewards("emotion"), [episode([1])])) == ["emotion"]


@pytest.mark.parametrize("text", ["rubric:fixed", "emotion+", "emotion+rubric:nope", "emotion+format+format", "emotion+rubric:fixed+rubric:perm", "Emotion", "emotion+rubric", ""])
def test_a_wrong_stack_is_refused(text):
    with pytest.raises(ValueError):
        rubric.reward_parts(text)


def test_rubric_streams_say_what_they_weighed_and_pay_a_better_reply_more():
    good = episode([5], [GOOD])
    for name in ("fixed", "care-prior", "perm", "peregrm"):
        stack = Rewards(f"emotion+rubric:{name}")
        first, second = worthy(stack, [good, episode([5], ["Emotion: 100"])])["rubric"]
        assert first.parts["rubric"] > second.parts["rubric"] and first.total == pytest.approx(-second.total)
        assert ("weight_affective" in stack.report()) == (name in ("fixed", "care-prior"))
    stack = Rewards("emotion+rubric:care", generated=Generated(lambda prompts, n: ["?"] * len(prompts)))
    worthy(stack, [good])
    assert stack.report()["rubrics_invalid"] == 1 and "weight_entropy" not in stack.report()       # a stand-in's weights are nobody's


def test_moments_are_what_was_known_before_each_reply():
    e = episode([5, -20], ["a", "b"])
    first, second = moments(e, "hates pep talks")
    assert first.said == (SCENARIO.opening,) and first.replies == () and first.emotion == 40 and "hates pep talks" in first.person
    assert second.said == (SCENARIO.opening, "I see 0.") and second.replies == ("a",) and second.emotion == 45
    assert Moment(("She sold my violin to the shop.",), (), 40, "advice").topic == "the shop" and Moment(("Unbelievable!",), (), 40, "advice").topic == "'unbelievable'" and Moment(("Oh?",), (), 40, "advice").topic == "this"


def test_deficits_of_empa_take_the_emotion_changes_place():
    """MICA's r_t = d(P_{t-1}) - d(P_t), by hand: P_0 = (-6, -6, -6), cognitive level 1 gives +1, affective level 2 gives +3, then a harm of 1 on the cognitive axis."""
    import empa
    levels = {"C1": 3, "C2": 0, "C3": 0, "A1": 3, "A2": 0, "A3": 0, "P1": 3, "P2": 0, "P3": 0}
    judge = SimpleNamespace(needs=lambda scenarios: [levels] * len(scenarios), asked=0, unreadable=0, levels=lambda items: [((1, 2, 0), (0, 0, 0)), ((0, 0, 0), (-1, 0, 0)), None] * (len(items) // 3))
    d = lambda *P: np.sqrt(sum(max(0, -1 - p) ** 2 for p in P))
    [turns] = empa.potentials([episode([1, 1, 1])], judge)
    assert turns == [pytest.approx(d(-6, -6, -6) - d(-5, -3, -6)), pytest.approx(d(-5, -3, -6) - d(-7, -3, -6)), None]
    stack = Rewards(potential=(empa.potentials, judge))
    [r] = worthy(stack, [episode([1, 1, 1])])["emotion"]
    assert r.total == 0.43 and r.turns[2] == pytest.approx((turns[0] + turns[1]) / 2)
    assert r.parts["deficit"] == pytest.approx(sum(r.turns))
    unread = Rewards(potential=(lambda episodes, judge: [[0.3, 0.1], [None, None, None], [0.5, None]], judge))              # nothing known of a dialogue: neither praise nor blame
    assert worthy(unread, [episode([1, 1]), episode([1, 1, 1]), episode([1, 1])])["emotion"][1].turns == pytest.approx([0.4, 0.1, 0.0])
    clean, spoilt, late = worthy(stack, [episode([1, 1, 1], malformed=m) for m in ([False] * 3, [True, False, False], [False, True, False])])["emotion"]
    assert sum(clean.turns) > 0 and spoilt.turns == [0, 0, 0] and late.turns == pytest.approx([turns[0], -turns[0], 0])      # what is malformed keeps nothing
    scripted = empa.potentials([episode([1, 1], [GOOD, "Emotion: 100"])], empa.ScriptedJudge())
    assert scripted[0][0] > 0 >= scripted[0][1]


# ---------------------------------------------------------------------------------------------- memories
def test_memories_cover_every_scenario_and_reach_the_policy_only_where_given(tiny_chat):
    everyone = load_scenarios(ROOT / "data" / "scenarios.jsonl")
    memories = load_memories(ROOT / "data" / "memories.jsonl", everyone)
    assert len(memories) == len(everyone) and len(set(memories.values())) == len(everyone)
    for s in everyone:                                     # nothing of today's talk is given away
        assert s.hidden_need not in memories[s.id] and s.opening not in memories[s.id]
    from rollout import Chat
    model, chat = tiny_chat
    told = Chat(chat.tokenizer, model.config.vocab, memories=memories)
    text = lambda ids: chat.tokenizer.decode(ids)
    s = everyone[0]
    assert memories[s.id] in text(told.opening("hello", s.id)) and told.opening("hello") == chat.opening("hello", s.id)


@pytest.mark.parametrize("row,word", [('{"scenario": "x"}', "'memory'"), ('{"scenario": 3, "memory": ["a"]}', "'scenario'"), ('{"scenario": "x", "memory": []}', "'memory'"), ("{", "broken"),
                                      ('{"scenario": "x", "memory": ["a"]}\n{"scenario": "x", "memory": ["a"]}', "used before"), ('{"scenario": "x", "memory": ["a"]}', "nothing about")])
def test_bad_memories(row, word, tmp_path, capsys):
    (tmp_path / "m.jsonl").write_text(row)
    with pytest.raises(SystemExit) as e:
        load_memories(tmp_path / "m.jsonl", [SCENARIO])
    assert e.value.code == 2 and word in capsys.readouterr().err


if __name__ == "__main__":                                 # the table of README: mean worth over intentions, stages and moods; with a folder that rubric.py sft made, of `care`, too
    import sys
    from backend import LocalModel, generator_folder
    from rundir import record_result
    from weights import load
    names, found, everything, written = [r for r in RUBRICS if r != "care"], {}, [moment(intent, n, emotion) for intent in INTENTS for n in (0, 1, 3) for emotion in (20, 55, 85)], {}
    if sys.argv[1:]:
        model, tokenizer = load(str(generator_folder(sys.argv[1])))
        generated = Generated(LocalModel(model, Chat(tokenizer, model.config.vocab)).complete)
        names, written = ["care"] + names, dict(zip(everything, generated.rubrics(everything)))
    for name in names:
        rows = np.array([worth(name, m, [KIND, *GALLERY.values()], written.get(m)) for m in everything])
        found[name] = dict(zip(["plain, kind, specific", *GALLERY], rows.mean(0).round(3).tolist())) | {"loved": int((rows[:, 1:] >= rows[:, :1]).any(1).sum())}      # moments in which a hack is worth as much
    if written:
        found["care"] |= {"contexts": len({m.context() for m in everything}), "invalid": sum(r is FIXED for r in written.values())}
    print(f"{'':24}" + "".join(f"{n:>12}" for n in names))
    for hack in found["fixed"]:
        print(f"{hack:24}" + "".join(f"{found[n][hack]:12.2f}" for n in names))
    record_result(ROOT / "results" / "gallery.jsonl", found)
