"""Open a trained model: from a run folder's checkpoint or from a model folder."""

from dataclasses import dataclass
from pathlib import Path

from slipstream.config import validate
from slipstream.errors import CheckpointError, ConfigError
from slipstream.models import ModelConfig, Transformer
from slipstream.models.folder import is_model_folder, load_model_folder
from slipstream.train import checkpoint
from slipstream.train.run_folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A model with its weights, fp32 on the CPU."""

    model: Transformer
    """The network, in evaluation mode."""
    tokenizer_json: str | None
    """Text of its tokenizer.json, if it has one."""
    step: int | None
    """Optimizer steps it was trained for; None for a model folder."""


def load_trained(path: Path, which: str = "latest") -> Trained:
    """Load the ``latest`` or ``best`` checkpoint of a run folder, or a model folder.

    Raises CheckpointError.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such run or model folder")
    tokenizer = path / "tokenizer.json"
    text = _read(tokenizer) if tokenizer.is_file() else None
    if is_model_folder(path):
        model = load_model_folder(path)
        return Trained(model=model.eval(), tokenizer_json=text, step=None)
    saved = checkpoint.choose(RunFolder(path).checkpoints, which)
    model = Transformer(_model_config(saved))
    checkpoint.load(saved, {"model": model.state_dict()})
    return Trained(model=model.eval(), tokenizer_json=text, step=saved.meta.step)


def load_model(path: str | Path, which: str = "latest") -> Transformer:
    """The network of a run folder or model folder; see ``load_trained``."""
    return load_trained(Path(path), which).model


def _model_config(saved: checkpoint.Saved) -> ModelConfig:
    file = saved.path / checkpoint.META
    try:
        return validate(ModelConfig, saved.meta.model, f"{file}: model")
    except ConfigError as error:
        raise CheckpointError(
            f"{error}; delete {saved.path} to use an earlier checkpoint"
        ) from None


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{file}: cannot be read ({error}); copy the tokenizer.json of the training data there"
        ) from None
