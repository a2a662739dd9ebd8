"""Pictures of a run, drawn with matplotlib into SVG."""

from importlib import import_module
from pathlib import Path
from types import ModuleType

from slipstream.errors import ConfigError, DependencyError
from slipstream.report.summary import read_run


def loss_curve(run: Path, out: Path) -> Path:
    """Draw training and validation loss over tokens into ``out`` (.svg or .png); returns ``out``.

    DependencyError without matplotlib, CheckpointError without metrics, ConfigError for an ``out``
    that cannot be written.
    """
    steps, evaluations = read_run(run)
    figure_class = _matplotlib("matplotlib.figure").Figure
    figure = figure_class(figsize=(7, 4), layout="constrained")
    if out.suffix.lower().removeprefix(".") not in figure.canvas.get_supported_filetypes():
        raise ConfigError(f"--figure {out}: unknown kind of picture; end its name in .svg or .png")
    axes = figure.add_subplot()
    per_step = steps[0]["tokens"] / steps[0]["step"]
    good = [s for s in steps if s["loss"] is not None]
    axes.plot(
        [s["tokens"] for s in good], [s["loss"] for s in good], lw=0.9, alpha=0.7, label="training"
    )
    if evaluations:
        axes.plot(
            [e["step"] * per_step for e in evaluations],
            [e["val_loss"] for e in evaluations],
            marker="o",
            ms=4,
            label="validation",
        )
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss, nats per token")
    axes.set_title(run.name)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(out)
    except OSError as error:
        raise ConfigError(
            f"{out}: the loss curve could not be written: {error.strerror or error}; "
            "give another place with --figure"
        ) from None
    return out


def _matplotlib(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError:
        raise DependencyError(
            "the loss picture needs matplotlib; pip install 'slipstream-train[report]'"
        ) from None
