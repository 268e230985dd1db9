"""The memory plan against what autograd and the cache really hold; activation checkpointing changes no gradient; a run that can't fit is refused before its weights are read."""
from copy import deepcopy
from pathlib import Path

import pytest
import torch

import memory
import train_grpo
from conftest import hf_model, ours
from linear import KEPT
from model import Cache, append, sample, token_logprobs
from test_train_grpo import TINY


def kept(model, B, T):
    """Bytes of the storages that autograd keeps of one forward, parameters left out."""
    seen, own = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(t):
        if t.untyped_storage().data_ptr() not in own:
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        hidden = model(torch.randint(0, 97, (B, T)))
    return sum(seen.values()), hidden


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_what_autograd_keeps_is_what_the_plan_says(arch, dtype):
    """One trained block more costs exactly kept_per_token a token (and in bf16 the cast of its weights)."""
    model = ours(hf_model(arch, layers=3, width=64, mlp=160), dtype)
    sizes = []
    for layers in (1, 2):
        model.train_only_upper(layers)
        sizes.append(kept(model, 2, 100)[0])
    block = model.model.layers[0]
    cast = 0 if dtype == torch.float32 else 2 * sum(p.numel() for name, p in block.named_parameters() if not name.endswith("bias"))
    assert sizes[1] - sizes[0] - cast == pytest.approx(200 * memory.kept_per_token(model.config, dtype.itemsize), rel=0.001)


def test_checkpointing_keeps_the_inputs_only_and_changes_no_gradient(tiny):
    ids = torch.randint(0, 97, (2, 50))
    tiny(ids).square().sum().backward()
    want = [p.grad.clone() for p in tiny.parameters()]
    tiny.zero_grad()
    full, _ = kept(tiny, 2, 50)
    tiny.checkpointed = True
    less, hidden = kept(tiny, 2, 50)
    assert less < 0.3 * full
    tiny(ids).square().sum().backward()
    assert all(torch.allclose(a, p.grad, atol=1e-6) for a, p in zip(want, tiny.parameters()))


def test_the_cache_and_the_weights(tiny):
    p = memory.plan(tiny.config, torch.float32, torch.device("cpu"), 1, 0, 5, 128, 64)
    cache = Cache(tiny, 5, 128)
    assert p["sampling"]["cache"] == cache.k.nbytes + cache.v.nbytes and p["always"]["weights, fp32"] == 4 * sum(q.numel() for q in tiny.parameters())
    tiny.train_only_upper(1)
    assert p["update"]["gradients"] == 4 * sum(q.numel() for q in tiny.parameters() if q.requires_grad) == p["always"]["Adam"] / 2
    tiny.add_lora(3)
    thin = memory.plan(tiny.config, torch.float32, torch.device("cpu"), 1, 3, 5, 128, 64)
    assert thin["update"]["gradients"] == 4 * sum(q.numel() for q in tiny.parameters() if q.requires_grad)
    more = memory.plan(tiny.config, torch.float32, torch.device("cpu"), 1, 0, 5, 128, 64, policies=2, frozen=1)
    assert more["always"]["weights, fp32"] == 3 * p["always"]["weights, fp32"] and memory.peak(more) > memory.peak(p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora,layers,kl", [(0, 0, 0), (4, 0, 0), (4, 1, 0), (4, 0, 1)])
def test_the_copies_that_are_kept_of_the_weights(dtype, lora, layers, kl):
    """Sampling, the update and the reference each keep their own of what is adapted: merged, cast, laid out without the adapters."""
    model = ours(hf_model("qwen2", layers=3, width=64, mlp=160), dtype)
    model.train_only_upper(layers)
    if lora:
        model.add_lora(lora)
    KEPT.clear()
    cache, ids = Cache(model, 2, 16), torch.randint(0, 97, (2, 10))
    hidden = append(model, cache, [[1, 2, 3], [4, 5]])
    sample(model, cache, hidden, [4, 4], set(), generator=torch.Generator())
    token_logprobs(model, model(ids).flatten(0, 1), ids.flatten())[0].sum().backward()
    if kl:
        with torch.no_grad(), model.without_adapters():
            model(ids)
    kept = sum(t.numel() * dtype.itemsize for of in KEPT.values() for _, t in of.values())
    planned = memory.plan(model.config, dtype, torch.device("cpu"), layers, lora, 2, 16, 64, frozen=kl)["always"]["copies to sample with"]
    assert kept == pytest.approx(planned, rel=0.07)


def test_a_run_that_cannot_fit_is_refused_with_a_way_out(tiny_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda device: 1000)
    monkeypatch.setattr(train_grpo, "load", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(SystemExit) as e:
        train_grpo.main(["--model", tiny_folder, "--run", str(tmp_path / "run"), "--steps", "1", *TINY])
    assert e.value.code == 2 and "--lora" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_as_many_tokens_as_fit(tiny_folder, monkeypatch, capsys):
    """--tokens_per_microbatch auto: the largest that the plan has room for, whole dialogues at least, and no more than is of use."""
    shape = dict(layers=0, lora=0, dialogues=4, max_tokens=256, micro_tokens="auto")
    c = memory.read_config(memory.config_of(Path(tiny_folder)))
    chosen = {}
    for free in (10 ** 6, 3 * 10 ** 8, 35 * 10 ** 7, 10 ** 12):
        monkeypatch.setattr(memory, "available", lambda device: free)
        try:
            chosen[free] = memory.check(tiny_folder, torch.float32, torch.device("cuda"), **shape)
        except SystemExit:
            chosen[free] = None
            assert "GB" in capsys.readouterr().err
    assert chosen[10 ** 6] is None and chosen[10 ** 12] == 32768 and 256 < chosen[3 * 10 ** 8] < chosen[35 * 10 ** 7] < 32768
    held = lambda n: sum(sum(memory.plan(c, torch.float32, torch.device("cuda"), **{**shape, "micro_tokens": n})[part].values()) for part in ("always", "update"))
    assert held(chosen[35 * 10 ** 7] - 1) <= 0.8 * 35 * 10 ** 7 <= held(chosen[35 * 10 ** 7] + 1)
    monkeypatch.setattr(memory, "available", lambda device: None)
    assert memory.check(tiny_folder, torch.float32, torch.device("mps"), **shape) == 4096 == memory.check(tiny_folder, torch.float32, torch.device("cpu"), **shape) and memory.tokens_or_auto("auto") == "auto" and memory.tokens_or_auto("7") == 7


def test_adam_on_the_host_is_adam(tiny_chat):
    """Moments and weights bit for bit those of AdamW, two groups with rates of their own, saved and loaded into the other kind."""
    def train(offload, state=None, steps=3, model=None):
        model = model or deepcopy(tiny_chat[0])
        parameters = list(model.parameters())
        optimizer = memory.adamw([{"params": parameters[:3], "lr": 0.01}, {"params": parameters[3:], "lr": 0.003}], offload)
        if state:
            optimizer.load_state_dict(state)
        for step in range(steps):
            optimizer.zero_grad(set_to_none=True)
            model(torch.arange(5 + step)[None]).square().sum().backward()
            optimizer.step()
        return model, optimizer
    (a, one), (b, two) = train(False), train(True)
    assert isinstance(two, memory.HostAdamW) and all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))
    assert all(torch.equal(x, y) for p, q in zip(one.state_dict()["state"].values(), two.state_dict()["state"].values()) for x, y in zip(p.values(), q.values()))
    a, b = train(True, one.state_dict(), 2, a)[0], train(False, two.state_dict(), 2, b)[0]
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters())) and not any(x is y for x, y in two.pairs())
