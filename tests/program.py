"""Programs under test, each a process of its own that need not import torch and transformers again: it is forked from one that has (multiprocessing's forkserver)."""
import multiprocessing
import os
import runpy
import socket
import sys
from types import SimpleNamespace

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch", "torch.distributed", "transformers", "tqdm", "safetensors.torch"])


def play(script, arguments, output, errors, environment):
    """In the child: what `python -u script arguments` would do."""
    os.environ.update(environment)
    for path, stream in ((output, sys.stdout), (errors, sys.stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream.fileno())
    sys.stdout.reconfigure(write_through=True)
    sys.argv, sys.path[0:0] = [script, *arguments], [os.path.dirname(script)]
    runpy.run_path(script, run_name="__main__")


def start(script, arguments, output, errors=None, **environment):
    """-> the process; what it prints goes to these files."""
    process = SERVER.Process(target=play, args=(str(script), [*map(str, arguments)], str(output), str(errors or output), {"OMP_NUM_THREADS": "1", **environment}))
    process.start()
    return process


def together(n, command, folder):
    """`command` as n ranks that meet, as torchrun would start it. -> returncode, the first that is not 0; stdout, stderr of them all."""
    with socket.socket() as s:                             # a port of its own, so that tests side by side don't meet
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    texts = [folder / "program.out", folder / "program.err"]
    for text in texts:
        text.write_text("")
    ranks = [start(*command[:1], command[1:], *texts, RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)) for r in range(n)]
    for rank in ranks:
        rank.join(300)
        rank.kill()
        rank.join()
    return SimpleNamespace(returncode=next((r.exitcode for r in ranks if r.exitcode), 0), stdout=texts[0].read_text(), stderr=texts[1].read_text())
