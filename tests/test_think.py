"""Think mode: what is heard, what stays in the context, one row a turn, reward 0 for a malformed block; in the rollout, both train scripts and chat."""
import random
from copy import deepcopy

import pytest
import torch

import rollout as module
import train_grpo
import train_ppo
from episode import collate, training_batches
from model import Critic, token_logprobs
from rollout import Chat, rollout
from rubric import score
from scenarios import load_scenarios
from simulator import ScriptedUsers
from test_train_grpo import SCENARIOS, TINY, metrics
from test_train_ppo import gradient, judge, settings


@pytest.fixture
def thinking(tiny_chat):
    model, chat = tiny_chat
    return deepcopy(model), Chat(chat.tokenizer, 259, template="think")


@pytest.mark.parametrize("text,heard,formed", [
    ("<think>they are sad</think>Oh no.", "Oh no.", True), ("<think>\na\n</think>\n\nHi", "Hi", True), ("Oh no.", "Oh no.", False), ("<think>they are sad", "", False), ("<think>a</think>", "", False),
    ("Well <think>a</think> Hi", "Hi", False), ("<think>a</think>Hi<think>b</think>Ho", "Ho", False), ("a</think>Hi", "Hi", False), ("<think>a</think>Hi <think>more", "Hi", False), ("<think><think>a</think>Hi", "Hi", False), ("", "", False)])
def test_what_is_heard(thinking, text, heard, formed):
    """Users and later context see only what follows the last </think>; an open block is not heard at all."""
    _, chat = thinking
    assert chat.heard(chat.plain(text) + [chat.eot]) == (heard, formed) == chat.heard(chat.plain(text))


def test_no_random_mixture_of_tags_leaks_a_thought(thinking):
    _, chat = thinking
    rng = random.Random(0)
    for _ in range(1000):
        text, depth = "", 0
        for _ in range(rng.randint(1, 6)):
            piece = rng.choice(["<think>", "</think>", "SECRET", "hello ", "\n"])
            depth = 1 if piece == "<think>" else 0 if piece == "</think>" else depth
            text += piece if piece != "SECRET" or depth else ""
        said, _ = chat.heard(chat.plain(text))
        assert "SECRET" not in said and "think>" not in said


def test_the_pair_may_be_sampled_and_the_header_is_open(tiny_folder):
    """Qwen3: thinking, <think> and </think> are allowed and the reply's header holds no empty block; not thinking, the other way round (pitfall 6)."""
    from tokenizers import AddedToken
    from weights import load
    _, tokenizer = load(tiny_folder)
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    names, vocab = tokenizer.get_vocab(), len(tokenizer)
    think, plain = Chat(tokenizer, vocab, template="think"), Chat(tokenizer, vocab)
    for t in ("<think>", "</think>"):
        assert not think.banned[names[t]] and plain.banned[names[t]] and names[t] not in think.reply and names[t] in plain.reply
    assert think.heard([names["<think>"]] + think.plain("sad") + [names["</think>"]] + think.plain("Oh.") + [think.eot]) == ("Oh.", True)
    assert "<think>" in tokenizer.decode(think.system) and "<think>" not in tokenizer.decode(plain.system)


def play(thinking, turns=3, copies=2, think_like=None, monkeypatch=None):
    model, chat = thinking
    if think_like:
        real = module.sample

        def sample(*args, **how):                           # random replies of a tiny model never have the form: put the tags around them
            tokens, logps = real(*args, **how)
            tokens = [chat.plain(think_like(i)) + [chat.eot] for i in range(len(tokens))]
            return tokens, [[-1.0] * len(t) for t in tokens]
        monkeypatch.setattr(module, "sample", sample)
    return rollout(model, chat, ScriptedUsers(), [(s, None) for s in load_scenarios(SCENARIOS, "dev")[:3]], copies, turns, 8, 4000, 0.9, torch.Generator().manual_seed(0), keep_states=think_like is None)


def test_each_turn_is_a_row_without_earlier_thoughts(thinking, monkeypatch):
    model, chat = thinking
    for e in play(thinking, think_like=lambda i: f"<think>secret {i}</think>Oh, {i}!", monkeypatch=monkeypatch):
        assert len(e.rows) == len(e.replies) == 3 and e.malformed == [False] * 3
        context = chat.opening(e.opening)
        for row, reply, turn in zip(e.rows, e.replies, e.turns):
            n = len(context)
            assert row.ids[:n] == context and row.mask == [0] * n + [1] * (len(row.ids) - n) and "secret" in chat.tokenizer.decode(row.ids[n:])
            context = context + chat.plain(reply) + [chat.eot] + chat.between(turn.text)
            assert "secret" not in chat.tokenizer.decode(context)
        assert e.beyond == context[:len(e.beyond)] and e.finish == "max_turns"


def test_the_rewound_cache_equals_a_fresh_forward(thinking):
    """What was sampled is overwritten by what was heard: log-probs of every row as if it stood alone (pitfall 12)."""
    model, chat = thinking
    episodes = play(thinking)
    rows = [row for e in episodes for row in e.rows]
    assert len(rows) == 18
    ids, branches, source, target, old, _ = collate(rows, "cpu")
    assert branches is None
    with torch.no_grad():
        logp, _ = token_logprobs(model, model(ids).flatten(0, 1)[source], target, chat.banned, 0.9)
    assert (logp - old).abs().max() < 1e-4


def test_a_malformed_block_is_worth_nothing(thinking, monkeypatch):
    episodes = play(thinking, think_like=lambda i: "Oh!" if i == 1 else "<think>p</think>Oh!", monkeypatch=monkeypatch)
    rewards = score(episodes)
    assert [r.total for r in rewards][1] == 0.0 == rewards[1].parts["emotion"] and rewards[1].turns[0] == -0.4 and rewards[1].turns[1:] == [0.0, 0.0]
    assert all(r.total == e.emotion / 100 for i, (e, r) in enumerate(zip(episodes, rewards)) if i != 1)
    from evaluate import summary
    assert abs(summary(episodes)["malformed"] - 100 / 6) < 1e-6


def test_batches_cover_every_policy_token_once(thinking):
    episodes = play(thinking)
    for budget in (1, 10 ** 6):
        seen = [at for *_, episode, place, _ in training_batches(episodes, [0, 2, 3], budget, "cpu") for at in zip(episode, place)]
        assert len(seen) == len(set(seen)) == sum(sum(row.mask) for i in (0, 2, 3) for row in episodes[i].rows)
        assert all({p for i, p in seen if i == k} == set(range(sum(sum(row.mask) for row in episodes[k].rows))) for k in (0, 2, 3))


@pytest.mark.parametrize("separate", [False, True])
def test_ppo_over_many_rows_is_one_trajectory(thinking, separate):
    """Advantages run across the turns' rows; splitting micro-batches changes nothing; the cut state is a row of its own; a malformed dialogue hopes for nothing."""
    model, chat = thinking
    episodes = play(thinking)
    for e in episodes[1:]:
        e.malformed = [False] * 3                           # random bytes never have the form
    critic = Critic(model, separate)
    torch.nn.init.normal_(critic.head.weight, std=0.05, generator=torch.Generator().manual_seed(3))
    b, split = judge(settings(), model, critic, chat, episodes), judge(settings(tokens_per_microbatch=1), model, critic, chat, episodes)
    assert all(torch.allclose(b[k].float(), split[k].float(), atol=1e-4) for k in ("value", "target", "advantage", "known"))
    for i, e in enumerate(episodes):
        k = 0
        for row in e.rows:
            hidden = (critic.own or model)(torch.tensor([row.ids]))[0]
            for j, m in enumerate(row.mask):
                if m:
                    want = critic(hidden[j - 1:j], b["known"][i, k:k + 1])
                    assert torch.allclose(b["value"][i, k], want[0], atol=1e-4)
                    k += 1
        assert k == b["mask"][i].sum()
        beyond = critic((critic.own or model)(torch.tensor([e.beyond]))[0, -1:], torch.tensor([e.emotion / 100])).clamp(0, 1)
        assert torch.allclose(b["target"][i, k - 1], beyond[0] if i else torch.zeros(()), atol=1e-4)
    one, seen = gradient(model, critic, chat, episodes, b)
    many, _ = gradient(model, critic, chat, episodes, b, tokens_per_microbatch=1)
    assert seen["canary"] < 1e-4 and all(torch.allclose(x, y, atol=1e-6) for x, y in zip(one, many))


@pytest.mark.parametrize("script,more", [(train_grpo, ["--credit", "turn"]), (train_ppo, []), (train_ppo, ["--critic", "separate", "--critic_sees", "need", "--gae", "token"])], ids=["grpo", "ppo", "ppo-separate"])
def test_runs_that_think_resume_bit_for_bit(script, more, tiny_folder, tmp_path):
    for run, steps in (("four", "4"), ("two", "2")):
        script.main(["--model", tiny_folder, "--run", str(tmp_path / run), "--steps", steps, *TINY, "--think", *more])
    script.main(["--resume", str(tmp_path / "two"), "--steps", "4"])
    assert metrics(tmp_path / "two") == metrics(tmp_path / "four") and all(line["malformed"] == 100.0 for line in metrics(tmp_path / "two")[1:])
    assert metrics(tmp_path / "two")[1]["reward"] == 0.0


def test_chat_hides_the_plan(thinking, monkeypatch):
    import chat as script
    model, chat = thinking
    talk = script.Talk(model, chat, 4000, 12, temperature=0)
    monkeypatch.setattr(script, "sample", lambda *a, **k: ([chat.plain("<think>plan</think>Hi!") + [chat.eot]], [[-1.0] * 23]))
    context = chat.opening("hello")
    assert talk.reply("hello") == ("Hi!", False) and int(talk.cache.n[0]) == len(context)
    talk.reply("and?")
    assert int(talk.cache.n[0]) == len(context + chat.plain("Hi!") + [chat.eot] + chat.between("and?"))
