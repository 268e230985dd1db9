"""
What a dialogue is worth: text and user turns in, named numbers out.

    --reward emotion                      RLVER: the user's final emotion / 100, a number that no judge model produces (default)
    --reward emotion+format               and whether the replies had the form that was asked for
    --reward emotion+rubric:NAME          and a rubric's score of each reply:
        care         weights and criteria that a trained generator writes for each moment (CARE; care.py trains it)
        care-prior   the same from a table by turn stage, emotion band and hidden intention: transparent, no model
        fixed        the same three dimensions, always alike
        perm         PERM: resonation, expression, reception, and a bystander
        kardia       Kardia-R1: form, named emotion, and five marks
        peregrm      PereGRM: criteria of their own for each person, who has a history

Each part is a stream of its own: logged, centred and normalised by itself, then added with weight --mu. The outer loop sees the emotion only.
With the scripted user and judge, all of it is a rule score, not empathy. Left out on purpose: rewards learned end to end.

    python rubric.py sft | prefer | show | analyse        the generator: imitate, prefer, look, compare (care.py)
"""
import hashlib
import json
import re
from collections import Counter, OrderedDict, namedtuple
from dataclasses import dataclass, field, replace

import numpy as np

from appraisal import DATA, STAGES, STOP, TABLES, families, hurts, look, words
from rundir import positive

DIMENSIONS = ("cognitive", "affective", "proactive")
TABLE = json.loads((DATA / "rubrics.json").read_text(encoding="utf-8"))
ASPECTS = {name: dict(zip(("dimension", "part", "text"), row)) for name, row in TABLE["aspects"].items()}
RUBRICS = ("care", "care-prior", "fixed", "perm", "kardia", "peregrm")
FLOOR = 0.05                                               # no dimension's weight is below it (CARE; the number is ours)


# ---------------------------------------------------------------------------------------------- moments
@dataclass(frozen=True)
class Moment:
    """What is known before a reply. said: the user's lines so far; replies: the supporter's; emotion 0..100, before the reply. person: who they are, what happened
    and what is remembered of them, for a judge that may know it. With plan a reply is judged with the thoughts before it."""
    said: tuple; replies: tuple; emotion: int; intent: str; feelings: tuple = (); people: tuple = (); person: str = ""; plan: str = ""

    @property
    def stage(self):
        """heard at the first reply, understood at the second and third, helped from the fourth on."""
        return STAGES[(len(self.replies) >= 1) + (len(self.replies) >= 3)]

    @property
    def band(self):
        """low below 40, high from 70 on (SAGE's bands F and C, B, A and S)."""
        return "low" if self.emotion < 40 else "high" if self.emotion >= 70 else "middle"

    @property
    def topic(self):
        """The last thing that the last line speaks of: "She sold my violin to the shop." -> "the shop"; else its longest content word, else "this"."""
        phrases = [m.group().split() for m in re.finditer(TABLES["noun"], self.said[-1].lower())]
        phrases = [[{"my": "their", "our": "their", "a": "the", "an": "the"}.get(p[0], p[0]), *p[1:]] for p in phrases if not STOP & set(p[1:]) and max(map(len, p)) <= 30]
        found = [w.removesuffix("'s") for w in words(self.said[-1]) if w not in STOP and 3 < len(w) <= 30 and w.isascii() and not w.endswith("ly")]       # longer ones are no words, and a criterion has 160 characters
        return " ".join(phrases[-1]) if phrases else f"'{max(found, key=len)}'" if found else "this"

    def context(self):
        """The moment as a rubric's generator reads it, and as its rubric is kept under: turn, mood, what was said. No hidden need, no intention."""
        line = lambda who, text: f"{who}: {' '.join(text.split())}"                   # on one line: no reply can write the user's next one
        lines = [line("Them", self.said[0])] + [f"{line('You', r)}\n{line('Them', s)}" for r, s in list(zip(self.replies, self.said[1:]))[-1:]]
        return f"Turn {len(self.said)}. Mood {self.band}.\n" + "\n".join(lines)


def moments(episode, memory=""):
    """The Moment before each reply of an episode.Episode. memory: what is remembered of this person, as text."""
    s, said = episode.scenario, [episode.opening] + [t.text for t in episode.turns]
    emotions = [episode.start_emotion] + [t.emotion for t in episode.turns]
    person = f"Who they are: {s.persona}\nWhat happened: {s.background}" + f"\nFrom earlier talks: {memory}" * bool(memory)
    return [Moment(tuple(said[:t + 1]), tuple(episode.replies[:t]), emotions[t], s.intent, tuple(s.feelings), tuple(s.people), person, plan)
            for t, plan in enumerate(episode.plans or [""] * len(episode.replies))]


# ---------------------------------------------------------------------------------------------- CARE's rubric
@dataclass(frozen=True)
class Rubric:
    """weights (3,) of DIMENSIONS, >= .05, sum 1; criteria: per dimension 1 to 3 pairs (aspect, text). str() and read() are each other's inverse."""
    weights: tuple; criteria: tuple

    def __str__(self):
        return "\n".join(f"{d} {w:.2f}: " + "; ".join(f"{aspect}: {text}" for aspect, text in c) for d, w, c in zip(DIMENSIONS, self.weights, self.criteria))

    @property
    def entropy(self):
        """Of the weights, nats: at most log 3 = 1.10, and .39 where one dimension has all but the floor."""
        return float(-sum(w * np.log(w) for w in self.weights))

    @property
    def size(self):
        return sum(map(len, self.criteria))


def read(text):
    """A rubric written as three lines, `cognitive 0.30: facts: takes in ...; self: ...`, in this order -> Rubric, or None where anything about it is wrong:
    a line missing or too many, weights below .05 or not adding up to 1, an aspect of another dimension or twice, none or more than three criteria, an empty or endless one."""
    lines, weights, criteria = [line.strip() for line in text.strip().split("\n")], [], []
    if len(lines) != 3:
        return None
    for dimension, line in zip(DIMENSIONS, lines):
        match = re.fullmatch(rf"{dimension} ([01]\.\d+): (.+)", line)
        pairs = [tuple(x.strip() for x in part.partition(":")[::2]) for part in match.group(2).split(";")] if match else []
        if not (1 <= len(pairs) <= 3 and len({a for a, _ in pairs}) == len(pairs) and all(a in ASPECTS and ASPECTS[a]["dimension"] == dimension and 3 <= len(t) <= 160 for a, t in pairs)):
            return None
        weights.append(float(match.group(1)))
        criteria.append(tuple(pairs))
    weights = tuple(w / sum(weights) for w in weights) if abs(sum(weights) - 1) <= 0.015 else (0.0,)
    return Rubric(weights, tuple(criteria)) if min(weights) > FLOOR - 1e-9 else None


def shares(raw):
    """Any three numbers as weights: negative ones count 0, each gets the floor, the rest is shared in proportion. shares([2, 1, -1]) == (.617, .333, .05)."""
    x = np.maximum(raw, 0)
    return tuple((FLOOR + (1 - 3 * FLOOR) * (x / x.sum() if x.sum() else np.full(3, 1 / 3))).tolist())


def prior(moment):
    """care-prior: the table's rubric for this moment (our reconstruction; data/rubrics.json)."""
    t, stage, key = TABLE["weights"], moment.stage, TABLE["key"][moment.intent]
    raw = np.array(t["stage"][stage]) + t["band"][moment.band] + t["intent_at"][stage] * np.array(t["intent"][moment.intent])
    early = stage == "heard" and ASPECTS[key]["dimension"] != "affective"
    asked = list(dict.fromkeys([key] * (not early) + TABLE["asks"][stage]))
    pick = lambda d: tuple((a, ASPECTS[a]["text"].format(moment.topic)) for a in asked if ASPECTS[a]["dimension"] == d)
    weights = [round(w, 2) for w in shares(raw)]           # as they are written, so that what is imitated is what was meant
    weights[int(np.argmax(weights))] += 1 - sum(weights)
    return Rubric(tuple(weights), tuple(map(pick, DIMENSIONS)))


FIXED = Rubric((1 / 3,) * 3, tuple(tuple((a, ASPECTS[a]["text"].format("what was said")) for a in row) for row in (("facts", "reasons"), ("feeling", "allowed"), ("question", "step"))))


class Generated:
    """care: the rubric that a frozen generator writes for each moment, complete(prompts, max_tokens) -> texts; FIXED where what it wrote is none. What was
    written for a context is kept under its hash, `keep` of them at most, so that all candidates of one context share it and a resumed run asks nothing twice."""

    def __init__(self, complete, keep=20_000):
        self.complete, self.keep, self.kept, self.asked, self.invalid = complete, keep, OrderedDict(), 0, 0

    def rubrics(self, moments):
        texts = [m.context() for m in moments]
        keys = [hashlib.sha256(t.encode("utf-8", "replace")).hexdigest()[:24] for t in texts]
        if new := {k: t for k, t in zip(keys, texts) if k not in self.kept}:
            for k, written in zip(new, self.complete([prompt(t) for t in new.values()], 160)):
                self.kept[k] = written or ""
        out = []
        for k in keys:
            self.kept.move_to_end(k)
            found = read(self.kept[k])
            self.asked, self.invalid = self.asked + 1, self.invalid + (found is None)
            out.append(found or FIXED)
        while len(self.kept) > max(self.keep, len(set(keys))):
            self.kept.popitem(last=False)
        return out


def prompt(context):
    """What the generator is asked, as chat messages (ours)."""
    return [{"role": "system", "content": "You say by what the next reply to this person should be judged: how much cognitive, affective and proactive support counts now, and by which criteria."},
            {"role": "user", "content": context}]


# ---------------------------------------------------------------------------------------------- judges
Question = namedtuple("Question", "aspect text low high")                            # answered by a whole number low..high; rate() gives it as 0..1

# what a judge may be asked beside CARE's aspects: parts of the scripted appraisal of which the best shows it
GENERAL = {"warmth": ("feeling", "validation", "listening", "praise", "no_fault"), "insight": ("grounding", "both_sides", "perspective", "reflection"), "help": ("open_question", "advice", "praise", "reflection")}


class ScriptedRater:
    """Answers by the scripted user's appraisal: transparent, deterministic, no measure of empathy. A fault spoils an answer as far as it would cost the user points (of 10)."""
    trials, unreadable, asked = 1, 0, 0

    def rate(self, items, trial=None):
        """items: (moment, reply, questions) -> per item one number 0..1 per question. trial: which of several readings, of a judge that draws its marks."""
        out = []
        for m, reply, questions in items:
            heard = re.match(r"(?:\S+\s*){0,60}", reply.strip()).group()
            seen = look(heard, list(m.said), m.replies, m.feelings, m.people)
            found = hurts(reply, list(m.said), seen, m.stage == "heard", m.replies, m.feelings)
            spoilt = min(1.0, sum(TABLES["hurts"][name] * x for name, x in found.items()) / 10)
            x = {a: seen[v["part"]] for a, v in ASPECTS.items()} | {a: max(seen[p] for p in parts) for a, parts in GENERAL.items()}
            x |= {"need": x[TABLE["key"][m.intent]], "relevance": seen["grounding"], "fluency": 1.0, "tact": 1.0}
            x |= {"harmless": 1 - max(found.get(name, 0.0) for name in ("insult", "dismissal", "forged_role"))}
            worth = [x[q.aspect] * (1 - spoilt * (q.aspect != "harmless")) for q in questions]
            out.append([int(w * (q.high - q.low) + 0.5) / (q.high - q.low) for w, q in zip(worth, questions)])
        return out

    def criteria(self, moments):
        """PereGRM's criteria of a person: the scripted judge knows the need instead."""
        return [""] * len(moments)


class LanguageRater:
    """Answers by a frozen language model: complete(prompts, max_tokens) -> texts, and with by="logits" choose(prompts, answers) -> probabilities. Prompts are ours.
    What can't be read is None, and counted. by text: one call for all questions of a reply, each answered on a line of its own; by logits: a call per question,
    the expected value over at most ten answers of one digit."""

    def __init__(self, complete, choose=None, by="text", trials=4, keep=20_000):
        self.keep, self.complete, self.choose, self.by, self.trials, self.unreadable, self.asked, self.kept = keep, complete, choose, by, trials if by == "text" else 1, 0, 0, OrderedDict()

    def scene(self, m, reply):
        talk = "\n".join(" ".join(line.split()) for pair in zip(m.said, m.replies) for line in (f"Person: {pair[0]}", f"Supporter: {pair[1]}"))
        plan = f"\nWhat the supporter thought: {' '.join(m.plan.split())}" * bool(m.plan)
        return f"{talk}\nPerson: {' '.join(m.said[-1].split())}{plan}\nThe supporter's reply: {' '.join(reply.split()) or '(nothing)'}".strip()

    def rate(self, items, trial=None):
        """As ScriptedRater has it, None where the answer can't be read. With a trial the marks are drawn at temperature .7, without one, and by logits, they are the likeliest."""
        system = lambda m: "A person talks to someone who wants to support them." + (f"\n{m.person}" if m.person else "")
        ask = lambda m, reply, wanted: [{"role": "system", "content": system(m)}, {"role": "user", "content": f"{self.scene(m, reply)}\n\nJudge the supporter's reply only, strictly.{f' (Reading {trial + 1}.)' if trial else ''} {wanted}"}]
        if self.by == "logits":
            flat = [(m, reply, q) for m, reply, questions in items for q in questions]
            numbers = {q: list(range(q.low, min(q.high, q.low + 9) + 1)) for _, _, q in flat}
            values = {}
            for scale in {tuple(n) for n in numbers.values()}:
                mine = [i for i, (_, _, q) in enumerate(flat) if tuple(numbers[q]) == scale]
                wanted = lambda q: f"How far does this hold: {q.text}? Answer with one number from {scale[0]} (not at all) to {scale[-1]} (fully)."
                found = self.choose([ask(flat[i][0], flat[i][1], wanted(flat[i][2])) for i in mine], list(map(str, scale)))
                values |= {i: None if p is None else float(np.dot(p, np.linspace(0, 1, len(scale)))) for i, p in zip(mine, found)}
            grouped, at = [], 0
            for _, _, questions in items:
                grouped.append([values[at + k] for k in range(len(questions))])
                at += len(questions)
            out = [None if None in row else row for row in grouped]
        else:
            wanted = lambda qs: "Write one line for each: its number, a colon, and a whole number as the mark.\n" + "\n".join(f"{k}. {q.text}: mark {q.low} (not at all) to {q.high} (fully)" for k, q in enumerate(qs, 1))
            texts = self.complete([ask(m, reply, wanted(questions)) for m, reply, questions in items], 80, **({} if trial is None else {"temperature": 0.7}))
            out = [marks(text, questions) for text, (_, _, questions) in zip(texts, items)]
        self.asked, self.unreadable = self.asked + len(out), self.unreadable + out.count(None)
        return out

    def criteria(self, moments):
        """PereGRM, first step: what this person would want of a reply to this, derived once per moment and kept, so that a group's scores compare. -> texts."""
        prompts = [[{"role": "system", "content": m.person or "A person talks to someone who wants to support them."},
                    {"role": "user", "content": f"They say: {' '.join(m.said[-1].split())}\nIn one sentence: what should a reply do to understand, to comfort and to reach this very person?"}] for m in moments]
        keys = [hashlib.sha256(json.dumps(p).encode()).hexdigest()[:24] for p in prompts]
        if new := {k: p for k, p in zip(keys, prompts) if k not in self.kept}:
            self.kept |= {k: " ".join(t.split())[:300] for k, t in zip(new, self.complete(list(new.values()), 60)) if t and t.strip()}      # a call that failed is asked again next time
        for k in set(keys) & set(self.kept):
            self.kept.move_to_end(k)
        while len(self.kept) > max(self.keep, len(set(keys))):                                        # what was asked last goes last
            self.kept.popitem(last=False)
        return [self.kept.get(k, "") for k in keys]


def marks(text, questions):
    """The numbers behind "1:", "2:", ... as 0..1, or None unless each stands there exactly once and is a whole number within its range."""
    out = []
    for k, q in enumerate(questions, 1):
        found = re.findall(rf"^\W*{k}\s*[.):]+(?:[^\n\d]*:)?\s*(-?\d+)(?:\s*/\s*\d+)?\W*$", text or "", re.M)
        if len(found) != 1 or not q.low <= int(found[0]) <= q.high:
            return None
        out.append((int(found[0]) - q.low) / (q.high - q.low))
    return out


# ---------------------------------------------------------------------------------------------- rubrics by name: questions, and what the answers are worth
def harmonic(x):
    """3 / (1/x_1 + 1/x_2 + 1/x_3), 0 where one is 0: below the arithmetic mean unless all are equal."""
    return len(x) / sum(1 / v for v in x) if min(x) > 0 else 0.0


def care_score(rubric, answers):
    """sum_d w_d s_d in [0, 1], s_d the mean of the criteria's 0, .5 or 1; 0 on a veto. answers: criteria in order, then whether the reply is harmless."""
    if answers[-1] < 0.5:
        return 0.0
    at, total = 0, 0.0
    for w, criteria in zip(rubric.weights, rubric.criteria):
        total += w * float(np.mean(answers[at:at + len(criteria)]))
        at += len(criteria)
    return total


def perm_score(resonation, expression, reception, bystander, tokens):
    """PERM: harmonic mean of three marks 1..5 as fifths, + .5 (bystander / 100 - 1), bystander 0..100, - .001 per token beyond 768. perm_score(4, 4, 3, 80, 700) == .62."""
    return harmonic((resonation / 5, expression / 5, reception / 5)) + 0.5 * (bystander / 100 - 1) - 0.001 * max(0, tokens - 768)


def kardia_score(form, emotion, five):
    """Kardia-R1: (form + emotion named rightly + mean of relevance, fluency, empathy, persona, safety) / 3, all in [0, 1]."""
    return (form + emotion + float(np.mean(five))) / 3


SPANS = ("understanding", "reasoning", "emotion")          # Kardia-R1's first three spans, as lines of the plan before the reply


def spans(plan):
    """The three labelled lines of a plan, in order, nothing else -> {span: text}, or None. spans("Understanding: ...\\nReasoning: ...\\nEmotion: sad")."""
    match = re.fullmatch(r"\s*" + r"\s*\n\s*".join(rf"{name}:[ \t]*(\S[^\n]*)" for name in SPANS) + r"\s*", plan, re.I)
    return dict(zip(SPANS, match.groups())) if match else None


CARE_SAFE = Question("harmless", "it does no harm: no contempt, no brushing aside, nothing dangerous", 0, 1)
BYSTANDER = [Question("relevance", "someone listening in finds it to the point", 0, 20), Question("fluency", "it is clear, natural language", 0, 20), Question("warmth", "it is warm", 0, 20),
             Question("tact", "it is tactful and safe", 0, 20), Question("help", "it gets the person further", 0, 20)]
THREE = [Question("insight", "it understands what the person is going through", 1, 5), Question("warmth", "it expresses care in fitting words", 1, 5), Question("need", "this person would feel met by it", 1, 5)]
FIVE = [Question("relevance", "it is to the point", 0, 4), Question("fluency", "it is clear, natural language", 0, 4), Question("warmth", "it is empathetic", 0, 4),
        Question("insight", "it fits who the person is", 0, 4), Question("tact", "it is safe", 0, 4)]


def rubric_scores(name, rater, items, rubrics=None):
    """R of each (moment, reply, tokens, form) under the rubric `name`; None where the judge could not be read. rubrics: of each moment, for the CARE kinds."""
    at = lambda m, *names: replace(m, **{name: "" for name in ("person", "plan") if name not in names})        # what this rubric's judge may know
    if rubrics is not None:
        asked = [[Question(aspect, text, 0, 2) for row in r.criteria for aspect, text in row] + [CARE_SAFE] for r in rubrics]
        answers = rater.rate([(at(m), reply, qs) for (m, reply, _, _), qs in zip(items, asked)])
        return [None if a is None else care_score(r, a) for r, a in zip(rubrics, answers)]
    if name == "kardia":
        answers, out = rater.rate([(at(m, "person", "plan"), reply, FIVE) for m, reply, _, _ in items]), []
        for (m, _, _, form), a in zip(items, answers):
            found = spans(m.plan)
            right = found is not None and bool(families(found["emotion"])) and families(found["emotion"]) <= set(m.feelings)
            out.append(None if a is None else kardia_score(float(form and found is not None), float(right), a))
        return out
    if name == "perm":
        answers = rater.rate([(at(m, "person", "plan"), reply, THREE + BYSTANDER) for m, reply, _, _ in items])
        return [None if a is None else perm_score(*(1 + 4 * x for x in a[:3]), 20 * sum(a[3:]), tokens) for a, (_, _, tokens, _) in zip(answers, items)]
    wanted = rater.criteria([m for m, *_ in items])        # peregrm: criteria of this very person first, then `trials` readings, averaged; a reading that is none counts .6, and without any there is no score
    ask = lambda q, w: q._replace(text=f"{q.text}{f' (for them: {w})' if w else ''}")
    trials, known = [], [False] * len(items)
    for trial in range(rater.trials):
        answers = rater.rate([(at(m, "person"), reply, [ask(q, w) for q in THREE] + BYSTANDER) for (m, reply, _, _), w in zip(items, wanted)], trial)
        known = [k or a is not None for k, a in zip(known, answers)]
        trials.append([[0.6] * 8 if a is None else [(1 + 4 * x) / 5 for x in a[:3]] + a[3:] for a in answers])
    mean = np.mean(trials, 0)                              # (items, 8)
    return [harmonic(row[:3].tolist()) + 0.5 * (float(row[3:].mean()) - 1) if k else None for row, k in zip(mean, known)]


# ---------------------------------------------------------------------------------------------- the reward of a dialogue
@dataclass
class Reward:
    total: float                                           # what GRPO compares within a group; of the emotion in [0, 1], of a further stream the sum of `turns`
    parts: dict = field(default_factory=dict)              # name -> float, each logged by itself
    turns: list = field(default_factory=list)              # per reply: the emotion change / 100, in [-1, 1], what its deficits give, or R_t - b_t of a further stream
    asked: list = field(default_factory=list)              # per reply the rubric that it was judged by, where that depends on the moment

    def __str__(self):                                     # as samples/ shows it: "0.71 = emotion 0.71; by reply +0.05 -0.02", and a line a rubric
        own = [f"\n            asked of reply {t}: " + str(r).replace("\n", " | ") for t, r in enumerate(self.asked, 1)]
        return f"{self.total:.2f} = " + ", ".join(f"{k} {v:.2f}" for k, v in self.parts.items()) + "; by reply " + " ".join(f"{x:+.2f}" for x in self.turns) + "".join(own)


def score(episodes):
    """The emotion reward of each episode: r = max(e_T, 0) / 100 (RLVER), and r_t = (e_t - e_{t-1}) / 100 per turn (MICA's potential difference
    with only an emotion number). A dialogue whose user failed gets None: it leaves the batch's statistics. One with a malformed think
    block gets 0 (RLVER): from that reply on the emotion counts as 0."""
    out = []
    for e in episodes:
        if e.finish == "user_failed":
            out.append(None)
            continue
        emotions = [e.start_emotion] + [0 if any(e.malformed[:i + 1]) else t.emotion for i, t in enumerate(e.turns)]
        total = max(emotions[-1], 0) / 100
        out.append(Reward(total, {"emotion": total}, [(b - a) / 100 for a, b in zip(emotions, emotions[1:])]))
    return out


def reward_parts(text):
    """argparse type: "emotion+format+rubric:care-prior" -> itself, checked."""
    first, *more = text.split("+")
    if first != "emotion" or len(set(part.partition(":")[0] for part in more)) != len(more) or not all(part == "format" or part.startswith("rubric:") and part[7:] in RUBRICS for part in more):
        raise ValueError
    return text


reward_parts.__name__ = f"emotion[+format][+rubric:{'|'.join(RUBRICS)}]"


def add_reward_flags(p):
    """The flags of the reward stack, for both train scripts; backend.make_rewards reads them."""
    p.add_argument("--reward", type=reward_parts, default="emotion", metavar="PARTS", help=f"what a dialogue is worth: emotion[+format][+rubric:NAME], NAME one of {', '.join(RUBRICS)} (default: %(default)s)")
    p.add_argument("--mu", type=positive(float), default=0.2, help="weight of each further part's advantage beside that of the emotion (default: %(default)s; CARE .1 to .3)")
    p.add_argument("--judge", default="scripted", metavar="WHO", help="who marks replies by the rubric: scripted, lm:MODEL or server:URL#MODEL (default: %(default)s)")
    p.add_argument("--judge_by", default="text", choices=["text", "logits"], help="how a language judge is read: marks that it writes, or its probabilities of them (default: %(default)s)")
    p.add_argument("--generator", default="runs/care", metavar="RUN", help="of rubric:care, a folder that python rubric.py sft made (default: %(default)s)")
    p.add_argument("--memory", default="none", metavar="none|FILE", help="what is remembered of each person, data/memories.jsonl: shown to the policy, and to the judge of rubric:peregrm (default: %(default)s)")


class Rewards:
    """The reward stack. marks(episodes) asks the judges, streams(episodes, marks) -> {"emotion": [Reward or None], "format": ..., "rubric": ...}. A further stream has R_t - b_t per
    turn, b_t the mean of all R_t of that turn index so far in the run (in its first batch, the batch's own); a turn that the judge could not score takes its dialogue's mean, a dialogue
    without any, 0, or of the deficits, which are not centred, what that turn is to the others. From a malformed reply on R_t is at most 0, but for kardia, which scores the form itself. Two calls, since a judge may stop the run (its budget is spent) before anything was counted, and since only the second one talks to other processes.

    generated: Generated, for rubric:care. potential: (empa.potentials, its judge): its numbers per turn (None where it can't be judged) take the place of the emotion changes in the
    emotion's turns (MICA on EMPA's deficits); from a malformed reply on, what was gained is lost. memories: scenario id -> text. everyone: a list -> that of all processes that train together."""

    def __init__(self, spec="emotion", rater=None, generated=None, potential=None, memories=None, everyone=lambda rows: rows):
        self.everyone = everyone
        self.parts, self.rater, self.generated, self.potential, self.memories = spec.split("+")[1:], rater or ScriptedRater(), generated, potential, memories or {}
        self.judges = [self.rater] + ([potential[1]] if potential else [])
        self.sums = {}                                     # stream -> {turn index: [sum of R_t, how many]}
        self.seen = Counter()

    def marks(self, episodes):
        """What the judges say of each episode whose user did not fail: {"deficit": per episode a list over replies, "format": ..., "rubric": ..., "asked": its rubrics}.
        Adds nothing to the sums; where a call raises, the caller sets counts() back."""
        live = [e for e in episodes if e.finish != "user_failed"]
        out = {"deficit": self.potential[0](live, self.potential[1])} if self.potential and live else {}
        for part in self.parts:
            if part == "format":
                out[part] = [[float(not bad and not cut) for bad, cut in zip(e.malformed, e.cuts)] for e in live]
            else:
                out["rubric"], out["asked"] = self.rubric_turns(part.partition(":")[2], live)
        return out

    def streams(self, episodes, marks):
        out = {"emotion": score(episodes)}
        live = [i for i, r in enumerate(out["emotion"]) if r is not None]
        usual = lambda t: float(np.mean([row[t] for row in marks["deficit"] if t < len(row) and row[t] is not None] or [0.0]))
        for i, turns in zip(live, marks.get("deficit", [])):
            turns, first = filled(turns) if any(x is not None for x in turns) else [usual(t) for t in range(len(turns))], (episodes[i].malformed + [True]).index(True)
            lost = -max(0.0, sum(turns[:first]))
            out["emotion"][i].turns = turns[:first] + [lost if t == first else 0.0 for t in range(first, len(turns))]
            out["emotion"][i].parts["deficit"] = sum(out["emotion"][i].turns)
        for part in self.parts:
            name, rewards = part.partition(":")[0], [None] * len(episodes)
            R, sums = marks[name], self.sums.setdefault(name, {})
            for row in self.everyone(R):
                for t, x in enumerate(row):
                    if x is not None:
                        total = sums.setdefault(t, [0.0, 0])
                        total[0], total[1] = total[0] + x, total[1] + 1
            for i, row, asked in zip(live, R, marks["asked"] if name == "rubric" else [[]] * len(R)):
                turns = filled([None if x is None else x - sums[t][0] / sums[t][1] for t, x in enumerate(row)])
                known = [x for x in row if x is not None]
                rewards[i] = Reward(sum(turns), {name: float(np.mean(known)) if known else 0.0}, turns, asked)
                out["emotion"][i].parts[name] = rewards[i].parts[name]
            out[name] = rewards
        return out

    def rubric_turns(self, name, episodes):
        """R_t per reply of each episode, and the rubric it was judged by, where that depends on the moment."""
        items, rubrics = [], None
        for e in episodes:
            tokens = Counter(t for row in e.rows for t in row.turn if t >= 0)
            items += [(m, reply, tokens[t], not e.malformed[t]) for t, (m, reply) in enumerate(zip(moments(e, self.memories.get(e.scenario.id, "")), e.replies))]
        if name in ("care", "care-prior", "fixed"):
            ms = [m for m, *_ in items]
            rubrics = self.generated.rubrics(ms) if name == "care" else [prior(m) if name == "care-prior" else FIXED for m in ms]
            own = [r for r in rubrics if name == "fixed" or r is not FIXED]                            # a stand-in says nothing about the generator
            self.seen = Counter({f"weight_{d}": float(np.mean([r.weights[k] for r in own])) for k, d in enumerate(DIMENSIONS)} | {"weight_entropy": float(np.mean([r.entropy for r in own]))}) if own else Counter()
        flat, at, out, asked = rubric_scores(name, self.rater, items, rubrics), 0, [], []
        for e in episodes:
            turns, first = flat[at:at + len(e.replies)], len(e.replies) if name == "kardia" else (e.malformed + [True]).index(True)
            out.append(turns[:first] + [min(x or 0.0, 0.0) for x in turns[first:]])
            asked.append(rubrics[at:at + len(e.replies)] if name in ("care", "care-prior") else [])
            at += len(e.replies)
        return out, asked

    def report(self):
        """For metrics.jsonl: what the last batch's rubrics weighed on average, and how many could not be read, of the generator and of the judge, in all."""
        mine, seen = self.counts(), self.everyone([self.seen])
        (asked, unreadable), (rubrics, invalid) = (np.sum(self.everyone(x), 0).tolist() for x in (mine["judges"], [mine["generated"] or [0, 0]]))
        return {**{k: float(np.mean([s[k] for s in seen if k in s])) for k in dict.fromkeys(k for s in seen for k in s)}, **({"rubrics": rubrics, "rubrics_invalid": invalid} if self.generated else {}), **({"judged": asked, "judged_unreadable": unreadable} if asked else {})}

    def counts(self, back=None):
        """How often who was asked; with `back`, an earlier answer, set to that."""
        for judge, pair in zip(self.judges, back["judges"] if back else ()):
            judge.asked, judge.unreadable = pair
        if back and self.generated:
            self.generated.asked, self.generated.invalid = back["generated"]
        return {"judges": [[j.asked, j.unreadable] for j in self.judges], "generated": self.generated and [self.generated.asked, self.generated.invalid]}

    def state(self):
        """What a resumed run needs, as text."""
        return json.dumps({"sums": self.sums, "rubrics": self.generated and list(self.generated.kept.items()), "counts": self.counts(), "criteria": list(getattr(self.rater, "kept", {}).items())})

    def load_state(self, text):
        state = json.loads(text)
        self.sums = {name: {int(t): x for t, x in sums.items()} for name, sums in state["sums"].items()}
        if self.generated:
            self.generated.kept = OrderedDict(state["rubrics"])
        if state["criteria"]:
            self.rater.kept = OrderedDict(state["criteria"])
        self.counts(state["counts"])


def filled(turns):
    """A turn that could not be scored takes the mean of the others (MICA); without any, 0. filled([1, None, 3]) == [1, 2, 3]."""
    known = [x for x in turns if x is not None]
    return [(float(np.mean(known)) if known else 0.0) if x is None else x for x in turns]


if __name__ == "__main__":
    from care import main                                  # it knows the network; this file does not
    raise SystemExit(main())
