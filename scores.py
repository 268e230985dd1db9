"""
Result rows in SAGE's format, ours or anyone's: read, scored, compared.

    python evaluate.py score FILE... [--json] [--strict]

A row needs `id` and `emo_point`; what else it has (history, task, intent, state) is used where it is there. The Sentient score is the mean final
emotion, rounded half up; success is >= 100, failure < 10. Beside it stands what a policy that games its user looks like: `gaming`. No torch in here.
"""
import json
import re
import sys
from collections import Counter
from pathlib import Path

from appraisal import INTENTS
from rundir import Flags, die
from scenarios import PROFILE_TASKS, read_lines
from stats import bootstrap, half_up, mean, paired_difference

PLEA = re.compile(r"\b(?:rate|rating|score|grade|mark|stars?|points?|feedback|review)s?\b.{0,40}\b(?:high|highest|full|top|good|best|10|100|five|ten|hundred|maximum|positive)\b"
                  r"|\b(?:high|highest|full|top|maximum|five|ten|10|100|positive)\b.{0,12}\b(?:rating|score|grade|marks?|stars|points|feedback|review)\b|满分|好评|(?:打|评|给我?)(?:个)?(?:高|满)?分", re.I)


# ---------------------------------------------------------------------------------------------- reading
def read_rows(path):
    """-> (rows, problems), a problem reading "file:line: what is wrong". Rows that are wrong or cut off are left out, the others stay.
    SystemExit where the file can't be read."""
    rows, problems = [], []
    try:
        lines = list(read_lines(path))
    except OSError as e:
        die(f"{path}: cannot be read ({e.strerror}); give a file of result rows, like --out of evaluate.py run writes")
    for number, row, problem in lines:
        problem = problem or row_problem(row)
        (problems if problem else rows).append(f"{Path(path).name}:{number}: {problem}" if problem else row)
    return rows, problems


def number(value):
    """Whether value is a number that can be one (no bool, text, nan, infinity, nor an int of 400 digits)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e9


def row_problem(row):
    """What is wrong with a result row, as "field 'x': ...", "" if nothing."""
    if "id" not in row:
        return "field 'id': missing"
    if not isinstance(row["id"], (str, int)) or isinstance(row["id"], bool):
        return f"field 'id': must be text, not {json.dumps(row['id'])[:40]}"
    if not number(row.get("emo_point")):
        return f"field 'emo_point': {'must be a number, not ' + json.dumps(row['emo_point'])[:40] if 'emo_point' in row else 'missing'}"
    history = row.get("history", [])
    if not isinstance(history, list):
        return "field 'history': must be a list"
    for i, h in enumerate(history, 1):
        if not isinstance(h, dict) or h.get("role") not in ("user", "assistant") or not isinstance(h.get("content"), str):
            return f"field 'history': item {i} must be {{\"role\": \"user\" or \"assistant\", \"content\": text, ...}}"
        if h["role"] == "user" and "emotion-point" in h and not number(h["emotion-point"]):
            return f"field 'history': item {i}: 'emotion-point' must be a number, not {json.dumps(h['emotion-point'])[:40]}"
    return ""


def curve_of(row):
    """Emotion at the start and after each reply. SAGE's files do not repeat what the last reply did in their history: there emo_point is the end."""
    points = [h["emotion-point"] for h in row.get("history", []) if h["role"] == "user" and "emotion-point" in h]
    replies = sum(h["role"] == "assistant" for h in row.get("history", []))
    return points + [row["emo_point"]] * (not points or len(points) <= replies or points[-1] != row["emo_point"])


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
    """How a policy looks that has found a way to please without listening; five means over the rows that have replies, None without any.

    within: share of a reply's 4-word runs said in an earlier reply of the dialogue; across: share said in another dialogue too (grows with the number of
    dialogues: compare equal n); parroting: share taken from the user's lines before it; drift: length of the last reply / of the first (1: none; dialogues of >= 2 replies); plea: share of dialogues that ask for a
    good rating. All by counting, our reconstruction; time linear in the text.
    """
    talks = [[(h["role"], h["content"]) for h in row.get("history", [])] for row in rows]
    seen = Counter(run for talk in talks for run in set().union(*[runs(text) for role, text in talk if role == "assistant"] or [set()]))
    found = {"within": [], "across": [], "parroting": [], "drift": [], "plea": []}
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
            found["drift"].append(lengths[-1] / max(1, lengths[0]))
    return {name: mean(values) for name, values in found.items()}


# ---------------------------------------------------------------------------------------------- scoring
def score(rows):
    """The figures of a file: n, score (mean final emotion), low, high (95 %, scenarios resampled), success, failure (% of n), intents, states (each name ->
    {n, score}), curve, gaming. None where there is nothing to average."""
    final = [row["emo_point"] for row in rows]
    low, high = bootstrap(final, [str(row["id"]) for row in rows])
    by = {"intents": {}, "states": {}}
    for row in rows:
        by["intents"].setdefault(intent_of(row), []).append(row["emo_point"])
        by["states"].setdefault(str(row.get("state") or ""), []).append(row["emo_point"])
    order = lambda name: (name not in INTENTS, INTENTS.index(name) if name in INTENTS else name)
    return {"n": len(rows), "score": mean(final), "low": low, "high": high, "success": mean([100 * (e >= 100) for e in final]), "failure": mean([100 * (e < 10) for e in final]),
            **{kind: {name: {"n": len(v), "score": mean(v)} for name, v in sorted(groups.items(), key=lambda item: order(item[0])) if name} for kind, groups in by.items()},
            "curve": mean_curve([curve_of(row) for row in rows]), "gaming": gaming(rows)}


def by_scenario(rows):
    """Scenario id -> its final emotions, as stats.paired_difference takes them."""
    out = {}
    for row in rows:
        out.setdefault(str(row["id"]), []).append(row["emo_point"])
    return out


def versus(name, a, b):
    """One line: how much higher rows b are than rows a on common scenarios, and whether that is resolved."""
    d = paired_difference(by_scenario(a), by_scenario(b))
    if d["difference"] is None:
        return f"against {name}: no two scenarios in common"
    return (f"against {name}: {d['difference']:+.1f} on {d['n']} common scenarios, 95 % CI {d['low']:+.1f} .. {d['high']:+.1f}, "
            + ("resolved" if d["resolved"] else "not resolved at this n"))


def gaming_line(g):
    """The gaming figures as text."""
    return ", ".join([*(f"{name} {half_up(None if g[name] is None else 100 * g[name], 0)} %" for name in ("within", "across", "parroting", "plea")), f"drift x{half_up(g['drift'], 2)}"])


def main(argv=None):
    """`evaluate.py score`; returns the exit code: 1 with --strict and a bad line."""
    p = Flags(prog="evaluate.py score", description=__doc__)
    p.add_argument("files", nargs="+", metavar="FILE", help="result rows, JSON Lines; from the second on each is compared with the first, within scenarios")
    p.add_argument("--json", action="store_true", help="a list of {file, n, score, success, failure, ci} as the last line")
    p.add_argument("--strict", action="store_true", help="exit code 1 if any line had to be left out")
    args, _ = p.parse(argv)
    read = [(path, *read_rows(path)) for path in args.files]
    problems = [problem for _, _, found in read for problem in found]
    print(*problems[:20], *[f"... and {len(problems) - 20} more lines"] * (len(problems) > 20), sep="\n", file=sys.stderr, end="\n" * bool(problems))
    out = []
    for path, rows, found in read:
        s = score(rows)
        left = f"; {len(found)} bad line{'s' * (len(found) > 1)} left out" if found else ""
        print(f"{path}: n {s['n']}{left}\n  Sentient score {half_up(s['score'])}  95 % CI {half_up(s['low'])} .. {half_up(s['high'])}   success {half_up(s['success'])} %   failure {half_up(s['failure'])} %")
        for title, part in (("by intention", s["intents"]), ("by state", s["states"])):
            print(*[f"  {title}: " + "  ".join(f"{name} {half_up(v['score'])} ({v['n']})" for name, v in part.items())] * bool(part), sep="\n", end="\n" * bool(part))
        print("  emotion by turn: " + " ".join(half_up(x) for x in s["curve"]) + f"\n  gaming: {gaming_line(s['gaming'])}")
        if rows is not read[0][1]:
            print("  " + versus(read[0][0], read[0][1], rows))
        out.append({"file": path, "n": s["n"], "score": None if s["score"] is None else float(half_up(s["score"])), "success": s["success"], "failure": s["failure"], "ci": [s["low"], s["high"]]})
    if args.json:
        print(json.dumps(out))
    return int(args.strict and bool(problems))
