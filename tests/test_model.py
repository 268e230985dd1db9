"""The network, the cache, sampling and log-probs against transformers, closed forms and brute force."""
import json

import pytest
import torch

from conftest import hf_model, ours
from linear import KEPT
from model import Cache, append, generate, sample, token_logprobs, truncate
from weights import build, load, pick_dtype, read_config, resolve, save

KINDS = [(arch, heads, kv, tied) for arch in ("qwen2", "qwen3", "llama") for heads, kv, tied in ((4, 4, True), (4, 2, False), (6, 2, True), (7, 1, False))]


def pair(arch, heads, kv, tied, **more):
    hf = hf_model(arch, heads, kv, tied, width=heads * 8, **more)
    return hf, ours(hf)


@pytest.mark.parametrize("arch,heads,kv,tied", KINDS)
def test_logits_and_logprobs_equal_transformers(arch, heads, kv, tied):
    hf, model = pair(arch, heads, kv, tied)
    ids = torch.randint(3, 97, (3, 21))
    with torch.no_grad():
        want = hf(ids).logits
        hidden = model(ids)
        assert (model.logits(hidden) - want).abs().max() < 1e-4
        logp, entropy = token_logprobs(model, hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), chunk=10)
    reference = want[:, :-1].log_softmax(-1).flatten(0, 1)
    assert (logp - reference.gather(1, ids[:, 1:].flatten()[:, None])[:, 0]).abs().max() < 1e-4
    assert (entropy + (reference.exp() * reference).sum(-1)).abs().max() < 1e-4


@pytest.mark.parametrize("arch,heads,kv,tied", KINDS)
def test_five_ragged_turns_on_a_live_cache_equal_transformers(arch, heads, kv, tied):
    """Pitfalls 10-12: appending several tokens to a ragged cache, then greedy decoding, equals one full forward of each row alone."""
    hf, model = pair(arch, heads, kv, tied)
    g = torch.Generator().manual_seed(1)
    cache, rows, pending = Cache(model, 3, 256), [[], [], []], [[], [], []]
    for turn in range(5):
        chunks = [p + torch.randint(3, 97, (int(torch.randint(1, 9, (), generator=g)),), generator=g).tolist() for p in pending]
        hidden = append(model, cache, chunks)
        rows = [r + c[len(p):] for r, c, p in zip(rows, chunks, pending)]
        tokens, logps = sample(model, cache, hidden, [3, 7, 5], {2}, temperature=0, check_every=2)
        for b in range(3):
            full = torch.tensor([rows[b]])
            with torch.no_grad():
                want = hf.generate(full, max_new_tokens=[3, 7, 5][b], do_sample=False, eos_token_id=2)[0, full.shape[1]:].tolist()
                score = hf(torch.tensor([rows[b] + want])).logits[0].log_softmax(-1)
            assert tokens[b] == want, (turn, b)
            reference = [score[len(rows[b]) + i - 1, t] for i, t in enumerate(want)]
            assert max(abs(a - r) for a, r in zip(logps[b], reference)) < 1e-4
            rows[b] = rows[b] + want
            pending[b] = want[-1:]
        assert cache.n.tolist() == [len(r) - 1 for r in rows]      # the last sampled id is fed with the next chunk


def test_each_row_alone_gives_the_same_tokens_as_in_the_batch(tiny):
    """Pitfall 11: a greedy row does not depend on its neighbours or their lengths."""
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14]]
    batch, _, _ = generate(tiny, prompts, 12, {2}, temperature=0)
    for p, want in zip(prompts, batch):
        assert generate(tiny, [p], 12, {2}, temperature=0)[0][0] == want


def test_dropping_finished_rows_changes_no_token(tiny):
    """Pitfall 13: compaction within a turn (every token, every 3, never) and retirement between turns, greedy and sampled."""
    prompts = [[i + 3, i + 4] for i in range(8)]
    for temperature in (0, 1.0):
        out = []
        for check in (1, 3, 100):
            cache = Cache(tiny, 8, 96)
            hidden = append(tiny, cache, prompts)
            budgets = [1, 20, 3, 9, 2, 17, 4, 12]
            first, _ = sample(tiny, cache, hidden, budgets, {2, 3, 4}, temperature=temperature, check_every=check, generator=torch.Generator().manual_seed(7))
            keep = [1, 3, 5, 7]
            cache = cache.rows(keep)
            hidden = append(tiny, cache, [first[r][-1:] + [50, 51] for r in keep])
            out.append((first, sample(tiny, cache, hidden, [9, 9, 9, 9], {2}, temperature=0, check_every=check)[0], cache.n.tolist()))
        assert out[0] == out[1] == out[2]


def test_sharing_the_prompt_changes_nothing(tiny):
    """Pitfall 13: prefill once and copy the row, against prefill of every copy."""
    prompt = [[5, 9, 4], [7]]
    shared = Cache(tiny, 2, 40)
    hidden = append(tiny, shared, prompt)[[0, 0, 0, 1, 1, 1]]
    shared = shared.rows([0, 0, 0, 1, 1, 1])
    alone = Cache(tiny, 6, 40)
    hidden_alone = append(tiny, alone, [prompt[0]] * 3 + [prompt[1]] * 3)
    how = dict(budgets=[10] * 6, stop_ids={2}, temperature=1.0)
    a = sample(tiny, shared, hidden, generator=torch.Generator().manual_seed(3), **how)
    b = sample(tiny, alone, hidden_alone, generator=torch.Generator().manual_seed(3), **how)
    assert a[0] == b[0] and shared.n.tolist() == alone.n.tolist()
    assert len({tuple(t) for t in a[0][:3]}) > 1              # the copies are independent draws


def test_rewinding_forgets(tiny):
    """Setting n back (think blocks, probes) gives what a fresh cache gives."""
    cache = Cache(tiny, 2, 64)
    append(tiny, cache, [[5, 6, 7], [8, 9]])
    n = cache.n.clone()
    append(tiny, cache, [[11, 12, 13, 14], [15]])
    cache.n.copy_(n)
    again = append(tiny, cache, [[20, 21], [22]])
    fresh = Cache(tiny, 2, 64)
    append(tiny, fresh, [[5, 6, 7], [8, 9]])
    assert torch.allclose(again, append(tiny, fresh, [[20, 21], [22]]), atol=1e-5)


def test_sampling_follows_the_distribution_and_never_a_banned_id(tiny):
    """Chi-square of 20,000 first tokens against softmax(logits / T) over the allowed ids; returned log-probs are exact."""
    banned = torch.zeros(97, dtype=torch.bool)
    banned[[2, 5, 90]] = True
    n, temperature = 20000, 0.7
    cache = Cache(tiny, 1, 8)
    hidden = append(tiny, cache, [[3, 4]]).expand(n, -1)
    tokens, logps = sample(tiny, cache.rows([0] * n), hidden, [1] * n, {2}, banned, temperature, generator=torch.Generator().manual_seed(0))
    p = tiny.logits(hidden[:1]).masked_fill(banned, float("-inf")).div(temperature).softmax(-1)[0]
    counts = torch.bincount(torch.tensor([t[0] for t in tokens]), minlength=97)
    assert counts[banned].sum() == 0
    big = p * n > 5
    chi2 = ((counts[big] - p[big] * n) ** 2 / (p[big] * n)).sum()
    assert chi2 < big.sum() + 5 * (2 * big.sum()) ** 0.5
    assert max(abs(l[0] - p[t[0]].log()) for t, l in zip(tokens, logps)) < 1e-5


def test_truncate_by_hand():
    logits = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05]]).log()
    assert truncate(logits, top_k=2).isfinite().tolist() == [[True, True, False, False, False]]
    assert truncate(logits, top_p=0.6).isfinite().tolist() == [[True, True, False, False, False]]
    assert truncate(logits, top_p=0.01).isfinite().tolist() == [[True, False, False, False, False]]


@pytest.mark.parametrize("chunk", [7, 64, 1000])
def test_token_logprobs_gradients_equal_autograd(chunk):
    """Values and gradients of logp and entropy, with temperature and banned ids, against log_softmax and autograd."""
    torch.manual_seed(0)
    model = ours(hf_model("qwen2", tied=False))
    banned = torch.zeros(97, dtype=torch.bool)
    banned[[0, 1, 95, 96]] = True
    banned[7:14] = True                                      # a whole chunk of 7 is banned
    hidden = torch.randn(11, 32, requires_grad=True)
    target = torch.randint(20, 95, (11,))
    wl, wh = torch.randn(11), torch.randn(11)
    logp, entropy = token_logprobs(model, hidden, target, banned, 0.8, chunk)
    got = torch.autograd.grad((logp * wl + entropy * wh).sum(), (hidden, model.lm_head.weight))
    reference = (model.logits(hidden) / 0.8).masked_fill(banned, float("-inf")).log_softmax(-1)
    ref_logp = reference.gather(1, target[:, None])[:, 0]
    finite = reference.masked_fill(banned, 0.0)
    ref_entropy = -(reference.exp() * finite).sum(-1)
    want = torch.autograd.grad((ref_logp * wl + ref_entropy * wh).sum(), (hidden, model.lm_head.weight))
    assert torch.allclose(logp, ref_logp, atol=1e-5) and torch.allclose(entropy, ref_entropy, atol=1e-5)
    for a, b in zip(got, want):
        assert torch.allclose(a, b, atol=1e-5)


def test_logprob_memory_never_holds_positions_by_vocabulary():
    """Pitfall 25, in small: no tensor of the forward or backward has N x V elements (bench.py logprob measures the real size)."""
    sizes = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(o.numel() for o in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(o, torch.Tensor))
            return out
    model = ours(hf_model("qwen2", vocab=4096, width=32))
    hidden = torch.randn(512, 32, requires_grad=True)
    with Spy():
        logp, _ = token_logprobs(model, hidden, torch.randint(0, 4096, (512,)), chunk=256)
        logp.sum().backward()
    assert sizes and max(sizes) <= 512 * 256


def test_bf16_compute_keeps_fp32_masters_and_sees_every_update():
    """The kept bf16 copies must follow each in-place weight edit, whichever kernel makes it."""
    model = ours(hf_model("llama"), torch.bfloat16)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    ids = torch.randint(3, 97, (2, 9))
    for fused in (False, True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)
        with torch.no_grad():
            before = model.logits(model(ids))
        token_logprobs(model, model(ids).flatten(0, 1), ids.flatten())[0].sum().backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 and p.grad.abs().sum() > 0 for p in model.parameters())
        optimizer.step()
        with torch.no_grad():
            after = model.logits(model(ids))
        assert after.dtype == torch.float32 and (after - before).abs().max() > 0.01
        with torch.no_grad():
            KEPT.clear()
            assert torch.equal(after, model.logits(model(ids)))


def test_save_loads_in_transformers_and_here(tmp_path):
    import transformers
    from tokenizers import Tokenizer, models
    vocab = {"<|im_start|>": 0, "<|im_end|>": 1, **{chr(33 + i): i + 2 for i in range(90)}}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="!")))
    for arch, heads, kv, tied in (("qwen2", 4, 2, True), ("qwen3", 4, 2, False), ("llama", 6, 2, True)):
        hf, model = pair(arch, heads, kv, tied)
        save(model, tokenizer, tmp_path / arch)
        back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / arch).eval()
        again, _ = load(str(tmp_path / arch))
        ids = torch.randint(3, 90, (2, 7))
        with torch.no_grad():
            assert type(back) is type(hf) and torch.allclose(back(ids).logits, hf(ids).logits, atol=1e-6)
            assert torch.allclose(again.logits(again(ids)), hf(ids).logits, atol=1e-4)


def test_weight_import_checks_every_shape_and_name():
    hf = hf_model("qwen2")
    config = json.loads(hf.config.to_json_string(use_diff=False))
    good = dict(hf.state_dict())
    for spoil in (lambda s: s.pop("model.norm.weight"), lambda s: s.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(3, 3)}), lambda s: s.update({"extra.weight": torch.zeros(1)})):
        state = dict(good)
        spoil(state)
        with pytest.raises(SystemExit):
            build(config, state)
    build(config, good)


@pytest.mark.parametrize("change,word", [({"model_type": "mistral"}, "mistral"), ({"use_sliding_window": True}, "sliding"), ({"hidden_act": "gelu"}, "gelu"),
                                         ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope scaling")])
def test_what_cannot_be_run_exactly_is_refused_by_name(change, word, capsys):
    config = json.loads(hf_model("qwen2").config.to_json_string(use_diff=False))
    with pytest.raises(SystemExit) as e:
        read_config({**config, **change})
    assert e.value.code == 2 and word in capsys.readouterr().err


def test_rope_theta_is_read_from_old_and_new_configs():
    """Pitfall 9: transformers 5 moved rope_theta into rope_parameters; both spellings give the same angles."""
    config = json.loads(hf_model("qwen2").config.to_json_string(use_diff=False))
    config.pop("rope_parameters")
    assert read_config({**config, "rope_theta": 5e5}).rope_theta == read_config({**config, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}).rope_theta == 5e5


def test_unknown_models_and_fp16_are_one_line_errors(tmp_path, capsys):
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_text("{}")
    for name in (str(tmp_path / "nowhere"), str(tmp_path / "half"), str(tmp_path / "x.gguf"), "gpt2"):
        with pytest.raises(SystemExit) as e:
            resolve(name)
        err = capsys.readouterr().err
        assert e.value.code == 2 and err.count("\n") == 1 and name in err
    with pytest.raises(SystemExit):
        pick_dtype("fp16", torch.device("cpu"))


def test_auto_takes_the_dtype_that_was_measured_faster(monkeypatch, tmp_path, capsys):
    import linear
    clock, cpu = [0.0], torch.device("cpu")
    for slow, wanted in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        def forward(self, x):
            clock[0] += (3.0 if x.dtype == slow else 1.0) * len(x)
        monkeypatch.setattr(linear.Linear, "forward", forward)
        monkeypatch.setattr(linear, "PACKS", [torch.float32, torch.bfloat16])
        monkeypatch.setattr(linear.time, "perf_counter", lambda: clock[0])
        monkeypatch.setenv("NANOEMPATHY_CACHE", str(tmp_path / str(slow)))
        assert pick_dtype("auto", cpu) == wanted == pick_dtype("auto", cpu) and capsys.readouterr().out.count("compute dtype") == 1
    monkeypatch.setattr(linear, "PACKS", [torch.float32])
    assert pick_dtype("auto", cpu) == torch.bfloat16       # kept: the same machine computes as it did
    monkeypatch.setenv("NANOEMPATHY_CACHE", str(tmp_path / "new"))
    assert pick_dtype("auto", cpu) == torch.float32 and pick_dtype("bf16", cpu) == torch.bfloat16
