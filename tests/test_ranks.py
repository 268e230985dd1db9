"""Two processes are one: the same episodes give the single process's loss and weights; whole runs learn together, save once and resume."""
import os
import runpy
import shutil
import socket
import subprocess
import sys

import pytest
import torch
import transformers

import ranks
import train_grpo
import train_ppo
from conftest import ROOT, ours
from program import together
from test_train_grpo import TINY, metrics
from weights import load, save

CHILD = '''
import sys
from copy import deepcopy
from types import SimpleNamespace
import pathlib, numpy, torch
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests"]
import ranks, train_grpo, train_ppo
from model import Critic
from rollout import Chat, rollout
from rubric import Reward, score
from scenarios import load_scenarios
from simulator import ScriptedUsers
from weights import load
from test_train_ppo import ARGS
torch.set_num_threads(1)
ranks.begin(torch.device("cpu"))
assert ranks.total([0.25, numpy.float64(0.25)][ranks.RANK]).item() == 0.25 * ranks.WORLD and ranks.total([True, 1][ranks.RANK]).item() == ranks.WORLD      # one number, whatever its type on each
model, tokenizer = load(sys.argv[2])
chat = Chat(tokenizer, model.config.vocab)
jobs = [(s, None) for s in load_scenarios(sys.argv[1] + "/data/scenarios.jsonl", "dev")[:4]]
episodes = rollout(model, chat, ScriptedUsers(), jobs, 2, 3, 6, 1024, 0.9, torch.Generator().manual_seed(0), keep_states=True)      # the same ones in every process
episodes[1].finish = "user_failed"                         # uneven: the first process has fewer to learn from
fsdp, empty = sys.argv[4] == "parted", sys.argv[4] == "empty"
part = lambda network: ranks.shard(network) if fsdp and ranks.WORLD > 1 else network
if empty:
    for e in episodes[4:]:                                 # one process has nothing to learn from at all
        e.finish = "user_failed"
first, groups = ranks.share(list(range(4)))
mine = [e for e in episodes if e.group in groups]
args = SimpleNamespace(**{**vars(ARGS), "minibatches": 2, "epochs": 2, "critic_warmup": 2, "group_size": 2, "gae": "turn", "tokens_per_microbatch": 1500, "kl": 0.1, "grad_clip": 1.0})
out = {}
policy, reference = part(deepcopy(model)), part(deepcopy(model).requires_grad_(False))
with ranks.gathered(policy):                               # each rank talks as long as it likes
    said = rollout(policy, chat, ScriptedUsers(), jobs[ranks.RANK:], 1, 1 + ranks.RANK, 6, 1024, 0.9, torch.Generator().manual_seed(0))
assert [e.replies[0] for e in said] == [e.replies[0] for e in rollout(model, chat, ScriptedUsers(), jobs[ranks.RANK:], 1, 1, 6, 1024, 0.9, torch.Generator().manual_seed(0))]
advantages, _ = train_grpo.trajectory_advantages(score(mine), 2, 0.03)
seen = train_grpo.update(args, policy, reference, torch.optim.AdamW(policy.parameters(), lr=3e-4), chat, mine, advantages)
out["grpo"], out["grpo_metrics"] = ranks.whole(policy.state_dict()), {k: seen[k] for k in ("kl", "entropy", "canary", "policy_tokens", "grad_norm", "kl_reference")}
for kind in (False, True):
    policy, critic = deepcopy(model), None
    critic = Critic(policy, separate=kind)
    part(policy)
    if kind:
        part(critic.own)
    optimizer = torch.optim.AdamW([*policy.parameters(), *critic.parameters()], lr=3e-4)
    rewards = score(mine)
    more = [r and Reward(0.0, {}, [0.1 * i * (-1) ** t for t in range(len(r.turns))]) for i, r in enumerate(rewards, 2 * first)]
    b = train_ppo.advantages(args, policy, critic, reference, chat, mine, {"emotion": rewards, "rubric": more}, 0.7)
    train_ppo.warm_up(args, policy, critic, optimizer, chat, mine, b)
    seen = train_ppo.update(args, policy, critic, reference, optimizer, chat, mine, b)
    name = f"ppo_{kind}"
    out[name], out[name + "_metrics"] = {**ranks.whole(policy.state_dict()), **{"critic." + k: v for k, v in ranks.whole(critic.state_dict()).items()}}, {**{k: seen[k] for k in ("kl", "value_loss", "grad_norm", "critic_grad_norm")}, **b["metrics"]}
if ranks.RANK == 0:
    torch.save(out, sys.argv[3])
ranks.end()
threads = [task.read_text() for task in pathlib.Path("/proc/self/task").glob("*/comm")]
assert fsdp or not [name for name in threads if "gloo" in name], threads      # one that lived on could abort the process at its very end; with --fsdp a cache of torch's holds the group
'''


def torchrun(n, command, **more):
    """Its own port, so that tests side by side don't meet."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    return subprocess.run([sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={n}", "--master_addr=127.0.0.1", f"--master_port={port}", "--", *map(str, command)], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "OMP_NUM_THREADS": "1"}, **more)


@pytest.mark.parametrize("kind,text", [("cuda", "process 1 has no GPU of its own, there are 1"), ("mps", "add --device cpu")])
def test_a_process_without_a_device_of_its_own_is_told_so(kind, text, monkeypatch, capsys):
    monkeypatch.setattr(ranks, "WORLD", 2)
    monkeypatch.setattr(ranks, "LOCAL", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit):
        ranks.begin(torch.device(kind))
    assert text in capsys.readouterr().err


def test_each_process_takes_the_gpu_of_its_number(monkeypatch):
    """Without a GPU: what begin() asks of torch on the way to its group, one call after the other."""
    asked = []
    monkeypatch.setattr(ranks, "WORLD", 2)
    monkeypatch.setattr(ranks, "LOCAL", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    monkeypatch.setattr(ranks.dist, "init_process_group", lambda backend, **_: asked.append(backend))
    monkeypatch.setattr(ranks.atexit, "register", asked.append)
    device = ranks.begin(torch.device("cuda"))
    assert asked == [device, "nccl", ranks.end] and device == torch.device("cuda", 1)


@pytest.mark.parametrize("how", ["whole", "empty", "parted"])
def test_two_processes_give_the_loss_and_weights_of_one(how, tiny_folder, tmp_path, monkeypatch):
    """GRPO, PPO with a shared critic, PPO with its own; two passes of two mini-batches, a failed user on one side, unequal numbers of micro-batches, a reference, clipped gradients: metrics
    and all weights within 1e-5. empty: one rank has nothing to learn from; parted: --fsdp, on a network whose head is not its embedding (a critic of its own has none then)."""
    if how == "parted":
        model, tokenizer = load(tiny_folder)
        untied = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**model.hf_config, "tie_word_embeddings": False}))
        tiny_folder = str(tmp_path / "untied")
        save(ours(untied), tokenizer, tiny_folder)
    (tmp_path / "child.py").write_text(CHILD)
    done = together(2, [tmp_path / "child.py", ROOT, tiny_folder, tmp_path / "2.pt", how], tmp_path)
    assert done.returncode == 0, done.stderr[:3000]
    monkeypatch.setattr(sys, "argv", ["child.py", str(ROOT), tiny_folder, str(tmp_path / "1.pt"), how])
    runpy.run_path(str(tmp_path / "child.py"))             # alone, in this process
    one, two = (torch.load(tmp_path / f"{n}.pt", weights_only=True) for n in (1, 2))
    for name in ("grpo", "ppo_False", "ppo_True"):
        assert max((one[name][k] - two[name][k]).abs().max().item() for k in one[name]) < 1e-5, name
        assert one[f"{name}_metrics"] == pytest.approx(two[f"{name}_metrics"], abs=1e-5), name
        assert max((one[name][k] - one["grpo"][k]).abs().max().item() for k in one["grpo"]) > 1e-4 or name == "grpo"      # it moved, each its own way


@pytest.mark.parametrize("script", ["train_grpo.py", "train_ppo.py"])
def test_a_run_of_two_processes_learns_saves_once_and_resumes(script, tiny_folder, tmp_path, monkeypatch, capsys):
    """Each rank plays its own groups; the folder has every step once, all dialogues in it; 1 + 1 steps are 2, to the digit (PPO's run is not repeated: it shares this code);
    another number of processes is refused."""
    shutil.copytree(tiny_folder, tmp_path / "generator" / "sft")
    flags = ["--model", tiny_folder, *TINY, "--groups", "4", "--eval_every", "1", "--curriculum", "dual", "--reward", "emotion+format+rubric:care", "--generator", tmp_path / "generator"]
    for run, steps in (("two", 2), ("one", 1))[:2 if script == "train_grpo.py" else 1]:
        command = [ROOT / script, "--run", tmp_path / run, "--steps", steps, *flags]
        done = torchrun(2, command) if run == "one" else together(2, command, tmp_path)          # torchrun itself once: it brings its own store, and imports all again
        assert done.returncode == 0, done.stderr[:3000]
        assert done.stdout.count("step   1") == 1          # one voice
    b = metrics(tmp_path / "two")
    assert [m["step"] for m in b] == [0, 1, 2] and sum(map(len, [m["curriculum"]["outcomes"] for m in b[1:]])) == 8
    assert (tmp_path / "two" / "samples" / "step_000001.txt").read_text().count("  tokens ") == 4
    if script == "train_ppo.py":
        return
    done = together(2, [ROOT / script, "--resume", tmp_path / "one", "--steps", 2], tmp_path)
    assert done.returncode == 0, done.stderr[:3000]
    assert metrics(tmp_path / "one") == b
    kept = [torch.load(tmp_path / run / "checkpoint" / "state.pt", weights_only=True)["rewards"] for run in ("one", "two")]
    assert kept[0] == kept[1] and len(set(kept[0])) == 2   # what each rank's judge and generator had said is its own again
    monkeypatch.setattr(ranks, "everyone", lambda rows: rows)
    monkeypatch.setattr(ranks, "begin", lambda device: device)         # what is refused is refused before they meet
    for world, word, more in ((1, "2 processes", ["--resume", tmp_path / "one", "--steps", 3]), (3, "with 2 processes", ["--resume", tmp_path / "one"]), (3, "3 processes", ["--run", tmp_path / "three", "--steps", 1, *flags])):
        monkeypatch.setattr(ranks, "WORLD", world)
        with pytest.raises(SystemExit) as e:
            train_grpo.main(list(map(str, more)))
        assert e.value.code == 2 and word in capsys.readouterr().err and not (tmp_path / "three").exists()


@pytest.mark.parametrize("script,more", [("train_grpo.py", ["--kl", "0.01"]), ("train_ppo.py", ["--critic", "separate"])])
def test_a_parted_run_saves_whole_weights_and_resumes(script, more, tiny_folder, tmp_path, capsys):
    """--fsdp: the checkpoint and best/ are those of an ordinary run; 1 + 1 steps are 2, to the digit; the first step says what whole copies would have said."""
    flags = ["--model", tiny_folder, *TINY, "--groups", "4", "--eval_every", "1", *more]
    resumes = script == "train_grpo.py"                    # PPO's shares that code
    for run, steps, part in [("one", 1, ["--fsdp"]), ("plain", 1, [])] + [("two", 2, ["--fsdp"])] * resumes:
        done = together(2, [ROOT / script, "--run", tmp_path / run, "--steps", steps, *flags, *part], tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
    if resumes:
        done = together(2, [ROOT / script, "--resume", tmp_path / "one", "--steps", 2], tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        assert metrics(tmp_path / "one") == metrics(tmp_path / "two")
    a, b = metrics(tmp_path / "one")[1], metrics(tmp_path / "plain")[1]
    assert all(a[k] == pytest.approx(b[k], abs=1e-4) for k in ("reward", "entropy", "grad_norm", "kl", "policy_tokens"))
    model, _ = load(str(tmp_path / "one" / "best"))
    state = torch.load(tmp_path / "one" / "checkpoint" / "state.pt", weights_only=True)
    assert all(type(v) is torch.Tensor and v.shape == model.state_dict()[k].shape for k, v in state["model"].items())
    with pytest.raises(SystemExit):
        {"train_grpo.py": train_grpo, "train_ppo.py": train_ppo}[script].main(["--model", tiny_folder, "--run", str(tmp_path / "x"), "--fsdp"])
    assert "torchrun" in capsys.readouterr().err
