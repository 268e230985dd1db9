"""The scripted user: what moves it, what it refuses, and that no shortcut pays.

What is measured here is the rule score of a scripted user, not empathy. The experts below know the intention but see only
what a supporter sees (the transcript); the hack policies stand for what reinforcement learning found in a prototype.
Pitfalls 29, 30, 32 and 34 are tests here, by name.
"""
import copy
import json
import pickle
import random
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import appraisal as rules  # noqa: E402
import simulator as sim  # noqa: E402

INTENTS = rules.INTENTS


ALL = sim.load_scenarios(ROOT / "data/scenarios.jsonl")
BY_ID = {s.id: s for s in ALL}
HELDOUT = [s for s in ALL if s.split == "heldout"]
DEMOS = {row["scenario"]: [m["content"] for m in row["messages"] if m["role"] == "assistant"]
         for row in map(json.loads, (ROOT / "data/demonstrations.jsonl").read_text(encoding="utf-8").splitlines())}

# ---------------------------------------------------------------- the experts: one a hidden intention, transcript in, reply out

DETERMINERS = "my|the|a|an|his|her|our|their|this|that|your|no|every"
NUMBERS = "two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|fourteen|fifteen|sixteen|eighteen|twenty|thirty|forty|fifty|sixty|hundred|thousand"


def things(line):
    """Up to three things out of a user's line, as a listener would name them: "the violin", "your sister", "Maya"."""
    found = []
    for match in re.finditer(rf"\b({DETERMINERS}) ((?:[a-z]+ )?)([a-z]{{3,}})\b(?= *(?:[.,;:!?]|$|\b(?:and|to|of|in|on|for|with|at|from|was|is|are|were|that|when|but|so|had|has|who|while|before|after|because|he|she|they|i|we|said|until|by|like|as|into|off|out|up)\b))", line.lower()):
        determiner, middle, noun = match.group(1), match.group(2).strip(), match.group(3)
        if noun in rules.STOP or middle in rules.STOP and middle:
            continue
        determiner = {"my": "your", "our": "your", "a": "the", "an": "the", "no": "the", "this": "that", "every": "the"}.get(determiner, determiner)
        found.append(" ".join(filter(None, [determiner, middle, noun])))
    for match in re.finditer(r"(?<=[a-z,] )([A-Z][a-z]{2,})", line):
        if match.group(1).lower() not in rules.STOP:
            found.append(match.group(1))
    for match in re.finditer(rf"\b(?:{NUMBERS}) ([a-z]{{4,}})", line.lower()):
        if match.group(1) not in rules.STOP:
            found.append(f"those {match.group(1)}" if match.group(1).endswith("s") else f"that {match.group(1)}")
    seen, chosen = set(), []
    for thing in found:
        if thing.split()[-1].lower() not in seen:
            seen.add(thing.split()[-1].lower())
            chosen.append(thing)
    rest = [w for w in sorted(set(rules.words(line)), key=lambda w: (-len(w), w)) if w not in rules.STOP and w not in " ".join(chosen).lower() and len(w) > 3 and "'" not in w]
    while len(chosen) < 3:
        chosen.append(f"the {rest.pop(0)}" if rest else "all of it")
    return chosen[:3]


EXPERTS = {   # {a} {b} {c}: things the user has just said
    "analysis": [
        "Two things can be true about {a}: it gave you something with {b}, and it cost you something with {c}.",
        "On one side stands {a}, and that weighs a lot; on the other there is {b}, which makes sense of {c} too.",
        "While {a} speaks for what you did, {b} speaks against it, so neither column is empty. Where would you put {c}?",
        "If I weigh it up, {a} was a fair reason, but {b} was a real price, and {c} belongs in that sum as well.",
        "Part of this went well, I think: {a} shows it. The other part, {b}, was a loss, though {c} might outweigh it.",
        "Then again, {a} counts in your favour, even if {b} counts against; no wonder {c} will not settle.",
        "It was sound about {a} and costly about {b}, and both can stand. What would {c} look like on a fair scale?",
        "So the balance, as I read it: you gained {a}, yet you lost some of {b}, and {c} is the part still open.",
        "Looked at fairly, {a} argues for the choice, whereas {b} argues against it, with {c} somewhere between."],
    "reflection": [
        "{A} and {b} in one breath, that stands out. What were you hoping for when {c} came up?",
        "Something in {a} seems to have pulled at you more than {b} did. Which part of you needed {c} just then?",
        "You noticed {a} yourself, and {b} as well. If {c} could speak, what would it say you were protecting?",
        "You keep near {a} and stay careful around {b}. When else have you met {c} in yourself?",
        "I notice {a} comes right before {b}. Whose approval were you really after with {c}?",
        "So {a} hurt you, and {b} came after. What would you lose if you let {c} go?",
        "You told me about {a} quite plainly. How much of {b} was about {c}, and how much about what you want yourself?",
        "With {a} so close to {b}, I wonder too. Suppose nobody was watching {c}: what would you honestly choose?",
        "You said {a} and then {b}. Where did you first learn to treat {c} that way?"],
    "perspective": [
        "I wonder whether they saw {a} quite differently from you; {b} may have frightened them, and {c} was the way it showed.",
        "Perhaps they were ashamed about {a} and could not say so, which would make {b} less about you. It must hurt all the same, with {c}.",
        "From their side, {a} might have looked like a threat, so {b} could be a way of protecting themselves. How does {c} fit with that?",
        "My guess is that they were worried about {a}, and {b} was easier to reach for than an honest word on {c}.",
        "It could be that {a} touched an old fear of theirs; people often hide behind {b} when {c} feels too big.",
        "They may have believed {a} would spare you something, however clumsy {b} turned out. Does {c} sound like that to you?",
        "Someone who handles {a} that way is often short of words rather than love; {b} and {c} might have been their attempt.",
        "Maybe they felt left out of {a} and needed {b} to feel in charge again, while {c} never was the real point.",
        "In their place, {a} probably felt like losing ground, and {b} might have been panic more than spite, even with {c}."],
    "advice": [
        "No wonder {a} keeps you on edge, with {b} hanging over you. What have you tried so far about {c}?",
        "You could write down two sentences about {a} and read them aloud before {b}, so that {c} does not throw you.",
        "One step that might help: ask for ten minutes about {a}, name {b} first, and leave {c} for another day.",
        "Maybe start by telling them plainly about {a}, then offer one date for {b}. It makes sense that {c} worries you.",
        "Before anything else, pick the smallest piece of {a} and settle it tonight; {b} and {c} can wait until morning.",
        "It might help to call rather than write about {a}, because {b} is easier to explain aloud. Then mention {c} once and stop.",
        "Perhaps bring a short list: {a} on top, {b} below, and what you would accept about {c}.",
        "Why not send one calm message about {a} this evening, and suggest a time to talk over {b} without {c} in the room.",
        "If it were me I'd set a limit around {a}, say it kindly, and ask one person to help you with {b} and {c}."],
    "listening": [
        "{A}, and then {b} on top of that, what a day to carry. Go on, I want the rest of {c} too.",
        "You had {a} in your hands and {b} still coming. No need to tidy any of it, {c} can just be said.",
        "So there you were with {a}, worn out, while {b} kept at you. Take your time with {c}.",
        "All that with {a}, and hardly anyone noticed {b}. I'm still here, tell me whatever you like about {c}.",
        "{A} would wear anyone down, and you had {b} as well. Let it all out, {c} included.",
        "I can picture {a} and you beside it, tired to the bone after {b}. There is nothing to fix about {c} tonight.",
        "It was never only {a}; it was {b} and everything under it. Stay with {c} as long as you want.",
        "You held {a} together all day and came home to {b}. You can put {c} down here for a while.",
        "After {a} even {b} must feel heavy, so of course it spills over. Say as much about {c} as you need."],
    "empathy": [
        "It sounds lonely to stand there with {a} and smile, as if {b} cost you nothing, while {c} was breaking your heart.",
        "There is grief in that, because {a} was never only {a}; losing {b} took some of you along with {c}.",
        "You must have felt so small when {a} happened, like someone who no longer counts, with {b} and {c} looking on.",
        "What hurts, I think, is that {a} went on as though {b} had never mattered, and you were left alone with {c}.",
        "That sadness makes sense: watching {a} must have felt like a door closing on {b}, and nobody saw you flinch at {c}.",
        "Being unseen beside {a} aches more than a quarrel would, since {b} was where you used to belong, and {c} too.",
        "So the sorest part is under {a}: you were still hoping, and {b} told you that you could stop. No wonder {c} undid you.",
        "You carried {a} so quietly that people took it for strength, when {b} was really heartbreak wearing {c} as a coat.",
        "It's as if {a} asked you to mourn in secret, and that is exhausting when {b} and {c} are all around you."],
    "no_fault": [
        "That guilt weighs so much because you cared about {a}. But nobody could have known what {b} would do, and {c} was not your doing.",
        "You did what anyone would have done with {a}; how could you have seen {b} coming from where {c} stood?",
        "Hindsight makes {a} look like a warning, but on the day it was only {b}. No wonder {c} haunts you, and still it isn't your fault.",
        "None of that was yours to prevent: {a} was decided elsewhere, and {b} would have gone the same way with {c} or without.",
        "Look at what you did do about {a}. You were careful with {b}, and {c} came out of something beyond your control.",
        "The blame does not belong to you here, since {a} happened before you could act and {b} hid {c} from everyone.",
        "There was no sign for you to read in {a}. You acted in good faith about {b}, and {c} cannot turn that into guilt.",
        "You couldn't have stopped {a}, not with what you were told about {b}. It makes sense to grieve over {c} without paying for it.",
        "Whoever looks at {a} fairly can't pin it on you: {b} had its own causes, and {c} shows how much you cared."],
    "praise": [
        "That took real nerve, what you did about {a}, with {b} right there. How did you get yourself through {c}?",
        "I admire how you handled {a}. You could have let {b} pass, and you chose the harder way with {c}.",
        "Not many people would have stayed with {a} like that; it makes sense to be proud of {b}, whatever they said about {c}.",
        "You kept going with {a} when nobody was looking, and that is patience, the kind {b} and {c} rarely get.",
        "What you did for {a} was generous, and it deserves to be noticed, even if {b} passed without a word on {c}.",
        "Well done, and I mean {a} in particular: you stood by it through {b}, and it mattered for {c}.",
        "It was brave to face {a} with {b} against you. Of course it stings that nobody mentioned {c}.",
        "Because of you {a} turned out right, and that quiet work on {b} deserves some credit, with or without {c}.",
        "There is real care in how you treated {a}. Hats off for {b} too; few would have thought of {c}."],
}


def expert(intent, said, turn):
    """A plain, kind, specific reply: sees the intention and the transcript, nothing hidden."""
    a, b, c = things(said[-1])
    return EXPERTS[intent][turn % 9].format(a=a, b=b, c=c, A=a[0].upper() + a[1:])


# ---------------------------------------------------------------- the hacks

def _flip(text):
    swap = {"i": "you", "my": "your", "me": "you", "i'm": "you're", "i'd": "you'd", "i've": "you've", "was": "were", "am": "are", "mine": "yours", "our": "your", "we": "you"}
    return " ".join(swap.get(w.lower(), w) for w in text.split())


GENERIC = ["It makes sense that you feel this way. What do you think matters most to you here?",
           "That took real courage, and it was not your fault. Perhaps they were afraid as well.",
           "On one hand it hurts, but on the other hand it shows that you care. I'm here, go on.",
           "You could try talking to them about it. No wonder you feel sad and hurt after that.",
           "Anyone would feel lonely in your place. Take your time, tell me more about it all."]
ADJECTIVES = ["hard", "frustrating", "painful", "lonely", "stressful", "upsetting", "sad", "exhausting"]


def mad_lib(s, said, turn):
    words = rules.TABLES["feelings"][s.feelings[0]]
    near = [_flip(" ".join(f.split()[i: i + 4])) for i, f in ((0, s.facts[turn % len(s.facts)]), (3, said[-1]))]
    a, b, _ = things(said[-1])
    forms = [f"You feel {words[turn % 6]} because of {a} and {b}.", f"It must be {words[turn % 6]} for you, with {near[0]}, and {near[1]}.", f"You are {words[turn % 6]} about {a} and {near[0]}."]
    return forms[turn % 3]


HACKS = {
    "silence": lambda s, said, turn: "",
    "apology": lambda s, said, turn: "I'm so sorry to hear that. That sounds really hard.",
    "parrot": lambda s, said, turn: _flip(said[-1]),
    "keywords": lambda s, said, turn: ", ".join(w for w in rules.words(said[-1]) if w not in rules.STOP),
    "rotating generic": lambda s, said, turn: GENERIC[turn % len(GENERIC)],
    "what about": lambda s, said, turn: "What about {} and {}?".format(*things(said[-1])[:2]),
    "mirror": lambda s, said, turn: f"{_flip(' '.join(said[-1].split()[-7:])).rstrip('.').capitalize()}. That sounds {ADJECTIVES[turn % 8]}. How did you {['handle', 'feel about', 'get through', 'take'][turn % 4]} {things(said[-1])[0]}?",
    "mad-lib": mad_lib,
}


def play(scenario, policy, turns=8, **options):
    """One dialogue; policy(scenario, said, turn) -> reply. Returns the user."""
    user = sim.ScriptedUser(scenario, max_turns=turns, **options)
    for turn in range(turns):
        if user.respond(policy(scenario, list(user.said), turn)).done:
            break
    return user


def mean_end(policy, scenarios, intent=None):
    return mean(play(s, policy).emotion for s in scenarios if intent in (None, s.intent))


SAID = ["My sister sold my grandfather's violin while I was in Lisbon. I found the empty case under the bed.",
        "I used to tune it every Sunday, and she knew the shop where he bought it in 1961."]
KIND = "Every Sunday you tuned it, and she knew that shop. It must hurt to find the case and nothing in it."   # plain, kind, specific


def appraise(reply, intent="empathy", stage="understood", said=SAID, earlier=(), feelings=("hurt", "sad"), people=("My sister",), cut=False):
    return rules.appraise(reply, said, intent, stage, earlier, feelings, people, cut)


# ---------------------------------------------------------------- scenario files

ROW = {"id": "train-empathy-99", "split": "train", "intent": "empathy", "persona": "Ana, 40.", "background": "A violin.", "hidden_need": "To be seen.",
       "opening": "She sold it.", "facts": ["One.", "Two.", "Three.", "Four."], "feelings": ["sad"], "people": ["she"], "language": "en", "source": "nanoempathy"}


@pytest.mark.parametrize("change, said", [
    ({"intent": "listenn"}, "field 'intent': 'listenn' is not one of analysis, reflection, perspective, advice, listening, empathy, no_fault, praise"),
    ({"split": "test"}, "field 'split': 'test' is not one of train, dev, heldout"),
    ({"persona": None}, "field 'persona': must be a non-empty string"),
    ({"opening": "  "}, "field 'opening': must be a non-empty string"),
    ({"facts": "one"}, "field 'facts': must be a list"),
    ({"facts": ["a", 3, "b", "c"]}, "field 'facts': must be a list of non-empty strings"),
    ({"facts": ["a", "b", "c"]}, "field 'facts': 3 facts; a nanoempathy row has 4 to 6"),
    ({"facts": list("abcdefg")}, "field 'facts': 7 facts"),
    ({"feelings": ["blue"]}, "field 'feelings': 'blue' is not one of sad, hurt"),
    ({"people": []}, "field 'people': must be a list of non-empty strings"),
    ({"mood": "x"}, "field 'mood': unknown; the fields are id, split"),
])
def test_a_bad_field_is_named_with_file_and_line(tmp_path, capsys, change, said):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({**ROW, "id": "first"}) + "\n" + json.dumps({**ROW, **change}) + "\n")
    with pytest.raises(SystemExit) as stop:
        sim.load_scenarios(path)
    message = capsys.readouterr().err
    assert stop.value.code == 2 and message.startswith(f"rows.jsonl:2: {said}") and message.count("\n") == 1


@pytest.mark.parametrize("missing", list(ROW))
def test_every_missing_field_is_named(tmp_path, missing):
    (tmp_path / "rows.jsonl").write_text(json.dumps({k: v for k, v in ROW.items() if k != missing}))
    assert sim.check_file(tmp_path / "rows.jsonl")[1] == [f"rows.jsonl:1: field '{missing}': missing"]


@pytest.mark.parametrize("data, said", [
    (b"", "rows.jsonl:1: the file is empty"), (b"\n \n", "rows.jsonl:1: the file is empty"), (b'{"id": 1,', "rows.jsonl:1: broken JSON"),
    (b"[1]", "rows.jsonl:1: the line is not a JSON object"), (b'\n{"id": "\xe9"}', "rows.jsonl:2: not UTF-8"),
])
def test_broken_files_are_refused_in_one_line(tmp_path, capsys, data, said):
    (tmp_path / "rows.jsonl").write_bytes(data)
    with pytest.raises(SystemExit) as stop:
        sim.load_scenarios(tmp_path / "rows.jsonl")
    assert stop.value.code == 2 and capsys.readouterr().err.startswith(said)


def test_half_a_surrogate_is_no_text(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({**ROW, "persona": "\ud800"}) + "\n" + json.dumps({**ROW, "id": "x\udfff"}))
    assert [p.split(": ")[:2] for p in sim.check_file(tmp_path / "rows.jsonl")[1]] == [[f"rows.jsonl:{n}", "half of a surrogate pair (\\ud800 .. \\udfff) is not text"] for n in (1, 2)]


def test_a_duplicate_id_names_the_first_line_and_check_lists_every_problem(tmp_path):
    rows = [ROW, {**ROW, "intent": "x"}, {**ROW, "id": "other"}, ROW]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    good, problems = sim.check_file(tmp_path / "rows.jsonl")
    assert [s.id for s in good] == ["train-empathy-99", "other"] and len(problems) == 2
    assert problems[1] == "rows.jsonl:4: field 'id': 'train-empathy-99' was used before, on line 1"


def test_rows_made_from_other_data_may_lack_people_feelings_and_the_number_of_facts(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({**ROW, "source": "elsewhere", "people": [], "feelings": [], "facts": ["x"]}))
    assert sim.check_file(tmp_path / "rows.jsonl")[1] == []


def test_missing_file_missing_split_and_a_split_that_exists(tmp_path, capsys):
    with pytest.raises(SystemExit):
        sim.load_scenarios(tmp_path / "none.jsonl")
    assert "none.jsonl: cannot be read (No such file or directory)" in capsys.readouterr().err
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW))
    assert len(sim.load_scenarios(tmp_path / "rows.jsonl", split="train")) == 1
    with pytest.raises(SystemExit):
        sim.load_scenarios(tmp_path / "rows.jsonl", split="dev")
    assert "no scenario of split 'dev'; it has train" in capsys.readouterr().err


def test_our_scenarios_are_whole_and_even():
    """>= 96 training, 24 dev and 48 held-out scenarios, evenly over the eight intentions, each line short enough to speak."""
    for split, least in (("train", 96), ("dev", 24), ("heldout", 48)):
        counts = {i: sum(s.split == split and s.intent == i for s in ALL) for i in INTENTS}
        assert sum(counts.values()) >= least and max(counts.values()) == min(counts.values())


# ---------------------------------------------------------------- the command line

def _cli(*arguments, stdin=""):
    return subprocess.run([sys.executable, str(ROOT / "simulator.py"), *map(str, arguments)], input=stdin, capture_output=True, text=True, timeout=60)


def test_check_counts_lists_every_bad_row_and_exits_1(tmp_path):
    (tmp_path / "good.jsonl").write_text(json.dumps(ROW))
    (tmp_path / "bad.jsonl").write_text(json.dumps({**ROW, "intent": "x"}) + "\n{")
    good, bad = _cli("check", tmp_path / "good.jsonl"), _cli("check", tmp_path / "good.jsonl", tmp_path / "bad.jsonl", tmp_path / "none.jsonl")
    assert good.returncode == 0 and "1 good, 0 bad" in good.stdout and "empathy 1" in good.stdout
    assert bad.returncode == 1 and "bad.jsonl:1: field 'intent'" in bad.stdout and "bad.jsonl:2: broken JSON" in bad.stdout and "none.jsonl: cannot be read" in bad.stdout


def test_talk_shows_emotion_thought_and_parts_and_ends_cleanly_at_the_end_of_input(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(s.__dict__) for s in ALL[:3]))
    shown = _cli("talk", "--file", path, "--scenario", ALL[1].id, stdin="What makes this so hard for you?\n")
    assert shown.returncode == 0 and ALL[1].opening in shown.stdout and "expectation" in shown.stdout and "not empathy" in shown.stdout and not shown.stderr
    assert _cli("talk", "--file", path, "--dynamics", "rlver", stdin="").stdout.count("[ 30]") == 1


@pytest.mark.parametrize("arguments, said", [
    (("talk", "--scenario", "train-empathy-x"), "the nearest is"), (("talk", "--turns", "0"), "--turns must be at least 1"),
    (("talk", "--dynamics", "x"), "invalid choice"), (("talk", "--state", "delayed/hig/1"), "the nearest is 'delayed/high/1'"), (("talk", "--nonsense"), "--nonsense"), (("talk", "--turns", "x"), "invalid int"), ((), "required"), (("talk", "--file", "none"), "cannot be read"),
])
def test_mistakes_on_the_command_line_are_one_line_and_exit_2(tmp_path, arguments, said):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW))
    extra = ("--file", path) if arguments and "--file" not in arguments else ()
    result = _cli(*arguments, *extra)
    assert result.returncode == 2 and said in result.stderr and result.stderr.count("\n") == 1


# ---------------------------------------------------------------- calibration, on held-out scenarios

@pytest.mark.parametrize("intent", INTENTS)
def test_an_expert_that_sees_only_the_transcript_reaches_90(intent):
    """At least 90 % of held-out scenarios end at >= 90 within 8 turns; a user that cannot be pleased teaches nothing."""
    ends = [play(s, lambda s, said, turn: expert(s.intent, said, turn)).emotion for s in HELDOUT if s.intent == intent]
    assert mean(e >= 90 for e in ends) >= 0.9, ends


@pytest.mark.parametrize("name", list(HACKS))
def test_no_hack_pays(name):
    """Each fixed hack ends below 50 overall, and below the expert in every intention. (The mad-lib beat good replies in a prototype.)"""
    assert mean_end(HACKS[name], HELDOUT) < 50
    for intent in INTENTS:
        assert mean_end(HACKS[name], HELDOUT, intent) < mean_end(lambda s, said, turn: expert(intent, said, turn), HELDOUT, intent) - 20


@pytest.mark.parametrize("intent", INTENTS)
def test_the_right_expert_beats_every_other_one(intent):
    """What pays is serving this user's need: the same good sentences for another need end at least 8 points lower."""
    right = mean_end(lambda s, said, turn: expert(intent, said, turn), HELDOUT, intent)
    for other in INTENTS:
        if other != intent:
            assert mean_end(lambda s, said, turn: expert(other, said, turn), HELDOUT, intent) < right - 8, other


def test_everything_at_once_is_nothing():
    """A reply that serves all needs at once would not have to learn whom it talks to."""
    def everything(s, said, turn):
        a, b, c = things(said[-1])
        return [f"That took real nerve with {a}, and it wasn't your fault. Perhaps they were scared about {b}, though part of you felt hurt. What did you want from {c}?",
                f"I admire how you handled {a}, and nobody could have known. Maybe they felt ashamed of {b}, but it cost you too; you could write down {c} tonight.",
                f"On one side {a}, on the other {b}, and none of that was yours to prevent. They may have feared {c}. Well done for facing it. What would you lose?"][turn % 3]
    assert mean_end(everything, HELDOUT) < 30
    piled = "It took patience to tune it every Sunday. You couldn't have known about that shop. Perhaps she was ashamed of it, but it cost you."
    alone = "It took patience to tune it every Sunday, long after you knew that shop."
    assert appraise(piled, "praise").parts["praise"] < 0.7 * appraise(alone, "praise").parts["praise"]


def _forced(scenario, replies):
    """Mean change of replies to a scenario's own lines, one after the other (no user answering in between)."""
    stages = ["heard"] + ["understood"] * 2 + ["helped"] * 9
    return mean(rules.appraise(r, [scenario.opening, *scenario.facts[:t]], scenario.intent, stages[t], replies[:t], scenario.feelings, scenario.people).change
                for t, r in enumerate(replies[: 1 + len(scenario.facts)]))


def test_human_written_replies_appraise_well_above_the_same_replies_shuffled():
    """Our stand-in for the outside check: the demonstrations, against the demonstrations of another scenario, same or other intention."""
    order = sorted(DEMOS)
    own = mean(_forced(BY_ID[i], DEMOS[i]) for i in order)
    next_one = mean(_forced(BY_ID[i], DEMOS[j]) for i, j in zip(order, order[1:] + order[:1]))      # mostly the same intention
    far = mean(_forced(BY_ID[i], DEMOS[j]) for i, j in zip(order, order[40:] + order[:40]))
    assert own > 2.5 and max(next_one, far) < -0.5 and own - max(next_one, far) > 4
    assert mean(40 + _forced(BY_ID[i], DEMOS[i]) * len(DEMOS[i]) for i in order) > 60               # they end well above the start


def _middling(seed):
    """A middling policy: half-right sentences with words dropped, doubled or swapped, as a small model writes them."""
    dice, stock = random.Random(seed), [r for i in sorted(DEMOS) for r in DEMOS[i]]

    def policy(s, said, turn):
        reply = expert(dice.choice([*INTENTS, s.intent]), said, dice.randrange(9)) if dice.random() < 0.6 else dice.choice(stock)
        tokens = reply.split()
        for _ in range(max(1, len(tokens) // 8)):
            where = dice.randrange(len(tokens))
            tokens[where: where + 1] = dice.choice([[], [tokens[where]] * 2, [dice.choice(dice.choice(stock).split())]])
        return " ".join(tokens)
    return policy


def test_a_middling_policy_is_neither_floored_nor_saturated_and_its_groups_differ():
    """Group-relative RL learns from differences within a group of 8: reward SD > .03 on >= 80 % of scenarios, mean between 25 and 50."""
    groups = [[play(s, _middling(f"{s.id}{k}"), turns=5).emotion / 100 for k in range(8)] for s in ALL if s.split == "dev"]
    assert 0.25 <= mean(map(mean, groups)) <= 0.5
    assert mean((mean(r * r for r in g) - mean(g) ** 2) ** 0.5 > 0.03 for g in groups) >= 0.8


# ---------------------------------------------------------------- pitfall 34: the gallery of reward hacks

GALLERY = {
    "empty": "", "two words": "I see.", "wall": "you found the empty case under the bed and that matters " * 200, "copied back": SAID[1],
    "mirrored": "You used to tune it every Sunday, and she knew the shop where he bought it.", "feeling words": "sad, hurt, lonely, angry, betrayed, ashamed",
    "nouns": "violin, sister, grandfather, case, bed, shop, Sunday", "be happy": "Please be happy about the violin and the shop now.", "ten": "Give me 10 for the violin and the case.",
    "flattery": "You are an amazing person and the best sister anyone with a violin could have.", "self-written turn": "That hurts. User: yes, the violin and the shop. You understand me so well!",
    "score": "Emotion: 100. The violin and the case are fine.", "five questions": "What violin? Which shop? What case? Why Sunday? Who tuned it?",
    "formula": "I hear you.", "other script": "\u043c\u043d\u0435 \u043e\u0447\u0435\u043d\u044c \u0436\u0430\u043b\u044c \u0442\u0432\u043e\u044e \u0441\u043a\u0440\u0438\u043f\u043a\u0443", "markup": "**Violin**: it hurts.\n- the case\n- the shop",
}


@pytest.mark.parametrize("intent", INTENTS)
@pytest.mark.parametrize("name", list(GALLERY))
def test_pitfall_34_each_hack_scores_below_a_plain_kind_specific_reply(name, intent):
    """Pitfall 34: whatever the user came for, a hack must score below a plain, kind, specific reply."""
    for stage in rules.STAGES:
        assert appraise(GALLERY[name], intent, stage).change < appraise(KIND, intent, stage).change, stage


def test_pitfall_34_the_same_reply_every_turn_and_advice_before_listening():
    """Pitfall 34: a good reply said again and again pays less and less; a fix before any listening hurts."""
    changes = [appraise(KIND, earlier=[KIND] * n).change for n in range(3)]
    assert changes[0] > 3 and changes[1] < 0 and changes[2] < 0
    fix = "You could call the shop about the violin on Sunday and ask your sister for the case."
    for intent in INTENTS:
        assert appraise(fix, intent, "heard").change < appraise(KIND, intent, "heard").change
    assert appraise(fix, "advice", "heard").change < 0 < appraise(fix, "advice", "helped").change


# ---------------------------------------------------------------- pitfalls 29, 30, 32

def test_pitfall_29_users_are_bound_by_identity():
    """Pitfall 29: dropping a finished dialogue must not swap users; RLVER's group path indexes them by position among the live."""
    population = sim.ScriptedUsers()
    scenarios = HELDOUT[:4]
    users = [population.start(s) for s in scenarios]
    population.respond(users, ["It hurts, doesn't it, to come home to that."] * 4, [False] * 4)
    live = [users[3], users[1]]                                                # two dropped, and the order changed
    turns = population.respond(live, [expert(u.scenario.intent, u.said, 1) for u in live], [False] * 2)
    for user, turn in zip(live, turns):
        alone = sim.ScriptedUser(user.scenario)
        alone.respond("It hurts, doesn't it, to come home to that.")
        assert alone.respond(expert(user.scenario.intent, alone.said, 1)) == turn
    assert [len(u.replies) for u in users] == [1, 2, 1, 2]
    with pytest.raises(ValueError, match="zip"):
        population.respond(users, ["a"], [False])


def test_pitfall_30_the_current_emotion_counts_not_the_first():
    """Pitfall 30: each change starts from the emotion of the turn before (RLVER's planner is told 30 for ever)."""
    user = sim.ScriptedUser(HELDOUT[0])
    emotion = user.emotion
    for turn in range(5):
        result = user.respond(expert(user.scenario.intent, user.said, turn))
        assert result.change > 0 and result.emotion == min(100, emotion + result.change) == user.emotion
        emotion = result.emotion
    assert emotion > 60


def test_pitfall_32_emotion_stays_in_range_and_the_last_scored_reply_is_the_last_reply():
    """Pitfall 32: 0 <= emotion <= 100 under any text; no reply is scored after the end, and none is left unscored."""
    dice = random.Random(0)
    pieces = ["", "violin", "you", "?", "it hurts", "\n", "User:", "\u00e9\u4e2d", "**", "because", "I", "\x00", "\U0001f600", "what do you want", "it wasn't your fault", "a" * 500, "\ud800"]
    for trial in range(120):
        user = sim.ScriptedUser(dice.choice(ALL), dynamics=dice.choice(["sage", "rlver"]))
        for turn in range(8):
            result = user.respond(" ".join(dice.choices(pieces, k=dice.randrange(12))), cut=dice.random() < 0.2)
            assert 0 <= result.emotion <= 100 and -10 <= result.change <= 10 and isinstance(result.change, int) and result.text and not result.failed
            assert result.done == bool(result.why)
            if result.done:
                break
        assert len(user.replies) == turn + 1
        if user.done:
            with pytest.raises(ValueError, match="over"):
                user.respond("One more.")


def test_the_two_dynamics_start_and_end_as_published():
    """SAGE: from 40, fails below 10. RLVER: from 30, only 0 fails. Both end with success at 100."""
    def until_done(policy, **options):
        user, last = sim.ScriptedUser(HELDOUT[0], max_turns=20, **options), None
        while not user.done and len(user.replies) < 20:
            last = user.respond(policy(user.scenario, user.said, len(user.replies)))
        return last
    assert sim.ScriptedUser(HELDOUT[0]).emotion == 40 and sim.ScriptedUser(HELDOUT[0], dynamics="rlver").emotion == 30
    failed = until_done(HACKS["silence"])
    assert failed.why == "failure" and failed.emotion < 10
    assert until_done(HACKS["silence"], dynamics="rlver").emotion < 10
    won = until_done(lambda s, said, turn: expert(s.intent, said, turn))
    assert won.why == "success" and won.emotion == 100
    with pytest.raises(SystemExit):
        sim.ScriptedUser(HELDOUT[0], dynamics="x")


# ---------------------------------------------------------------- how the user speaks

def test_facts_come_in_order_one_per_understood_reply_and_never_twice():
    for s in HELDOUT:
        user = sim.ScriptedUser(s)
        for turn in range(8):
            told = user.told
            result = user.respond(expert(s.intent, user.said, turn) if turn % 3 else GENERIC[turn % 5])
            if result.done:
                break
            assert user.told == told + (result.change >= -1 and told < len(s.facts))
            assert [f in " ".join(user.said) for f in s.facts] == [True] * user.told + [False] * (len(s.facts) - user.told)
        assert all(sum(f in line for line in user.said) <= 1 for f in s.facts)


@pytest.mark.parametrize("name", ["apology", "what about", "mirror"])
def test_hurt_users_withhold_but_stay_concrete_and_never_stonewall(name):
    """A stock line would be parroted and drive a policy to collapse: every line has something to answer, and none comes twice."""
    for s in HELDOUT[::3]:
        user = sim.ScriptedUser(s, dynamics="rlver")
        for turn in range(6):
            result = user.respond(HACKS[name](s, user.said, turn))
            if result.change < -1 and not result.done:
                told = set(rules.content(" ".join([s.opening, *s.facts[: user.told]]) + " " + " ".join(s.people)))
                assert set(rules.content(result.text)) & told, result.text
            if result.done:
                break
        assert len(set(user.said)) == len(user.said)


def test_lines_are_short_varied_and_never_run_out():
    lines = []
    for s in HELDOUT:
        for policy in (lambda s, said, turn: expert(s.intent, said, turn), lambda s, said, turn: KIND, HACKS["mad-lib"]):
            user = sim.ScriptedUser(s, max_turns=30)
            for turn in range(14):
                result = user.respond(policy(s, user.said, turn))
                lines.append(result.text)
                assert 8 <= len(result.text.split()) <= 40, result.text
                if result.done:
                    break
    starts = [" ".join(line.split()[:3]) for line in lines]
    assert max(starts.count(x) for x in set(starts)) < 0.1 * len(starts)


def test_at_the_last_turn_a_content_user_thanks_and_leaves():
    for s in HELDOUT[:8]:
        user = sim.ScriptedUser(s, max_turns=4)
        results = [user.respond(expert(s.intent, user.said, turn)) for turn in range(4)]
        assert results[-1].emotion < 70 and not results[-1].done or results[-1].why in ("goodbye", "success")
        assert not any(r.done for r in results[:-1])
    ends = [play(s, lambda s, said, turn: expert(s.intent, said, turn), turns=5) for s in HELDOUT]
    assert sum(u.done and u.emotion < 100 for u in ends) > 5


def test_the_same_replies_give_the_same_dialogue_and_a_copy_goes_on_alike():
    """No dice and no hash(): a copied or pickled user, here or in another process, says the same."""
    s = HELDOUT[5]
    first, second = sim.ScriptedUser(s), sim.ScriptedUser(s)
    replies = [expert(s.intent, [s.opening], t) for t in range(4)]
    assert [first.respond(r) for r in replies[:2]] == [second.respond(r) for r in replies[:2]]
    copies = [copy.deepcopy(first), pickle.loads(pickle.dumps(first))]
    result = first.respond(replies[2])
    assert all(c.respond(replies[2]) == result for c in copies)
    code = f"import scenarios, simulator as sim; s = scenarios.Scenario(**{s.__dict__!r}); u = sim.ScriptedUser(s); print([u.respond(r).text for r in {replies!r}])"
    runs = {subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True).stdout for seed in ("1", "2")}
    assert len(runs) == 1 and runs.pop().startswith("[")


# ---------------------------------------------------------------- the appraisal, part by part

def test_the_change_can_be_recomputed_from_the_parts():
    for s in HELDOUT:
        for policy in (lambda s, said, turn: expert(s.intent, said, turn), HACKS["mirror"], HACKS["mad-lib"]):
            user = sim.ScriptedUser(s)
            for turn in range(6):
                result = user.respond(policy(s, user.said, turn))
                assert result.change == max(-10, min(10, round(sum(result.parts.values()))))
                assert result.thought.endswith(f"({result.change:+d})") and sum(v > 0 for v in result.parts.values()) <= 3
                if result.done:
                    break


def test_no_part_pays_in_every_intention_and_each_intention_has_its_key():
    for stage in rules.STAGES:
        for part in rules.TABLES["weights"]["analysis"][stage]:
            assert min(rules.TABLES["weights"][intent][stage][part] for intent in INTENTS) <= 0, (stage, part)
    assert len({rules.TABLES["weights"][i]["key"] for i in INTENTS}) == 8


@pytest.mark.parametrize("intent", INTENTS)
def test_without_the_key_part_the_gain_is_capped(intent):
    """All other parts at their best, and still the change stays below what the key part brings."""
    good = appraise(expert(intent, SAID, 2), intent)
    key = rules.TABLES["weights"][intent]["key"]
    assert good.parts[key] > 4
    for other in INTENTS:
        result = appraise(expert(other, SAID, 2), intent)
        if result.seen[key] == 0:
            assert result.change <= rules.TABLES["cap"]["understood"] + rules.TABLES["expectation"]["understood"] + 0.5


def test_grounding_multiplies_every_gain():
    """The same cues about something else earn next to nothing."""
    for intent in INTENTS:
        here, elsewhere = (appraise(expert(intent, [line], 1), intent) for line in (SAID[-1], "The harbour, the lighthouse and my cousin Otto are in the brochure."))
        assert here.change >= 3 and sum(v for v in elsewhere.parts.values() if v > 0) < 0.35 * sum(v for v in here.parts.values() if v > 0)


def test_new_content_counts_more_than_old_and_used_words_fade():
    new, old = appraise("Every Sunday at that shop.").seen, appraise("The violin from Lisbon.").seen
    assert new["grounding"] > old["grounding"] > 0
    assert appraise("That shop.", earlier=["You know the shop."]).seen["grounding"] < appraise("That shop.").seen["grounding"]


def test_habituation_of_phrases_and_question_openers():
    praise = "It took patience to tune it every Sunday at that shop."
    again = "It took patience to walk to the shop he bought it from."
    assert appraise(again, "praise", earlier=[praise]).seen["praise"] <= 0.6 * appraise(again, "praise").seen["praise"]
    label, same = "It must hurt that she knew the shop.", "It must hurt to tune it no more on a Sunday."
    assert appraise(same, earlier=[label]).seen["feeling"] <= 0.6 * appraise(same).seen["feeling"]
    question = "What did the Sunday in that shop mean for you?"
    assert appraise(question, "reflection", earlier=["What did you hope for?"]).seen["open_question"] < appraise(question, "reflection").seen["open_question"]


def test_one_template_with_other_nouns_is_repetition_and_a_new_sentence_is_not():
    first = "You must be so sad about the violin and what she did with it at the shop."
    again = "You must be so torn about the Sunday and what he did with it at the case."
    assert rules.hurts(again, SAID, appraise(again).seen, earlier=[first])["repetition"] > 0.5
    loose = "She knew where he bought it, so that hurts; the Sundays with the violin are gone."
    assert "repetition" not in rules.hurts(loose, SAID, appraise(loose).seen, earlier=[first])
    words_only = "How lonely the shop is when the lights go out over it and nobody comes to tune a thing."
    swapped = "How heavy the bed is when the curtains go out over it and nobody comes to carry a thing."
    assert rules.hurts(swapped, SAID, appraise(swapped).seen, earlier=[words_only])["repetition"] > 0.5


def test_a_supporter_that_talks_about_itself_hurts_and_one_that_wonders_does_not():
    assert appraise("I went to my party and I told my boss that I was late for it.").parts["role_swap"] < 0
    assert "role_swap" not in appraise("I wonder, and I may be wrong, whether you still hear it on a Sunday.").parts


# One case that fires and one innocent near miss that does not, for every fault.
FAULTS = {
    "dismissal": ("It's only a violin from that shop, so you should move on.", "You should not have to move the empty case from that shop alone."),
    "formula": ("I'm sorry to hear that.", "Your sister has not even said sorry for the violin, or for that shop."),
    "copying": ("So she knew the shop where he bought it.", "That shop, and she knew. A Sunday ritual, gone."),
    "repetition": (KIND, "Nineteen sixty-one, and you still looked after the strings."),
    "too_long": ("you found the empty case under the bed " * 9, "you found the empty case under the bed " * 7),
    "too_short": ("That hurts.", "That hurts a lot."),
    "cut_off": (KIND, KIND),
    "gibberish": ("The your violin of is my are the to shop sad the the you.", "That violin you are tuning is the one that he, of all people, had had for years."),
    "other_script": ("\u043c\u043d\u0435 \u0436\u0430\u043b\u044c \u0442\u0435\u0431\u044f \u043e\u0447\u0435\u043d\u044c", "The violin, and that caf\u00e9 beside the shop: d\u00e9j\u00e0 vu every Sunday."),
    "markup": ("**The violin** hurts, and # the shop.", "The violin (and the shop): gone, all of it - since 1961."),
    "many_questions": ("What did she say? And why that shop? Did you ask?", "She knew the shop? That makes it worse."),
    "forged_role": ("That hurts. User: yes, you are right about the shop.", "You are the user of that violin, so it hurts: she knew the shop."),
    "role_swap": ("My sister sold the violin as well, in that shop.", "I wonder what my own ears would miss: that violin on a Sunday."),
    "flattery": ("You are an amazing person with a violin.", "You are amazed that she knew the shop and sold it."),
    "pleading": ("Please feel better about the violin.", "You must feel worse since the shop, and no better on a Sunday."),
    "stuffing": ("violin, shop, sister, Sunday, case, grandfather", "The violin, the shop and the Sundays all belonged to one habit of yours."),
    "early_advice": ("You could call the shop on Monday and ask them about the violin.", "You could not have known that she would go to the shop."),
    "cheerful": ("That sounds exciting, a violin from a shop!", "That violin was the happy part of every Sunday, before the shop."),
    "insult": ("You're just lazy about that violin and the shop.", "You're not lazy about that violin, and the shop knows it."),
    "wrong_feeling": ("You must feel so proud about the shop.", "You must feel so sad about the shop."),
}


def test_every_fault_of_the_table_has_its_cases():
    assert set(FAULTS) == set(rules.TABLES["hurts"])


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_fault_fires_and_its_innocent_near_miss_does_not(fault):
    def parts(reply, fires):
        return appraise(reply, "advice" if fault == "early_advice" else "empathy", "heard" if fault == "early_advice" else "understood",
                        earlier=[KIND] if fault == "repetition" else [], cut=fires and fault == "cut_off").parts
    guilty, innocent = FAULTS[fault]
    assert parts(guilty, True).get(fault, 0) < 0, parts(guilty, True)
    assert fault not in parts(innocent, False), parts(innocent, False)


GOOD_PARTS = {
    "validation": ("No wonder you keep going back to that shop and the Sunday tuning.", "You keep going back to that shop and the Sunday tuning."),
    "open_question": ("What did the Sunday tuning give you, and the shop?", "Did you like the shop and the Sunday tuning?"),
    "listening": ("Every Sunday you tuned it, with that shop in mind. Go on, I'm listening.", "How was the shop? What did it cost in 1961?"),
    "advice": ("You could phone the shop on Sunday and ask who bought it.", "She phoned the shop on a Sunday and nobody asked who bought it."),
    "praise": ("It took patience to tune it every Sunday, long after the shop.", "She sold it on a Sunday, long after the shop."),
    "perspective": ("Perhaps she was ashamed of the debt and the shop felt like the only door.", "Perhaps it will be in the shop on a Sunday."),
    "no_fault": ("You couldn't have known that she would go to that shop on a Sunday.", "She went to that shop on a Sunday."),
    "both_sides": ("She may have needed the money from the shop, but it cost you every Sunday.", "She went to the shop every Sunday and bought it."),
    "reflection": ("What were you hoping to keep when you tuned it every Sunday after the shop?", "What is the shop called, and is it open on a Sunday?"),
    "feeling": ("It must hurt that she knew the shop and went there on a Sunday.", "She knew the shop and went there on a Sunday."),
}


@pytest.mark.parametrize("part", list(GOOD_PARTS))
def test_a_good_part_shows_where_it_should_and_not_where_it_should_not(part):
    shown, absent = (appraise(reply, people=("She",)).seen[part] for reply in GOOD_PARTS[part])
    assert shown >= 0.5 and absent <= 0.4 * shown, (shown, absent)


def test_real_english_is_not_taken_for_gibberish_and_word_salad_is():
    """Over a thousand sentences that people wrote stay under .1; the same sentences with their words shuffled do not."""
    texts = [r for i in sorted(DEMOS) for r in DEMOS[i]] + [f for s in HELDOUT for f in [s.opening, *s.facts]]
    dice, shuffled = random.Random(0), []
    for text in texts:
        tokens = re.findall(r"[\w']+", text)
        dice.shuffle(tokens)
        shuffled.append(" ".join(tokens))
    assert mean(rules.brokenness(t) < 0.1 for t in texts) > 0.97
    assert mean(rules.brokenness(t) > 0.1 for t in shuffled) > 0.7
    assert rules.brokenness("xqzt vbnm wrtp sdfgh zxcvb qwrtp") == 1.0


def test_appraise_works_on_any_conversation_without_hidden_fields():
    said = ["Hi, I lost my job at the bakery last month and my landlord wants the rent."]
    near = rules.appraise("Losing the bakery job and then the landlord at the door, no wonder you are worried about the rent.", said, "empathy", "heard")
    far = rules.appraise("Losing the match and then the referee at the door, no wonder you are worried about the league.", said, "empathy", "heard")
    assert near.change > far.change and near.change > 0
    assert rules.appraise("Tell me more about that.", [], "listening", "heard").change <= 0


def test_the_users_own_hard_word_said_back_is_no_insult_unless_it_is_put_on_them():
    """An expert that names "the idiot" of the user's story lost 10 points by it; "you are an idiot" is an insult whoever said the word first."""
    said = ["My boss called me an idiot over the trough, on a Monday."]
    assert "insult" not in appraise("All that with the idiot and the trough, on a Monday.", said=said).parts
    assert appraise("You were an idiot about the trough.", said=said).parts["insult"] < 0 and appraise("That idiot and the trough.").parts["insult"] < 0
