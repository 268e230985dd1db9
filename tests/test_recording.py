"""Recorded decode steps without a GPU: operators recorded on the CPU and replayed on the very tensors they ran on."""
import contextlib
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import linear
import model as network
import recording
from conftest import hf_model, ours
from model import Cache, append, sample, token_logprobs


class Recording(TorchDispatchMode):
    """A CUDA graph on the CPU: every operator that ran, on the very tensors it ran on. What Python knew is baked in, replay() sees nothing but those tensors."""
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        assert "local_scalar" not in str(op) and "nonzero" not in str(op), f"{op} waits for the device, which a capture refuses"
        out = op(*args, **(kwargs or {}))
        self.calls.append((op, args, kwargs or {}, out))
        return out

    def replay(self):
        for op, args, kwargs, out in self.calls:
            for then, now in zip(*(x if isinstance(x, (tuple, list)) else [x] for x in (out, op(*args, **kwargs)))):
                if torch.is_tensor(then) and then.data_ptr() != now.data_ptr():
                    then.copy_(now)


@pytest.fixture
def recordings(monkeypatch):
    """Steps are recorded on the CPU, whose products are those of a GPU (casts, not laid-out weights); -> how many rows each recording held."""
    made = []

    def recorded(step, pool):
        with Recording() as graph:
            step()
        made.append(next(out.shape[0] for op, _, _, out in graph.calls if "embedding" in str(op)))
        return graph
    monkeypatch.setattr(linear, "PACKS", [])
    monkeypatch.setattr(network, "recorded", recorded)
    monkeypatch.setitem(recording.GRAPHS, "device", "cpu")
    return made


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_recorded_steps_give_the_tokens_of_stepwise_ones(tiny, temperature, recordings, monkeypatch):
    """What CUDA graphs rely on, without a GPU: a step reads and writes the same memory each time, in this call and the next; rows come in powers of two, slots in multiples of 256."""
    prompts, budgets = [[i + 3, i + 4] + [7] * (i % 5) for i in range(11)], [60, 33, 3, 40, 2, 60, 24, 60, 9, 9, 1]

    def run(seed):
        cache, states = Cache(tiny, 11, 128), []
        hidden = append(tiny, cache, prompts)
        tokens, logps = sample(tiny, cache, hidden, budgets, {2, 3}, temperature=temperature, check_every=4, states=states, generator=torch.Generator().manual_seed(seed))
        more, _ = sample(tiny, cache, append(tiny, cache, [t[-1:] for t in tokens]), [5] * 11, {2}, temperature=0)
        few, _ = sample(tiny, cache.rows([4, 7]), append(tiny, cache.rows([4, 7]), [[9], [10, 11]]), [12, 3], set(), banned=torch.arange(97) > 60, temperature=temperature, top_k=9, generator=torch.Generator().manual_seed(seed))
        return tokens, logps, states, more, few, cache.n.tolist(), [cache.k[:, r, :, :n].clone() for r, n in enumerate(cache.n)]
    close = lambda a, b: len(a) == len(b) and all(torch.allclose(torch.as_tensor(x), torch.as_tensor(y), atol=1e-5) for x, y in zip(a, b))
    for seed in (5, 6, 7):
        again = run(seed)
        with monkeypatch.context() as off:
            off.setitem(recording.GRAPHS, "device", None)
            want = run(seed)
        for i in (0, 3, 4, 5):
            assert want[i] == again[i]
        assert all(close(want[i], again[i]) for i in (1, 2, 6))
        if seed == 5:
            first = list(recordings)
    assert recordings[:len(first)] == first and first[0] == 16 and set(recordings) <= {1, 2, 4, 8, 16} and len(recordings) <= len(first) + 2        # later calls replay what is there


@pytest.mark.parametrize("lora,dtype", [(0, torch.float32), (0, torch.bfloat16), (4, torch.bfloat16), (4, torch.float32)])
def test_recordings_outlive_optimiser_steps(lora, dtype, recordings, monkeypatch):
    """The weights of the second call are those after the update, read where they were; weights that moved (a load, a larger batch of them) are recorded anew, never read where they lay."""
    model = ours(hf_model("qwen3", tied=not lora), dtype)
    if lora:
        model.add_lora(lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)

    def run(rows=4):
        cache = Cache(model, rows, 64)
        hidden = append(model, cache, [[5, 6, 7 + r] for r in range(rows)])
        return sample(model, cache, hidden, [20] * rows, set(), temperature=0)[0]

    def stepwise(rows=4):
        with monkeypatch.context() as off:                 # the same shapes, so that bf16 rounds alike; nothing kept, nothing recorded
            for module, name in ((recording, "DESKS"), (linear, "KEPT")):
                off.setattr(module, name, WeakKeyDictionary())
            off.setattr(network, "recorded", lambda step, pool: (step(), SimpleNamespace(replay=step))[1])
            return run(rows)
    said = [run()]
    assert said == [stepwise()] and recordings == [4]
    for _ in range(2):
        optimizer.zero_grad()
        token_logprobs(model, model(torch.randint(3, 97, (2, 9))).flatten(0, 1), torch.randint(3, 97, (18,)))[0].sum().backward()
        optimizer.step()
        said.append(run())
        assert said[-1] == stepwise() and said[-1] != said[-2]
    assert recordings == [4]
    model.model.norm.weight.data = model.model.norm.weight.data * -1
    assert run() == stepwise() != said[-1] and recordings == [4, 4]
    assert run(7) == stepwise(7) and run() == stepwise() and recordings == [4, 4, 8, 4]         # a larger desk begins anew


def test_a_recording_that_fails_is_done_without(tiny, monkeypatch, capsys):
    def run():
        cache = Cache(tiny, 2, 64)
        return sample(tiny, cache, append(tiny, cache, [[5, 6], [7]]), [30, 30], set(), temperature=0)[0]
    want = run()

    def recorded(step, pool):
        step()
        recording.GRAPHS["device"] = None
    monkeypatch.setattr(network, "recorded", recorded)
    monkeypatch.setitem(recording.GRAPHS, "device", "cpu")
    assert run() == want == run()


def test_a_broken_capture_names_its_cause_and_leaves_the_step_done_once(monkeypatch, capsys):
    """recorded() itself, on a CUDA of straw: the step ran once for real, the cause is printed and not the error that ends the capture, the caller's stream is back, recording is off."""
    class Straw:
        def wait_stream(self, other):
            pass

    class Capture:
        def __init__(self, graph, pool, stream, capture_error_mode):
            pass

        def __enter__(self):
            pass

        def __exit__(self, *error):
            raise RuntimeError("operation failed due to a previous error during capture")
    mine, on, ran = Straw(), [], []
    for name, fake in dict(Stream=Straw, current_stream=lambda: mine, stream=lambda s: contextlib.nullcontext(), CUDAGraph=object, graph=Capture, set_stream=on.append).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(recording, "GRAPHS", {"device": "cuda", "stream": None})

    def step():
        if ran:
            raise RuntimeError("this kernel synchronises")
        ran.append(1)
    assert recording.recorded(step, None) is None and ran == [1] and on == [mine] and recording.GRAPHS["device"] is None
    assert "this kernel synchronises" in capsys.readouterr().out
