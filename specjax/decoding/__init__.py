"""Decoding in steps, from texts to rows. Everything jitted lies below, in the two loops.

- `methods`: checkpoints, drafters and names → the loop that decodes
- `conditions`: the conditions that a loop is tuned for or used under
- `texts`: texts → token ids, and the arrays that a model starts from
- `starting`: requests → the state before the first round
- `running`: a number of rows that decode together
- `streaming`: which inputs run together, in which order; rows as they end
- `outputs`: rows → tokens, texts and counts
- `programs`: both programs of a run, compiled ahead of it, and the bytes that they need

The names listed here are imported from here; all others, from their modules.
"""

from specjax.decoding.conditions import conditions
from specjax.decoding.methods import (
    build,
    check_carry,
    check_depth,
    check_log,
    check_models,
    plain,
    plain_if_preferred,
    plain_of,
    reads_batch,
    with_draft,
    with_policy,
)
from specjax.decoding.outputs import check_finite, read_rows, rows_of, text_of
from specjax.decoding.programs import Programs, compiled, needed
from specjax.decoding.running import Running
from specjax.decoding.starting import Request, prepare
from specjax.decoding.streaming import as_they_end, at_once, decoded, in_order, stream
from specjax.decoding.texts import (
    check_room,
    check_texts,
    common_width,
    is_blank,
    pack_for,
    tokenize,
)

__all__ = [
    "Programs",
    "Request",
    "Running",
    "as_they_end",
    "at_once",
    "build",
    "check_carry",
    "check_depth",
    "check_finite",
    "check_log",
    "check_models",
    "check_room",
    "check_texts",
    "common_width",
    "compiled",
    "conditions",
    "decoded",
    "in_order",
    "is_blank",
    "needed",
    "pack_for",
    "plain",
    "plain_if_preferred",
    "plain_of",
    "prepare",
    "read_rows",
    "reads_batch",
    "rows_of",
    "stream",
    "text_of",
    "tokenize",
    "with_draft",
    "with_policy",
]
