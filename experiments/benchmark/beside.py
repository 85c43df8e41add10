"""specjax beside llama.cpp, transformers and CTranslate2: the same ids, decoded greedily in turns.

    python -m experiments.benchmark.beside --target=1.5b.gguf --draft=0.5b.gguf --workdir=runs/pair
    python -m experiments.benchmark.beside --shapes=t5-base --workdir=runs/t5-base

Each peer is a process, which uses all cores while it answers. For each prompt every peer decodes
--tokens ids without a draft, then with it, and one id alone; then all of that again. Only the least
of the turns counts, which leaves out what the first turn compiles. A row of results.jsonl has all
seconds of one prompt. The same command goes on with the prompts that are missing.

    llama.cpp      node, and in the folder --packages:
                   npm install --ignore-scripts node-llama-cpp @node-llama-cpp/linux-x64
    transformers   pip install torch gguf accelerate
    ctranslate2    pip install torch ctranslate2
"""

import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from absl import flags

from experiments.benchmark.cases import SHAPES
from experiments.chat.groups import encode, user
from experiments.command import publish
from experiments.reproduce.pages import Section, number
from specjax import checkpoints
from specjax.measure import provenance, report
from specjax.support import command_line, runs

Row = Mapping[str, Any]
HERE = pathlib.Path(__file__).parent
LLAMA = "node-llama-cpp"
NEEDS = {"transformers": ("torch", "gguf", "accelerate"), "ctranslate2": ("torch", "ctranslate2")}
PAIR = ("specjax:int8", "llama.cpp:as stored", "transformers:bfloat16")
ENCODER = ("specjax:float32", "specjax:int8", "ctranslate2:float32", "ctranslate2:int8")
CODE = """
def read_rows(path):
    rows = []
    for line in open(path):
        parts = line.strip().split(",")
        rows.append((parts[0], float(parts[1])))
    return rows
"""
PROMPTS = (
    ("code written", "Write a Python function that tests whether a text is a palindrome."),
    ("code written", "Write a Python class for a queue with methods push, pop and size."),
    ("code written", "Write a shell script that prints the ten largest files of a folder."),
    ("code edited", f"Add type hints and a docstring. Print the code.\n{CODE}"),
    ("code edited", f"Rename `rows` to `orders` everywhere. Print the code.\n{CODE}"),
    ("code edited", f"Skip lines that are empty. Print the code.\n{CODE}"),
    ("chat", "What should I pack for a week of walking in the mountains in autumn?"),
    ("chat", "Explain to a child why the moon changes its shape during a month."),
)


class Peer:
    """A process that decodes; `ask` returns its answer to one request."""

    def __init__(self, name: str, dtype: str, files: Sequence[str], packages: str):
        self.name, self.dtype = name, dtype
        if name == "llama.cpp":
            cores = str(provenance.environment()["cores"])
            command = ["node", str(HERE / "llama_cpp.mjs"), packages, cores, *files]
        else:
            command = [sys.executable, "-m", "experiments.benchmark.worker", name, dtype, *files]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, **pipes)
        self.version = self._read()["version"]

    def ask(self, ids: Sequence[int], tokens: int, gamma: int = 0) -> dict[str, Any]:
        """Decode so many tokens: `ids`, and the `seconds` of the whole call."""
        request = json.dumps({"ids": list(ids), "tokens": tokens, "gamma": gamma})
        assert self._process.stdin is not None, "a pipe"
        print(request, file=self._process.stdin, flush=True)
        return self._read()

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "a pipe"
        if line := self._process.stdout.readline():
            return json.loads(line)
        self.end()
        raise ValueError(f"{self.name}:{self.dtype} ended without an answer; see its error above.")


def check(peers: Sequence[str], packages: str) -> None:
    """ValueError if a peer is not known, or what it needs is not installed."""
    for name in (peer.partition(":")[0] for peer in peers):
        if name not in ("specjax", "llama.cpp", *NEEDS):
            raise ValueError(f"--peers={name}: name specjax, llama.cpp, {' or '.join(NEEDS)}.")
        missing = [one for one in NEEDS.get(name, ()) if importlib.util.find_spec(one) is None]
        if missing:
            raise ValueError(f"{name} needs packages: pip install {' '.join(missing)}")
        if name == "llama.cpp" and shutil.which("node") is None:
            raise ValueError("llama.cpp needs node, 20 or newer: install nodejs and npm.")
        if name == "llama.cpp" and not pathlib.Path(packages, "node_modules", LLAMA).is_dir():
            raise ValueError(
                f"--packages={packages} has no node_modules/{LLAMA}: npm install --prefix "
                f"{packages} --ignore-scripts {LLAMA} @{LLAMA}/linux-x64"
            )


def measure(peers: Sequence[Peer], ids: Sequence[int], gammas: Sequence[int]) -> list[Row]:
    """What each peer needs for one prompt, by method: `seconds` and `first` by turn."""
    args = flags.FLAGS
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for _ in range(args.turns):
        for peer in peers:
            for gamma in (0, *gammas):
                first = peer.ask(ids, 1, gamma)["seconds"]
                answer = peer.ask(ids, args.tokens, gamma)
                key = {"peer": peer.name, "dtype": peer.dtype, "gamma": gamma}
                new = key | {"first": [], "seconds": []}
                row = found.setdefault((peer.name, peer.dtype, gamma), new)
                row["first"].append(round(first, 4))
                row["seconds"].append(round(answer["seconds"], 4))
                row |= {"ids": answer["ids"], "version": peer.version}
            time.sleep(args.pause)
    return list(found.values())


def table(rows: Sequence[Row]) -> Section:
    """A line for each method, with its mean over the prompts of each kind."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    by: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        plain = {m["peer"] + m["dtype"]: m["ids"] for m in row["methods"] if not m["gamma"]}
        ours = next(m["ids"] for m in row["methods"])
        for m in row["methods"]:
            count, least = len(m["ids"]), min(m["seconds"])
            cell = {"kind": row["kind"], "ms": 1e3 * (least - min(m["first"])) / (count - 1)}
            cell |= {"whole": 1e3 * least / count, "same": m["ids"] == ours}
            cell["own"] = m["ids"] == plain[m["peer"] + m["dtype"]]
            drafted = f"γ = {m['gamma']}" if m["gamma"] else "plain"
            by.setdefault(f"{m['peer']}, {m['dtype']}, {drafted}", []).append(cell)

    def mean(cells: Sequence[Row], name: str, kind: str = "") -> float:
        return float(np.mean([c[name] for c in cells if kind in ("", c["kind"])]))

    own = [mean(by[n], "ms") for n in by if n.startswith("specjax") and n.endswith("plain")]
    lines = []
    for name, cells in by.items():
        line = {"method": name} | {kind: number(mean(cells, "ms", kind), 1) for kind in kinds}
        line |= {"all": number(mean(cells, "ms"), 1), "whole call": number(mean(cells, "whole"), 1)}
        line["speedup"] = number(min(own) / mean(cells, "ms")) if own else "–"
        for heading, key in (("as plain", "own"), ("as the first", "same")):
            line[heading] = f"{sum(cell[key] for cell in cells)} of {len(cells)}"
        lines.append(line)
    columns: list[report.Column] = [(name, itemgetter(name)) for name in lines[0]]
    versions = dict.fromkeys(m["version"] for row in rows for m in row["methods"])
    legend = (
        "ms a token, the least of the turns for each prompt, the mean over prompts. By kind and in "
        "all: of the tokens after the first. whole call: with the prompt or the encoder. speedup: "
        "the fastest plain loop of specjax over this line. as plain: outputs that are those of the "
        "peer's plain decoding; as the first: those of the first line. "
    )
    tokens = len(rows[0]["methods"][0]["ids"])
    return Section(
        f"{rows[0]['target']}, {tokens} tokens", columns, lines, f"{'; '.join(versions)}.", legend,
        measured=rows,
    )  # fmt: skip


def prompts() -> list[tuple[str, list[int]]]:
    """Ids of each prompt, with its kind; for random weights, random ids."""
    args = flags.FLAGS
    if args.shapes:
        rng, size = np.random.default_rng(0), SHAPES[args.shapes].vocab_size
        return [("random ids", rng.integers(2, size, 64).tolist()) for _ in PROMPTS]
    target = checkpoints.outline(args.target)
    texts = encode(target, [[user(text)] for _, text in PROMPTS])
    return [(kind, ids) for (kind, _), ids in zip(PROMPTS, texts, strict=True)]


def main(_) -> None:
    args = flags.FLAGS
    if bool(args.shapes) == bool(args.target):
        raise ValueError("Give --target, and --draft if there is one; or --shapes.")
    files = [args.shapes] if args.shapes else [f for f in (args.target, args.draft) if f]
    names = args.peers or list(ENCODER if args.shapes else PAIR)
    check(names, args.packages)
    gammas = [int(gamma) for gamma in args.gamma] if len(files) > 1 else []
    workdir = command_line.make_workdir(args.workdir)
    results = provenance.Results(workdir / "results.jsonl")
    models = [os.path.basename(file) for file in files]
    settings = {"models": models, "peers": names, "gammas": gammas}
    settings |= {"tokens": args.tokens, "turns": args.turns}
    mine = runs.fingerprint(*settings.values())
    runs.keep_settings(results, settings, mine, "rows of other models or settings")
    known = {row["prompt"] for row in results.done}
    if todo := [(at, *one) for at, one in enumerate(prompts()) if at not in known]:
        fill(results, todo, files, names, gammas, {"run": mine})
    publish(workdir, "specjax beside others", [table(results.done)], results.done)


def fill(results, todo, files, names, gammas, fields: dict[str, Any]) -> None:
    """Append a row for each prompt, as long as --minutes last."""
    args, peers = flags.FLAGS, []
    command = provenance.command()
    for file in files:
        command = command.replace(file, os.path.basename(file))
    models = dict(zip(("target", "draft"), map(os.path.basename, files), strict=False))
    try:
        for name in names:
            command_line.say(f"loading {' and '.join(models.values())} for {name}")
            peer, _, dtype = name.partition(":")
            peers.append(Peer(peer, dtype, files, args.packages))
        begin = time.monotonic()
        for at, kind, ids in command_line.Steps(todo, unit="prompt", disable=None):
            if args.minutes and time.monotonic() - begin > 60 * args.minutes:
                break
            row = {"prompt": at, "kind": kind, "methods": measure(peers, ids, gammas)}
            facts = {"dtype": ", ".join(names), "batch": 1, "seed": 0, "command": command}
            results.append({**row, **models, **facts, **fields})
    finally:
        for peer in peers:
            peer.end()


if __name__ == "__main__":
    flags.DEFINE_string("target", "", "A GGUF file.")
    flags.DEFINE_string("draft", "", "A GGUF file of the same vocabulary.")
    flags.DEFINE_enum("shapes", "", ["", *SHAPES], "Random weights instead: a T5 of these shapes.")
    flags.DEFINE_list("peers", [], "NAME:DTYPE of each; the first is the one to compare with.")
    flags.DEFINE_list("gamma", ["3"], "Drafted tokens in a round; one or more values.")
    flags.DEFINE_integer("tokens", 48, "New tokens.", lower_bound=2)
    flags.DEFINE_integer("turns", 3, "Turns for each prompt.", lower_bound=2)
    flags.DEFINE_float("minutes", 0, "After which no further prompt is begun; 0: no limit.")
    flags.DEFINE_float("pause", 0.2, "Seconds after each peer, whose threads spin for a while.")
    flags.DEFINE_string("packages", ".", "The folder with node_modules.")
    flags.DEFINE_string("workdir", None, "Directory for results and report.")
    flags.mark_flag_as_required("workdir")
    command_line.run(main, __doc__)
