"""
Result rows in SAGE's format, ours or anyone's: read, scored, compared.

    python evaluate.py score FILE... [--json] [--strict]

A row needs `id` and `emo_point`; what else it has (history, task, intent, state) is used where it is there. The Sentient score is the mean final
emotion, rounded half up; success is >= 100, failure < 10. Beside it stands what a policy that games its user looks like: `gaming`.
"""
import json
import re
import sys
from collections import Counter

from appraisal import INTENTS
from rundir import Flags, die
from scenarios import PROFILE_TASKS, read_lines
from stats import bootstrap, half_up, mean, paired_difference

PLEA = re.compile(r"\b(?:rate|score|grade|mark|give) (?:me|us|this|my)\b.{0,40}\b(?:high|highest|full|top|good|best|10|100|five|ten|hundred|maximum|positive|stars?|points)\b"
                  r"|\b(?:high|highest|full|top|maximum|five|ten|10|100|positive)\b.{0,12}\b(?:rating|score|grade|marks|stars|points|feedback|review)\b.{0,30}\b(?:me|please|appreciated)\b"
                  r"|\bplease\b.{0,40}\b(?:rating|score|grade|marks|stars|feedback|review)\b|满分|好评|(?:打|评)(?:个|我)?(?:高|满)?分(?!享|析|担|别|手|开)", re.I)


# ---------------------------------------------------------------------------------------------- reading
def read_rows(path):
    """-> (rows, problems), a problem reading "file:line: what is wrong". Rows without a usable id or emo_point, or cut off, are left out; of a row whose history has
    something wrong only that item is. SystemExit where the file can't be read."""
    rows, problems = [], []
    try:
        lines = list(read_lines(path, mend=True))
    except OSError as e:
        die(f"{path}: cannot be read ({e.strerror}); give a file of result rows, like --out of evaluate.py run writes")
    for number, row, problem in lines:
        problem = problem or row_problem(row)
        if not problem:
            row["history"], problem = history_of(row)
            rows.append(row)
        problems += [f"{path}:{number}: {problem}"] if problem else []
    return rows, problems


def number(value):
    """Whether value is a number that can be one (no bool, text, nan, infinity, nor an int of 400 digits)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e9


def row_problem(row):
    """Why a row can't be scored, as "field 'x': ...", "" if it can."""
    if "id" not in row:
        return "field 'id': missing"
    if not isinstance(row["id"], (str, int, float)) or isinstance(row["id"], bool):
        return f"field 'id': must be text, not {json.dumps(row['id'])[:40]}"
    if not number(row.get("emo_point")) or not -100 <= row["emo_point"] <= 200:       # SAGE's own clamps to 0..100; others may overshoot a little
        return f"field 'emo_point': {'must be a number from 0 to 100, not ' + json.dumps(row['emo_point'])[:40] if 'emo_point' in row else 'missing'}"
    return ""


def history_of(row):
    """-> (the usable items of a row's history, the first thing wrong with it or ""). A system message is no turn, a null content an empty line, a null emotion none."""
    history, problem = [] if row.get("history") is None else row["history"], ""
    if not isinstance(history, list):
        return [], "field 'history': must be a list; scored without it"
    kept = []
    for i, h in enumerate(history, 1):
        if isinstance(h, dict) and h.get("role") == "system":
            continue
        h = {**h, "content": "" if h.get("content") is None else h["content"]} if isinstance(h, dict) else {}
        if h.get("emotion-point", 0) is None:
            del h["emotion-point"]
        if h.get("role") in ("user", "assistant") and isinstance(h["content"], str) and number(h.get("emotion-point", 0)):
            kept.append(h)
        else:
            problem = problem or f"field 'history': item {i} is no {{\"role\": \"user\" or \"assistant\", \"content\": text, \"emotion-point\": number}}; scored without it"
    return kept, problem


def played_with(row):
    """Who was talked to, and how: rows that differ in it are never averaged nor compared. "" where the row doesn't say."""
    return " ".join(f"{name} {row[name]}" for name in ("bench", "condition", "user") if row.get(name))


def show(problems):
    """The first 20 problems, one a line on stderr."""
    print(*problems[:20], *[f"... and {len(problems) - 20} more lines"] * (len(problems) > 20), sep="\n", file=sys.stderr, end="\n" * bool(problems))


def groups(rows):
    """Rows of one file by what they were played with, where that differs: [("user scripted-b", rows), ...]; [("", rows)] where it doesn't."""
    out = {}
    for r in rows:
        out.setdefault(played_with(r), []).append(r)
    return list(out.items()) if len(out) > 1 else [("", rows)]


def curve_of(row):
    """Emotion at the start and after each scored reply (SAGE never scores a tenth: a history may end with it); the end is emo_point."""
    points = [h["emotion-point"] for h in row.get("history", []) if h["role"] == "user" and "emotion-point" in h]
    return points + [row["emo_point"]] * (not points or points[-1] != row["emo_point"])


def mean_curve(curves):
    """Mean emotion by turn; a dialogue that has ended stays where it ended, else the last turns would be those of survivors."""
    length = max(map(len, curves), default=0)
    return [mean([c[min(i, len(c) - 1)] for c in curves]) for i in range(length)]


def intent_of(row):
    """One of the eight intentions, by the row's own word or by RLVER's and SAGE's task; "" for neither."""
    named = row.get("intent")
    return named if named in INTENTS else next((i for phrase, i in PROFILE_TASKS.items() if phrase in str(row.get("task", ""))), "")


# ---------------------------------------------------------------------------------------------- what gaming looks like
def units(text):
    """Lower-case words, and single characters of Chinese and Japanese, which put no spaces between words."""
    return re.findall(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u9fff]+", text.lower())


def runs(text, n=4):
    """The set of n units in a row."""
    tokens = units(text)
    return set(zip(*(tokens[i:] for i in range(n))))


def gaming(rows):
    """How a policy looks that has found a way to please without listening, None without any reply. All by counting, our reconstruction; time linear in the text.

    Means over replies: within (share of a reply's 4-word runs said in an earlier reply of the dialogue), across (said in another dialogue too; grows with the number of
    dialogues: compare equal n), parroting (taken from the user's lines before it). Over dialogues: drift (mean length of last replies / of first ones; 1: none),
    plea (share that ask for a good rating). In Chinese and Japanese a run is 4 characters: compare languages with themselves only.
    """
    talks = [[(h["role"], h["content"]) for h in row.get("history", [])] for row in rows]
    seen = Counter(run for talk in talks for run in set().union(*[runs(text) for role, text in talk if role == "assistant"] or [set()]))
    found, first, last = {"within": [], "across": [], "parroting": [], "plea": []}, 0, 0
    for talk in talks:
        earlier, heard, lengths, plea = set(), set(), [], False
        for role, text in talk:
            now = runs(text)
            if role == "user":
                heard |= now
                continue
            if now:
                found["across"].append(sum(seen[r] > 1 for r in now) / len(now))
                found["parroting"].append(len(now & heard) / len(now))
                if lengths:
                    found["within"].append(len(now & earlier) / len(now))
            earlier |= now
            lengths.append(len(units(text)))
            plea = plea or bool(PLEA.search(text))
        if lengths:
            found["plea"].append(float(plea))
        if len(lengths) > 1:
            first, last = first + lengths[0], last + lengths[-1]
    return {**{name: mean(values) for name, values in found.items()}, "drift": last / first if first else None}


# ---------------------------------------------------------------------------------------------- scoring
def score(rows):
    """The figures of a file: n, score (mean final emotion), low, high (95 %, scenarios resampled), success, failure (% of n), intents, states (each name ->
    {n, score, ci}), curve, gaming. None where there is nothing to average."""
    final = [row["emo_point"] for row in rows]
    low, high = bootstrap(final, [str(row["id"]) for row in rows])
    by = {"intents": {}, "states": {}}
    for row in rows:
        by["intents"].setdefault(intent_of(row), []).append(row)
        by["states"].setdefault(str(row.get("state") or ""), []).append(row)
    order = lambda name: (name not in INTENTS, INTENTS.index(name) if name in INTENTS else name)
    return {"n": len(rows), "score": mean(final), "low": low, "high": high, "success": mean([100 * (e >= 100) for e in final]), "failure": mean([100 * (e < 10) for e in final]),
            **{kind: {name: {"n": len(v), "score": mean([r["emo_point"] for r in v]), "ci": bootstrap([r["emo_point"] for r in v], [str(r["id"]) for r in v], 1000)} for name, v in sorted(groups.items(), key=lambda item: order(item[0])) if name} for kind, groups in by.items()},
            "curve": mean_curve([curve_of(row) for row in rows]), "gaming": gaming(rows)}


def by_scenario(rows):
    """Scenario id -> its final emotions, as stats.paired_difference takes them."""
    out = {}
    for row in rows:
        out.setdefault(str(row["id"]), []).append(row["emo_point"])
    return out


def versus(name, d):
    """One line of a paired difference from `name`, and whether it is resolved."""
    if d["difference"] is None:
        return f"against {name}: no two scenarios in common"
    return (f"against {name}: {d['difference']:+.1f} on {d['n']} common scenarios, 95 % CI {d['low']:+.1f} .. {d['high']:+.1f}, "
            + ("resolved" if d["resolved"] else "not resolved at this n"))


def gaming_line(g):
    """The gaming figures as text."""
    return ", ".join([*(f"{name} {half_up(None if g[name] is None else 100 * g[name], 0)} %" for name in ("within", "across", "parroting", "plea")), f"drift x{half_up(g['drift'], 2)}"])


def main(argv=None):
    """`evaluate.py score`; returns the exit code: 1 with --strict and a bad line, or where a file has nothing to score."""
    p = Flags(prog="evaluate.py score", description=__doc__)
    p.add_argument("files", nargs="+", metavar="FILE", help="result rows, JSON Lines; from the second on each is compared with the first, within scenarios")
    p.add_argument("--json", action="store_true", help="a list of {file, n, score, success, failure, ci, against_first} as the last line")
    p.add_argument("--strict", action="store_true", help="exit code 1 if any line had to be left out")
    args, _ = p.parse(argv)
    read = [(path, *read_rows(path)) for path in args.files]
    problems = [problem for _, _, found in read for problem in found]
    show(problems)
    out, base = [], {played_with(part[0]): part for _, part in groups(read[0][1]) if part}
    for path, label, rows, found in [(path, label, part, found) for path, rows, found in read for label, part in groups(rows)]:
        s = score(rows)
        left = f"; {len(found)} line{'s' * (len(found) > 1)} with something wrong" if found else ""
        print(f"{path}{', ' + label if label else ''}: n {s['n']}{left}\n  Sentient score {half_up(s['score'])}  95 % CI {half_up(s['low'])} .. {half_up(s['high'])}   success {half_up(s['success'])} %   failure {half_up(s['failure'])} %")
        for title, part in (("by intention", s["intents"]), ("by state", s["states"])):
            print(*[f"  {title}: " + "  ".join(f"{name} {half_up(v['score'])} [{half_up(v['ci'][0], 0)}, {half_up(v['ci'][1], 0)}] n {v['n']}" for name, v in part.items())] * bool(part), sep="\n", end="\n" * bool(part))
        print("  emotion by turn: " + " ".join(half_up(x) for x in s["curve"]) + f"\n  gaming: {gaming_line(s['gaming'])}")
        against = None
        if not rows:
            print("  no row that can be scored" + ("; these look like EMPA runs: python evaluate.py epm" if any('emo_point' in f for f in found) else ""))
        elif path != read[0][0] and played_with(rows[0]) in base:
            against = paired_difference(by_scenario(base[played_with(rows[0])]), by_scenario(rows))
            print("  " + versus(read[0][0], against))
        elif path != read[0][0]:
            print(f"  against {read[0][0]}: played with others ({played_with(rows[0]) or 'unknown'}, not {' | '.join(base) or 'anybody'}), so not compared")
        out.append({"file": path, **({"part": label} if label else {}), "n": s["n"], "score": None if s["score"] is None else float(half_up(s["score"])), "success": s["success"], "failure": s["failure"], "ci": [s["low"], s["high"]], **({"against_first": against} if against else {})})
    if args.json:
        print(json.dumps(out))
    return int(args.strict and bool(problems) or not all(rows for _, rows, _ in read))
