"""The demo where everything is done. That it trains what is not, `make demo` shows."""

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("shift", "held"), [(0.005, True), (0.3, False)])
def test_demo_ends_well_whether_or_not_the_forecast_held(ladder, registered_home, write_hero, shift, held):
    write_hero(shift=shift)
    result = ladder("demo", "tiny", "--json", "--home", registered_home)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["outcome"]["held"] is held
    assert found["watch"] == ("healthy" if held else "alert")
    assert os.path.exists(found["report"])
    assert f"sqlite:///{registered_home / 'mlflow.db'}" in found["mlflow_ui"]


def test_demo_closing_table_gives_the_verdict(ladder, registered_home, write_hero):
    write_hero(shift=0.3)
    result = ladder("demo", "tiny", "--home", registered_home)
    assert "the forecast did not hold" in result.stdout
    assert "5 of 5" in result.stderr
    assert "5 of 5" not in result.stdout


def test_demo_with_nothing_to_do_imports_neither_jax_nor_mlflow(registered_home, write_hero):
    write_hero()
    code = f"""
import pathlib, sys
from rungwise.ladder.demo import demo_family
demo_family("tiny", home=pathlib.Path({str(registered_home)!r}))
print(*{{"jax", "mlflow", "orbax", "grain"}} & set(sys.modules))
"""
    child = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == ""


def test_demo_refuses_a_hero_that_started_without_a_forecast(ladder, rungs_home, write_hero):
    write_hero(steps=20)
    result = ladder("demo", "tiny", "--home", rungs_home)
    assert result.returncode == 2
    assert "has started" in result.stderr.splitlines()[-1]
