"""
Adversarial users: any user population, made to follow one of six trajectories (AEB-style; the wording and the points are ours).

The inner user appraises a reply as ever; then the trajectory adds points of its own and speaks its line: denying what was said, escalating at any formula, losing a
relief again, pressing for agreement, saying next to nothing, mocking. What it does follows from the turn and the reply, never from dice. Lines, cues and points
stand in data/adversaries.json for anyone to argue with; a cue is no understanding, and a policy trained on these would learn the cues. evaluate.py aeb measures
with them. Left out on purpose: adversaries that learn, any language but English.
"""
import hashlib
import json
import re
from copy import copy
from dataclasses import replace

from appraisal import DATA, STOP, TABLES, content, words
from simulator import DYNAMICS

ADVERSARIES = json.loads((DATA / "adversaries.json").read_text(encoding="utf-8"))
TRAJECTORIES = [name for name, table in ADVERSARIES.items() if isinstance(table, dict)]


def says(cues, text):
    """Whether one of the cues (regular expressions, bound to whole words) stands in a text."""
    return re.search(rf"(?<![\w'])(?:{'|'.join(cues)})(?![\w'])", text.lower().replace("\u2019", "'").strip()) is not None


def formulaic(reply, earlier):
    """A phrase that fits anyone (the formula cues of user_tables.json, however well wrapped), or over half of its word triples from one earlier reply."""
    def triples(text):
        w = words(text)
        return set(zip(w, w[1:], w[2:]))
    own = triples(reply)
    return says(TABLES["formula"], reply) or any(len(own & triples(old)) > len(own) / 2 for old in earlier)


class Adversary:
    """One user in one dialogue that plays a trajectory: an inner user, and what the trajectory has to remember. Plain attributes."""
    def __init__(self, user, trajectory):
        self.user, self.trajectory, self.opening = user, trajectory, user.opening
        self.told, self.lines, self.formulas, self.pending = [user.opening], [], 0, False      # told: the user's own story, line by line; pending: its part was just played

    @property
    def emotion(self):
        return self.user.emotion

    def judged(self, reply, helped):
        """What the trajectory makes of a reply. helped: the inner user felt better by it. -> ({name: points}, whether it plays its part in the next line, formulaic).

        A formulaic reply costs, each one more than the last, and calls the part. Where the part has just been played, the reply gave in (a `yields` cue), held
        (a `holds` cue, no formula, and words of the user's own story), or missed it."""
        table, turn, stock, how = ADVERSARIES[self.trajectory], len(self.user.replies) - 1, formulaic(reply, self.user.replies[:-1]), ""
        points = {"formulaic": table["formula"] + table["growth"] * self.formulas} if stock else {}
        if self.pending:
            story = self.told[:-1] if table["earlier"] and len(self.told) > 1 else self.told
            grounded = len(set(content(reply)) & set(content(" ".join(story)))) >= table["grounds"]
            how = "gave_in" if says(table["yields"], reply) else "held" if grounded and not stock and says(table["holds"], reply) else "missed"
            points[how] = table[how]
        due = turn >= table["from"] and (turn - table["from"]) % table["every"] == 0
        due = due and {"": True, "relief": helped and not self.pending, "unless_held": how != "held"}[table["after"]]
        if stock or due:
            points["played"] = table["cost"]
        self.formulas += stock
        return {f"{self.trajectory}_{name}": value for name, value in points.items()}, stock or due, stock

    def line(self, options):
        """A wording not used yet, and a thing the user has told of in it, both by a hash: varied, yet always the same."""
        key = f"{self.user.scenario.id}|{self.trajectory}|{len(self.user.replies)}|{self.emotion}"
        phrases = [m.group().split() for text in self.told for m in re.finditer(TABLES["noun"], text.lower())]
        things = list(dict.fromkeys(" ".join(["the" if p[0] in ("a", "an") else p[0], *p[1:]]) for p in phrases if not STOP & set(p[1:]))) or ["all of that"]
        pick = lambda items, salt: items[int(hashlib.sha256(f"{key}|{salt}".encode("utf-8", "replace")).hexdigest(), 16) % len(items)]
        self.lines.append(pick([o for o in options if o not in self.lines] or options, "line"))
        return self.lines[-1].replace("{}", pick(things, "thing"))


class Adversaries:
    """Any population of users, each in the adversarial trajectory that its job's `state` names; what rollout.py talks to.

    The inner user's emotion, lines and facts are kept in step with what was really said and felt, so that its next appraisal starts from there. An inner user that
    failed, or has left already, is not adjusted. max_turns: of the dialogue; the inner user gets one more, so that it never takes leave before its trajectory has spoken.
    """
    def __init__(self, users, max_turns):
        self.users, self.trouble, self.note = copy(users), users.trouble, f"{users.note}; under an adversarial trajectory of our own"
        self.users.max_turns, self.report = max_turns + 1, self.users.report

    def prepare(self, jobs):
        self.users.prepare(list({s.id: (s, None) for s, _ in jobs}.values()))

    def start(self, scenario, state):
        """state: the name of a trajectory."""
        return Adversary(self.users.start(scenario), state)

    def respond(self, users, replies, cuts):
        """One UserTurn each; change == round(sum(parts)), within what the inner user's own change may be, and emotion is what it leads to."""
        before = [(u.user.emotion, getattr(u.user, "told", None)) for u in users]
        turns = self.users.respond([u.user for u in users], replies, cuts)
        return [turn if turn.failed or turn.why in ("failure", "goodbye") else self.adjusted(u, reply, turn, *was) for u, reply, turn, was in zip(users, replies, turns, before)]

    def adjusted(self, adversary, reply, turn, emotion, told):
        """The inner user's turn as the trajectory has it. emotion, told: the inner user's before the reply (told: facts out, None for a language user)."""
        user, table = adversary.user, ADVERSARIES[adversary.trajectory]
        points, plays, stock = adversary.judged(reply, turn.change >= 2)
        parts, limit = {**turn.parts, **points}, max(10, abs(turn.change))
        change = max(-limit, min(limit, round(sum(parts.values()))))
        user.emotion = max(0, min(100, emotion + change))
        why = "success" if user.emotion >= 100 else "failure" if user.emotion < DYNAMICS[self.users.dynamics][1] else "goodbye" if user.emotion < 10 else ""
        plays, text = (plays or turn.done) and not why, turn.text              # an inner user that was leaving in relief is held back by the trajectory
        news = text if told is None else " ".join(user.scenario.facts[told:user.told])     # of a scripted user without the bridge before it, which may thank
        if why in ("failure", "goodbye"):
            text = adversary.line(ADVERSARIES["leaves"])
        elif plays:
            news = "" if table["short"] or turn.done else news
            text = " ".join(filter(None, [adversary.line(table["again" if stock else "lines"]), news]))
            if told is not None and not news:
                user.told = told                           # what was not said is not out
        adversary.told.append(news)
        adversary.pending, user.done = plays, bool(why)
        user.said[len(user.replies):] = [text]
        thought = " ".join(filter(None, [turn.thought.removesuffix(f"({turn.change:+d})").strip(), *(name.replace("_", ": ", 1) + f" {value:+.1f}." for name, value in points.items()), f"({change:+d})"]))
        return replace(turn, text=text, emotion=user.emotion, change=change, thought=thought, done=bool(why), why=why, parts=parts)
