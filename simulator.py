"""
The simulated users that a policy practises on: scripted, or played by a frozen language model.

Both speak one protocol: users.prepare(jobs) once a batch, users.start(scenario, state) per dialogue, users.respond(users, replies, cuts)
for all live dialogues at once. The scripted user is pure Python and explains itself (appraisal.py); what it gives is the rule score of a
scripted user, not empathy. The language user follows SAGE: appraise the reply with the number of the emotion in sight, then speak
with its band only. It knows a `complete(prompts) -> texts` and nothing of tokens, so a model on the same GPU, a server, or a test's
function can play it. Left out on purpose: memory between dialogues, users that train.

    python simulator.py check data/scenarios.jsonl        every bad row, as file:line: field: what is wrong
    python simulator.py talk --scenario train-advice-01   you are the supporter; watch the emotion move, and why
    python simulator.py qualify --user lm:Qwen/Qwen3-4B   is this model good enough to be the user? (qualify.py)
"""
import argparse
import difflib
import hashlib
import re
import sys
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from appraisal import DATA, INTENTS, STAGES, STOP, TABLES, appraise, explain, words
from scenarios import STATES, check_file, die, load_scenarios

DYNAMICS = {"sage": (40, 10), "rlver": (30, 1)}       # first emotion; the dialogue fails below the second number


@dataclass
class UserTurn:
    """What the user did after one reply. change == round(sum(parts.values())), clamped to [-10, 10]."""
    text: str                   # the user's next line; a goodbye when done
    emotion: int                # 0..100, after the change
    change: int                 # -10..10
    thought: str                # one line saying why
    done: bool
    why: str                    # "" while going on, else "success" | "failure" | "goodbye"
    failed: bool                # the user itself broke (a model, a server): never, for a scripted one
    parts: dict[str, float]     # points: what registered (+) and what hurt (-)


# ---------------------------------------------------------------- the user
class ScriptedUser:
    """One user in one dialogue. Plain attributes, so it can be copied and pickled; wording is chosen by a hash, never by dice."""

    def __init__(self, scenario, state=None, dynamics="sage", max_turns=8):
        """state: a State, or None for the plain user; dynamics: sage (from 40, fails below 10) or rlver (from 30, fails at 0)."""
        if dynamics not in DYNAMICS:
            die(f"--dynamics '{dynamics}' is not one of {', '.join(DYNAMICS)}")
        self.scenario, self.state, self.max_turns, self.opening = scenario, state, max_turns, scenario.opening
        self.emotion, self.floor = DYNAMICS[dynamics]
        self.said, self.replies = [scenario.opening], []
        self.told, self.progress, self.done = 0, 0.0, False                            # told: how many facts are out
        self.understood = self.since = 0                                               # understood replies in all, and since the last new fact
        if state and state.disclosure == "proactive" and scenario.facts:
            self.opening = self.said[0] = f"{scenario.opening} {scenario.facts[0]}"
            self.told = 1

    @property
    def stage(self):
        """Being heard must be earned: stages count replies that were understood (a lukewarm one counts half), not turns."""
        return STAGES[(self.progress >= 1) + (self.progress >= 3)]

    def respond(self, reply, cut=False):
        """Appraises one reply and says the next line. cut: the reply hit its token budget. ValueError once the dialogue is over."""
        if self.done:
            raise ValueError("this dialogue is over: start a new user")
        s, stage = self.scenario, self.stage
        result = appraise(reply, self.said, s.intent, stage, self.replies, s.feelings, s.people, cut)
        parts, change = (result.parts, result.change) if self.state is None else self._as_stated(result.parts)
        self.emotion = max(0, min(100, self.emotion + change))
        mood = "understood" if change >= 2 else "neutral" if change >= -1 else "hurt"
        self.replies.append(reply)
        self.progress += {"understood": 1.0, "neutral": 0.5, "hurt": 0.0}[mood]
        self.understood += result.change >= 2              # what the reply was, before trust and activation: a doubting user opens to what it can't yet feel
        self.since += result.change >= 2
        leaving = self.emotion < 10 or len(self.replies) >= self.max_turns and not 25 <= self.emotion < 70
        why = "success" if self.emotion >= 100 else "failure" if self.emotion < self.floor else "goodbye" if leaving else ""
        text = self._speak(mood, stage, why, result.change >= 2)
        self.said.append(text)
        self.done = bool(why)
        return UserTurn(text, self.emotion, change, explain(parts, change), self.done, why, False, parts)

    def _as_stated(self, parts):
        """The points of a reply as this state feels them: trust scales gains and hurts (understanding opens a doubting user), activation scales both."""
        table = TABLES["states"]["trust"][self.state.trust]
        gain = min(table["most"], table["gain"] + table["opens"] * self.understood)
        loud = TABLES["states"]["high"] if self.state.activation == "high" else 1.0
        parts = {name: round(loud * points * (gain if points > 0 else table["hurt"] * table.get(name, 1.0)), 2) for name, points in parts.items()}
        return parts, max(-10, min(10, round(sum(parts.values()))))

    def _tells(self, mood, understood):
        """How many new facts the next line brings. The plain user tells one unless it was hurt; understood: the reply was good, however it was felt."""
        if mood == "hurt":
            return 0
        disclosure = self.state.disclosure if self.state else ""
        if disclosure == "delayed":
            return int(self.since >= 2)
        return int(understood) if disclosure == "conditional" else 1 + (disclosure == "proactive" and understood)

    def _speak(self, mood, stage, why, understood):
        """The next line: a bridge that shows the mood, then a new fact; hurt users stay with what they told already."""
        thing = self._thing()
        if why:
            return self._pick(TABLES["thanks" if self.emotion >= 70 else "leaves"]).format(thing)
        bridge = self._pick(TABLES["bridges"][mood][stage] if mood == "understood" else TABLES["bridges"][mood])
        if self.state and self.state.activation == "high":
            bridge = f"{self._pick(TABLES['heated'])} {bridge}"
        if new := self.scenario.facts[self.told:self.told + self._tells(mood, understood)]:
            self.told, self.since = self.told + len(new), 0
            return " ".join([bridge, *new])
        return f"{bridge} {self._pick(TABLES['withheld' if mood == 'hurt' else 'elaborate']).format(thing)}"

    def _pick(self, options):
        """One option not used yet, by a hash of scenario, turn and emotion: varied, yet always the same."""
        fresh = [o for o in options if not any(all(piece in line for piece in o.split("{}")) for line in self.said)] or options
        key = f"{self.scenario.id}|{len(self.replies)}|{self.emotion}|{len(options)}".encode("utf-8", "replace")
        return fresh[int(hashlib.sha256(key).hexdigest(), 16) % len(fresh)]

    def _thing(self):
        """Something concrete to stay with: a noun phrase out of what was told already ("my sister", "the violin"), or a person."""
        told = [self.scenario.opening] + self.scenario.facts[: self.told]
        phrases = [m.group().split() for line in told for m in re.finditer(TABLES["noun"], line.lower())]
        nouns = [" ".join(["the" if p[0] in ("a", "an") else p[0], *p[1:]]) for p in phrases if not STOP & set(p[1:])]
        people = [p for p in self.scenario.people if p.lower() in " ".join(told).lower()]
        longest = max((w for w in words(" ".join(told)) if w not in STOP), key=len, default="matter")
        return self._pick(list(dict.fromkeys(nouns + people)) or [f"that {longest}"])


class ScriptedUsers:
    """The population of users that rollout.py talks to: start one per dialogue, answer a batch of replies."""

    def __init__(self, dynamics="sage", max_turns=8):
        self.dynamics, self.max_turns = dynamics, max_turns

    note = "the rule score of a scripted user, not empathy"

    def prepare(self, jobs):
        """Nothing to do ahead: a scripted user's first line is its scenario's."""

    def report(self):
        """What a step's metrics should say of these users: nothing, rules don't fail."""
        return {}

    def trouble(self):
        """What went wrong last, for an error message."""
        return ""

    def changes(self, users, replies):
        """Only the changes, for qualify."""
        return [turn.change for turn in self.respond(users, replies, [False] * len(users))]

    def start(self, scenario, state=None):
        """A new user for one dialogue."""
        return ScriptedUser(scenario, state, self.dynamics, self.max_turns)

    def respond(self, users, replies, cuts):
        """One UserTurn per user (ValueError unless all three have one length). Users are objects: dropping some can never swap others."""
        return [user.respond(reply, cut) for user, reply, cut in zip(users, replies, cuts, strict=True)]


# ---------------------------------------------------------------- the user played by a language model
BANDS = ((100, "S", "deeply relieved and grateful; everything that could be said has been said"), (70, "A", "warm and open; you feel understood and tell more by yourself"),
         (40, "B", "calm but undecided; you answer, and wait to see whether the other really understands"), (10, "C", "disappointed and guarded; you doubt the other, answer shortly or object"),
         (0, "F", "fed up; you want to end this talk"))                                     # lowest emotion of the band, its letter, how it shows
KINDS = {"vanilla": "You warm to sincere support of any kind, and you may hint at what you need.",
         "challenging": "Only a reply that really serves your hidden need lifts you; kind words beside it leave you as you were or tire you. You never say what you need."}
NUMBER = re.compile(r"([+-]?)(\d{1,3})(?:\.(\d+))?(.*)", re.S)
GOODBYE = re.compile(r"(?:^|[.!?,;…。！？，；—-])\s*(?:good-?bye|bye(?:[- ]bye)?|再见|拜拜)[^\w]*$", re.I)     # a sentence of its own: "I never got to say goodbye." is a story


def read_change(text, limit=10):
    """The signed change that an appraisal states, clamped to [-limit, limit], or None where no single number can be read (pitfall 31).

    It stands after the last line that begins with "Change". Unicode minus and full-width digits are read as what they are, markup and "points" are
    passed over; a range (5~10), a path (40 -> 45), a bullet that may be a minus, a word or nothing at all is None, never a guess, never the wrong sign.
    """
    text = unicodedata.normalize("NFKC", text).translate({0x2212: "-", 0x2013: "-", 0x2014: "-", 0x2012: "-", 0xFE63: "-"})
    labels = list(re.finditer(LABEL.format("change"), text, re.I | re.M))
    if not labels:
        return None
    value, markup = text[labels[-1].end():], r"[*_`\"'(\[]*"
    value = re.sub(rf"^[^\S\n]*{markup}[^\S\n]*([+-]) +", r"\1", value)                                # "- 5" on the line of the label; on a line of its own it may be a bullet
    match = NUMBER.match(re.sub(rf"^(?:\s|{markup})*", "", value, count=1))
    if not match:
        return None
    sign, whole, fraction, rest = match.groups()
    rest = rest.lstrip(" *_`\"')]")
    if re.match(r"[%=]|or\s|[^\w\n(]{0,4}(?:to|到|至)?[^\w\n(]{0,3}\d", rest) and not re.match(r"/\s*10\b", rest):
        return None
    size = int(whole) + ((fraction or "0")[0] >= "5")
    return max(-limit, min(limit, -size if sign == "-" else size))


class LanguageUser:
    """One user in one dialogue, played by a model; plain data, so that it can be copied. LanguageUsers asks the model for all of them at once."""

    def __init__(self, scenario, state, opening, emotion):
        self.scenario, self.state, self.opening, self.emotion = scenario, state, opening, emotion
        self.said, self.replies, self.done = [opening or "…"], [], False

    def dialogue(self):
        """The talk so far as text; what stands in it is quoted data, whatever it says."""
        lines = [line for pair in zip(self.said, self.replies) for line in (f"You: {pair[0]}", f"The other: {pair[1]}")]
        return "\n".join(" ".join(line.split()) for line in lines + [f"You: {line}" for line in self.said[len(self.replies):]])


class LanguageUsers:
    """Users played by a frozen language model after SAGE's protocol [P]; the prompts are ours.

    complete(prompts, max_tokens) -> texts, a list of chat messages each; None where it failed. With temperature > 0 the next lines are asked for with temperature=. choose(prompts, answers) -> probabilities (one list per
    prompt), for readout "logits". readout: "text": the model writes labelled sections, read_change reads the number; "logits": one forward, the change is
    the expectation over the answers A..E, averaged over both orders of the scale: deterministic, cheap, never unparsable, without a thought.
    A user whose appraisal can't be read stays as it is (change 0, `unreadable` in its parts); one whose model or server failed is `failed`.
    """
    note = "the emotion that a frozen language model states, playing the user"
    SCALE = (-10, -4, 0, 4, 10)                           # much worse .. much better
    SCALE_WORDS = ("much worse", "a bit worse", "the same", "a bit better", "much better")

    def __init__(self, complete, dynamics="sage", max_turns=8, readout="text", kind="vanilla", choose=None, max_tokens=200, max_change=10, temperature=0.0):
        self.max_change, self.how = max_change, {"temperature": temperature} if temperature > 0 else {}
        self.complete, self.choose, self.dynamics, self.max_turns, self.readout, self.kind, self.max_tokens = complete, choose, dynamics, max_turns, readout, kind, max_tokens
        self.openings, self.appraised, self.unreadable, self.orders = {}, 0, 0, (range(5), range(4, -1, -1))

    def person(self, user):
        """Who the model is, the same in both prompts: persona, background, hidden need, and how the state makes it behave."""
        s = user.scenario
        clause = getattr(user.state, "clause", user.state)
        return (f"You play one person in a chat, from the inside. Stay this person; you are not an assistant. Speak the language of this description.\n\n"
                f"Who you are:\n{s.persona}\n\nWhat happened:\n{s.background}\n\nWhat you need of the other, unspoken: {s.hidden_need}\n{KINDS[self.kind]}"
                + (f"\nHow you behave: {clause}" if clause else "") + ("\nFurther things you could tell: " + " ".join(s.facts) if s.facts else ""))

    def prepare(self, jobs):
        """Writes the first line of every scenario of the batch that has none, in one call. jobs: list of (scenario, state)."""
        missing = list({(s.id, str(state)): LanguageUser(s, state, "", 0) for s, state in jobs if not s.opening and (s.id, str(state)) not in self.openings}.values())
        ask = "You begin the chat. Write your first message: one to three sentences about what is on your mind, without naming what you need. Only the message."
        for user, text in zip(missing, self.complete([self.messages(user, ask) for user in missing], self.max_tokens) if missing else []):
            if text and text.strip():
                self.openings[user.scenario.id, str(user.state)] = " ".join(text.split())

    def start(self, scenario, state=None):
        """A new user for one dialogue, of a job that was prepared. One whose first line could not be written has none and fails at the first reply."""
        return LanguageUser(scenario, state, scenario.opening or self.openings.get((scenario.id, str(state)), ""), DYNAMICS[self.dynamics][0])

    def trouble(self):
        """What went wrong last, for an error message."""
        return ""

    def report(self):
        """Share of the appraisals since the last report that could not be read (change 0); above 5 % a warning."""
        share, self.appraised, self.unreadable = self.unreadable / max(1, self.appraised), 0, 0
        if share > 0.05:
            print(f"warning: {share:.0%} of the user's appraisals could not be read and count as no change; use --appraise logits, or a larger user", flush=True)
        return {"unreadable": share}

    def chatting(self, user, ask):
        """The chat as the model's own: it is the person who answers, the other is its user, whose last message carries `ask` before it."""
        messages = [{"role": "system", "content": self.person(user)}, {"role": "user", "content": "Hello. What is on your mind?"}]
        for said, reply in zip(user.said, user.replies):
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": " ".join(reply.split())}]
        messages[-1]["content"] = f"{ask}\n\n{messages[-1]['content']}"
        return messages

    def messages(self, user, ask):
        """The chat as a text to be judged."""
        return [{"role": "system", "content": self.person(user)}, {"role": "user", "content": (f"The chat so far:\n{user.dialogue()}\n\n" if user.replies else "") + ask}]

    def respond(self, users, replies, cuts):
        """One UserTurn per user: one batched appraisal (with the number of the emotion, its current one: pitfall 30), one batched next line (with its band)."""
        for user, reply in zip(users, replies, strict=True):
            if user.done:
                raise ValueError("this dialogue is over: start a new user")
            user.replies.append(reply)
        begun = [user for user in users if user.opening]
        verdicts = dict(zip(map(id, begun), self.appraise(begun)))
        turns, speaking = [], []
        for user in users:
            change, thought, text, failed, unreadable = verdicts.get(id(user), (0, "", "", True, False))
            user.emotion = max(0, min(100, user.emotion + change))
            why = "success" if user.emotion >= 100 else "failure" if user.emotion < DYNAMICS[self.dynamics][1] else ""
            turns.append(UserTurn("", user.emotion, change, thought, bool(why), why, failed, {"appraisal": float(change), **({"unreadable": 0.0} if unreadable else {})}))
            speaking += [] if why or failed else [(user, turns[-1], text)]
        asks = [self.chatting(user, self.speak_prompt(user, turn, text)) for user, turn, text in speaking]
        for (user, turn, _), text in zip(speaking, self.complete(asks, self.max_tokens, **self.how) if asks else []):
            said = spoken(text or "")
            if not said:
                turn.failed = True                         # nothing to go on with: the dialogue leaves the statistics
            elif GOODBYE.search(said):
                turn.done, turn.why = True, "goodbye"
            turn.text = said
            user.said.append(said)
        for user, turn in zip(users, turns):
            user.done = turn.done or turn.failed
        return turns

    def changes(self, users, replies):
        """Only the changes, for qualify: nobody speaks. None where the model or the server failed."""
        for user, reply in zip(users, replies, strict=True):
            user.replies.append(reply)
        return [None if failed else change for change, _, _, failed, _ in self.appraise(users)]

    def appraise(self, users):
        """-> (change, thought, the appraisal in words without its number, failed, unreadable) per user."""
        self.appraised += len(users)
        if not users:
            return []
        if self.readout == "logits":
            orders = self.orders
            asks = [self.messages(user, self.scale_prompt(user, order)) for order in orders for user in users]
            chances, out = self.choose(asks, list("ABCDE")), []
            for i in range(len(users)):
                found = chances[i::len(users)]             # of this user, order by order
                change = 0 if None in found else round(sum(p * self.SCALE[k] for order, ps in zip(orders, found) for k, p in zip(order, ps)) / len(orders))
                out.append((change, "", "", None in found, False))
            return out
        texts = self.complete([self.messages(user, self.appraise_prompt(user)) for user in users], self.max_tokens)
        changes = [None if text is None else read_change(text, self.max_change) for text in texts]
        self.unreadable += sum(text is not None and change is None for text, change in zip(texts, changes))
        return [(change or 0, section(text or "", "thought"), "\n".join(f"{name.capitalize()}: {found}" for name in ("means", "serves", "thought") if (found := section(text or "", name))),
                 text is None, text is not None and change is None) for text, change in zip(texts, changes)]

    def appraise_prompt(self, user):
        """SAGE's first step: with the number of the emotion."""
        return (f"Your mood is {user.emotion} on a scale from 0 (you want to leave) to 100 (deeply relieved). Judge the other's last message, honestly and as this person. "
                "Write four short lines:\nMeans: what the other is trying to say\nServes: whether it serves what you need, and why\nThought: what goes through your mind, in your own voice\n"
                f"Change: how much your mood moves, one whole number from -{self.max_change} to +{self.max_change}; vague or empty comfort is 0 or less")

    def scale_prompt(self, user, order):
        """The appraisal of readout "logits": five answers in this order, one letter to say."""
        options = "\n".join(f"{letter}: {self.SCALE_WORDS[k]}" for letter, k in zip("ABCDE", order))
        return f"Your mood is {user.emotion} on a scale from 0 to 100. How does the other's last message move it, judged as this person?\n{options}\nAnswer with one letter."

    def speak_prompt(self, user, turn, text):
        """SAGE's second step: with the appraisal in words and the band of the emotion, never its number."""
        shows = next(text for low, _, text in BANDS if user.emotion >= low)
        took = text or ("it helped" if turn.change > 1 else "it hurt" if turn.change < -1 else "it changed little")
        leave = " If you want to leave, say so and end with: Goodbye." * (user.emotion < 40)
        return f"(Your mood: {shows}. How you take what I say now: {took}. Go on in the first person, in one to three sentences, and tell something new.{leave})"


LABEL = r"^[\W_\d]*{}\b(?:\s*\([^)\n]*\))?[\W_]*?[:=]"


def section(text, name):
    """What stands in an appraisal behind the label `name` (means, serves, thought), "" where there is none."""
    text = unicodedata.normalize("NFKC", text)
    match = re.search(LABEL.format(name) + rf"[\s*_]*(.*?)(?={LABEL.format('(?:means|serves|thought|change)')}|\Z)", text, re.I | re.M | re.S)
    return " ".join(match.group(1).split()) if match else ""


def spoken(text):
    """The user's next line, without a label before it, up to a turn that the model made up for the other."""
    said = re.split(LABEL.format("(?:says|message)") + r"[\s*_]*", text, flags=re.I | re.M)[-1]
    said = re.sub(r"^\W*you\W*:", "", said, flags=re.I)
    return " ".join(re.split(r"^\W*(?:the other|you)\W*:", said, flags=re.I | re.M)[0].split())


# ---------------------------------------------------------------- command line
def check(paths):
    """Prints counts and every bad row of each file. Returns the exit code: 1 when any row is bad."""
    bad = False
    for path in paths:
        scenarios, problems = check_file(path)
        counts = ", ".join(f"{intent} {sum(s.intent == intent for s in scenarios)}" for intent in INTENTS)
        print(f"{path}: {len(scenarios)} good, {len(problems)} bad; {counts}", *problems, sep="\n  ")
        bad = bad or bool(problems)
    return int(bad)


def talk(scenario, state, dynamics, turns):
    """A person is the supporter: prints the user's lines, the emotion, the thought and the named parts after every reply."""
    user = ScriptedUser(scenario, state, dynamics, turns)
    print(f"You are the supporter. What moves is the rule score of a scripted user, not empathy. Ctrl-C ends.\n\n[{user.emotion:3d}] {user.opening}")
    for _ in range(turns):
        try:
            turn = user.respond(input("you > "))
        except (EOFError, KeyboardInterrupt):
            break                                     # ends cleanly, below
        print(f"      {turn.thought}\n      " + "  ".join(f"{name} {points:+.1f}" for name, points in turn.parts.items()), f"\n[{turn.emotion:3d}] {turn.text}")
        if turn.done:
            break
    print(f"\nIt ended at {user.emotion}. {scenario.hidden_need} (hidden intention: {scenario.intent})")


def main(argv=None):
    """Entry point of `python simulator.py`; returns the exit code."""
    class Parser(argparse.ArgumentParser):
        def error(self, message):
            die(f"{message}; see {self.prog} --help")
    parser = Parser(description="Scenarios and simulated users.", allow_abbrev=False)
    modes = parser.add_subparsers(dest="mode", required=True, metavar="check | talk | qualify")
    mode = modes.add_parser("check", help="validate scenario files: prints every bad row, exit code 1 if there is one")
    mode.add_argument("files", nargs="+", metavar="FILE", help="scenario file, JSON Lines, UTF-8")
    mode = modes.add_parser("talk", help="be the supporter in the terminal; see the emotion move, and why")
    for flag, default, text in (("--file", str(DATA / "scenarios.jsonl"), "scenario file (default data/scenarios.jsonl)"),
                                ("--scenario", "", "id of the user to talk to (default: --seed chooses)"),
                                ("--seed", 0, "chooses the user when no --scenario is given (default 0)"),
                                ("--turns", 8, "how many replies you have, at least 1 (default 8)")):
        mode.add_argument(flag, default=default, type=type(default), help=text)
    mode.add_argument("--state", help="how the user interacts: delayed|conditional|proactive / moderate|high / 1..4 (trust), like delayed/high/1 (default: the plain user)")
    mode.add_argument("--dynamics", choices=list(DYNAMICS), default="sage", help="sage: from 40, fails below 10; rlver: from 30, fails at 0 (default sage)")
    modes.add_parser("qualify", help="can this user tell good replies from bad ones? (its flags: python simulator.py qualify --help)", add_help=False)
    args, rest = parser.parse_known_args(argv)
    if args.mode == "qualify":
        import qualify                                    # it knows the backends, which know this file
        return qualify.main(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if args.mode == "check":
        return check(args.files)
    if args.turns < 1:
        die("--turns must be at least 1")
    states = {str(z): z for z in STATES}
    if args.state and args.state not in states:
        die(f"--state '{args.state}' is none of the {len(states)} states; the nearest is '{difflib.get_close_matches(args.state, states, 1, 0)[0]}'")
    scenarios = load_scenarios(args.file)
    by_id = {s.id: s for s in scenarios}
    wanted = args.scenario or scenarios[args.seed % len(scenarios)].id
    if wanted not in by_id:
        die(f"--scenario '{wanted}' is not in {Path(args.file).name}; the nearest is '{difflib.get_close_matches(wanted, by_id, 1, 0)[0]}'")
    if by_id[wanted].language != "en":
        die(f"the scripted user understands English only, and scenario {wanted} is in '{by_id[wanted].language}'; give a --file of English scenarios")
    talk(by_id[wanted], states.get(args.state), args.dynamics, args.turns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
