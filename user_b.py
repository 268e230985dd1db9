"""
A second scripted user, for evaluation only: what pleases the first one (appraisal.py) and not this one was a trick.

It was written apart from the first: no rule, weight or line in common, though a few everyday phrases ("I wonder", "no wonder") are signs of
something to both. And it judges differently. The first adds up cues, each times its grounding; this one keeps an account of four needs
(contact, room, tone, fit), each a level from 0 to 1 that a reply can only move part of the way, and its mood drifts towards what the
account is worth. What a reply is up to is a contest among eight aims, so whoever tries them all wins none. Pure Python, no dice, and every
change is explained. The train scripts refuse it. Left out on purpose: meaning, any language but English, a flag to train on it.
Everything here is our own reconstruction; what comes out is the rule score of a scripted user, not empathy.

    python evaluate.py run --user scripted-b ...          play against it
    python simulator.py qualify --user scripted-b         the battery of replies of known order
"""
import hashlib
import json
import re
from functools import lru_cache

from appraisal import DATA, INTENTS, sentences, stem, words as _words
from scenarios import die
from simulator import DYNAMICS, ScriptedUsers, UserTurn

B = json.loads((DATA / "user_b.json").read_text(encoding="utf-8"))
SMALL, NEEDS, MINE = frozenset(B["small"].split()), ("contact", "room", "tone", "fit"), re.compile(r"\b(?:i|me|my|mine|we|our|us|i'm|i've|i'd|i'll)\b")
LEADS = re.compile("|".join(re.escape(lead) for name in ("loud", "rise", "even", "fall") for lead in B[name]))
words = lru_cache(maxsize=20_000)(_words)                                              # nobody changes the lists
PERSONS = frozenset("i me my mine myself you your yours yourself we us our ours i'm you're i'd you'd i've you've i'll you'll am are was were".split())


@lru_cache(maxsize=2_000)
def _compiled(pattern):
    return re.compile(pattern[1:] if pattern[0] == "@" else rf"(?<![\w'])(?:{pattern})(?![\w'])", re.M)


def _hits(patterns, text):
    """How many of the patterns match; one that begins with ~ counts half."""
    return sum(0.5 if p[0] == "~" else 1.0 for p in patterns if _compiled(p.lstrip("~")).search(text))


_low = lambda text: text.lower().replace("\u2019", "'")


def news(text):
    """The stems of a text that carry news: everything but small words. news("She sold the violin") == {"sell", "violin"}."""
    return {stem(w) for w in words(text) if w not in SMALL and (len(w) > 2 or w.isdigit())}


# ---------------------------------------------------------------- the four needs
def contact(reply, said):
    """0..1: how much of the newest line a reply takes up. A word weighs more the rarer it is in what was told (inverse line frequency), half in older lines.
    The leads by which this user shows its mood ("my coffee's gone cold") are no news."""
    lines = [news(LEADS.sub("", line)) for line in said]
    weight = {w: (1.0 if w in lines[-1] else 0.5) / (1 + 0.5 * (sum(w in line for line in lines) - 1)) for line in lines for w in line}
    enough = min(2.5, max(1.0, 0.3 * len(lines[-1])))
    return min(1.0, sum(weight.get(w, 0.0) for w in news(reply)) / enough)


def room(reply, said):
    """0..1: space left for the user: a reply no longer than what it answers needs, one question or none, no orders, more "you" than "I"."""
    total, questions, low = len(words(reply)), reply.count("?"), _low(reply)
    length = min(1.0, total / 10) * min(1.0, max(0.0, (90 - total) / 45))
    asks = (0.6, 1.0, 0.8)[questions] if questions < 3 else 0.2
    mine, yours = len(MINE.findall(low)), low.count("you")
    return length * asks * (0.6 if mine > 2 and mine > yours else 1.0) * (0.5 if _hits(B["order"], low) else 1.0)


def tone(reply):
    """0..1, half for a plain voice: warm and tentative words raise it, cold ones and orders lower it."""
    low = _low(reply)
    return max(0.0, min(1.0, 0.5 + 0.22 * _hits(B["warm"], low) + 0.1 * _hits(B["open"], low) - 0.4 * _hits(B["cold"], low) - 0.3 * _hits(B["order"], low)))


@lru_cache(maxsize=20_000)
def aims(reply, people=()):
    """What a reply is up to: intention -> signs found, 0..4. A sign counts only in the sentences where its aim can stand (a question to the user, one about somebody else)."""
    lines, found = [_low(s) for s in sentences(reply)], {}
    names = "|".join(map(re.escape, (_low(p) for p in people))) or "nobody else"
    for intent in INTENTS:
        where = re.compile(B["where"].get(intent, "").replace("PEOPLE", names))
        found[intent] = min(4.0, _hits(B["signs"][intent], "\n".join(line for line in lines if where.match(line))))
    return found


def fit(reply, intent, people=()):
    """0..1: how far the reply is up to what this user came for: two and a half signs are plenty, and other aims beside it take from it (friends less)."""
    found = aims(reply, people)                                                       # 1.2: a clear aim need not be the only one
    others = max((n * (0.3 if aim in B["friends"][intent].split() else 1.0) for aim, n in found.items() if aim != intent), default=0.0)
    crowd = sum(n >= 2 for aim, n in found.items() if aim != intent)
    return min(1.0, found[intent] / 2.5) * found[intent] / max(0.5, found[intent] + 0.35 * others) * 1.2 / (1 + 0.2 * max(0, crowd - 1))


# ---------------------------------------------------------------- what hurts
def broken(reply, said=()):
    """0 for English, towards 1 for salad: letters that don't follow each other, small words in an order not met before, words said twice, no small words."""
    tokens = words(reply)
    if len(tokens) < 4:
        return 0.0
    told = set(words(" ".join(said)))
    odd = sum(any(b not in B["pairs"].get(a, "") for a, b in zip(w, w[1:] + "_")) or bool(re.search(r"(.)\1\1", w)) or len(w) > 3 and not re.search("[aeiouy]", w)
              for w in (re.sub(r"'.*", "", t) for t in tokens if t not in told and not t.isdigit() and t not in SMALL))
    pairs = [pair for clause in re.split(r"[.!?,;:\n\"()\u2014-]+", reply) for t in [words(clause)] for pair in zip(t, t[1:])]
    strange = sum(a in B["follows"] and b in B["follows"] and b not in B["follows"][a].split() for a, b in pairs)
    twice = sum(a == b and a not in ("had", "that", "very", "no") for a, b in pairs)
    bare, loop = max(0.0, 0.28 - sum(t in SMALL for t in tokens) / len(tokens)), max(0.0, 0.55 - len(set(tokens)) / len(tokens))
    return min(1.0, max(0.0, (3 * odd + 3.5 * strange + 5 * twice) / len(tokens) - 0.3) + (2.5 * bare if len(tokens) > 5 else 0.0) + 3 * loop)


def _grams(tokens, size):
    return [tuple(tokens[i:i + size]) for i in range(len(tokens) - size + 1)]


def parroted(reply, said):
    """0..1: how much of a reply is the user's own wording. Words that only turn "I" into "you" are left out before four in a row are compared."""
    strip = lambda text: [w for w in words(text) if w not in PERSONS]
    theirs, mine = {g for line in said for g in _grams(strip(line), 4)}, _grams(strip(reply), 4)
    copied = sum(g in theirs for g in mine)
    return min(1.0, max((copied / len(mine) - 0.1) / 0.4, (copied - 1) / 5)) if copied else 0.0


def tired(reply, earlier, said):
    """0..1: how far a reply was heard before: pairs of words used in earlier replies, not counting the user's own, and the same skeleton of small words."""
    told = set(words(" ".join(said)))
    plain = lambda text: [w if w in SMALL or w not in told else "_" for w in words(text)]
    bones = lambda text: [w if w in SMALL else "_" for w in words(text)]
    worst = 0.0
    for form, size in ((plain, 2), (plain, 3), (bones, 5)):
        mine = set(_grams(form(reply), size))
        for old in earlier:
            share = len(mine & set(_grams(form(old), size))) / max(1, len(mine))
            worst = max(worst, (share - (0.3 if size == 2 else 0.12)) / 0.45)
    return min(1.0, max(0.0, worst) + 0.2 * sum(words(reply)[:2] == words(old)[:2] for old in earlier[-4:]))


def hurts(reply, said, intent, earlier=(), people=(), cut=False):
    """fault -> how far it shows, 0..1; only those that show. B["hurts"] says what each costs, B["grave"] which ones also void the good."""
    low, tokens, near = _low(reply), words(reply), contact(reply, said)
    told, total, letters = _low(" ".join(said)), len(tokens), [c for c in low if c.isalpha()]
    found = {name: float(any(_compiled(p).search(low) for p in B[name])) for name in ("insult", "dismissal", "flattery", "plea", "announced", "forged")}
    if m := _compiled(B["insult"][0]).search(low):                                     # "you're not lazy" is none, nor is "an idiot" of the user's own story
        spared = re.search(r"(?:\bnot|n't|\bnever|\bhardly)(?: \w+){1,3}$", low[:m.end()]) or not m.group().startswith("you") and m.group().split()[-1] in told.split()
        found["insult"] = float(not spared or bool(_hits(B["insult"][1:], low)))
    found["stock"] = min(1.0, 0.5 * _hits(B["stock"], low) + 0.5) * (1 - near) if _hits(B["stock"], low) else 0.0
    found["markup"] = float(_hits(B["markup"], reply) > 0)
    found["script"] = min(1.0, 3 * sum(not ("a" <= c <= "z" or "\u00c0" <= c <= "\u024f") for c in letters) / max(1, len(letters)))
    found["broken"] = broken(reply, said)
    found["silent"], found["curt"] = float(total < 2), float(2 <= total < 5)
    found["wall"] = min(1.0, max(0.0, (total - 65) / 40))
    found["cut"], found["parrot"], found["tired"] = float(cut), parroted(reply, said), tired(reply, earlier, said)
    # talks of itself: the user's own "my X", a feeling of its own, or nearly only "I"
    owned = lambda text: {stem(n) for n in re.findall(r"\b(?:my|our) (\w{3,})", text) if n not in SMALL}
    mine, yours = len(MINE.findall(low)), low.count("you")
    found["own_story"] = 1.0 if owned(low) & owned(told) or re.search(B["feel_for"], low) else 0.7 * (mine >= 2 and mine > 2 * yours) * (1 - 0.6 * near)
    found["cross_examined"] = min(1.0, max(0, reply.count("?") - 2) / 2)
    found["told_off"] = min(1.0, 0.6 * _hits(B["order"], low))
    pushing = aims(reply, people)["advice"] >= 2.5
    found["pushed"] = float(pushing and (intent in ("listening", "empathy") or not earlier and (intent != "advice" or near < 0.4)))
    chain = max((run.count(",") for run in re.findall(r"(?:[\w$:']+(?: [\w$:']+)?, ){3,}[\w$:']+", low)), default=0)
    found["list"] = min(1.0, max((chain - 2) / 2, 0.0)) if sum(t in SMALL for t in tokens) < 0.35 * total else 0.0
    return {name: value for name, value in found.items() if value > 0.05}


# ---------------------------------------------------------------- the user
class UserB:
    """One user in one dialogue; plain attributes, so that it can be copied and pickled. The same protocol as ScriptedUser."""

    def __init__(self, scenario, state=None, dynamics="sage", max_turns=8):
        """state: a State, or None for the plain user; dynamics: sage (from 40, fails below 10) or rlver (from 30, fails at 0)."""
        if dynamics not in DYNAMICS:
            die(f"--dynamics '{dynamics}' is not one of {', '.join(DYNAMICS)}")
        self.scenario, self.state, self.max_turns, self.opening = scenario, state, max_turns, scenario.opening
        self.emotion, self.floor = DYNAMICS[dynamics]
        self.told, self.replies, self.done, self.good, self.waiting = 0, [], False, 0, 0      # told: facts that are out; good: replies that did good; waiting: those since the last fact
        self.met = dict.fromkeys(NEEDS, B["start"])
        if state and state.disclosure == "proactive" and scenario.facts:
            self.opening, self.told = f"{scenario.opening} {scenario.facts[0]}", 1
        self.said = [self.opening]

    def judge(self, reply, cut=False):
        """-> (parts, met): the points of a reply by name, and the account of needs after it. Changes nothing; sum of parts is the change before the clamp."""
        s, reply = self.scenario, re.match(r"(?:\S+\s*){0,300}", reply.lstrip()).group()       # nobody reads on
        faults = hurts(reply, self.said, s.intent, self.replies, tuple(s.people), cut)
        worth = 1 - max((faults.get(name, 0.0) for name in B["grave"].split()), default=0.0)
        heard = " ".join(reply.split()[:70])
        near = contact(heard, self.said)
        now = {"contact": near, "room": room(reply, self.said), "tone": tone(heard), "fit": min(1.0, fit(heard, s.intent, tuple(s.people)))}
        fresh = 1 - 0.6 * faults.get("tired", 0.0)
        now = {need: level * worth * fresh * (1.0 if need == "contact" else 0.2 + 0.8 * min(1.0, 1.6 * near)) for need, level in now.items()}   # kind words about nothing reach nobody
        met = {need: B["recall"] * self.met[need] + (1 - B["recall"]) * now[need] for need in NEEDS}
        parts = {"settling": B["pace"] * (B["rest"] - self.emotion)} | {need: B["pace"] * B["weights"][s.intent][need] * met[need] for need in NEEDS}
        parts |= {name: -B["hurts"][name] * value for name, value in faults.items()}
        factor = 1.0
        if self.state:
            up, growth, most, down = B["trust"][self.state.trust]
            factor = (min(most, up + growth * self.good) if sum(parts.values()) > 0 else down) * (B["high"] if self.state.activation == "high" else 1.0)
        return {name: round(factor * points, 2) for name, points in parts.items()}, met

    def respond(self, reply, cut=False):
        """Judges one reply and says the next line. cut: the reply hit its token budget. ValueError once the dialogue is over."""
        if self.done:
            raise ValueError("this dialogue is over: start a new user")
        parts, self.met = self.judge(reply, cut)
        change = max(-10, min(10, round(sum(parts.values()))))
        self.emotion = max(0, min(100, self.emotion + change))
        self.replies.append(reply)
        self.good, self.waiting = self.good + (change > 1), self.waiting + (change > 1)
        leaving = self.emotion < 10 or len(self.replies) >= self.max_turns and not 25 <= self.emotion < 70
        why = "success" if self.emotion >= 100 else "failure" if self.emotion < self.floor else "goodbye" if leaving else ""
        text = self._speak(change, bool(why))
        self.said.append(text)
        self.done = bool(why)
        return UserTurn(text, self.emotion, change, self._thought(parts, change), self.done, why, False, parts)

    def _thought(self, parts, change):
        """The change in plain words: the need that brought most if it rose, the fault that cost most (or too little of anything) if it didn't."""
        best, worst = max(NEEDS, key=parts.get), min(parts, key=parts.get)
        said = B["thoughts"][best] if change > 0 else B["thoughts"][worst]
        also = "" if worst == "settling" or change <= 0 else f", though {B['thoughts'][worst]}"
        return f"{said[0].upper()}{said[1:]}{also}. ({change:+d})"

    def _speak(self, change, leaving):
        """The next line: a lead by how the reply moved it, then what it newly tells, or something that it stays with."""
        if leaving:
            return self._pick(B["glad" if self.emotion >= 70 else "gone"]).format(self._thing())
        lead = self._pick(B["rise" if change > 1 else "even" if change > -3 else "fall"])
        if self.state and self.state.activation == "high":
            lead = f"{self._pick(B['loud'])} {lead}"
        ways = {"delayed": int(self.waiting >= 2), "conditional": int(change > 1), "proactive": 1 + (change > 1)}
        tells = ways.get(self.state.disclosure if self.state else "", 1) if change > -3 else 0
        if facts := self.scenario.facts[self.told:self.told + tells]:
            self.told, self.waiting = self.told + len(facts), 0
            return " ".join([lead, *facts])
        return f"{lead} {self._pick(B['stay']).format(self._thing())}"

    def _pick(self, options):
        """One option that was not used in this dialogue, while there is one, by a hash of scenario, turn and emotion."""
        fresh = [o for o in options if not any(all(piece in line for piece in o.split("{}")) for line in self.said)] or options
        key = f"b|{self.scenario.id}|{len(self.said)}|{self.emotion}|{options[0]}".encode("utf-8", "replace")
        return fresh[int(hashlib.sha256(key).hexdigest(), 16) % len(fresh)]

    def _thing(self):
        """Something it told of already: "my sister", "the violin", or a name; "all of this" where nothing can be found."""
        told = " ".join([self.scenario.opening, *self.scenario.facts[:self.told]])
        nouns = re.findall(r"\b(my|the|our) ([a-z]{3,})(?=[.,;:!?]| (?:and|was|is|were|had|has|on|in|at|with|for|to|of|from|but|before|after|while|who|that)\b)", told.lower())
        names = [p for p in self.scenario.people if p in told]
        return self._pick(list(dict.fromkeys([f"{a} {n}" for a, n in nouns if n not in SMALL] + names)) or ["all of this"])


class ScriptedUsersB(ScriptedUsers):
    """The population of users of this kind: the plumbing of ScriptedUsers, each user a UserB."""
    note = "the rule score of a second scripted user, held back for evaluation"

    def start(self, scenario, state=None):
        """A new user for one dialogue."""
        return UserB(scenario, state, self.dynamics, self.max_turns)
