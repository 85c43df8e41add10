"""The paper's own experiment on published checkpoints: translation and summaries, three drafts.

    JAX_DEFAULT_MATMUL_PRECISION=highest XLA_PYTHON_CLIENT_MEM_FRACTION=.95 \\
        python -m experiments.reproduce --config=configs/paper.py:t5-11b_en-de --workdir=runs/paper

Reproduces Tables 2 and 4 (and the T5 rows of Table 3): α, τ, c, v(γ) and the speedup over plain
decoding at batch 1, at temperatures 0 and 1, with the small, base and large model of the target's
family as drafts; and BLEU or ROUGE of both methods, which must agree: the same outputs at
temperature 0, a difference within its interval at temperature 1.

NOT RUN YET: this needs a network and an accelerator. The tests run each config unchanged but for
its lengths, on tiny models and corpora in the hub's layout. What to expect is therefore the paper's
(T5-XXL v1.1, fine-tuned on each task, one TPU-v4):

                       EnDe  T=0   T=1        CNNDM  T=0   T=1
    α        small              .75   .62               .65   .53
             base               .80   .68               .73   .55
             large              .82   .71               .74   .56
    speedup  small              3.4   2.6               3.1   2.3
             base               2.8   2.4               3.0   2.2
             large              1.7   1.4               2.2   1.7

`t5-v1_1-xxl_en-de`, and likewise xl and cnn-dm, are the workdirs in runs/ of models that
configs/paper_train.py has tuned (experiments/reproduce/pretrained.md).

Here the checkpoints are other ones, so α will be near these and not equal; a 3B target gets a
smaller speedup, since a step of it is cheaper beside its draft's. Memory for weights, caches and
the largest draft, in GB; activations come on top. experiments/reproduce/README.md says how this was
computed:

    after configs/paper.py:                     float32   bfloat16
    t5-3b_en-de         t5-3b_cnn-dm               17         9
    t5-11b_en-de        t5-11b_cnn-dm              58        29
    flan-t5-xl_en-de    flan-t5-xl_cnn-dm          16         8
    flan-t5-xxl_en-de   flan-t5-xxl_cnn-dm         50        25

`--config.dtype=bfloat16` halves it, and then near-ties may part the outputs at temperature 0.
"""

from typing import NamedTuple

import ml_collections

from specjax.cli import defaults

DRAFT_SIZES = ("small", "base", "large")
# Hub names of the targets, each followed by what its drafts are called up to their size.
TARGETS = {
    "t5-3b": ("google-t5/t5-3b", "google-t5/t5-"),
    "t5-11b": ("google-t5/t5-11b", "google-t5/t5-"),
    "flan-t5-xl": ("google/flan-t5-xl", "google/flan-t5-"),
    "flan-t5-xxl": ("google/flan-t5-xxl", "google/flan-t5-"),
}


class Setting(NamedTuple):
    """A task, its metric, and its name in the paper's tables."""

    task: str
    metric: str
    in_paper: str


SETTINGS = {
    "en-de": Setting("wmt14_en_de", "bleu", "EnDe"),
    "cnn-dm": Setting("cnn_dailymail", "rouge", "CNNDM"),
}
CHOICES = tuple(f"{target}_{setting}" for target in TARGETS for setting in SETTINGS)
# Workdirs of configs/paper_train.py, in runs/: the paper's own targets.
TUNED = tuple(f"t5-v1_1-{size}_{setting}" for size in ("xl", "xxl") for setting in SETTINGS)


def get_config(name: str = "t5-3b_en-de") -> ml_collections.ConfigDict:
    """`name` is one of `CHOICES`, a target and a setting, or one of `TUNED`."""
    if name not in CHOICES + TUNED:
        raise ValueError(f"configs/paper.py:{name}: choose one of {', '.join(CHOICES + TUNED)}.")
    target, setting = name.rsplit("_", 1)
    task, metric, in_paper = SETTINGS[setting]
    config = defaults.decode()
    if name in TUNED:
        config.target = f"runs/{name}/model"
        config.drafts = tuple(f"runs/t5-v1_1-{size}_{setting}/model" for size in DRAFT_SIZES)
    else:
        config.target, draft_prefix = TARGETS[target]
        config.drafts = tuple(draft_prefix + size for size in DRAFT_SIZES)
    config.draft = config.drafts[0]  # for `specjax decode`
    # Counting unigrams and bigrams, as the paper did too, would fetch the whole training split.
    config.ngrams = ("lookup",)
    # The paper's rows to print beside ours: (task, draft) of `experiments.reproduce.printed`.
    config.paper = {name: (in_paper, name) for name in ("unigram", "bigram")} | {
        draft.split("/")[1]: (in_paper, f"T5-{size}")
        for draft, size in zip(config.drafts, DRAFT_SIZES, strict=True)
    }
    config.tables = ("alpha", "speedup", "quality")
    config.timeline = False  # Figure 5
    config.temperatures = (0.0, 1.0)
    config.max_source_len = 512  # what the checkpoints were trained on; the paper states no length
    config.max_new_tokens = 128  # likewise not stated
    config.task = task
    config.split = "test"  # of WMT14: newstest2014
    config.data_dir = ""  # "": the hub; or a directory in its layout
    config.metric = metric
    config.alpha_inputs = 400  # more than the paper's 10,000 tokens
    config.quality_inputs = 1000  # outputs of both methods that the metric compares
    config.lenience_inputs = 200  # of the table "lenience", if it is asked for
    config.timed_inputs = 50  # inputs that the timed loops decode, at batch 1
    config.timed_ngrams = ()
    config.repeats = 3  # of each timing, methods taking turns
    config.gammas = (1, 2, 3, 5, 7, 10)  # among which the formula picks
    config.gamma_by_position = False  # by the rates of each position, not by one α for all
    config.batch_size = 4  # of all that is not timed
    config.dtype = "float32"  # in which outputs at temperature 0 are identical
    return config
