"""GRPO's advantages, loss and update by closed forms and brute force; runs that resume, and runs that are killed."""
import json
import os
import random
import signal
import subprocess
import sys
import time
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train_grpo
from conftest import ROOT, hf_model, ours
from program import start
from rollout import rollout
from rubric import Reward, score
from scenarios import load_scenarios
from simulator import ScriptedUsers
from train_grpo import mica_advantages, policy_loss, trajectory_advantages, turn_advantages, update

SCENARIOS = str(ROOT / "data" / "scenarios.jsonl")
ARGS = SimpleNamespace(max_turns=3, max_new_tokens=6, tokens_per_microbatch=100000, temperature=0.9, clip_low=0.2, clip_high=0.28, dual_clip=3.0, kl=0.0, grad_clip=1e9, minibatches=1, epochs=1)


def reward(*turns):
    return Reward(sum(turns), {"emotion": sum(turns)}, list(turns))


@pytest.fixture
def batch(tiny_chat):
    """Two groups of three sampled dialogues, with the model that sampled them."""
    model, chat = tiny_chat
    model = deepcopy(model)
    episodes = rollout(model, chat, ScriptedUsers(), [(s, None) for s in load_scenarios(SCENARIOS, "dev")[:2]], 3, 3, 6, 1024, 0.9, torch.Generator().manual_seed(0))
    return model, chat, episodes


# ---------------------------------------------------------------------------------------------- advantages
def test_trajectory_advantages_by_hand():
    rewards = [reward(.1, .1), reward(.3), reward(.2), reward(.2), None, reward(.2)]
    adv, flat = trajectory_advantages(rewards, 3, 0.03)
    std = np.std([.2, .3, .2])
    assert np.allclose(adv[0], [(.2 - 7 / 30) / std] * 2) and np.allclose(adv[1], [(.3 - 7 / 30) / std])
    assert adv[3:] == [[0.0], [], [0.0]] and flat == 0.5
    assert np.allclose(trajectory_advantages(rewards[:3], 3, 10.0)[0][1], (.3 - 7 / 30) / 10)      # the floor is in force


def test_turn_advantages_by_brute_force():
    rng = np.random.default_rng(0)
    rewards = [reward(*rng.normal(size=rng.integers(1, 5)) / 10) for _ in range(8)]
    rewards[5] = None
    adv, _ = turn_advantages(rewards, 4, 0.03, 0.85)
    for g in (0, 4):
        for i in range(g, g + 4):
            turns = rewards[i].turns if rewards[i] else []
            for t in range(len(turns)):
                G = lambda r: sum(0.85 ** (k - t) * r.turns[k] for k in range(t, len(r.turns)))
                peers = [G(r) for r in rewards[g:g + 4] if r and len(r.turns) > t]
                want = 0.0 if len(peers) == 1 else (G(rewards[i]) - np.mean(peers)) / max(np.std(peers), 0.03)
                assert abs(adv[i][t] - want) < 1e-9
            assert len(adv[i]) == len(turns)


def test_mica_advantages_by_brute_force():
    """The worked example, gamma .85, and a group with a failed user; the third turn of the second group is reached by one dialogue alone."""
    for turns in ([[1, 2, 0], [0, 1], [2, 2, 2], [0, 0, 1]], [[.1, -.2], [.3, .1, .05], None, [.0, .2]]):
        adv, flat = mica_advantages([None if t is None else reward(*t) for t in turns], 4, 0.85)
        known = [t for t in turns if t is not None]
        G = {(i, t): sum(0.85 ** (k - t) * r[k] for k in range(t, len(r))) for i, r in enumerate(turns) if r for t in range(len(r))}
        every = [r for t in known for r in t]
        for (i, t), x in G.items():
            peers = [v for (_, u), v in G.items() if u == t]
            a_turn = 0.0 if len(peers) == 1 else (x - np.mean(peers)) / (np.std(peers) + 1e-8)
            assert adv[i][t] == pytest.approx(0.5 * a_turn + 0.5 * (turns[i][t] - np.mean(every)) / (np.std(every) + 1e-8))
        assert [len(a) for a in adv] == [len(t or []) for t in turns] and flat == 0
    # by hand, first turn: G = 2.7, .85, 5.145, .7225; its r = 1 is the mean of all eleven
    adv, _ = mica_advantages([reward(*t) for t in ([1, 2, 0], [0, 1], [2, 2, 2], [0, 0, 1])], 4, 0.85)
    assert adv[0][0] == pytest.approx(0.5 * (2.7 - 2.354375) / np.std([2.7, .85, 5.145, .7225]))


def test_a_further_stream_is_credited_by_itself_and_added():
    """A = A_emotion + mu A_rubric, each normalised within the group by itself; flat groups are those of the emotion; a failed user has none."""
    rng = np.random.default_rng(1)
    first, second = ([None if i == 3 else reward(*rng.normal(size=2) * scale) for i in range(8)] for scale in (0.1, 5.0))
    for credit in ("trajectory", "turn", "mica"):
        args = SimpleNamespace(credit=credit, group_size=4, std_floor=0.03, gamma=0.85, mu=0.3)
        a, flat = train_grpo.mixed_advantages(args, {"emotion": first})
        b, _ = train_grpo.mixed_advantages(args, {"rubric": second})
        both, flat_both = train_grpo.mixed_advantages(args, {"emotion": first, "rubric": second})
        assert flat == flat_both and both[3] == [] and all(x == pytest.approx([p + 0.3 * q for p, q in zip(m, n)]) for x, m, n in zip(both, a, b))
        assert np.abs(np.concatenate(a)).mean() == pytest.approx(np.abs(np.concatenate(b)).mean(), rel=0.3)      # of one size, though the streams' are not


def test_a_failed_user_leaves_the_statistics(batch):
    """Pitfall 33: its dialogue has no reward, moves no mean, and trains nothing."""
    model, chat, episodes = batch
    episodes[1].finish = "user_failed"
    rewards = score(episodes)
    assert rewards[1] is None and train_grpo.evaluate.summary(episodes)["failed"] == 1
    adv, _ = trajectory_advantages(rewards, 3, 0.03)
    seen = update(ARGS, model, None, torch.optim.SGD(model.parameters(), lr=0.0), chat, episodes, adv)
    assert seen["policy_tokens"] == sum(sum(e.rows[0].mask) for i, e in enumerate(episodes) if i != 1)


def test_the_reward_is_the_last_emotion(batch):
    _, _, episodes = batch
    for e, r in zip(episodes, score(episodes)):
        assert r.total == e.turns[-1].emotion / 100 == r.parts["emotion"] and abs(sum(r.turns) - (e.emotion - e.start_emotion) / 100) < 1e-9


# ---------------------------------------------------------------------------------------------- loss
@pytest.mark.parametrize("advantage,ratio,gradient", [(-1, 0.5, 0), (-1, 1.5, -1), (-1, 1.0, -1), (-1, 4.0, 0), (1, 0.5, 1), (1, 1.0, 1), (1, 1.27, 1), (1, 1.29, 0), (1, 4.0, 0)])
def test_pitfall_15_clip_gradients(advantage, ratio, gradient):
    """d(objective)/d(ratio) at A = -1 is 0 at ratio .5 and -1 at 1.5 (one book's scripts have it reversed); dual clip stops at 3."""
    r = torch.tensor([float(ratio)], requires_grad=True)
    loss, got = policy_loss(r.log(), torch.zeros(1), torch.tensor([float(advantage)]), 0.2, 0.28, 3.0)
    assert torch.allclose(got, r) and torch.allclose(-torch.autograd.grad(loss.sum(), r)[0], torch.tensor([float(gradient)]), atol=1e-6)


def gradient(model, chat, episodes, adv, **changed):
    model.zero_grad()
    args = SimpleNamespace(**{**vars(ARGS), **changed})

    class Keep(torch.optim.SGD):                            # a step that changes nothing but keeps the gradient
        def step(self):
            self.kept = [p.grad.clone() for p in model.parameters()]
    optimizer = Keep(model.parameters(), lr=0.0)
    seen = update(args, model, changed.get("reference"), optimizer, chat, episodes, adv)
    return optimizer.kept, seen


def test_pitfall_17_and_24_micro_batches_equal_one_batch(batch):
    """Gradients and metrics of the whole batch, however it is split; the denominator is dialogues x turns x tokens, a constant."""
    model, chat, episodes = batch
    adv = [list(np.random.default_rng(i).normal(size=len(e.turns))) for i, e in enumerate(episodes)]
    one, seen_one = gradient(model, chat, episodes, adv)
    many, seen_many = gradient(model, chat, episodes, adv, tokens_per_microbatch=1)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one, many))
    assert all(abs(seen_one[k] - seen_many[k]) < 1e-5 * max(1, abs(seen_one[k])) for k in seen_one)
    halved, _ = gradient(model, chat, episodes, adv, max_new_tokens=12)
    assert all(torch.allclose(a / 2, b, atol=1e-6) for a, b in zip(one, halved))


def test_the_update_is_the_policy_gradient_written_out(batch):
    """On fresh samples the ratio is 1 and the gradient is that of -sum A log p / constant, computed here with plain log_softmax, row by row."""
    model, chat, episodes = batch
    adv = [[0.5 - i + t for t in range(len(e.turns))] for i, e in enumerate(episodes)]
    got, seen = gradient(model, chat, episodes, adv)
    assert abs(seen["ratio"] - 1) < 1e-4 and seen["canary"] < 1e-4 and seen["clip_low"] == seen["clip_high"] == 0
    model.zero_grad()
    total = 0.0
    for e, a in zip(episodes, adv):
        row = e.rows[0]
        logits = model.logits(model(torch.tensor([row.ids])))[0].masked_fill(chat.banned, float("-inf")) / ARGS.temperature
        logp = logits.log_softmax(-1)
        total = total - sum(a[row.turn[i]] * logp[i - 1, row.ids[i]] for i in range(len(row.ids)) if row.mask[i])
    (total / (len(episodes) * 3 * 6)).backward()
    assert all(torch.allclose(g, p.grad, atol=1e-5) for g, p in zip(got, model.parameters()))


def test_pitfall_22_every_parameter_gets_a_gradient(batch):
    model, chat, episodes = batch
    got, _ = gradient(model, chat, episodes, [[1.0 + i] * len(e.turns) for i, e in enumerate(episodes)])
    assert all(g.abs().sum() > 0 for g in got)


def test_pitfall_23_equal_rewards_give_exactly_zero_gradient_and_are_counted(batch):
    model, chat, episodes = batch
    for fn in (lambda r: trajectory_advantages(r, 3, 0.03), lambda r: turn_advantages(r, 3, 0.03, 0.85), lambda r: mica_advantages(r, 3, 0.85)):
        adv, flat = fn([reward(*[0.1] * len(e.turns)) for e in episodes[:1] * 3] + [reward(*[0.1] * len(e.turns)) for e in episodes[3:4] * 3])
        assert flat == 1.0 and all(x == 0 for a in adv for x in a)
    got, _ = gradient(model, chat, episodes, [[0.0] * len(e.turns) for e in episodes])
    assert all((g == 0).all() for g in got)


def test_pitfall_16_kl_pulls_towards_the_reference(batch):
    """k3 in the loss: its expected gradient is not zero, and a small step along it lowers the true KL to the reference (summed over the vocabulary)."""
    model, chat, episodes = batch
    reference = deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.03)
    episodes = rollout(model, chat, ScriptedUsers(), [(e.scenario, None) for e in episodes[::3]], 24, 3, 6, 1024, 0.9, torch.Generator().manual_seed(5))
    ids = [torch.tensor([e.rows[0].ids]) for e in episodes[::8]]

    def true_kl():
        out = 0.0
        with torch.no_grad():
            for e, x in zip(episodes[::8], ids):
                at = [i - 1 for i, m in enumerate(e.rows[0].mask) if m]
                a, b = ((m.logits(m(x))[0, at].masked_fill(chat.banned, float("-inf")) / 0.9).log_softmax(-1) for m in (model, reference))
                out += (a.exp() * (a - b).nan_to_num(0.0)).sum().item()
        return out
    before = true_kl()
    got, seen = gradient(model, chat, episodes, [[0.0] * len(e.turns) for e in episodes], kl=1.0, reference=reference)
    assert seen["kl_reference"] > 0 and sum(g.abs().sum() for g in got) > 0
    with torch.no_grad():
        for p, g in zip(model.parameters(), got):
            p -= 0.05 * g / max(g.norm(), 1e-9)
    assert true_kl() < before


def test_pitfall_19_fp32_masters_move_at_lr_1e_6(batch):
    """One Adam step at 1e-6 changes more than 99 % of the weights that have a gradient; bf16 masters would move about 2 %."""
    _, chat, _ = batch
    model = ours(hf_model("llama", vocab=259), torch.bfloat16)
    model.config.max_positions = 4096
    model.rope.clear()
    episodes = rollout(model, chat, ScriptedUsers(), [(s, None) for s in load_scenarios(SCENARIOS, "dev")[:2]], 3, 2, 6, 1024, 0.9, torch.Generator().manual_seed(0))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    grads = {}
    optimizer.register_step_pre_hook(lambda o, a, k: grads.update({i: p.grad.clone() for i, p in enumerate(model.parameters())}))
    update(ARGS, model, None, optimizer, chat, episodes, [[1.0 - i] * len(e.turns) for i, e in enumerate(episodes)])
    used = [(g != 0) for g in grads.values()]
    moved = sum(((a != b) & u).sum().item() for a, b, u in zip(before, model.parameters(), used))
    in_bf16 = sum(((a.bfloat16() != b.bfloat16()) & u).sum().item() for a, b, u in zip(before, model.parameters(), used))
    total = sum(u.sum().item() for u in used)
    assert moved > 0.99 * total > 0 and in_bf16 < 0.1 * total


def test_minibatches_are_steps_of_their_own(batch):
    """Two optimiser steps on a group each: the second sees the first's weights; the canary is of the first step only."""
    model, chat, episodes = batch
    other, adv = deepcopy(model), [[1.0 - i] * len(e.turns) for i, e in enumerate(episodes)]
    both = SimpleNamespace(**{**vars(ARGS), "minibatches": 2})
    seen = update(both, model, None, torch.optim.SGD(model.parameters(), lr=0.5), chat, episodes, adv)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.5)
    for g in range(2):
        update(ARGS, other, None, optimizer, chat, episodes[3 * g:3 * g + 3], adv[3 * g:3 * g + 3])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), other.parameters()))
    assert seen["canary"] < 1e-4 and abs(seen["ratio"] - 1) > 1e-5


def test_only_the_upper_layers_train(batch):
    model, chat, episodes = batch
    model.train_only_upper(1)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    parameters = [p for p in model.parameters() if p.requires_grad]
    update(ARGS, model, None, torch.optim.AdamW(parameters, lr=0.01), chat, episodes, [[1.0 - i] * len(e.turns) for i, e in enumerate(episodes)])
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == {k for k in before if k.startswith("model.layers.1.") or k == "model.norm.weight"}


# ---------------------------------------------------------------------------------------------- runs
TINY = ["--cold_start", "none", "--scenarios", SCENARIOS, "--groups", "2", "--group_size", "2", "--max_turns", "2", "--max_new_tokens", "5", "--train_layers", "1", "--minibatches", "2",
        "--eval_every", "2", "--save_every", "2", "--final_repeats", "0", "--lr=0.001", "--dtype", "fp32", "--threads", "1"]


def metrics(run):
    """All that a run computed, but for how long it took."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")} for line in lines]


def weights(run):
    state = torch.load(run / "checkpoint" / "state.pt", weights_only=True)
    return {**state["model"], **{f"{i}.{k}": v for i, s in state["optimizer"]["state"].items() for k, v in s.items()}}


def test_a_run_with_a_reward_stack_resumes_bit_for_bit(tiny_folder, tmp_path):
    """Emotion, format and a generated rubric (by a model that writes none, so the fixed one stands in and no weights are logged): each part logged apart, means and kept rubrics come back with the checkpoint."""
    stack = ["--reward", "emotion+format+rubric:care", "--generator", tiny_folder, "--credit", "mica", "--credit_from", "deficit", "--mu", "0.3", "--memory", str(ROOT / "data" / "memories.jsonl")]
    flags = [*TINY, "--eval_every", "9", *stack]
    train_grpo.main(["--model", tiny_folder, "--run", str(tmp_path / "two"), "--steps", "2", *flags])
    train_grpo.main(["--model", tiny_folder, "--run", str(tmp_path / "one"), "--steps", "1", *flags])
    train_grpo.main(["--resume", str(tmp_path / "one"), "--steps", "2"])
    [_, first, second] = metrics(tmp_path / "two")
    assert metrics(tmp_path / "one") == [metrics(tmp_path / "two")[0], first, second]
    assert 0 <= second["reward_format"] <= 1 and 0 <= second["reward_rubric"] <= 1 and second["rubrics_invalid"] == second["rubrics"] > first["rubrics"] and "weight_entropy" not in second and "reward_deficit" in second
    a, b = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert all(torch.equal(a[k], b[k]) for k in b)
    assert "rubric 0." in (tmp_path / "two" / "samples" / "step_000002.txt").read_text()


@pytest.mark.parametrize("flags,word", [(["--reward", "emotion+rubric:nope"], "rubric:nope"), (["--reward", "emotion+rubric:kardia"], "--template kardia"), (["--credit_from", "deficit", "--credit", "trajectory"], "--credit_from"), (["--judge", "lm:nowhere"], "--judge"), (["--reward", "emotion+rubric:peregrm"], "--memory"), (["--mu", "0"], "--mu"),
                                        (["--reward", "emotion+rubric:care", "--generator", "none-such"], "rubric.py sft"), (["--judge", "oracle"], "--judge"), (["--memory", "none-such.jsonl"], "none-such.jsonl")])
def test_a_stack_that_cannot_be_is_refused_at_once(flags, word, tiny_folder, tmp_path, capsys):
    with pytest.raises(SystemExit) as e:
        train_grpo.main(["--model", tiny_folder, "--run", str(tmp_path / "run"), "--steps", "1", *TINY, *flags])
    assert e.value.code == 2 and word in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.fixture(scope="session")
def unbroken(tiny_folder, tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "six"
    train_grpo.main(["--model", tiny_folder, "--run", str(run), "--steps", "6", *TINY])
    return run


def test_pitfall_26_three_and_three_steps_equal_six(tiny_folder, unbroken, tmp_path):
    run = tmp_path / "three"
    train_grpo.main(["--model", tiny_folder, "--run", str(run), "--steps", "3", *TINY])
    train_grpo.main(["--resume", str(run), "--steps", "6"])
    assert metrics(run) == metrics(unbroken) and len(metrics(run)) == 7
    a, b = weights(run), weights(unbroken)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert (run / "samples" / "step_000006.txt").read_text() == (unbroken / "samples" / "step_000006.txt").read_text()


def test_pitfalls_26_and_27_killed_ten_times(tiny_folder, unbroken, tmp_path):
    """SIGKILL at ten random moments, mid-step or mid-save, then resumed: the metrics and weights of the unbroken run."""
    run, rng, said = tmp_path / "killed", random.Random(1), tmp_path / "said.txt"
    for kills in range(11):
        said.write_text("")
        process = start(ROOT / "train_grpo.py", ["--resume", run] if (run / "config.json").exists() else ["--model", tiny_folder, "--run", run, "--steps", "6", *TINY], said)
        if kills < 10:
            while not said.read_text() and process.is_alive():         # the imports are over
                time.sleep(0.02)
            time.sleep(rng.uniform(0, 1.2))
            process.kill()
        process.join(300)
    assert process.exitcode == 0, said.read_text()
    assert metrics(run) == metrics(unbroken)
    a, b = weights(run), weights(unbroken)
    assert all(torch.equal(a[k], b[k]) for k in b)


def test_ctrl_c_finishes_the_step_and_saves(tiny_folder, unbroken, tmp_path):
    run = tmp_path / "stopped"
    process = subprocess.Popen([sys.executable, str(ROOT / "train_grpo.py"), "--model", tiny_folder, "--run", str(run), "--steps", "6", *TINY, "--save_every", "100"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"})
    for line in process.stdout:
        if line.startswith("step   1"):
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and "Traceback" not in err and f"--resume {run}" in out
    assert torch.load(run / "checkpoint" / "state.pt", weights_only=True)["step"] == len(metrics(run)) - 1 >= 1


@pytest.mark.parametrize("flags,word", [(["--grups", "3"], "did you mean --groups?"), (["--groups", "0"], "--groups"), (["--dtype", "fp16"], "fp16"), (["--model", "nowhere/x/y"], "nowhere"),
                                        (["--scenarios", "none.jsonl"], "none.jsonl"), (["--resume", "runs/none-such"], "none-such"), (["--run", "tests"], "exists"), (["--lr", "fast"], "--lr"),
                                        (["--cold_start", "none.jsonl"], "none.jsonl"), (["--group_size", "1"], "--group_size"), (["--groups", "1000"], "--groups"), (["--seed", "-1"], "--seed"),
                                        (["--kl", "-1"], "--kl"), (["--minibatches", "3"], "--minibatches"), (["--final_repeats", "-1"], "--final_repeats"), (["--resume", "README.md"], "README.md")])
def test_bad_input_is_one_line_before_weights_load(flags, word, tiny_folder, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(train_grpo, "load", lambda *a: pytest.fail("weights were loaded"))
    monkeypatch.setattr(train_grpo, "cold_start", lambda *a: pytest.fail("a cold start was made"))
    with pytest.raises(SystemExit) as e:
        train_grpo.main(["--model", tiny_folder, "--run", "runs/never-made", *flags])
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and word in err and "Traceback" not in err


def test_a_half_written_checkpoint_is_named(tiny_folder, unbroken, tmp_path, capsys):
    import shutil
    shutil.copytree(unbroken, tmp_path / "run")
    state = tmp_path / "run" / "checkpoint" / "state.pt"
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(SystemExit) as e:
        train_grpo.main(["--resume", str(tmp_path / "run")])
    assert e.value.code == 2 and "state.pt" in capsys.readouterr().err


def test_killed_before_the_first_checkpoint(tiny_folder, unbroken, tmp_path):
    """The run starts over, and step 0 is in the metrics once."""
    import shutil
    run = tmp_path / "run"
    shutil.copytree(unbroken, run)
    shutil.rmtree(run / "checkpoint")
    train_grpo.main(["--resume", str(run)])
    assert metrics(run) == metrics(unbroken)


def test_a_longer_run_is_remembered(tiny_folder, tmp_path):
    """--resume with more --steps writes them down: a later plain --resume goes to the same end."""
    run = tmp_path / "run"
    train_grpo.main(["--model", tiny_folder, "--run", str(run), "--steps", "1", *TINY])
    train_grpo.main(["--resume", str(run), "--steps", "2"])
    assert not (run / "result.json").exists()
    assert json.loads((run / "config.json").read_text())["steps"] == 2 and metrics(run)[-1]["step"] == 2
    assert "[[" in (run / "samples" / "step_000002.txt").read_text() and "  emotion   0." in (run / "samples" / "step_000002.txt").read_text()


def test_the_closing_table(tiny_folder, tmp_path, capsys):
    """Base and best policy on the held-out split, printed and kept; no cold start, no such row."""
    run = tmp_path / "run"
    train_grpo.main(["--model", tiny_folder, "--run", str(run), "--steps", "1", *TINY, "--final_repeats", "1"])
    results = json.loads((run / "result.json").read_text())
    assert set(results) == {"base", "RL (best dev)"} and results["base"]["n"] == 48
    assert "held-out, 48 scenarios x 1 dialogues" in capsys.readouterr().out


@pytest.mark.parametrize("flags,word", [(["--max_tokens", "60"], "--max_tokens"), (["--train_layers", "99"], "--train_layers"), (["--max_tokens", "100000"], "positions")])
def test_what_only_the_model_can_tell_leaves_no_run_folder(flags, word, tiny_folder, tmp_path, capsys):
    with pytest.raises(SystemExit) as e:
        train_grpo.main(["--model", tiny_folder, "--run", str(tmp_path / "run"), "--steps", "1", *TINY, *flags])
    assert e.value.code == 2 and word in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_resume_refuses_other_flags(unbroken, capsys):
    with pytest.raises(SystemExit):
        train_grpo.main(["--resume", str(unbroken), "--lr", "0.5"])
    assert "--lr" in capsys.readouterr().err


def test_pitfall_28_equals_sign_and_unknown_flags(capsys):
    args, given = train_grpo.p.parse(["--lr=1", "--steps", "3"])
    assert args.lr == 1.0 and given == {"lr", "steps"}
