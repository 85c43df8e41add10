"""Whether a draft may propose for a target."""

from specjax.models.hub import Checkpoint, start_field

MAX_PADDING = 256  # rows that an embedding may have beyond its tokenizer's ids (T5: 28)


def check_pair(target: Checkpoint, draft: Checkpoint) -> None:
    """Refuse a draft whose ids mean something else than the target's; padding may differ.

    Only the start token and the vocabulary have to agree: a row ends where the target says.

    Raises:
      ValueError: names the first token with two ids, or the sizes where there is no tokenizer.
    """
    pair = f"The target {target.name} and the draft {draft.name}"
    way_out = (
        "Speculation needs a draft with the target's tokenizer: choose or train another draft."
    )
    if target.config.is_encoder_decoder != draft.config.is_encoder_decoder:
        reads = ["a source" if c.config.is_encoder_decoder else "a prompt" for c in (target, draft)]
        raise ValueError(
            f"{pair} read the text differently, as {reads[0]} and as {reads[1]}. Choose or train "
            "a draft of the target's kind."
        )
    difference = _first_difference(target, draft)
    if difference:
        raise ValueError(f"{pair} have different vocabularies: {difference}. {way_out}")
    if target.start_id != draft.start_id:
        raise ValueError(
            f"{pair} start from different tokens: {start_field(target.config)} is "
            f"{target.start_id} and {draft.start_id}. {way_out}"
        )


def _first_difference(target: Checkpoint, draft: Checkpoint) -> str:
    """In words; empty if there is none."""
    if target.tokenizer is None or draft.tokenizer is None:
        return _size_difference(target, draft)
    ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    both = ours.keys() | theirs.keys()
    for token in sorted(both, key=lambda token: (ours.get(token, len(ours)), token)):
        if ours.get(token) != theirs.get(token):
            said = ["no id" if v.get(token) is None else f"id {v[token]}" for v in (ours, theirs)]
            return f"{token!r} has {said[0]} in the target and {said[1]} in the draft"
    return ""


def _size_difference(target: Checkpoint, draft: Checkpoint) -> str:
    """Where a tokenizer is missing, its model may have up to `MAX_PADDING` rows more."""
    sizes = target.model.vocab_size, draft.model.vocab_size
    slack = [MAX_PADDING * (c.tokenizer is None) for c in (target, draft)]
    if sizes[0] == sizes[1]:
        return ""
    if sum(slack) == MAX_PADDING:  # exactly one says how many ids are real
        extra = sizes[0] - sizes[1] if slack[0] else sizes[1] - sizes[0]
        if 0 < extra <= MAX_PADDING:
            return ""
    return f"{sizes[0]} and {sizes[1]} ids"
