"""Decode one's own input, with any target and draft. `specjax decode` does the same by default.

    specjax decode --config=configs/decode.py \\
        --config.target=google-t5/t5-3b --config.draft=google-t5/t5-small \\
        --input=prompts.txt --output=out.jsonl --config.gamma=7

Target and draft are Hugging Face directories or hub names of one vocabulary; a draft may also be
unigram, bigram, lookup, or the import path of one's own drafter (docs/drafters.md). At
temperature 0 and in float32 the tokens are those of --config.method=autoregressive, sooner.
"""

from specjax.cli.defaults import decode as get_config

__all__ = ["get_config"]
