"""
What this machine can do, and how much of it we use: the modes of bench.py that compare with no other library.

    python bench.py roofline    a decode step against what must be moved and multiplied at the speeds measured here
    python bench.py memory      the peak of one update against the plan that a run prints (memory.py)
    python bench.py start       a cold process: imports, weights, the first update
    python bench.py scale       two processes against one, on the same episodes
    python bench.py gpu         all that a GPU should be asked, in so many minutes: recorded steps token for token, then the tables

Left out on purpose: energy, and any number that a formula alone gives.
"""
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

import memory as plans
import model as network
import ranks
import train_grpo
from bench import finish, memory, random_ids, random_model, timed
from episode import Episode, Row
from model import Cache, append, sample
from recording import GRAPHS
from rubric import Reward
from rundir import die
from weights import DTYPES, config_of, load, pick_device, read_config, resolve

ROOT = Path(__file__).resolve().parent


def synthetic(model, n, tokens, share, seed, copies=1):
    """n Episodes of one row of `tokens` tokens, the last `share` of them the policy's, with rewards: no user, no dice of a policy. -> episodes, rewards, a chat that bans nothing."""
    rng, episodes = random.Random(seed), []
    for i in range(n):
        row, mine = Row(), max(1, int(share * tokens))
        row.environment(random_ids(tokens - mine, model.config.vocab, rng))
        row.policy(random_ids(mine, model.config.vocab, rng), [-2.0] * mine, 0)
        episodes.append(Episode(None, None, i // copies, "", 0, [row], replies=[""], finish="max_turns"))
    return episodes, [Reward(rng.random(), turns=[0.0]) for _ in episodes], SimpleNamespace(banned=torch.zeros(model.config.vocab, dtype=torch.bool))


def grpo_settings(**changed):
    return SimpleNamespace(**{**dict(minibatches=1, epochs=1, max_turns=1, max_new_tokens=64, tokens_per_microbatch=4096, temperature=1.0, clip_low=0.2, clip_high=0.28, dual_clip=3.0, kl=0.0, grad_clip=1.0), **changed})


# ---------------------------------------------------------------------------------------------- roofline
def speeds(device, dtype, threads):
    """Bytes a second of reading and writing (a copy counts both ways) and multiplications-and-additions x 2 a second of a square product: the medians of 5 rounds of 4 each, launched together."""
    big = torch.empty(64 * 2 ** 20, dtype=torch.float32, device=device).fill_(1)                       # 256 MB: no cache holds it
    other, n = torch.empty_like(big), 4096 if device.type == "cuda" else 1536
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    four = lambda f, *x: [f(*x) for _ in range(4)]
    copy, product = (statistics.median(timed(four, *what)[1] / 4 for _ in range(5)) for what in ((other.copy_, big), (torch.mm, a, b)))
    return 2 * big.nbytes / copy, 2 * n ** 3 / product


def decode_cost(c, B, context, b):
    """Bytes that one decode step of B rows must move (every weight once, the cache of every row, one new slot) and its floating point operations."""
    block = c.width * c.head_dim * (2 * c.heads + 2 * c.kv_heads) + 3 * c.width * c.mlp
    weights = c.layers * block + c.vocab * c.width                     # the head; of the embedding B rows only
    slot = 2 * c.layers * c.kv_heads * c.head_dim
    return b * (weights + B * (context + 1) * slot), 2 * B * weights + 4 * B * context * c.layers * c.heads * c.head_dim


@torch.no_grad()
def seconds_a_token(model, B, context, new, seed, repeats):
    """The median over `repeats` rounds of sample()'s time a token, after a prompt of `context` tokens."""
    rng, out = random.Random(seed), []
    prompts = [random_ids(context, model.config.vocab, rng) for _ in range(B)]
    assert new > 1
    for repeat in range(repeats + 1):
        cache = Cache(model, B, context + new + 1)
        hidden = append(model, cache, prompts)
        _, s = timed(lambda: sample(model, cache, hidden, [new] * B, set(), temperature=1.0, generator=torch.Generator().manual_seed(seed)))
        out += [s / (new - 1)] if repeat else []           # the first token needs no forward: its state is there
    return statistics.median(out)


def roofline(args):
    model, _ = random_model(args) if args.model.startswith("random:") else load(str(resolve(args.model)), DTYPES[args.dtype], pick_device())
    model.requires_grad_(False)
    device, b, rows = pick_device(), DTYPES[args.dtype].itemsize, []
    bandwidth, rate = speeds(device, DTYPES[args.dtype], args.threads)
    print(f"{args.model}, {args.dtype}, context {args.context}: this machine copies {bandwidth / 1e9:.1f} GB/s and multiplies {rate / 1e9:.0f} GFLOP/s")
    print(f"{'rows':>5} {'ms a step':>10} {'MB moved':>9} {'GFLOP':>7} {'bound':>8} {'ms at best':>11} {'share':>6}")
    for B in args.batch:
        s = seconds_a_token(model, B, args.context, args.new, args.seed, args.repeats)
        moved, flop = decode_cost(model.config, B, args.context + args.new // 2, b)
        best, bound = max((moved / bandwidth, "memory"), (flop / rate, "compute"))
        rows.append({"batch": B, "ms": round(1e3 * s, 2), "mb": round(moved / 1e6, 1), "gflop": round(flop / 1e9, 2), "bound": bound, "share": round(best / s, 3)})
        print(f"{B:5d} {1e3 * s:10.2f} {moved / 1e6:9.1f} {flop / 1e9:7.2f} {bound:>8} {1e3 * best:11.2f} {best / s:6.2f}", flush=True)
    finish(args, rows=rows, copy_gb_s=round(bandwidth / 1e9, 1), gflop_s=round(rate / 1e9, 1), share=rows[-1]["share"])


# ---------------------------------------------------------------------------------------------- memory
def memory_child(args):
    """One update of the laptop preset's shape in a process of its own: GB held with everything loaded, and at the peak of the update."""
    device, dtype = pick_device(), DTYPES[args.dtype]
    model, _ = load(args.model, dtype, device)
    model.train_only_upper(args.train_layers)
    model.checkpointed = args.checkpoint_layers
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6, fused=True)
    episodes, rewards, chat = synthetic(model, args.rows, args.tokens, 0.3, args.seed, 4)
    advantages, _ = train_grpo.trajectory_advantages(rewards, 4, 1e-4)
    for _ in range(2):                                     # the second step has Adam's moments from the start
        train_grpo.update(grpo_settings(tokens_per_microbatch=args.micro), model, None, optimizer, chat, episodes, advantages)
    print(json.dumps({"peak": memory("VmHWM")}))


def frozen_copies(args):
    """Bytes of the laid-out copies of those matrices that no gradient goes to: an update makes them once and keeps them."""
    if pick_device().type != "cpu" and args.dtype == "fp32":
        return 0
    with torch.device("meta"):
        model = network.Policy(read_config(config_of(resolve(args.model))))
    model.train_only_upper(args.train_layers)
    return DTYPES[args.dtype].itemsize * sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear) and not m.weight.requires_grad)


def last_words(stderr):
    """The last line that says what went wrong, of a process that may have been torchrun's."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()] or ["it said nothing"]
    return next((line for line in reversed(lines) if line.startswith("error:") or "Error" in line.split(":")[0]), lines[-1])


def memory_mode(args):
    if args.child:
        return memory_child(args)
    if args.rows % 4 or args.model.startswith("random:"):
        die(f"--rows {args.rows} --model {args.model}: needs rows in groups of four, and a model that is read from files")
    args.micro = min(args.micro, args.rows * args.tokens)
    flags = ["--model", args.model, "--dtype", args.dtype, "--threads", str(args.threads), "--train_layers", str(args.train_layers), "--rows", str(args.rows), "--tokens", str(args.tokens), "--micro", str(args.micro), *["--checkpoint_layers"] * args.checkpoint_layers]
    bare = subprocess.run([sys.executable, "-c", "import machine; from bench import memory; print(memory('VmHWM'))"], capture_output=True, text=True, cwd=ROOT)
    peaks = []
    for more in ({}, {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}):        # as it runs; and with every tensor returned to the system at once, which shows what is alive (slower)
        run = subprocess.run([sys.executable, str(ROOT / "bench.py"), "memory", "--child", *flags], capture_output=True, text=True, env={**os.environ, **more})
        if run.returncode or bare.returncode:
            die(f"the measured process failed: {last_words(run.stderr or bare.stderr)}")
        peaks.append(json.loads(run.stdout.splitlines()[-1])["peak"])
    program, (held, measured) = float(bare.stdout), peaks
    p = plans.plan(read_config(config_of(resolve(args.model))), DTYPES[args.dtype], pick_device(), layers=args.train_layers, lora=0, dialogues=0, max_tokens=0, micro_tokens=args.micro, checkpointed=args.checkpoint_layers)
    p["always"]["copies to sample with"] = frozen_copies(args)         # nothing was sampled
    planned = plans.peak(p) / 1e9
    print(f"{args.model}, {args.dtype}, upper {args.train_layers} layers, micro-batches of {args.micro} tokens: {measured:.2f} GB alive at the peak, {program:.2f} of them the program itself; the plan says {planned:.2f}, "
          f"{(measured - program) / planned - 1:+.0%} measured over it; with what the allocator keeps {held:.2f} GB")
    finish(args, peak_gb=round(measured, 2), held_gb=round(held, 2), program_gb=round(program, 2), plan_gb=round(planned, 2), over=round((measured - program) / planned - 1, 3))


# ---------------------------------------------------------------------------------------------- start
def start(args):
    """Seconds from nothing: a Python that imports what a training script imports; and train_grpo.py on tiny settings until its first update is done, two dev scenarios before RL and best/ included."""
    imports, steps = [], []
    for _ in tqdm(range(args.repeats), desc="cold starts", leave=False):
        imports.append(timed(lambda: subprocess.run([sys.executable, "-c", "import train_grpo"], cwd=ROOT, check=True))[1])
        with tempfile.TemporaryDirectory() as folder:
            few = [line for split, n in (("train", 8), ("dev", 2), ("heldout", 2)) for line in [x for x in (ROOT / "data" / "scenarios.jsonl").read_text(encoding="utf-8").splitlines() if json.loads(x)["split"] == split][:n]]
            Path(f"{folder}/few.jsonl").write_text("\n".join(few), encoding="utf-8")
            begin = time.time()
            run = subprocess.Popen([sys.executable, "-u", str(ROOT / "train_grpo.py"), "--model", args.model, "--cold_start", "none", "--steps", "1", "--groups", "4", "--group_size", "2", "--minibatches", "1", "--max_turns", "1",
                                  "--max_new_tokens", "16", "--final_repeats", "0", "--eval_every", "9", "--threads", str(args.threads), "--dtype", args.dtype, "--scenarios", f"{folder}/few.jsonl", "--run", f"{folder}/run"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            printed = []
            for line in run.stdout:
                printed.append(line.strip())
                if line.startswith("step   1"):
                    steps.append(time.time() - begin)
            if run.wait():
                die(f"train_grpo.py failed: {last_words(chr(10).join(printed))}")
    imported, first = statistics.median(imports), statistics.median(steps)
    print(f"{args.model}: imports {imported:.1f} s; {first:.1f} s to the first update, on 8 dialogues of one turn")
    finish(args, import_seconds=round(imported, 2), seconds=round(first, 2))


# ---------------------------------------------------------------------------------------------- scale
def scale_child(args):
    """One process of several: two GRPO updates on its share of the same episodes; rank 0 writes weights and metrics."""
    ranks.begin(torch.device("cpu"))
    model, _ = load(args.model, DTYPES[args.dtype])
    model.train_only_upper(args.train_layers)
    episodes, rewards, chat = synthetic(model, args.rows, args.tokens, 0.3, args.seed, 4)
    first, groups = ranks.share(list(range(args.rows // 4)))
    mine = [i for i, e in enumerate(episodes) if e.group in groups]
    advantages, _ = train_grpo.trajectory_advantages([rewards[i] for i in mine], 4, 1e-4)
    optimizer, seconds = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True), []
    for _ in range(2):
        seen, s = timed(train_grpo.update, grpo_settings(), model, None, optimizer, chat, [episodes[i] for i in mine], advantages)
        seconds.append(s)
    if not ranks.RANK:
        save_file({name: p.detach().contiguous() for name, p in model.named_parameters() if p.requires_grad}, args.child)
        Path(args.child + ".json").write_text(json.dumps({"seconds": seconds[-1], **{k: float(seen[k]) for k in ("kl", "grad_norm", "entropy")}}))


def scale(args):
    if args.child:
        return scale_child(args)
    if args.rows % 8 or args.threads < 2:
        die(f"--rows {args.rows} --threads {args.threads}: needs rows in groups of four that two processes divide, a multiple of 8, and a thread for each")
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for n in (1, 2):
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}", "--", str(ROOT / "bench.py"), "scale", "--child", f"{folder}/{n}", "--model", args.model, "--dtype", args.dtype, "--threads", str(max(1, args.threads // n)),
                       "--rows", str(args.rows), "--tokens", str(args.tokens), "--train_layers", str(args.train_layers), "--seed", str(args.seed)]
            run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": str(max(1, args.threads // n))})
            if run.returncode:
                die(f"{n} processes failed: {last_words(run.stderr)}")
            results[n] = json.loads(Path(f"{folder}/{n}.json").read_text()), load_file(f"{folder}/{n}")
    (one, a), (two, b) = results[1], results[2]
    weights, metrics = max((a[k] - b[k]).abs().max().item() for k in a), max(abs(one[k] - two[k]) for k in ("kl", "grad_norm", "entropy"))
    print(f"two updates on the same {args.rows} rows of {args.tokens} tokens, {args.threads} threads in all: one process {one['seconds']:.2f} s, two {two['seconds']:.2f} s; weights differ by {weights:.1e} at most, metrics by {metrics:.1e}")
    finish(args, seconds=round(one["seconds"], 2), two_seconds=round(two["seconds"], 2), ratio=round(two["seconds"] / one["seconds"], 2), weights_differ=weights, metrics_differ=metrics)


# ---------------------------------------------------------------------------------------------- gpu
def gpu(args):
    """What a lease of a few minutes should answer. Every part prints and records its own line; parts that no longer fit are named, not begun."""
    if pick_device().type != "cuda":
        die("bench.py gpu: needs a CUDA device; the other modes run anywhere")
    import bench
    begin, left = time.time(), lambda: args.minutes * 60 - (time.time() - begin)
    device, sizes = torch.cuda.get_device_name(), [s for s in ("0.5b", "1.5b") if torch.cuda.get_device_properties(0).total_memory > {"0.5b": 12e9, "1.5b": 36e9}[s]]
    print(f"{device}, torch {torch.__version__}, {args.minutes} minutes")
    how, wrong = lambda **more: SimpleNamespace(**{**vars(args), "mode": "gpu", **more}), []
    for size in sizes:
        each = how(model=f"random:{size}", dtype="fp32")
        model = random_model(each)[0].requires_grad_(False)

        @torch.no_grad()
        def tokens(recording, B, temperature):
            GRAPHS["device"] = "cuda" if recording else None
            rng = random.Random(args.seed)
            prompts = [random_ids(rng.randint(64, 192), model.config.vocab, rng) for _ in range(B)]
            cache = Cache(model, B, 512)
            hidden = append(model, cache, prompts)
            budgets = [128] * B if model.dtype == torch.float32 else [rng.randint(8, 128) for _ in range(B)]      # equal ones, where tokens are compared: the sides retire rows at different sizes
            return timed(lambda: sample(model, cache, hidden, budgets, set(), temperature=temperature, generator=torch.Generator().manual_seed(args.seed)))
        for dtype, B, temperature in (("fp32", 1, 0), ("fp32", 8, 0.8), ("bf16", 1, 0), ("bf16", 8, 0.8), ("bf16", 32, 0), ("bf16", 128, 0.8)):      # fp32: whether it is right; bf16: how fast
            if left() < 60:
                print(f"graphs {size} {dtype} B={B}: left out, {max(0, left()):.0f} s are left")
                continue
            model.dtype = DTYPES[dtype]
            tokens(True, B, temperature)                   # warm: recorded here, replayed below, with weights that an optimiser might have moved meanwhile
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1.001)
            (a, la), with_graph = tokens(True, B, temperature)
            still_on = GRAPHS["device"] == "cuda"
            (e, le), without = tokens(False, B, temperature)
            same, gap = statistics.mean(x == y for x, y in zip(a, e)), max((abs(x - y) for r, q in zip(la, le) if len(r) == len(q) for x, y in zip(r, q)), default=0.0)
            print(f"{size} {dtype} B={B:<4d} temperature {temperature}: recorded {sum(map(len, a)) / with_graph:8.0f} tokens/s, stepwise {sum(map(len, e)) / without:8.0f}; rows with the same tokens {same:.2f}, log-probs within {gap:.4f}{'' if still_on else '; RECORDING FAILED'}", flush=True)
            finish(how(part="graphs", model=each.model, dtype=dtype, batch=B, temperature=temperature), recorded=round(sum(map(len, a)) / with_graph), stepwise=round(sum(map(len, e)) / without), ratio=round(without / with_graph, 2), agreement=same, recording=still_on)
            # at a temperature a draw may fall on the other side of two ids' border by the last bit of a sum; greedily in fp32 it must not
            wrong += [f"{size} {dtype} B={B}"] * (not still_on or dtype == "fp32" and (same < 1 if temperature == 0 else same < 0.75))
        GRAPHS["device"] = "cuda"
        del model
        torch.cuda.empty_cache()
        for name, f, more in (("decode", bench.decode, dict(batch=[1, 8, 32, 128], prompt=[64, 192], new=64, repeats=3)), ("turns", bench.turns, dict(dialogues=32, turns=8, chunk=[20, 40], reply=64)),
                              ("roofline", roofline, dict(batch=[1, 8, 32, 128], context=512, new=64, repeats=3))):
            if left() < 60:
                print(f"{name} {size}: left out, {max(0, left()):.0f} s are left")
                continue
            f(how(part=name, model=each.model, dtype="bf16", **more))
            torch.cuda.empty_cache()
        if left() < 60:
            print(f"update {size}: left out, {max(0, left()):.0f} s are left")
        else:                                              # one whole update, all layers
            model = random_model(how(model=each.model, dtype="bf16"))[0]
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
            episodes, rewards, chat = synthetic(model, 64, 512, 0.3, args.seed, 8)
            advantages, _ = train_grpo.trajectory_advantages(rewards, 8, 1e-4)
            torch.cuda.reset_peak_memory_stats()
            seconds = [timed(train_grpo.update, grpo_settings(tokens_per_microbatch=8192), model, None, optimizer, chat, episodes, advantages)[1] for _ in range(3)]
            p = plans.plan(model.config, torch.bfloat16, pick_device(), layers=0, lora=0, dialogues=0, max_tokens=0, micro_tokens=8192)
            p["always"]["copies to sample with"] = 0
            print(f"{size}: one update on 64 rows of 512 tokens {statistics.median(seconds[1:]):.2f} s, {memory('VmHWM'):.1f} GB at the peak, the plan says {plans.peak(p) / 1e9:.1f}", flush=True)
            finish(how(part="update", model=each.model, dtype="bf16"), seconds=round(statistics.median(seconds[1:]), 3), peak_gb=round(memory("VmHWM"), 2), plan_gb=round(plans.peak(p) / 1e9, 2))
            del model, optimizer
            torch.cuda.empty_cache()
    if left() < 60:
        print("logprob: left out")
    else:
        bench.logprob(how(part="logprob", tokens=4096, vocab=151936, width=896, dtype="bf16", repeats=2, child=None))
    print(f"{(time.time() - begin) / 60:.1f} minutes")
    if wrong:
        die(f"recorded and stepwise decoding differ, or recording failed: {', '.join(wrong)}")
