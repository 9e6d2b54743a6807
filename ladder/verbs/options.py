"""Arguments and options that several verbs share."""

import os
from pathlib import Path
from typing import Annotated

import typer

Family = Annotated[str, typer.Argument(help="A shipped family (tiny, laptop, …) or a path to a TOML file.")]
Home = Annotated[
    Path | None,
    typer.Option(help="Folder of all runs; else RUNGWISE_HOME, else ./rungwise-runs.", show_default=False),
]
Tracking = Annotated[
    str | None,
    typer.Option(envvar="MLFLOW_TRACKING_URI", help="MLflow address; else mlflow.db at home.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


def show_traceback_if_asked() -> None:
    """Prints the traceback of the error at hand where RUNGWISE_TRACEBACK is set."""
    if os.environ.get("RUNGWISE_TRACEBACK"):
        import traceback

        traceback.print_exc()
