"""Write what the chat's model says, for training a drafter.

    python -m experiments.chat.outputs
    python -m experiments.train --config=configs/train.py:eagle3-smollm2 --workdir=runs/eagle3

The model writes the user's turns as well: it continues the chat template's opening and one of
`OPENERS`. Turns that it ends itself are answered, half of them greedily, half at temperature 1.
Lines with input and target go to train.jsonl, validation.jsonl and test.jsonl in outputs/. The same
command continues a run that was cut off. 1,400 outputs take about half an hour on two cores.
"""

import random
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from absl import flags
from tqdm import tqdm

import specjax
from experiments.chat import fetch
from specjax.checkpoints.tokenizers import chat_prompt
from specjax.models.checkpoint import Checkpoint
from specjax.results import Row
from specjax.support import command_line, files

OPENERS = (
    "", "What", "What is", "How", "How do I", "How can", "Why", "Can you", "Write", "Write a",
    "Write a short story about", "Write a Python function that", "Write an email", "Explain",
    "Explain the", "Summarize", "Summarize the following text:\n\n",
    "Translate the following sentence to French:", "Translate", "I am", "I'm", "I have", "Who",
    "When", "Where", "Give me", "List", "Describe", "Compare", "Solve",
    "Solve the following problem:", "If", "A", "Tom", "Sarah has",
    "Based on the following passage, answer the question.\n\n", "Read the passage below.\n\n",
    "Answer the question with the help of these documents.\n\nDocument 1:", "Rewrite", "Create",
    "Suggest", "def", "Fix the bug in this code:\n\n```python\n", "Imagine", "Tell me", "Should",
    "Is it", "Which", "Help me", "Plan",
)  # fmt: skip
MARK = "\0"  # a user's turn, until it is cut out of the template
ROUND = 256  # turns that are begun at once
TURN_TEMPERATURE = 0.8
TURN_TOKENS, ANSWER_TOKENS = 120, 224
HELD_OUT = {0: "test", 1: "validation"}  # of every 32 outputs


def template(target: Checkpoint) -> tuple[str, str]:
    """The chat template's text before and after a user's turn, up to the answer."""
    text = chat_prompt(target.tokenizer, [{"role": "user", "content": MARK}], target.name)
    before, _, after = text.partition(MARK)
    return before, after


def ended(row: Row, target: Checkpoint) -> bool:
    """Whether the model ended an output itself."""
    return bool(row.tokens) and row.tokens[-1] in target.eos_ids


def rounds(target: Checkpoint, begin: int, batch_size: int) -> Iterator[list[dict[str, str]]]:
    """Inputs and outputs of rounds `begin`, `begin` + 1, …, each drawn with its own seed."""
    before, after = template(target)
    while True:
        openers = random.Random(begin).choices(OPENERS, k=ROUND)
        how: dict[str, Any] = {"batch_size": batch_size, "key": begin}
        turns = specjax.generate(
            target,
            None,
            [before + opener for opener in openers],
            sampling=specjax.Sampling(TURN_TEMPERATURE),
            max_new_tokens=TURN_TOKENS,
            **how,
        )
        texts = [
            before + opener + row.text + after
            for opener, row in zip(openers, turns.rows, strict=True)
            if ended(row, target)
        ]
        found = []
        for temperature, some in ((0.0, texts[::2]), (1.0, texts[1::2])):
            if some:
                answers = specjax.generate(
                    target,
                    None,
                    some,
                    sampling=specjax.Sampling(temperature),
                    max_new_tokens=ANSWER_TOKENS,
                    **how,
                )
                pairs = zip(some, answers.texts, strict=True)
                found += [{"input": text, "target": answer} for text, answer in pairs if answer]
        yield found
        begin += 1


def main(_) -> None:
    args = flags.FLAGS
    workdir = command_line.make_workdir(args.workdir)
    name = fetch.resolved(args.target or fetch.SMOLLM2, workdir)
    command_line.say_loading(name)
    target = specjax.load(name, dtype=jnp.bfloat16)
    place = workdir / "outputs"
    place.mkdir(exist_ok=True)
    rows = files.Rows(place / "all.jsonl")
    begin = max((row["round"] for row in rows.done), default=-1)
    if len(rows.done) < args.outputs:
        begin = max(begin, 0)  # the last round may have been cut off: it is drawn again
        rows.keep(lambda row: row["round"] < begin)
        made = rounds(target, begin, args.batch_size)
        with tqdm(total=args.outputs, initial=len(rows.done), unit="output") as bar:
            while len(rows.done) < args.outputs:
                for pair in next(made):
                    rows.append({"round": begin, **pair})
                    bar.update()
                begin += 1
    splits: dict[str, list[dict[str, Any]]] = {"train": [], "validation": [], "test": []}
    for i, row in enumerate(rows.done):
        splits[HELD_OUT.get(i % 32, "train")].append(row)
    for split, some in splits.items():
        files.write_rows(place / f"{split}.jsonl", some)
    print(f"{place}: {', '.join(f'{split} {len(some)}' for split, some in splits.items())}")


if __name__ == "__main__":
    flags.DEFINE_string("target", "", "A checkpoint with a chat template; empty: SmolLM2.")
    flags.DEFINE_string("workdir", "runs/chat", "Where the model and outputs/ lie.")
    flags.DEFINE_integer("outputs", 1400, "Outputs to write in all.", lower_bound=1)
    flags.DEFINE_integer("batch_size", 48, "Rows at once.", lower_bound=1)
    command_line.run(main, __doc__)
