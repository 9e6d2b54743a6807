"""rungwise: a scaling-ladder experiment platform for mixture-of-experts language models.

Train four small rungs, forecast the hero's loss from them, then watch the hero against that forecast.
The four packages live at the top of the repository and are linked here, so that one import root serves
editable installs, wheels and type checkers alike; `docs/architecture.md` draws how they hang together.
"""

__version__ = "0.1.0"
