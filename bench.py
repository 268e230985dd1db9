"""
Speed and memory, side by side with what you would use instead, in one run: A and B take turns, the median of the
repeats counts, so a busy machine slows both. Every mode prints a table, and one JSON line last (gpu: one a part). What compares with nobody (roofline, memory, start, scale, gpu) is in machine.py.

Left out on purpose: a timed test (timing belongs here, tests are about right and wrong) and vLLM (needs a GPU).

    python bench.py decode      tokens/s of one batch of ragged prompts            against transformers.generate and generate_batch
    python bench.py turns       a live cache over 8 turns                          against re-reading the history each turn
    python bench.py logprob     peak memory of log-probs at a 152 k vocabulary     against log_softmax of all logits, and gather - logsumexp
    python bench.py step        one whole GRPO step, rollout and update            against TRL's GRPOTrainer, where installed
    python bench.py ppo         one PPO update, values and all                     against one GRPO update on the same dialogues
    python bench.py roofline | memory | start | scale | gpu                        see machine.py
"""
import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from tqdm import tqdm

import train_ppo
from model import Cache, Critic, append, generate, sample, token_logprobs
from rollout import Chat, answers, rollout
from rubric import Reward, score
from rundir import Flags, die, nonnegative, positive, record_result, seed_number, writable
from scenarios import load_scenarios
from simulator import ScriptedUsers
from train_grpo import trajectory_advantages, update
from weights import DTYPES, build, load, pick_device, resolve

SHAPES = {"0.5b": (896, 24, 14, 2, 4864), "1.5b": (1536, 28, 12, 2, 8960)}      # Qwen2.5's: width, layers, query heads, key heads, MLP


def clock():
    """Seconds, after the device has finished what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(f, *args):
    start = clock()
    result = f(*args)
    return result, clock() - start


def finish(args, **result):
    """The JSON line: what was measured, on what, with which versions. --record appends it to a file, with commit and command."""
    device = torch.cuda.get_device_name() if pick_device().type == "cuda" else f"{pick_device().type}: {platform.processor() or platform.machine()}"
    line = {**result, **{k: v for k, v in vars(args).items() if k not in ("record", "child") and not (k == "repeats" and args.mode in ("memory", "scale"))}, "device": device, "torch": torch.__version__,
            "transformers": transformers.__version__, "load": [round(x, 1) for x in getattr(os, "getloadavg", list)()]}
    if args.record:
        record_result(args.record, line)
    print(json.dumps(line))


def both_models(args):
    """-> our model and transformers' model: the same weights, dtype and device."""
    if args.model.startswith("random:"):
        model, theirs = random_model(args)
        return model.requires_grad_(False), theirs
    folder, device = resolve(args.model), pick_device()
    model, _ = load(str(folder), DTYPES[args.dtype], device)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[args.dtype]).to(device).eval()
    return model.requires_grad_(False), theirs


def random_model(args):
    """random:0.5b, random:1.5b: a Qwen2.5 of that shape with random weights, for speed and memory. -> ours (fp32 masters), transformers' (compute dtype)."""
    name = args.model.removeprefix("random:")
    width, layers, heads, keys, mlp = SHAPES.get(name) or die(f"--model {args.model}: there are {', '.join('random:' + s for s in SHAPES)}")
    torch.manual_seed(args.seed)
    config = transformers.Qwen2Config(hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=keys, intermediate_size=mlp, vocab_size=151936, tie_word_embeddings=True,
                                      max_position_embeddings=32768, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ours = build(theirs.config.to_dict(), theirs.state_dict(), DTYPES[args.dtype]).to(pick_device())
    return ours, theirs.to(pick_device(), DTYPES[args.dtype]).eval()


def random_ids(n, vocab, rng):
    """n ordinary ids: special tokens live at the ends of the vocabularies we know."""
    return [rng.randrange(1000 if vocab > 2000 else 0, min(vocab, 49000)) for _ in range(n)]


@torch.no_grad()
def their_generate(theirs, histories, new):
    """transformers' greedy decoding of exactly `new` tokens: left padding, attention mask, a fresh cache."""
    longest = max(map(len, histories))
    ids = torch.tensor([[0] * (longest - len(h)) + h for h in histories], device=theirs.device)        # (B, T)
    mask = torch.tensor([[0] * (longest - len(h)) + [1] * len(h) for h in histories], device=theirs.device)
    how = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0, bos_token_id=0)
    theirs.generation_config = how                         # else the checkpoint's own stop ids are merged in
    return theirs.generate(ids, attention_mask=mask, generation_config=how)[:, longest:].tolist()


@torch.no_grad()
def their_batch(theirs, prompts, new):
    """transformers' continuous batching on the same prompts, with no more pages than they need (its default takes most of the memory). Its manager starts anew
    in each call, as a rollout would have it: weights change in between."""
    how = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0, bos_token_id=0)
    theirs.generation_config, most = how, sum(map(len, prompts)) + len(prompts) * new
    pages = transformers.generation.configuration_utils.ContinuousBatchingConfig(page_size=32, num_blocks=most // 32 + 2 * len(prompts) + 8, max_batch_tokens=max(512, len(prompts)))
    out = theirs.generate_batch(inputs=prompts, generation_config=how, continuous_batching_config=pages, persistent_manager=False, warmup=False)
    tokens = [out[k].generated_tokens for k in sorted(out, key=lambda k: int(k.rpartition("_")[2]))]
    assert [len(t) for t in tokens] == [new] * len(prompts), "generate_batch stopped early"
    return tokens


# ---------------------------------------------------------------------------------------------- decode
def decode(args):
    """Greedy tokens/s of ragged batches, prefill included, and the share of rows whose tokens agree."""
    model, theirs = both_models(args)
    rng, rows, attention = random.Random(args.seed), [], theirs.config._attn_implementation
    print(f"{args.new} greedy tokens after ragged prompts of {args.prompt[0]}..{args.prompt[1]} tokens, {args.dtype}, tokens/s (prefill included)")
    print(f"{'rows':>5} {'ours':>9} {'generate':>9} {'ratio':>6} {'generate_batch':>15} {'ratio':>6}   rows with generate's tokens")
    for B in args.batch:
        prompts = [random_ids(rng.randint(*args.prompt), model.config.vocab, rng) for _ in range(B)]
        sides = {"ours": lambda: generate(model, prompts, args.new, set(), temperature=0)[0], "transformers": lambda: their_generate(theirs, prompts, args.new)}
        if B > 1:
            sides["generate_batch"] = lambda: their_batch(theirs, prompts, args.new)
        seconds, tokens, trouble = {name: [] for name in sides}, {}, ""
        for repeat in tqdm(range(args.repeats + 1), desc=f"B={B}", leave=False):
            for name in list(sides) if repeat % 2 else list(reversed(sides)):
                try:
                    tokens[name], s = timed(sides[name])
                except Exception as e:                     # a young part of transformers: what it can't do here is no reason to lose the rest
                    if name != "generate_batch":
                        raise
                    trouble = f"generate_batch failed: {type(e).__name__}: {(str(e).splitlines() or [''])[0][:80]}"
                    sides.pop(name)
                    continue
                finally:
                    theirs.set_attn_implementation(attention)      # generate_batch leaves its own behind
                seconds[name] += [s] if repeat else []     # the first round warms up
        speed = {name: B * args.new / statistics.median(seconds[name]) for name in sides}
        same = statistics.mean(a == b for a, b in zip(tokens["ours"], tokens["transformers"]))
        rows.append({"batch": B, "agreement": same, "ratio": round(speed["ours"] / speed["transformers"], 2), **{name: round(s, 1) for name, s in speed.items()}})
        batch = f"{speed['generate_batch']:15.1f} {speed['ours'] / speed['generate_batch']:6.2f}" if "generate_batch" in speed else f"{'-':>15} {'-':>6}"
        print(f"{B:5d} {speed['ours']:9.1f} {speed['transformers']:9.1f} {rows[-1]['ratio']:6.2f} {batch}   {same:.2f}  {trouble}", flush=True)
    finish(args, rows=rows, ratio=rows[-1]["ratio"], agreement=min(r["agreement"] for r in rows))


# ---------------------------------------------------------------------------------------------- turns
def turns(args):
    """Seconds a turn of B dialogues: ours appends to a live cache, theirs reads the whole history again."""
    model, theirs = both_models(args)
    rng, B = random.Random(args.seed), args.dialogues
    env = [[random_ids(rng.randint(*args.chunk), model.config.vocab, rng) for _ in range(B)] for _ in range(args.turns)]
    state, history = SimpleNamespace(), []

    def ours(chunks):
        chunks = [a + b for a, b in zip(state.fresh, chunks)]
        tokens, _ = sample(model, state.cache, append(model, state.cache, chunks), [args.reply] * B, set(), temperature=0)
        state.fresh = [t[-1:] for t in tokens]
        return tokens

    def other(chunks):
        for h, c in zip(history, chunks):
            h += c
        tokens = their_generate(theirs, history, args.reply)
        for h, t in zip(history, tokens):
            h += t
        return tokens

    generate(model, env[0], 2, set(), temperature=0), their_generate(theirs, env[0], 2)     # warm up
    rounds, same = {ours: [], other: []}, []
    print(f"{B} dialogues, {args.chunk[0]}..{args.chunk[1]} tokens in and {args.reply} out a turn, {args.dtype}, seconds")
    print(f"{'turn':>5} {'ours':>8} {'transformers':>13} {'ratio':>6}   same replies")
    for repeat in tqdm(range(args.repeats), desc="rounds", leave=False):
        state.cache, state.fresh, history[:] = Cache(model, B, 0), [[] for _ in range(B)], [[] for _ in range(B)]         # fresh: sampled ids not in the cache yet
        for f in rounds:
            rounds[f].append([])
        for turn, chunks in enumerate(env):
            tokens = {}
            for f in (ours, other) if (turn + repeat) % 2 else (other, ours):
                tokens[f], s = timed(f, chunks)
                rounds[f][-1].append(s)
            same.append(statistics.mean(a == b for a, b in zip(tokens[ours], tokens[other])))
    seconds = {f: [statistics.median(s) for s in zip(*rounds[f])] for f in rounds}
    for turn in range(args.turns):
        print(f"{turn + 1:5d} {seconds[ours][turn]:8.2f} {seconds[other][turn]:13.2f} {seconds[other][turn] / seconds[ours][turn]:6.2f}   {statistics.mean(same[turn::args.turns]):.2f}", flush=True)
    total = sum(seconds[ours]), sum(seconds[other])
    print(f"{'all':>5} {total[0]:8.2f} {total[1]:13.2f} {total[1] / total[0]:6.2f}   {statistics.mean(same):.2f}")
    late = statistics.median(seconds[ours][-3:]) / statistics.median(seconds[ours][1:4])      # turns 2..4 against the last three: a live cache costs the new tokens only
    print(f"our last turns take {late:.2f} times the time of the second to fourth")
    finish(args, late_over_early=round(late, 2), ratio=round(total[1] / total[0], 2), agreement=statistics.mean(same), seconds=round(total[0], 2), transformers_seconds=round(total[1], 2),
           turn_seconds=[round(s, 2) for s in seconds[ours]], transformers_turn_seconds=[round(s, 2) for s in seconds[other]])


# ---------------------------------------------------------------------------------------------- logprob
def memory(field):
    """VmRSS (now) or VmHWM (peak) of this process in GB. ru_maxrss alone would start at what the parent had."""
    if torch.cuda.is_available():
        return (torch.cuda.max_memory_allocated() if field == "VmHWM" else torch.cuda.memory_allocated()) / 1e9
    if Path("/proc/self/status").exists():
        return int(next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(field)).split()[1]) * 1024 / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9       # macOS: bytes, and always the peak


def logprob_child(args):
    """One side, in a process of its own: forward and backward, peak memory over what was there before, seconds."""
    device, dtype = pick_device(), DTYPES[args.dtype]
    torch.manual_seed(args.seed)
    weight = torch.nn.Parameter(torch.randn(args.vocab, args.width, device=device) * 0.02)             # (V, D), fp32 master
    hidden = torch.randn(args.tokens, args.width, device=device).to(dtype).requires_grad_()            # (N, D)
    target = torch.randint(args.vocab, (args.tokens,), device=device)
    small = SimpleNamespace(head=SimpleNamespace(weight=weight))
    token_logprobs(small, hidden[:16], target[:16])[0].sum().backward()   # threads and code pages up, then forget it
    weight.grad = hidden.grad = None
    before = memory("VmRSS")
    start = clock()
    if args.child == "ours":
        logp, entropy = token_logprobs(small, hidden, target)
    else:
        logits = torch.nn.functional.linear(hidden, weight.to(dtype)).float()                         # (N, V), 2.5 GB each copy
        picked = lambda x: x.gather(1, target[:, None])[:, 0]
        logp = picked(logits.log_softmax(-1)) if args.child == "naive" else picked(logits) - logits.logsumexp(-1)
    logp.mean().backward()
    print(json.dumps({"seconds": clock() - start, "peak": memory("VmHWM") - before, "logp": logp.mean().item(), "grad": weight.grad.norm().item()}))


def logprob(args):
    """Peak extra memory (GB) and seconds of forward and backward, each side in processes of its own."""
    if args.child:
        return logprob_child(args)
    need = 3.2 * args.tokens * args.vocab * 4 / 1e9
    free = torch.cuda.mem_get_info()[0] / 1e9 if torch.cuda.is_available() else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    sides = ["ours"] + (["naive", "lse"] if free > need else [])
    runs = {s: [] for s in sides}
    for _ in tqdm(range(args.repeats), desc="logprob", leave=False):
        for side in sides:
            p = subprocess.run([sys.executable, __file__, "logprob", "--child", side] + [f"--{k}={getattr(args, k)}" for k in
                               ("tokens", "vocab", "width", "dtype", "threads", "seed")], capture_output=True, text=True)
            if p.returncode:
                die(f"the {side} side failed: {(p.stderr.strip().splitlines() or ['killed'])[-1]}")
            runs[side].append(json.loads(p.stdout.splitlines()[-1]))
    middle = {s: {k: statistics.median(r[k] for r in runs[s]) for k in runs[s][0]} for s in sides}
    print(f"log-probs of {args.tokens} tokens over {args.vocab} ids, width {args.width}, {args.dtype}, forward and backward")
    print(f"{'':8} {'extra GB':>9} {'seconds':>8} {'mean logp':>10} {'|d head|':>9}")
    for s in sides:
        print(f"{s:8} {middle[s]['peak']:9.2f} {middle[s]['seconds']:8.2f} {middle[s]['logp']:10.5f} {middle[s]['grad']:9.6f}")
    result = {"peak_extra_gb": round(middle["ours"]["peak"], 3), "seconds": round(middle["ours"]["seconds"], 2)}
    if "naive" in middle:
        result |= {"naive_peak_extra_gb": round(middle["naive"]["peak"], 3), "naive_seconds": round(middle["naive"]["seconds"], 2),
                   "ratio_seconds": round(middle["naive"]["seconds"] / middle["ours"]["seconds"], 2),
                   "lse_peak_extra_gb": round(middle["lse"]["peak"], 3), "lse_seconds": round(middle["lse"]["seconds"], 2)}
    else:
        print(f"naive: skipped, it needs {need:.1f} GB and {free:.1f} are free")
    finish(args, **result)


# ---------------------------------------------------------------------------------------------- step
def our_step(model, optimizer, prompts, args, generator):
    """One GRPO step, train_grpo.py's own update on dialogues of one turn without users: -> seconds of the rollout, seconds of the update."""
    C, start = args.completion, clock()
    chat = SimpleNamespace(banned=torch.zeros(model.config.vocab, dtype=torch.bool), eot=-1, text=lambda ids: "")           # no stop id: exactly C tokens each
    episodes = answers(model, chat, prompts, args.copies, C, args.temperature, generator)
    rewards = [Reward(len(set(row.ids[-C:])) / C, turns=[0.0]) for e in episodes for row in e.rows]
    advantages, _ = trajectory_advantages(rewards, args.copies, 1e-4)
    middle = clock()
    settings = SimpleNamespace(minibatches=1, epochs=1, max_turns=1, max_new_tokens=C, tokens_per_microbatch=args.micro_ours * (args.prompt_tokens + C), temperature=args.temperature,
                               clip_low=0.2, clip_high=0.28, dual_clip=3.0, kl=0.0, grad_clip=1.0)
    update(settings, model, None, optimizer, chat, episodes, advantages)
    return middle - start, clock() - middle


def make_prompts(tokenizer, n, length, rng):
    """n texts of exactly `length` tokens each, made of words that are one token."""
    words = [t[1:] for t in tokenizer.get_vocab() if t[0] == "\u0120" and t[1:].isascii() and t[1:].isalpha() and t[1:].islower() and 3 < len(t) < 9]
    texts = []
    while len(texts) < n:
        text = " ".join(rng.choice(sorted(words)) for _ in range(length))
        if len(tokenizer(text)["input_ids"]) == length:
            texts.append(text)
    return texts


def step(args):
    """Seconds of one whole GRPO step; TRL's trainer and ours take turns in one process. Then the peak memory of two steps of each, alone in a process."""
    try:
        import trl
        from datasets import Dataset
    except ImportError:
        trl = None
        print("TRL is not installed (pip install trl==1.16): ours only")
    torch.manual_seed(args.seed)
    model, tokenizer = load(args.model, DTYPES[args.dtype], pick_device())
    if args.child == "trl":
        model = None                                       # alone: only TRL's own copy is there
    optimizer, generator = model and torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True), torch.Generator().manual_seed(args.seed)
    texts = make_prompts(tokenizer, args.prompts * (args.repeats + 1), args.prompt_tokens, random.Random(args.seed))
    prompts = [tokenizer(t)["input_ids"] for t in texts]
    ours, theirs, bar = [], [], tqdm(total=args.repeats + 1, desc="steps", leave=False)

    def one_step():
        at = len(ours) * args.prompts
        ours.append(our_step(model, optimizer, prompts[at:at + args.prompts], args, generator))
        bar.update(1)

    if trl is None or args.child == "ours":
        for _ in range(args.repeats + 1):
            one_step()
    else:
        class TakeTurns(transformers.TrainerCallback):     # after each of TRL's steps, one of ours, outside its clock
            def on_train_begin(self, *_, **__):
                self.start = clock()

            def on_step_end(self, *_, **__):
                theirs.append(clock() - self.start)
                if not args.child:
                    one_step()
                self.start = clock()

        rows = args.prompts * args.copies
        assert rows % args.micro_trl == 0, f"--micro_trl {args.micro_trl} does not divide {rows} completions"
        with tempfile.TemporaryDirectory() as folder:
            config = trl.GRPOConfig(
                output_dir=folder, use_cpu=pick_device().type == "cpu", bf16=args.dtype == "bf16", report_to="none", save_strategy="no", logging_strategy="no",
                disable_tqdm=True, max_steps=args.repeats + 1, learning_rate=1e-6, lr_scheduler_type="constant", per_device_train_batch_size=args.micro_trl,
                gradient_accumulation_steps=rows // args.micro_trl, num_generations=args.copies, max_completion_length=args.completion, beta=0.0,
                temperature=args.temperature, gradient_checkpointing=False,      # TRL's default, True, recomputes the forward: slower here
                dataloader_pin_memory=False, generation_kwargs={"min_new_tokens": args.completion})
            trl.GRPOTrainer(model=transformers.AutoModelForCausalLM.from_pretrained(resolve(args.model), dtype=torch.float32), args=config,
                            reward_funcs=lambda completion_ids, **_: [len(set(c)) / len(c) for c in completion_ids], processing_class=tokenizer,
                            train_dataset=Dataset.from_list([{"prompt": t} for t in texts]), callbacks=[TakeTurns()]).train()
    bar.close()
    if args.child:
        return print(json.dumps({"peak": memory("VmHWM")}))
    rollout, update = (statistics.median(x[i] for x in ours[1:]) for i in (0, 1))      # the first step warms up
    total = statistics.median(map(sum, ours[1:]))
    print(f"one GRPO step: {args.prompts} prompts of {args.prompt_tokens} tokens x {args.copies} completions of {args.completion}, all layers, {args.dtype}, seconds")
    print(f"ours  {total:8.2f}   (rollout {rollout:.2f}, update {update:.2f})")
    result = {"seconds": round(total, 2), "rollout_seconds": round(rollout, 2), "update_seconds": round(update, 2)}
    if trl is not None:
        other = statistics.median(theirs[1:])
        print(f"TRL   {other:8.2f}   ratio {total / other:.2f}")
        result |= {"trl_seconds": round(other, 2), "ratio": round(total / other, 2), "trl": trl.__version__}
    peaks = {}
    for side in ["ours"] + ["trl"] * (trl is not None):
        flags = [f"--{k}={getattr(args, k)}" for k in ("model", "dtype", "threads", "seed", "prompts", "copies", "prompt_tokens", "completion", "temperature", "micro_ours", "micro_trl")]
        run = subprocess.run([sys.executable, __file__, "step", "--child", side, "--repeats", "1", *flags], capture_output=True, text=True)
        if run.returncode:
            die(f"the {side} side alone failed: {(run.stderr.strip().splitlines() or ['killed'])[-1]}")
        peaks[side] = round(json.loads(run.stdout.splitlines()[-1])["peak"], 2)
    print("peak memory, GB: " + ", ".join(f"{side} {x}" for side, x in peaks.items()))
    result |= {"peak_gb": peaks, **({"ratio_peak": round(peaks["ours"] / peaks["trl"], 2)} if "trl" in peaks else {})}
    finish(args, **result)


# ---------------------------------------------------------------------------------------------- ppo
def ppo(args):
    """Seconds and peak memory of one update on the same dialogues of the laptop preset: GRPO's, PPO's with a shared critic, PPO's with a separate one.
    PPO's hold the values of the whole batch too, but no warm-up: a run has that once. The states that a shared critic reads come with the rollout."""
    preset = SimpleNamespace(**{**vars(train_ppo.p.parse([])[0]), **train_ppo.PRESETS["laptop"]})
    model, tokenizer = load(args.model, DTYPES[args.dtype], pick_device())
    model.train_only_upper(preset.train_layers)
    chat, jobs = Chat(tokenizer, model.config.vocab), [(s, None) for s in load_scenarios("data/scenarios.jsonl", "train")[::12]]      # 8 of them
    with tqdm(total=8 * args.copies * preset.max_turns, desc="dialogues", unit="reply", leave=False) as bar:
        episodes = rollout(model, chat, ScriptedUsers(), jobs, args.copies, preset.max_turns, preset.max_new_tokens, preset.max_tokens, preset.temperature,
                           torch.Generator().manual_seed(args.seed), bar, keep_states=True)
    rewards, critics = score(episodes), {"PPO, shared": Critic(model), "PPO, separate": Critic(model, separate=True)}
    adam = lambda *modules: torch.optim.AdamW([q for m in modules for q in m.parameters() if q.requires_grad], lr=1e-6, fused=True)
    optimizers = {"GRPO": adam(model), **{name: adam(model, critic) for name, critic in critics.items()}}

    def one(name):
        if name == "GRPO":
            return update(preset, model, None, optimizers[name], chat, episodes, trajectory_advantages(rewards, args.copies, 0.03)[0])
        b = train_ppo.advantages(preset, model, critics[name], None, chat, episodes, {"emotion": rewards}, preset.lam)
        return train_ppo.update(preset, model, critics[name], None, optimizers[name], chat, episodes, b)
    seconds, peak = {name: [] for name in optimizers}, {}
    for repeat in tqdm(range(args.repeats + 1), desc="rounds", leave=False):
        for name in seconds if repeat % 2 else reversed(seconds):
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            elif Path("/proc/self/clear_refs").exists():
                Path("/proc/self/clear_refs").write_text("5")                # the peak starts again from what is held now
            _, s = timed(one, name)
            seconds[name] += [s] if repeat else []         # the first round warms up: packed weights, Adam's state
            peak[name] = memory("VmHWM")
    middle = {name: statistics.median(s) for name, s in seconds.items()}
    print(f"one update on the same {len(episodes)} dialogues, upper {preset.train_layers} layers, {preset.minibatches} optimiser steps, {args.dtype}")
    print(f"{'':14} {'seconds':>8} {'ratio':>6} {'peak GB, everything held':>26}")
    for name, s in middle.items():
        print(f"{name:14} {s:8.2f} {s / middle['GRPO']:6.2f} {peak[name]:26.2f}")
    finish(args, grpo_seconds=round(middle["GRPO"], 2), shared_seconds=round(middle["PPO, shared"], 2), separate_seconds=round(middle["PPO, separate"], 2),
           ratio=round(middle["PPO, shared"] / middle["GRPO"], 2), ratio_separate=round(middle["PPO, separate"] / middle["GRPO"], 2), peak_gb={k: round(v, 2) for k, v in peak.items()})


# ---------------------------------------------------------------------------------------------- flags
def main():
    show = argparse.ArgumentDefaultsHelpFormatter
    p = Flags(description=__doc__)
    modes = p.add_subparsers(dest="mode", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--model", default="smollm2-135m", help="smollm2-135m, hub name, HF folder, or random:0.5b, random:1.5b (Qwen2.5's shapes; not for memory, ppo, scale, start, step)")
    common.add_argument("--dtype", choices=list(DTYPES), default="fp32", help="compute dtype of both sides")
    common.add_argument("--threads", type=positive(int), default=torch.get_num_threads(), help="CPU threads of both sides")
    common.add_argument("--repeats", type=positive(int), default=3, help="measured rounds; the median counts")
    common.add_argument("--seed", type=seed_number, default=0, help="of prompts and sampling")
    common.add_argument("--record", type=writable, metavar="FILE", help="append the JSON line, with command, commit and machine, to this .jsonl")
    m = modes.add_parser("decode", parents=[common], formatter_class=show, help="one batch of ragged prompts")
    m.add_argument("--batch", type=positive(int), nargs="+", default=[1, 8, 32], help="rows")
    m.add_argument("--prompt", type=positive(int), nargs=2, default=[64, 192], help="shortest and longest prompt, tokens")
    m.add_argument("--new", type=positive(int), default=64, help="tokens a row")
    m = modes.add_parser("turns", parents=[common], formatter_class=show, help="many turns on a live cache")
    m.add_argument("--dialogues", type=positive(int), default=16, help="rows")
    m.add_argument("--turns", type=positive(int), default=8, help="replies a dialogue")
    m.add_argument("--chunk", type=positive(int), nargs=2, default=[20, 40], help="shortest and longest user turn, tokens")
    m.add_argument("--reply", type=positive(int), default=32, help="tokens a reply")
    m = modes.add_parser("logprob", parents=[common], formatter_class=show, help="memory of log-probs over a large vocabulary")
    m.add_argument("--tokens", type=positive(int), default=4096, help="policy tokens")
    m.add_argument("--vocab", type=positive(int), default=151936, help="ids (Qwen2.5's)")
    m.add_argument("--width", type=positive(int), default=896, help="hidden width (Qwen2.5-0.5B's)")
    m.add_argument("--child", choices=["ours", "naive", "lse"], help=argparse.SUPPRESS)
    m = modes.add_parser("step", parents=[common], formatter_class=show, help="one GRPO step")
    m.add_argument("--prompts", type=positive(int), default=8, help="groups")
    m.add_argument("--copies", type=positive(int), default=8, help="completions a group")
    m.add_argument("--prompt_tokens", type=positive(int), default=256, help="tokens a prompt")
    m.add_argument("--completion", type=positive(int), default=64, help="tokens a completion, exactly")
    m.add_argument("--temperature", type=float, default=0.8, help="sampling temperature, also in the loss")
    m.add_argument("--micro_ours", type=positive(int), default=8, help="rows a micro-batch, ours")
    m.add_argument("--micro_trl", type=positive(int), default=16, help="rows a micro-batch, TRL's")
    m.add_argument("--child", choices=["ours", "trl"], help=argparse.SUPPRESS)
    m = modes.add_parser("ppo", parents=[common], formatter_class=show, help="one PPO update against one GRPO update")
    m.add_argument("--copies", type=positive(int), default=8, help="dialogues of each of 8 scenarios")
    m = modes.add_parser("roofline", parents=[common], formatter_class=show, help="a decode step against this machine's speeds")
    m.add_argument("--batch", type=positive(int), nargs="+", default=[1, 8, 32], help="rows")
    m.add_argument("--context", type=positive(int), default=256, help="tokens in the cache")
    m.add_argument("--new", type=positive(int), default=32, help="tokens a row")
    for name, help in (("memory", "one update's peak against the plan"), ("scale", "two processes against one")):
        m = modes.add_parser(name, parents=[common], formatter_class=show, help=help)
        m.add_argument("--rows", type=positive(int), default=16, help="training rows, four a group")
        m.add_argument("--tokens", type=positive(int), default=512, help="tokens a row")
        m.add_argument("--train_layers", type=nonnegative(int), default=15, help="upper layers trained, 0 = all")
        if name == "memory":
            m.add_argument("--micro", type=positive(int), default=4096, help="tokens a micro-batch")
            m.add_argument("--checkpoint_layers", action="store_true", help="activation checkpointing")
            m.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
        else:
            m.add_argument("--child", help=argparse.SUPPRESS)
    modes.add_parser("start", parents=[common], formatter_class=show, help="from a cold process to the first update of train_grpo.py with --model, on 8 dialogues of one turn")
    m = modes.add_parser("gpu", parents=[common], formatter_class=show, help="everything for a GPU, in one run")
    m.add_argument("--minutes", type=positive(float), default=8, help="parts that would take longer are left out")
    args = p.parse_args()
    for name, (least, most) in [(k, v) for k, v in vars(args).items() if k in ("prompt", "chunk")]:
        if least > most:
            p.error(f"--{name} {least} {most}: the shortest comes first")
    if args.mode == "step" and args.prompts * args.copies % args.micro_trl:
        p.error(f"--micro_trl {args.micro_trl}: does not divide the {args.prompts * args.copies} rows")
    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    if args.mode in ("roofline", "memory", "start", "scale", "gpu"):
        import machine
        return {"roofline": machine.roofline, "memory": machine.memory_mode, "start": machine.start, "scale": machine.scale, "gpu": machine.gpu}[args.mode](args)
    {"decode": decode, "turns": turns, "logprob": logprob, "step": step, "ppo": ppo}[args.mode](args)


if __name__ == "__main__":
    main()
