"""
Imitation on demonstration dialogues: the cold start without which a small model's RL first learns only to stop babbling.

Cross-entropy on the supporter's tokens (end of turn included), nothing else: the user's tokens are environment. The same
pieces, masks and log-probs as in RL, so this file is also the simplest place to see them at work.

    python train_sft.py --out runs/sft            train SmolLM2-135M on data/demonstrations.jsonl
    (train_grpo.py runs this by itself in the laptop preset, and keeps the result in the user's cache)
"""
import hashlib
import inspect
import json
import time
from collections import namedtuple
from pathlib import Path

import torch
from tqdm import tqdm

from appraisal import DATA
from emotions import EDF, felt_by, regulate
from episode import Row, Tree, collate, micro_batches
from model import token_logprobs
from rollout import ASKED, Chat
from rundir import Flags, die, new_folder, nonnegative, positive, seed_number
from scenarios import load_scenarios, read_lines
from weights import cache_folder, load, pick_device, pick_dtype, resolve, save

Demonstration = namedtuple("Demonstration", "lines feeling", defaults=["neutral"])
DEFAULTS = dict(epochs=2, lr=3e-4, batch=8, train_layers=15, seed=0)


# ---------------------------------------------------------------------------------------------- demonstrations
def read_demonstrations(path):
    """[(line number, row), ...] of JSONL rows {"messages": [{"role", "content"}, ...]}: roles alternate, user first, assistant last; "id", "scenario" and "intent" are texts where they are given.
    SystemExit with file:line: field on the first row that does not fit."""
    if not Path(path).is_file():
        die(f"{path}: no such file of demonstrations")
    out = []
    for number, row, problem in read_lines(path):
        where, messages = f"{path}:{number}", (row or {}).get("messages")
        if problem or "messages" not in row:
            die(f"{where}: " + (problem or "field 'messages': missing"))
        if name := next((k for k in ("id", "scenario", "intent") if not isinstance(row.get(k, ""), str)), None):
            die(f"{where}: field '{name}': must be a string")
        for i, m in enumerate(messages if isinstance(messages, list) else []):
            role = ("user", "assistant")[i % 2]
            if not isinstance(m, dict) or m.get("role") != role or not isinstance(m.get("content"), str) or not m["content"].strip():
                die(f"{where}: field 'messages': message {i + 1} must be {{\"role\": \"{role}\", \"content\": some text}}")
        if not isinstance(messages, list) or not messages or len(messages) % 2:
            die(f"{where}: field 'messages': needs a list of user and assistant messages that ends with the assistant's")
        out.append((number, row))
    return out or die(f"{path}: empty file of demonstrations")


def load_demonstrations(path):
    """[Demonstration([user line, reply, user line, reply, ...], what the user feels), ...] of a file as read_demonstrations wants it. The feeling is that of the row's "scenario", where it names one of ours, else neutral."""
    feelings = {s.id: felt_by(s)[0] for s in load_scenarios(DATA / "scenarios.jsonl")}
    return [Demonstration([m["content"] for m in row["messages"]], feelings.get(row.get("scenario"), "neutral")) for _, row in read_demonstrations(path)]


def demonstration_rows(chat, lines, feeling="neutral"):
    """The training rows of a dialogue: the supporter's tokens have mask 1, with their end of turn. One row; with --template edf two a turn, the feeling's name and the reply to its aim,
    in the pieces that rollout() would put together."""
    rows = [Row()]
    rows[-1].environment(chat.opening(lines[0]))
    def says(text, turn):
        ids = chat.plain(text) + [chat.eot]
        rows[-1].policy(ids, [0.0] * len(ids), turn)
    for i in range(1, len(lines), 2):
        context = list(rows[-1].ids)
        if chat.template == "edf":
            rows[-1].environment(chat.ask)
            says(f" {feeling}", i // 2)
            rows.append(Row())
            rows[-1].environment(context + chat.aims[regulate(feeling)])
        says(lines[i].strip(), i // 2)
        if i + 1 < len(lines):
            if chat.template == "edf":
                rows.append(Row())
                rows[-1].environment(context + chat.plain(lines[i].strip()) + [chat.eot])
            rows[-1].environment(chat.between(lines[i + 1]))
    return rows


# ---------------------------------------------------------------------------------------------- the loop
def imitate(model, chat, dialogues, epochs, lr, batch, train_layers, seed, tokens_per_microbatch=4096):
    """Fits the upper layers to the supporter's replies of all dialogues. -> list of (nats per token) a step. Changes `model` in place."""
    model.train_only_upper(train_layers)
    losses = fit(model, chat, [Tree(demonstration_rows(chat, *d)) for d in dialogues], epochs, lr, batch, seed, tokens_per_microbatch)
    model.requires_grad_(True)
    return losses


def fit(model, chat, rows, epochs, lr, batch, seed, tokens_per_microbatch=4096):
    """AdamW on the mean negative log-likelihood of the rows' (or trees') policy tokens, for whatever of the model requires grad; the learning rate warms up over 5 steps and falls
    linearly to 0. -> list of (nats per token) a step."""
    assert (n := max(len(row.ids) for t in rows for row in getattr(t, "rows", [t]))) <= model.config.max_positions, f"{n} tokens, but the model knows {model.config.max_positions} positions"
    device = model.model.embed_tokens.weight.device
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    steps = epochs * -(-len(rows) // batch)
    losses = []
    with tqdm(total=steps, desc="imitation", unit="step") as bar:
        for epoch in range(epochs):
            order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed * 1000 + epoch)).tolist()
            for a in range(0, len(rows), batch):
                part = [rows[i] for i in order[a:a + batch]]
                batches = [collate([part[i] for i in index], device) for index in micro_batches(part, tokens_per_microbatch)]
                count = sum(len(target) for _, _, _, target, _, _ in batches)      # policy tokens of the whole batch, whatever the micro-batches
                total = torch.zeros((), device=device)
                for ids, branches, source, target, _, _ in batches:
                    hidden = model(ids, branches=branches).flatten(0, 1)[source]                      # (N, D)
                    logp, _ = token_logprobs(model, hidden, target, chat.banned.to(device))
                    loss = -logp.sum() / count
                    loss.backward()
                    total += loss.detach()
                for group in optimizer.param_groups:
                    group["lr"] = lr * min((len(losses) + 1) / 5, 1 - len(losses) / steps)
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                losses.append(total.item())
                bar.set_postfix(nats_per_token=f"{losses[-1]:.3f}")
                bar.update()
    return losses


RECIPE = inspect.getsource(imitate) + inspect.getsource(fit) + inspect.getsource(demonstration_rows)   # edit these, and the next run makes a new cold start


def cold_start(name, file, device, dtype, template="none"):
    """HF folder of model `name` after imitation of `file` with the defaults; made once and kept in the user's cache under a hash of what goes in."""
    source, made_for = resolve(name), "edf" if template == "edf" else "none"       # there are no plans to imitate: with think the policy starts from plain replies
    stamp = hashlib.sha256()
    for part in (str(source.resolve()), json.dumps(load_demonstrations(file)), json.dumps(DEFAULTS), str(dtype), device.type, ASKED[made_for], made_for, json.dumps(EDF) * (made_for == "edf"), RECIPE):
        stamp.update(part if isinstance(part, bytes) else part.encode())
    folder = cache_folder() / f"cold-start-{stamp.hexdigest()[:16]}"
    if (folder / "config.json").is_file():
        print(f"cold start: kept from before, {folder}")
        return folder
    dialogues = load_demonstrations(file)
    print(f"cold start: imitation of {len(dialogues)} dialogues from {file}, once; kept in {folder}")
    model, tokenizer = load(name, dtype, device)
    imitate(model, Chat(tokenizer, model.config.vocab, template=made_for), dialogues, **DEFAULTS)
    save(model, tokenizer, folder)
    return folder


def main():
    p = Flags(description=__doc__)
    p.add_argument("--model", default="smollm2-135m", help="smollm2-135m, hub name, HF folder or .gguf (default: %(default)s)")
    p.add_argument("--demonstrations", default="data/demonstrations.jsonl", help="JSONL of dialogues (default: %(default)s)")
    p.add_argument("--out", default="runs/sft", help="HF folder to write (default: %(default)s)")
    p.add_argument("--epochs", type=positive(int), default=DEFAULTS["epochs"], help="passes over the file (default: %(default)s)")
    p.add_argument("--lr", type=positive(float), default=DEFAULTS["lr"], help="peak learning rate (default: %(default)s)")
    p.add_argument("--batch", type=positive(int), default=DEFAULTS["batch"], help="dialogues a step (default: %(default)s)")
    p.add_argument("--train_layers", type=nonnegative(int), default=DEFAULTS["train_layers"], help="train the upper N layers and the final norm only; 0 = everything (default: %(default)s)")
    p.add_argument("--dtype", default="auto", choices=["auto", "fp32", "bf16", "fp16"], help="compute dtype; masters are fp32 (default: %(default)s)")
    p.add_argument("--seed", type=seed_number, default=DEFAULTS["seed"], help="order of the dialogues (default: %(default)s)")
    p.add_argument("--threads", type=positive(int), help="CPU threads (default: torch's choice)")
    p.add_argument("--template", default="none", choices=["none", "edf"], help="edf: imitate the feeling's name before each reply too, and the reply to its aim (default: %(default)s)")
    args, _ = p.parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = pick_device()
    dtype = pick_dtype(args.dtype, device)
    new_folder(args.out)
    dialogues = load_demonstrations(args.demonstrations)
    if args.template == "edf" and (without := sum("scenario" not in row for _, row in read_demonstrations(args.demonstrations))):
        print(f"{without} of {len(dialogues)} dialogues name no scenario of ours: the feeling that is imitated before their replies is neutral")
    resolve(args.model)
    began = time.time()
    model, tokenizer = load(args.model, dtype, device)
    print(f"{args.model} on {device}, compute {dtype}; {len(dialogues)} dialogues, {sum(len(d.lines) // 2 for d in dialogues)} replies")
    losses = imitate(model, Chat(tokenizer, model.config.vocab, template=args.template), dialogues, args.epochs, args.lr, args.batch, args.train_layers, args.seed)
    save(model, tokenizer, args.out)
    print(f"{losses[0]:.3f} -> {losses[-1]:.3f} nats a token in {time.time() - began:.0f} s; saved {args.out}")
    print(f"next: python evaluate.py run --model {args.out}{' --template edf' * (args.template == 'edf')}")


if __name__ == "__main__":
    main()
