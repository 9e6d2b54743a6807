"""Held-out loss of a run whose context or transport changes: the same windows throughout, under what is in effect."""

from typing import Any, Final

from rungwise.ladder.family import RunConfig
from rungwise.ladder.text.batches import held_out_windows
from rungwise.ladder.text.data import RunData
from rungwise.ladder.training.engine import Engine
from rungwise.ladder.training.evaluation import Evaluator, dropless_losses

TOGETHER: Final = 8
"""Longer windows are evaluated in parts of at least so many, where there are."""


class Evaluators:
    """One evaluator for each way in which a run's segments compute; programs are compiled at their first use.

    `eval/loss` and `eval/<subset>/loss` are measured in windows of the run's own length all along, so that they compare
    from the first step to the last. In a segment with longer context `eval/context-<tokens>/loss` is the loss in
    windows of its length, on as many tokens of held-out text, or all there is of it.
    """

    def __init__(self, config: RunConfig, data: RunData, engine: Engine) -> None:
        self._config, self._data, self._engine = config, data, engine
        self._evaluators: dict[Any, Evaluator] = {}
        self._longer: dict[Any, Any] = {}
        self.at(config)

    def at(self, segment: RunConfig) -> Evaluator:
        """The evaluator of a segment: its model, transport and precision, in the run's own batch and length."""
        own = self._config
        config = segment.replace(
            model=segment.model.replace(seq_len=own.model.seq_len), sequences_per_rank=own.sequences_per_rank
        )
        key = config.model, config.transport, config.execution
        if key not in self._evaluators:
            self._evaluators[key] = Evaluator(config, self._data.held_out, self._engine)
        return self._evaluators[key]

    def evaluate(self, segment: RunConfig, state: Any) -> dict[str, float]:
        """Dropless loss on the run's windows and, where the segment's are longer, on windows of its length."""
        return self.at(segment).evaluate(state) | self._evaluate_longer(segment, state)

    def evaluate_dropping(self, segment: RunConfig, state: Any) -> dict[str, float]:
        """Loss through the segment's transport, on the run's windows."""
        return self.at(segment).evaluate_dropping(state)

    def _evaluate_longer(self, segment: RunConfig, state: Any) -> dict[str, float]:
        length, own = segment.model.seq_len, self._config
        if length == own.model.seq_len:
            return {}
        if segment.model not in self._longer:
            everything = held_out_windows(self._data.tokens, seq_len=length)
            wanted = own.evaluation.num_sequences * own.model.seq_len // length
            count = min(len(everything.windows), max(1, wanted))
            count -= count % TOGETHER if count > TOGETHER else 0
            windows = held_out_windows(self._data.tokens, seq_len=length, count=count)
            self._longer[segment.model] = windows, self._engine.eval_step(segment)
        windows, step = self._longer[segment.model]
        return {f"eval/context-{length}/loss": float(dropless_losses(step, state, windows).mean())}
