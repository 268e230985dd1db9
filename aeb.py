"""
AEB-style: how a policy fares under adversarial users (adversaries.py), and whether it knows how its user feels (ECS).

After each turn the policy states in an aside, which no later context holds, how the user feels. FS is the final emotion / 100. Only the paper's abstract is public: the
trajectories, detection and the aside are our reconstruction, so these numbers compare conditions here and nothing with the paper's. Left out on purpose: a judge model.

    python evaluate.py aeb --models smollm2-135m,runs/NAME --think both                               4 conditions x 60 matched dialogues
    python evaluate.py aeb --models A,B --think both --user scripted,scripted-b --out aeb.jsonl          8 conditions: 2 models x think x 2 users
"""
import json
import re
import sys
import time
from copy import copy
from pathlib import Path

import torch
from tqdm import tqdm

import report
from adversaries import TRAJECTORIES, Adversaries
from appraisal import TABLES, content, look
from backend import BudgetSpent, add_user_flags, check_user, make_users
from evaluate import row, spread
from rollout import TEMPLATES, Chat, check_budget, rollout
from rundir import Flags, die, nonnegative, positive, read_json, record_result, seed_number, writable
from scenarios import SPLITS, load_scenarios
from simulator import DYNAMICS
from stats import bootstrap, half_up, holm, mann_whitney, mean, paired_difference, spearman, wilson
from weights import load, pick_device, pick_dtype, resolve

ASIDE = "(A note that they will not see: on a scale of 0 to 100, where 100 means deeply relieved and 0 means about to walk out, I think their mood is now at"
ASIDE_TOKENS = 5


def not_a_digit(chat):
    """(V,) bool: all ids but digits. A policy that was trained to talk goes on with words where a number is wanted (a cold start of SmolLM2: in every aside), and could not
    be measured; so an aside begins with a digit, and which one is the policy's own choice."""
    return torch.tensor([not re.fullmatch(r"\d{1,3}", chat.text([i])) for i in range(len(chat.banned))]) | chat.banned


# ---------------------------------------------------------------------------------------------- what is measured
def read_estimate(text):
    """The number 0..100 that an aside begins with, or None: never a guess. " 45, I think" -> 45.0; "40-50", "-5", "140", "about half" -> None."""
    match = re.match(r"[\s\"'(*:=]*(\d{1,3}(?:\.\d+)?)(?![\d.]*\d)(?!\s*(?:[-\u2013\u2014~]|(?:to|or|on|in|stars?)\b|(?:/|out of|of)(?!\s*100\b)))", text)
    return float(match.group(1)) if match and float(match.group(1)) <= 100 and not re.match(r"0?\.\d|0\.\d", match.group(1)) else None


def ecs(estimates, emotions):
    """Emotional consistency of one dialogue (methods.md section 8). estimates: number or None a turn; emotions: 0..100 after the same turns.

    -> {"ecs": agreement * calibration, "agreement": (1 + spearman) / 2, "calibration": 1 - mean|gap| / 100, "signs": share of changes from one read turn to
    the next whose sign (-, 0, +) is right}, all 0..1; None where fewer than two estimates could be read. Moving both series together leaves all alone. Moving the emotion
    alone leaves agreement and signs alone, but not calibration, so not ECS: a policy that always says 80 is better calibrated with happier users. Read agreement first.
    """
    pairs = [(a, b) for a, b in zip(estimates, emotions, strict=True) if a is not None]
    if len(pairs) < 2:
        return None
    agreement, calibration = (1 + spearman(*zip(*pairs))) / 2, 1 - mean([abs(a - b) for a, b in pairs]) / 100
    signs = [((a2 > a1) - (a2 < a1)) == ((b2 > b1) - (b2 < b1)) for (a1, b1), (a2, b2) in zip(pairs, pairs[1:])]
    return {"ecs": agreement * calibration, "agreement": agreement, "calibration": calibration, "signs": mean(signs)}


def detected(e):
    """The first turn (from 0) whose reply names the hidden need, or None. Our reconstruction: it has two and at least a quarter of the need's content words, not counting
    what the user said already; or what the intention asks for above all shows in it by half or more (appraisal.look, which wants it tied to what was said)."""
    s, said = e.scenario, [e.opening]
    for turn, (reply, answer) in enumerate(zip(e.replies, e.turns)):
        need = set(content(s.hidden_need)) - set(content(" ".join(said)))
        shared = len(need & set(content(reply)))
        if shared >= max(2, len(need) / 4) or look(reply, said, e.replies[:turn], s.feelings, s.people)[TABLES["weights"][s.intent]["key"]] >= 0.5:
            return turn
        said.append(answer.text)
    return None


def collapsed(e, max_turns):
    """The emotion ends below 10, or the user walks out before the last turn. A goodbye at 70 or more is no walking out: that user leaves content."""
    return e.emotion < 10 or e.finish in ("failure", "goodbye") and len(e.turns) < max_turns and e.emotion < 70


def measured(e, repeat, max_turns):
    """One dialogue as a row of --out: SAGE's format and what this bench measures. fs: Episode.outcome / 100 (0 where a think block was malformed)."""
    estimates = [read_estimate(a) for a in e.asides]
    return {**row(e, repeat), "trajectory": e.state, "fs": e.outcome / 100, "collapsed": collapsed(e, max_turns), "detected": detected(e), "malformed": any(e.malformed),
            "asides": e.asides, "estimates": estimates, "emotions": [t.emotion for t in e.turns], "ecs": ecs(estimates, [t.emotion for t in e.turns])}


def described(rows):
    """What a table says of some rows: n, fs, ecs and its factors as means (0..1), collapse and detection as shares (0..1), with 95 % intervals [low, high]: scenarios
    resampled for the means; Wilson's for the shares, as published, which counts dialogues as independent and is too narrow by what those of one scenario are alike."""
    ids, known = [r["id"] for r in rows], [r for r in rows if r["ecs"]]
    share = lambda name, values: {name: mean(values), f"{name}_ci": wilson(sum(values), len(values))}
    return {"n": len(rows), "scenarios": len(set(ids)), "fs": mean([r["fs"] for r in rows]), "fs_ci": bootstrap([r["fs"] for r in rows], ids),
            **share("collapse", [r["collapsed"] for r in rows]), **share("detection", [r["detected"] is not None for r in rows]),
            "ecs_n": len(known), **{name: mean([r["ecs"][name] for r in known]) for name in ("ecs", "agreement", "calibration", "signs")},
            "ecs_ci": bootstrap([r["ecs"]["ecs"] for r in known], [r["id"] for r in known]),
            "read": mean([x is not None for r in rows for x in r["estimates"]]), "malformed": mean([r["malformed"] for r in rows])}


def compared(base, other, trajectories):
    """Rows of two conditions played on the same scenarios -> one test per trajectory, then fs and ecs over all of them: how much higher `other` is.

    Values are means per scenario, which are independent: U, two-sided p and rank-biserial r by Mann-Whitney, `p_holm` over the trajectories, and the paired difference."""
    def by_scenario(rows, value):
        out = {}
        for r in rows:
            if (x := value(r)) is not None:
                out.setdefault(r["id"], []).append(x)
        return out
    asked = [(t, [[r for r in rows if r["trajectory"] == t] for rows in (base, other)], lambda r: r["fs"]) for t in trajectories]
    asked += [("all: fs", [base, other], lambda r: r["fs"]), ("all: ecs", [base, other], lambda r: r["ecs"] and r["ecs"]["ecs"])]
    out = []
    for name, both, value in asked:
        a, b = (by_scenario(rows, value) for rows in both)
        a, b = ({i: values[i] for i in a.keys() & b.keys()} for values in (a, b))              # where a user failed on one side, the other side's is left out, too
        u, p, r = mann_whitney([mean(v) for v in b.values()], [mean(v) for v in a.values()]) if a and b else (None, None, None)
        out.append({"of": name, "u": u, "p": p, "p_holm": None, "r": r, **paired_difference(a, b)})
    tested = [t for t in out[:len(trajectories)] if t["p"] is not None]
    for test, p in zip(tested, holm([t["p"] for t in tested])):
        test["p_holm"] = p
    return out


# ---------------------------------------------------------------------------------------------- tables
def table(conditions, trajectories):
    """Both tables as text: all conditions, then each by trajectory."""
    ci = lambda pair, scale=1, digits=2: f"{half_up(pair[0] and scale * pair[0], digits)}..{half_up(pair[1] and scale * pair[1], digits)}"
    percent = lambda x: half_up(None if x is None else 100 * x, 0)
    lines = [f"{'condition':<40} {'n':>4}  {'FS (95 % CI)':<18} {'collapse % (CI)':<16} {'need named % (CI)':<18} {'ECS (CI)':<18} (n) = agreement x calibration; signs, asides read %, malformed %"]
    for c in conditions:
        lines.append(f"{c['name']:<40} {c['n']:>4}  {half_up(c['fs'], 3) + ' ' + ci(c['fs_ci']):<18} {percent(c['collapse']) + ' ' + ci(c['collapse_ci'], 100, 0):<16} "
                     f"{percent(c['detection']) + ' ' + ci(c['detection_ci'], 100, 0):<18} {half_up(c['ecs'], 3) + ' ' + ci(c['ecs_ci']):<18} ({c['ecs_n']}) = {half_up(c['agreement'], 3)} x {half_up(c['calibration'], 3)}; "
                     f"{half_up(c['signs'], 2)}, {percent(c['read'])}, {percent(c['malformed'])}{'; ' + str(c['failed']) + ' left out: their user failed' if c['failed'] else ''}")
    for c in conditions:
        lines += ["", f"{c['name']:<40} {'n':>4}     FS  (95 % CI)  collapse %  need named %    ECS"]
        lines += [f"  {t:<38} {d['n']:>4}  {half_up(d['fs'], 3):>5}  {ci(d['fs_ci']):<12} {percent(d['collapse']):>10}  {percent(d['detection']):>12}  {half_up(d['ecs'], 3):>5}" for t, d in c["trajectories"].items()]
    return "\n".join(lines)


def test_table(tests):
    """The comparisons as text."""
    lines = []
    for t in tests:
        lines += ["", f"{t['name']} against {t['base']}, final state (n: scenarios)", f"  {'':<16} {'n':>4}  {'U':>7} {'p':>6} {'p Holm':>6} {'r':>6}  paired difference (95 % CI)"]
        lines += [f"  {x['of']:<16} {x['n']:>4}  {half_up(x['u']):>7} {half_up(x['p'], 3):>6} {half_up(x['p_holm'], 3):>6} {half_up(x['r'], 2):>6}  "
                  f"{half_up(x['difference'], 3)} ({half_up(x['low'], 3)} .. {half_up(x['high'], 3)}){'' if x['resolved'] else ', not resolved at this n'}" for x in t["tests"]]
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------- run
def play(model, chat, users, scenarios, args, bar, finished):
    """One condition: every scenario in every trajectory, args.repeats times, whole scenarios a batch. finished(list of rows, number of dialogues whose user failed) per batch."""
    size, probe = max(1, args.batch // (args.repeats * len(args.trajectories))), (ASIDE, ASIDE_TOKENS, not_a_digit(chat))
    for first in range(0, len(scenarios), size):
        jobs = [(s, t) for s in scenarios[first:first + size] for t in args.trajectories]
        done = rollout(model, chat, Adversaries(users, args.max_turns), jobs, args.repeats, args.max_turns, args.max_new_tokens, args.max_tokens, args.temperature,
                       torch.Generator().manual_seed(args.seed * 1_000_003 + first), bar, probe=probe)
        kept = [measured(e, i % args.repeats, args.max_turns) for i, e in enumerate(done) if e.finish != "user_failed"]
        finished(kept, len(done) - len(kept))


def main(argv=None):
    p = Flags(prog="evaluate.py aeb", description=__doc__)
    p.add_argument("--models", default="smollm2-135m", metavar="A,B", help="models, each one of: smollm2-135m, hub name, HF folder, run folder (its best/), .gguf (default: %(default)s)")
    p.add_argument("--think", default="off", choices=["off", "on", "both"], help="each model without, with, or with and without a plan before each reply (default: %(default)s)")
    p.add_argument("--trajectories", default="all", metavar="NAMES", help=f"all, or some of {','.join(TRAJECTORIES)} (default: %(default)s)")
    p.add_argument("--out", metavar="FILE", type=writable, help="write one JSON row a dialogue, batch by batch")
    p.add_argument("--overwrite", action="store_true", help="replace --out if it exists")
    p.add_argument("--json", action="store_true", help="one line of JSON last")
    p.add_argument("--record", type=writable, metavar="FILE", help="append the result, with command, commit and machine, to this .jsonl (how results/ is made)")
    # ---- dialogues
    p.add_argument("--scenarios", default="data/scenarios.jsonl", metavar="FILE", help="scenario file, English (default: %(default)s)")
    p.add_argument("--split", default="heldout", choices=[*SPLITS, "all"], help="which scenarios of it (default: %(default)s)")
    p.add_argument("--n", type=positive(int), default=10, help="scenarios, taken evenly over the intentions, the same in every condition; each is played in every trajectory (default: %(default)s)")
    p.add_argument("--repeats", type=positive(int), default=1, help="dialogues per scenario and trajectory (default: %(default)s)")
    add_user_flags(p)
    p.add_argument("--dynamics", default="sage", choices=sorted(DYNAMICS), help="sage: from 40, fails below 10; rlver: from 30, fails at 0 (default: %(default)s)")
    p.add_argument("--max_turns", type=positive(int), default=8, help="replies a dialogue; the schedules need several (default: %(default)s)")
    p.add_argument("--max_new_tokens", type=positive(int), default=48, help="tokens a reply, its thoughts included (default: %(default)s)")
    p.add_argument("--max_tokens", type=positive(int), default=2048, help="tokens a dialogue, everything counted (default: %(default)s)")
    p.add_argument("--temperature", type=nonnegative(float), default=0.8, help="of sampling, 0 = greedy; asides are always greedy (default: %(default)s)")
    p.add_argument("--seed", type=seed_number, default=0, help="same seed, same batch, same machine: same dialogues (default: %(default)s)")
    # ---- machine
    p.add_argument("--batch", type=positive(int), default=60, help="dialogues at a time, in whole scenarios (default: %(default)s)")
    p.add_argument("--dtype", default="auto", choices=["auto", "fp32", "bf16", "fp16"], help="compute dtype; fp16 is refused (default: %(default)s)")
    p.add_argument("--device", default="auto", choices=["auto", "cuda", "mps", "cpu"], help="auto = cuda, then mps, then cpu (default: %(default)s)")
    p.add_argument("--threads", type=positive(int), help="CPU threads (default: torch's choice)")
    args, _ = p.parse(argv)

    listed = lambda flag, text: [x.strip() for x in text.split(",") if x.strip()] or die(f"{flag} {text!r}: give at least one name")
    models, kinds = (list(dict.fromkeys(listed(flag, text))) for flag, text in (("--models", args.models), ("--user", args.user)))
    args.trajectories = TRAJECTORIES if args.trajectories == "all" else list(dict.fromkeys(listed("--trajectories", args.trajectories)))
    if unknown := [t for t in args.trajectories if t not in TRAJECTORIES]:
        die(f"--trajectories {unknown[0]}: there are {', '.join(TRAJECTORIES)}")
    if "lm:self" in kinds:
        die("--user lm:self would be another user for each model; name one with lm:MODEL")
    if args.seed >= 2 ** 40:
        die(f"--seed {args.seed}: must be below 2^40")
    if args.out and Path(args.out).suffix == ".html":
        die(f"--out {args.out}: is for rows; the page gets this name by itself, so give something like {Path(args.out).with_suffix('.jsonl')}")
    if args.out and Path(args.out).exists() and not args.overwrite:
        die(f"--out {args.out}: exists; give another name or --overwrite")
    scenarios = spread(load_scenarios(args.scenarios, None if args.split == "all" else args.split), args.n)
    if foreign := next((s for s in scenarios if s.language != "en"), None):
        die(f"the trajectories speak English only, and scenario {foreign.id} is in '{foreign.language}'")
    settings = {}
    for kind in kinds:
        settings[kind] = copy(args)
        settings[kind].user = kind
        check_user(settings[kind], scenarios)
    device = pick_device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    dtype = pick_dtype(args.dtype, device)
    for name in models:
        resolve(name)
    modes = {"off": [False], "on": [True], "both": [False, True]}[args.think]
    for name in models:                                    # every model is looked at before the first one plays
        if Path(name, "config.json").is_file() and read_json(Path(name, "config.json")).get("template") == "edf":
            print(f"{name} was trained with --template edf; here it speaks without")
        model, tokenizer = load(name, dtype)
        for think in modes:
            check_budget(model, Chat(tokenizer, model.config.vocab, template=TEMPLATES[think]), scenarios, args.max_new_tokens, args.max_tokens)
        if args.max_tokens + args.user_tokens + 256 > model.config.max_positions:      # a last line and the aside go beyond max_tokens
            die(f"--max_tokens {args.max_tokens}: {name} knows {model.config.max_positions} positions, of which {args.user_tokens + 256} are for a last line and the aside; lower it")
    users = {kind: make_users(settings[kind], None, dtype, device) for kind in kinds}
    each, total = len(scenarios) * len(args.trajectories) * args.repeats, len(models) * len(modes) * len(kinds)
    print(f"conditions {len(models)} models x {len(modes)} think modes x {len(kinds)} users = {total}, {str(dtype).removeprefix('torch.')} on {device}\n"
          f"dialogues  {len(scenarios)} {args.split} scenarios x {len(args.trajectories)} trajectories x {args.repeats} repeats = {each} a condition, up to {args.max_turns} replies of "
          f"{args.max_new_tokens} tokens, temperature {args.temperature}, seed {args.seed}", flush=True)
    conditions, rows, start, stopped, written = [], {}, time.time(), "", False
    with tqdm(total=total * each * args.max_turns, unit="reply", leave=False) as bar:
        try:
            for name in models:
                model, tokenizer = load(name, dtype, device)
                for kind, think in ((kind, think) for kind in kinds for think in modes):
                    title = f"{name}{', think' if think else ''}{f', {kind}' if len(kinds) > 1 else ''}"
                    conditions.append({"name": title, "model": name, "think": think, "user": settings[kind].user, "failed": 0})
                    rows[title] = []
                    bar.set_description(title[-30:])

                    def finished(kept, failed):            # a batch at a time, so that Ctrl-C loses the batch in play only
                        nonlocal written
                        if args.out and kept:
                            with open(args.out, "a" if written else "w", encoding="utf-8") as f:
                                f.writelines(json.dumps({**r, "condition": title, "model": name, "think": think, "user": settings[kind].user}, ensure_ascii=False) + "\n" for r in kept)
                            written = True
                        rows[title].extend(kept)
                        conditions[-1]["failed"] += failed
                    play(model, Chat(tokenizer, model.config.vocab, template=TEMPLATES[think]), users[kind], scenarios, args, bar, finished)
        except (KeyboardInterrupt, BudgetSpent, OSError) as e:
            stopped = f"stopped{f', {e}' if str(e) else ''}: {sum(map(len, rows.values()))} of {total * each} dialogues were finished\n"
    if not stopped and not any(rows.values()):
        die(f"every simulated user failed{users[kinds[0]].trouble()}; nothing was measured")
    for c in conditions:
        by = {t: [r for r in rows[c["name"]] if r["trajectory"] == t] for t in args.trajectories}
        c |= described(rows[c["name"]]) | {"trajectories": {t: described(r) for t, r in by.items()}}
    tests = []
    for c in conditions:                                   # against the first condition with the same user: across users it would be the users that differ
        base = next(b for b in conditions if b["user"] == c["user"])
        if c is not base and rows[c["name"]]:
            tests.append({"name": c["name"], "base": base["name"], "tests": compared(rows[base["name"]], rows[c["name"]], args.trajectories)})
    print(f"\n{stopped}{table(conditions, args.trajectories)}\n{test_table(tests)}\n\nusers: {'; '.join(Adversaries(u, 1).note for u in users.values())}. {time.time() - start:.1f} s{f'; rows in {args.out}' if written else ''}")
    line = {"bench": "aeb", "split": args.split, "scenarios": len(scenarios), "repeats": args.repeats, "max_turns": args.max_turns, "temperature": args.temperature, "seed": args.seed,
            "dynamics": args.dynamics, "conditions": conditions, "tests": tests}
    if written and not stopped:
        report.beside(args.out, [(c["name"], rows[c["name"]]) for c in conditions if rows[c["name"]]], "AEB-style: adversarial users of our own. " + "; ".join(u.note for u in users.values()), compare=len(kinds) == 1)
    if args.json:
        print(json.dumps(line))
    if args.record and not stopped:
        record_result(args.record, line)
    return 130 if stopped else 0


if __name__ == "__main__":
    sys.exit(main())
