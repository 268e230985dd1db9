"""
GRPO on a simulated user's emotion, whole algorithm top to bottom: talk, score, compare within the group, step.

Against PPO it drops the value function: the baseline is the mean of K dialogues of the same scenario. Against the GRPO
paper it drops the KL term (off by default), the division by each answer's length (a constant denominator instead, so that
length is not rewarded), and the division by a group std that is below a floor (it would blow up noise).

    python train_grpo.py                          laptop: SmolLM2-135M, cold start, then RL; 20-25 minutes on 2 cores
    python train_grpo.py --preset gpu             Qwen2.5-0.5B-Instruct on one GPU
    python train_grpo.py --resume runs/grpo       go on, bit for bit
"""
import json
import time
from copy import deepcopy
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import evaluate
import ranks
from appraisal import INTENTS
from backend import BudgetSpent, add_user_flags, check_rewards, check_user, make_rewards, make_users
from curriculum import Curriculum, add_curriculum_flags, read_settings
from episode import marked, training_batches, transcript
from memory import adamw, tokens_or_auto
from memory import check as check_memory
from model import token_logprobs
from report import training_page
from rollout import Chat, add_template_flags, check_budget, check_template, overlapped, rollout
from rubric import add_reward_flags
from rundir import Flags, RunDir, StopOnInterrupt, die, nonnegative, positive, seed_number
from scenarios import STATES, load_scenarios
from train_sft import cold_start, load_demonstrations
from weights import DTYPES, build, load, pick_device, pick_dtype, resolve, save

# ---------------------------------------------------------------------------------------------- flags
PRESETS = {   # every flag on the command line overrides its preset
    "laptop": dict(model="smollm2-135m", cold_start="data/demonstrations.jsonl", steps=9, groups=8, group_size=8, max_turns=5, max_new_tokens=48, max_tokens=1024,
                   temperature=0.8, lr=1e-4, minibatches=4, epochs=1, train_layers=15, credit="turn", tokens_per_microbatch=4096),
    "gpu": dict(model="Qwen/Qwen2.5-0.5B-Instruct", cold_start="none", steps=200, groups=16, group_size=8, max_turns=8, max_new_tokens=128, max_tokens=2048,
                temperature=1.0, lr=1e-6, minibatches=4, epochs=1, train_layers=0, credit="trajectory", tokens_per_microbatch="auto"),
}
p = Flags(description=__doc__, epilog="flags marked *, by preset:\n" + "\n".join(f"  {name}: {' '.join(f'{k}={v}' for k, v in values.items())}" for name, values in PRESETS.items()))
p.add_argument("--preset", default="auto", choices=["auto", *PRESETS], help="auto = gpu on an accelerator, else laptop; sets the flags marked *")
p.add_argument("--run", default="runs/grpo", help="folder of this run; must not exist (default: %(default)s)")
p.add_argument("--resume", metavar="RUN", help="continue the run in this folder with its own flags; only --steps, --threads, --server_calls and --server_parallel may be given beside it")
p.add_argument("--seed", type=seed_number, default=0, help="fixes everything: same seed, same machine, same result (default: %(default)s)")
p.add_argument("--threads", type=positive(int), help="CPU threads (default: torch's choice)")
# ---- model
p.add_argument("--model", help="* smollm2-135m, hub name, HF folder or .gguf")
p.add_argument("--cold_start", metavar="none|FILE", help="* imitation of these demonstrations before RL, kept in the user's cache")
p.add_argument("--dtype", default="auto", choices=["auto", "fp32", "bf16", "fp16"], help="compute dtype; masters are fp32, fp16 is refused; auto = bf16 where a GPU has it or a CPU was measured to be faster in it (default: %(default)s)")
p.add_argument("--device", default="auto", choices=["auto", "cuda", "mps", "cpu"], help="auto: cuda, then mps, then cpu (default: %(default)s)")
p.add_argument("--train_layers", type=nonnegative(int), help="* train the upper N layers, freeze the rest; 0 = train everything")
p.add_argument("--lora", type=nonnegative(int), default=0, metavar="RANK", help="train adapters of this rank beside the layers to be trained, not their weights; wants about 10 times the --lr; 0 = off (default: %(default)s)")
# ---- rollout
p.add_argument("--scenarios", default="data/scenarios.jsonl", help="scenario file; its train, dev and heldout splits are used (default: %(default)s)")
p.add_argument("--dynamics", default="sage", choices=["sage", "rlver"], help="sage: emotion starts at 40, fails below 10; rlver: starts at 30, fails at 0 (default: %(default)s)")
add_user_flags(p)
add_curriculum_flags(p)
p.add_argument("--groups", type=positive(int), help="* G, scenarios a step")
p.add_argument("--group_size", type=positive(int), help="* K, dialogues of each scenario; the advantage compares them")
p.add_argument("--max_turns", type=positive(int), help="* replies a dialogue")
p.add_argument("--max_new_tokens", type=positive(int), help="* tokens a reply, its thoughts included")
add_template_flags(p)
p.add_argument("--overlap", action="store_true", help="with a served user: play the dialogues in two halves, one decoding while the other's users think")
p.add_argument("--max_tokens", type=positive(int), help="* tokens a dialogue, everything counted")
p.add_argument("--temperature", type=positive(float), help="* of sampling and of the loss")
# ---- reward and advantage
add_reward_flags(p)
p.add_argument("--credit", choices=["trajectory", "turn", "mica"], help="* trajectory: one advantage a dialogue (RLVER); turn: discounted emotion changes, one a reply (MICA's G_t); mica: half of that, half the change itself against all of the group's")
p.add_argument("--credit_from", default="emotion", choices=["emotion", "deficit"], help="what a reply changed, for --credit turn and mica: the emotion, or by --judge the deficits of EMPA (MICA's potential) (default: %(default)s)")
p.add_argument("--gamma", type=nonnegative(float), default=0.85, help="discount per turn of --credit turn and mica (default: %(default)s, MICA)")
p.add_argument("--std_floor", type=positive(float), default=0.03, help="advantages are divided by max(group std, this), but for --credit mica (default: %(default)s, in reward units)")
# ---- loss and optimiser
p.add_argument("--steps", type=positive(int), help="* batches of groups x group_size new dialogues")
p.add_argument("--minibatches", type=positive(int), help="* optimiser steps per pass over a batch of dialogues, each on its share of the groups")
p.add_argument("--epochs", type=positive(int), help="* passes over each batch of dialogues")
p.add_argument("--lr", type=positive(float), help="* learning rate of AdamW")
p.add_argument("--clip_low", type=positive(float), default=0.2, help="ratio clip below 1 (default: %(default)s)")
p.add_argument("--clip_high", type=positive(float), default=0.28, help="ratio clip above 1 (default: %(default)s, clip-higher)")
p.add_argument("--dual_clip", type=positive(float), default=3.0, help="bound of the ratio where the advantage is negative (default: %(default)s)")
p.add_argument("--kl", type=nonnegative(float), default=0.0, help="weight of the k3 penalty to the initial policy; above 0 keeps a frozen copy, or switches the adapters off with --lora (default: %(default)s)")
p.add_argument("--grad_clip", type=positive(float), default=1.0, help="gradient norm limit (default: %(default)s)")
p.add_argument("--fsdp", action="store_true", help="with torchrun: every process holds its part of weights, gradients and Adam only, for models that do not fit otherwise; slower")
p.add_argument("--checkpoint_layers", action="store_true", help="keep each block's input only and make the rest again in backward: a third more compute, about a tenth of the activations")
p.add_argument("--tokens_per_microbatch", type=tokens_or_auto, metavar="N|auto", help="* padded tokens of one forward and backward; auto: as many as the memory plan has room for")
p.add_argument("--offload_optimizer", action="store_true", help="keep Adam's moments in the host's memory: 8 bytes a trained weight less on a GPU, two copies over the bus an optimiser step more")
# ---- output
p.add_argument("--eval_every", type=positive(int), default=3, help="steps between evaluations on the dev split; the best policy is kept (default: %(default)s)")
p.add_argument("--save_every", type=positive(int), default=5, help="steps between checkpoints (default: %(default)s)")
p.add_argument("--final_repeats", type=nonnegative(int), default=1, help="dialogues per held-out scenario and user (this one and scripted-b) in the closing base / cold start / RL table; 0 = no table (default: %(default)s)")


# ---------------------------------------------------------------------------------------------- advantages
def trajectory_advantages(rewards, group_size, floor):
    """GRPO: (r - mean) / max(std, floor) within each group, every turn of a dialogue alike.

    rewards: list of rubric.Reward or None (its user failed: advantage 0, and out of the group's mean). -> list of lists
    over turns, and the share of groups whose rewards are all equal (they contribute exactly 0).
    """
    advantages, flat = [], 0
    for g in range(0, len(rewards), group_size):
        group = rewards[g:g + group_size]
        totals = np.array([r.total for r in group if r is not None])
        flat += len(totals) == 0 or np.ptp(totals) == 0
        for r in group:
            a = 0.0 if r is None or np.ptp(totals) == 0 else (r.total - totals.mean()) / max(totals.std(), floor)
            advantages.append([] if r is None else [float(a)] * len(r.turns))
    return advantages, flat / (len(rewards) // group_size)


def discounted(turns, gamma):
    """G_t = sum_k>=t gamma^(k-t) r_k: discounted([0, 1], 0.5) == [0.5, 1.0]."""
    G, future = [], 0.0
    for r in reversed(turns):
        future = r + gamma * future
        G.append(future)
    return G[::-1]


def turn_advantages(rewards, group_size, floor, gamma):
    """Turn-level credit: returns G_t = sum_k>=t gamma^(k-t) r_k of the emotion changes, compared within the group at the same
    turn index: (G_t - mean_t) / max(std_t, floor). A turn that one dialogue alone reached gets 0. Same returns as above."""
    advantages, flat = [], 0
    for g in range(0, len(rewards), group_size):
        returns = [discounted([] if r is None else r.turns, gamma) for r in rewards[g:g + group_size]]
        columns = [np.array([G[t] for G in returns if len(G) > t]) for t in range(max(map(len, returns)))]
        flat += all(np.ptp(c) == 0 for c in columns)
        advantages += [[float((x - c.mean()) / max(c.std(), floor)) if np.ptp(c) > 0 else 0.0 for x, c in zip(G, columns)] for G in returns]
    return advantages, flat / (len(rewards) // group_size)


def mica_advantages(rewards, group_size, gamma):
    """MICA: A = A_turn / 2 + A_group / 2. A_turn: z-score of G_t over the group's dialogues at the same turn index, 0 where one dialogue alone got that far;
    A_group: z-score of r_t over all turns of the group. Population std + 1e-8, no floor. Same returns as above."""
    advantages, flat = [], 0
    for g in range(0, len(rewards), group_size):
        turns = [[] if r is None else r.turns for r in rewards[g:g + group_size]]
        returns = [discounted(t, gamma) for t in turns]
        columns = [np.array([G[t] for G in returns if len(G) > t]) for t in range(max(map(len, returns)))]
        every = np.array([r for t in turns for r in t])
        flat += len(every) == 0 or np.ptp(every) == 0 and all(np.ptp(c) == 0 for c in columns)
        z = lambda x, values: 0.0 if np.ptp(values) == 0 else float((x - values.mean()) / (values.std() + 1e-8))
        advantages += [[0.5 * z(x, c) + 0.5 * z(r, every) for x, r, c in zip(G, t, columns)] for G, t in zip(returns, turns)]
    return advantages, flat / (len(rewards) // group_size)


def mixed_advantages(args, streams):
    """Credit for each stream of rewards by itself, then added: emotion + mu x each further one. Same returns as above; flat groups are those of the emotion."""
    kinds = {"turn": lambda rewards: turn_advantages(rewards, args.group_size, args.std_floor, args.gamma), "mica": lambda rewards: mica_advantages(rewards, args.group_size, args.gamma),
             "trajectory": lambda rewards: trajectory_advantages(rewards, args.group_size, args.std_floor)}
    (advantages, flat), *more = [kinds[args.credit](rewards) for rewards in streams.values()]
    for stream, _ in more:
        advantages = [[a + args.mu * b for a, b in zip(mine, other)] for mine, other in zip(advantages, stream)]
    return advantages, flat


# ---------------------------------------------------------------------------------------------- loss
def policy_loss(logp, old, advantage, clip_low, clip_high, dual_clip):
    """Clipped surrogate per policy token, all (N,). -> loss (N,), ratio (N,).

    -min(rho A, clip(rho, 1 - low, 1 + high) A); for A < 0 no less than dual_clip * A, so that one unlucky token whose ratio
    exploded can't drag the whole step (dual clip). Literal example, A = -1: d loss / d rho is 0 at rho = 0.5 and +1 at rho = 1.5.
    """
    ratio = (logp - old).exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    surrogate = torch.where(advantage < 0, torch.maximum(surrogate, dual_clip * advantage), surrogate)
    return -surrogate, ratio


def update(args, model, reference, optimizer, chat, episodes, advantages):
    """`epochs` passes over all dialogues, each in `minibatches` optimiser steps, whole groups together. -> metrics over every policy token seen.

    The first step is on-policy (ratio 1), the later ones slightly off it, which the ratio corrects and the clip bounds.
    """
    device = model.model.embed_tokens.weight.device
    banned = chat.banned.to(device)
    parameters = [q for q in model.parameters() if q.requires_grad]
    names = ("tokens", "entropy", "kl", "kl_reference", "clip_low", "clip_high", "ratio", "first_tokens", "ratio_first", "canary")
    sums, norms = {k: torch.zeros((), device=device) for k in names}, []
    for minibatch in range(args.epochs * args.minibatches):
        use = [i for i, e in enumerate(episodes) if e.group % args.minibatches == minibatch % args.minibatches]
        # a constant, not the number of tokens sampled: neither padding, micro-batching nor a reply's length changes a token's weight
        denominator = len(use) * args.max_turns * args.max_new_tokens
        use = [i for i in use if episodes[i].finish != "user_failed"]
        if not ranks.total(len(use)):
            continue
        for ids, branches, source, target, old, episode, place, turn in ranks.even(training_batches(episodes, use, args.tokens_per_microbatch, device), model, reference):     # (B, T), then N each
            advantage = torch.tensor([advantages[i][t] for i, t in zip(episode, turn)], device=device)                # (N,)
            hidden = model(ids, branches=branches).flatten(0, 1)[source]                                                 # (N, D): policy positions only
            logp, entropy = token_logprobs(model, hidden, target, banned, args.temperature)           # (N,), never (B, T, V)
            loss, ratio = policy_loss(logp, old, advantage, args.clip_low, args.clip_high, args.dual_clip)
            if reference is not None:
                with torch.no_grad(), reference.without_adapters():
                    logp_reference, _ = token_logprobs(reference, reference(ids, branches=branches).flatten(0, 1)[source], target, banned, args.temperature)
                d = logp_reference - logp
                k3 = d.exp() - d - 1                       # its gradient pulls the right way; that of the mean of d has none in expectation
                loss = loss + args.kl * k3
                sums["kl_reference"] += k3.detach().sum()
            (loss.sum() / denominator).backward()
            with torch.no_grad():
                first = float(minibatch == 0)              # before any step: sampler and trainer are the same weights
                for k, v in (("tokens", torch.ones_like(old)), ("entropy", entropy), ("kl", (ratio - 1) - (logp - old)), ("ratio", ratio),
                             ("clip_low", ((ratio < 1 - args.clip_low) & (advantage < 0)).float()), ("clip_high", ((ratio > 1 + args.clip_high) & (advantage > 0)).float()),
                             ("first_tokens", torch.full_like(old, first)), ("ratio_first", first * ratio), ("canary", first * (logp - old).abs())):
                    sums[k] += v.sum()
        ranks.average_gradients(parameters)
        norms.append(ranks.clip(parameters, args.grad_clip))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    sums = {k: ranks.total(v).item() for k, v in sums.items()}       # the metrics stay on the device until here
    if reference is None:
        del sums["kl_reference"]                           # not measured is not 0
    n, first = max(sums.pop("tokens"), 1.0), max(sums.pop("first_tokens"), 1.0)
    first = {k: sums.pop(k) / first for k in ("ratio_first", "canary")}
    return {**{k: v / n for k, v in sums.items()}, **first, "policy_tokens": int(n), "grad_norm": torch.stack(norms).mean().item()}


# ---------------------------------------------------------------------------------------------- set-up
def main(argv=None):
    args, given, run = RunDir.from_flags(p, argv)
    device = ranks.begin(pick_device(args.device))
    if not args.resume:
        args.preset = args.preset if args.preset != "auto" else "laptop" if device.type == "cpu" else "gpu"
        for name, value in PRESETS[args.preset].items():
            if getattr(args, name) is None:
                setattr(args, name, value)
    if args.threads:
        torch.set_num_threads(args.threads)
    dtype = pick_dtype(args.dtype, device)
    args.dtype = ranks.everyone([next(name for name, d in DTYPES.items() if d == dtype)])[0]         # one for all, and a run that is resumed computes as it did
    dtype = DTYPES[args.dtype]
    train, dev, heldout = (load_scenarios(args.scenarios, split) for split in ("train", "dev", "heldout"))
    check_user(args, train + dev + heldout, training=True)
    memories, perceived = check_rewards(args, train + dev + heldout), check_template(args, train + dev + heldout)
    settings = read_settings(args, args.steps * args.groups)
    if args.groups > len(train):
        die(f"--groups {args.groups}: only {len(train)} training scenarios in {args.scenarios}")
    if args.resume and args.world != ranks.WORLD:
        die(f"--resume {args.resume}: was begun with {args.world} processes and can only go on with as many; this is {ranks.WORLD}")
    if args.groups % (args.minibatches * ranks.WORLD):
        die(f"--minibatches {args.minibatches}{f' x {ranks.WORLD} processes' * (ranks.WORLD > 1)} does not divide --groups {args.groups}; give other --minibatches or --groups")
    if args.group_size < 2:
        die("--group_size 1: GRPO compares the dialogues of a group; use 2 or more")
    if not args.resume:
        RunDir.free(args.run)
    if args.fsdp and (ranks.WORLD == 1 or args.lora or args.offload_optimizer or args.user == "lm:self"):
        die("--fsdp: parts a model over the processes of torchrun --nproc_per_node=N, and goes with none of --lora, --offload_optimizer, --user lm:self; leave it out")
    if args.overlap and not args.user.startswith("server:"):
        die(f"--overlap: decodes while a served user thinks, and --user {args.user} thinks on this machine; leave it out")
    if args.cold_start != "none":
        load_demonstrations(args.cold_start)
    source = ranks.in_turn(lambda: resolve(args.model))
    print(f"preset {args.preset} ({'chosen for ' + device.type if 'preset' not in given and not args.resume else 'given'}): {args.model} on {device}, compute {dtype}")
    init = Path(args.init) if args.resume else source if args.cold_start == "none" else ranks.in_turn(lambda: cold_start(args.model, args.cold_start, device, dtype, args.template))
    if not init.exists():
        die(f"{args.run}/config.json: the initial policy {init} is gone; this run can't be resumed")
    args.tokens_per_microbatch = check_memory(init, dtype, device, layers=args.train_layers, lora=args.lora, dialogues=args.groups * args.group_size // ranks.WORLD, max_tokens=args.max_tokens, micro_tokens=args.tokens_per_microbatch,
                 frozen=int(args.kl > 0), checkpointed=args.checkpoint_layers, offload=args.offload_optimizer, shards=ranks.WORLD if args.fsdp else 1)
    config = {k: v for k, v in vars(args).items() if k != "resume"}
    config |= {"init": str(init), "world": ranks.WORLD}
    state = run.load() if args.resume else None
    model, tokenizer = load(str(init), dtype, device)
    ranks.same(model)
    if args.train_layers > len(model.model.layers):
        die(f"--train_layers {args.train_layers}: this model has {len(model.model.layers)}")
    model.train_only_upper(args.train_layers)
    model.checkpointed = args.checkpoint_layers
    if args.lora:
        model.add_lora(args.lora, args.seed)
    how = dict(template=args.template, memories=memories, perceived=perceived)
    chat = Chat(tokenizer, model.config.vocab, **how)
    users = make_users(args, (model, chat), dtype, device)      # before a checkpoint is loaded: lm:self is the policy before RL
    stack = make_rewards(args, memories, dtype, device)
    check_budget(model, chat, train + dev + heldout, args.max_new_tokens, args.max_tokens)
    run = run or RunDir.create(args.run, config)
    run.configure(config)
    reference = None if args.kl == 0 else model if args.lora else deepcopy(model).requires_grad_(False)
    if state is not None:
        model.load_state_dict(state["model"])
    if args.fsdp:
        for network in filter(None, (model, reference)):
            ranks.shard(network)
    parameters = [q for q in model.parameters() if q.requires_grad]
    optimizer = adamw(parameters, args.offload_optimizer, lr=args.lr)
    controller = Curriculum(settings, INTENTS, list(map(str, STATES)), sharing=not args.no_sharing)
    start, best, pending = 0, -1.0, {"step": 0}
    if state is not None:
        optimizer.load_state_dict(ranks.part(optimizer, state["optimizer"]) if args.fsdp else state["optimizer"])
        controller.load_state_dict(state["curriculum"])
        stack.load_state(state["rewards"][ranks.RANK])
        start, best, pending = state["step"], state["best"], json.loads(state["pending"])
        del state
    count = lambda ps: sum(q.numel() for q in ps)
    talk = dict(max_turns=args.max_turns, max_new_tokens=args.max_new_tokens, max_tokens=args.max_tokens, temperature=args.temperature)
    print(f"policy: {count(model.parameters()) / 1e6:.1f} M parameters, {count(parameters) / 1e6:.1f} M of them trained")
    print(f"a step: {f'{ranks.WORLD} processes with together ' * (ranks.WORLD > 1)}{args.groups} groups x {args.group_size} = {args.groups * args.group_size} dialogues of <= {args.max_turns} replies of <= {args.max_new_tokens} tokens, then {args.epochs} x {args.minibatches} optimiser steps")
    print(f"the reward is {users.note}; {len(train)} training, {len(dev)} dev, {len(heldout)} held-out scenarios")

    # ------------------------------------------------------------------------------------------ evaluation
    def checkpoint(step, pending=None):
        """pending: the record of this step, where its dev score is still to come."""
        run.save({"model": ranks.whole(model.state_dict()), "optimizer": ranks.whole(optimizer.state_dict()), "curriculum": controller.state_dict(), "rewards": ranks.everyone([stack.state()]), "step": step, "best": best, "pending": json.dumps(pending)})

    def within_budget(work, step, pending=None):
        """work(); where a served user or judge has spent its calls, on any rank, saves first, then ends the program."""
        out, spent, counts = None, "", stack.counts()
        try:
            out = work()
        except BudgetSpent as e:
            spent = str(e)
        if ranks.total(int(bool(spent))):
            stack.counts(counts)                           # whose own calls went through takes them back: this batch will be played again
            checkpoint(step, pending)
            die(f"{spent or 'another process has spent its calls'}; saved {run.path}: go on with --resume {run.path} --server_calls N")
        return out

    def score_dev(record):
        """Adds the score on the dev split to this step's record; keeps the best policy. The same dialogue seeds each time, so that scores differ by the policy only.
        Where the user can't go on, saves first, then ends the program."""
        nonlocal best
        with ranks.gathered(model):
            played = within_budget(lambda: evaluate.play(model, chat, users, dev, seed=args.seed, states=args.curriculum != "no-states", **talk) if ranks.RANK == 0 else [], record["step"], record)
        played = ranks.everyone(played)                    # one rank's: served users may answer each otherwise, and are asked once
        found = evaluate.summary(played)
        if found["n"] == 0:
            checkpoint(record["step"], record)
            die(f"every simulated user failed on the dev split{users.trouble()}; mend the user, then go on with --resume {run.path}")
        record.update(dev_emotion=found["emotion"], dev_distinct_2=found["distinct_2"], **{f"dev_{k}": v for k, v in ranks.everyone([users.report()])[0].items()})
        if run.writes:
            training_page(run.path, record, [evaluate.row(e, 0) for e in played if e.finish != "user_failed"])
        if found["outcome"] > best:
            best = found["outcome"]
            best_policy = build(model.hf_config, ranks.whole(model.state_dict())) if args.fsdp else model
            if run.writes:
                save(best_policy, tokenizer, run.path / "best", base=str(init))

    # ------------------------------------------------------------------------------------------ the loop
    with StopOnInterrupt() as stop:
        if pending is not None:                            # the score before RL, or one that a budget's end left out
            score_dev(pending)
            run.log(pending)
            if args.resume:                                # else a kill before the next checkpoint would have it scored and logged again
                checkpoint(pending["step"])
            print(f"step {pending['step']:3d}  dev {pending['dev_emotion']:.1f}{'  (before RL)' * (pending['step'] == 0)}", flush=True)
        for step in range(start, args.steps):
            clock = [time.time()]
            # uniform over scenarios: one seeded shuffle after another, G at a time
            stream = [np.random.default_rng([args.seed, e]).permutation(len(train)) for e in range(step * args.groups // len(train), (step + 1) * args.groups // len(train) + 1)]
            at = step * args.groups % len(train)
            chosen = [train[i] for i in np.concatenate(stream)[at:at + args.groups]]
            intents = [INTENTS.index(s.intent) for s in chosen]
            states = controller.sample(intents, np.random.default_rng([args.seed, step, 1]))
            jobs = [(s, STATES[z] if args.curriculum != "no-states" else None) for s, z in zip(chosen, states)]
            first, jobs = ranks.share(jobs)                # of several processes each plays its groups
            generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step + 500_009 * ranks.RANK)
            with tqdm(total=len(jobs) * args.group_size * args.max_turns, desc=f"step {step + 1}", unit="reply", leave=False, disable=ranks.RANK > 0) as bar:
                with ranks.gathered(model):
                    episodes = within_budget(lambda: (overlapped if args.overlap else rollout)(model, chat, users, jobs, args.group_size, generator=generator, progress=bar, **talk), step)
            clock.append(time.time())
            for e in episodes:
                e.group += first
            if not ranks.total(sum(e.finish != "user_failed" for e in episodes)):
                checkpoint(step)
                die(f"every simulated user failed in step {step + 1}{users.trouble()}; mend the user, then go on with --resume {run.path}")

            streams = stack.streams(episodes, within_budget(lambda: stack.marks(episodes), step))
            rewards = streams["emotion"]
            advantages, flat = mixed_advantages(args, streams)
            flat = ranks.total(flat).item() / ranks.WORLD
            metrics = update(args, model, reference, optimizer, chat, episodes, advantages)
            clock.append(time.time())
            # sampler and trainer are one network: a gap here means a broken mask, cache or temperature (pitfalls 12, 18)
            limit = {torch.float32: 1e-3, torch.bfloat16: 0.08}[dtype]
            if metrics["canary"] > limit:
                print(f"warning: mean |logp trained - logp sampled| is {metrics['canary']:.4f}, above {limit} for {dtype}", flush=True)

            # the outer loop sees the outcomes that were just paid for, after the optimizer step; a group whose user failed somewhere is not complete
            episodes, streams = ranks.everyone(episodes), {name: ranks.everyone(rows) for name, rows in streams.items()}
            rewards = streams["emotion"]
            outcomes = controller.update([(intents[g], states[g], [e.outcome for e in episodes if e.group == g and e.finish != "user_failed"]) for g in range(args.groups)])
            found = evaluate.summary(episodes)
            stds = [np.std([r.total for r in rewards[g:g + args.group_size] if r is not None] or [0.0]) for g in range(0, len(rewards), args.group_size)]
            record = {"step": step + 1, "reward": float(np.mean([r.total for r in rewards if r is not None])), **{f"reward_{name}": float(np.mean([r.parts[name] for r in rewards if r is not None])) for name in next(r for r in rewards if r is not None).parts if name != "emotion"}, **stack.report(), "group_std": float(np.mean(stds)),
                      "spread_groups": float(np.mean(np.array(stds) > 0.03)), "flat_groups": flat, **metrics,
                      **{k: found[k] for k in ("emotion", "success", "failure", "failed", "tokens", "cut", "malformed", "perceived", "follows", "mirrors", "distinct_2", "parts", "intents")}, **ranks.mean_of(users.report()), **({"curriculum": {**controller.metrics(), "outcomes": outcomes}} if args.curriculum != "no-states" else {})}
            run.sample(step + 1, "\n\n".join("\n".join([transcript(e), *(f"  {name:9} {r}" for name, r in zip(streams, worth)), f"  tokens    {' | '.join(marked(row, tokenizer) for row in e.rows)}"]) for e, *worth in list(zip(episodes, *streams.values()))[::args.group_size]))
            if found["malformed"] == 100:
                print(f"warning: no reply had the form of --template {args.template}, so the emotion is worth 0 in every one; raise --max_new_tokens, or take a model that writes the form when asked", flush=True)
            if (step + 1) % args.eval_every == 0:
                score_dev(record)
            clock.append(time.time())
            seconds = dict(zip(("rollout", "update", "evaluate"), np.diff(clock).round(2).tolist()))
            tokens = sum(len(r.ids) for e in episodes for r in e.rows)
            run.log({**record, "seconds": seconds, "tokens_per_second": round(tokens / (clock[2] - clock[0]))})
            dev_text = f"  dev {record['dev_emotion']:.1f}" if "dev_emotion" in record else ""
            rubric_text = f"  rubric {record['reward_rubric']:.2f}" if "reward_rubric" in record else ""
            print(f"step {step + 1:3d}  emotion {record['emotion']:.1f}{dev_text}{rubric_text}  entropy {record['entropy']:.2f}  kl {record['kl']:.4f}  grad {record['grad_norm']:.2f}  "
                  f"{record['tokens']:.0f} tokens/reply  rollout {seconds['rollout']:.0f} s  update {seconds['update']:.0f} s  {tokens / (clock[2] - clock[0]):.0f} tokens/s", flush=True)
            stopping = bool(ranks.total(int(stop.asked)))      # read once: a Ctrl-C from here on is seen by the next step
            if (step + 1) % args.save_every == 0 or step + 1 == args.steps or stopping:
                checkpoint(step + 1)
            if stopping:
                print(f"saved {run.path}; go on with: python train_grpo.py --resume {run.path}")
                return

    # ------------------------------------------------------------------------------------------ what it learned
    if args.final_repeats and run.writes:
        folders = {"base": source, "cold start": init, "RL (best dev)": run.path / "best"}
        if init == source:
            del folders["cold start"]
        try:
            results = evaluate.closing_table(folders, heldout, args.final_repeats, users, dtype, device, args.seed, how, states=args.curriculum != "no-states", **talk)
        except BudgetSpent as e:
            die(f"{e}; the run is saved, only the closing table is missing: --resume {run.path} --server_calls N")
        (run.path / "result.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(f"{run.best()}    to look at: {run.path}/report.html    next: python evaluate.py run --model {run.path}    python chat.py --model {run.path}")


if __name__ == "__main__":
    main()
