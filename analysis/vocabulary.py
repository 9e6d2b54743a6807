"""The words every package shares: metric names, tags, event kinds, journal records, non-finite values.

Standard library only, so that anything may import it. `comm` and `model` return records with plain field names;
`ladder/recording/tracking.py` turns a field into one of these names, and a test compares both sets.
No name is a prefix of another at a slash.
"""

import json
import math
import re
from typing import Any, Final

SCHEMA_VERSION: Final = 1
"""First line of every journal and first key of every JSON file we write."""

PARAMETER_GROUPS: Final = ("embed", "attention", "router", "experts", "shared", "head", "norms", "gates")
"""Groups whose gradient, update and parameter norms are logged apart."""

MOE_FIELDS: Final = {
    "drop_fraction": "dropped assignments over valid assignments",
    "sender_drop_fraction": "assignments dropped by a full sending pool, of all valid assignments",
    "receiver_drop_fraction": "assignments dropped by a full expert at the receiver, of all valid assignments",
    "expert_load_max_over_mean": "assignments of the most loaded expert over the mean expert",
    "rank_load_max_over_mean": "assignments addressed to the most loaded rank over the mean rank",
    "dead_experts": "experts that no token of the batch chose",
    "router_entropy": "entropy of the mean softmax router probability, nats (uniform: ln num_experts)",
    "router_bias_abs_max": "largest absolute balancing bias, logits",
    "topk_margin": "mean distance of the last chosen logit to the first rejected one, logits",
    "tokens_lost_all_routes": "fraction of tokens whose every assignment was dropped",
    "balance_inner_product": "num_experts × Σ (f − 1/E)(P − 1/E): what an auxiliary balance loss would penalise",
    "frequency_deviation": "√num_experts × ‖f − 1/E‖, f the fraction of assignments by expert",
    "probability_deviation": "√num_experts × ‖P − 1/E‖, P the mean router probability by expert",
    "router_z_loss": "mean squared log-sum-exp of the router logits",
}
"""Per-layer routing figures. Each is logged as mean over layers, worst layer and journalled per-layer vector."""

METRICS: Final = {
    "train/loss": "language-model cross-entropy, nats per token, no auxiliary term",
    "train/objective": "what is differentiated: loss plus weighted auxiliary terms, nats per token",
    "train/logit_z_loss": "mean squared log-partition of the output logits, unweighted",
    "train/balance_loss": "auxiliary balance loss added over layers, unweighted; 0 where balance is no loss",
    "train/grad_norm": "Euclidean norm of the whole gradient before clipping",
    "grad_norm/<group>": "the same over one parameter group",
    "train/update_norm": "Euclidean norm of the applied update",
    "update_norm/<group>": "the same over one parameter group",
    "train/param_norm": "Euclidean norm of the parameters after the update",
    "param_norm/<group>": "the same over one parameter group",
    "train/learning_rate": "peak-group learning rate of this step",
    "train/logit_abs_max": "largest absolute output logit",
    "train/log_z_mean": "mean log-partition of the output logits, nats",
    "train/attention_logit_max": "largest attention logit over layers and heads, after scaling",
    "train/residual_rms_max": "largest root-mean-square of the residual stream over layers",
    "train/skipped": "1 where the trainer left a step's update out",
    "train/nonfinite": "gradient entries that are NaN or infinite",
    "train/clipped_values": "values that MXFP8 could not hold, of rows sent between ranks and multiplied by experts",
    "train/counted_tokens": "target tokens whose loss counted; where 0, train/loss is NaN and nothing was updated",
    "eval/loss": "cross-entropy on the fixed held-out set, dropless, nats per token",
    "eval/bits_per_byte": "the same in bits per UTF-8 byte of text",
    "eval/<subset>/loss": "the same on one held-out subset",
    "eval_dropping/loss": "the same with the training transport's drops",
    **{f"moe/{name}": f"{text}; mean over layers" for name, text in MOE_FIELDS.items()},
    **{f"moe_worst_layer/{name}": f"{text}; worst layer" for name, text in MOE_FIELDS.items()},
    "data/source_fraction/<source>": "fraction of the step's tokens from one source",
    "perf/tokens_per_second": "tokens of a step over its wall time",
    "perf/mfu": "model FLOPs (causal, with head) per second over the measured matmul ceiling",
    "progress/tokens": "training tokens seen, the trainer's own counter",
    "progress/flops": "training FLOPs spent, without head",
    "progress/fraction": "tokens seen over the token horizon",
}
"""Metric name → meaning and unit. `<word>` stands for a parameter group, subset or source."""

EVENT_KINDS: Final = ("transport", "mixture", "context", "schedule", "precision", "restart", "note")
RUN_STATES: Final = ("running", "finished", "failed", "killed")
ROLES: Final = ("rung", "hero", "branch", "engineering")
SEVERITIES: Final = ("info", "warning", "critical")

TAG_LINEAGE: Final = "rungwise.lineage"
"""Ties the attempts of one training run: `<family>/<run>`."""
TAG_ATTEMPT: Final = "rungwise.attempt"
TAG_FAMILY: Final = "rungwise.family"
TAG_RUN: Final = "rungwise.run"
TAG_ROLE: Final = "rungwise.role"
TAG_RUNG: Final = "rungwise.rung"
TAG_SEED: Final = "rungwise.seed"
TAG_STATE: Final = "rungwise.state"
TAG_CONFIG_HASH: Final = "rungwise.config_hash"
TAG_CORPUS_HASH: Final = "rungwise.corpus_hash"
TAG_FORECAST_HASH: Final = "rungwise.forecast_hash"
TAG_CODE_VERSION: Final = "rungwise.code_version"
TAG_SCHEMA: Final = "rungwise.schema"
TAG_WATCH_STATE: Final = "rungwise.watch_state"
TAG_ALERT_PREFIX: Final = "rungwise.alert."
"""`rungwise.alert.<rule>`: the latest alert of a rule, in a line."""
TAG_RESTORED_STEP: Final = "rungwise.restored_step"
"""Last step an attempt restored from its checkpoint, 0 when it started afresh: what its predecessors lose to it."""
TAG_END_REASON: Final = "rungwise.end_reason"
TAG_JOB: Final = "rungwise.job"
"""The scheduler's name of the job that trained the attempt."""
TAG_LOG: Final = "rungwise.log"
"""File that what the attempt printed went to, on the machine or file system it ran on."""
TAG_MIRRORED_BYTES: Final = "rungwise.mirrored_bytes"
"""How far into the journal this MLflow run has been copied."""
TAG_MIRRORED_TIME: Final = "rungwise.mirrored_time"
"""Unix milliseconds of the last record that is there whole; a batch under way may have left part of later ones."""
INFINITE_PREFIX: Final = "infinite/"
"""MLflow cannot hold ±inf. The point is stored as NaN, and `infinite/<metric>` holds its sign at the same step."""

_PLACEHOLDER = re.compile(r"<\w+>")
_PATTERNS = tuple(re.compile("^" + _PLACEHOLDER.sub(r"[A-Za-z0-9_.-]+", re.escape(name)) + "$") for name in METRICS)
_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def is_metric_name(name: str) -> bool:
    """Whether `name` is one of `METRICS`, placeholders filled in.

    >>> is_metric_name("grad_norm/experts"), is_metric_name("loss")
    (True, False)
    """
    return any(pattern.match(name) for pattern in _PATTERNS)


def encode_number(value: float) -> float | str:
    """A JSON-safe number: non-finite values become "NaN", "Infinity", "-Infinity".

    >>> encode_number(float("-inf"))
    '-Infinity'
    """
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def decode_number(value: float | str) -> float:
    """Inverse of `encode_number`.

    Raises:
        ValueError: `value` is text other than the three non-finite words.
    """
    if isinstance(value, str):
        if value not in _NONFINITE:
            raise ValueError(f"number {value!r} is text; write a JSON number or one of {', '.join(_NONFINITE)}")
        return _NONFINITE[value]
    return float(value)


def _encode(value: Any) -> Any:
    if isinstance(value, float):
        return encode_number(value)
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    return value


def dump_json(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON of plain Python values, keys in the order given, non-finite floats as words."""
    return json.dumps(_encode(value), allow_nan=False, indent=indent, ensure_ascii=False)


def canonical_json(value: Any) -> str:
    """One text per content: sorted keys, no spaces. What content hashes are taken over."""
    return json.dumps(_encode(value), allow_nan=False, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"JSON constant {word} is not allowed; write it as a string")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def load_json(text: str) -> Any:
    """Strict JSON in: bare NaN or Infinity are refused; words stay words until `decode_number`."""
    return _DECODER.decode(text)
