"""The embedded families: `parse`, a T5 v1.1 with two drafts, and `prose`, a GPT-2 with one.

    python -m experiments.train --config=configs/train.py:target-small --workdir=runs/target-small
    python -m experiments.train --config=configs/train.py:target      --workdir=runs/target
    python -m experiments.train --config=configs/train.py:draft-small --workdir=runs/draft-small
    python -m experiments.train --config=configs/train.py:draft-tiny  --workdir=runs/draft-tiny
    python -m experiments.train --config=configs/train.py:gpt-target  --workdir=runs/gpt-target
    python -m experiments.train --config=configs/train.py:gpt-draft   --workdir=runs/gpt-draft
    python -m experiments.train --config=configs/train.py:head        --workdir=runs/head
    python -m experiments.train --config=configs/train.py:eagle-parse --workdir=runs/eagle-parse

The drafts learn from the data first and then from the probabilities of the shipped target; for
another target add --config.teacher=runs/target/model --config.tokenizer=runs/target/model.

What to expect on the test split (Python 3.11.7 and the pinned packages; one run each), nats per
target token and the share of exact trees among 256 greedy outputs:

                parameters   loss   exact   well-formed   steps
    target-small  6,034,432  .050    .80           .88   4,500
    target       18,226,176  .022    .88           .94   6,000
    draft-small     918,656  .135    .58           .72   4,000
    draft-tiny      361,152  .272    .36           .58   4,000
    gpt-target    5,587,584 3.555      –             –   6,000
    gpt-draft       272,496 4.150      –             –   3,000

Reading the sources takes another minute or two. What was learned: experiments/train/README.md.

`head` is the acceptance head of draft-small (`experiments.train.train_head`), a matter of
minutes; for draft-tiny add --config.draft=families/parse/draft-tiny, and expect a weighted loss of
.62 on held-out rounds, where a constant has .97, and a rejected token below an accepted one 88
times in 100.

`eagle-parse`, `eagle3-parse`, `medusa-parse`, `medusa2-parse`, `hydra-parse`, `kangaroo-parse` and
the same of `prose`, and `shallow-parse`, are drafters that belong to the shipped targets
(`experiments.train.train_drafter`); for another add --config.target=runs/target/model. `medusa2`
trains the target's last layer along, and writes that target too. See docs/drafters.md.

`gpt-97m` and `gpt-6m` have the shapes of the paper's GPT-like pair: 8,000 tokens, heads of their
own (only then are there 97M and 6M parameters), GELU. NOT RUN: the paper trains on lm1b, which is
not here. Give sentences as a jsonl task, {"input": "", "target": "…"} on each line, and expect α of
.88 and .89 at temperatures 0 and 1; an accelerator is needed for the larger one:

    python -m experiments.train --config=configs/train.py:gpt-97m --workdir=runs/gpt-97m \\
        --config.task_file=train.jsonl,validation.jsonl,test.jsonl
    python -m experiments.train --config=configs/train.py:gpt-6m --workdir=runs/gpt-6m \\
        --config.task_file=… --config.tokenizer=runs/gpt-97m/model
"""

from ml_collections import ConfigDict

from configs.embedded import FAMILIES

CHOICES = (
    "target-small",
    "target",
    "draft-small",
    "draft-tiny",
    "gpt-target",
    "gpt-draft",
    "gpt-97m",
    "gpt-6m",
    "head",
    "eagle-parse",
    "eagle-prose",
    "eagle3-parse",
    "eagle3-prose",
    "medusa-parse",
    "medusa-prose",
    "medusa2-parse",
    "medusa2-prose",
    "hydra-parse",
    "hydra-prose",
    "kangaroo-parse",
    "kangaroo-prose",
    "shallow-parse",
    "eagle3-smollm2",
)


def get_config(model: str = "target") -> ConfigDict:
    """The config of one model of the families.

    `experiments.train.config.TrainConfig` explains the fields; those of `head` are in
    `experiments.train.train_head.HeadConfig`, those of drafters in
    `experiments.train.train_drafter.DrafterConfig`.

    Raises:
      ValueError: no such model.
    """
    if model not in CHOICES:
        raise ValueError(f"no model {model!r}: choose from {', '.join(CHOICES)}")
    if model == "head":
        return _head()
    if model == "eagle3-smollm2":
        return _eagle_of_smollm2()
    if model.startswith(("eagle", "medusa", "hydra", "kangaroo", "shallow")):
        return _attached(*model.split("-"))
    if model in ("gpt-97m", "gpt-6m"):
        return _gpt_of_the_paper(model)
    return _gpt(model) if model.startswith("gpt-") else _t5(model)


def common() -> ConfigDict:
    """The fields of every model, as the embedded families have them."""
    config = ConfigDict()
    config.task_file = ""  # of the jsonl task: "train.jsonl,validation.jsonl,test.jsonl"
    config.max_examples = 0  # 0: all
    config.tokenizer = ""  # "": train one
    config.vocab_size = 2048
    config.start = ""  # directory or hub name of a model to start from, with its shape
    config.grow = ""  # directory of a model to start from; "": start from scratch
    config.teacher = ""  # "": learn from the data
    config.teacher_after = 0  # steps on the data before the teacher's probabilities replace it
    config.exits = ()  # numbers of layers after which the model learns to exit
    config.exit_weight = 1.0  # of their mean loss, beside 1 for the model's own
    config.layer_dropout = 0.0  # with which the last layer is left out at the end
    config.divergence = "forward_kl"  # by which it is learned: `experiments.train.divergences`
    config.prefixes = "data"  # at which: data, target, draft, or shares such as "data=1, draft=3"
    config.prefix_temperature = 1.0  # of what models write there
    config.prefix_inputs = 512  # that a model writes outputs for at once
    config.refresh_every = 100  # steps after which it writes others
    config.optimizer = "adam"  # or adafactor
    config.warmup_steps = 100
    config.decay_share = 1.0
    config.clip = 1.0
    config.mesh = ""  # "data=4,model=2"; "": one device
    config.accumulate = 1  # microbatches, one after the other, that a batch is cut into
    config.dropout = 0.0  # of a T5
    config.remat = False  # whether a T5's layers are computed again in the backward pass
    config.compute_dtype = "float32"  # of products and activations; weights are float32
    config.save_dtype = "float16"  # of model/
    config.truncate = False  # inputs to the longest bucket; else they are left out
    config.metric = ""  # of greedy outputs: bleu or rouge
    config.seed = 0
    config.log_every = 50
    config.eval_every = 1000
    config.eval_examples = 512
    config.sample_examples = 64
    config.checkpoint_every = 250
    return config


def _t5(model: str) -> ConfigDict:
    config = common()
    config.task = "parse"
    config.family = "t5"
    config.max_source_len = 64
    config.steps = 4500
    config.target_tokens = 1024
    config.buckets = ((16, 24), (24, 40), (32, 64), (48, 104))
    config.learning_rate = 6e-4
    config.eval_every = 500
    # A step of the target's decoder reads 12.6M float32 parameters, 50 MB, head included and the
    # encoder's keys and values not: more than the caches of common processors hold.
    encoder, decoder, width, heads, size, inner = {
        "target": (2, 6, 256, 16, 32, 1600),
        "target-small": (2, 4, 256, 8, 32, 512),
        "draft-small": (1, 1, 128, 4, 32, 256),
        "draft-tiny": (1, 1, 64, 4, 16, 128),
    }[model]
    config.model = {
        "d_model": width,
        "d_kv": size,
        "d_ff": inner,
        "num_layers": encoder,
        "num_decoder_layers": decoder,
        "num_heads": heads,
    }
    if model == "target":
        config.tokenizer = config.grow = "runs/target-small/model"
        config.learning_rate = 4e-4
        config.steps = 6000
    elif model.startswith("draft-"):
        config.tokenizer = config.teacher = str(FAMILIES / "parse" / "target")
        config.learning_rate = 2e-3
        config.steps = 4000
        config.teacher_after = 2500
    return config


def _gpt(model: str) -> ConfigDict:
    config = common()
    config.task = "prose"
    config.family = "gpt2"
    config.max_source_len = 256
    config.steps = 6000
    config.target_tokens = 2048
    config.buckets = ((0, 160), (0, 320), (0, 416), (0, 480))
    config.learning_rate = 1.5e-3
    layers, width, heads, inner = (
        (4, 320, 5, 1216) if model == "gpt-target" else (1, 80, 5, 256)  # a twentieth of it
    )
    config.model = {
        "n_positions": 512,
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "n_inner": inner,
    }
    if model == "gpt-draft":
        config.tokenizer = config.teacher = str(FAMILIES / "prose" / "target")
        config.learning_rate = 3e-3
        config.steps = 3000
        config.teacher_after = 1500
    return config


def _gpt_of_the_paper(model: str) -> ConfigDict:
    config = _gpt("gpt-target")
    config.task = "jsonl"
    config.vocab_size = 8000
    config.steps = 100_000  # the paper states neither steps nor batches
    config.warmup_steps = 2000
    config.target_tokens = 1 << 15
    config.buckets = ((0, 24), (0, 48), (0, 80), (0, 136))  # of sentences
    config.learning_rate = 6e-4
    layers, width, heads = (12, 768, 12) if model == "gpt-97m" else (2, 256, 4)
    config.model = {
        "n_positions": 256,
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "tie_word_embeddings": False,
    }
    return config


def _attached(kind: str, task: str) -> ConfigDict:
    config = ConfigDict()
    config.drafter = {"hydra": "medusa"}.get(kind, kind.rstrip("23"))
    config.target = str(FAMILIES / task / "target")
    config.task = task
    config.task_file = ""
    config.max_examples = 0
    config.seed = 0
    config.log_every = 50
    config.eval_every = 1000
    config.eval_examples = 512
    config.checkpoint_every = 250
    config.clip = 1.0
    config.warmup_steps = 100
    config.decay_share = 1.0
    config.learning_rate = 1e-3
    config.steps = 1500 if task == "parse" else 3000 if kind == "eagle" else 2000
    like = _t5("target") if task == "parse" else _gpt("gpt-target")
    config.target_tokens = 1024
    config.buckets = like.buckets
    config.settings = ConfigDict({"divergence": "forward_kl"})
    config.settings.update(
        {
            # A token weighs .1 at the published size of features and vocabulary.
            "eagle": {
                "version": 1, "steps": 1, "feature_weight": 1.0, "token_weight": 1.0, "noise": 0.1,
            },
            "eagle3": {"version": 3, "steps": 3, "frequent": 1024},
            "medusa": {"heads": 4},
            "medusa2": {"heads": 4, "train_layers": 1, "heads_weight": 0.2},
            "hydra": {"heads": 4, "hydra": True},
            # Targets of 6 and 4 layers: of a deeper one take 2.
            "kangaroo": {"layers": 1},
            "shallow": {"layers": (0, 5)},
        }[kind]
    )  # fmt: skip
    return config


def _eagle_of_smollm2() -> ConfigDict:
    config = _attached("eagle3", "prose")
    config.target = "runs/chat/SmolLM2-135M-Instruct.Q4_1.gguf"  # of `make real`
    config.task = "jsonl"
    config.task_file = ",".join(
        f"runs/chat/outputs/{split}.jsonl" for split in ("train", "validation", "test")
    )
    config.buckets = ((0, 96), (0, 160), (0, 224), (0, 288), (0, 352))
    config.steps = 1000
    config.warmup_steps = 50
    config.eval_every = 250
    config.eval_examples = 32
    config.checkpoint_every = 50
    config.log_every = 10
    config.settings.update({"frequent": 6144, "taps": (2, 15, 30)})
    return config


def _head() -> ConfigDict:
    config = ConfigDict()
    config.task = "parse"
    config.task_file = ""
    config.target = str(FAMILIES / "parse" / "target")
    config.draft = str(FAMILIES / "parse" / "draft-small")
    config.inputs = 1000
    config.held_out_inputs = 200
    config.temperatures = (0.0, 1.0)
    config.gamma = 10
    config.max_new_tokens = 96
    config.batch_size = 32
    config.layers = 1
    config.steps = 3000
    config.tokens = 1024
    config.learning_rate = 1e-3
    config.reject_weight = 6.0
    config.seed = 0
    return config
