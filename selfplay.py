"""
Emotion recognition by self-play (after SELF-EMO, abstract; the mechanics are our reconstruction): one small model understands, dialogue -> emotions, and expresses, dialogue and emotion ->
the next line; each makes lessons for the other.

    python selfplay.py sft --out runs/emo                      imitation of gold labels (data/emotions.jsonl), both roles
    python selfplay.py grpo --run runs/emo                     SELF-GRPO: groups of answers, worth their overlap with gold, or with the group's own majority, and with each other
    python selfplay.py fly --run runs/emo --guard              the flywheel: lines written towards an emotion and understood as it are kept and learned from, round after round
    python selfplay.py test --model runs/emo/sft FILE...       accuracy and F1 on a file: ours, MELD, EmoryNLP, JSONL

Agreement without gold can lock in a shared error, so each round is held against gold that it never trains on. Left out on purpose: audio, and more than two emotions at once.
"""
import hashlib
import json
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from tqdm import tqdm

from appraisal import words
from emotions import LABELS, Utterance, classification, consistency, iou, majority, read_emotions
from episode import Row
from model import Cache, append
from rollout import Chat, answers
from rundir import Flags, StopOnInterrupt, die, fraction, keep_begun, new_folder, nonnegative, positive, read_json, record_result, seed_number, take_up, writable, write_rows
from stats import bootstrap, half_up
from train_grpo import trajectory_advantages, update
from train_sft import fit
from weights import load, pick_device, pick_dtype, resolve, save, weights_stamp

HISTORY = 4                                                # lines of the dialogue that either role sees


# ---------------------------------------------------------------------------------------------- two roles
def understand(u):
    """What the model is asked about the last line of an Utterance."""
    lines = "\n".join(f"{speaker}: {text}" for speaker, text in u.lines[-HISTORY:])
    return [{"role": "system", "content": f"You name what a speaker feels: one or two of {', '.join(LABELS)}."}, {"role": "user", "content": f"{lines}\n\nWhat does {u.speaker} feel in the last line?"}]


def express(lines, speaker, emotion):
    """What the model is asked for the next line of a dialogue, said by `speaker` who feels `emotion`."""
    talk = "\n".join(f"{who}: {text}" for who, text in lines[-HISTORY:])
    return [{"role": "system", "content": "You write the next line of a conversation as its speaker would say it."}, {"role": "user", "content": f"{talk}\n\nWrite what {speaker} says next, feeling {emotion}."}]


def parse(text):
    """An understanding answer -> frozenset of one or two labels, or None: "Sadness, anger." is read, "I think it is sadness" is not. neutral stands alone."""
    found = [part.strip() for part in text.strip().removesuffix(".").lower().replace(" and ", ",").split(",")]
    good = 1 <= len(found) <= 2 and len(set(found)) == len(found) and all(f in LABELS for f in found) and not (len(found) == 2 and "neutral" in found)
    return frozenset(found) if good else None


def lesson(chat, messages, answer):
    """One training row: the prompt is environment, the answer and its end of turn are the model's."""
    row, ids = Row(), chat.plain(answer) + [chat.eot]
    row.environment(chat.prompt(messages))
    row.policy(ids, [0.0] * len(ids), 0)
    return row


@torch.no_grad()
def label_logprobs(model, chat, us, batch=16):
    """log p(label, end of turn | prompt) of each of the seven labels, (N, 7): deterministic, one read of each prompt."""
    device, ids, out = model.model.embed_tokens.weight.device, [chat.plain(label) + [chat.eot] for label in LABELS], []
    for a in tqdm(range(0, len(us), batch), desc="understanding", leave=False):
        prompts = [chat.prompt(understand(u)) for u in us[a:a + batch]]
        cache = Cache(model, len(prompts), max(map(len, prompts)))
        last = append(model, cache, prompts)                                                          # (B, D)
        rows = torch.arange(len(prompts), device=device).repeat_interleave(7)
        cache, last, width = cache.rows(rows), last[rows], max(map(len, ids))
        cache.reserve(cache.top + width)
        chunk = torch.tensor([i + [0] * (width - len(i)) for i in ids] * len(prompts), device=device)                 # (7 B, T)
        lengths = torch.tensor([len(i) for i in ids] * len(prompts), device=device)
        hidden = torch.cat((last[:, None], model(chunk, cache, lengths)[:, :-1]), 1)                  # (7 B, T, D): before each token
        logits = model.logits(hidden).masked_fill_(chat.banned.to(device), float("-inf"))
        logp = logits.log_softmax(-1).gather(2, chunk[..., None])[..., 0]                             # (7 B, T)
        out.append(logp.masked_fill(torch.arange(width, device=device) >= lengths[:, None], 0.0).sum(1).view(-1, 7))
    return torch.cat(out).cpu()


def evaluate(model, chat, us, name, quiet=False):
    """Scores on utterances with gold, by label log-probs and by sampled text (greedy), of which overlap is the mean smoothed IoU with all of gold. -> dict of numbers, printed unless quiet."""
    logp = label_logprobs(model, chat, us)
    texts = [e.replies[0].lower() for e in answers(model, chat, [chat.prompt(understand(u)) for u in us], 1, 12, 0.0, None)]
    by_logp, by_text = [LABELS[k] for k in logp.argmax(1).tolist()], [r and min(r, key=text.find) for text in texts for r in [parse(text)]]       # of two, the one named first
    hit = [100.0 * (p in u.gold) for p, u in zip(by_logp, us)]
    low, high = bootstrap(hit, [u.dialogue for u in us])
    chance, top = max((100 * np.mean([label in u.gold for u in us]), label) for label in LABELS)
    c, t = classification([u.gold for u in us], by_logp), classification([u.gold for u in us], by_text)
    entropy = -sum(p * np.log(p) for p in (np.array(list(Counter(by_logp).values())) / len(us)))
    found = {"name": name, "n": len(us), "accuracy": 100 * c["accuracy"], "low": low, "high": high, "weighted_f1": 100 * c["weighted_f1"], "macro_f1": 100 * c["macro_f1"], "majority": chance, "confusion": c["confusion"],
             "text_accuracy": 100 * t["accuracy"], "text_weighted_f1": 100 * t["weighted_f1"], "overlap": float(np.mean([iou(parse(text) or (), u.gold) for text, u in zip(texts, us)])), "unread": 100 * t["unread"] / len(us), "label_entropy": float(entropy)}
    if not quiet:
        ci = f" ({half_up(low)} .. {half_up(high)})" if low is not None else ""
        print(f"{name}: n {len(us)}  accuracy {half_up(found['accuracy'])}{ci}, always '{top}' {half_up(chance)}  weighted F1 {half_up(found['weighted_f1'])}  macro F1 {half_up(found['macro_f1'])}  "
              f"as text {half_up(found['text_accuracy'])}, {half_up(found['unread'])} % unread", flush=True)
    return found


def digest(text):
    """Hash of a line's words, whatever their case and punctuation."""
    return hashlib.sha256(" ".join(words(text)).encode()).hexdigest()


def forbidden(us):
    """What no training may touch: dialogue ids of held-out and dev utterances, hashes of their lines of four words or more."""
    return {u.dialogue for u in us if u.split != "train"}, {digest(text) for u in us if u.split != "train" for _, text in u.lines if len(text.split()) > 3}


def clean(u, ids, hashes):
    """Whether an utterance, and every line it is read with, is of no held-out dialogue."""
    return u.dialogue not in ids and not any(digest(text) in hashes for _, text in u.lines)


def assert_clean(us, ids, hashes):
    """AssertionError where something is about to be trained on that is held out."""
    for u in us:
        assert clean(u, ids, hashes), f"{u.dialogue} is held out"


def unlabelled(us, share, seed):
    """The training dialogues whose gold no stage of a run may read: a share of them, drawn by the run's seed."""
    names = sorted({u.dialogue for u in us if u.split == "train"})
    return set(np.random.default_rng([seed, 3]).permutation(names)[:round(share * len(names))].tolist())


# ---------------------------------------------------------------------------------------------- imitation
def sft(args, us, device, dtype):
    """Negative log-likelihood of the gold labels, and with --express of the line itself, given its emotion. --shuffle: labels dealt at random, the control that must learn nothing."""
    run = new_folder(args.out)
    hidden = unlabelled(us, args.unlabelled, args.seed)
    train, heldout = ([u for u in us if u.split == split and u.gold and u.dialogue not in hidden] for split in ("train", "heldout"))
    if not train:
        die(f"--unlabelled {args.unlabelled:g}: leaves nothing to imitate; lower it")
    assert_clean(train, *forbidden(us))
    gold = [u.gold for u in train]
    if args.shuffle:
        gold = [gold[i] for i in np.random.default_rng(args.seed).permutation(len(gold))]
    resolve(args.model)
    model, tokenizer = load(args.model, dtype, device)
    chat, began = Chat(tokenizer, model.config.vocab), time.time()
    check_fits(args, model, chat, us)
    found = [evaluate(model, chat, heldout, "base")]
    rows = [lesson(chat, understand(u), ", ".join(g)) for u, g in zip(train, gold)]
    if args.express:
        rows += [lesson(chat, express(u.lines[:-1], u.speaker, " and ".join(g)), u.lines[-1][1]) for u, g in zip(train, gold) if len(u.lines) > 1]
    model.train_only_upper(args.train_layers)
    losses = fit(model, chat, rows, args.epochs, args.lr, args.batch, args.seed)
    save(model, tokenizer, run / "sft", base=str(resolve(args.model)))
    (run / "config.json").write_text(json.dumps({**vars(args), "utterances": stamp(us)}, indent=1), encoding="utf-8")
    found.append(evaluate(model, chat, heldout, "shuffled labels" if args.shuffle else "sft"))
    print(f"{losses[0]:.3f} -> {losses[-1]:.3f} nats a token, {time.time() - began:.0f} s in all; saved {run}/sft; next: python selfplay.py grpo --run {run}")
    return found


# ---------------------------------------------------------------------------------------------- SELF-GRPO
def rewards(group, gold, weight=0.2, s=0.1):
    """(1 - lam) overlap with gold + lam consistency, one number per answer of a group; gold () means the labels that half of the group named. An answer that can't be read is worth 0, and
    counts as the empty set to the others. Without gold and without a majority nothing is known: all 0."""
    sets = [a or frozenset() for a in group]
    target = gold or majority(sets)                        # half of the whole group: what can't be read is no vote, and no abstention either
    if not target:
        return [0.0] * len(group)
    return [0.0 if a is None else (1 - weight) * iou(a, target, s) + weight * c for a, c in zip(group, consistency(sets, s))]


def self_grpo(args, us, device, dtype):
    """GRPO over groups of understanding answers; the loss is train_grpo.py's. In the dialogues that sft --unlabelled left out, the group's majority stands in for gold."""
    run, (model, tokenizer, chat, start, hidden) = Path(args.run), begin(args, us, device, dtype)
    train, dev, heldout = ([u for u in us if u.split == split and (u.gold or split == "train")] for split in ("train", "dev", "heldout"))
    if len(train) < args.batch or args.batch % 2:
        die(f"--batch {args.batch}: must be even, it is learned from in two halves, and no more than the {len(train)} training utterances in {args.emotions}")
    assert_clean(train, *forbidden(us))
    model.train_only_upper(args.train_layers)
    optimizer = torch.optim.AdamW([q for q in model.parameters() if q.requires_grad], lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    begun, flags, size = run / "grpo.pt", begun_with(args, us), args.batch
    records = take_up(begun, flags, model, optimizer, args.steps)
    found = [records[0]["start"] if records else evaluate(model, chat, heldout, start)]
    how = SimpleNamespace(epochs=1, minibatches=2, max_turns=1, max_new_tokens=12, tokens_per_microbatch=4096, temperature=1.0, clip_low=0.2, clip_high=0.28, dual_clip=3.0, kl=0.0, grad_clip=1.0)
    with StopOnInterrupt() as stop:
        for step in range(len(records), args.steps):
            began, order = time.time(), np.random.default_rng([args.seed, step // (len(train) // size), 5]).permutation(len(train))
            at = step % (len(train) // size) * size
            batch = [train[i] for i in order[at:at + size]]
            episodes = answers(model, chat, [chat.prompt(understand(u)) for u in batch], args.group_size, 12, 1.0, torch.Generator().manual_seed(args.seed * 1_000_003 + step))
            groups = [[parse(e.replies[0]) for e in episodes[k * args.group_size:(k + 1) * args.group_size]] for k in range(len(batch))]
            worth = [r for u, g in zip(batch, groups) for r in rewards(g, () if u.dialogue in hidden else u.gold, args.consistency)]
            advantages, flat = trajectory_advantages([SimpleNamespace(total=w, turns=[w]) for w in worth], args.group_size, 0.1)
            # a flat group has no gradient: left out, it costs none either; the others are numbered anew, so that both halves of the batch have some
            live = [k for k in range(size) if np.ptp(worth[k * args.group_size:(k + 1) * args.group_size]) > 0]
            use = [(k * args.group_size + i, n) for n, k in enumerate(live) for i in range(args.group_size)]
            for i, n in use:
                episodes[i].group = n
            metrics = update(how, model, None, optimizer, chat, [episodes[i] for i, _ in use], [advantages[i] for i, _ in use]) if live else {}
            record = {"step": step + 1, "reward": float(np.mean(worth)), "unread": float(np.mean([a is None for g in groups for a in g])), "right": float(np.mean([a is not None and bool(a & set(u.gold)) for u, g in zip(batch, groups) for a in g])),
                      "flat_groups": flat, **metrics, "seconds": round(time.time() - began, 1), **({} if records else {"start": found[0]})}
            if (step + 1) % args.eval_every == 0:
                record["dev"] = evaluate(model, chat, dev, "dev", quiet=True)["accuracy"]
            records.append(record)
            print(f"step {step + 1:3d}  reward {record['reward']:.3f}  right {100 * record['right']:.1f} %  unread {100 * record['unread']:.1f} %  flat groups {flat:.2f}  {f'''dev {record['dev']:.1f}  ''' if 'dev' in record else ''}{record['seconds']:.0f} s", flush=True)
            keep_begun(begun, flags, model, optimizer, records)                               # 640 MB and two seconds for 15 layers of the 135M model and Adam's moments
            write_rows(run / "grpo.jsonl", records)
            if stop.asked and step + 1 < args.steps:
                stopped(begun, len(records), args.steps)
    save(model, tokenizer, run / "grpo", base=str(run / start))
    return found + [evaluate(model, chat, heldout, "SELF-GRPO") | {"steps": [{k: r[k] for k in ("reward", "right", "unread", "flat_groups", "entropy", "dev") if k in r} for r in records]}]


# ---------------------------------------------------------------------------------------------- the flywheel
def keepable(group, target, threshold=0.6):
    """Whether a line written towards `target` and understood by a group of answers goes into the next round: the majority is the target, its mean overlap with it passes the threshold,
    and the answers are not all alike (unanimous and right teaches nothing, unanimous and wrong is an error)."""
    sets = [a or frozenset() for a in group]
    return majority(sets) == (target,) and float(np.mean([iou(a, {target}) for a in sets])) >= threshold and len(set(sets)) > 1


def fly(args, us, device, dtype):
    """Rounds of: write a line towards an emotion, understand it `group_size` times, keep by three tests, learn both roles from what was kept. The dialogues are those that sft --unlabelled
    left out, else the training ones; no label of theirs is read.
    Each round logs the share kept, accuracy on the dev gold, the entropy of the labels given; --guard takes back a round after which the accuracy has fallen, and ends there."""
    run, (model, tokenizer, chat, start, hidden) = Path(args.run), begin(args, us, device, dtype)
    seeds, dev, heldout = ([u for u in us if u.split == split and (u.gold or split == "train")] for split in ("train", "dev", "heldout"))
    ids, hashes = forbidden(us)
    seeds = [u for u in seeds if u.dialogue in hidden] or seeds
    assert_clean(seeds, ids, hashes)
    model.train_only_upper(args.train_layers)
    begun, flags = run / "fly.pt", begun_with(args, us)
    records = take_up(begun, flags, model, None, args.rounds)
    found = [records[0]["start"] if records else evaluate(model, chat, heldout, start)]
    best = records[-1]["best"] if records else evaluate(model, chat, dev, "dev", quiet=True)["accuracy"]
    print(f"dev before round {len(records) + 1} at best {best:.1f}")
    with StopOnInterrupt() as stop:
        for round_ in range(len(records), 0 if records and records[-1]["taken_back"] else args.rounds):
            began, rng = time.time(), np.random.default_rng([args.seed, round_, 9])
            chosen = [seeds[i] for i in rng.permutation(len(seeds))[:args.lines]]
            targets = [LABELS[(i + round_) % 7] for i in range(len(chosen))]                          # every emotion equally often
            speakers = [next((who for who, _ in reversed(u.lines[:-1]) if who != u.speaker), u.speaker) for u in chosen]
            generator = torch.Generator().manual_seed(args.seed * 1_000_003 + round_)
            lines = answers(model, chat, [chat.prompt(express(u.lines, who, t)) for u, who, t in zip(chosen, speakers, targets)], 1, 40, 0.8, generator)
            said = [" ".join(e.replies[0].split()) for e in lines]
            new = [Utterance(u.dialogue, "train", (*u.lines, (who, text)), ()) for u, who, text in zip(chosen, speakers, said)]
            episodes = answers(model, chat, [chat.prompt(understand(u)) for u in new], args.group_size, 12, 1.0, generator)
            groups = [[parse(e.replies[0]) for e in episodes[k * args.group_size:(k + 1) * args.group_size]] for k in range(len(new))]
            # a line that was cut off, or that happens to be a held-out one word for word, is no lesson
            kept = [(u, t) for u, t, g, e in zip(new, targets, groups, lines) if 3 <= len(u.lines[-1][1].split()) and not e.cuts[0] and keepable(g, t, args.threshold)
                    and digest(u.lines[-1][1]) not in hashes]
            assert_clean([u for u, _ in kept], ids, hashes)
            rows = [row for u, t in kept for row in (lesson(chat, understand(u), t), lesson(chat, express(u.lines[:-1], u.speaker, t), u.lines[-1][1]))]
            before = {k: v.clone() for k, v in model.state_dict().items()} if args.guard else None
            if rows:
                fit(model, chat, rows, 1, args.lr, 16, args.seed + round_)
            seen = evaluate(model, chat, dev, "dev", quiet=True)
            record = {"round": round_ + 1, "lines": len(new), "kept": len(kept) / len(new), "kept_by_label": Counter(t for _, t in kept), "dev": seen["accuracy"], "label_entropy": seen["label_entropy"],
                      "agreement": float(np.mean([np.mean(consistency([a or frozenset({i}) for i, a in enumerate(g)])) for g in groups])), "seconds": round(time.time() - began, 1),
                      "best": max(best, seen["accuracy"]), "taken_back": args.guard and seen["accuracy"] < best - args.tolerance, **({} if records else {"start": found[0]})}
            records.append(record)
            print(f"round {round_ + 1}  kept {100 * record['kept']:.1f} % of {len(new)}  agreement {record['agreement']:.2f}  dev accuracy {record['dev']:.1f}  entropy of labels {record['label_entropy']:.2f}  {record['seconds']:.0f} s", flush=True)
            if record["taken_back"]:
                print(f"--guard: accuracy on gold fell from {best:.1f} to {seen['accuracy']:.1f}; this round is taken back, and it was the last")
                model.load_state_dict(before)
            last, best = record["taken_back"] or round_ + 1 == args.rounds, record["best"]
            keep_begun(begun, flags, model, None, records)
            write_rows(run / "fly.jsonl", records)
            if stop.asked and not last:
                stopped(begun, len(records), args.rounds)
            if last:
                break
    save(model, tokenizer, run / "fly", base=str(run / start))
    return found + [evaluate(model, chat, heldout, "flywheel") | {"rounds": [{k: r[k] for k in ("lines", "kept", "kept_by_label", "dev", "agreement", "label_entropy", "taken_back")} for r in records]}]


def begin(args, us, device, dtype):
    """The model that a later stage starts from: RUN/sft, or what --start names. -> model, tokenizer, chat, name, dialogues whose gold is hidden."""
    run = Path(args.run)
    if not (run / args.start / "model.safetensors").is_file() or not (run / "config.json").is_file():
        die(f"--run {run}: no {args.start} there; python selfplay.py sft --out {run} makes one")
    if (run / args.what).exists() and not (run / f"{args.what}.pt").exists():          # with it, the stage was trained and not measured
        die(f"{run}/{args.what} exists; remove it, or make another run")
    if args.group_size < 2:
        die(f"--group_size {args.group_size}: needs 2 answers or more, to compare")
    made = read_json(run / "config.json")
    if made.get("utterances") != stamp(us):                # its split is the fence, and what --unlabelled hid was drawn from it
        die(f"--emotions {args.emotions}: {run} was made from other utterances; give the file that it was made with, or make another run")
    model, tokenizer = load(str(run / args.start), dtype, device)
    chat = Chat(tokenizer, model.config.vocab)
    check_fits(args, model, chat, us)
    return model, tokenizer, chat, args.start, unlabelled(us, made["unlabelled"], made["seed"])


def stamp(us):
    """Tells one set of utterances from another."""
    return hashlib.sha256(repr(us).encode()).hexdigest()


def check_fits(args, model, chat, us):
    """SystemExit where an utterance with its history, and an answer, is longer than the model's context, or more layers are to be trained than there are."""
    if getattr(args, "train_layers", 0) > model.config.layers:
        die(f"--train_layers {args.train_layers}: the model has {model.config.layers}")
    for u in us:
        if (n := max(len(chat.prompt(understand(u))) + 12, len(chat.prompt(express(u.lines, u.speaker, LABELS[0]))) + 40)) > model.config.max_positions:
            die(f"dialogue {u.dialogue}, '{u.lines[-1][1][:40]}': takes {n} tokens, the model knows {model.config.max_positions} positions; shorten it")


def begun_with(args, us):
    """What a stage that was stopped must be gone on with: its flags, the model it starts from, the utterances."""
    flags = {k: v for k, v in vars(args).items() if k not in ("what", "run", "steps", "rounds", "threads", "record", "emotions")}
    return flags | {"of --start": weights_stamp(Path(args.run) / args.start), "of --emotions": stamp(us)}


def stopped(begun, done, wanted):
    print(f"stopped: {done} of {wanted} are in {begun}, and the same command goes on", file=sys.stderr)
    raise SystemExit(130)


# ---------------------------------------------------------------------------------------------- flags
def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    p = Flags(prog="selfplay.py", description=__doc__, epilog="each has a --help of its own")
    p.add_argument("what", choices=["sft", "grpo", "fly", "test"])
    what = p.parse(argv[:1])[0].what
    p = Flags(prog=f"selfplay.py {what}", description={"sft": sft, "grpo": self_grpo, "fly": fly, "test": evaluate}[what].__doc__)
    p.add_argument("--seed", type=seed_number, default=0, help="fixes everything (default: %(default)s)")
    p.add_argument("--threads", type=positive(int), help="CPU threads (default: torch's choice)")
    p.add_argument("--dtype", default="auto", choices=["auto", "fp32", "bf16", "fp16"], help="compute dtype; masters are fp32 (default: %(default)s)")
    p.add_argument("--record", type=writable, metavar="FILE", help="append the scores, with command, commit and machine, to this .jsonl")
    if what == "test":
        p.add_argument("files", nargs="+", metavar="FILE", help="utterances with gold: data/emotions.jsonl (its held-out split), MELD's or EmoryNLP's .csv, EmoryNLP's .json, JSONL")
        p.add_argument("--model", default="smollm2-135m", help="smollm2-135m, hub name, HF folder or .gguf (default: %(default)s)")
    else:
        p.add_argument("--emotions", default=str(Path("data") / "emotions.jsonl"), metavar="FILE", help="dialogues with splits train, dev, heldout (default: %(default)s)")
        p.add_argument("--train_layers", type=nonnegative(int), default=15, help="train the upper N layers; 0 = all (default: %(default)s)")
        p.add_argument("--lr", type=positive(float), default={"sft": 3e-4, "grpo": 2e-5, "fly": 1e-4}[what], help="learning rate of AdamW (default: %(default)s)")
    if what == "sft":
        p.add_argument("--model", default="smollm2-135m", help="smollm2-135m, hub name, HF folder or .gguf (default: %(default)s)")
        p.add_argument("--out", default="runs/emo", metavar="RUN", help="folder to make (default: %(default)s)")
        p.add_argument("--epochs", type=positive(int), default=2, help="passes over the utterances (default: %(default)s)")
        p.add_argument("--batch", type=positive(int), default=16, help="utterances a step (default: %(default)s)")
        p.add_argument("--express", action="store_true", help="the second role too, which the flywheel needs")
        p.add_argument("--unlabelled", type=fraction, default=0.0, metavar="SHARE", help="of the training dialogues, whose gold is hidden from this and every later stage (default: %(default)s)")
        p.add_argument("--shuffle", action="store_true", help="the control: labels dealt at random")
    if what in ("grpo", "fly"):
        p.add_argument("--run", default="runs/emo", metavar="RUN", help="folder that selfplay.py sft made (default: %(default)s)")
        p.add_argument("--start", default="sft", choices=["sft", "fly" if what == "grpo" else "grpo"], help="the stage to go on from (default: %(default)s)")
        p.add_argument("--group_size", type=positive(int), default=8, help="answers to each line (default: %(default)s)")
    if what == "grpo":
        p.add_argument("--steps", type=positive(int), default=12, help="batches (default: %(default)s)")
        p.add_argument("--batch", type=positive(int), default=32, help="utterances a batch, an even number (default: %(default)s)")
        p.add_argument("--consistency", type=fraction, default=0.2, help="lambda, the weight of agreement within the group (default: %(default)s)")
        p.add_argument("--eval_every", type=positive(int), default=4, help="batches between scores on the dev split (default: %(default)s)")
    if what == "fly":
        p.add_argument("--rounds", type=positive(int), default=3, help="rounds of self-play (default: %(default)s)")
        p.add_argument("--lines", type=positive(int), default=196, help="lines written a round (default: %(default)s)")
        p.add_argument("--threshold", type=fraction, default=0.6, help="least mean overlap of a line's answers with its target (default: %(default)s)")
        p.add_argument("--guard", action="store_true", help="stop, and take the round back, when accuracy on the dev gold falls")
        p.add_argument("--tolerance", type=nonnegative(float), default=2.0, help="points that it may fall (default: %(default)s)")
    args, _ = p.parse(argv[1:])
    args.what = what
    if args.threads:
        torch.set_num_threads(args.threads)
    sets = []
    for path in args.files if what == "test" else [args.emotions]:
        us, left = read_emotions(path)
        sets.append((path, us))
        if left or not all(u.gold for u in us):
            print(f"{path}: {left} utterances left out, their label is none of the seven; {sum(not u.gold for u in us)} have none")
    if what != "test" and not all(any(u.split == s and u.gold for u in us) for s in ("train", "dev", "heldout")):
        die(f"--emotions {path}: needs the splits train, dev and heldout; other files can be tested on, not trained")
    if what != "test":
        fence = forbidden(us)
        sets = [(path, [u for u in us if u.split != "train" or clean(u, *fence)])]
        if not any(u.split == "train" and u.gold for u in sets[0][1]):
            die(f"--emotions {path}: every training utterance is in dev or heldout, too")
        if len(sets[0][1]) < len(us):
            print(f"{path}: {len(us) - len(sets[0][1])} training utterances left out, they or a line before them are in dev or heldout, too")
    device = pick_device()
    dtype = pick_dtype(args.dtype, device)
    if what == "test":
        sets = [(path, [u for u in us if u.gold and u.split == "heldout"]) for path, us in sets]
        if empty := next((path for path, us in sets if not us), None):
            die(f"{empty}: no utterance of split heldout with a label; a file without splits is tested on whole")
        resolve(args.model)
        model, tokenizer = load(args.model, dtype, device)
        chat = Chat(tokenizer, model.config.vocab)
        check_fits(args, model, chat, [u for _, us in sets for u in us])
        found = [evaluate(model, chat, us, Path(path).name) for path, us in sets]
        for f in found:
            print(f"\n{f['name']}, by label log-probs; rows: gold, columns: named\n{'':10}" + "".join(f"{label:>10}" for label in LABELS))
            print("\n".join(f"{label:10}" + "".join(f"{n:10d}" for n in row) for label, row in zip(LABELS, f["confusion"])))
    else:
        found = {"sft": sft, "grpo": self_grpo, "fly": fly}[what](args, sets[0][1], device, dtype)
    if args.record:
        for f in found:
            record_result(args.record, f)
    if what in ("grpo", "fly"):
        (Path(args.run) / f"{what}.pt").unlink()           # last: until all is measured, the same command goes on
    return 0


if __name__ == "__main__":
    sys.exit(main())
