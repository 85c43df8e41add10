"""What is measured: shapes, cases, and the suite that a config describes."""

import dataclasses
from typing import Any

from experiments.reproduce.printed import TABLES_2_AND_4
from specjax.models.t5 import T5Config

# T5 v1.1, and the embedded family's target and its larger draft; "tiny" is what the tests run.
SHAPES = {
    "tiny": T5Config(64, 16, 8, 24, 2, 2, 2),
    "tiny-draft": T5Config(64, 8, 8, 16, 1, 1, 1),
    "embedded": T5Config(2048, 256, 32, 1600, 2, 6, 16),
    "embedded-draft": T5Config(2048, 128, 32, 256, 1, 1, 4),
    "t5-small": T5Config(32128, 512, 64, 1024, 8, 8, 6),
    "t5-base": T5Config(32128, 768, 64, 2048, 12, 12, 12),
    "t5-large": T5Config(32128, 1024, 64, 2816, 24, 24, 16),
    "t5-xl": T5Config(32128, 2048, 64, 5120, 24, 24, 32),
    "t5-xxl": T5Config(32128, 4096, 64, 10240, 24, 24, 64),
}
KINDS = ("decode", "silent")


@dataclasses.dataclass(frozen=True)
class Case:
    """One setting, in numbers and names that JSON can hold: they identify its row."""

    target: str  # of SHAPES
    draft: str = ""  # of SHAPES; "": plain decoding alone
    kind: str = "decode"
    """decode: both loops; silent: plain decoding and a loop that drafts nothing."""
    gamma: int = 3
    alpha: float = 0.8  # each drafted token is accepted with this chance
    weights: str = "random"
    """random; or agreeing: both heads are 0, both models always say the first token, and the
    paper's rule decides in the place of α."""
    batch: int = 1
    buffer: int = 128
    source: int = 64  # ids of every row
    tokens: int = 32  # of every row's output
    dtype: str = "float32"
    temperature: float = 0.0
    share: float = 1.0  # of the ids that the draft's head reads, see `specjax.frequent`

    def __post_init__(self):
        for name, allowed in (
            ("target", SHAPES),
            ("draft", ("", *SHAPES)),
            ("kind", KINDS),
            ("weights", ("random", "agreeing")),
        ):
            if (value := getattr(self, name)) not in allowed:
                known = ", ".join(filter(None, allowed))
                raise ValueError(f"{name}={value!r}: choose one of {known}.")
        if not 0 < self.share <= 1:
            raise ValueError(f"share={self.share}: it must lie in (0, 1]; 1 reads the whole head.")
        if self.buffer < (room := 1 + self.tokens + self.gamma + 1):
            raise ValueError(
                f"buffer={self.buffer} cannot hold the start token, {self.tokens} tokens and a "
                f"verify pass of γ={self.gamma}: it takes {room}."
            )

    @property
    def cell(self) -> dict[str, Any]:
        """The fields."""
        return dataclasses.asdict(self)


PARTS = (
    "base", "gamma", "batch", "buffer", "source", "shape", "frequent", "agree", "silent", "paper",
)  # fmt: skip


def suite(config) -> dict[str, list[Case]]:
    """Cases by part. Each differs from `config.base` in one factor; the paper's are their own.

    Raises:
      ValueError: a name that is not known, or a buffer that is too small.
    """
    base = Case(**config.base.to_dict())

    def vary(**changes) -> Case:
        return dataclasses.replace(base, **changes)

    return {
        "base": [base],
        "gamma": [vary(gamma=gamma) for gamma in config.gammas],
        "batch": [vary(batch=batch) for batch in config.batches],
        "buffer": [vary(batch=b, buffer=t) for b in config.buffer_batches for t in config.buffers],
        "source": [vary(source=source) for source in config.sources],
        "shape": [vary(target=target, draft=draft) for target, draft in config.shapes],
        "frequent": [vary(share=share) for share in config.shares],
        "agree": [vary(target=t, draft=d, weights="agreeing") for t, d in config.agreeing],
        "silent": [
            vary(kind="silent", target=t, draft=d, temperature=temperature)
            for t, d in config.silent
            for temperature in (0.0, 1.0)
        ],
        "paper": [
            vary(
                target=config.paper_target,
                draft=row.draft.lower(),
                gamma=row.gamma,
                alpha=row.alpha,
                temperature=float(row.temperature),
            )
            for row in TABLES_2_AND_4
            if row.draft.lower() in config.paper_drafts
        ],
    }


def chosen(config) -> list[Case]:
    """The cases of the config's part, or of all, each once."""
    parts = suite(config)
    if config.part != "all" and config.part not in parts:
        raise ValueError(f"part={config.part!r}: choose all or one of {', '.join(PARTS)}.")
    names = PARTS if config.part == "all" else (config.part,)
    return list(dict.fromkeys(case for name in names for case in parts[name]))


def step_bytes(
    config: T5Config, *, batch: int, source: int, slots: float, itemsize: int, share: float = 1.0
) -> float:
    """What a decoder step must read at least, however many positions it has.

    Every weight of the decoder and the head's `share` of rows once; keys and values of the source
    and of the `slots` filled so far, for every row. Not counted: what is written, activations, the
    rows of the embedding and the position biases, which are thousands of times smaller; the weights
    that project the encoder's output, which are read once per input.
    """
    width, inner = config.d_model, config.num_heads * config.d_kv
    gates = 2 if config.feed_forward_proj.startswith("gated-") else 1
    attention = 4 * width * inner + 2 * width * inner  # self: q, k, v, o; cross: q, o
    layer = attention + (gates + 1) * width * config.d_ff + 3 * width
    weights = config.num_decoder_layers * layer + width + round(share * config.vocab_size) * width
    cache = config.num_decoder_layers * batch * 2 * inner * (source + slots)
    return float(itemsize * (weights + cache))
