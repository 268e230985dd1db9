"""
What a training run will hold in memory, from shapes alone, before any weights are read: printed, and refused where it can't fit.

Two moments count: sampling (weights, their fast copies, the cache of all live dialogues, logits of one token each) and the update (weights, gradients, and what the backward
pass needs of one micro-batch). Adam's two moments are there in both. Formulas are of our own network (model.py): a test counts what autograd really keeps.
Two ways to hold less live here as well: micro-batches that fit, and Adam on the host. Left out on purpose: tokenizer, users, and the allocator's slack (bench.py memory: glibc kept a third more than was alive at any time).
"""
import os
from pathlib import Path

import torch

from linear import Linear
from model import Policy
from rundir import die, positive
from weights import config_of, read_config


def kept_per_token(c, b, checkpointed=False):
    """Bytes that autograd keeps per token and trained block, computing in numbers of b bytes. checkpointed: the block's input only; the rest is made again in backward."""
    if checkpointed:
        return b * c.width
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    block = b * (4 * c.mlp + 2 * q + 2 * kv) + 2 * (4 + 2 * b) * c.width + 4 * c.heads + 8            # MLP and attention; two norms, each with an fp32 copy
    return block + ((4 + b) * (q + kv) + 4 * (c.heads + c.kv_heads) if c.arch == "qwen3" else 0)


def plan(c, dtype, device, layers, lora, dialogues, max_tokens, micro_tokens, policies=1, frozen=0, checkpointed=False, offload=False, shards=1):
    """Bytes by name, sampling and update apart. layers: trained ones, 0 all; dialogues: live at a time; policies: trained networks (2 with a separate critic); frozen: references (with lora the policy without its adapters);
    offload: Adam's moments are on the host; shards: ranks that each hold a part (--fsdp)."""
    b = 2 if dtype == torch.bfloat16 else 4
    with torch.device("meta"):
        model = Policy(c)
    model.train_only_upper(layers)
    blocks = [block for block in model.model.layers if block.mlp.gate_proj.weight.requires_grad]
    count = lambda ps: sum(p.numel() for p in ps)
    adapted = [m for block in blocks for m in block.modules() if isinstance(m, Linear)] if lora else []
    adapters = sum(lora * (m.in_features + m.out_features) for m in adapted)
    parameters, trained = count(model.parameters()), adapters or count(p for p in model.parameters() if p.requires_grad)
    networks = policies + frozen * (not lora)
    # laid out for the CPU, cast, or with adapters merged in; of a separate critic and a reference too, which are read without gradients. What is adapted is kept without its adapters as well:
    # cast, for the update, and on a CPU laid out, for the reference
    copies = b * parameters * networks if device.type == "cpu" or b == 2 or lora else 0
    copies += b * sum(m.weight.numel() for m in adapted) * (policies * (b == 2) + frozen * (device.type == "cpu"))
    on_host = offload and device.type != "cpu"             # offloaded on a CPU, Adam's own copy of the weights is one more in the same memory
    always = {"weights, fp32": 4 * (parameters + adapters) * networks // shards, "copies to sample with": copies, "Adam": 0 if on_host else (8 + 4 * offload) * trained * policies // shards}
    cache = lambda rows, slots: rows * slots * 2 * c.layers * c.kv_heads * c.head_dim * b
    if device.type == "cuda" and dialogues and shards == 1:
        always["cache of recorded steps"] = cache(1 << (dialogues - 1).bit_length(), -(-max_tokens // 256) * 256)       # model.Desk
    sampling = {"cache": cache(dialogues, max_tokens), "logits": 6 * 4 * dialogues * c.vocab, "gathered": 4 * parameters * (shards > 1)}
    depth = len(blocks) if checkpointed else 0
    update = {"gradients": 4 * trained * policies // shards, "casts": b * trained if b == 2 else 0,
              "activations": micro_tokens * (depth * kept_per_token(c, b, True) + (len(blocks) if not checkpointed else 1) * kept_per_token(c, b) + 3 * b * c.mlp + 8 * c.width),
              "head": (4 * c.width * c.vocab if layers == 0 and not lora else 0) + 3 * 4 * 8192 * micro_tokens // 2}                 # of the tokens half at most are the policy's
    return {"always": always, "sampling": sampling, "update": update}


def peak(p):
    """The larger of the two moments, in bytes."""
    total = lambda part: sum(part.values())
    return total(p["always"]) + max(total(p["sampling"]), total(p["update"]))


def available(device):
    """Bytes that can still be had: of the GPU, or this process's share of the machine's memory (and of the limit that a container sets)."""
    if device.type == "cuda":
        torch.cuda.empty_cache()                           # what a cold start in this process left behind is free
        return torch.cuda.mem_get_info(device)[0]
    free = []
    if os.path.exists("/proc/meminfo"):
        free.append(int(next(line for line in open("/proc/meminfo") if line.startswith("MemAvailable")).split()[1]) * 1024)
    if os.path.exists("/sys/fs/cgroup/memory.max") and (most := Path("/sys/fs/cgroup/memory.max").read_text().strip()) != "max":
        stat = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        free.append(int(most) - int(Path("/sys/fs/cgroup/memory.current").read_text()) + int(stat["inactive_file"]))       # files that were read make room
    return min(free) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if free else None


def check(folder, dtype, device, **shape):
    """Prints the plan of the model in `folder` (or .gguf); SystemExit where it is more than there is, with what to change. -> tokens of a micro-batch: shape's micro_tokens, or for "auto"
    as many as fit beside the rest in 80 % of what is free, at least one whole dialogue, at most 32768 (4096 on a CPU, where more is no faster, and where nobody says what is free)."""
    c = read_config(config_of(Path(folder)))
    free, gb = available(device), 1e9
    most = 32768 if free and device.type != "cpu" else 4096
    if shape["micro_tokens"] == "auto":
        total = lambda n: sum(sum(p[part].values()) for p in [plan(c, dtype, device, **{**shape, "micro_tokens": n})] for part in ("always", "update"))
        rest, each = total(0), (total(most) - total(0)) / most
        shape["micro_tokens"] = max(min(int((0.8 * free - rest) / each) if free else most, most), shape["max_tokens"])
        print(f"micro-batches of {shape['micro_tokens']} tokens, by the plan")
    p = plan(c, dtype, device, **shape)
    text = lambda part: ", ".join(f"{name} {x / gb:.1f}" for name, x in part.items() if x / gb >= 0.05)
    print(f"memory, GB: {text(p['always']) or 'little'}; while sampling {text(p['sampling']) or 'little'}; in the update {text(p['update']) or 'little'}; about {peak(p) / gb:.1f}" + (f" of {free / gb:.1f} free" if free else ""))
    if free and device.type == "cpu" and peak(p) <= free < 1.35 * peak(p):
        print(f"that is close: the C library keeps up to a third more than is alive, {1.35 * peak(p) / gb:.1f} GB here; if the run is killed, lower --tokens_per_microbatch or add --checkpoint_layers")
    if free and peak(p) > free:
        hints = ["--group_size or --groups lower" if sum(p["sampling"].values()) > sum(p["update"].values()) else "--tokens_per_microbatch lower" + ", or --checkpoint_layers" * (not shape.get("checkpointed"))]
        parted = shape.get("shards", 1) > 1                # --fsdp goes with neither
        hints += ["--offload_optimizer"] * (device.type != "cpu" and not parted and not shape.get("offload") and not shape["lora"])
        hints += ["--lora 16"] * (not shape["lora"] and not parted) + ["--critic shared"] * (shape.get("policies", 1) > 1) + ["a smaller --model"]
        die(f"this run needs about {peak(p) / gb:.1f} GB and {free / gb:.1f} are free on {device}; try {', '.join(hints)}")
    return shape["micro_tokens"]


def tokens_or_auto(text):
    """argparse type: a number of tokens above zero, or "auto"."""
    return text if text == "auto" else positive(int)(text)


def adamw(groups, offload=False, **how):
    """AdamW as both training scripts use it, on the device or on the host."""
    return (HostAdamW if offload else torch.optim.AdamW)(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True, **how)


class HostAdamW(torch.optim.AdamW):
    """AdamW whose moments and arithmetic are the host's: 8 bytes a trained weight less on the device (and 4 more on the host, its copy of the weights). A step carries the gradients down and
    the weights up, 4 bytes a weight each way; with a few optimiser steps to minutes of sampling that is little."""
    def __init__(self, groups, **how):
        groups = [g if isinstance(g, dict) else {"params": g} for g in (groups if isinstance(groups[0], dict) else [groups])]
        self.device_weights = [p for g in groups for p in g["params"]]
        super().__init__([{**g, "params": [torch.nn.Parameter(p.detach().cpu().clone()) for p in g["params"]]} for g in groups], **how)

    def pairs(self):
        return zip(self.device_weights, (p for g in self.param_groups for p in g["params"]))

    @torch.no_grad()
    def step(self):
        for theirs, mine in self.pairs():
            mine.grad = None if theirs.grad is None else theirs.grad.to("cpu")
        super().step()
        for theirs, mine in self.pairs():
            theirs.copy_(mine)
            mine.grad = None

    def zero_grad(self, set_to_none=True):
        for theirs, _ in self.pairs():
            theirs.grad = None

    @torch.no_grad()
    def load_state_dict(self, state):
        """After the weights themselves were loaded: the host's copies follow them."""
        super().load_state_dict(state)
        for theirs, mine in self.pairs():
            mine.copy_(theirs)
