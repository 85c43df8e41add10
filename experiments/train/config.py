"""The settings of a training run on a task; `configs/train.py` has those of the embedded family."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from experiments.reproduce import scores
from experiments.train import divergences, meshes, prefixes
from experiments.train.exits import Exits
from experiments.train.loop import LoopConfig
from experiments.train.modes import Mode
from specjax import checkpoints
from specjax.support.ranges import number, whole

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopConfig):
    """What to train and how.

    Raises:
      ValueError: a field is out of its range, or two contradict each other.
    """

    tokenizer: str = ""  # directory of a model whose tokenizer to use; "": train one
    vocab_size: int = 2048  # of a tokenizer that is trained
    max_source_len: int = 64
    truncate: bool = False  # inputs to the longest bucket, as decoding does; else they are left out
    family: str = "t5"  # or gpt2, which learns input and target as one text
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of T5Config, GPTConfig
    start: str = ""  # directory or hub name of a model to start from, instead of family and model
    grow: str = ""  # directory of a model to start from; a smaller T5 grows (`grow.py`)
    teacher: str = ""  # directory of a model to learn the probabilities of; "": learn the data
    teacher_after: int = 0  # steps on the data before the teacher's probabilities replace it
    exits: tuple[int, ...] = ()  # layers after which the model learns to exit (`exits.py`)
    exit_weight: float = 1.0  # of the mean loss of the exits, beside 1 for the model's own
    layer_dropout: float = 0.0  # with which the last layer is left out at the end
    divergence: str = "forward_kl"  # from the teacher, see `experiments.train.divergences`
    prefixes: str = "data"  # at which: data, target, draft, or shares such as "data=1, draft=3"
    prefix_temperature: float = 1.0  # of what models write
    prefix_inputs: int = 512  # that a model writes outputs for at once
    refresh_every: int = 100  # steps after which it writes others
    sample_examples: int = 64  # for greedy outputs
    metric: str = ""  # of greedy outputs: bleu or rouge (`experiments.reproduce.scores`)
    mesh: str = ""  # "data=4,model=2"; "": one device
    accumulate: int = 1  # microbatches, one after the other, that a batch is cut into
    dropout: float = 0.0  # of a T5
    remat: bool = False  # whether a T5's layers are computed again in the backward pass
    compute_dtype: str = "float32"  # of products and activations; weights are float32
    save_dtype: str = "float16"  # of model/

    def __post_init__(self):
        super().__post_init__()
        for name in ("accumulate", "prefix_inputs", "refresh_every"):
            whole(name, getattr(self, name), "[1, ∞)")
        whole("sample_examples", self.sample_examples, "[0, ∞)")
        number("teacher_after", self.teacher_after, "[0, ∞]")
        number("prefix_temperature", self.prefix_temperature, "[0, ∞)")
        for name, known in (
            ("compute_dtype", DTYPES),
            ("save_dtype", DTYPES),
            ("family", tuple(checkpoints.FAMILIES)),
            ("metric", ("", *scores.METRICS)),
        ):
            if (value := getattr(self, name)) not in known:
                choices = ", ".join(choice or "empty" for choice in known)
                raise ValueError(f"{name}={value!r} must be one of {choices}.")
        meshes.check_rows(self.buckets, self.target_tokens, self.accumulate, self.mesh)
        if self.start and self.grow:
            raise ValueError(f"start={self.start!r} and grow={self.grow!r}: give one of them.")
        check_shape(self.family, self.model)
        self.mode.check(self.family)
        Exits(self.exits, self.exit_weight, self.layer_dropout)
        divergences.parse(self.divergence)
        if prefixes.shares(self.prefixes).keys() != {"data"} and not self.teacher:
            raise ValueError(
                f"prefixes={self.prefixes!r} are to learn a teacher's probabilities at: name the "
                "teacher"
            )

    @property
    def mode(self) -> Mode:
        """Dropout and rematerialisation."""
        return Mode(self.dropout, self.remat)

    @property
    def decoder_only(self) -> bool:
        """Whether input and target are one text to the model."""
        return not checkpoints.FAMILIES[self.family].config_class.is_encoder_decoder


def check_shape(family: str, model: Mapping[str, Any]) -> None:
    """Raise ValueError if `model` has fields that are unknown, or sizes that no model can have."""
    config_class = checkpoints.FAMILIES[family].config_class
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    for name in ("vocab_size", "bos_token_id", "pad_token_id"):
        defaults.pop(name, None)  # the tokenizer has them
    for name, value in model.items():
        if name not in defaults:
            raise ValueError(
                f"model.{name} is no field of family={family!r}; choose from {', '.join(defaults)}."
            )
        if type(defaults[name]) is int:  # of a size whose default is 0, 0 leaves the choice open
            whole(f"model.{name}", value, "[1, ∞)" if defaults[name] else "[0, ∞)")
    config_class(**model)
