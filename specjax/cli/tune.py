"""Find the fastest way to draft on this machine, by measured costs and a race.

    specjax tune --config.target=DIR --config.draft=DIR --input=FILE --settings=settings.json
    specjax decode --config.target=DIR --config.draft=DIR --input=FILE --settings=settings.json

Times drafts of a few lengths on some of the inputs, compares drafts of one length, the policy and
plain decoding, and prints the fastest way and the reasons. The fields of the config are those that
you will decode with. Most of its time compiles two loops, or four with time enough. A forecast
comes first. --config.minutes limits what is timed. docs/costs.md describes what is measured.

Input: one line each, "-" for standard input. In FILE.jsonl each line is {"input": "…"}, or
{"messages": [{"role": "user", "content": "…"}]}, a chat for the target's chat template, or a
question of Spec-Bench, whose first turn is taken.

Half of the timed inputs choose, and the speedup that is printed is of the others.
--settings names a JSON file, which `specjax decode`, `specjax.Settings.load` and `specjax.generate`
take; settings hold for this machine, this pair, this batch size and such inputs, and a warning
says where they are used for something else.
"""

import pathlib

from absl import flags
from ml_collections import config_flags

from specjax.cli import defaults, inputs, outputs, pairs
from specjax.defaults import MINUTES
from specjax.measure import doubts
from specjax.support import command_line
from specjax.tuning.pace import check_minutes
from specjax.tuning.tune import tuned, with_passes


def main(_) -> None:
    args, config = flags.FLAGS, flags.FLAGS.config
    config.method = "speculative"
    pairs.check(config)
    check_minutes(config.get("minutes", MINUTES))
    if args.settings:
        file = pathlib.Path(args.settings)
        outputs.check_place(file, "settings", args, config.target, config.draft)
    texts = inputs.read_texts(args.input, config.target)
    if not texts:
        raise ValueError(f"--input={args.input} is empty: give it one input a line.")
    if config.mesh:
        pairs.check_plan(config, texts)
    pairs.check_fit(config)
    if busy := doubts.busy_before(doubts.used_by_others()):
        command_line.say(busy)
    with command_line.clocked() as say:
        command_line.say_loading(config.target, config.draft, say=say)
        target, draft = pairs.load_pair(config)
        assert draft is not None  # of a speculative method
        job = pairs.job(config, target, texts, config.get("minutes", MINUTES), say)
        found = tuned(job, draft, with_passes(job, defaults.drafting(config)))
    print(found)
    if args.settings:
        found.save(args.settings)


def run() -> None:
    """Run the command with the flags of this process."""
    config_flags.DEFINE_config_file("config", None, "What to decode with; none: the defaults.")
    flags.DEFINE_string("input", None, inputs.HELP)
    flags.DEFINE_string("settings", "", "A JSON file to write what is found to; empty: none.")
    flags.mark_flags_as_required(["config", "input"])
    command_line.run(
        main,
        __doc__,
        config=f"{defaults.__file__}:tune",
        fields=defaults.help_of(defaults.TUNE),
    )
