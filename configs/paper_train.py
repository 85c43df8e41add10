"""The paper's models: T5 v1.1 fine-tuned on translation or summaries, and drafts from the target.

    python -m experiments.train --config=configs/paper_train.py:t5-v1_1-xxl_en-de \\
        --config.mesh=data=2,model=4 --workdir=runs/t5-v1_1-xxl_en-de

After configs/paper_train.py: a size (small, base, large, xl, xxl) and a task (en-de, cnn-dm), as
in t5-v1_1-small_cnn-dm. Each starts from google/t5-v1_1-SIZE, with its shape and tokenizer; give
--config.start=DIR where the hub cannot be reached, and --config.task_file=DIR for a corpus in the
hub's layout. `_distil` after the name of a small, base or large model goes on from the tuned model
of that name, on the probabilities of the tuned XXL: both are looked for in runs/.

The recipe is T5's (Raffel et al. 2020, 1910.10683, section 3.1 and 3.5): Adafactor at a constant
rate of 1e-3, dropout of .1, 2^18 steps on batches of 128 rows of 512 tokens. Shorter pairs make
batches of more rows. Weights are float32, products bfloat16, and layers are computed again in the
backward pass. The speculative decoding paper states none of it.

NOT RUN: this needs accelerators and a network. What each device holds:
experiments/reproduce/pretrained.md.
"""

from ml_collections import ConfigDict

from configs import train

SIZES = ("small", "base", "large", "xl", "xxl")
DRAFTS = SIZES[:3]
TASKS = {"en-de": ("wmt14_en_de", "bleu"), "cnn-dm": ("cnn_dailymail", "rouge")}
# Microbatches: 8 rows of 512 tokens at once for XXL.
ACCUMULATE = {"small": 1, "base": 2, "large": 4, "xl": 8, "xxl": 16}
CHOICES = {
    f"t5-v1_1-{size}_{task}{kind}": (size, task, kind)
    for kind in ("", "_distil")
    for size in (DRAFTS if kind else SIZES)
    for task in TASKS
}


def get_config(name: str = "t5-v1_1-small_en-de") -> ConfigDict:
    """The config of a model, one of `CHOICES`; `experiments.train.config.TrainConfig` explains it.

    Raises:
      ValueError: no such model.
    """
    if name not in CHOICES:
        raise ValueError(f"configs/paper_train.py:{name}: choose one of {', '.join(CHOICES)}.")
    size, task, kind = CHOICES[name]
    config = train.common()
    config.task, config.metric = TASKS[task]
    config.family = "t5"
    config.model = ConfigDict()  # the start's
    config.start = f"google/t5-v1_1-{size}"
    config.max_source_len = 512
    config.truncate = task == "cnn-dm"
    if task == "en-de":
        config.target_tokens = 128 * 512
        config.buckets = ((64, 64), (128, 128), (256, 256), (512, 512))
    else:
        config.target_tokens = 128 * 128
        config.buckets = ((512, 128), (512, 256))
    config.steps = 1 << 18
    config.optimizer = "adafactor"
    config.learning_rate = 1e-3
    config.warmup_steps = 0
    config.decay_share = 0.0
    config.clip = float("inf")  # Adafactor clips its steps itself
    config.dropout = 0.1
    config.remat = True
    config.compute_dtype = "bfloat16"
    config.save_dtype = "float32"
    config.accumulate = ACCUMULATE[size]
    config.log_every = 100
    config.eval_every = 5000
    config.checkpoint_every = 1000
    if kind:
        config.start = f"runs/t5-v1_1-{size}_{task}/model"
        config.teacher = f"runs/t5-v1_1-xxl_{task}/model"
        config.steps = 1 << 14
        config.accumulate = ACCUMULATE["xxl"]  # the teacher reads the batch too
    return config
