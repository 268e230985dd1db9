"""
Several processes that train one policy: what each must hear from the others, and nothing more.

    torchrun --nproc_per_node=2 train_grpo.py ...        one process per GPU (or, on CPUs, per so many cores); --nnodes=M --rdzv_endpoint=HOST:PORT over M machines

Each rank holds the whole policy and plays its share of the groups; gradients are averaged before every optimiser step, so that all ranks take the same one;
the outer loop hears every rank's outcomes; rank 0 alone writes and prints. With one process every function here is the identity. Left out on purpose: sharding of
the policy (a 0.5B with Adam takes 8 GB), overlap of communication with backward (one sum per optimiser step, of the trained weights' size).
"""
import atexit
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def begin(device):
    """Meets the other processes that torchrun started. -> this process's own device."""
    if WORLD == 1:
        return device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(hours=2))      # a rank may wait while another's users think
    atexit.register(dist.destroy_process_group)            # else a rank that ends early may abort the others' last words
    if RANK:
        sys.stdout = open(os.devnull, "w")                 # one voice; errors are heard from all
    return device


def in_turn(make):
    """make(), on rank 0 first: it may download, or train a cold start, which the others then find in the cache."""
    if WORLD == 1:
        return make()
    if RANK:
        dist.barrier()
    out = make()
    if not RANK:
        dist.barrier()
    return out


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


def total(x):
    """The sum of a number or tensor over all ranks, as a tensor."""
    x = torch.as_tensor(x).clone()
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
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= WORLD
    at = 0
    for p in parameters:
        p.grad = flat[at:at + p.numel()].view_as(p)
        at += p.numel()
