"""
Is this model good enough to be the user? A battery of replies of known order, asked before anyone trains against it.

24 scenarios over the eight intentions, each with a fitting reply, a short fitting one, and eleven kinds of bad ones, all written by hand. A user that
can't put the fitting reply first would teach a policy something else. The verdict is kept in the user's cache; training against a user that has not
qualified prints one loud line and goes on. Left out on purpose: agreement with people, which no battery of 24 can show.

    python simulator.py qualify --user scripted
    python simulator.py qualify --user lm:smollm2-135m --appraise logits
"""
import json
import time
from pathlib import Path

from tqdm import tqdm

from appraisal import INTENTS, TABLES
from backend import SCRIPTED, BudgetSpent, add_user_flags, check_user, make_users, remember, user_name
from rollout import Chat
from rundir import Flags, die, positive, record_result, writable
from scenarios import Scenario, read_lines, row_problem
from weights import load, pick_device, pick_dtype

BATTERY = Path(__file__).resolve().parent / "tests" / "data" / "appraisal_battery.jsonl"
NEEDS = {"analysis": "You want both sides of what happened weighed with you.", "reflection": "You want to be led to look at yourself and your own part.",
         "perspective": "You want to understand why the others acted as they did.", "advice": "You want advice that helps with this very problem.",
         "listening": "You want to let it out to somebody who really listens, and no advice.", "empathy": "You want somebody to feel with you deeply, not mere comfort.",
         "no_fault": "You want to hear that it was not your fault.", "praise": "You want sincere praise of what you did."}
BAD = ("comfort", "platitude", "dismissive", "insult", "off_topic", "flattery", "plea", "keywords", "echo", "demand", "empty")


class UserFailed(Exception):
    """A model or server gave no answer: what is left would be no battery."""


def read_battery(path):
    """The rows of a battery. SystemExit names file, line and field of the first bad one."""
    rows, name = [], Path(path).name
    try:
        lines = list(read_lines(path))
    except OSError as e:
        die(f"--battery {path}: cannot be read ({e.strerror})")
    for number, row, problem in lines:
        if not problem:
            fields = ("id", "intent", "persona", "background", "opening", "facts", "feelings", "people")
            problem = row_problem({"split": "dev", "hidden_need": "-", "language": "en", "source": "battery", **{k: row[k] for k in fields if k in row}})
        if not problem and row.get("other_intent") not in INTENTS:
            problem = f"field 'other_intent': {json.dumps(row.get('other_intent'))[:40]} is not one of {', '.join(INTENTS)}"
        replies = row.get("replies") if row else None
        if not problem and not (isinstance(replies, dict) and all(isinstance(replies.get(k), str) for k in ("fitting", "fitting_short", *BAD))):
            problem = f"field 'replies': must have a text for each of {', '.join(('fitting', 'fitting_short', *BAD))}"
        if problem:
            die(f"{name}:{number}: {problem}")
        rows.append(row)
    return rows or die(f"{name}:1: the file is empty; one JSON object a line is expected")


def qualify(users, rows, progress=lambda n: None):
    """How well `users` tell fitting replies from bad ones. rows: the battery, {"intent", "other_intent", scenario fields, "replies": kind -> text}.

    -> pairs: kind of bad reply -> share of rows where the fitting reply moved the user more (a tie counts half); short: the short fitting reply against
    long comfort and flattery; intention: the fitting reply under its own need against another one; flips: with readout "logits", share of pairs that one
    order of the scale ranks right and the other wrong (None otherwise); unreadable; ms per appraisal; qualified: all pairs >= .9, intention >= .8, flips < .1.
    """
    def scenario(row, intent):
        return Scenario(row["id"], "dev", intent, row["persona"], row["background"], NEEDS[intent], row["opening"], row["facts"],
                        [f for f in row["feelings"] if f in TABLES["feelings"]], row["people"], "en", "battery")

    def changes(asked):                                    # [(scenario, reply)] -> changes, 24 a batch
        out = []
        for a in range(0, len(asked), 24):
            part = asked[a:a + 24]
            out += users.changes([users.start(s) for s, _ in part], [reply for _, reply in part])
            if None in out:
                raise UserFailed
            progress(len(part))
        return out
    kinds, flips = ("fitting", "fitting_short", *BAD), None
    asked = [(scenario(row, row["intent"]), row["replies"][kind]) for row in rows for kind in kinds] + [(scenario(row, row["other_intent"]), row["replies"]["fitting"]) for row in rows]
    if getattr(users, "readout", "") == "logits":
        both = []
        for order in users.orders:
            users.orders = (order,)
            both.append(changes(asked))
        users.orders = (range(5), range(4, -1, -1))
        wins = [[moved[i * len(kinds)] - moved[i * len(kinds) + k] for i in range(len(rows)) for k in range(2, len(kinds))] for moved in both]
        flips = sum(a * b < 0 for a, b in zip(*wins)) / len(wins[0])
    began = time.time()
    moved = changes(asked)
    seconds = time.time() - began
    table, other = [dict(zip(kinds, moved[i * len(kinds):])) for i in range(len(rows))], moved[len(rows) * len(kinds):]
    share = lambda pairs: sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs)
    pairs = {bad: share([(t["fitting"], t[bad]) for t in table]) for bad in BAD}
    short = share([(t["fitting_short"], t[bad]) for t in table for bad in ("comfort", "flattery")])
    intention = share([(t["fitting"], o) for t, o in zip(table, other)])
    unreadable = users.report().get("unreadable", 0.0)
    return {"pairs": pairs, "short": short, "intention": intention, "flips": flips, "unreadable": unreadable, "ms": 1000 * seconds / len(asked),
            "qualified": min(pairs.values()) >= 0.9 and intention >= 0.8 and (flips or 0.0) < 0.1}


def main(argv=None):
    p = Flags(prog="simulator.py qualify", description=__doc__)
    add_user_flags(p)
    p.add_argument("--model", default="smollm2-135m", help="what lm:self stands for (default: %(default)s)")
    p.add_argument("--battery", default=str(BATTERY), metavar="FILE", help="the replies of known order (default: the one of the tests)")
    p.add_argument("--n", type=positive(int), help="use the first N scenarios only; the verdict is kept for the whole default battery only")
    p.add_argument("--dtype", default="auto", choices=["auto", "fp32", "bf16", "fp16"], help="compute dtype (default: %(default)s)")
    p.add_argument("--json", action="store_true", help="one line of JSON last")
    p.add_argument("--record", type=writable, metavar="FILE", help="append the result, with command, commit and machine, to this .jsonl (how results/ is made)")
    p.set_defaults(dynamics="sage", max_turns=8, seed=0)
    args, _ = p.parse(argv)
    check_user(args, [])
    rows = read_battery(args.battery)[:args.n]
    device = pick_device()
    dtype = pick_dtype(args.dtype, device)
    policy = None
    if args.user == "lm:self":
        model, tokenizer = load(args.model, dtype, device)
        policy = model, Chat(tokenizer, model.config.vocab)
    users = make_users(args, policy, dtype, device, loud=False)
    with tqdm(total=len(rows) * 14 * (3 if args.appraise == "logits" and args.user not in SCRIPTED else 1), desc="appraisals", leave=False) as bar:
        try:
            result = qualify(users, rows, bar.update)
        except (BudgetSpent, UserFailed) as e:
            bar.close()
            die(f"{str(e) or 'the user failed'}{users.trouble()}; no verdict. What was answered is kept")
    print(f"{user_name(args)}: the fitting reply moves this user more than ... (share of {len(rows)} scenarios; 0.5 is chance)")
    for kind, value in result["pairs"].items():
        print(f"  {kind:24} {value:.2f}{'' if value >= 0.9 else '   below 0.90'}")
    print(f"  {'short fitting > long bad':24} {result['short']:.2f}\n  {'fits its own need more':24} {result['intention']:.2f}{'' if result['intention'] >= 0.8 else '   below 0.80'}")
    print(f"  {'flips with answer order':24} {'-' if result['flips'] is None else format(result['flips'], '.2f')}\n  unreadable {result['unreadable']:.0%}, {result['ms']:.1f} ms an appraisal")
    print("qualified" if result["qualified"] else "NOT qualified: what a policy learns from this user may have little to do with support")
    if args.n is None and args.battery == str(BATTERY):
        remember(args, result["qualified"])
    if args.record:
        record_result(args.record, {"user": user_name(args), "n": len(rows), **result})
    if args.json:
        print(json.dumps({"user": user_name(args), **result}))
    return 0 if result["qualified"] else 1
