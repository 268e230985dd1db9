"""
Held-out measurement: play scenarios with a model, print the mean final emotion with its uncertainty.

The number is the rule score of a scripted user, not empathy: it counts what that user's rules count. Definitions are
those of the SAGE leaderboard (mean final emotion, success at >= 100, failure below 10). The other benches have files of
their own. Left out on purpose: significance stars, a single "score" without its interval.

    python evaluate.py run --model smollm2-135m --n 16                         a base model on 16 held-out scenarios
    python evaluate.py run --model runs/NAME --out after.jsonl --show 1        a run's best checkpoint, dialogues kept
    python evaluate.py score FILE...        result rows, anyone's (scores.py)          python evaluate.py report FILE...       one page to look at (report.py)
    python evaluate.py epm FILE...          EMPA's runs (empa.py)                      python evaluate.py aeb --models A,B     adversarial users (aeb.py)
    python evaluate.py eqbench ...          EQ-Bench 3 (eqbench.py)
"""
import argparse
import hashlib
import importlib
import json
import math
import os
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import report
from appraisal import INTENTS, words
from backend import SCRIPTED, BudgetSpent, add_user_flags, check_user, make_users
from emotions import LABELS, felt_by, regulation
from episode import Episode, Row, transcript
from rollout import TEMPLATES, Chat, add_template_flags, check_budget, check_template, rollout
from rundir import Flags, die, positive, read_json, record_result, seed_number, writable, write_atomically
from scenarios import SPLITS, STATES, load_memories, load_scenarios
from scores import by_scenario, gaming, gaming_line, read_rows
from simulator import BANDS, DYNAMICS, UserTurn
from stats import bootstrap, half_up, mean, paired_difference
from weights import load, pick_device, pick_dtype, resolve, weights_stamp


# ---------------------------------------------------------------------------------------------- playing
def spread(scenarios, n=None):
    """The first n scenarios taken evenly over the intents: one of each intent, then a second of each, ... (files are sorted by intent)."""
    seen = Counter()
    ranked = [(seen.update([s.intent]) or seen[s.intent], i) for i, s in enumerate(scenarios)]        # (how many of its intent so far, place)
    return [scenarios[i] for _, i in sorted(ranked)][:n]


def play(model, chat, users, scenarios, repeats=1, max_turns=5, max_new_tokens=48, max_tokens=1024, temperature=0.8, seed=0, batch=64,
         progress=None, finished=None, states=False, kept=None, known=None):
    """Play every scenario `repeats` times. -> list[Episode], repeats adjacent; e.group is the scenario's place in `scenarios`.

    states: each dialogue in one of the 24 interaction states, all of them equally often (exactly, where 24 divides the number of dialogues), the same
    ones at each call; else the plain user.
    batch: dialogues at a time, in whole scenarios (at least one with all its repeats, whose prompt is computed once).
    progress: a tqdm bar, advanced per reply. finished: called with the episodes of each batch as soon as it is done. kept: first scenario of a batch ->
    its episodes, of batches played before; `known` is called with those instead.

    The same call gives the same dialogues: each batch draws from its own generator, seeded by (seed, first scenario), and
    torch's global state is neither read nor moved. Another `batch` gives the same dialogues at temperature 0 (but for
    rounding); above it the draws belong to a place in the batch, so compare runs at one batch size.
    """
    check_budget(model, chat, scenarios, max_new_tokens, max_tokens)       # said now rather than by the last batch
    # one shuffle of the 24 after another, over the ids in order: which state a dialogue is in depends on no order of scenarios, and intents meet them evenly
    assigned = {} if not states else {(id_, r): STATES[np.random.default_rng(k // 24).permutation(24)[k % 24]] for k, (id_, r) in enumerate((id_, r) for id_ in sorted(s.id for s in scenarios) for r in range(repeats))}
    episodes, size = [], max(1, batch // repeats)
    for first in range(0, len(scenarios), size):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + first)
        part = scenarios[first:first + size]
        if kept and first in kept:
            known(kept[first])
            episodes += kept[first]
            if progress is not None:
                progress.update(len(part) * repeats * max_turns)
            continue
        jobs = [(s, None) for s in part]
        if states:
            jobs = [(s, assigned[s.id, r]) for s in part for r in range(repeats)]
        done = rollout(model, chat, users, jobs, 1 if states else repeats, max_turns, max_new_tokens, max_tokens, temperature, generator, progress)
        for i, e in enumerate(done):
            e.group = first + i // repeats
        if finished is not None:
            finished(done)
        episodes += done
    return episodes


# ---------------------------------------------------------------------------------------------- statistics
def summary(episodes):
    """The statistics of a list of episodes, as a dict of plain numbers (None where there is nothing to average).

    n dialogues; scenarios; failed (dialogues whose *user* broke: in no other number); emotion, low, high: mean final
    emotion 0..100 and its scenario-clustered 95 % interval; outcome: the same with 0 for dialogues with a malformed think block; success, failure: % of dialogues ending >= 100, < 10;
    intents: intent -> {n, emotion, low, high}; states: the same by interaction state, with passed, the % that ended at >= 50; finish: how dialogues ended -> count; tokens: mean reply length, <|im_end|> included;
    cut: % of replies that hit their budget; malformed: % that lacked the form of the template; perceived: with --template edf, % of replies whose named feeling
    is one of the scenario's, and perceived_by_rote, what the best single label would get; follows, mirrors: % of replies as emotions.regulation has them, for users that speak English; distinct_2: different word pairs / word pairs over all replies (falls as
    there are more replies: compare equal n); curve: mean emotion at the start and after each reply, a dialogue that has
    ended staying where it ended (else the curve of the last turns would be one of survivors only); parts: share of replies
    (0..1) in which each named part of the user's appraisal was not zero; gaming: as scores.gaming has it.
    """
    kept = [e for e in episodes if e.finish != "user_failed"]
    final, length = [e.emotion for e in kept], max((len(e.turns) for e in kept), default=0)
    low, high = bootstrap(final, [e.scenario.id for e in kept])
    def part(of):                                          # some of the dialogues, with an interval of their own
        low, high = bootstrap([e.emotion for e in of], [e.scenario.id for e in of], 1000)
        return {"n": len(of), "emotion": mean([e.emotion for e in of]), "low": low, "high": high}
    replies, cuts = [words(r) for e in kept for r in e.replies], [100 * c for e in kept for c in e.cuts]
    pairs = [p for r in replies for p in zip(r, r[1:])]
    named = [(felt_by(e.scenario), label) for e in kept if e.scenario.feelings for label, _ in e.perceived]
    regulated = [kind for e in kept for kind in regulation(e)] if all(e.scenario.language == "en" for e in kept) else []
    fired = Counter(name for e in kept for t in e.turns for name, value in t.parts.items() if value)
    curves = [[e.start_emotion] + [t.emotion for t in e.turns] + [e.emotion] * (length - len(e.turns)) for e in kept]
    return {"n": len(kept), "scenarios": len({e.scenario.id for e in kept}), "failed": len(episodes) - len(kept),
            "emotion": mean(final), "outcome": mean([e.outcome for e in kept]), "low": low, "high": high,
            "success": mean([100 * (e >= 100) for e in final]), "failure": mean([100 * (e < 10) for e in final]),
            "intents": {i: part(of) for i in INTENTS if (of := [e for e in kept if e.scenario.intent == i])},
            "states": {str(z): {**part(of), "passed": mean([100 * (e.emotion >= 50) for e in of])} for z in STATES if (of := [e for e in kept if e.state == z])},
            "finish": dict(Counter(e.finish for e in kept).most_common()),
            "tokens": sum(lengths(e).total() for e in kept) / len(replies) if replies else None, "cut": mean(cuts), "malformed": mean([100 * bad for e in kept for bad in e.malformed]),
            "perceived": mean([100 * (label in felt) for felt, label in named]), "perceived_by_rote": max((100 * np.mean([label in felt for felt, _ in named]) for label in LABELS), default=None) if named else None, **{kind: mean([100 * (r == kind) for r in regulated]) for kind in ("follows", "mirrors")},
            "distinct_2": len(set(pairs)) / len(pairs) if pairs else None, "curve": [mean(c) for c in zip(*curves)],
            "parts": {name: count / len(replies) for name, count in fired.most_common()}, "gaming": gaming([row(e, 0) for e in kept])}


def table(s, note):
    """A summary as text; note: what the number is."""
    interval = f"95 % CI {half_up(s['low'])} .. {half_up(s['high'])}, by scenario" if s["low"] is not None else "no CI from one scenario"
    lines = [f"mean final emotion  {half_up(s['emotion'])}   ({interval}; {note})",
             f"success (>= 100)    {half_up(s['success'])} %", f"failure (< 10)      {half_up(s['failure'])} %",
             f"dialogues           {s['n']} of {s['scenarios']} scenarios; " + ", ".join(f"{k} {v}" for k, v in s["finish"].items())
             + (f"; {s['failed']} left out: their user failed" if s["failed"] else ""),
             f"replies             {half_up(s['tokens'])} tokens, {half_up(s['cut'])} % cut off, {half_up(s['malformed'])} % malformed, distinct-2 {half_up(s['distinct_2'], 2)}",
             *([f"feelings named       {half_up(s['perceived'])} % rightly; the best single label would get {half_up(s['perceived_by_rote'])} %"] if s["perceived_by_rote"] is not None else []),
             "gaming              " + gaming_line(s["gaming"]),
             "in % of replies     " + ", ".join(f"{name} {half_up(100 * x, 0)}" for name, x in s["parts"].items() if name != "expectation"),
             "emotion by turn     " + " ".join(half_up(x) for x in s["curve"]), "", f"{'intention':<12} {'n':>4}  emotion        95 % CI"]
    ci = lambda v: f"{half_up(v['low'])} .. {half_up(v['high'])}" if v["low"] is not None else "-"
    lines += [f"{i:<12} {v['n']:>4}  {half_up(v['emotion']):>7}  {ci(v):>14}" for i, v in s["intents"].items()]
    if s["states"]:
        lines += ["", f"{'state (disclosure/activation/trust)':<36} {'n':>4}  emotion        95 % CI  >= 50"]
        lines += [f"{z:<36} {v['n']:>4}  {half_up(v['emotion']):>7}  {ci(v):>14}  {half_up(v['passed'], 0):>3} %" for z, v in s["states"].items()]
    return "\n".join(lines)


def closing_table(folders, scenarios, repeats, users, dtype, device, seed, how={}, **talk):
    """What a training script prints last: the same held-out dialogues played with each of its models, by its user and by scripted-b, which no policy was trained on: a
    gain that only the first sees is a gain in pleasing that one. folders: name -> HF folder; how: for Chat; talk: as play has it. -> name -> summary, and under "scripted-b" the second one (None: not English)."""
    results, ends, second = {}, {}, SCRIPTED["scripted-b"](users.dynamics, talk["max_turns"]) if all(s.language == "en" for s in scenarios) else None
    for name, folder in folders.items():
        model, tokenizer = load(str(folder), dtype, device)
        with tqdm(total=len(scenarios) * repeats * talk["max_turns"] * (1 + bool(second)), desc=f"held-out, {name}", unit="reply", leave=False) as bar:
            played = [u and play(model, Chat(tokenizer, model.config.vocab, **how), u, scenarios, repeats, seed=seed, progress=bar, **talk) for u in (users, second)]
        first, other = (part and summary(part) for part in played)
        ends[name] = [by_scenario([row(e, 0) for e in part or [] if e.finish != "user_failed"]) for part in played]
        results[name] = {**first, "scripted-b": other}
    print(f"\nheld-out, {len(scenarios)} scenarios x {repeats} dialogues, final emotion (0-100), {users.note}:")
    def over(name, k):                                     # paired by scenario, against the first model
        d = paired_difference(ends[next(iter(ends))][k], ends[name][k])
        return "" if d["difference"] is None or name == next(iter(ends)) else f"  {d['difference']:+.1f} [{d['low']:+.1f}, {d['high']:+.1f}] over {next(iter(ends))}{'' if d['resolved'] else ', not resolved'}"
    for name, r in results.items():
        print(f"  {name:14s} {half_up(r['emotion']):>5s}  95 % CI {half_up(r['low'])} .. {half_up(r['high'])}  success {half_up(r['success'])} %  failure {half_up(r['failure'])} %{over(name, 0)}")
        if b := r["scripted-b"]:
            print(f"    {'scripted-b':12s} {half_up(b['emotion']):>5s}  95 % CI {half_up(b['low'])} .. {half_up(b['high'])}  success {half_up(b['success'])} %  failure {half_up(b['failure'])} %{over(name, 1)}")
    return results


# ---------------------------------------------------------------------------------------------- rows
def lengths(e):
    """Policy tokens of each reply, by turn: of a turn's rows the last one, since with --template edf the one before it names the feeling."""
    return Counter({r.turn[-1]: sum(r.mask) for r in e.rows} if e.perceived else [turn for r in e.rows for turn, m in zip(r.turn, r.mask) if m])


def row(e, repeat, **more):
    """One line of --out in SAGE's result format, so that anyone's scorer reads ours: id, emo_point, emo_state, task, history with the emotion at each of
    the user's lines. Ours besides: intent, split, repeat, finish, state; `cut`, `malformed` and `tokens` of a reply, `parts` of what it did; and `more`."""
    s, history = e.scenario, [{"role": "user", "content": e.opening, "emotion-point": e.start_emotion}]
    tokens = lengths(e)
    for i, (reply, cut, t) in enumerate(zip(e.replies, e.cuts, e.turns)):
        planning = {"activity": t.thought, "TargetCompletion": "", "content": "", "analyse": t.thought, "change": t.change}
        history += [{"role": "assistant", "content": reply, "cut": cut, "malformed": bool(e.malformed and e.malformed[i]), "tokens": tokens[i], **({"perceived": e.perceived[i]} if e.perceived else {})}, {"role": "user", "content": t.text, "emotion-point": t.emotion, "planning": planning, "parts": t.parts}]
    return {"id": s.id, "emo_point": e.emotion, "emo_state": "Emotion-" + next(letter for low, letter, _ in BANDS if e.emotion >= low), "target": "eq", "player": s.persona,
            "scene": s.background, "character": "", "topic": "", "task": s.hidden_need, "history": history, "intent": s.intent, "split": s.split, "repeat": repeat, "finish": e.finish, **({"state": str(e.state)} if e.state else {}), **more}


def revive(row, scenarios, states):
    """The Episode that `row` was made of, as far as summary() and the report look at it. scenarios: id -> Scenario; states: text -> State. KeyError where it isn't one of ours."""
    first, *rest = row["history"]
    e = Episode(scenarios[row["id"]], states[row["state"]] if "state" in row else None, 0, first["content"], first["emotion-point"], [Row()], finish=row["finish"])
    for i, (reply, user) in enumerate(zip(rest[::2], rest[1::2])):
        e.rows[0].policy([0] * reply["tokens"], [0.0] * reply["tokens"], i)
        e.replies.append(reply["content"]), e.cuts.append(reply["cut"]), e.malformed.append(reply["malformed"])
        e.perceived += [tuple(reply["perceived"])] if "perceived" in reply else []
        e.turns.append(UserTurn(user["content"], user["emotion-point"], user["planning"]["change"], user["planning"]["analyse"], False, "", False, user["parts"]))
    return e


def finished_batches(path, stamp, asked, scenarios, repeats, size):
    """What --resume finds in a file of rows: (user, seed, first scenario of the batch) -> its (row, Episode)s, for the batches that are whole. asked: the (user, seed) of this
    command. SystemExit where it's another evaluation's, or was asked for more."""
    rows, problems = read_rows(path)
    last = len(path.read_bytes().rstrip(b"\n").split(b"\n"))
    if problems and (len(problems) > 1 or not rows or not problems[0].startswith(f"{path}:{last}:")):
        die(f"--resume: {problems[0]}; only a last line may be cut off, so nothing was touched; mend the file or give another --out")
    for problem in problems:
        print(f"{problem}; left out", file=sys.stderr)
    if any(r.get("evaluation") != stamp or not isinstance(r.get("user"), str) or not isinstance(r.get("seed"), int) for r in rows):
        die(f"--resume: {path} was written by other settings, weights or scenarios; give the same flags, or another --out")
    if other := {(r["user"], r["seed"]) for r in rows} - asked:
        die(f"--resume: {path} has rows of {' and '.join(f'user {u}, seed {s}' for u, s in sorted(other))}; give the --seed, --seeds and --user2 it was begun with (or more of them), or another --out")
    place, batches, by_id, by_state = {s.id: i for i, s in enumerate(scenarios)}, {}, {s.id: s for s in scenarios}, {str(z): z for z in STATES}
    for r in rows:
        try:
            batches.setdefault((r["user"], r["seed"], place[r["id"]] // size * size), {})[place[r["id"]], int(r["repeat"])] = (r, revive(r, by_id, by_state))
        except (KeyError, ValueError, TypeError, IndexError):
            pass                                           # damaged: its batch is played again
    return {k: [found[i] for i in sorted(found)] for k, found in batches.items() if len(found) == len(scenarios[k[2]:k[2] + size]) * repeats}


# ---------------------------------------------------------------------------------------------- run
def run(args):
    """`evaluate.py run`. Every flag is checked before weights are touched. Ctrl-C: reports the batches that are finished; --resume goes on with the others."""
    if not 0 <= args.temperature < math.inf or not 0 <= args.seed < 2 ** 40 or args.show < 0:
        die(f"--temperature {args.temperature}, --seed {args.seed}, --show {args.show}: each must be 0 or more (temperature 0 is greedy)")
    out = args.out and Path(args.out)
    if args.resume and not out:
        die("--resume: give the --out FILE that was begun")
    if out:
        if out.is_dir() or not out.parent.is_dir():        # `writable` would make the folder; a mistyped one is a mistake
            die(f"--out {out}: cannot be written; give a file in a folder that exists")
        try:
            writable(str(out))
        except argparse.ArgumentTypeError as e:
            die(f"--out {e}")
        if args.resume and args.overwrite:
            die("--resume and --overwrite: one of them")
        if out.suffix == ".html":
            die(f"--out {out}: is for rows; the page gets this name by itself, so give something like {out.with_suffix('.jsonl')}")
        if out.exists() and not (args.overwrite or args.resume):
            die(f"--out {out}: exists; give another name, --resume to go on with it, or --overwrite")
    everything = load_scenarios(args.scenarios)
    args.split = args.split or ("all" if everything[0].source == "rlver" else "heldout")
    scenarios = spread(everything if args.split == "all" else load_scenarios(args.scenarios, args.split), args.n)
    check_user(args, scenarios)
    memories, perceived = {} if args.memory == "none" else load_memories(args.memory, scenarios), check_template(args, scenarios)
    if args.user2:
        check_user(second := argparse.Namespace(**{**vars(args), "user": args.user2}), scenarios, "--user2")
        args.user2 = second.user
        if args.user2 == args.user:
            die(f"--user2 {args.user2}: is the first user already")
    if args.bench == "empa":
        import empa
        empa.check(args)
    elif args.perturb or args.judge != "scripted":
        die("--judge and --perturb: of --bench empa; the final emotion (--bench sage) needs no judge")
    device = pick_device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    dtype = pick_dtype(args.dtype, device)
    resolve(args.model)                                    # last: it may have to be downloaded
    seeds, names = range(args.seed, args.seed + args.seeds), [args.user] + [args.user2] * bool(args.user2)
    n = len(scenarios) * args.repeats
    what = ("model", "split", "user_kind", "appraise", "max_change", "user_temperature", "user_tokens", "dynamics", "states", "max_turns", "max_new_tokens", "template", "max_tokens", "temperature", "batch", "repeats")
    weights = [weights_stamp(Path(f)) for f in (resolve(args.model), args.init if "lm:self" in names else None) if f]
    stamp = hashlib.sha256(json.dumps([{k: getattr(args, k) for k in what}, [repr(s) for s in scenarios], str(dtype), weights, *([memories] if memories else []), *([sorted(perceived.items())] if perceived else [])]).encode("utf-8", "replace")).hexdigest()[:12]
    done = finished_batches(out, stamp, {(u, s) for u in names for s in seeds}, scenarios, args.repeats, max(1, args.batch // args.repeats)) if args.resume and out.exists() else {}

    print(f"model      {args.model}, {str(dtype).removeprefix('torch.')} on {device}")
    print(f"users      {len(scenarios)} {args.split} scenarios of {args.scenarios}, user {' and '.join(names)}, {args.dynamics} dynamics (from {DYNAMICS[args.dynamics][0]})")
    print(f"dialogues  {len(scenarios)} scenarios x {args.repeats} repeats{f' x {args.seeds} seeds' * (args.seeds > 1)}{' x 2 users' * bool(args.user2)} = {n * len(seeds) * len(names)}, up to {args.max_turns} replies of "
          f"{args.max_new_tokens} tokens, temperature {args.temperature}, seed {args.seed}", flush=True)
    model, tokenizer = load(args.model, dtype, device)
    chat = Chat(tokenizer, model.config.vocab, template=args.template, memories=memories, perceived=perceived)
    initial = load(args.init, dtype, device)[0] if "lm:self" in names and args.init else model
    if args.bench == "empa":
        return empa.bench(args, scenarios, model, chat, make_users(args, (initial, chat), dtype, device), dtype, device)
    everyone = {name: make_users(argparse.Namespace(**{**vars(args), "user": name}), (initial, chat), dtype, device) for name in names}
    if done:                                               # what is kept, without the batches that are not whole
        write_atomically(out, "".join(json.dumps(r, ensure_ascii=False) + "\n" for batch in done.values() for r, _ in batch).encode())
    played, start, stopped, lines, fresh = {}, time.time(), "", [], bool(done)

    def finished(batch, name, seed):                       # a batch at a time, so that Ctrl-C loses the batch in play only; SAGE's format has no word for a user that failed
        nonlocal fresh
        rows = [json.dumps(row(e, i % args.repeats, user=name, seed=seed, evaluation=stamp), ensure_ascii=False) + "\n" for i, e in enumerate(batch) if e.finish != "user_failed"]
        if out and rows:                                   # an old file stays until there is a first row
            with open(out, "a" if fresh else "w", encoding="utf-8") as f:
                f.writelines(rows)
            fresh = True
        played.setdefault((name, seed), []).extend(batch)

    with tqdm(total=n * len(seeds) * len(names) * args.max_turns, unit="reply", leave=False) as bar:
        try:
            for name, users in everyone.items():
                for seed in seeds:
                    kept = {first: [e for _, e in batch] for (u, s, first), batch in done.items() if (u, s) == (name, seed)}
                    play(model, chat, users, scenarios, args.repeats, args.max_turns, args.max_new_tokens, args.max_tokens, args.temperature, seed, args.batch, bar,
                         lambda batch: finished(batch, name, seed), args.states, kept, lambda batch: played.setdefault((name, seed), []).extend(batch))
        except (KeyboardInterrupt, BudgetSpent, OSError) as e:     # OSError: the disk is full
            stopped = f"\nstopped{f', {e}' if str(e) else ''}: {sum(map(len, played.values()))} of {n * len(seeds) * len(names)} dialogues were finished" + "; go on with --resume" * bool(out and fresh)
    if played and all(e.finish == "user_failed" for part in played.values() for e in part):
        die(f"every simulated user failed{everyone[names[0]].trouble()}; nothing was measured")
    print(stopped)
    for name, users in everyone.items():
        episodes = [e for (u, _), part in played.items() if u == name for e in part]
        if not any(e.finish != "user_failed" for e in episodes):
            print(f"user {name}: " + (f"failed in every dialogue{users.trouble()}; not measured" if episodes else "no dialogue was finished"), flush=True)
            continue
        if args.show and episodes:
            order = sorted(episodes, key=lambda e: -e.emotion)
            k, middle = min(args.show, len(order)), max(0, (len(order) - args.show) // 2)
            for title, part in (("best", order[:k]), ("median", order[middle:middle + k]), ("worst", order[-k:])):
                for e in part:
                    print(f"\n---- {title}\n{transcript(e)}")
        result, by_seed = summary(episodes), [summary(played[name, s])["emotion"] for s in seeds if (name, s) in played]
        lines.append({"label": args.label, "model": args.model, "split": args.split, "seed": args.seed, "seeds": args.seeds, "repeats": args.repeats, "dynamics": args.dynamics, "max_turns": args.max_turns,
                      "temperature": args.temperature, "note": users.note, "user": name, "interaction": "24 states" if args.states else "plain", **result, "by_seed": by_seed, **users.report()})
        print("\n" * bool(lines) + f"user {name}\n" * (len(names) > 1) + table(result, users.note))
        if args.seeds > 1 and len(by_seed) > 1 and None not in by_seed:
            print(f"by seed             {' '.join(map(half_up, by_seed))}: mean {half_up(mean(by_seed))} +- SD {half_up(float(np.std(by_seed, ddof=1)))}")
    print(f"\n{time.time() - start:.1f} s" + (f"; rows in {out}" if fresh else ""))
    if out and fresh and not stopped:
        rows = read_rows(out)[0]
        report.beside(out, [(f"{Path(args.model).name}, user {name}", part) for name in names if (part := [r for r in rows if r.get("user") == name])], f"{args.model}: {everyone[names[0]].note}", compare=False)
    if args.json:
        print(json.dumps({**lines[0], **({"user2": lines[1]} if len(lines) > 1 else {})} if lines else {}))
    if args.record and not stopped:
        for line in lines:
            record_result(args.record, line)
    return 130 if stopped else 0


COMMANDS = {"score": "scores", "epm": "empa", "eqbench": "eqbench", "aeb": "aeb", "report": "report"}      # command -> the file that does it


def main(argv=None):
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] in (["-h"], ["--help"]):
        print(__doc__.strip())
        return 0
    if argv and argv[0] in COMMANDS:
        return importlib.import_module(COMMANDS[argv[0]]).main(argv[1:])
    if argv[:1] != ["run"]:
        die(f"{argv[0] if argv else 'nothing'} is not a command; there are: {', '.join(['run', *COMMANDS])} (--help after one lists its flags)")
    p = Flags(prog="evaluate.py run", description="Play scenarios with a model and report the final emotion. With the scripted user that is the rule score of a scripted user, not empathy.")
    p.add_argument("--model", default="smollm2-135m", help="smollm2-135m, hub name, HF folder, run folder (its best/ and dialogue settings), or .gguf (default: %(default)s)")
    p.add_argument("--bench", choices=["sage", "empa"], default="sage", help="sage: the final emotion; empa: a --judge moves a deficit turn by turn, up to 45 replies (default: %(default)s)")
    p.add_argument("--judge", default="scripted", metavar="WHO", help="of --bench empa: scripted (cues, no measure of empathy), lm:MODEL or server:URL#MODEL (default: %(default)s)")
    p.add_argument("--perturb", action="store_true", help="of --bench empa: judge all again with another's persona, with flattery, and as it is (the judge's noise)")
    p.add_argument("--out", metavar="FILE", help="write one JSON row a dialogue, batch by batch, and in the end a page to look at beside it")
    p.add_argument("--overwrite", action="store_true", help="replace --out if it exists")
    p.add_argument("--resume", action="store_true", help="go on with the --out of an evaluation that was stopped: batches that are whole are not played again")
    p.add_argument("--show", type=int, default=0, metavar="N", help="print the N best, median and worst dialogues (default: %(default)s)")
    p.add_argument("--json", action="store_true", help="one line of JSON last")
    p.add_argument("--record", type=writable, metavar="FILE", help="append the result, with command, commit and machine, to this .jsonl (how results/ is made)")
    p.add_argument("--label", default="", help="a name for the --record line, like 'cold start'")
    # ---- dialogues
    p.add_argument("--scenarios", default="data/scenarios.jsonl", metavar="FILE", help="scenario file (default: %(default)s)")
    p.add_argument("--split", choices=[*SPLITS, "all"], help="which scenarios of it (default: heldout; all of an RLVER or SAGE profile file)")
    add_user_flags(p)
    p.add_argument("--user2", default="", metavar="USER", help="a second user, for whom all is played again: a policy that pleases one simulator only shows (default: none)")
    p.add_argument("--n", type=positive(int), help="scenarios, taken evenly over the intentions (default: all of the split)")
    p.add_argument("--repeats", type=positive(int), default=4, help="dialogues per scenario (default: %(default)s)")
    p.add_argument("--dynamics", default="sage", choices=sorted(DYNAMICS), help="sage: from 40, fails below 10; rlver: from 30, fails at 0 (default: %(default)s)")
    p.add_argument("--states", action="store_true", help="users in all 24 interaction states, equally often, instead of the plain user")
    p.add_argument("--max_turns", type=positive(int), default=5, help="replies a dialogue (default: %(default)s, as the laptop preset trains; the full protocol has 8)")
    p.add_argument("--max_new_tokens", type=positive(int), default=48, help="tokens a reply, its thoughts included (default: %(default)s)")
    p.add_argument("--memory", default="none", metavar="none|FILE", help="what the policy is told of earlier talks with each person, data/memories.jsonl, where it was trained with it (default: %(default)s)")
    add_template_flags(p)
    p.add_argument("--max_tokens", type=positive(int), default=1024, help="tokens a dialogue, everything counted (default: %(default)s)")
    p.add_argument("--temperature", type=float, default=0.8, help="of sampling, 0 = greedy (default: %(default)s)")
    p.add_argument("--seed", type=seed_number, default=0, help="same seed, same batch, same machine: same dialogues (default: %(default)s)")
    p.add_argument("--seeds", type=positive(int), default=1, help="how many seeds from --seed on; more than one: also mean +- SD over them, as the papers print (default: %(default)s)")
    # ---- machine
    p.add_argument("--batch", type=positive(int), default=64, help="dialogues at a time (default: %(default)s)")
    p.add_argument("--dtype", default="auto", choices=["auto", "fp32", "bf16", "fp16"], help="compute dtype; fp16 is refused (default: %(default)s)")
    p.add_argument("--device", default="auto", choices=["auto", "cuda", "mps", "cpu"], help="auto = cuda, then mps, then cpu (default: %(default)s)")
    p.add_argument("--threads", type=positive(int), help="CPU threads (default: torch's choice)")
    args, given = p.parse(argv[1:])
    if args.bench == "empa":
        args.max_turns, args.max_tokens = (args.max_turns if "max_turns" in given else 45), (args.max_tokens if "max_tokens" in given else 8192)
        given |= {"max_turns", "max_tokens"}
    config, args.init = Path(args.model) / "config.json", None
    if (Path(args.model) / "best").is_dir() and config.is_file():      # a run: its own dialogue settings, where none are given
        saved = read_json(config)
        whole = lambda x: type(x) is int and x > 0
        good = {"dynamics": lambda x: x in list(DYNAMICS), "template": lambda x: x in TEMPLATES, "perception": lambda x: isinstance(x, str), "max_turns": whole, "max_new_tokens": whole, "max_tokens": whole,
                "temperature": lambda x: type(x) in (int, float) and 0 <= x < math.inf, "init": lambda x: isinstance(x, str)}
        if wrong := next((name for name in good if name in saved and not good[name](saved[name])), None):
            die(f"{config}: field '{wrong}': {json.dumps(saved[wrong])[:40]} is not what a training script writes; mend it, or give {args.model}/best and the flags")
        for name in good.keys() & saved.keys() - given - {"init"}:
            setattr(args, name, saved[name])
        if args.template != "edf" and "perception" not in given:
            args.perception = "model"                      # another template than the run's was asked for
        args.init = saved.get("init")                      # what lm:self is: the policy as it was before RL
    return run(args)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:                              # outside of the work that saves what it has
        sys.exit(130)
    except BrokenPipeError:                                # | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
