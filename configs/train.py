"""The embedded family: a T5 v1.1 target and two one-layer drafts, on the task `parse`."""

from ml_collections import ConfigDict

MODELS = ("target", "draft", "tiny")


def get_config(model: str = "target") -> ConfigDict:
    """The config of one model of the family.

    Raises:
      ValueError: no such model.
    """
    if model not in MODELS:
        raise ValueError(f"no model {model!r}: choose from {', '.join(MODELS)}")
    config = ConfigDict()
    config.task = "parse"
    config.task_file = ""  # of the jsonl task: "train.jsonl,validation.jsonl,test.jsonl"
    config.max_examples = 0  # 0: all
    config.tokenizer = ""  # "": train one
    config.vocab_size = 2048
    config.max_source_len = 64
    config.teacher = ""  # "": learn from the data
    config.steps = 5000
    config.target_tokens = 1024
    config.buckets = ((16, 24), (24, 40), (32, 64), (48, 104))
    config.learning_rate = 1e-3
    config.warmup_steps = 100
    config.decay_share = 0.4
    config.clip = 1.0
    config.seed = 0
    config.log_every = 50
    config.eval_every = 500
    config.eval_examples = 512
    config.sample_examples = 64
    config.checkpoint_every = 250
    layers, width, heads, inner = {
        "target": (4, 256, 8, 512), "draft": (1, 128, 4, 256), "tiny": (1, 64, 4, 128)
    }[model]  # fmt: skip
    config.model = dict(
        d_model=width,
        d_kv=32 if width > 64 else 16,
        d_ff=inner,
        num_layers=layers,
        num_decoder_layers=layers,
        num_heads=heads,
    )
    if model != "target":
        config.tokenizer = config.teacher = "runs/target/model"
        config.learning_rate = 2e-3
        config.steps = 4000
    return config
