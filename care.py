"""
The generator of CARE's rubrics: a small model that writes, for one moment of a dialogue, what the next reply should be judged by.

First it imitates the table of care-prior, which knows the hidden intention; the generator sees the dialogue and the mood only, so it has to guess. Then it is trained by preference: GRPO over several
rubrics of one moment, each worth what it says about two replies of which people would prefer one. Then it is frozen, for --reward emotion+rubric:care.
Published is the outline (CARE, abstract); all mechanics, constants, prompts and data are our reconstruction. Left out on purpose: human annotators; data/preferences.jsonl is our own judgement.

    python rubric.py show                          rubrics of one dialogue, turn by turn, and what the replies are worth under them
    python rubric.py sft --out runs/care           imitation; 23 minutes on one core
    python rubric.py prefer --run runs/care        preference RL on top of it; 67 minutes
    python rubric.py analyse runs/care             dimensions by turn and mood, preference accuracy
"""
import hashlib
import json
import sys
import time
from collections import Counter, namedtuple
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from appraisal import DATA, INTENTS, STOP, words
from backend import BudgetSpent, LocalModel, add_server_flags, check_backend, generator_folder, make_backend
from episode import Row
from rollout import Chat, answers
from rubric import ASPECTS, CARE_SAFE, DIMENSIONS, FIXED, Generated, LanguageRater, Moment, Question, Rubric, ScriptedRater, filled, prior, prompt, read, rubric_scores, shares
from rundir import Flags, StopOnInterrupt, die, keep_begun, new_folder, nonnegative, positive, read_json, record_result, seed_number, take_up, writable, write_rows
from scenarios import load_scenarios, read_lines
from scores import history_of, read_rows
from simulator import ScriptedUser
from stats import bootstrap, half_up, paired_difference
from train_sft import fit, read_demonstrations
from weights import load, pick_device, pick_dtype, resolve, save, weights_stamp

Pair = namedtuple("Pair", "id dialogue split moment chosen rejected fault")


# ---------------------------------------------------------------------------------------------- data
def load_preferences(path):
    """Pairs of replies to one moment: JSONL rows {"id", "split": train | heldout, "intent", "emotion": 0..100, "messages": [{"role", "content"}, ...], "chosen", "rejected"},
    messages user first and last. "fault", what the rejected one did wrong, may be missing, and so may "dialogue", which of several pairs belong together: then it is the id without its last -part.
    SystemExit with file:line: field on the first row that does not fit."""
    out, first = [], {}
    try:
        lines = list(read_lines(path))
    except OSError as e:
        die(f"{path}: cannot be read ({e.strerror}); give a file of preferences")
    for number, row, problem in lines:
        problem = problem or pair_problem(row)
        if not problem and row["id"] in first:
            problem = f"field 'id': '{row['id']}' was used before, on line {first[row['id']]}"
        if problem:
            die(f"{Path(path).name}:{number}: {problem}")
        first[row["id"]] = number
        text = [m["content"] for m in row["messages"]]
        out.append(Pair(row["id"], row.get("dialogue") or row["id"].rsplit("-", 1)[0], row["split"], Moment(tuple(text[::2]), tuple(text[1::2]), row["emotion"], row["intent"]), row["chosen"], row["rejected"], row.get("fault", "")))
    if not all(any(p.split == split for p in out) for split in ("train", "heldout")):
        die(f"{path}: needs rows of split train and of split heldout")
    return out


def pair_problem(row):
    """The first thing wrong with a row of preferences, or ""."""
    text = lambda x: isinstance(x, str) and bool(x.strip())
    for name in ("id", "chosen", "rejected"):
        if not text(row.get(name)):
            return f"field '{name}': must be a non-empty string" if name in row else f"field '{name}': missing"
    for name, allowed in (("split", ("train", "heldout")), ("intent", INTENTS)):
        if row.get(name) not in allowed:
            return f"field '{name}': {json.dumps(row.get(name))[:40]} is not one of {', '.join(allowed)}"
    if type(row.get("emotion")) is not int or not 0 <= row["emotion"] <= 100:
        return "field 'emotion': must be a whole number from 0 to 100"
    messages = row.get("messages")
    if not isinstance(messages, list) or len(messages) % 2 == 0:
        return "field 'messages': needs a list of user and assistant messages that begins and ends with the user's"
    for i, m in enumerate(messages):
        if not isinstance(m, dict) or m.get("role") != ("user", "assistant")[i % 2] or not text(m.get("content")):
            return f"field 'messages': message {i + 1} must be {{\"role\": \"{('user', 'assistant')[i % 2]}\", \"content\": some text}}"
    for name in ("dialogue", "fault"):
        if not isinstance(row.get(name, ""), str):
            return f"field '{name}': must be a string"
    if row["chosen"].strip() == row["rejected"].strip():
        return "field 'rejected': is the chosen one"
    return ""


def lessons(pairs, demonstrations, seed):
    """Moments to imitate care-prior on: those of the training pairs, and two of each demonstration dialogue, at a mood drawn at random, since the rubric depends on it."""
    rng, intents = np.random.default_rng(seed), {s.id: s.intent for s in load_scenarios(DATA / "scenarios.jsonl")}
    out = [p.moment for p in pairs if p.split == "train"]
    for number, row in read_demonstrations(demonstrations):
        text, intent = [m["content"] for m in row["messages"]], intents.get(row.get("scenario"), row.get("intent"))
        if intent not in INTENTS:
            die(f"{demonstrations}:{number}: field 'scenario': not one of ours, and no field 'intent'")
        for t in sorted(rng.choice(len(text) // 2, min(2, len(text) // 2), replace=False).tolist()):
            out.append(Moment(tuple(text[:2 * t + 1:2]), tuple(text[1:2 * t:2]), int(rng.integers(5, 96)), intent))
    return out


# ---------------------------------------------------------------------------------------------- what a rubric is worth
def preference_reward(margin, rubric, tau=0.1, floor=0.5):
    """r = 1[m > 0] + .5 1[m = 0] + .3 tanh(m / tau) + .1 - .1 max(0, criteria - 9) / 9 - max(0, floor - H(w)): right about the two replies, by how much, well-formed, not endless, and
    not all on one dimension. m = R(chosen) - R(rejected). None where the judge could not mark (margin None).
    A text that is no rubric (None) gets -.4, less than the worst rubric: left to what FIXED makes of the pair, writing none would pay wherever FIXED is right. That, and a floor under each entropy
    rather than under the mean, are this file's own; neither was compared with the other way."""
    if rubric is None or margin is None:
        return -0.4 if rubric is None else None
    return (margin > 0) + 0.5 * (margin == 0) + 0.3 * float(np.tanh(margin / tau)) + 0.1 - 0.1 * max(0, rubric.size - 9) / 9 - max(0.0, floor - rubric.entropy)


def margins(rater, pairs, rubrics, rng=None):
    """R(chosen) - R(rejected) of each pair under its rubric, None where the judge could not be read. The two are marked in random order."""
    swap = (rng or np.random.default_rng(0)).random(len(pairs)) < 0.5
    items = [(p.moment, reply, 0, True) for p, s in zip(pairs, swap) for reply in ((p.rejected, p.chosen) if s else (p.chosen, p.rejected))]
    R = rubric_scores("care", rater, items, [r for r in rubrics for _ in range(2)])
    return [None if None in (a, b) else (b - a if s else a - b) for a, b, s in zip(R[::2], R[1::2], swap)]


def measure(stage, pairs, rubrics, rater, found=None):
    """Rows of rubrics.jsonl: what each pair's rubric says, FIXED where it is none ("valid": false), and whether it prefers the chosen reply. found: margins, where they come from elsewhere."""
    found = found or [m or 0.0 for m in margins(rater, pairs, [r or FIXED for r in rubrics])]      # could not be marked: no preference
    return [{"stage": stage, "id": p.id, "dialogue": p.dialogue, "turn": len(p.moment.said), "emotion": p.moment.emotion, "band": p.moment.band, "intent": p.moment.intent, "fault": p.fault,
             "valid": r is not None, "weights": list((r or FIXED).weights), "entropy": (r or FIXED).entropy, "rubric": str(r or FIXED), "margin": m, "right": (m > 0) + 0.5 * (m == 0)} for p, r, m in zip(pairs, rubrics, found)]


def constant(train, rater, tries=2000, seed=0):
    """The rubric that, always alike, is right about most training pairs, of `tries` drawn at random: what adapting to the moment has to beat."""
    names, rng = [[a for a in ASPECTS if ASPECTS[a]["dimension"] == d] for d in DIMENSIONS], np.random.default_rng(seed)
    asked = [Question(a, ASPECTS[a]["text"].format("what was said"), 0, 2) for row in names for a in row] + [CARE_SAFE]
    marked = rater.rate([(p.moment, reply, asked) for p in train for reply in (p.chosen, p.rejected)])
    s = np.array([a or [0.0] * len(asked) for a in marked])                                           # (2 pairs, aspects + 1)
    at, best = {q.aspect: i for i, q in enumerate(asked)}, (-1.0, None)
    for _ in range(tries):
        weights, chosen = shares(rng.dirichlet(np.ones(3))), [rng.permutation(row)[:rng.integers(1, 4)].tolist() for row in names]
        R = sum(w * s[:, [at[a] for a in row]].mean(1) for w, row in zip(weights, chosen)) * (s[:, -1] >= 0.5)
        right = float(np.mean((R[::2] > R[1::2]) + 0.5 * (R[::2] == R[1::2])))
        if right > best[0]:
            best = right, Rubric(weights, tuple(tuple((a, asked[at[a]].text) for a in row) for row in chosen))
    return best[1]


def rote(train, pairs):
    """Margins of two readers that know no rubric: how many of a reply's content words the last line has, and naive Bayes on the replies' words alone, the moment unseen."""
    content = lambda text: [w for w in words(text) if w not in STOP]
    shared = lambda p, reply: np.mean([w in set(words(p.moment.said[-1])) for w in content(reply)] or [0.0])
    counts = [Counter(w for p in train for w in set(words(getattr(p, side)))) for side in ("chosen", "rejected")]
    worth = lambda reply: sum(np.log((counts[0][w] + 1) / (counts[1][w] + 1)) for w in set(words(reply)))
    return {"overlap": [float(shared(p, p.chosen) - shared(p, p.rejected)) for p in pairs], "words alone": [float(worth(p.chosen) - worth(p.rejected)) for p in pairs]}


def accuracy(rows):
    """-> stage -> {"pairs", "right", "low", "high": % of pairs whose chosen reply it prefers and the interval by dialogue, "invalid": % without a rubric, "entropy": mean, of the weights of those that are one, in nats (None: none is),
    "over_fixed", "over_sft": stats.paired_difference in %, by dialogue}."""
    by = {}
    for r in rows:
        by.setdefault(r["stage"], {}).setdefault(r["dialogue"], []).append(r)
    right, out = {stage: {d: [100 * r["right"] for r in some] for d, some in of.items()} for stage, of in by.items()}, {}
    for stage, of in by.items():
        mine = [r for some in of.values() for r in some]
        low, high = bootstrap([100 * r["right"] for r in mine], [r["dialogue"] for r in mine])
        out[stage] = {"pairs": len(mine), "right": float(np.mean([100 * r["right"] for r in mine])), "low": low, "high": high, "invalid": float(np.mean([100 * (not r["valid"]) for r in mine])),
                      "entropy": float(np.mean([r["entropy"] for r in mine if r["valid"]])) if any(r["valid"] for r in mine) else None, **{f"over_{than}": paired_difference(right.get(than, {}), right[stage]) for than in ("fixed", "sft")}}
    return out


def table(rows):
    """accuracy(rows) as text."""
    over = lambda d: f"{'-':>22}" if d["low"] is None else f"{d['difference']:+6.1f} [{d['low']:+5.1f}, {d['high']:+5.1f}]{'*' if d['resolved'] else ' '}"
    lines = [f"{'':12} {'pairs':>5}  prefers the chosen, %   95 % CI         no rubric, %   entropy of weights   over fixed, by dialogue   over sft (*: resolved)"]
    for stage, a in accuracy(rows).items():
        lines.append(f"{stage:12} {a['pairs']:>5}  {half_up(a['right']):>21}   {half_up(a['low'])} .. {half_up(a['high']):<8} {half_up(a['invalid']):>12}   {'-' if a['entropy'] is None else half_up(a['entropy'], 2):>18}   {over(a['over_fixed'])}    {over(a['over_sft'])}")
    return "\n".join(lines)


def check_fits(args, model, chat, moments):
    """SystemExit where a moment and its rubric are longer than the model's context, or more layers are to be trained than there are: now, not in the middle of the work."""
    if args.train_layers > model.config.layers:
        die(f"--train_layers {args.train_layers}: the model has {model.config.layers}")
    for m in moments:
        if (n := len(chat.prompt(prompt(m.context()))) + 160) > model.config.max_positions:
            die(f"{args.preferences} or {args.demonstrations}: the moment that begins '{m.said[0][:40]}' takes {n} tokens with its rubric, the model knows {model.config.max_positions} positions; shorten it")


def unread(rater):
    """A line that says how often the judge could not be read, "" where it always could."""
    return f"\nthe judge could not be read in {rater.unreadable} of {rater.asked} cases, which count as no preference; give another --judge, or --judge_by" if rater.unreadable else ""


def written(model, chat, pairs):
    """The rubric that the generator writes, greedily, for each pair's moment; None where it is none."""
    return [read(text) for text in LocalModel(model, chat).complete([prompt(p.moment.context()) for p in pairs], 160)]


def keep(run, rows):
    """Replace these stages' rows in RUN/rubrics.jsonl."""
    stages = {r["stage"] for r in rows}
    everything = [r for r in kept(run) if r["stage"] not in stages] + rows
    write_rows(run / "rubrics.jsonl", everything)
    return everything


def kept(run):
    """The rows of RUN/rubrics.jsonl, none where it isn't there. SystemExit with file:line on one that is none of ours."""
    path, number = Path(run) / "rubrics.jsonl", lambda x, least, most: type(x) in (int, float) and least <= x <= most
    out = []
    for line, row, problem in read_lines(path) if path.exists() else ():
        texts = isinstance(row, dict) and all(isinstance(row.get(k), str) for k in ("stage", "dialogue", "band", "fault"))
        if problem or not (texts and type(row.get("turn")) is int and isinstance(row.get("valid"), bool) and number(row.get("entropy"), 0, 2) and number(row.get("right"), 0, 1)
                           and isinstance(row.get("weights"), list) and len(row["weights"]) == 3 and all(number(w, 0, 1) for w in row["weights"])):
            die(f"{path}:{line}: {problem or 'not a row that rubric.py sft or prefer wrote'}; remove the line, or make the run again")
        out.append(row)
    return out


# ---------------------------------------------------------------------------------------------- the two trainings
def sft(args, rater, device, dtype):
    """Negative log-likelihood of care-prior's rubric given the moment; measured on the held-out pairs before and after."""
    run, pairs = Path(args.out), load_preferences(args.preferences)
    trained = all((run / name).is_file() for name in ("config.json", "sft/model.safetensors")) and not any(r["stage"] == "sft" for r in kept(run))      # stopped before it was measured
    if trained and (other := [k for k, v in read_json(run / "config.json").items() if k != "threads" and not k.startswith("server_") and v != getattr(args, k, None)]):
        die(f"--out {run} was made with another --{other[0]}, and is not measured yet; give the same, or remove it")
    if not trained:
        new_folder(run)
    moments, heldout = lessons(pairs, args.demonstrations, args.seed), [p for p in pairs if p.split == "heldout"]
    resolve(args.model)
    model, tokenizer = load(str(run / "sft") if trained else args.model, dtype, device)
    chat, began = Chat(tokenizer, model.config.vocab), time.time()
    check_fits(args, model, chat, moments + [p.moment for p in heldout])
    print(f"{args.model} on {device}, compute {dtype}; {len(moments)} moments to imitate, {len(heldout)} held-out pairs")
    if trained:
        print(f"{run}/sft is trained, and is measured now")
    else:
        learned, always = [p for p in pairs if p.split == "train"], lambda rubric: [rubric] * len(heldout)
        rows = [row for name, found in rote(learned, heldout).items() for row in measure(name, heldout, always(None), rater, found)]
        rows += measure("fixed", heldout, always(FIXED), rater) + measure("constant", heldout, always(constant(learned, rater)), rater) + measure("care-prior", heldout, [prior(p.moment) for p in heldout], rater)
        rows += measure("base", heldout, written(model, chat, heldout), rater)
        model.train_only_upper(args.train_layers)
        if args.lora:
            model.add_lora(args.lora, args.seed)
        train = []
        for m in moments:
            row, ids = Row(), chat.plain(str(prior(m))) + [chat.eot]
            row.environment(chat.prompt(prompt(m.context())))
            row.policy(ids, [0.0] * len(ids), 0)
            train.append(row)
        losses = fit(model, chat, train, args.epochs, args.lr, args.batch, args.seed)
        save(model, tokenizer, run / "sft", base=str(resolve(args.model)))
        (run / "config.json").write_text(json.dumps(vars(args), indent=1), encoding="utf-8")
        keep(run, rows)
        print(f"{losses[0]:.3f} -> {losses[-1]:.3f} nats a token in {time.time() - began:.0f} s; saved {run}/sft")
    rows = keep(run, measure("sft", heldout, written(model, chat, heldout), rater))
    print(f"\n{table(rows)}\n{unread(rater)}\nnext: python rubric.py prefer --run {run}")
    return 0


def prefer(args, rater, device, dtype):
    """GRPO: `group_size` rubrics of each moment, worth preference_reward, compared within the group; k3 to the generator after imitation (the adapters' start). Every step is kept in
    RUN/prefer.pt: stopped half-way, by Ctrl-C or a judge whose calls are spent, the same command goes on, to the same generator."""
    from train_grpo import trajectory_advantages, update    # the same loss, clip and micro-batches; that file knows nothing of this one
    run, pairs = Path(args.run), load_preferences(args.preferences)
    if not (run / "sft").is_dir():
        die(f"--run {run}: no generator there; python rubric.py sft --out {run} makes one")
    begun = run / "prefer.pt"
    if (run / "preferred").exists() and not begun.exists():
        die(f"{run}/preferred exists; remove it, or make another run")
    kept(run)                                              # damaged rows are found now, not after an hour
    made = read_json(run / "config.json") if (run / "config.json").is_file() else vars(args)
    for name in ("judge", "judge_by", "preferences"):
        if made.get(name) != getattr(args, name):
            die(f"--{name} {getattr(args, name)}: {run} was measured with {made.get(name)}, and its stages are compared; give the same, or make another run")
    train, heldout = ([p for p in pairs if p.split == split] for split in ("train", "heldout"))
    if args.group_size < 2 or args.lora < 1:
        die(f"--group_size {args.group_size} --lora {args.lora}: needs at least 2 rubrics of a moment, to compare, and adapters of rank 1 or more")
    if args.pairs % args.minibatches or args.pairs > len(train):
        die(f"--pairs {args.pairs}: must be a multiple of --minibatches {args.minibatches}, and no more than the {len(train)} training pairs")
    model, tokenizer = load(str(run / "sft"), dtype, device)
    chat = Chat(tokenizer, model.config.vocab)
    check_fits(args, model, chat, [p.moment for p in pairs])
    model.train_only_upper(args.train_layers)
    model.add_lora(args.lora, args.seed)
    parameters = [q for q in model.parameters() if q.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    how = SimpleNamespace(epochs=1, minibatches=args.minibatches, max_turns=1, max_new_tokens=160, tokens_per_microbatch=4096, temperature=1.0, clip_low=0.2, clip_high=0.28, dual_clip=3.0, kl=args.kl, grad_clip=1.0)
    flags = {k: v for k, v in vars(args).items() if k not in ("run", "steps", "threads", "demonstrations") and not k.startswith("server_")}
    flags |= {"of sft/": weights_stamp(run / "sft"), "of --preferences": hashlib.sha256(repr(pairs).encode()).hexdigest()}
    records = take_up(begun, flags, model, optimizer, args.steps)
    with StopOnInterrupt() as stop:
        spent = None
        for step in range(len(records), args.steps):
            rng, began = np.random.default_rng([args.seed, step]), time.time()
            order = np.concatenate([np.random.default_rng([args.seed, e, 7]).permutation(len(train)) for e in range((step + 1) * args.pairs // len(train) + 1)])
            chosen = [train[i] for i in order[step * args.pairs:(step + 1) * args.pairs]]
            episodes = answers(model, chat, [chat.prompt(prompt(p.moment.context())) for p in chosen], args.group_size, how.max_new_tokens, how.temperature, torch.Generator().manual_seed(args.seed * 1_000_003 + step))
            rubrics = [read(e.replies[0]) for e in episodes]
            several = [p for p in chosen for _ in range(args.group_size)]
            try:
                found = margins(rater, several, [r or FIXED for r in rubrics], rng)
            except BudgetSpent as e:
                spent = e
                break
            worth = [preference_reward(m, r) for m, r in zip(found, rubrics)]
            worth = [w for g in range(0, len(worth), args.group_size) for w in filled(worth[g:g + args.group_size])]      # what could not be marked takes its group's mean
            advantages, flat = trajectory_advantages([SimpleNamespace(total=w, turns=[w]) for w in worth], args.group_size, 0.1)
            metrics = update(how, model, model, optimizer, chat, episodes, advantages)
            record = {"step": step + 1, "reward": float(np.mean(worth)), "right": float(np.mean([((m or 0) > 0) + 0.5 * (not m) for m in found])), "invalid": float(np.mean([r is None for r in rubrics])),
                      "weight_entropy": float(np.mean([r.entropy for r in rubrics if r])) if any(rubrics) else 0.0, "flat_groups": flat, **metrics, "seconds": round(time.time() - began, 1)}
            records.append(record)
            keep_begun(begun, flags, model, optimizer, records)
            write_rows(run / "prefer.jsonl", records)
            print(f"step {step + 1:3d}  prefers the chosen {100 * record['right']:.1f} %  no rubric (the fixed one stands in) {100 * record['invalid']:.1f} %  entropy of weights {record['weight_entropy']:.2f}  "
                  f"kl to imitation {metrics['kl_reference']:.4f}  flat groups {flat:.2f}  {record['seconds']:.0f} s", flush=True)
            if stop.asked:
                break
    if len(records) < args.steps:
        print(f"{spent or 'stopped'}: {len(records)} of {args.steps} steps are in {begun}, and the same command goes on", file=sys.stderr)
        return 130
    save(model, tokenizer, run / "preferred", base=str(run / "sft"))
    rows = keep(run, measure("preferred", heldout, written(model, chat, heldout), rater))
    begun.unlink()                                         # last: until all is measured, the same command goes on
    print(f"saved {run}/preferred\n\n{table(rows)}\n{unread(rater)}\nnext: python rubric.py analyse {run}")
    return 0


# ---------------------------------------------------------------------------------------------- to look at
def strict_share(rows):
    """How often each dimension's weight is strictly the largest. -> three shares; they miss 1 by the ties. What is no rubric has no share."""
    top = [np.flatnonzero(np.array(r["weights"]) > max(r["weights"]) - 1e-9) for r in rows]
    return [float(np.mean([list(t) == [d] for t in top])) for d in range(3)]


def analyse(args):
    """Tables of RUN/rubrics.jsonl (of several runs: all together, accuracies run by run too), and RUN/rubrics.svg of the first."""
    runs = {}
    if twice := next((run for run, n in Counter(str(Path(r).resolve()) for r in args.runs).items() if n > 1), None):
        die(f"{twice} is named twice, and would count twice")
    for run in args.runs:
        runs[run] = kept(run) if (Path(run) / "rubrics.jsonl").is_file() else die(f"{run}: no rubrics.jsonl; python rubric.py sft --out {run} makes one")
        if not runs[run]:
            die(f"{run}/rubrics.jsonl: is empty; python rubric.py sft makes one")
    rows = [r for mine in runs.values() for r in mine]
    for run, mine in runs.items():
        print(f"{run}, held-out pairs\n{table(mine)}\n")
    if len(runs) > 1:
        for stage in dict.fromkeys(r["stage"] for r in rows):
            means = [100 * np.mean([r["right"] for r in mine if r["stage"] == stage]) for mine in runs.values() if any(r["stage"] == stage for r in mine)]
            print(f"{stage:12} mean of {len(means)} runs {half_up(np.mean(means))} ({', '.join(map(half_up, means))})")
        print()
    stages, panels = [s for s in ("care-prior", "sft", "preferred") if any(r["stage"] == s for r in rows)], []
    for what, name in (("turn", lambda r: f"turn {r['turn']}"), ("band", lambda r: r["band"])):
        print(f"{'':12} {what:10} {'n':>4}  share of rubrics in which a dimension weighs most: " + ", ".join(DIMENSIONS))
        for stage in stages:
            mine = [r for r in rows if r["stage"] == stage and r["valid"]]
            kinds = [f"turn {t}" for t in sorted({r["turn"] for r in mine})] if what == "turn" else ("low", "middle", "high")
            of = {k: [r for r in mine if name(r) == k] for k in kinds}
            for k in kinds:
                if of[k]:
                    print(f"{stage:12} {k:10} {len(of[k]):>4}  " + "  ".join(f"{half_up(100 * x, 0):>4} %" for x in strict_share(of[k])))
            panels.append((f"{stage}, by {'turn' if what == 'turn' else 'mood'}", {k: strict_share(v) for k, v in of.items() if v}))
    print(f"\n{'':12} accuracy by what the rejected reply did wrong, %")
    faults = sorted({r["fault"] for r in rows if r["fault"]})
    for stage in ("overlap", "words alone", "fixed", "constant", "care-prior", "sft", "preferred"):
        by = {f: [r["right"] for r in rows if r["stage"] == stage and r["fault"] == f] for f in faults}
        if any(by.values()):
            print(f"{stage:12} " + ", ".join(f"{f} {half_up(100 * np.mean(x), 0)} (n {len(x)})" for f, x in by.items() if x))
    out = Path(args.runs[0]) / "rubrics.svg"
    out.write_text(bars(panels), encoding="utf-8")
    print(f"\nwrote {out}")
    if args.record:
        record_result(args.record, {"runs": {run: accuracy(mine) for run, mine in runs.items()}, "shares": dict(panels)})
    return 0


def bars(panels):
    """Stacked bars as an SVG text. panels: (title, {bar: three shares})."""
    colours, half, out, rows = ("#3b6fb5", "#d9762b", "#4c9a4c"), len(panels) // 2, [], 2
    width, height = 250, 190
    for i, (title, columns) in enumerate(panels):
        x0, y0 = 20 + (i % half) * width, 40 + (i // half) * height
        out.append(f'<text x="{x0}" y="{y0 - 8}">{title}</text>')
        for j, (name, values) in enumerate(columns.items()):
            at = y0 + 120
            for value, colour in zip(values, colours):
                at -= 120 * value
                out.append(f'<rect x="{x0 + j * 52}" y="{at:.1f}" width="40" height="{120 * value:.1f}" fill="{colour}"/>')
            out.append(f'<text x="{x0 + j * 52}" y="{y0 + 135}">{name}</text>')
    legend = "".join(f'<rect x="{20 + 110 * k}" y="5" width="12" height="12" fill="{c}"/><text x="{36 + 110 * k}" y="15">{d}</text>' for k, (c, d) in enumerate(zip(colours, DIMENSIONS)))
    w, h = 20 + half * width, 30 + rows * height
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" font-family="sans-serif" font-size="12"><rect width="{w}" height="{h}" fill="white"/>{legend}{"".join(out)}</svg>\n'


def show(args, rater, device, dtype):
    """The rubric of each turn of one dialogue, and what the reply that was given is worth under it."""
    if args.rows:
        found, problems = read_rows(args.rows)
        if not args.row < len(found):
            die(f"--row {args.row}: {args.rows} has {len(found)} rows, counted from 0{f'; {problems[0]}' if problems else ''}")
        for problem in problems[:5]:
            print(problem, file=sys.stderr)
        row = found[args.row]
        history, _ = history_of(row)
        if [h["role"] for h in history] != [("user", "assistant")[i % 2] for i in range(len(history))] or len(history) < 2:
            die(f"{args.rows}: row {args.row}: its turns are not user, assistant, user, ...; show another --row")
        said, replies, emotions = [h["content"] for h in history[::2]], [h["content"] for h in history[1::2]], [h.get("emotion-point") for h in history[::2]]
        if None in emotions[:len(replies)]:
            die(f"{args.rows}: row {args.row}: a user's turn has no field 'emotion-point'")
        scenario = {s.id: s for s in load_scenarios(DATA / "scenarios.jsonl")}.get(row["id"])
        intent = row.get("intent") or (scenario.intent if scenario else "")
        if intent not in INTENTS:
            die(f"{args.rows}: row {args.row} says nothing of its intention; show rows that evaluate.py run --out wrote")
    else:
        row = next((row for _, row in read_demonstrations(args.demonstrations) if args.id in ("", row.get("id"))), None) or die(f"--id {args.id}: no such dialogue in {args.demonstrations}")
        scenario = {s.id: s for s in load_scenarios(DATA / "scenarios.jsonl")}.get(row.get("scenario")) or die(f"{args.demonstrations}: dialogue {row.get('id')}: field 'scenario': not one of ours")
        text, user, intent = [m["content"] for m in row["messages"]], ScriptedUser(scenario), scenario.intent
        said, replies, emotions = text[::2], text[1::2], [user.emotion]
        for reply in replies:                              # the mood that the scripted user would have had
            emotions.append(user.emotion if user.done else user.respond(reply).emotion)
    moments = [Moment(tuple(said[:t + 1]), tuple(replies[:t]), emotions[t], intent, tuple(scenario.feelings if scenario else ()), tuple(scenario.people if scenario else ())) for t in range(len(replies))]
    if args.rubric == "care":
        generated = Generated(make_backend(f"lm:{generator_folder(args.generator)}", args, dtype, device).complete)
        rubrics = generated.rubrics(moments)
        if generated.invalid:
            print(f"for {generated.invalid} of {generated.asked} moments {args.generator} wrote no rubric; the fixed one stands in\n")
    else:
        rubrics = [prior(m) if args.rubric == "care-prior" else FIXED for m in moments]
    R = rubric_scores(args.rubric, rater, [(m, reply, 0, True) for m, reply in zip(moments, replies)], rubrics)
    for t, (m, rubric, reply, r) in enumerate(zip(moments, rubrics, replies, R)):
        print(f"{t + 1}  user      {m.said[-1]}\n   mood      {m.emotion} ({m.band}), stage {m.stage}")
        print("".join(f"   rubric    {line}\n" for line in str(rubric).split("\n")), end="")
        print(f"   reply     {reply}\n   worth     {'could not be read' if r is None else f'{r:.2f}'}\n")
    return 0


# ---------------------------------------------------------------------------------------------- flags
def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    p = Flags(prog="rubric.py", description=__doc__, epilog="each has a --help of its own")
    p.add_argument("what", choices=["sft", "prefer", "show", "analyse"])
    what = p.parse(argv[:1])[0].what
    p = Flags(prog=f"rubric.py {what}", description={"sft": sft, "prefer": prefer, "show": show, "analyse": analyse}[what].__doc__)
    if what == "analyse":
        p.add_argument("runs", nargs="+", metavar="RUN", help="folders that rubric.py sft made")
        p.add_argument("--record", type=writable, metavar="FILE", help="append the result, with command, commit and machine, to this .jsonl")
        return analyse(p.parse(argv[1:])[0])
    p.add_argument("--judge", default="scripted", metavar="WHO", help="who marks replies by the rubric: scripted, lm:MODEL or server:URL#MODEL (default: %(default)s)")
    p.add_argument("--judge_by", default="text", choices=["text", "logits"], help="how a language judge is read (default: %(default)s)")
    p.add_argument("--demonstrations", default=str(Path("data") / "demonstrations.jsonl"), help="dialogues, by scenario (default: %(default)s)")
    p.add_argument("--seed", type=seed_number, default=0, help="fixes everything (default: %(default)s)")
    p.add_argument("--threads", type=positive(int), help="CPU threads (default: torch's choice)")
    p.add_argument("--dtype", default="auto", choices=["auto", "fp32", "bf16", "fp16"], help="compute dtype; masters are fp32 (default: %(default)s)")
    add_server_flags(p)
    if what == "show":
        p.add_argument("--rubric", default="care-prior", choices=["care", "care-prior", "fixed"], help="which (default: %(default)s)")
        p.add_argument("--generator", default="runs/care", metavar="RUN", help="of care, a folder that python rubric.py sft made (default: %(default)s)")
        p.add_argument("--id", default="", help="of the demonstration (default: the first)")
        p.add_argument("--rows", metavar="FILE", help="instead of a demonstration: result rows of evaluate.py run --out")
        p.add_argument("--row", type=nonnegative(int), default=0, help="which of them, from 0 (default: %(default)s)")
    else:
        p.add_argument("--preferences", default=str(Path("data") / "preferences.jsonl"), help="pairs of replies to one moment (default: %(default)s)")
        p.add_argument("--train_layers", type=nonnegative(int), default=15, help="train the upper N layers; 0 = all (default: %(default)s)")
        p.add_argument("--lora", type=nonnegative(int), default=16 if what == "prefer" else 0, metavar="RANK", help="adapters of this rank instead of the weights themselves; prefer needs them, their start is its reference; after sft with 16 three answers in ten were no rubric, without one in nine (default: %(default)s)")
    if what == "sft":
        p.add_argument("--model", default="smollm2-135m", help="smollm2-135m, hub name, HF folder or .gguf (default: %(default)s)")
        p.add_argument("--out", default="runs/care", metavar="RUN", help="folder to make (default: %(default)s)")
        p.add_argument("--epochs", type=positive(int), default=2, help="passes over the moments (default: %(default)s)")
        p.add_argument("--lr", type=positive(float), default=3e-4, help="peak learning rate (default: %(default)s)")
        p.add_argument("--batch", type=positive(int), default=16, help="moments a step (default: %(default)s)")
    if what == "prefer":
        p.add_argument("--run", default="runs/care", metavar="RUN", help="folder that rubric.py sft made (default: %(default)s)")
        p.add_argument("--steps", type=positive(int), default=16, help="batches (default: %(default)s)")
        p.add_argument("--pairs", type=positive(int), default=16, help="moments a batch (default: %(default)s)")
        p.add_argument("--group_size", type=positive(int), default=8, help="rubrics of each moment (default: %(default)s)")
        p.add_argument("--minibatches", type=positive(int), default=2, help="optimiser steps a batch (default: %(default)s)")
        p.add_argument("--lr", type=positive(float), default=1e-3, help="learning rate of AdamW, of the adapters (default: %(default)s)")
        p.add_argument("--kl", type=positive(float), default=0.02, help="weight of the k3 penalty to the generator after imitation (default: %(default)s)")
    args, given = p.parse(argv[1:])
    if args.judge == "scripted" and "judge_by" in given:
        die(f"--judge_by {args.judge_by}: of a language judge; the scripted one is not read, add --judge lm:MODEL or server:URL#MODEL")
    if what == "show" and (args.rows and "id" in given or not args.rows and "row" in given):
        die("--row is of --rows FILE, --id of --demonstrations; give a pair that fits")
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.judge != "scripted":
        check_backend("--judge", args.judge, args, "scripted, lm:MODEL or server:URL#MODEL")
    if what == "show" and args.rubric == "care" and generator_folder(args.generator) is None:
        die(f"--generator {args.generator}: no rubric generator there; make one with python rubric.py sft --out {args.generator}")
    device = pick_device()
    dtype = pick_dtype(args.dtype, device)
    backend = make_backend(args.judge, args, dtype, device) if args.judge != "scripted" else None
    rater = LanguageRater(backend.complete, backend.choose, args.judge_by) if backend else ScriptedRater()
    if what == "show":
        return show(args, rater, device, dtype)
    try:
        return {"sft": sft, "prefer": prefer}[what](args, rater, device, dtype)
    except BudgetSpent as e:
        die(f"{e}; raise --server_calls, or let the scripted judge mark")
