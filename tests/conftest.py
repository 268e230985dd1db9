"""Shared by the tests: tiny random models of each architecture, ours and transformers', with the same weights."""
import os
import sys
from pathlib import Path

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")             # two workers side by side (pytest.ini), and the programs that they start
os.environ.setdefault("HF_HUB_OFFLINE", "1")               # no test talks to a hub
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_threads():
    """A script under test may have set --threads for the whole process."""
    yield
    torch.set_num_threads(1)


def hf_model(arch, heads=4, kv_heads=2, tied=True, vocab=97, layers=2, width=32, mlp=48, seed=0, **more):
    """A random transformers model whose weights are far from symmetric: biases and norms are drawn too."""
    import transformers as tf
    kinds = {"qwen2": (tf.Qwen2Config, tf.Qwen2ForCausalLM), "qwen3": (tf.Qwen3Config, tf.Qwen3ForCausalLM), "llama": (tf.LlamaConfig, tf.LlamaForCausalLM)}
    make_config, make_model = kinds[arch]
    config = make_config(vocab_size=vocab, hidden_size=width, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads,
                         num_key_value_heads=kv_heads, head_dim=more.pop("head_dim", 16 if arch == "qwen3" else width // heads), max_position_embeddings=512,
                         tie_word_embeddings=tied, pad_token_id=0, bos_token_id=1, eos_token_id=2, **more)
    torch.manual_seed(seed)
    model = make_model(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.15)
    return model


def ours(hf, dtype=torch.float32):
    """Our Policy with the weights of a transformers model."""
    import json
    from weights import build
    state = {k: v.clone() for k, v in hf.state_dict().items()}
    return build(json.loads(hf.config.to_json_string(use_diff=False)), state, dtype)


@pytest.fixture
def tiny():
    return ours(hf_model("qwen2"))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A random Llama with a byte-level ChatML tokenizer (256 bytes and three special tokens), as an HF folder."""
    import transformers
    from weights import save
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=259, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                      max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=256, eos_token_id=258, pad_token_id=None)
    folder = tmp_path_factory.mktemp("tiny") / "model"
    save(ours(transformers.LlamaForCausalLM(config)), tokenizer, folder)
    return str(folder)


@pytest.fixture(scope="session")
def tiny_chat(tiny_folder):
    from weights import load
    from rollout import Chat
    model, tokenizer = load(tiny_folder)
    return model, Chat(tokenizer, model.config.vocab)
