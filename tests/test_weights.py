"""Weights in: GGUF by name, order and quantisation, and the embedded model against transformers on real text."""
import json
import os

import gguf
import numpy as np
import pytest
import torch
from safetensors import SafetensorError

import weights
from conftest import hf_model, ours
from model import Cache, append, sample
from rundir import keep_begun, new_folder, on_disk, write_atomically
from weights import build, load, read_gguf, save, smollm2_folder

NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
         "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
         "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def write_gguf(path, hf, quantised=False):
    """A .gguf of a transformers model as llama.cpp's converter lays it out: for llama, rotary pairs of q and k side by side."""
    c, arch = hf.config, hf.config.model_type
    w = gguf.GGUFWriter(str(path), arch)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_block_count(c.num_hidden_layers)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(c.num_key_value_heads)
    w.add_key_length(c.head_dim if arch == "qwen3" else c.hidden_size // c.num_attention_heads)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_rope_freq_base(c.rope_parameters["rope_theta"])
    w.add_vocab_size(c.vocab_size)
    for name, t in hf.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        stem, kind = name.rsplit(".", 1)
        x = t.numpy()
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            if arch == "llama" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = c.num_attention_heads if "q_proj" in stem else c.num_key_value_heads
                x = x.reshape(heads, 2, -1, x.shape[1]).swapaxes(1, 2).reshape(x.shape)
            target = f"blk.{layer}.{NAMES[stem]}.{kind}"
        else:
            target = f"{NAMES[stem]}.{kind}"
        if quantised and x.ndim == 2:
            w.add_tensor(target, gguf.quants.quantize(np.ascontiguousarray(x), gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            w.add_tensor(target, np.ascontiguousarray(x))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


@pytest.mark.parametrize("arch,tied", [("llama", True), ("llama", False), ("qwen2", True), ("qwen3", False)])
@pytest.mark.parametrize("quantised", [False, True])
def test_gguf_gives_the_logits_of_the_model_it_came_from(arch, tied, quantised, tmp_path):
    hf = hf_model(arch, heads=4, kv_heads=2, tied=tied, width=64, mlp=96)
    config, state = read_gguf(write_gguf(tmp_path / "m.gguf", hf, quantised))
    ids = torch.randint(3, 97, (2, 15))
    model = build(config, state)
    with torch.no_grad():
        gap = (model.logits(model(ids)) - hf(ids).logits).abs().max()
    assert gap < (0.5 if quantised else 1e-4)
    if not quantised:
        assert all(torch.equal(v, state[k]) for k, v in ours(hf).state_dict().items())


def test_an_unknown_gguf_is_refused_by_name(tmp_path, capsys):
    w = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "phi3")
    for add, value in ((w.add_context_length, 64), (w.add_embedding_length, 32), (w.add_block_count, 1), (w.add_feed_forward_length, 48), (w.add_head_count, 4), (w.add_vocab_size, 97)):
        add(value)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    with pytest.raises(SystemExit) as e:
        read_gguf(tmp_path / "m.gguf")
    assert e.value.code == 2 and "phi3" in capsys.readouterr().err


def test_smollm2_equals_transformers_on_real_text(capsys):
    """The embedded model, real weights: logits, greedy tokens and log-probs over five ragged turns on a live cache, and it knows a fact."""
    import transformers
    try:
        folder = smollm2_folder()
    except SystemExit:
        pytest.skip(f"the embedded model can't be fetched: {capsys.readouterr().err.strip()}")
    model, tokenizer = load("smollm2-135m")
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama" and len(model.model.layers) == 30
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    chunks = [[encode("The capital of France is"), encode("My sister sold the violin without")], [encode(" and the capital of Italy is"), encode(". Then")], [encode("."), encode(" my mother said that")],
              [encode(" Then"), encode(", and so I")], [encode(" we went home, and it was"), encode(" not")]]
    cache, rows, pending = Cache(model, 2, 0), [[], []], [[], []]
    for chunk in chunks:
        hidden = append(model, cache, [p + c for p, c in zip(pending, chunk)])
        tokens, logps = sample(model, cache, hidden, [3, 5], {2}, temperature=0)
        for b in range(2):
            rows[b] += chunk[b]
            with torch.no_grad():
                score = hf(torch.tensor([rows[b] + tokens[b]])).logits[0].log_softmax(-1)
            at = range(len(rows[b]) - 1, len(rows[b]) + len(tokens[b]) - 1)
            assert tokens[b] == [int(score[i].argmax()) for i in at]
            assert (model.logits(hidden[b:b + 1])[0].log_softmax(-1) - score[at[0]]).abs().max() < 1e-4
            assert max(abs(l - score[i, t]) for l, i, t in zip(logps[b], at, tokens[b])) < 1e-4
            rows[b], pending[b] = rows[b] + tokens[b], tokens[b][-1:]
    assert "Paris" in tokenizer.decode(rows[0]) and "Rome" in tokenizer.decode(rows[0])


@pytest.mark.parametrize("error", [SafetensorError("I/O error: No space left on device"), OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed writing file data/1"),
                                   Exception("No space left on device (os error 28)")])
def test_a_full_disk_is_one_line_and_leaves_what_was_there(error, tiny_folder, tmp_path, monkeypatch, capsys):
    model, tokenizer = load(tiny_folder)
    save(model, tokenizer, tmp_path / "best")
    write_atomically(tmp_path / "begun.pt", b"whole")

    def full(*_, **__):
        raise error
    monkeypatch.setattr(weights, "save_file", full)
    monkeypatch.setattr(torch, "save", full)
    for write, name in ((lambda: save(model, tokenizer, tmp_path / "best"), "best"), (lambda: keep_begun(tmp_path / "begun.pt", {}, model, None, []), "begun.pt")):
        with pytest.raises(SystemExit) as e:
            write()
        err = capsys.readouterr().err
        assert e.value.code == 2 and err.count("\n") == 1 and str(tmp_path / name) in err and "GB are free" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["begun.pt", "best"] and (tmp_path / "begun.pt").read_bytes() == b"whole"
    load(str(tmp_path / "best"))
    with pytest.raises(SystemExit):
        save(model, tokenizer, tmp_path / "run" / "sft")
    assert not (tmp_path / "run").exists()                 # the same command finds its name free


def test_what_is_no_fault_of_the_disk_is_not_called_one(tmp_path):
    with pytest.raises(RuntimeError, match="device-side"), on_disk(tmp_path / "best"):
        raise RuntimeError("CUDA error: device-side assert triggered")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no folder here that is there and takes nothing")
def test_a_folder_that_takes_nothing_is_named_before_the_work(capsys):
    with pytest.raises(SystemExit):
        new_folder("/proc/sft")
    assert capsys.readouterr().err.count("\n") == 1
