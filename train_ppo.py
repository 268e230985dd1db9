"""
PPO on a simulated user's emotion, whole algorithm top to bottom: talk, score, compare with what a critic expected, step.

Against GRPO it adds a value function: what a dialogue is worth is compared with the critic's guess, token by token, not with
K - 1 other dialogues of the same scenario. Against textbook PPO it adds an asymmetric clip and a dual clip, and a critic that
is told the emotion so far, so that its head only has to learn what is still to come. Diff it with train_grpo.py: the same
sections in the same order, and what differs is the algorithm.

    python train_ppo.py                           laptop: SmolLM2-135M, cold start, then RL; 20-25 minutes on 2 cores
    python train_ppo.py --preset gpu              Qwen2.5-0.5B-Instruct on one GPU
    python train_ppo.py --resume runs/ppo         go on, bit for bit
"""
import json
import time
from copy import deepcopy
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import evaluate
import ranks
from appraisal import INTENTS
from backend import BudgetSpent, add_user_flags, check_rewards, check_user, make_rewards, make_users
from curriculum import Curriculum, add_curriculum_flags, read_settings
from episode import critic_rows, marked, training_batches, transcript
from memory import adamw, tokens_or_auto
from memory import check as check_memory
from model import Critic, token_logprobs
from report import training_page
from rollout import AFTER, Chat, add_template_flags, check_budget, check_template, overlapped, rollout
from rubric import add_reward_flags
from rundir import Flags, RunDir, StopOnInterrupt, die, nonnegative, positive, seed_number
from scenarios import STATES, load_scenarios
from train_sft import cold_start, load_demonstrations
from weights import DTYPES, build, load, pick_device, pick_dtype, resolve, save

# ---------------------------------------------------------------------------------------------- flags
PRESETS = {   # every flag on the command line overrides its preset
    "laptop": dict(model="smollm2-135m", cold_start="data/demonstrations.jsonl", steps=9, groups=64, group_size=1, max_turns=5, max_new_tokens=48, max_tokens=1024,
                   temperature=0.8, lr=1e-4, critic_lr=5e-5, critic="shared", critic_warmup=10, minibatches=4, epochs=1, train_layers=15, gae="turn", lam=0.5, tokens_per_microbatch=4096),
    "gpu": dict(model="Qwen/Qwen2.5-0.5B-Instruct", cold_start="none", steps=200, groups=64, group_size=2, max_turns=8, max_new_tokens=128, max_tokens=2048,
                temperature=1.0, lr=1e-6, critic_lr=5e-6, critic="separate", critic_warmup=20, minibatches=4, epochs=1, train_layers=0, gae="token", lam=0.95, tokens_per_microbatch="auto"),
}
p = Flags(description=__doc__, epilog="flags marked *, by preset:\n" + "\n".join(f"  {name}: {' '.join(f'{k}={v}' for k, v in values.items())}" for name, values in PRESETS.items()))
p.add_argument("--preset", default="auto", choices=["auto", *PRESETS], help="auto = gpu on an accelerator, else laptop; sets the flags marked *")
p.add_argument("--run", default="runs/ppo", help="folder of this run; must not exist (default: %(default)s)")
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
p.add_argument("--group_size", type=positive(int), help="* K, dialogues of each scenario; 1 is enough: the critic is the baseline")
p.add_argument("--max_turns", type=positive(int), help="* replies a dialogue")
p.add_argument("--max_new_tokens", type=positive(int), help="* tokens a reply, its thoughts included")
add_template_flags(p)
p.add_argument("--overlap", action="store_true", help="with a served user: play the dialogues in two halves, one decoding while the other's users think")
p.add_argument("--max_tokens", type=positive(int), help="* tokens a dialogue, everything counted")
p.add_argument("--temperature", type=positive(float), help="* of sampling and of the loss")
# ---- reward and advantage
add_reward_flags(p)
p.add_argument("--reward_at", default="end", choices=["end", "turn"], help="when the emotion is paid: the final one at the end, or each change with the reply that made it; with --gamma 1 the same advantages, since the critic is told the emotion so far (default: %(default)s)")
p.add_argument("--gae", choices=["token", "turn"], help="* token: a value before every policy token; turn: one value a reply, before its first token, and one advantage for all its tokens")
p.add_argument("--gamma", type=nonnegative(float), default=1.0, help="discount per policy token, or per reply with --gae turn (default: %(default)s)")
p.add_argument("--lam", type=nonnegative(float), help="* lambda of GAE: 0 trusts the critic's next value, 1 what really happened")
p.add_argument("--adaptive_lam", action="store_true", help="lambda 1 - 1/(.4 L) for the actor, L decisions in the dialogue, and 1 for the critic's targets (after VAPO, arXiv 2504.05118)")
# ---- critic
p.add_argument("--critic", choices=["shared", "separate"], help="* shared: a value head on the policy's trunk; separate: on a trunk of its own, a copy at the start (RLVER)")
p.add_argument("--critic_sees", default="dialogue", choices=["dialogue", "need"], help="need: the critic also reads the user's hidden need and state, which the policy never sees; with --critic separate (default: %(default)s)")
p.add_argument("--critic_lr", type=positive(float), help="* learning rate of the value head, and of the critic's own trunk")
p.add_argument("--critic_warmup", type=nonnegative(int), help="* optimiser steps of the critic alone, on the first batch of dialogues, before the policy moves")
p.add_argument("--value_coef", type=nonnegative(float), default=0.1, help="weight of the value loss: how much it bends the policy's features where the trunk is shared (default: %(default)s)")
p.add_argument("--value_clip", type=nonnegative(float), default=0.0, help="the loss counts a value's step away from its old self only up to this; 0 = off (default: %(default)s; RLVER: 0.5)")
p.add_argument("--value_bound", action="store_true", help="squash values into [0, 1], where the final emotion lives")
# ---- loss and optimiser
p.add_argument("--steps", type=positive(int), help="* batches of groups x group_size new dialogues")
p.add_argument("--minibatches", type=positive(int), help="* optimiser steps per pass over a batch of dialogues, each on its share of the groups")
p.add_argument("--epochs", type=positive(int), help="* passes over each batch of dialogues")
p.add_argument("--lr", type=positive(float), help="* learning rate of AdamW")
p.add_argument("--clip_low", type=positive(float), default=0.2, help="ratio clip below 1 (default: %(default)s)")
p.add_argument("--clip_high", type=positive(float), default=0.28, help="ratio clip above 1 (default: %(default)s, clip-higher)")
p.add_argument("--dual_clip", type=positive(float), default=3.0, help="bound of the ratio where the advantage is negative (default: %(default)s)")
p.add_argument("--kl", type=nonnegative(float), default=0.0, help="weight of the penalty for leaving the initial policy; above 0 keeps a frozen copy, or switches the adapters off with --lora (default: %(default)s)")
p.add_argument("--kl_in", default="loss", choices=["loss", "reward"], help="loss: as k3, per token; reward: logp - logp_reference off each token's reward, so that the critic sees it (default: %(default)s)")
p.add_argument("--target_kl", type=nonnegative(float), default=0.0, help="drop the rest of a batch once a mini-batch's mean KL to the sampling policy is above this; 0 = off (default: %(default)s)")
p.add_argument("--entropy", type=nonnegative(float), default=0.0, help="weight of the entropy bonus (default: %(default)s)")
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
def told(args, chat, e):
    """What the critic reads before the dialogue, ids: with --critic_sees need what the policy isn't told; it may, since the user is simulated."""
    return [] if args.critic_sees == "dialogue" else chat.turn("system", f"What this person needs, unsaid: {e.scenario.hidden_need} ({e.scenario.intent}){f' State: {e.state}' if e.state else ''}") + chat.newline


def gae(rewards, values, mask, beyond, gamma, lam):
    """Generalised advantage estimation over the places where mask is set, whatever lies between them (Schulman et al. 2016).

    rewards, values, mask (B, T); beyond (B,), the value after the last place; lam a number or (B,). -> advantages (B, T), 0 off the mask;
    the returns are advantages + values. The next value of a place is that of the next *set* place: user tokens do not exist here.
    Example, gamma = lam = 1: rewards [0, 7, 1], values [.2, 7, .5], mask [1, 0, 1], beyond 0 -> [.8, 0, .5].
    """
    out, following, carried = torch.zeros_like(values), beyond.clone(), torch.zeros_like(beyond)
    for t in reversed(range(values.shape[1])):
        here = mask[:, t]
        delta = rewards[:, t] + gamma * following - values[:, t]                                      # (B,)
        carried = torch.where(here, delta + gamma * lam * carried, carried)
        following = torch.where(here, values[:, t], following)
        out[:, t] = carried * here
    return out


@torch.no_grad()
def advantages(args, model, critic, reference, chat, episodes, streams, lam):
    """Values of all policy tokens, then GAE. A shared critic reads the states that sampling has computed; a separate one costs a forward.

    lam: a number, replaced by each dialogue's own with --adaptive_lam. -> dict of (E, P) tensors on the CPU, E episodes, P policy
    tokens: mask; known, the emotion so far / 100; decide, where values are learned (every policy token, or the first of each reply); value;
    target of the value; advantage, whitened over the policy tokens of the whole batch (divided by max(std, .01): no noise is blown up).

    streams: name -> rewards, as rubric.Rewards gives them. The emotion's e_T / 100 is paid at the last place of the dialogue that decides, with --gae token its last policy token,
    or with --reward_at turn each change at the last such place of its reply, and then the value is the change still to come; the KL penalty of
    --kl_in reward where it arises (`reference` is None otherwise). A further stream has no critic, since its turns are centred already: its advantages are GAE
    with value 0, whitened by themselves, and added with weight mu. A dialogue that a budget cut is not finished: `beyond` adds the change that
    the critic still expected, V - known, since V counts the emotion so far, which has just been paid. A user who left adds nothing.
    Three numbers for the metrics: explained_variance, 1 - Var(R - value) / Var(R - known) with R the lambda-1 return: how much of the change still to
    come the critic foresaw (0 untrained, 1 at best, below 0 worse than saying nothing); bootstrap, the mean of `beyond`; kl_reference, if measured.
    """
    device = model.model.embed_tokens.weight.device
    use = [i for i, e in enumerate(episodes) if e.finish != "user_failed"]
    turns = {i: [t for row in episodes[i].rows for t in row.turn if t >= 0] + [len(episodes[i].turns)] * episodes[i].truncated for i in use}
    E, P = len(episodes), max(map(len, turns.values()), default=1)
    value, emotion, penalty, turn = torch.zeros(E, P), torch.zeros(E, P), torch.zeros(E, P), torch.full((E, P), -1)
    for i, mine in turns.items():
        e, n = episodes[i], len(mine)
        turn[i, :n], emotion[i, :n] = torch.tensor(mine), torch.tensor([e.start_emotion] + [u.emotion for u in e.turns])[mine] / 100
    known = emotion if args.reward_at == "end" else torch.zeros(E, P)                                 # what of the return is no news
    for i, mine in turns.items():
        e, n = episodes[i], len(mine)
        if critic.own is None:
            value[i, :n] = critic(torch.cat(e.states)[:n], known[i, :n].to(device)).cpu()
    if critic.own is not None:
        for ids, branches, source, _, _, episode, place, _ in ranks.even(training_batches(episodes, use, args.tokens_per_microbatch, device, lambda e: critic_rows(chat, e, told(args, chat, e), beyond=True)), critic.own, learns=False):
            value[episode, place] = critic(critic.own(ids, branches=branches).flatten(0, 1)[source], known[episode, place].to(device)).cpu()     # (B, T), then (N,)
    if reference is not None:
        for ids, branches, source, target, old, episode, place, _ in ranks.even(training_batches(episodes, use, args.tokens_per_microbatch, device), reference, learns=False):
            with reference.without_adapters():
                logp_reference, _ = token_logprobs(reference, reference(ids, branches=branches).flatten(0, 1)[source], target, chat.banned.to(device), args.temperature)
            penalty[episode, place] = args.kl * (old - logp_reference).cpu()
    mask, all_rows, places = turn >= 0, torch.arange(E), torch.arange(P)
    cut, last = torch.tensor([e.truncated for e in episodes]), (mask.sum(1) - 1).clamp(min=0)
    hope = cut & ~torch.tensor([any(e.malformed) for e in episodes])                                  # a dialogue that is worth 0 hopes for nothing
    beyond = torch.where(hope, ((value - known + emotion).clamp(0, 1) - emotion)[all_rows, last], 0.0) # (E,); nobody can hope for more than 100
    mask[all_rows[cut], last[cut]] = False                 # the policy token that never was
    decide = mask if args.gae == "token" else mask & (turn != F.pad(turn, (1, 0), value=-1)[:, :-1])
    start = torch.where(decide, places, 0).cummax(1).values                                           # (E, P): the place that decides for this token
    ends = [{int(turn[i, k]): int(k) for k in decide[i].nonzero()[:, 0]} for i in range(E)]            # reply -> its last place that decides
    def paid(rewards):                                     # (E, P): each reply's reward where the reply ends
        out = torch.zeros(E, P)
        for i, r in enumerate(rewards):
            for t, x in enumerate(r.turns if r is not None else []):
                out[i, ends[i][t]] = x
        return out
    reward = torch.zeros(E, P).scatter_add_(1, start, -penalty * mask)
    if args.reward_at == "turn":
        reward += paid(streams["emotion"])
    else:
        reward[all_rows, (decide * places).amax(1)] += torch.tensor([r.total if r is not None else 0.0 for r in streams["emotion"]])
    returns = value + gae(reward, value, decide, beyond, args.gamma, 1.0)
    lam = (1 - 1 / (0.4 * decide.sum(1))).clamp(min=0) if args.adaptive_lam else lam
    advantage = gae(reward, value, decide, beyond, args.gamma, lam)
    target = returns if args.adaptive_lam else value + advantage
    def whitened(a):
        a = a.gather(1, start)                                                                        # a reply's advantage for each of its tokens
        mean, std = ranks.mean_std(a[mask])
        return (a - mean) / std.clamp(min=0.01)
    advantage = whitened(advantage)
    for name in list(streams)[1:]:
        advantage = advantage + args.mu * whitened(gae(paid(streams[name]), torch.zeros(E, P), decide, torch.zeros(E), args.gamma, lam))
    variance = lambda x: ranks.mean_std(x[decide])[1].square().clamp(min=1e-8)
    metrics = {"explained_variance": 1 - variance(returns - value) / variance(returns - known), "bootstrap": ranks.mean_std(beyond[use])[0]}
    if reference is not None:
        metrics["kl_reference"] = ranks.mean_std(penalty[mask])[0] / args.kl
    return {"mask": mask, "known": known, "decide": decide, "value": value, "target": target, "advantage": advantage, "metrics": {k: v.item() for k, v in metrics.items()}}


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


def value_loss(args, critic, b, episode, place, hidden):
    """Half the squared error of the values at those of N policy tokens that decide, (M,). episode, place: where the N stand in b's tensors; hidden (N, D):
    the trunk's states before them. With --value_clip the value held within that of its old self is scored too, and the larger error counts."""
    device, decide = critic.head.weight.device, b["decide"][episode, place].nonzero()[:, 0]
    old, target, known = (b[name][episode, place][decide].to(device) for name in ("value", "target", "known"))        # (M,)
    value = critic(hidden[decide.to(device)], known)                                                  # (M,)
    error = (value - target).square()
    if args.value_clip > 0:
        error = torch.maximum(error, (old + (value - old).clamp(-args.value_clip, args.value_clip) - target).square())
    return 0.5 * error


def critic_backward(args, critic, chat, episodes, b, use, deciding, device):
    """Gradients of a separate critic's value loss on episodes `use`. -> its sum, without gradient."""
    total = torch.zeros((), device=device)
    for ids, branches, source, _, _, episode, place, _ in ranks.even(training_batches(episodes, use, args.tokens_per_microbatch, device, lambda e: critic_rows(chat, e, told(args, chat, e))), critic.own):
        error = value_loss(args, critic, b, episode, place, critic.own(ids, branches=branches).flatten(0, 1)[source]).sum()
        (args.value_coef * error / deciding).backward()
        total += error.detach()
    return total


def warm_up(args, model, critic, optimizer, chat, episodes, b):
    """`critic_warmup` optimiser steps of the critic alone, the policy frozen, on the mini-batches of this batch in turn."""
    device = critic.head.weight.device
    for minibatch in range(args.critic_warmup):
        use = [i for i, e in enumerate(episodes) if e.group % args.minibatches == minibatch % args.minibatches and e.finish != "user_failed"]
        deciding = ranks.total(int(b["decide"][use].sum())).item() / ranks.WORLD
        if not deciding:
            continue
        if critic.own is None and use:                     # the policy's trunk doesn't move: its states are those of the rollout
            episode, place = b["mask"].nonzero()[torch.isin(b["mask"].nonzero()[:, 0], torch.tensor(use))].T.tolist()
            hidden = torch.cat([s for i in use for s in episodes[i].states[:len(episodes[i].states) - episodes[i].truncated]])
            (args.value_coef * value_loss(args, critic, b, episode, place, hidden).sum() / deciding).backward()     # as in update: Adam remembers the scale
        elif critic.own is not None:
            critic_backward(args, critic, chat, episodes, b, use, deciding, device)
        ranks.average_gradients([q for q in critic.parameters() if q.requires_grad])
        ranks.clip(critic.parameters(), args.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def update(args, model, critic, reference, optimizer, chat, episodes, b):
    """`epochs` passes over all dialogues, each in `minibatches` optimiser steps, whole groups together. -> metrics over every policy token seen.

    The first step is on-policy (ratio 1), the later ones slightly off it, which the ratio corrects and the clip bounds.
    """
    device = model.model.embed_tokens.weight.device
    banned = chat.banned.to(device)
    parameters = [q for q in model.parameters() if q.requires_grad]
    names = ("tokens", "entropy", "kl", "kl_reference", "clip_low", "clip_high", "ratio", "first_tokens", "ratio_first", "canary", "value_loss")
    sums, norms, critic_norms, decisions = {k: torch.zeros((), device=device) for k in names}, [], [], 0
    for minibatch in range(args.epochs * args.minibatches):
        use = [i for i, e in enumerate(episodes) if e.group % args.minibatches == minibatch % args.minibatches]
        # a constant, not the number of tokens sampled: neither padding, micro-batching nor a reply's length changes a token's weight
        denominator = len(use) * args.max_turns * args.max_new_tokens
        use = [i for i in use if episodes[i].finish != "user_failed"]
        deciding = ranks.total(int(b["decide"][use].sum())).item() / ranks.WORLD           # a rank's share of what all of them learn from
        if not deciding:
            continue
        before = sums["kl"].clone()
        for ids, branches, source, target, old, episode, place, turn in ranks.even(training_batches(episodes, use, args.tokens_per_microbatch, device), model, reference):     # (B, T), then N each
            advantage = b["advantage"][episode, place].to(device)                                                     # (N,)
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
            if args.entropy > 0:
                loss = loss - args.entropy * entropy
            loss = loss.sum() / denominator
            if critic.own is None:
                error = value_loss(args, critic, b, episode, place, hidden).sum()
                loss = loss + args.value_coef * error / deciding
                sums["value_loss"] += error.detach()
            loss.backward()
            with torch.no_grad():
                first = float(minibatch == 0)              # before any step: sampler and trainer are the same weights
                for k, v in (("tokens", torch.ones_like(old)), ("entropy", entropy), ("kl", (ratio - 1) - (logp - old)), ("ratio", ratio),
                             ("clip_low", ((ratio < 1 - args.clip_low) & (advantage < 0)).float()), ("clip_high", ((ratio > 1 + args.clip_high) & (advantage > 0)).float()),
                             ("first_tokens", torch.full_like(old, first)), ("ratio_first", first * ratio), ("canary", first * (logp - old).abs())):
                    sums[k] += v.sum()
        if critic.own is not None:                         # after the policy's, so that the two graphs never stand side by side
            sums["value_loss"] += critic_backward(args, critic, chat, episodes, b, use, deciding, device)
        decisions += deciding * ranks.WORLD
        if args.target_kl > 0 and ranks.total(sums["kl"] - before).item() > args.target_kl * ranks.total(int(b["mask"][use].sum())).item():
            optimizer.zero_grad(set_to_none=True)          # too far from the policy that sampled this batch: drop the rest of it
            break
        ranks.average_gradients(parameters + [q for q in critic.parameters() if q.requires_grad])
        norms.append(ranks.clip(parameters, args.grad_clip))
        critic_norms.append(ranks.clip(critic.parameters(), args.grad_clip))     # apart: the head's error doesn't shorten the policy's step
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    sums = {k: ranks.total(v).item() for k, v in sums.items()}       # the metrics stay on the device until here
    if reference is None:
        del sums["kl_reference"]                           # not measured is not 0
    n, first = max(sums.pop("tokens"), 1.0), max(sums.pop("first_tokens"), 1.0)
    first = {k: sums.pop(k) / first for k in ("ratio_first", "canary")}
    value_error = sums.pop("value_loss") / max(decisions, 1)
    mean = lambda xs: torch.stack(xs).mean().item() if xs else 0.0
    return {**{k: v / n for k, v in sums.items()}, **first, "policy_tokens": int(n), "grad_norm": mean(norms), "critic_grad_norm": mean(critic_norms), "value_loss": value_error, "optimizer_steps": len(norms)}


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
    for name in ("gamma", "lam"):
        if getattr(args, name) > 1:
            die(f"--{name} {getattr(args, name)}: must be at most 1")
    if args.value_bound and args.reward_at == "turn":
        die("--value_bound: holds the final emotion in [0, 1]; with --reward_at turn the value is a change, which may be negative: leave one of them out")
    if args.critic_sees == "need" and args.critic == "shared":
        die("--critic_sees need: a shared trunk would show it to the policy too; add --critic separate")
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
                 policies=1 + (args.critic == "separate"), frozen=int(args.kl > 0), checkpointed=args.checkpoint_layers, offload=args.offload_optimizer, shards=ranks.WORLD if args.fsdp else 1)
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
    critic = Critic(model, args.critic == "separate", args.value_bound)
    how = dict(template=args.template, memories=memories, perceived=perceived)
    chat = Chat(tokenizer, model.config.vocab, **how)
    users = make_users(args, (model, chat), dtype, device)      # before a checkpoint is loaded: lm:self is the policy before RL
    stack = make_rewards(args, memories, dtype, device)
    prefix = max(len(chat.plain(s.hidden_need)) + 64 for s in train + dev + heldout) if args.critic_sees == "need" else 0
    if args.max_tokens + AFTER + prefix >= model.config.max_positions:
        die(f"--max_tokens {args.max_tokens}: the critic also reads a last line and {prefix} tokens of its own, {args.max_tokens + AFTER + prefix} in all; this model knows {model.config.max_positions} positions")
    check_budget(model, chat, train + dev + heldout, args.max_new_tokens, args.max_tokens)
    run = run or RunDir.create(args.run, config)
    run.configure(config)
    reference = None if args.kl == 0 else model if args.lora else deepcopy(model).requires_grad_(False)
    if state is not None:
        model.load_state_dict(state["model"])
        critic.load_state_dict(state["critic"])
    if args.fsdp:
        for network in filter(None, (model, reference, critic.own)):
            ranks.shard(network)
    parameters = [q for q in model.parameters() if q.requires_grad]
    learners = [{"params": [q for q in part.parameters() if q.requires_grad], "lr": lr} for part, lr in ((model, args.lr), (critic.own, args.critic_lr), (critic.head, args.critic_lr)) if part is not None]
    optimizer = adamw(learners, args.offload_optimizer)
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
    print(f"critic: {args.critic}, {count(critic.parameters()):,} parameters of its own; {args.critic_warmup} optimiser steps of it alone on the first batch")
    print(f"a step: {f'{ranks.WORLD} processes with together ' * (ranks.WORLD > 1)}{args.groups} groups x {args.group_size} = {args.groups * args.group_size} dialogues of <= {args.max_turns} replies of <= {args.max_new_tokens} tokens, then {args.epochs} x {args.minibatches} optimiser steps")
    print(f"the reward is {users.note}; {len(train)} training, {len(dev)} dev, {len(heldout)} held-out scenarios")

    # ------------------------------------------------------------------------------------------ evaluation
    def checkpoint(step, pending=None):
        """pending: the record of this step, where its dev score is still to come."""
        run.save({"model": ranks.whole(model.state_dict()), "critic": ranks.whole(critic.state_dict()), "optimizer": ranks.whole(optimizer.state_dict()), "curriculum": controller.state_dict(), "rewards": ranks.everyone([stack.state()]), "step": step, "best": best, "pending": json.dumps(pending)})

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
                    episodes = within_budget(lambda: (overlapped if args.overlap else rollout)(model, chat, users, jobs, args.group_size, generator=generator, progress=bar, keep_states=critic.own is None, **talk), step)
            clock.append(time.time())
            for e in episodes:
                e.group += first
            if not ranks.total(sum(e.finish != "user_failed" for e in episodes)):
                checkpoint(step)
                die(f"every simulated user failed in step {step + 1}{users.trouble()}; mend the user, then go on with --resume {run.path}")

            streams = stack.streams(episodes, within_budget(lambda: stack.marks(episodes), step))
            rewards = streams["emotion"]
            judge = lambda lam: advantages(args, model, critic, reference if args.kl_in == "reward" else None, chat, episodes, streams, lam)
            warming = step == 0 and args.critic_warmup > 0
            b = judge(1.0 if warming else args.lam)
            foreseen = b["metrics"]                        # before this batch has taught the critic anything
            if warming:                                    # lambda 1: towards what really happened, since this critic knows nothing yet
                cold, _ = b, warm_up(args, model, critic, optimizer, chat, episodes, b)
                b = judge(args.lam)
                foreseen |= {name: 0.5 * (v["value"] - cold["target"])[v["decide"]].square().mean().item() for name, v in (("value_loss_cold", cold), ("value_loss_warm", b))}
            metrics = {**update(args, model, critic, reference if args.kl_in == "loss" else None, optimizer, chat, episodes, b), **foreseen}
            clock.append(time.time())
            # sampler and trainer are one network: a gap here means a broken mask, cache or temperature (pitfalls 12, 18)
            limit = {torch.float32: 1e-3, torch.bfloat16: 0.08}[dtype]
            if metrics["canary"] > limit:
                print(f"warning: mean |logp trained - logp sampled| is {metrics['canary']:.4f}, above {limit} for {dtype}", flush=True)

            # the outer loop sees the outcomes that were just paid for, after the optimizer step; a group whose user failed somewhere is not complete
            for e in episodes:
                e.states = []                              # the critic has read them
            episodes, streams = ranks.everyone(episodes), {name: ranks.everyone(rows) for name, rows in streams.items()}
            rewards = streams["emotion"]
            outcomes = controller.update([(intents[g], states[g], [e.outcome for e in episodes if e.group == g and e.finish != "user_failed"]) for g in range(args.groups)])
            found = evaluate.summary(episodes)
            record = {"step": step + 1, "reward": float(np.mean([r.total for r in rewards if r is not None])), **{f"reward_{name}": float(np.mean([r.parts[name] for r in rewards if r is not None])) for name in next(r for r in rewards if r is not None).parts if name != "emotion"}, **stack.report(), **metrics,
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
            print(f"step {step + 1:3d}  emotion {record['emotion']:.1f}{dev_text}{rubric_text}  entropy {record['entropy']:.2f}  kl {record['kl']:.4f}  grad {record['grad_norm']:.2f}  critic explains {record['explained_variance']:.2f}  "
                  f"{record['tokens']:.0f} tokens/reply  rollout {seconds['rollout']:.0f} s  update {seconds['update']:.0f} s  {tokens / (clock[2] - clock[0]):.0f} tokens/s", flush=True)
            stopping = bool(ranks.total(int(stop.asked)))      # read once: a Ctrl-C from here on is seen by the next step
            if (step + 1) % args.save_every == 0 or step + 1 == args.steps or stopping:
                checkpoint(step + 1)
            if stopping:
                print(f"saved {run.path}; go on with: python train_ppo.py --resume {run.path}")
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
