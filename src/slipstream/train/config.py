"""The settings of a run: every section, owned by its component, composed here."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from slipstream.config import Config, FloatOrInf, overlay, read, source_of, validate
from slipstream.data.config import DataConfig
from slipstream.errors import ConfigError
from slipstream.models.config import ModelConfig
from slipstream.models.folder import read_model_config
from slipstream.models.presets import preset
from slipstream.parallel import ParallelConfig
from slipstream.recompute import RecomputeConfig


class RecipeModelConfig(ModelConfig):
    """The model of a recipe: a preset, changed by the other keys, or the keys alone."""

    preset: str | None = None
    """Name of a published shape to start from."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("preset") is None:
            return values
        try:
            return overlay(preset(values["preset"]), values)
        except ConfigError as error:
            raise ValueError(str(error)) from None

    def plain(self) -> ModelConfig:
        """The model without the name of its preset."""
        return ModelConfig.model_validate(self.model_dump(exclude={"preset"}))


class TrainConfig(Config):
    """Length, batch and numerics of a run."""

    steps: PositiveInt = 1000
    """Optimizer steps."""
    tokens_per_step: PositiveInt = 32768
    """Tokens of one optimizer step over all ranks; a multiple of data.seq_len."""
    micro_batch: int = Field(0, ge=0)
    """Sequences per rank and forward pass; 0: the rank's whole share of a step at once."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the initial weights and the order of the data."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Dtype of activations and matrix products; weights stay fp32. auto: bf16 on GPUs that have
    it, fp32 otherwise."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train."""
    compile: bool = False
    """Compile each layer with torch.compile."""
    cuda_graph: bool = False
    """Record forward and backward of a micro-batch once as a CUDA graph and replay it: the host
    launches one graph instead of every kernel. On one GPU."""
    deterministic: bool = False
    """Ask PyTorch for deterministic kernels: bit-exact resume on GPUs too, somewhat slower."""
    init_from: str | None = None
    """Model folder or run folder to start the weights from."""
    z_loss: float = Field(0.0, ge=0.0)
    """Coefficient of the mean squared logsumexp of the logits."""
    label_smoothing: float = Field(0.0, ge=0.0, lt=1.0)
    """Share of the target's probability spread over the vocabulary; validation has none."""
    log_every: PositiveInt = 10
    """Steps between console lines; metrics.jsonl has every step."""
    max_skipped: PositiveInt = 5
    """Stop after this many steps in a row with a non-finite loss or gradient."""


class OptimConfig(Config):
    """AdamW and its schedule."""

    lr: PositiveFloat = 3e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After warm-up: cosine decay; stable, then a linear decay at the end (wsd); or constant."""
    warmup_steps: int = Field(100, ge=0)
    """Linear warm-up."""
    decay_fraction: float = Field(0.2, gt=0.0, le=1.0)
    """wsd: share of the steps spent decaying."""
    min_lr_ratio: float = Field(0.1, ge=0.0, le=1.0)
    """Final learning rate over the peak."""
    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    """Decay of the mean of the gradient."""
    beta2: float = Field(0.95, ge=0.0, lt=1.0)
    """Decay of the mean of its square."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.1, ge=0.0)
    """Decoupled decay of matrices; vectors (norms, biases) are not decayed."""
    clip: FloatOrInf = Field(1.0, gt=0.0)
    """Largest gradient norm; inf turns clipping off."""
    storage: Literal["flat", "separate"] = "flat"
    """flat: weights and optimizer state in a few large tensors; on one rank the weights that are
    cast anyway are kept in train.dtype, beside fp32 masters. separate: a tensor for each. The
    results are the same."""


class CheckpointConfig(Config):
    """What is saved, when, and how much of it is kept."""

    every: int = Field(500, ge=0)
    """Steps between checkpoints; 0: only the last step."""
    keep: PositiveInt = 2
    """Newest checkpoints kept; the one with the best validation loss is kept as well."""
    background: bool = True
    """Write while training goes on."""


class EvalConfig(Config):
    """Validation."""

    every: int = Field(250, ge=0)
    """Steps between evaluations; 0: none. The last step is evaluated too."""
    tokens: PositiveInt = 262144
    """Validation tokens per evaluation at most; one sequence at least."""


class TrackConfig(Config):
    """Experiment trackers beside metrics.jsonl."""

    to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Trackers that get the metrics; they come with the extra ``track``."""
    project: str = "slipstream"
    """Project name at the tracker."""

    @field_validator("to", mode="before")
    @classmethod
    def _one(cls, value: Any) -> Any:
        return tuple(value.split(",")) if isinstance(value, str) else value


class RunConfig(Config):
    """A whole run."""

    model: RecipeModelConfig = RecipeModelConfig()
    """The network."""
    data: DataConfig = DataConfig()
    """Token shards and how samples are cut from them."""
    train: TrainConfig = TrainConfig()
    """Length, batch and numerics."""
    optim: OptimConfig = OptimConfig()
    """Optimizer and schedule."""
    eval: EvalConfig = EvalConfig()
    """Validation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    parallel: ParallelConfig = ParallelConfig()
    """Spread over ranks."""
    recompute: RecomputeConfig = RecomputeConfig()
    """Activation memory."""
    track: TrackConfig = TrackConfig()
    """Experiment trackers."""

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        # About the whole, so that a default that does not fit a given value is seen too.
        if self.train.tokens_per_step % self.data.seq_len:
            raise ValueError(
                f"train.tokens_per_step = {self.train.tokens_per_step} is not a multiple of "
                f"data.seq_len = {self.data.seq_len}; change one of them"
            )
        if self.data.seq_len > self.model.max_seq_len:
            raise ValueError(
                f"data.seq_len = {self.data.seq_len} exceeds "
                f"model.max_seq_len = {self.model.max_seq_len}; lower the one or raise the other"
            )
        return self

    @property
    def sequences_per_step(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self.train.tokens_per_step // self.data.seq_len


def load_run_config(recipe: Path | None, overrides: list[str]) -> RunConfig:
    """Read a recipe; with ``train.init_from`` its [model] changes the folder's model.

    So a recipe needs no [model] then, or only what it wants otherwise (``model.moe.aux_loss``).
    Raises ConfigError, and CheckpointError for a folder that holds no model.
    """
    values, source = read(RunConfig, recipe, overrides), source_of(recipe)
    train = values.get("train")
    folder = train.get("init_from") if isinstance(train, dict) else None
    # Before validation: the rules that join sections are about the model that will be trained.
    given = values.get("model", {})
    if isinstance(folder, str) and isinstance(given, dict) and "preset" not in given:
        values["model"] = overlay(read_model_config(Path(folder)).model_dump(), given)
        source = f"{source} with the model of {folder}"
    return validate(RunConfig, values, source, overrides)
