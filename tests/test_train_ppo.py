"""PPO's GAE, critic, loss and update by brute force and closed forms; a bandit it must solve; runs that resume; LoRA."""
import inspect
import json
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import backend
import train_grpo
import train_ppo
from conftest import ROOT, hf_model, ours
from episode import critic_rows
from model import Critic
from rollout import Chat, rollout
from rubric import Reward, score
from scenarios import load_scenarios
from simulator import ScriptedUsers, UserTurn
from test_train_grpo import SCENARIOS, TINY, metrics
from train_ppo import advantages, gae, told, update, value_loss, warm_up
from weights import load, save

ARGS = SimpleNamespace(max_turns=3, max_new_tokens=6, tokens_per_microbatch=100000, temperature=0.9, clip_low=0.2, clip_high=0.28, dual_clip=3.0, kl=0.0, grad_clip=1e9, minibatches=1, epochs=1,
                       gae="token", gamma=1.0, lam=0.95, adaptive_lam=False, critic_sees="dialogue", critic_warmup=0, value_coef=0.5, value_clip=0.0, target_kl=0.0, entropy=0.0, reward_at="end", mu=0.2)


def settings(**changed):
    return SimpleNamespace(**{**vars(ARGS), **changed})


@pytest.fixture
def batch(tiny_chat):
    """Six sampled dialogues of two scenarios, the model that sampled them, and a critic with an opinion."""
    model, chat = tiny_chat
    model = deepcopy(model)
    episodes = rollout(model, chat, ScriptedUsers(), [(s, None) for s in load_scenarios(SCENARIOS, "dev")[:2]], 3, 3, 6, 1024, 0.9, torch.Generator().manual_seed(0), keep_states=True)
    critic = Critic(model)
    torch.nn.init.normal_(critic.head.weight, std=0.05, generator=torch.Generator().manual_seed(3))
    return model, chat, episodes, critic


def judge(args, model, critic, chat, episodes, reference=None):
    return advantages(args, model, critic, reference, chat, episodes, {"emotion": score(episodes)}, args.lam)


# ---------------------------------------------------------------------------------------------- GAE
def brute_force(rewards, values, mask, beyond, gamma, lam):
    """The double sum: A_t = sum_k (gamma lam)^k delta_{t+k} over the set places of one row, written out."""
    out = torch.zeros_like(values)
    for b in range(len(values)):
        places = [t for t in range(values.shape[1]) if mask[b, t]]
        following = [values[b, t].item() for t in places[1:]] + [beyond[b].item()]
        deltas = [rewards[b, t].item() + gamma * f - values[b, t].item() for t, f in zip(places, following)]
        l = lam if isinstance(lam, float) else lam[b].item()
        for i, t in enumerate(places):
            out[b, t] = sum((gamma * l) ** k * d for k, d in enumerate(deltas[i:]))
    return out


@pytest.mark.parametrize("gamma,lam", [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.7, 0.0), (1.0, torch.tensor([0.0, 0.3, 0.95, 1.0, 0.5]))])
def test_gae_by_brute_force_on_random_masks(gamma, lam):
    g = torch.Generator().manual_seed(0)
    for _ in range(20):
        rewards, values, mask = torch.randn(5, 17, generator=g), torch.randn(5, 17, generator=g), torch.rand(5, 17, generator=g) < 0.4
        beyond = torch.randn(5, generator=g)
        assert torch.allclose(gae(rewards, values, mask, beyond, gamma, lam), brute_force(rewards, values, mask, beyond, gamma, lam), atol=1e-4)


def test_the_example_of_the_docstring():
    got = gae(torch.tensor([[0.0, 7, 1]]), torch.tensor([[0.2, 7, 0.5]]), torch.tensor([[True, False, True]]), torch.zeros(1), 1.0, 1.0)
    assert torch.allclose(got, torch.tensor([[0.8, 0.0, 0.5]]))


def test_pitfall_21_user_tokens_inserted_anywhere_change_nothing():
    """GAE that runs over user tokens decays, or leaks their values, across the user's turn (miles#1827)."""
    g = torch.Generator().manual_seed(1)
    rewards, values, beyond = torch.randn(1, 9, generator=g), torch.randn(1, 9, generator=g), torch.randn(1, generator=g)
    plain = gae(rewards, values, torch.ones(1, 9, dtype=torch.bool), beyond, 0.9, 0.8)
    for _ in range(20):
        at = torch.randperm(30, generator=g)[:9].sort().values
        r, v, m = torch.randn(1, 30, generator=g), torch.randn(1, 30, generator=g), torch.zeros(1, 30, dtype=torch.bool)
        r[0, at], v[0, at], m[0, at] = rewards[0], values[0], True
        assert torch.allclose(gae(r, v, m, beyond, 0.9, 0.8)[0, at], plain[0], atol=1e-6)


def test_pitfall_20_truncated_and_finished_differ_by_the_bootstrap(batch):
    """A dialogue that a budget cut goes on in the critic's eyes (cleanrl#198); one that the user ended doesn't. `finish` alone decides."""
    model, chat, episodes, critic = batch
    args = settings(gamma=0.9, lam=0.8)
    for e in episodes:
        assert e.finish == "max_turns" and e.truncated and e.beyond[-len(chat.reply):] == chat.reply and e.turns[-1].text in chat.tokenizer.decode(e.beyond) and e.beyond[:len(e.rows[0].ids)] == e.rows[0].ids
    cut = judge(args, model, critic, chat, episodes)
    ended = judge(args, model, critic, chat, [replace(e, finish="goodbye") for e in episodes])
    assert torch.allclose(cut["value"][cut["mask"]], ended["value"][ended["mask"]], atol=1e-5) and torch.equal(cut["mask"][:, :ended["mask"].shape[1]], ended["mask"])
    for i, e in enumerate(episodes):
        n = int(cut["mask"][i].sum())
        hidden = model(torch.tensor([e.beyond]))[0, -1:]           # the state in which the policy would speak next
        beyond = (critic(hidden, torch.tensor([e.emotion / 100])).clamp(0, 1) - e.emotion / 100).item()
        want = torch.tensor([0.9 * (0.9 * 0.8) ** (n - 1 - t) * beyond for t in range(n)])
        assert abs(beyond) > 1e-3 and torch.allclose(cut["target"][i, :n] - ended["target"][i, :n], want, atol=1e-5)


@pytest.mark.parametrize("finish,truncated", [("success", False), ("failure", False), ("goodbye", False), ("user_failed", False), ("max_turns", True), ("max_tokens", True)])
def test_which_ends_are_ends(batch, finish, truncated):
    assert replace(batch[2][0], finish=finish).truncated == truncated


@pytest.mark.parametrize("kind", ["token", "turn"])
def test_advantages_of_dialogues_by_brute_force(batch, kind):
    """From the episodes up, row by row: rewards at the last policy token, or reply by reply with one value each; whitened over all policy tokens."""
    model, chat, episodes, critic = batch
    args = settings(gae=kind, gamma=0.95, lam=0.7, tokens_per_microbatch=1)
    episodes[0] = replace(episodes[0], finish="goodbye")
    got, raw = judge(args, model, critic, chat, episodes), []
    for i, e in enumerate(episodes):
        row = e.rows[0]
        emotions = [e.start_emotion] + [t.emotion for t in e.turns]
        hidden = model(torch.tensor([e.beyond or row.ids]))[0]
        at = [j for j, m in enumerate(row.mask) if m]
        V = critic(hidden[[j - 1 for j in at]], torch.tensor([emotions[row.turn[j]] / 100 for j in at]))
        beyond = critic(hidden[-1:], torch.tensor([e.emotion / 100])).clamp(0, 1) - e.emotion / 100 if e.truncated else torch.zeros(1)
        decide = [kind == "token" or k == 0 or row.turn[j] != row.turn[at[k - 1]] for k, j in enumerate(at)]
        reward = torch.zeros(1, len(at))
        reward[0, max(k for k, d in enumerate(decide) if d)] = e.emotion / 100
        A = brute_force(reward, V[None], torch.tensor([decide]), beyond, 0.95, 0.7)[0]
        n = len(at)
        assert torch.allclose(got["value"][i, :n], V, atol=1e-5) and got["decide"][i, :n].tolist() == decide and not got["mask"][i, n:].any()
        assert torch.allclose(got["target"][i, :n][got["decide"][i, :n]], (A + V)[torch.tensor(decide)], atol=1e-5)
        raw.append(torch.stack([A[max(m for m in range(k + 1) if decide[m])] for k in range(n)]))
    flat = torch.cat(raw)
    want = torch.cat([(r - flat.mean()) / flat.std(correction=0) for r in raw])
    assert torch.allclose(got["advantage"][got["mask"]], want, atol=1e-3)
    assert (got["decide"].sum(1) == 3).all() == (kind == "turn")


def test_paying_at_the_end_is_paying_as_it_comes(batch):
    """With gamma 1 and a critic that is told the emotion so far, e_T at the end and its changes reply by reply give the same advantages
    (potential-based shaping, Ng et al. 1999): why RLVER's reward needs no turn credit here."""
    model, chat, episodes, critic = batch
    b = judge(settings(lam=0.6), model, critic, chat, episodes)
    change, reward = b["value"] - b["known"], torch.zeros_like(b["value"])
    beyond = torch.zeros(len(episodes))
    for i, e in enumerate(episodes):
        ids = torch.tensor([e.beyond])
        beyond[i] = critic(model(ids)[0, -1:], torch.tensor([e.emotion / 100])).clamp(0, 1)[0] - e.emotion / 100
        turns = [t for t in e.rows[0].turn if t >= 0]
        for t, u in enumerate(e.turns):
            reward[i, max(k for k, x in enumerate(turns) if x == t)] = u.change / 100
    A = gae(reward, change, b["mask"], beyond, 1.0, 0.6)
    assert torch.allclose((b["target"] - b["value"])[b["mask"]], A[b["mask"]], atol=1e-4)


@pytest.mark.parametrize("kind", ["token", "turn"])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reward_at_turn(batch, kind, gamma):
    """Each change paid where its reply ends, the value being the change to come: the double sum; with gamma 1 the same advantages as e_T at the end, with less they differ."""
    model, chat, episodes, critic = batch
    args = settings(gae=kind, gamma=gamma, lam=0.6)
    end, turn = judge(args, model, critic, chat, episodes), judge(settings(**{**vars(args), "reward_at": "turn"}), model, critic, chat, episodes)
    assert not turn["known"].any()
    same = torch.allclose(end["advantage"], turn["advantage"], atol=1e-4)
    assert same == (gamma == 1.0)
    reward = torch.zeros_like(turn["value"])
    for i, e in enumerate(episodes):
        turns = [t for t in e.rows[0].turn if t >= 0]
        for t, u in enumerate(e.turns):
            reward[i, max(k for k, x in enumerate(turns) if x == t and turn["decide"][i, k])] = u.change / 100
    last = [max(k for k in range(turn["decide"].shape[1]) if turn["decide"][i, k]) for i in range(len(episodes))]
    raw = turn["target"] - turn["value"]                   # the advantage before whitening
    beyond = torch.stack([(raw[i, k] + turn["value"][i, k] - reward[i, k]) / gamma for i, k in enumerate(last)])
    assert all(-e.emotion / 100 - 1e-5 <= b <= 1 - e.emotion / 100 + 1e-5 for e, b in zip(episodes, beyond.tolist()))
    assert torch.allclose(raw[turn["decide"]], brute_force(reward, turn["value"], turn["decide"], beyond, gamma, 0.6)[turn["decide"]], atol=1e-4)


@pytest.mark.parametrize("kind", ["token", "turn"])
def test_a_further_stream_is_whitened_by_itself_and_added(batch, kind):
    """A = A_emotion + mu A_rubric: the second stream's by the double sum with value 0, whatever its scale; the critic's targets don't know of it."""
    model, chat, episodes, critic = batch
    rng, args = np.random.default_rng(0), settings(gae=kind, gamma=0.9, lam=0.7, mu=0.3)
    more = [Reward(0.0, {}, rng.normal(size=len(e.turns)).tolist()) for e in episodes]
    plain = judge(args, model, critic, chat, episodes)
    both = advantages(args, model, critic, None, chat, episodes, {"emotion": score(episodes), "rubric": more}, args.lam)
    assert torch.equal(plain["target"], both["target"])
    reward, mask = torch.zeros_like(plain["value"]), plain["mask"]
    for i, r in enumerate(more):
        turns = [t for t in episodes[i].rows[0].turn if t >= 0]
        for t, x in enumerate(r.turns):
            reward[i, max(k for k, u in enumerate(turns) if u == t and plain["decide"][i, k])] = x
    A = brute_force(reward, torch.zeros_like(reward), plain["decide"], torch.zeros(len(more)), 0.9, 0.7)
    start = torch.where(plain["decide"], torch.arange(A.shape[1]), 0).cummax(1).values
    A = A.gather(1, start)
    A = (A - A[mask].mean()) / A[mask].std(correction=0)
    assert torch.allclose((both["advantage"] - plain["advantage"])[mask], 0.3 * A[mask], atol=1e-4)
    scaled = [Reward(0.0, {}, [100 * x for x in r.turns]) for r in more]
    again = advantages(args, model, critic, None, chat, episodes, {"emotion": score(episodes), "rubric": scaled}, args.lam)
    assert torch.allclose(again["advantage"][mask], both["advantage"][mask], atol=1e-4)


def test_length_adaptive_lambda(batch):
    """The actor's lambda is 1 - 1/(.4 L), the critic's target has lambda 1: e_T and what lies beyond, with no value of its own in it."""
    model, chat, episodes, critic = batch
    b = judge(settings(adaptive_lam=True), model, critic, chat, episodes)
    plain = judge(settings(lam=1.0), model, critic, chat, episodes)
    assert torch.allclose(b["target"][b["mask"]], plain["target"][b["mask"]], atol=1e-5)
    L = b["decide"].sum(1)
    reward = torch.zeros_like(b["value"])
    reward[torch.arange(len(L)), L - 1] = torch.tensor([e.emotion / 100 for e in episodes])
    beyond = (plain["target"] - reward.sum(1, keepdim=True))[:, 0]
    A = brute_force(reward, b["value"], b["mask"], beyond, 1.0, 1 - 1 / (0.4 * L))
    flat = A[b["mask"]]
    assert torch.allclose(b["advantage"][b["mask"]], (flat - flat.mean()) / flat.std(correction=0), atol=1e-3)


def test_pitfall_23_equal_rewards_and_an_untrained_critic_move_nothing(batch):
    """Nobody's emotion moved: advantages are rounding errors, and whitening must not blow them up to 1."""
    model, chat, episodes, _ = batch
    for e in episodes:
        for t in e.turns:
            t.emotion = 43
        e.start_emotion = 43
    for bound in (False, True):
        b = judge(ARGS, model, Critic(model, bound=bound), chat, episodes)
        assert b["advantage"].abs().max() < 1e-3


def test_a_real_cut_by_max_tokens(tiny_chat):
    """A dialogue that no longer fits keeps the user's last line, and the critic reads it."""
    model, chat = tiny_chat
    jobs = [(s, None) for s in load_scenarios(SCENARIOS, "dev")[:2]]
    room = max(len(chat.opening(s.opening)) for s, _ in jobs) + 6
    episodes = rollout(model, chat, ScriptedUsers(), jobs, 2, 3, 6, room, 0.9, torch.Generator().manual_seed(0), keep_states=True)
    assert all(e.finish == "max_tokens" and e.truncated and e.beyond and len(e.replies) == 1 for e in episodes)
    assert all(len(e.states) == 2 and len(torch.cat(e.states)) == sum(e.rows[0].mask) + 1 for e in episodes)
    [row] = critic_rows(chat, episodes[0], beyond=True)
    assert row.ids == episodes[0].beyond + [chat.eot] and row.turn[-1] == 1 and sum(row.mask) == sum(episodes[0].rows[0].mask) + 1


def test_a_failed_user_leaves_everything(batch):
    model, chat, episodes, critic = batch
    episodes[1] = replace(episodes[1], finish="user_failed")
    b = judge(ARGS, model, critic, chat, episodes)
    assert not b["mask"][1].any() and abs(b["advantage"][b["mask"]].mean()) < 1e-5
    seen = update(ARGS, model, critic, None, torch.optim.SGD(model.parameters(), lr=0.0), chat, episodes, b)
    assert seen["policy_tokens"] == sum(sum(e.rows[0].mask) for i, e in enumerate(episodes) if i != 1)


# ---------------------------------------------------------------------------------------------- critic
def test_the_states_that_sampling_kept_are_the_trainers(batch):
    """Four ragged turns on a live cache, rows retired and moved: the hidden state before every policy token, and after a cut dialogue's last line, as one forward gives it."""
    model, chat, _, _ = batch
    users = ScriptedUsers(max_turns=3)
    for e in rollout(model, chat, users, [(s, None) for s in load_scenarios(SCENARIOS, "dev")[:3]], 3, 4, 7, 1024, 0.9, torch.Generator().manual_seed(1), keep_states=True):
        row = e.rows[0]
        hidden = model(torch.tensor([e.beyond or row.ids]))[0]
        want = [hidden[[j - 1 for j, t in enumerate(row.turn) if t == k]] for k in range(len(e.turns))] + [hidden[-1:]] * e.truncated
        assert len(want) == len(e.states) and all(torch.allclose(a, b, atol=1e-4) for a, b in zip(e.states, want))


def test_the_untrained_critic_says_it_stays_as_it_is(batch):
    model, chat, episodes, _ = batch
    for bound in (False, True):
        b = judge(ARGS, model, Critic(model, bound=bound), chat, episodes)
        assert torch.allclose(b["value"][b["mask"]], b["known"][b["mask"]], atol=1e-6) and abs(b["metrics"]["explained_variance"]) < 1e-5
        first = b["known"][:, 0]
        assert torch.allclose(first, torch.full_like(first, 0.4))


def test_bounded_values_stay_in_the_range_of_the_reward(tiny):
    critic = Critic(tiny, bound=True)
    torch.nn.init.normal_(critic.head.weight, std=30.0)
    v = critic(torch.randn(200, tiny.config.width), torch.rand(200).round())
    assert v.min() >= 0 and v.max() <= 1 and v.std() > 0.3


def test_value_clip_scores_the_larger_error(batch):
    model, chat, episodes, critic = batch
    b = judge(ARGS, model, critic, chat, episodes)
    old, target = torch.full_like(b["value"], 0.4), torch.full_like(b["value"], 0.5)
    hidden = torch.cat([model(torch.tensor([e.rows[0].ids]))[0][[i - 1 for i, m in enumerate(e.rows[0].mask) if m]] for e in episodes])
    value = b["value"][b["mask"]]
    for clip in (0.0, 0.05):
        got = value_loss(settings(value_clip=clip), critic, {**b, "value": old, "target": target}, *b["mask"].nonzero().T.tolist(), hidden)
        held = value.clamp(0.4 - clip, 0.4 + clip) if clip else value
        assert torch.allclose(got, 0.5 * torch.maximum((value - 0.5).abs(), (held - 0.5).abs()) ** 2, atol=1e-5)
    assert ((value > 0.45) & (value < 0.55)).any() and (value < 0.35).any()      # places where the clipped error is the larger one, and where it isn't


def test_what_the_policy_is_not_told(batch):
    """--critic_sees need: the hidden need moves the critic's values and stands in no row of the policy's."""
    model, chat, episodes, _ = batch
    critic = Critic(model, separate=True)
    torch.nn.init.normal_(critic.head.weight, std=0.05, generator=torch.Generator().manual_seed(3))
    args, rows = settings(critic_sees="need"), [list(e.rows[0].ids) for e in episodes]
    [row] = critic_rows(chat, episodes[0], told(args, chat, episodes[0]))
    shift = len(row.ids) - len(rows[0])
    assert episodes[0].scenario.hidden_need in chat.tokenizer.decode(row.ids[:shift]) and row.ids[shift:] == rows[0] and row.mask == [0] * shift + episodes[0].rows[0].mask
    one = judge(args, model, critic, chat, episodes)
    other = judge(args, model, critic, chat, [replace(e, scenario=replace(e.scenario, hidden_need="Nothing of the kind.")) for e in episodes])
    blind = judge(ARGS, model, critic, chat, episodes)
    for b in (other, blind):
        assert (one["value"] - b["value"])[one["mask"]].abs().min() > 0
    assert rows == [e.rows[0].ids for e in episodes]


@pytest.mark.parametrize("separate", [False, True])
def test_warm_up_moves_the_critic_only(batch, separate):
    model, chat, episodes, _ = batch
    critic = Critic(model, separate)
    args = settings(critic_warmup=30, minibatches=2, lam=1.0)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.AdamW([{"params": model.parameters(), "lr": 1.0}, {"params": critic.parameters(), "lr": 3e-3}], weight_decay=0.0)
    cold = judge(args, model, critic, chat, episodes)
    warm_up(args, model, critic, optimizer, chat, episodes, cold)
    warm = judge(args, model, critic, chat, episodes)
    loss = lambda b: (b["value"] - cold["target"])[b["decide"]].square().mean()
    assert loss(warm) < 0.5 * loss(cold)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) and all(q.grad is None for q in model.parameters())


# ---------------------------------------------------------------------------------------------- loss
def test_pitfall_15_the_clip_is_grpos():
    """The surrogate is the very text whose gradients test_train_grpo.py checks at ratios on both sides of the clip."""
    assert inspect.getsource(train_ppo.policy_loss) == inspect.getsource(train_grpo.policy_loss)


def gradient(model, critic, chat, episodes, b, reference=None, **changed):
    model.zero_grad(), critic.zero_grad()
    both = [*model.parameters(), *critic.parameters()]

    class Keep(torch.optim.SGD):                            # a step that changes nothing but keeps the gradient
        def step(self):
            self.kept = [p.grad.clone() for p in both]
    optimizer = Keep(both, lr=0.0)
    seen = update(settings(**changed), model, critic, reference, optimizer, chat, episodes, b)
    return optimizer.kept, seen


@pytest.mark.parametrize("kind", ["token", "turn"])
def test_pitfall_17_and_24_micro_batches_equal_one_batch(batch, kind):
    """Gradients and metrics of the whole batch, however it is split; policy tokens count by a constant, values by their number."""
    model, chat, episodes, critic = batch
    b = judge(settings(gae=kind), model, critic, chat, episodes)
    one, seen_one = gradient(model, critic, chat, episodes, b, gae=kind)
    many, seen_many = gradient(model, critic, chat, episodes, b, gae=kind, tokens_per_microbatch=1)
    assert all(torch.allclose(x, y, atol=1e-6) for x, y in zip(one, many))
    assert all(abs(seen_one[k] - seen_many[k]) < 1e-5 * max(1, abs(seen_one[k])) for k in seen_one)
    halved, _ = gradient(model, critic, chat, episodes, b, gae=kind, max_new_tokens=12, value_coef=0.25)
    assert all(torch.allclose(x / 2, y, atol=1e-6) for x, y in zip(one, halved))


@pytest.mark.parametrize("kind,separate", [("token", False), ("turn", False), ("token", True)])
def test_the_update_is_the_two_losses_written_out(batch, kind, separate):
    """On fresh samples the ratio is 1: -sum A log p / constant + coefficient x mean of half squared errors, here with plain log_softmax, row by row."""
    model, chat, episodes, critic = batch
    if separate:
        critic = Critic(model, separate=True)
        torch.nn.init.normal_(critic.head.weight, std=0.05, generator=torch.Generator().manual_seed(3))
    b = judge(settings(gae=kind), model, critic, chat, episodes)
    got, seen = gradient(model, critic, chat, episodes, b, gae=kind)
    assert abs(seen["ratio_first"] - 1) < 1e-4 and seen["canary"] < 1e-4 and seen["clip_low"] == seen["clip_high"] == 0
    model.zero_grad(), critic.zero_grad()
    policy, values, count = 0.0, 0.0, 0
    for i, e in enumerate(episodes):
        row, k = e.rows[0], 0
        hidden = model(torch.tensor([row.ids]))
        logp = (model.logits(hidden)[0].masked_fill(chat.banned, float("-inf")) / ARGS.temperature).log_softmax(-1)
        theirs = hidden if not separate else critic.own(torch.tensor([row.ids]))
        for j in range(len(row.ids)):
            if row.mask[j]:
                policy = policy - b["advantage"][i, k] * logp[j - 1, row.ids[j]]
                if b["decide"][i, k]:
                    values, count = values + 0.5 * (critic(theirs[0, j - 1:j], b["known"][i, k:k + 1])[0] - b["target"][i, k]) ** 2, count + 1
                k += 1
    (policy / (len(episodes) * 3 * 6) + 0.5 * values / count).backward()
    assert abs(seen["value_loss"] - (values / count).item()) < 1e-6
    assert all(torch.allclose(g, p.grad, atol=1e-5) for g, p in zip(got, [*model.parameters(), *critic.parameters()]))


def test_warm_up_and_update_weigh_the_critic_alike(batch):
    """Adam divides by the size of past gradients: a warm-up in another scale would slow, or drive, the critic for the whole run."""
    model, chat, episodes, critic = batch
    b = judge(ARGS, model, critic, chat, episodes)
    got, _ = gradient(model, critic, chat, episodes, {**b, "advantage": torch.zeros_like(b["advantage"])})
    kept = []

    class Keep(torch.optim.SGD):
        def step(self):
            kept.extend(p.grad.clone() for p in critic.parameters())
    warm_up(settings(critic_warmup=1), model, critic, Keep(critic.parameters(), lr=0.0), chat, episodes, b)
    assert all(torch.allclose(a, g, atol=1e-7) for a, g in zip(kept, got[-2:]))


@pytest.mark.parametrize("separate", [False, True])
def test_pitfall_22_every_parameter_gets_a_gradient(batch, separate):
    """The value head's and a separate critic's too."""
    model, chat, episodes, critic = batch
    critic = Critic(model, separate)
    torch.nn.init.normal_(critic.head.weight, std=0.05, generator=torch.Generator().manual_seed(3))
    got, _ = gradient(model, critic, chat, episodes, judge(ARGS, model, critic, chat, episodes))
    assert all(g.abs().sum() > 0 for g in got)


def test_pitfall_16_kl_in_the_loss_and_in_the_reward(batch):
    """k3 in the loss has a gradient of its own; in the reward, logp - logp_reference is taken off token by token, and the critic's targets see it."""
    model, chat, episodes, critic = batch
    reference = deepcopy(model)
    with torch.no_grad():
        for p in reference.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.03)
    b = judge(ARGS, model, critic, chat, episodes)
    flat = {**b, "advantage": torch.zeros_like(b["advantage"])}
    pulled, seen = gradient(model, critic, chat, episodes, flat, reference=reference, kl=1.0, value_coef=0.0)
    assert seen["kl_reference"] > 0 and sum(g.abs().sum() for g in pulled) > 0
    charged = judge(settings(kl=0.5, lam=1.0), model, critic, chat, episodes, reference)
    plain = judge(settings(lam=1.0), model, critic, chat, episodes)
    for i, e in enumerate(episodes):
        row, n = e.rows[0], int(b["mask"][i].sum())
        at = [j for j, m in enumerate(row.mask) if m]
        with torch.no_grad():
            logp = (reference.logits(reference(torch.tensor([row.ids]))[0]).masked_fill(chat.banned, float("-inf")) / 0.9).log_softmax(-1)
        penalty = torch.tensor([0.5 * (row.logp[j] - logp[j - 1, row.ids[j]].item()) for j in at])
        owed = penalty.flip(0).cumsum(0).flip(0)           # gamma = lambda = 1: all that is still to be paid
        assert torch.allclose(plain["target"][i, :n] - charged["target"][i, :n], owed, atol=1e-4)


def test_pitfall_19_fp32_masters_move_at_lr_1e_6(tiny_chat):
    """One Adam step at 1e-6 changes more than 99 % of the trained weights that have a gradient, the critic's too."""
    _, chat = tiny_chat
    model = ours(hf_model("llama", vocab=259), torch.bfloat16)
    model.config.max_positions = 4096
    model.rope.clear()
    episodes = rollout(model, chat, ScriptedUsers(), [(s, None) for s in load_scenarios(SCENARIOS, "dev")[:2]], 3, 2, 6, 1024, 0.9, torch.Generator().manual_seed(0))
    critic = Critic(model, separate=True)
    torch.nn.init.normal_(critic.head.weight, std=0.05)
    both = [*model.parameters(), *critic.parameters()]
    before, grads = [p.detach().clone() for p in both], {}
    optimizer = torch.optim.AdamW(both, lr=1e-6, weight_decay=0.0, fused=True)
    optimizer.register_step_pre_hook(lambda o, a, k: grads.update({i: p.grad.clone() for i, p in enumerate(both)}))
    update(ARGS, model, critic, None, optimizer, chat, episodes, judge(ARGS, model, critic, chat, episodes))
    moved = sum(((a != p) & (grads[i] != 0)).sum().item() for i, (a, p) in enumerate(zip(before, both)))
    assert moved > 0.99 * sum((g != 0).sum().item() for g in grads.values()) > 0


def test_entropy_bonus_and_target_kl(batch):
    model, chat, episodes, critic = batch
    b = judge(ARGS, model, critic, chat, episodes)
    flat = {**b, "advantage": torch.zeros_like(b["advantage"])}
    entropies = []
    for _ in range(3):
        pulled, seen = gradient(model, critic, chat, episodes, flat, entropy=1.0, value_coef=0.0)
        entropies.append(seen["entropy"])
        with torch.no_grad():
            for p, g in zip(model.parameters(), pulled):
                p -= 0.3 * g
    assert entropies[0] < entropies[1] < entropies[2]
    kept = {k: v.clone() for k, v in model.state_dict().items()}
    far = update(settings(target_kl=1e-9, epochs=3), model, critic, None, torch.optim.SGD(model.parameters(), lr=1.0), chat, episodes, b)
    assert far["optimizer_steps"] == 0 and all(torch.equal(v, kept[k]) for k, v in model.state_dict().items())      # already off the sampler: nothing is stepped
    near = update(settings(target_kl=1e9, epochs=3), model, critic, None, torch.optim.SGD(model.parameters(), lr=0.0), chat, episodes, b)
    assert near["optimizer_steps"] == 3


# ---------------------------------------------------------------------------------------------- a bandit
class OneArm:
    """A user who is delighted by a reply that begins with "a", and by no other."""
    opening, emotion = "hi", 40

    def prepare(self, jobs):
        pass

    def start(self, scenario, state=None):
        return OneArm()

    def respond(self, users, replies, cuts):
        return [UserTurn("", 100 if r == "a" else 0, 0, "", True, "success" if r == "a" else "failure", False, {}) for r in replies]


@pytest.mark.parametrize("variant", [{}, {"bound": True}, {"lora": 4}, {"separate": True}, {"gae": "turn"}], ids=lambda v: next(iter(v), "plain"))
@pytest.mark.parametrize("seed", range(5))
def test_two_armed_bandit(tiny_chat, seed, variant):
    """Two tokens may be sampled, one of them is worth 1: above .95 within 40 batches of 32, whatever the seed and the critic."""
    model, chat = tiny_chat
    model, chat = deepcopy(model), Chat(chat.tokenizer, 259, system="a or b")
    chat.banned = torch.ones(259, dtype=torch.bool)
    chat.banned[chat.tokenizer("ab", add_special_tokens=False)["input_ids"]] = False
    args = settings(max_turns=1, max_new_tokens=1, temperature=1.0, minibatches=2, gae=variant.get("gae", "token"), grad_clip=1.0)
    if "lora" in variant:
        model.add_lora(4, seed)
        with torch.no_grad():                               # frozen, and so small at random that no hidden state could prefer a token by more than 0.7
            model.model.embed_tokens.weight.mul_(10)
    critic = Critic(model, variant.get("separate", False), variant.get("bound", False))
    optimizer = torch.optim.AdamW([{"params": [p for p in model.parameters() if p.requires_grad], "lr": 3e-2 if "lora" in variant else 3e-3}, {"params": [p for p in critic.parameters() if p.requires_grad], "lr": 1e-2}], weight_decay=0.0)
    scenario, generator = load_scenarios(SCENARIOS, "dev")[0], torch.Generator().manual_seed(seed)
    for _ in range(40):
        episodes = rollout(model, chat, OneArm(), [(scenario, None)] * 32, 1, 1, 1, 1024, 1.0, generator, keep_states=True)
        won = sum(e.emotion for e in episodes) / 3200
        if won > 0.95:
            break
        update(args, model, critic, None, optimizer, chat, episodes, judge(args, model, critic, chat, episodes))
    assert won > 0.95


# ---------------------------------------------------------------------------------------------- LoRA
def test_lora_starts_at_the_base_and_leaves_it_alone(batch):
    """Zero at the start; then adapters off is the base bit for bit, merged while sampling is the same network as beside it in training."""
    model, chat, episodes, _ = batch
    ids = torch.tensor([episodes[0].rows[0].ids])
    with torch.no_grad():
        base = model(ids)
    model.train_only_upper(1)
    model.add_lora(4)
    names = {k for k, p in model.named_parameters() if p.requires_grad}
    assert len(names) == 14 and all(k.startswith("model.layers.1.") and ".lora_" in k for k in names)
    with torch.no_grad():
        assert torch.equal(model(ids), base)
        for k, p in model.named_parameters():
            if k.endswith("lora_b"):
                p.normal_(std=0.1)
        merged = model(ids)
    assert not torch.allclose(merged, base, atol=1e-3) and torch.allclose(model(ids), merged, atol=1e-5)
    with torch.no_grad(), model.without_adapters():
        assert torch.equal(model(ids), base)
    assert torch.allclose(model(ids), merged, atol=1e-5)


def test_the_merged_copy_follows_the_optimizer(tiny):
    tiny.add_lora(2)
    ids, optimizer = torch.arange(6)[None], torch.optim.AdamW([p for p in tiny.parameters() if p.requires_grad], lr=0.1, fused=True)
    for _ in range(3):
        tiny(ids).square().sum().backward()
        with torch.no_grad():
            tiny(ids)                                      # a merged copy is kept from here
        optimizer.step()
        with torch.no_grad():
            merged = tiny(ids)
        assert torch.allclose(merged, tiny(ids), atol=1e-4)


@pytest.mark.parametrize("script", [train_grpo, train_ppo])
def test_adapters_off_is_the_reference(batch, script):
    """--kl with --lora needs no second model: the same penalty as with a frozen copy of the start."""
    model, chat, episodes, critic = batch
    frozen = deepcopy(model)
    model.add_lora(4)
    with torch.no_grad():
        for k, p in model.named_parameters():
            if k.endswith("lora_b"):
                p.normal_(std=0.2, generator=torch.Generator().manual_seed(0))
    seen = []
    for reference in (frozen, model):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
        if script is train_grpo:
            seen.append(script.update(settings(kl=1.0), model, reference, optimizer, chat, episodes, [[1.0] * len(e.turns) for e in episodes]))
        else:
            seen.append(script.update(settings(kl=1.0), model, critic, reference, optimizer, chat, episodes, judge(ARGS, model, critic, chat, episodes)))
    assert seen[0]["kl_reference"] > 1e-3 and abs(seen[0]["kl_reference"] - seen[1]["kl_reference"]) < 1e-4


def test_lora_is_saved_merged_and_by_itself(tiny_chat, tmp_path):
    """best/ loads anywhere as a plain model; adapter/ holds the same difference under PEFT's names."""
    from safetensors.torch import load_file
    model, chat = tiny_chat
    model = deepcopy(model)
    model.train_only_upper(1)
    model.add_lora(4)
    with torch.no_grad():
        for k, p in model.named_parameters():
            if k.endswith("lora_b"):
                p.normal_(std=0.2)
        save(model, chat.tokenizer, tmp_path / "best")
        again, _ = load(str(tmp_path / "best"))
        ids = torch.arange(20)[None]
        assert torch.allclose(again(ids), model(ids), atol=1e-5)
    told, adapters = json.loads((tmp_path / "best" / "adapter" / "adapter_config.json").read_text()), load_file(tmp_path / "best" / "adapter" / "adapter_model.safetensors")
    assert told["r"] == 4 and told["lora_alpha"] == 8 and told["layers_to_transform"] == [1] and len(adapters) == 14
    q = model.model.layers[1].self_attn.q_proj
    name = "base_model.model.model.layers.1.self_attn.q_proj"
    difference = told["lora_alpha"] / told["r"] * adapters[f"{name}.lora_B.weight"] @ adapters[f"{name}.lora_A.weight"]
    assert torch.allclose(again.model.layers[1].self_attn.q_proj.weight, q.weight + difference, atol=1e-6)


# ---------------------------------------------------------------------------------------------- runs
@pytest.mark.parametrize("more", [[], ["--critic", "separate", "--critic_sees", "need"], ["--critic", "separate", "--lora", "2", "--kl", "0.1", "--kl_in", "reward"],
                                  ["--lora", "2", "--kl", "0.1", "--gae", "turn", "--value_bound", "--adaptive_lam"]], ids=["shared", "separate", "separate-lora", "lora"])
def test_pitfall_26_two_and_two_steps_equal_four(tiny_folder, tmp_path, more):
    """The critic, its optimizer and the adapters come back with the policy, bit for bit."""
    tiny = [*TINY, "--critic_warmup", "3", "--epochs", "2", *more]
    train_ppo.main(["--model", tiny_folder, "--run", str(tmp_path / "four"), "--steps", "4", *tiny])
    train_ppo.main(["--model", tiny_folder, "--run", str(tmp_path / "two"), "--steps", "2", *tiny])
    train_ppo.main(["--resume", str(tmp_path / "two"), "--steps", "4"])
    assert metrics(tmp_path / "two") == metrics(tmp_path / "four") and len(metrics(tmp_path / "four")) == 5

    def flat(x, at=""):
        return {at: x} if not isinstance(x, (dict, list)) else {k: v for i, y in (x.items() if isinstance(x, dict) else enumerate(x)) for k, v in flat(y, f"{at}.{i}").items()}
    a, b = (flat(torch.load(tmp_path / name / "checkpoint" / "state.pt", weights_only=True)) for name in ("two", "four"))
    assert a.keys() == b.keys() and any(k.startswith(".critic") for k in a)
    assert all(torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k] for k in a)


@pytest.mark.parametrize("steps,lams", [("0", [0.7, 0.7]), ("3", [1.0, 0.7, 0.7])])
def test_the_policy_always_learns_at_its_own_lambda(steps, lams, tiny_folder, tmp_path, monkeypatch):
    """Lambda 1 is for the critic's warm-up alone: without one, the first batch once moved the policy at lambda 1 too."""
    seen, real = [], train_ppo.advantages
    monkeypatch.setattr(train_ppo, "advantages", lambda *a: (seen.append(a[-1]), real(*a))[1])
    train_ppo.main(["--model", tiny_folder, "--run", str(tmp_path / "run"), "--steps", "2", *TINY, "--critic_warmup", steps, "--lam", "0.7"])
    assert seen == lams


def test_health_is_logged(tiny_folder, tmp_path, capsys):
    run = tmp_path / "run"
    train_ppo.main(["--model", tiny_folder, "--run", str(run), "--steps", "2", *TINY, "--critic_warmup", "20", "--critic_lr", "0.003"])
    lines = metrics(run)
    for key in ("explained_variance", "value_loss", "kl", "clip_low", "clip_high", "ratio_first", "entropy", "grad_norm", "critic_grad_norm", "optimizer_steps"):
        assert key in lines[1] and key in lines[2]
    assert lines[1]["value_loss_warm"] < lines[1]["value_loss_cold"] and "value_loss_warm" not in lines[2] and abs(lines[1]["ratio_first"] - 1) < 1e-4
    out = capsys.readouterr().out
    assert "critic explains" in out and "critic: shared" in out


@pytest.mark.parametrize("flags,word", [(["--critic_sees", "need"], "--critic separate"), (["--lam", "1.5"], "--lam"), (["--gamma", "1.5"], "--gamma"), (["--critic_lr", "0"], "--critic_lr"),
                                        (["--credit", "turn"], "--credit"), (["--critic_warmup", "-1"], "--critic_warmup"), (["--resume", "runs/none-such"], "none-such"), (["--lora", "-1"], "--lora")])
def test_bad_input_is_one_line_before_weights_load(flags, word, tiny_folder, monkeypatch, capsys):
    monkeypatch.setattr(train_ppo, "load", lambda *a: pytest.fail("weights were loaded"))
    monkeypatch.setattr(train_ppo, "cold_start", lambda *a: pytest.fail("a cold start was made"))
    with pytest.raises(SystemExit) as e:
        train_ppo.main(["--model", tiny_folder, "--preset", "laptop", "--run", "runs/never-made", *flags])
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and word in err and "Traceback" not in err


def test_a_run_of_the_other_script_is_refused(tiny_folder, tmp_path, capsys):
    run = tmp_path / "run"
    train_grpo.main(["--model", tiny_folder, "--run", str(run), "--steps", "1", *TINY])
    with pytest.raises(SystemExit) as e:
        train_ppo.main(["--resume", str(run)])
    assert e.value.code == 2 and "not a run of this script" in capsys.readouterr().err


@pytest.mark.parametrize("script", [train_grpo, train_ppo])
@pytest.mark.parametrize("preset", ["laptop", "gpu"])
def test_each_preset_passes_its_own_checks(script, preset, tiny_folder, tmp_path, monkeypatch):
    """Up to the point where weights are loaded."""
    class Loaded(Exception):
        pass

    def load(*_):
        raise Loaded
    monkeypatch.setattr(script, "load", load)
    monkeypatch.chdir(ROOT)
    with pytest.raises(Loaded):
        script.main(["--model", tiny_folder, "--preset", preset, "--cold_start", "none", "--run", str(tmp_path / "run"), "--device", "cpu"])


@pytest.mark.parametrize("script", [train_grpo, train_ppo])
def test_a_step_whose_users_all_failed_is_saved_and_said(script, tiny_folder, tmp_path, monkeypatch, capsys):
    class Broken(ScriptedUsers):
        def respond(self, users, replies, cuts):
            turns = super().respond(users, replies, cuts)
            for u, t in zip(users, turns):
                t.failed = u.scenario.split == "train"
            return turns
    monkeypatch.setitem(backend.SCRIPTED, "scripted", Broken)
    with pytest.raises(SystemExit) as e:
        script.main(["--model", tiny_folder, "--run", str(tmp_path / "run"), "--steps", "1", *TINY])
    assert e.value.code == 2 and "every simulated user failed" in capsys.readouterr().err and (tmp_path / "run" / "checkpoint" / "state.pt").exists()


def test_the_critics_prefix_must_fit(tiny_folder, tmp_path, capsys):
    with pytest.raises(SystemExit) as e:
        train_ppo.main(["--model", tiny_folder, "--run", str(tmp_path / "run"), "--steps", "1", *TINY, "--critic", "separate", "--critic_sees", "need", "--max_tokens", "3800"])
    assert e.value.code == 2 and "--max_tokens 3800" in capsys.readouterr().err and not (tmp_path / "run").exists()
