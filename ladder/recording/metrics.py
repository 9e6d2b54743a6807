"""The one place where a figure's field becomes a metric name of `analysis/vocabulary.py`."""

from collections.abc import Mapping

import numpy as np

from rungwise.analysis.vocabulary import MOE_FIELDS
from rungwise.ladder.training.step import StepFigures

LOWER_IS_WORSE = ("router_entropy", "topk_margin")
"""Routing figures whose worst layer is the smallest."""

Values = dict[str, float]
Layers = dict[str, list[float]]


def step_metrics(figures: StepFigures) -> tuple[Values, Layers]:
    """Metrics of one training step, and the per-layer vectors of its routing figures.

    Args:
        figures: on the host (`jax.device_get`).
    """
    values = {
        "train/loss": float(figures.loss.loss),
        "train/objective": float(figures.loss.objective),
        "train/logit_z_loss": float(figures.loss.logit_z_loss),
        "train/balance_loss": float(figures.loss.balance_loss),
        "train/logit_abs_max": float(figures.loss.logit_abs_max),
        "train/log_z_mean": float(figures.loss.log_z_mean),
        "train/grad_norm": float(figures.grad_norm),
        "train/update_norm": float(figures.update_norm),
        "train/param_norm": float(figures.param_norm),
        "train/learning_rate": float(figures.learning_rate),
        "train/nonfinite": float(figures.nonfinite),
        "train/counted_tokens": float(figures.counted_tokens),
        "train/attention_logit_max": float(np.max(figures.layers.attention_logit_max)),
        "train/residual_rms_max": float(np.max(figures.layers.residual_rms)),
    }
    if figures.skipped is not None:
        values["train/skipped"] = float(figures.skipped)
    if figures.clipped_values is not None:
        values["train/clipped_values"] = float(figures.clipped_values)
    for prefix, norms in (
        ("grad_norm", figures.group_grad_norms),
        ("update_norm", figures.group_update_norms),
        ("param_norm", figures.group_param_norms),
    ):
        values |= {f"{prefix}/{group}": float(norm) for group, norm in norms.items()}
    layers: Layers = {}
    for field in MOE_FIELDS:
        vector = np.asarray(getattr(figures.layers, field), np.float64)
        values[f"moe/{field}"] = float(np.mean(vector))
        worst = np.min(vector) if field in LOWER_IS_WORSE else np.max(vector)
        values[f"moe_worst_layer/{field}"] = float(worst)
        layers[f"moe/{field}"] = vector.tolist()
    return values, layers


def progress_metrics(*, tokens: int, horizon: int, flops: float) -> Values:
    """How far a run is: the trainer's own counters.

    Args:
        horizon: tokens of the whole run, as planned now.
    """
    return {"progress/tokens": float(tokens), "progress/flops": flops, "progress/fraction": tokens / horizon}


def source_metrics(fractions: Mapping[str, float]) -> Values:
    """Share of a step's tokens by source."""
    return {f"data/source_fraction/{source}": float(share) for source, share in fractions.items()}
