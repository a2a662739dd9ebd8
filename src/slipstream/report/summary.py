"""The few numbers people ask of a run."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from slipstream.errors import CheckpointError
from slipstream.train.metrics import Record, read_metrics

WARMUP_STEPS = 5
PHASES = ("data", "forward", "backward", "graph", "optimizer")
"""Forward and backward, or both in one CUDA graph."""
_EVERY_RUN = ("data", "optimizer")
_STEP_KEYS = {"tokens", "loss", "skipped", "time"}
_TIME_KEYS = {"tok_per_s", "step_ms", "peak_gib", "mfu", *(f"{name}_ms" for name in _EVERY_RUN)}
_EVALUATION_KEYS = {"val_loss", "val_nats_per_byte"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Numbers of a run; None where it has none."""

    steps: int
    """Steps done."""
    tokens: int
    """Tokens trained on."""
    loss: float | None
    """Training loss of the last step, nats per token."""
    val_loss: float | None
    """Last validation loss, nats per token."""
    val_nats_per_byte: float | None
    """The same per byte of text."""
    best_val_loss: float | None
    """Lowest validation loss."""
    tok_per_s: float
    """Median tokens per second, first steps left out."""
    step_ms: float
    """Median step time, first steps left out."""
    phases_ms: dict[str, float]
    """Median time of each phase."""
    peak_gib: float
    """Most memory used."""
    mfu: float | None
    """Median model FLOP/s over the device's peak."""
    skipped: int
    """Steps that were not finite."""
    moe_max_over_mean: float | None
    """Load of the busiest expert over the mean, last step."""

    def lines(self) -> list[tuple[str, str]]:
        """Name and text of each number there is."""
        phases = ", ".join(f"{name} {ms:.0f}" for name, ms in self.phases_ms.items())
        rows = [
            ("steps", f"{self.steps:,} ({self.tokens:,} tokens)"),
            ("training loss", _number(self.loss, "nats per token")),
            ("validation loss", _number(self.val_loss, "nats per token")),
            ("validation, per byte", _number(self.val_nats_per_byte, "nats per byte")),
            ("best validation loss", _number(self.best_val_loss, "nats per token")),
            ("speed", f"{self.tok_per_s:,.0f} tokens/s, {self.step_ms:.0f} ms a step"),
            ("phases", f"{phases} ms"),
            ("MFU", None if self.mfu is None else f"{100 * self.mfu:.1f} %"),
            ("expert load, max / mean", _number(self.moe_max_over_mean, "", 2)),
            ("skipped steps", str(self.skipped) if self.skipped else None),
            ("peak memory", f"{self.peak_gib:.2f} GiB"),
        ]
        return [(name, text) for name, text in rows if text is not None]


def summarise(run: Path) -> Summary:
    """Read a run's metrics; CheckpointError if there are none."""
    steps, evaluations = read_run(run)
    timed = steps[WARMUP_STEPS:] or steps
    last = steps[-1]
    val_losses = [e["val_loss"] for e in evaluations if e["val_loss"] is not None]
    mfus = [s["time"]["mfu"] for s in timed if s["time"]["mfu"] is not None]
    return Summary(
        steps=last["step"],
        tokens=last["tokens"],
        loss=last["loss"],
        val_loss=evaluations[-1]["val_loss"] if evaluations else None,
        val_nats_per_byte=evaluations[-1]["val_nats_per_byte"] if evaluations else None,
        best_val_loss=min(val_losses, default=None),
        tok_per_s=_median(timed, "tok_per_s"),
        step_ms=_median(timed, "step_ms"),
        phases_ms=_phases(timed),
        peak_gib=max(s["time"]["peak_gib"] for s in steps),
        mfu=median(mfus) if mfus else None,
        skipped=sum(s["skipped"] for s in steps),
        moe_max_over_mean=last["moe"]["max_over_mean"] if "moe" in last else None,
    )


def read_run(run: Path) -> tuple[list[Record], list[Record]]:
    """Step records and evaluation records of a run folder; CheckpointError."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise CheckpointError(f"{path}: not there; give the folder of a run")
    records = read_metrics(path)
    steps = [record for record in records if "loss" in record]
    if not steps:
        raise CheckpointError(f"{path}: has no finished step yet")
    evaluations = [record for record in records if "val_loss" in record]
    for step in steps:
        _require(path, step, step, _STEP_KEYS)
        _require(path, step, step["time"], _TIME_KEYS)
    for evaluation in evaluations:
        _require(path, evaluation, evaluation, _EVALUATION_KEYS)
    return steps, evaluations


def _require(path: Path, record: Record, part: object, keys: set[str]) -> None:
    missing = keys - part.keys() if isinstance(part, dict) else keys
    if missing:
        raise CheckpointError(
            f"{path}: the record of step {record['step']} lacks {', '.join(sorted(missing))}; "
            "delete that line, or give a run of this version"
        )


def _phases(records: list[Record]) -> dict[str, float]:
    # A run may go on with another train.cuda_graph: each phase from the steps that had it.
    have = {name: [r for r in records if f"{name}_ms" in r["time"]] for name in PHASES}
    return {name: _median(found, f"{name}_ms") for name, found in have.items() if found}


def _median(records: list[Record], name: str) -> float:
    return median(record["time"][name] for record in records)


def _number(value: float | None, unit: str, digits: int = 4) -> str | None:
    return None if value is None else f"{value:.{digits}f} {unit}".rstrip()
