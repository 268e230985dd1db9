"""Faults found in the field's own code that belong to no single file here, and the roll-call of all the others."""
import ast
import re

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import ROOT, hf_model, ours
from model import Cache, append, generate
from weights import load, save

COVERED = range(1, 35)


def test_every_pitfall_is_named_by_a_test():
    """A fault's number stands in the name or docstring of the test that fails on it."""
    named = set()
    for file in (ROOT / "tests").glob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for numbers in re.findall(r"[Pp]itfalls?[ _]((?:\d+(?:, | and |-|_and_|_)?)+)", f"{node.name} {ast.get_docstring(node)}"):
                    for first, last in re.findall(r"(\d+)(?:-(\d+))?", numbers):
                        named |= set(range(int(first), int(last or first) + 1))
    assert not set(COVERED) - named


def test_pitfall_8_generation_config_is_never_applied(tmp_path, tiny_folder):
    """A checkpoint's generation_config.json (repetition penalty, top-k) must not change a token unless asked for by flag."""
    model, tokenizer = load(tiny_folder)
    prompts = [[5, 6, 7, 8], [9, 10]]
    save(model, tokenizer, tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text('{"do_sample": true, "top_k": 1, "repetition_penalty": 50.0, "temperature": 0.01}')
    again, _ = load(str(tmp_path / "m"))
    draw = lambda m: generate(m, prompts, 12, {258}, temperature=1.0, generator=torch.Generator().manual_seed(0))[0]
    assert draw(model) == draw(again)


def test_pitfall_9_no_template_is_applied(tiny_folder):
    """transformers 5 returns a dict from apply_chat_template; nothing of ours may depend on it, or on any template at all."""
    sources = "".join(f.read_text() for f in ROOT.glob("*.py"))
    assert "apply_chat_template(" not in sources
    _, tokenizer = load(tiny_folder)
    tokenizer.chat_template = "{{ raise_exception('a template was rendered') }}"
    from rollout import Chat
    assert Chat(tokenizer, 259).opening("hello")


def test_pitfall_14_decoding_never_copies_the_cache():
    """GQA by repeat_interleave of the cache is 10-30x slower: in a decode step no operation may make a tensor as large as the keys it reads."""
    model = ours(hf_model("llama", heads=6, kv_heads=2, width=48))
    cache = Cache(model, 4, 400)
    append(model, cache, [[3] * 300] * 4)
    largest = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for o in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(o, torch.Tensor) and o._base is None and o.data_ptr() not in (cache.k.data_ptr(), cache.v.data_ptr()) and not func._schema.name.endswith("_"):
                    views = {"aten::slice", "aten::select", "aten::transpose", "aten::view", "aten::expand", "aten::permute", "aten::unsqueeze", "aten::t", "aten::alias", "aten::detach", "aten::_unsafe_view"}
                    if func._schema.name not in views:
                        largest.append((o.numel(), func._schema.name))
            return out
    with Spy(), torch.no_grad():
        model(torch.tensor([[5]] * 4), cache)
    keys = 4 * 2 * 301 * 8                                    # B x Hkv x S x head_dim of one layer
    assert largest and max(largest)[0] < keys, max(largest)
