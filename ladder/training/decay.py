"""How the learning rate of a run falls, on the host: where a changed length takes it from, and what follows.

`schedule.py` is the same inside a compiled step. Steps are counted as there: index s is the step after s finished ones.
Imports no jax.
"""

from typing import NamedTuple, Self

from rungwise.ladder.training.optimizer_config import OptimizerRule


class Decay(NamedTuple):
    """Warm-up, then a straight fall to the final rate at the last step. Rates are shares of the peak."""

    steps: int
    """Optimizer steps of the whole run."""
    warmup: int
    start: int
    """Step index at which the fall begins; its rate is `rate`."""
    rate: float
    final: float
    anneal_start: int = 0
    """Step index from which an annealed weight decay goes down to nothing at the last step."""
    anneal: float = 1.0
    """Its share there."""

    @classmethod
    def of(cls, rule: OptimizerRule, steps: int) -> Self:
        """The decay of a run whose length never changed."""
        warmup = max(1, round(rule.warmup_fraction * steps))
        return cls(steps, warmup, warmup, 1.0, rule.final_fraction)

    def at(self, step: int) -> float:
        """Rate of a step over the peak."""
        if step < self.warmup:
            return (1 + step) / self.warmup
        fallen = (step - self.start) / max(1, self.steps - 1 - self.start)
        return self.rate - (self.rate - self.final) * min(1.0, max(0.0, fallen))

    def anneal_at(self, step: int) -> float:
        """Share that is left of an annealed weight decay at a step."""
        gone = (step - self.anneal_start) / max(1, self.steps - self.anneal_start)
        return self.anneal * min(1.0, max(0.0, 1.0 - gone))

    def redirected(self, done: int, steps: int) -> Self:
        """The same run with another last step from here on, its rate falling from where it is: no jump.

        The step before, index done − 1, keeps its rate and is where the new line begins. A warm-up under way goes on.

        Args:
            done: optimizer steps done under the old length.
        Raises:
            ValueError: nothing would be left to do, or not even the warm-up.
        """
        if steps <= max(done, self.warmup):
            least = max(done, self.warmup)
            raise ValueError(f"steps {steps} are not more than the {least} that are done or warm-up; ask for more")
        start, rate = (done - 1, self.at(done - 1)) if done >= self.warmup else (self.warmup, 1.0)
        return self._replace(
            steps=steps, start=start, rate=rate, anneal_start=max(0, done - 1), anneal=self.anneal_at(max(0, done - 1))
        )
