"""Colours of plots, all of which people with a colour vision deficiency can tell apart.

Source: M. Okabe and K. Ito, Color Universal Design (2008), https://jfly.uni-koeln.de/color/. A role has one colour in
every plot, so that a legend read once holds everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

BLUE: Final = "#0072B2"
SKY_BLUE: Final = "#56B4E9"
GREEN: Final = "#009E73"
YELLOW: Final = "#F0E442"
ORANGE: Final = "#E69F00"
VERMILION: Final = "#D55E00"
PURPLE: Final = "#CC79A7"
GREY: Final = "#999999"
BLACK: Final = "#000000"

SERIES: Final = (BLUE, ORANGE, GREEN, PURPLE, SKY_BLUE, VERMILION, BLACK, YELLOW)
"""The colours of runs or classes that are compared, in the order in which they are given out."""
ROLES: Final[Mapping[str, str]] = {"prefill": BLUE, "transfer": GREEN, "decode": VERMILION, "aggregated": PURPLE}
"""The colour of what happens at engines of a role, and between them."""
KINDS: Final[Mapping[str, str]] = {"aggregated": ROLES["aggregated"], "disaggregated": BLUE}
"""The colours of the two kinds of clusters where they are compared."""
KINDS_ON_DARK: Final[Mapping[str, str]] = {"aggregated": "#E59AC6", "disaggregated": SKY_BLUE}
"""The same, lighter: for a dark ground."""
STAGES: Final[Mapping[str, str]] = {
    "route": GREY,
    "p_queue": SKY_BLUE,
    "prefill": ROLES["prefill"],
    "handoff": BLACK,
    "d_admit": ORANGE,
    "handshake": YELLOW,
    "xfer_post": "#7FCEB9",  # the green of transfers, half as strong
    "xfer_wire": ROLES["transfer"],
    "notify": PURPLE,
    "first_decode": ROLES["decode"],
}
"""The colour of each stage of TTFT: that of its role, or a lighter one near it for what waits."""
