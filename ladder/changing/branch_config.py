"""Where a branch leaves the run it comes from, as part of the branch's own config. Imports no jax."""

from pydantic import Field

from rungwise.ladder.training.decay import Decay
from rungwise.model.config import Record


class Start(Record):
    """The parent run at the step where the branch begins: what of it goes on."""

    parent: str
    parent_hash: str = Field(description="content hash of the parent's config")
    step: int = Field(ge=1, description="optimizer steps done; the checkpoint it starts from")
    tokens: int = Field(ge=1, description="trained on by then")
    flops: float = Field(gt=0, description="spent by then, without head")
    warmup: int = Field(ge=1)
    rate: float = Field(gt=0, description="learning rate of the last step over the peak")
    anneal: float = Field(default=1.0, description="share left of an annealed weight decay")
    stretches: tuple[tuple[int, int, int, tuple[int, ...]], ...] = Field(
        description="how batches were made: first step, seq_len, batch_size, weights by source"
    )
    longest_context: int = Field(ge=2, description="blocks in which the parent's text is laid out, tokens")

    def decay(self, *, steps: int, final: float) -> Decay:
        """From the parent's rate straight down to the branch's last step."""
        at = self.step - 1
        own = Decay(steps, self.warmup, self.warmup, 1.0, final)
        if at < self.warmup - 1:  # its warm-up goes on
            return own._replace(anneal_start=at, anneal=self.anneal)
        return own._replace(start=at, rate=self.rate, anneal_start=at, anneal=self.anneal)
