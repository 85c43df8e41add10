"""Check a pair: a line for each check, with a verdict and the way out.

    specjax doctor --config.target=DIR --config.draft=DIR [--input=FILE]

Checks files, tokenizer, compatibility, devices and dtypes, memory, weights, logits, outputs, greedy
identity, the sampling distribution, acceptance by position, c and v, and the expected speedup. A
failed check skips those that build on it. The fields of the config, listed below, are those that
you decode with. --input has texts of your own, on which α and the speedup depend: one a line, or
FILE.jsonl with {"input": "…"} or {"messages": [{"role": "user", "content": "…"}]} on each line.
docs/troubleshooting.md goes by symptom. Status 1 if a check failed.
"""

import sys
import time

from absl import flags
from ml_collections import config_flags
from rich.console import Console
from rich.text import Text

from specjax import doctor
from specjax.cli import defaults
from specjax.cli.inputs import HELP, read_texts
from specjax.cli.pairs import check
from specjax.measure import doubts
from specjax.support import command_line

MAX_INPUTS = 8  # of a file, the first ones
STYLES: dict[doctor.Verdict, str] = {
    "pass": "green",
    "warn": "yellow",
    "fail": "bold red",
    "skip": "dim",
}
INDENT = 6


def main(_) -> None:
    config = flags.FLAGS.config
    config.method = "speculative"
    check(config)
    plan = doctor.Plan(
        target=config.target,
        draft=config.draft,
        texts=texts(flags.FLAGS.input, config.target),
        **defaults.precision(config),
        mesh=config.mesh or None,
        replicate_draft=config.replicate_draft,
        max_source_len=config.max_source_len or None,
        drafting=defaults.drafting(config),
        max_new_tokens=config.max_new_tokens,
        batch_size=config.batch_size,
        sampling=defaults.sampling(config),
        key=config.seed,
    )
    if busy := doubts.busy_before(doubts.used_by_others()):
        command_line.say(busy)
    command_line.say_loading(config.target, config.draft)
    command_line.say("compiling what each check runs")
    console, begin, verdicts = Console(highlight=False), time.monotonic(), []
    for finding in doctor.examine(plan):
        console.print(line(finding), soft_wrap=True)
        verdicts.append(finding.verdict)
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in STYLES)
    console.print(f"{counts}; {time.monotonic() - begin:.0f} s")
    if "fail" in verdicts:
        sys.exit(1)


def texts(path: str, target: str) -> tuple[str, ...]:
    """Read the first texts of a file that are not blank, or take the doctor's own."""
    if not path:
        return doctor.TEXTS
    found = [text for text in read_texts(path, target) if text.strip()][:MAX_INPUTS]
    if not found:
        raise ValueError(f"--input={path} has no text.")
    return tuple(found)


def line(finding: doctor.Finding) -> Text:
    """Format verdict, name and observation, with the way out on a line of its own."""
    width = max(len(check.name) for check in doctor.CHECKS)
    shown = Text.assemble(
        (f"{finding.verdict:<{INDENT}}", STYLES[finding.verdict]),
        f"{finding.name:<{width}}  {finding.seen}",
    )
    if finding.way_out:
        shown.append(f"\n{'':<{INDENT + width}}→ {finding.way_out}")
    return shown


def run() -> None:
    """Run the command with the flags of this process."""
    config_flags.DEFINE_config_file("config", None, "What to decode with; none: the defaults.")
    flags.DEFINE_string("input", "", f"{HELP} Empty: a few built in.")
    flags.mark_flags_as_required(["config"])
    command_line.run(
        main,
        __doc__,
        config=f"{defaults.__file__}:decode",
        fields=defaults.help_of(defaults.DOCTOR),
    )
