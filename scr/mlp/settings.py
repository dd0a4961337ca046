"""The options of the study, apart from it so that reading them imports no framework."""

from dataclasses import dataclass, field

from harness.measure import MeasureSettings


@dataclass(frozen=True)
class Settings(MeasureSettings):
    """Options of the study; those of the harness with defaults for many short cells."""

    trials: int = field(default=100, metadata={"help": "timed forwards per cell"})
    warmup: int = field(default=10, metadata={"help": "warm-up forwards per cell, more until it is steady"})
    budget: float = field(default=2.0, metadata={"help": "seconds per cell at most"})
    rounds: int = field(default=20, metadata={"help": "rounds per case, over which trials are spread"})
    seconds: float = field(default=270.0, metadata={"help": "what the run should take; shortens the budget"})
    device: str = field(
        default="auto", metadata={"help": "where to run", "choices": ("auto", "cpu", "mps", "cuda")}
    )
    experiments: tuple[int, ...] = field(default=(1, 2, 3, 4, 5, 6, 7), metadata={"help": "which to run"})
    tag: str | None = field(
        default=None, metadata={"help": "write a reference run to output/TAG and conclusions/TAG"}
    )
    quick: bool = field(default=False, metadata={"help": "tiny sizes, to see that everything runs"})
    rebuild: bool = field(default=False, metadata={"help": "rebuild the report from the stored files"})
