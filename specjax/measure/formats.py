"""Results in the formats of others: Spec-Bench's rows, and vLLM's fields of a request.

Spec-Bench's scripts read a JSON line for each question, of which the first choice counts. Its mean
of accepted tokens is that of all `accept_lengths`, and its speed the mean over questions of
Σ new_tokens / Σ wall_time. For a baseline it counts the tokens of `turns` again, by its tokenizer
and without the first id, which it takes for <s>. https://github.com/hemingkx/Spec-Bench

vLLM reports `metrics.speculative_decoding` with each response if its server is started with
--per-request-spec-decode-metrics; `detailed` adds the arrays by step that `read_vllm` needs. Steps
without a draft do not count there, nor does the token of the prefill.
https://docs.vllm.ai/en/stable/features/speculative_decoding/acceptance_metrics
"""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specjax.results import Row
from specjax.support import files
from specjax.support.ranges import shown

FORMATS = ("spec_bench", "vllm")
MAX_DRAFT = 1024  # tokens of a draft in a file: replay has a slot for each, at every position
WAY_OUT = (
    "Give a line of JSON for each response of a vLLM server started with "
    "--per-request-spec-decode-metrics=detailed, or of `specjax decode --format=vllm`."
)


class Answer(NamedTuple):
    """What Spec-Bench's rows need of an output. A `Row` has these fields too."""

    text: str
    emitted: int
    target_calls: int
    accepted_lengths: Sequence[int]
    rounds: Sequence[Mapping[str, Any]] = ()


def spec_bench(
    choices: Sequence[Sequence[tuple[Row | Answer, float]]],
    *,
    question_id: int | str,
    category: str,
    model_id: str,
    tstamp: float,
) -> dict[str, Any]:
    """Make Spec-Bench's row of a question.

    Args:
      choices: for each sample the row of each turn, and its seconds, prefill included.
      category: the category that the question's file gives, which its scripts select by.
      tstamp: time of writing, in seconds since 1970.
    """
    return {
        "question_id": question_id,
        "category": category,
        "model_id": model_id,
        "choices": [
            {
                "index": index,
                "turns": [row.text.strip() for row, _ in turns],
                "decoding_steps": [row.target_calls for row, _ in turns],
                "new_tokens": [row.emitted for row, _ in turns],
                "wall_time": [seconds for _, seconds in turns],
                "accept_lengths": [n for row, _ in turns for n in accept_lengths(row)],
            }
            for index, turns in enumerate(choices)
        ],
        "tstamp": tstamp,
    }


def accept_lengths(row: Row | Answer) -> list[int]:
    """Tokens that each target call emitted, in order if the row has its rounds.

    Without them the lengths ascend; the count, the sum and so the mean are the same.
    """
    if row.rounds:
        return [line["emitted"] for line in row.rounds]
    lengths = [kept + 1 for kept, calls in enumerate(row.accepted_lengths) for _ in range(calls)]
    if lengths:  # an output that ends inside a draft lacks the target's own token
        lengths[-1] -= sum(lengths) - row.emitted
    return lengths


def vllm(row: Row) -> dict[str, Any]:
    """Make vLLM's `speculative_decoding` of a request.

    The arrays by step are there if the row has its rounds. Drafted tokens behind the end of an
    output are not accepted here; vLLM may count them.
    """
    found = {
        "mean_acceptance_length": row.mean_acceptance_length,
        "draft_acceptance_rate": row.draft_acceptance_rate,
        "acceptance_histogram": row.acceptance_histogram,
        "num_spec_steps": row.num_spec_steps,
        "num_accepted_draft_tokens": row.accepted,
        "num_draft_tokens": row.verified,
        "num_spec_tokens": len(row.tested),
    }
    if steps := [line for line in row.rounds if line["verified"]]:
        found["per_step_accepted"] = [line["accepted"] for line in steps]
        found["per_step_drafted"] = [line["verified"] for line in steps]
    return found


def vllm_id(index: int, sample: int) -> str:
    """Make the id of a response, from the numbers of its input and its draw."""
    return f"{index}-{sample}"


def vllm_response(row: Row, model: str) -> dict[str, Any]:
    """Make the parts of vLLM's response that readers of its metrics take."""
    return {
        "id": vllm_id(row.index, row.sample),
        "model": model,
        "choices": [{"index": 0, "text": row.text, "token_ids": row.tokens}],
        "usage": {"completion_tokens": row.emitted},
        "metrics": {"speculative_decoding": vllm(row)},
    }


class Steps(NamedTuple):
    """The verified drafts of one output, in order."""

    accepted: list[int]
    drafted: list[int]
    longest: int  # the longest draft that the run allowed


def read_vllm(path: str | os.PathLike) -> list[Steps]:
    """Read the arrays by step of a file of vLLM's responses, one a line.

    A line is a response, or its `speculative_decoding` alone.

    Raises:
      ValueError: no such file, or a line without these arrays or with wrong ones.
    """
    file = pathlib.Path(path)
    if not file.is_file():
        raise ValueError(f"{path}: no such file. {WAY_OUT}")
    lines = files.json_objects(file.read_bytes(), path, WAY_OUT)
    if not (found := [_steps(line, place) for place, line in lines]):
        raise ValueError(f"{path} is empty. {WAY_OUT}")
    return found


def _is_no_count(value: Any) -> bool:
    return type(value) is not int or not 0 <= value <= MAX_DRAFT


def _steps(line: Mapping[str, Any], place: str) -> Steps:
    """The steps of one line; ValueError that names its place."""
    metrics = line.get("metrics")
    inner = metrics.get("speculative_decoding") if isinstance(metrics, Mapping) else None
    fields = inner if isinstance(inner, Mapping) else line
    idle = fields.get("num_spec_steps") == 0  # vLLM leaves the arrays out then
    accepted: Any = fields.get("per_step_accepted", [] if idle else None)
    drafted: Any = fields.get("per_step_drafted", [] if idle else None)
    if accepted is None:
        raise ValueError(f"{place}: no per_step_accepted. {WAY_OUT}")
    longest: Any = fields.get("num_spec_tokens")
    for name, value in (("per_step_accepted", accepted), ("per_step_drafted", drafted)):
        if not isinstance(value, list) or any(map(_is_no_count, value)):
            raise ValueError(
                f"{place}: {name}={shown(value)} should be a list of counts, 0 … {MAX_DRAFT}."
            )
    if len(accepted) != len(drafted):
        raise ValueError(
            f"{place}: {len(accepted)} steps in per_step_accepted and {len(drafted)} in "
            "per_step_drafted, which should be the same ones."
        )
    longest = max(drafted, default=0) if longest is None else longest
    if _is_no_count(longest) or longest < max(drafted, default=0):
        raise ValueError(
            f"{place}: num_spec_tokens={shown(longest)} should be the longest draft, and a step "
            f"drafted {max(drafted, default=0)}."
        )
    for step, (kept, count) in enumerate(zip(accepted, drafted, strict=True)):
        if kept > count:
            raise ValueError(f"{place}: step {step} accepted {kept} of {count} drafted tokens.")
    return Steps(accepted, drafted, longest)
