"""
A run's folder, and the command line that made it. Knows nothing of dialogues, rewards or models.

    runs/<name>/config.json      every flag, as used
                metrics.jsonl    one line a step
                samples/         whole dialogues as text
                report.html      curves, and dialogues of the dev split before RL and now (from dev_first.jsonl, dev_last.jsonl)
                checkpoint/      state.pt: weights, optimizer, counters; one file, replaced atomically
                best/            the best policy by dev score, an HF folder

Randomness is counter-based: every step makes its generators from (seed, step). So a checkpoint needs no RNG state, and a
run resumed after `kill -9` at any moment repeats what the unbroken run did, bit for bit.
"""
import argparse
import difflib
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError


# ---------------------------------------------------------------------------------------------- flags
def die(message):
    """A user's mistake: one line on stderr that names the fix, exit code 2, no traceback."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


class Flags(argparse.ArgumentParser):
    """argparse with one-line errors (exit code 2), the nearest flag named for an unknown one, and a record of what was given."""
    def __init__(self, **kwargs):
        super().__init__(**{"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter, **kwargs})

    def error(self, message):
        die(f"{message}; see {self.prog} --help")

    def parse(self, argv=None):
        """-> (namespace, set of the names that stood on the command line)."""
        argv = sys.argv[1:] if argv is None else argv
        sys.excepthook = interrupted
        args, unknown = self.parse_known_args(argv)
        if unknown:
            flags = [o for a in self._actions for o in a.option_strings if o.startswith("--")]
            near = difflib.get_close_matches(unknown[0].split("=")[0], flags, 1, 0.5)
            die(f"unknown flag {unknown[0].split('=')[0]}" + (f"; did you mean {near[0]}?" if near else f"; see {self.prog} --help"))
        given = {a.dest for a in self._actions for o in a.option_strings if any(w == o or w.startswith(o + "=") for w in argv)}
        return args, given


def positive(kind):
    """argparse type: a finite number of `kind` above zero."""
    def read(text):
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} must be above 0")
        return value
    read.__name__ = f"positive {kind.__name__}"
    return read


def nonnegative(kind):
    """argparse type: a finite number of `kind`, zero or more."""
    def read(text):
        value = kind(text)
        if not 0 <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} must be 0 or more")
        return value
    read.__name__ = f"nonnegative {kind.__name__}"
    return read


def fraction(text):
    """argparse type: a number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be from 0 to 1")
    return value


def seed_number(text):
    """argparse type: a whole number from 0 to 10^12, so that a seed with a step's number added still fits a generator's 64 bits."""
    value = int(text)
    if not 0 <= value <= 10**12:
        raise argparse.ArgumentTypeError(f"{text} must be from 0 to 10^12")
    return value


seed_number.__name__ = "whole number"                      # as argparse calls it


def writable(text):
    """argparse type: a file that can be written, known before the work whose result it takes."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        open(path, "a").close()
        if new:
            path.unlink()                                  # what is asked is whether it could be there
    except OSError as e:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written ({e.strerror})")
    return text


def new_folder(path, flag="--out", instead="give another name or remove it"):
    """A folder that is not there yet and can be made, parents and all: SystemExit before the work whose result it takes, not after it. -> Path"""
    path = Path(path)
    if path.exists():
        die(f"{flag} {path} exists; {instead}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.rmdir(tempfile.mkdtemp(dir=path.parent, prefix=path.name + "."))               # a parent that is there may refuse all the same
    except OSError as e:
        die(f"{flag} {path}: {e.strerror}; give another folder")
    return path


def read_json(path, rows=False):
    """A JSON object, or with rows a list of them, one a line. SystemExit names file and line of what is not one; OSError where there is no file.
    A last row without its newline was being written when the program was killed: it is left out."""
    try:
        text = path.read_text(encoding="utf-8")
        parts = text.split("\n")[:-1] if rows else [text]
    except UnicodeDecodeError:
        die(f"{path}: not UTF-8")
    out = []
    for number, part in enumerate(parts, start=1):
        try:
            out.append(json.loads(part))
        except (ValueError, RecursionError) as e:
            die(f"{path}:{number if rows else getattr(e, 'lineno', 1)}: broken JSON ({getattr(e, 'msg', 'nested too deeply')})")
        if not isinstance(out[-1], dict):
            die(f"{path}:{number}: a JSON object is expected")
    return out if rows else out[0]


# ---------------------------------------------------------------------------------------------- the folder
class RunDir:
    """writes: whether this process is the one that does (of several, rank 0 alone; the others' calls do nothing)."""
    def __init__(self, path):
        self.path, self.writes = Path(path), os.environ.get("RANK", "0") == "0"
        self.metrics = self.path / "metrics.jsonl"
        self.state = self.path / "checkpoint" / "state.pt"

    @staticmethod
    def free(path):
        """SystemExit where no new run can be made: asked before the work, and again when it is made."""
        new_folder(path, "--run", f"give another --run, continue it with --resume {path}, or remove it")

    @classmethod
    def create(cls, path, config):
        """A new run. SystemExit if the folder exists: nothing already computed is overwritten."""
        run = cls(path)
        if not run.writes:
            return run
        cls.free(path)
        temporary = Path(tempfile.mkdtemp(dir=run.path.parent, prefix=run.path.name + "."))
        (temporary / "samples").mkdir()
        write_atomically(temporary / "config.json", json.dumps(config, indent=1).encode())
        temporary.chmod(0o755)
        temporary.rename(run.path)                         # a run folder has its config from its first moment on
        return run

    @classmethod
    def open(cls, path):
        """An existing run and its config. SystemExit on a folder that is none."""
        run = cls(path)
        try:
            config = read_json(run.path / "config.json")
        except OSError:
            die(f"--resume {path}: no run there (no config.json); runs are folders under runs/")
        if run.writes and (run.path / "best.old").exists() and not (run.path / "best").exists():   # killed between two renames
            (run.path / "best.old").rename(run.path / "best")
        return run, config

    @classmethod
    def from_flags(cls, parser, argv, free=("steps", "threads", "server_calls", "server_parallel")):
        """The command line of a training script; with --resume the run's own flags, of which only `free` may be given anew.
        -> args, names given, RunDir or None (a new run)."""
        args, given = parser.parse(argv)
        if not args.resume:
            return args, given, None
        run, saved = cls.open(args.resume)
        if not set(saved) == set(vars(args)) - {"resume"} | {"init", "world"}:
            die(f"{args.resume}/config.json: not a run of this script, or of an older version of it; start a new run with --model {args.resume}")
        for name in given - {"resume", *free}:
            if getattr(args, name) != saved[name]:
                die(f"--resume {args.resume} continues with its own --{name} {saved[name]}; leave --{name} out, or start a new run")
        saved.update({k: getattr(args, k) for k in given & set(free)})
        return argparse.Namespace(**saved, resume=args.resume), given, run

    def configure(self, config):
        """Write config.json again, atomically: a resumed run may have been given more steps."""
        if self.writes:
            write_atomically(self.path / "config.json", json.dumps(config, indent=1).encode())

    def log(self, record):
        if not self.writes:
            return
        with open(self.metrics, "a", encoding="utf-8") as f:
            f.write(json.dumps(record) + "\n")

    def best(self):
        """In words, which policy best/ holds: the first with the highest dev score in metrics.jsonl."""
        rows = [r for r in read_json(self.metrics, rows=True) if "dev_emotion" in r] if self.writes else []
        if not rows:
            return f"best policy: {self.path}/best"
        top = max(rows, key=lambda r: r["dev_emotion"])
        return f"best policy: {self.path}/best (step {top['step']}, dev {top['dev_emotion']:.1f}{'; before RL, no later score was higher' * (top['step'] == 0)})"

    def sample(self, step, text):
        if self.writes:
            (self.path / "samples" / f"step_{step:06d}.txt").write_text(text + "\n", encoding="utf-8")

    def save(self, state):
        """Write the checkpoint; the previous one stays whole until the new one is on disk. state: tensors, numbers, strings, lists, dicts."""
        if self.writes:
            with on_disk(self.state):
                write_atomically(self.state, lambda f: torch.save(state, f))

    def load(self, device="cpu"):
        """The last checkpoint, or None where the run was killed before its first. Forgets metrics of steps after it."""
        if not self.state.exists():
            state, step = None, -1
        else:
            try:
                state = torch.load(self.state, map_location=device, weights_only=True)
                step = state["step"]
            except Exception as e:
                die(f"{self.state}: not a readable checkpoint ({type(e).__name__}); restore it, or start a new run with --model {self.path}")
        if self.writes and self.metrics.exists():
            kept = []
            for line in self.metrics.read_text(encoding="utf-8").splitlines():
                try:
                    if json.loads(line)["step"] <= step:
                        kept.append(line + "\n")
                except (ValueError, KeyError, TypeError):      # the line that was being written when the run was killed
                    pass
            write_atomically(self.metrics, "".join(kept).encode())
        return state


def write_atomically(path, content):
    """content: bytes, or a function that writes to an open binary file. The name appears, or changes, only when all is on disk."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")                      # two ranks may write one file of the cache
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(temporary, "wb") as f:
            f.write(content) if isinstance(content, bytes) else content(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        with suppress(OSError):                            # where nothing may be written this fails too, and what failed first is to be heard
            temporary.unlink(missing_ok=True)              # half a file on a full disk


@contextmanager
def on_disk(path, temporary=None):
    """Inside `with` what a run computed is written to `path`, by way of a folder `temporary`. SystemExit with one line where the disk is full or refuses; what stood there before stands there still,
    and a parent folder that nothing else is in goes with the temporary one. Any other error is raised as it is."""
    try:
        yield
    except Exception as e:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
            with suppress(OSError):
                os.rmdir(Path(path).parent)                # if it is empty: the same command is to find its --out free
        if not isinstance(e, (OSError, SafetensorError)) and not any(words in str(e) for words in ("os error", "PytorchStreamWriter", "unexpected pos", "inline_container")):       # names of their own for a full disk: tokenizers, torch
            raise
        free = shutil.disk_usage(next(p for p in Path(path).absolute().parents if p.exists())).free
        die(f"{path}: could not be written, {free / 1e9:.1f} GB are free there ({(str(e) or repr(e)).splitlines()[0]}); make room, then give the same command or --resume: what was saved before is whole")


def cpu_name():
    return next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "") if os.path.exists("/proc/cpuinfo") else platform.machine()


def record_result(path, result):
    """Append one measured result to a .jsonl file together with what made it: command, commit, machine, versions, date (UTC)."""
    git = lambda *words: subprocess.run(["git", *words], capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    commit = git("rev-parse", "--short", "HEAD") + "-dirty" * bool(git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!results"))       # an earlier result is no change of the code
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{cpu_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    made = {"command": shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]), "commit": commit or None, "machine": machine,
            "torch": torch.__version__, "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime())}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as f:
        f.write(json.dumps({**result, **made}) + "\n")


def write_rows(path, rows):
    """A .jsonl file of these rows, atomically."""
    with on_disk(path):
        write_atomically(path, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows).encode())


# ---------------------------------------------------------------------------------------------- a loop that goes on
def keep_begun(path, flags, model, optimizer, records):
    """Write what a loop without a RunDir needs to go on, atomically: what it was begun with, the parameters that are trained, the optimizer's state (or None), a record of each step."""
    trained = {k: v for k, v in model.named_parameters() if v.requires_grad}
    state = {"flags": flags, "trained": trained, "optimizer": optimizer and optimizer.state_dict(), "log": json.dumps(records)}
    with on_disk(path):
        write_atomically(path, lambda f: torch.save(state, f))


def take_up(path, flags, model, optimizer, steps):
    """-> the records of a loop that keep_begun kept, model and optimizer (or None) put where they were; [] where there is none. SystemExit where it was begun with other flags, is further
    than `steps`, or can't be read. A flag named "of X" is what X held."""
    if not path.exists():
        return []
    try:
        state = torch.load(path, weights_only=True, map_location=next(model.parameters()).device)
        other, records = [k for k in flags if state["flags"].get(k) != flags[k]], json.loads(state["log"])
        if not other:
            missing = {k for k, v in model.named_parameters() if v.requires_grad} - state["trained"].keys()
            assert not model.load_state_dict(state["trained"], strict=False).unexpected_keys and not missing
            if optimizer:
                optimizer.load_state_dict(state["optimizer"])
    except Exception as e:
        die(f"{path}: cannot be read ({type(e).__name__}); remove it to begin anew")
    if other:
        die(f"{path} was begun with " + ", ".join(f"another {k[3:]}" if k.startswith("of ") else f"--{k} {state['flags'].get(k)}" for k in other) + "; give the same to go on, or remove it to begin anew")
    if len(records) > steps:
        die(f"{path} has {len(records)} steps already, more than {steps}; ask for more, or remove it to begin anew")
    print(f"{path} has {len(records)} steps, going on from there")
    return records


# ---------------------------------------------------------------------------------------------- Ctrl-C
def interrupted(kind, value, trace):
    """sys.excepthook: Ctrl-C where nothing is to be saved ends in one line, everything else in its traceback."""
    print("stopped", file=sys.stderr) if issubclass(kind, KeyboardInterrupt) else sys.__excepthook__(kind, value, trace)


class StopOnInterrupt:
    """Inside `with`: the first Ctrl-C (or SIGTERM) asks the loop to finish its step and save; the second one ends at once."""
    def __enter__(self):
        self.asked = False
        self.before = {s: signal.signal(s, self.ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_):
        for s, handler in self.before.items():
            signal.signal(s, handler)

    def ask(self, number, frame):
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print("\nstopping: this step is finished and saved first (Ctrl-C again to stop at once)", file=sys.stderr, flush=True)
