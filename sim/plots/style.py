"""How every figure looks: one look for each policy, one for each state of a slot, and how a figure is saved.

Policies have the colours of Okabe and Ito (2008), states those of Paul Tol's "muted" scheme (2021): both stay apart
under the common forms of colour blindness, and none is in both, so a colour never means a policy in one figure and a
state in the next. Nor does colour stand alone: policies differ in marker and line as well, states in hatch, so a
figure survives a grey printer. What belongs to neither is drawn in ink and wine.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
INDIGO, CYAN, ROSE, TEAL, SAND, PALE_GREY = "#332288", "#88CCEE", "#CC6677", "#44AA99", "#DDCC77", "#E4E4E4"
INK, WINE = "#404040", "#882255"

PNG_DPI = 160

Dashes = str | tuple[int, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class PolicyLook:
    """How one policy is drawn in every line figure: a colour, a matplotlib marker and a matplotlib line style."""

    colour: str
    marker: str
    line: Dashes

    @property
    def style(self) -> dict[str, Any]:
        """The same as keyword arguments of matplotlib's lines."""
        return {"color": self.colour, "marker": self.marker, "linestyle": self.line}


@dataclass(frozen=True, slots=True)
class StateLook:
    """How the slots in one state are drawn: a fill colour and a matplotlib hatch (empty: none)."""

    colour: str
    hatch: str

    @property
    def style(self) -> dict[str, Any]:
        """The same as keyword arguments of matplotlib's patches; a hatch takes the colour of the edge."""
        return {"facecolor": self.colour, "hatch": self.hatch, "edgecolor": "white", "linewidth": 0.4}


# The systems most often drawn together (Orca's three reservations and vLLM) differ in all three traits.
POLICY_LOOKS: dict[str, PolicyLook] = {
    "static_batching": PolicyLook(BLACK, "s", ":"),
    "orca_max": PolicyLook(VERMILLION, "^", "--"),
    "orca_pow2": PolicyLook(ORANGE, "v", "-."),
    "orca_oracle": PolicyLook(PURPLE, "D", ":"),
    "vllm_v0": PolicyLook(SKY, "o", "--"),
    "vllm_v1": PolicyLook(BLUE, "o", "-"),
    "vllm_2023": PolicyLook(BLUE, "s", "--"),
    "vllm_2023_prefix": PolicyLook(GREEN, "s", "-."),
    "sglang": PolicyLook(GREEN, "P", "-"),
    "tensorrt_llm_no_evict": PolicyLook(GREEN, "<", "--"),
    "tensorrt_llm_max_utilization": PolicyLook(GREEN, ">", ":"),
    "tgi": PolicyLook(ORANGE, "X", "-"),
    "lightllm": PolicyLook(PURPLE, "h", "-"),
    "llama_cpp": PolicyLook(BLACK, "*", "-"),
    "vattention": PolicyLook(SKY, "d", "-."),
}

# In the order in which they are stacked; the words are those of the waste identity.
STATE_LOOKS: dict[str, StateLook] = {
    "used": StateLook(INDIGO, ""),
    "reserved": StateLook(CYAN, "///"),
    "internal": StateLook(ROSE, "\\\\\\"),
    "cached": StateLook(TEAL, "..."),
    "external": StateLook(SAND, "xxx"),
    "idle": StateLook(PALE_GREY, ""),
}
STATES = tuple(STATE_LOOKS)

_NEWCOMER_LINE: Dashes = (0, (6.0, 1.5, 1.0, 1.5, 1.0, 1.5))
_NEWCOMER_LOOKS = tuple(
    PolicyLook(colour, marker, _NEWCOMER_LINE)
    for marker in ("p", "H", "o", "s", "^", "v", "D", "P", "X", "<", ">", "*", "h", "d")
    for colour in (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
    if all((look.colour, look.marker) != (colour, marker) for look in POLICY_LOOKS.values())
)


def policy_looks(names: Iterable[str]) -> dict[str, PolicyLook]:
    """A look for each name, in the order given, no two of them alike.

    A name outside the table takes a look from its spelling, so it keeps it from figure to figure; only if two such
    names of one figure fall on the same look does the later in the alphabet move on to the next free one.

    Raises:
        ValueError: if there are more names outside the table than looks left for them (85).
    """
    names = list(dict.fromkeys(names))
    unknown = sorted(set(names) - POLICY_LOOKS.keys())
    if len(unknown) > len(_NEWCOMER_LOOKS):
        raise ValueError(f"{len(unknown)} unknown policies; there are {len(_NEWCOMER_LOOKS)} looks for them")
    taken: dict[int, str] = {}
    for name in unknown:
        place = zlib.crc32(name.encode()) % len(_NEWCOMER_LOOKS)
        while place in taken:
            place = (place + 1) % len(_NEWCOMER_LOOKS)
        taken[place] = name
    newcomers = {name: _NEWCOMER_LOOKS[place] for place, name in taken.items()}
    return {name: POLICY_LOOKS.get(name) or newcomers[name] for name in names}


def settings() -> AbstractContextManager[None]:
    """matplotlib's own defaults plus ours, whatever the user's matplotlibrc says; artists are made and saved inside."""
    defaults: dict[Any, Any] = {
        key: value for key, value in matplotlib.rcParamsDefault.items() if not key.startswith("backend")
    }
    ours: dict[Any, Any] = {
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.labelsize": 9,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlesize": 9.5,
        "figure.titlesize": 11,
        "font.family": ["DejaVu Sans"],  # ships with matplotlib, so the same everywhere
        "font.size": 9,
        "grid.alpha": 0.6,
        "grid.color": "#CCCCCC",
        "grid.linewidth": 0.5,
        "hatch.linewidth": 0.5,
        "legend.fontsize": 8.5,
        "legend.frameon": False,
        "lines.linewidth": 1.6,
        "lines.markersize": 5.5,
        "svg.hashsalt": "kvtwin",  # element ids are hashes; without a fixed salt no two files are alike
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
    }
    return matplotlib.rc_context({**defaults, **ours})


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of `width` by `height` inches that belongs to no window and no global state."""
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06))
    FigureCanvasAgg(figure)
    return figure


def write_title(figure: Figure, question: str, setting: str) -> None:
    """Puts the question that the figure answers on top, and below it what all its points have in common."""
    characters = int(figure.get_figwidth() * 11)
    lines = [fill(question, characters), *([fill(setting, characters)] if setting else [])]
    figure.suptitle("\n".join(lines), x=0.012, ha="left")


def write_footnote(figure: Figure, sentences: Iterable[str]) -> None:
    """Puts `sentences` (empty ones are passed over) at the foot, where they take their own space."""
    text = " ".join(sentence for sentence in sentences if sentence)
    if text:
        wrapped = fill(text, int(figure.get_figwidth() * 16))
        figure.supxlabel(wrapped, x=0.012, ha="left", fontsize=7.5, color=INK)


def label_log_axis(axis: Axis, lowest: float, highest: float) -> None:
    """Writes plain numbers on a logarithmic axis, at 1, 2 and 5 of each decade if it has few decades."""
    steps = (1.0, 2.0, 5.0) if highest < 200 * lowest else (1.0,)
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_minor_formatter(NullFormatter())


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Writes `name`.png and `name`.svg into `folder`, each whole or not at all; the same figure gives the same bytes.

    Raises:
        OSError: if `folder` does not exist or cannot be written; a file already there is then as it was.
    """
    undated: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
    paths = []
    for kind, metadata in undated.items():
        path = folder / f"{name}.{kind}"
        unfinished = folder / f".{name}.{kind}.unfinished"
        try:
            figure.savefig(unfinished, format=kind, dpi=PNG_DPI, metadata=metadata)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        paths.append(path)
    return paths
