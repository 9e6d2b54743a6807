"""What reaches the terminal: one-line errors, results apart from progress, progress without a terminal."""

import json

import pydantic
import pytest

from rungwise.ladder import console


class _Shape(pydantic.BaseModel):
    num_heads: int
    top_k: int = pydantic.Field(ge=1)


def test_console_pydantic_complaints_are_one_line():
    with pytest.raises(pydantic.ValidationError) as caught:
        _Shape.model_validate({"num_heads": "many", "top_k": 0})
    line = console.one_line(caught.value)
    assert "\n" not in line
    assert line.startswith("num_heads: ")
    assert "; top_k: " in line


def test_console_error_without_words_names_its_type():
    assert console.one_line(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_console_json_result_is_strict_and_alone_on_standard_output(capsys):
    console.log("on the way")
    console.print_json({"loss": float("nan")})
    out, err = capsys.readouterr()
    assert json.loads(out) == {"loss": "NaN"}
    assert err == "on the way\n"


def test_console_progress_off_terminal_says_the_last_step_once(capsys):
    with console.ProgressView() as view:
        view.start("d64", 3)
        for step in (1, 2, 3, 3):
            view.update("d64", step, loss=5.0 / step, tokens_per_second=1000.0)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["d64: step 1/3", "d64: step 3/3"]


def test_console_progress_disabled_is_silent(capsys):
    with console.ProgressView(enabled=False) as view:
        view.start("d64", 3)
        view.update("d64", 3, loss=1.0, tokens_per_second=1.0)
    assert capsys.readouterr() == ("", "")
