"""A race: plain and speculative decoding of the same inputs, side by side, at their real pace.

    python -m experiments.race
    python -m experiments.race --config=configs/embedded.py --draft=draft-small --temperature=1
    python -m experiments.race --config.tree="fixed(3, 2)"
    python -m experiments.race --config=configs/decode.py --config.target=DIR --draft=lookup \\
        --input=FILE --save=race.gif

Accepted tokens, rejected ones and the target's own have the colours of the paper's Figure 1; of
trees only what is kept is shown. Both sides decode one input after the other at batch 1, the
encoder included. Rounds are stepped and timed first, and then shown: --slow=5 shows them five times
as slowly, and says so. Where the output is no terminal, one line has the times.
"""

import math
import pathlib
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from absl import flags
from matplotlib.animation import FuncAnimation, PillowWriter
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from ml_collections import config_flags
from PIL import Image, ImageSequence
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from experiments import figure1
from experiments.race import recording
from experiments.race.recording import Piece, Side
from experiments.tasks.config import load_examples
from specjax import checkpoints, drafters
from specjax.cli import defaults
from specjax.cli.inputs import read_texts
from specjax.decoding import building
from specjax.decoding.texts import tokenize
from specjax.loop import Method
from specjax.measure import doubts
from specjax.measure.compiling import at_once
from specjax.sampling import Sampling
from specjax.support import command_line, memory_maps
from specjax.support.named import short

HEIGHT = 15  # lines of text on each side
FRAMES_PER_SECOND = 5
GIF_WIDTH = 48  # characters on each side of the animation
GIF_SECONDS = 7.0  # of the slower side, as it is shown


def main(_) -> None:
    config, args = flags.FLAGS.config, flags.FLAGS
    if args.inputs < 1 or not 0 < args.slow < math.inf:
        raise ValueError(
            f"--inputs={args.inputs} must be ≥ 1, and --slow={args.slow:g} a number above 0."
        )
    if args.save and pathlib.Path(args.save).suffix != ".gif":
        raise ValueError(f"--save={args.save} must end in .gif.")
    if busy := doubts.busy_before(doubts.used_by_others()):
        command_line.say(busy)
    sides = run(config, args.draft, args.gamma, args.temperature, args.inputs, args.input)
    console = Console()
    if args.save:
        seconds = save(pathlib.Path(args.save), sides, title(config, args))
        slower = seconds / slowest(sides)
        print(f"{args.save}: {seconds:.0f} s, {pace(slower)}.")
    elif console.is_terminal:
        show(console, sides, args.slow)
    print(recording.outcome(sides))
    if busy := doubts.busy([doubts.load_average()]):
        print(busy)


def title(config, args) -> str:
    """What is run, for the animation."""
    return (
        f"{config.get('task') or short(config.target)}, draft {short(chosen(config, args.draft))}, "
        f"{f'γ = {args.gamma}' if config.tree == 'chain' else config.tree}, "
        f"T = {args.temperature:g}, batch 1"
    )


def chosen(config, draft: str) -> str:
    """The draft of the config whose name this is, the first one for "", or the name itself."""
    drafts = config.get("drafts") or (config.draft,)
    named = {short(name): name for name in drafts}
    return named.get(draft, draft) if draft else drafts[0]


def run(
    config, draft: str, gamma: int, temperature: float, inputs: int, file: str = ""
) -> list[Side]:
    """Run both sides, plain decoding first.

    Args:
      inputs: how many; the first ones.
      file: of the inputs, as `specjax decode` reads them; empty: those of the config's task.
    """
    draft = chosen(config, draft)
    command_line.say_loading(config.target, draft)
    precision, mesh = defaults.precision(config), config.get("mesh") or None
    target = checkpoints.load(config.target, **precision, mesh=mesh)
    texts = (
        read_texts(file, config.target) if file else [one.input for one in load_examples(config)]
    )
    sources = tokenize(target, texts[:inputs], config.max_source_len or None)
    how = Sampling(temperature)
    loaded = drafters.load(draft, target, dtype=precision["dtype"])
    methods: dict[str, Method] = {
        "plain": building.plain(target, how),
        "speculative": building.build(target, loaded, gamma=gamma, sampling=how, tree=config.tree),
    }
    options: dict[str, Any] = {
        "target": target,
        "sources": sources,
        "max_new_tokens": config.max_new_tokens,
        "key": jax.random.key(config.seed),
    }
    command_line.say("compiling plain and speculative decoding, and a round of each")
    with memory_maps.kept(methods=4):  # both loops, and their rounds
        at_once(partial(recording.compile_, **options), methods.values())
        sides = []
        for name, method in methods.items():
            command_line.say(f"timing {name} decoding of {len(sources)} inputs")
            sides.append(recording.record(name, method, **options))
    return sides


def pace(slow: float) -> str:
    """How the speed of what is shown differs from the real one."""
    return f"slowed down {slow:.3g}x" if slow >= 1 else f"sped up {1 / slow:.3g}x"


def slowest(sides: Sequence[Side]) -> float:
    """Seconds of the race."""
    return max(side.seconds for side in sides)


# --- In a terminal -------------------------------------------------------------------------------


def show(console: Console, sides: Sequence[Side], slow: float) -> None:
    """The race in two panels, until the slower side is done."""
    width = console.width // 2 - 4
    with Live(console=console, refresh_per_second=30) as live:
        begin = time.perf_counter()
        while (now := (time.perf_counter() - begin) / slow) < slowest(sides):
            live.update(panels(sides, now, width, slow))
            time.sleep(1 / 30)
        live.update(panels(sides, slowest(sides), width, slow))


def panels(sides: Sequence[Side], now: float, width: int, slow: float) -> Columns:
    """Both sides as of a time."""
    return Columns(
        [
            Panel(
                written(recording.screen(side, now, width, HEIGHT)),
                title=side.name if slow == 1 else f"{side.name}, {pace(slow)}",
                subtitle=recording.clock(side, now),
                height=HEIGHT + 2,
                width=width + 4,
            )
            for side in sides
        ]
    )


def written(lines: Sequence[Sequence[Piece]]) -> Text:
    """Lines in Figure 1's colours."""
    text = Text()
    for line in lines:
        for piece, kind in line:
            struck = " strike" if kind == "rejected" else ""
            text.append(piece, style=f"{figure1.COLOURS[kind]}{struck}")
        text.append("\n")
    return text


# --- As an animation ------------------------------------------------------------------------------


def save(path: pathlib.Path, sides: Sequence[Side], heading: str) -> float:
    """Write the animation, whole or not at all; the seconds that it takes to watch."""
    slow = GIF_SECONDS / slowest(sides)
    count = int(GIF_SECONDS * FRAMES_PER_SECOND)
    hold = FRAMES_PER_SECOND * 2  # the end stays to be read, and is the picture of a page at rest
    figure = blank()

    def frame(number: int) -> list:
        figure.clear()
        now = count if number == 0 else min(number - 1, count)
        draw(figure, sides, now / FRAMES_PER_SECOND / slow, heading, slow)
        return []

    animation = FuncAnimation(figure, frame, frames=1 + count + hold, cache_frame_data=False)
    with tempfile.TemporaryDirectory(dir=path.resolve().parent) as folder:
        made = pathlib.Path(folder) / "race.gif"
        animation.save(made, writer=PillowWriter(fps=FRAMES_PER_SECOND))
        share_palette(made)
        made.replace(path)
    return GIF_SECONDS


def blank() -> Figure:
    """A frame without anything in it, as large as all of them."""
    advance = 9 * 0.602 / 72  # inches that a character of the monospace font takes at 9 points
    # Characters are drawn in whole pixels: 8 of them at this resolution.
    return Figure(figsize=(advance * (2 * GIF_WIDTH + 8), 0.21 * (HEIGHT + 6)), dpi=8 / advance)


TOP = 4.7  # of the first line of text, in lines
BAR, EMPTY = "#0072b2", "0.88"
SHADES = 3  # of each colour, from white on: the edges of letters


def share_palette(path: pathlib.Path) -> None:
    """Give all frames of an animation the same few colours, which makes it a third as large."""
    with Image.open(path) as animation:
        frames = [frame.convert("RGB") for frame in ImageSequence.Iterator(animation)]
        took = [frame.info["duration"] for frame in ImageSequence.Iterator(animation)]
    few = palette()
    first, *others = (frame.quantize(palette=few, dither=Image.Dither.NONE) for frame in frames)
    first.save(path, save_all=True, append_images=others, duration=took, loop=0, optimize=True)


def palette() -> Image.Image:
    """Make an image with the palette of an animation: its colours in a few shades."""
    kinds = (figure1.COLOURS[kind] for kind in ("accepted", "rejected", "corrected"))
    inks = np.array([to_rgb(ink) for ink in ("black", "0.4", BAR, *kinds)])
    shades = [1 - (1 - inks) * shade / SHADES for shade in range(1, SHADES + 1)]
    colours = np.concatenate([np.ones((1, 3)), [to_rgb(EMPTY)], *shades])
    made = Image.new("P", (1, 1))
    made.putpalette((255 * colours).round().astype(int).ravel().tolist())
    return made


def draw(figure: Figure, sides: Sequence[Side], now: float, heading: str, slow: float) -> None:
    """One frame."""
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, 2 * GIF_WIDTH + 8)
    axes.set_ylim(HEIGHT + 6, 0)
    mono: dict[str, Any] = {"family": "monospace", "fontsize": 9, "va": "center"}
    mono["parse_math"] = False
    axes.text(2, 0.7, f"{heading}; {pace(slow)}", fontsize=9, va="center", color="0.4",
              parse_math=False)  # fmt: skip
    for column, (side, words) in enumerate(zip(sides, captions(sides, now), strict=True)):
        left = 2 + column * (GIF_WIDTH + 4)
        axes.text(left, 1.8, words, fontsize=10, weight="bold", va="center")
        axes.text(left, 2.8, recording.clock(side, now), **mono)
        for share, colour in ((1.0, EMPTY), (recording.share(side, now), BAR)):
            axes.plot([left, left + share * GIF_WIDTH], [3.6] * 2, color=colour, linewidth=4,
                      solid_capstyle="butt")  # fmt: skip
        for row, line in enumerate(recording.screen(side, now, GIF_WIDTH, HEIGHT)):
            x = left
            for piece, kind in line:
                figure1.write_on(axes, x, TOP + row, piece, kind)
                x += len(piece)
    at = 2.0
    legend: dict[str, str | None] = {
        "drafted and accepted": "accepted",
        "drafted and rejected": "rejected",
        "the target's own": "corrected",
        f"{figure1.SPACE} a space at a token's edge": None,
    }
    for name, of in legend.items():
        figure1.write_on(axes, at, HEIGHT + 5.3, name, of)
        at += len(name) + 3


def captions(sides: Sequence[Side], now: float) -> tuple[str, str]:
    """What each side does; of the second, when it is done, by what factor it was faster."""
    plain, other = sides
    if now < other.seconds:
        return "plain: the target alone", "speculative: a draft, checked by the target"
    return "plain: the target alone", f"done: {plain.seconds / other.seconds:.2f} times as fast"


if __name__ == "__main__":
    config_flags.DEFINE_config_file(
        "config",
        str(command_line.ROOT / "configs" / "embedded.py"),
        "Whose target, drafts and inputs.",
    )
    flags.DEFINE_string("draft", "", "One of the config's drafts, or any other; none: the first.")
    flags.DEFINE_integer("gamma", 7, "Drafted tokens per target call.")
    flags.DEFINE_float("temperature", 0.0, "0: greedy.")
    flags.DEFINE_integer("inputs", 8, "Inputs, the first of --input or of the config's split.")
    flags.DEFINE_string("input", "", "A file of inputs, as `specjax decode` takes it.")
    flags.DEFINE_float("slow", 1.0, "The factor by which the race is shown slower.")
    flags.DEFINE_string("save", "", "Write an animation, a file that ends in .gif.")
    command_line.run(main, __doc__)
