"""
Several processes that train one policy: what each must hear from the others, and nothing more.

    torchrun --nproc_per_node=2 --shutdown_timeout=3600 -- train_grpo.py ...        one process per GPU (or, on CPUs, per so many cores); --nnodes=M --rdzv_endpoint=HOST:PORT over M machines

Each rank holds the whole policy and plays its share of the groups; gradients are averaged before every optimiser step, so that all ranks take the same one;
the outer loop hears every rank's outcomes; rank 0 alone writes and prints. With one process every function here is the identity. With --fsdp each rank holds its part of weights, gradients and Adam's moments only (last section); for models that
do not fit otherwise, since every layer travels for every micro-batch. Left out on purpose: overlap of communication with backward (one sum per optimiser step, of the trained weights' size).
"""
import atexit
import os
import sys
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.nn                                # before begin(): transformers imports it later, and its default arguments hold the group of that moment, whose threads then outlive end()
from torch.nn.utils import clip_grad_norm_

from linear import KEPT
from model import token_logprobs
from rundir import die

RANK, WORLD, LOCAL = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))


def begin(device):
    """Meets the other processes that torchrun started. -> this process's own device."""
    if WORLD == 1:
        return device
    if device.type == "mps":
        die("several processes need CUDA devices or CPUs; add --device cpu")
    if device.type == "cuda":
        if LOCAL >= torch.cuda.device_count():
            die(f"--nproc_per_node: process {LOCAL} has no GPU of its own, there are {torch.cuda.device_count()}")
        device = torch.device("cuda", LOCAL)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(hours=2))      # a rank may wait while another's users think
    atexit.register(end)
    if RANK:
        sys.stdout = open(os.devnull, "w")                 # one voice; errors are heard from all
    return device


def end():
    """Leaves the group and ends its threads, while Python still runs: left to the interpreter's own end they may abort this rank, and the others' last words with it."""
    if dist.is_initialized():
        dist.destroy_process_group()


def in_turn(make):
    """make(), on the first rank of each machine first: it may download, or train a cold start, which the others then find in the cache."""
    if WORLD == 1:
        return make()
    if LOCAL:
        dist.barrier()
    out = make()
    if not LOCAL:
        dist.barrier()
    return out


@torch.no_grad()
def same(model):
    """Every rank gets rank 0's parameters: a cold start made on another machine need not be the same to the last bit. -> model"""
    for p in model.parameters() if WORLD > 1 else ():
        dist.broadcast(p, 0)
    return model


def share(rows):
    """This rank's part of a list whose length WORLD divides: its place in the whole, and the rows."""
    n = len(rows) // WORLD
    return RANK * n, rows[RANK * n:(RANK + 1) * n]


def everyone(rows):
    """The lists of all ranks in one, in the order of ranks. Any objects: they come from our own processes."""
    if WORLD == 1:
        return rows
    lists = [None] * WORLD
    dist.all_gather_object(lists, rows)
    return [row for part in lists for row in part]


def mean_of(record):
    """Every number of a flat dict as its mean over the ranks."""
    records = everyone([record])
    return {k: sum(r[k] for r in records) / len(records) for k in record}


def total(x):
    """The sum of a number or tensor over all ranks, as a tensor. A number is summed in fp64: a Python float here may be numpy's there, and a sum of two widths ends the run."""
    x = x.clone() if torch.is_tensor(x) else torch.tensor(x, dtype=torch.float64)
    if WORLD > 1:
        where = x.device
        x = x.to(torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(x)
        x = x.to(where)
    return x


def mean_std(x):
    """Mean and population standard deviation of x (N,) over all ranks' values."""
    if WORLD == 1:
        return x.mean(), x.std(correction=0)
    n, s = total(torch.tensor(float(len(x)))), total(x.double().sum())
    mean = s / n
    return mean.to(x.dtype), (total((x.double() - mean).square().sum()) / n).sqrt().to(x.dtype)


def average_gradients(parameters):
    """Every gradient becomes its mean over the ranks; one that a rank has none of counts 0. One all-reduce of one flat copy: 4 bytes per trained weight."""
    if WORLD == 1:
        return
    parameters = [p for p in parameters if not hasattr(p, "full_tensor")]                  # a sharded one's was averaged in backward
    if not parameters:
        return
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= WORLD
    at = 0
    for p in parameters:
        p.grad = flat[at:at + p.numel()].view_as(p)
        at += p.numel()


# ---------------------------------------------------------------------------------------------- --fsdp
def shard(model):
    """Parts every parameter of a Policy over the ranks, in place: each block is whole while it computes, in forward and again in backward, and the rest (embedding, head, last norm) from
    forward to backward. Its gradients come out averaged, in parts. After this the parameters are others: make optimizers now."""
    from torch.distributed.fsdp import fully_shard          # half a second that other runs need not wait; what is parted shows by its methods: unshard, full_tensor
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    return model


@contextmanager
def gathered(model):
    """Inside `with` a sharded policy is whole on every rank, to sample from: ranks talk for different lengths of time, so no layer may wait for the others. Costs the weights once more; the
    cast copies made in it are dropped behind it."""
    parts = [m for m in model.modules() if hasattr(m, "unshard")]
    for m in parts:
        m.unshard()
        m.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for m in parts:
            m.set_reshard_after_forward(m is not model, recurse=False)
            m.reshard()
        if parts:
            KEPT.clear()


def even(batches, model, reference=None, learns=True):
    """The micro-batches of this rank, and behind them as many empty rounds as another rank has more: with sharded layers all must go forward and backward equally often."""
    if not hasattr(model, "unshard"):
        yield from batches
        return
    batches = list(batches)
    counts = everyone([len(batches)])
    yield from batches
    nothing = torch.zeros(1, 1, dtype=torch.long, device=model.model.embed_tokens.weight.device)
    for _ in range(max(counts) - len(batches)):
        hidden = model(nothing)
        if reference is not None:
            with torch.no_grad():
                reference(nothing)
        if learns:                                         # through the head too, where there is one: each rank's gradients must be of the same parameters
            ((token_logprobs(model, hidden[0], nothing[0])[0] if hasattr(model, "head") else hidden).sum() * 0.0).backward()


def clip(parameters, limit):
    """torch's clip_grad_norm_ for parameters of which some, or all, are parted. -> the norm of all their gradients."""
    parameters = [p for p in parameters if p.grad is not None]
    parted = [p.grad.to_local() for p in parameters if hasattr(p, "full_tensor")]
    if not parted:
        return clip_grad_norm_(parameters, limit)
    whole = [p.grad for p in parameters if not hasattr(p, "full_tensor")]
    square = lambda grads: sum((g.square().sum() for g in grads), torch.zeros((), device=parted[0].device))
    norm = (total(square(parted)) + square(whole)).sqrt()
    for g in parted + whole:
        g.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


def whole(state):
    """A state dict, of any depth, with every parted tensor put together, on the CPU. All ranks must ask."""
    if isinstance(state, dict):
        return {k: whole(v) for k, v in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(whole(v) for v in state)
    return state.full_tensor().cpu() if hasattr(state, "full_tensor") else state


def part(optimizer, state):
    """An optimizer's state dict of whole tensors as what this rank holds of it, cut one by one, in place: whole they may be more than a GPU has. -> state, for optimizer.load_state_dict()"""
    from torch.distributed.tensor import distribute_tensor
    for index, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        moments = state["state"].get(index, {})
        for name, value in moments.items():
            if hasattr(p, "full_tensor") and value.shape == p.shape:
                moments[name] = distribute_tensor(value.to(p.device), p.device_mesh, p.placements, src_data_rank=None)
    return state
