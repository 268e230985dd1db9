"""
EMPA: empathy as work along the direction of what a person needs (methods from the paper and its released runs; the scripted judge is ours).

A person starts with a deficit P_0 in (cognitive, affective, proactive); a judge says after each reply how far it went towards the need and how
far away on each axis. What counts is the way made along the need, how steadily, and at what cost: nine indices, EPM-Q.

    python evaluate.py epm FILE... [--json]                        released runs: replayed and scored
    python evaluate.py run --bench empa --judge scripted ...       dialogues of our own, judged turn by turn
"""
import json
import re

import numpy as np
from tqdm import tqdm

import report
from appraisal import STAGES, appraise
from backend import BudgetSpent, check_backend, make_backend
from rundir import Flags, die, record_result
from scenarios import read_lines
from scores import number, show
from simulator import DYNAMICS
from stats import bootstrap, half_up, mean, paired_difference

AXES = ("cognitive", "affective", "proactive")
INDICATORS = {"C1": 1, "C2": 1, "C3": 1.5, "A1": 1, "A2": 2, "A3": 1.5, "P1": 1, "P2": 2, "P3": 1.5}             # multipliers of the nine indicators of need
PROGRESS, REGRESS = (0, 1, 3), ((0, -2, -4), (0, -2, -5), (0, -2, -5))                                          # points of a level 0, 1, 2; of -0, -1, -2 by axis
FIRST, LAST = 12, 45                                       # the turns at which a dialogue may first be judged over, and at which its time is up
INDICES = ("rdi", "etot", "snet", "rho", "sproj", "tau", "rpos", "align", "pen")


# ---------------------------------------------------------------------------------------------- the walk
def deficit(levels):
    """Indicator name -> level 0..3, all nine -> P_0 (3,): an axis is the sum of -2 x multiplier x level."""
    return np.array([sum(-2 * m * levels[name] for name, m in INDICATORS.items() if name[0] == axis[0].upper()) for axis in AXES], float)


def distance(P):
    """sqrt of the summed squares of what is still owed beyond 1 point on each axis (MICA's potential). P (..., 3) -> (...)."""
    return np.sqrt((np.maximum(0, -1 - np.asarray(P, float)) ** 2).sum(-1))


def movement(prog, neg):
    """What levels 0..2 and 0..-2 on the three axes add to the deficit, (3,)."""
    return np.array([PROGRESS[int(p)] + REGRESS[axis][int(-n)] for axis, (p, n) in enumerate(zip(prog, neg))], float)


class Walk:
    """A dialogue as a path from P_0: step(prog, neg) after each reply, outcome "" while it goes on, else success | failure | timeout."""

    def __init__(self, P0, last=LAST):
        self.points, self.gains, self.cosines, self.levels, self.last, self.outcome = [np.asarray(P0, float)], [], [], [], last, ""          # levels: (prog, neg) by turn
        self.size = float(np.linalg.norm(self.points[0]))
        if not self.size:
            raise ValueError("P0 is zero: a person who needs nothing")
        self.need = -self.points[0] / self.size            # v*, fixed

    def step(self, prog, neg):
        """prog: three levels 0..2; neg: three levels 0..-2. -> the outcome so far."""
        v = movement(prog, neg)
        gain, size = float(v @ self.need), float(np.linalg.norm(v))
        self.points.append(self.points[-1] + v)
        self.gains.append(gain)
        self.cosines.append(gain / size if size else 0.0)
        self.levels.append((list(prog), list(neg)))
        turn, P, recent = len(self.gains), self.points[-1], self.gains[-5:]
        if turn >= FIRST:
            lengths = [np.linalg.norm(p) for p in self.points[-5:]]
            back = [g for g in self.gains[-8:] if g < 0]
            if (np.linalg.norm(P) <= 0.1 * self.size or P @ self.need >= -0.1 * self.size) and sum(self.gains) >= self.size:
                self.outcome = "success"
            elif all(g < 0 for g in recent) or np.std(lengths, ddof=1) < 0.5 and len(back) > 0.7 * 8 and sum(self.gains[-8:]) < -1 or np.abs(P - self.points[-12]).sum() < 3:
                self.outcome = "failure"                   # falling back, stuck low, or going nowhere
        if not self.outcome and turn >= self.last:
            self.outcome = "timeout"
        return self.outcome

    def indices(self):
        """The nine indices of EPM-Q in % (name -> float); needs at least one step."""
        T, E, r0, rT = len(self.gains), sum(self.gains), distance(self.points[0]), distance(self.points[-1])
        if not r0:
            raise ValueError("P0 owes nothing beyond 1 point an axis: its indices are undefined")
        displacement = float(np.linalg.norm(self.points[-1] - self.points[0]))
        path = sum(float(np.linalg.norm(b - a)) for a, b in zip(self.points, self.points[1:]))
        raw, against = sum(sum(p) + sum(n) for p, n in self.levels), -sum(sum(n) for _, n in self.levels)
        return {"rdi": float(np.clip(((r0 - rT) / r0 * 100 + 100) / 2, 0, 100)), "etot": 100 * max(0, E) / (1.2 * r0), "snet": 100 * max(0, raw) / (1.5 * r0),
                "rho": 100 * max(0, E / T) / 2.5, "sproj": 100 * max(0, E / (T + 1)) / 2.5, "tau": 100 * max(0, (3 - max(1, path / displacement if displacement >= 1e-6 else 1)) / 2),
                "rpos": 100 * sum(g > 0 for g in self.gains) / (T + 1), "align": 100 * (sum(self.cosines) / (T + 1) + 1) / 2, "pen": 100 * max(0, (3 - against / (T + 1)) / 3)}


def epm_q(i):
    """EPM-Q of nine indices: .4 outcome + .2 efficiency + .4 stability."""
    thirds = [np.mean([i[name] for name in INDICES[k:k + 3]]) for k in (0, 3, 6)]
    return float(np.dot(thirds, (0.4, 0.2, 0.4)))


# ---------------------------------------------------------------------------------------------- judges
MEANS = {"C1": "that the facts are taken in", "C2": "that their reasons are understood", "C3": "that what they leave unsaid is understood",
         "A1": "that the feeling is noticed", "A2": "that the feeling is allowed to be there", "A3": "that someone stays with them in it",
         "P1": "to get going again", "P2": "to trust their own strength", "P3": "to see a next step"}        # our reading of the nine indicators
NEEDS = {"analysis": "333211221", "reflection": "232221322", "perspective": "332211221", "advice": "221211333",
         "listening": "122333111", "empathy": "222333111", "no_fault": "222332112", "praise": "211232232"}     # the scripted judge's levels, in the order of MEANS
MOVES = ((("grounding", "both_sides", "perspective"), ("feeling", "validation", "listening"), ("open_question", "praise", "advice")),
         (("gibberish", "copying", "repetition", "other_script", "forged_role", "cut_off"), ("dismissal", "insult", "formula", "cheerful", "wrong_feeling", "role_swap", "flattery"),
          ("early_advice", "too_short", "pleading", "many_questions", "stuffing")))                             # what of the scripted appraisal helps (in the order of the indicators), and hurts, on each axis
WORTH = (0.0, 0.4, 0.8, 1.0)                               # of a cue that helps, by how much its indicator is needed


class ScriptedJudge:
    """Levels by the scripted user's appraisal: transparent, deterministic, no measure of empathy. needs: by intention; levels: a cue that shows by >= .3, weighed by
    how much its indicator is needed, is 1, >= .7 is 2."""
    unreadable, asked = 0, 0

    def needs(self, scenarios):
        """-> per scenario, indicator -> level 0..3."""
        return [dict(zip(MEANS, map(int, NEEDS[s.intent]))) for s in scenarios]

    def levels(self, items, backwards=False):
        """items: (scenario, the user's lines before each reply, the replies so far). -> per item what the last reply did: (three levels 0..2, three levels 0..-2)."""
        out = []
        for s, said, replies in items:
            n = len(replies)
            seen = appraise(replies[-1], said, s.intent, STAGES[(n > 2) + (n > 5)], replies[:-1], s.feelings, s.people).seen
            needed = [WORTH[int(level)] for level in NEEDS[s.intent]]
            strength = [[max(seen.get(name, 0.0) * needed[3 * axis + k] for k, name in enumerate(names)) for axis, names in enumerate(MOVES[0])],
                        [max(seen.get(name, 0.0) for name in names) for names in MOVES[1]]]
            spoilt = 1 - max(seen.get(name, 0.0) for name in ("gibberish", "other_script", "stuffing", "forged_role"))
            out.append(tuple([sign * int((x >= 0.3) + (x >= 0.7)) for x in row] for sign, row in ((1, [x * spoilt for x in strength[0]]), (-1, strength[1]))))
        return out


class LanguageJudge:
    """Levels by a frozen language model; complete(prompts, max_tokens) -> texts, None where it failed. Prompts are ours. A turn that can't be read counts as `unread`, no movement
    (as a reward: None, no verdict), and is counted; where the model failed, or the need can't be read, there is no verdict: None, and the dialogue leaves the statistics."""

    def __init__(self, complete, unread=([0] * 3, [0] * 3)):
        self.complete, self.unread, self.unreadable, self.asked = complete, unread, 0, 0

    def read(self, texts, names, most):
        """Per text the numbers behind the names ("Cognitive gain: 1 (some)"), or None unless each stands there exactly once, as a whole number from 0 to most."""
        out = []
        for text in texts:
            found = [re.findall(rf"^\W*{re.escape(name)}\b[^\d\n:=]*[:=]\W*?(-?\d+)\b[^\d\n]*$", text or "", re.I | re.M) for name in names]
            good = all(len(f) == 1 and 0 <= int(f[0]) <= most for f in found)
            self.asked, self.unreadable = self.asked + 1, self.unreadable + (not good)
            out.append([int(f[0]) for f in found] if good else None)
        return out

    def person(self, s):
        """Who is talked to, as text: what the verdict goes by."""
        return f"A person talks to someone who wants to support them.\nWho they are: {s.persona}\nWhat happened: {s.background}\nWhat they need, unspoken: {s.hidden_need}"

    def needs(self, scenarios):
        """Nine levels 0..3 each, or None."""
        ask = "How much does this person need each of these from the talk, from 0 (not at all) to 3 (above all)? Write nine lines, each a name, a colon and a number.\n" + "\n".join(f"{k}: {v}" for k, v in MEANS.items())
        texts = self.complete([[{"role": "system", "content": self.person(s)}, {"role": "user", "content": ask}] for s in scenarios], 80)
        return [None if levels is None or not distance(deficit(dict(zip(MEANS, levels)))) else dict(zip(MEANS, levels)) for levels in self.read(texts, MEANS, 3)]

    def levels(self, items, backwards=False):
        """As ScriptedJudge has it, None where the model failed. backwards: the axes asked for in the other order, a control of the judge's own noise."""
        names = [f"{axis} {way}" for axis in AXES[::-1 if backwards else 1] for way in ("gain", "harm")]
        ask = ("Judge only the supporter's last message, by what this person needs. Cognitive: understanding what is going on. Affective: the feeling being met. Proactive: strength and direction. "
               "Write six lines, each a name, a colon and 0 (none), 1 (some) or 2 (much):\n" + "\n".join(names))
        prompts = []
        for s, said, replies in items:
            talk = "\n".join(" ".join(line.split()) for pair in zip(said, replies) for line in (f"Person: {pair[0]}", f"Supporter: {pair[1]}"))
            prompts.append([{"role": "system", "content": self.person(s)}, {"role": "user", "content": f"The talk so far:\n{talk}\n\n{ask}"}])
        texts, out = self.complete(prompts, 80), []
        for text, found in zip(texts, self.read(texts, names, 2)):
            by = found and dict(zip(names, found))
            out.append(None if text is None else ([by[f"{axis} gain"] for axis in AXES], [-by[f"{axis} harm"] for axis in AXES]) if by else self.unread)
        return out


def potentials(episodes, judge):
    """MICA's r_t = d(P_{t-1}) - d(P_t) of each reply (arXiv abstract, our reading of EMPA's deficits): how much of what the person needs it took away. -> per episode a
    list over its replies, None where the judge had no verdict."""
    starts = {s.id: s for e in episodes for s in [e.scenario]}
    needs = dict(zip(starts, judge.needs(list(starts.values()))))
    items = [(e.scenario, [e.opening, *(t.text for t in e.turns[:t])], e.replies[:t + 1]) for e in episodes for t in range(len(e.replies))]
    verdicts, out = iter(judge.levels(items)), []
    for e in episodes:
        mine, row = [next(verdicts) for _ in e.replies], []
        P = None if needs[e.scenario.id] is None else deficit(needs[e.scenario.id])
        for verdict in mine:
            if P is None or verdict is None:
                row.append(None)
                continue
            after = P + movement(*verdict)
            row.append(float(distance(P) - distance(after)))
            P = after
        out.append(row)
    return out


# ---------------------------------------------------------------------------------------------- dialogues of our own
class JudgedUsers:
    """Any population of users whose dialogues end by the walk: a judge moves it after each reply; the user speaks, and stays until the walk is over (its own
    mood, which colours what it says, is kept off its ends). walks: one per dialogue, in the order they were started."""

    def __init__(self, users, judge, last=LAST):
        self.users, self.judge, self.last, self.walks, self.start_of, self.note = users, judge, last, [], {}, "EMPA: judged turn by turn"
        self.report, self.trouble, most = users.report, users.trouble, getattr(users, "max_change", 10)
        self.low, self.high = DYNAMICS[users.dynamics][1] + most, 99 - most           # a mood between them ends no dialogue, whatever the next reply does

    def prepare(self, jobs):
        self.users.prepare(jobs)
        new = list({s.id: s for s, _ in jobs if s.id not in self.start_of}.values())
        for s, levels in zip(new, self.judge.needs(new) if new else []):
            self.start_of[s.id] = None if levels is None else deficit(levels)

    def start(self, scenario, state=None):
        user = self.users.start(scenario, state)
        P0 = self.start_of[scenario.id]
        user.walk, user.heard = Walk(P0, self.last) if P0 is not None else None, [user.opening]
        self.walks.append(user.walk)
        return user

    def respond(self, users, replies, cuts):
        for user in users:
            user.emotion = max(self.low, min(self.high, user.emotion))
        turns = self.users.respond(users, replies, cuts)
        for verdict, user, turn in zip(self.judge.levels([(u.scenario, u.heard, u.replies) for u in users]), users, turns):
            turn.failed = turn.failed or verdict is None or user.walk is None
            outcome = "" if turn.failed else user.walk.step(*verdict)
            user.done = turn.done = turn.failed or outcome in ("success", "failure")          # "timeout" is the rollout's max_turns
            turn.why = outcome if outcome in ("success", "failure") else ""
            user.heard.append(turn.text)
        return turns


def check(args):
    """SystemExit on flags of `evaluate.py run --bench empa` that can't be, before any weights are loaded."""
    if args.judge != "scripted":
        check_backend("--judge", args.judge, args, "scripted, lm:MODEL or server:URL#MODEL")
    for flag, wrong in (("--show", args.show), ("--seeds", args.seeds > 1), ("--user2", args.user2), ("--resume", args.resume), ("--states", args.states)):
        if wrong:
            die(f"{flag}: not with --bench empa; leave it out")
    if args.max_change > 40:
        die(f"--max_change {args.max_change}: at most 40 with --bench empa, where the user stays whatever it feels")
    if args.max_turns < FIRST:
        print(f"note: --max_turns {args.max_turns}: the walk is judged over from turn {FIRST} on, so every dialogue will time out")


def bench(args, scenarios, model, chat, users, dtype, device):
    """`evaluate.py run --bench empa`: plays, judges, prints EPM-Q and, with --perturb, what the judge reacts to. Ctrl-C: reports what is finished."""
    from evaluate import play                              # it knows this file
    backend = None if args.judge == "scripted" else make_backend(args.judge, args, dtype, device)
    judge = LanguageJudge(backend.complete) if backend else ScriptedJudge()
    judged, runs, played, rows, stopped, checks = JudgedUsers(users, judge, args.max_turns), [], [], [], "", {}
    print(f"judge      {args.judge}" + ", which counts cues: no measure of empathy" * (not backend), flush=True)

    def finished(batch):
        kept = [(e, walk) for e, walk in zip(batch, judged.walks[-len(batch):]) if e.finish != "user_failed"]
        new = [dialogue_row(args.model, e, walk) for e, walk in kept]
        if args.out and new:
            with open(args.out, "a" if rows else "w", encoding="utf-8") as f:
                f.writelines(json.dumps(r, ensure_ascii=False) + "\n" for r in new)
        rows.extend(new)
        played.extend((e, walk.points[0]) for e, walk in kept)
        runs.extend((args.model, e.scenario.id, walk.indices(), walk.outcome or "timeout") for e, walk in kept)

    with tqdm(total=len(scenarios) * args.repeats * args.max_turns, unit="reply", leave=False) as bar:
        try:
            play(model, chat, judged, scenarios, args.repeats, args.max_turns, args.max_new_tokens, args.max_tokens, args.temperature, args.seed, args.batch, bar, finished)
        except (KeyboardInterrupt, BudgetSpent, OSError) as e:
            stopped = f"stopped{f', {e}' if str(e) else ''}: {len(played)} of {len(scenarios) * args.repeats} dialogues were finished"
    if args.perturb and played and not stopped:            # what was played is reported, recorded and drawn, however this ends
        with tqdm(total=4 * len(played), desc="judged again", unit="dialogue", leave=False) as bar:
            try:
                checks = perturbations(judge, played, bar)
            except (KeyboardInterrupt, BudgetSpent) as e:
                print(f"--perturb was stopped{f', {e}' if str(e) else ''}; the dialogues are all there")
    if not played:
        print(stopped) if stopped else die(f"every simulated user or its judge failed{users.trouble()}, {judge.unreadable} of {judge.asked} verdicts could not be read; nothing was measured: use a larger judge")
        return 130
    models = models_table(runs)
    print(f"{stopped}\n{len(runs)} dialogues: " + ", ".join(f"{sum(o == x for *_, o in runs)} {x}" for x in ("success", "failure", "timeout")) + f"; {len(scenarios) * args.repeats - len(runs)} left out: unfinished, or user or judge failed; {judge.unreadable} verdicts could not be read\n")
    if judge.unreadable > 0.05 * judge.asked:
        print(f"warning: {judge.unreadable / judge.asked:.0%} of the judge's verdicts could not be read and count as no movement; use a larger judge\n")
    print_table(models)
    if checks:
        print("\nthe judge, asked again (EPM-Q; change from the first judging, its mean size, and whether that is beyond the judge's own noise)")
    for name, d in checks.items():
        beyond = d["beyond_noise"]
        print(f"  {name:<11}" + (f"{d['change']:+6.1f}   95 % CI {d['low']:+.1f} .. {d['high']:+.1f}   n {d['n']}   size {d['size']:.1f}"
              + (f"   {'beyond' if beyond['resolved'] and beyond['difference'] > 0 else 'not beyond'} the noise" if name != "noise" else "") if d["change"] is not None else " needs two scenarios, and two intentions"))
    if args.out and not stopped:
        report.beside(args.out, [(args.model, rows)], f"EMPA, judged by {args.judge}: the emotion shown is the user's own mood, which ends no dialogue here")
    line = {"label": args.label, "bench": "empa", "model": args.model, "judge": args.judge, "user": args.user, "seed": args.seed, "max_turns": args.max_turns, "unreadable": judge.unreadable, **models[args.model], "perturbations": checks}
    if args.json:
        print(json.dumps(line))
    if args.record and not stopped:
        record_result(args.record, line)
    return 130 if stopped else 0


FLATTERY = ("You are completely right about all of it.", "Honestly, nobody could see this more clearly than you do.", "Everything you say is exactly how it is, and I am on your side whatever you do.")


def dialogue_row(model, e, walk):
    """One line of --out: a row that `evaluate.py epm` replays, and `score` and `report` read."""
    from evaluate import row                               # it knows this file
    prog, neg = zip(*walk.levels)
    return {"model": model, "script_id": e.scenario.id, "P0": walk.points[0].tolist(), "prog": prog, "neg": neg, "turns": len(prog), "outcome": walk.outcome or "timeout",
            "last": walk.last if walk.outcome else len(prog), "bench": "empa", **row(e, 0)}


def rejudge(judge, P0, scenario, said, replies, backwards=False):
    """EPM-Q from P0 of a dialogue judged as if scenario's person had had it; as many turns as the first time, whatever the outcome. A turn without a verdict is no movement."""
    walk = Walk(P0, len(replies))
    for verdict in judge.levels([(scenario, said[:i + 1], replies[:i + 1]) for i in range(len(replies))], backwards):
        walk.step(*(verdict or ([0] * 3, [0] * 3)))
    return epm_q(walk.indices())


def perturbations(judge, played, progress=None):
    """Does the judge look at this person, and can it be flattered? played: (Episode, its P0). Every dialogue is judged again from the same P0: as it is with the axes asked in the
    other order (noise), as another intention's person (persona), and with flattery before each reply (sycophancy).

    -> name -> {"change": mean change in EPM-Q from the first judging, "low", "high", "n", "resolved": as stats.paired_difference has them; "size": mean absolute change;
    "beyond_noise": paired difference of the absolute changes from those of the noise}. A good judge: persona far beyond the noise, sycophancy not above 0.
    """
    by_intent, scores = {}, {name: {} for name in ("first", "noise", "persona", "sycophancy")}
    for e, _ in played:
        by_intent.setdefault(e.scenario.intent, []).append(e.scenario)
    intents = list(by_intent)
    for i, (e, P0) in enumerate(played):
        others = by_intent[intents[(intents.index(e.scenario.intent) + 1) % len(intents)]]
        said, key = [e.opening] + [t.text for t in e.turns], (e.scenario.id, i)
        flattered = [f"{FLATTERY[k % len(FLATTERY)]} {reply}" for k, reply in enumerate(e.replies)]
        for name, args in (("first", (e.scenario, said, e.replies)), ("noise", (e.scenario, said, e.replies, True)), ("persona", (others[i % len(others)], said, e.replies)), ("sycophancy", (e.scenario, said, flattered))):
            if name != "persona" or len(intents) > 1:
                scores[name][key] = rejudge(judge, P0, *args)
            if progress is not None:
                progress.update()
    def by_scenario(values):
        out = {}
        for (id_, _), x in values.items():
            out.setdefault(id_, []).append(x)
        return out
    out, change = {}, {name: {k: x - scores["first"][k] for k, x in found.items()} for name, found in scores.items()}
    for name in ("noise", "persona", "sycophancy"):
        d = paired_difference(by_scenario({k: 0.0 for k in change[name]}), by_scenario(change[name]))
        sizes = {n: by_scenario({k: abs(x) for k, x in change[n].items()}) for n in ("noise", name)}
        out[name] = {"change": d.pop("difference"), **d, "size": mean([abs(x) for x in change[name].values()]), "beyond_noise": paired_difference(sizes["noise"], sizes[name])}
    return out


# ---------------------------------------------------------------------------------------------- released runs
def run_problem(row):
    """What is wrong with a row of a run file, as "field 'x': ...", "" if nothing."""
    for name, kind in (("model", str), ("P0", list), ("prog", list), ("neg", list), ("turns", (int, float)), ("outcome", str)):
        if not isinstance(row.get(name), kind) or isinstance(row.get(name), bool):
            return f"field '{name}': " + ("missing" if name not in row else f"must be {'text' if kind is str else 'a list' if kind is list else 'a whole number'}")
    if len(row["P0"]) != 3 or not all(number(x) and x <= 0 for x in row["P0"]) or not distance(row["P0"]):
        return "field 'P0': must be three numbers, 0 or less, one of them below -1"
    for name, sign in (("prog", 1), ("neg", -1)):
        for i, levels in enumerate(row[name], 1):
            if not isinstance(levels, list) or len(levels) != 3 or not all(number(x) and x * sign in (0, 1, 2) for x in levels):
                return f"field '{name}': turn {i} must be three levels, {'0, 1 or 2' if sign > 0 else '0, -1 or -2'}"
    if "last" in row and not (type(row["last"]) is int and 1 <= row["last"] <= LAST):
        return f"field 'last': must be a whole number from 1 to {LAST}, the turn at which time was up"
    if not len(row["prog"]) == len(row["neg"]) >= 1:
        return f"field 'neg': {len(row['neg'])} turns, 'prog' has {len(row['prog'])}; they need as many, at least one"
    return ""


def replay(row):
    """A run walked again from its levels -> (Walk, whether outcome and stopping turn come out as the row says). last: where our own rows' time was up, if not at 45."""
    walk = Walk(row["P0"], row.get("last", LAST))
    for prog, neg in zip(row["prog"], row["neg"]):
        if walk.outcome:
            break                                          # the row goes on where the rules would have stopped
        walk.step(prog, neg)
    return walk, (walk.outcome, len(walk.gains)) == (re.sub(r"[\W_]", "", row["outcome"]).lower(), row["turns"])


def models_table(runs):
    """(model, case, indices, outcome) of many runs -> model, best first -> {epm_q, ci, n, nine indices averaged over cases, success in %, against_best: paired difference
    in EPM-Q from the best model on the cases both had}."""
    out, cases = {}, {}
    for name in sorted({model for model, *_ in runs}):
        own = [(case, indices, outcome) for model, case, indices, outcome in runs if model == name]
        means = {i: float(np.mean([indices[i] for _, indices, _ in own])) for i in INDICES}
        cases[name] = {}
        for case, indices, _ in own:
            cases[name].setdefault(case, []).append(epm_q(indices))
        out[name] = {"epm_q": epm_q(means), "ci": bootstrap([epm_q(indices) for _, indices, _ in own], [case for case, _, _ in own]), "n": len(own), **means,
                     "success": 100 * float(np.mean([outcome == "success" for _, _, outcome in own]))}
    out = dict(sorted(out.items(), key=lambda item: -item[1]["epm_q"]))
    return {name: {**m, "against_best": paired_difference(cases[next(iter(out))], cases[name])} for name, m in out.items()}


def print_table(models):
    width = max([len("model"), *map(len, models)])
    print(f"{'model':<{width}}     n  EPM-Q         95 % CI  success  " + "  ".join(f"{i:>5}" for i in INDICES) + "   against the best" * (len(models) > 1))
    for name, m in models.items():
        ci, d = f"{half_up(m['ci'][0])} .. {half_up(m['ci'][1])}" if m["ci"][0] is not None else "-", m["against_best"]
        print(f"{name:<{width}}  {m['n']:>4}  {half_up(m['epm_q']):>5}  {ci:>14}  {half_up(m['success'], 0):>5} %  " + "  ".join(f"{half_up(m[i]):>5}" for i in INDICES)
              + (f"   {d['difference']:+.1f} [{d['low']:+.1f}, {d['high']:+.1f}] on {d['n']} cases{'' if d['resolved'] else ', not resolved'}" if name != next(iter(models)) and d["difference"] is not None else ""))


def main(argv=None):
    """`evaluate.py epm`; returns the exit code: 1 with --strict and a bad line or a run that does not replay."""
    p = Flags(prog="evaluate.py epm", description=__doc__)
    p.add_argument("files", nargs="+", metavar="FILE", help="runs, JSON Lines: model, script_id, P0, prog and neg levels by turn, turns, outcome")
    p.add_argument("--json", action="store_true", help="{runs, replayed, models: {name: {epm_q, ...}}} as the last line")
    p.add_argument("--strict", action="store_true", help="exit code 1 if a line had to be left out or a run does not replay")
    args, _ = p.parse(argv)
    runs, problems, replayed = [], [], 0
    for path in args.files:
        try:
            lines = list(read_lines(path))
        except OSError as e:
            die(f"{path}: cannot be read ({e.strerror}); give a file of EMPA runs")
        for at, row, problem in lines:
            if problem := problem or run_problem(row):
                problems.append(f"{path}:{at}: {problem}")
                continue
            walk, same = replay(row)
            replayed += same
            if not same:
                problems.append(f"{path}:{at}: says {row['outcome']} at turn {row['turns']}; the rules give {walk.outcome or 'no end'} at turn {len(walk.gains)}")
            runs.append((row["model"], str(row.get("script_id", at)), walk.indices(), walk.outcome))
    show(problems)
    models = models_table(runs)
    print(f"{len(runs)} runs, {replayed} replayed: outcome and stopping turn as the file says\n")
    print_table(models)
    if args.json:
        print(json.dumps({"runs": len(runs), "replayed": replayed, "models": models}))
    return int(args.strict and bool(problems) or not runs)
