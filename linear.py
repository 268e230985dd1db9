"""
One linear layer: fp32 master weight, product in the compute dtype, laid out for fast sampling, and LoRA beside it.

The three things that a product needs besides its weight are all copies of it: a cast (bf16), a layout that the CPU
multiplies fast, a sum with the adapters. While sampling each is made once and kept until the weight may have changed (any
optimizer step counts, for every trained weight). Left out on purpose: autocast (which casts again in every call) and quantised weights.
"""
import time
from weakref import WeakKeyDictionary

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

KEPT = WeakKeyDictionary()                                 # module -> its cast or packed weights: in no state_dict, no checkpoint, no deepcopy
UPDATES = [0]                                              # optimizer steps so far, of any optimizer: fused kernels don't count in _version
register_optimizer_step_post_hook(lambda *_: UPDATES.__setitem__(0, UPDATES[0] + 1))


class Linear(nn.Linear):
    """fp32 master weight, product in the dtype of x. While sampling the cast copy is kept until the weight changes
    (an in-place edit, a load or an optimizer step drops it); in training the cast is part of the graph.

    LoRA (Hu et al. 2021): x @ (W + scale B A).T with W frozen, A (rank, in) random, B (out, rank) zero at the start. In training
    the two thin products stand beside the frozen one; without gradients W + scale B A is merged once and kept, so sampling
    costs what it costs without LoRA. In bf16 the merged sum is rounded to W's grid, the thin products are not: early on the
    sampler is a little behind the trainer, which the ratio corrects and `canary` shows.
    """
    rank, scale, adapted = 0, 2.0, False                   # adapted: the adapters are there and switched on

    def add_lora(self, rank, generator):
        limit = self.in_features ** -0.5
        self.rank, self.adapted = rank, True
        self.lora_a = nn.Parameter(torch.empty(rank, self.in_features).uniform_(-limit, limit, generator=generator).to(self.weight.device))
        self.lora_b = nn.Parameter(torch.zeros(self.out_features, rank, device=self.weight.device))

    def reset_parameters(self):
        """Nothing: weights are always loaded, and torch's first random numbers on the meta device cost two seconds of imports."""

    @torch.no_grad()
    def merged(self):
        return self.weight + self.scale * self.lora_b @ self.lora_a if self.rank else self.weight

    def forward(self, x):
        y = product(self, x)
        if self.adapted and torch.is_grad_enabled():
            y = y + F.linear(F.linear(x, cast(self, "lora_a", x.dtype)), cast(self, "lora_b", x.dtype)) * self.scale
        return y


def product(module, x):
    """x (..., D) -> x @ module.weight.T + bias, in the dtype of x; module is a Linear or the tied embedding.

    Sampling on a CPU multiplies 1 to 64 rows at a time, where oneDNN with the weight laid out once in its own order is
    1.3-2x faster than the BLAS call of F.linear; that costs one more copy of the weights, kept until they change.
    """
    weight, bias = module.weight, getattr(module, "bias", None)
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or bias is not None and bias.requires_grad)
    bias = None if bias is None else cast(module, "bias", x.dtype)
    if needs_grad or x.device.type != "cpu" or x.dtype not in PACKS:
        return F.linear(x, cast(module, "weight", x.dtype), bias)
    packed = keep(module, "weight", ("packed", x.dtype), lambda w: torch.ops.mkldnn._reorder_linear_weight(w.to(x.dtype), 32))   # 32: typical rows, a hint
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def bf16_is_faster():
    """Whether this CPU multiplies faster in bf16 than in fp32, over a decode step (32 rows, laid out for it) and a training product (1024 rows, weights cast on the way): the best of 5 tries in turn, about .2 s."""
    if torch.bfloat16 not in PACKS:
        return False
    layer, best = Linear(1536, 1536, bias=False), {}
    layer.weight.data.fill_(0.01)
    for dtype, rows in [(dtype, rows) for _ in range(5) for dtype in PACKS for rows in (32, 1024)]:
        x = torch.ones(rows, 1536, dtype=dtype)
        layer.requires_grad_(rows == 1024)
        layer(x)                                           # the layout is made
        start = time.perf_counter()
        layer(x)
        best[dtype, rows] = min(best.get((dtype, rows), float("inf")), time.perf_counter() - start)
    gain = (best[torch.float32, 32] * best[torch.float32, 1024] / best[torch.bfloat16, 32] / best[torch.bfloat16, 1024]) ** 0.5
    print(f"compute dtype: {'bf16' if gain > 1.1 else 'fp32'}, since a product in bf16 takes {1 / gain:.2f} of fp32's time here", flush=True)
    return gain > 1.1


PACKS = [torch.float32] * torch.backends.mkldnn.is_available()          # dtypes that this CPU's oneDNN multiplies
PACKS += [torch.bfloat16] * (bool(PACKS) and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def cast(module, name, dtype):
    """module.name in `dtype`: the parameter itself, a differentiable cast of it, or (no gradient wanted) a kept copy."""
    w = getattr(module, name)
    if w.dtype == dtype and not merging(module, name):
        return w
    if torch.is_grad_enabled() and w.requires_grad:
        return w.to(dtype)                                # autograd casts the gradient back to fp32
    return keep(module, name, dtype, lambda w: w.to(dtype))


def merging(module, name):
    """Whether module.name stands for the weight with its adapters merged in: without gradients, where they are switched on."""
    return name == "weight" and getattr(module, "adapted", False) and not torch.is_grad_enabled()


def keep(module, name, form, make):
    """make(module.name), made once per form and kept until the parameter changes: by an in-place edit, a load or an optimizer step."""
    sources = [getattr(module, name)]
    if merging(module, name):
        sources, form = [*sources, module.lora_a, module.lora_b], ("merged", form)
    kept = KEPT.setdefault(module, {})
    state = [UPDATES[0] if w.requires_grad else 0 for w in sources] + [v for w in sources for v in (w._version, w.data_ptr())]
    if (name, form) not in kept or kept[name, form][0] != state:
        old = kept.pop((name, form), (None, None))[1]
        if old is not None and old.layout != torch.strided:
            old = None                                     # laid out for the CPU: the old copy goes before the new one is made
        new = make(module.merged() if len(sources) > 1 else sources[0].detach())
        kept[name, form] = (state, new if old is None or old.shape != new.shape or old.device != new.device else old.copy_(new))       # a cast stays where it lies: recorded steps know its address
    return kept[name, form][1]
