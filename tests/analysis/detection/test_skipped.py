"""Updates that the trainer left out: one is handled, many are an alert."""

import math

import numpy as np

from rungwise.analysis.divergence import replay

PLAIN = {"train/grad_norm": 0.5, "train/skipped": 0.0}


def _run(skipped: dict[int, float], *, told: bool = True) -> list[dict[str, float]]:
    noise = np.random.default_rng(1).standard_normal(400)
    rows = []
    for step in range(1, 401):
        loss = skipped.get(step, 3.0 - step / 1000 + 0.01 * noise[step - 1])
        norm = 40.0 if step in skipped else 0.5 + 0.01 * noise[-step]
        rows.append({"step": step, "train/loss": loss, "train/grad_norm": norm})
        if told:
            rows[-1]["train/skipped"] = float(step in skipped)
    return rows


def _alerts(rows):
    import pandas as pd

    return replay(pd.DataFrame(rows))


def test_one_update_left_out_is_no_alert_and_teaches_no_baseline():
    assert _alerts(_run({200: 9.0})) == []
    assert any(alert.rule == "loss_spike" for alert in _alerts(_run({200: 9.0}, told=False)))
    assert _alerts(_run({200: math.nan})) == []


def test_updates_left_out_again_and_again_are():
    alerts = _alerts(_run({200: 9.0, 215: 9.0, 240: 9.0}))
    (alert,) = (found for found in alerts if found.rule == "skipped_updates")
    assert (alert.step, alert.since, alert.severity, alert.state) == (240, 200, "warning", "resolved")
    assert _alerts(_run({200: 9.0, 215: 9.0, 260: 9.0})) == [], "two in fifty steps"


def test_a_run_that_takes_no_update_at_all_is_critical():
    alerts = _alerts(_run(dict.fromkeys(range(200, 401), 9.0)))
    (alert,) = (found for found in alerts if found.rule == "skipped_updates")
    assert alert.severity == "critical"
